/*
 * manifest: which tensors a version has, where each lies in the store, and how it is partitioned
 * into frames.
 *
 * Everything here follows from the list of tensors and the frame size alone, so both ends compute
 * the same. Tensors lie one after the other, each aligned to 64 bytes (tied ones lie where their
 * original lies; an empty one takes no bytes and has no blocks). A block is 65,536 elements of one
 * tensor, the last one shorter; a frame is a run of whole blocks: the bytes from the first block's
 * start to the last one's end, padding between tensors included, at most frame_bytes (a single
 * block may be larger), at most RFT_FRAME_BLOCKS blocks.
 */
#ifndef RFT_MANIFEST_H
#define RFT_MANIFEST_H

#include <refit/broadcast.h>

#include "wire/fields.h"

#define RFT_BLOCK_ELEMENTS   65536u
#define RFT_FRAME_BLOCKS     1024u
#define RFT_TENSOR_ALIGNMENT 64u

typedef struct rft_manifest_tensor {
    const char *name; /* owned by the manifest */
    refit_dtype dtype;
    uint32_t rank;
    uint64_t shape[REFIT_RANK_MAX];
    uint64_t bytes;
    uint32_t alias_of;    /* or REFIT_NO_ALIAS; never of an alias */
    uint64_t offset;      /* in the store */
    uint64_t block_bytes; /* of a whole block */
    uint32_t first_block; /* number of its first block in the version; unused for aliases */
    uint32_t blocks;      /* 0 for an alias or an empty tensor */
} rft_manifest_tensor;

typedef struct rft_block {
    uint32_t tensor;
    uint64_t offset; /* in the store */
    uint64_t bytes;
    uint64_t tensor_offset; /* in its tensor: what rft_digest_part wants */
} rft_block;

typedef struct rft_frame_span {
    uint64_t offset; /* in the store */
    uint64_t bytes;
    uint32_t first_block;
    uint32_t blocks;
} rft_frame_span;

typedef struct rft_manifest_name {
    const char *name;
    uint32_t tensor;
} rft_manifest_name;

typedef struct rft_manifest {
    rft_manifest_tensor *tensors; /* owned */
    uint32_t count;
    uint32_t originals;       /* tensors that are not aliases */
    char *names;              /* owned; one after the other, each with its NUL */
    rft_manifest_name *index; /* owned; sorted by name */
    rft_block *blocks;        /* owned */
    uint32_t block_count;
    rft_frame_span *frames; /* owned */
    uint32_t frame_count;
    uint64_t frame_bytes;   /* by which it is partitioned */
    uint64_t store_bytes;   /* room that a version takes: a multiple of 64, never 0 */
    uint64_t payload_bytes; /* sum of the originals */
    rft_digest128 digest;   /* XXH3-128 of the encoded list */
    rft_bytes encoded;      /* the list as it travels */
} rft_manifest;

/* One tensor in the list as it travels: one msgpack map each, one after the other. The list is not
 * one array, so it is read one tensor at a time, and the memory to unpack it does not grow with a
 * peer's claims. The name lies in the bytes that it was read from. */
typedef struct rft_listed_tensor {
    rft_view name;
    uint32_t dtype;
    uint32_t original; /* 1 + the index of the tensor it shares bytes with; 0: its own bytes */
    rft_dims shape;
    uint64_t bytes;
} rft_listed_tensor;

/* Appends one tensor to a list; `out` grows to at most limits.manifest_bytes. */
refit_status rft_tensor_list_append(const rft_listed_tensor *tensor, const rft_limits *limits,
                                    rft_bytes *out, refit_error *error);

/* From the caller's list; checks everything that refit_publisher_declare promises.
 * REFIT_ERR_INVALID, REFIT_ERR_LIMIT, REFIT_ERR_HOST_MEMORY. */
refit_status rft_manifest_open(const refit_tensor *tensors, uint32_t count, uint64_t frame_bytes,
                               const rft_limits *limits, rft_manifest **out, refit_error *error);

/* From the wire (MANIFEST's `tensors`; copied); the same checks, as REFIT_ERR_PROTOCOL or
 * REFIT_ERR_LIMIT. */
refit_status rft_manifest_decode(rft_view encoded, uint64_t frame_bytes, const rft_limits *limits,
                                 rft_manifest **out, refit_error *error);
void rft_manifest_close(rft_manifest *manifest);

/* Fills a public description; the name is borrowed. */
void rft_manifest_describe(const rft_manifest *manifest, uint32_t tensor, refit_tensor *out);

/* Index by name, or UINT32_MAX. */
uint32_t rft_manifest_find(const rft_manifest *manifest, const char *name);

/* The version's digest: XXH3-128 over the manifest's digest and the tensors' digests: one for each
 * original, in order, as numbers or as SEAL has them (8 bytes each, little-endian). */
rft_digest128 rft_version_digest(const rft_manifest *manifest, const uint64_t *tensor_digests);
rft_digest128 rft_version_digest_encoded(const rft_manifest *manifest, rft_view tensor_digests);

/* From those of the originals, as SEAL has them, to one a tensor: tied ones have that of the tensor
 * whose bytes they share. */
void rft_digests_by_tensor(const rft_manifest *manifest, const unsigned char *encoded,
                           uint64_t *by_tensor);

/* XXH3-128 of any bytes, and whether two are equal. */
rft_digest128 rft_digest128_of(rft_view bytes);
bool rft_digest128_equal(const rft_digest128 *a, const rft_digest128 *b);

#endif
