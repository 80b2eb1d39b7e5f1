/* master_wide: the wide forms of splitting and joining, which master.c chooses between. */
#ifndef RFT_KERNEL_MASTER_WIDE_H
#define RFT_KERNEL_MASTER_WIDE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What all take a multiple of: elements whose remainders make one line. */
#define RFT_MASTER_STEP ((size_t)32)

/* Write the remainders; return how many elements are exceptions. */
uint32_t rft_master_split_avx2(char *low, const char *master, const char *weights, size_t count);
uint32_t rft_master_split_avx512(char *low, const char *master, const char *weights, size_t count);
uint32_t rft_master_split_neon(char *low, const char *master, const char *weights, size_t count);

/* Write what weights and remainders stand for. `streams`: round the caches; then `master` is
 * aligned to 64 bytes. */
void rft_master_join_avx2(char *master, const char *weights, const char *low, size_t count,
                          bool streams);
void rft_master_join_avx512(char *master, const char *weights, const char *low, size_t count,
                            bool streams);
void rft_master_join_neon(char *master, const char *weights, const char *low, size_t count);

#endif
