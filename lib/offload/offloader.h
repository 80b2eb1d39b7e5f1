/*
 * offloader: what the files of this module share. offloader.c draws the states.
 *
 * Threads: one thread at a time calls the verbs; it owns everything but what names a lock. Any
 * thread may look at the state, wait on a future or hold a read lock: those go through `lock`,
 * which is never held while bytes move, hooks run or a thread waits. `verify_lock` is held while
 * digests are taken (offload.verify), and is locked before `lock`.
 */
#ifndef RFT_OFFLOADER_H
#define RFT_OFFLOADER_H

#include <refit/advanced/host_step.h>
#include <refit/advanced/window.h>

#include "base/thread.h"
#include "memory/host_arena.h"
#include "memory/ration.h"
#include "offload/region.h"
#include "offload/schedule.h"
#include "transfer/mover.h"

#define RFT_FUTURES    64 /* most futures that are open at once */
#define RFT_ALL_GROUPS UINT64_MAX

typedef enum rft_direction {
    RFT_OFFLOAD = 0,
    RFT_RESTORE = 1,
} rft_direction;

/* The last operation that started: under way while the state says OFFLOADING or RESTORING. */
typedef struct rft_operation {
    uint64_t number; /* counts operations from 1; 0: there was none */
    rft_direction direction;
    rft_mover *mover; /* NULL on the pageable path, where an operation ends as it starts */
    int64_t began;
    uint64_t bytes;
    uint64_t copies;
    bool decodes;             /* masters: streams that join wait until the results are there */
    uint64_t checked_groups;  /* groups whose results on masters were read */
    uint64_t verified_groups; /* groups whose digests were taken and compared */
    uint64_t corrupt;         /* of these, the ones that did not match, or could not be checked */
    refit_error corruption;   /* of the first such region */
    refit_error failure;      /* how the operation failed; status REFIT_OK if it did not */
} rft_operation;

struct refit_future {
    refit_offloader *offloader;
    uint64_t operation; /* its number */
    bool taken;
    bool done;
    uint64_t good_groups; /* once done: the groups that arrived */
    refit_error end;      /* once done: how it ended */
};

/* What refit_stats is filled from. */
typedef struct rft_offload_figures {
    uint64_t count[2]; /* by direction, as all of them */
    uint64_t bytes_total[2];
    uint64_t bytes_last[2];
    int64_t last[2]; /* nanoseconds from the call to the last byte */
    int64_t blocked[2];
    uint64_t copies_last;
    uint64_t reclaimed_last;
    uint64_t failures;
} rft_offload_figures;

/* Steps in windows, or on the CPU. */
typedef struct rft_step_figures {
    uint64_t count;
    uint64_t failures; /* of calls of the window, or of the host step */
    uint64_t in_bytes; /* of the last step, as the rest */
    uint64_t out_bytes;
    int64_t last;
    int64_t blocked;
    int64_t computed; /* on the CPU */
} rft_step_figures;

/* What windows, or the host step, tell of themselves. They alone write it: window.c, host_step.c.
 */
typedef struct rft_stepper {
    rft_step_figures figures;
    uint64_t bytes; /* device memory of windows, or host memory of the host step, now */
    bool is_short;  /* there are fewer or smaller windows than configured */
    bool stepping;  /* they change the image; guarded by the offloader's lock */
} rft_stepper;

struct refit_offloader {
    refit_device *device;
    refit_config config;
    rft_device_caps caps;
    rft_region_table regions;
    rft_schedule schedule;      /* open while sealed */
    rft_host_arena *image;      /* NULL on the pageable path, before seal and after trim; with
                                   offload.background its memory may still be coming */
    bool image_used;            /* bytes were written to it: it does not hold zeros any more */
    rft_mover *movers[2];       /* by direction; NULL on the pageable path */
    char *staging;              /* device memory for masters on their way (masters.c), or NULL */
    uint64_t staging_bytes;     /* of each of them */
    uint32_t staging_count;     /* one after the other */
    rft_ration unit_ration;     /* of their host memory */
    uint64_t unit_bytes[2];     /* host memory of units that do not fit: pageable, page-locked */
    refit_memory_hooks hooks;   /* both NULL: there are none */
    refit_window *window;       /* that is open on it, or NULL */
    refit_host_step *host_step; /* that is open on it, or NULL */
    rft_stepper windows;
    rft_stepper cpu;
    bool accumulating;
    bool giving_back; /* wait is to give device memory back */
    bool closing;     /* a close has begun and was not finished: nothing starts any more */

    rft_mutex lock;
    refit_offloader_state state;       /* guarded by lock */
    rft_operation operation;           /* guarded by lock */
    refit_future futures[RFT_FUTURES]; /* guarded by lock */
    uint32_t read_locks;               /* guarded by lock */
    bool image_ready;                  /* its memory is there; guarded by lock */
    rft_offload_figures figures;       /* guarded by lock */
    bool misfits;                      /* masters did not fit: the plan is to be made anew; guarded
                                          by lock */

    rft_mutex verify_lock; /* digests are being taken */
};

/* The most copies of one batch. */
uint32_t rft_offloader_batch_most(const refit_offloader *offloader);

/* Makes the plan anew, if masters did not fit into that of the last offload. REFIT_ERR_LIMIT: they
 * cannot before regions that are away are back; or those of a seal. */
refit_status rft_offloader_renew_plan(refit_offloader *offloader, refit_error *error);

/* Does the next offload do that? */
bool rft_offloader_misfits(refit_offloader *offloader);

/* From now on no read lock begins, and no restore; `by` NULL: only looks. The image's bytes are in
 * it. REFIT_ERR_BUSY: read locks are open. */
refit_status rft_offloader_claim_image(refit_offloader *offloader, rft_stepper *by,
                                       refit_error *error);

/* Ends the claim. */
void rft_offloader_release_image(refit_offloader *offloader, rft_stepper *by);

/* Does it change the image now? */
bool rft_offloader_is_stepping(refit_offloader *offloader, const rft_stepper *by);

/* ---- window.c and host_step.c: what they tell */

void rft_window_stats(const refit_offloader *offloader, refit_stats *stats);
void rft_host_step_stats(const refit_offloader *offloader, refit_stats *stats);

/* ---- operation.c: operations begin, are noticed to have ended, and are waited for */

/* Is an operation under way? Lock held. */
bool rft_offloader_is_moving(const refit_offloader *offloader);

/* Is any region's memory or content away? */
bool rft_offloader_is_away(const refit_offloader *offloader);

/* REFIT_ERR_DEVICE: copies of an operation that failed to start hang. They may still use the image,
 * and the plan, so nothing may change either; all that is left is to close. */
refit_status rft_offloader_check_movers(refit_offloader *offloader, refit_error *error);

/* The operation has been started; `future` (may be NULL) is the caller's. */
void rft_operation_begin(refit_offloader *offloader, const rft_operation *operation,
                         refit_future *future);

/* If the operation's copies have ended, ends it; never waits. With offload.verify it does nothing:
 * digests are taken only by a call that waits. Lock held. */
void rft_operation_notice(refit_offloader *offloader);

/* Waits until operation `number` has ended, however it did. REFIT_ERR_TIMEOUT. Any thread. */
refit_status rft_operation_wait(refit_offloader *offloader, uint64_t number, uint32_t timeout_ms,
                                refit_error *error);

/* Counts time that a caller spent on operation `number`, since `began`. */
void rft_operation_count_blocked(refit_offloader *offloader, uint64_t number, int64_t began);

/* Counts an operation that failed before it began, and passes its status on. */
refit_status rft_operation_not_begun(refit_offloader *offloader, refit_future *future,
                                     refit_status status);

/* A future of the operation now or, with `next`, of the one about to begin. Lock held.
 * REFIT_ERR_BUSY. */
refit_status rft_future_take(refit_offloader *offloader, bool next, refit_future **out,
                             refit_error *error);

/* ---- host_image.c: where offloaded bytes lie */

/* Sees to it that there is an arena for the plan: takes it or, with offload.background, begins to.
 * REFIT_ERR_BUDGET, _PIN, _HOST_MEMORY, _TIMEOUT. */
refit_status rft_image_begin(refit_offloader *offloader, refit_error *error);

/* Does the same, and waits for its memory. If the memory could not be taken, this says why, once,
 * and the next call tries again. REFIT_ERR_TIMEOUT also says how far it is. */
refit_status rft_image_await(refit_offloader *offloader, uint32_t timeout_ms, refit_error *error);

/* Can the image be read, as far as its memory goes? Lock held. */
bool rft_image_is_ready(const refit_offloader *offloader);

/* Ends the taking, if it is under way. REFIT_ERR_TIMEOUT: end it again. */
refit_status rft_image_end(refit_offloader *offloader, refit_error *error);

/* Gives all of it back; ends the taking first, as above. */
refit_status rft_image_drop(refit_offloader *offloader, refit_error *error);

/* Makes the bytes of all regions zeros. The arena's memory is there, or still being taken. */
void rft_image_zero(refit_offloader *offloader);

/* Bytes of host memory that it has now. */
uint64_t rft_image_held(refit_offloader *offloader);

/* The host copy of a KEEP region. */
void *rft_image_of(const refit_offloader *offloader, const rft_region *region);

/* The pageable path (use_pinned_optimizer_offload: false): offload and restore, one tensor at a
 * time. */
refit_status rft_pageable_offload(refit_offloader *offloader, refit_stream_ref after,
                                  rft_operation *operation, refit_error *error);
refit_status rft_pageable_restore(refit_offloader *offloader, refit_stream_ref after,
                                  rft_operation *operation, refit_error *error);

/* Frees the host copies of regions that are on the device, unless a read lock reads them. Lock
 * held. */
void rft_pageable_trim(refit_offloader *offloader);

/* What there are host copies of now. Lock held. */
uint64_t rft_pageable_bytes(const refit_offloader *offloader);

/* ---- offloader_regions.c: device memory comes and goes */

/* Gives back the memory of regions that are away. Stops at the first failure; again goes on. */
refit_status rft_regions_give_back(refit_offloader *offloader, refit_error *error);

/* Takes memory for regions that are away. Stops and goes on in the same way. */
refit_status rft_regions_take(refit_offloader *offloader, refit_error *error);

#endif
