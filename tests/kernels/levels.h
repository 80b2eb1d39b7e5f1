/* Runs a check, or a group of tests, with every vector level that this machine has, the base level
 * first. */
#ifndef LEVELS_H
#define LEVELS_H

#include "kernels/cpu.h"
#include "tests/support/test.h"

static inline bool has_level(int level)
{
    rft_cpu_limit((rft_cpu_level)level);
    return rft_cpu_get_level() == (rft_cpu_level)level;
}

static inline void on_every_level(void (*check)(void))
{
    for (int level = RFT_CPU_BASE; level <= RFT_CPU_AVX512; level++)
        if (has_level(level)) check();
    rft_cpu_limit(RFT_CPU_AVX512);
}

static inline int run_on_every_level(const char *name)
{
    size_t count;
    const struct CMUnitTest *tests = test_listed(&count);
    int failed = 0;
    for (int level = RFT_CPU_BASE; level <= RFT_CPU_AVX512; level++) {
        if (!has_level(level)) continue;
        print_message("[  LEVEL   ] %d\n", level);
        failed += _cmocka_run_group_tests(name, tests, count, NULL, NULL);
    }
    rft_cpu_limit(RFT_CPU_AVX512);
    return failed;
}

#endif
