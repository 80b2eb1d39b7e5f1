/*
 * archive_chain: a version put together from its files, frame by frame.
 *
 *     anchor ─► delta ─► … ─► delta, the version        from nothing
 *                 base ─► delta ─► …                    from a version that is in memory
 *
 * Which file is read first is found out by headers alone, so a file that is missing or that belongs
 * to another chain is known before memory is taken. The caller has the image and may do something
 * else between two steps.
 */
#ifndef RFT_ARCHIVE_CHAIN_H
#define RFT_ARCHIVE_CHAIN_H

#include "archive/archive.h"

/* A version in memory that files may build on. */
typedef struct rft_archive_base {
    rft_version_id id;
    rft_manifest *manifest;
    const unsigned char *image; /* of manifest->store_bytes */
} rft_archive_base;

/* Follows a version down to the first file that is to be read for it: the one that builds on `base`
 * (NULL: none), or else its anchor. On failure `*first` is the file at fault. REFIT_ERR_NOT_FOUND,
 * REFIT_ERR_STALE, and as rft_archive_reader_find. */
refit_status rft_archive_chain_first(const refit_archive *archive, const rft_archive_entry *last,
                                     const rft_archive_base *base, const rft_archive_entry **first,
                                     refit_error *error);

typedef struct rft_archive_chain {
    const refit_archive *archive;
    const rft_archive_entry *entry; /* whose file is read; on failure the one at fault */
    const rft_archive_entry *last;
    rft_archive_reader reader; /* of that file */
    rft_manifest *manifest;    /* of the first file, or the base's */
    bool lent;                 /* the manifest is another's */
    const unsigned char *base; /* what the first file builds on; NULL: the image itself */
    bool framed;               /* all frames are in: the image is being digested */
    rft_image_cursor cursor;
    uint64_t bytes_read; /* of frames */
} rft_archive_chain;

/* Opens the first file of those up to `last` and reads its lists. It is an anchor, or builds on
 * `base`, which is borrowed and whose manifest serves as the version's where the two are the same.
 * `archive` is borrowed, too, and must list the same files until close. On failure only
 * chain->entry is set. */
refit_status rft_archive_chain_open(rft_archive_chain *chain, const refit_archive *archive,
                                    const rft_archive_entry *first, const rft_archive_entry *last,
                                    const rft_archive_base *base, refit_error *error);
/* {0} is allowed. */
void rft_archive_chain_close(rft_archive_chain *chain);

/* The manifest becomes the caller's, who keeps it until close; NULL: it is the base's. */
rft_manifest *rft_archive_chain_take_manifest(rft_archive_chain *chain);

/* Reads one frame, or digests as much of the image. `image` has room for the version and may be the
 * base's; `*done`: it is the version. After a failure it is anything. REFIT_ERR_CORRUPT,
 * REFIT_ERR_STALE, REFIT_ERR_NOT_FOUND, … */
refit_status rft_archive_chain_step(rft_archive_chain *chain, unsigned char *image, bool *done,
                                    refit_error *error);

#endif
