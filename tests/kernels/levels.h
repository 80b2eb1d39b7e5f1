/* Runs a check with every vector level that this machine has, the base level first. */
#ifndef LEVELS_H
#define LEVELS_H

#include "kernels/cpu.h"

static inline void on_every_level(void (*check)(void))
{
    for (int level = RFT_CPU_BASE; level <= RFT_CPU_AVX512; level++) {
        rft_cpu_limit((rft_cpu_level)level);
        if (rft_cpu_get_level() == (rft_cpu_level)level) check();
    }
    rft_cpu_limit(RFT_CPU_AVX512);
}

#endif
