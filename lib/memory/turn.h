/*
 * turn: processes of one user on one machine do something one after another: take their host
 * memory, so that no two read the same free bytes and meet the limit together.
 *
 *     rft_turn turn;
 *     rft_turn_find(&turn, "");                            on a thread that may read the
 * environment RFT_TRY(rft_turn_take(&turn, 60000, &watch, error));
 *     ... read what is free, take it ...
 *     rft_turn_give(&turn);
 *
 * A lock on a file in /dev/shm, or else in XDG_RUNTIME_DIR: the first, because it is the same for
 * all ranks whatever their environment. The kernel drops it when its holder dies, and a child that
 * the holder forks does not keep it. Processes that see different folders, such as those of two
 * containers, do not meet.
 */
#ifndef RFT_TURN_H
#define RFT_TURN_H

#include <time.h>

#include "memory/watch.h"

#define RFT_TURN_PLACES     2
#define RFT_TURN_PATH_BYTES 256

typedef struct rft_turn {
    char paths[RFT_TURN_PLACES][RFT_TURN_PATH_BYTES]; /* empty: no such place */
    void *held;                                       /* NULL: it is not this one's turn */
    struct timespec since; /* when the one who has it, in the eyes of who waits, has taken it */
} rft_turn;

/* Finds out where the file may lie. `root` is put before /dev/shm: "" in life. */
void rft_turn_find(rft_turn *turn, const char *root);

/* Waits until nobody else of this user has the turn, and no longer than `timeout_ms` for each who
 * has: many may come first, but one that does not go on stops nobody for ever. Where no file can be
 * had that is this user's alone, it goes on without one, with a line in the log. REFIT_ERR_TIMEOUT,
 * REFIT_ERR_CANCELLED (`watch`). Blocks. */
refit_status rft_turn_take(rft_turn *turn, uint32_t timeout_ms, rft_watch *watch,
                           refit_error *error);

/* Nothing if there is nothing to give. */
void rft_turn_give(rft_turn *turn);

#endif
