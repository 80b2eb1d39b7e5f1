/*
 * gpu_copy: tensors of a version, copied to memory of the engine on its GPU.
 *
 * From the GPU's own memory, where the trainer has lent it, what is copied is digested on the way
 * and compared with SEAL: a trainer that changed its tensors too early, or was killed and replaced,
 * is found out here. Host memory, the trainer's or this process's, is page-locked first, once for
 * all versions in it, so that the copies run at the speed of the link.
 *
 * Belongs to the caller's thread.
 */
#ifndef RFT_GPU_COPY_H
#define RFT_GPU_COPY_H

#include <refit/broadcast.h>

#include "store/copy_queue.h"
#include "subscriber/images.h"

/* {0} is not open: closing it is harmless. */
typedef struct rft_gpu_copy {
    rft_copy_queue *copy_queue;
    int64_t pin_at; /* when a page-lock that failed is tried again */
} rft_gpu_copy;

/* Copies to memory of `device`, after what the caller has put on `after`, and waits at most
 * broadcast.stage_timeout_ms: from a GPU's memory once a batch of digests, from the host once. The
 * image is lent to the caller. `*begun`: some of the memory may have been written.
 * REFIT_ERR_INVALID, REFIT_ERR_CORRUPT; REFIT_ERR_TIMEOUT, and it may still be written; those of
 * the device. */
refit_status rft_gpu_copy_run(rft_gpu_copy *copy, refit_device *device, const refit_config *config,
                              rft_image *image, const refit_target *list, uint32_t count,
                              refit_stream_ref after, bool *begun, refit_error *error);
/* The same for a version that comes piece by piece, until all of it has: a batch of digests has a
 * wait, and so has each list of pieces. Also what rft_piece_queue_next answers. */
refit_status rft_gpu_copy_pieces(rft_gpu_copy *copy, refit_device *device,
                                 const refit_config *config, rft_image *image,
                                 const refit_target *list, uint32_t count, refit_stream_ref after,
                                 bool *begun, refit_error *error);
/* Digests pieces that the caller copies by itself; at the end (`pieces` NULL) the tensors' are
 * compared with SEAL. REFIT_ERR_CORRUPT, REFIT_ERR_TIMEOUT, those of the device. */
refit_status rft_gpu_copy_verify(rft_gpu_copy *copy, refit_device *device,
                                 const refit_config *config, rft_image *image,
                                 const rft_pieces *pieces, refit_error *error);
/* Page-locks host memory in which a version lies. NULL: that cannot be, and copies are slower; it
 * is tried again, but not for each version, as a try may take a while. */
const rft_pinning *rft_gpu_copy_pin(rft_gpu_copy *copy, refit_device *device,
                                    const refit_config *config, rft_image *image);
/* Waits for copies that a run gave up waiting for: they read the image. False: they have not ended.
 */
bool rft_gpu_copy_await(const rft_gpu_copy *copy, uint32_t timeout_ms);
/* False: a copy did not end by `deadline`, and its stream stays open. */
bool rft_gpu_copy_close(rft_gpu_copy *copy, int64_t deadline);

#endif
