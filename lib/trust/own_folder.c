/*
 * A place where no other user can make names comes first: the folder that the system makes for the
 * user's sockets. Its usual path is tried where the variable is missing, too, so that a process
 * that was started without the variable (by cron, say) finds the same folder as the others. What is
 * set but unfit is not used: `su` and batch systems hand down the folder of another user or of
 * another machine. The system makes that folder at the user's first login and removes it at the
 * last logout, so two processes may choose different places: a process that looks for another one
 * looks at all of them.
 *
 * In /tmp another user may have taken the name; that is refused, because no other name would be
 * found by the processes that look for this one. What is there is judged by a descriptor that
 * follows no link. No other user can rename it: /tmp is sticky, and the other places belong to this
 * user.
 */
#include "trust/own_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "trust/trusted_open.h"

#define OTHERS (S_IRWXG | S_IRWXO)

/* Whether the folder belongs to this user, and no other user may enter it. */
static bool is_own(int fd)
{
    struct stat found;
    return fstat(fd, &found) == 0 && S_ISDIR(found.st_mode) && found.st_uid == geteuid() &&
           (found.st_mode & OTHERS) == 0;
}

static bool is_own_place(const char *place)
{
    int fd = -1;
    if (place[0] != '/' ||
        rft_trusted_open(AT_FDCWD, place, "folder", O_PATH | O_DIRECTORY, &fd, NULL) != REFIT_OK)
        return false;
    bool own = is_own(fd);
    close(fd);
    return own;
}

/* ---- The places ---- */

/* A path that is too long for a socket is no place. */
static void add_place(rft_own_places *list, const char *parent, const char *name)
{
    char *path = list->paths[list->count];
    int length = snprintf(path, RFT_OWN_FOLDER_BYTES, "%s/%s", parent, name);
    if (length > 0 && length < RFT_OWN_FOLDER_BYTES) list->count++;
}

void rft_own_places_list(rft_own_places *out)
{
    char usual[64], shared[64];
    const char *runtime = secure_getenv("XDG_RUNTIME_DIR");
    (void)snprintf(usual, sizeof usual, "/run/user/%u", (unsigned)geteuid());
    (void)snprintf(shared, sizeof shared, "refit-%u", (unsigned)geteuid());
    out->count = 0;
    if (runtime != NULL && runtime[0] != '\0') add_place(out, runtime, "refit");
    add_place(out, usual, "refit");
    add_place(out, "/tmp", shared);
}

/* Whether the folder may be made and used at this place: the last one is in /tmp, the others lie in
 * a folder that has to be this user's own. */
static bool is_place(const rft_own_places *list, uint32_t place)
{
    char parent[RFT_OWN_FOLDER_BYTES];
    if (place + 1 == list->count) return true;
    strcpy(parent, list->paths[place]);
    *strrchr(parent, '/') = '\0';
    return is_own_place(parent);
}

static int open_folder(const char *path)
{
    return open(path, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

bool rft_own_places_has(const rft_own_places *list, uint32_t place)
{
    int fd = is_place(list, place) ? open_folder(list->paths[place]) : -1;
    bool own = fd >= 0 && is_own(fd);
    if (fd >= 0) close(fd);
    return own;
}

/* ---- The folder ---- */

static void tell_unused(void)
{
    const char *runtime = secure_getenv("XDG_RUNTIME_DIR");
    if (runtime == NULL || runtime[0] == '\0') return;
    rft_log(REFIT_LOG_INFO,
            "XDG_RUNTIME_DIR is not used: %s is no folder that only user %u may enter, or too long "
            "for the path of a socket (%d bytes)",
            runtime, (unsigned)geteuid(), RFT_OWN_FOLDER_BYTES - 1);
}

static void choose(size_t behind, char path[RFT_OWN_FOLDER_BYTES])
{
    rft_own_places list;
    rft_own_places_list(&list);
    uint32_t at = 0;
    while (at + 1 < list.count &&
           (strlen(list.paths[at]) + behind >= RFT_OWN_FOLDER_BYTES || !is_place(&list, at)))
        at++;
    if (at > 0) tell_unused();
    strcpy(path, list.paths[at]);
}

static refit_status judge(const char *path, int fd, refit_error *error)
{
    struct stat found;
    if (fstat(fd, &found) != 0)
        return rft_fail_sub(error, REFIT_ERR_IO, errno, "folder %s cannot be looked at: %s", path,
                            strerror(errno));
    RFT_REFUSE_IF(found.st_uid != geteuid(), error, REFIT_ERR_SECURITY,
                  "folder %s belongs to user %u, not to user %u: have it removed, set "
                  "XDG_RUNTIME_DIR to a folder of yours (mode 0700), or name an endpoint in a "
                  "folder of yours (ipc://PATH)",
                  path, (unsigned)found.st_uid, (unsigned)geteuid());
    RFT_REFUSE_IF(!is_own(fd), error, REFIT_ERR_SECURITY,
                  "folder %s is open to other users (mode %04o): chmod 700 %s", path,
                  (unsigned)found.st_mode & 07777, path);
    return REFIT_OK;
}

refit_status rft_own_folder_find(size_t behind, char path[RFT_OWN_FOLDER_BYTES], refit_error *error)
{
    choose(behind, path);
    if (mkdir(path, S_IRWXU) != 0 && errno != EEXIST)
        return rft_fail_sub(error, REFIT_ERR_IO, errno, "folder %s cannot be made: %s", path,
                            strerror(errno));
    int fd = open_folder(path);
    int code = errno;
    RFT_REFUSE_IF(fd < 0 && (code == ENOTDIR || code == ELOOP), error, REFIT_ERR_SECURITY,
                  "%s is a link or no folder: have it removed, or set XDG_RUNTIME_DIR to a folder "
                  "of yours (mode 0700)",
                  path);
    if (fd < 0)
        return rft_fail_sub(error, REFIT_ERR_IO, code, "folder %s cannot be opened: %s", path,
                            strerror(code));
    refit_status status = judge(path, fd, error);
    close(fd);
    return status;
}
