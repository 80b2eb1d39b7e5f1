/* archive_disk: files and folders, with every failure as a status and a sentence. */
#ifndef RFT_ARCHIVE_DISK_H
#define RFT_ARCHIVE_DISK_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

/* All of it, however little each call of the system takes. REFIT_ERR_IO. */
refit_status rft_disk_write(int file, const void *bytes, size_t count, uint64_t at,
                            refit_error *error);

/* All of it. REFIT_ERR_IO; REFIT_ERR_CORRUPT: the file ends before. */
refit_status rft_disk_read(int file, void *bytes, size_t count, uint64_t at, refit_error *error);

/* Onto the disk, and closes it either way: some errors are known to close alone. REFIT_ERR_IO. */
refit_status rft_disk_close(int file, refit_error *error);

/* Opens a regular file for reading; a FIFO is refused, not waited for. REFIT_ERR_NOT_FOUND,
 * REFIT_ERR_IO, REFIT_ERR_INVALID. */
refit_status rft_disk_open(int folder, const char *name, int *file, uint64_t *bytes,
                           refit_error *error);

/* "cannot WHAT NAME: reason", from errno. */
refit_status rft_disk_fail(refit_error *error, const char *what, const char *name);

/* Puts the file's name before the sentence; a rule of the wire that was broken in a file is damage.
 * Returns the status that it has then. */
refit_status rft_disk_blame(refit_error *error, refit_status status, const char *name);

#endif
