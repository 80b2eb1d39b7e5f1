/*
 * The folder as a sorted table of keys.
 *
 * Every look lists the folder and asks for each file's inode, size, times and mode; only if their
 * sum differs from the last are the files read. Times of a file system are coarse: what was changed
 * a moment before it was read may change again under the same time, so a fresh folder is read again
 * at every look until it has settled.
 *
 * A key is allowed as long as its file is there. To find that out takes no new descriptor and reads
 * no block of the file: the folder stays open from look to look, and a file that cannot be read for
 * now keeps the key that it had.
 */
#include "trust/allow_list.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/log.h"
#include "base/thread.h"
#include "base/user.h"
#include "trust/trusted_path.h"

#define SETTLED_S 2 /* times are no coarser than that */

typedef struct entry {
    char key[RFT_KEY_TEXT];
    char name[RFT_KEY_NAME_BYTES];
} entry;

/* The result of one look; {0} is empty. */
typedef struct table {
    entry *entries;
    uint32_t count;
    uint32_t room;
    bool lacking;  /* a file found no room */
    bool complete; /* all files are in it, if only with the key that they had */
} table;

struct rft_allow_list {
    char *folder;
    /* The looking thread's. */
    uint64_t seen; /* sum of what the last look saw */
    bool settled;  /* nothing there was fresh then */
    refit_status last;
    DIR *opened; /* the folder, when it could last be opened; or NULL */

    rft_mutex lock;
    table keys;       /* guarded by lock; the looking thread alone changes it */
    uint64_t edition; /* guarded by lock */
};

/* ---- What is there */

static uint64_t mix(uint64_t sum, uint64_t value)
{
    sum = (sum ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return sum ^ sum >> 32;
}

static uint64_t mix_stat(uint64_t sum, const struct stat *found)
{
    sum = mix(sum, found->st_dev);
    sum = mix(sum, found->st_ino);
    sum = mix(sum, (uint64_t)found->st_size);
    sum = mix(sum, found->st_mode);
    sum = mix(sum, found->st_uid);
    sum = mix(sum, (uint64_t)found->st_mtim.tv_sec);
    sum = mix(sum, (uint64_t)found->st_mtim.tv_nsec);
    sum = mix(sum, (uint64_t)found->st_ctim.tv_sec);
    return mix(sum, (uint64_t)found->st_ctim.tv_nsec);
}

static bool is_fresh(const struct stat *found)
{
    time_t now = time(NULL);
    return found->st_mtim.tv_sec + SETTLED_S >= now || found->st_ctim.tv_sec + SETTLED_S >= now;
}

/* NAME of NAME.public; false for any other file. */
static bool name_of(const char *file, char name[RFT_KEY_NAME_BYTES])
{
    const char *suffix = rft_key_suffix(RFT_KEY_PUBLIC);
    size_t length = strlen(file), tail = strlen(suffix);
    if (length <= tail || strcmp(file + length - tail, suffix) != 0) return false;
    if (length - tail >= RFT_KEY_NAME_BYTES) return false;
    memcpy(name, file, length - tail);
    name[length - tail] = '\0';
    return rft_key_name_is_valid(name);
}

typedef struct look {
    uint64_t sum; /* does not depend on the order in which the files are listed */
    uint32_t files;
    bool fresh;
} look;

static void look_at(int folder, const char *file, look *out)
{
    char name[RFT_KEY_NAME_BYTES];
    struct stat found;
    uint64_t sum = 1;
    if (!name_of(file, name)) return;
    for (const char *at = name; *at != '\0'; at++)
        sum = mix(sum, (unsigned char)*at);
    out->files++;
    if (fstatat(folder, file, &found, 0) == 0) {
        sum = mix_stat(sum, &found);
        out->fresh = out->fresh || is_fresh(&found);
    }
    out->sum += sum;
}

static refit_status fail_errno(const rft_allow_list *list, int code, refit_error *error)
{
    return rft_fail_sub(error, REFIT_ERR_IO, code,
                        "security.allow: folder %.120s cannot be read: %s", list->folder,
                        strerror(code));
}

static refit_status check_folder(const rft_allow_list *list, const struct stat *found,
                                 refit_error *error)
{
    RFT_REFUSE_IF(
        !rft_user_is_own(found->st_uid) && found->st_uid != 0, error, REFIT_ERR_SECURITY,
        "security.allow: folder %.120s belongs to user %u, which could admit any key: own "
        "it (chown)%s",
        list->folder, (unsigned)found->st_uid, rft_user_doubt(found->st_uid));
    RFT_REFUSE_IF((found->st_mode & 022) != 0, error, REFIT_ERR_SECURITY,
                  "security.allow: others may write to folder %.120s, and so admit any key: chmod "
                  "go-w",
                  list->folder);
    return REFIT_OK;
}

/* Opens the folder, checked; the descriptor is closed with the stream. */
static refit_status folder_open(const rft_allow_list *list, DIR **out, look *seen,
                                refit_error *error)
{
    struct stat found;
    int fd = -1;
    RFT_TRY(rft_trusted_open(AT_FDCWD, list->folder, "security.allow: folder",
                             O_RDONLY | O_DIRECTORY, &fd, error));
    if (fstat(fd, &found) != 0) {
        int code = errno;
        close(fd);
        return fail_errno(list, code, error);
    }
    refit_status status = check_folder(list, &found, error);
    if (status != REFIT_OK) {
        close(fd);
        return status;
    }
    *out = fdopendir(fd);
    if (*out == NULL) {
        int code = errno;
        close(fd);
        return fail_errno(list, code, error);
    }
    seen->sum = mix_stat(1, &found);
    seen->fresh = is_fresh(&found);
    return REFIT_OK;
}

/* A failure that passes by itself says nothing about which keys are allowed. */
static bool is_passing(refit_status status, int code)
{
    static const int passing[] = {EMFILE, ENFILE, ENOMEM, EIO, ESTALE, EINTR, EAGAIN, ETIMEDOUT};
    bool found = status == REFIT_ERR_HOST_MEMORY;
    for (size_t i = 0; status == REFIT_ERR_IO && i < sizeof passing / sizeof passing[0]; i++) {
        found = found || code == passing[i];
    }
    return found;
}

/* Whether the folder that was opened last is still the one there. Nothing is opened. */
static refit_status check_opened(const rft_allow_list *list, refit_error *error)
{
    struct stat there, opened;
    if (stat(list->folder, &there) != 0 || fstat(dirfd(list->opened), &opened) != 0)
        return fail_errno(list, errno, error);
    if (!S_ISDIR(there.st_mode)) return fail_errno(list, ENOTDIR, error);
    RFT_TRY(check_folder(list, &there, error));
    bool same = there.st_dev == opened.st_dev && there.st_ino == opened.st_ino;
    return same ? REFIT_OK : fail_errno(list, EAGAIN, error);
}

static refit_status look_around(const rft_allow_list *list, DIR *folder, look *seen,
                                refit_error *error)
{
    errno = 0;
    for (struct dirent *file; (file = readdir(folder)) != NULL; errno = 0) {
        look_at(dirfd(folder), file->d_name, seen);
    }
    if (errno != 0) return fail_errno(list, errno, error);
    RFT_REFUSE_IF(seen->files > RFT_ALLOW_MOST, error, REFIT_ERR_LIMIT,
                  "security.allow: folder %.120s has more than %u keys", list->folder,
                  RFT_ALLOW_MOST);
    rewinddir(folder);
    return REFIT_OK;
}

/* ---- Reading it */

/* Files may have come since they were counted, and be listed before those that were there. */
static bool grow(table *into)
{
    uint32_t room = 2 * into->room + 8;
    if (into->count < into->room) return true;
    entry *larger = rft_realloc(into->entries, room, sizeof *into->entries);
    if (larger == NULL) return false;
    into->entries = larger;
    into->room = room;
    return true;
}

static void add_entry(table *into, const char *name, const char *key)
{
    into->lacking = into->lacking || !grow(into);
    if (into->lacking) return;
    entry *next = &into->entries[into->count++];
    strcpy(next->key, key);
    strcpy(next->name, name);
}

/* Whether the file is there; a link to nowhere is not. Takes no descriptor. */
static bool is_there(int folder, const char *file)
{
    struct stat found;
    return fstatat(folder, file, &found, 0) == 0 || is_passing(REFIT_ERR_IO, errno);
}

/* One bad file takes its own key out and no other; one that cannot be read for now is taken without
 * a key, and `error` says why. `again`: what is wrong there has been said. */
static refit_status take_file(int folder, const char *file, bool again, table *into,
                              refit_error *error)
{
    rft_key key;
    char name[RFT_KEY_NAME_BYTES], text[RFT_KEY_TEXT] = "";
    if (!name_of(file, name)) return REFIT_OK;
    refit_status status = rft_key_file_read(folder, file, RFT_KEY_PUBLIC, &key, error);
    if (status != REFIT_OK && is_passing(status, error->subsystem)) {
        if (is_there(folder, file)) add_entry(into, name, text);
        return status;
    }
    if (status != REFIT_OK) {
        if (!again) rft_log(REFIT_LOG_WARNING, "security.allow: passed over: %s", error->text);
        return REFIT_OK;
    }
    rft_key_print(&key, text);
    add_entry(into, name, text);
    return REFIT_OK;
}

static int compare_entries(const void *a, const void *b)
{
    const entry *left = a, *right = b;
    int order = strcmp(left->key, right->key);
    return order != 0 ? order : strcmp(left->name, right->name);
}

static int compare_names(const void *a, const void *b)
{
    const entry *left = a, *right = b;
    return strcmp(left->name, right->name);
}

static uint32_t count_keyless(const table *sorted)
{
    uint32_t count = 0;
    while (count < sorted->count && sorted->entries[count].key[0] == '\0')
        count++;
    return count;
}

/* Gives each file without a key the one that it had, and drops those that had none: they come
 * first in the order, by their names. */
static void fill_in(const table *old, table *keys)
{
    uint32_t keyless = count_keyless(keys);
    if (keyless == 0) return;
    for (uint32_t i = 0; i < old->count; i++) {
        entry *found =
            bsearch(&old->entries[i], keys->entries, keyless, sizeof *keys->entries, compare_names);
        if (found != NULL) strcpy(found->key, old->entries[i].key);
    }
    qsort(keys->entries, keys->count, sizeof *keys->entries, compare_entries);
    uint32_t never = count_keyless(keys);
    keys->count -= never;
    memmove(keys->entries, keys->entries + never, keys->count * sizeof *keys->entries);
}

/* The first failure to read a file, the table complete all the same. */
static refit_status read_files(const rft_allow_list *list, DIR *folder, const look *seen,
                               table *into, refit_error *error)
{
    into->room = seen->files;
    into->entries = rft_calloc((size_t)seen->files + 1, sizeof *into->entries);
    RFT_REFUSE_IF(into->entries == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for %u keys",
                  seen->files);
    bool again = list->seen == seen->sum;
    refit_status first = REFIT_OK;
    errno = 0;
    for (struct dirent *file; (file = readdir(folder)) != NULL; errno = 0) {
        refit_error why;
        refit_status status = take_file(dirfd(folder), file->d_name, again, into, &why);
        if (status == REFIT_OK || first != REFIT_OK) continue;
        first = status;
        *error = why;
    }
    if (errno != 0) return fail_errno(list, errno, error);
    RFT_REFUSE_IF(into->lacking, error, REFIT_ERR_HOST_MEMORY, "no memory for the keys that came");
    qsort(into->entries, into->count, sizeof *into->entries, compare_entries);
    fill_in(&list->keys, into);
    into->complete = true;
    return first;
}

static void table_close(table *keys)
{
    rft_free(keys->entries);
    *keys = (table){0};
}

static bool tables_equal(const table *a, const table *b)
{
    bool equal = a->count == b->count;
    for (uint32_t i = 0; equal && i < a->count; i++) {
        equal = compare_entries(&a->entries[i], &b->entries[i]) == 0;
    }
    return equal;
}

/* A worker is named after its key's file. */
static void say_shared(const table *keys)
{
    for (uint32_t i = 1; i < keys->count; i++) {
        const entry *first = &keys->entries[i - 1], *second = &keys->entries[i];
        if (strcmp(first->key, second->key) != 0) continue;
        rft_log(REFIT_LOG_WARNING,
                "security.allow: %s and %s are the same key: its workers are named after the first "
                "of its files",
                first->name, second->name);
    }
}

/* Takes `keys`. */
static void adopt(rft_allow_list *list, table *keys)
{
    rft_lock(&list->lock);
    bool changed = !tables_equal(&list->keys, keys);
    table old = list->keys;
    list->keys = *keys;
    list->edition += changed;
    rft_unlock(&list->lock);
    if (changed) {
        rft_log(REFIT_LOG_INFO, "security.allow: %u keys in folder %.120s", keys->count,
                list->folder);
        say_shared(keys);
    }
    table_close(&old);
}

static refit_status read_folder(rft_allow_list *list, DIR *folder, look *seen, refit_error *error)
{
    table keys = {0};
    RFT_TRY(look_around(list, folder, seen, error));
    if (list->last == REFIT_OK && list->settled && list->seen == seen->sum) return REFIT_OK;
    refit_status status = read_files(list, folder, seen, &keys, error);
    if (!keys.complete) {
        table_close(&keys);
        return status;
    }
    list->seen = seen->sum;
    list->settled = !seen->fresh;
    adopt(list, &keys);
    return status;
}

/* The folder cannot be opened for now: at least the keys whose files are gone are removed. */
static refit_status read_opened(rft_allow_list *list, refit_error *error)
{
    look seen = {0};
    if (list->opened == NULL) return REFIT_OK;
    RFT_TRY(check_opened(list, error));
    rewinddir(list->opened);
    return read_folder(list, list->opened, &seen, error);
}

static refit_status look_and_read(rft_allow_list *list, refit_error *error)
{
    DIR *folder = NULL;
    look seen = {0};
    refit_error why;
    refit_status status = folder_open(list, &folder, &seen, error);
    if (status == REFIT_OK) {
        if (list->opened != NULL) closedir(list->opened);
        list->opened = folder;
        return read_folder(list, folder, &seen, error);
    }
    if (!is_passing(status, error->subsystem)) return status;
    refit_status instead = read_opened(list, &why);
    if (instead == REFIT_OK || is_passing(instead, why.subsystem)) return status;
    *error = why;
    return instead;
}

void rft_allow_list_refresh(rft_allow_list *list)
{
    refit_error why = {0};
    table none = {0};
    refit_status status = look_and_read(list, &why);
    if (status != REFIT_OK && !is_passing(status, why.subsystem)) {
        if (list->last != status) {
            rft_log(REFIT_LOG_ERROR, "%s; no key is admitted, and all workers are evicted",
                    why.text);
        }
        adopt(list, &none);
    } else if (status != REFIT_OK && list->last != status) {
        rft_log(REFIT_LOG_WARNING, "%s; what cannot be read stays as it was for now", why.text);
    }
    list->last = status;
}

/* ---- Opening and asking */

refit_status rft_allow_list_open(const char *folder, rft_allow_list **out, refit_error *error)
{
    rft_allow_list *list = rft_calloc(1, sizeof *list);
    char *name = rft_strdup(folder);
    refit_status status = REFIT_OK;
    if (list == NULL || name == NULL) {
        status = rft_fail(error, REFIT_ERR_HOST_MEMORY, "no memory for a list of keys");
    }
    if (status == REFIT_OK) status = rft_mutex_open(&list->lock, error);
    if (status != REFIT_OK) {
        rft_free(name);
        rft_free(list);
        return status;
    }
    list->folder = name;
    list->edition = 1;
    refit_error why;
    status = look_and_read(list, &why);
    if (status != REFIT_OK) {
        if (error != NULL) *error = why;
        rft_allow_list_close(list);
        return status;
    }
    if (list->keys.count == 0) {
        rft_log(REFIT_LOG_WARNING, "security.allow: no key in folder %.120s: no worker is admitted",
                folder);
    }
    *out = list;
    return REFIT_OK;
}

void rft_allow_list_close(rft_allow_list *list)
{
    if (list == NULL) return;
    if (list->opened != NULL) closedir(list->opened);
    table_close(&list->keys);
    rft_mutex_close(&list->lock);
    rft_free(list->folder);
    rft_free(list);
}

uint64_t rft_allow_list_edition(rft_allow_list *list)
{
    rft_lock(&list->lock);
    uint64_t edition = list->edition;
    rft_unlock(&list->lock);
    return edition;
}

uint32_t rft_allow_list_count(rft_allow_list *list)
{
    rft_lock(&list->lock);
    uint32_t count = list->keys.count;
    rft_unlock(&list->lock);
    return count;
}

/* Of names that share a key, the first. */
static const entry *find(const table *keys, const char *key)
{
    uint32_t low = 0, high = keys->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (strcmp(keys->entries[middle].key, key) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    bool found = low < keys->count && strcmp(keys->entries[low].key, key) == 0;
    return found ? &keys->entries[low] : NULL;
}

bool rft_allow_list_has(rft_allow_list *list, const char *key, char name[RFT_KEY_NAME_BYTES])
{
    rft_lock(&list->lock);
    const entry *found = find(&list->keys, key);
    if (found != NULL && name != NULL) strcpy(name, found->name);
    rft_unlock(&list->lock);
    return found != NULL;
}
