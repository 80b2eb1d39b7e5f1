/*
 * refit/advanced/archive.h: versions kept as files, each of which can be rebuilt, byte for byte.
 *
 *     writing                                    reading
 *     refit_archive_open(WRITE)                  refit_archive_open(READ)
 *     per version:                               refit_archive_describe     what is there
 *       refit_archive_write    beside            refit_archive_read     ─►  refit_snapshot
 *       refit_archive_commit   it has its name     refit_snapshot_tensor    (views, read-only)
 *       (or refit_archive_abort)                   refit_snapshot_close
 *     refit_archive_close                        refit_archive_close
 *
 * An archive is a folder. Every archive.anchor_every versions, and wherever the one before is not
 * in it, a version is kept whole, as an anchor; the others as what changed since the one before, so
 * they need the files back to their anchor. A file is RUN-VERSION-EPOCH.refit: a restarted trainer
 * counts from 1 again, so a version is named by its number and its trainer's epoch, and runs number
 * the epochs in their order in time. A process that reads the folder sees whole files only,
 * whenever the writer dies.
 *
 * A restarted writer goes on from the last version, which it reads back; where that is not
 * possible, it says why in the log and begins with an anchor.
 *
 * refit_subscriber_open with "archive://FOLDER" follows an archive as if it were a trainer.
 *
 * One process writes, any number read meanwhile. The writer keeps the last version's weights in
 * memory, once, and a few frames; a snapshot has its own weights, once. No thread of its own.
 */
#ifndef REFIT_ADVANCED_ARCHIVE_H
#define REFIT_ADVANCED_ARCHIVE_H

#include <refit/broadcast.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct refit_archive refit_archive;
typedef struct refit_snapshot refit_snapshot;

typedef enum refit_archive_mode {
    REFIT_ARCHIVE_READ = 0,  /* the versions that are there now */
    REFIT_ARCHIVE_WRITE = 1, /* the same; and more may be added */
} refit_archive_mode;

/*
 * Opens a folder; for writing it is made if it is missing (its parent must be there; mode 0700, so
 * that other users read it only if you let them: files in it have the modes that the umask gives),
 * taken for this object alone, and what a writer that died has left is removed. One user writes to
 * an archive, also in a folder that a group may write to: only the user that first wrote to it can
 * take its lock. `config` may be NULL; it is copied: archive.*, limits.*, broadcast.frame_bytes
 * and, for what is written, broadcast.compress and its level count. Blocks for the disk.
 *
 * Errors:
 * - REFIT_ERR_BUSY: another writer has it
 * - REFIT_ERR_NOT_FOUND: no such folder
 * - REFIT_ERR_IO: also where another user writes to it
 * - REFIT_ERR_INVALID, REFIT_ERR_CONFIG, REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_archive_open(const char *folder,
                                                           refit_archive_mode mode,
                                                           const refit_config *config,
                                                           refit_archive **out, refit_error *error);

/* Aborts a version that was not committed, and frees all; NULL is allowed. */
REFIT_API void refit_archive_close(refit_archive *archive);

/* A version as refit_archive_write takes it; all is borrowed for the call. */
typedef struct refit_archive_version {
    size_t size;                 /* sizeof(refit_archive_version), set by the caller */
    uint64_t epoch;              /* of the trainer, not 0 */
    uint64_t version;            /* from 1 */
    const unsigned char *digest; /* 16 bytes: what the version's digest must be; NULL: not known */
    const refit_tensor *tensors; /* as refit_publisher_declare takes them */
    const refit_weight *weights; /* the bytes in host memory, once for each that is not tied */
    uint32_t count;              /* of tensors, tied ones included */
    uint32_t weight_count;       /* of those that are not tied */
} refit_archive_version;

/* What one file of an archive says about itself. */
typedef struct refit_archive_info {
    size_t size;   /* sizeof(refit_archive_info), set by the caller */
    char name[64]; /* of the file in its folder */
    uint64_t epoch;
    uint64_t version;
    uint64_t base;          /* the version that it builds on; 0: none, it is an anchor */
    uint64_t file_bytes;    /* of the file */
    uint64_t weight_bytes;  /* of the version's weights */
    uint64_t elements;      /* of the weights */
    uint64_t changed;       /* of those, how many differ from the base; of an anchor all */
    uint32_t tensors;       /* tied ones included */
    uint32_t blocks_same;   /* as in the base */
    uint32_t blocks_sparse; /* kept as what changed */
    uint32_t blocks_dense;  /* kept as they are */
    uint32_t frames;        /* that its blocks are kept in */
    uint32_t frames_packed; /* of those, how many are compressed */
    unsigned char digest[16];
    unsigned char base_digest[16]; /* of an anchor 0 */
    unsigned char manifest[16];    /* digest of the list of tensors */
} refit_archive_info;

#define REFIT_CHANGED_UNKNOWN UINT64_MAX

/* What became of one tensor between a version's base and the version. */
typedef struct refit_tensor_change {
    size_t size;            /* sizeof(refit_tensor_change), set by the caller */
    uint64_t elements;      /* bytes, of types whose elements have fewer bits or an odd number */
    uint64_t changed;       /* of an anchor all; REFIT_CHANGED_UNKNOWN: an early file says not */
    uint32_t blocks_same;   /* as in refit_archive_info */
    uint32_t blocks_sparse; /* as in refit_archive_info */
    uint32_t blocks_dense;  /* as in refit_archive_info */
} refit_tensor_change;

/*
 * Writes a version to the disk, under a name that no reader opens: commit or abort it. A version
 * that is in the archive already is compared by its digest, and nothing is written. After a failure
 * nothing of the version is left, and the next one builds on the newest version on the disk. The
 * version before this one is read back first where it is not in memory; that takes no further
 * memory. Blocks for the disk.
 *
 * Errors:
 * - REFIT_ERR_STATE: not open for writing, or a version is neither committed nor aborted
 * - REFIT_ERR_EXISTS: this version is there, with other bytes
 * - REFIT_ERR_CORRUPT: the bytes do not give `digest`
 * - REFIT_ERR_NOT_FOUND: the folder was removed
 * - REFIT_ERR_INVALID, REFIT_ERR_LIMIT, REFIT_ERR_IO, REFIT_ERR_HOST_MEMORY
 * - where the archive has a file of this version already: those of refit_archive_describe
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_archive_write(refit_archive *archive,
                                                            const refit_archive_version *version,
                                                            refit_error *error);

/*
 * Gives the version that was written its name; `info` (may be NULL) says what its file is. Blocks
 * for the disk.
 *
 * Errors:
 * - REFIT_ERR_STATE: nothing is written
 * - REFIT_ERR_INVALID: info->size; nothing happened
 * - REFIT_ERR_NOT_FOUND: the file or the folder was removed
 * - REFIT_ERR_IO: nothing of it is left; where not even that can be had from the disk,
 *   refit_archive_count counts it
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_archive_commit(refit_archive *archive,
                                                             refit_archive_info *info,
                                                             refit_error *error);

/*
 * Removes the version that was written and not committed.
 *
 * Errors:
 * - REFIT_ERR_STATE: there is none
 * - REFIT_ERR_IO: its file is still there; the next write, or open for writing, removes it
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_archive_abort(refit_archive *archive,
                                                            refit_error *error);

/*
 * Removes old files: all that are older than the last `anchors` anchors (1 or more) and the files
 * that build on those. `*removed` (may be NULL) is their number, also after a failure. The order of
 * removal leaves, wherever it ends, every remaining file with the files that it builds on; a reader
 * whose files are removed meanwhile gets REFIT_ERR_NOT_FOUND. Reads the first bytes of each file
 * once (blocks).
 *
 * Errors:
 * - REFIT_ERR_STATE: not open for writing, or a version is neither committed nor aborted
 * - REFIT_ERR_IO: call again
 * - REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_archive_prune(refit_archive *archive,
                                                            uint32_t anchors, uint32_t *removed,
                                                            refit_error *error);

/* How many versions the archive has, of all trainers. */
REFIT_API uint32_t refit_archive_count(const refit_archive *archive);

/*
 * Describes file `index`, in the order of runs and versions, below refit_archive_count. A failure
 * means that this file cannot be used; others may be. Reads its first bytes only (blocks).
 *
 * Errors:
 * - REFIT_ERR_CORRUPT: damaged, or no file of an archive at all
 * - REFIT_ERR_STALE: it holds another version than its name says
 * - REFIT_ERR_NOT_FOUND: no such index, or it was removed since the archive was opened
 * - REFIT_ERR_UNSUPPORTED, REFIT_ERR_LIMIT, REFIT_ERR_IO
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_archive_describe(const refit_archive *archive,
                                                               uint32_t index,
                                                               refit_archive_info *info,
                                                               refit_error *error);

/*
 * Rebuilds a version: reads its anchor and all files from there on, checks every section, and in
 * the end the digest of every tensor. `epoch` 0: of any trainer, if only one has this
 * version. Blocks for the disk.
 *
 * Errors:
 * - REFIT_ERR_NOT_FOUND: the version, or one that it builds on, is not there
 * - REFIT_ERR_EXISTS: `epoch` is 0 and several trainers have it
 * - REFIT_ERR_CORRUPT: a file is damaged, or no file of an archive at all
 * - REFIT_ERR_STALE: a file builds on another version than the one that is there, or holds another
 *   than its name says
 * - REFIT_ERR_UNSUPPORTED: a format that this refit does not know
 * - REFIT_ERR_LIMIT, REFIT_ERR_IO, REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_archive_read(const refit_archive *archive,
                                                           uint64_t epoch, uint64_t version,
                                                           refit_snapshot **out,
                                                           refit_error *error);

/*
 * Reads one file, wherever it lies, and checks every section, without the files that it builds on:
 * the snapshot has no bytes. `config` may be NULL.
 *
 * Errors:
 * - REFIT_ERR_INVALID: not a file of an archive, an empty path
 * - those of refit_archive_read
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_snapshot_open(const char *path,
                                                            const refit_config *config,
                                                            refit_snapshot **out,
                                                            refit_error *error);

/*
 * Reads the lists of file `index`, not its weights: refit_snapshot_describe, _tensor (without
 * bytes) and _change then tell of it. Of a file that an early refit wrote the blocks are read, too.
 * `*snapshot` is NULL, or one that this call has made before and that becomes this file's: that is
 * quick where the tensors are the same. The caller closes it; after a failure it is unchanged.
 *
 * Errors:
 * - REFIT_ERR_LIMIT, REFIT_ERR_HOST_MEMORY
 * - those of refit_archive_describe
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_archive_outline(const refit_archive *archive,
                                                              uint32_t index,
                                                              refit_snapshot **snapshot,
                                                              refit_error *error);

/* Frees the weights; NULL is allowed. */
REFIT_API void refit_snapshot_close(refit_snapshot *snapshot);

/*
 * What its file says.
 *
 * Errors:
 * - REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_snapshot_describe(const refit_snapshot *snapshot,
                                                                refit_archive_info *info,
                                                                refit_error *error);

/* How many tensors it has, tied ones included. */
REFIT_API uint32_t refit_snapshot_count(const refit_snapshot *snapshot);

/*
 * Tensor `index`: what it is, its bytes (read-only, aligned to 64; NULL after refit_snapshot_open)
 * and the digest of its bytes (that of kernels/digest.h), each of which may be NULL. All is
 * borrowed until refit_snapshot_close. Tied tensors share one pointer.
 *
 * Errors:
 * - REFIT_ERR_NOT_FOUND, REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_snapshot_tensor(const refit_snapshot *snapshot,
                                                              uint32_t index, refit_tensor *tensor,
                                                              const void **bytes, uint64_t *digest,
                                                              refit_error *error);

/*
 * What became of tensor `index` in the file that was read last: for one that refit_archive_read has
 * rebuilt, against the version before; of a tied tensor, that of the one whose bytes it shares.
 *
 * Errors:
 * - REFIT_ERR_NOT_FOUND, REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_snapshot_change(const refit_snapshot *snapshot,
                                                              uint32_t index,
                                                              refit_tensor_change *change,
                                                              refit_error *error);

#ifdef __cplusplus
}
#endif
#endif
