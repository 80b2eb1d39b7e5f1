/* Copies move exactly their bytes at every level, size and alignment, and touch nothing else. */
#include <stdlib.h>

#include "kernels/copy.h"
#include "tests/kernels/levels.h"
#include "tests/support/test.h"

#define ROOM  ((size_t)3 << 20)
#define GUARD ((size_t)256)

typedef void (*copy_fn)(void *to, const void *from, size_t bytes);

static unsigned char *there, *back;

static int set_up(void **state)
{
    there = malloc(ROOM + GUARD);
    back = malloc(ROOM + 2 * GUARD);
    if (there == NULL || back == NULL) return -1;
    for (size_t i = 0; i < ROOM + GUARD; i++) {
        there[i] = (unsigned char)((i * UINT64_C(0x9E3779B97F4A7C15)) >> 56);
    }
    return 0;
}

static int tear_down(void **state)
{
    free(there);
    free(back);
    return 0;
}

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

static void check_small(void)
{
    for (size_t bytes = 0; bytes <= 300; bytes++) {
        check_copy(rft_copy_bytes, bytes % 61, bytes % 37, bytes);
        check_copy(rft_copy_piece, bytes % 61, bytes % 37, bytes);
    }
}

static void small_copies_are_exact(void **state)
{
    on_every_level(check_small);
}

/* Sizes around both thresholds, at every alignment of either side. */
static void check_large(void)
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

static void large_copies_are_exact(void **state)
{
    on_every_level(check_large);
}

static void the_limit_only_lowers_the_level(void **state)
{
    rft_cpu_level machine = rft_cpu_get_level();
    rft_cpu_limit(RFT_CPU_BASE);
    assert_int_equal(rft_cpu_get_level(), RFT_CPU_BASE);
    rft_cpu_limit(RFT_CPU_AVX2);
    assert_true(rft_cpu_get_level() <= RFT_CPU_AVX2);
    rft_cpu_limit(RFT_CPU_AVX512);
    assert_int_equal(rft_cpu_get_level(), machine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_copies_are_exact),
        cmocka_unit_test(large_copies_are_exact),
        cmocka_unit_test(the_limit_only_lowers_the_level),
    };
    return cmocka_run_group_tests_name("copy", tests, set_up, tear_down);
}
