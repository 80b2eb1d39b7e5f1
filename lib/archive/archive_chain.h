/*
 * archive_chain: the files that a version needs, from its anchor on, and what comes of them.
 *
 *     version 7 ─base─► 6 ─base─► 5, an anchor        the chain, by headers alone
 *     image  ◄─ 5, then 6, then 7                     each over the one before, in place
 */
#ifndef RFT_ARCHIVE_CHAIN_H
#define RFT_ARCHIVE_CHAIN_H

#include "archive/archive_reader.h"
#include "archive/archive_state.h"

struct refit_snapshot {
    char name[RFT_ARCHIVE_NAME];
    rft_archive_header header;
    rft_manifest *manifest;      /* owned */
    unsigned char *digests;      /* owned; 8 bytes an original */
    uint64_t *by_tensor;         /* owned; the same, by tensor */
    rft_archive_change *changes; /* owned; by tensor; those of the last file alone */
    unsigned char *memory;       /* owned; NULL: without bytes, or they lie elsewhere */
    unsigned char *image;        /* in memory, aligned; or borrowed */
    uint64_t room;               /* of a borrowed image: what the version must take */
};

/* Follows a version down to its anchor, by headers alone. REFIT_ERR_NOT_FOUND, REFIT_ERR_STALE, and
 * as rft_archive_reader_find. */
refit_status rft_archive_chain_anchor(const refit_archive *archive, const rft_archive_entry *entry,
                                      const rft_archive_entry **anchor, refit_error *error);

/* Applies all files from the anchor to the last one, whose digests are checked, to the snapshot's
 * image; takes memory for that unless there is one. On failure the image is anything. */
refit_status rft_archive_chain_apply(const refit_archive *archive, const rft_archive_entry *anchor,
                                     const rft_archive_entry *last, refit_snapshot *snapshot,
                                     refit_error *error);

/* Takes over what a file's reader has read. */
refit_status rft_snapshot_take_lists(refit_snapshot *snapshot, rft_archive_reader *reader,
                                     refit_error *error);

#endif
