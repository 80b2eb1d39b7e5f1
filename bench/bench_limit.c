/*
 * bench_limit: how fast this machine copies: one large buffer to another, with as many
 * threads as refit uses, by the fastest of several loops (the C library's memcpy and streaming
 * stores of each width that the processor has). The loops are this file's own, so that the ceiling
 * does not depend on refit's.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <xxhash.h>

#include "bench.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { THREADS_MOST = 8, TRIES = 3 };

typedef void (*copy_loop)(char *to, const char *from, size_t bytes);

struct bench_limit {
    char *from;
    char *to;
    uint64_t bytes;
    uint32_t threads;
    copy_loop loop;
    const char *name;
};

typedef struct share {
    copy_loop loop;
    char *to;
    const char *from;
    size_t bytes;
} share;

static void loop_memcpy(char *to, const char *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void loop_avx2(char *to, const char *from, size_t bytes)
{
    for (size_t i = 0; i + 64 <= bytes; i += 64) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)(from + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(from + i + 32));
        _mm256_stream_si256((__m256i *)(void *)(to + i), a);
        _mm256_stream_si256((__m256i *)(void *)(to + i + 32), b);
    }
    _mm_sfence();
}

__attribute__((target("avx512f"))) static void loop_avx512(char *to, const char *from, size_t bytes)
{
    for (size_t i = 0; i + 64 <= bytes; i += 64)
        _mm512_stream_si512((__m512i *)(void *)(to + i), _mm512_loadu_si512(from + i));
    _mm_sfence();
}
#endif

static void *run_share(void *user)
{
    share *mine = user;
    mine->loop(mine->to, mine->from, mine->bytes);
    return NULL;
}

static double copy_with(const bench_limit *limit, copy_loop loop)
{
    pthread_t threads[THREADS_MOST];
    share shares[THREADS_MOST];
    size_t part = limit->bytes / limit->threads / 64 * 64;
    double start = bench_now();
    for (uint32_t i = 0; i < limit->threads; i++) {
        size_t at = (size_t)i * part;
        size_t bytes = i + 1 < limit->threads ? part : limit->bytes / 64 * 64 - at;
        shares[i] = (share){loop, limit->to + at, limit->from + at, bytes};
        if (i > 0 && pthread_create(&threads[i], NULL, run_share, &shares[i]) != 0) abort();
    }
    run_share(&shares[0]);
    for (uint32_t i = 1; i < limit->threads; i++)
        pthread_join(threads[i], NULL);
    return bench_now() - start;
}

static void consider(bench_limit *limit, copy_loop loop, const char *name, double *best)
{
    for (int i = 0; i < TRIES; i++) {
        double seconds = copy_with(limit, loop);
        if (seconds >= *best) continue;
        *best = seconds;
        limit->loop = loop;
        limit->name = name;
    }
}

static char *map_buffer(uint64_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    (void)madvise(memory, bytes, MADV_HUGEPAGE);
    memset(memory, 1, bytes);
    return memory;
}

bench_limit *bench_limit_open(uint64_t bytes, uint32_t threads)
{
    double best = 1e30;
    bench_limit *limit = calloc(1, sizeof *limit);
    if (limit == NULL) return NULL;
    limit->bytes = bytes;
    limit->threads = threads > THREADS_MOST ? THREADS_MOST : threads;
    limit->from = map_buffer(bytes);
    limit->to = map_buffer(bytes);
    if (limit->from == NULL || limit->to == NULL) {
        bench_limit_close(limit);
        return NULL;
    }
    consider(limit, loop_memcpy, "memcpy", &best);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) consider(limit, loop_avx2, "avx2 streaming stores", &best);
    if (__builtin_cpu_supports("avx512f"))
        consider(limit, loop_avx512, "avx512 streaming stores", &best);
#endif
    return limit;
}

void bench_limit_close(bench_limit *limit)
{
    if (limit == NULL) return;
    if (limit->from != NULL) munmap(limit->from, limit->bytes);
    if (limit->to != NULL) munmap(limit->to, limit->bytes);
    free(limit);
}

double bench_limit_copy(bench_limit *limit)
{
    return copy_with(limit, limit->loop);
}

double bench_limit_digest(bench_limit *limit)
{
    double start = bench_now();
    volatile XXH64_hash_t hash = XXH3_64bits(limit->from, limit->bytes);
    (void)hash;
    return bench_now() - start;
}

const char *bench_limit_loop(const bench_limit *limit)
{
    return limit->name;
}
