/* digest_word: what a word adds to a digest (kernels/digest.h), for the GPU's kernels. */
#ifndef RFT_KERNEL_DIGEST_WORD_H
#define RFT_KERNEL_DIGEST_WORD_H

#include "kernels/gpu.h"

#define DIGEST_STEP UINT64_C(0x9E3779B97F4A7C15)

RFT_GPU_PART uint64_t digest_word(uint64_t word, uint64_t key)
{
    uint64_t x = word ^ key;
    return (x & 0xFFFFFFFFu) * (x >> 32) + (x >> 32 | x << 32);
}

#endif
