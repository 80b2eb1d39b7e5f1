/* Mover: bytes arrive after the caller's work, and every waiter gets the same status. */
#include <refit/offload.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/thread.h"
#include "tests/support/failing_alloc.h"
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

/* Some batches a piece, or one. */
static const rft_plan_limits limits = {
    .pieces = PIECES, .bytes = ALL, .piece_bytes = 1000, .batch_most = 2};
static const rft_plan_limits singly = {
    .pieces = PIECES, .bytes = ALL, .piece_bytes = BYTES, .batch_most = 1};

static rft_piece piece_at(uint32_t i, uint32_t group)
{
    return (rft_piece){
        .to = all.to + i * BYTES, .from = all.from + i * BYTES, .bytes = BYTES, .group = group};
}

static void open_all(const rft_plan_limits *bounds)
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
    assert_ok(rft_plan_open(&all.plan, bounds, NULL));
}

/* Piece i goes from `from` to `to`, those of group 1 after those of group 0; the last is zeroed. */
static int set_up(void **state)
{
    rft_piece pieces[PIECES];
    open_all(&limits);
    for (uint32_t i = 0; i < PIECES; i++)
        pieces[i] = piece_at(i, i / 2);
    pieces[PIECES - 1].from = NULL;
    assert_ok(rft_plan_fill(&all.plan, pieces, PIECES, NULL));
    return 0;
}

static int tear_down(void **state)
{
    faulty_device_go(all.device);
    faulty_device_reset(all.device);
    rft_plan_close(&all.plan);
    assert_ok(rft_mover_close(all.mover, TIMEOUT_MS, NULL));
    assert_ok(refit_stream_close(all.device, all.stream, NULL));
    test_host_free(all.plain, all.from, ALL);
    assert_ok(refit_memory_free(all.device, all.to, NULL));
    assert_true(test_device_quiet());
    return refit_device_close(all.device, NULL) == REFIT_OK ? 0 : -1;
}

#define MOVER_TEST(name) TEST_WITH(name, set_up, tear_down)

static refit_status start(refit_stream_ref after)
{
    return rft_mover_start(all.mover, &all.plan, after, RFT_COPY_STREAM, NULL);
}

static refit_status wait_all(void)
{
    return rft_mover_wait(all.mover, TIMEOUT_MS, NULL);
}

static refit_status wait_group(uint32_t group)
{
    return rft_mover_wait_group(all.mover, group, TIMEOUT_MS, NULL);
}

static void assert_moved(void)
{
    char expected[ALL] = {0};
    memset(expected, 'a', ALL - BYTES);
    assert_device_equal(all.plain, all.to, expected, ALL);
}

MOVER_TEST(bytes_are_moved_and_zeroed)
{
    int64_t before = rft_now();
    assert_int_equal(rft_mover_finished_at(all.mover), 0);
    assert_ok(start(REFIT_STREAM_NONE));
    assert_ok(wait_all());
    assert_moved();
    assert_in_range(rft_mover_finished_at(all.mover), before, rft_now());
}

MOVER_TEST(nothing_started_is_nothing_to_wait_for)
{
    assert_ok(rft_mover_wait(all.mover, 0, NULL));
    assert_ok(rft_mover_wait_group(all.mover, 1, 0, NULL));
    assert_ok(rft_mover_join(all.mover, all.stream, NULL));
    assert_ok(rft_mover_join_group(all.mover, 0, all.stream, NULL));
    assert_ok(rft_mover_close(NULL, 0, NULL));
}

MOVER_TEST(plan_of_nothing_is_done_at_once)
{
    assert_ok(rft_plan_fill(&all.plan, NULL, 0, NULL));
    assert_ok(start(all.stream));
    assert_ok(wait_all());
    assert_device_equal(all.plain, all.to, ".", 1);
}

static void write_source(void *user)
{
    (void)user;
    memset(all.from, 'b', ALL);
}

/* The caller's stream stands before a copy and then writes the source: the mover reads it after. */
MOVER_TEST(copies_wait_for_the_caller_s_stream)
{
    faulty_device_stop(all.device);
    assert_ok(refit_stream_copy(all.device, all.stream, all.to + ALL, all.from, 1, NULL));
    assert_ok(refit_stream_call(all.device, all.stream, write_source, NULL, NULL));
    assert_ok(start(all.stream));
    assert_int_equal(rft_mover_wait(all.mover, 0, NULL), REFIT_ERR_TIMEOUT);
    faulty_device_go(all.device);
    assert_ok(wait_all());
    assert_device_equal(all.plain, all.to, "b", 1);
}

/* What the caller's stream finds there. */
static void look(char *seen)
{
    assert_ok(refit_stream_copy(all.device, all.stream, seen, all.to, 1, NULL));
}

MOVER_TEST(caller_s_stream_waits_for_the_copies)
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

MOVER_TEST(the_calling_thread_cannot_be_joined)
{
    assert_ok(start(REFIT_STREAM_NONE));
    assert_invalid(rft_mover_join(all.mover, REFIT_STREAM_NONE, NULL));
    assert_invalid(rft_mover_join_group(all.mover, 0, REFIT_STREAM_NONE, NULL));
    assert_ok(wait_all());
    assert_moved();
}

MOVER_TEST(second_start_is_refused_while_copies_run)
{
    faulty_device_stop(all.device);
    assert_ok(start(REFIT_STREAM_NONE));
    assert_int_equal(start(REFIT_STREAM_NONE), REFIT_ERR_STATE);
    assert_int_equal(rft_mover_finished_at(all.mover), 0);
    assert_int_equal(rft_mover_close(all.mover, 0, NULL), REFIT_ERR_TIMEOUT);
    faulty_device_go(all.device);
    assert_ok(wait_all());
    assert_ok(start(REFIT_STREAM_NONE));
}

MOVER_TEST(group_beyond_the_last_is_refused)
{
    rft_piece piece = {.to = all.to, .from = all.from, .bytes = 10, .group = REFIT_GROUPS};
    assert_invalid(rft_mover_wait_group(all.mover, REFIT_GROUPS, 0, NULL));
    assert_invalid(rft_mover_join_group(all.mover, REFIT_GROUPS, all.stream, NULL));
    assert_ok(rft_plan_fill(&all.plan, &piece, 1, NULL));
    assert_invalid(start(REFIT_STREAM_NONE));
    assert_ok(rft_mover_wait(all.mover, 0, NULL));
}

MOVER_TEST(starting_and_waiting_allocate_nothing)
{
    for (int i = 0; i < 3; i++) { /* the device's queue grows to what it needs */
        assert_ok(start(all.stream));
        assert_ok(wait_all());
    }
    uint64_t before = rft_alloc_count();
    for (int i = 0; i < 20; i++) {
        assert_ok(start(all.stream));
        assert_ok(wait_group(0));
        assert_ok(wait_all());
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
        refit_status status = self->group == 0 ? wait_all() : wait_group(self->group);
        self->well = self->well && status == REFIT_OK;
        (void)rft_mover_finished_at(all.mover);
    }
    return NULL;
}

MOVER_TEST(any_thread_waits_while_another_starts)
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
        status = rft_keep_first(status, wait_all());
        atomic_fetch_add(&rounds, 1);
    }
    for (uint32_t i = 0; i < WAITERS; i++)
        rft_thread_join(waiters[i].thread);
    assert_ok(status);
    for (uint32_t i = 0; i < WAITERS; i++)
        assert_true(waiters[i].well);
    assert_moved();
}

/* ---- A device that fails: what cannot be started may be started again, a lost device may not. */

static const uint32_t grouped[PIECES] = {0, 0, 1, 2};

static int set_up_faults(void **state)
{
    rft_piece pieces[PIECES];
    open_all(&singly);
    for (uint32_t i = 0; i < PIECES; i++)
        pieces[i] = piece_at(i, grouped[i]);
    assert_ok(rft_plan_fill(&all.plan, pieces, PIECES, NULL));
    return 0;
}

#define FAULT(name) TEST_WITH(name, set_up_faults, tear_down)

static void assert_next_start_works(void)
{
    faulty_device_reset(all.device);
    test_fill(all.plain, all.to, 0, ALL);
    assert_ok(start(all.stream));
    assert_ok(wait_all());
    assert_device_equal(all.plain, all.to, all.from, ALL);
}

/* The copy that is lost is the first of group 1, or work of the caller's that all copies wait for.
 */
FAULT(a_device_that_is_lost_breaks_the_mover)
{
    for (uint32_t nth = 1; nth <= 3; nth += 2) {
        refit_error error = {0};
        if (nth == 3) {
            (void)tear_down(NULL);
            (void)set_up_faults(NULL);
        }
        faulty_device_lose(all.device, FAULTY_COPY_BATCH, nth);
        if (nth == 1) {
            assert_ok(refit_stream_copy(all.device, all.stream, all.to + ALL, all.from, 1, NULL));
        }
        refit_status started = start(all.stream); /* the loss may come before all is submitted */
        assert_true(started == REFIT_OK || started == REFIT_ERR_DEVICE);
        assert_int_equal(wait_group(1), REFIT_ERR_DEVICE);
        assert_int_equal(wait_all(), REFIT_ERR_DEVICE);
        assert_false(rft_mover_is_moving(all.mover));
        assert_int_equal(rft_mover_check(all.mover, &error), REFIT_ERR_DEVICE);
        assert_non_null(strstr(error.text, "lost"));
        assert_int_equal(wait_group(0), REFIT_ERR_DEVICE);
        assert_int_equal(rft_mover_join(all.mover, all.stream, NULL), REFIT_ERR_DEVICE);
        assert_int_equal(start(all.stream), REFIT_ERR_DEVICE);
    }
}

/* As when other work on the device has lost it. */
FAULT(a_start_on_a_lost_device_breaks_the_mover)
{
    refit_error error = {0};
    faulty_device_lose(all.device, FAULTY_ZERO, 1);
    assert_int_equal(rft_device_zero(all.device, REFIT_STREAM_NONE, all.to, 1, NULL),
                     REFIT_ERR_DEVICE);
    assert_int_equal(start(all.stream), REFIT_ERR_DEVICE);
    assert_int_equal(rft_mover_check(all.mover, &error), REFIT_ERR_DEVICE);
    assert_non_null(strstr(error.text, "lost"));
}

/* A caller that is told may free the group's memory: no copy may still write there. */
FAULT(a_loss_is_told_once_the_group_s_copies_are_over)
{
    faulty_device_lose(all.device, FAULTY_COPY_BATCH, 1);
    faulty_device_stop(all.device);
    assert_ok(start(all.stream));
    assert_int_equal(rft_mover_wait_group(all.mover, 1, 0, NULL), REFIT_ERR_TIMEOUT);
    faulty_device_go(all.device);
    assert_int_equal(wait_group(1), REFIT_ERR_DEVICE);
}

/* Each call that a start makes fails once: the start fails, nothing is under way, and no waiter is
 * told. */
FAULT(every_failure_to_issue_is_returned_and_drained)
{
    const faulty_slot slots[] = {FAULTY_COPY_BATCH, FAULTY_STREAM_CALL, FAULTY_EVENT_RECORD,
                                 FAULTY_EVENT_JOIN};
    for (size_t i = 0; i < COUNT_OF(slots); i++) {
        faulty_device_reset(all.device);
        assert_next_start_works();
        uint32_t calls = faulty_device_calls(all.device, slots[i]);
        assert_int_not_equal(calls, 0);
        for (uint32_t nth = 1; nth <= calls; nth++) {
            refit_error error = {0};
            faulty_device_fail(all.device, slots[i], nth, REFIT_ERR_DEVICE);
            assert_int_equal(
                rft_mover_start(all.mover, &all.plan, all.stream, RFT_COPY_STREAM, &error),
                REFIT_ERR_DEVICE);
            assert_int_equal(error.status, REFIT_ERR_DEVICE);
            test_fill(all.plain, all.to, 'x', ALL); /* no copy comes in between */
            assert_ok(rft_mover_wait(all.mover, 0, NULL));
            assert_int_equal(rft_mover_finished_at(all.mover), 0);
            assert_next_start_works();
        }
    }
}

/* No event can be recorded any more: the stream is closed to wait for it, and opened again. */
FAULT(stream_that_takes_no_event_is_replaced)
{
    faulty_device_fail_times(all.device, FAULTY_EVENT_RECORD, 2, FAULTY_ALWAYS, REFIT_ERR_DEVICE);
    assert_int_equal(start(all.stream), REFIT_ERR_DEVICE);
    assert_int_not_equal(faulty_device_calls(all.device, FAULTY_STREAM_CLOSE), 0);
    faulty_device_fail(all.device, FAULTY_STREAM_OPEN, 1, REFIT_ERR_DEVICE);
    assert_int_equal(start(all.stream), REFIT_ERR_DEVICE);
    assert_next_start_works();
}

FAULT(what_cannot_be_waited_for_breaks_the_mover)
{
    faulty_device_fail_times(all.device, FAULTY_EVENT_RECORD, 2, FAULTY_ALWAYS, REFIT_ERR_DEVICE);
    faulty_device_fail(all.device, FAULTY_STREAM_CLOSE, 1, REFIT_ERR_DEVICE);
    assert_int_equal(start(all.stream), REFIT_ERR_DEVICE);
    faulty_device_reset(all.device);
    assert_int_equal(rft_mover_wait(all.mover, 0, NULL), REFIT_ERR_DEVICE);
    assert_int_equal(wait_group(0), REFIT_ERR_DEVICE);
    assert_int_equal(rft_mover_join(all.mover, all.stream, NULL), REFIT_ERR_DEVICE);
    assert_int_equal(rft_mover_check(all.mover, NULL), REFIT_ERR_DEVICE);
    assert_int_equal(start(all.stream), REFIT_ERR_DEVICE);
}

/* What broke it may have been a timeout: that is not one of the close. */
FAULT(a_mover_that_a_timeout_broke_can_be_closed)
{
    refit_error error = {0};
    assert_ok(rft_mover_check(all.mover, NULL));
    faulty_device_fail(all.device, FAULTY_COPY_BATCH, 2, REFIT_ERR_TIMEOUT);
    faulty_device_fail_times(all.device, FAULTY_EVENT_RECORD, 2, FAULTY_ALWAYS, REFIT_ERR_DEVICE);
    faulty_device_fail(all.device, FAULTY_STREAM_CLOSE, 1, REFIT_ERR_DEVICE);
    assert_int_equal(start(all.stream), REFIT_ERR_TIMEOUT);
    faulty_device_reset(all.device);
    assert_int_equal(rft_mover_check(all.mover, &error), REFIT_ERR_DEVICE);
    assert_non_null(strstr(error.text, "could not be waited for"));
}

/* A device whose streams cannot call back: the time is that of the first look. */
FAULT(the_first_look_notes_the_end_where_streams_cannot_call)
{
    faulty_device_fail_times(all.device, FAULTY_STREAM_CALL, 1, FAULTY_ALWAYS,
                             REFIT_ERR_UNSUPPORTED);
    assert_ok(start(all.stream));
    assert_ok(wait_all());
    int64_t finished = rft_mover_finished_at(all.mover);
    assert_true(finished > 0);
    assert_ok(wait_all());
    assert_int_equal(rft_mover_finished_at(all.mover), finished);
}

FAULT(stream_that_does_not_close_keeps_the_mover)
{
    faulty_device_fail(all.device, FAULTY_STREAM_CLOSE, 1, REFIT_ERR_DEVICE);
    assert_int_equal(rft_mover_close(all.mover, TIMEOUT_MS, NULL), REFIT_ERR_DEVICE);
    assert_next_start_works();
}

FAULT(every_failure_to_open_leaves_nothing)
{
    rft_mover *mover = NULL;
    for (uint32_t nth = 1; nth <= REFIT_GROUPS + 2; nth++) {
        faulty_device_fail(all.device, FAULTY_EVENT_OPEN, nth, REFIT_ERR_DEVICE);
        assert_int_equal(rft_mover_open(all.device, 0, &mover, NULL), REFIT_ERR_DEVICE);
        assert_null(mover);
    }
    faulty_device_fail(all.device, FAULTY_STREAM_OPEN, 1, REFIT_ERR_DEVICE);
    assert_int_equal(rft_mover_open(all.device, 0, &mover, NULL), REFIT_ERR_DEVICE);
    assert_null(mover);
}

/* With a rate limit, so that the mover has every part. */
static refit_status move_once(refit_device *device, void *memory)
{
    rft_piece piece = {.to = memory, .from = "a", .bytes = 1};
    rft_plan plan;
    rft_mover *mover = NULL;
    RFT_TRY(rft_plan_open(&plan, &singly, NULL));
    refit_status status = rft_plan_fill(&plan, &piece, 1, NULL);
    if (status == REFIT_OK) status = rft_mover_open(device, UINT64_C(1) << 30, &mover, NULL);
    if (status == REFIT_OK) {
        status = rft_mover_start(mover, &plan, REFIT_STREAM_NONE, RFT_COPY_ANY, NULL);
    }
    if (mover != NULL) status = rft_keep_first(status, rft_mover_wait(mover, TIMEOUT_MS, NULL));
    status = rft_keep_first(status, rft_mover_close(mover, TIMEOUT_MS, NULL));
    rft_plan_close(&plan);
    return status;
}

TEST(every_failed_allocation_is_an_error)
{
    for (uint64_t nth = 1;; nth++) {
        void *memory = NULL;
        refit_device *device = NULL;
        failing_alloc_begin(nth);
        refit_status status = test_device_open("host", &device, NULL);
        if (status == REFIT_OK) status = refit_memory_alloc(device, 1, &memory, NULL);
        if (status == REFIT_OK) status = move_once(device, memory);
        if (memory != NULL) assert_ok(refit_memory_free(device, memory, NULL));
        assert_ok(refit_device_close(device, NULL));
        if (!failing_alloc_end()) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
}

int main(void)
{
    return test_run("mover");
}
