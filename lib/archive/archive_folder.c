/*
 * The folder of an archive: its files, their names to entries and back, and the writer's lock.
 *
 * No index is kept on the disk: the names alone list the versions, so there is nothing that a crash
 * could leave inconsistent. The lock is the kernel's and ends with the process that holds it; its
 * file stays, because a lock on a file that another process removes is not a lock. Knows nothing of
 * a file's content.
 */
#include "archive/archive_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/forks.h"
#include "base/log.h"
#include "base/user.h"

#define LOCK_NAME   ".lock"
#define LOCK_MODE   0600
#define FOLDER_MODE 0700 /* versions may be secrets; a folder that exists keeps its mode */

/* ---- Files
 *
 * Bytes are read and written at given places, so that a file's header can be written last and no
 * call depends on the one before. Files are read, not mapped: one that is cut short meanwhile is an
 * error here, where a map would be a signal.
 */

#define MOST ((size_t)1 << 30) /* at once: no system takes less */

refit_status rft_disk_fail(refit_error *error, const char *what, const char *name)
{
    int code = errno;
    return rft_fail_sub(error, code == ENOENT ? REFIT_ERR_NOT_FOUND : REFIT_ERR_IO, code,
                        "cannot %s %.120s: %s", what, name, strerror(code));
}

static refit_status fail_here(refit_error *error, const char *what)
{
    int code = errno;
    return rft_fail_sub(error, REFIT_ERR_IO, code, "it cannot be %s: %s", what, strerror(code));
}

refit_status rft_disk_write(int file, const void *bytes, size_t count, uint64_t at,
                            refit_error *error)
{
    const unsigned char *from = bytes;
    while (count > 0) {
        ssize_t taken = pwrite(file, from, count < MOST ? count : MOST, (off_t)at);
        if (taken < 0 && errno == EINTR) continue;
        if (taken == 0) errno = ENOSPC; /* no progress and no reason */
        if (taken <= 0) return fail_here(error, "written");
        from += taken;
        at += (uint64_t)taken;
        count -= (size_t)taken;
    }
    return REFIT_OK;
}

refit_status rft_disk_read(int file, void *bytes, size_t count, uint64_t at, refit_error *error)
{
    unsigned char *to = bytes;
    while (count > 0) {
        ssize_t got = pread(file, to, count < MOST ? count : MOST, (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fail_here(error, "read");
        RFT_REFUSE_IF(got == 0, error, REFIT_ERR_CORRUPT,
                      "it ends at byte %llu, where %zu more should be", (unsigned long long)at,
                      count);
        to += got;
        at += (uint64_t)got;
        count -= (size_t)got;
    }
    return REFIT_OK;
}

refit_status rft_disk_close(int file, refit_error *error)
{
    int code = fsync(file) == 0 ? 0 : errno;
    if (close(file) != 0 && code == 0) code = errno;
    if (code == 0) return REFIT_OK;
    errno = code;
    return fail_here(error, "written");
}

refit_status rft_disk_open(int folder, const char *name, int *file, uint64_t *bytes,
                           refit_error *error)
{
    struct stat found;
    int opened = openat(folder, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (opened < 0) return rft_disk_fail(error, "open", name);
    if (fstat(opened, &found) != 0 || !S_ISREG(found.st_mode)) {
        (void)close(opened);
        return rft_fail(error, REFIT_ERR_INVALID, "%.120s is not a regular file", name);
    }
    *file = opened;
    *bytes = (uint64_t)found.st_size;
    return REFIT_OK;
}

refit_status rft_disk_blame(refit_error *error, refit_status status, const char *name)
{
    if (status == REFIT_OK) return REFIT_OK;
    if (status == REFIT_ERR_PROTOCOL) status = REFIT_ERR_CORRUPT;
    if (error == NULL) return status;
    return rft_fail_sub(error, status, error->subsystem, "%s: %s", name, error->text);
}

/* ---- Names ---- */

void rft_archive_entry_name(const rft_archive_entry *entry, char name[RFT_ARCHIVE_NAME])
{
    (void)snprintf(name, RFT_ARCHIVE_NAME, "%04" PRIu32 "-%08" PRIu64 "-%016" PRIx64 ".refit",
                   entry->run, entry->version, entry->epoch);
}

/* A number that ends at `end`, where the next part begins; false if there is none or it is too
 * large. */
static bool take_number(const char **at, int base, char end, uint64_t *out)
{
    char *after;
    char first = **at;
    bool digit = (first >= '0' && first <= '9') || (first >= 'a' && first <= 'f');
    errno = 0;
    *out = strtoull(*at, &after, base);
    if (!digit || errno != 0 || *after != end) return false;
    *at = after + 1;
    return true;
}

/* Only what rft_archive_entry_name would write: one entry has one name. */
bool rft_archive_entry_parse(const char *name, rft_archive_entry *out)
{
    char again[RFT_ARCHIVE_NAME];
    uint64_t run;
    rft_archive_entry entry = {0};
    const char *at = name;
    if (!take_number(&at, 10, '-', &run) || !take_number(&at, 10, '-', &entry.version))
        return false;
    if (!take_number(&at, 16, '.', &entry.epoch) || run == 0 || run > UINT32_MAX) return false;
    entry.run = (uint32_t)run;
    rft_archive_entry_name(&entry, again);
    if (strcmp(name, again) != 0 || entry.version == 0 || entry.epoch == 0) return false;
    *out = entry;
    return true;
}

/* ---- The list ---- */

int rft_archive_entry_compare(const void *left, const void *right)
{
    const rft_archive_entry *a = left, *b = right;
    if (a->run != b->run) return a->run < b->run ? -1 : 1;
    if (a->version != b->version) return a->version < b->version ? -1 : 1;
    return a->epoch < b->epoch ? -1 : a->epoch > b->epoch;
}

refit_status rft_archive_folder_reserve(rft_archive_folder *folder, refit_error *error)
{
    if (folder->count < folder->room) return REFIT_OK;
    uint32_t room = folder->room == 0 ? 64 : folder->room * 2;
    RFT_REFUSE_IF(room < folder->room, error, REFIT_ERR_LIMIT, "the archive has too many files");
    void *more = rft_realloc(folder->entries, room, sizeof *folder->entries);
    RFT_REFUSE_IF(more == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a list of %u files",
                  room);
    folder->entries = more;
    folder->room = room;
    return REFIT_OK;
}

void rft_archive_folder_add(rft_archive_folder *folder, const rft_archive_entry *entry)
{
    uint32_t at = folder->count++;
    for (; at > 0 && rft_archive_entry_compare(entry, &folder->entries[at - 1]) < 0; at--)
        folder->entries[at] = folder->entries[at - 1];
    folder->entries[at] = *entry;
}

void rft_archive_folder_drop(rft_archive_folder *folder)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < folder->count; i++) {
        if (folder->entries[i].kind != RFT_ARCHIVE_REMOVED)
            folder->entries[kept++] = folder->entries[i];
    }
    folder->count = kept;
}

static refit_status list_entry(rft_archive_folder *folder, const char *name, refit_error *error)
{
    rft_archive_entry entry;
    if (!rft_archive_entry_parse(name, &entry)) return REFIT_OK;
    RFT_TRY(rft_archive_folder_reserve(folder, error));
    folder->entries[folder->count++] = entry;
    return REFIT_OK;
}

static refit_status list_all(rft_archive_folder *folder, DIR *listing, refit_error *error)
{
    for (;;) {
        errno = 0;
        const struct dirent *found = readdir(listing);
        if (found == NULL && errno != 0) return rft_disk_fail(error, "list", "the folder");
        if (found == NULL) return REFIT_OK;
        RFT_TRY(list_entry(folder, found->d_name, error));
    }
}

static refit_status list(rft_archive_folder *folder, refit_error *error)
{
    int again = openat(folder->dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *listing = again < 0 ? NULL : fdopendir(again);
    if (listing == NULL) {
        refit_status status = rft_disk_fail(error, "list", "the folder");
        if (again >= 0) (void)close(again);
        return status;
    }
    refit_status status = list_all(folder, listing, error);
    (void)closedir(listing);
    if (status != REFIT_OK || folder->count == 0) return status;
    qsort(folder->entries, folder->count, sizeof *folder->entries, rft_archive_entry_compare);
    return REFIT_OK;
}

const rft_archive_entry *rft_archive_folder_find(const rft_archive_folder *folder, uint64_t epoch,
                                                 uint64_t version)
{
    for (uint32_t i = 0; i < folder->count; i++) {
        const rft_archive_entry *entry = &folder->entries[i];
        if (entry->epoch == epoch && entry->version == version) return entry;
    }
    return NULL;
}

const rft_archive_entry *rft_archive_folder_at(const rft_archive_folder *folder, uint32_t run,
                                               uint64_t version, uint64_t epoch)
{
    const rft_archive_entry key = {.run = run, .version = version, .epoch = epoch};
    if (folder->count == 0) return NULL;
    return bsearch(&key, folder->entries, folder->count, sizeof key, rft_archive_entry_compare);
}

refit_status rft_archive_folder_run(const rft_archive_folder *folder, uint64_t epoch, uint32_t *run,
                                    refit_error *error)
{
    uint32_t most = 0;
    for (uint32_t i = folder->count; i-- > 0;) {
        if (folder->entries[i].epoch == epoch) {
            *run = folder->entries[i].run;
            return REFIT_OK;
        }
        if (folder->entries[i].run > most) most = folder->entries[i].run;
    }
    RFT_REFUSE_IF(most == UINT32_MAX, error, REFIT_ERR_LIMIT, "the archive has no run left");
    *run = most + 1;
    return REFIT_OK;
}

/* ---- The folder ---- */

/* A process that can open the file, if only to read, can hold its lock. Earlier releases left it
 * open to readers of the folder. So one user writes to an archive, also in a folder that a group
 * may write to. */
static void close_to_others(int lock)
{
    struct stat found;
    if (fstat(lock, &found) == 0 && (found.st_mode & 077) == 0) return;
    if (fchmod(lock, LOCK_MODE) == 0) return;
    rft_log(REFIT_LOG_WARNING,
            "archive: other users can hold the lock of the writer, and so keep writers out: chmod "
            "600 " LOCK_NAME " (%s)",
            strerror(errno));
}

static refit_status lock_failed(const rft_archive_folder *folder, refit_error *error)
{
    struct stat found;
    int code = errno;
    bool others = code == EACCES &&
                  fstatat(folder->dir, LOCK_NAME, &found, AT_SYMLINK_NOFOLLOW) == 0 &&
                  !rft_user_is_own(found.st_uid);
    errno = code;
    if (!others) return rft_disk_fail(error, "create", LOCK_NAME);
    return rft_fail_sub(error, REFIT_ERR_IO, code,
                        "user %u writes to this archive, and no other user can: write as that "
                        "user, or give user %u an archive of its own",
                        (unsigned)found.st_uid, (unsigned)geteuid());
}

static refit_status take_lock(rft_archive_folder *folder, refit_error *error)
{
    int flags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
    folder->lock = openat(folder->dir, LOCK_NAME, flags, LOCK_MODE);
    if (folder->lock < 0) return lock_failed(folder, error);
    rft_forks_keep(folder->lock);
    close_to_others(folder->lock);
    if (flock(folder->lock, LOCK_EX | LOCK_NB) == 0) return REFIT_OK;
    RFT_REFUSE_IF(errno == EWOULDBLOCK, error, REFIT_ERR_BUSY,
                  "another process writes to this archive: give this one a folder of its own");
    return rft_disk_fail(error, "lock", LOCK_NAME);
}

static refit_status remove_leftover(const rft_archive_folder *folder, refit_error *error)
{
    if (unlinkat(folder->dir, RFT_ARCHIVE_NEXT, 0) == 0 || errno == ENOENT) return REFIT_OK;
    return rft_disk_fail(error, "remove", RFT_ARCHIVE_NEXT);
}

static refit_status begin_writing(rft_archive_folder *folder, refit_error *error)
{
    RFT_TRY(take_lock(folder, error));
    return remove_leftover(folder, error);
}

refit_status rft_archive_folder_open(const char *path, bool write, rft_archive_folder *out,
                                     refit_error *error)
{
    rft_archive_folder folder = {.lock = -1};
    if (write && mkdir(path, FOLDER_MODE) != 0 && errno != EEXIST) {
        return rft_disk_fail(error, "make the folder", path);
    }
    folder.dir = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder.dir < 0) return rft_disk_fail(error, "open the folder", path);
    refit_status status = write ? begin_writing(&folder, error) : REFIT_OK;
    if (status == REFIT_OK) status = list(&folder, error);
    if (status != REFIT_OK) {
        rft_archive_folder_close(&folder);
        return status;
    }
    *out = folder;
    return REFIT_OK;
}

void rft_archive_folder_close(rft_archive_folder *folder)
{
    rft_forks_close(folder->lock);
    (void)close(folder->dir);
    rft_free(folder->entries);
    *folder = (rft_archive_folder){.dir = -1, .lock = -1};
}
