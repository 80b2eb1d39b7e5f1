/*
 * key_file: keys in files, one each: NAME.secret and NAME.public.
 *
 * A line of comment says whose key it is and which half; the key's 40 characters stand on a line of
 * their own. A secret is read only from a file that its owner alone can read or write; what
 * counts is the file that a symbolic link leads to, and every folder on the way. Every refusal is a
 * sentence that says what to do.
 */
#ifndef RFT_KEY_FILE_H
#define RFT_KEY_FILE_H

#include "base/error.h"
#include "trust/key.h"

#define RFT_KEY_NAME_BYTES 64 /* of NAME, with its end */

typedef enum rft_key_half {
    RFT_KEY_PUBLIC,
    RFT_KEY_SECRET,
} rft_key_half;

/* ".public" or ".secret". */
const char *rft_key_suffix(rft_key_half half);

/* `folder` is that of a relative path: AT_FDCWD, or open; `path` is what sentences call it.
 * REFIT_ERR_IO: it cannot be read; REFIT_ERR_SECURITY: others could read or change it, or put
 * another in its place, or it is the other half; REFIT_ERR_CONFIG: there is no key in it. */
refit_status rft_key_file_read(int folder, const char *path, rft_key_half half, rft_key *out,
                               refit_error *error);

/* Whether NAME may be one: letters, digits, '.', '_' and '-', not first '.' or '-'. */
bool rft_key_name_is_valid(const char *name);

/* Writes FOLDER/NAME.secret with mode 0600 and FOLDER/NAME.public with 0644, whatever the umask;
 * makes the folder (0700) if it is not there. Both or none; files that are there are replaced only
 * if `replace`, each at once. REFIT_ERR_EXISTS, REFIT_ERR_INVALID (the name), REFIT_ERR_IO. */
refit_status rft_key_files_write(const char *folder, const char *name, const rft_key *public_key,
                                 const rft_key *secret_key, bool replace, refit_error *error);

#endif
