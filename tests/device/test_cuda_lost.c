/* The CUDA device when the GPU is lost, the driver fails or work is late: every call returns the
 * failure, nothing leaks, and all objects can be closed. */
#include "tests/device/cuda_case.h"

#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "device/cuda/cuda_device.h"

#define PAGE 4096u

/* A device with one of everything open on it. */
typedef struct bench {
    refit_device *device;
    refit_stream_ref stream;
    rft_event *event;
    char *memory;
    char *host; /* pinned */
} bench;

static bench on;

static void bench_open(void)
{
    on.device = cuda_open();
    on.host = aligned_alloc(PAGE, PAGE);
    memset(on.host, 1, PAGE);
    assert_ok(rft_device_host_pin(on.device, on.host, PAGE, false, NULL));
    assert_ok(refit_stream_open(on.device, &on.stream, NULL));
    assert_ok(rft_device_event_open(on.device, &on.event, NULL));
    assert_ok(refit_memory_alloc(on.device, PAGE, (void **)&on.memory, NULL));
}

/* offload.timeout_ms, from now on. */
static void set_timeout(uint32_t timeout_ms)
{
    rft_cuda_device *cuda = on.device->self;
    cuda->config.offload_timeout_ms = timeout_ms;
    on.device->wait_most_ms = timeout_ms;
}

/* All releases succeed, whatever has happened. */
static void bench_close(void)
{
    rft_device_event_close(on.device, on.event);
    assert_ok(refit_memory_free(on.device, on.memory, NULL));
    assert_ok(refit_stream_close(on.device, on.stream, NULL));
    rft_device_host_unpin(on.device, on.host, PAGE);
    cuda_close(on.device);
    free(on.host);
}

static int begin(void **state)
{
    (void)cuda_case_begin(state);
    bench_open();
    return 0;
}

static int end(void **state)
{
    bench_close();
    return cuda_case_end(state);
}

#define BENCH(name) TEST_WITH(name, begin, end)

/* All of it anew, for the next of several rounds. */
static void begin_again(void)
{
    (void)end(NULL);
    (void)begin(NULL);
}

static void copy_works(void)
{
    memset(on.host, 7, PAGE);
    assert_ok(refit_stream_copy(on.device, on.stream, on.memory, on.host, PAGE, NULL));
    assert_ok(rft_device_zero(on.device, on.stream, on.memory, 1, NULL));
    assert_ok(refit_stream_copy(on.device, on.stream, on.host, on.memory, PAGE, NULL));
    assert_ok(refit_stream_wait(on.device, on.stream, TIMEOUT_MS, NULL));
    assert_int_equal(on.host[0], 0);
    assert_int_equal(on.host[1], 7);
}

static void assert_every_call_refuses(refit_status status, const char *words)
{
    refit_device *device = on.device;
    void *memory;
    refit_stream_ref stream;
    rft_event *event;
    assert_refused(refit_memory_alloc(device, 1, &memory, error), status, words);
    assert_refused(rft_device_memory_check(device, on.memory, 1, NULL, error), status, words);
    assert_refused(rft_device_host_pin(device, &event, 1, false, error), status, words);
    assert_refused(refit_stream_open(device, &stream, error), status, words);
    assert_refused(refit_stream_copy(device, on.stream, on.memory, on.host, PAGE, error), status,
                   words);
    assert_refused(rft_device_zero(device, on.stream, on.memory, PAGE, error), status, words);
    assert_refused(refit_stream_copy(device, REFIT_STREAM_NONE, on.memory, on.host, PAGE, error),
                   status, words);
    assert_refused(refit_stream_call(device, on.stream, free, NULL, error), status, words);
    assert_refused(refit_stream_wait(device, on.stream, 0, error), status, words);
    assert_refused(rft_device_event_open(device, &event, error), status, words);
    assert_refused(rft_device_event_record(device, on.event, on.stream, error), status, words);
    assert_refused(rft_device_event_join(device, on.event, on.stream, error), status, words);
    assert_refused(rft_device_event_join(device, on.event, REFIT_STREAM_NONE, error), status,
                   words);
    assert_refused(rft_device_event_wait(device, on.event, 0, error), status, words);
}

BENCH(every_call_on_a_lost_gpu_fails_and_it_can_be_closed)
{
    static const rft_cu_result results[] = {RFT_CU_ILLEGAL_ADDRESS, RFT_CU_ECC_UNCORRECTABLE,
                                            RFT_CU_LAUNCH_FAILED,   RFT_CU_HARDWARE_STACK_ERROR,
                                            RFT_CU_CONTAINED,       RFT_CU_ASSERT,
                                            RFT_CU_LAUNCH_TIMEOUT,  RFT_CU_CONTEXT_IS_DESTROYED};
    for (unsigned i = 0; i < COUNT_OF(results); i++) {
        refit_device_info info = {.size = sizeof info};
        begin_again();
        copy_works();
        fake_cuda_lose(0, results[i]);
        assert_every_call_refuses(REFIT_ERR_DEVICE, "only a new process helps");
        assert_ok(refit_device_describe(on.device, &info, NULL));
    }
}

/* As when the process ends and its objects are closed after the driver has gone, or when the GPU
 * was reset: the context cannot even be made current. */
CUDA_TEST(a_context_that_is_gone_can_be_closed)
{
    static const rft_cu_result results[] = {RFT_CU_DEINITIALIZED, RFT_CU_CONTEXT_IS_DESTROYED,
                                            RFT_CU_ASSERT};
    static const char *const calls[] = {"cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode"};
    for (unsigned i = 0; i < 6; i++) {
        void *memory;
        fake_cuda_reset();
        bench_open();
        fake_cuda_fail(calls[i % 2], 1, 1000, results[i / 2]);
        assert_refused(refit_memory_alloc(on.device, 1, &memory, error), REFIT_ERR_DEVICE, "; ");
        refit_status status = refit_memory_free(on.device, on.host, NULL); /* not the GPU's */
        assert_invalid(status);
        bench_close();
    }
    fake_cuda_reset();
}

BENCH(work_that_fails_in_the_queue_loses_the_gpu)
{
    fake_cuda_stop();
    fake_cuda_fail_later("cuMemsetD8Async", 1, RFT_CU_ILLEGAL_ADDRESS);
    assert_ok(rft_device_zero(on.device, on.stream, on.memory, PAGE, NULL));
    assert_ok(rft_device_event_record(on.device, on.event, on.stream, NULL));
    assert_int_equal(rft_device_event_wait(on.device, on.event, 0, NULL), REFIT_ERR_TIMEOUT);
    fake_cuda_go();
    assert_refused(rft_device_event_wait(on.device, on.event, TIMEOUT_MS, error), REFIT_ERR_DEVICE,
                   "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_refused(refit_stream_wait(on.device, on.stream, TIMEOUT_MS, error), REFIT_ERR_DEVICE,
                   "only a new process helps");
}

BENCH(a_full_gpu_says_what_is_free_and_recovers)
{
    void *memory;
    fake_cuda_set_taken(0, 64 * MIB - PAGE - 1000); /* by another process */
    assert_refused(refit_memory_alloc(on.device, 2000, &memory, error), REFIT_ERR_DEVICE_MEMORY,
                   "2048 bytes were asked for, 1000 of 67108864 are free");
    assert_refused(refit_memory_alloc(on.device, 2000, &memory, error), REFIT_ERR_DEVICE_MEMORY,
                   "empty_cache()");
    fake_cuda_set_taken(0, 0);
    assert_ok(refit_memory_alloc(on.device, 2000, &memory, NULL));
    assert_ok(refit_memory_free(on.device, memory, NULL));
}

BENCH(a_stream_with_work_is_closed_when_it_is_done)
{
    refit_stream_ref stream;
    set_timeout(5);
    assert_ok(refit_stream_open(on.device, &stream, NULL));
    fake_cuda_stop();
    assert_ok(rft_device_zero(on.device, stream, on.memory, PAGE, NULL));
    assert_refused(refit_stream_close(on.device, stream, error), REFIT_ERR_TIMEOUT,
                   "stays open: close it again later");
    assert_refused(refit_stream_wait(on.device, stream, 1, error), REFIT_ERR_TIMEOUT, "goes on");
    assert_ok(rft_device_event_record(on.device, on.event, stream, NULL));
    assert_refused(rft_device_event_join(on.device, on.event, REFIT_STREAM_NONE, error),
                   REFIT_ERR_TIMEOUT, "goes on");
    fake_cuda_go();
    set_timeout(TIMEOUT_MS);
    assert_ok(refit_stream_close(on.device, stream, NULL));
}

typedef struct closing {
    refit_device *device;
    refit_stream_ref stream;
    refit_status status;
} closing;

static void *close_stream(void *user)
{
    closing *it = user;
    it->status = refit_stream_close(it->device, it->stream, NULL);
    return NULL;
}

BENCH(a_close_that_waits_for_work_blocks_no_other_call)
{
    void *base;
    uint64_t granule;
    rft_thread thread;
    closing it = {.device = on.device};
    assert_ok(refit_stream_open(on.device, &it.stream, NULL));
    fake_cuda_stop_stream(it.stream.native);
    assert_ok(rft_device_zero(on.device, it.stream, on.memory, PAGE, NULL));
    assert_ok(rft_thread_start(&thread, "closes", close_stream, &it, NULL));
    rft_looks looks = rft_looks_until(rft_deadline(TIMEOUT_MS));
    while (fake_cuda_calls("cuStreamQuery") == 0 && rft_poll_again(&looks)) {
    }
    assert_ok(rft_device_reserve(on.device, MIB, &base, &granule, NULL));
    assert_ok(rft_device_reserve_add_stream(on.device, base, on.stream, NULL));
    assert_ok(rft_device_commit(on.device, base, granule, NULL));
    assert_ok(rft_device_decommit(on.device, base, granule, NULL, NULL));
    rft_device_unreserve(on.device, base, MIB);
    fake_cuda_go_stream(it.stream.native);
    rft_thread_join(thread);
    assert_ok(it.status); /* it did not give up before all that was done */
}

/* The internal stream is dropped, and the next call gets another. */
BENCH(work_on_the_calling_thread_has_a_deadline)
{
    set_timeout(5);
    fake_cuda_stop();
    assert_refused(refit_stream_copy(on.device, REFIT_STREAM_NONE, on.memory, on.host, PAGE, error),
                   REFIT_ERR_TIMEOUT, "goes on");
    fake_cuda_go();
    fake_cuda_settle(); /* what has timed out goes on */
    set_timeout(TIMEOUT_MS);
    memset(on.host, 3, PAGE);
    assert_ok(rft_device_zero(on.device, REFIT_STREAM_NONE, on.memory, PAGE, NULL));
    assert_ok(refit_stream_copy(on.device, REFIT_STREAM_NONE, on.host, on.memory, PAGE, NULL));
    assert_int_equal(on.host[0], 0);
}

/* Everything once, up to the first failure; what was opened is closed. */
static refit_status do_all(refit_error *error)
{
    refit_status status = REFIT_OK;
    refit_device *device = on.device;
    void *memory = NULL;
    refit_stream_ref stream;
    rft_event *event = NULL;
    RFT_TRY(refit_memory_alloc(device, PAGE, &memory, error));
    RFT_TRY_GOTO(refit_stream_open(device, &stream, error), free_memory);
    RFT_TRY_GOTO(rft_device_event_open(device, &event, error), close_stream);
    RFT_TRY_GOTO(rft_device_memory_check(device, memory, PAGE, NULL, error), close_event);
    RFT_TRY_GOTO(rft_device_zero(device, stream, memory, PAGE, error), close_event);
    RFT_TRY_GOTO(refit_stream_copy(device, stream, on.host, memory, PAGE, error), close_event);
    RFT_TRY_GOTO(rft_device_event_record(device, event, stream, error), close_event);
    RFT_TRY_GOTO(rft_device_event_join(device, event, on.stream, error), close_event);
    RFT_TRY_GOTO(rft_device_event_wait(device, event, TIMEOUT_MS, error), close_event);
    RFT_TRY_GOTO(rft_device_zero(device, REFIT_STREAM_NONE, memory, PAGE, error), close_event);
    RFT_TRY_GOTO(refit_stream_call(device, stream, free, NULL, error), close_event);

close_event:
    fake_cuda_settle();
    rft_device_event_close(device, event);
close_stream:
    status = rft_keep_first(status, refit_stream_close(device, stream, NULL));
    if (status != REFIT_OK) (void)!refit_stream_close(device, stream, NULL);
free_memory:
    status = rft_keep_first(status, refit_memory_free(device, memory, NULL));
    if (status != REFIT_OK) (void)!refit_memory_free(device, memory, NULL);
    return status;
}

/* No failure of a single call is kept: the device works right after it. */
BENCH(a_call_that_fails_once_leaves_the_device_usable)
{
    static const char *const symbols[] = {"cuMemAlloc",
                                          "cuMemFree",
                                          "cuMemGetAddressRange",
                                          "cuPointerGetAttributes",
                                          "cuMemcpyAsync",
                                          "cuMemsetD8Async",
                                          "cuStreamCreateWithPriority",
                                          "cuStreamQuery",
                                          "cuStreamGetCtx",
                                          "cuLaunchHostFunc",
                                          "cuEventCreate",
                                          "cuEventRecord",
                                          "cuEventQuery",
                                          "cuStreamWaitEvent",
                                          "cuCtxPushCurrent",
                                          "cuStreamIsCapturing"};
    for (unsigned i = 0; i < COUNT_OF(symbols); i++) {
        begin_again();
        for (unsigned nth = 1; nth <= 3; nth++) {
            fake_cuda_fail(symbols[i], nth, 1, RFT_CU_UNKNOWN);
            (void)do_all(NULL);
            fake_cuda_forget_faults();
            refit_error error = {0};
            assert_ok(do_all(&error));
            copy_works();
        }
    }
}

BENCH(memory_that_could_not_be_freed_is_kept_on_the_books)
{
    fake_cuda_fail("cuMemFree", 1, 1, RFT_CU_INVALID_VALUE);
    assert_refused(refit_memory_free(on.device, on.memory, error), REFIT_ERR_DEVICE,
                   "could not be freed");
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(on.device, &info, NULL));
    assert_int_equal(info.used_bytes, PAGE);
}

/* In the child only the exit status tells. */
static int refuses_in_child(void)
{
    void *memory;
    refit_error error = {0};
    char byte = 0;
    if (refit_memory_alloc(on.device, 1, &memory, &error) != REFIT_ERR_STATE) return 1;
    if (strstr(error.text, "does not survive a fork") == NULL) return 2;
    if (rft_device_host_pin(on.device, &byte, 1, false, NULL) != REFIT_ERR_STATE) return 3;
    if (refit_stream_open(on.device, &on.stream, NULL) != REFIT_ERR_STATE) return 4;
    if (rft_device_zero(on.device, REFIT_STREAM_NONE, on.memory, 1, NULL) != REFIT_ERR_STATE) {
        return 5;
    }
    if (refit_device_close(on.device, NULL) != REFIT_ERR_BUSY) return 6; /* the memory */
    refit_device *device;
    if (refit_device_open("cuda:0", NULL, &device, &error) != REFIT_ERR_DEVICE) return 7;
    return strstr(error.text, "spawn") == NULL ? 8 : 0;
}

BENCH(a_forked_child_is_refused_and_harms_nothing)
{
    refit_device *empty = cuda_open();
    pid_t child = fork();
    if (child == 0) {
        int code = refuses_in_child();
        if (code == 0 && refit_device_close(empty, NULL) != REFIT_OK) code = 9;
        _exit(code);
    }
    assert_child_succeeds(child);
    assert_ok(rft_device_zero(on.device, REFIT_STREAM_NONE, on.memory, PAGE, NULL));
    cuda_close(empty);
}

int main(void)
{
    return test_run("cuda_lost");
}
