/*
 * Writing one frame of a version.
 *
 * Its bytes are copied out of the caller's memory once, with their digest, before anything is made
 * of them: the file is what the digests speak of, even if that memory changed meanwhile, which the
 * caller then learns from the version's digest. What was written takes its place in the image, the
 * base of the next version, right away.
 */
#include <string.h>

#include <xxhash.h>

#include "archive/archive_disk.h"
#include "archive/archive_work.h"
#include "kernels/digest.h"
#include "wire/sparse.h"

/* Copies one block into the frame, and notes how it differs from the base. */
static void take_block(rft_archive_work *work, uint32_t index, bool anchor)
{
    refit_archive *archive = work->archive;
    rft_archive_slice *slice = archive->slice;
    const rft_block *block = &slice->blocks[index];
    uint32_t tensor = slice->tensor + block->tensor;
    const unsigned char *from = work->memory[tensor];
    unsigned char *to = archive->frame + block->offset;
    const unsigned char *before = archive->image + slice->offset + block->offset;
    size_t bytes = (size_t)block->bytes;
    const rft_delta_shape shape = rft_sparse_shape(&slice->manifest, block);
    archive->sums[tensor] +=
        rft_digest_copy_part(to, from + block->tensor_offset, bytes, block->tensor_offset);
    uint32_t changed = anchor ? shape.elements : rft_delta_count(shape, before, to);
    archive->same[index] = changed == 0;
    archive->changes[tensor].changed += changed;
    work->header->elements += shape.elements;
    work->header->changed += changed;
}

refit_status rft_archive_write_at_end(rft_archive_work *work, const void *bytes, size_t count)
{
    RFT_TRY(rft_disk_write(work->file, bytes, count, work->at, work->error));
    work->at += count;
    return REFIT_OK;
}

static void count_blocks(rft_archive_work *work, const rft_frame *frame)
{
    refit_archive *archive = work->archive;
    const rft_archive_slice *slice = archive->slice;
    for (uint32_t i = 0; i < slice->frame.blocks; i++) {
        rft_archive_change *change = &archive->changes[slice->tensor + slice->blocks[i].tensor];
        change->same += archive->modes.data[i] == RFT_BLOCK_SAME;
        change->sparse += archive->modes.data[i] == RFT_BLOCK_SPARSE;
        change->dense += archive->modes.data[i] == RFT_BLOCK_DENSE;
    }
    work->header->same += frame->counts.same;
    work->header->sparse += frame->counts.sparse;
    work->header->dense += frame->counts.dense;
    work->header->packed += frame->packed;
}

/* A frame that is dense all over: its blocks without what is between them. */
static refit_status pack_dense(refit_archive *archive, rft_frame *frame, refit_error *error)
{
    const rft_archive_slice *slice = archive->slice;
    rft_bytes *blocks = &archive->scratch; /* the payload is not in it */
    rft_view packed;
    rft_bytes_reset(blocks);
    RFT_TRY(rft_bytes_reserve(blocks, (size_t)slice->frame.bytes, error));
    for (uint32_t i = 0; i < slice->frame.blocks; i++) {
        const unsigned char *from = archive->frame + slice->blocks[i].offset;
        RFT_TRY(rft_bytes_append(blocks, from, (size_t)slice->blocks[i].bytes, error));
    }
    RFT_TRY(rft_packer_pack(archive->packer, &slice->manifest, &slice->frame, archive->modes.data,
                            rft_bytes_view(blocks), &packed, frame->planes, error));
    if (packed.count == 0) return REFIT_OK;
    frame->payload = packed;
    frame->packed = true;
    frame->hash = XXH3_64bits(packed.data, packed.count);
    return REFIT_OK;
}

static refit_status encode(refit_archive *archive, bool anchor, rft_frame *frame,
                           refit_error *error)
{
    rft_archive_slice *slice = archive->slice;
    const rft_frame_source source = {
        .image = archive->frame,
        .same = anchor ? NULL : archive->same,
        .base = anchor ? NULL : archive->image + slice->offset,
        .packer = archive->packer,
    };
    RFT_TRY(rft_frame_encode(&slice->manifest, 0, &source, &archive->modes, &archive->scratch,
                             frame, error));
    if (archive->packer == NULL || frame->counts.dense < slice->frame.blocks) return REFIT_OK;
    return pack_dense(archive, frame, error);
}

/* What stands before the payload. */
static refit_status write_begin(rft_archive_work *work, uint32_t sequence, const rft_frame *coded)
{
    unsigned char begin[RFT_ARCHIVE_FRAME_BYTES + RFT_FRAME_BLOCKS + RFT_ARCHIVE_HASH_BYTES];
    const rft_bytes *modes = &work->archive->modes;
    rft_archive_frame frame = {
        .sequence = sequence,
        .blocks = (uint32_t)modes->count,
        .payload_bytes = coded->payload.count,
        .payload_hash = coded->hash,
        .packed = coded->packed,
    };
    memcpy(frame.planes, coded->planes, sizeof frame.planes);
    size_t hashed = RFT_ARCHIVE_FRAME_BYTES + modes->count;
    rft_archive_frame_encode(&frame, begin);
    memcpy(begin + RFT_ARCHIVE_FRAME_BYTES, modes->data, modes->count);
    rft_put_u64(begin + hashed, XXH3_64bits(begin, hashed));
    return rft_archive_write_at_end(work, begin, hashed + RFT_ARCHIVE_HASH_BYTES);
}

refit_status rft_archive_write_frame(rft_archive_work *work, uint32_t sequence)
{
    refit_archive *archive = work->archive;
    rft_archive_slice *slice = archive->slice;
    bool anchor = work->header->base == 0;
    rft_archive_slice_cut(slice, archive->manifest, sequence);
    memset(archive->frame, 0, (size_t)slice->frame.bytes); /* between tensors, too */
    for (uint32_t i = 0; i < slice->frame.blocks; i++)
        take_block(work, i, anchor);
    rft_frame frame;
    RFT_TRY(encode(archive, anchor, &frame, work->error));
    count_blocks(work, &frame);
    RFT_TRY(write_begin(work, sequence, &frame));
    RFT_TRY(rft_archive_write_at_end(work, frame.payload.data, frame.payload.count));
    memcpy(archive->image + slice->offset, archive->frame, (size_t)slice->frame.bytes);
    return REFIT_OK;
}
