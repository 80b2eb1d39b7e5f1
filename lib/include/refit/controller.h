/*
 * refit/controller.h: the refit cycle, as a training loop calls it.
 *
 *     TRAINING ─offload─► CLEARED ──publish──► REFITTED ─restore─► RETURNING ──wait──► TRAINING
 *                            └──────────── restore (the refit failed or was skipped) ───┘
 *
 *     optimizer_step();
 *     refit_controller_offload(controller, stream, &error);           states off the device
 *     refit_controller_publish(controller, 0, weights, n, ...);     all workers switch, or none
 *     generate();                                                   rollouts use the free memory
 *     refit_controller_restore(controller, stream, &error);          states come back meanwhile
 *     forward(); backward();
 *     refit_controller_wait(controller, stream, &error);            before the next optimizer step
 *
 * Each verb is idempotent; one that does not fit the state answers REFIT_ERR_STATE and says which
 * would. A failed phase leaves the state where it was, so it can be called again or skipped by
 * `restore`; two exceptions say so below. With several offloaders, a verb that fails on one has
 * done its work on the others: it is called again for the rest, or `restore` brings all back.
 */
#ifndef REFIT_CONTROLLER_H
#define REFIT_CONTROLLER_H

#include <refit/broadcast.h>
#include <refit/offload.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct refit_controller refit_controller;

typedef enum refit_controller_state {
    REFIT_TRAINING = 0,  /* states on the device, free to be stepped */
    REFIT_CLEARED = 1,   /* states in the host image, their device memory given back */
    REFIT_REFITTED = 2,  /* the same, and the workers hold the new version */
    REFIT_RETURNING = 3, /* states are returning; do not step yet */
} refit_controller_state;

/*
 * Joins an offloader and a publisher (either may be NULL: then its phases do nothing) into a cycle.
 * Both are borrowed: close the controller first. Seals the offloader if it is not. `config` may be
 * NULL; it is copied. An offloader whose states are away makes it begin in CLEARED, or in
 * RETURNING. One thread at a time. Does not block, but for the seal.
 *
 * Errors:
 * - REFIT_ERR_INVALID: both are NULL
 * - those of refit_offloader_seal
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_controller_open(refit_offloader *offloader,
                                                              refit_publisher *publisher,
                                                              const refit_config *config,
                                                              refit_controller **out,
                                                              refit_error *error);

/*
 * Adds the offloader of another device: from now on each verb moves the states of all devices, side
 * by side. `stream` is a stream of that device and stands for the one that a verb is given, which
 * is for the offloader of refit_controller_open; REFIT_STREAM_NONE as in the verbs. Adding an
 * offloader again, in any state, only changes its stream.
 * The offloader is borrowed: close the controller first. The stream stays open until another one is
 * given, or the controller is closed. Seals the offloader if it is not, and blocks for that alone.
 *
 * Errors:
 * - REFIT_ERR_STATE: the states of the controller, or of the offloader, are away
 * - REFIT_ERR_INVALID, REFIT_ERR_HOST_MEMORY
 * - those of refit_offloader_seal
 *
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_controller_add(refit_controller *controller,
                                                             refit_offloader *offloader,
                                                             refit_stream_ref stream,
                                                             refit_error *error);

/*
 * Frees the controller, in whatever state; offloaders and the publisher stay as they are. NULL is
 * allowed.
 */
REFIT_API void refit_controller_close(refit_controller *controller);

/*
 * States leave the device after the work that `after` has queued; returns when they have left and
 * their memory is given back. If all have left but their memory could not be given back, the state
 * is CLEARED all the same; calling it again goes on with that. In TRAINING after a failure the
 * optimizer steps only once refit_controller_wait agrees. Blocks, at most offload.timeout_ms, and
 * with offload.background before as long for host memory that is not there yet.
 *
 * Errors:
 * - REFIT_ERR_STATE: in RETURNING
 * - those of refit_offloader_offload and refit_offloader_wait
 * - once, the error of the last restore, if the last wait only made a stream wait for its copies
 *   and the device was lost later
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_controller_offload(refit_controller *controller,
                                                                 refit_stream_ref after,
                                                                 refit_error *error);

/*
 * Publishes one version (0: the next number) from the weights given, which live on `device` after
 * `after` (NULL and REFIT_STREAM_NONE: host memory). Returns when refit_publisher_commit does, by
 * default when the version is applied, or aborted. Also allowed in TRAINING, where the states stay.
 * Nothing if `version` is the current one already. Where a commit fails because workers were lost
 * after it, the version holds, and so does REFITTED. Blocks within the deadlines of
 * refit_publisher_commit.
 *
 * Errors:
 * - REFIT_ERR_STATE: in RETURNING
 * - those of refit_publisher_begin, refit_publisher_write_all and refit_publisher_commit
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_controller_publish(
    refit_controller *controller, uint64_t version, const refit_weight *weights, uint32_t count,
    refit_device *device, refit_stream_ref after, refit_error *error);

/*
 * Starts the restore of the states, without waiting for it; does nothing if they are on the device.
 * After a failure (no device memory yet, say) call it again. After an offload that timed out it
 * waits for the offload first.
 *
 * Errors:
 * - those of refit_offloader_restore; after an offload that timed out also those of
 *   refit_offloader_wait
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_controller_restore(refit_controller *controller,
                                                                 refit_stream_ref after,
                                                                 refit_error *error);

/*
 * Makes `stream` wait for the states; with REFIT_STREAM_NONE, blocks until they are back (at most
 * offload.timeout_ms). Call it before the optimizer step. Nothing in TRAINING with the states
 * there.
 *
 * Errors:
 * - REFIT_ERR_STATE: before the restore, also in TRAINING where a phase has failed and states are
 *   away or leaving
 * - the error of the restore; then call refit_controller_restore again
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_controller_wait(refit_controller *controller,
                                                              refit_stream_ref stream,
                                                              refit_error *error);

/* The state now. */
REFIT_API refit_controller_state refit_controller_get_state(const refit_controller *controller);

/* The state's name ("CLEARED"), a constant. */
REFIT_API const char *refit_controller_state_name(refit_controller_state state);

/*
 * The whole picture: the figures of the offloaders (see refit_stats_merge), the publisher and the
 * cycle. `stats->size` set by the caller.
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_controller_stats(refit_controller *controller,
                                                               refit_stats *stats,
                                                               refit_error *error);

#ifdef __cplusplus
}
#endif
#endif
