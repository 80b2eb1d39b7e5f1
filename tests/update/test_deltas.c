/* Versions that travel as their changes: every worker has the trainer's bytes, bit for bit, also
 * when workers join late, refuse, are slow or ask again, with one slot and with two. */
#include "tests/support/raw_worker.h"
#include "training_run.h"

#define TENSORS 6u

static void begin_deltas(training_run *run, uint64_t seed, uint32_t slots)
{
    run_begin(run, slots);
    run->seed = seed;
    run->config.broadcast_shm = REFIT_SHM_OFF;
    run->config.broadcast_heartbeat_ms = 1000; /* a slow machine takes no frame for lost */
    run->config.broadcast_encode_threads = 1 + (uint32_t)(seed % 4);
    run_add_tensor(run, REFIT_BF16, 300001, REFIT_NO_ALIAS);
    run_add_tensor(run, REFIT_F32, 70000, REFIT_NO_ALIAS);
    run_add_tensor(run, REFIT_F16, 65536, REFIT_NO_ALIAS);
    run_add_tensor(run, REFIT_U8, 200000, REFIT_NO_ALIAS);
    run_add_tensor(run, REFIT_F6_E2M3, 70001, REFIT_NO_ALIAS);
    run_add_tensor(run, REFIT_I64, 3, REFIT_NO_ALIAS);
    for (uint32_t i = 0; i < TENSORS; i++)
        for (uint64_t k = 0; k < run->tensors[i].bytes; k++)
            run->bytes[i][k] = (unsigned char)(seeded_next(&run->seed) >> 20);
}

/* With one worker, and a first version. */
static rollout_thread *open_deltas(training_run *run)
{
    run_open(run, "tcp://127.0.0.1:0");
    rollout_thread *member = run_add_worker(run, ROLLOUT_ACCEPT);
    run_write(run, 0);
    run_commit(run);
    return member;
}

static uint64_t publish(training_run *run)
{
    run_write(run, 0);
    run_commit(run);
    return refit_publisher_version(run->publisher);
}

/* The next version, which all workers see. */
static refit_stats publish_to_all(training_run *run)
{
    uint64_t digest = run_digest(run);
    run_expect(run, publish(run), digest);
    return run_stats(run);
}

/* ---- Whatever happens */

static void publish_to_a_refuser(training_run *run, rollout_action action)
{
    rollout_thread *refuser = &run->rollouts[seeded_below(&run->seed, run->rollouts_count)];
    uint64_t before = refit_publisher_version(run->publisher);
    rollout_set_action(refuser, action);
    run_write(run, 0);
    assert_int_equal(refit_publisher_commit(run->publisher, NULL), REFIT_ERR_PEER);
    uint64_t version = refit_publisher_version(run->publisher);
    assert_true(version > before);
    (void)rollouts_wait(refuser, version, 1);
    rollout_set_action(refuser, ROLLOUT_ACCEPT);
}

static void one_step(training_run *run)
{
    uint64_t chance = seeded_below(&run->seed, 10);
    run_change(run);
    if (chance == 0 && run->rollouts_count < RUN_CREW) run_add_worker(run, ROLLOUT_ACCEPT);
    if (chance == 1) {
        run_write(run, 0);
        assert_ok(refit_publisher_abort(run->publisher, NULL));
        run_change(run);
    }
    if (chance == 2) publish_to_a_refuser(run, ROLLOUT_REFUSE_KEPT);
    if (chance == 3) publish_to_a_refuser(run, ROLLOUT_REFUSE_LOST);
    if (chance == 2 || chance == 3) run_change(run);
    run_wait_workers(run, run->rollouts_count);
    (void)publish_to_all(run);
}

TEST(random_updates_arrive_bit_for_bit)
{
    for (uint64_t seed = 1; seed <= 6; seed++) {
        training_run run;
        uint64_t sparse = 0;
        begin_deltas(&run, seed, 1 + seed % 2);
        run.config.broadcast_compress = seed % 4 < 2 ? REFIT_COMPRESS_NONE : REFIT_COMPRESS_ZSTD;
        run.config.broadcast_delta = seed % 3 == 0 ? REFIT_DELTA_ALWAYS : REFIT_DELTA_AUTO;
        run_open(&run, "tcp://127.0.0.1:0");
        run_add_worker(&run, ROLLOUT_ACCEPT);
        run_add_worker(&run, ROLLOUT_ACCEPT);
        for (int i = 0; i < 12; i++) {
            one_step(&run);
            sparse += run_stats(&run).publish_sparse_blocks_last;
        }
        assert_true(sparse > 0);
        run_end(&run);
    }
}

/* ---- What travels */

TEST(little_changes_travel_as_little)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        training_run run;
        begin_deltas(&run, 3, slots);
        (void)open_deltas(&run);
        assert_int_equal(run_stats(&run).publish_delta_bytes_last, 0);
        uint64_t sent = run_stats(&run).publish_sent_bytes_total;
        run.changed = 0;
        for (uint32_t i = 0; i < 3; i++)
            run_change_tensor(&run, i, 100);
        refit_stats stats = publish_to_all(&run);
        sent = stats.publish_sent_bytes_total - sent;
        assert_int_equal(stats.publish_delta_bytes_last, sent);
        assert_int_equal(stats.publish_changed_elements_last, run.changed);
        assert_int_equal(stats.publish_dense_blocks_last, 0);
        assert_int_equal(stats.publish_sparse_blocks_last, 5 + 2 + 1);
        assert_true(stats.publish_encode_seconds_last > 0);
        assert_true(sent < stats.publish_bytes_last / 40);
        run_end(&run);
    }
}

/* Nearly all of a bf16 tensor changes, and little of an fp32 one: each is coded as is cheaper. */
static refit_stats publish_mixed(training_run *run)
{
    run_change_tensor(run, 0, 1);
    run->changed = 0;
    run_change_tensor(run, 1, 100);
    return publish_to_all(run);
}

TEST(auto_sends_whole_what_nearly_all_changed)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        training_run run;
        begin_deltas(&run, 10 + slots, slots);
        (void)open_deltas(&run);
        refit_stats stats = publish_mixed(&run);
        assert_int_equal(stats.publish_dense_blocks_last, 5);
        assert_int_equal(stats.publish_sparse_blocks_last, 2);
        assert_int_equal(stats.publish_changed_elements_last, run.changed);
        assert_true(stats.publish_delta_bytes_last >= run.tensors[0].bytes);
        assert_true(stats.publish_delta_bytes_last < run.tensors[0].bytes + 5000);
        run_change_tensor(&run, 0, 4); /* a quarter pays */
        assert_int_equal(publish_to_all(&run).publish_sparse_blocks_last, 5);
        run_end(&run);
    }
}

TEST(always_codes_what_nearly_all_changed)
{
    training_run run;
    begin_deltas(&run, 13, 2);
    run.config.broadcast_delta = REFIT_DELTA_ALWAYS;
    (void)open_deltas(&run);
    refit_stats stats = publish_mixed(&run);
    assert_int_equal(stats.publish_dense_blocks_last, 0);
    assert_int_equal(stats.publish_sparse_blocks_last, 5 + 2);
    assert_true(stats.publish_delta_bytes_last < run.tensors[0].bytes);
    run_end(&run);
}

TEST(never_sends_every_version_whole)
{
    training_run run;
    begin_deltas(&run, 4, 2);
    run.config.broadcast_delta = REFIT_DELTA_NEVER;
    (void)open_deltas(&run);
    uint64_t sent = run_stats(&run).publish_sent_bytes_total;
    run_change_tensor(&run, 0, 1000);
    refit_stats stats = publish_to_all(&run);
    assert_true(stats.publish_sent_bytes_total - sent >= stats.publish_bytes_last);
    assert_int_equal(stats.publish_delta_bytes_last, 0);
    run_end(&run);
}

/* ---- Workers that speak one message at a time */

static void open_raw(training_run *run, raw_worker *worker, const char *name, bool delta)
{
    raw_worker_open(worker, refit_publisher_endpoint(run->publisher), name, false);
    worker->delta = delta;
    raw_worker_join(worker);
}

static void check_raw(const training_run *run, const raw_worker *worker)
{
    for (uint32_t i = 0; i < TENSORS; i++) {
        assert_memory_equal(raw_worker_bytes(worker) + worker->manifest->tensors[i].offset,
                            run->bytes[i], run->tensors[i].bytes);
    }
}

static void set_quorum(training_run *run)
{
    run->config.broadcast_commit = REFIT_COMMIT_QUORUM;
    run->config.broadcast_quorum = 1;
}

/* Takes the committed version, and waits until the publisher knows: STAGED for a version that is
 * held already is answered with COMMIT. */
static void take_committed(const training_run *run, raw_worker *raw)
{
    raw_worker_stage(raw);
    check_raw(run, raw);
    raw_worker_apply(raw);
    raw_worker_say_staged(raw);
    (void)raw_worker_expect(raw, RFT_COMMIT);
}

/* A version for one rollout and one raw worker, both of which hold it then.
 */
static void publish_first(training_run *run, raw_worker *raw, bool delta)
{
    (void)run_add_worker(run, ROLLOUT_ACCEPT);
    open_raw(run, raw, "raw", delta);
    run_wait_workers(run, 2);
    uint64_t version = publish(run);
    (void)rollouts_wait(&run->rollouts[0], version, 1);
    take_committed(run, raw);
}

TEST(worker_that_does_not_announce_it_gets_no_sparse_blocks)
{
    training_run run;
    raw_worker raw;
    begin_deltas(&run, 5, 2);
    set_quorum(&run);
    run_open(&run, "tcp://127.0.0.1:0");
    publish_first(&run, &raw, false);
    run_change_tensor(&run, 0, 500);
    (void)publish(&run);
    raw_worker_stage(&raw);
    check_raw(&run, &raw);
    raw_worker_apply(&raw);
    assert_int_equal(raw.sparse_blocks, 0);
    raw_worker_close(&raw);
    run_end(&run);
}

/* With one slot the base is gone, with two it is there. In both cases the frames that were coded
 * for another worker are sent, and again when they are asked for. */
TEST(a_straggler_gets_what_was_coded_for_others)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        training_run run;
        raw_worker raw;
        begin_deltas(&run, 6 + slots, slots);
        set_quorum(&run);
        run_open(&run, "tcp://127.0.0.1:0");
        publish_first(&run, &raw, true);
        for (uint32_t i = 0; i < TENSORS; i++)
            run_change_tensor(&run, i, 100);
        (void)publish(&run);
        raw_worker_offer(&raw);
        uint32_t frames = raw.offer.as.offer.frames;
        assert_true(raw.offer.as.offer.base != 0 && frames > 2);
        raw_worker_pull(&raw, 1);
        (void)raw_worker_expect(&raw, RFT_FRAME);
        raw_worker_resend(&raw, raw.heard.as.frame.sequence);
        (void)raw_worker_expect(&raw, RFT_FRAME);
        for (uint32_t i = 1; i < frames; i++) {
            raw_worker_pull(&raw, 1);
            (void)raw_worker_expect(&raw, RFT_FRAME);
        }
        assert_true(raw.sparse_blocks > 0);
        assert_int_equal(rft_reassembly_taken(raw.reassembly), frames);
        check_raw(&run, &raw);
        raw_worker_close(&raw);
        run_end(&run);
    }
}

/* Small frames share credits. No frame stays unsent until a beat makes the worker ask for it again.
 */
TEST(frames_of_all_sizes_fit_through_the_smallest_window)
{
    for (uint32_t window = 1; window <= 3; window++) {
        training_run run;
        begin_deltas(&run, 20 + window, 2);
        run.config.broadcast_window = window;
        run.config.broadcast_frame_bytes = 64 * 1024;
        run.config.broadcast_delta = REFIT_DELTA_ALWAYS;
        run.config.broadcast_heartbeat_ms = 20000;
        run.config.broadcast_heartbeat_timeout_ms = 60000;
        run_open(&run, "tcp://127.0.0.1:0");
        run_add_worker(&run, ROLLOUT_ACCEPT);
        for (int turn = 0; turn < 12; turn++) {
            run_change(&run);
            (void)publish_to_all(&run);
        }
        assert_int_equal(run_stats(&run).publish_resent_frames, 0);
        run_end(&run);
    }
}

/* No other worker takes sparse blocks, so none were coded before the commit; after it, with one
 * slot, the changes can no longer be found. */
TEST(a_straggler_alone_gets_the_same_bytes)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        training_run run;
        raw_worker plain, raw;
        rft_thread thread;
        begin_deltas(&run, 8 + slots, slots);
        set_quorum(&run);
        run_open(&run, "tcp://127.0.0.1:0");
        open_raw(&run, &plain, "plain", false);
        open_raw(&run, &raw, "raw", true);
        for (int turn = 0; turn < 2; turn++) {
            run_change_tensor(&run, 0, 100);
            run_write(&run, 0);
            assert_ok(rft_thread_start(&thread, "commit", run_commit_on_thread, &run, NULL));
            raw_worker_stage(&plain);
            raw_worker_apply(&plain);
            rft_thread_join(thread);
            assert_ok(run.status);
            take_committed(&run, &raw);
        }
        assert_int_equal(raw.sparse_blocks > 0, slots == 2);
        raw_worker_close(&plain);
        raw_worker_close(&raw);
        run_end(&run);
    }
}

/* ---- A base that is not what it was */

/* An engine that writes where it may only read. */
static void scribble_on(const refit_update *update, uint32_t index)
{
    refit_tensor tensor = {.size = sizeof tensor};
    const void *bytes = NULL;
    assert_ok(refit_update_tensor(update, index, &tensor, &bytes, NULL));
    ((unsigned char *)(uintptr_t)bytes)[tensor.bytes - 1] ^= 1;
}

static void check_update(const training_run *run, const refit_update *update)
{
    for (uint32_t i = 0; i < TENSORS; i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        const void *bytes = NULL;
        assert_ok(refit_update_tensor(update, i, &tensor, &bytes, NULL));
        assert_memory_equal(bytes, run->bytes[i], run->tensors[i].bytes);
    }
}

/* Publishes a version and receives it; returns the bytes that were sent. */
static uint64_t publish_to(training_run *run, refit_subscriber *subscriber, bool scribbles)
{
    rft_thread thread;
    refit_update *update = NULL;
    uint64_t sent = run_stats(run).publish_sent_bytes_total;
    run_write(run, 0);
    assert_ok(rft_thread_start(&thread, "commit", run_commit_on_thread, run, NULL));
    assert_done(refit_subscriber_next(subscriber, RUN_WAIT_MS, &update, error));
    check_update(run, update);
    if (scribbles) scribble_on(update, 3);
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    rft_thread_join(thread);
    assert_ok(run->status);
    return run_stats(run).publish_sent_bytes_total - sent;
}

/* The block that it changed travels as the same: only the digest at the end shows it. */
TEST(a_base_that_was_written_over_is_replaced_by_the_next_version)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        training_run run;
        refit_subscriber *subscriber = NULL;
        begin_deltas(&run, 30 + slots, slots);
        run_open(&run, "tcp://127.0.0.1:0");
        const char *endpoint = refit_publisher_endpoint(run.publisher);
        assert_ok(refit_subscriber_open(endpoint, &run.config, &subscriber, NULL));
        run_wait_workers(&run, 1);
        (void)publish_to(&run, subscriber, true);
        run_change_tensor(&run, 0, 100);
        uint64_t whole = run_stats(&run).publish_bytes_last;
        assert_true(publish_to(&run, subscriber, false) > whole);
        for (int turn = 0; turn < 2; turn++) {
            run_change_tensor(&run, 0, 100);
            assert_true(publish_to(&run, subscriber, false) < whole / 20);
        }
        refit_subscriber_close(subscriber);
        run_end(&run);
    }
}

int main(void)
{
    return test_run("deltas");
}
