/* Host memory on the CUDA device is registered once and whole, found while it is registered, and
 * refused with advice. */
#include "tests/device/cuda_case.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "device/cuda/cuda_memory.h"
#include "tests/support/failing_alloc.h"

#define PAGE 4096u

static char *pages(uint64_t count)
{
    char *memory = aligned_alloc(PAGE, count * PAGE);
    assert_non_null(memory);
    memset(memory, 0, count * PAGE);
    return memory;
}

static bool covered(const void *memory, uint64_t bytes)
{
    return rft_cuda_pinned_holds(rft_cuda_pins_find(gpu->self, memory), memory, bytes);
}

GPU_TEST(a_range_is_known_from_pin_to_unpin)
{
    char *memory = pages(4);
    assert_false(covered(memory, 1));
    assert_ok(rft_device_host_pin(gpu, memory, 2 * PAGE, false, NULL));
    assert_ok(rft_device_host_pin(gpu, memory + 2 * PAGE, PAGE, false, NULL));
    assert_true(covered(memory, 2 * PAGE));
    assert_true(covered(memory + PAGE, PAGE));
    assert_true(covered(memory + 2 * PAGE, 1));
    /* Over two registrations, over the end of one, from before one. */
    assert_false(covered(memory + PAGE, PAGE + 1));
    assert_false(covered(memory + 3 * PAGE - 1, 2));
    assert_false(covered(memory + 3 * PAGE, 1));
    assert_false(covered(memory - 1, 2));
    assert_false(covered(memory, UINT64_MAX));
    rft_device_host_unpin(gpu, memory, 2 * PAGE);
    assert_false(covered(memory, 1));
    assert_true(covered(memory + 2 * PAGE, PAGE));
    rft_device_host_unpin(gpu, memory + 2 * PAGE, PAGE);
    assert_int_equal(fake_cuda_alive().registrations, 0);
    free(memory);
}

GPU_TEST(many_ranges_are_found_in_any_order)
{
    enum { COUNT = 101 };
    char *memory = pages(2 * COUNT);
    for (unsigned i = 0; i < COUNT; i++)
        assert_ok(rft_device_host_pin(gpu, memory + i * 37 % COUNT * 2 * PAGE, PAGE, false, NULL));
    for (unsigned i = 0; i < COUNT; i++) {
        assert_true(covered(memory + i * 2 * PAGE, PAGE));
        assert_false(covered(memory + i * 2 * PAGE, PAGE + 1));
        assert_false(covered(memory + (i * 2 + 1) * PAGE, 1));
    }
    for (unsigned i = 0; i < COUNT; i++) {
        rft_device_host_unpin(gpu, memory + i * 53 % COUNT * 2 * PAGE, PAGE);
        assert_false(covered(memory + i * 53 % COUNT * 2 * PAGE, PAGE));
    }
    free(memory);
}

GPU_TEST(memory_pinned_elsewhere_is_left_alone)
{
    char *memory = pages(2);
    assert_ok(rft_device_host_pin(gpu, memory, 2 * PAGE, false, NULL));
    rft_device_host_unpin(gpu, memory + PAGE, PAGE);
    assert_true(covered(memory, 2 * PAGE));
    rft_device_host_unpin(gpu, memory, 2 * PAGE);
    rft_device_host_unpin(gpu, memory, 2 * PAGE);
    free(memory);
}

GPU_TEST(a_refusal_says_what_helps)
{
    char *memory = pages(4);
    assert_ok(rft_device_host_pin(gpu, memory, 2 * PAGE, false, NULL));
    assert_refused(rft_device_host_pin(gpu, memory + PAGE, 2 * PAGE, false, error), REFIT_ERR_PIN,
                   "page-locked already");
    rft_device_host_unpin(gpu, memory, 2 * PAGE);

    static const rft_cu_result results[] = {RFT_CU_OUT_OF_MEMORY, RFT_CU_INVALID_VALUE,
                                            RFT_CU_OPERATING_SYSTEM, RFT_CU_NOT_SUPPORTED,
                                            RFT_CU_NOT_PERMITTED};
    for (unsigned i = 0; i < COUNT_OF(results); i++) {
        refit_error error = {0};
        fake_cuda_fail("cuMemHostRegister", 1, 1, results[i]);
        assert_int_equal(rft_device_host_pin(gpu, memory, PAGE, false, &error), REFIT_ERR_PIN);
        assert_int_equal(error.subsystem, results[i]);
        assert_says(&error, "CUDA_ERROR");
        assert_says(&error, "docker --memory");
        assert_says(&error, "ulimit -l does not count here");
        assert_says(&error, "offload.pin: prefer"); /* the last words: nothing was cut off */
        assert_false(covered(memory, 1));
    }
    fake_cuda_set_register_cap(2 * PAGE);
    assert_refused(rft_device_host_pin(gpu, memory, 3 * PAGE, false, error), REFIT_ERR_PIN,
                   "offload.slab_bytes");
    assert_ok(rft_device_host_pin(gpu, memory, 2 * PAGE, false, NULL));
    rft_device_host_unpin(gpu, memory, 2 * PAGE);
    free(memory);
}

GPU_TEST(closing_takes_back_what_is_left)
{
    char *memory = pages(3);
    for (unsigned i = 0; i < 3; i++)
        assert_ok(rft_device_host_pin(gpu, memory + i * PAGE, PAGE, false, NULL));
    cuda_close(gpu);
    gpu = NULL;
    assert_int_equal(fake_cuda_alive().registrations, 0);
    free(memory);
}

static refit_status pin_each(char *memory, unsigned count)
{
    refit_status status = REFIT_OK;
    for (unsigned i = 0; i < count && status == REFIT_OK; i++) {
        status = rft_device_host_pin(gpu, memory + i * PAGE, PAGE, false, NULL);
        assert_int_equal(covered(memory + i * PAGE, PAGE), status == REFIT_OK);
    }
    return status;
}

CUDA_TEST(a_list_that_cannot_grow_leaves_nothing_pinned)
{
    char *memory = pages(100);
    bool met = true;
    for (uint64_t nth = 1; met; nth++) {
        failing_alloc_begin(nth);
        refit_status status = refit_device_open("cuda:0", NULL, &gpu, NULL);
        if (status == REFIT_OK) {
            status = pin_each(memory, 100);
            cuda_close(gpu);
        }
        met = failing_alloc_end();
        assert_int_equal(status, met ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
        assert_int_equal(fake_cuda_leaks(), 0);
    }
    free(memory);
}

/* Pages that the process may only read: such as another's shared memory. */
GPU_TEST(memory_that_cannot_be_written_is_pinned_for_reading)
{
    void *memory = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    assert_refused(rft_device_host_pin(gpu, memory, PAGE, false, error), REFIT_ERR_PIN,
                   "not page-locked");
    assert_ok(rft_device_host_pin(gpu, memory, PAGE, true, NULL));
    assert_true(covered(memory, PAGE));
    rft_device_host_unpin(gpu, memory, PAGE);
    assert_int_equal(fake_cuda_alive().registrations, 0);
    assert_int_equal(munmap(memory, PAGE), 0);
}

int main(void)
{
    return test_run("cuda_pin");
}
