/*
 * refit/advanced/activations.h: saved tensors leave in the forward pass and return in the backward
 * pass.
 *
 *     OPEN ──commit──► LEAVING ──►  AWAY ──fetch──► RETURNING ──► RETURNED ──fetch──► RETURNING
 *                                                              release: from any of them
 *
 * Tensors leave in groups: those that one layer saves, say. The host memory is one page-locked
 * arena of activations.host_bytes, taken once. What leaves in the forward pass returns in reverse
 * order, so the arena is a stack of groups: a group takes its room on top, and gives it back there.
 * Groups that are released in another order (pipelines, several backward passes) leave free pieces
 * below the top; those are used where the top has no room, and the statistics count them.
 *
 *     refit_activations_begin(activations, &group, &error);              forward, layer by layer
 *     refit_activations_add(activations, group, memories, bytes, count, tensors, &error);
 *     refit_activations_commit(activations, group, stream, &error);      copies out begin
 *     …                                                                  the next layer computes
 *     refit_activations_join(activations, group, stream, &error);        then free the memory
 *
 *     refit_activations_fetch(activations, group, memories, count, stream, &error);  backward
 *     refit_activations_join(activations, group, stream, &error);        use what has returned
 *     refit_activations_release(activations, group, stream, &error);
 *
 * A group is known by its number, which is never used again; a tensor by its place in the group,
 * never by its address. Copies out have a stream of their own, and copies in have another. The
 * caller's stream waits by events, on the device; REFIT_STREAM_NONE waits in the call. Several
 * groups may be OPEN, LEAVING or RETURNING at once. offload.rate_limit and offload.verify are for
 * states, and do not apply to these copies.
 *
 * Calls take turns: any thread may call, and one that waits delays the others. No thread of its
 * own, but that which takes the arena with offload.background. After the first iteration nothing is
 * allocated, unless more groups or more tensors are there at once than ever before.
 */
#ifndef REFIT_ADVANCED_ACTIVATIONS_H
#define REFIT_ADVANCED_ACTIVATIONS_H

#include <refit/config.h>
#include <refit/device.h>
#include <refit/stats.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct refit_activations refit_activations;

/* A group of tensors of one refit_activations: 1, 2, 3 … in the order they were begun. */
typedef uint64_t refit_activation_group;

/* The place of a tensor that has got no room: it stays on the device. */
#define REFIT_ACTIVATION_STAYS UINT32_MAX

/*
 * Opens the arena for the tensors of `device`, which is borrowed; `config` is copied, NULL: the
 * defaults. Takes activations.host_bytes of page-locked host memory, at once, or with
 * offload.background on a thread of its own: then refit_activations_begin reports how that ended.
 * Blocks for it otherwise. All host arenas of one device share offload.budget_bytes: this one,
 * those of offloaders, and those of host steps.
 *
 * Errors:
 * - REFIT_ERR_CONFIG: activations.host_bytes is 0
 * - REFIT_ERR_UNSUPPORTED: use_pinned_optimizer_offload is false: the arena is page-locked
 * - REFIT_ERR_BUDGET, REFIT_ERR_PIN, REFIT_ERR_HOST_MEMORY, REFIT_ERR_SYSTEM, REFIT_ERR_TIMEOUT
 * - REFIT_ERR_DEVICE
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_activations_open(refit_device *device,
                                                               const refit_config *config,
                                                               refit_activations **out,
                                                               refit_error *error);

/*
 * Waits for copies, at most offload.timeout_ms, then gives back all groups and the arena. NULL is
 * allowed. No other thread may use it any more.
 *
 * Errors:
 * - REFIT_ERR_TIMEOUT, REFIT_ERR_DEVICE: copies, or the thread that takes the arena, have not
 *   ended. Close again: all other calls but refit_activations_stats are refused until then
 *   (REFIT_ERR_STATE)
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_activations_close(refit_activations *activations,
                                                                refit_error *error);

/*
 * Begins a group, which is OPEN. Its tensors go on top of the stack. Waits for the arena where a
 * thread still takes it, at most offload.timeout_ms.
 *
 * Errors:
 * - REFIT_ERR_BUDGET, REFIT_ERR_PIN, REFIT_ERR_HOST_MEMORY, REFIT_ERR_SYSTEM, REFIT_ERR_TIMEOUT: of
 *   the arena. The next call tries to take it again
 * - REFIT_ERR_HOST_MEMORY: for bookkeeping
 * - REFIT_ERR_DEVICE: no event can be opened
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_activations_begin(refit_activations *activations,
                                                                refit_activation_group *group,
                                                                refit_error *error);

/*
 * Adds `count` tensors to an OPEN group: `bytes` (> 0) of device memory each, borrowed until a join
 * or a release after the commit. `tensors` are their places in the group, 0, 1, 2 … in the order in
 * which they are added, or REFIT_ACTIVATION_STAYS for one that the arena has no room for: no error,
 * since all others go on. Does not block. One memory that is added twice leaves twice. Tensors
 * before one that fails stay added.
 *
 * Errors:
 * - REFIT_ERR_STATE: the group is not OPEN
 * - REFIT_ERR_NOT_FOUND: there is no such group (or it was released)
 * - REFIT_ERR_INVALID: no memory of this device
 * - REFIT_ERR_HOST_MEMORY: for bookkeeping
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_activations_add(
    refit_activations *activations, refit_activation_group group, void *const *memories,
    const uint64_t *bytes, uint32_t count, uint32_t *tensors, refit_error *error);

/*
 * Starts the copies out, after what `stream` has queued. Until a join of the group the memory must
 * stay as it is. A group without tensors is AWAY at once. Does not block, unless copies fail to
 * start: then it waits for those that did start, at most offload.timeout_ms.
 *
 * Errors:
 * - REFIT_ERR_STATE: not OPEN
 * - REFIT_ERR_NOT_FOUND
 * - REFIT_ERR_COPY and others: the group is OPEN, and no copy reads its memory; commit again, or
 *   release
 * - REFIT_ERR_TIMEOUT: copies that a call started before it failed go on; the same
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_activations_commit(refit_activations *activations,
                                                                 refit_activation_group group,
                                                                 refit_stream_ref stream,
                                                                 refit_error *error);

/*
 * Makes the work that `stream` gets from now on wait for the group's copies, in either direction:
 * after it memory that has left may be freed or used again, and memory that has returned may be
 * read. With REFIT_STREAM_NONE the call waits, at most offload.timeout_ms; with a stream it does
 * not. With no copy under way it does nothing.
 *
 * Errors:
 * - REFIT_ERR_STATE: OPEN
 * - REFIT_ERR_NOT_FOUND
 * - REFIT_ERR_TIMEOUT, REFIT_ERR_DEVICE
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_activations_join(refit_activations *activations,
                                                               refit_activation_group group,
                                                               refit_stream_ref stream,
                                                               refit_error *error);

/*
 * Waits until the group's copies are over, at most `timeout_ms` (0: only looks). With no copy under
 * way: REFIT_OK at once.
 *
 * Errors:
 * - REFIT_ERR_TIMEOUT
 * - REFIT_ERR_NOT_FOUND
 * - REFIT_ERR_DEVICE: the device is lost (refit/device.h): all that is left is to release and close
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_activations_wait(refit_activations *activations,
                                                               refit_activation_group group,
                                                               uint32_t timeout_ms,
                                                               refit_error *error);

/*
 * Starts the copies in. `memories` has `count` addresses of device memory, by the places of the
 * tensors; NULL: this one is not wanted now. The copies wait for what `stream` has queued, which is
 * where this memory was used last, and for the copies out. The memory must stay until a join, a
 * wait or a release. The bytes stay in the arena until the release: they can be fetched again, all
 * or some of them. A fetch after a fetch that was joined waits for its copies, at most
 * offload.timeout_ms. Otherwise it does not block, unless copies fail to start, as in a commit.
 * With no address it does nothing.
 *
 * Errors:
 * - REFIT_ERR_STATE: OPEN, or RETURNING and not joined: wait or join first
 * - REFIT_ERR_NOT_FOUND
 * - REFIT_ERR_INVALID: more addresses than tensors, or one that is not memory of this device
 * - REFIT_ERR_COPY and others: no copy in is under way; fetch again
 * - REFIT_ERR_TIMEOUT: earlier copies go on; fetch again
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_activations_fetch(
    refit_activations *activations, refit_activation_group group, void *const *memories,
    uint32_t count, refit_stream_ref stream, refit_error *error);

/*
 * Gives the group back: its number means nothing any more, and its room in the arena is free. Work
 * that `stream` gets from now on waits for copies that are still under way, as with a join; then
 * device memory that they use may be freed. In any state. Where `stream` cannot be made to wait,
 * and with REFIT_STREAM_NONE, the call waits, at most offload.timeout_ms; on a lost device for
 * nothing.
 *
 * Errors:
 * - REFIT_ERR_NOT_FOUND
 * - REFIT_ERR_TIMEOUT, REFIT_ERR_DEVICE: copies are under way and cannot be waited for; release
 *   again: nothing has changed
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_activations_release(refit_activations *activations,
                                                                  refit_activation_group group,
                                                                  refit_stream_ref stream,
                                                                  refit_error *error);

/*
 * Fills in the figures that begin with activation_. Does not block. Any thread.
 *
 * Errors:
 * - REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_activations_stats(refit_activations *activations,
                                                                refit_stats *stats,
                                                                refit_error *error);

#ifdef __cplusplus
}
#endif
#endif
