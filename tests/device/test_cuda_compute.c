/* Digests on a GPU when the driver fails or is late: the failure is returned, no sum is written
 * afterwards, and the next digest works. */
#include "tests/device/cuda_case.h"

#include "device/cuda/cuda_device.h"
#include "kernels/digest.h"

#define BYTES     4096u
#define UNTOUCHED UINT64_C(0x1234567)
#define UNDER_WAY 256u /* digests at once, at most */

static refit_error error;
static refit_stream_ref stream;
static rft_cu_ptr given; /* memory of the caller's own */
static void *memory;     /* the same */
static unsigned char zeros[BYTES];
static unsigned kept; /* objects that stay with the driver */

/* Digests on the calling thread end after a moment. */
static refit_device *open_hasty(void)
{
    refit_device *device = cuda_open();
    ((rft_cuda_device *)device->self)->config.offload_timeout_ms = 50;
    return device;
}

static int begin(void **state)
{
    (void)cuda_case_begin(state);
    kept = 0;
    gpu = open_hasty();
    assert_ok(refit_stream_open(gpu, &stream, &error));
    given = fake_cuda_memory(0, BYTES);
    memory = (void *)(uintptr_t)given;
    assert_ok(rft_device_zero(gpu, stream, memory, BYTES, &error));
    fake_cuda_settle();
    return 0;
}

static int end(void **state)
{
    fake_cuda_forget_faults();
    fake_cuda_go();
    fake_cuda_settle();
    fake_cuda_memory_free(given);
    assert_ok(refit_stream_close(gpu, stream, &error));
    cuda_close(gpu);
    assert_int_equal(fake_cuda_leaks(), kept);
    assert_string_equal(fake_cuda_violation(), "");
    return 0;
}

#define DIGEST_TEST(name) TEST_WITH(name, begin, end)

static refit_status digest_on(refit_stream_ref where, uint64_t *sum)
{
    return rft_device_digest(gpu, where, memory, BYTES, 0, sum, &error);
}

static void check_digest(void)
{
    uint64_t sum = UNTOUCHED;
    assert_ok(digest_on(stream, &sum));
    fake_cuda_settle();
    assert_int_equal(sum, rft_digest_part(zeros, BYTES, 0));
}

DIGEST_TEST(a_failed_call_is_returned_and_the_next_digest_works)
{
    static const char *const calls[] = {"cuMemsetD8Async", "cuLaunchKernel", "cuMemcpyAsync",
                                        "cuLaunchHostFunc"};
    check_digest();
    for (unsigned i = 0; i < 4; i++) {
        uint64_t sum = UNTOUCHED;
        fake_cuda_fail(calls[i], 1, 2, RFT_CU_UNKNOWN);
        assert_int_equal(digest_on(stream, &sum), REFIT_ERR_DEVICE);
        assert_int_equal(error.subsystem, RFT_CU_UNKNOWN);
        assert_int_equal(digest_on(REFIT_STREAM_NONE, &sum), REFIT_ERR_DEVICE);
        fake_cuda_settle();
        assert_int_equal(sum, UNTOUCHED);
        check_digest();
    }
}

/* More often than there are places for sums. */
DIGEST_TEST(failures_use_up_no_slots)
{
    uint64_t sum = UNTOUCHED;
    fake_cuda_fail("cuLaunchKernel", 1, UNDER_WAY + 1, RFT_CU_UNKNOWN);
    for (unsigned i = 0; i <= UNDER_WAY; i++) {
        assert_int_equal(digest_on(stream, &sum), REFIT_ERR_DEVICE);
        fake_cuda_settle();
    }
    check_digest();
}

DIGEST_TEST(memory_for_sums_may_be_had_later)
{
    uint64_t sum = UNTOUCHED;
    fake_cuda_fail("cuMemHostAlloc", 1, 1, RFT_CU_OUT_OF_MEMORY);
    assert_int_not_equal(digest_on(stream, &sum), REFIT_OK);
    fake_cuda_fail("cuMemAlloc", 1, 1, RFT_CU_OUT_OF_MEMORY);
    assert_int_equal(digest_on(stream, &sum), REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(fake_cuda_alive().host_memories, 0);
    check_digest();
}

DIGEST_TEST(too_many_at_once_are_refused_and_none_is_lost)
{
    enum { ON_EACH = 50, STREAMS = UNDER_WAY / ON_EACH + 1 }; /* more on one, and a call waits */
    static uint64_t sums[UNDER_WAY];
    refit_stream_ref streams[STREAMS];
    uint64_t extra = UNTOUCHED;
    for (unsigned i = 0; i < STREAMS; i++)
        assert_ok(refit_stream_open(gpu, &streams[i], &error));
    fake_cuda_stop();
    for (unsigned i = 0; i < UNDER_WAY; i++) {
        sums[i] = UNTOUCHED;
        assert_ok(digest_on(streams[i / ON_EACH], &sums[i]));
    }
    assert_int_equal(digest_on(stream, &extra), REFIT_ERR_LIMIT);
    assert_int_equal(sums[0], UNTOUCHED);
    fake_cuda_go();
    fake_cuda_settle();
    for (unsigned i = 0; i < UNDER_WAY; i++)
        assert_int_equal(sums[i], rft_digest_part(zeros, BYTES, 0));
    assert_int_equal(extra, UNTOUCHED);
    for (unsigned i = 0; i < STREAMS; i++)
        assert_ok(refit_stream_close(gpu, streams[i], &error));
    check_digest();
}

DIGEST_TEST(a_digest_that_comes_too_late_writes_nothing)
{
    uint64_t sum = UNTOUCHED;
    fake_cuda_stop();
    assert_int_equal(digest_on(REFIT_STREAM_NONE, &sum), REFIT_ERR_TIMEOUT);
    fake_cuda_go();
    fake_cuda_settle();
    assert_int_equal(sum, UNTOUCHED);
    check_digest();
}

/* A device of its own, and on it a digest that did not come in time. */
static refit_device *open_late(uint64_t *sum)
{
    refit_device *late = open_hasty();
    fake_cuda_stop();
    assert_int_equal(rft_device_digest(late, REFIT_STREAM_NONE, memory, BYTES, 0, sum, &error),
                     REFIT_ERR_TIMEOUT);
    return late;
}

DIGEST_TEST(a_device_that_closes_waits_for_a_late_digest)
{
    uint64_t sum = UNTOUCHED;
    refit_device *late = open_late(&sum);
    ((rft_cuda_device *)late->self)->config.offload_timeout_ms = TIMEOUT_MS;
    fake_cuda_go();
    assert_ok(refit_device_close(late, &error));
    assert_int_equal(sum, UNTOUCHED);
    check_digest();
}

/* Memory that the GPU still uses then stays with the driver; the close or the late digest,
 * whichever comes last, frees the memory of refit. */
DIGEST_TEST(a_device_closes_before_a_digest_that_hangs)
{
    uint64_t sum = UNTOUCHED;
    unsigned before = fake_cuda_leaks();
    refit_device *late = open_late(&sum);
    assert_ok(refit_device_close(late, &error));
    assert_string_equal(fake_cuda_violation(), "");
    fake_cuda_go();
    fake_cuda_settle();
    assert_int_equal(sum, UNTOUCHED);
    kept = fake_cuda_leaks() - before;
    assert_int_equal(kept, 4); /* both ends of the sums, the image, and our hold on the context */
    check_digest();
}

/* Nothing answers any more, and all of our side can still be freed. */
DIGEST_TEST(a_gpu_lost_under_a_digest_can_be_closed)
{
    uint64_t sum = UNTOUCHED;
    fake_cuda_stop();
    fake_cuda_fail_later("cuLaunchKernel", 1, RFT_CU_ILLEGAL_ADDRESS);
    assert_ok(digest_on(stream, &sum));
    fake_cuda_go();
    assert_int_equal(refit_stream_wait(gpu, stream, TIMEOUT_MS, &error), REFIT_ERR_DEVICE);
    assert_int_equal(sum, UNTOUCHED);
    assert_int_equal(digest_on(stream, &sum), REFIT_ERR_DEVICE);
}

int main(void)
{
    return test_run("cuda_compute");
}
