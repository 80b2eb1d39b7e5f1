/*
 * The digest's scalar form, which every other form must equal bit for bit, and the choice between
 * them at run time.
 */
#include "kernels/digest.h"

#include <string.h>

#include "kernels/copy.h"

#define WORD_STEP  UINT64_C(0x9E3779B97F4A7C15)
#define LENGTH_MIX UINT64_C(0xC2B2AE3D27D4EB4F)

static uint64_t load_word(const unsigned char *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static uint64_t word_part(uint64_t word, uint64_t key)
{
    uint64_t x = word ^ key;
    return (x & UINT32_MAX) * (x >> 32) + (x >> 32 | x << 32);
}

uint64_t rft_digest_part(const void *data, size_t bytes, uint64_t offset)
{
    const unsigned char *at = data;
    uint64_t key = (offset / 8 + 1) * WORD_STEP;
    uint64_t sum = 0;
    for (; bytes >= 8; bytes -= 8, at += 8, key += WORD_STEP) {
        sum += word_part(load_word(at), key);
    }
    if (bytes == 0) return sum;
    unsigned char last[8] = {0};
    memcpy(last, at, bytes);
    return sum + word_part(load_word(last), key);
}

uint64_t rft_digest_copy_part(void *to, const void *from, size_t bytes, uint64_t offset)
{
    rft_copy_bytes(to, from, bytes);
    return rft_digest_part(from, bytes, offset);
}

uint64_t rft_digest_finish(uint64_t sum, uint64_t bytes)
{
    uint64_t x = sum ^ bytes * LENGTH_MIX;
    x = (x ^ x >> 33) * UINT64_C(0xFF51AFD7ED558CCD);
    x = (x ^ x >> 33) * UINT64_C(0xC4CEB9FE1A85EC53);
    return x ^ x >> 33;
}
