/*
 * The digest's scalar form, which every other form equals bit for bit, and the choice between them
 * at run time.
 *
 * A chunk is taken in three: a head up to where the wide form may begin, whole blocks with the
 * wide form, and the rest with the scalar one.
 */
#include "kernels/digest.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/cpu.h"
#include "kernels/digest_job.h"
#include "kernels/digest_wide.h"

#define LENGTH_MIX UINT64_C(0xC2B2AE3D27D4EB4F)

/* From these sizes on a copy is streamed, as in copy.c, and a piece of a larger one. */
#define STREAM_LEAST ((size_t)1 << 20)
#define PIECE_LEAST  ((size_t)4 << 10)

/* A piece that stays in the first-level cache between being copied and being read. */
#define CACHED ((size_t)16 << 10)

static uint64_t load_word(const char *at)
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

static uint64_t scalar_part(const char *at, size_t bytes, uint64_t key)
{
    uint64_t sum = 0;
    for (; bytes >= 8; bytes -= 8, at += 8, key += RFT_DIGEST_STEP) {
        sum += word_part(load_word(at), key);
    }
    if (bytes == 0) return sum;
    char last[8] = {0};
    memcpy(last, at, bytes);
    return sum + word_part(load_word(last), key);
}

/* Whole blocks; false where the CPU has no wide form. */
static bool wide_part(char *to, const char *from, size_t bytes, uint64_t key, bool streams,
                      uint64_t *sum)
{
#if defined(__x86_64__)
    switch (rft_cpu_get_level()) {
    case RFT_CPU_AVX512: *sum = rft_digest_avx512(to, from, bytes, key, streams); return true;
    case RFT_CPU_AVX2: *sum = rft_digest_avx2(to, from, bytes, key, streams); return true;
    case RFT_CPU_BASE: break;
    }
#elif defined(__aarch64__)
    if (rft_cpu_get_level() == RFT_CPU_NEON) {
        *sum = rft_digest_neon(to, from, bytes, key);
        return true;
    }
#endif
    (void)to;
    (void)from;
    (void)bytes;
    (void)key;
    (void)streams;
    (void)sum;
    return false;
}

static uint64_t key_of(uint64_t offset)
{
    return (offset / 8 + 1) * RFT_DIGEST_STEP;
}

uint64_t rft_digest_part(const void *data, size_t bytes, uint64_t offset)
{
    const char *from = data;
    uint64_t sum = 0;
    size_t body = bytes / RFT_DIGEST_BLOCK * RFT_DIGEST_BLOCK;
    if (body == 0 || !wide_part(NULL, from, body, key_of(offset), false, &sum)) body = 0;
    return sum + scalar_part(from + body, bytes - body, key_of(offset + body));
}

/* Fetches the bytes from memory once: the wide form copies what it reads; the scalar one reads the
 * copy, piece after piece. So the sum is that of the copy, even where the source changes meanwhile:
 * the fence keeps the compiler from reading the source for the copy. */
static uint64_t copy_through_cache(char *to, const char *from, size_t bytes, uint64_t offset)
{
    uint64_t sum = 0;
    size_t done = bytes / RFT_DIGEST_BLOCK * RFT_DIGEST_BLOCK;
    if (done == 0 || !wide_part(to, from, done, key_of(offset), false, &sum)) done = 0;
    while (done != bytes) {
        size_t piece = bytes - done < CACHED ? bytes - done : CACHED;
        memcpy(to + done, from + done, piece);
        atomic_signal_fence(memory_order_acq_rel);
        sum += scalar_part(to + done, piece, key_of(offset + done));
        done += piece;
    }
    return sum;
}

/* The wide form streams to whole lines: `to` must come to one after a number of whole words. */
static bool may_stream(const char *to, size_t bytes, size_t least)
{
    return bytes >= least && (uintptr_t)to % 8 == 0;
}

static uint64_t copy_streaming(void *to, const void *from, size_t bytes, uint64_t offset)
{
    size_t head = -(uintptr_t)to % 64;
    if (bytes <= head) return copy_through_cache(to, from, bytes, offset);
    size_t body = (bytes - head) / RFT_DIGEST_BLOCK * RFT_DIGEST_BLOCK;
    size_t done = head + body;
    uint64_t sum = 0;
    if (!wide_part((char *)to + head, (const char *)from + head, body, key_of(offset + head), true,
                   &sum)) {
        return copy_through_cache(to, from, bytes, offset);
    }
    return sum + copy_through_cache(to, from, head, offset) +
           copy_through_cache((char *)to + done, (const char *)from + done, bytes - done,
                              offset + done);
}

uint64_t rft_digest_copy_part(void *to, const void *from, size_t bytes, uint64_t offset)
{
    if (!may_stream(to, bytes, STREAM_LEAST)) return copy_through_cache(to, from, bytes, offset);
    return copy_streaming(to, from, bytes, offset);
}

uint64_t rft_digest_copy_piece(void *to, const void *from, size_t bytes, uint64_t offset)
{
    if (!may_stream(to, bytes, PIECE_LEAST)) return copy_through_cache(to, from, bytes, offset);
    return copy_streaming(to, from, bytes, offset);
}

uint64_t rft_digest_parts(const void *data, size_t bytes, uint64_t offset, size_t each,
                          uint64_t *parts)
{
    uint64_t sum = 0;
    for (size_t at = 0; at < bytes; at += each, parts++) {
        size_t piece = bytes - at < each ? bytes - at : each;
        *parts = rft_digest_part((const char *)data + at, piece, offset + at);
        sum += *parts;
    }
    return sum;
}

uint64_t rft_digest_copy_parts(void *to, const void *from, size_t bytes, uint64_t offset,
                               size_t each, uint64_t *parts)
{
    uint64_t sum = 0;
    bool streams = may_stream(to, bytes, STREAM_LEAST);
    for (size_t at = 0; at < bytes; at += each, parts++) {
        size_t piece = bytes - at < each ? bytes - at : each;
        char *target = (char *)to + at;
        const char *source = (const char *)from + at;
        *parts = streams ? copy_streaming(target, source, piece, offset + at)
                         : copy_through_cache(target, source, piece, offset + at);
        sum += *parts;
    }
    return sum;
}

void rft_digest_list(rft_digest_job *jobs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        rft_digest_job *job = &jobs[i];
        void *to = (void *)(uintptr_t)job->to;
        const void *from = (const void *)(uintptr_t)job->from;
        if (job->bytes == 0) continue;
        job->sum += to == NULL ? rft_digest_part(from, job->bytes, job->offset)
                               : rft_digest_copy_part(to, from, job->bytes, job->offset);
    }
}

uint64_t rft_digest_finish(uint64_t sum, uint64_t bytes)
{
    uint64_t x = sum ^ bytes * LENGTH_MIX;
    x = (x ^ x >> 33) * UINT64_C(0xFF51AFD7ED558CCD);
    x = (x ^ x >> 33) * UINT64_C(0xC4CEB9FE1A85EC53);
    return x ^ x >> 33;
}
