/* The CUDA device opens on whatever driver and GPU it finds, or says what is wrong with them. */
#include "tests/device/cuda_case.h"

#include "device/cuda/cuda_driver.h"
#include "tests/support/failing_alloc.h"

typedef struct driver_symbol {
    const char *name;
    int version;
    bool required;
} driver_symbol;

#define REQUIRED(field, symbol, version, ...) {symbol, version, true},
#define OPTIONAL(field, symbol, version, ...) {symbol, version, false},
static const driver_symbol symbols[] = {RFT_CUDA_SYMBOLS(REQUIRED, OPTIONAL)};
enum { SYMBOLS = COUNT_OF(symbols) };

/* A refusal leaves nothing open. */
static void assert_fails(const char *spec, refit_status expected, const char *words)
{
    refit_device *device = NULL;
    assert_refused(refit_device_open(spec, NULL, &device, error), expected, words);
    assert_null(device);
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_int_equal(fake_cuda_depth(), 0);
}

CUDA_TEST(a_gpu_describes_itself)
{
    refit_device_info info = {.size = sizeof info};
    fake_cuda_set_attribute(1, RFT_CU_ATTR_HOST_NUMA, 3, true);
    fake_cuda_set_memory(1, 32 * MIB);
    refit_device *device = cuda_open_spec("cuda:1");
    assert_ok(refit_device_describe(device, &info, NULL));
    assert_string_equal(info.kind, "cuda");
    assert_string_equal(info.name, "Fake GPU 1");
    assert_int_equal(info.capacity_bytes, 32 * MIB);
    assert_int_equal(info.used_bytes, 0);
    assert_int_equal(info.host_addressable, 0);
    assert_int_equal(info.numa_node, 3);
    assert_int_equal(info.driver_version, 13000);
    assert_string_equal(info.uuid, "GPU-01203f5e-7d9c-bbda-f918-37567594b3d2");
    rft_device_caps caps = rft_device_get_caps(device);
    assert_true(caps.needs_pinned);
    assert_false(caps.host_addressable);
    assert_int_equal(caps.batch_most, 65536);
    assert_int_equal(caps.numa_node, 3);
    assert_int_equal(caps.ordinal, 1);
    assert_int_equal(caps.uuid[0], 0x01);
    cuda_close(device);
}

CUDA_TEST(a_driver_that_knows_no_numa_leaves_it_to_the_bus)
{
    fake_cuda_set_attribute(0, RFT_CU_ATTR_HOST_NUMA, 0, false);
    fake_cuda_set_attribute(0, RFT_CU_ATTR_PCI_DOMAIN, 0xfffe, true); /* nowhere */
    refit_device *device = cuda_open();
    assert_int_equal(rft_device_get_caps(device).numa_node, -1);
    cuda_close(device);
}

CUDA_TEST(a_capacity_bounds_what_is_taken)
{
    refit_device *device = cuda_open_spec("cuda:0:capacity=1MiB");
    void *memory, *more;
    assert_ok(refit_memory_alloc(device, MIB, &memory, NULL));
    assert_refused(refit_memory_alloc(device, 1, &more, error), REFIT_ERR_DEVICE_MEMORY,
                   "0 of 1048576 are free");
    assert_ok(refit_memory_free(device, memory, NULL));
    cuda_close(device);

    /* No more than the GPU has. */
    refit_device_info info = {.size = sizeof info};
    device = cuda_open_spec("cuda:0:capacity=4GiB");
    assert_ok(refit_device_describe(device, &info, NULL));
    assert_int_equal(info.capacity_bytes, 64 * MIB);
    cuda_close(device);
}

CUDA_TEST(drivers_of_every_version_since_12_will_do)
{
    static const int versions[] = {12000, 12040, 12080, 12090, 13000, 13020, 14000};
    for (size_t i = 0; i < COUNT_OF(versions); i++) {
        fake_cuda_reset();
        fake_cuda_set_version(versions[i]);
        cuda_close(cuda_open());
    }
    fake_cuda_reset();
    fake_cuda_set_version(11080);
    assert_fails("cuda:0", REFIT_ERR_UNSUPPORTED, "for CUDA 11.8 and refit needs 12.0");
    assert_fails("auto", REFIT_ERR_UNSUPPORTED, "for CUDA 11.8 and refit needs 12.0");
}

CUDA_TEST(a_missing_symbol_is_named_or_done_without)
{
    for (size_t i = 0; i < SYMBOLS; i++) {
        fake_cuda_reset();
        fake_cuda_hide(symbols[i].name, symbols[i].version);
        if (symbols[i].required) {
            assert_fails("cuda:0", REFIT_ERR_UNSUPPORTED, symbols[i].name);
        } else {
            cuda_close(cuda_open());
        }
    }
}

CUDA_TEST(no_gpu_is_not_found)
{
    fake_cuda_set_devices(0);
    assert_fails("cuda:0", REFIT_ERR_NOT_FOUND, "CUDA_VISIBLE_DEVICES");
    fake_cuda_set_devices(2);
    assert_fails("cuda:2", REFIT_ERR_NOT_FOUND, "\"cuda:2\": this process sees 2");
    assert_fails("cuda:99999", REFIT_ERR_NOT_FOUND, "\"cuda:99999\"");
    cuda_close(cuda_open_spec("cuda:1"));
}

CUDA_TEST(a_gpu_that_may_not_be_used_says_why)
{
    fake_cuda_fail("cuDevicePrimaryCtxRetain", 1, 1, RFT_CU_DEVICE_UNAVAILABLE);
    assert_fails("cuda:0", REFIT_ERR_BUSY, "exclusive mode");
    fake_cuda_fail("cuDevicePrimaryCtxRetain", 1, 1, RFT_CU_OUT_OF_MEMORY);
    assert_fails("cuda:0", REFIT_ERR_DEVICE_MEMORY, "free or offload");
    fake_cuda_set_attribute(0, RFT_CU_ATTR_COMPUTE_MODE, RFT_CU_MODE_PROHIBITED, true);
    assert_fails("cuda:0", REFIT_ERR_DEVICE, "nvidia-smi -i 0 -c DEFAULT");
    assert_fails("auto", REFIT_ERR_DEVICE, "nvidia-smi -i 0 -c DEFAULT");
    cuda_close(cuda_open_spec("cuda:1"));
    fake_cuda_set_attribute(0, RFT_CU_ATTR_COMPUTE_MODE, RFT_CU_MODE_EXCLUSIVE_PROCESS, true);
    cuda_close(cuda_open());
    fake_cuda_fail("cuDevicePrimaryCtxRetain", 1, 1, RFT_CU_INVALID_DEVICE);
    assert_fails("cuda:0", REFIT_ERR_BUSY, "exclusive mode");
}

CUDA_TEST(a_driver_that_does_not_start_says_why)
{
    static const struct {
        rft_cu_result result;
        refit_status status;
        const char *says;
    } answers[] = {
        {RFT_CU_NO_DEVICE, REFIT_ERR_NOT_FOUND, "no GPU is visible"},
        {RFT_CU_STUB_LIBRARY, REFIT_ERR_NOT_FOUND, "stub"},
        {RFT_CU_SYSTEM_NOT_READY, REFIT_ERR_DEVICE, "fabricmanager"},
        {RFT_CU_SYSTEM_DRIVER_MISMATCH, REFIT_ERR_DEVICE, "different versions"},
        {RFT_CU_COMPAT_NOT_SUPPORTED, REFIT_ERR_DEVICE, "compatibility"},
        {RFT_CU_NOT_INITIALIZED, REFIT_ERR_DEVICE, "spawn"},
        {RFT_CU_UNKNOWN, REFIT_ERR_DEVICE, "CUDA_ERROR_UNKNOWN, 999"},
        {RFT_CU_OPERATING_SYSTEM, REFIT_ERR_DEVICE, "304"},
    };
    for (size_t i = 0; i < COUNT_OF(answers); i++) {
        fake_cuda_fail("cuInit", 1, 1, answers[i].result);
        assert_fails("cuda:0", answers[i].status, answers[i].says);
        if (answers[i].status == REFIT_ERR_NOT_FOUND) continue;
        fake_cuda_fail("cuInit", 1, 1, answers[i].result);
        assert_fails("auto", answers[i].status, answers[i].says);
    }
    cuda_close(cuda_open());
}

static void open_auto(const char *kind, const char *words)
{
    refit_device_info info = {.size = sizeof info};
    heard_begin(REFIT_LOG_INFO);
    refit_device *device = cuda_open_spec("auto");
    assert_ok(refit_device_describe(device, &info, NULL));
    assert_string_equal(info.kind, kind);
    assert_int_equal(heard_count(words), 1);
    cuda_close(device);
}

CUDA_TEST(auto_says_which_device_it_took)
{
    open_auto("cuda", "device auto: cuda:0");
    fake_cuda_set_devices(0);
    open_auto("host", "device auto: host, since");
    open_auto("host", "CUDA_VISIBLE_DEVICES");
}

/* NOT_FOUND of a later call must not be taken for "no GPU", so that auto falls back. */
CUDA_TEST(whatever_call_fails_the_opening_fails_and_leaves_nothing)
{
    static const rft_cu_result results[] = {RFT_CU_UNKNOWN, RFT_CU_INVALID_VALUE, RFT_CU_NOT_FOUND,
                                            RFT_CU_OUT_OF_MEMORY, RFT_CU_ILLEGAL_ADDRESS};
    for (size_t i = 0; i < SYMBOLS * 5; i++) {
        refit_device *device = NULL;
        refit_error error = {0};
        /* A context that cannot be left stays current. */
        if (strcmp(symbols[i / 5].name, "cuCtxPopCurrent") == 0) continue;
        fake_cuda_reset();
        fake_cuda_fail(symbols[i / 5].name, 1, 1, results[i % 5]);
        refit_status status = refit_device_open("auto", NULL, &device, &error);
        if (status == REFIT_OK) {
            refit_device_info info = {.size = sizeof info};
            assert_ok(refit_device_describe(device, &info, NULL));
            assert_string_equal(info.kind, "cuda");
            fake_cuda_forget_faults();
            cuda_close(device);
        } else {
            assert_null(device);
            assert_int_equal(error.status, status);
            assert_string_not_equal(error.text, "");
        }
        assert_int_equal(fake_cuda_leaks(), 0);
        assert_int_equal(fake_cuda_depth(), 0);
        assert_int_equal(fake_cuda_capture_mode(), RFT_CU_CAPTURE_MODE_GLOBAL);
    }
}

CUDA_TEST(every_failed_allocation_leaves_nothing)
{
    bool met = true;
    for (uint64_t nth = 1; met; nth++) {
        refit_device *device = NULL;
        failing_alloc_begin(nth);
        refit_status status = refit_device_open("cuda:0", NULL, &device, NULL);
        if (status == REFIT_OK) cuda_close(device);
        met = failing_alloc_end();
        assert_int_equal(status, met ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
        assert_int_equal(fake_cuda_leaks(), 0);
    }
}

CUDA_TEST(a_gpu_may_be_opened_twice)
{
    void *memory;
    refit_device *one = cuda_open(), *two = cuda_open();
    assert_int_equal(fake_cuda_alive().contexts, 2);
    assert_ok(refit_memory_alloc(two, MIB, &memory, NULL));
    assert_invalid(refit_memory_free(one, memory, NULL));
    cuda_close(one);
    assert_ok(rft_device_zero(two, REFIT_STREAM_NONE, memory, MIB, NULL));
    assert_ok(refit_memory_free(two, memory, NULL));
    cuda_close(two);
}

CUDA_TEST(opening_does_not_break_a_capture)
{
    refit_device *first = cuda_open();
    rft_cu_stream stream = fake_cuda_stream(fake_cuda_primary(0), RFT_CU_STREAM_NON_BLOCKING);
    fake_cuda_capture_begin(stream);
    cuda_close(cuda_open());
    assert_true(fake_cuda_capture_end(stream));
    fake_cuda_stream_free(stream);
    cuda_close(first);
}

int main(void)
{
    return test_run("cuda_open");
}
