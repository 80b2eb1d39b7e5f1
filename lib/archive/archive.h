/*
 * archive: what a refit_archive and a refit_snapshot are made of.
 *
 *     IDLE ──write──► WRITTEN ──commit, abort──► IDLE
 *
 * `image` is the version that the next one is held against. It takes on a new version's bytes frame
 * by frame while that one is written, so that one image is enough; `held` says which version it is,
 * and says "none" from the first byte that changes until the commit: whatever goes wrong between
 * the two, the next version is an anchor.
 *
 * A version is read from its chain, which begins with its anchor:
 *
 *     version 7 ─base─► 6 ─base─► 5, an anchor        the chain, by headers alone
 *     image  ◄─ 5, then 6, then 7                     each over the one before, in place
 */
#ifndef RFT_ARCHIVE_H
#define RFT_ARCHIVE_H

#include "archive/archive_reader.h"

struct refit_archive {
    rft_archive_folder folder;
    rft_limits limits;
    uint64_t frame_bytes;  /* by which versions are partitioned */
    uint32_t anchor_every; /* versions from anchor to anchor */

    /* to write */
    rft_manifest *manifest;      /* of the image; NULL: none yet */
    unsigned char *image;        /* owned */
    rft_version_id held;         /* the version in it; 0: none */
    uint32_t since;              /* versions since the last anchor, that one included */
    rft_archive_slice *slice;    /* owned; with room for one frame: */
    unsigned char *frame;        /* the new version's bytes */
    unsigned char *same;         /* a byte a block */
    rft_bytes modes, scratch;    /* of rft_frame_encode */
    rft_frame_codec *codec;      /* owned; NULL: files are not packed */
    rft_archive_change *changes; /* a tensor */
    uint64_t *sums;              /* a tensor: of the digests of its parts */
    unsigned char *digests;      /* 8 bytes an original */

    bool written;              /* waits for commit or abort */
    bool present;              /* it was there already: nothing to do */
    rft_archive_header header; /* of what is written */
    rft_archive_entry entry;   /* of what is written */
};

/* Forgets what the image is, and frees all that depends on the manifest. */
void rft_archive_forget(refit_archive *archive);

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

/* Applies all files from the anchor to the last one, whose digests are checked, to the snapshot's
 * image; takes memory for that unless there is one. On failure the image is anything. */
refit_status rft_snapshot_apply(const refit_archive *archive, const rft_archive_entry *anchor,
                                const rft_archive_entry *last, refit_snapshot *snapshot,
                                refit_error *error);

#endif
