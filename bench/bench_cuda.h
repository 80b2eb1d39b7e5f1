/*
 * bench_cuda: NVIDIA's driver without refit, for the baselines on a GPU: each call in its simplest
 * correct form. Calls block the thread that makes them, but for bench_cuda_copy and
 * bench_cuda_fill, which queue on the one stream of this object.
 *
 * A call that the driver refuses returns false (or NULL), and bench_cuda_why names the call and the
 * error. One thread at a time.
 */
#ifndef BENCH_CUDA_H
#define BENCH_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct bench_cuda bench_cuda;

/* The GPU of a device spec such as "cuda:0", or a negative number: the spec names another kind. */
int bench_cuda_ordinal(const char *spec);

/* Opens the driver and the GPU's primary context, which becomes current here. NULL, and `why` says
 * what is missing (at most `room` bytes). */
bench_cuda *bench_cuda_open(int ordinal, char *why, size_t room);
void bench_cuda_close(bench_cuda *cuda);
const char *bench_cuda_why(const bench_cuda *cuda);

uint64_t bench_cuda_free_bytes(const bench_cuda *cuda);

void *bench_cuda_alloc(bench_cuda *cuda, uint64_t bytes);
bool bench_cuda_free(bench_cuda *cuda, void *memory);

/* Page-locked host memory of the driver's own (cuMemHostAlloc). */
void *bench_cuda_pin(bench_cuda *cuda, uint64_t bytes);
bool bench_cuda_unpin(bench_cuda *cuda, void *memory);

/* One cuMemcpyAsync, whatever the two sides are. */
bool bench_cuda_copy(bench_cuda *cuda, void *to, const void *from, uint64_t bytes);
bool bench_cuda_fill(bench_cuda *cuda, void *memory, int value, uint64_t bytes);

/* Until the stream has done all, and until the whole device has. */
bool bench_cuda_wait(bench_cuda *cuda);
bool bench_cuda_wait_device(bench_cuda *cuda);
void *bench_cuda_stream(const bench_cuda *cuda);

/* Addresses, and memory mapped to them, for one allocation at a time: `bytes` is a multiple of the
 * granule wherever it is asked for. */
uint64_t bench_cuda_granule(const bench_cuda *cuda);
void *bench_cuda_reserve(bench_cuda *cuda, uint64_t bytes);
bool bench_cuda_map(bench_cuda *cuda, void *at, uint64_t bytes);
bool bench_cuda_unmap(bench_cuda *cuda, void *at, uint64_t bytes);
bool bench_cuda_unreserve(bench_cuda *cuda, void *at, uint64_t bytes);

#endif
