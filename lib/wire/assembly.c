/*
 * Frames to a version: which frames are in, and the sum of each tensor's digest so far.
 *
 * A frame is judged before a byte of the staging image changes: its place, its block modes, its
 * length, then its hash. Then each block is copied and digested in the same pass; since a digest is
 * a sum over a tensor's words, blocks may come in any order. Padding inside a dense frame travels
 * but belongs to no tensor, so it is neither copied nor digested. All memory is taken by open.
 */
#include "wire/assembly.h"

#include <string.h>

#include <xxhash.h>

#include "base/alloc.h"
#include "kernels/digest.h"
#include "wire/seal.h"

struct rft_assembly {
    const rft_manifest *manifest;
    unsigned char *staging;
    const unsigned char *base; /* NULL: none */
    uint64_t *sums;            /* per tensor; aliases stay 0 */
    bool *taken;               /* per frame */
    uint32_t taken_count;
};

refit_status rft_assembly_open(const rft_manifest *manifest, unsigned char *staging,
                               const unsigned char *base, rft_assembly **out, refit_error *error)
{
    rft_assembly *assembly = rft_calloc(1, sizeof *assembly);
    if (assembly != NULL) {
        assembly->manifest = manifest;
        assembly->sums = rft_calloc(manifest->count, sizeof *assembly->sums);
        assembly->taken = rft_calloc((size_t)manifest->frame_count + 1, sizeof *assembly->taken);
        if (assembly->sums != NULL && assembly->taken != NULL) {
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

static uint32_t count_same(const unsigned char *modes, uint32_t blocks)
{
    uint32_t same = 0;
    for (uint32_t i = 0; i < blocks; i++)
        same += modes[i] == RFT_BLOCK_SAME ? 1 : 0;
    return same;
}

static refit_status check_modes(const rft_assembly *assembly, const rft_frame_span *span,
                                rft_view modes, refit_error *error)
{
    RFT_REFUSE_IF(modes.count != span->blocks, error, REFIT_ERR_PROTOCOL,
                  "a frame of %u blocks came with %zu block modes", span->blocks, modes.count);
    const unsigned char *mode = modes.data;
    for (uint32_t i = 0; i < span->blocks; i++) {
        RFT_REFUSE_IF(mode[i] > RFT_BLOCK_SAME, error, REFIT_ERR_PROTOCOL,
                      "there is no block mode %u", mode[i]);
        RFT_REFUSE_IF(mode[i] == RFT_BLOCK_SAME && assembly->base == NULL, error,
                      REFIT_ERR_PROTOCOL,
                      "a block is said to equal a base version, and there is none");
    }
    return REFIT_OK;
}

/* All dense: the span as it lies in the store; else the dense blocks, one behind the other. */
static uint64_t payload_bytes(const rft_manifest *manifest, const rft_frame_span *span,
                              const unsigned char *modes)
{
    if (count_same(modes, span->blocks) == 0) return span->bytes;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < span->blocks; i++) {
        if (modes[i] == RFT_BLOCK_DENSE) bytes += manifest->blocks[span->first_block + i].bytes;
    }
    return bytes;
}

static refit_status check_payload(const rft_manifest *manifest, const rft_frame_span *span,
                                  const rft_message *frame, rft_view payload, refit_error *error)
{
    uint64_t expected = payload_bytes(manifest, span, frame->as.frame.modes.data);
    RFT_REFUSE_IF(payload.count != expected, error, REFIT_ERR_PROTOCOL,
                  "frame %u has %zu bytes of payload; its blocks take %llu",
                  frame->as.frame.sequence, payload.count, (unsigned long long)expected);
    RFT_REFUSE_IF(XXH3_64bits(payload.data, payload.count) != frame->as.frame.hash, error,
                  REFIT_ERR_CORRUPT, "frame %u was damaged on its way: its hash does not match",
                  frame->as.frame.sequence);
    return REFIT_OK;
}

static void place_block(rft_assembly *assembly, const rft_block *block, const unsigned char *from)
{
    assembly->sums[block->tensor] += rft_digest_copy_part(assembly->staging + block->offset, from,
                                                          block->bytes, block->tensor_offset);
}

static void place_blocks(rft_assembly *assembly, const rft_frame_span *span,
                         const unsigned char *modes, const unsigned char *payload)
{
    const rft_block *blocks = &assembly->manifest->blocks[span->first_block];
    bool dense = count_same(modes, span->blocks) == 0;
    const unsigned char *next = payload; /* where the next gathered block starts */
    for (uint32_t i = 0; i < span->blocks; i++) {
        const rft_block *block = &blocks[i];
        if (modes[i] == RFT_BLOCK_SAME) {
            place_block(assembly, block, assembly->base + block->offset);
            continue;
        }
        place_block(assembly, block, dense ? payload + (block->offset - span->offset) : next);
        next += block->bytes;
    }
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
    RFT_TRY(check_payload(manifest, span, frame, payload, error));
    place_blocks(assembly, span, frame->as.frame.modes.data, payload.data);
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
