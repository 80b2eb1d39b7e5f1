/*
 * Frames to a version: which frames are in, and the sum of each tensor's digest so far.
 *
 * A frame is judged before a byte of the staging image changes: its place, its block modes, its
 * hash, then where in the payload each block has its bytes or planes, and that nothing is left
 * over. Then each block is copied and digested in the same pass; since a digest is a sum over a
 * tensor's words, blocks may come in any order. Padding inside a dense frame travels but belongs to
 * no tensor, so it is neither copied nor digested.
 *
 * A sparse block is the base's, copied to a place that stays in the cache and digested, changed
 * there, and digested again on its way to staging, round the caches. What is in its planes shows
 * only while they are applied; then staging has nothing of it. The base's digest is taken anew, not
 * remembered from when that version was verified: the block is read for the copy anyway, and so it
 * speaks of the bytes that the changes are applied to.
 *
 * All memory is taken by open, but what unpacking needs.
 */
#include "wire/assembly.h"

#include <string.h>

#include <xxhash.h>

#include "base/alloc.h"
#include "kernels/digest.h"
#include "wire/seal.h"
#include "wire/sparse.h"

/* One block of the frame under way. */
typedef struct block_plan {
    const unsigned char *from; /* in the payload */
    rft_sparse sparse;
    uint64_t part; /* of its tensor's digest, once it is placed */
} block_plan;

struct rft_assembly {
    const rft_manifest *manifest;
    unsigned char *staging;
    const unsigned char *base; /* NULL: none */
    uint64_t *sums;            /* per tensor; aliases stay 0 */
    bool *taken;               /* per frame */
    uint32_t taken_count;
    block_plan *plan;     /* per block of the largest frame */
    unsigned char *block; /* the sparse one under way */
    rft_packer *packer;   /* NULL: no packed frame has come so far */
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

refit_status rft_assembly_open(const rft_manifest *manifest, unsigned char *staging,
                               const unsigned char *base, rft_assembly **out, refit_error *error)
{
    rft_assembly *assembly = rft_calloc(1, sizeof *assembly);
    if (assembly != NULL) {
        assembly->manifest = manifest;
        assembly->sums = rft_calloc(manifest->count, sizeof *assembly->sums);
        assembly->taken = rft_calloc((size_t)manifest->frame_count + 1, sizeof *assembly->taken);
        assembly->plan = rft_calloc(most_blocks(manifest), sizeof *assembly->plan);
        assembly->block = rft_calloc(1, most_bytes(manifest));
        if (assembly->block != NULL && assembly->sums != NULL && assembly->taken != NULL &&
            assembly->plan != NULL) {
            rft_assembly_reset(assembly, staging, base);
            *out = assembly;
            return REFIT_OK;
        }
    }
    rft_assembly_close(assembly);
    return rft_fail(error, REFIT_ERR_HOST_MEMORY, "no memory to assemble %u frames",
                    manifest->frame_count);
}

void rft_assembly_close(rft_assembly *assembly)
{
    if (assembly == NULL) return;
    rft_free(assembly->sums);
    rft_free(assembly->taken);
    rft_free(assembly->plan);
    rft_free(assembly->block);
    rft_packer_close(assembly->packer);
    rft_free(assembly);
}

void rft_assembly_reset(rft_assembly *assembly, unsigned char *staging, const unsigned char *base)
{
    const rft_manifest *manifest = assembly->manifest;
    assembly->staging = staging;
    assembly->base = base;
    assembly->taken_count = 0;
    memset(assembly->sums, 0, manifest->count * sizeof *assembly->sums);
    memset(assembly->taken, 0, manifest->frame_count * sizeof *assembly->taken);
}

/* ---- One frame ---- */

static uint32_t count_mode(const unsigned char *modes, uint32_t blocks, rft_block_mode mode)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < blocks; i++)
        count += modes[i] == mode ? 1 : 0;
    return count;
}

static refit_status check_modes(const rft_assembly *assembly, const rft_frame_span *span,
                                rft_view modes, refit_error *error)
{
    RFT_REFUSE_IF(modes.count != span->blocks, error, REFIT_ERR_PROTOCOL,
                  "a frame of %u blocks came with %zu block modes", span->blocks, modes.count);
    const unsigned char *mode = modes.data;
    for (uint32_t i = 0; i < span->blocks; i++) {
        RFT_REFUSE_IF(mode[i] > RFT_BLOCK_SPARSE, error, REFIT_ERR_PROTOCOL,
                      "there is no block mode %u", mode[i]);
        RFT_REFUSE_IF(mode[i] != RFT_BLOCK_DENSE && assembly->base == NULL, error,
                      REFIT_ERR_PROTOCOL,
                      "a block is said to build on a base version, and there is none");
    }
    return REFIT_OK;
}

/* ---- What the payload holds */

/* All dense: the span as it lies in the store. */
static bool plan_whole(rft_assembly *assembly, const rft_frame_span *span, rft_view payload)
{
    const rft_block *blocks = &assembly->manifest->blocks[span->first_block];
    for (uint32_t i = 0; i < span->blocks && payload.count == span->bytes; i++) {
        assembly->plan[i].from =
            (const unsigned char *)payload.data + (blocks[i].offset - span->offset);
    }
    return payload.count == span->bytes;
}

/* Whether the block's bytes or planes lie at `at`, before `end`; then at is behind them. */
static bool plan_block(const rft_assembly *assembly, const rft_block *block, rft_block_mode mode,
                       const unsigned char **entry, const unsigned char **at,
                       const unsigned char *end, block_plan *plan)
{
    size_t room = (size_t)(end - *at), bytes = 0;
    if (mode == RFT_BLOCK_DENSE) {
        bytes = block->bytes;
    } else if (mode == RFT_BLOCK_SPARSE) {
        if (!rft_sparse_read(assembly->manifest, block, *entry, *at, room, &plan->sparse))
            return false;
        *entry += RFT_SPARSE_ENTRY_BYTES;
        bytes = plan->sparse.delta.total;
    }
    if (bytes > room) return false;
    plan->from = *at;
    *at += bytes;
    return true;
}

/* The directory of the sparse blocks, then block after block; all of it. */
static bool plan_gathered(rft_assembly *assembly, const rft_frame_span *span,
                          const unsigned char *modes, rft_view payload)
{
    const rft_block *blocks = &assembly->manifest->blocks[span->first_block];
    size_t directory =
        (size_t)count_mode(modes, span->blocks, RFT_BLOCK_SPARSE) * RFT_SPARSE_ENTRY_BYTES;
    if (directory > payload.count || payload.count > span->bytes) return false;
    if (payload.count == 0) return count_mode(modes, span->blocks, RFT_BLOCK_SAME) == span->blocks;
    const unsigned char *entry = payload.data, *at = entry + directory;
    const unsigned char *end = entry + payload.count;
    for (uint32_t i = 0; i < span->blocks; i++) {
        if (!plan_block(assembly, &blocks[i], modes[i], &entry, &at, end, &assembly->plan[i]))
            return false;
    }
    return at == end;
}

/* Unpacks what is packed and sound. */
static refit_status unpack(rft_assembly *assembly, const rft_frame_span *span,
                           const rft_message *frame, rft_view *payload, refit_error *error)
{
    if (frame->as.frame.planes.count == 0) return REFIT_OK;
    RFT_REFUSE_IF(XXH3_64bits(payload->data, payload->count) != frame->as.frame.hash, error,
                  REFIT_ERR_CORRUPT, "frame %u was damaged on its way: its hash does not match",
                  frame->as.frame.sequence);
    if (assembly->packer == NULL) RFT_TRY(rft_packer_open(1, &assembly->packer, error));
    return rft_packer_unpack(assembly->packer, assembly->manifest, span, frame->as.frame.modes.data,
                             frame->as.frame.planes, *payload, payload, error);
}

/* The entries of damaged sparse blocks may say anything: then the damage is the finding. */
static refit_status check_payload(rft_assembly *assembly, const rft_frame_span *span,
                                  const rft_message *frame, rft_view payload, refit_error *error)
{
    const unsigned char *modes = frame->as.frame.modes.data;
    bool whole = count_mode(modes, span->blocks, RFT_BLOCK_DENSE) == span->blocks;
    bool sparse = count_mode(modes, span->blocks, RFT_BLOCK_SPARSE) > 0;
    bool fits =
        whole ? plan_whole(assembly, span, payload) : plan_gathered(assembly, span, modes, payload);
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

static refit_status apply_sparse(rft_assembly *assembly, const rft_block *block, block_plan *plan,
                                 refit_error *error)
{
    unsigned char *to = assembly->block;
    const char *name = assembly->manifest->tensors[block->tensor].name;
    uint64_t before = rft_digest_copy_part(to, assembly->base + block->offset, block->bytes,
                                           block->tensor_offset);
    RFT_REFUSE_IF(before != plan->sparse.before, error, REFIT_ERR_STALE,
                  "a change of tensor '%.80s' belongs to other bytes than this worker holds", name);
    RFT_REFUSE_IF(!rft_delta_apply(plan->sparse.shape, &plan->sparse.delta, plan->from, to), error,
                  REFIT_ERR_PROTOCOL, "a change of tensor '%.80s' is malformed", name);
    plan->part = rft_digest_copy_piece(assembly->staging + block->offset, to, block->bytes,
                                       block->tensor_offset);
    RFT_REFUSE_IF(plan->part != plan->sparse.after, error, REFIT_ERR_CORRUPT,
                  "a change of tensor '%.80s' does not give the bytes that it should", name);
    return REFIT_OK;
}

static refit_status place_blocks(rft_assembly *assembly, const rft_frame_span *span,
                                 const unsigned char *modes, refit_error *error)
{
    const rft_block *blocks = &assembly->manifest->blocks[span->first_block];
    for (uint32_t i = 0; i < span->blocks; i++) {
        const rft_block *block = &blocks[i];
        block_plan *plan = &assembly->plan[i];
        if (modes[i] == RFT_BLOCK_SPARSE) {
            RFT_TRY(apply_sparse(assembly, block, plan, error));
            continue;
        }
        bool same = modes[i] == RFT_BLOCK_SAME;
        plan->part = rft_digest_copy_part(assembly->staging + block->offset,
                                          same ? assembly->base + block->offset : plan->from,
                                          block->bytes, block->tensor_offset);
    }
    for (uint32_t i = 0; i < span->blocks; i++)
        assembly->sums[blocks[i].tensor] += assembly->plan[i].part;
    return REFIT_OK;
}

refit_status rft_assembly_take(rft_assembly *assembly, const rft_message *frame, rft_view payload,
                               refit_error *error)
{
    const rft_manifest *manifest = assembly->manifest;
    uint32_t sequence = frame->as.frame.sequence;
    RFT_REFUSE_IF(sequence >= manifest->frame_count, error, REFIT_ERR_PROTOCOL,
                  "frame %u of a version that has %u", sequence, manifest->frame_count);
    if (assembly->taken[sequence]) return REFIT_OK;
    const rft_frame_span *span = &manifest->frames[sequence];
    RFT_TRY(check_modes(assembly, span, frame->as.frame.modes, error));
    RFT_TRY(unpack(assembly, span, frame, &payload, error));
    RFT_TRY(check_payload(assembly, span, frame, payload, error));
    RFT_TRY(place_blocks(assembly, span, frame->as.frame.modes.data, error));
    assembly->taken[sequence] = true;
    assembly->taken_count++;
    return REFIT_OK;
}

uint32_t rft_assembly_taken(const rft_assembly *assembly)
{
    return assembly->taken_count;
}

bool rft_assembly_complete(const rft_assembly *assembly)
{
    return assembly->taken_count == assembly->manifest->frame_count;
}

uint32_t rft_assembly_missing(const rft_assembly *assembly, uint32_t from, uint32_t before)
{
    for (uint32_t i = from; i < before && i < assembly->manifest->frame_count; i++) {
        if (!assembly->taken[i]) return i;
    }
    return UINT32_MAX;
}

refit_status rft_assembly_verify(const rft_assembly *assembly, const rft_message *seal,
                                 refit_error *error)
{
    RFT_REFUSE_IF(!rft_assembly_complete(assembly), error, REFIT_ERR_STATE,
                  "%u of %u frames are in: verify when all are", assembly->taken_count,
                  assembly->manifest->frame_count);
    return rft_seal_check(assembly->manifest, assembly->sums, seal, error);
}
