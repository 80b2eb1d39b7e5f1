/*
 * The header of an archive's file, as bytes and back; archive_format.h says what lies where.
 */
#include "archive/archive_format.h"

#include <stdio.h>
#include <string.h>

#include <xxhash.h>

#define HASH_AT  160u
#define SECTIONS RFT_ARCHIVE_HEADER_BYTES

static const unsigned char magic[8] = {0x89, 'R', 'F', 'T', 'A', 'R', 'C', '\n'};

/* One list for both ways. X32 and X64: member, place; XD: a digest. */
#define FIELDS(X32, X64, XD)                                                                       \
    X32(tensors, 12)                                                                               \
    X32(frames, 16)                                                                                \
    X32(same, 20)                                                                                  \
    X32(sparse, 24)                                                                                \
    X32(dense, 28)                                                                                 \
    X64(epoch, 32)                                                                                 \
    X64(version, 40)                                                                               \
    X64(base, 48)                                                                                  \
    X64(file_bytes, 56)                                                                            \
    X64(frame_bytes, 64)                                                                           \
    X64(weight_bytes, 72)                                                                          \
    X64(elements, 80)                                                                              \
    X64(changed, 88)                                                                               \
    X64(manifest_bytes, 96)                                                                        \
    X64(digest_bytes, 104)                                                                         \
    XD(digest, 112)                                                                                \
    XD(base_digest, 128)                                                                           \
    XD(manifest, 144)

#define PUT32(member, place)  rft_put_u32(out + (place), header->member);
#define PUT64(member, place)  rft_put_u64(out + (place), header->member);
#define PUTD(member, place)   memcpy(out + (place), header->member.bytes, 16);
#define TAKE32(member, place) header.member = rft_get_u32(in + (place));
#define TAKE64(member, place) header.member = rft_get_u64(in + (place));
#define TAKED(member, place)  memcpy(header.member.bytes, in + (place), 16);

void rft_archive_header_encode(const rft_archive_header *header,
                               unsigned char out[RFT_ARCHIVE_HEADER_BYTES])
{
    memcpy(out, magic, sizeof magic);
    rft_put_u32(out + 8, RFT_ARCHIVE_FORMAT);
    FIELDS(PUT32, PUT64, PUTD)
    rft_put_u64(out + HASH_AT, XXH3_64bits(out, HASH_AT));
}

static rft_archive_header take_fields(const unsigned char *in)
{
    rft_archive_header header;
    FIELDS(TAKE32, TAKE64, TAKED)
    return header;
}

static refit_status check_form(const unsigned char *in, refit_error *error)
{
    RFT_REFUSE_IF(memcmp(in, magic, sizeof magic) != 0, error, REFIT_ERR_INVALID,
                  "it is not a file of an archive");
    RFT_REFUSE_IF(rft_get_u32(in + 8) != RFT_ARCHIVE_FORMAT, error, REFIT_ERR_UNSUPPORTED,
                  "it has format %u; this refit knows format %u", rft_get_u32(in + 8),
                  RFT_ARCHIVE_FORMAT);
    RFT_REFUSE_IF(rft_get_u64(in + HASH_AT) != XXH3_64bits(in, HASH_AT), error, REFIT_ERR_CORRUPT,
                  "its header is damaged: the hash does not match");
    return REFIT_OK;
}

static refit_status check_limits(const rft_archive_header *header, const rft_limits *limits,
                                 refit_error *error)
{
    RFT_REFUSE_IF(header->manifest_bytes > limits->manifest_bytes, error, REFIT_ERR_LIMIT,
                  "its manifest has %llu bytes; limits.manifest_bytes allows %llu",
                  (unsigned long long)header->manifest_bytes,
                  (unsigned long long)limits->manifest_bytes);
    RFT_REFUSE_IF(header->tensors > limits->tensors, error, REFIT_ERR_LIMIT,
                  "it has %u tensors; limits.tensors allows %u", header->tensors, limits->tensors);
    RFT_REFUSE_IF(header->weight_bytes > limits->version_bytes, error, REFIT_ERR_LIMIT,
                  "it has %llu bytes of weights; limits.version_bytes allows %llu",
                  (unsigned long long)header->weight_bytes,
                  (unsigned long long)limits->version_bytes);
    return REFIT_OK;
}

/* What must be there at least: an anchor has every byte of the weights. The terms are each below
 * the file's size, but for the weights, which limits bound. */
static bool has_room(const rft_archive_header *header, uint64_t bytes)
{
    if (bytes < SECTIONS || header->manifest_bytes > bytes - SECTIONS) return false;
    uint64_t left = bytes - SECTIONS - header->manifest_bytes;
    if (header->digest_bytes > left || header->digest_bytes > (uint64_t)header->tensors * 8) {
        return false;
    }
    left -= header->digest_bytes;
    uint64_t frames =
        (uint64_t)header->frames * (RFT_ARCHIVE_FRAME_BYTES + 1 + RFT_ARCHIVE_HASH_BYTES);
    if (frames > left) return false;
    return header->base != 0 || header->weight_bytes <= left - frames;
}

static bool is_sensible(const rft_archive_header *header)
{
    static const rft_digest128 none;
    bool anchor = header->base == 0;
    if (header->epoch == 0 || header->version == 0) return false;
    if (!anchor && header->base + 1 != header->version) return false;
    if (anchor && (header->same != 0 || header->sparse != 0)) return false;
    return anchor == rft_digest128_equal(&header->base_digest, &none) &&
           header->changed <= header->elements;
}

refit_status rft_archive_header_decode(const unsigned char in[RFT_ARCHIVE_HEADER_BYTES],
                                       uint64_t bytes, const rft_limits *limits,
                                       rft_archive_header *out, refit_error *error)
{
    RFT_TRY(check_form(in, error));
    rft_archive_header header = take_fields(in);
    RFT_REFUSE_IF(header.file_bytes != bytes, error, REFIT_ERR_CORRUPT,
                  "it has %llu bytes and should have %llu", (unsigned long long)bytes,
                  (unsigned long long)header.file_bytes);
    RFT_TRY(check_limits(&header, limits, error));
    RFT_REFUSE_IF(!is_sensible(&header) || !has_room(&header, bytes), error, REFIT_ERR_CORRUPT,
                  "its header contradicts itself");
    *out = header;
    return REFIT_OK;
}

/* ---- Frames ---- */

void rft_archive_frame_encode(const rft_archive_frame *frame, unsigned char *out)
{
    rft_put_u32(out, frame->sequence);
    rft_put_u32(out + 4, frame->blocks);
    rft_put_u64(out + 8, frame->payload_bytes);
    rft_put_u64(out + 16, frame->payload_hash);
}

rft_archive_frame rft_archive_frame_decode(const unsigned char *in)
{
    return (rft_archive_frame){
        .sequence = rft_get_u32(in),
        .blocks = rft_get_u32(in + 4),
        .payload_bytes = rft_get_u64(in + 8),
        .payload_hash = rft_get_u64(in + 16),
    };
}

/* ---- For the door ---- */

refit_status rft_archive_header_describe(const rft_archive_header *header, const char *name,
                                         refit_archive_info *info, refit_error *error)
{
    RFT_REFUSE_IF(info == NULL || info->size < sizeof *info, error, REFIT_ERR_INVALID,
                  "set info.size to sizeof(refit_archive_info)");
    size_t size = info->size;
    *info = (refit_archive_info){
        .size = size,
        .epoch = header->epoch,
        .version = header->version,
        .base = header->base,
        .file_bytes = header->file_bytes,
        .weight_bytes = header->weight_bytes,
        .elements = header->elements,
        .changed = header->changed,
        .tensors = header->tensors,
        .blocks_same = header->same,
        .blocks_sparse = header->sparse,
        .blocks_dense = header->dense,
    };
    (void)snprintf(info->name, sizeof info->name, "%s", name);
    memcpy(info->digest, header->digest.bytes, sizeof info->digest);
    memcpy(info->base_digest, header->base_digest.bytes, sizeof info->base_digest);
    memcpy(info->manifest, header->manifest.bytes, sizeof info->manifest);
    return REFIT_OK;
}
