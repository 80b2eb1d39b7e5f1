/*
 * user: whether something belongs to the user that this process runs as. Every check of an owner
 * asks here.
 */
#ifndef RFT_USER_H
#define RFT_USER_H

#include <stdbool.h>
#include <sys/types.h>

/* Whether this is the process's effective user, and no other one can be meant. */
bool rft_user_is_own(uid_t user);

/* Whether it is the number that stands for users whom this user namespace does not map: it says
 * nothing about who they are. */
bool rft_user_is_unknown(uid_t user);

/* What a sentence that refuses this user adds: empty, or why its number proves nothing, with what
 * to do. Begins with ": ". */
const char *rft_user_doubt(uid_t user);

#endif
