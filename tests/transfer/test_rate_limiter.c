/* Rate limiter: no batch begins before the bytes ahead of it were due; order stays; close does not
 * wait.
 */
#include "base/clock.h"
#include "tests/support/faulty_device.h"
#include "tests/support/test.h"
#include "tests/support/test_device.h"
#include "transfer/mover.h"

#define PIECES 480u
#define BYTES  UINT64_C(65536)
#define ALL    (4 * BYTES)

static refit_device *device;
static refit_device *plain; /* the one in it */
static rft_mover *mover;
static rft_plan plan;
static char *from; /* host memory */
static char *to;   /* device memory */
static rft_piece pieces[PIECES];

static int set_up(void **state)
{
    void *memory;
    assert_ok(faulty_device_open(test_device_spec("host"), &device, NULL));
    plain = faulty_device_inner(device);
    assert_ok(refit_memory_alloc(device, ALL, &memory, NULL));
    to = memory;
    from = test_host_alloc(plain, ALL);
    memset(from, 'a', ALL);
    test_fill(plain, to, 0, ALL);
    return 0;
}

static int tear_down(void **state)
{
    refit_status status = rft_mover_close(mover, TIMEOUT_MS, NULL);
    mover = NULL;
    rft_plan_close(&plan);
    test_host_free(plain, from, ALL);
    status = rft_keep_first(status, refit_memory_free(device, to, NULL));
    status = rft_keep_first(status, refit_device_close(device, NULL));
    return status == REFIT_OK && test_device_quiet() ? 0 : -1;
}

#define RATE_TEST(name) TEST_WITH(name, set_up, tear_down)

static char first_byte(uint64_t piece)
{
    char byte;
    test_read(plain, &byte, to + piece % 4 * BYTES, 1);
    return byte;
}

/* `count` copies of BYTES, round and round through `to`, every third a zeroing if `zeroes`. */
static void open_moves(uint64_t rate, uint32_t count, bool zeroes)
{
    rft_plan_limits limits = {.pieces = count,
                              .bytes = count * BYTES,
                              .piece_bytes = BYTES,
                              .batch_most = 16,
                              .batch_bytes = rft_mover_step_bytes(rate)};
    for (uint32_t i = 0; i < count; i++) {
        bool zero = zeroes && i % 3 == 2;
        pieces[i] = (rft_piece){.to = to + i % 4 * BYTES,
                                .from = zero ? NULL : from + (i + 1) % 4 * BYTES,
                                .bytes = BYTES};
    }
    assert_ok(rft_plan_open(&plan, &limits, NULL));
    assert_ok(rft_plan_fill(&plan, pieces, count, NULL));
    assert_ok(rft_mover_open(device, rate, &mover, NULL));
}

static refit_status start(void)
{
    return rft_mover_start(mover, &plan, REFIT_STREAM_NONE, RFT_COPY_STREAM, NULL);
}

TEST(a_step_crosses_the_link_in_a_moment)
{
    assert_int_equal(rft_mover_step_bytes(0), 0);
    assert_int_equal(rft_mover_step_bytes(MIB), 65536);
    assert_int_equal(rft_mover_step_bytes(1000 * MIB), 50 * MIB);
}

/* One call a batch, and the one that notes the end. */
RATE_TEST(every_batch_with_a_source_has_its_turn)
{
    open_moves(16 * MIB, 12, true);
    assert_int_equal(plan.batch_count, 8);
    assert_ok(start());
    assert_ok(rft_mover_wait(mover, TIMEOUT_MS, NULL));
    assert_int_equal(faulty_device_calls(device, FAULTY_STREAM_CALL), 4 + 1);
    assert_int_equal(faulty_device_calls(device, FAULTY_COPY_BATCH), 4);
    for (uint32_t i = 0; i < 4; i++) { /* the last four pieces: 8 and 11 zero, in order */
        assert_int_equal(first_byte(i), i == 0 || i == 3 ? 0 : 'a');
    }
}

RATE_TEST(nothing_is_faster_than_the_limit)
{
    open_moves(MIB, 5, false);
    assert_int_equal(plan.batch_count, 5);
    for (int i = 0; i < 2; i++) {
        int64_t began = rft_now();
        assert_ok(start());
        assert_ok(rft_mover_wait(mover, TIMEOUT_MS, NULL));
        assert_true(rft_mover_finished_at(mover) - began >= INT64_C(4) * 1000000000 / 16);
    }
}

/* 30 batches of 1 MiB: more than there may be calls, so that a step has two of them. */
RATE_TEST(an_operation_of_many_batches_has_few_steps)
{
    open_moves(64 * MIB, PIECES, false);
    assert_int_equal(plan.batch_count, 30);
    int64_t began = rft_now();
    assert_ok(start());
    assert_ok(rft_mover_wait(mover, TIMEOUT_MS, NULL));
    assert_int_equal(faulty_device_calls(device, FAULTY_STREAM_CALL), 15 + 1);
    assert_int_equal(faulty_device_calls(device, FAULTY_COPY_BATCH), 30);
    assert_true(rft_mover_finished_at(mover) - began >= INT64_C(14) * 2 * 1000000000 / 64);
}

/* Held up for the time of four steps it makes up for one, and keeps the pace from there. */
RATE_TEST(what_others_held_up_is_not_made_up_for)
{
    open_moves(MIB, 6, false);
    faulty_device_stop(device);
    assert_ok(start());
    assert_int_equal(rft_mover_wait(mover, 4 * 63, NULL), REFIT_ERR_TIMEOUT);
    int64_t went_on = rft_now();
    faulty_device_go(device);
    assert_ok(rft_mover_wait(mover, TIMEOUT_MS, NULL));
    assert_true(rft_mover_finished_at(mover) - went_on >= INT64_C(3) * 1000000000 / 16);
}

RATE_TEST(without_a_limit_no_call_is_made)
{
    open_moves(0, 5, false);
    assert_ok(start());
    assert_ok(rft_mover_wait(mover, TIMEOUT_MS, NULL));
    assert_int_equal(faulty_device_calls(device, FAULTY_STREAM_CALL), 1);
}

/* The second batch has its turn in a quarter of an hour. */
RATE_TEST(close_does_not_wait_for_the_rate_limit)
{
    open_moves(64, PIECES, false);
    assert_ok(start());
    while (faulty_device_calls(device, FAULTY_COPY_BATCH) == 0)
        assert_int_equal(rft_mover_wait(mover, 50, NULL), REFIT_ERR_TIMEOUT);
    assert_ok(rft_mover_close(mover, TIMEOUT_MS, NULL));
    mover = NULL;
    assert_int_equal(first_byte(0), 'a');
}

RATE_TEST(a_start_that_fails_does_not_wait_for_the_rate_limit)
{
    open_moves(MIB, PIECES, false);
    faulty_device_fail(device, FAULTY_COPY_BATCH, PIECES, REFIT_ERR_COPY);
    assert_int_equal(start(), REFIT_ERR_COPY);
    assert_ok(rft_mover_wait(mover, 0, NULL));
}

RATE_TEST(hurry_is_for_what_is_under_way)
{
    open_moves(MIB, 3, false);
    rft_mover_hurry(mover);
    int64_t began = rft_now();
    assert_ok(start());
    assert_ok(rft_mover_wait(mover, TIMEOUT_MS, NULL));
    assert_true(rft_mover_finished_at(mover) - began >= INT64_C(2) * 1000000000 / 16);
}

RATE_TEST(a_rate_limit_needs_streams_that_call_back)
{
    open_moves(MIB, 3, false);
    faulty_device_fail(device, FAULTY_STREAM_CALL, 1, REFIT_ERR_UNSUPPORTED);
    assert_refused(rft_mover_start(mover, &plan, REFIT_STREAM_NONE, RFT_COPY_STREAM, error),
                   REFIT_ERR_UNSUPPORTED, "offload.rate_limit");
    assert_int_equal(first_byte(0), 0);
}

int main(void)
{
    return test_run("rate limiter");
}
