/*
 * Reading the frames of an archive's file.
 *
 * A frame is applied in a buffer of its own (wire/assembly, over a slice of the base) and then
 * takes its place in the image: one image suffices for a chain of any length. The modes of blocks
 * are counted, tensor by tensor, against what the file says of its changes, so that what it says
 * about itself is what it holds. Format 1 says nothing of tensors: there the blocks are asked.
 */
#include <string.h>

#include <xxhash.h>

#include "archive/archive_disk.h"
#include "archive/archive_reader.h"
#include "base/alloc.h"
#include "wire/sparse.h"

static refit_status take_memory(rft_archive_reader *reader, refit_error *error)
{
    uint64_t most = rft_archive_slice_most(reader->manifest);
    reader->slice = rft_calloc(1, sizeof *reader->slice);
    reader->begin =
        rft_calloc(RFT_ARCHIVE_FRAME_BYTES + RFT_FRAME_BLOCKS + RFT_ARCHIVE_HASH_BYTES, 1);
    reader->payload = rft_calloc((size_t)most, 1);
    reader->staging = rft_calloc((size_t)most, 1);
    reader->seen = rft_calloc((size_t)reader->manifest->count + 1, sizeof *reader->seen);
    bool all = reader->slice != NULL && reader->begin != NULL && reader->payload != NULL &&
               reader->staging != NULL && reader->seen != NULL;
    RFT_REFUSE_IF(!all, error, REFIT_ERR_HOST_MEMORY, "no memory for a frame of %llu bytes",
                  (unsigned long long)most);
    return REFIT_OK;
}

/* Beginning, modes and hash of the frame at reader->at, which moves behind them. */
static refit_status read_begin(rft_archive_reader *reader, uint32_t sequence,
                               rft_archive_frame *frame, refit_error *error)
{
    const rft_frame_span *span = &reader->manifest->frames[sequence];
    size_t hashed = rft_archive_frame_bytes(&reader->header) + span->blocks;
    RFT_TRY(rft_disk_read(reader->file, reader->begin, hashed + RFT_ARCHIVE_HASH_BYTES, reader->at,
                          error));
    RFT_REFUSE_IF(rft_get_u64(reader->begin + hashed) != XXH3_64bits(reader->begin, hashed), error,
                  REFIT_ERR_CORRUPT, "frame %u is damaged: the hash of its head does not match",
                  sequence);
    *frame = rft_archive_frame_decode(&reader->header, reader->begin);
    RFT_REFUSE_IF(frame->sequence != sequence || frame->blocks != span->blocks ||
                      frame->payload_bytes > span->bytes,
                  error, REFIT_ERR_CORRUPT, "frame %u is not the one that should be there",
                  sequence);
    reader->at += hashed + RFT_ARCHIVE_HASH_BYTES;
    return REFIT_OK;
}

static refit_status read_frame(rft_archive_reader *reader, uint32_t sequence,
                               rft_archive_frame *frame, refit_error *error)
{
    RFT_TRY(read_begin(reader, sequence, frame, error));
    size_t bytes = (size_t)frame->payload_bytes;
    RFT_TRY(rft_disk_read(reader->file, reader->payload, bytes, reader->at, error));
    RFT_REFUSE_IF(XXH3_64bits(reader->payload, bytes) != frame->payload_hash, error,
                  REFIT_ERR_CORRUPT, "frame %u is damaged: its hash does not match", sequence);
    reader->at += bytes;
    return REFIT_OK;
}

static const unsigned char *modes_of(const rft_archive_reader *reader)
{
    return reader->begin + rft_archive_frame_bytes(&reader->header);
}

static refit_status unpack(rft_archive_reader *reader, const rft_archive_frame *frame,
                           rft_view *payload, refit_error *error)
{
    const rft_view planes = {frame->planes, sizeof frame->planes};
    if (reader->packer == NULL) RFT_TRY(rft_packer_open(1, &reader->packer, error));
    return rft_packer_unpack(reader->packer, &reader->slice->manifest, &reader->slice->frame,
                             modes_of(reader), planes, *payload, payload, error);
}

/* Dense blocks that were packed: one behind the other, as long as they must be. */
static void place_dense(const rft_archive_slice *slice, const unsigned char *from,
                        unsigned char *place)
{
    for (uint32_t i = 0; i < slice->frame.blocks; i++) {
        const rft_block *block = &slice->blocks[i];
        memcpy(place + block->offset, from, (size_t)block->bytes);
        from += block->bytes;
    }
}

/* Over the base's bytes, then to their place. */
static refit_status assemble(rft_archive_reader *reader, uint64_t hash, rft_view payload,
                             unsigned char *place, refit_error *error)
{
    const rft_archive_slice *slice = reader->slice;
    rft_message message = {.kind = RFT_FRAME};
    message.as.frame.hash = hash;
    message.as.frame.modes = (rft_view){modes_of(reader), slice->frame.blocks};
    rft_assembly *assembly;
    RFT_TRY(rft_assembly_open(&slice->manifest, reader->staging,
                              reader->header.base == 0 ? NULL : place, &assembly, error));
    refit_status status = rft_assembly_take(assembly, &message, payload, error);
    rft_assembly_close(assembly);
    RFT_TRY(status);
    for (uint32_t i = 0; i < slice->frame.blocks; i++) {
        const rft_block *block = &slice->blocks[i];
        memcpy(place + block->offset, reader->staging + block->offset, (size_t)block->bytes);
    }
    return REFIT_OK;
}

static bool is_dense(const unsigned char *modes, uint32_t blocks)
{
    for (uint32_t i = 0; i < blocks; i++) {
        if (modes[i] != RFT_BLOCK_DENSE) return false;
    }
    return true;
}

static refit_status apply_frame(rft_archive_reader *reader, const rft_archive_frame *frame,
                                unsigned char *image, refit_error *error)
{
    rft_archive_slice_cut(reader->slice, reader->manifest, frame->sequence);
    unsigned char *place = image + reader->slice->offset;
    rft_view payload = {reader->payload, (size_t)frame->payload_bytes};
    if (!frame->packed) return assemble(reader, frame->payload_hash, payload, place, error);
    RFT_TRY(unpack(reader, frame, &payload, error));
    if (!is_dense(modes_of(reader), frame->blocks)) {
        const uint64_t hash = XXH3_64bits(payload.data, payload.count);
        return assemble(reader, hash, payload, place, error);
    }
    place_dense(reader->slice, payload.data, place);
    return REFIT_OK;
}

/* Format 1 does not say how many elements changed: `entries` does for sparse blocks (NULL: that
 * cannot be seen), and nobody for dense blocks of a delta. */
static void count_changed(const rft_archive_reader *reader, rft_block_mode mode,
                          const unsigned char **entry, rft_archive_change *seen)
{
    uint32_t changed = 0, escapes = 0;
    if (reader->header.base == 0 || seen->changed == REFIT_CHANGED_UNKNOWN) return;
    if (mode == RFT_BLOCK_SPARSE && *entry != NULL) {
        rft_sparse_read_counts(*entry, &changed, &escapes);
        *entry += RFT_SPARSE_ENTRY_BYTES;
        seen->changed += changed;
    } else if (mode != RFT_BLOCK_SAME) {
        seen->changed = REFIT_CHANGED_UNKNOWN;
    }
}

static refit_status count_blocks(rft_archive_reader *reader, const rft_archive_frame *frame,
                                 refit_error *error)
{
    const rft_frame_span *span = &reader->manifest->frames[frame->sequence];
    const unsigned char *modes = modes_of(reader), *entry = reader->payload;
    uint64_t directory = 0;
    for (uint32_t i = 0; i < span->blocks; i++)
        directory += modes[i] == RFT_BLOCK_SPARSE ? RFT_SPARSE_ENTRY_BYTES : 0;
    if (directory > frame->payload_bytes) entry = NULL;
    for (uint32_t i = 0; i < span->blocks; i++) {
        rft_archive_change *seen =
            &reader->seen[reader->manifest->blocks[span->first_block + i].tensor];
        RFT_REFUSE_IF(modes[i] > RFT_BLOCK_SPARSE, error, REFIT_ERR_UNSUPPORTED,
                      "there is no block mode %u", modes[i]);
        seen->same += modes[i] == RFT_BLOCK_SAME;
        seen->sparse += modes[i] == RFT_BLOCK_SPARSE;
        seen->dense += modes[i] == RFT_BLOCK_DENSE;
        if (reader->header.format == 1)
            count_changed(reader, (rft_block_mode)modes[i], &entry, seen);
    }
    reader->packed += frame->packed;
    return REFIT_OK;
}

/* Whether the tensors' blocks are those that the file speaks of. */
static bool has_changes(const rft_archive_reader *reader)
{
    for (uint32_t i = 0; i < reader->manifest->count; i++) {
        const rft_archive_change *said = &reader->changes[i], *seen = &reader->seen[i];
        if (said->same != seen->same || said->sparse != seen->sparse || said->dense != seen->dense)
            return false;
    }
    return true;
}

/* Of format 1: what was seen is what there is to say. */
static bool take_seen(rft_archive_reader *reader)
{
    uint64_t same = 0, sparse = 0, dense = 0;
    for (uint32_t i = 0; i < reader->manifest->count; i++) {
        reader->changes[i] = reader->seen[i];
        if (reader->header.base == 0)
            reader->changes[i].changed = rft_archive_elements(reader->manifest, i);
        same += reader->seen[i].same;
        sparse += reader->seen[i].sparse;
        dense += reader->seen[i].dense;
    }
    const rft_archive_header *header = &reader->header;
    return same == header->same && sparse == header->sparse && dense == header->dense;
}

static refit_status check_end(rft_archive_reader *reader, refit_error *error)
{
    const rft_archive_header *header = &reader->header;
    RFT_REFUSE_IF(reader->at != header->file_bytes, error, REFIT_ERR_CORRUPT,
                  "there is something behind its last frame");
    bool fits = header->format == 1 ? take_seen(reader) : has_changes(reader);
    RFT_REFUSE_IF(!fits || reader->packed != header->packed, error, REFIT_ERR_CORRUPT,
                  "its blocks are not those of its header");
    return REFIT_OK;
}

refit_status rft_archive_reader_frames(rft_archive_reader *reader, unsigned char *image,
                                       refit_error *error)
{
    RFT_TRY(take_memory(reader, error));
    for (uint32_t i = 0; i < reader->manifest->frame_count; i++) {
        rft_archive_frame frame = {0};
        RFT_TRY(read_frame(reader, i, &frame, error));
        RFT_TRY(count_blocks(reader, &frame, error));
        if (image != NULL) RFT_TRY(apply_frame(reader, &frame, image, error));
    }
    return check_end(reader, error);
}
