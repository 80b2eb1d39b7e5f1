/*
 * A given path is followed one name after the other, each looked up in a folder that is held open
 * and was checked: so nothing can change between the look and the next step.
 *
 *     /run ─► /run/keys ─► trainer.secret, a link ─► ..data/trainer.secret ─► /run/keys/..data ─► …
 */
#include "trust/trusted_path.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <linux/magic.h>

#include "base/log.h"
#include "base/user.h"

#define LINKS_MOST 40 /* as the kernel */
#define OTHERS     (S_IRWXG | S_IRWXO)

typedef struct walk {
    const char *what, *path; /* for sentences */
    int at;                  /* the folder reached; owned */
    int links;
    uid_t owner_of_all;   /* of "/": it could lead any path elsewhere */
    bool shared;          /* others make names in `at` */
    char rest[PATH_MAX];  /* the names that were not followed yet */
    char where[PATH_MAX]; /* the path of `at` */
} walk;

static refit_status fail(const walk *it, int code, refit_error *error)
{
    return rft_fail_sub(error, REFIT_ERR_IO, code, "%s %.120s cannot be opened: %s", it->what,
                        it->path, strerror(code));
}

/* Where the owner of "/" is a user that this user namespace does not map, all such users have its
 * number: so what lies where others make names is not believed to be that owner's. */
static bool is_trusted(const walk *it, const struct stat *found)
{
    if (rft_user_is_own(found->st_uid) || found->st_uid == 0) return true;
    return found->st_uid == it->owner_of_all && !(it->shared && rft_user_is_unknown(found->st_uid));
}

/* ---- Folders */

static refit_status check_folder(walk *it, const struct stat *found, refit_error *error)
{
    RFT_REFUSE_IF(!is_trusted(it, found), error, REFIT_ERR_SECURITY,
                  "%s %.50s: folder %.70s belongs to user %u: own it (chown), or use another place",
                  it->what, it->path, it->where, (unsigned)found->st_uid);
    RFT_REFUSE_IF(
        (found->st_mode & 022) != 0 && (found->st_mode & S_ISVTX) == 0, error, REFIT_ERR_SECURITY,
        "%s %.50s: others may write to folder %.70s, and so put another there: chmod go-w, "
        "or use another place",
        it->what, it->path, it->where);
    it->shared = (found->st_mode & 022) != 0;
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
    return check_folder(it, &found, error);
}

static refit_status enter_root(walk *it, refit_error *error)
{
    strcpy(it->where, "/");
    it->shared = false;
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

/* ---- Links */

/* Puts a link's target, or the working folder, in front of the names that are left. */
static refit_status go_first(walk *it, const char *way, refit_error *error)
{
    char after[PATH_MAX];
    strcpy(after, it->rest);
    int length =
        snprintf(it->rest, sizeof it->rest, "%s%s%s", way, after[0] == '\0' ? "" : "/", after);
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

/* ---- The path */

/* Takes the next name of the path; none ("") at the end. */
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

/* Opens the last name, which was not a link a moment ago. */
static refit_status open_last(walk *it, const char *name, int flags, int *out, refit_error *error)
{
    int fd = openat(it->at, name, flags | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return fail(it, errno, error);
    *out = fd;
    return REFIT_OK;
}

/* Follows one name; `out` gets the descriptor of the last one. */
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

/* Whether the kernel makes the file up; true also if the system cannot tell. */
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

/* ---- The user's own folder
 *
 * A place where no other user can make names comes first: the folder that the system makes for the
 * user's sockets. Its usual path is tried where the variable is missing, too, so that a process
 * that was started without the variable (by cron, say) finds the same folder as the others. What is
 * set but unfit is not used: `su` and batch systems hand down the folder of another user or of
 * another machine. The system makes that folder at the user's first login and removes it at the
 * last logout, so two processes may choose different places: a process that looks for another one
 * looks at all of them.
 *
 * In /tmp another user may have taken the name; that is refused, because no other name would be
 * found by the processes that look for this one. What is there is checked by a descriptor that
 * follows no link. No other user can rename it: /tmp is sticky, and the other places belong to this
 * user. */

/* Whether the folder belongs to this user, and no other user may enter it. */
static bool is_own(int fd)
{
    struct stat found;
    return fstat(fd, &found) == 0 && S_ISDIR(found.st_mode) && rft_user_is_own(found.st_uid) &&
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

/* ---- The places */

/* A path that is too long for a socket is not a place. */
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

/* ---- The folder */

static void tell_unused(void)
{
    const char *runtime = secure_getenv("XDG_RUNTIME_DIR");
    if (runtime == NULL || runtime[0] == '\0') return;
    rft_log(
        REFIT_LOG_INFO,
        "XDG_RUNTIME_DIR is not used: %s is not a folder that only user %u may enter, or too long "
        "for the path of a socket (%d bytes)",
        runtime, (unsigned)geteuid(), RFT_OWN_FOLDER_BYTES - 1);
}

static void choose(size_t after, char path[RFT_OWN_FOLDER_BYTES])
{
    rft_own_places list;
    rft_own_places_list(&list);
    uint32_t at = 0;
    while (at + 1 < list.count &&
           (strlen(list.paths[at]) + after >= RFT_OWN_FOLDER_BYTES || !is_place(&list, at)))
        at++;
    if (at > 0) tell_unused();
    strcpy(path, list.paths[at]);
}

static refit_status check(const char *path, int fd, refit_error *error)
{
    struct stat found;
    if (fstat(fd, &found) != 0)
        return rft_fail_sub(error, REFIT_ERR_IO, errno, "folder %s cannot be looked at: %s", path,
                            strerror(errno));
    RFT_REFUSE_IF(!rft_user_is_own(found.st_uid), error, REFIT_ERR_SECURITY,
                  "folder %s belongs to user %u, not to user %u%s: have it removed, set "
                  "XDG_RUNTIME_DIR to a folder of yours (mode 0700), or name an endpoint in a "
                  "folder of yours (ipc://PATH)",
                  path, (unsigned)found.st_uid, (unsigned)geteuid(), rft_user_doubt(found.st_uid));
    RFT_REFUSE_IF(!is_own(fd), error, REFIT_ERR_SECURITY,
                  "folder %s is open to other users (mode %04o): chmod 700 %s", path,
                  (unsigned)found.st_mode & 07777, path);
    return REFIT_OK;
}

refit_status rft_own_folder_find(size_t after, char path[RFT_OWN_FOLDER_BYTES], refit_error *error)
{
    choose(after, path);
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
    refit_status status = check(path, fd, error);
    close(fd);
    return status;
}
