/*
 * machine_lock: a lock that all processes of one user on one machine share, and what each of them
 * claims under it. They take their host memory with it, so that no two take the same free bytes and
 * meet the limit together.
 *
 * Memory that a process is about to touch still counts as free for the kernel. So the process
 * claims it under the lock; then it gives the lock, and the others subtract its claim from what is
 * free while it touches and page-locks the memory, which many processes do at the same time.
 *
 *     rft_machine_lock machine_lock;
 *     rft_machine_lock_find(&machine_lock, "");     on a thread that may read the environment
 *     RFT_TRY(rft_machine_lock_take(&machine_lock, 60000, &token, error));
 *     while (rft_machine_lock_claimed(&machine_lock, &claimed) && bytes > free_bytes() - claimed)
 *         RFT_TRY(rft_machine_lock_retry(&machine_lock, 60000, &token, error));
 *     ... refuse what does not fit ...
 *     rft_machine_lock_claim(&machine_lock, bytes); others go on
 *     ... touch the bytes, and lower *machine_lock.claim ...
 *     rft_machine_lock_give(&machine_lock);         the claim ends
 *
 * A lock on a file in /dev/shm, or else in XDG_RUNTIME_DIR: the first, because it is the same for
 * all ranks whatever their environment. A claim is a lock on another file of that folder, which
 * holds the number of bytes; the files stay, and serve the next claims. The kernel drops lock and
 * claim when their holder dies, and a child that the holder forks keeps neither. Processes that see
 * different folders, such as those of two containers, do not meet. The files must be left alone: a
 * claim whose file is removed counts no more, and one whose file is cut short ends its holder by a
 * signal. Other users can do neither.
 */
#ifndef RFT_MACHINE_LOCK_H
#define RFT_MACHINE_LOCK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "memory/cancel_token.h"

#define RFT_MACHINE_LOCK_PLACES     2
#define RFT_MACHINE_LOCK_PATH_BYTES 256

typedef struct rft_machine_lock {
    char paths[RFT_MACHINE_LOCK_PLACES][RFT_MACHINE_LOCK_PATH_BYTES]; /* empty: no such place */
    int place;                                                        /* the path that is locked */
    void *held;                                                       /* the lock; NULL: not held */
    atomic_uint_fast64_t *claim; /* what others read of its claim, which its holder may lower; NULL:
                                    there is none */
    struct timespec since;       /* when its holder took it, as seen by a waiter */
    uint64_t claimed;            /* by others, when it was last asked */
    uint64_t waited;             /* the number that it has waited for to change, */
    int64_t until;               /* until then; 0: it has not */
} rft_machine_lock;

/* Finds out where the file may lie. `root` is put before /dev/shm: "" in life. */
void rft_machine_lock_find(rft_machine_lock *machine_lock, const char *root);

/* Waits until no other process of this user has the lock, at most `timeout_ms` for each holder:
 * many may come first, but a holder that hangs does not block the others for longer. Where no file
 * can be had that is this user's alone, it goes on without the lock, with a line in the log.
 * REFIT_ERR_TIMEOUT, REFIT_ERR_CANCELLED (`token`). Blocks. */
refit_status rft_machine_lock_take(rft_machine_lock *machine_lock, uint32_t timeout_ms,
                                   rft_cancel_token *token, refit_error *error);

/* The lock is held: do other holders claim anything, and how many bytes? Ask this before what is
 * free is read: what is touched between the two counts twice then, and not never. False where it
 * goes on without the lock. */
bool rft_machine_lock_claimed(rft_machine_lock *machine_lock, uint64_t *bytes);

/* For a holder to whom the claims of others leave too little: gives the lock, and takes it again a
 * moment later. At most `timeout_ms` while the bytes of those claims stay the same. On failure it
 * has no lock. REFIT_ERR_TIMEOUT, REFIT_ERR_CANCELLED (`token`). Blocks. */
refit_status rft_machine_lock_retry(rft_machine_lock *machine_lock, uint32_t timeout_ms,
                                    rft_cancel_token *token, refit_error *error);

/* The lock is held: claims so many bytes and gives the lock. Where no claim can be made, with a
 * line in the log, it keeps the lock: then the others wait until it is given. Does nothing where it
 * goes on without the lock. */
void rft_machine_lock_claim(rft_machine_lock *machine_lock, uint64_t bytes);

/* Gives the lock, and ends the claim. Does nothing where there is neither. */
void rft_machine_lock_give(rft_machine_lock *machine_lock);

#endif
