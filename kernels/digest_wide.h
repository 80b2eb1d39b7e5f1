/* digest_wide: the wide forms of the digest, which digest.c chooses between. */
#ifndef RFT_KERNEL_DIGEST_WIDE_H
#define RFT_KERNEL_DIGEST_WIDE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The key of word i is (i + 1) * RFT_DIGEST_STEP. */
#define RFT_DIGEST_STEP UINT64_C(0x9E3779B97F4A7C15)

/* What all take a multiple of. */
#define RFT_DIGEST_BLOCK ((size_t)256)

/* The part of `bytes` at `from`, whose first word has the key `key`. With a `to` the
 * bytes are copied there, round the caches if it `streams`, to whole lines then; NULL: they are
 * only read. */
uint64_t rft_digest_avx2(char *to, const char *from, size_t bytes, uint64_t key, bool streams);
uint64_t rft_digest_avx512(char *to, const char *from, size_t bytes, uint64_t key, bool streams);
uint64_t rft_digest_neon(char *to, const char *from, size_t bytes, uint64_t key);

#endif
