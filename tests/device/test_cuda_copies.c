/* Copies on a GPU: whichever calls the driver has, batches keep its rules, every byte arrives where
 * it belongs, and small ones take few calls. */
#include "tests/device/copy_rig.h"

#include "base/alloc.h"
#include "base/checked.h"

static const char *const engines_only[] = {"offload.small_bytes=1", NULL};
static const char *const gathering[] = {"offload.small_bytes=32KiB", "offload.staging_bytes=1MiB",
                                        NULL};

/* 3,000 copies, none of which is small. */
static void round_by_engines(void)
{
    rig_open(4 * MIB, engines_only);
    rig_lay(3000, 600, 8, 8, 424);
    rig_round(1);
    assert_int_equal(fake_cuda_calls("cuLaunchKernel"), 0);
    assert_int_equal(fake_cuda_legacy_calls(NULL), 0);
}

/* A driver, and the calls that 3,000 copies out and back take on it. */
typedef struct batch_case {
    const char *name;
    int version;          /* 0: the newest */
    bool hidden;          /* it has no call for a batch */
    rft_cu_result refuse; /* what the first 6 batches answer */
    uint64_t batches;     /* calls for a batch */
    uint64_t singly;      /* calls for one copy */
} batch_case;

static const batch_case batches[] = {
    {"the newer call for a batch", 0, false, 0, 2 * 3, 0},
    {"the older call for a batch", 12080, false, 0, 2 * 3, 0},
    {"a driver older than batches", 12040, false, 0, 0, 2 * 3000},
    {"a driver without batches", 0, true, 0, 0, 2 * 3000},
    {"batches are not supported", 0, false, RFT_CU_NOT_SUPPORTED, 2 * 3, 2 * 3000},
    {"batches are refused", 0, false, RFT_CU_INVALID_VALUE, 2 * 3, 2 * 3000},
};

/* Batches hold 1,024 copies at most; a refused batch is copied one by one, and told once. */
RIG_TEST(batches_take_the_calls_that_the_driver_has)
{
    for (size_t i = 0; i < COUNT_OF(batches); i++) {
        const batch_case *it = &batches[i];
        rig_case_again();
        fake_cuda_set_batch_cap(1024);
        if (it->version != 0) fake_cuda_set_version(it->version);
        if (it->hidden) fake_cuda_hide("cuMemcpyBatchAsync", 0);
        if (it->refuse != 0) fake_cuda_fail("cuMemcpyBatchAsync", 1, 6, it->refuse);
        round_by_engines();
        if (fake_cuda_calls("cuMemcpyBatchAsync") != it->batches ||
            fake_cuda_calls("cuMemcpyAsync") != it->singly) {
            fail_msg("%s: %llu batches, %llu copies by themselves", it->name,
                     (unsigned long long)fake_cuda_calls("cuMemcpyBatchAsync"),
                     (unsigned long long)fake_cuda_calls("cuMemcpyAsync"));
        }
        if (it->singly == 0) assert_int_equal(fake_cuda_batch_most(), 1024);
        unsigned warnings = it->refuse == 0 ? 0 : 1;
        assert_int_equal(heard_count(""), warnings);
        assert_int_equal(heard_count("refuses a batch of copies (CUDA_ERROR_"), warnings);
    }
}

/* The copy at fault is refused, not the batch. */
RIG_TEST(an_impossible_copy_of_a_batch_is_reported)
{
    rig_open(MIB, engines_only);
    rig_lay(100, 600, 0, 0, 0);
    rig.back[70].to = rig.memory + rig.bytes - 1; /* beyond the allocation */
    assert_int_equal(rig_put(&rig, false, RFT_COPY_STREAM), REFIT_ERR_COPY);
    assert_says(&rig.error, "a copy could not be queued: the driver refuses an address");
    assert_int_equal(fake_cuda_calls("cuMemcpyAsync"), 71);
    fake_cuda_settle();
    rig_lay(100, 600, 0, 0, 0);
    rig_round(7);
}

/* As in WSL2: a batch would lose the context there, a copy by itself is translated. */
RIG_TEST(registered_memory_at_other_addresses_is_kept_out_of_batches)
{
    fake_cuda_set_attribute(0, RFT_CU_ATTR_HOST_POINTERS, 0, true);
    rig_open(4 * MIB, gathering);
    rig_lay(3000, 600, 8, 8, 424);
    rig_round(1);
    assert_int_not_equal(fake_cuda_calls("cuLaunchKernel"), 0);
    assert_int_equal(fake_cuda_calls("cuMemcpyBatchAsync"), 0);
}

RIG_TEST(copies_of_nothing_are_left_out)
{
    rig_open(MIB, gathering);
    for (uint64_t size = 0; size <= 600; size += 600) {
        rig_lay(300, size, 8, 0, 0);
        for (uint32_t i = 0; i < 300; i += 3)
            rig.out[i].bytes = rig.back[i].bytes = 0;
        rig_round(3);
    }
    rig_lay(1, 0, 0, 0, 0);
    rig_round(3);
}

RIG_TEST(pageable_memory_is_kept_out_of_batches)
{
    rig_open(MIB, gathering);
    rft_device_host_unpin(rig.device, rig.host, rig.bytes);
    rig_lay(100, 600, 0, 0, 0);
    rig_round(5);
    assert_int_equal(fake_cuda_calls("cuMemcpyBatchAsync"), 0);
    assert_int_equal(fake_cuda_calls("cuMemcpyAsync"), 2 * 100);
    assert_int_equal(fake_cuda_calls("cuLaunchKernel"), 0);
}

/* Pinned to the device, pageable to the device, on the device, and within the host. */
RIG_TEST(a_batch_may_hold_all_kinds_of_copies)
{
    rig_open(4 * KIB, engines_only);
    char pageable[1024];
    rig_lay(4, 1024, 0, 0, 0);
    rig_fill(false, 9);
    memcpy(pageable, rig.host + 1024, 1024);
    char *there = fake_cuda_bytes((uintptr_t)rig.memory, 4096);
    memcpy(there + 3072, rig.host + 2048, 1024);
    rig.back[1].from = pageable;
    rig.back[2].from = rig.memory + 3072;
    rig.back[3].from = rig.host;
    rig.back[3].to = rig.host + 3072;
    assert_ok(rig_put(&rig, false, RFT_COPY_ANY));
    rig_wait(&rig);
    assert_memory_equal(there, rig.host, 3072);
    assert_memory_equal(rig.host + 3072, rig.host, 1024);
}

RIG_TEST(a_hundred_thousand_small_copies_take_few_calls)
{
    fake_cuda_set_memory(0, 256 * MIB);
    rig_open(56 * MIB, (const char *const[]){"offload.small_bytes=32KiB", NULL});
    rig_lay(100000, 500, 12, 12, 56);
    rig_round(2);
    uint64_t before = fake_cuda_calls(NULL);
    rig_fill(true, 3);
    assert_ok(rig_put(&rig, true, RFT_COPY_STREAM));
    assert_in_range(fake_cuda_calls(NULL) - before, 50, 200);
    rig_wait(&rig);
    rig_check(true, 3);
}

/* Whatever lies between two copies on the host, only padding is written. */
RIG_TEST(nothing_but_padding_is_touched)
{
    static const struct {
        uint64_t size, gap;
        uint32_t slack;
    } shapes[] = {{500, 12, 12}, {500, 12, 11}, {500, 100, 7},     {512, 0, 0},      {1, 511, 511},
                  {17, 3, 3},    {4096, 1, 0},  {100, 9000, 9000}, {20000, 480, 480}};
    rig_open(4 * MIB, gathering);
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        uint64_t step = shapes[i].size + shapes[i].gap;
        uint32_t count =
            (uint32_t)rft_min_u64(2000, 4 * MIB / rft_max_u64(step, shapes[i].size + 64));
        rig_lay(count, shapes[i].size, shapes[i].gap, shapes[i].slack, 64);
        rig_round((unsigned)i);
    }
    assert_int_not_equal(fake_cuda_calls("cuLaunchKernel"), 0);
}

RIG_TEST(large_and_small_copies_of_a_batch_take_either_way)
{
    rig_open(16 * MIB, gathering);
    rig_lay(200, 20000, 480, 480, 64);
    for (uint32_t i = 0; i < 200; i += 7) { /* as large as the room is: these are no small ones */
        rig.out[i].bytes = rig.back[i].bytes = 20000;
        rig.out[i].known_memory = rig.back[i].known_memory = false;
    }
    rig_round(4);
    assert_int_not_equal(fake_cuda_calls("cuLaunchKernel"), 0);
    assert_int_not_equal(fake_cuda_calls("cuMemcpyBatchAsync"), 0);
}

RIG_TEST(memory_that_was_not_checked_meets_no_kernel)
{
    rig_open(MIB, gathering);
    rig_lay(500, 600, 0, 0, 0);
    for (uint32_t i = 0; i < rig.count; i++)
        rig.out[i].known_memory = rig.back[i].known_memory = false;
    rig_round(4);
    assert_int_equal(fake_cuda_calls("cuLaunchKernel"), 0);
}

/* Two registrations side by side: host sides go on across the edge, copies and ranges do not. */
RIG_TEST(no_copy_straddles_two_registrations)
{
    const uint64_t edge = 600 * KIB;
    rig_open(2 * MIB, gathering);
    rft_device_host_unpin(rig.device, rig.host, rig.bytes);
    assert_ok(rft_device_host_pin(rig.device, rig.host, edge, false, &rig.error));
    assert_ok(rft_device_host_pin(rig.device, rig.host + edge, 2 * MIB - edge, false, &rig.error));
    rig_lay(1024, 2 * KIB, 0, 0, 0);
    rig_round(6);
    assert_int_not_equal(fake_cuda_calls("cuLaunchKernel"), 0);
    rft_device_host_unpin(rig.device, rig.host + edge, 2 * MIB - edge);
}

RIG_TEST(the_steady_state_allocates_nothing)
{
    rig_open(2 * MIB, gathering);
    rig_lay(2000, 600, 0, 0, 0);
    rig_round(1);
    uint64_t before = rft_alloc_count();
    uint64_t opened = fake_cuda_calls("cuEventCreate") + fake_cuda_calls("cuMemAlloc") +
                      fake_cuda_calls("cuMemHostAlloc");
    for (unsigned i = 0; i < 20; i++) {
        assert_ok(rig_put(&rig, i % 2 == 0, RFT_COPY_STREAM));
        rig_wait(&rig);
    }
    assert_int_equal(rft_alloc_count(), before);
    assert_int_equal(fake_cuda_calls("cuEventCreate") + fake_cuda_calls("cuMemAlloc") +
                         fake_cuda_calls("cuMemHostAlloc"),
                     opened);
}

int main(void)
{
    return test_run("cuda_copies");
}
