/*
 * on_gpu: the GPU that a trainer shares with some of its workers, and what each of them has there:
 * a place for each tensor of the model. By public headers alone.
 */
#ifndef CHAOS_ON_GPU_H
#define CHAOS_ON_GPU_H

#include <stdbool.h>

#include <refit.h>

typedef struct on_gpu {
    refit_device *device; /* NULL: the process is not on the GPU */
    void *memory;
} on_gpu;

/* After a failure nothing is open. */
refit_status on_gpu_open(on_gpu *out, refit_error *error);

/* Allowed for one that is not open. False: not all was given back, or a rule of the driver was
 * broken, as the fake driver says; it is printed. */
bool on_gpu_close(on_gpu *one);

/* Where it has the tensor. */
void *on_gpu_at(const on_gpu *one, uint32_t tensor);

/* Copies all of an update to where its tensors are to be, wherever they come from. */
refit_status on_gpu_load(const on_gpu *one, refit_update *update, refit_error *error);

/* Bytes of a tensor that lie on the GPU, on the host; valid until the next call. */
refit_status on_gpu_read(const on_gpu *one, const void *memory, uint64_t bytes, const void **out,
                         refit_error *error);

#endif
