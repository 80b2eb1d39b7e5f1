/*
 * archive_state: what a refit_archive is made of.
 *
 *     IDLE ──write──► WRITTEN ──commit, abort──► IDLE
 *
 * `image` is the version that the next one is held against. It takes on a new version's bytes frame
 * by frame while that one is written, so that one image is enough; `held` says which version it is,
 * and says "none" from the first byte that changes until the commit: whatever goes wrong between
 * the two, the next version is an anchor.
 */
#ifndef RFT_ARCHIVE_STATE_H
#define RFT_ARCHIVE_STATE_H

#include "archive/archive_reader.h"

struct refit_archive {
    rft_archive_folder folder;
    rft_limits limits;
    uint64_t frame_bytes;  /* versions are cut so */
    uint32_t anchor_every; /* versions from anchor to anchor */

    /* to write */
    rft_manifest *manifest;      /* of the image; NULL: none yet */
    unsigned char *image;        /* owned */
    rft_held held;               /* the version in it; 0: none */
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
    rft_archive_entry entry;   /* likewise */
};

/* Forgets what the image is, and frees all that depends on the manifest. */
void rft_archive_forget(refit_archive *archive);

#endif
