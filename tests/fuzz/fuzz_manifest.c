/*
 * Any bytes as a manifest: two bytes for the size of a frame, then the list. What is accepted must
 * be cut without a gap, find all its names, and be accepted when its own description is declared.
 */
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "wire/manifest.h"

static const rft_limits limits = {
    .tensors = 64,
    .rank = 8,
    .name_bytes = 64,
    .message_bytes = 4096,
    .manifest_bytes = 1 << 16,
    .frame_bytes = 1 << 20,
    .version_bytes = 1 << 26,
    .blocks = 1 << 14,
    .window = 64,
};

static void check_blocks(const rft_manifest *manifest)
{
    uint64_t covered = 0;
    uint64_t end = 0;
    for (uint32_t i = 0; i < manifest->block_count; i++) {
        const rft_block *block = &manifest->blocks[i];
        FUZZ_REQUIRE(block->tensor < manifest->count && block->offset >= end);
        end = block->offset + block->bytes;
        covered += block->bytes;
    }
    FUZZ_REQUIRE(end <= manifest->store_bytes && covered == manifest->payload_bytes);
    FUZZ_REQUIRE(manifest->store_bytes <= limits.version_bytes);
    FUZZ_REQUIRE(manifest->block_count <= limits.blocks);
}

static void check_frames(const rft_manifest *manifest)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < manifest->frame_count; i++) {
        const rft_frame_span *frame = &manifest->frames[i];
        FUZZ_REQUIRE(frame->first_block == next && frame->blocks > 0);
        FUZZ_REQUIRE(frame->bytes <= limits.frame_bytes);
        next += frame->blocks;
    }
    FUZZ_REQUIRE(next == manifest->block_count);
}

static void declare_again(const rft_manifest *manifest, uint64_t frame_bytes)
{
    refit_tensor *tensors = calloc(manifest->count, sizeof *tensors);
    FUZZ_REQUIRE(tensors != NULL);
    for (uint32_t i = 0; i < manifest->count; i++) {
        rft_manifest_describe(manifest, i, &tensors[i]);
        FUZZ_REQUIRE(rft_manifest_find(manifest, tensors[i].name) == i);
    }
    rft_manifest *again;
    FUZZ_REQUIRE(rft_manifest_open(tensors, manifest->count, frame_bytes, &limits, &again, NULL) ==
                 REFIT_OK);
    FUZZ_REQUIRE(again->store_bytes == manifest->store_bytes);
    FUZZ_REQUIRE(again->block_count == manifest->block_count);
    FUZZ_REQUIRE(again->frame_count == manifest->frame_count);
    rft_manifest_close(again);
    free(tensors);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2) return 0;
    uint64_t frame_bytes = 1 + 16 * (uint64_t)(data[0] | data[1] << 8);
    rft_manifest *manifest;
    refit_error error;
    refit_status status = rft_manifest_decode((rft_view){data + 2, size - 2}, frame_bytes, &limits,
                                              &manifest, &error);
    if (status != REFIT_OK) {
        FUZZ_REQUIRE(status == REFIT_ERR_PROTOCOL || status == REFIT_ERR_LIMIT);
        return 0;
    }
    check_blocks(manifest);
    check_frames(manifest);
    declare_again(manifest, frame_bytes);
    rft_manifest_close(manifest);
    fuzz_taken++;
    return 0;
}
