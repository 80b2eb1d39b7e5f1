/*
 * Every fp32 there is comes back from its remainder and its weight: all 2^32 patterns of bits, with
 * weights that are rounded to nearest as PyTorch does it, cut off, next to the rounding, and
 * random. Each level writes what the base one does: for rounded weights with all patterns, for
 * others, with which few blocks take the wide forms, with one part in 16. Of rounded weights, the
 * exceptions are those that can be counted by hand.
 */
#include <stdlib.h>

#include "kernels/cast.h"
#include "kernels/master_rules.h"
#include "tests/kernels/levels.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"

#define COUNT RFT_MASTER_UNIT

static uint32_t masters[COUNT], back[COUNT];
static uint16_t weights[COUNT];
static unsigned char *coded, *expected;
static size_t bytes;
static bool compares; /* with what the base level wrote */

static void check_level(void)
{
    rft_master_verdict verdict = {0};
    rft_master_job job = {.master = masters,
                          .weights = weights,
                          .coded = coded,
                          .verdict = &verdict,
                          .elements = COUNT,
                          .room = RFT_MASTER_ROOM};
    rft_master_split(&job);
    rft_master_list(&job);
    size_t written = bytes - RFT_MASTER_ROOM + verdict.need;
    if (compares && rft_cpu_get_level() == RFT_CPU_BASE) memcpy(expected, coded, written);
    if (compares) assert_memory_equal(coded, expected, written);
    job.master = back;
    rft_master_join(&job);
    assert_int_equal(verdict.found, 0);
    assert_memory_equal(back, masters, sizeof masters);
}

static uint64_t count_exceptions(void)
{
    uint64_t exceptions = 0;
    rft_master_entry table[RFT_MASTER_UNIT / RFT_MASTER_BLOCK];
    memcpy(table, coded, sizeof table);
    for (size_t i = 0; i < COUNT_OF(table); i++) {
        exceptions += table[i].exceptions;
    }
    return exceptions;
}

typedef enum way { ROUNDED, CUT, NEXT, RANDOM } way;

static void make_weights(way made, uint64_t *seed)
{
    float values[256];
    for (uint32_t i = 0; i < COUNT; i += 256) {
        memcpy(values, masters + i, sizeof values);
        rft_cast_bf16(weights + i, values, 256);
    }
    for (uint32_t i = 0; made != ROUNDED && i < COUNT; i++) {
        if (made == CUT) weights[i] = (uint16_t)(masters[i] >> 16);
        if (made == NEXT) weights[i] = (uint16_t)(weights[i] + (i % 3 == 0 ? -1 : 1));
        if (made == RANDOM) weights[i] = (uint16_t)(seeded_next(seed) >> 33);
    }
    /* PyTorch's CPU gives another NaN than its GPU. */
    for (uint32_t i = 0; made == ROUNDED && i < COUNT; i++) {
        if (weights[i] == 0x7FFF && i % 2 == 0) weights[i] = 0x7FC0;
    }
}

static uint64_t go_through_all(way made)
{
    uint64_t exceptions = 0, seed = 9;
    bytes = (size_t)rft_master_bytes(COUNT, RFT_MASTER_ROOM);
    coded = aligned_alloc(64, bytes);
    expected = aligned_alloc(64, bytes);
    assert_true(coded != NULL && expected != NULL);
    for (uint64_t first = 0; first < UINT64_C(1) << 32; first += COUNT) {
        for (uint32_t i = 0; i < COUNT; i++) {
            masters[i] = (uint32_t)first + i;
        }
        make_weights(made, &seed);
        compares = made == ROUNDED || first / COUNT % 16 == 0;
        if (compares) {
            on_every_level(check_level);
        } else {
            check_level();
        }
        exceptions += count_exceptions();
    }
    free(coded);
    free(expected);
    return exceptions;
}

/* In the middle above an odd upper half that is no NaN's; and NaNs, but for those that a weight of
 * 0x7FFF, which the odd ones have, or 0x7FC0, the even ones, gives. */
static void rounded_weights_give_every_master_back(void **state)
{
    const uint64_t middles = (65536 - 256) / 2, nans = 2 * ((UINT64_C(1) << 23) - 1);
    const uint64_t upper_7fff = 16384, upper_7ffe = 16384; /* odd, <= 0x8000; odd, > 0x8000 */
    const uint64_t upper_7fc0 = 16385, upper_7fbf = 16383; /* even */
    uint64_t given = upper_7fff + upper_7ffe + upper_7fc0 + upper_7fbf;
    assert_int_equal(go_through_all(ROUNDED), middles + nans - given);
}

static void weights_that_were_cut_off_give_every_master_back(void **state)
{
    assert_int_equal(go_through_all(CUT), UINT64_C(65536) * 32767);
}

static void weights_next_to_the_rounding_give_every_master_back(void **state)
{
    assert_true(go_through_all(NEXT) > UINT64_C(4200000000));
}

static void random_weights_give_every_master_back(void **state)
{
    assert_true(go_through_all(RANDOM) > UINT64_C(4200000000));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rounded_weights_give_every_master_back),
        cmocka_unit_test(weights_that_were_cut_off_give_every_master_back),
        cmocka_unit_test(weights_next_to_the_rounding_give_every_master_back),
        cmocka_unit_test(random_weights_give_every_master_back),
    };
    return cmocka_run_group_tests_name("master_all", tests, NULL, NULL);
}
