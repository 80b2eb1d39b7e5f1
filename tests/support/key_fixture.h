/*
 * key_fixture: a folder of key files for tests: the trainer's pair, the workers' pairs, and the
 * folder of those that are allowed. Every call fails the test if it cannot be done.
 */
#ifndef KEY_FIXTURE_H
#define KEY_FIXTURE_H

#include <refit/config.h>

#include "tests/support/file_tree.h"

typedef struct key_fixture {
    file_tree tree;
} key_fixture;

/* With the pair "trainer", and no worker allowed. */
key_fixture key_fixture_open(void);
void key_fixture_close(key_fixture *smith);

/* A pair of this name, not yet allowed. */
void key_fixture_make(const key_fixture *smith, const char *name);
/* Its public key comes to the allowed ones, whole at once; and goes again. */
void key_fixture_allow(const key_fixture *smith, const char *name);
void key_fixture_revoke(const key_fixture *smith, const char *name);
/* Both. */
void key_fixture_admit(const key_fixture *smith, const char *name);

/* The path of a file ("keys/w0.public", "allow"). */
void key_fixture_path(const key_fixture *smith, const char *file, char path[256]);

/* Adds the keys of the trainer, or of this worker, to a configuration. */
void key_fixture_equip_trainer(const key_fixture *smith, refit_config *config);
/* And that of the other ranks of a trainer, which is its own; it is to be allowed ("trainer"). */
void key_fixture_equip_rank(const key_fixture *smith, refit_config *config);
void key_fixture_equip_worker(const key_fixture *smith, const char *name, refit_config *config);

#endif
