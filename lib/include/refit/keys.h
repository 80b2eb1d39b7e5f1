/*
 * refit/keys.h: key pairs for weights that leave this host.
 *
 * A trainer and each of its workers have a key pair (CURVE). The secret half stays where it was
 * made, in a file that only its owner can read (security.key). The trainer's public half goes to
 * its workers (security.server_key); theirs go into one folder of the trainer (security.allow).
 * Then neither end listens to any other peer, and all bytes on the network are encrypted.
 *
 * A key is read only where no user but this one and root could have replaced it: from a file of
 * theirs that others cannot write to, in folders of theirs, up to "/" and through every symbolic
 * link, that others cannot write to either, unless they are sticky, as /tmp is. Anything else is
 * REFIT_ERR_SECURITY, with a sentence that names the folder: mostly, chmod go-w mends it. The
 * folder of security.allow admits no key if it is sticky only: other users must not write to it.
 */
#ifndef REFIT_KEYS_H
#define REFIT_KEYS_H

#include <refit/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Makes a new pair and writes FOLDER/NAME.secret (mode 0600) and FOLDER/NAME.public (mode 0644),
 * both or none. The folder is made (mode 0700) if it is not there. `name`: letters, digits, '.',
 * '_' and '-'; reports call the worker's key by it. Existing files are kept unless `replace`; a
 * replaced pair opens nothing any more. Writes files (blocks). Any thread.
 *
 * Errors:
 * - REFIT_ERR_EXISTS: a file is there, without `replace`
 * - REFIT_ERR_INVALID: the name
 * - REFIT_ERR_UNSUPPORTED: ZeroMQ was built without CURVE
 * - REFIT_ERR_IO, REFIT_ERR_SYSTEM
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_keys_generate(const char *folder, const char *name,
                                                            int replace, refit_error *error);

#ifdef __cplusplus
}
#endif
#endif
