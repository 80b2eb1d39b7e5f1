/* Which vector instructions this CPU has; asked once, so that one binary serves every machine. */
#ifndef RFT_KERNEL_CPU_H
#define RFT_KERNEL_CPU_H

typedef enum rft_cpu_level {
    RFT_CPU_BASE = 0,
    RFT_CPU_AVX2 = 1,   /* and BMI1, BMI2, POPCNT, FMA and F16C, which came with it */
    RFT_CPU_AVX512 = 2, /* F, BW, DQ and VL besides */
    RFT_CPU_NEON = 1,   /* on ARM, where every 64-bit CPU has it */
} rft_cpu_level;

/* The level of this machine, or the lower one set by rft_cpu_limit. */
rft_cpu_level rft_cpu_get_level(void);

/* Tests run every variant with it; RFT_CPU_AVX512 brings back what the machine has. */
void rft_cpu_limit(rft_cpu_level most);

#endif
