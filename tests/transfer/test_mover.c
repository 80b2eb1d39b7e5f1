/* Mover: bytes arrive behind the caller's work, and every waiter gets the same status. */
#include <refit/offload.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/thread.h"
#include "tests/support/faulty_device.h"
#include "tests/support/test.h"
#include "tests/support/test_device.h"
#include "transfer/mover.h"

#define PIECES 4
#define BYTES  3000
#define ALL    (PIECES * BYTES)

typedef struct fixture {
    refit_device *device;
    refit_device *plain;     /* the one in it */
    refit_stream_ref stream; /* the caller's */
    rft_mover *mover;
    rft_plan plan;
    char *from; /* host memory */
    char *to;   /* device memory, and one byte more */
} fixture;

static fixture all;

static const rft_plan_limits limits = {
    .pieces = PIECES, .bytes = PIECES * BYTES, .piece_bytes = 1000, .batch_most = 2};

/* Piece i goes from `from` to `to`, those of group 1 behind those of group 0; the last is zeroed.
 */
static void fill_plan(void)
{
    rft_piece pieces[PIECES];
    for (uint32_t i = 0; i < PIECES; i++) {
        const char *from = i == PIECES - 1 ? NULL : all.from + i * BYTES;
        pieces[i] =
            (rft_piece){.to = all.to + i * BYTES, .from = from, .bytes = BYTES, .group = i / 2};
    }
    assert_ok(rft_plan_fill(&all.plan, pieces, PIECES, NULL));
}

static int set_up(void **state)
{
    void *memory;
    memset(&all, 0, sizeof all);
    assert_ok(faulty_device_open(test_device_spec("host"), &all.device, NULL));
    all.plain = faulty_device_inner(all.device);
    assert_ok(refit_memory_alloc(all.device, ALL + 1, &memory, NULL));
    all.to = memory;
    all.from = test_host_alloc(all.plain, ALL);
    memset(all.from, 'a', ALL);
    test_fill(all.plain, all.to, '.', ALL + 1);
    assert_ok(refit_stream_open(all.device, &all.stream, NULL));
    assert_ok(rft_mover_open(all.device, 0, &all.mover, NULL));
    assert_ok(rft_plan_open(&all.plan, &limits, NULL));
    fill_plan();
    return 0;
}

static int tear_down(void **state)
{
    faulty_device_go(all.device);
    rft_plan_close(&all.plan);
    assert_ok(rft_mover_close(all.mover, TIMEOUT_MS, NULL));
    assert_ok(refit_stream_close(all.device, all.stream, NULL));
    test_host_free(all.plain, all.from, ALL);
    assert_ok(refit_memory_free(all.device, all.to, NULL));
    assert_true(test_device_quiet());
    return refit_device_close(all.device, NULL) == REFIT_OK ? 0 : -1;
}

static refit_status start(refit_stream_ref after)
{
    return rft_mover_start(all.mover, &all.plan, after, RFT_COPY_STREAM, NULL);
}

static void assert_moved(void)
{
    char expected[ALL] = {0};
    memset(expected, 'a', ALL - BYTES);
    assert_device_equal(all.plain, all.to, expected, ALL);
}

static void bytes_are_moved_and_zeroed(void **state)
{
    int64_t before = rft_now();
    assert_int_equal(rft_mover_finished_at(all.mover), 0);
    assert_ok(start(REFIT_STREAM_NONE));
    assert_ok(rft_mover_wait(all.mover, TIMEOUT_MS, NULL));
    assert_moved();
    assert_in_range(rft_mover_finished_at(all.mover), before, rft_now());
}

static void nothing_started_is_nothing_to_wait_for(void **state)
{
    assert_ok(rft_mover_wait(all.mover, 0, NULL));
    assert_ok(rft_mover_wait_group(all.mover, 1, 0, NULL));
    assert_ok(rft_mover_join(all.mover, all.stream, NULL));
    assert_ok(rft_mover_join_group(all.mover, 0, all.stream, NULL));
    assert_ok(rft_mover_close(NULL, 0, NULL));
}

static void plan_of_nothing_is_done_at_once(void **state)
{
    assert_ok(rft_plan_fill(&all.plan, NULL, 0, NULL));
    assert_ok(start(all.stream));
    assert_ok(rft_mover_wait(all.mover, TIMEOUT_MS, NULL));
    assert_device_equal(all.plain, all.to, ".", 1);
}

static void write_source(void *user)
{
    (void)user;
    memset(all.from, 'b', ALL);
}

/* The caller's stream stands before a copy and then writes the source: the mover reads it after. */
static void copies_wait_for_the_caller_s_stream(void **state)
{
    faulty_device_stop(all.device);
    assert_ok(refit_stream_copy(all.device, all.stream, all.to + ALL, all.from, 1, NULL));
    assert_ok(refit_stream_call(all.device, all.stream, write_source, NULL, NULL));
    assert_ok(start(all.stream));
    assert_int_equal(rft_mover_wait(all.mover, 0, NULL), REFIT_ERR_TIMEOUT);
    faulty_device_go(all.device);
    assert_ok(rft_mover_wait(all.mover, TIMEOUT_MS, NULL));
    assert_device_equal(all.plain, all.to, "b", 1);
}

/* What the caller's stream finds there. */
static void look(char *seen)
{
    assert_ok(refit_stream_copy(all.device, all.stream, seen, all.to, 1, NULL));
}

static void caller_s_stream_waits_for_the_copies(void **state)
{
    char *seen = test_host_alloc(all.plain, 2);
    faulty_device_stop(all.device);
    assert_ok(start(REFIT_STREAM_NONE));
    assert_ok(rft_mover_join_group(all.mover, 0, all.stream, NULL));
    look(&seen[0]);
    assert_ok(rft_mover_join(all.mover, all.stream, NULL));
    look(&seen[1]);
    assert_int_equal(refit_stream_wait(all.device, all.stream, 0, NULL), REFIT_ERR_TIMEOUT);
    faulty_device_go(all.device);
    assert_ok(refit_stream_wait(all.device, all.stream, TIMEOUT_MS, NULL));
    assert_int_equal(seen[0], 'a');
    assert_int_equal(seen[1], 'a');
    test_host_free(all.plain, seen, 2);
}

static void the_calling_thread_cannot_be_joined(void **state)
{
    assert_ok(start(REFIT_STREAM_NONE));
    assert_invalid(rft_mover_join(all.mover, REFIT_STREAM_NONE, NULL));
    assert_invalid(rft_mover_join_group(all.mover, 0, REFIT_STREAM_NONE, NULL));
    assert_ok(rft_mover_wait(all.mover, TIMEOUT_MS, NULL));
    assert_moved();
}

static void second_start_is_refused_while_copies_run(void **state)
{
    faulty_device_stop(all.device);
    assert_ok(start(REFIT_STREAM_NONE));
    assert_int_equal(start(REFIT_STREAM_NONE), REFIT_ERR_STATE);
    assert_int_equal(rft_mover_finished_at(all.mover), 0);
    assert_int_equal(rft_mover_close(all.mover, 0, NULL), REFIT_ERR_TIMEOUT);
    faulty_device_go(all.device);
    assert_ok(rft_mover_wait(all.mover, TIMEOUT_MS, NULL));
    assert_ok(start(REFIT_STREAM_NONE));
}

static void group_beyond_the_last_is_refused(void **state)
{
    rft_piece piece = {.to = all.to, .from = all.from, .bytes = 10, .group = REFIT_GROUPS};
    assert_invalid(rft_mover_wait_group(all.mover, REFIT_GROUPS, 0, NULL));
    assert_invalid(rft_mover_join_group(all.mover, REFIT_GROUPS, all.stream, NULL));
    assert_ok(rft_plan_fill(&all.plan, &piece, 1, NULL));
    assert_invalid(start(REFIT_STREAM_NONE));
    assert_ok(rft_mover_wait(all.mover, 0, NULL));
}

static void starting_and_waiting_allocate_nothing(void **state)
{
    for (int i = 0; i < 3; i++) { /* the device's queue grows to what it needs */
        assert_ok(start(all.stream));
        assert_ok(rft_mover_wait(all.mover, TIMEOUT_MS, NULL));
    }
    uint64_t before = rft_alloc_count();
    for (int i = 0; i < 20; i++) {
        assert_ok(start(all.stream));
        assert_ok(rft_mover_wait_group(all.mover, 0, TIMEOUT_MS, NULL));
        assert_ok(rft_mover_wait(all.mover, TIMEOUT_MS, NULL));
    }
    assert_int_equal(rft_alloc_count(), before);
}

#define WAITERS 4
#define ROUNDS  50

typedef struct waiter {
    rft_thread thread;
    uint32_t group;
    atomic_uint *rounds; /* operations started */
    bool well;
} waiter;

/* Waits for whatever is under way until the last operation has been started and is over. */
static void *run_waiter(void *user)
{
    waiter *self = user;
    self->well = true;
    while (atomic_load(self->rounds) < ROUNDS) {
        refit_status status = self->group == 0
                                  ? rft_mover_wait(all.mover, TIMEOUT_MS, NULL)
                                  : rft_mover_wait_group(all.mover, self->group, TIMEOUT_MS, NULL);
        self->well = self->well && status == REFIT_OK;
        (void)rft_mover_finished_at(all.mover);
    }
    return NULL;
}

static void any_thread_waits_while_another_starts(void **state)
{
    waiter waiters[WAITERS];
    atomic_uint rounds;
    atomic_init(&rounds, 0);
    for (uint32_t i = 0; i < WAITERS; i++) {
        waiters[i].group = i % 2;
        waiters[i].rounds = &rounds;
        assert_ok(rft_thread_start(&waiters[i].thread, "waiter", run_waiter, &waiters[i], NULL));
    }
    refit_status status = REFIT_OK;
    for (uint32_t i = 0; i < ROUNDS; i++) {
        status = rft_keep_first(status, start(all.stream));
        status = rft_keep_first(status, rft_mover_wait(all.mover, TIMEOUT_MS, NULL));
        atomic_fetch_add(&rounds, 1);
    }
    for (uint32_t i = 0; i < WAITERS; i++) {
        rft_thread_join(waiters[i].thread);
    }
    assert_ok(status);
    for (uint32_t i = 0; i < WAITERS; i++) {
        assert_true(waiters[i].well);
    }
    assert_moved();
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(bytes_are_moved_and_zeroed),
        TEST(nothing_started_is_nothing_to_wait_for),
        TEST(plan_of_nothing_is_done_at_once),
        TEST(copies_wait_for_the_caller_s_stream),
        TEST(caller_s_stream_waits_for_the_copies),
        TEST(the_calling_thread_cannot_be_joined),
        TEST(second_start_is_refused_while_copies_run),
        TEST(group_beyond_the_last_is_refused),
        TEST(starting_and_waiting_allocate_nothing),
        TEST(any_thread_waits_while_another_starts),
    };
    return cmocka_run_group_tests_name("mover", tests, NULL, NULL);
}
