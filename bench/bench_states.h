/*
 * bench_states: a model's optimizer states in the host image of refit, the same states once more on
 * the device, and the arithmetic that steps them.
 *
 * On the host device the arithmetic is bench_adamw, run in stream order. Elsewhere C cannot launch
 * any: there the states of a parameter change places by copies on the device, which reads and
 * writes each byte of them, as AdamW does (a single state is copied aside). The image and the
 * device's states begin equal, and states that were stepped equally often must be equal.
 */
#ifndef BENCH_STATES_H
#define BENCH_STATES_H

#include "bench.h"
#include "bench_adamw.h"

/* A weight and the tensors of the list that are its states. */
typedef struct bench_parameter {
    uint32_t tensor; /* the first */
    uint32_t state_count;
    uint64_t bytes;    /* of each state */
    uint64_t elements; /* in front of it, of all parameters */
} bench_parameter;

enum { BENCH_ON_DEVICE, BENCH_IN_IMAGE, BENCH_COPIES };

typedef struct bench_states {
    const bench_list *list;
    refit_device *device;
    refit_offloader *offloader;
    refit_window *window;
    refit_stream_ref work, in, out;
    bench_parameter *parameters;
    uint32_t parameter_count;
    uint64_t largest; /* the states of one parameter, each at a multiple of 512 */
    char **image;     /* of each tensor, page-locked */
    char **resident;  /* of each tensor, on the device; NULL: not yet */
    bool arithmetic;  /* bench_adamw; false: copies on the device */
    float *gradients;
    float *weights[BENCH_COPIES];
    uint32_t steps[BENCH_COPIES]; /* how often each copy was stepped */
    void *scratch;                /* of the copies on the device */
    struct bench_batch *batches;  /* of the step under way */
    uint32_t batch_count;
} bench_states;

/* Opens all and seals; `list` must stay. On failure, too, bench_states_close gives back what there
 * is. */
refit_status bench_states_open(bench_states *it, const bench_options *options,
                               const bench_list *list, refit_error *error);
refit_status bench_states_close(bench_states *it, refit_error *error);

/* Makes the device's own states, once: the image's as they are now. */
refit_status bench_states_settle(bench_states *it, refit_error *error);

/* What of a parameter lies in `bytes` of each state from `offset` on; the states' addresses are
 * still to be set. */
bench_slice bench_states_slice(const bench_states *it, const bench_parameter *of, uint64_t offset,
                               uint64_t bytes, uint32_t copy);

/* Room for a step of so many batches; false: no memory. */
bool bench_states_batches(bench_states *it, uint32_t most);

/* A step is: begin, queue for all slices of it, wait for it to end. Slices must stay meanwhile. */
void bench_states_begin(bench_states *it, uint32_t copy);
refit_status bench_states_queue(bench_states *it, uint32_t copy, const bench_slice *slices,
                                uint32_t count, refit_error *error);

/* Steps the device's own states until both were stepped equally often, with `slices`, and compares.
 * REFIT_ERR_CORRUPT: a tensor or the weights differ. */
refit_status bench_states_check(bench_states *it, const bench_slice *slices, refit_error *error);

/* Bytes of device memory in use through refit. */
uint64_t bench_states_used(const bench_states *it);

#endif
