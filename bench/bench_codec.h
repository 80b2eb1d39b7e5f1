/*
 * bench_codec: formats for the changes between two versions, encoded and decoded on one thread:
 * refit's, and those of other trainers, each of these in its simplest correct form.
 */
#ifndef BENCH_CODEC_H
#define BENCH_CODEC_H

#include <stdbool.h>
#include <stdint.h>

/* Two versions of the same tensors, and room for a third. */
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

/* The output of a codec for a pair of versions, and its buffers. */
typedef struct bench_coder {
    unsigned char *coded;
    unsigned char *scratch;     /* another image's worth, and 2 bytes an element */
    uint64_t coded_room;        /* enough for every way */
    uint64_t bytes;             /* of `coded`, with all that a receiver needs besides the layout */
    uint64_t changed;           /* elements */
    struct bench_block *blocks; /* refit's directory */
    uint64_t block_count;
    uint64_t same, sparse, dense; /* of the blocks */
    void *zstd_in, *zstd_out;
} bench_coder;

/* False: no memory; bench_coder_close all the same. */
bool bench_coder_open(bench_coder *coder, const bench_pairs *pairs);
void bench_coder_close(bench_coder *coder);

typedef enum bench_delta_kind {
    BENCH_ENCODES, /* writes coder->coded */
    BENCH_COPIES,  /* makes pairs->into of pairs->before and what was coded last */
    BENCH_APPLIES, /* makes pairs->into, which holds the version before, of what was coded last */
} bench_delta_kind;

/* False: it failed, or a digest was not what it should be. */
typedef bool (*bench_delta_run)(bench_coder *coder, const bench_pairs *pairs);

typedef struct bench_delta_move {
    const char *name; /* NULL ends the list */
    bench_delta_kind kind;
    bench_delta_run run;
} bench_delta_move;

enum { BENCH_DELTA_MOVES = 6 };
typedef struct bench_codec {
    const char *name;
    bench_delta_move moves[BENCH_DELTA_MOVES + 1]; /* the first one encodes */
} bench_codec;

/* Blocks as they travel, each with its entry of 20 bytes and no compressor; "decode"
 * is a worker's way into a copy of its own, "apply" that in place. Digests of each changed block,
 * before and after, are made and checked where it says so. */
extern const bench_codec bench_codec_refit;

/* Positions and values; the whole tensor's XOR, compressed; gaps of 16
 * bits and the XOR of what changed, both compressed. */
enum { BENCH_CODEC_BASELINES = 3 };
extern const bench_codec bench_codec_baselines[BENCH_CODEC_BASELINES];

#endif
