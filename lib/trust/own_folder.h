/*
 * own_folder: a folder that only this user can enter, the same one for all processes of the user on
 * this machine: for sockets, and for locks that other users must not hold.
 */
#ifndef RFT_OWN_FOLDER_H
#define RFT_OWN_FOLDER_H

#include "base/error.h"

#define RFT_OWN_FOLDER_BYTES 256 /* of its path, with its end */

/* Writes the path of the folder, which is made (0700) if it is not there: "refit" in
 * $XDG_RUNTIME_DIR, or else in /run/user/UID, where that belongs to this user and nobody else may
 * enter it; otherwise /tmp/refit-UID. Reads the environment.
 * REFIT_ERR_SECURITY: another user made it first, or may enter it; REFIT_ERR_IO: it cannot be made;
 * REFIT_ERR_LIMIT: its path is too long. */
refit_status rft_own_folder_find(char path[RFT_OWN_FOLDER_BYTES], refit_error *error);

#endif
