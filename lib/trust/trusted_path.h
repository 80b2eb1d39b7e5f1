/*
 * trusted_path: paths that no other user can lead elsewhere: one that is given, and the folder that
 * only this user can enter, which is the same for all processes of the user on this machine.
 * Sockets lie there, and locks that other users must not hold.
 */
#ifndef RFT_TRUSTED_PATH_H
#define RFT_TRUSTED_PATH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

/* ---- A given path, followed as open() does, but only where no other user could have led it
 * elsewhere.
 *
 * Every folder on the way, those that links lead through too, belongs to this user, to root or to
 * the owner of "/", and others may not write to it unless it is sticky as /tmp is; so does every
 * link. The folder and the file that it ends at are the caller's to check, by their descriptor.
 * What a kernel makes up (procfs and its like) is refused: a process chooses text there, and it
 * belongs to root. */

/* `folder` is that of a relative path: AT_FDCWD, whose own way is checked, too, or open and
 * checked. `what` is what sentences call the path's end ("key file"). O_CLOEXEC is added to
 * `flags`. REFIT_ERR_SECURITY names the folder and says what to do; REFIT_ERR_IO (with errno): it
 * cannot be opened. */
refit_status rft_trusted_open(int folder, const char *path, const char *what, int flags, int *out,
                              refit_error *error);

/* ---- The user's own folder */

/* Of the folder's path and what is put after it, with the end: what the path of a socket can have,
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
 * is this user's alone and leaves room for `after` bytes; at the last place otherwise, which has
 * room for "/", a name of 63 bytes and a suffix. Reads the environment.
 * REFIT_ERR_SECURITY: another user made it first, or may enter it; REFIT_ERR_IO: it cannot be made.
 */
refit_status rft_own_folder_find(size_t after, char path[RFT_OWN_FOLDER_BYTES], refit_error *error);

#endif
