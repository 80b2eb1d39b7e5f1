/*
 * in_place: versions written into the engine's own memory, whole or not at all.
 *
 * apply makes the destinations equal to the update's image, block by block, independent of what
 * they hold: a block is compared, and where it differs its old bytes are noted and the new ones
 * written, so that doing it again, or after it was left half done, comes to the same. On the
 * engine's GPU its kernels do that (gpu_exchange.h), elsewhere the CPU (rft_rollback).
 * If anything fails, the written bytes are taken back before apply returns. keep makes it final,
 * undo takes it back. Where taking back fails as well (a device is lost), the notes stay: the
 * destinations are torn until an undo succeeds, or an apply that is kept. Until an update was
 * accepted they hold no version: nothing is noted then, and once written they are torn until an
 * apply succeeds.
 *
 * Belongs to the caller's thread, but for the figures, which any thread may read.
 */
#ifndef RFT_IN_PLACE_H
#define RFT_IN_PLACE_H

#include <stdatomic.h>

#include "subscriber/destinations.h"
#include "subscriber/gpu_exchange.h"
#include "subscriber/images.h"

typedef struct rft_in_place_figures {
    atomic_uint_fast64_t bound; /* destinations */
    atomic_uint_fast64_t bytes; /* that changed, of all applies that succeeded */
    atomic_uint_fast64_t taken_back;
    atomic_int_fast64_t last_ns; /* of the last apply that succeeded */
} rft_in_place_figures;

typedef struct rft_in_place {
    const refit_config *config; /* borrowed until close */
    rft_destinations to;
    uint32_t *tensors; /* owned; for each destination, the tensor that is written there: scratch of
                          apply */
    rft_rollback old;  /* what was written on the host */
    rft_gpu_exchange *gpu; /* what was written by the kernels of a GPU; NULL: nothing so far */
    bool held;             /* they hold a version, to which undo goes back */
    bool overwritten;      /* they held none, and were written since */
    bool applied;          /* an update is in them, neither kept nor undone */
    bool failed;           /* the update under way: its last apply */
    uint64_t changed;      /* bytes, by the apply under way */
    rft_in_place_figures figures;
} rft_in_place;

refit_status rft_in_place_bind(rft_in_place *place, const refit_destination *list, uint32_t count,
                               const refit_config *config, refit_error *error);
/* Takes back a torn version; if a device does not let it, they stay bound. */
refit_status rft_in_place_unbind(rft_in_place *place, refit_error *error);
/* They stay as they are. Harmless on {0}. */
void rft_in_place_close(rft_in_place *place);
bool rft_in_place_is_bound(const rft_in_place *place);

typedef struct rft_in_place_source {
    const rft_image *image;
    refit_device *device;       /* where its bytes lie; NULL: host memory */
    refit_device *gpu;          /* whose kernels write to memory of its own; NULL: there is none */
    const rft_pinning *pinning; /* of the image for that GPU; NULL: there is none */
    bool verify;                /* digest the bytes in the destinations at the end */
} rft_in_place_source;

/* `left` as refit_update_apply has it. */
refit_status rft_in_place_apply(rft_in_place *place, const rft_in_place_source *source,
                                uint32_t *left, refit_error *error);
/* Of the update that ends now; the next begins. */
void rft_in_place_forget(rft_in_place *place);
/* The update that ends is in the destinations, applied or loaded in another way. */
void rft_in_place_keep(rft_in_place *place);
refit_status rft_in_place_undo(rft_in_place *place, refit_error *error);
/* Whether any of them lies on the GPU. */
bool rft_in_place_is_on(const rft_in_place *place, refit_device *gpu);
/* Waits for work on a GPU that an earlier call gave up waiting for: it reads the image. False: it
 * has not ended. */
bool rft_in_place_await(const rft_in_place *place, uint32_t timeout_ms);
/* Adds the figures. Any thread. */
void rft_in_place_report(const rft_in_place *place, refit_stats *stats);
/* Whether they hold no version at all, since an undo failed or there was none to go back to. */
bool rft_in_place_is_torn(const rft_in_place *place);
/* Whether the update under way was to be applied, and is not there. */
bool rft_in_place_has_failed(const rft_in_place *place);

#endif
