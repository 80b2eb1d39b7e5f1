/* cast_wide: the wide forms of the cast, which cast.c chooses between. */
#ifndef RFT_KERNEL_CAST_WIDE_H
#define RFT_KERNEL_CAST_WIDE_H

#include <stdbool.h>
#include <stddef.h>

/* What all take a multiple of: elements that make one line of results. */
#define RFT_CAST_BLOCK ((size_t)32)

/* `streams`: the results go round the caches; then `to` is aligned to 64 bytes. */
void rft_cast_avx2(char *to, const char *from, size_t count, bool streams);
void rft_cast_avx512(char *to, const char *from, size_t count, bool streams);
void rft_cast_neon(char *to, const char *from, size_t count);

#endif
