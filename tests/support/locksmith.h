/*
 * locksmith: a folder of key files for tests: the trainer's pair, the workers' pairs, and the
 * folder of those that are allowed. Every call fails the test if it cannot be done.
 */
#ifndef LOCKSMITH_H
#define LOCKSMITH_H

#include <refit/config.h>

#include "tests/support/file_tree.h"

typedef struct locksmith {
    file_tree tree;
} locksmith;

/* With the pair "trainer", and no worker allowed. */
locksmith locksmith_open(void);
void locksmith_close(locksmith *smith);

/* A pair of this name, not yet allowed. */
void locksmith_make(const locksmith *smith, const char *name);
/* Its public key comes to the allowed ones, whole at once; and goes again. */
void locksmith_allow(const locksmith *smith, const char *name);
void locksmith_revoke(const locksmith *smith, const char *name);
/* Both. */
void locksmith_admit(const locksmith *smith, const char *name);

/* The path of a file ("keys/w0.public", "allow"). */
void locksmith_path(const locksmith *smith, const char *file, char path[256]);

/* Adds the keys of the trainer, or of this worker, to a configuration. */
void locksmith_equip_trainer(const locksmith *smith, refit_config *config);
void locksmith_equip_worker(const locksmith *smith, const char *name, refit_config *config);

#endif
