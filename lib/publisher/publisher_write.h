/*
 * publisher_write: the steps of writing a tensor, which writing one (publisher_write.c) and writing
 * many at once (publisher_batch.c) have in common. The caller's thread only.
 */
#ifndef RFT_PUBLISHER_WRITE_H
#define RFT_PUBLISHER_WRITE_H

#include "publisher/publisher.h"

/* One tensor on its way. */
typedef struct rft_write_job {
    uint32_t tensor;
    const void *memory;
    uint64_t bytes;
    refit_device *device;
    refit_stream_ref after;
    unsigned char *image;  /* its place in the store; NULL: the store keeps no bytes */
    rft_gpu_block *block;  /* of the GPU that it goes to; NULL: none */
    unsigned char *shared; /* its place there */
} rft_write_job;

/* All but `image`. */
rft_write_job rft_write_make_job(const refit_publisher *publisher, const refit_weight *weight,
                                 refit_device *device, refit_stream_ref after);
/* Writes a tensor that the store has checked. */
refit_status rft_write_one(refit_publisher *publisher, const refit_weight *weight,
                           refit_device *device, refit_stream_ref after, refit_error *error);
/* The time since `began` was spent on writing. */
void rft_write_count(refit_publisher *publisher, int64_t began);

/* Whether it is the GPU that versions are shown on. */
bool rft_write_is_gpu(const refit_publisher *publisher, refit_device *device);
/* Whether the tensor lies on its device, and on one that it may be written from. */
refit_status rft_write_check_source(const refit_publisher *publisher, const rft_write_job *job,
                                    refit_error *error);
/* Whatever brings a tensor now, and from wherever: a late copy of an earlier call would write over
 * it. */
refit_status rft_write_await_earlier(const refit_publisher *publisher, const rft_gpu_block *block,
                                     refit_error *error);
/* The carrier of `device` in `*place`, which may hold another device's: idle. */
refit_status rft_write_get_copy_queue(const refit_publisher *publisher, refit_device *device,
                                      rft_copy_queue **place, refit_error *error);
/* The slot that is written, page-locked for the device. */
void rft_write_pin_slot(refit_publisher *publisher, refit_device *device);
/* NULL: the store has no memory. */
rft_buffer *rft_write_buffer(const refit_publisher *publisher);
/* Waits. The first failure is the story, but what was put on the stream before it is waited for. */
refit_status rft_write_finish(const refit_publisher *publisher, rft_copy_queue *copy_queue,
                              refit_status issued, refit_error *error);

#endif
