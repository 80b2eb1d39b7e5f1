/* Every device: memory is given within the capacity and taken back; others' is refused. */
#include "tests/device/every_device.h"

#include <stdlib.h>

TEST(memory_is_aligned_and_its_own)
{
    static const uint64_t sizes[] = {1, 511, 512, 513, 65536, MIB - 1, MIB, MIB + 1, 3 * MIB + 5};
    enum { COUNT = COUNT_OF(sizes) };
    void *memory[COUNT];
    for (unsigned i = 0; i < COUNT; i++) {
        memory[i] = device_alloc(sizes[i]);
        assert_int_equal((uintptr_t)memory[i] % 512, 0);
        device_fill(memory[i], sizes[i], i);
    }
    for (unsigned i = 0; i < COUNT; i++) {
        assert_int_equal(device_right(memory[i], sizes[i], i), sizes[i]);
        device_free(memory[i]);
    }
    assert_int_equal(device_used(), 0);
}

TEST(a_full_device_refuses_and_recovers)
{
    void *memory[100];
    void *extra = &on; /* must stay as it is */
    unsigned taken = 0;
    refit_status status = REFIT_OK;
    while (taken < 100 && status == REFIT_OK) {
        status = refit_memory_alloc(on.device, 4 * MIB, &memory[taken], &on.error);
        if (status == REFIT_OK) taken++;
    }
    assert_int_equal(status, REFIT_ERR_DEVICE_MEMORY);
    assert_in_range(taken, 1, DEVICE_BYTES / (4 * MIB));
    assert_int_equal(on.error.status, REFIT_ERR_DEVICE_MEMORY);
    assert_non_null(strstr(on.error.text, "free"));
    assert_int_equal(refit_memory_alloc(on.device, 4 * MIB, &extra, NULL), REFIT_ERR_DEVICE_MEMORY);
    assert_ptr_equal(extra, &on);

    device_free(memory[--taken]);
    memory[taken++] = device_alloc(4 * MIB);
    while (taken > 0)
        device_free(memory[--taken]);
    assert_int_equal(device_used(), 0);
}

/* Where two allocations are neighbours, a copy of both at once may be refused: a caller that joins
 * copies can tell them apart. */
TEST(what_may_be_copied_as_one_can_be_told)
{
    enum { COUNT = 6 };
    void *memory[COUNT];
    rft_memory_range allocation[COUNT];
    for (unsigned i = 0; i < COUNT; i++) {
        memory[i] = device_alloc(MIB);
        assert_ok(rft_device_memory_check(on.device, memory[i], MIB, &allocation[i], &on.error));
    }
    for (unsigned i = 0; i < COUNT; i++) {
        rft_memory_range inside;
        char *last = (char *)memory[i] + MIB - 1;
        assert_ok(rft_device_memory_check(on.device, last, 1, &inside, &on.error));
        assert_ptr_equal(inside.base, allocation[i].base);
        assert_int_equal(inside.bytes, allocation[i].bytes);
        assert_int_equal(inside.id, allocation[i].id);
        bool joined = i > 0 && (char *)memory[i - 1] + MIB == memory[i] &&
                      allocation[i - 1].base == allocation[i].base;
        if (!joined) continue;
        device_fill(memory[i - 1], 2 * MIB, i);
        assert_int_equal(device_right(memory[i - 1], 2 * MIB, i), 2 * MIB);
    }
    for (unsigned i = 0; i < COUNT; i++)
        device_free(memory[i]);
}

TEST(sizes_beyond_all_memory_are_refused)
{
    static const uint64_t sizes[] = {UINT64_MAX, UINT64_MAX - 4096, UINT64_C(1) << 62};
    void *memory;
    for (unsigned i = 0; i < COUNT_OF(sizes); i++)
        assert_int_equal(refit_memory_alloc(on.device, sizes[i], &memory, &on.error),
                         REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(device_used(), 0);
}

TEST(freeing_twice_or_what_is_foreign_is_refused)
{
    static const uint64_t sizes[] = {1000, 2 * MIB};
    for (unsigned i = 0; i < 2; i++) {
        char *memory = device_alloc(sizes[i]);
        assert_invalid(refit_memory_free(on.device, memory + 512, &on.error));
        device_free(memory);
        assert_invalid(refit_memory_free(on.device, memory, &on.error));
    }
    assert_invalid(refit_memory_free(on.device, &on, &on.error));
    assert_int_equal(device_used(), 0);
}

TEST(bad_arguments_are_refused)
{
    void *memory;
    assert_invalid(refit_memory_alloc(on.device, 0, &memory, NULL));
    assert_invalid(refit_memory_alloc(on.device, 1, NULL, NULL));
    assert_invalid(refit_memory_alloc(NULL, 1, &memory, NULL));
    assert_invalid(refit_memory_free(NULL, NULL, NULL));
    assert_ok(refit_memory_free(on.device, NULL, &on.error));
}

TEST(many_allocations_are_kept_apart)
{
    enum { COUNT = 3000 };
    static void *memory[COUNT];
    srand(1);
    for (unsigned round = 0; round < 4; round++) {
        for (unsigned i = 0; i < COUNT; i++) {
            if (memory[i] != NULL && rand() % 2 == 0) {
                device_free(memory[i]);
                memory[i] = NULL;
            } else if (memory[i] == NULL) {
                memory[i] = device_alloc(1 + (uint64_t)rand() % 5000);
            }
        }
    }
    for (unsigned i = 0; i < COUNT; i++) {
        device_free(memory[i]);
        memory[i] = NULL;
    }
    assert_int_equal(device_used(), 0);
}

TEST(a_device_with_memory_stays_open)
{
    void *memory = device_alloc(100);
    rft_device_retain(on.device);
    assert_refused(refit_device_close(on.device, error), REFIT_ERR_BUSY,
                   "1 allocations, 1 streams and 1 objects");
    rft_device_release(on.device);
    device_free(memory);
}

TEST(describe_fills_what_the_caller_knows)
{
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(on.device, &info, &on.error));
    assert_int_equal(info.size, sizeof info);
    assert_string_not_equal(info.kind, "");
    assert_string_not_equal(info.name, "");
    assert_int_equal(info.capacity_bytes, DEVICE_BYTES);

    refit_device_info older = {.size = offsetof(refit_device_info, capacity_bytes)};
    older.capacity_bytes = 77;
    assert_ok(refit_device_describe(on.device, &older, &on.error));
    assert_int_equal(older.capacity_bytes, 77);
    older.size = 3;
    assert_invalid(refit_device_describe(on.device, &older, NULL));
    assert_invalid(refit_device_describe(on.device, NULL, NULL));
    assert_invalid(refit_device_describe(NULL, &info, NULL));
}

int main(void)
{
    return run_on_every_device("memory");
}
