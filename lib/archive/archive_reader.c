/*
 * Reading one file of an archive.
 *
 *     open ─► header ─► lists ─► frame, frame, … ─► verify
 *
 * A frame is applied in a buffer of its own (wire/assembly, over a slice of the base) and then
 * takes its place in the image: one image suffices for a chain of any length. The modes of a frame
 * are counted against the header, so that what a file says about itself is what it holds.
 */
#include "archive/archive_reader.h"

#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "archive/archive_disk.h"
#include "base/alloc.h"

refit_status rft_archive_reader_open(int file, uint64_t bytes, const rft_limits *limits,
                                     rft_archive_reader *out, refit_error *error)
{
    unsigned char header[RFT_ARCHIVE_HEADER_BYTES];
    rft_archive_reader reader = {.file = file};
    refit_status status = bytes < sizeof header
                              ? rft_fail(error, REFIT_ERR_INVALID, "it is not a file of an archive")
                              : rft_disk_read(file, header, sizeof header, 0, error);
    if (status == REFIT_OK) {
        status = rft_archive_header_decode(header, bytes, limits, &reader.header, error);
    }
    if (status != REFIT_OK) {
        (void)close(file);
        return status;
    }
    *out = reader;
    return REFIT_OK;
}

static refit_status find(const rft_archive_folder *folder, const rft_archive_entry *entry,
                         const char *name, const rft_limits *limits, rft_archive_reader *out,
                         refit_error *error)
{
    int file;
    uint64_t bytes;
    rft_archive_reader reader;
    RFT_TRY(rft_disk_open(folder->dir, name, &file, &bytes, error));
    RFT_TRY(rft_archive_reader_open(file, bytes, limits, &reader, error));
    if (reader.header.epoch != entry->epoch || reader.header.version != entry->version) {
        rft_archive_reader_close(&reader);
        return rft_fail(error, REFIT_ERR_STALE,
                        "it holds version %llu of epoch %016llx, not what its name says",
                        (unsigned long long)reader.header.version,
                        (unsigned long long)reader.header.epoch);
    }
    *out = reader;
    return REFIT_OK;
}

refit_status rft_archive_reader_find(const rft_archive_folder *folder,
                                     const rft_archive_entry *entry, const rft_limits *limits,
                                     rft_archive_reader *out, refit_error *error)
{
    char name[RFT_ARCHIVE_NAME];
    rft_archive_entry_name(entry, name);
    return rft_disk_blame(error, find(folder, entry, name, limits, out, error), name);
}

void rft_archive_reader_close(rft_archive_reader *reader)
{
    (void)close(reader->file);
    rft_manifest_close(reader->manifest);
    rft_free(reader->digests);
    rft_free(reader->slice);
    rft_free(reader->begin);
    rft_free(reader->payload);
    rft_free(reader->staging);
}

/* ---- Lists ---- */

/* Memory for a section whose length was checked, and its bytes. */
static refit_status read_section(rft_archive_reader *reader, uint64_t bytes, unsigned char **out,
                                 refit_error *error)
{
    *out = rft_calloc((size_t)bytes + 1, 1);
    RFT_REFUSE_IF(*out == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a list of %llu bytes",
                  (unsigned long long)bytes);
    RFT_TRY(rft_disk_read(reader->file, *out, (size_t)bytes, reader->at, error));
    reader->at += bytes;
    return REFIT_OK;
}

static refit_status check_manifest(const rft_archive_header *header, const rft_manifest *manifest,
                                   refit_error *error)
{
    RFT_REFUSE_IF(manifest->count != header->tensors ||
                      manifest->payload_bytes != header->weight_bytes ||
                      manifest->frame_count != header->frames ||
                      (uint64_t)manifest->originals * 8 != header->digest_bytes,
                  error, REFIT_ERR_CORRUPT, "its tensors are not those of its header");
    return REFIT_OK;
}

/* Hashed first: what is damaged is not parsed. */
static refit_status read_manifest(rft_archive_reader *reader, const rft_limits *limits,
                                  refit_error *error)
{
    unsigned char *encoded = NULL;
    const rft_archive_header *header = &reader->header;
    refit_status status = read_section(reader, header->manifest_bytes, &encoded, error);
    rft_view view = {encoded, (size_t)header->manifest_bytes};
    if (status == REFIT_OK) {
        rft_digest128 digest = rft_digest128_of(view);
        status =
            rft_digest128_equal(&digest, &header->manifest)
                ? rft_manifest_decode(view, header->frame_bytes, limits, &reader->manifest, error)
                : rft_fail(error, REFIT_ERR_CORRUPT, "its list of tensors is damaged");
    }
    rft_free(encoded);
    RFT_TRY(status);
    return check_manifest(header, reader->manifest, error);
}

refit_status rft_archive_reader_lists(rft_archive_reader *reader, const rft_limits *limits,
                                      refit_error *error)
{
    reader->at = RFT_ARCHIVE_HEADER_BYTES;
    RFT_TRY(read_manifest(reader, limits, error));
    RFT_TRY(read_section(reader, reader->header.digest_bytes, &reader->digests, error));
    rft_view digests = {reader->digests, (size_t)reader->header.digest_bytes};
    rft_digest128 digest = rft_version_digest_encoded(reader->manifest, digests);
    RFT_REFUSE_IF(!rft_digest128_equal(&digest, &reader->header.digest), error, REFIT_ERR_CORRUPT,
                  "its digests are damaged");
    return REFIT_OK;
}

/* ---- Frames ---- */

static refit_status take_memory(rft_archive_reader *reader, refit_error *error)
{
    uint64_t most = rft_archive_slice_most(reader->manifest);
    reader->slice = rft_calloc(1, sizeof *reader->slice);
    reader->begin =
        rft_calloc(RFT_ARCHIVE_FRAME_BYTES + RFT_FRAME_BLOCKS + RFT_ARCHIVE_HASH_BYTES, 1);
    reader->payload = rft_calloc((size_t)most, 1);
    reader->staging = rft_calloc((size_t)most, 1);
    bool all = reader->slice != NULL && reader->begin != NULL && reader->payload != NULL &&
               reader->staging != NULL;
    RFT_REFUSE_IF(!all, error, REFIT_ERR_HOST_MEMORY, "no memory for a frame of %llu bytes",
                  (unsigned long long)most);
    return REFIT_OK;
}

/* Beginning, modes and hash of the frame at reader->at, which moves behind them. */
static refit_status read_begin(rft_archive_reader *reader, uint32_t sequence,
                               rft_archive_frame *frame, refit_error *error)
{
    const rft_frame_span *span = &reader->manifest->frames[sequence];
    size_t hashed = RFT_ARCHIVE_FRAME_BYTES + span->blocks;
    RFT_TRY(rft_disk_read(reader->file, reader->begin, hashed + RFT_ARCHIVE_HASH_BYTES, reader->at,
                          error));
    RFT_REFUSE_IF(rft_get_u64(reader->begin + hashed) != XXH3_64bits(reader->begin, hashed), error,
                  REFIT_ERR_CORRUPT, "frame %u is damaged: the hash of its head does not match",
                  sequence);
    *frame = rft_archive_frame_decode(reader->begin);
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

/* Over the base's bytes, then to their place. */
static refit_status apply_frame(rft_archive_reader *reader, const rft_archive_frame *frame,
                                unsigned char *image, refit_error *error)
{
    rft_archive_slice *slice = reader->slice;
    rft_message message = {.kind = RFT_FRAME};
    message.as.frame.hash = frame->payload_hash;
    message.as.frame.modes = (rft_view){reader->begin + RFT_ARCHIVE_FRAME_BYTES, frame->blocks};
    rft_archive_slice_cut(slice, reader->manifest, frame->sequence);
    unsigned char *place = image + slice->offset;
    rft_assembly *assembly;
    RFT_TRY(rft_assembly_open(&slice->manifest, reader->staging,
                              reader->header.base == 0 ? NULL : place, &assembly, error));
    rft_view payload = {reader->payload, (size_t)frame->payload_bytes};
    refit_status status = rft_assembly_take(assembly, &message, payload, error);
    rft_assembly_close(assembly);
    RFT_TRY(status);
    for (uint32_t i = 0; i < slice->frame.blocks; i++) {
        const rft_block *block = &slice->blocks[i];
        memcpy(place + block->offset, reader->staging + block->offset, (size_t)block->bytes);
    }
    return REFIT_OK;
}

/* `counts` by rft_block_mode. */
static refit_status count_modes(const unsigned char *modes, uint32_t blocks, uint32_t counts[3],
                                refit_error *error)
{
    for (uint32_t i = 0; i < blocks; i++) {
        RFT_REFUSE_IF(modes[i] > RFT_BLOCK_SPARSE, error, REFIT_ERR_UNSUPPORTED,
                      "there is no block mode %u", modes[i]);
        counts[modes[i]]++;
    }
    return REFIT_OK;
}

static refit_status check_end(const rft_archive_reader *reader, const uint32_t counts[3],
                              refit_error *error)
{
    const rft_archive_header *header = &reader->header;
    RFT_REFUSE_IF(reader->at != header->file_bytes, error, REFIT_ERR_CORRUPT,
                  "there is something behind its last frame");
    RFT_REFUSE_IF(counts[RFT_BLOCK_DENSE] != header->dense ||
                      counts[RFT_BLOCK_SAME] != header->same ||
                      counts[RFT_BLOCK_SPARSE] != header->sparse,
                  error, REFIT_ERR_CORRUPT, "its blocks are not those of its header");
    return REFIT_OK;
}

refit_status rft_archive_reader_frames(rft_archive_reader *reader, unsigned char *image,
                                       refit_error *error)
{
    uint32_t counts[3] = {0};
    RFT_TRY(take_memory(reader, error));
    for (uint32_t i = 0; i < reader->manifest->frame_count; i++) {
        rft_archive_frame frame = {0};
        RFT_TRY(read_frame(reader, i, &frame, error));
        RFT_TRY(count_modes(reader->begin + RFT_ARCHIVE_FRAME_BYTES, frame.blocks, counts, error));
        if (image != NULL) RFT_TRY(apply_frame(reader, &frame, image, error));
    }
    return check_end(reader, counts, error);
}

refit_status rft_archive_reader_verify(const rft_archive_reader *reader, const unsigned char *image,
                                       refit_error *error)
{
    rft_message seal = {.kind = RFT_SEAL};
    seal.as.seal.digest = reader->header.digest;
    seal.as.seal.tensors = (rft_view){reader->digests, (size_t)reader->header.digest_bytes};
    return rft_image_verify(reader->manifest, image, &seal, error);
}
