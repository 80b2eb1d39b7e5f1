/*
 * archive_reader: one file of an archive, section by section, each checked before it is used.
 */
#ifndef RFT_ARCHIVE_READER_H
#define RFT_ARCHIVE_READER_H

#include "archive/archive_folder.h"
#include "archive/archive_format.h"
#include "wire/reassembly.h"

/* ---- One frame as a version of its own
 *
 * A slice begins at byte 0, so that wire's coding of frames works on a buffer of one frame. A
 * second image of all weights is needed neither to write a version that lies elsewhere, nor to
 * apply one file after another.
 */

/* Valid until the next cut; names and shapes are borrowed from the manifest. */
typedef struct rft_archive_slice {
    rft_manifest manifest; /* tensors from `tensor` on; one frame; no names' index, no encoding */
    rft_frame_span frame;  /* its only one */
    uint32_t tensor;       /* number of its first tensor in the version */
    uint64_t offset;       /* of its first byte in the version's image */
    rft_block blocks[RFT_FRAME_BLOCKS];
} rft_archive_slice;

/* Frame `sequence` of a manifest that has it. */
void rft_archive_slice_cut(rft_archive_slice *slice, const rft_manifest *manifest,
                           uint32_t sequence);

/* Bytes of the longest frame. */
uint64_t rft_archive_slice_most(const rft_manifest *manifest);

/* ---- One file ---- */

typedef struct rft_archive_reader {
    int file;
    rft_archive_header header;
    rft_manifest *manifest;      /* owned, once the lists were read */
    unsigned char *digests;      /* owned; header.digest_bytes, as in SEAL */
    rft_archive_change *changes; /* owned; a tensor; of format 1 once the frames were read */
    uint64_t at;                 /* where the next frame begins */
    uint32_t sequence;           /* of that one */
    /* while frames are read */
    rft_archive_change *seen; /* owned; a tensor: what the frames had so far */
    uint32_t packed;          /* frames that were */
    rft_frame_codec *codec;   /* owned; NULL: no frame was packed so far */
    rft_archive_slice *slice; /* owned */
    unsigned char *begin;     /* owned: a frame's beginning, its modes, its hash */
    unsigned char *payload;   /* owned: of the longest frame */
    unsigned char *staging;   /* owned: of the longest frame */
} rft_archive_reader;

/* Reads the header of an opened file of `bytes`; takes over the descriptor, also where it fails.
 * {0} is not a reader: close only what was opened. */
refit_status rft_archive_reader_open(int file, uint64_t bytes, const rft_limits *limits,
                                     rft_archive_reader *out, refit_error *error);

/* Opens a file of a folder and reads its header, which must say what the file's name says;
 * sentences begin with the name. REFIT_ERR_CORRUPT where it is not a file of an archive,
 * REFIT_ERR_STALE where it is of another version. */
refit_status rft_archive_reader_find(const rft_archive_folder *folder,
                                     const rft_archive_entry *entry, const rft_limits *limits,
                                     rft_archive_reader *out, refit_error *error);
void rft_archive_reader_close(rft_archive_reader *reader);

/* Gives it the manifest of another file, if that is the one that this file has; lists takes it
 * then. Whether it did: it is the reader's. */
bool rft_archive_reader_give(rft_archive_reader *reader, rft_manifest *manifest);

/* Whether the file has it without damage, too, which nothing below looks at. */
refit_status rft_archive_reader_check_given(rft_archive_reader *reader, refit_error *error);

/* The manifest, the digests and the changes, once. */
refit_status rft_archive_reader_lists(rft_archive_reader *reader, const rft_limits *limits,
                                      refit_error *error);

/* Reads the next frame, after the lists, into the `image` of the version; `base` is that of the
 * version that the file builds on, the same one or another, and not used for an anchor. NULL: the
 * frame is checked only. `*end`: it was the last, and the file is whole. */
refit_status rft_archive_reader_frame(rft_archive_reader *reader, const unsigned char *base,
                                      unsigned char *image, bool *end, refit_error *error);

/* Checks all frames, after the lists, each by itself. */
refit_status rft_archive_reader_frames(rft_archive_reader *reader, refit_error *error);

/* Whether the image is the version, by the digests of its tensors: rft_image_verify_part. */
refit_status rft_archive_reader_verify(const rft_archive_reader *reader, const unsigned char *image,
                                       uint64_t most, rft_image_cursor *cursor, refit_error *error);

#endif
