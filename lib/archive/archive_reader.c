/*
 * Reading one file of an archive, section by section, each checked before it is used. Knows nothing
 * of the file's base: archive_chain.c puts files together.
 *
 *     open ─► header ─► lists ─► frame, frame, … ─► verify
 */
#include "archive/archive_reader.h"

#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "wire/frame.h"

/* ---- Slices
 *
 * The blocks of one frame, moved to the beginning, and the tensors that they belong to, which are
 * neighbours.
 */

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

/* ---- One file ---- */

/* As much of the header as the file has. */
static refit_status read_header(int file, uint64_t bytes, const rft_limits *limits,
                                rft_archive_header *out, refit_error *error)
{
    unsigned char header[RFT_ARCHIVE_HEADER_BYTES] = {0};
    const size_t count = (size_t)rft_min_u64(bytes, sizeof header);
    RFT_TRY(rft_disk_read(file, header, count, 0, error));
    return rft_archive_header_decode(header, bytes, limits, out, error);
}

refit_status rft_archive_reader_open(int file, uint64_t bytes, const rft_limits *limits,
                                     rft_archive_reader *out, refit_error *error)
{
    rft_archive_reader reader = {.file = file};
    refit_status status = read_header(file, bytes, limits, &reader.header, error);
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
    refit_status status = find(folder, entry, name, limits, out, error);
    if (status == REFIT_ERR_INVALID) status = REFIT_ERR_CORRUPT; /* by its name it is a version */
    return rft_disk_blame(error, status, name);
}

void rft_archive_reader_close(rft_archive_reader *reader)
{
    (void)close(reader->file);
    rft_manifest_close(reader->manifest);
    rft_free(reader->digests);
    rft_free(reader->changes);
    rft_free(reader->seen);
    rft_frame_codec_close(reader->codec);
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

/* The list of tensors determines the number of blocks, and a few bytes of it can claim very many.
 * Memory is taken for no more than the header counts, for which the file is long enough. */
static rft_limits limits_of_file(const rft_archive_header *header, const rft_limits *limits)
{
    rft_limits held = *limits;
    const uint64_t blocks = rft_archive_blocks(header);
    held.blocks_told = blocks < limits->blocks;
    if (held.blocks_told) held.blocks = (uint32_t)blocks;
    return held;
}

/* The encoded manifest, to be freed, also on failure. */
static refit_status read_encoded(rft_archive_reader *reader, unsigned char **out,
                                 refit_error *error)
{
    const rft_archive_header *header = &reader->header;
    RFT_TRY(read_section(reader, header->manifest_bytes, out, error));
    rft_digest128 digest = rft_digest128_of((rft_view){*out, (size_t)header->manifest_bytes});
    RFT_REFUSE_IF(!rft_digest128_equal(&digest, &header->manifest), error, REFIT_ERR_CORRUPT,
                  "its list of tensors is damaged");
    return REFIT_OK;
}

/* The hash is checked first, so damaged bytes are not parsed. */
static refit_status read_manifest(rft_archive_reader *reader, const rft_limits *limits,
                                  refit_error *error)
{
    unsigned char *encoded = NULL;
    const rft_archive_header *header = &reader->header;
    const rft_limits held = limits_of_file(header, limits);
    refit_status status = read_encoded(reader, &encoded, error);
    rft_view view = {encoded, (size_t)header->manifest_bytes};
    if (status == REFIT_OK)
        status = rft_manifest_decode(view, header->frame_bytes, &held, &reader->manifest, error);
    rft_free(encoded);
    RFT_TRY(status);
    return check_manifest(header, reader->manifest, error);
}

refit_status rft_archive_reader_check_given(rft_archive_reader *reader, refit_error *error)
{
    unsigned char *encoded = NULL;
    reader->at = rft_archive_header_bytes(&reader->header);
    refit_status status = read_encoded(reader, &encoded, error);
    rft_free(encoded);
    return status;
}

bool rft_archive_reader_give(rft_archive_reader *reader, rft_manifest *manifest)
{
    const rft_archive_header *header = &reader->header;
    bool same = manifest != NULL && header->frame_bytes == manifest->frame_bytes &&
                header->manifest_bytes == manifest->encoded.count &&
                rft_digest128_equal(&header->manifest, &manifest->digest);
    if (same) reader->manifest = manifest;
    return same;
}

/* Checks that need no blocks of the tensor. */
static bool is_possible(const rft_archive_reader *reader, uint32_t tensor)
{
    const rft_archive_change *change = &reader->changes[tensor];
    const uint64_t blocks = (uint64_t)change->same + change->sparse + change->dense;
    const uint64_t elements = rft_archive_elements(reader->manifest, tensor);
    if (blocks != reader->manifest->tensors[tensor].blocks) return false;
    return reader->header.base == 0 ? change->changed == elements : change->changed <= elements;
}

/* Each tensor's, and all of them together. */
static refit_status check_changes(const rft_archive_reader *reader, refit_error *error)
{
    const rft_archive_header *header = &reader->header;
    uint64_t same = 0, sparse = 0, dense = 0, changed = 0;
    bool possible = true;
    for (uint32_t i = 0; i < reader->manifest->count; i++) {
        if (reader->manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        const rft_archive_change *change = &reader->changes[i];
        possible = possible && is_possible(reader, i);
        same += change->same;
        sparse += change->sparse;
        dense += change->dense;
        changed += change->changed;
    }
    RFT_REFUSE_IF(!possible || same != header->same || sparse != header->sparse ||
                      dense != header->dense || changed != header->changed,
                  error, REFIT_ERR_CORRUPT, "its changes are not those of its header");
    return REFIT_OK;
}

static void take_changes(rft_archive_reader *reader, const unsigned char *from)
{
    for (uint32_t i = 0; i < reader->manifest->count; i++) {
        if (reader->manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        reader->changes[i] = rft_archive_change_decode(from);
        from += RFT_ARCHIVE_CHANGE_BYTES;
    }
}

static refit_status read_changes(rft_archive_reader *reader, refit_error *error)
{
    reader->changes = rft_calloc((size_t)reader->manifest->count + 1, sizeof *reader->changes);
    RFT_REFUSE_IF(reader->changes == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory for the changes of %u tensors", reader->manifest->count);
    const uint64_t bytes = rft_archive_changes_bytes(&reader->header);
    if (bytes == 0) return REFIT_OK;
    unsigned char *encoded = NULL;
    refit_status status = read_section(reader, bytes, &encoded, error);
    const size_t hashed = (size_t)bytes - RFT_ARCHIVE_HASH_BYTES;
    if (status == REFIT_OK && rft_get_u64(encoded + hashed) != XXH3_64bits(encoded, hashed))
        status = rft_fail(error, REFIT_ERR_CORRUPT, "its list of changes is damaged");
    if (status == REFIT_OK) take_changes(reader, encoded);
    rft_free(encoded);
    RFT_TRY(status);
    return check_changes(reader, error);
}

refit_status rft_archive_reader_lists(rft_archive_reader *reader, const rft_limits *limits,
                                      refit_error *error)
{
    reader->at = rft_archive_header_bytes(&reader->header);
    if (reader->manifest == NULL) {
        RFT_TRY(read_manifest(reader, limits, error));
    } else {
        RFT_TRY(check_manifest(&reader->header, reader->manifest, error));
        reader->at += reader->header.manifest_bytes;
    }
    RFT_TRY(read_section(reader, reader->header.digest_bytes, &reader->digests, error));
    rft_view digests = {reader->digests, (size_t)reader->header.digest_bytes};
    rft_digest128 digest = rft_version_digest_encoded(reader->manifest, digests);
    RFT_REFUSE_IF(!rft_digest128_equal(&digest, &reader->header.digest), error, REFIT_ERR_CORRUPT,
                  "its digests are damaged");
    return read_changes(reader, error);
}

/* ---- The end ---- */

refit_status rft_archive_reader_verify(const rft_archive_reader *reader, const unsigned char *image,
                                       uint64_t most, rft_image_cursor *cursor, refit_error *error)
{
    rft_message seal = {.kind = RFT_SEAL};
    seal.as.seal.digest = reader->header.digest;
    seal.as.seal.tensors = (rft_view){reader->digests, (size_t)reader->header.digest_bytes};
    return rft_image_verify_part(reader->manifest, image, &seal, most, cursor, error);
}

/* ---- The frames
 *
 * A frame is applied in a buffer of its own (wire/reassembly, over a slice of the base) and then
 * copied to its place in the image: one image suffices for a chain of any length. The modes of
 * blocks are counted, tensor by tensor, and compared with the file's section of changes. Format 1
 * has no such section: there the changes are taken from the blocks.
 */

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

/* Beginning, modes and hash of the frame at reader->at, which moves after them. */
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
    if (reader->codec == NULL) RFT_TRY(rft_frame_codec_open(1, &reader->codec, error));
    return rft_frame_codec_unpack(reader->codec, &reader->slice->manifest, &reader->slice->frame,
                                  modes_of(reader), planes, *payload, payload, error);
}

/* Dense blocks that were packed: one after the other, as long as they must be. */
static void place_dense(const rft_archive_slice *slice, const unsigned char *from,
                        unsigned char *place)
{
    for (uint32_t i = 0; i < slice->frame.blocks; i++) {
        const rft_block *block = &slice->blocks[i];
        memcpy(place + block->offset, from, (size_t)block->bytes);
        from += block->bytes;
    }
}

/* Applies the frame to the base's bytes, which may lie where its own are to be, and copies the
 * result to its place. */
static refit_status assemble(rft_archive_reader *reader, uint64_t hash, rft_view payload,
                             const unsigned char *base, unsigned char *place, refit_error *error)
{
    const rft_archive_slice *slice = reader->slice;
    rft_message message = {.kind = RFT_FRAME};
    message.as.frame.hash = hash;
    message.as.frame.modes = (rft_view){modes_of(reader), slice->frame.blocks};
    rft_reassembly *reassembly;
    RFT_TRY(rft_reassembly_open(&slice->manifest, reader->staging,
                                reader->header.base == 0 ? NULL : base, &reassembly, error));
    refit_status status = rft_reassembly_take(reassembly, &message, payload, error);
    rft_reassembly_close(reassembly);
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
                                const unsigned char *base, unsigned char *image, refit_error *error)
{
    rft_archive_slice_cut(reader->slice, reader->manifest, frame->sequence);
    unsigned char *place = image + reader->slice->offset;
    if (base != NULL) base += reader->slice->offset;
    rft_view payload = {reader->payload, (size_t)frame->payload_bytes};
    if (!frame->packed) return assemble(reader, frame->payload_hash, payload, base, place, error);
    RFT_TRY(unpack(reader, frame, &payload, error));
    if (!is_dense(modes_of(reader), frame->blocks)) {
        const uint64_t hash = XXH3_64bits(payload.data, payload.count);
        return assemble(reader, hash, payload, base, place, error);
    }
    place_dense(reader->slice, payload.data, place);
    return REFIT_OK;
}

/* Format 1 does not say how many elements changed. For sparse blocks `entry` does (NULL: it cannot
 * be seen); for dense blocks of a delta the number is unknown. */
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

/* Whether the tensors' blocks are those that the file's changes name. */
static bool has_changes(const rft_archive_reader *reader)
{
    for (uint32_t i = 0; i < reader->manifest->count; i++) {
        const rft_archive_change *said = &reader->changes[i], *seen = &reader->seen[i];
        if (said->same != seen->same || said->sparse != seen->sparse || said->dense != seen->dense)
            return false;
    }
    return true;
}

/* Of format 1: the changes are those that were counted. */
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
                  "there is something after its last frame");
    bool fits = header->format == 1 ? take_seen(reader) : has_changes(reader);
    RFT_REFUSE_IF(!fits || reader->packed != header->packed, error, REFIT_ERR_CORRUPT,
                  "its blocks are not those of its header");
    return REFIT_OK;
}

refit_status rft_archive_reader_frame(rft_archive_reader *reader, const unsigned char *base,
                                      unsigned char *image, bool *end, refit_error *error)
{
    if (reader->slice == NULL) RFT_TRY(take_memory(reader, error));
    if (reader->sequence < reader->manifest->frame_count) {
        rft_archive_frame frame = {0};
        RFT_TRY(read_frame(reader, reader->sequence, &frame, error));
        RFT_TRY(count_blocks(reader, &frame, error));
        if (image != NULL) RFT_TRY(apply_frame(reader, &frame, base, image, error));
        reader->sequence++;
    }
    *end = reader->sequence == reader->manifest->frame_count;
    return *end ? check_end(reader, error) : REFIT_OK;
}

refit_status rft_archive_reader_frames(rft_archive_reader *reader, refit_error *error)
{
    bool end = false;
    while (!end)
        RFT_TRY(rft_archive_reader_frame(reader, NULL, NULL, &end, error));
    return REFIT_OK;
}
