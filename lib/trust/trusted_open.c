/*
 * One name after the other, each looked up in a folder that is held open and was judged: so nothing
 * can change between the look and the next step.
 *
 *     /run ─► /run/keys ─► trainer.secret, a link ─► ..data/trainer.secret ─► /run/keys/..data ─► …
 */
#include "trust/trusted_open.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <linux/magic.h>

#define LINKS_MOST 40 /* as the kernel */

typedef struct walk {
    const char *what, *path; /* for sentences */
    int at;                  /* the folder reached; owned */
    int links;
    uid_t owner_of_all;   /* of "/": it could lead any path elsewhere */
    char rest[PATH_MAX];  /* what is still to go */
    char where[PATH_MAX]; /* the way to `at` */
} walk;

static refit_status fail(const walk *it, int code, refit_error *error)
{
    return rft_fail_sub(error, REFIT_ERR_IO, code, "%s %.120s cannot be opened: %s", it->what,
                        it->path, strerror(code));
}

static bool is_trusted(const walk *it, const struct stat *found)
{
    return found->st_uid == geteuid() || found->st_uid == 0 || found->st_uid == it->owner_of_all;
}

/* ---- Folders ---- */

static refit_status judge_folder(const walk *it, const struct stat *found, refit_error *error)
{
    RFT_REFUSE_IF(!is_trusted(it, found), error, REFIT_ERR_SECURITY,
                  "%s %.50s: folder %.70s belongs to user %u: own it (chown), or use another place",
                  it->what, it->path, it->where, (unsigned)found->st_uid);
    RFT_REFUSE_IF(
        (found->st_mode & 022) != 0 && (found->st_mode & S_ISVTX) == 0, error, REFIT_ERR_SECURITY,
        "%s %.50s: others may write to folder %.70s, and so put another there: chmod go-w, "
        "or use another place",
        it->what, it->path, it->where);
    return REFIT_OK;
}

/* Takes the descriptor. */
static refit_status enter(walk *it, int fd, refit_error *error)
{
    struct stat found;
    if (fd < 0 || fstat(fd, &found) != 0) {
        int code = errno;
        if (fd >= 0) close(fd);
        return fail(it, code, error);
    }
    if (it->at >= 0) close(it->at);
    it->at = fd;
    return judge_folder(it, &found, error);
}

static refit_status enter_root(walk *it, refit_error *error)
{
    strcpy(it->where, "/");
    return enter(it, open("/", O_PATH | O_DIRECTORY | O_CLOEXEC), error);
}

static refit_status enter_named(walk *it, const char *name, int fd, refit_error *error)
{
    size_t length = strlen(it->where);
    bool slash = length > 0 && it->where[length - 1] == '/';
    int more =
        snprintf(it->where + length, sizeof it->where - length, "%s%s", slash ? "" : "/", name);
    if (more < 0 || (size_t)more >= sizeof it->where - length) {
        close(fd);
        return fail(it, ENAMETOOLONG, error);
    }
    return enter(it, fd, error);
}

/* ---- Links ---- */

/* Puts a way in front of what is still to go. */
static refit_status go_first(walk *it, const char *way, refit_error *error)
{
    char behind[PATH_MAX];
    strcpy(behind, it->rest);
    int length =
        snprintf(it->rest, sizeof it->rest, "%s%s%s", way, behind[0] == '\0' ? "" : "/", behind);
    if (length < 0 || (size_t)length >= sizeof it->rest) return fail(it, ENAMETOOLONG, error);
    return way[0] == '/' ? enter_root(it, error) : REFIT_OK;
}

static refit_status follow(walk *it, const char *name, int fd, const struct stat *found,
                           refit_error *error)
{
    char target[PATH_MAX];
    RFT_REFUSE_IF(!is_trusted(it, found), error, REFIT_ERR_SECURITY,
                  "%s %.50s: link %.40s in folder %.50s belongs to user %u, which could lead it "
                  "anywhere: remove it, or use another place",
                  it->what, it->path, name, it->where, (unsigned)found->st_uid);
    if (++it->links > LINKS_MOST) return fail(it, ELOOP, error);
    ssize_t length = readlinkat(fd, "", target, sizeof target - 1);
    if (length < 0) return fail(it, errno, error);
    target[length] = '\0';
    return go_first(it, target, error);
}

/* ---- The way ---- */

/* The next name of what is still to go; none ("") at the end. */
static refit_status take_name(walk *it, char name[NAME_MAX + 1], refit_error *error)
{
    const char *at = it->rest + strspn(it->rest, "/");
    size_t length = strcspn(at, "/");
    if (length > NAME_MAX) return fail(it, ENAMETOOLONG, error);
    memcpy(name, at, length);
    name[length] = '\0';
    memmove(it->rest, at + length, strlen(at + length) + 1);
    return REFIT_OK;
}

/* The way's end: not a link, or it was made one this moment. */
static refit_status open_last(walk *it, const char *name, int flags, int *out, refit_error *error)
{
    int fd = openat(it->at, name, flags | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return fail(it, errno, error);
    *out = fd;
    return REFIT_OK;
}

/* One name further; the end, once it is reached, is in `out`. */
static refit_status step(walk *it, int flags, int *out, refit_error *error)
{
    char name[NAME_MAX + 1];
    struct stat found;
    RFT_TRY(take_name(it, name, error));
    if (name[0] == '\0') return open_last(it, ".", flags, out, error);
    int fd = openat(it->at, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return fail(it, errno, error);
    refit_status status = REFIT_OK;
    if (fstat(fd, &found) != 0)
        status = fail(it, errno, error);
    else if (S_ISLNK(found.st_mode))
        status = follow(it, name, fd, &found, error);
    else if (it->rest[0] == '\0')
        status = open_last(it, name, flags, out, error);
    else if (S_ISDIR(found.st_mode))
        return enter_named(it, name, fd, error);
    else
        status = fail(it, ENOTDIR, error);
    close(fd);
    return status;
}

static refit_status begin(walk *it, int folder, refit_error *error)
{
    char here[PATH_MAX];
    if ((size_t)snprintf(it->rest, sizeof it->rest, "%s", it->path) >= sizeof it->rest) {
        return fail(it, ENAMETOOLONG, error);
    }
    if (it->rest[0] == '\0') return fail(it, ENOENT, error);
    if (it->rest[0] == '/') return enter_root(it, error);
    if (folder != AT_FDCWD) {
        strcpy(it->where, ".");
        return enter(it, openat(folder, ".", O_PATH | O_DIRECTORY | O_CLOEXEC), error);
    }
    if (getcwd(here, sizeof here) == NULL) return fail(it, errno, error);
    return go_first(it, here, error);
}

/* Or it cannot be said. */
static bool is_made_up(int fd)
{
    static const uint32_t kinds[] = {PROC_SUPER_MAGIC,    SYSFS_MAGIC,   CGROUP_SUPER_MAGIC,
                                     CGROUP2_SUPER_MAGIC, DEBUGFS_MAGIC, TRACEFS_MAGIC};
    struct statfs found;
    bool any = fstatfs(fd, &found) != 0;
    for (size_t i = 0; !any && i < sizeof kinds / sizeof kinds[0]; i++)
        any = (uint32_t)found.f_type == kinds[i];
    return any;
}

static refit_status go(walk *it, int folder, int flags, int *out, refit_error *error)
{
    struct stat root;
    if (stat("/", &root) != 0) return fail(it, errno, error);
    it->owner_of_all = root.st_uid;
    RFT_TRY(begin(it, folder, error));
    while (*out < 0)
        RFT_TRY(step(it, flags, out, error));
    return REFIT_OK;
}

refit_status rft_trusted_open(int folder, const char *path, const char *what, int flags, int *out,
                              refit_error *error)
{
    walk it = {.what = what, .path = path, .at = -1};
    int fd = -1;
    refit_status status = go(&it, folder, flags, &fd, error);
    if (it.at >= 0) close(it.at);
    if (status == REFIT_OK && is_made_up(fd)) {
        close(fd);
        return rft_fail(error, REFIT_ERR_SECURITY,
                        "%s %.120s lies where the kernel makes files up: use another place", what,
                        path);
    }
    if (status == REFIT_OK) *out = fd;
    return status;
}
