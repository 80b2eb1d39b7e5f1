/*
 * machine_lock: a lock that all processes of one user on one machine share. They take their host
 * memory under it, so that no two read the same free bytes and meet the limit together.
 *
 *     rft_machine_lock machine_lock;
 *     rft_machine_lock_find(&machine_lock, "");     on a thread that may read the environment
 *     RFT_TRY(rft_machine_lock_take(&machine_lock, 60000, &token, error));
 *     ... read what is free, take it ...
 *     rft_machine_lock_give(&machine_lock);
 *
 * A lock on a file in /dev/shm, or else in XDG_RUNTIME_DIR: the first, because it is the same for
 * all ranks whatever their environment. The kernel drops it when its holder dies, and a child that
 * the holder forks does not keep it. Processes that see different folders, such as those of two
 * containers, do not meet.
 */
#ifndef RFT_MACHINE_LOCK_H
#define RFT_MACHINE_LOCK_H

#include <time.h>

#include "memory/cancel_token.h"

#define RFT_MACHINE_LOCK_PLACES     2
#define RFT_MACHINE_LOCK_PATH_BYTES 256

typedef struct rft_machine_lock {
    char paths[RFT_MACHINE_LOCK_PLACES][RFT_MACHINE_LOCK_PATH_BYTES]; /* empty: no such place */
    void *held;                                                       /* NULL: not held */
    struct timespec since; /* when its holder took it, as seen by a waiter */
} rft_machine_lock;

/* Finds out where the file may lie. `root` is put before /dev/shm: "" in life. */
void rft_machine_lock_find(rft_machine_lock *machine_lock, const char *root);

/* Waits until no other process of this user has the lock, at most `timeout_ms` for each holder:
 * many may come first, but a holder that hangs does not block the others for longer. Where no file
 * can be had that is this user's alone, it goes on without the lock, with a line in the log.
 * REFIT_ERR_TIMEOUT, REFIT_ERR_CANCELLED (`token`). Blocks. */
refit_status rft_machine_lock_take(rft_machine_lock *machine_lock, uint32_t timeout_ms,
                                   rft_cancel_token *token, refit_error *error);

/* Does nothing where it is not held. */
void rft_machine_lock_give(rft_machine_lock *machine_lock);

#endif
