/*
 * bench_mover: the ways to move tensors off a GPU and back with which refit is compared.
 *
 *   one large pinned copy     as many bytes between two large buffers: the ceiling
 *   per-tensor pageable       .to("cpu"): fresh memory and a blocking copy for every tensor
 *   per-tensor pinned         a page-locked buffer for every tensor, kept; one wait for all
 *   coalesced                 one page-locked buffer, kept, and still a copy for every tensor;
 *                             the whole device is waited for (NeMo-RL's pull request 2248)
 *   save each                 memory mapped at addresses that stay: page-lock, copy and wait,
 *                             unmap, one tensor after the other, and back likewise
 *                             (torch_memory_saver's way)
 *   save each, retained       likewise, the page-locked buffers kept
 */
#ifndef BENCH_MOVER_H
#define BENCH_MOVER_H

#include "bench.h"
#include "bench_baseline.h"
#include "bench_cuda.h"

typedef struct bench_mover {
    bench_cuda *cuda;
    const bench_list *list;
    void **device;  /* of each tensor */
    void **host;    /* of each tensor; NULL: not taken */
    char *buffer;   /* one for all */
    char *large;    /* device memory of the ceiling */
    uint64_t bytes; /* of buffer and large */
    bool given;     /* the device memory is refit's, and stays */
    bool retained;  /* page-locked memory is kept */
    void (*drop)(struct bench_mover *it);
} bench_mover;

/* Where a way's device memory comes from. */
typedef enum bench_memory_kind {
    BENCH_NOT_RUN,
    BENCH_NO_MEMORY, /* it takes what it needs */
    BENCH_GIVEN,     /* refit's tensors */
    BENCH_ALLOCATED, /* an allocation each */
    BENCH_MAPPED,    /* an address that stays, and memory behind it, each */
} bench_memory_kind;

typedef struct bench_way {
    const char *name;
    bench_move out; /* of a bench_mover */
    bench_move back;
    void (*drop)(bench_mover *it);
    bench_memory_kind stays;   /* where refit keeps the device memory */
    bench_memory_kind reclaim; /* where it gives it back */
    bool retained;
    bool pins_each; /* a page-locked allocation for every tensor */
} bench_way;

enum { BENCH_WAYS = 6 };
extern const bench_way bench_ways[BENCH_WAYS];

/* What a tensor takes where it is mapped. */
uint64_t bench_mapped_bytes(const bench_mover *it, uint32_t at);

#endif
