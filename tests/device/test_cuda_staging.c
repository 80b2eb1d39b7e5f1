/* Small copies on a GPU are in stream order, serve several streams at once and never wait for
 * another stream. A failure costs speed, or fails one batch and no more. */
#include "tests/device/copy_rig.h"

#include "base/thread.h"
#include "device/cuda/cuda_bounce.h"

static const char *const gathering[] = {"offload.small_bytes=32KiB", "offload.staging_bytes=1MiB",
                                        NULL};

static void open_small(void)
{
    rig_open(4 * MIB, gathering);
    rig_lay(4000, 900, 124, 124, 60);
}

/* ---- Order ------------------------------------------------------------------------------- */

/* The stream stands while both batches are put; each sees what the one before has left. */
RIG_TEST(batches_follow_each_other_on_their_stream)
{
    open_small();
    rig_fill(true, 1);
    fake_cuda_stop_stream(rig.stream.native);
    assert_ok(rig_put(&rig, true, RFT_COPY_STREAM));
    assert_ok(rft_device_zero(rig.device, rig.stream, rig.memory, rig.bytes, &rig.error));
    assert_ok(rig_put(&rig, false, RFT_COPY_STREAM));
    fake_cuda_go_stream(rig.stream.native);
    rig_wait(&rig);
    rig_check(true, 1);
    for (uint32_t i = 0; i < rig.count; i++) {
        const char *there = fake_cuda_bytes((uintptr_t)rig.back[i].to, rig.back[i].bytes);
        assert_memory_equal(there, rig.back[i].from, rig.back[i].bytes);
    }
}

/* What the host side holds when the stream gets there, not when the batch was put. */
RIG_TEST(sources_are_read_in_stream_order)
{
    open_small();
    for (uint64_t small = 0; small < 2; small++) {
        for (uint32_t i = 0; i < rig.count; i++)
            rig.back[i].known_memory = small;
        rig_fill(false, 1);
        fake_cuda_stop_stream(rig.stream.native);
        assert_ok(rig_put(&rig, false, RFT_COPY_STREAM));
        fake_cuda_settle();
        rig_fill(false, 2);
        fake_cuda_go_stream(rig.stream.native);
        rig_wait(&rig);
        rig_check(false, 2);
    }
}

/* Then the driver may read at once, and the fake one tells of sources that change afterwards. */
static bool is_read_at_once(void)
{
    rig_fill(false, 1);
    fake_cuda_stop_stream(rig.stream.native);
    assert_ok(rig_put(&rig, false, RFT_COPY_ANY));
    fake_cuda_settle();
    char first = rig.host[0];
    rig.host[0] = (char)(first + 1);
    fake_cuda_go_stream(rig.stream.native);
    rig_wait(&rig);
    bool early = *(char *)fake_cuda_bytes((uintptr_t)rig.memory, 1) == first;
    fake_cuda_forgive();
    return early;
}

RIG_TEST(host_memory_may_be_read_at_once_where_that_is_allowed)
{
    open_small();
    assert_true(is_read_at_once()); /* gathered */
    for (uint32_t i = 0; i < rig.count; i++)
        rig.back[i].known_memory = false;
    assert_true(is_read_at_once()); /* by the engines */
}

/* One source on the device: work before the batch writes it. */
RIG_TEST(memory_of_the_device_is_never_read_at_once)
{
    for (int small = 0; small < 2; small++) {
        open_small();
        rig_fill(false, 1);
        for (uint32_t i = 0; i < rig.count; i++) {
            if (i % 40 >= 20) rig.back[i] = rig.out[i];
            rig.back[i].known_memory = small;
        }
        fake_cuda_stop_stream(rig.stream.native);
        assert_ok(rft_device_zero(rig.device, rig.stream, rig.memory, rig.bytes, &rig.error));
        assert_ok(rig_put(&rig, false, RFT_COPY_ANY));
        fake_cuda_settle();
        fake_cuda_go_stream(rig.stream.native);
        rig_wait(&rig);
        for (uint32_t i = 0; i < rig.count; i++) {
            if (i % 40 < 20) continue;
            const char *here = rig.back[i].to;
            assert_int_equal(here[0], 0);
            assert_int_equal(here[rig.back[i].bytes - 1], 0);
        }
        rig_case_again();
    }
}

/* ---- Several streams --------------------------------------------------------------------- */

#define STREAMS 5

/* More streams than bounce buffers, and each stands in turn: the others get through. */
RIG_TEST(no_stream_waits_for_another)
{
    copy_rig parts[STREAMS];
    open_small();
    rig_fill(true, 1);
    for (uint32_t i = 0; i < STREAMS; i++)
        parts[i] = rig_part(i, STREAMS);
    for (int held = 0; held < STREAMS; held++) {
        fake_cuda_stop_stream(parts[held].stream.native);
        for (int i = 0; i < STREAMS; i++)
            assert_ok(rig_put(&parts[(held + i) % STREAMS], true, RFT_COPY_STREAM));
        for (int i = 1; i < STREAMS; i++)
            rig_wait(&parts[(held + i) % STREAMS]);
        fake_cuda_go_stream(parts[held].stream.native);
        rig_wait(&parts[held]);
    }
    for (int i = 0; i < STREAMS; i++)
        assert_ok(refit_stream_close(rig.device, parts[i].stream, &rig.error));
    rig_check(true, 1);
    assert_int_not_equal(fake_cuda_calls("cuLaunchKernel"), 0);
}

typedef struct worker {
    rft_thread thread;
    copy_rig part;
    refit_status status;
} worker;

static void *run_worker(void *user)
{
    worker *self = user;
    copy_rig *part = &self->part;
    for (int i = 0; i < 10 && self->status == REFIT_OK; i++) {
        bool out = i % 2 == 0;
        self->status = rig_put(part, out, out ? RFT_COPY_STREAM : RFT_COPY_ANY);
        if (self->status == REFIT_OK) {
            self->status = refit_stream_wait(part->device, part->stream, TIMEOUT_MS, &part->error);
        }
    }
    return NULL;
}

/* Every thread has a stream and a quarter of the memory. */
RIG_TEST(threads_copy_at_once)
{
    enum { WORKERS = 4 };
    worker workers[WORKERS];
    open_small();
    rig_fill(true, 3);
    for (uint32_t i = 0; i < WORKERS; i++) {
        workers[i] = (worker){.part = rig_part(i, WORKERS)};
        assert_ok(rft_thread_start(&workers[i].thread, "copier", run_worker, &workers[i], NULL));
    }
    for (uint32_t i = 0; i < WORKERS; i++) {
        rft_thread_join(workers[i].thread);
        assert_ok(workers[i].status);
        assert_ok(refit_stream_close(rig.device, workers[i].part.stream, &rig.error));
    }
    rig_check(true, 3);
}

/* The stream stands, and more is put on it than the table holds: the engines take the rest. */
RIG_TEST(a_stream_that_stands_for_long_is_not_waited_for)
{
    rig_open(2 * MIB, gathering);
    rig_lay(RIG_BATCH, 100, 20, 20, 20);
    rig_fill(true, 1);
    fake_cuda_stop_stream(rig.stream.native);
    for (int i = 0; i < 9; i++)
        assert_ok(rig_put(&rig, true, RFT_COPY_STREAM));
    assert_int_not_equal(fake_cuda_calls("cuMemcpyBatchAsync"), 0);
    fake_cuda_go_stream(rig.stream.native);
    rig_wait(&rig);
    rig_check(true, 1);
    rig_round(2);
}

/* ---- What is missing --------------------------------------------------------------------- */

RIG_TEST(without_kernels_the_engines_do_the_work)
{
    fake_cuda_fail("cuLibraryLoadData", 1, 2, RFT_CU_INVALID_IMAGE);
    open_small();
    rig_round(1);
    assert_int_equal(rig_small_bytes(), 0);
    assert_int_equal(fake_cuda_alive().host_memories, 0);
}

RIG_TEST(without_memory_the_engines_do_the_work_for_now)
{
    open_small();
    fake_cuda_set_taken(0, 60 * MIB); /* of 64 */
    for (unsigned i = 0; i < 8; i++)
        rig_round(i);
    assert_int_equal(fake_cuda_calls("cuLaunchKernel"), 0);
    assert_int_equal(heard_count("small copies"), 1);
    fake_cuda_set_taken(0, 0);
    for (unsigned i = 0; i < 8; i++)
        rig_round(i);
    assert_int_not_equal(fake_cuda_calls("cuLaunchKernel"), 0);
    assert_int_equal(heard_count("small copies"), 1);
}

/* ---- What fails -------------------------------------------------------------------------- */

/* One batch each way, of which any may fail; what was put is waited for. */
static refit_status try_round(void)
{
    refit_status status = REFIT_OK;
    for (int out = 1; out >= 0; out--) {
        rig_fill(out, 5);
        refit_status put = rig_put(&rig, out, RFT_COPY_STREAM);
        status = rft_keep_first(status, put);
        fake_cuda_settle();
        if (put == REFIT_OK) rig_check(out, 5);
    }
    return status;
}

/* Each driver call of a round fails once; then the same stream works. */
RIG_TEST(every_failed_call_leaves_the_stream_usable)
{
    unsigned failures = 0;
    bool over = false;
    for (unsigned nth = 1; !over; nth++) {
        rig_case_again();
        rig_open(2 * MIB, gathering);
        rig_lay(1500, 900, 124, 124, 60);
        rig.out[700].known_memory = rig.back[700].known_memory = false;
        uint64_t before = fake_cuda_calls(NULL);
        fake_cuda_fail("*", nth, 1, RFT_CU_INVALID_VALUE);
        refit_status status = try_round();
        over = fake_cuda_calls(NULL) - before < nth;
        if (status != REFIT_OK) failures++;
        if (status != REFIT_OK && status != REFIT_ERR_COPY)
            assert_int_equal(status, REFIT_ERR_DEVICE);
        fake_cuda_forget_faults();
        rig_round(7);
    }
    assert_in_range(failures, 10, 100);
}

/* Once a bounce buffer's events cannot be told any more, others take its place, or the engines. */
RIG_TEST(bounce_buffers_that_break_are_not_used_again)
{
    open_small();
    rig_round(1);
    for (int i = 0; i < 3; i++) {
        rig_fill(true, 2);
        fake_cuda_fail("cuEventRecord", 2, 3, RFT_CU_INVALID_VALUE);
        (void)rig_put(&rig, true, RFT_COPY_STREAM);
        fake_cuda_forget_faults();
        fake_cuda_settle();
        rig_round(3);
    }
    uint64_t launches = fake_cuda_calls("cuLaunchKernel");
    rig_round(4);
    assert_int_equal(fake_cuda_calls("cuLaunchKernel"), launches);
}

RIG_TEST(a_lost_gpu_is_reported_and_closes)
{
    open_small();
    rig_round(1);
    fake_cuda_lose(0, RFT_CU_ILLEGAL_ADDRESS);
    assert_int_equal(rig_put(&rig, true, RFT_COPY_STREAM), REFIT_ERR_DEVICE);
}

/* Work that does not end, on a bounce buffer that closes: what it uses stays. */
RIG_TEST(a_bounce_buffer_that_hangs_keeps_its_memory)
{
    refit_device *device = cuda_open();
    rft_cuda_device *cuda = device->self;
    rft_cuda_guard guard;
    rft_cuda_bounce *bounce = NULL;
    assert_ok(rft_cuda_enter(cuda, &guard, NULL));
    assert_ok(rft_cuda_bounce_open(cuda, MIB, &bounce, NULL));
    fake_cuda_stop();
    assert_int_equal(cuda->driver.fill(bounce->halves[0].memory, 1, MIB, bounce->own),
                     RFT_CU_SUCCESS);
    cuda->config.offload_timeout_ms = 5;
    rft_cuda_bounce_close(cuda, bounce);
    rft_cuda_leave(cuda, &guard);
    cuda_close(device);
    assert_string_equal(fake_cuda_violation(), "");
    fake_cuda_go();
    fake_cuda_settle();
    fake_cuda_live kept = fake_cuda_alive();
    assert_int_equal(kept.memories, 1);
    assert_int_equal(kept.host_memories, 1);
    assert_int_equal(kept.libraries, 1);
    assert_int_equal(kept.contexts, 1);
    assert_int_equal(fake_cuda_leaks(), 4);
    fake_cuda_reset();
}

int main(void)
{
    return test_run("cuda_staging");
}
