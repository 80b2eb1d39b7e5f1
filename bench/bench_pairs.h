/*
 * bench_pairs: two versions of the same tensors, and room for a third, for the benchmark of deltas.
 */
#ifndef BENCH_PAIRS_H
#define BENCH_PAIRS_H

#include <stdbool.h>
#include <stdint.h>

#include <refit/status.h>

typedef struct bench_pair {
    uint64_t offset; /* in each of the images; a multiple of 64 */
    uint64_t elements;
    uint32_t width; /* bytes of an element: 1, 2, 4, 8 */
    bool half;      /* bf16, fp16 */
} bench_pair;

typedef struct bench_pairs {
    bench_pair *all; /* none is empty */
    uint32_t count;
    unsigned char *before, *after, *into; /* images; what lies between the tensors is 0 in all */
    uint64_t image_bytes;
    uint64_t bytes, elements; /* of all tensors */
} bench_pairs;

/* One bf16 tensor of `bytes`, to be filled by bench_pairs_make. */
refit_status bench_pairs_open(uint64_t bytes, bench_pairs *out, refit_error *error);

/* Fills it with an update of that density, see bench_updates.h. */
void bench_pairs_make(const bench_pairs *pairs, double density);

/* The tensors of two safetensors files. REFIT_ERR_INVALID: not the same tensors. */
refit_status bench_pairs_load(const char *from, const char *to, bench_pairs *out,
                              refit_error *error);

void bench_pairs_close(bench_pairs *pairs);

#endif
