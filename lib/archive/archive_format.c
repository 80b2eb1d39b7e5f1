/*
 * The header, the frames' beginnings and the changes of an archive's file, encoded and decoded;
 * archive_format.h says what lies where.
 */
#include "archive/archive_format.h"

#include <stdio.h>
#include <string.h>

#include <xxhash.h>

#include "wire/frame.h"

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

uint64_t rft_archive_elements(const rft_manifest *manifest, uint32_t tensor)
{
    const rft_block block = {.tensor = tensor};
    return manifest->tensors[tensor].bytes / rft_sparse_shape(manifest, &block).width;
}

uint32_t rft_archive_header_bytes(const rft_archive_header *header)
{
    return header->format == 1 ? RFT_ARCHIVE_HEADER_LEAST : RFT_ARCHIVE_HEADER_BYTES;
}

uint32_t rft_archive_frame_bytes(const rft_archive_header *header)
{
    return header->format == 1 ? RFT_ARCHIVE_FRAME_BYTES - RFT_PACK_BYTES : RFT_ARCHIVE_FRAME_BYTES;
}

uint64_t rft_archive_blocks(const rft_archive_header *header)
{
    return (uint64_t)header->same + header->sparse + header->dense;
}

uint64_t rft_archive_changes_bytes(const rft_archive_header *header)
{
    if (header->format == 1) return 0;
    return header->digest_bytes / 8 * RFT_ARCHIVE_CHANGE_BYTES + RFT_ARCHIVE_HASH_BYTES;
}

void rft_archive_header_encode(const rft_archive_header *header,
                               unsigned char out[RFT_ARCHIVE_HEADER_BYTES])
{
    const uint32_t hashed = RFT_ARCHIVE_HEADER_BYTES - RFT_ARCHIVE_HASH_BYTES;
    memcpy(out, magic, sizeof magic);
    rft_put_u32(out + 8, RFT_ARCHIVE_FORMAT);
    FIELDS(PUT32, PUT64, PUTD)
    rft_put_u32(out + 160, header->packed);
    rft_put_u32(out + 164, 0);
    rft_put_u64(out + hashed, XXH3_64bits(out, hashed));
}

static rft_archive_header take_fields(const unsigned char *in)
{
    rft_archive_header header = {.format = rft_get_u32(in + 8)};
    FIELDS(TAKE32, TAKE64, TAKED)
    if (header.format > 1) header.packed = rft_get_u32(in + 160);
    return header;
}

static refit_status check_form(const unsigned char *in, uint64_t bytes, refit_error *error)
{
    RFT_REFUSE_IF(bytes < RFT_ARCHIVE_HEADER_LEAST || memcmp(in, magic, sizeof magic) != 0, error,
                  REFIT_ERR_INVALID, "it is not a file of an archive");
    const rft_archive_header header = {.format = rft_get_u32(in + 8)};
    RFT_REFUSE_IF(header.format == 0 || header.format > RFT_ARCHIVE_FORMAT, error,
                  REFIT_ERR_UNSUPPORTED, "it has format %u; this refit knows format %u and before",
                  header.format, RFT_ARCHIVE_FORMAT);
    const uint32_t hashed = rft_archive_header_bytes(&header) - RFT_ARCHIVE_HASH_BYTES;
    RFT_REFUSE_IF(bytes < hashed + RFT_ARCHIVE_HASH_BYTES ||
                      rft_get_u64(in + hashed) != XXH3_64bits(in, hashed) ||
                      (header.format > 1 && rft_get_u32(in + 164) != 0),
                  error, REFIT_ERR_CORRUPT, "its header is damaged: the hash does not match");
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

/* Whether the file is as long as it must be at least: an anchor has every byte of the weights,
 * unless frames are packed. Each term is below the file's size, except the weights, which limits
 * bound. */
static bool has_room(const rft_archive_header *header, uint64_t bytes)
{
    uint64_t left = bytes - rft_archive_header_bytes(header);
    if (header->manifest_bytes > left) return false;
    left -= header->manifest_bytes;
    if (header->digest_bytes > left || header->digest_bytes > (uint64_t)header->tensors * 8 ||
        rft_archive_changes_bytes(header) > left - header->digest_bytes) {
        return false;
    }
    left -= header->digest_bytes + rft_archive_changes_bytes(header);
    uint64_t frames =
        (uint64_t)header->frames * (rft_archive_frame_bytes(header) + RFT_ARCHIVE_HASH_BYTES);
    frames += rft_archive_blocks(header); /* the mode of each */
    if (header->frames > rft_archive_blocks(header) || frames > left ||
        header->packed > header->frames)
        return false;
    return header->base != 0 || header->packed > 0 || header->weight_bytes <= left - frames;
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

refit_status rft_archive_header_decode(const unsigned char *in, uint64_t bytes,
                                       const rft_limits *limits, rft_archive_header *out,
                                       refit_error *error)
{
    RFT_TRY(check_form(in, bytes, error));
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
    if (frame->packed)
        memcpy(out + 24, frame->planes, RFT_PACK_BYTES);
    else
        memset(out + 24, 0, RFT_PACK_BYTES);
}

rft_archive_frame rft_archive_frame_decode(const rft_archive_header *header,
                                           const unsigned char *in)
{
    static const unsigned char none[RFT_PACK_BYTES];
    rft_archive_frame frame = {
        .sequence = rft_get_u32(in),
        .blocks = rft_get_u32(in + 4),
        .payload_bytes = rft_get_u64(in + 8),
        .payload_hash = rft_get_u64(in + 16),
    };
    if (header->format > 1) memcpy(frame.planes, in + 24, RFT_PACK_BYTES);
    frame.packed = memcmp(frame.planes, none, RFT_PACK_BYTES) != 0;
    return frame;
}

/* ---- Changes ---- */

void rft_archive_change_encode(const rft_archive_change *change, unsigned char *out)
{
    rft_put_u64(out, change->changed);
    rft_put_u32(out + 8, change->same);
    rft_put_u32(out + 12, change->sparse);
    rft_put_u32(out + 16, change->dense);
}

rft_archive_change rft_archive_change_decode(const unsigned char *in)
{
    return (rft_archive_change){
        .changed = rft_get_u64(in),
        .same = rft_get_u32(in + 8),
        .sparse = rft_get_u32(in + 12),
        .dense = rft_get_u32(in + 16),
    };
}

/* ---- The public description ---- */

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
        .frames = header->frames,
        .frames_packed = header->packed,
    };
    (void)snprintf(info->name, sizeof info->name, "%s", name);
    memcpy(info->digest, header->digest.bytes, sizeof info->digest);
    memcpy(info->base_digest, header->base_digest.bytes, sizeof info->base_digest);
    memcpy(info->manifest, header->manifest.bytes, sizeof info->manifest);
    return REFIT_OK;
}
