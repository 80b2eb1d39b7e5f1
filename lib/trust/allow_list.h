/*
 * allow_list: the public keys that may connect: the files NAME.public of one folder, as they are
 * now.
 *
 * One thread looks at the folder repeatedly. Any thread asks which keys are allowed: that is
 * answered from memory, so no other thread waits for a file system. Files that are not public keys
 * are skipped, with a line in the log. A user that can write into the folder can admit keys, so a
 * folder or file that other users can write to admits none, nor does one that other users could
 * replace.
 */
#ifndef RFT_ALLOW_LIST_H
#define RFT_ALLOW_LIST_H

#include <stdint.h>

#include "trust/key.h"

#define RFT_ALLOW_MOST 65536u /* keys of one folder: as many as limits.workers can be */

typedef struct rft_allow_list rft_allow_list;

/* REFIT_ERR_IO: there is no such folder; REFIT_ERR_SECURITY: others may write to it, or
 * to a folder on the way; REFIT_ERR_LIMIT, REFIT_ERR_HOST_MEMORY. */
refit_status rft_allow_list_open(const char *folder, rft_allow_list **out, refit_error *error);
void rft_allow_list_close(rft_allow_list *list);

/* Looks at the folder, and reads it if anything there has changed. A file that cannot be read for
 * want of descriptors or memory, or because the disk failed, keeps the key that it had; a folder
 * that cannot be opened so is listed by the descriptor of the last look. Only if that cannot be
 * done either, or another folder has come in its place, all stays as it was. If the folder is gone
 * or not to be trusted, no key is allowed. Reads files (blocks). One thread at a time. */
void rft_allow_list_refresh(rft_allow_list *list);

/* A number that changes whenever the keys or their names do. Any thread. */
uint64_t rft_allow_list_edition(rft_allow_list *list);

/* Whether this key (its 40 characters) is allowed, and the name of its file. `name` may be NULL.
 * Any thread. */
bool rft_allow_list_has(rft_allow_list *list, const char *key, char name[RFT_KEY_NAME_BYTES]);

uint32_t rft_allow_list_count(rft_allow_list *list);

#endif
