/*
 * Frames to a version: which frames are in, and the sum of each tensor's digest so far.
 *
 * A frame is checked before a byte of the staging image changes: its place, its block modes, its
 * hash, then where in the payload each block has its bytes or planes, and that nothing is left
 * over. Then each block is copied and digested in the same pass; since a digest is a sum over a
 * tensor's words, blocks may come in any order. Padding inside a dense frame travels but belongs to
 * no tensor, so it is neither copied nor digested.
 *
 * A sparse block is the base's, copied to a place that stays in the cache and digested, changed
 * there, and digested again while it is copied to staging, past the caches. Malformed planes are
 * found while they are applied, before staging has any of the block. The base's digest is taken
 * again and not remembered from when that version was verified: the block is read for the copy
 * anyway, and so the digest is that of the bytes that the changes are applied to.
 *
 * All memory is taken by open, except that for unpacking.
 */
#include "wire/reassembly.h"

#include <string.h>

#include <xxhash.h>

#include "base/alloc.h"
#include "kernels/digest.h"

/* ---- SEAL
 *
 * The last check before a version counts: every original tensor's digest against the one that the
 * publisher sent, then the version's digest over all of them, which ties them to this manifest.
 * The sums come from a reassembly, or are taken from an image here, which may take several calls:
 * a cursor keeps the tensor reached and the sum of its bytes so far. Nothing is allocated.
 */

#define DIGEST_BYTES 8u
/* Parts of a digest begin at whole words. */
#define WORD_BYTES 8u

static refit_status check_length(const rft_manifest *manifest, rft_view digests, refit_error *error)
{
    RFT_REFUSE_IF(digests.count != (size_t)manifest->originals * DIGEST_BYTES, error,
                  REFIT_ERR_PROTOCOL, "the seal has %zu bytes of digests for %u tensors",
                  digests.count, manifest->originals);
    return REFIT_OK;
}

static refit_status check_tensor(const rft_manifest_tensor *tensor, uint64_t sum,
                                 const unsigned char *expected, refit_error *error)
{
    uint64_t digest = rft_digest_finish(sum, tensor->bytes);
    RFT_REFUSE_IF(digest != rft_get_u64(expected), error, REFIT_ERR_CORRUPT,
                  "tensor '%.80s' is not what the publisher wrote: digest %016llx, not %016llx",
                  tensor->name, (unsigned long long)digest,
                  (unsigned long long)rft_get_u64(expected));
    return REFIT_OK;
}

static refit_status check_version(const rft_manifest *manifest, const rft_message *seal,
                                  refit_error *error)
{
    rft_digest128 version = rft_version_digest_encoded(manifest, seal->as.seal.tensors);
    RFT_REFUSE_IF(!rft_digest128_equal(&version, &seal->as.seal.digest), error, REFIT_ERR_CORRUPT,
                  "all tensors are right but the version's digest is not: the publisher has "
                  "another manifest");
    return REFIT_OK;
}

refit_status rft_seal_check(const rft_manifest *manifest, const rft_want *want,
                            const uint64_t *sums, const rft_message *seal, refit_error *error)
{
    RFT_TRY(check_length(manifest, seal->as.seal.tensors, error));
    const unsigned char *expected = seal->as.seal.tensors.data;
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        if (rft_want_tensor(want, i) == RFT_WANT_ALL)
            RFT_TRY(check_tensor(tensor, sums[i], expected, error));
        expected += DIGEST_BYTES;
    }
    return check_version(manifest, seal, error);
}

/* ---- An image, part by part ---- */

/* Adds what it may of the tensor at the cursor, and says how many bytes those were. */
static uint64_t add_part(rft_image_cursor *cursor, const rft_manifest_tensor *tensor,
                         const unsigned char *image, uint64_t most)
{
    uint64_t left = tensor->bytes - cursor->offset;
    uint64_t bytes = left <= most ? left : most - most % WORD_BYTES;
    cursor->sum +=
        rft_digest_part(image + tensor->offset + cursor->offset, (size_t)bytes, cursor->offset);
    cursor->offset += bytes;
    return bytes;
}

static void next_tensor(rft_image_cursor *cursor, bool original)
{
    cursor->tensor++;
    cursor->original += original ? 1 : 0;
    cursor->offset = 0;
    cursor->sum = 0;
}

refit_status rft_image_verify_part(const rft_manifest *manifest, const unsigned char *image,
                                   const rft_message *seal, uint64_t most, rft_image_cursor *cursor,
                                   refit_error *error)
{
    RFT_TRY(check_length(manifest, seal->as.seal.tensors, error));
    const unsigned char *expected = seal->as.seal.tensors.data;
    while (cursor->tensor < manifest->count) {
        const rft_manifest_tensor *tensor = &manifest->tensors[cursor->tensor];
        bool original = tensor->alias_of == REFIT_NO_ALIAS;
        if (original && rft_want_tensor(cursor->want, cursor->tensor) == RFT_WANT_ALL) {
            most -= add_part(cursor, tensor, image, most);
            if (cursor->offset < tensor->bytes) return REFIT_OK;
            RFT_TRY(check_tensor(tensor, cursor->sum,
                                 expected + (size_t)cursor->original * DIGEST_BYTES, error));
        }
        next_tensor(cursor, original);
    }
    RFT_TRY(check_version(manifest, seal, error));
    cursor->done = true;
    return REFIT_OK;
}

refit_status rft_image_verify(const rft_manifest *manifest, const unsigned char *image,
                              const rft_message *seal, refit_error *error)
{
    rft_image_cursor cursor = {0};
    return rft_image_verify_part(manifest, image, seal, UINT64_MAX, &cursor, error);
}

/* ---- Frames to a version */

/* One block of the frame under way. */
typedef struct block_plan {
    const unsigned char *from; /* in the payload */
    rft_sparse sparse;
    uint64_t part; /* of its tensor's digest, once it is placed */
} block_plan;

struct rft_reassembly {
    const rft_manifest *manifest;
    unsigned char *staging;
    const unsigned char *base; /* NULL: none */
    uint64_t *sums;            /* per tensor; aliases stay 0 */
    const rft_want *want;      /* NULL: everything */
    bool *taken;               /* per frame */
    uint32_t taken_count;
    block_plan *plan;       /* per block of the largest frame */
    unsigned char *block;   /* the sparse one under way */
    rft_frame_codec *codec; /* NULL: no packed frame has come so far */
};

static uint32_t most_blocks(const rft_manifest *manifest)
{
    uint32_t most = 1;
    for (uint32_t i = 0; i < manifest->frame_count; i++) {
        if (manifest->frames[i].blocks > most) most = manifest->frames[i].blocks;
    }
    return most;
}

static size_t most_bytes(const rft_manifest *manifest)
{
    size_t most = 1;
    for (uint32_t i = 0; i < manifest->block_count; i++) {
        if (manifest->blocks[i].bytes > most) most = manifest->blocks[i].bytes;
    }
    return most;
}

refit_status rft_reassembly_open(const rft_manifest *manifest, unsigned char *staging,
                                 const unsigned char *base, rft_reassembly **out,
                                 refit_error *error)
{
    rft_reassembly *reassembly = rft_calloc(1, sizeof *reassembly);
    if (reassembly != NULL) {
        reassembly->manifest = manifest;
        reassembly->sums = rft_calloc(manifest->count, sizeof *reassembly->sums);
        reassembly->taken =
            rft_calloc((size_t)manifest->frame_count + 1, sizeof *reassembly->taken);
        reassembly->plan = rft_calloc(most_blocks(manifest), sizeof *reassembly->plan);
        reassembly->block = rft_calloc(1, most_bytes(manifest));
        if (reassembly->block != NULL && reassembly->sums != NULL && reassembly->taken != NULL &&
            reassembly->plan != NULL) {
            rft_reassembly_reset(reassembly, staging, base);
            *out = reassembly;
            return REFIT_OK;
        }
    }
    rft_reassembly_close(reassembly);
    return rft_fail(error, REFIT_ERR_HOST_MEMORY, "no memory to assemble %u frames",
                    manifest->frame_count);
}

void rft_reassembly_close(rft_reassembly *reassembly)
{
    if (reassembly == NULL) return;
    rft_free(reassembly->sums);
    rft_free(reassembly->taken);
    rft_free(reassembly->plan);
    rft_free(reassembly->block);
    rft_frame_codec_close(reassembly->codec);
    rft_free(reassembly);
}

void rft_reassembly_reset(rft_reassembly *reassembly, unsigned char *staging,
                          const unsigned char *base)
{
    const rft_manifest *manifest = reassembly->manifest;
    reassembly->staging = staging;
    reassembly->base = base;
    reassembly->want = NULL;
    reassembly->taken_count = 0;
    memset(reassembly->sums, 0, manifest->count * sizeof *reassembly->sums);
    memset(reassembly->taken, 0, manifest->frame_count * sizeof *reassembly->taken);
}

void rft_reassembly_narrow(rft_reassembly *reassembly, const rft_want *want)
{
    reassembly->want = want;
    for (uint32_t i = 0; i < reassembly->manifest->frame_count; i++) {
        if (rft_want_frame(want, i) != RFT_WANT_NONE) continue;
        reassembly->taken[i] = true;
        reassembly->taken_count++;
    }
}

/* ---- One frame ---- */

static uint32_t count_mode(const unsigned char *modes, uint32_t blocks, rft_block_mode mode)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < blocks; i++)
        count += modes[i] == mode ? 1 : 0;
    return count;
}

static refit_status check_modes(const rft_reassembly *reassembly, const rft_frame_span *span,
                                rft_view modes, refit_error *error)
{
    RFT_REFUSE_IF(modes.count != span->blocks, error, REFIT_ERR_PROTOCOL,
                  "a frame of %u blocks came with %zu block modes", span->blocks, modes.count);
    const unsigned char *mode = modes.data;
    for (uint32_t i = 0; i < span->blocks; i++) {
        RFT_REFUSE_IF(mode[i] > RFT_BLOCK_SPARSE, error, REFIT_ERR_PROTOCOL,
                      "there is no block mode %u", mode[i]);
        RFT_REFUSE_IF(mode[i] != RFT_BLOCK_DENSE && reassembly->base == NULL, error,
                      REFIT_ERR_PROTOCOL,
                      "a block is said to build on a base version, and there is none");
    }
    return REFIT_OK;
}

/* ---- What the payload holds */

/* All dense: the span as it lies in the store. */
static bool plan_whole(rft_reassembly *reassembly, const rft_frame_span *span, rft_view payload)
{
    const rft_block *blocks = &reassembly->manifest->blocks[span->first_block];
    for (uint32_t i = 0; i < span->blocks && payload.count == span->bytes; i++) {
        reassembly->plan[i].from =
            (const unsigned char *)payload.data + (blocks[i].offset - span->offset);
    }
    return payload.count == span->bytes;
}

/* Whether the block's bytes or planes lie at `at`, before `end`; then at is after them. */
static bool plan_block(const rft_reassembly *reassembly, const rft_block *block,
                       rft_block_mode mode, const unsigned char **entry, const unsigned char **at,
                       const unsigned char *end, block_plan *plan)
{
    size_t room = (size_t)(end - *at), bytes = 0;
    uint64_t wanted = rft_want_block(reassembly->want, block);
    if (mode == RFT_BLOCK_DENSE) {
        bytes = wanted;
    } else if (mode == RFT_BLOCK_SPARSE) {
        rft_block cut;
        if (!rft_sparse_cut(reassembly->manifest, reassembly->want, block, &cut) ||
            !rft_sparse_read(reassembly->manifest, &cut, *entry, *at, room, &plan->sparse))
            return false;
        *entry += RFT_SPARSE_ENTRY_BYTES;
        bytes = plan->sparse.delta.total;
    }
    if (bytes > room) return false;
    plan->from = *at;
    *at += bytes;
    return true;
}

/* Whether nothing of its blocks travels. */
static bool is_empty(const rft_reassembly *reassembly, const rft_frame_span *span,
                     const unsigned char *modes)
{
    const rft_block *blocks = &reassembly->manifest->blocks[span->first_block];
    for (uint32_t i = 0; i < span->blocks; i++) {
        bool left_out =
            modes[i] == RFT_BLOCK_SAME || rft_want_block(reassembly->want, &blocks[i]) == 0;
        if (!left_out) return false;
    }
    return true;
}

/* The directory of the sparse blocks, then block after block; all of it. */
static bool plan_gathered(rft_reassembly *reassembly, const rft_frame_span *span,
                          const unsigned char *modes, rft_view payload)
{
    const rft_block *blocks = &reassembly->manifest->blocks[span->first_block];
    size_t directory =
        (size_t)count_mode(modes, span->blocks, RFT_BLOCK_SPARSE) * RFT_SPARSE_ENTRY_BYTES;
    if (directory > payload.count || payload.count > span->bytes) return false;
    if (payload.count == 0) return is_empty(reassembly, span, modes);
    const unsigned char *entry = payload.data, *at = entry + directory;
    const unsigned char *end = entry + payload.count;
    for (uint32_t i = 0; i < span->blocks; i++) {
        if (!plan_block(reassembly, &blocks[i], modes[i], &entry, &at, end, &reassembly->plan[i]))
            return false;
    }
    return at == end;
}

/* Unpacks the payload, if it is packed, after its hash was checked. */
static refit_status unpack(rft_reassembly *reassembly, const rft_frame_span *span,
                           const rft_message *frame, rft_view *payload, refit_error *error)
{
    if (frame->as.frame.planes.count == 0) return REFIT_OK;
    bool all = rft_want_frame(reassembly->want, frame->as.frame.sequence) == RFT_WANT_ALL;
    RFT_REFUSE_IF(!all, error, REFIT_ERR_PROTOCOL, "frame %u is packed, and wanted in part",
                  frame->as.frame.sequence);
    RFT_REFUSE_IF(XXH3_64bits(payload->data, payload->count) != frame->as.frame.hash, error,
                  REFIT_ERR_CORRUPT, "frame %u was damaged on its way: its hash does not match",
                  frame->as.frame.sequence);
    if (reassembly->codec == NULL) RFT_TRY(rft_frame_codec_open(1, &reassembly->codec, error));
    return rft_frame_codec_unpack(reassembly->codec, reassembly->manifest, span,
                                  frame->as.frame.modes.data, frame->as.frame.planes, *payload,
                                  payload, error);
}

/* Entries of damaged sparse blocks may contradict the payload: then the damage is reported. */
static refit_status check_payload(rft_reassembly *reassembly, const rft_frame_span *span,
                                  const rft_message *frame, rft_view payload, refit_error *error)
{
    const unsigned char *modes = frame->as.frame.modes.data;
    bool all = rft_want_frame(reassembly->want, frame->as.frame.sequence) == RFT_WANT_ALL;
    bool whole = all && count_mode(modes, span->blocks, RFT_BLOCK_DENSE) == span->blocks;
    bool sparse = count_mode(modes, span->blocks, RFT_BLOCK_SPARSE) > 0;
    bool fits = whole ? plan_whole(reassembly, span, payload)
                      : plan_gathered(reassembly, span, modes, payload);
    bool packed = frame->as.frame.planes.count > 0; /* then the hash has been checked */
    bool sound = packed || ((fits || sparse) &&
                            XXH3_64bits(payload.data, payload.count) == frame->as.frame.hash);
    RFT_REFUSE_IF(!fits && (sound || !sparse), error, REFIT_ERR_PROTOCOL,
                  "frame %u has %zu bytes of payload, and not what its blocks need",
                  frame->as.frame.sequence, payload.count);
    RFT_REFUSE_IF(!sound, error, REFIT_ERR_CORRUPT,
                  "frame %u was damaged on its way: its hash does not match",
                  frame->as.frame.sequence);
    return REFIT_OK;
}

/* ---- Into the staging image */

/* Of a block that is wanted in part, to its wanted bytes: no digest of the tensor's is about them.
 */
static refit_status apply_sparse(rft_reassembly *reassembly, const rft_block *block,
                                 block_plan *plan, refit_error *error)
{
    unsigned char *to = reassembly->block;
    const char *name = reassembly->manifest->tensors[block->tensor].name;
    uint64_t before, after, wanted = rft_want_block(reassembly->want, block);
    bool cut = wanted < block->bytes;
    if (cut) {
        rft_want_gather(reassembly->want, block, reassembly->base, to);
        before = rft_digest_part(to, wanted, block->tensor_offset);
    } else {
        before = rft_digest_copy_part(to, reassembly->base + block->offset, block->bytes,
                                      block->tensor_offset);
    }
    RFT_REFUSE_IF(before != plan->sparse.before, error, REFIT_ERR_STALE,
                  "a change of tensor '%.80s' belongs to other bytes than this worker holds", name);
    RFT_REFUSE_IF(!rft_delta_apply(plan->sparse.shape, &plan->sparse.delta, plan->from, to), error,
                  REFIT_ERR_PROTOCOL, "a change of tensor '%.80s' is malformed", name);
    if (cut) {
        after = rft_digest_part(to, wanted, block->tensor_offset);
        rft_want_scatter(reassembly->want, block, to, reassembly->staging);
    } else {
        after = rft_digest_copy_piece(reassembly->staging + block->offset, to, block->bytes,
                                      block->tensor_offset);
    }
    plan->part = cut ? 0 : after;
    RFT_REFUSE_IF(after != plan->sparse.after, error, REFIT_ERR_CORRUPT,
                  "a change of tensor '%.80s' does not give the bytes that it should", name);
    return REFIT_OK;
}

/* A block that is wanted in part, or not at all: no digest is about it. */
static void place_part(rft_reassembly *reassembly, const rft_block *block, block_plan *plan,
                       bool same)
{
    plan->part = 0;
    if (same)
        rft_want_copy(reassembly->want, block, reassembly->base, reassembly->staging);
    else
        rft_want_scatter(reassembly->want, block, plan->from, reassembly->staging);
}

static refit_status place_blocks(rft_reassembly *reassembly, const rft_frame_span *span,
                                 const unsigned char *modes, refit_error *error)
{
    const rft_block *blocks = &reassembly->manifest->blocks[span->first_block];
    for (uint32_t i = 0; i < span->blocks; i++) {
        const rft_block *block = &blocks[i];
        block_plan *plan = &reassembly->plan[i];
        if (modes[i] == RFT_BLOCK_SPARSE) {
            RFT_TRY(apply_sparse(reassembly, block, plan, error));
            continue;
        }
        bool same = modes[i] == RFT_BLOCK_SAME;
        if (rft_want_block(reassembly->want, block) < block->bytes) {
            place_part(reassembly, block, plan, same);
            continue;
        }
        plan->part = rft_digest_copy_part(reassembly->staging + block->offset,
                                          same ? reassembly->base + block->offset : plan->from,
                                          block->bytes, block->tensor_offset);
    }
    for (uint32_t i = 0; i < span->blocks; i++)
        reassembly->sums[blocks[i].tensor] += reassembly->plan[i].part;
    return REFIT_OK;
}

refit_status rft_reassembly_take(rft_reassembly *reassembly, const rft_message *frame,
                                 rft_view payload, refit_error *error)
{
    const rft_manifest *manifest = reassembly->manifest;
    uint32_t sequence = frame->as.frame.sequence;
    RFT_REFUSE_IF(sequence >= manifest->frame_count, error, REFIT_ERR_PROTOCOL,
                  "frame %u of a version that has %u", sequence, manifest->frame_count);
    if (reassembly->taken[sequence]) return REFIT_OK;
    const rft_frame_span *span = &manifest->frames[sequence];
    RFT_TRY(check_modes(reassembly, span, frame->as.frame.modes, error));
    RFT_TRY(unpack(reassembly, span, frame, &payload, error));
    RFT_TRY(check_payload(reassembly, span, frame, payload, error));
    RFT_TRY(place_blocks(reassembly, span, frame->as.frame.modes.data, error));
    reassembly->taken[sequence] = true;
    reassembly->taken_count++;
    return REFIT_OK;
}

void rft_reassembly_take_placed(rft_reassembly *reassembly, uint32_t sequence,
                                const unsigned char *image)
{
    const rft_frame_span *span = &reassembly->manifest->frames[sequence];
    const rft_block *blocks = &reassembly->manifest->blocks[span->first_block];
    if (reassembly->taken[sequence]) return;
    for (uint32_t i = 0; i < span->blocks; i++) {
        const rft_block *block = &blocks[i];
        if (rft_want_block(reassembly->want, block) < block->bytes) {
            rft_want_copy(reassembly->want, block, image, reassembly->staging);
            continue;
        }
        reassembly->sums[block->tensor] +=
            rft_digest_copy_part(reassembly->staging + block->offset, image + block->offset,
                                 block->bytes, block->tensor_offset);
    }
    reassembly->taken[sequence] = true;
    reassembly->taken_count++;
}

bool rft_reassembly_has(const rft_reassembly *reassembly, uint32_t sequence)
{
    return reassembly->taken[sequence];
}

uint32_t rft_reassembly_taken(const rft_reassembly *reassembly)
{
    return reassembly->taken_count;
}

bool rft_reassembly_complete(const rft_reassembly *reassembly)
{
    return reassembly->taken_count == reassembly->manifest->frame_count;
}

uint32_t rft_reassembly_missing(const rft_reassembly *reassembly, uint32_t from, uint32_t before)
{
    for (uint32_t i = from; i < before && i < reassembly->manifest->frame_count; i++) {
        if (!reassembly->taken[i]) return i;
    }
    return UINT32_MAX;
}

refit_status rft_reassembly_verify(const rft_reassembly *reassembly, const rft_message *seal,
                                   refit_error *error)
{
    RFT_REFUSE_IF(!rft_reassembly_complete(reassembly), error, REFIT_ERR_STATE,
                  "%u of %u frames are in: verify when all are", reassembly->taken_count,
                  reassembly->manifest->frame_count);
    return rft_seal_check(reassembly->manifest, reassembly->want, reassembly->sums, seal, error);
}

/* ---- Several reassemblies, one image ---- */

refit_status rft_joint_sums_open(const rft_manifest *manifest, rft_joint_sums *out,
                                 refit_error *error)
{
    *out = (rft_joint_sums){
        .manifest = manifest,
        .sums = rft_calloc((size_t)manifest->count + 1, sizeof *out->sums),
        .known = rft_calloc((size_t)manifest->block_count + 1, sizeof *out->known),
    };
    if (out->sums != NULL && out->known != NULL) return REFIT_OK;
    rft_joint_sums_close(out);
    return rft_fail(error, REFIT_ERR_HOST_MEMORY, "no memory for the digests of %u tensors",
                    manifest->count);
}

void rft_joint_sums_close(rft_joint_sums *joint)
{
    rft_free(joint->sums);
    rft_free(joint->known);
    *joint = (rft_joint_sums){0};
}

void rft_joint_sums_add(rft_joint_sums *joint, const rft_reassembly *reassembly)
{
    const rft_manifest *manifest = joint->manifest;
    for (uint32_t i = 0; i < manifest->count; i++)
        joint->sums[i] += reassembly->sums[i];
    for (uint32_t i = 0; i < manifest->frame_count; i++) {
        const rft_frame_span *span = &manifest->frames[i];
        rft_want_part part = rft_want_frame(reassembly->want, i);
        for (uint32_t k = 0; part != RFT_WANT_NONE && k < span->blocks; k++) {
            const rft_block *block = &manifest->blocks[span->first_block + k];
            bool whole =
                part == RFT_WANT_ALL || rft_want_block(reassembly->want, block) == block->bytes;
            if (whole) joint->known[span->first_block + k] = 1;
        }
    }
}

bool rft_joint_sums_digest(rft_joint_sums *joint, const rft_want *want, const unsigned char *image,
                           uint64_t most)
{
    const rft_manifest *manifest = joint->manifest;
    uint64_t bytes = 0;
    for (; joint->block < manifest->block_count; joint->block++) {
        const rft_block *block = &manifest->blocks[joint->block];
        bool needed =
            joint->known[joint->block] == 0 && rft_want_tensor(want, block->tensor) == RFT_WANT_ALL;
        if (!needed) continue;
        if (bytes > 0 && bytes + block->bytes > most) return false;
        joint->sums[block->tensor] +=
            rft_digest_part(image + block->offset, block->bytes, block->tensor_offset);
        bytes += block->bytes;
    }
    return true;
}
