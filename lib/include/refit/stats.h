/*
 * refit/stats.h: what refit has done, as numbers.
 *
 * One list gives the struct, the JSON and the Prometheus text. Counters and totals count since the
 * object was opened; "last" figures are those of the most recent operation. Seconds are wall time.
 * *Blocked* is the part of it during which the caller was made to wait.
 */
#ifndef REFIT_STATS_H
#define REFIT_STATS_H

#include <refit/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(type, name, kind, "help"): type u64, or f64 for seconds; kind counter or gauge. Append only:
 * order is ABI. */
#define REFIT_STATS_MAP(X)                                                                         \
    X(u64, offload_regions, gauge, "regions that the offloader moves")                             \
    X(u64, offload_copies_per_cycle, gauge, "copies submitted by the last offload")                \
    X(u64, offload_count, counter, "offloads completed")                                           \
    X(u64, offload_bytes_total, counter, "bytes copied out")                                       \
    X(u64, offload_bytes_last, gauge, "bytes copied out by the last offload")                      \
    X(u64, offload_reclaimed_bytes_last, gauge,                                                    \
      "device bytes that the last offload gave to the system or to the caller's allocator")        \
    X(f64, offload_seconds_last, gauge, "last offload, from call to last byte")                    \
    X(f64, offload_blocked_seconds_last, gauge, "last offload, time the caller waited")            \
    X(u64, restore_count, counter, "restores completed")                                           \
    X(u64, restore_bytes_total, counter, "bytes copied back")                                      \
    X(u64, restore_bytes_last, gauge, "bytes copied back by the last restore")                     \
    X(f64, restore_seconds_last, gauge, "last restore, from call to last byte")                    \
    X(f64, restore_blocked_seconds_last, gauge, "last restore, time the caller waited")            \
    X(u64, offload_failures, counter, "offloads and restores that failed")                         \
    X(u64, host_payload_bytes, gauge, "bytes that the host image must hold")                       \
    X(u64, host_bytes, gauge, "bytes of host memory taken for the image")                          \
    X(u64, host_pinned_bytes, gauge, "of these, page-locked")                                      \
    X(u64, host_pageable_bytes, gauge, "of these, not page-locked")                                \
    X(u64, host_huge_pages, gauge, "1 if huge pages were asked for")                               \
    X(f64, host_pin_seconds, gauge, "first touch and page-lock of the image")                      \
    X(u64, read_locks, gauge, "open read locks on the host image")                                 \
    X(u64, publish_version, gauge, "last committed version")                                       \
    X(u64, publish_count, counter, "versions committed")                                           \
    X(u64, publish_aborts, counter, "versions aborted")                                            \
    X(u64, publish_bytes_last, gauge, "bytes of weights in the last version")                      \
    X(u64, publish_sent_bytes_total, counter, "payload bytes sent through sockets")                \
    X(u64, publish_resent_frames, counter, "frames sent again")                                    \
    X(u64, publish_same_blocks_last, gauge, "blocks of the last version that had not changed")     \
    X(f64, publish_write_seconds_last, gauge, "device to store, digest included")                  \
    X(f64, publish_stage_seconds_last, gauge, "from begin until the needed workers had staged")    \
    X(f64, publish_commit_seconds_last, gauge, "from commit until the last worker had applied")    \
    X(u64, workers, gauge, "workers subscribed now")                                               \
    X(u64, workers_shm, gauge, "of these, through shared memory")                                  \
    X(u64, workers_committed_last, gauge, "workers that applied the last version")                 \
    X(u64, workers_evicted, counter, "workers lost or evicted")                                    \
    X(u64, messages_refused, counter, "messages that broke the protocol")                          \
    X(u64, receive_version, gauge, "subscriber: version held")                                     \
    X(u64, receive_count, counter, "subscriber: versions applied")                                 \
    X(u64, receive_aborts, counter, "subscriber: versions dropped before commit")                  \
    X(u64, receive_bytes_total, counter, "subscriber: payload bytes received")                     \
    X(u64, receive_bad_frames, counter, "subscriber: frames whose hash did not match")             \
    X(f64, receive_stage_seconds_last, gauge, "subscriber: from offer to staged")                  \
    X(u64, cycles, counter, "refit cycles completed")                                              \
    X(u64, cycle_failures, counter, "refit cycles in which a phase failed")                        \
    X(f64, cycle_seconds_last, gauge, "last cycle, offload to wait")                               \
    X(f64, cycle_blocked_seconds_last, gauge, "last cycle, time the caller waited")                \
    X(f64, cycle_offload_seconds_last, gauge,                                                      \
      "last cycle: states off the device and memory given back")                                   \
    X(f64, cycle_publish_seconds_last, gauge, "last cycle: publish and commit")                    \
    X(f64, cycle_restore_seconds_last, gauge, "last cycle: from restore to the last byte back")    \
    X(f64, cycle_wait_seconds_last, gauge, "last cycle: time wait waited for the bytes")           \
    X(u64, host_ready_bytes, gauge, "of host_bytes, ready for copies: less while they are taken")  \
    X(u64, workers_gpu, gauge, "workers subscribed now that read the memory of their GPU")         \
    X(u64, publish_shm_bytes_total, counter, "bytes that workers took from shared memory")         \
    X(u64, publish_gpu_bytes_total, counter, "bytes that workers took from their GPU's memory")    \
    X(u64, publish_gpu_bytes, gauge, "memory of the GPU that is kept for workers on it")           \
    X(u64, publish_pinned_bytes, gauge, "bytes of the store that are page-locked")                 \
    X(u64, publish_sparse_blocks_last, gauge, "blocks of the last version sent as changes")        \
    X(u64, publish_dense_blocks_last, gauge, "blocks sent whole to holders of the version before") \
    X(u64, publish_changed_elements_last, gauge, "elements that changed in those sent as changes") \
    X(u64, publish_delta_bytes_last, gauge, "payload to holders of the version before; 0: none")   \
    X(f64, publish_encode_seconds_last, gauge, "time spent on finding and coding what changed")    \
    X(u64, receive_bound, gauge, "subscriber: destinations that are bound")                        \
    X(u64, receive_applied_bytes_total, counter, "subscriber: bytes that changed in destinations") \
    X(u64, receive_rollbacks, counter, "subscriber: versions taken back out of destinations")      \
    X(f64, receive_apply_seconds_last, gauge,                                                      \
      "subscriber: last version written into destinations")                                        \
    X(u64, connections_unclaimed, gauge, "connections to the publisher that belong to no worker")  \
    X(u64, connections_ended, counter, "of these, ended: too many, or for too long")               \
    X(u64, connections_refused, counter, "connections refused: no descriptor was left")            \
    X(u64, connections_held_off, counter, "times that new connections were held off for a while")  \
    X(u64, step_count, counter, "optimizer steps in windows")                                      \
    X(u64, step_failures, counter, "calls of a window that failed")                                \
    X(u64, step_in_bytes_last, gauge, "bytes copied to the device by the last step in windows")    \
    X(u64, step_out_bytes_last, gauge, "bytes copied back to the host by it")                      \
    X(f64, step_seconds_last, gauge, "last step, from its first window to the last byte")          \
    X(f64, step_blocked_seconds_last, gauge, "last step, time the caller waited for copies")       \
    X(u64, window_bytes, gauge, "device memory that windows have now")                             \
    X(u64, host_step_in_bytes_last, gauge,                                                         \
      "gradients and parameters copied to the host by the last step on the CPU")                   \
    X(u64, host_step_out_bytes_last, gauge, "parameters copied back to the device by it")          \
    X(u64, host_step_bytes, gauge, "host memory for gradients and parameters of steps on the CPU") \
    X(u64, host_step_count, counter, "optimizer steps on the CPU")                                 \
    X(u64, host_step_failures, counter, "calls of a host step that failed")                        \
    X(f64, host_step_seconds_last, gauge,                                                          \
      "last step on the CPU, from its run to the last byte on the device")                         \
    X(f64, host_step_blocked_seconds_last, gauge, "last step on the CPU, time that calls waited")  \
    X(f64, host_step_compute_seconds_last, gauge, "last step on the CPU, time that it computed")   \
    X(u64, activation_groups, gauge, "groups of activations that were begun and not released")     \
    X(u64, activation_host_bytes, gauge, "host memory of the arena of activations")                \
    X(u64, activation_used_bytes, gauge, "of these, in use by groups")                             \
    X(u64, activation_used_bytes_peak, gauge, "the most that was in use")                          \
    X(u64, activation_out_bytes_total, counter, "bytes of activations that copies out took")       \
    X(u64, activation_in_bytes_total, counter, "bytes of activations that copies in took")         \
    X(u64, activation_refused_bytes_total, counter, "bytes that stayed: the arena had no room")    \
    X(u64, activation_out_of_order, counter, "groups released below others that stay")             \
    X(u64, activation_reused, counter, "tensors placed in free pieces below the top")              \
    X(u64, activation_failures, counter, "groups whose copies did not start, or were lost")        \
    X(f64, activation_blocked_seconds_total, counter,                                              \
      "time that calls waited for copies of groups")                                               \
    X(u64, workers_neighbor, gauge,                                                                \
      "workers subscribed now that map what one of their host receives")

typedef struct refit_stats {
    size_t size; /* sizeof(refit_stats), set by the caller */
#define REFIT_STATS_FIELD_u64(name)               uint64_t name;
#define REFIT_STATS_FIELD_f64(name)               double name;
#define REFIT_STATS_FIELD(type, name, kind, help) REFIT_STATS_FIELD_##type(name)
    REFIT_STATS_MAP(REFIT_STATS_FIELD)
#undef REFIT_STATS_FIELD
#undef REFIT_STATS_FIELD_f64
#undef REFIT_STATS_FIELD_u64
} refit_stats;

/*
 * Zeroes every figure and sets the size. `size` is sizeof(refit_stats) as the caller was compiled.
 */
REFIT_API void refit_stats_init(refit_stats *stats, size_t size);

/*
 * Adds the figures of another object to those in `into`: of the offloader of another device, say.
 * Counts, bytes, the time that callers waited, that the CPU computed, and host_pin_seconds add up.
 * Of other seconds, of versions and of host_huge_pages the larger figure stays, for devices work
 * side by side. Figures that one of the two structs has no room for stay as they are. NULL adds
 * nothing. Does not block. Any thread.
 */
REFIT_API void refit_stats_merge(refit_stats *into, const refit_stats *from);

/*
 * Writes one JSON object on one line, keys as in the list, always NUL-terminated if `capacity` > 0.
 * Returns the length it has in full, like snprintf: larger than `capacity` - 1 means cut short.
 * Figures that `stats` has no room for are left out; NULL has none. `text` may be NULL. The same in
 * every locale. Does not block. Any thread.
 */
REFIT_API size_t refit_stats_json(const refit_stats *stats, char *text, size_t capacity);

/* The same in the Prometheus text format, each name with the prefix "refit_". */
REFIT_API size_t refit_stats_prometheus(const refit_stats *stats, char *text, size_t capacity);

#ifdef __cplusplus
}
#endif
#endif
