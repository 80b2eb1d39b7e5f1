/*
 * trusted_open: a path followed as open() does, but only where no other user could have led it
 * elsewhere.
 *
 * Every folder on the way, those that links lead through too, belongs to this user, to root or to
 * the owner of "/", and others may not write to it unless it is sticky as /tmp is; so does every
 * link. The folder and the file that it ends at are the caller's to judge, by their descriptor.
 * What a kernel makes up (procfs and its like) is refused: a process chooses text there, and it
 * belongs to root.
 */
#ifndef RFT_TRUSTED_OPEN_H
#define RFT_TRUSTED_OPEN_H

#include "base/error.h"

/* `folder` is that of a relative path: AT_FDCWD, whose own way is judged, too, or open and judged.
 * `what` is what sentences call the path's end ("key file"). O_CLOEXEC is added to `flags`.
 * REFIT_ERR_SECURITY names the folder and says what to do; REFIT_ERR_IO (with errno): it cannot be
 * opened. */
refit_status rft_trusted_open(int folder, const char *path, const char *what, int flags, int *out,
                              refit_error *error);

#endif
