/* Copies move exactly their bytes at every level, size and alignment, and touch nothing else. */
#include "kernels/copy.h"
#include "tests/kernels/levels.h"
#include "tests/kernels/random_bytes.h"
#include "tests/support/test.h"

#define ROOM  ((size_t)3 << 20)
#define GUARD ((size_t)256)

typedef void (*copy_fn)(void *to, const void *from, size_t bytes);

static unsigned char there[ROOM + GUARD], back[ROOM + 2 * GUARD];

static void check_copy(copy_fn copy, size_t to, size_t from, size_t bytes)
{
    unsigned char untouched[GUARD];
    memset(untouched, 0xA5, sizeof untouched);
    memset(back, 0xA5, GUARD + to);
    memset(back + GUARD + to + bytes, 0xA5, GUARD - to);
    copy(back + GUARD + to, there + from, bytes);
    assert_memory_equal(back + GUARD + to, there + from, bytes);
    assert_memory_equal(back, untouched, GUARD);
    assert_memory_equal(back + GUARD + to + bytes, untouched, GUARD - to);
}

TEST(small_copies_are_exact)
{
    for (size_t bytes = 0; bytes <= 300; bytes++) {
        check_copy(rft_copy_bytes, bytes % 61, bytes % 37, bytes);
        check_copy(rft_copy_piece, bytes % 61, bytes % 37, bytes);
    }
}

/* Sizes around both thresholds, at every alignment of either side. */
TEST(large_copies_are_exact)
{
    static const size_t sizes[] = {4095,          4096,    4097,           4096 + 127,
                                   (1 << 20) - 1, 1 << 20, (1 << 20) + 129};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        for (size_t shift = 0; shift < 64; shift += i < 4 ? 1 : 21) {
            check_copy(rft_copy_bytes, shift, 0, sizes[i]);
            check_copy(rft_copy_piece, shift, 3, sizes[i]);
            check_copy(rft_copy_piece, 0, shift, sizes[i]);
        }
    }
    check_copy(rft_copy_bytes, 1, 2, ROOM - 2);
}

TEST(the_limit_only_lowers_the_level)
{
    rft_cpu_level now = rft_cpu_get_level();
    rft_cpu_limit(RFT_CPU_AVX512);
    rft_cpu_level machine = rft_cpu_get_level();
    rft_cpu_limit(RFT_CPU_BASE);
    assert_int_equal(rft_cpu_get_level(), RFT_CPU_BASE);
    rft_cpu_limit(RFT_CPU_AVX2);
    assert_true(rft_cpu_get_level() <= RFT_CPU_AVX2);
    rft_cpu_limit(RFT_CPU_AVX512);
    assert_int_equal(rft_cpu_get_level(), machine);
    rft_cpu_limit(now);
}

int main(void)
{
    uint64_t seed = 3;
    fill_random(there, sizeof there, &seed);
    return run_on_every_level("copy");
}
