/*
 * key: one half of a CURVE key pair, in memory and in a file.
 *
 * A key is 32 bytes, and 40 characters (Z85) as text. Files hold one key each: NAME.secret and
 * NAME.public. A secret key is in memory of its own while it is read, written or handed on.
 */
#ifndef RFT_KEY_H
#define RFT_KEY_H

#include <stdbool.h>
#include <stddef.h>

#include "base/error.h"

#define RFT_KEY_BYTES 32u
#define RFT_KEY_CHARS 40u
#define RFT_KEY_TEXT  (RFT_KEY_CHARS + 1u) /* with its end */

typedef struct rft_key {
    unsigned char bytes[RFT_KEY_BYTES];
} rft_key;

void rft_key_print(const rft_key *key, char text[RFT_KEY_TEXT]);

/* Reads `count` characters. False: these are not a key, and nothing is written. */
bool rft_key_parse(const char *text, size_t count, rft_key *out);

/* ---- Files
 *
 * A line of comment says which half of which key the file holds; the key's 40 characters stand on a
 * line of their own. A secret is read only from a file that its owner alone can read or write; what
 * counts is the file that a symbolic link leads to, and every folder on the way. Every refusal is a
 * sentence that says what to do. */

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

/* ---- Memory for a secret key: pages of its own, between two that cannot be touched, locked so
 * that they are not swapped out, left out of core dumps and of forked children, wiped before they
 * are given back.
 *
 * This holds for the copies of this library. ZeroMQ keeps one of its own for as long as the socket
 * lives, in memory that it takes by malloc and does not show: a core dump of a process with keys
 * has that one, so no such process should write any (`ulimit -c 0`) where others read them. */

/* Zeroed. Where the limit of locked memory (RLIMIT_MEMLOCK) is reached, the log says that it is not
 * locked. REFIT_ERR_HOST_MEMORY. */
refit_status rft_secret_open(size_t bytes, void **out, refit_error *error);

/* `bytes` as they were asked for; NULL is allowed. */
void rft_secret_close(void *secret, size_t bytes);

#endif
