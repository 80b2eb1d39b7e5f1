/*
 * Writing one version.
 *
 *     .next   header left out ─► manifest ─► frame, frame, … ─► digests, changes ─► header ─► fsync
 *     commit  .next renamed to its name ─► fsync of the folder; where that fails, removed again
 *     abort   .next removed
 *
 * The header, which says that the file is whole, is written when all else is there.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "archive/archive_chain.h"
#include "base/alloc.h"
#include "base/checked.h"
#include "base/log.h"
#include "kernels/digest.h"
#include "wire/frame.h"

/* One version on its way into an archive. */
typedef struct archive_work {
    refit_archive *archive;
    const void **memory; /* owned; a tensor: its bytes */
    int file;
    uint64_t at; /* where the next bytes go */
    rft_archive_header *header;
    refit_error *error;
} archive_work;

/* ---- What the caller gives, and memory
 *
 * The arguments of refit_archive_write are checked before anything is written. The memory that a
 * version needs stays for the next version of the same tensors.
 */

void rft_archive_forget(refit_archive *archive)
{
    rft_manifest_close(archive->manifest);
    rft_free(archive->image);
    rft_free(archive->frame);
    rft_free(archive->same);
    rft_free(archive->changes);
    rft_free(archive->sums);
    rft_free(archive->digests);
    archive->manifest = NULL;
    archive->image = NULL;
    archive->frame = NULL;
    archive->same = NULL;
    archive->changes = NULL;
    archive->sums = NULL;
    archive->digests = NULL;
    archive->held = (rft_version_id){0};
}

/* ---- What the caller gives ---- */

static refit_status check_version(const refit_archive *archive,
                                  const refit_archive_version *version, refit_error *error)
{
    RFT_REFUSE_IF(archive == NULL || version == NULL || version->size < sizeof *version, error,
                  REFIT_ERR_INVALID, "refit_archive_write needs an archive and version.size set");
    RFT_REFUSE_IF(archive->folder.lock < 0, error, REFIT_ERR_STATE,
                  "the archive is open for reading: open it with REFIT_ARCHIVE_WRITE");
    RFT_REFUSE_IF(archive->written, error, REFIT_ERR_STATE,
                  "version %llu is written: commit or abort it first",
                  (unsigned long long)archive->header.version);
    RFT_REFUSE_IF(version->epoch == 0 || version->version == 0, error, REFIT_ERR_INVALID,
                  "epochs and versions begin at 1");
    RFT_REFUSE_IF(version->weights == NULL && version->weight_count > 0, error, REFIT_ERR_INVALID,
                  "the list of weights is NULL");
    return REFIT_OK;
}

static refit_status take_weight(const rft_manifest *manifest, const refit_weight *weight,
                                const void **memory, bool *taken, refit_error *error)
{
    RFT_REFUSE_IF(weight->tensor >= manifest->count, error, REFIT_ERR_INVALID,
                  "there is no tensor %u: the version has %u", weight->tensor, manifest->count);
    const rft_manifest_tensor *tensor = &manifest->tensors[weight->tensor];
    RFT_REFUSE_IF(tensor->alias_of != REFIT_NO_ALIAS, error, REFIT_ERR_INVALID,
                  "tensor '%.80s' is tied: give the one that it shares bytes with", tensor->name);
    RFT_REFUSE_IF(taken[weight->tensor], error, REFIT_ERR_INVALID, "tensor '%.80s' comes twice",
                  tensor->name);
    RFT_REFUSE_IF(weight->bytes != tensor->bytes, error, REFIT_ERR_INVALID,
                  "tensor '%.80s' has %llu bytes, not %llu", tensor->name,
                  (unsigned long long)tensor->bytes, (unsigned long long)weight->bytes);
    RFT_REFUSE_IF(tensor->bytes > 0 &&
                      (weight->memory == NULL || !rft_span_exists(weight->memory, tensor->bytes)),
                  error, REFIT_ERR_INVALID,
                  "tensor '%.80s' has no memory: its address is NULL, or ends beyond those that "
                  "there are",
                  tensor->name);
    taken[weight->tensor] = true;
    memory[weight->tensor] = weight->memory;
    return REFIT_OK;
}

/* Each original once; `memory` has a place for each tensor. */
static refit_status take_weights(const rft_manifest *manifest, const refit_archive_version *version,
                                 const void **memory, refit_error *error)
{
    RFT_REFUSE_IF(version->weight_count != manifest->originals, error, REFIT_ERR_INVALID,
                  "%u weights for %u tensors that are not tied", version->weight_count,
                  manifest->originals);
    bool *taken = rft_calloc(manifest->count, sizeof *taken);
    RFT_REFUSE_IF(taken == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for %u tensors",
                  manifest->count);
    refit_status status = REFIT_OK;
    for (uint32_t i = 0; i < version->weight_count && status == REFIT_OK; i++)
        status = take_weight(manifest, &version->weights[i], memory, taken, error);
    rft_free(taken);
    return status;
}

/* ---- Memory, which stays for versions of the same tensors ---- */

static refit_status take_memory(refit_archive *archive, refit_error *error)
{
    const rft_manifest *manifest = archive->manifest;
    if (archive->slice == NULL) archive->slice = rft_calloc(1, sizeof *archive->slice);
    archive->image = rft_calloc((size_t)manifest->store_bytes, 1);
    archive->frame = rft_calloc((size_t)rft_archive_slice_most(manifest), 1);
    archive->same = rft_calloc(RFT_FRAME_BLOCKS, 1);
    archive->changes = rft_calloc(manifest->count, sizeof *archive->changes);
    archive->sums = rft_calloc(manifest->count, sizeof *archive->sums);
    archive->digests = rft_calloc((size_t)manifest->originals + 1, 8);
    bool all = archive->slice != NULL && archive->image != NULL && archive->frame != NULL &&
               archive->same != NULL && archive->changes != NULL && archive->sums != NULL &&
               archive->digests != NULL;
    RFT_REFUSE_IF(!all, error, REFIT_ERR_HOST_MEMORY,
                  "no memory for the archive's copy of the weights, %llu bytes",
                  (unsigned long long)manifest->store_bytes);
    return REFIT_OK;
}

/* Keeps the image where the tensors are the same as before. */
static refit_status take_manifest(refit_archive *archive, rft_manifest *manifest,
                                  refit_error *error)
{
    bool same = archive->manifest != NULL &&
                rft_digest128_equal(&archive->manifest->digest, &manifest->digest);
    if (same) {
        rft_manifest_close(manifest);
        return REFIT_OK;
    }
    rft_archive_forget(archive);
    archive->manifest = manifest;
    refit_status status = take_memory(archive, error);
    if (status != REFIT_OK) rft_archive_forget(archive);
    return status;
}

/* ---- The version before, read back
 *
 * After a restart, or after a write that failed, the image of the version before is read back. A
 * version is compared with the archive's own bytes, and not with those that the trainer says it
 * had: so they are read from the disk, with all checks, or the next version is written whole. The
 * reason is logged, unless the next version would be an anchor anyway.
 */

/* Rebuilds the version into the archive's image. */
static refit_status rebuild(refit_archive *archive, const rft_archive_entry *anchor,
                            const rft_archive_entry *last, refit_error *error)
{
    refit_snapshot *into = rft_calloc(1, sizeof *into);
    RFT_REFUSE_IF(into == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a snapshot");
    into->image = archive->image;
    into->room = archive->manifest->store_bytes;
    refit_status status = rft_snapshot_apply(archive, anchor, last, into, error);
    if (status == REFIT_OK &&
        !rft_digest128_equal(&into->header.manifest, &archive->manifest->digest)) {
        status = rft_fail(error, REFIT_ERR_STALE, "its tensors are others");
    }
    if (status == REFIT_OK) {
        archive->held = (rft_version_id){last->epoch, last->version, into->header.digest};
        archive->since = (uint32_t)(last->version - anchor->version + 1);
    }
    refit_snapshot_close(into);
    return status;
}

static refit_status resume(refit_archive *archive, const rft_archive_entry *last,
                           refit_error *error)
{
    const rft_archive_entry *anchor = NULL;
    rft_archive_reader reader;
    RFT_TRY(rft_archive_reader_find(&archive->folder, last, &archive->limits, &reader, error));
    bool same = rft_digest128_equal(&reader.header.manifest, &archive->manifest->digest);
    rft_archive_reader_close(&reader);
    RFT_REFUSE_IF(!same, error, REFIT_ERR_STALE, "its tensors are others");
    RFT_TRY(rft_archive_chain_first(archive, last, NULL, &anchor, error));
    if (last->version - anchor->version + 1 >= archive->anchor_every) return REFIT_OK;
    return rebuild(archive, anchor, last, error);
}

/* A failure is logged, and the next version is written whole. A lack of memory says nothing about
 * the files, and is returned. */
static refit_status try_resume(refit_archive *archive, const rft_archive_entry *last,
                               refit_error *error)
{
    refit_error why;
    refit_status status = resume(archive, last, &why);
    if (status == REFIT_OK) return REFIT_OK;
    if (status == REFIT_ERR_HOST_MEMORY) return rft_fail(error, status, "%s", why.text);
    rft_log(REFIT_LOG_WARNING,
            "archive: version %llu is kept whole: nothing can build on version %llu: %s",
            (unsigned long long)last->version + 1, (unsigned long long)last->version, why.text);
    return REFIT_OK;
}

static refit_status resume_image(refit_archive *archive, const refit_archive_version *version,
                                 refit_error *error)
{
    const uint64_t before = version->version - 1;
    if (archive->held.version == before && archive->held.epoch == version->epoch) return REFIT_OK;
    archive->held = (rft_version_id){0};
    if (archive->anchor_every == 1 || archive->folder.count == 0 || before == 0) return REFIT_OK;
    const rft_archive_entry *last =
        rft_archive_folder_find(&archive->folder, version->epoch, before);
    if (last != NULL) return try_resume(archive, last, error);
    rft_log(REFIT_LOG_WARNING,
            "archive: version %llu is kept whole: version %llu of epoch %016llx is not there",
            (unsigned long long)version->version, (unsigned long long)before,
            (unsigned long long)version->epoch);
    return REFIT_OK;
}

/* ---- One frame
 *
 * The bytes are copied out of the caller's memory once, with their digest, before they are coded.
 * So the digests are those of the file even if that memory changed meanwhile; the caller learns of
 * such a change from the version's digest. The written bytes are copied into the image, the base of
 * the next version, at once.
 */

/* Copies one block into the frame, and notes how it differs from the base. */
static void take_block(archive_work *work, uint32_t index, bool anchor)
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

static refit_status write_at_end(archive_work *work, const void *bytes, size_t count)
{
    RFT_TRY(rft_disk_write(work->file, bytes, count, work->at, work->error));
    work->at += count;
    return REFIT_OK;
}

static void count_blocks(archive_work *work, const rft_frame *frame)
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

/* A frame of dense blocks only: its blocks without the padding between them. */
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
    RFT_TRY(rft_frame_codec_pack(archive->codec, &slice->manifest, &slice->frame,
                                 archive->modes.data, rft_bytes_view(blocks), &packed,
                                 frame->planes, error));
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
        .codec = archive->codec,
    };
    RFT_TRY(rft_frame_encode(&slice->manifest, 0, &source, &archive->modes, &archive->scratch,
                             frame, error));
    if (archive->codec == NULL || frame->counts.dense < slice->frame.blocks) return REFIT_OK;
    return pack_dense(archive, frame, error);
}

/* The frame's bytes before the payload. */
static refit_status write_begin(archive_work *work, uint32_t sequence, const rft_frame *coded)
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
    return write_at_end(work, begin, hashed + RFT_ARCHIVE_HASH_BYTES);
}

static refit_status write_frame(archive_work *work, uint32_t sequence)
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
    RFT_TRY(write_at_end(work, frame.payload.data, frame.payload.count));
    memcpy(archive->image + slice->offset, archive->frame, (size_t)slice->frame.bytes);
    return REFIT_OK;
}

/* ---- One version */

/* ---- Sections ---- */

/* From the sums of all parts. */
static void finish_digests(refit_archive *archive)
{
    const rft_manifest *manifest = archive->manifest;
    unsigned char *to = archive->digests;
    for (uint32_t i = 0; i < manifest->count; i++) {
        if (manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        rft_put_u64(to, rft_digest_finish(archive->sums[i], manifest->tensors[i].bytes));
        to += 8;
    }
}

static refit_status check_digest(const refit_archive *archive, const refit_archive_version *version,
                                 rft_digest128 *out, refit_error *error)
{
    rft_view digests = {archive->digests, (size_t)archive->manifest->originals * 8};
    *out = rft_version_digest_encoded(archive->manifest, digests);
    RFT_REFUSE_IF(
        version->digest != NULL && memcmp(out->bytes, version->digest, sizeof out->bytes) != 0,
        error, REFIT_ERR_CORRUPT, "the weights of version %llu are not what its digest says",
        (unsigned long long)version->version);
    return REFIT_OK;
}

/* Those of the tensors that are not tied, and their hash. */
static refit_status write_changes(archive_work *work, uint64_t at)
{
    const refit_archive *archive = work->archive;
    const size_t count = (size_t)rft_archive_changes_bytes(work->header);
    rft_bytes *encoded = &work->archive->scratch;
    rft_bytes_reset(encoded);
    RFT_TRY(rft_bytes_reserve(encoded, count, work->error));
    unsigned char *to = encoded->data;
    for (uint32_t i = 0; i < archive->manifest->count; i++) {
        if (archive->manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        rft_archive_change_encode(&archive->changes[i], to);
        to += RFT_ARCHIVE_CHANGE_BYTES;
    }
    rft_put_u64(to, XXH3_64bits(encoded->data, count - RFT_ARCHIVE_HASH_BYTES));
    return rft_disk_write(work->file, encoded->data, count, at, work->error);
}

static refit_status write_header(archive_work *work)
{
    unsigned char bytes[RFT_ARCHIVE_HEADER_BYTES];
    work->header->file_bytes = work->at;
    rft_archive_header_encode(work->header, bytes);
    return rft_disk_write(work->file, bytes, sizeof bytes, 0, work->error);
}

static refit_status write_sections(archive_work *work, const refit_archive_version *version)
{
    refit_archive *archive = work->archive;
    const rft_bytes *encoded = &archive->manifest->encoded;
    work->at = RFT_ARCHIVE_HEADER_BYTES;
    RFT_TRY(write_at_end(work, encoded->data, encoded->count));
    const uint64_t digests_at = work->at, changes_at = digests_at + work->header->digest_bytes;
    work->at = changes_at + rft_archive_changes_bytes(work->header);
    for (uint32_t i = 0; i < archive->manifest->frame_count; i++)
        RFT_TRY(write_frame(work, i));
    finish_digests(archive);
    RFT_TRY(check_digest(archive, version, &work->header->digest, work->error));
    RFT_TRY(rft_disk_write(work->file, archive->digests, (size_t)work->header->digest_bytes,
                           digests_at, work->error));
    RFT_TRY(write_changes(work, changes_at));
    return write_header(work);
}

static rft_archive_header make_header(const refit_archive *archive,
                                      const refit_archive_version *version, bool delta)
{
    const rft_manifest *manifest = archive->manifest;
    rft_archive_header header = {
        .format = RFT_ARCHIVE_FORMAT,
        .tensors = manifest->count,
        .frames = manifest->frame_count,
        .epoch = version->epoch,
        .version = version->version,
        .frame_bytes = archive->frame_bytes,
        .weight_bytes = manifest->payload_bytes,
        .manifest_bytes = manifest->encoded.count,
        .digest_bytes = (uint64_t)manifest->originals * 8,
        .manifest = manifest->digest,
    };
    if (delta) {
        header.base = archive->held.version;
        header.base_digest = archive->held.digest;
    }
    return header;
}

/* Whether it may build on the one before. */
static bool may_be_delta(const refit_archive *archive, const refit_archive_version *version)
{
    return archive->held.version != 0 && archive->held.epoch == version->epoch &&
           archive->held.version + 1 == version->version && archive->since < archive->anchor_every;
}

static refit_status write_next(archive_work *work, const refit_archive_version *version)
{
    refit_archive *archive = work->archive;
    archive->held = (rft_version_id){0};
    memset(archive->sums, 0, archive->manifest->count * sizeof *archive->sums);
    memset(archive->changes, 0, archive->manifest->count * sizeof *archive->changes);
    /* A new file, never one that lies there: it may be a link to a file that is not ours. */
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
    if (unlinkat(archive->folder.dir, RFT_ARCHIVE_NEXT, 0) != 0 && errno != ENOENT)
        return rft_disk_fail(work->error, "remove", RFT_ARCHIVE_NEXT);
    work->file = openat(archive->folder.dir, RFT_ARCHIVE_NEXT, flags, 0666);
    if (work->file < 0) return rft_disk_fail(work->error, "create", RFT_ARCHIVE_NEXT);
    refit_status status = write_sections(work, version);
    if (status == REFIT_OK) {
        status = rft_disk_close(work->file, work->error);
    } else {
        (void)close(work->file);
    }
    if (status != REFIT_OK) (void)unlinkat(archive->folder.dir, RFT_ARCHIVE_NEXT, 0);
    return status;
}

/* ---- A version that is there already ---- */

static void digest_weights(archive_work *work)
{
    refit_archive *archive = work->archive;
    memset(archive->sums, 0, archive->manifest->count * sizeof *archive->sums);
    for (uint32_t i = 0; i < archive->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &archive->manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS || tensor->bytes == 0) continue;
        archive->sums[i] = rft_digest_part(work->memory[i], (size_t)tensor->bytes, 0);
    }
    finish_digests(archive);
}

/* Compares; then there is nothing to write. */
static refit_status check_present(archive_work *work, const refit_archive_version *version,
                                  const rft_archive_entry *entry)
{
    refit_archive *archive = work->archive;
    rft_archive_reader reader;
    rft_digest128 digest;
    RFT_TRY(
        rft_archive_reader_find(&archive->folder, entry, &archive->limits, &reader, work->error));
    *work->header = reader.header;
    rft_archive_reader_close(&reader);
    digest_weights(work);
    RFT_TRY(check_digest(archive, version, &digest, work->error));
    RFT_REFUSE_IF(!rft_digest128_equal(&digest, &work->header->digest), work->error,
                  REFIT_ERR_EXISTS,
                  "the archive has version %llu of this trainer, with other weights",
                  (unsigned long long)version->version);
    archive->entry = *entry;
    archive->present = true;
    return REFIT_OK;
}

/* ---- The public functions ---- */

static refit_status write_version(archive_work *work, const refit_archive_version *version)
{
    refit_archive *archive = work->archive;
    const rft_archive_entry *entry =
        rft_archive_folder_find(&archive->folder, version->epoch, version->version);
    if (entry != NULL) {
        archive->held = (rft_version_id){0};
        return check_present(work, version, entry);
    }
    archive->present = false;
    archive->entry = (rft_archive_entry){.version = version->version, .epoch = version->epoch};
    RFT_TRY(
        rft_archive_folder_run(&archive->folder, version->epoch, &archive->entry.run, work->error));
    RFT_TRY(rft_archive_folder_reserve(&archive->folder, work->error));
    RFT_TRY(resume_image(archive, version, work->error));
    *work->header = make_header(archive, version, may_be_delta(archive, version));
    char name[RFT_ARCHIVE_NAME];
    rft_archive_entry_name(&archive->entry, name);
    return rft_disk_blame(work->error, write_next(work, version), name);
}

static refit_status open_manifest(refit_archive *archive, const refit_archive_version *version,
                                  refit_error *error)
{
    rft_manifest *manifest;
    RFT_TRY(rft_manifest_open(version->tensors, version->count, archive->frame_bytes,
                              &archive->limits, &manifest, error));
    return take_manifest(archive, manifest, error);
}

refit_status refit_archive_write(refit_archive *archive, const refit_archive_version *version,
                                 refit_error *error)
{
    RFT_TRY(check_version(archive, version, error));
    RFT_TRY(open_manifest(archive, version, error));
    archive_work work = {.archive = archive, .header = &archive->header, .error = error};
    work.memory = rft_calloc(archive->manifest->count, sizeof *work.memory);
    RFT_REFUSE_IF(work.memory == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for %u tensors",
                  archive->manifest->count);
    refit_status status = take_weights(archive->manifest, version, work.memory, error);
    if (status == REFIT_OK) status = write_version(&work, version);
    rft_free(work.memory);
    archive->written = status == REFIT_OK;
    return status;
}

static refit_status check_written(refit_archive *archive, refit_error *error)
{
    RFT_REFUSE_IF(archive == NULL, error, REFIT_ERR_INVALID, "there is no archive: it is NULL");
    RFT_REFUSE_IF(!archive->written, error, REFIT_ERR_STATE,
                  "there is no version that was written and not yet committed or aborted");
    archive->written = false;
    return REFIT_OK;
}

static void list_written(refit_archive *archive)
{
    archive->entry.kind = archive->header.base == 0 ? RFT_ARCHIVE_ANCHOR : RFT_ARCHIVE_DELTA;
    rft_archive_folder_add(&archive->folder, &archive->entry);
}

/* If the folder cannot be synced, the name may not last, and the file is removed again. If that
 * fails as well, the file stays in the list as it does in the folder: a prune must know it, or it
 * would leave files whose base is gone. */
static refit_status put_in_place(refit_archive *archive, refit_error *error)
{
    char name[RFT_ARCHIVE_NAME];
    const rft_archive_folder *folder = &archive->folder;
    rft_archive_entry_name(&archive->entry, name);
    if (renameat(folder->dir, RFT_ARCHIVE_NEXT, folder->dir, name) != 0) {
        refit_status status = rft_disk_fail(error, "name", name);
        (void)unlinkat(folder->dir, RFT_ARCHIVE_NEXT, 0);
        return status;
    }
    if (fsync(folder->dir) == 0) return REFIT_OK;
    refit_status status = rft_disk_fail(error, "write the folder of", name);
    if (unlinkat(folder->dir, name, 0) != 0) list_written(archive);
    return status;
}

static void note_committed(refit_archive *archive)
{
    const rft_archive_header *header = &archive->header;
    list_written(archive);
    archive->held = (rft_version_id){header->epoch, header->version, header->digest};
    archive->since = header->base == 0 ? 1 : archive->since + 1;
}

refit_status refit_archive_commit(refit_archive *archive, refit_archive_info *info,
                                  refit_error *error)
{
    RFT_REFUSE_IF(info != NULL && info->size < sizeof *info, error, REFIT_ERR_INVALID,
                  "set info.size to sizeof(refit_archive_info)");
    RFT_TRY(check_written(archive, error));
    if (!archive->present) {
        RFT_TRY(put_in_place(archive, error));
        note_committed(archive);
    }
    if (info == NULL) return REFIT_OK;
    char name[RFT_ARCHIVE_NAME];
    rft_archive_entry_name(&archive->entry, name);
    return rft_archive_header_describe(&archive->header, name, info, error);
}

refit_status refit_archive_abort(refit_archive *archive, refit_error *error)
{
    RFT_TRY(check_written(archive, error));
    if (archive->present) return REFIT_OK;
    if (unlinkat(archive->folder.dir, RFT_ARCHIVE_NEXT, 0) == 0 || errno == ENOENT) return REFIT_OK;
    return rft_disk_fail(error, "remove", RFT_ARCHIVE_NEXT);
}
