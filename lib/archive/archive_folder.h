/*
 * archive_folder: which versions a folder has, by the names of its files; which process may write
 * there; and the bytes of a file, read and written.
 *
 *     RUN-VERSION-EPOCH.refit     0002-00000017-9f1c66a04b7de210.refit: one version
 *     .next                       a version being written; only its writer opens it
 *     .lock                       the writer holds a lock on it (flock), which ends with the
 *                                 process; mode 0600, so that no reader can hold it
 *
 * RUN and VERSION are decimal, EPOCH hexadecimal. Sorted by name is sorted by time, within what the
 * zeros in front allow; rft_archive_folder sorts by the numbers. Other names are passed over.
 */
#ifndef RFT_ARCHIVE_FOLDER_H
#define RFT_ARCHIVE_FOLDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define RFT_ARCHIVE_NAME 64u /* room for a file's name */
#define RFT_ARCHIVE_NEXT ".next"

/* What a file is, as far as is known. */
typedef enum rft_archive_kind {
    RFT_ARCHIVE_UNSEEN,
    RFT_ARCHIVE_ANCHOR,
    RFT_ARCHIVE_DELTA,   /* or damaged: nothing begins with it */
    RFT_ARCHIVE_REMOVED, /* by a prune that is under way */
} rft_archive_kind;

typedef struct rft_archive_entry {
    uint32_t run;
    uint64_t version;
    uint64_t epoch;
    rft_archive_kind kind;
} rft_archive_entry;

typedef struct rft_archive_folder {
    int dir;
    int lock;                   /* -1: not for writing */
    rft_archive_entry *entries; /* owned; sorted by run, then version */
    uint32_t count;
    uint32_t room;
} rft_archive_folder;

/* Opens and lists it; to write, makes it, locks it and removes what a dead writer left.
 * REFIT_ERR_NOT_FOUND, REFIT_ERR_BUSY, REFIT_ERR_IO, REFIT_ERR_HOST_MEMORY. */
refit_status rft_archive_folder_open(const char *path, bool write, rft_archive_folder *out,
                                     refit_error *error);
void rft_archive_folder_close(rft_archive_folder *folder);

/* Drops the entries of files that were removed. */
void rft_archive_folder_drop(rft_archive_folder *folder);

/* Adds an entry at its place; rft_archive_folder_reserve has made the room. */
refit_status rft_archive_folder_reserve(rft_archive_folder *folder, refit_error *error);
void rft_archive_folder_add(rft_archive_folder *folder, const rft_archive_entry *entry);

/* The entry, or NULL. */
const rft_archive_entry *rft_archive_folder_find(const rft_archive_folder *folder, uint64_t epoch,
                                                 uint64_t version);

/* The entry, or NULL, where its run is known: quick in a large folder. */
const rft_archive_entry *rft_archive_folder_at(const rft_archive_folder *folder, uint32_t run,
                                               uint64_t version, uint64_t epoch);

/* The run of an epoch, or the one that a new epoch gets. REFIT_ERR_LIMIT. */
refit_status rft_archive_folder_run(const rft_archive_folder *folder, uint64_t epoch, uint32_t *run,
                                    refit_error *error);

/* The order of the list: of two entries, for qsort. */
int rft_archive_entry_compare(const void *left, const void *right);

void rft_archive_entry_name(const rft_archive_entry *entry, char name[RFT_ARCHIVE_NAME]);
bool rft_archive_entry_parse(const char *name, rft_archive_entry *out);

/* ---- Files, with every failure as a status and a sentence ---- */

/* All of it, however little each call of the system takes. REFIT_ERR_IO. */
refit_status rft_disk_write(int file, const void *bytes, size_t count, uint64_t at,
                            refit_error *error);

/* All of it. REFIT_ERR_IO; REFIT_ERR_CORRUPT: the file ends before. */
refit_status rft_disk_read(int file, void *bytes, size_t count, uint64_t at, refit_error *error);

/* Onto the disk, and closes it either way: some errors are known to close alone. REFIT_ERR_IO. */
refit_status rft_disk_close(int file, refit_error *error);

/* Opens a regular file for reading; a FIFO is refused, not waited for. REFIT_ERR_NOT_FOUND,
 * REFIT_ERR_IO, REFIT_ERR_INVALID. */
refit_status rft_disk_open(int folder, const char *name, int *file, uint64_t *bytes,
                           refit_error *error);

/* "cannot WHAT NAME: reason", from errno. */
refit_status rft_disk_fail(refit_error *error, const char *what, const char *name);

/* Puts the file's name before the sentence; a rule of the wire that was broken in a file is damage.
 * Returns the status that it has then. */
refit_status rft_disk_blame(refit_error *error, refit_status status, const char *name);

#endif
