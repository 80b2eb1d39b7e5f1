/* Versions that travel as what changed: every worker has the trainer's bytes, bit for bit, whoever
 * comes late, refuses, is slow or asks again, with one slot and with two. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/crew.h"
#include "tests/support/quick_config.h"
#include "tests/support/raw_worker.h"
#include "tests/support/seeded.h"

#define CREW_MOST 4u
#define TENSORS   6u
#define WAIT_MS   20000u

/* A trainer with its model, and its workers. */
typedef struct theatre {
    refit_config config;
    refit_publisher *publisher;
    refit_tensor tensors[TENSORS];
    char names[TENSORS][32];
    unsigned char *bytes[TENSORS];
    crew_member crew[CREW_MOST];
    uint32_t crew_count;
    uint64_t seed;
    uint64_t changed;    /* elements, by change_tensor */
    refit_status status; /* of the commit on a thread */
} theatre;

static void set_tensor(theatre *play, uint32_t index, refit_dtype dtype, uint64_t elements)
{
    snprintf(play->names[index], sizeof play->names[index], "tensor.%u", index);
    play->tensors[index] = (refit_tensor){
        .size = sizeof(refit_tensor),
        .name = play->names[index],
        .dtype = dtype,
        .rank = 1,
        .shape = {elements},
        .bytes = (elements * refit_dtype_bits(dtype) + 7) / 8,
        .alias_of = REFIT_NO_ALIAS,
    };
    play->bytes[index] = malloc(play->tensors[index].bytes + 1);
    assert_non_null(play->bytes[index]);
    for (uint64_t i = 0; i < play->tensors[index].bytes; i++)
        play->bytes[index][i] = (unsigned char)(seeded_next(&play->seed) >> 20);
}

static void begin_play(theatre *play, uint64_t seed, uint32_t slots)
{
    memset(play, 0, sizeof *play);
    play->seed = seed;
    play->config = quick_config();
    play->config.broadcast_shm = REFIT_SHM_OFF;
    play->config.broadcast_slots = slots;
    play->config.broadcast_heartbeat_ms = 1000; /* a slow machine takes no frame for lost */
    play->config.broadcast_heartbeat_timeout_ms = 30000;
    play->config.broadcast_encode_threads = 1 + (uint32_t)(seed % 4);
    set_tensor(play, 0, REFIT_BF16, 300001);
    set_tensor(play, 1, REFIT_F32, 70000);
    set_tensor(play, 2, REFIT_F16, 65536);
    set_tensor(play, 3, REFIT_U8, 200000);
    set_tensor(play, 4, REFIT_F6_E2M3, 70001);
    set_tensor(play, 5, REFIT_I64, 3);
}

static void open_play(theatre *play)
{
    refit_error error;
    if (refit_publisher_open("tcp://127.0.0.1:0", &play->config, &play->publisher, &error) !=
        REFIT_OK) {
        fail_msg("%s", error.text);
    }
    assert_int_equal(refit_publisher_declare(play->publisher, play->tensors, TENSORS, NULL),
                     REFIT_OK);
}

static void end_play(theatre *play)
{
    for (uint32_t i = 0; i < play->crew_count; i++)
        crew_stop(&play->crew[i]);
    refit_publisher_close(play->publisher);
    for (uint32_t i = 0; i < TENSORS; i++)
        free(play->bytes[i]);
}

static void wait_workers(theatre *play, uint32_t count)
{
    assert_int_equal(refit_publisher_wait_workers(play->publisher, count, WAIT_MS, NULL), REFIT_OK);
}

static crew_member *hire(theatre *play)
{
    crew_member *member = &play->crew[play->crew_count++];
    crew_start(member, refit_publisher_endpoint(play->publisher), &play->config, CREW_ACCEPT);
    wait_workers(play, play->crew_count);
    return member;
}

/* One in `every` elements changes: mostly to the next value. 0: none does. */
static void change_tensor(theatre *play, uint32_t index, uint64_t every)
{
    const refit_tensor *tensor = &play->tensors[index];
    uint32_t bits = refit_dtype_bits(tensor->dtype), width = bits % 8 == 0 ? bits / 8 : 1;
    for (uint64_t at = 0; every != 0 && at + width <= tensor->bytes; at += width) {
        if (seeded_below(&play->seed, every) != 0) continue;
        unsigned char *element = play->bytes[index] + at;
        if (seeded_below(&play->seed, 10) == 0) {
            element[width - 1] ^= (unsigned char)(1 + seeded_below(&play->seed, 255));
        } else {
            element[0] = (unsigned char)(element[0] + 1);
        }
        play->changed++;
    }
}

static uint64_t model_digest(const theatre *play)
{
    return crew_digest(play->tensors, TENSORS, (const void *const *)play->bytes);
}

static void change_model(theatre *play)
{
    static const uint64_t densities[] = {0, 1, 3, 20, 100, 1000, 20000};
    for (uint32_t i = 0; i < TENSORS; i++)
        change_tensor(play, i, densities[seeded_below(&play->seed, 7)]);
}

static void begin_and_write(theatre *play)
{
    refit_error error;
    if (refit_publisher_begin(play->publisher, 0, &error) != REFIT_OK) fail_msg("%s", error.text);
    for (uint32_t n = 0, at = (uint32_t)seeded_below(&play->seed, TENSORS); n < TENSORS; n++) {
        uint32_t i = (at + n) % TENSORS;
        assert_int_equal(refit_publisher_write(play->publisher, i, play->bytes[i],
                                               play->tensors[i].bytes, NULL, REFIT_STREAM_NONE,
                                               NULL),
                         REFIT_OK);
    }
}

static uint64_t publish(theatre *play)
{
    refit_error error;
    begin_and_write(play);
    if (refit_publisher_commit(play->publisher, &error) != REFIT_OK) fail_msg("%s", error.text);
    return refit_publisher_version(play->publisher);
}

static refit_stats figures(theatre *play)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_int_equal(refit_publisher_stats(play->publisher, &stats, NULL), REFIT_OK);
    return stats;
}

/* ---- Whatever happens */

static void publish_to_a_refuser(theatre *play, crew_habit habit)
{
    crew_member *refuser = &play->crew[seeded_below(&play->seed, play->crew_count)];
    uint64_t before = refit_publisher_version(play->publisher);
    crew_set_habit(refuser, habit);
    begin_and_write(play);
    assert_int_equal(refit_publisher_commit(play->publisher, NULL), REFIT_ERR_PEER);
    uint64_t version = refit_publisher_version(play->publisher);
    assert_true(version > before);
    (void)crew_wait(refuser, version, 1);
    crew_set_habit(refuser, CREW_ACCEPT);
}

static void one_step(theatre *play)
{
    uint64_t chance = seeded_below(&play->seed, 10);
    change_model(play);
    if (chance == 0 && play->crew_count < CREW_MOST) hire(play);
    if (chance == 1) {
        begin_and_write(play);
        assert_int_equal(refit_publisher_abort(play->publisher, NULL), REFIT_OK);
        change_model(play);
    }
    if (chance == 2) publish_to_a_refuser(play, CREW_REFUSE_KEPT);
    if (chance == 3) publish_to_a_refuser(play, CREW_REFUSE_LOST);
    if (chance == 2 || chance == 3) change_model(play);
    wait_workers(play, play->crew_count);
    uint64_t digest = model_digest(play), version = publish(play);
    for (uint32_t i = 0; i < play->crew_count; i++)
        assert_int_equal(crew_wait(&play->crew[i], version, 1), digest);
}

static void random_updates_arrive_bit_for_bit(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        theatre play;
        uint64_t sparse = 0;
        begin_play(&play, seed, 1 + seed % 2);
        play.config.broadcast_compress = seed % 4 < 2 ? REFIT_COMPRESS_NONE : REFIT_COMPRESS_ZSTD;
        play.config.broadcast_delta = seed % 3 == 0 ? REFIT_DELTA_ALWAYS : REFIT_DELTA_AUTO;
        open_play(&play);
        hire(&play);
        hire(&play);
        for (int i = 0; i < 12; i++) {
            one_step(&play);
            sparse += figures(&play).publish_sparse_blocks_last;
        }
        assert_true(sparse > 0);
        end_play(&play);
    }
}

/* ---- What travels */

static void little_changes_travel_as_little(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        theatre play;
        begin_play(&play, 3, slots);
        open_play(&play);
        crew_member *member = hire(&play);
        (void)publish(&play);
        assert_int_equal(figures(&play).publish_delta_bytes_last, 0);
        uint64_t sent = figures(&play).publish_sent_bytes_total;
        play.changed = 0;
        for (uint32_t i = 0; i < 3; i++)
            change_tensor(&play, i, 100);
        uint64_t digest = model_digest(&play), version = publish(&play);
        assert_int_equal(crew_wait(member, version, 1), digest);
        refit_stats stats = figures(&play);
        sent = stats.publish_sent_bytes_total - sent;
        assert_int_equal(stats.publish_delta_bytes_last, sent);
        assert_int_equal(stats.publish_changed_elements_last, play.changed);
        assert_int_equal(stats.publish_dense_blocks_last, 0);
        assert_int_equal(stats.publish_sparse_blocks_last, 5 + 2 + 1);
        assert_true(stats.publish_encode_seconds_last > 0);
        assert_true(sent < stats.publish_bytes_last / 40);
        end_play(&play);
    }
}

/* Nearly all of a bf16 tensor, little of an fp32 one: each goes the way that pays for it. */
static refit_stats publish_mixed(theatre *play, crew_member *member)
{
    change_tensor(play, 0, 1);
    play->changed = 0;
    change_tensor(play, 1, 100);
    uint64_t digest = model_digest(play), version = publish(play);
    assert_int_equal(crew_wait(member, version, 1), digest);
    return figures(play);
}

static void auto_sends_whole_what_nearly_all_changed(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        theatre play;
        begin_play(&play, 10 + slots, slots);
        open_play(&play);
        crew_member *member = hire(&play);
        (void)publish(&play);
        refit_stats stats = publish_mixed(&play, member);
        assert_int_equal(stats.publish_dense_blocks_last, 5);
        assert_int_equal(stats.publish_sparse_blocks_last, 2);
        assert_int_equal(stats.publish_changed_elements_last, play.changed);
        assert_true(stats.publish_delta_bytes_last >= play.tensors[0].bytes);
        assert_true(stats.publish_delta_bytes_last < play.tensors[0].bytes + 5000);
        change_tensor(&play, 0, 4); /* a quarter pays */
        uint64_t digest = model_digest(&play), version = publish(&play);
        assert_int_equal(crew_wait(member, version, 1), digest);
        assert_int_equal(figures(&play).publish_sparse_blocks_last, 5);
        end_play(&play);
    }
}

static void always_codes_what_nearly_all_changed(void **state)
{
    (void)state;
    theatre play;
    begin_play(&play, 13, 2);
    play.config.broadcast_delta = REFIT_DELTA_ALWAYS;
    open_play(&play);
    crew_member *member = hire(&play);
    (void)publish(&play);
    refit_stats stats = publish_mixed(&play, member);
    assert_int_equal(stats.publish_dense_blocks_last, 0);
    assert_int_equal(stats.publish_sparse_blocks_last, 5 + 2);
    assert_true(stats.publish_delta_bytes_last < play.tensors[0].bytes);
    end_play(&play);
}

static void never_sends_every_version_whole(void **state)
{
    (void)state;
    theatre play;
    begin_play(&play, 4, 2);
    play.config.broadcast_delta = REFIT_DELTA_NEVER;
    open_play(&play);
    crew_member *member = hire(&play);
    (void)publish(&play);
    uint64_t sent = figures(&play).publish_sent_bytes_total;
    change_tensor(&play, 0, 1000);
    uint64_t digest = model_digest(&play), version = publish(&play);
    assert_int_equal(crew_wait(member, version, 1), digest);
    refit_stats stats = figures(&play);
    assert_true(stats.publish_sent_bytes_total - sent >= stats.publish_bytes_last);
    assert_int_equal(stats.publish_delta_bytes_last, 0);
    end_play(&play);
}

/* ---- Workers that speak one message at a time */

static void open_raw(theatre *play, raw_worker *worker, const char *name, bool delta)
{
    raw_worker_open(worker, refit_publisher_endpoint(play->publisher), name, false);
    worker->delta = delta;
    raw_worker_join(worker);
}

static void check_raw(const theatre *play, const raw_worker *worker)
{
    for (uint32_t i = 0; i < TENSORS; i++) {
        assert_memory_equal(raw_worker_bytes(worker) + worker->manifest->tensors[i].offset,
                            play->bytes[i], play->tensors[i].bytes);
    }
}

static void set_quorum(theatre *play)
{
    play->config.broadcast_commit = REFIT_COMMIT_QUORUM;
    play->config.broadcast_quorum = 1;
}

/* Takes the committed version, and waits until the publisher knows: what is staged though it is
 * held already is answered with a commit. */
static void take_committed(const theatre *play, raw_worker *raw)
{
    raw_worker_stage(raw);
    check_raw(play, raw);
    raw_worker_apply(raw);
    raw_worker_say_staged(raw);
    (void)raw_worker_expect(raw, RFT_COMMIT);
}

/* A version for one member of the crew and one raw worker, both of which hold it then. */
static void publish_first(theatre *play, raw_worker *raw, bool delta)
{
    (void)hire(play);
    open_raw(play, raw, "raw", delta);
    wait_workers(play, 2);
    uint64_t version = publish(play);
    (void)crew_wait(&play->crew[0], version, 1);
    take_committed(play, raw);
}

static void worker_that_does_not_announce_it_gets_no_sparse_blocks(void **state)
{
    (void)state;
    theatre play;
    raw_worker raw;
    begin_play(&play, 5, 2);
    set_quorum(&play);
    open_play(&play);
    publish_first(&play, &raw, false);
    change_tensor(&play, 0, 500);
    (void)publish(&play);
    raw_worker_stage(&raw);
    check_raw(&play, &raw);
    raw_worker_apply(&raw);
    assert_int_equal(raw.sparse_blocks, 0);
    raw_worker_close(&raw);
    end_play(&play);
}

/* The base is gone with one slot, and there with two: either way what was coded for another worker
 * is sent, and again when it is asked for. */
static void a_straggler_gets_what_was_coded_for_others(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        theatre play;
        raw_worker raw;
        begin_play(&play, 6 + slots, slots);
        set_quorum(&play);
        open_play(&play);
        publish_first(&play, &raw, true);
        for (uint32_t i = 0; i < TENSORS; i++)
            change_tensor(&play, i, 100);
        (void)publish(&play);
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
        check_raw(&play, &raw);
        raw_worker_close(&raw);
        end_play(&play);
    }
}

/* Small frames share credits, and none of them is left over for a beat to find. */
static void frames_of_all_sizes_fit_through_the_smallest_window(void **state)
{
    (void)state;
    for (uint32_t window = 1; window <= 3; window++) {
        theatre play;
        begin_play(&play, 20 + window, 2);
        play.config.broadcast_window = window;
        play.config.broadcast_frame_bytes = 64 * 1024;
        play.config.broadcast_delta = REFIT_DELTA_ALWAYS;
        play.config.broadcast_heartbeat_ms = 20000;
        play.config.broadcast_heartbeat_timeout_ms = 60000;
        open_play(&play);
        crew_member *member = hire(&play);
        for (int round = 0; round < 12; round++) {
            change_model(&play);
            uint64_t version = publish(&play);
            assert_int_equal(crew_wait(member, version, 1), model_digest(&play));
        }
        assert_int_equal(figures(&play).publish_resent_frames, 0);
        end_play(&play);
    }
}

static void *commit(void *user)
{
    theatre *play = user;
    play->status = refit_publisher_commit(play->publisher, NULL);
    return NULL;
}

/* Nobody else takes sparse blocks, so none were coded before the commit; after it, with one slot,
 * what changed can no longer be found. */
static void a_straggler_alone_gets_the_same_bytes(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        theatre play;
        raw_worker plain, raw;
        rft_thread thread;
        begin_play(&play, 8 + slots, slots);
        set_quorum(&play);
        open_play(&play);
        open_raw(&play, &plain, "plain", false);
        open_raw(&play, &raw, "raw", true);
        for (int round = 0; round < 2; round++) {
            change_tensor(&play, 0, 100);
            begin_and_write(&play);
            assert_int_equal(rft_thread_start(&thread, "commit", commit, &play, NULL), REFIT_OK);
            raw_worker_stage(&plain);
            raw_worker_apply(&plain);
            rft_thread_join(thread);
            assert_int_equal(play.status, REFIT_OK);
            take_committed(&play, &raw);
        }
        assert_int_equal(raw.sparse_blocks > 0, slots == 2);
        raw_worker_close(&plain);
        raw_worker_close(&raw);
        end_play(&play);
    }
}

/* ---- A base that is not what it was */

/* An engine that writes where it may only read. */
static void scribble_on(const refit_update *update, uint32_t index)
{
    refit_tensor tensor = {.size = sizeof tensor};
    const void *bytes = NULL;
    assert_int_equal(refit_update_tensor(update, index, &tensor, &bytes, NULL), REFIT_OK);
    ((unsigned char *)(uintptr_t)bytes)[tensor.bytes - 1] ^= 1;
}

static void check_update(const theatre *play, const refit_update *update)
{
    for (uint32_t i = 0; i < TENSORS; i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        const void *bytes = NULL;
        assert_int_equal(refit_update_tensor(update, i, &tensor, &bytes, NULL), REFIT_OK);
        assert_memory_equal(bytes, play->bytes[i], play->tensors[i].bytes);
    }
}

/* Publishes, and is the worker as well. The bytes that were sent for it. */
static uint64_t publish_to(theatre *play, refit_subscriber *subscriber, bool scribbles)
{
    rft_thread thread;
    refit_error error;
    refit_update *update = NULL;
    uint64_t sent = figures(play).publish_sent_bytes_total;
    begin_and_write(play);
    assert_int_equal(rft_thread_start(&thread, "commit", commit, play, NULL), REFIT_OK);
    if (refit_subscriber_next(subscriber, WAIT_MS, &update, &error) != REFIT_OK)
        fail_msg("%s", error.text);
    check_update(play, update);
    if (scribbles) scribble_on(update, 3);
    assert_int_equal(refit_update_accept(update, NULL), REFIT_OK);
    refit_update_close(update);
    rft_thread_join(thread);
    assert_int_equal(play->status, REFIT_OK);
    return figures(play).publish_sent_bytes_total - sent;
}

/* What it changed travels as the same: only the digest at the end tells. */
static void a_base_that_was_written_over_is_replaced_by_the_next_version(void **state)
{
    (void)state;
    for (uint32_t slots = 1; slots <= 2; slots++) {
        theatre play;
        refit_subscriber *subscriber = NULL;
        begin_play(&play, 30 + slots, slots);
        open_play(&play);
        const char *endpoint = refit_publisher_endpoint(play.publisher);
        assert_int_equal(refit_subscriber_open(endpoint, &play.config, &subscriber, NULL),
                         REFIT_OK);
        wait_workers(&play, 1);
        (void)publish_to(&play, subscriber, true);
        change_tensor(&play, 0, 100);
        uint64_t whole = figures(&play).publish_bytes_last;
        assert_true(publish_to(&play, subscriber, false) > whole);
        for (int round = 0; round < 2; round++) {
            change_tensor(&play, 0, 100);
            assert_true(publish_to(&play, subscriber, false) < whole / 20);
        }
        refit_subscriber_close(subscriber);
        end_play(&play);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_updates_arrive_bit_for_bit),
        cmocka_unit_test(little_changes_travel_as_little),
        cmocka_unit_test(auto_sends_whole_what_nearly_all_changed),
        cmocka_unit_test(always_codes_what_nearly_all_changed),
        cmocka_unit_test(never_sends_every_version_whole),
        cmocka_unit_test(worker_that_does_not_announce_it_gets_no_sparse_blocks),
        cmocka_unit_test(a_straggler_gets_what_was_coded_for_others),
        cmocka_unit_test(a_straggler_alone_gets_the_same_bytes),
        cmocka_unit_test(frames_of_all_sizes_fit_through_the_smallest_window),
        cmocka_unit_test(a_base_that_was_written_over_is_replaced_by_the_next_version),
    };
    return cmocka_run_group_tests_name("deltas", tests, NULL, NULL);
}
