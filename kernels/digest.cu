/*
 * digest: the sum of kernels/digest.h. Warps take chunks of RFT_DIGEST_CHUNK bytes, of one digest
 * or of a list of them, and add what they found, once for as many chunks of one digest as come in a
 * row: a sum, so that the order does not matter.
 *
 * Data on a boundary of 8 bytes is read by pairs of words, with one word before them where the
 * first pair would lie across a boundary of 16. Words anywhere else are put together from the two
 * that they lie across; the last one byte by byte, so that nothing after the data is read.
 *
 * What is read can be copied on the way, to a boundary of 8 bytes: by pairs where both ends agree
 * modulo 16, else by words. `to` is NULL where it is not.
 */
#include "kernels/digest_job.h"
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

RFT_GPU_PART void digest_put(ulonglong2 *to, unsigned i, ulonglong2 pair)
{
    if (to != NULL) __stcs(to + i, pair);
}

/* The bytes of word `i`, which are all there. */
RFT_GPU_PART void digest_put_word(unsigned char *to, unsigned i, uint64_t word)
{
    if (to != NULL) ((uint64_t *)to)[i] = word;
}

RFT_GPU_PART unsigned digest_lane(void)
{
    return threadIdx.x % RFT_GPU_WARP;
}

/* `key`: of the first pair's first word. Four loads are under way before the first is used. */
RFT_GPU_PART uint64_t digest_pairs(ulonglong2 *to, const ulonglong2 *from, unsigned count,
                                   uint64_t key)
{
    const unsigned lanes = RFT_GPU_WARP;
    const uint64_t step = 2 * lanes * DIGEST_STEP;
    unsigned i = digest_lane();
    uint64_t sum = 0;
    key += 2 * i * DIGEST_STEP;
    RFT_GPU_ROLLED
    for (; i + 3 * lanes < count; i += 4 * lanes, key += 4 * step) {
        ulonglong2 a = __ldcs(from + i);
        ulonglong2 b = __ldcs(from + i + lanes);
        ulonglong2 c = __ldcs(from + i + 2 * lanes);
        ulonglong2 d = __ldcs(from + i + 3 * lanes);
        digest_put(to, i, a);
        digest_put(to, i + lanes, b);
        digest_put(to, i + 2 * lanes, c);
        digest_put(to, i + 3 * lanes, d);
        sum += digest_pair(a, key) + digest_pair(b, key + step);
        sum += digest_pair(c, key + 2 * step) + digest_pair(d, key + 3 * step);
    }
    RFT_GPU_ROLLED
    for (; i < count; i += lanes, key += step) {
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

/* Words on their boundaries. `to`, if it is not NULL, agrees with `from` modulo 16. */
RFT_GPU_PART uint64_t digest_even(unsigned char *to, const unsigned char *from, unsigned words,
                                  uint64_t key)
{
    unsigned single = words != 0 && (uintptr_t)from % 16 != 0 ? 1 : 0;
    unsigned pairs = (words - single) / 2;
    unsigned done = single + 2 * pairs;
    ulonglong2 *put = to == NULL ? NULL : (ulonglong2 *)(to + 8 * single);
    const ulonglong2 *paired = (const ulonglong2 *)(from + 8 * single);
    uint64_t sum = digest_pairs(put, paired, pairs, key + single * DIGEST_STEP);
    if (digest_lane() != 0) return sum;
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
RFT_GPU_PART uint64_t digest_askew(unsigned char *to, const unsigned char *from, unsigned words,
                                   uint64_t key)
{
    uint64_t sum = 0;
    bool even = (uintptr_t)from % 8 == 0;
    for (unsigned i = digest_lane(); i < words; i += RFT_GPU_WARP) {
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

/* What this lane finds in a chunk. `key`: of its first word. */
RFT_GPU_PART uint64_t digest_share(unsigned char *to, const unsigned char *from, unsigned bytes,
                                   uint64_t key)
{
    unsigned words = bytes / 8;
    bool alike = to == NULL || (uintptr_t)to % 16 == (uintptr_t)from % 16;
    bool even = (uintptr_t)from % 8 == 0;
    uint64_t sum =
        even && alike ? digest_even(to, from, words, key) : digest_askew(to, from, words, key);
    if (digest_lane() == 0 && bytes % 8 != 0) {
        unsigned char *rest = to == NULL ? NULL : to + 8 * words;
        sum += digest_last(rest, from + 8 * words, bytes % 8, key + words * DIGEST_STEP);
    }
    return sum;
}

/* Likewise in chunk `chunk` of a job. */
RFT_GPU_PART uint64_t digest_chunk(const rft_digest_job *job, uint64_t chunk)
{
    uint64_t begin = chunk * RFT_DIGEST_CHUNK, left = job->bytes - begin;
    unsigned bytes = (unsigned)(left < RFT_DIGEST_CHUNK ? left : RFT_DIGEST_CHUNK);
    unsigned char *to = job->to == 0 ? NULL : (unsigned char *)(uintptr_t)(job->to + begin);
    const unsigned char *from = (const unsigned char *)(uintptr_t)(job->from + begin);
    return digest_share(to, from, bytes, (job->offset / 8 + begin / 8 + 1) * DIGEST_STEP);
}

/* By all lanes of a warp. */
RFT_GPU_PART void digest_add(uint64_t sum, uint64_t *total)
{
    for (unsigned apart = RFT_GPU_WARP / 2; apart > 0; apart /= 2) {
        sum += __shfl_down_sync(0xFFFFFFFFu, sum, apart);
    }
    if (digest_lane() != 0 || sum == 0) return;
    atomicAdd((unsigned long long *)total, (unsigned long long)sum);
}

/* Chunks that lie side by side are taken by warps of different blocks: a few keep many
 * multiprocessors busy. */
RFT_GPU_PART uint64_t digest_first_chunk(void)
{
    return (uint64_t)(threadIdx.x / RFT_GPU_WARP) * gridDim.x + blockIdx.x;
}

RFT_GPU_PART uint64_t digest_warps(void)
{
    return (uint64_t)(blockDim.x / RFT_GPU_WARP) * gridDim.x;
}

RFT_GPU_KERNEL void rft_digest_kernel(const void *data, uint64_t bytes, uint64_t offset,
                                      uint64_t *total)
{
    rft_digest_job job = {0, (uint64_t)(uintptr_t)data, bytes, offset, RFT_DIGEST_CHUNKS(bytes), 0};
    uint64_t sum = 0;
    for (uint64_t chunk = digest_first_chunk(); chunk < job.end; chunk += digest_warps()) {
        sum += digest_chunk(&job, chunk);
    }
    digest_add(sum, total);
}

/* The job of a chunk: `at`, or one after it. */
RFT_GPU_PART uint32_t digest_find(const rft_digest_job *jobs, uint32_t at, uint32_t count,
                                  uint64_t chunk)
{
    while (at < count) {
        uint32_t middle = at + (count - at) / 2;
        if (jobs[middle].end > chunk) {
            count = middle;
        } else {
            at = middle + 1;
        }
    }
    return at;
}

/* A chunk before the first of its job is one of a table that lost jobs on its way to the device,
 * which the sums show. */
RFT_GPU_KERNEL void rft_digest_list_kernel(rft_digest_job *jobs, uint32_t count)
{
    uint64_t chunk = digest_first_chunk(), end = count == 0 ? 0 : jobs[count - 1].end;
    uint64_t sum = 0;
    uint32_t at = digest_find(jobs, 0, count, chunk);
    while (chunk < end) {
        const rft_digest_job *job = &jobs[at];
        uint64_t first = job->end - RFT_DIGEST_CHUNKS(job->bytes);
        if (chunk >= first) sum += digest_chunk(job, chunk - first);
        chunk += digest_warps();
        if (chunk < job->end) continue;
        digest_add(sum, &jobs[at].sum);
        sum = 0;
        at = digest_find(jobs, at + 1, count, chunk);
    }
}
