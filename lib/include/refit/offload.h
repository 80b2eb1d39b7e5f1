/*
 * refit/offload.h: optimizer states and grads leave the device and come back.
 *
 *     RESIDENT ──offload──► OFFLOADING ──► OFFLOADED ──restore──► RESTORING ──► RESIDENT
 *                                └────────► FAILED ◄────────────────┘
 *
 * Add each distinct storage once as a *region*, seal the offloader (this plans the layout and page-
 * locks the host memory, once; with offload.background while you go on), then offload and restore
 * as often as you like; neither allocates.
 *
 * Regions that are pieces of a refit_arena give up and regain their device memory by themselves.
 * For all others the caller does that: once offloaded, free the storage and refit_offloader_unbind
 * the region; before the restore allocate it again and refit_offloader_bind it. Or set hooks that
 * refit calls: refit_offloader_set_memory.
 *
 * A verb that fails before its copies are under way leaves the state as it was, and may be called
 * again. Copies under way do not fail, unless the device is lost (refit/device.h). But what they
 * brought may be refused: by a digest (offload.verify), or by the result of a check of masters.
 * That makes the state FAILED, and each region is in a known place (refit_offloader_region): its
 * bytes are on the device, or in the host image, which stays authoritative until the last byte is
 * back. After an offload all are still on the device; after a restore, the groups that were not
 * refused are. Both verbs may be called again from FAILED: they move what is not yet where it
 * should be.
 *
 * When the device is lost, every call but closes, reports and read locks answers REFIT_ERR_DEVICE.
 * What was away stays in the host image, which a read lock reads: also in RESTORING, and in FAILED
 * after it.
 *
 * With offload.verify the bytes are checked by the calls that wait: refit_offloader_wait, the
 * waits of a future, and its joins, which then wait too. Until one of them has, the state stays
 * OFFLOADING or RESTORING.
 *
 * Masters: a region of fp32 masters may name the bf16 weights that are their rounding
 * (refit_region_desc.weights). With offload.masters: auto only what the weights lack then leaves:
 * 2 of 4 bytes, and where a weight is not a rounding of its master a little more. Every bit returns
 * the same, whatever the weights are. In return the weights are device memory that stays where it
 * is, or is told where it went (refit_offloader_bind_weights), and is not changed while its masters
 * are away: a restore looks first, and writes no master whose weights are others
 * (REFIT_ERR_CORRUPT); with the weights as they were it can be repeated. So the joins of its
 * future wait, as with offload.verify. If more weights than expected are not roundings, the
 * offload ends with REFIT_ERR_LIMIT, in FAILED and with all bytes on the device: the next one,
 * called at once, plans anew and takes more host memory; a controller does that by itself. The
 * masters pass through offload.staging_bytes of device memory, which seal takes. Travel whole all
 * the same: masters of less than 4096 elements, or of which little would be saved; those with
 * another policy than REFIT_KEEP; and where the device has no kernels for it, or
 * use_pinned_optimizer_offload is false. refit_region_info.host_bytes is less than `bytes` for a
 * region whose masters do not.
 *
 * Masters with REFIT_PLACEMENT_HOST are away all the time, but for their visits in windows, which
 * refit/advanced/window.h describes. So their weights change only in a step that has them in its
 * window. Where weights are not roundings, and what they lack does not fit, the masters go whole
 * into host memory that is taken for them then: 1 MiB for each 262144 elements, beyond the image
 * and what refit_offloader_estimate says, and not held against offload.budget_bytes.
 *
 * Unchanged: the image keeps the bytes of a region that has come back. With refit_region_desc.reuse
 * an offload takes a digest of what is on the device now, as fast as the device reads its memory,
 * and copies the region only if that is not what left the last time: weights that nothing trains
 * leave once, and are only given up after that. The offload then waits for the work that `after`
 * has queued, and for the digest. A region is copied as ever after an unseal, or a trim; where the
 * device takes no digests; and with use_pinned_optimizer_offload: false.
 *
 * An offloader is used by one thread at a time, but for what is marked "any thread".
 */
#ifndef REFIT_OFFLOAD_H
#define REFIT_OFFLOAD_H

#include <refit/advanced/arena.h>
#include <refit/config.h>
#include <refit/device.h>
#include <refit/stats.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct refit_offloader refit_offloader;
typedef struct refit_future refit_future;
typedef struct refit_read_lock refit_read_lock;

/* A region of one offloader: 0, 1, 2 … in the order they were added. */
typedef uint32_t refit_region_id;

/* What happens to the bytes of a region while it is away. */
typedef enum refit_policy {
    REFIT_KEEP = 0,    /* they return exactly */
    REFIT_DISCARD = 1, /* they are lost, by agreement; nothing is copied */
    REFIT_ZERO = 2,    /* nothing is copied out; the memory returns zeroed */
} refit_policy;

/* Where a region is when nothing moves. All regions of one offloader have the same placement. */
typedef enum refit_placement {
    REFIT_PLACEMENT_DEVICE = 0,
    REFIT_PLACEMENT_HOST = 1, /* in the host image, from zeros on: sealed, the offloader is
                            OFFLOADED. The region visits the device in windows
                            (refit/advanced/window.h), or is bound and restored */
} refit_placement;

#define REFIT_GROUPS 64 /* groups are numbered below this */

typedef struct refit_region_desc {
    size_t size;      /* sizeof(refit_region_desc) */
    const char *name; /* for reports; copied; unique in the offloader */
    void *memory;     /* device memory; borrowed until unbind or close */
    uint64_t bytes;   /* > 0 */
    refit_policy policy;
    uint32_t group;            /* what is waited for together, < REFIT_GROUPS */
    int32_t priority;          /* the higher comes back first */
    int32_t reserved;          /* not read: shorter structs end in padding here */
    refit_placement placement; /* REFIT_PLACEMENT_HOST: `memory` is NULL, the policy REFIT_KEEP */
    const uint16_t *weights;   /* the bf16 weights whose fp32 masters the region holds, one of each;
                                  NULL: none. See "Masters" above */
    uint32_t reuse;            /* 1: it seldom changes, and leaves without a copy where it has not.
                                  See "Unchanged" above */
    uint32_t reserved2;        /* not read */
} refit_region_desc;

typedef enum refit_offloader_state {
    REFIT_OPEN = 0,       /* regions may be added; nothing planned */
    REFIT_RESIDENT = 1,   /* the device holds all bytes; the host image none that count */
    REFIT_OFFLOADING = 2, /* copies out under way; the device still holds all */
    REFIT_OFFLOADED = 3,  /* the host image is authoritative; device memory may be freed */
    REFIT_RESTORING = 4,  /* copies back under way; the host image is authoritative */
    REFIT_FAILED = 5,     /* see refit_offloader_region for where each region is */
} refit_offloader_state;

/* Where the bytes of one region are. */
typedef enum refit_place {
    REFIT_ON_DEVICE = 0,
    REFIT_ON_HOST = 1, /* away; REFIT_DISCARD and REFIT_ZERO: their bytes no longer count */
} refit_place;

typedef struct refit_region_info {
    size_t size;      /* sizeof(refit_region_info), set by the caller */
    const char *name; /* borrowed from the offloader */
    void *memory;     /* NULL while unbound */
    uint64_t bytes;
    uint64_t host_offset; /* in the host image; only for REFIT_KEEP, once sealed */
    refit_policy policy;
    uint32_t group;
    int32_t priority;
    refit_place place;
    uint8_t bound;       /* 1: it has device memory */
    uint8_t in_arena;    /* 1: a refit_arena holds it */
    uint64_t host_bytes; /* that it takes in the host image, once sealed */
} refit_region_info;

/* How the memory of regions outside an arena is freed and taken again, by the caller's allocator.
 * Called on the thread that calls refit, never on another; they must not call refit. A failing one
 * stops the operation with REFIT_ERR_CALLBACK and leaves it retryable. */
typedef struct refit_memory_hooks {
    size_t size;
    /* Free it: no copy uses it any more. 0, or any other number for failure. */
    int (*release)(void *user, refit_region_id region, void *memory, uint64_t bytes);
    /* Allocate it again and store the address. 0, or any other number for failure. */
    int (*acquire)(void *user, refit_region_id region, uint64_t bytes, void **memory);
    void *user;
} refit_memory_hooks;

/*
 * Opens an offloader on a device, which must outlive it, and two streams there, one for each
 * direction (on the host device a thread each), but with use_pinned_optimizer_offload: false.
 * `config` may be NULL; it is copied. Takes no arena memory yet.
 *
 * Errors:
 * - REFIT_ERR_CONFIG, REFIT_ERR_HOST_MEMORY, REFIT_ERR_DEVICE
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_open(refit_device *device,
                                                             const refit_config *config,
                                                             refit_offloader **out,
                                                             refit_error *error);

/*
 * Closes it in any state; NULL is allowed. Copies under way are finished first, and host memory
 * that is still being taken is given up (each blocks, at most offload.timeout_ms). Bytes that are
 * still away are lost with it: restore before, if they matter. Its futures end with it.
 *
 * Errors:
 * - REFIT_ERR_BUSY: a read lock is open; nothing is closed
 * - REFIT_ERR_TIMEOUT: a copy or the taking of memory does not end; nothing is closed
 * - REFIT_ERR_DEVICE, REFIT_ERR_TIMEOUT: the device does not close a stream; it starts nothing any
 *   more: close it again
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_close(refit_offloader *offloader,
                                                              refit_error *error);

/*
 * Adds a region and writes its number. A piece of an arena whose memory went with another offloader
 * gets it again (this may block for the driver; nothing else here blocks).
 *
 * Errors:
 * - REFIT_ERR_STATE: sealed
 * - REFIT_ERR_EXISTS: the name, or an overlapping address, is there already
 * - REFIT_ERR_BUSY: a piece that is held (refit_arena_pin), or still a region of another offloader
 * - REFIT_ERR_DEVICE_MEMORY: a piece cannot get its memory again
 * - REFIT_ERR_LIMIT, REFIT_ERR_HOST_MEMORY, REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_add(refit_offloader *offloader,
                                                            const refit_region_desc *region,
                                                            refit_region_id *out,
                                                            refit_error *error);

/*
 * Batch form of refit_offloader_add: adds `count` regions, numbered in this order. `size` is the
 * same in all elements, and is the distance between them. Stops at the first that fails; those
 * before it stay added (see refit_offloader_count). Blocks as add does.
 *
 * Errors:
 * - REFIT_ERR_INVALID: no list
 * - those of refit_offloader_add
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_add_each(refit_offloader *offloader,
                                                                 const refit_region_desc *regions,
                                                                 uint32_t count,
                                                                 refit_error *error);

/*
 * What sealing would take, without taking it: host bytes, and the budget they are held against, in
 * which the host memory that the offloader has already counts as free. Does not block.
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_estimate(refit_offloader *offloader,
                                                                 uint64_t *host_bytes,
                                                                 uint64_t *budget_bytes,
                                                                 refit_error *error);

/*
 * Sets the hooks (copied); NULL removes them.
 *
 * Errors:
 * - REFIT_ERR_STATE: not OPEN or RESIDENT
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_set_memory(refit_offloader *offloader,
                                                                   const refit_memory_hooks *hooks,
                                                                   refit_error *error);

/*
 * Plans the layout and takes, touches and page-locks the host memory; then no region can be added.
 * Blocks for the first touch. Other processes of this user on this machine may take theirs at the
 * same time; while these leave too little, it waits for them first (offload.take_turns; at most
 * offload.timeout_ms while they get nowhere). With offload.background it returns at once, and a
 * thread of its own takes the memory (see refit_offloader_prepare). If an earlier, smaller request
 * for memory is still in progress, the call first ends it, which takes at most offload.timeout_ms.
 * On failure the offloader is OPEN as before and nothing is held. A second call does nothing.
 *
 * Errors:
 * - REFIT_ERR_TIMEOUT: other processes that leave too little got nowhere
 * - REFIT_ERR_LIMIT: more regions or bytes than can be planned
 * - REFIT_ERR_UNSUPPORTED: REFIT_PLACEMENT_HOST without use_pinned_optimizer_offload
 * - REFIT_ERR_STATE: REFIT_PLACEMENT_HOST, and some regions were restored before an unseal while
 *   others are new
 * - REFIT_ERR_CONFIG: a NUMA node that is not there
 * - REFIT_ERR_DEVICE_MEMORY: none for masters on their way
 * - REFIT_ERR_INVALID: weights that lie in a region, with which they would leave; weights that two
 *   regions with REFIT_PLACEMENT_HOST share
 * - REFIT_ERR_BUDGET, REFIT_ERR_PIN, REFIT_ERR_HOST_MEMORY, REFIT_ERR_SYSTEM, REFIT_ERR_DEVICE
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_seal(refit_offloader *offloader,
                                                             refit_error *error);

/*
 * Waits until the host memory is ready, at most `timeout_ms` (0: only look). Every offload waits
 * for it too, so this call is for callers that want the memory, or its failure, earlier. If the
 * memory could not be taken, the first call that needs it returns the error that
 * refit_offloader_seal would have returned (REFIT_ERR_CANCELLED if a trim or a close has stopped
 * it, and had no time to end it), and the next call tries again. After a trim this call begins to
 * take the memory; without offload.background it takes all of it before it returns, as seal does,
 * whatever `timeout_ms` is.
 *
 * Errors:
 * - REFIT_ERR_TIMEOUT: the sentence says how far it is; call again
 * - REFIT_ERR_STATE: not sealed
 * - those of refit_offloader_seal
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_prepare(refit_offloader *offloader,
                                                                uint32_t timeout_ms,
                                                                refit_error *error);

/*
 * Undoes seal, so that regions can be added or removed (re-planned) again; the host memory is kept
 * for the next seal. Does not block.
 *
 * Errors:
 * - REFIT_ERR_STATE: not RESIDENT
 * - REFIT_ERR_BUSY: a read lock is open
 * - REFIT_ERR_DEVICE: copies hang that failed to start; it can only be closed
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_unseal(refit_offloader *offloader,
                                                               refit_error *error);

/*
 * Removes all regions. Does not block, but for pieces of an arena that PyTorch has given back
 * meanwhile: see refit_torch_free.
 *
 * Errors:
 * - REFIT_ERR_STATE: not OPEN
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_clear(refit_offloader *offloader,
                                                              refit_error *error);

/*
 * Says that a gradient accumulation is open (1) or closed (0). While it is open, an offload that
 * would discard or zero a region is refused (REFIT_ERR_STATE).
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_set_accumulating(refit_offloader *offloader,
                                                                         int open,
                                                                         refit_error *error);

/*
 * Starts the offload: the copies wait for the work that `after` has queued, and the call returns.
 * With `out` the caller gets a future, which it closes; NULL for none. If regions in arenas or
 * hooks are to give memory back, that happens in refit_offloader_wait, once the copies are done.
 * From OFFLOADING or OFFLOADED it does nothing and gives the future of the operation under way or
 * done.
 *
 * Does not block, with these exceptions: the semantics of REFIT_STREAM_NONE for `after`; regions
 * with `reuse` (see "Unchanged" above); host memory that offload.background has not taken yet (at
 * most offload.timeout_ms); masters that did not fit (REFIT_ERR_LIMIT of refit_offloader_wait), for
 * which it plans anew, as seal does; use_pinned_optimizer_offload: false, where it copies before it
 * returns; and a GPU with a low offload.rate_limit, once the driver's queue is full.
 *
 * Errors:
 * - REFIT_ERR_STATE: not sealed, accumulating, or restoring
 * - REFIT_ERR_BUSY: a read lock holds the image, or 64 futures are open
 * - REFIT_ERR_TIMEOUT: the host memory is not there yet; call again
 * - REFIT_ERR_LIMIT: more copies than a stream of the device queues; masters that did not fit,
 *   while other regions are away
 * - REFIT_ERR_COPY, REFIT_ERR_DEVICE
 * - planning anew: those of refit_offloader_seal
 * - after a trim and with offload.background: those of refit_offloader_seal
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_offload(refit_offloader *offloader,
                                                                refit_stream_ref after,
                                                                refit_future **out,
                                                                refit_error *error);

/*
 * Waits for the operation under way and completes it. After an offload: the device memory of arena
 * regions, and of others through the hooks, is given back; that first waits for streams that use
 * the arena (refit_arena_add_stream, which says how long, and what it answers). An arena or a hook
 * that fails leaves the state OFFLOADED, and the next call goes on where it was. After a restore:
 * nothing but the wait. Idempotent; with no operation under way it returns REFIT_OK at once, or in
 * FAILED how the operation failed.
 *
 * Errors:
 * - REFIT_ERR_TIMEOUT: call again
 * - REFIT_ERR_CORRUPT: offload.verify; weights that were changed while their masters were away
 * - REFIT_ERR_LIMIT: masters did not fit into their room; offload again
 * - REFIT_ERR_DEVICE, REFIT_ERR_CALLBACK
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_wait(refit_offloader *offloader,
                                                             uint32_t timeout_ms,
                                                             refit_error *error);

/*
 * Says that the caller has freed the region's memory. Only in OFFLOADED or FAILED, for a region
 * whose bytes are on the host. Idempotent.
 *
 * Errors:
 * - REFIT_ERR_INVALID: a region in an arena
 * - REFIT_ERR_STATE, REFIT_ERR_NOT_FOUND
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_unbind(refit_offloader *offloader,
                                                               refit_region_id region,
                                                               refit_error *error);

/*
 * Gives the region new device memory (borrowed until unbind or close). In RESIDENT it says that the
 * caller has moved the storage. On failure the region keeps the memory it has. Blocks as add does.
 *
 * Errors:
 * - REFIT_ERR_STATE: copies run
 * - REFIT_ERR_EXISTS: an overlap
 * - REFIT_ERR_DEVICE_MEMORY: an arena that cannot take its memory back
 * - REFIT_ERR_BUSY: as for add
 * - REFIT_ERR_NOT_FOUND, REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_bind(refit_offloader *offloader,
                                                             refit_region_id region, void *memory,
                                                             refit_error *error);

/*
 * Says where the weights of a region that was added with weights are now (device memory, borrowed
 * until the next call or close). Does not block.
 *
 * Errors:
 * - REFIT_ERR_STATE: copies run, or a step in windows
 * - REFIT_ERR_INVALID: a region without weights, or no device memory
 * - REFIT_ERR_NOT_FOUND
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_bind_weights(refit_offloader *offloader,
                                                                     refit_region_id region,
                                                                     const uint16_t *weights,
                                                                     refit_error *error);

/*
 * Batch forms of the two. Regions are handled in order: the call stops at the first failure, and
 * those before it have changed, so call again.
 *
 * Errors:
 * - REFIT_ERR_INVALID: no list
 * - those of refit_offloader_unbind and refit_offloader_bind
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_unbind_each(refit_offloader *offloader,
                                                                    const refit_region_id *regions,
                                                                    uint32_t count,
                                                                    refit_error *error);
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_bind_each(refit_offloader *offloader,
                                                                  const refit_region_id *regions,
                                                                  void *const *memory,
                                                                  uint32_t count,
                                                                  refit_error *error);

/*
 * Starts the restore, highest priority first, after the work that `after` has queued (that is
 * where the new memory was allocated). Unbound regions get memory first: from their arena, or
 * through the hooks. From RESTORING or RESIDENT it does nothing. Does not wait for copies (see
 * offload for the exceptions).
 *
 * Errors:
 * - REFIT_ERR_STATE: a region has neither arena nor hooks (the sentence names it), or the offload
 *   is not finished
 * - REFIT_ERR_DEVICE_MEMORY, REFIT_ERR_CALLBACK: memory taken so far stays bound, and the call can
 *   be repeated; nothing is lost
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_restore(refit_offloader *offloader,
                                                                refit_stream_ref after,
                                                                refit_future **out,
                                                                refit_error *error);

/*
 * The state now; a finished copy is noticed, but with offload.verify. Memory that
 * refit_offloader_wait is to give back is still taken in an OFFLOADED seen here. OPEN for NULL.
 * Any thread. Does not block.
 */
REFIT_API refit_offloader_state refit_offloader_get_state(refit_offloader *offloader);

/* The state's name ("OFFLOADED"), a constant. */
REFIT_API const char *refit_offloader_state_name(refit_offloader_state state);

/* How many regions there are. */
REFIT_API uint32_t refit_offloader_count(const refit_offloader *offloader);

/*
 * Describes one region.
 *
 * Errors:
 * - REFIT_ERR_NOT_FOUND, REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_region(refit_offloader *offloader,
                                                               refit_region_id region,
                                                               refit_region_info *info,
                                                               refit_error *error);

/* Adds the offloader's figures to `stats` (see refit/stats.h). Does not block. */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_stats(refit_offloader *offloader,
                                                              refit_stats *stats,
                                                              refit_error *error);

/*
 * Gives the host memory back while nothing is away, also memory that is still being taken (blocks,
 * at most offload.timeout_ms); the next offload takes it again.
 *
 * Errors:
 * - REFIT_ERR_TIMEOUT: call again
 * - REFIT_ERR_STATE, REFIT_ERR_BUSY, REFIT_ERR_DEVICE: as for unseal
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_offloader_trim(refit_offloader *offloader,
                                                             refit_error *error);

/* ---- Futures: an operation under way ------------------------------------------------------------
 * An operation that failed to start has none; one that started completes exactly once, with one
 * status that every wait returns. Any thread may wait; one closes it. */

/*
 * Waits until the whole operation is done.
 *
 * Errors:
 * - REFIT_ERR_TIMEOUT
 * - the operation's own error
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_future_wait(refit_future *future, uint32_t timeout_ms,
                                                          refit_error *error);

/*
 * Waits until the regions of one group are done. During an offload their memory must stay as it is
 * until the whole operation is. A group without regions is done.
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_future_wait_group(refit_future *future,
                                                                uint32_t group, uint32_t timeout_ms,
                                                                refit_error *error);

/*
 * 1 if the whole operation is done, however it ended; with offload.verify only after a wait. 0 for
 * NULL. Does not block.
 */
REFIT_API int refit_future_done(refit_future *future);

/*
 * Makes `stream` wait, on the device, for the whole operation; the CPU goes on (with
 * REFIT_STREAM_NONE it blocks, and for a restore of masters by their weights). Use it on every
 * stream that reads the regions.
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_future_join(refit_future *future,
                                                          refit_stream_ref stream,
                                                          refit_error *error);

/* The join for the regions of one group. */
REFIT_API REFIT_MUST_CHECK refit_status refit_future_join_group(refit_future *future,
                                                                uint32_t group,
                                                                refit_stream_ref stream,
                                                                refit_error *error);

/* Ends the caller's use of it; NULL is allowed. The operation goes on. Does not block. */
REFIT_API void refit_future_close(refit_future *future);

/*
 * ---- Read locks: reading the host image while states are away
 *
 * A checkpoint writer holds a read lock; until it ends, no offload overwrites what it reads.
 */

/*
 * Starts a read lock, while the image holds all KEEP regions: in OFFLOADED and RESTORING, unless
 * some are on the device since an operation that was refused; on a lost device in FAILED, too, if
 * none was there. Several read locks may be open. Any thread.
 *
 * Errors:
 * - REFIT_ERR_STATE: another state, or a KEEP region is not in the image
 * - REFIT_ERR_DEVICE: the device was lost during a step in windows, which stays unfinished
 * - REFIT_ERR_BUSY: a step in windows changes the image; or its host memory is still coming
 *   (REFIT_PLACEMENT_HOST with offload.background: see refit_offloader_prepare)
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_read_lock_acquire(refit_offloader *offloader,
                                                                refit_read_lock **out,
                                                                refit_error *error);

/*
 * The host bytes of a KEEP region, read-only, valid until the read lock is released. Any thread. Of
 * masters that left by their weights the first call makes them whole, in host memory that the read
 * lock keeps (4 bytes an element, pageable): it reads the weights, and blocks for that.
 *
 * Errors:
 * - REFIT_ERR_NOT_FOUND: a region without a host image
 * - REFIT_ERR_CORRUPT: the weights are not as they were when the masters left
 * - REFIT_ERR_HOST_MEMORY, REFIT_ERR_COPY, REFIT_ERR_DEVICE: masters
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_read_lock_read(const refit_read_lock *lock,
                                                             refit_region_id region,
                                                             const void **bytes, uint64_t *count,
                                                             refit_error *error);

/* Ends a read lock; NULL is allowed. Any thread. */
REFIT_API void refit_read_lock_release(refit_read_lock *lock);

#ifdef __cplusplus
}
#endif
#endif
