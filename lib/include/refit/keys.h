/*
 * refit/keys.h: key pairs for weights that leave this host.
 *
 * A trainer and each of its workers have a key pair (CURVE). The secret half stays where it was
 * made, in a file that only its owner can read (security.key). The trainer's public half goes to
 * its workers (security.server_key); theirs go into one folder of the trainer (security.allow).
 * Then nobody else is listened to, on either side, and what travels is encrypted.
 *
 * A key is read only where nobody but this user and root could have put another: from a file of
 * theirs that others cannot write to, in folders of theirs, up to "/" and through every symbolic
 * link, that others cannot write to either, unless they are sticky, as /tmp is. Anything else is
 * REFIT_ERR_SECURITY, with a sentence that names the folder: mostly, chmod go-w mends it. The
 * folder of security.allow lets nobody in if it is sticky only: it must be closed to others.
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
 * '_' and '-'; reports call the worker's key by it. Files that are there are kept, which is
 * REFIT_ERR_EXISTS, unless `replace`: what the old pair opened is shut then. Writes files (blocks).
 * Any thread. REFIT_ERR_INVALID (the name), REFIT_ERR_IO, REFIT_ERR_UNSUPPORTED: ZeroMQ was built
 * without CURVE; REFIT_ERR_SYSTEM. Since 0.1.
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_keys_generate(const char *folder, const char *name,
                                                            int replace, refit_error *error);

#ifdef __cplusplus
}
#endif
#endif
