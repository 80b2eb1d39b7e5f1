/*
 * want: which bytes of a version a worker takes, where that is not all of them.
 *
 * A list of rows: runs of bytes of one tensor, all of one length, one stride apart. A whole tensor
 * is one row. Both ends compute from it what of a block travels, so that nothing about it stands in
 * a frame: a block that is wanted in part has its wanted bytes in the payload, one after the other,
 * and one that is not wanted has none.
 *
 * As it travels, and as it lies in `encoded`, an entry has 36 bytes, little-endian:
 *
 *     u32 tensor | u64 offset | u64 count | u64 stride | u64 bytes
 *
 * in the order of the tensors and their offsets, of originals alone. Rows of a tensor begin after
 * the end of those before them; rows that follow each other without a gap are one row (count 1,
 * stride = bytes). So equal wants are equal bytes.
 *
 * NULL stands for a want of everything. Immutable once it is open; any thread may use it.
 */
#ifndef RFT_WANT_H
#define RFT_WANT_H

#include <stdatomic.h>

#include "wire/manifest.h"
#include "wire/message.h"

#define RFT_WANT_ENTRY_BYTES 36u

typedef struct rft_want_rows {
    uint32_t tensor;
    uint64_t offset; /* of the first, in the tensor */
    uint64_t count;
    uint64_t stride;
    uint64_t bytes; /* of each */
} rft_want_rows;

typedef enum rft_want_part {
    RFT_WANT_NONE,
    RFT_WANT_SOME,
    RFT_WANT_ALL,
} rft_want_part;

typedef struct rft_want {
    atomic_uint users;
    rft_bytes encoded; /* owned */
    rft_digest128 digest;
    const rft_manifest *manifest; /* borrowed */
    rft_want_rows *rows;          /* owned */
    uint32_t row_count;
    uint32_t *first;       /* owned; per tensor, and one more: where its rows begin in `rows` */
    unsigned char *frames; /* owned; per frame: rft_want_part */
    uint64_t bytes;        /* of all rows */
} rft_want;

/* Reads a list, which is copied; the caller is the first user. `manifest` must outlive it.
 * REFIT_ERR_PROTOCOL: it is not in that form, or not of this manifest; REFIT_ERR_HOST_MEMORY. */
refit_status rft_want_open(const rft_manifest *manifest, rft_view encoded, rft_want **out,
                           refit_error *error);
/* NULL is allowed, for both. Any thread. */
rft_want *rft_want_acquire(rft_want *want);
void rft_want_release(rft_want *want);

/* A list of rows that travels in several messages: the next of them. {0} begins. False: that was
 * all; an empty list is one message. */
typedef struct rft_want_slice {
    uint32_t from;
    bool more; /* further ones follow */
    rft_view rows;
    uint32_t next;
    bool begun;
} rft_want_slice;

bool rft_want_slice_next(const rft_want *want, const rft_limits *limits, rft_want_slice *slice);
/* And puts them together again. One that does not follow is of a list that was begun before, and
 * passed over. `*whole`: it was the last. REFIT_ERR_LIMIT: longer than limits.manifest_bytes. */
refit_status rft_want_slice_add(rft_bytes *list, const rft_want_slice *slice,
                                const rft_limits *limits, bool *whole, refit_error *error);

/* Appends rows to a list: in the order above, or REFIT_ERR_INVALID. Rows that touch the last ones
 * of the list are joined with them where that is possible. REFIT_ERR_HOST_MEMORY. */
refit_status rft_want_append(rft_bytes *encoded, const rft_want_rows *rows, refit_error *error);

/* Whether all that the other one wants is wanted, row by row: a merged list includes both that it
 * is of, but not rows that two of its own make up together; and whether they are equal. Of one
 * manifest. */
bool rft_want_includes(const rft_want *want, const rft_want *other);
bool rft_want_equal(const rft_want *one, const rft_want *other);

/* Appends what two wants of one manifest have together, and in each row what is between them; where
 * their rows of a tensor are not alike, all of the tensor. */
refit_status rft_want_merge(const rft_want *one, const rft_want *other, rft_bytes *encoded,
                            refit_error *error);

/* Appends what is in both wants of one manifest; NULL stands for everything, but not for both. */
refit_status rft_want_intersect(const rft_want *one, const rft_want *other, rft_bytes *encoded,
                                refit_error *error);

/* Whether its caller is its only user. */
bool rft_want_is_last(const rft_want *want);

/* A walk over the wanted runs of one tensor, in order, within a range of its bytes. */
typedef struct rft_want_walk {
    const rft_want_rows *rows; /* the next */
    const rft_want_rows *last; /* after the last */
    uint64_t row;              /* of `rows`, the next */
    uint64_t begin, end;       /* the range */
} rft_want_walk;

rft_want_walk rft_want_walk_begin(const rft_want *want, uint32_t tensor, uint64_t begin,
                                  uint64_t end);
/* The next run: its place in the tensor. False: there are no more. */
bool rft_want_walk_next(rft_want_walk *walk, uint64_t *offset, uint64_t *bytes);

/* How much of a frame is wanted. */
rft_want_part rft_want_frame(const rft_want *want, uint32_t sequence);
/* How much of a tensor: of an original, or of that which an alias stands for. */
rft_want_part rft_want_tensor(const rft_want *want, uint32_t tensor);
/* Whether all of so many bytes of a tensor are. */
bool rft_want_covers(const rft_want *want, uint32_t tensor, uint64_t offset, uint64_t bytes);

/* How many bytes of a block are. */
uint64_t rft_want_block(const rft_want *want, const rft_block *block);
/* These bytes, from an image to one after the other, and back. */
void rft_want_gather(const rft_want *want, const rft_block *block, const unsigned char *image,
                     unsigned char *out);
void rft_want_scatter(const rft_want *want, const rft_block *block, const unsigned char *from,
                      unsigned char *image);
/* And from one image to another. */
void rft_want_copy(const rft_want *want, const rft_block *block, const unsigned char *from,
                   unsigned char *image);

#endif
