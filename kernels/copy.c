/*
 * Large copies go round the caches: non-temporal stores write whole lines without reading them
 * first, which saves a third of the traffic and leaves the caches to other work. Below the
 * threshold the bytes are likely to be read soon, and the C library's memcpy wins. The source is
 * prefetched a kilobyte ahead, which the hardware does not do well across pages.
 *
 * Not on ARM: its CPUs see by themselves that whole lines are written, and stop to read them first,
 * and the C library's memcpy is made for each of them. STNP is only a hint, and orders no bytes
 * sooner; DC ZVA writes zeros, in blocks whose size is the CPU's.
 *
 * The vector variants carry their instruction set as a function attribute, so that the file is
 * compiled for the plain machine and one binary runs everywhere.
 */
#include "kernels/copy.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define STREAM_LEAST ((size_t)1 << 20)
#define PIECE_LEAST  ((size_t)4 << 10)
#define LINE         ((size_t)64)
#define AHEAD        1024u

/* An integer sum, for it may point beyond the source; prefetching there does no harm. */
static inline const char *ahead(const char *from, size_t at)
{
    return (const char *)((uintptr_t)from + at + AHEAD);
}

/* Both copy pairs of lines to a `to` that is aligned to a line. */
__attribute__((target("avx2"))) static void stream_avx2(char *to, const char *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += 2 * LINE) {
        _mm_prefetch(ahead(from, at), _MM_HINT_NTA);
        _mm_prefetch(ahead(from, at + LINE), _MM_HINT_NTA);
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + at));
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + at + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + at + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + at + 96));
        _mm256_stream_si256((__m256i *)(to + at), a);
        _mm256_stream_si256((__m256i *)(to + at + 32), b);
        _mm256_stream_si256((__m256i *)(to + at + 64), c);
        _mm256_stream_si256((__m256i *)(to + at + 96), d);
    }
    _mm_sfence();
}

__attribute__((target("avx512f"))) static void stream_avx512(char *to, const char *from,
                                                             size_t bytes)
{
    for (size_t at = 0; at < bytes; at += 2 * LINE) {
        _mm_prefetch(ahead(from, at), _MM_HINT_NTA);
        _mm_prefetch(ahead(from, at + LINE), _MM_HINT_NTA);
        __m512i a = _mm512_loadu_si512(from + at);
        __m512i b = _mm512_loadu_si512(from + at + LINE);
        _mm512_stream_si512((__m512i *)(to + at), a);
        _mm512_stream_si512((__m512i *)(to + at + LINE), b);
    }
    _mm_sfence();
}

/* False, and nothing is copied, where the CPU has no wide streaming stores. */
static bool stream(char *to, const char *from, size_t bytes)
{
    rft_cpu_level level = rft_cpu_get_level();
    if (level == RFT_CPU_BASE) return false;
    size_t head = -(uintptr_t)to % LINE;
    size_t body = (bytes - head) / (2 * LINE) * (2 * LINE);
    size_t done = head + body;
    memcpy(to, from, head);
    if (level == RFT_CPU_AVX512) {
        stream_avx512(to + head, from + head, body);
    } else {
        stream_avx2(to + head, from + head, body);
    }
    memcpy(to + done, from + done, bytes - done);
    return true;
}
#else
#define STREAM_LEAST SIZE_MAX
#define PIECE_LEAST  SIZE_MAX

static bool stream(char *to, const char *from, size_t bytes)
{
    (void)to;
    (void)from;
    (void)bytes;
    return false;
}
#endif

static void copy_from(size_t least, void *to, const void *from, size_t bytes)
{
    if (bytes >= least && stream(to, from, bytes)) return;
    if (bytes != 0) memcpy(to, from, bytes);
}

void rft_copy_bytes(void *to, const void *from, size_t bytes)
{
    copy_from(STREAM_LEAST, to, from, bytes);
}

void rft_copy_piece(void *to, const void *from, size_t bytes)
{
    copy_from(PIECE_LEAST, to, from, bytes);
}
