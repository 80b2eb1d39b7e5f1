/*
 * Pure arithmetic: tensors to offsets, tensors to blocks, blocks to frames.
 *
 *     store    [ tensor 0      |pad][ tensor 1 ][ tensor 2            |pad]
 *     blocks   [ 0  ][ 1  ][ 2]     [ 3        ][ 4  ][ 5  ][ 6  ][ 7]
 *     frames   [ 0                            ][ 1                    ]
 *
 * Everything is checked against limits.version_bytes, limits.blocks and, where a version is to be
 * held, the memory that the machine has before memory is reserved,
 * and both ends get the same numbers from the same list, so neither is sent.
 */
#include "wire/cut.h"

#include "base/alloc.h"
#include "base/checked.h"

static refit_status refuse_size(const rft_manifest_rules *rules)
{
    RFT_REFUSE_IF(rules->limits->memory_bytes != 0 &&
                      rules->limits->memory_bytes < rules->limits->version_bytes,
                  rules->error, REFIT_ERR_HOST_MEMORY,
                  "the tensors take more memory than this machine has, %llu bytes",
                  (unsigned long long)rules->limits->memory_bytes);
    return rft_fail(rules->error, REFIT_ERR_LIMIT,
                    "the tensors take more than limits.version_bytes allows: %llu",
                    (unsigned long long)rules->limits->version_bytes);
}

static refit_status place_original(rft_manifest *manifest, rft_manifest_tensor *tensor,
                                   const rft_manifest_rules *rules)
{
    uint64_t end, most = rules->limits->version_bytes;
    if (rules->limits->memory_bytes != 0) most = rft_min_u64(most, rules->limits->memory_bytes);
    bool fits = rft_add_u64(manifest->store_bytes, tensor->bytes, &end) &&
                rft_align_u64(end, RFT_TENSOR_ALIGNMENT, &end) && end <= most;
    if (!fits) return refuse_size(rules);
    tensor->offset = manifest->store_bytes;
    tensor->block_bytes = (uint64_t)RFT_BLOCK_ELEMENTS / 8 * refit_dtype_bits(tensor->dtype);
    manifest->store_bytes = end;
    manifest->payload_bytes += tensor->bytes;
    manifest->originals++;
    return REFIT_OK;
}

static refit_status number_blocks(rft_manifest *manifest, rft_manifest_tensor *tensor,
                                  const rft_manifest_rules *rules)
{
    uint64_t whole = tensor->bytes / tensor->block_bytes;
    uint64_t blocks = whole + (tensor->bytes % tensor->block_bytes != 0 ? 1 : 0);
    bool fits = blocks <= rules->limits->blocks - manifest->block_count;
    RFT_REFUSE_IF(!fits && rules->limits->blocks_told, rules->error, rules->refusal,
                  "the tensors make more blocks than the %u that there are", rules->limits->blocks);
    RFT_REFUSE_IF(!fits, rules->error, REFIT_ERR_LIMIT,
                  "the tensors make more blocks than limits.blocks allows: %u",
                  rules->limits->blocks);
    tensor->first_block = manifest->block_count;
    tensor->blocks = (uint32_t)blocks;
    manifest->block_count += tensor->blocks;
    return REFIT_OK;
}

static refit_status place_tensors(rft_manifest *manifest, const rft_manifest_rules *rules)
{
    for (uint32_t i = 0; i < manifest->count; i++) {
        rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        RFT_TRY(place_original(manifest, tensor, rules));
        RFT_TRY(number_blocks(manifest, tensor, rules));
    }
    for (uint32_t i = 0; i < manifest->count; i++) {
        rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of == REFIT_NO_ALIAS) continue;
        tensor->offset = manifest->tensors[tensor->alias_of].offset;
        tensor->block_bytes = manifest->tensors[tensor->alias_of].block_bytes;
    }
    manifest->store_bytes = rft_max_u64(manifest->store_bytes, RFT_TENSOR_ALIGNMENT);
    return REFIT_OK;
}

static void cut_tensor(rft_manifest *manifest, uint32_t index)
{
    const rft_manifest_tensor *tensor = &manifest->tensors[index];
    for (uint32_t i = 0; i < tensor->blocks; i++) {
        uint64_t start = i * tensor->block_bytes;
        manifest->blocks[tensor->first_block + i] = (rft_block){
            .tensor = index,
            .offset = tensor->offset + start,
            .bytes = rft_min_u64(tensor->block_bytes, tensor->bytes - start),
            .tensor_offset = start,
        };
    }
}

/* At least one element: a manifest of empty tensors has no blocks and no frames. */
static void *reserve(uint32_t count, size_t bytes)
{
    return rft_calloc(count == 0 ? 1 : count, bytes);
}

static refit_status cut_blocks(rft_manifest *manifest, const rft_manifest_rules *rules)
{
    manifest->blocks = reserve(manifest->block_count, sizeof *manifest->blocks);
    RFT_REFUSE_IF(manifest->blocks == NULL, rules->error, REFIT_ERR_HOST_MEMORY,
                  "no memory for a manifest of %u blocks", manifest->block_count);
    for (uint32_t i = 0; i < manifest->count; i++)
        cut_tensor(manifest, i);
    return REFIT_OK;
}

/* The bytes from block `first` to the end of block `last`, padding between tensors included. */
static uint64_t span_bytes(const rft_manifest *manifest, uint32_t first, uint32_t last)
{
    const rft_block *end = &manifest->blocks[last];
    return end->offset + end->bytes - manifest->blocks[first].offset;
}

static rft_frame_span frame_from(const rft_manifest *manifest, uint32_t first, uint64_t frame_bytes)
{
    uint32_t last = first;
    while (last + 1 < manifest->block_count && last + 1 - first < RFT_FRAME_BLOCKS &&
           span_bytes(manifest, first, last + 1) <= frame_bytes)
        last++;
    return (rft_frame_span){
        .offset = manifest->blocks[first].offset,
        .bytes = span_bytes(manifest, first, last),
        .first_block = first,
        .blocks = last - first + 1,
    };
}

/* Counts the frames, and writes them where there is room for them. */
static uint32_t list_frames(const rft_manifest *manifest, uint64_t frame_bytes,
                            rft_frame_span *frames)
{
    uint32_t count = 0;
    for (uint32_t first = 0; first < manifest->block_count; count++) {
        rft_frame_span frame = frame_from(manifest, first, frame_bytes);
        if (frames != NULL) frames[count] = frame;
        first += frame.blocks;
    }
    return count;
}

static refit_status cut_frames(rft_manifest *manifest, const rft_manifest_rules *rules)
{
    manifest->frame_count = list_frames(manifest, rules->frame_bytes, NULL);
    manifest->frames = reserve(manifest->frame_count, sizeof *manifest->frames);
    RFT_REFUSE_IF(manifest->frames == NULL, rules->error, REFIT_ERR_HOST_MEMORY,
                  "no memory for a manifest of %u frames", manifest->frame_count);
    list_frames(manifest, rules->frame_bytes, manifest->frames);
    return REFIT_OK;
}

/* A frame larger than asked for is a single block; it must still be one that the other end takes.
 */
static refit_status check_frames(const rft_manifest *manifest, const rft_manifest_rules *rules)
{
    for (uint32_t i = 0; i < manifest->frame_count; i++) {
        RFT_REFUSE_IF(manifest->frames[i].bytes > rules->limits->frame_bytes, rules->error,
                      REFIT_ERR_LIMIT, "a block of %llu bytes; limits.frame_bytes allows %llu",
                      (unsigned long long)manifest->frames[i].bytes,
                      (unsigned long long)rules->limits->frame_bytes);
    }
    return REFIT_OK;
}

refit_status rft_manifest_cut(rft_manifest *manifest, const rft_manifest_rules *rules)
{
    RFT_TRY(place_tensors(manifest, rules));
    RFT_TRY(cut_blocks(manifest, rules));
    RFT_TRY(cut_frames(manifest, rules));
    return check_frames(manifest, rules);
}
