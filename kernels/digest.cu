/*
 * digest: the sum of kernels/digest.h. Threads take words in turn and add what they found, first
 * within a warp, then within a block, and each block once to the result: a sum, so that the order
 * does not matter.
 *
 * Data on a boundary of 8 bytes is read by pairs of words, with one word before them where the
 * first pair would lie across a boundary of 16. Words anywhere else are put together from the two
 * that they lie across; the last one byte by byte, so that nothing after the data is read.
 *
 * What is read can be copied on the way, to a boundary of 8 bytes: by pairs where both ends agree
 * modulo 16, else by words. `to` is NULL where it is not.
 */
#include "kernels/digest_word.h"

RFT_GPU_PART uint64_t digest_pair(ulonglong2 pair, uint64_t key)
{
    return digest_word(pair.x, key) + digest_word(pair.y, key + DIGEST_STEP);
}

/* A word of which `bytes` are there; the others are zero. */
RFT_GPU_PART uint64_t digest_gather(const unsigned char *from, unsigned bytes)
{
    uint64_t word = 0;
    for (unsigned i = 0; i < bytes; i++) {
        word |= (uint64_t)from[i] << 8 * i;
    }
    return word;
}

RFT_GPU_PART void digest_put(ulonglong2 *to, uint64_t i, ulonglong2 pair)
{
    if (to != NULL) __stcs(to + i, pair);
}

/* The bytes of word `i`, which are all there. */
RFT_GPU_PART void digest_put_word(unsigned char *to, uint64_t i, uint64_t word)
{
    if (to != NULL) ((uint64_t *)to)[i] = word;
}

/* `key`: of the first pair's first word. Four loads are under way before the first is used. */
RFT_GPU_PART uint64_t digest_pairs(ulonglong2 *to, const ulonglong2 *from, uint64_t count,
                                   uint64_t key)
{
    uint64_t threads = (uint64_t)gridDim.x * blockDim.x;
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint64_t step = 2 * threads * DIGEST_STEP, sum = 0;
    key += 2 * i * DIGEST_STEP;
    for (; i + 3 * threads < count; i += 4 * threads, key += 4 * step) {
        ulonglong2 a = __ldcs(from + i);
        ulonglong2 b = __ldcs(from + i + threads);
        ulonglong2 c = __ldcs(from + i + 2 * threads);
        ulonglong2 d = __ldcs(from + i + 3 * threads);
        digest_put(to, i, a);
        digest_put(to, i + threads, b);
        digest_put(to, i + 2 * threads, c);
        digest_put(to, i + 3 * threads, d);
        sum += digest_pair(a, key) + digest_pair(b, key + step);
        sum += digest_pair(c, key + 2 * step) + digest_pair(d, key + 3 * step);
    }
    for (; i < count; i += threads, key += step) {
        ulonglong2 pair = __ldcs(from + i);
        digest_put(to, i, pair);
        sum += digest_pair(pair, key);
    }
    return sum;
}

/* The word at `from`, which lies across two aligned ones. */
RFT_GPU_PART uint64_t digest_funnel(const unsigned char *from)
{
    unsigned aside = (unsigned)((uintptr_t)from % 8);
    const uint64_t *around = (const uint64_t *)(from - aside);
    return around[0] >> 8 * aside | around[1] << (64 - 8 * aside);
}

/* The thread that does what is left over. */
RFT_GPU_PART bool digest_is_first(void)
{
    return blockIdx.x == 0 && threadIdx.x == 0;
}

/* Words on their boundaries. `to`, if it is not NULL, agrees with `from` modulo 16. */
RFT_GPU_PART uint64_t digest_even(unsigned char *to, const unsigned char *from, uint64_t words,
                                  uint64_t key)
{
    uint64_t single = words != 0 && (uintptr_t)from % 16 != 0 ? 1 : 0;
    uint64_t pairs = (words - single) / 2;
    uint64_t done = single + 2 * pairs;
    ulonglong2 *put = to == NULL ? NULL : (ulonglong2 *)(to + 8 * single);
    const ulonglong2 *paired = (const ulonglong2 *)(from + 8 * single);
    uint64_t sum = digest_pairs(put, paired, pairs, key + single * DIGEST_STEP);
    if (!digest_is_first()) return sum;
    const uint64_t *all = (const uint64_t *)from;
    if (single != 0) {
        digest_put_word(to, 0, all[0]);
        sum += digest_word(all[0], key);
    }
    if (done < words) {
        digest_put_word(to, done, all[done]);
        sum += digest_word(all[done], key + done * DIGEST_STEP);
    }
    return sum;
}

/* Words that lie, or are put, anywhere else. */
RFT_GPU_PART uint64_t digest_askew(unsigned char *to, const unsigned char *from, uint64_t words,
                                   uint64_t key)
{
    uint64_t threads = (uint64_t)gridDim.x * blockDim.x, sum = 0;
    bool even = (uintptr_t)from % 8 == 0;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += threads) {
        const unsigned char *at = from + 8 * i;
        uint64_t word;
        if (even) {
            word = *(const uint64_t *)at;
        } else {
            word = i + 1 == words ? digest_gather(at, 8) : digest_funnel(at);
        }
        digest_put_word(to, i, word);
        sum += digest_word(word, key + i * DIGEST_STEP);
    }
    return sum;
}

/* The last bytes, fewer than a word. */
RFT_GPU_PART uint64_t digest_last(unsigned char *to, const unsigned char *from, unsigned bytes,
                                  uint64_t key)
{
    for (unsigned i = 0; to != NULL && i < bytes; i++) {
        to[i] = from[i];
    }
    return digest_word(digest_gather(from, bytes), key);
}

/* What this thread finds. */
RFT_GPU_PART uint64_t digest_share(unsigned char *to, const unsigned char *from, uint64_t bytes,
                                   uint64_t offset)
{
    uint64_t key = (offset / 8 + 1) * DIGEST_STEP;
    uint64_t words = bytes / 8;
    bool alike = to == NULL || (uintptr_t)to % 16 == (uintptr_t)from % 16;
    bool even = (uintptr_t)from % 8 == 0;
    uint64_t sum =
        even && alike ? digest_even(to, from, words, key) : digest_askew(to, from, words, key);
    if (digest_is_first() && bytes % 8 != 0) {
        unsigned char *rest = to == NULL ? NULL : to + 8 * words;
        sum +=
            digest_last(rest, from + 8 * words, (unsigned)(bytes % 8), key + words * DIGEST_STEP);
    }
    return sum;
}

/* What the threads found, as one; only thread 0 gets it. `of_warps`: shared by the block. */
RFT_GPU_PART uint64_t digest_add_block(uint64_t sum, uint64_t *of_warps)
{
    for (unsigned apart = RFT_GPU_WARP / 2; apart > 0; apart /= 2) {
        sum += __shfl_down_sync(0xFFFFFFFFu, sum, apart);
    }
    if (threadIdx.x % RFT_GPU_WARP == 0) of_warps[threadIdx.x / RFT_GPU_WARP] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return 0;
    for (unsigned warp = 1; warp < blockDim.x / RFT_GPU_WARP; warp++) {
        sum += of_warps[warp];
    }
    return sum;
}

/* By all threads of a block. */
RFT_GPU_PART void digest_add(uint64_t sum, uint64_t *of_warps, uint64_t *total)
{
    sum = digest_add_block(sum, of_warps);
    if (threadIdx.x == 0) atomicAdd((unsigned long long *)total, (unsigned long long)sum);
}

RFT_GPU_KERNEL void rft_digest_kernel(const void *data, uint64_t bytes, uint64_t offset,
                                      uint64_t *total)
{
    __shared__ uint64_t of_warps[RFT_GPU_THREADS / RFT_GPU_WARP];
    const unsigned char *from = (const unsigned char *)data;
    digest_add(digest_share(NULL, from, bytes, offset), of_warps, total);
}

RFT_GPU_KERNEL void rft_digest_copy_kernel(void *to, const void *data, uint64_t bytes,
                                           uint64_t offset, uint64_t *total)
{
    __shared__ uint64_t of_warps[RFT_GPU_THREADS / RFT_GPU_WARP];
    const unsigned char *from = (const unsigned char *)data;
    digest_add(digest_share((unsigned char *)to, from, bytes, offset), of_warps, total);
}
