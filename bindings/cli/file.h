/* file: a file that the user named, opened to be read. */
#ifndef CLI_FILE_H
#define CLI_FILE_H

#include <refit/status.h>

/* Opens it without waiting, and tells its size. REFIT_ERR_IO; REFIT_ERR_INVALID: it is empty, or
 * not a regular file: a FIFO may never have a writer, and has no size that could be checked first.
 */
refit_status cli_file_open(const char *path, int *out, uint64_t *bytes, refit_error *error);

#endif
