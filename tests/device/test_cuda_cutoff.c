/* The size from which on copies go to the copy engines alone: it is chosen from measured times,
 * measured once, and never makes copies fail. */
#include "tests/device/copy_rig.h"

#include "device/cuda/cuda_bounce.h"

#define SIZES RFT_CUDA_CUTOFF_SIZES

static rft_cuda_cutoff_times times_of(const float engines[SIZES], uint32_t count)
{
    rft_cuda_cutoff_times times = {.count = count};
    for (uint32_t i = 0; i < SIZES; i++) {
        times.engines[i] = engines[i];
        times.gathered[i] = 1;
    }
    return times;
}

/* Times of the engines for 4 KiB, 8 KiB, … where gathering takes 1, and the size that follows. */
typedef struct times_case {
    const char *name;
    float engines[SIZES];
    uint64_t size;
} times_case;

static const times_case measured[] = {
    {"the engines catch up at 32 KiB", {9, 8, 7, 0.9f, 0.9f, 0.9f}, 32 * KIB},
    {"a tie is won by the engines", {9, 1, 1, 1, 1, 1}, 8 * KIB},
    {"the engines catch up at the last size", {9, 8, 7, 6, 5, 0.9f}, 128 * KIB},
    {"a single lucky time, the first", {0.5f, 8, 7, 6, 0.9f, 0.9f}, 64 * KIB},
    {"a single lucky time, the second", {9, 0.5f, 7, 6, 0.9f, 0.9f}, 64 * KIB},
    {"the engines never catch up", {9, 8, 7, 6, 5, 4}, RFT_CUDA_CUTOFF_MOST},
    {"the engines win throughout", {0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f}, 0},
};

TEST(the_size_is_where_the_engines_catch_up)
{
    for (size_t i = 0; i < COUNT_OF(measured); i++) {
        rft_cuda_cutoff_times times = times_of(measured[i].engines, SIZES);
        uint64_t size = rft_cuda_cutoff_choose(&times);
        if (size != measured[i].size) {
            fail_msg("%s: %llu bytes", measured[i].name, (unsigned long long)size);
        }
    }
}

TEST(measuring_ends_when_the_engines_have_won_twice)
{
    const float engines[SIZES] = {9, 8, 0.5f, 0.5f, 0, 0};
    for (uint32_t count = 0; count <= 4; count++) {
        rft_cuda_cutoff_times times = times_of(engines, count);
        assert_int_equal(rft_cuda_cutoff_is_clear(&times), count == 4);
    }
    rft_cuda_cutoff_times times = times_of(engines, 4);
    assert_int_equal(rft_cuda_cutoff_choose(&times), 16 * KIB);
}

/* All sizes that may turn out to be small. */
static void open_mixed(void)
{
    heard_begin(REFIT_LOG_INFO);
    rig_open(8 * MIB, (const char *const[]){"offload.staging_bytes=4MiB", NULL});
    rig_lay(48, 130 * KIB, 512, 512, 512);
    for (uint32_t i = 0; i < rig.count; i++) {
        rig.out[i].bytes = rig.back[i].bytes = (KIB << i % 8) + i;
        rig.out[i].slack = rig.back[i].slack = 0;
    }
    for (uint32_t i = 0; i < rig.count; i += 2) { /* pairs that go on from each other */
        rig.out[i + 1].to = (char *)rig.out[i].to + rig.out[i].bytes;
        rig.back[i + 1].from = rig.out[i + 1].to;
    }
    rig.slack = 0;
}

/* The fake driver has no fixed speed: either a size is found, or the log says why not. */
RIG_TEST(measuring_leaves_the_copies_right)
{
    open_mixed();
    assert_int_equal(rig_small_bytes(), 0);
    rig_round(1);
    uint64_t small = rig_small_bytes();
    assert_int_equal(heard_count("gathered by a kernel"), small == 0 ? 0 : 1);
    assert_int_equal(heard_count("small copies"), small == 0 ? 1 : 0);
    if (small != 0) assert_in_range(small, 8 * KIB, 128 * KIB);
    assert_int_not_equal(fake_cuda_calls("cuLaunchKernel"), 0);
}

RIG_TEST(what_is_configured_is_not_measured)
{
    rig_open(4 * MIB, (const char *const[]){"offload.small_bytes=20KiB", NULL});
    assert_int_equal(rig_small_bytes(), 20 * KIB);
    rig_lay(100, 20 * KIB, 0, 0, 0);
    rig_round(1);
    assert_int_equal(fake_cuda_calls("cuLaunchKernel"), 0);
    rig_lay(100, 20 * KIB - 1, 0, 0, 0);
    rig_round(1);
    assert_int_not_equal(fake_cuda_calls("cuLaunchKernel"), 0);
    assert_int_equal(fake_cuda_calls("cuEventElapsedTime"), 0);
}

/* Nothing larger than a quarter of a half is small. */
RIG_TEST(the_size_keeps_to_the_staging_memory)
{
    rig_open(4 * MIB,
             (const char *const[]){"offload.small_bytes=1MiB", "offload.staging_bytes=1MiB", NULL});
    assert_int_equal(rig_small_bytes(), 256 * KIB);
    rig_lay(16, 256 * KIB - 1, 1, 1, 1);
    rig_round(1);
    assert_int_not_equal(fake_cuda_calls("cuLaunchKernel"), 0);
}

/* The engines do the work; some batches later it is tried again. Each time two events go. */
RIG_TEST(a_measurement_that_fails_is_made_again_later)
{
    open_mixed();
    fake_cuda_fail("cuEventElapsedTime", 1, 1000, RFT_CU_INVALID_VALUE);
    rig_round(1);
    assert_int_equal(fake_cuda_calls("cuEventDestroy"), 2);
    for (unsigned i = 0; i < 7; i++)
        rig_round(i);
    assert_int_equal(fake_cuda_calls("cuEventDestroy"), 2);
    rig_round(1);
    assert_int_equal(fake_cuda_calls("cuEventDestroy"), 4);
    assert_int_equal(rig_small_bytes(), 0);
    assert_int_equal(heard_count("small copies"), 1);
}

/* The bounce buffer's own stream stands: the measurement gives up, and the bounce buffer rests
 * until it is idle. */
RIG_TEST(a_gpu_that_is_busy_is_not_waited_for)
{
    open_mixed();
    rig_fill(true, 1);
    fake_cuda_stop();
    assert_ok(rig_put(&rig, true, RFT_COPY_STREAM));
    assert_int_equal(rig_small_bytes(), 0);
    assert_int_equal(heard_count("small copies"), 1);
    fake_cuda_go();
    rig_wait(&rig);
    rig_check(true, 1);
}

RIG_TEST(every_failed_call_leaves_the_stream_usable)
{
    static const char *const calls[] = {"cuEventCreate", "cuEventRecord", "cuEventQuery",
                                        "cuEventElapsedTime", "cuLaunchKernel"};
    for (size_t i = 0; i < COUNT_OF(calls); i++) {
        for (unsigned nth = 1; nth < 6; nth++) {
            rig_case_again();
            open_mixed();
            rig_fill(true, 2);
            fake_cuda_fail(calls[i], nth, 1, RFT_CU_INVALID_VALUE);
            refit_status status = rig_put(&rig, true, RFT_COPY_STREAM);
            fake_cuda_forget_faults();
            fake_cuda_settle();
            if (status == REFIT_OK) rig_check(true, 2);
            rig_round(3);
        }
    }
}

int main(void)
{
    return test_run("cuda_cutoff");
}
