/*
 * masters: regions of fp32 masters that leave as what their bf16 weights lack (kernels/master.h).
 *
 * Such a region is *coded*. It goes in stretches through one piece of device memory, the staging:
 *
 *     staging:  verdict, and up to 64 bytes │ the units of one stretch
 *     image:    verdict, and up to 64 bytes │ the units of the region
 *
 * The verdict of a whole region reaches the image behind its last stretch, in either direction.
 */
#ifndef RFT_MASTERS_H
#define RFT_MASTERS_H

#include "kernels/master.h"
#include "offload/region.h"

#define RFT_MASTERS_HEAD 64u /* bytes of the verdict, and what follows it */

/* How many stretches a coded region has. */
uint64_t rft_masters_stretches(const rft_region *region);

/* Where in the image the stretch lies whose first element is `first`. */
uint64_t rft_masters_at(const rft_region *region, uint64_t first);

/* That stretch, through `staging`. */
rft_master_job rft_masters_job(const rft_region *region, char *staging, uint64_t first);

/* Which regions are coded from now on, and what all of them take of the image. A seal decides it,
 * from what the offloads before it have found. REFIT_ERR_INVALID: weights that lie in a region,
 * with which they would leave. */
refit_status rft_masters_decide(refit_offloader *offloader, refit_error *error);

/* Takes the staging that the coded regions need, or gives it back if there are none. No copy may be
 * under way. REFIT_ERR_DEVICE_MEMORY. */
refit_status rft_masters_take_staging(refit_offloader *offloader, refit_error *error);
refit_status rft_masters_drop_staging(refit_offloader *offloader, refit_error *error);

/* What the verdict on a coded region says, once the copies of its group are over. An offload:
 * REFIT_ERR_LIMIT, and the region remembers what it needed. A restore: REFIT_ERR_CORRUPT. Lock
 * held. */
refit_status rft_masters_judge(refit_offloader *offloader, rft_region *region, bool out,
                               refit_error *error);

/* offload.verify: is the coded image, with the weights, what the device has? REFIT_ERR_CORRUPT, or
 * the failure of a copy. Waits for the device. The region is on the device, and its own copies are
 * over. */
refit_status rft_masters_compare(const refit_offloader *offloader, const rft_region *region,
                                 refit_error *error);

/* The masters of a coded region, which is in the image, to host memory: `to` has room for its
 * bytes. Waits for the device. REFIT_ERR_CORRUPT: the weights are others; REFIT_ERR_HOST_MEMORY,
 * _COPY, _DEVICE. Any thread. */
refit_status rft_masters_read(const refit_offloader *offloader, const rft_region *region, void *to,
                              refit_error *error);

#endif
