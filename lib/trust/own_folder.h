/*
 * own_folder: a folder that only this user can enter, the same one for all processes of the user on
 * this machine: for sockets, and for locks that other users must not hold.
 */
#ifndef RFT_OWN_FOLDER_H
#define RFT_OWN_FOLDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

/* Of the folder's path and what is put behind it, with the end: what the path of a socket can have,
 * with room for ".lock". */
#define RFT_OWN_FOLDER_BYTES 100
#define RFT_OWN_PLACES_MOST  3

/* Where the folder may be, in the order of choice: "refit" in $XDG_RUNTIME_DIR, "refit" in
 * /run/user/UID, /tmp/refit-UID. Two of them may be the same. */
typedef struct rft_own_places {
    uint32_t count;
    char paths[RFT_OWN_PLACES_MOST][RFT_OWN_FOLDER_BYTES];
} rft_own_places;

/* Reads the environment. */
void rft_own_places_list(rft_own_places *out);

/* Whether the folder is there at this place, belongs to this user and is closed to others. Makes
 * nothing, and reads no environment. */
bool rft_own_places_has(const rft_own_places *list, uint32_t place);

/* Writes the path of the folder, which is made (0700) if it is not there, at the first place that
 * is this user's alone and leaves room for `behind` bytes; at the last place otherwise, which has
 * room for "/", a name of 63 bytes and a suffix. Reads the environment.
 * REFIT_ERR_SECURITY: another user made it first, or may enter it; REFIT_ERR_IO: it cannot be made.
 */
refit_status rft_own_folder_find(size_t behind, char path[RFT_OWN_FOLDER_BYTES],
                                 refit_error *error);

#endif
