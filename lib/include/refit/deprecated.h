/*
 * refit/deprecated.h: names that were renamed in 0.1, for one minor release.
 *
 * Each is a macro for the new name, and has the new name's contract. They go in 0.2.
 */
#ifndef REFIT_DEPRECATED_H
#define REFIT_DEPRECATED_H

#include <refit/controller.h>

/* refit/controller.h, refit/offload.h */
#define refit_controller_clear  refit_controller_offload
#define refit_controller_return refit_controller_restore
#define refit_controller_join   refit_controller_wait
#define refit_offloader_finish  refit_offloader_wait
#define refit_lease             refit_read_lock
#define refit_lease_acquire     refit_read_lock_acquire
#define refit_lease_read        refit_read_lock_read
#define refit_lease_release     refit_read_lock_release
#define refit_home              refit_placement
#define REFIT_HOME_DEVICE       REFIT_PLACEMENT_DEVICE
#define REFIT_HOME_HOST         REFIT_PLACEMENT_HOST

/* refit/stats.h */
#define clear_seconds_last  cycle_offload_seconds_last
#define refit_seconds_last  cycle_publish_seconds_last
#define return_seconds_last cycle_restore_seconds_last
#define join_seconds_last   cycle_wait_seconds_last

/* refit/broadcast.h */
#define refit_update_keep   refit_update_retain
#define refit_update_unkeep refit_update_release

/* refit/advanced */
#define REFIT_PART_TOGETHER    REFIT_PART_SAME_WINDOW
#define REFIT_PART_BORN        REFIT_PART_NEW
#define REFIT_PARAMETER_NAMED  REFIT_PARAMETER_SUBMITTED
#define REFIT_BESIDE_NONE      REFIT_MASTER_NONE
#define REFIT_BESIDE_MASTER    REFIT_MASTER_FP32
#define REFIT_BESIDE_REMAINDER REFIT_MASTER_REMAINDER
#define refit_arena_use        refit_arena_add_stream
#define refit_arena_unuse      refit_arena_remove_stream
#define refit_arena_hold       refit_arena_pin
#define refit_arena_unhold     refit_arena_unpin
#define refit_glance           refit_query
#define refit_glance_info      refit_query_info
#define refit_glance_open      refit_query_open
#define refit_glance_close     refit_query_close
#define refit_glance_describe  refit_query_describe
#define refit_glance_tensor    refit_query_tensor

#endif
