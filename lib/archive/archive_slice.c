/*
 * Cutting one frame out of a manifest: its blocks, moved to the beginning, and the tensors that
 * they belong to, which are neighbours.
 */
#include "archive/archive_slice.h"

void rft_archive_slice_cut(rft_archive_slice *slice, const rft_manifest *manifest,
                           uint32_t sequence)
{
    const rft_frame_span *span = &manifest->frames[sequence];
    const rft_block *blocks = &manifest->blocks[span->first_block];
    slice->tensor = blocks[0].tensor;
    slice->offset = span->offset;
    for (uint32_t i = 0; i < span->blocks; i++) {
        slice->blocks[i] = blocks[i];
        slice->blocks[i].tensor -= slice->tensor;
        slice->blocks[i].offset -= slice->offset;
    }
    slice->frame = (rft_frame_span){.bytes = span->bytes, .blocks = span->blocks};
    slice->manifest = (rft_manifest){
        .tensors = manifest->tensors + slice->tensor,
        .count = blocks[span->blocks - 1].tensor - slice->tensor + 1,
        .blocks = slice->blocks,
        .block_count = span->blocks,
        .frames = &slice->frame,
        .frame_count = 1,
        .store_bytes = span->bytes,
    };
}

uint64_t rft_archive_slice_most(const rft_manifest *manifest)
{
    uint64_t most = 1;
    for (uint32_t i = 0; i < manifest->frame_count; i++) {
        if (manifest->frames[i].bytes > most) most = manifest->frames[i].bytes;
    }
    return most;
}
