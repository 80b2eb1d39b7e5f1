/*
 * Reading one file of an archive.
 *
 *     open ─► header ─► lists ─► frame, frame, … (archive_blocks.c) ─► verify
 */
#include "archive/archive_reader.h"

#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "archive/archive_disk.h"
#include "base/alloc.h"
#include "base/checked.h"

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
    rft_packer_close(reader->packer);
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

/* The list of tensors says how many blocks there are, and a few bytes of it can say a great many:
 * memory is taken for no more than the header counts, which the file has room for. */
static rft_limits limits_of_file(const rft_archive_header *header, const rft_limits *limits)
{
    rft_limits held = *limits;
    const uint64_t blocks = rft_archive_blocks(header);
    held.blocks_told = blocks < limits->blocks;
    if (held.blocks_told) held.blocks = (uint32_t)blocks;
    return held;
}

/* Hashed first: what is damaged is not parsed. */
static refit_status read_manifest(rft_archive_reader *reader, const rft_limits *limits,
                                  refit_error *error)
{
    unsigned char *encoded = NULL;
    const rft_archive_header *header = &reader->header;
    const rft_limits held = limits_of_file(header, limits);
    refit_status status = read_section(reader, header->manifest_bytes, &encoded, error);
    rft_view view = {encoded, (size_t)header->manifest_bytes};
    if (status == REFIT_OK) {
        rft_digest128 digest = rft_digest128_of(view);
        status =
            rft_digest128_equal(&digest, &header->manifest)
                ? rft_manifest_decode(view, header->frame_bytes, &held, &reader->manifest, error)
                : rft_fail(error, REFIT_ERR_CORRUPT, "its list of tensors is damaged");
    }
    rft_free(encoded);
    RFT_TRY(status);
    return check_manifest(header, reader->manifest, error);
}

bool rft_archive_reader_give(rft_archive_reader *reader, rft_manifest *manifest,
                             uint64_t frame_bytes)
{
    const rft_archive_header *header = &reader->header;
    bool same = manifest != NULL && header->frame_bytes == frame_bytes &&
                header->manifest_bytes == manifest->encoded.count &&
                rft_digest128_equal(&header->manifest, &manifest->digest);
    if (same) reader->manifest = manifest;
    return same;
}

/* What can be known of a tensor's change without its blocks. */
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
                                       refit_error *error)
{
    rft_message seal = {.kind = RFT_SEAL};
    seal.as.seal.digest = reader->header.digest;
    seal.as.seal.tensors = (rft_view){reader->digests, (size_t)reader->header.digest_bytes};
    return rft_image_verify(reader->manifest, image, &seal, error);
}
