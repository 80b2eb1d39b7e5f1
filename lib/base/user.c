/*
 * In a user namespace the kernel gives one number, the overflow uid, in place of all users that the
 * namespace does not map. It may be the number of this process too: because its own user is not
 * mapped, or because a user of that number is. Then equal numbers do not show equal users. Where
 * every number is mapped, as in the first namespace, the overflow uid is a user like others
 * ("nobody", whom containers often run as).
 *
 * That number is read once, and what is mapped for that number alone: the sender of each message is
 * checked.
 */
#include "base/user.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#define OVERFLOW_USER 65534 /* where /proc does not say */

static uid_t overflow_user(void)
{
    static _Atomic unsigned known; /* 0: not yet */
    unsigned user = atomic_load(&known);
    if (user != 0) return user;
    FILE *file = fopen("/proc/sys/kernel/overflowuid", "re");
    if (file == NULL) return OVERFLOW_USER;
    if (fscanf(file, "%u", &user) != 1) user = OVERFLOW_USER;
    (void)fclose(file);
    atomic_store(&known, user);
    return user;
}

/* A number is left out for "no user": so all are mapped by a count one below 2^32. */
static bool maps_all_users(void)
{
    uint64_t inside, outside, count, sum = 0;
    FILE *file = fopen("/proc/self/uid_map", "re");
    if (file == NULL) return false;
    while (fscanf(file, "%" SCNu64 " %" SCNu64 " %" SCNu64, &inside, &outside, &count) == 3)
        sum += count;
    (void)fclose(file);
    return sum >= UINT32_MAX;
}

bool rft_user_is_unknown(uid_t user)
{
    return user != 0 && user == overflow_user() && !maps_all_users();
}

bool rft_user_is_own(uid_t user)
{
    return user == geteuid() && !rft_user_is_unknown(user);
}

const char *rft_user_doubt(uid_t user)
{
    if (!rft_user_is_unknown(user)) return "";
    return ": that number stands for all users that this user namespace does not map; map the user "
           "(uid_map)";
}
