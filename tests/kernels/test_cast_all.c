/* fp32 to bf16 over the whole range of floats: every seventh of the 2^32, at every level. */
#include <stdlib.h>

#include "kernels/cast.h"
#include "tests/kernels/cast_oracle.h"
#include "tests/kernels/levels.h"
#include "tests/support/test.h"

#define STEP  7u
#define COUNT 65536u

static uint32_t bits[COUNT];
static float values[COUNT];
static uint16_t expected[COUNT], results[COUNT];

static void check_values(void)
{
    memset(results, 0, sizeof results);
    rft_cast_bf16(results, values, COUNT);
    assert_memory_equal(results, expected, sizeof results);
}

static void all_floats_are_rounded_right(void **state)
{
    for (uint64_t first = 0; first < UINT64_C(1) << 32; first += (uint64_t)STEP * COUNT) {
        for (uint32_t i = 0; i < COUNT; i++) {
            bits[i] = (uint32_t)first + STEP * i;
            expected[i] = cast_oracle(bits[i]);
        }
        memcpy(values, bits, sizeof values);
        on_every_level(check_values);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(all_floats_are_rounded_right)};
    return cmocka_run_group_tests_name("cast_all", tests, NULL, NULL);
}
