/* Several publishers, each with the shard of its rank: workers get whole versions, all or none, and
 * what a rank does wrong, or that it is gone, is told to all of them. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/support/key_fixture.h"
#include "tests/support/quick_config.h"
#include "tests/support/raw_worker.h"
#include "tests/support/rollout_threads.h"
#include "tests/support/test.h"

#define RANKS   3u
#define TENSORS 5u
#define WORKERS 2u

/* Rows, columns, elements that divide words, one that a single rank has, and a tied one. */
static const refit_tensor tensors[TENSORS] = {
    {sizeof *tensors, "rows", REFIT_BF16, 2, {1000, 300}, 600000, REFIT_NO_ALIAS},
    {sizeof *tensors, "columns", REFIT_BF16, 2, {500, 333}, 333000, REFIT_NO_ALIAS},
    {sizeof *tensors, "odd", REFIT_BF16, 1, {77}, 154, REFIT_NO_ALIAS},
    {sizeof *tensors, "one", REFIT_F32, 1, {100000}, 400000, REFIT_NO_ALIAS},
    {sizeof *tensors, "tied", REFIT_F32, 1, {100000}, 400000, 3},
};

typedef struct box {
    bool there;
    uint64_t row, rows, column, columns; /* in elements of a matrix */
} box;

static box box_of(uint32_t rank, uint32_t tensor)
{
    static const uint64_t begin[] = {0, 333, 667, 1000};
    if (tensor == 0) return (box){true, begin[rank], begin[rank + 1] - begin[rank], 0, 300};
    if (tensor == 1) return (box){true, 0, 500, rank * 111u, 111};
    if (tensor == 2) return (box){true, rank * 26u, rank == 2 ? 25 : 26, 0, 1};
    return (box){tensor == 3 && rank == 1, 0, 100000, 0, 1};
}

typedef struct ranks_rig ranks_rig;
typedef refit_status (*rank_step)(ranks_rig *rig, uint32_t rank, refit_error *error);

typedef struct rank_thread {
    ranks_rig *rig;
    uint32_t rank;
    rank_step step;
    rft_thread thread;
    refit_status status;
    refit_error error;
} rank_thread;

struct ranks_rig {
    refit_config config;
    refit_config worker_config;         /* by add_worker */
    refit_publisher *publishers[RANKS]; /* NULL: it is not there */
    rank_thread threads[RANKS];
    unsigned char *bytes[TENSORS];
    rollout_thread workers[WORKERS + 1];
    uint32_t worker_count;
    uint64_t version;
    uint32_t timeout_ms; /* of shard */
    uint32_t faulty;     /* the rank that does something else */
    uint32_t turn;       /* a rank has what the one so many after it had at first */
};

static uint64_t width_of(uint32_t tensor)
{
    return refit_dtype_bits(tensors[tensor].dtype) / 8;
}

static void change(ranks_rig *rig, uint64_t version)
{
    rig->version = version;
    for (uint32_t i = 0; i < TENSORS; i++) {
        if (tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        for (uint64_t k = 0; k < tensors[i].bytes; k++) {
            bool changes = k % 1001 == 0 || i == 2;
            rig->bytes[i][k] =
                (unsigned char)(k * 31 + (k >> 9) + i + (changes ? version * 17 : 0));
        }
    }
}

static uint64_t digest_of(const ranks_rig *rig)
{
    const void *bytes[TENSORS];
    for (uint32_t i = 0; i < TENSORS; i++)
        bytes[i] = rig->bytes[tensors[i].alias_of == REFIT_NO_ALIAS ? i : tensors[i].alias_of];
    return rollouts_digest(tensors, TENSORS, bytes);
}

/* ---- What each rank does */

static refit_status shard_as(ranks_rig *rig, uint32_t rank, const refit_selection *list,
                             uint32_t count, refit_error *error)
{
    const refit_shards shards = {
        sizeof shards, refit_publisher_endpoint(rig->publishers[0]), rank, RANKS, list, count};
    return refit_publisher_shard(rig->publishers[rank], &shards, rig->timeout_ms, error);
}

static uint32_t list_boxes(const ranks_rig *rig, uint32_t rank, refit_selection list[TENSORS])
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < TENSORS; i++) {
        box at = box_of((rank + rig->turn) % RANKS, i);
        if (!at.there) continue;
        list[count++] = (refit_selection){.size = sizeof *list,
                                          .name = tensors[i].name,
                                          .rank = tensors[i].rank,
                                          .first = {at.row, at.column},
                                          .shape = {at.rows, at.columns}};
    }
    return count;
}

static refit_status shard(ranks_rig *rig, uint32_t rank, refit_error *error)
{
    refit_selection list[TENSORS];
    uint32_t count = list_boxes(rig, rank, list);
    return shard_as(rig, rank, list, count, error);
}

static refit_status declare_and_shard(ranks_rig *rig, uint32_t rank, refit_error *error)
{
    refit_status status = refit_publisher_declare(rig->publishers[rank], tensors, TENSORS, error);
    return status == REFIT_OK ? shard(rig, rank, error) : status;
}

static refit_status write_box(ranks_rig *rig, uint32_t rank, uint32_t tensor, refit_error *error)
{
    box at = box_of((rank + rig->turn) % RANKS, tensor);
    if (!at.there) return REFIT_OK;
    uint64_t width = width_of(tensor);
    uint64_t line = tensors[tensor].rank == 2 ? tensors[tensor].shape[1] : 1;
    unsigned char *local = malloc(at.rows * at.columns * width);
    assert_non_null(local);
    for (uint64_t row = 0; row < at.rows; row++)
        memcpy(local + row * at.columns * width,
               rig->bytes[tensor] + ((at.row + row) * line + at.column) * width,
               at.columns * width);
    refit_status status =
        refit_publisher_write(rig->publishers[rank], tensor, local, at.rows * at.columns * width,
                              NULL, REFIT_STREAM_NONE, error);
    free(local);
    return status;
}

static refit_status begin_and_write(ranks_rig *rig, uint32_t rank, refit_error *error)
{
    refit_status status = refit_publisher_begin(rig->publishers[rank], rig->version, error);
    for (uint32_t i = 0; status == REFIT_OK && i < TENSORS; i++)
        status = write_box(rig, rank, i, error);
    return status;
}

static refit_status commit(ranks_rig *rig, uint32_t rank, refit_error *error)
{
    return refit_publisher_commit(rig->publishers[rank], error);
}

static refit_status publish(ranks_rig *rig, uint32_t rank, refit_error *error)
{
    refit_status status = begin_and_write(rig, rank, error);
    return status == REFIT_OK ? commit(rig, rank, error) : status;
}

/* ---- Together */

static void *run_step(void *user)
{
    rank_thread *own = user;
    own->status = own->step(own->rig, own->rank, &own->error);
    return NULL;
}

static void start(ranks_rig *rig, uint32_t rank, rank_step step)
{
    rank_thread *own = &rig->threads[rank];
    *own = (rank_thread){.rig = rig, .rank = rank, .step = step};
    assert_ok(rft_thread_start(&own->thread, "test-rank", run_step, own, NULL));
}

static void finish(ranks_rig *rig, uint32_t rank)
{
    rft_thread_join(rig->threads[rank].thread);
}

static void together(ranks_rig *rig, rank_step step)
{
    for (uint32_t i = 0; i < RANKS; i++)
        if (rig->publishers[i] != NULL) start(rig, i, step);
    for (uint32_t i = 0; i < RANKS; i++)
        if (rig->publishers[i] != NULL) finish(rig, i);
}

static void all_well(ranks_rig *rig, rank_step step)
{
    together(rig, step);
    for (uint32_t i = 0; i < RANKS; i++)
        if (rig->threads[i].status != REFIT_OK)
            fail_msg("rank %u: %s", i, rig->threads[i].error.text);
}

static void expect_all(ranks_rig *rig, refit_status status, const char *words)
{
    for (uint32_t i = 0; i < RANKS; i++) {
        if (rig->publishers[i] == NULL) continue;
        const rank_thread *own = &rig->threads[i];
        if (own->status != status || strstr(own->error.text, words) == NULL)
            fail_msg("rank %u: %s: %s", i, refit_status_name(own->status), own->error.text);
    }
}

static void open_publisher(ranks_rig *rig, uint32_t rank)
{
    assert_ok(
        refit_publisher_open("tcp://127.0.0.1:0", &rig->config, &rig->publishers[rank], NULL));
    assert_ok(refit_publisher_declare(rig->publishers[rank], tensors, TENSORS, NULL));
}

static void add_worker(ranks_rig *rig)
{
    rollouts_start(&rig->workers[rig->worker_count++], refit_publisher_endpoint(rig->publishers[0]),
                   &rig->worker_config, ROLLOUT_ACCEPT);
    assert_ok(
        refit_publisher_wait_workers(rig->publishers[0], rig->worker_count, TIMEOUT_MS, NULL));
}

static void open_workers(ranks_rig *rig)
{
    if (rig->worker_config.security_key[0] == '\0') rig->worker_config = rig->config;
    while (rig->worker_count < WORKERS)
        add_worker(rig);
}

static void expect_version(ranks_rig *rig, uint64_t version)
{
    for (uint32_t i = 0; i < rig->worker_count; i++)
        assert_int_equal(rollouts_wait(&rig->workers[i], version, 1), digest_of(rig));
}

static void publish_all(ranks_rig *rig, uint64_t version)
{
    change(rig, version);
    all_well(rig, publish);
    expect_version(rig, version);
    for (uint32_t i = 0; i < RANKS; i++)
        assert_int_equal(refit_publisher_version(rig->publishers[i]), version);
}

static int rig_setup(void **state)
{
    static ranks_rig rig;
    memset(&rig, 0, sizeof rig);
    rig.config = quick_config();
    rig.config.broadcast_slots = 2;
    rig.config.broadcast_heartbeat_timeout_ms = 3000;
    rig.config.broadcast_linger_ms = 500;
    rig.config.broadcast_frame_bytes = 64 * 1024;
    rig.timeout_ms = TIMEOUT_MS;
    for (uint32_t i = 0; i < TENSORS; i++) {
        if (tensors[i].alias_of == REFIT_NO_ALIAS) rig.bytes[i] = malloc(tensors[i].bytes);
    }
    *state = &rig;
    return 0;
}

static void close_publisher(ranks_rig *rig, uint32_t rank)
{
    refit_publisher_close(rig->publishers[rank]);
    rig->publishers[rank] = NULL;
}

static int rig_teardown(void **state)
{
    ranks_rig *rig = *state;
    for (uint32_t i = 0; i < rig->worker_count; i++)
        rollouts_stop(&rig->workers[i]);
    for (uint32_t i = RANKS; i-- > 0;)
        close_publisher(rig, i);
    for (uint32_t i = 0; i < TENSORS; i++)
        free(rig->bytes[i]);
    return 0;
}

#define WITH_RANKS(test) TEST_ON(ranks_rig *rig, test, rig_setup, rig_teardown)

static void open_ranks(ranks_rig *rig)
{
    for (uint32_t i = 0; i < RANKS; i++)
        open_publisher(rig, i);
}

static void open_all(ranks_rig *rig)
{
    open_ranks(rig);
    all_well(rig, shard);
    open_workers(rig);
}

/* ---- Versions */

WITH_RANKS(workers_get_whole_versions_from_all_ranks)
{
    open_all(rig);
    for (uint64_t version = 1; version <= 6; version++)
        publish_all(rig, version);
    uint64_t sent = 0;
    for (uint32_t i = 0; i < RANKS; i++) {
        refit_stats stats = {.size = sizeof stats};
        assert_ok(refit_publisher_stats(rig->publishers[i], &stats, NULL));
        assert_true(stats.publish_sent_bytes_total > 0);
        sent += stats.publish_sent_bytes_total;
    }
    uint64_t model = 600000 + 333000 + 154 + 400000;
    assert_in_range(sent, model, 6 * model); /* one image for both workers, and changes alone */
}

WITH_RANKS(workers_that_came_before_the_ranks_are_sent_versions)
{
    open_ranks(rig);
    open_workers(rig);
    all_well(rig, shard);
    publish_all(rig, 1);
    publish_all(rig, 2);
}

WITH_RANKS(each_worker_of_its_own_host_is_sent_changes)
{
    rig->config.broadcast_host_image = REFIT_HOST_IMAGE_OFF;
    rig->config.broadcast_delta = REFIT_DELTA_ALWAYS;
    open_all(rig);
    for (uint64_t version = 1; version <= 4; version++)
        publish_all(rig, version);
}

WITH_RANKS(one_slot_is_written_over_and_brought_back)
{
    rig->config.broadcast_slots = 1;
    open_all(rig);
    publish_all(rig, 1);
    change(rig, 2);
    all_well(rig, begin_and_write);
    assert_ok(refit_publisher_abort(rig->publishers[2], NULL));
    start(rig, 0, commit);
    start(rig, 1, commit);
    finish(rig, 0);
    finish(rig, 1);
    assert_int_equal(rig->threads[0].status, REFIT_ERR_PEER);
    assert_int_equal(rig->threads[1].status, REFIT_ERR_PEER);
    change(rig, 1);
    rollouts_stop(&rig->workers[--rig->worker_count]);
    add_worker(rig); /* late, it is served the version that was brought back */
    expect_version(rig, 1);
    publish_all(rig, 3);
}

WITH_RANKS(a_late_worker_is_served_by_all_ranks)
{
    open_ranks(rig);
    all_well(rig, shard);
    change(rig, 1);
    all_well(rig, publish);
    open_workers(rig);
    expect_version(rig, 1);
}

WITH_RANKS(commits_may_wait_for_less)
{
    open_all(rig);
    for (uint32_t i = 0; i < RANKS; i++)
        assert_ok(refit_publisher_set_wait(rig->publishers[i], REFIT_WAIT_NONE, NULL));
    for (uint64_t version = 1; version <= 3; version++) {
        change(rig, version);
        all_well(rig, publish);
    }
    expect_version(rig, 3);
}

/* Refused, it is not offered again: the worker would be asked without end. */
WITH_RANKS(a_version_that_a_worker_refuses_is_not_offered_again)
{
    rig->config.broadcast_commit = REFIT_COMMIT_QUORUM;
    rig->config.broadcast_quorum = 1;
    open_all(rig);
    publish_all(rig, 1);
    rollout_set_action(&rig->workers[1], ROLLOUT_REFUSE_KEPT);
    change(rig, 2);
    together(rig, publish); /* or REFIT_ERR_PEER, where the refusal comes before the end */
    assert_int_equal(refit_publisher_version(rig->publishers[0]), 2);
    rollouts_wait(&rig->workers[1], 2, 1);
    add_worker(rig); /* rank 0 has long heard the refusal when it is there */
    expect_version(rig, 2);
    assert_int_equal(rollouts_count(&rig->workers[1], 2), 1);
    rollout_set_action(&rig->workers[1], ROLLOUT_ACCEPT);
    publish_all(rig, 3);
}

WITH_RANKS(other_shards_and_one_publisher_again)
{
    open_all(rig);
    publish_all(rig, 1);
    all_well(rig, declare_and_shard);
    publish_all(rig, 2);
    /* Another list ends the sharing, and so does a single rank. */
    refit_publisher *alone = rig->publishers[0];
    const refit_shards one = {.size = sizeof one, .ranks = 1};
    assert_ok(refit_publisher_shard(alone, &one, 0, NULL));
    assert_ok(refit_publisher_declare(alone, tensors, 3, NULL));
    assert_ok(refit_publisher_wait_workers(alone, WORKERS, TIMEOUT_MS, NULL));
    assert_ok(refit_publisher_begin(alone, 3, NULL));
    for (uint32_t i = 0; i < 3; i++)
        assert_ok(refit_publisher_write(alone, i, rig->bytes[i], tensors[i].bytes, NULL,
                                        REFIT_STREAM_NONE, NULL));
    assert_ok(refit_publisher_commit(alone, NULL));
    const void *bytes[] = {rig->bytes[0], rig->bytes[1], rig->bytes[2]};
    for (uint32_t i = 0; i < WORKERS; i++)
        assert_int_equal(rollouts_wait(&rig->workers[i], 3, 1), rollouts_digest(tensors, 3, bytes));
}

static void await_dismissal(ranks_rig *rig, uint32_t rank)
{
    refit_error why = {0};
    for (int i = 0; i < 20 && strstr(why.text, "divided the tensors anew") == NULL; i++)
        assert_int_equal(refit_publisher_begin(rig->publishers[rank], 0, &why), REFIT_ERR_PEER);
    assert_non_null(strstr(why.text, "divided the tensors anew"));
}

/* Whichever rank is first: none joins with what it had before. */
WITH_RANKS(tensors_are_divided_in_another_way)
{
    open_all(rig);
    publish_all(rig, 1);
    rig->turn = 1;
    start(rig, 0, shard);
    await_dismissal(rig, 1);
    await_dismissal(rig, 2);
    start(rig, 1, shard);
    start(rig, 2, shard);
    for (uint32_t i = 0; i < RANKS; i++)
        finish(rig, i);
    expect_all(rig, REFIT_OK, "");
    publish_all(rig, 2);
    rig->turn = 2;
    start(rig, 2, shard);
    start(rig, 1, shard);
    start(rig, 0, shard);
    for (uint32_t i = 0; i < RANKS; i++)
        finish(rig, i);
    expect_all(rig, REFIT_OK, "");
    publish_all(rig, 3);
}

/* ---- Shards that are not the tensors */

static refit_status shard_without_one(ranks_rig *rig, uint32_t rank, refit_error *error)
{
    refit_selection list[TENSORS];
    uint32_t count = list_boxes(rig, rank, list);
    if (rank == rig->faulty) list[0].shape[0]--;
    return shard_as(rig, rank, list, count, error);
}

static refit_status shard_with_more(ranks_rig *rig, uint32_t rank, refit_error *error)
{
    refit_selection list[TENSORS];
    uint32_t count = list_boxes(rig, rank, list);
    if (rank == rig->faulty) {
        list[1].first[1]--;
        list[1].shape[1]++;
    }
    return shard_as(rig, rank, list, count, error);
}

WITH_RANKS(a_hole_and_an_overlap_are_told_to_all_ranks)
{
    open_ranks(rig);
    rig->faulty = 1;
    together(rig, shard_without_one);
    expect_all(rig, REFIT_ERR_INVALID, "\"rows\"");
    rig->faulty = 2;
    together(rig, shard_with_more);
    expect_all(rig, REFIT_ERR_INVALID, "ranks 1 and 2 both publish");
    all_well(rig, shard);
    open_workers(rig);
    publish_all(rig, 1);
}

WITH_RANKS(ranks_that_are_missing_are_named)
{
    open_ranks(rig);
    rig->timeout_ms = 700;
    start(rig, 0, shard);
    start(rig, 2, shard);
    finish(rig, 0);
    finish(rig, 2);
    assert_int_equal(rig->threads[0].status, REFIT_ERR_TIMEOUT);
    assert_non_null(strstr(rig->threads[0].error.text, ": 1 missing"));
    assert_int_equal(rig->threads[2].status, REFIT_ERR_TIMEOUT);
    refit_error why;
    assert_int_equal(refit_publisher_begin(rig->publishers[0], 1, &why), REFIT_ERR_PEER);
    rig->timeout_ms = TIMEOUT_MS;
    all_well(rig, shard);
}

WITH_RANKS(ranks_with_other_tensors_do_not_join)
{
    open_ranks(rig);
    assert_ok(refit_publisher_declare(rig->publishers[1], tensors, 4, NULL));
    rig->timeout_ms = 1000;
    together(rig, shard);
    assert_int_equal(rig->threads[1].status, REFIT_ERR_TIMEOUT);
    assert_non_null(strstr(rig->threads[1].error.text, "declared other tensors"));
    assert_int_equal(rig->threads[0].status, REFIT_ERR_TIMEOUT);
}

WITH_RANKS(ranks_with_other_frames_do_not_join)
{
    open_ranks(rig);
    close_publisher(rig, 1);
    rig->config.broadcast_frame_bytes *= 2;
    open_publisher(rig, 1);
    rig->timeout_ms = 1000;
    together(rig, shard);
    assert_int_equal(rig->threads[1].status, REFIT_ERR_INVALID);
    assert_non_null(strstr(rig->threads[1].error.text, "broadcast.frame_bytes"));
}

WITH_RANKS(calls_that_cannot_be_are_refused)
{
    refit_publisher *one;
    refit_error why;
    refit_selection list[TENSORS];
    open_ranks(rig);
    one = rig->publishers[1];
    uint32_t count = list_boxes(rig, 1, list);
    refit_shards shards = {sizeof shards, "tcp://127.0.0.1:9", 1, RANKS, list, count};
    assert_invalid(refit_publisher_shard(one, NULL, 0, &why));
    shards.rank = RANKS;
    assert_invalid(refit_publisher_shard(one, &shards, 0, &why));
    shards.rank = 1;
    shards.ranks = 0;
    assert_invalid(refit_publisher_shard(one, &shards, 0, &why));
    shards.ranks = RANKS;
    shards.coordinator = NULL;
    assert_invalid(refit_publisher_shard(one, &shards, 0, &why));
    shards.coordinator = "nowhere";
    assert_int_equal(refit_publisher_shard(one, &shards, 300, &why), REFIT_ERR_TIMEOUT);
    shards.coordinator = "tcp://127.0.0.1:9"; /* where no publisher is */
    assert_int_equal(refit_publisher_shard(one, &shards, 300, &why), REFIT_ERR_TIMEOUT);
    list[0].name = "nothing";
    assert_invalid(refit_publisher_shard(one, &shards, 0, &why));
    list[0].name = "rows";
    list[0].shape[0] = 2000;
    assert_invalid(refit_publisher_shard(one, &shards, 0, &why));
    assert_int_equal(refit_publisher_begin(one, 1, &why), REFIT_ERR_PEER);
}

WITH_RANKS(a_shard_is_written_as_it_is)
{
    refit_error why;
    static unsigned char bytes[400000];
    open_ranks(rig);
    all_well(rig, shard);
    change(rig, 1);
    all_well(rig, begin_and_write);
    refit_publisher *last = rig->publishers[2];
    assert_int_equal(
        refit_publisher_write(last, 0, bytes, 333 * 600, NULL, REFIT_STREAM_NONE, &why),
        REFIT_ERR_STATE);
    assert_invalid(refit_publisher_write(last, 3, bytes, 400000, NULL, REFIT_STREAM_NONE, &why));
    assert_non_null(strstr(why.text, "on this rank"));
    all_well(rig, commit);
}

/* ---- A rank that fails */

static refit_status publish_or_abort(ranks_rig *rig, uint32_t rank, refit_error *error)
{
    refit_status status = begin_and_write(rig, rank, error);
    if (rank != rig->faulty || status != REFIT_OK)
        return status == REFIT_OK ? commit(rig, rank, error) : status;
    return refit_publisher_abort(rig->publishers[rank], error);
}

WITH_RANKS(any_rank_aborts_for_all)
{
    open_all(rig);
    publish_all(rig, 1);
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        rig->faulty = rank;
        change(rig, 2 + rank);
        together(rig, publish_or_abort);
        for (uint32_t i = 0; i < RANKS; i++) {
            assert_int_equal(rig->threads[i].status, i == rank ? REFIT_OK : REFIT_ERR_PEER);
            assert_int_equal(refit_publisher_version(rig->publishers[i]), 1);
        }
    }
    publish_all(rig, 2 + RANKS);
    for (uint32_t i = 0; i < WORKERS; i++)
        assert_int_equal(rollouts_count(&rig->workers[i], 2), 0);
}

/* It goes before it has written, or when all of its own is written and it has not sealed. */
static void lose_rank(ranks_rig *rig, uint32_t rank, bool written)
{
    change(rig, 2);
    for (uint32_t i = 0; i < RANKS; i++) {
        if (i == rank && !written) continue;
        start(rig, i, begin_and_write);
    }
    for (uint32_t i = 0; i < RANKS; i++) {
        if (i == rank && !written) continue;
        finish(rig, i);
        assert_ok(rig->threads[i].status);
    }
    for (uint32_t i = 0; i < RANKS; i++)
        if (i != rank) start(rig, i, commit);
    close_publisher(rig, rank);
    for (uint32_t i = 0; i < RANKS; i++)
        if (i != rank) finish(rig, i);
    expect_all(rig, REFIT_ERR_PEER, rank == 0 ? "rank 0" : "rank 2");
    refit_error why;
    assert_int_equal(refit_publisher_begin(rig->publishers[1], 0, &why), REFIT_ERR_PEER);
}

WITH_RANKS(a_rank_that_goes_ends_the_version_everywhere)
{
    for (int written = 0; written < 2; written++) {
        open_all(rig);
        publish_all(rig, 1);
        lose_rank(rig, 2, written);
        for (uint32_t i = 0; i < WORKERS; i++)
            assert_int_equal(rollouts_count(&rig->workers[i], 2), 0);
        /* Started anew, it is known once all ranks have said what they have. */
        open_publisher(rig, 2);
        all_well(rig, shard);
        publish_all(rig, 3);
        rig->worker_count = 0;
        for (uint32_t i = 0; i < WORKERS; i++)
            rollouts_stop(&rig->workers[i]);
        for (uint32_t i = RANKS; i-- > 0;)
            close_publisher(rig, i);
    }
}

WITH_RANKS(rank_0_that_goes_ends_the_version_everywhere)
{
    open_all(rig);
    publish_all(rig, 1);
    lose_rank(rig, 0, true);
}

/* And the others do not wait until it has been silent for too long. */
WITH_RANKS(a_rank_that_declares_other_tensors_says_so)
{
    refit_error why;
    open_all(rig);
    publish_all(rig, 1);
    assert_ok(refit_publisher_declare(rig->publishers[2], tensors, 3, NULL));
    change(rig, 2);
    start(rig, 0, publish);
    finish(rig, 0);
    assert_int_equal(rig->threads[0].status, REFIT_ERR_PEER);
    assert_non_null(strstr(rig->threads[0].error.text, "no shard of these tensors any more"));
    assert_int_equal(refit_publisher_begin(rig->publishers[1], 2, &why), REFIT_ERR_PEER);
    all_well(rig, declare_and_shard);
    publish_all(rig, 3);
}

WITH_RANKS(a_quorum_of_workers_needs_all_ranks)
{
    rig->config.broadcast_commit = REFIT_COMMIT_QUORUM;
    rig->config.broadcast_quorum = 1;
    open_all(rig);
    publish_all(rig, 1);
    lose_rank(rig, 2, true);
}

WITH_RANKS(a_rank_that_does_not_commit_ends_the_version_in_time)
{
    rig->config.broadcast_stage_timeout_ms = 1000;
    open_all(rig);
    change(rig, 1);
    all_well(rig, begin_and_write);
    start(rig, 0, commit);
    start(rig, 1, commit);
    finish(rig, 0);
    finish(rig, 1);
    assert_int_equal(rig->threads[0].status, REFIT_ERR_PEER);
    assert_non_null(strstr(rig->threads[0].error.text, "had not written version 1 in time"));
    assert_int_equal(rig->threads[1].status, REFIT_ERR_PEER);
    refit_error why;
    assert_int_equal(refit_publisher_commit(rig->publishers[2], &why), REFIT_ERR_PEER);
}

WITH_RANKS(a_rank_waits_for_rank_0_and_no_longer_than_it_may)
{
    refit_error why;
    rig->config.broadcast_stage_timeout_ms = 500;
    open_ranks(rig);
    all_well(rig, shard);
    assert_int_equal(refit_publisher_begin(rig->publishers[1], 1, &why), REFIT_ERR_TIMEOUT);
    refit_publisher_cancel(rig->publishers[1]);
    assert_int_equal(refit_publisher_begin(rig->publishers[1], 1, &why), REFIT_ERR_CANCELLED);
    assert_ok(refit_publisher_begin(rig->publishers[0], 7, NULL));
    assert_int_equal(refit_publisher_begin(rig->publishers[1], 8, &why), REFIT_ERR_STALE);
    assert_ok(refit_publisher_begin(rig->publishers[1], 0, NULL));
    assert_ok(refit_publisher_abort(rig->publishers[0], NULL));
    /* The word of the abort may come while it begins: then its commit says so. */
    refit_status status = refit_publisher_begin(rig->publishers[2], 7, &why);
    if (status == REFIT_OK) {
        for (uint32_t i = 0; i < TENSORS; i++)
            assert_ok(write_box(rig, 2, i, NULL));
        status = refit_publisher_commit(rig->publishers[2], &why);
    }
    assert_int_equal(status, REFIT_ERR_PEER);
    assert_non_null(strstr(why.text, "aborted version 7"));
}

/* ---- Others */

WITH_RANKS(a_worker_of_another_rank_or_of_an_old_release_is_told_so)
{
    raw_worker stranger;
    open_ranks(rig);
    all_well(rig, shard);
    for (uint32_t rank = 0; rank < 2; rank++) {
        raw_worker_open(&stranger, refit_publisher_endpoint(rig->publishers[rank]), "s", false);
        raw_worker_say_hello(&stranger); /* it does not say that it takes shards */
        const rft_message *refuse = raw_worker_expect(&stranger, RFT_REFUSE);
        char reason[RFT_SENTENCE_BYTES];
        rft_view_print(refuse->as.refuse.reason, reason, sizeof reason);
        assert_non_null(strstr(reason, rank == 0 ? "release" : "subscribe to rank 0"));
        assert_false(refuse->as.refuse.final);
        raw_worker_close(&stranger);
    }
}

/* All ranks have one key; a worker's makes it no rank. */
WITH_RANKS(ranks_with_keys_have_that_of_rank_0)
{
    key_fixture keys = key_fixture_open();
    key_fixture_admit(&keys, "worker");
    key_fixture_allow(&keys, "trainer");
    rig->worker_config = rig->config;
    key_fixture_equip_worker(&keys, "worker", &rig->worker_config);
    key_fixture_equip_trainer(&keys, &rig->config);
    strcpy(rig->config.security_server_key, rig->worker_config.security_server_key);
    open_all(rig);
    publish_all(rig, 1);
    refit_config trainers = rig->config;
    strcpy(rig->config.security_key, rig->worker_config.security_key);
    close_publisher(rig, 2);
    open_publisher(rig, 2);
    rig->config = trainers;
    rig->timeout_ms = 1500;
    together(rig, shard);
    assert_int_equal(rig->threads[2].status, REFIT_ERR_SECURITY);
    assert_non_null(strstr(rig->threads[2].error.text, "the key of rank 0"));
    assert_int_equal(rig->threads[0].status, REFIT_ERR_TIMEOUT);
    key_fixture_close(&keys);
}

int main(int argc, char **argv)
{
    if (argc > 1) test_filter(argv[1]);
    return test_run("shards");
}
