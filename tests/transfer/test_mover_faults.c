/* Mover on a device that fails: each failure is returned to its own waiters, and the next start
 * works.
 */
#include <refit/offload.h>

#include "tests/support/failing_alloc.h"
#include "tests/support/faulty_device.h"
#include "tests/support/test.h"
#include "tests/support/test_device.h"
#include "transfer/mover.h"

#define PIECES 4
#define BYTES  1000
#define ALL    (PIECES * BYTES)

typedef struct fixture {
    refit_device *device;
    refit_device *plain; /* the one in it */
    refit_stream_ref stream;
    rft_mover *mover;
    rft_plan plan;
    char *from; /* host memory */
    char *to;   /* device memory, and one byte more */
} fixture;

static fixture all;

static const rft_plan_limits limits = {
    .pieces = PIECES, .bytes = PIECES * BYTES, .piece_bytes = BYTES, .batch_most = 1};

/* One copy and one batch a piece; groups as given. */
static void fill_plan(const uint32_t *groups)
{
    rft_piece pieces[PIECES];
    for (uint32_t i = 0; i < PIECES; i++) {
        pieces[i] = (rft_piece){.to = all.to + i * BYTES,
                                .from = all.from + i * BYTES,
                                .bytes = BYTES,
                                .group = groups[i]};
    }
    assert_ok(rft_plan_fill(&all.plan, pieces, PIECES, NULL));
}

static const uint32_t grouped[PIECES] = {0, 0, 1, 2};
static const uint32_t mixed[PIECES] = {0, 1, 0, 2};

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
    assert_ok(refit_stream_open(all.device, &all.stream, NULL));
    assert_ok(rft_mover_open(all.device, 0, &all.mover, NULL));
    assert_ok(rft_plan_open(&all.plan, &limits, NULL));
    fill_plan(grouped);
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

static refit_status start(refit_error *error)
{
    return rft_mover_start(all.mover, &all.plan, all.stream, RFT_COPY_STREAM, error);
}

static refit_status wait_group(uint32_t group)
{
    return rft_mover_wait_group(all.mover, group, TIMEOUT_MS, NULL);
}

static void assert_next_start_works(void)
{
    faulty_device_reset(all.device);
    test_fill(all.plain, all.to, 0, ALL);
    assert_ok(start(NULL));
    assert_ok(rft_mover_wait(all.mover, TIMEOUT_MS, NULL));
    assert_device_equal(all.plain, all.to, all.from, ALL);
}

static void copy_that_breaks_fails_its_group_and_the_whole(void **state)
{
    faulty_device_fail_later(all.device, FAULTY_COPY_BATCH, 3, REFIT_ERR_COPY);
    assert_ok(start(NULL));
    assert_ok(wait_group(0));
    assert_int_equal(wait_group(1), REFIT_ERR_COPY);
    assert_ok(wait_group(2));
    for (int i = 0; i < 2; i++) { /* every time the same */
        refit_error error = {0};
        assert_int_equal(rft_mover_wait(all.mover, TIMEOUT_MS, &error), REFIT_ERR_COPY);
        assert_int_equal(error.status, REFIT_ERR_COPY);
        assert_int_not_equal(error.text[0], '\0');
    }
    assert_int_equal(wait_group(1), REFIT_ERR_COPY);
    assert_next_start_works();
}

/* The failure of group 0's first batch stands with the event of group 1, which lies between. */
static void failure_before_another_group_s_event_is_not_lost(void **state)
{
    fill_plan(mixed);
    faulty_device_fail_later(all.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
    assert_ok(start(NULL));
    assert_int_equal(wait_group(0), REFIT_ERR_COPY);
    assert_ok(wait_group(2));
    assert_int_equal(rft_mover_wait(all.mover, TIMEOUT_MS, NULL), REFIT_ERR_COPY);
    assert_next_start_works();
}

static void failure_of_the_caller_s_work_is_the_operation_s(void **state)
{
    faulty_device_fail_later(all.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
    assert_ok(refit_stream_copy(all.device, all.stream, all.to + ALL, all.from, 1, NULL));
    assert_ok(start(NULL));
    assert_int_equal(wait_group(1), REFIT_ERR_COPY);
    assert_int_equal(rft_mover_wait(all.mover, TIMEOUT_MS, NULL), REFIT_ERR_COPY);
    assert_next_start_works();
}

/* A caller that is told of the failure may reuse the group's memory: no copy may still write there.
 */
static void failure_is_returned_once_the_group_s_copies_are_over(void **state)
{
    faulty_device_fail_later(all.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
    assert_ok(refit_stream_copy(all.device, all.stream, all.to + ALL, all.from, 1, NULL));
    faulty_device_stop(all.device);
    assert_ok(start(NULL));
    assert_ok(refit_stream_wait(all.device, all.stream, TIMEOUT_MS, NULL));
    assert_int_equal(rft_mover_wait_group(all.mover, 1, 0, NULL), REFIT_ERR_TIMEOUT);
    faulty_device_go(all.device);
    assert_int_equal(wait_group(1), REFIT_ERR_COPY);
    assert_int_equal(rft_mover_wait(all.mover, TIMEOUT_MS, NULL), REFIT_ERR_COPY);
    assert_next_start_works();
}

/* Each call that a start makes fails once: the start fails, nothing is under way, and no waiter is
 * told. */
static void every_failure_to_issue_is_returned_and_drained(void **state)
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
            assert_int_equal(start(&error), REFIT_ERR_DEVICE);
            assert_int_equal(error.status, REFIT_ERR_DEVICE);
            test_fill(all.plain, all.to, 'x', ALL); /* no copy comes in between */
            assert_ok(rft_mover_wait(all.mover, 0, NULL));
            assert_int_equal(rft_mover_finished_at(all.mover), 0);
            assert_next_start_works();
        }
    }
}

/* No event can be recorded any more: the stream is closed to wait for it, and opened again. */
static void stream_that_takes_no_event_is_replaced(void **state)
{
    faulty_device_fail_times(all.device, FAULTY_EVENT_RECORD, 2, FAULTY_ALWAYS, REFIT_ERR_DEVICE);
    assert_int_equal(start(NULL), REFIT_ERR_DEVICE);
    assert_int_not_equal(faulty_device_calls(all.device, FAULTY_STREAM_CLOSE), 0);
    faulty_device_fail(all.device, FAULTY_STREAM_OPEN, 1, REFIT_ERR_DEVICE);
    assert_int_equal(start(NULL), REFIT_ERR_DEVICE);
    assert_next_start_works();
}

static void what_cannot_be_waited_for_breaks_the_mover(void **state)
{
    faulty_device_fail_times(all.device, FAULTY_EVENT_RECORD, 2, FAULTY_ALWAYS, REFIT_ERR_DEVICE);
    faulty_device_fail(all.device, FAULTY_STREAM_CLOSE, 1, REFIT_ERR_DEVICE);
    assert_int_equal(start(NULL), REFIT_ERR_DEVICE);
    faulty_device_reset(all.device);
    assert_int_equal(rft_mover_wait(all.mover, 0, NULL), REFIT_ERR_DEVICE);
    assert_int_equal(wait_group(0), REFIT_ERR_DEVICE);
    assert_int_equal(rft_mover_join(all.mover, all.stream, NULL), REFIT_ERR_DEVICE);
    assert_int_equal(rft_mover_check(all.mover, NULL), REFIT_ERR_DEVICE);
    assert_int_equal(start(NULL), REFIT_ERR_DEVICE);
}

/* What broke it may have been a timeout: that is not one of the close. */
static void a_mover_that_a_timeout_broke_can_be_closed(void **state)
{
    refit_error error = {0};
    assert_ok(rft_mover_check(all.mover, NULL));
    faulty_device_fail(all.device, FAULTY_COPY_BATCH, 2, REFIT_ERR_TIMEOUT);
    faulty_device_fail_times(all.device, FAULTY_EVENT_RECORD, 2, FAULTY_ALWAYS, REFIT_ERR_DEVICE);
    faulty_device_fail(all.device, FAULTY_STREAM_CLOSE, 1, REFIT_ERR_DEVICE);
    assert_int_equal(start(NULL), REFIT_ERR_TIMEOUT);
    faulty_device_reset(all.device);
    assert_int_equal(rft_mover_check(all.mover, &error), REFIT_ERR_TIMEOUT);
    assert_true(error.text[0] != '\0');
}

/* A wait that fails by itself is not the end of the operation. */
static void wait_that_fails_does_not_complete_the_operation(void **state)
{
    faulty_device_stop(all.device);
    assert_ok(start(NULL));
    faulty_device_fail(all.device, FAULTY_EVENT_WAIT, 1, REFIT_ERR_DEVICE);
    assert_int_equal(rft_mover_wait(all.mover, 0, NULL), REFIT_ERR_DEVICE);
    assert_int_equal(start(NULL), REFIT_ERR_STATE);
    faulty_device_fail(all.device, FAULTY_EVENT_WAIT, 1, REFIT_ERR_DEVICE);
    assert_int_equal(rft_mover_wait_group(all.mover, 1, 0, NULL), REFIT_ERR_DEVICE);
    faulty_device_go(all.device);
    assert_ok(rft_mover_wait(all.mover, TIMEOUT_MS, NULL));
    assert_next_start_works();
}

/* A device whose streams cannot call back: the time is that of the first look. */
static void the_first_look_notes_the_end_where_streams_cannot_call(void **state)
{
    faulty_device_fail_times(all.device, FAULTY_STREAM_CALL, 1, FAULTY_ALWAYS,
                             REFIT_ERR_UNSUPPORTED);
    assert_ok(start(NULL));
    assert_ok(rft_mover_wait(all.mover, TIMEOUT_MS, NULL));
    int64_t finished = rft_mover_finished_at(all.mover);
    assert_true(finished > 0);
    assert_ok(rft_mover_wait(all.mover, TIMEOUT_MS, NULL));
    assert_int_equal(rft_mover_finished_at(all.mover), finished);
}

static void stream_that_does_not_close_keeps_the_mover(void **state)
{
    faulty_device_fail(all.device, FAULTY_STREAM_CLOSE, 1, REFIT_ERR_DEVICE);
    assert_int_equal(rft_mover_close(all.mover, TIMEOUT_MS, NULL), REFIT_ERR_DEVICE);
    assert_next_start_works();
}

static void every_failure_to_open_leaves_nothing(void **state)
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
    RFT_TRY(rft_plan_open(&plan, &limits, NULL));
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

static void every_failed_allocation_is_an_error(void **state)
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

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(copy_that_breaks_fails_its_group_and_the_whole),
        TEST(failure_before_another_group_s_event_is_not_lost),
        TEST(failure_of_the_caller_s_work_is_the_operation_s),
        TEST(failure_is_returned_once_the_group_s_copies_are_over),
        TEST(every_failure_to_issue_is_returned_and_drained),
        TEST(stream_that_takes_no_event_is_replaced),
        TEST(what_cannot_be_waited_for_breaks_the_mover),
        TEST(a_mover_that_a_timeout_broke_can_be_closed),
        TEST(wait_that_fails_does_not_complete_the_operation),
        TEST(the_first_look_notes_the_end_where_streams_cannot_call),
        TEST(stream_that_does_not_close_keeps_the_mover),
        TEST(every_failure_to_open_leaves_nothing),
        cmocka_unit_test(every_failed_allocation_is_an_error),
    };
    return cmocka_run_group_tests_name("mover_faults", tests, NULL, NULL);
}
