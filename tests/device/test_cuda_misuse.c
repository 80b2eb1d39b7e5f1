/* The CUDA device refuses streams, memory and contexts that it cannot use, with a sentence, and
 * leaves the caller's context and capture mode as they were. */
#include "tests/device/cuda_case.h"

#include <stdlib.h>

#include "device/cuda/cuda_driver.h"

/* A caller's stream in a context. */
static refit_stream_ref callers(rft_cu_context context, unsigned flags)
{
    return (refit_stream_ref){fake_cuda_stream(context, flags)};
}

static void *pinned(uint64_t bytes)
{
    void *memory = aligned_alloc(4096, bytes);
    assert_non_null(memory);
    memset(memory, 1, bytes);
    assert_ok(rft_device_host_pin(gpu, memory, bytes, false, NULL));
    return memory;
}

static void unpin(void *memory, uint64_t bytes)
{
    rft_device_host_unpin(gpu, memory, bytes);
    free(memory);
}

static refit_status check(const void *memory, uint64_t bytes, refit_error *error)
{
    const void *untouched = &untouched;
    rft_memory_range allocation = {.base = untouched};
    refit_status status = rft_device_memory_check(gpu, memory, bytes, &allocation, error);
    if (status == REFIT_OK) {
        assert_true((uintptr_t)allocation.base != 0 &&
                    (uintptr_t)allocation.base <= (uintptr_t)memory);
    } else {
        assert_ptr_equal(allocation.base, untouched);
    }
    return status;
}

/* All that takes a stream for work says the same of it. */
static void assert_no_work_on(refit_stream_ref stream, refit_status status, const char *words)
{
    char byte = 1;
    void *memory;
    assert_ok(refit_memory_alloc(gpu, 512, &memory, NULL));
    assert_refused(refit_stream_copy(gpu, stream, memory, &byte, 1, error), status, words);
    assert_refused(rft_device_zero(gpu, stream, memory, 512, error), status, words);
    assert_refused(refit_stream_call(gpu, stream, free, NULL, error), status, words);
    assert_ok(refit_memory_free(gpu, memory, NULL));
}

static void assert_no_event_on(refit_stream_ref stream, refit_status status, const char *words)
{
    rft_event *event;
    assert_ok(rft_device_event_open(gpu, &event, NULL));
    assert_refused(rft_device_event_record(gpu, event, stream, error), status, words);
    assert_refused(rft_device_event_join(gpu, event, stream, error), status, words);
    rft_device_event_close(gpu, event);
    assert_refused(refit_stream_wait(gpu, stream, 0, error), status, words);
}

GPU_TEST(the_legacy_stream_is_joined_and_takes_no_work)
{
    const refit_stream_ref legacy = {RFT_CU_STREAM_LEGACY};
    refit_stream_ref own;
    rft_event *event;
    assert_no_work_on(legacy, REFIT_ERR_INVALID, "legacy default stream (1)");
    assert_int_equal(fake_cuda_legacy_calls(NULL), 0);

    assert_ok(refit_stream_open(gpu, &own, NULL));
    assert_ok(rft_device_event_open(gpu, &event, NULL));
    assert_ok(rft_device_event_record(gpu, event, legacy, NULL));
    assert_ok(rft_device_event_join(gpu, event, own, NULL));
    assert_ok(rft_device_event_record(gpu, event, own, NULL));
    assert_ok(rft_device_event_join(gpu, event, legacy, NULL));
    assert_ok(refit_stream_wait(gpu, legacy, TIMEOUT_MS, NULL));
    assert_ok(refit_stream_wait(gpu, own, TIMEOUT_MS, NULL));
    rft_device_event_close(gpu, event);
    assert_ok(refit_stream_close(gpu, own, NULL));
    assert_int_equal(fake_cuda_legacy_calls(NULL),
                     fake_cuda_legacy_calls("cuEventRecord") +
                         fake_cuda_legacy_calls("cuStreamWaitEvent") +
                         fake_cuda_legacy_calls("cuStreamIsCapturing"));
}

GPU_TEST(the_per_thread_stream_is_refused)
{
    const refit_stream_ref stream = {RFT_CU_STREAM_PER_THREAD};
    assert_no_work_on(stream, REFIT_ERR_INVALID, "per-thread default stream (2)");
    assert_no_event_on(stream, REFIT_ERR_INVALID, "per-thread default stream (2)");
}

GPU_TEST(a_stream_of_another_context_is_refused)
{
    refit_device *other = cuda_open_spec("cuda:1");
    const refit_stream_ref strangers[] = {
        callers(fake_cuda_other_context(0), RFT_CU_STREAM_NON_BLOCKING),
        callers(fake_cuda_primary(1), RFT_CU_STREAM_NON_BLOCKING)};
    for (unsigned i = 0; i < 2; i++) {
        assert_no_work_on(strangers[i], REFIT_ERR_INVALID, "another GPU or context");
        assert_no_event_on(strangers[i], REFIT_ERR_INVALID, "another GPU or context");
        assert_invalid(refit_stream_close(gpu, strangers[i], NULL));
        fake_cuda_stream_free(strangers[i].native);
    }
    cuda_close(other);
}

GPU_TEST(a_callers_stream_takes_work_and_stays_open)
{
    const unsigned flags[] = {0, RFT_CU_STREAM_NON_BLOCKING};
    char *bytes = pinned(4096);
    void *memory;
    assert_ok(refit_memory_alloc(gpu, 4096, &memory, NULL));
    for (unsigned i = 0; i < 2; i++) {
        refit_stream_ref stream = callers(fake_cuda_primary(0), flags[i]);
        assert_ok(rft_device_zero(gpu, stream, memory, 4096, NULL));
        assert_ok(refit_stream_copy(gpu, stream, bytes, memory, 4096, NULL));
        assert_ok(refit_stream_wait(gpu, stream, TIMEOUT_MS, NULL));
        assert_int_equal(bytes[4095], 0);
        assert_refused(refit_stream_close(gpu, stream, error), REFIT_ERR_INVALID,
                       "its creator destroys it");
        fake_cuda_stream_free(stream.native);
    }
    assert_ok(refit_memory_free(gpu, memory, NULL));
    unpin(bytes, 4096);
}

GPU_TEST(a_stream_in_a_capture_is_refused_until_it_ends)
{
    refit_stream_ref stream = callers(fake_cuda_primary(0), 0);
    fake_cuda_capture_begin(stream.native);
    assert_no_work_on(stream, REFIT_ERR_STATE, "end the capture first");
    assert_no_event_on(stream, REFIT_ERR_STATE, "end the capture first");
    /* It is in the way of the legacy stream too, which would break it. */
    assert_no_event_on((refit_stream_ref){RFT_CU_STREAM_LEGACY}, REFIT_ERR_STATE,
                       "end the capture first");
    assert_true(fake_cuda_capture_end(stream.native));
    assert_ok(refit_stream_wait(gpu, stream, TIMEOUT_MS, NULL));
    fake_cuda_stream_free(stream.native);
}

/* One of everything that the device does. */
static void do_all(void)
{
    char *bytes = pinned(4096);
    void *memory;
    refit_stream_ref stream;
    rft_event *event;
    assert_ok(refit_memory_alloc(gpu, MIB, &memory, NULL));
    assert_ok(check(memory, MIB, NULL));
    assert_ok(refit_stream_open(gpu, &stream, NULL));
    assert_ok(rft_device_event_open(gpu, &event, NULL));
    assert_ok(rft_device_zero(gpu, stream, memory, MIB, NULL));
    assert_ok(refit_stream_copy(gpu, stream, memory, bytes, 4096, NULL));
    assert_ok(rft_device_event_record(gpu, event, stream, NULL));
    assert_ok(rft_device_event_join(gpu, event, REFIT_STREAM_NONE, NULL));
    assert_ok(rft_device_event_wait(gpu, event, TIMEOUT_MS, NULL));
    assert_ok(refit_stream_copy(gpu, REFIT_STREAM_NONE, bytes, memory, 4096, NULL));
    assert_ok(rft_device_zero(gpu, REFIT_STREAM_NONE, memory, MIB, NULL));
    assert_ok(refit_stream_wait(gpu, stream, TIMEOUT_MS, NULL));
    rft_device_event_close(gpu, event);
    assert_ok(refit_stream_close(gpu, stream, NULL));
    assert_ok(refit_memory_free(gpu, memory, NULL));
    unpin(bytes, 4096);
}

GPU_TEST(a_capture_elsewhere_is_not_broken)
{
    refit_stream_ref stream = callers(fake_cuda_primary(0), RFT_CU_STREAM_NON_BLOCKING);
    fake_cuda_capture_begin(stream.native);
    do_all();
    assert_true(fake_cuda_capture_end(stream.native));
    fake_cuda_stream_free(stream.native);
}

GPU_TEST(nothing_is_said_on_the_legacy_stream)
{
    do_all();
    cuda_close(gpu);
    gpu = NULL;
    assert_int_equal(fake_cuda_legacy_calls(NULL), 0);
}

/* Misaligned memory of the driver is taken again; it is freed by the address that it has there. */
GPU_TEST(memory_is_aligned_on_a_driver_that_promises_less)
{
    void *memory[20];
    fake_cuda_set_skew(true);
    for (unsigned i = 0; i < 20; i++) {
        assert_ok(refit_memory_alloc(gpu, 1 + 300 * i, &memory[i], NULL));
        assert_int_equal((uintptr_t)memory[i] % 512, 0);
        assert_ok(rft_device_zero(gpu, REFIT_STREAM_NONE, memory[i], 1 + 300 * i, NULL));
    }
    for (unsigned i = 0; i < 20; i++)
        assert_ok(refit_memory_free(gpu, memory[i], NULL));
    assert_int_equal(fake_cuda_used(0), 0);
}

GPU_TEST(memory_of_other_kinds_is_refused_by_name)
{
    refit_device *other = cuda_open_spec("cuda:1");
    char *bytes = pinned(4096), *plain = malloc(100);
    rft_cu_ptr managed = fake_cuda_managed(0, MIB), torch = fake_cuda_memory(0, MIB);
    void *memory, *far;
    assert_ok(refit_memory_alloc(gpu, MIB, &memory, NULL));
    assert_ok(refit_memory_alloc(other, MIB, &far, NULL));

    const struct {
        const char *name;
        const void *at;
        uint64_t bytes;
        const char *words; /* of the refusal; NULL: it is memory of the device */
    } rows[] = {
        {"a whole allocation", memory, MIB, NULL},
        {"a part of an allocation", (char *)memory + 77, 1000, NULL},
        {"memory of another library", (void *)(uintptr_t)torch, MIB, NULL},
        {"host memory", plain, 100, "ordinary host memory"},
        {"page-locked memory", bytes, 4096, "page-locked host memory"},
        {"managed memory", (void *)(uintptr_t)managed, 8, "managed memory"},
        {"another GPU", far, 8, "is memory of cuda:1, and this device is cuda:0"},
        {"no addresses", memory, UINT64_MAX, "would end beyond the last address"},
        {"beyond its end", memory, 64 * MIB, "not memory of cuda:0"},
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        refit_error error = {0};
        refit_status status = check(rows[i].at, rows[i].bytes, &error);
        bool right = rows[i].words == NULL
                         ? status == REFIT_OK
                         : status == REFIT_ERR_INVALID && error.status == (int32_t)status &&
                               strstr(error.text, rows[i].words) != NULL;
        if (!right) fail_msg("%s: %s: %s", rows[i].name, refit_status_name(status), error.text);
    }

    assert_ok(refit_memory_free(gpu, memory, NULL));
    assert_refused(check(memory, 8, error), REFIT_ERR_INVALID, "was freed");
    assert_ok(refit_memory_free(other, far, NULL));
    fake_cuda_managed_free(managed);
    fake_cuda_memory_free(torch);
    free(plain);
    unpin(bytes, 4096);
    cuda_close(other);
}

GPU_TEST(where_memory_ends_is_asked_twice)
{
    void *memory;
    assert_ok(refit_memory_alloc(gpu, MIB, &memory, NULL));
    fake_cuda_fail("cuMemGetAddressRange", 1, 1, RFT_CU_NOT_FOUND);
    assert_ok(check(memory, MIB, NULL));
    fake_cuda_fail("cuPointerGetAttributes", 1, 1, RFT_CU_INVALID_VALUE);
    assert_refused(check(memory, MIB, error), REFIT_ERR_INVALID, "not memory of cuda:0");
    fake_cuda_fail("cuPointerGetAttributes", 1, 1, RFT_CU_UNKNOWN);
    assert_refused(check(memory, MIB, error), REFIT_ERR_DEVICE, "CUDA_ERROR_UNKNOWN");
    assert_ok(refit_memory_free(gpu, memory, NULL));
}

/* Reserved addresses with a physical memory of its own mapped to each granule, as PyTorch's
 * expandable_segments grow them. */
typedef struct segments {
    rft_cuda_driver driver;
    rft_cu_context context;
    rft_cu_ptr base;
    size_t granule;
} segments;

enum { SEGMENTS = 3 };

static void segments_open(segments *it)
{
    const rft_cu_location location = {RFT_CU_LOCATION_DEVICE, 0};
    const rft_cu_allocation properties = {.type = RFT_CU_ALLOCATION_PINNED, .location = location};
    const rft_cu_access access = {location, RFT_CU_ACCESS_READWRITE};
    assert_ok(rft_cuda_driver_open(&it->driver, NULL));
    assert_int_equal(it->driver.context_push(fake_cuda_primary(0)), 0);
    assert_int_equal(it->driver.granularity(&it->granule, &properties, 0), 0);
    assert_int_equal(it->driver.address_reserve(&it->base, SEGMENTS * it->granule, 0, 0, 0), 0);
    for (unsigned i = 0; i < SEGMENTS; i++) {
        rft_cu_handle handle;
        rft_cu_ptr at = it->base + i * it->granule;
        assert_int_equal(it->driver.physical_create(&handle, it->granule, &properties, 0), 0);
        assert_int_equal(it->driver.map(at, it->granule, 0, handle, 0), 0);
        assert_int_equal(it->driver.set_access(at, it->granule, &access, 1), 0);
        assert_int_equal(it->driver.physical_release(handle), 0);
    }
}

static void segments_unmap(segments *it, unsigned which)
{
    assert_int_equal(it->driver.unmap(it->base + which * it->granule, it->granule), 0);
}

static void segments_close(segments *it)
{
    assert_int_equal(it->driver.address_free(it->base, SEGMENTS * it->granule), 0);
    assert_int_equal(it->driver.context_pop(&it->context), 0);
    rft_cuda_driver_close(&it->driver);
}

GPU_TEST(memory_of_many_mappings_is_one_and_a_hole_is_seen)
{
    segments torch;
    segments_open(&torch);
    char *base = (char *)(uintptr_t)torch.base;
    uint64_t bytes = SEGMENTS * torch.granule;
    assert_ok(check(base, bytes, NULL));
    assert_ok(check(base + torch.granule - 100, torch.granule + 200, NULL));
    assert_refused(check(base, bytes + 1, error), REFIT_ERR_INVALID, "not memory of cuda:0");
    segments_unmap(&torch, 1);
    assert_ok(check(base, torch.granule, NULL));
    assert_ok(check(base + 2 * torch.granule, torch.granule, NULL));
    assert_refused(check(base, bytes, error), REFIT_ERR_INVALID, "no memory mapped to");
    assert_refused(check(base + torch.granule + 5, 1, error), REFIT_ERR_INVALID,
                   "no memory mapped to");
    segments_unmap(&torch, 0);
    segments_unmap(&torch, 2);
    segments_close(&torch);
}

/* Of a list, what lies in the mapping of the one before is known, and nothing else is. */
GPU_TEST(the_driver_is_asked_once_about_a_mapping_of_a_list)
{
    segments torch;
    rft_memory_range last = {0};
    segments_open(&torch);
    const char *base = (const char *)(uintptr_t)torch.base;
    uint64_t granule = torch.granule, asked = fake_cuda_calls("cuPointerGetAttributes");
    for (uint64_t at = 0; at < granule; at += granule / 8)
        assert_ok(rft_device_memory_check_next(gpu, base + at, granule / 8, &last, NULL));
    assert_ok(rft_device_memory_check_next(gpu, base, granule, &last, NULL));
    assert_int_equal(fake_cuda_calls("cuPointerGetAttributes"), asked + 1);
    segments_unmap(&torch, 1);
    assert_refused(rft_device_memory_check_next(gpu, base, granule + 1, &last, error),
                   REFIT_ERR_INVALID, "no memory mapped to");
    assert_refused(rft_device_memory_check_next(gpu, base + granule, 1, &last, error),
                   REFIT_ERR_INVALID, "no memory mapped to");
    assert_refused(rft_device_memory_check_next(gpu, base, 0, &last, error), REFIT_ERR_INVALID,
                   "0 bytes");
    assert_ok(rft_device_memory_check_next(gpu, base + 2 * granule, 1, &last, NULL));
    assert_ptr_equal(last.mapped, base + 2 * granule);
    segments_unmap(&torch, 0);
    segments_unmap(&torch, 2);
    segments_close(&torch);
}

GPU_TEST(a_copy_to_memory_that_is_gone_is_refused_and_costs_nothing)
{
    char *bytes = pinned(4096), *memory;
    refit_stream_ref stream;
    assert_ok(refit_stream_open(gpu, &stream, NULL));
    assert_ok(refit_memory_alloc(gpu, 4096, (void **)&memory, NULL));
    assert_ok(refit_memory_free(gpu, memory, NULL));
    rft_copy copies[2] = {{.to = memory, .from = bytes, .bytes = 8},
                          {.to = memory + 512, .from = bytes + 512, .bytes = 8}};
    assert_refused(refit_stream_copy(gpu, stream, memory, bytes, 4096, error), REFIT_ERR_COPY,
                   "is not mapped now");
    assert_refused(rft_device_copy_batch(gpu, stream, copies, 2, RFT_COPY_STREAM, error),
                   REFIT_ERR_COPY, "the driver refuses an address");
    assert_refused(rft_device_zero(gpu, REFIT_STREAM_NONE, memory, 8, error), REFIT_ERR_COPY,
                   "was freed");
    assert_ok(refit_stream_wait(gpu, stream, TIMEOUT_MS, NULL));
    assert_ok(refit_stream_close(gpu, stream, NULL));
    unpin(bytes, 4096);
    do_all();
}

/* PyTorch frees a segment and gets another one where it lay: who kept the first must notice. */
GPU_TEST(memory_that_is_freed_and_taken_again_is_another_allocation)
{
    rft_memory_range first, part, second;
    rft_cu_ptr memory = fake_cuda_memory(0, MIB), again;
    const char *at = (const char *)(uintptr_t)memory;
    assert_ok(rft_device_memory_check(gpu, at, MIB, &first, NULL));
    assert_ok(rft_device_memory_check(gpu, at + 512, 8, &part, NULL));
    assert_ptr_equal(first.base, at);
    assert_int_equal(first.bytes, MIB);
    assert_true(first.id != 0 && part.id == first.id && part.base == first.base);
    do { /* the driver gives an address back late */
        fake_cuda_memory_free(memory);
        memory = again = fake_cuda_memory(0, MIB);
    } while (again != (rft_cu_ptr)(uintptr_t)at);
    assert_ok(rft_device_memory_check(gpu, at, MIB, &second, NULL));
    assert_true(second.base == first.base && second.id != first.id);
    fake_cuda_memory_free(again);
}

int main(void)
{
    return test_run("cuda_misuse");
}
