/*
 * A file into the archive's reader: a byte of flags, then the file.
 *
 * One flag says that the fuzzer's bytes are to have the length, the digests and the hashes that
 * their sections need, so that damage is not all that is ever seen; another that the file's changes
 * are applied to weights. Whatever the file, it is refused with a status of the reader's, or read
 * to its end; nothing is written outside the image; and what verifies has the digests that the file
 * tells.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <xxhash.h>

#include "archive/archive_reader.h"
#include "fuzz.h"

#define MENDED  1u
#define APPLIED 2u
#define MOST    (1u << 16)

static const rft_limits limits = {.tensors = 16,
                                  .rank = 8,
                                  .name_bytes = 64,
                                  .message_bytes = 4096,
                                  .manifest_bytes = 4096,
                                  .frame_bytes = 1 << 22,
                                  .version_bytes = 1 << 20,
                                  .blocks = 1 << 8,
                                  .window = 8};

/* What of the header says how long the parts of the file are; a format that is not known is left to
 * the reader, as the newest. */
static rft_archive_header lengths_of(const unsigned char *file)
{
    return (rft_archive_header){
        .format = rft_get_u32(file + 8) == 1 ? 1 : RFT_ARCHIVE_FORMAT,
        .manifest_bytes = rft_get_u64(file + 96),
        .digest_bytes = rft_get_u64(file + 104),
    };
}

/* The digests and the hash of the lists, if there is room for those. Returns where the frames
 * begin, or 0. */
static size_t mend_lists(unsigned char *file, size_t size, const rft_archive_header *header)
{
    uint64_t manifest = header->manifest_bytes, digests = header->digest_bytes;
    size_t room = size - rft_archive_header_bytes(header);
    if (manifest > room || digests > room - manifest) return 0;
    unsigned char *lists = file + rft_archive_header_bytes(header);
    rft_manifest named = {.digest = rft_digest128_of((rft_view){lists, (size_t)manifest})};
    rft_digest128 version =
        rft_version_digest_encoded(&named, (rft_view){lists + manifest, (size_t)digests});
    memcpy(file + 144, named.digest.bytes, 16);
    memcpy(file + 112, version.bytes, 16);
    uint64_t changes = rft_archive_changes_bytes(header);
    if (changes > room - manifest - digests) return 0;
    unsigned char *listed = lists + manifest + digests;
    if (changes > 0) rft_put_u64(listed + changes - 8, XXH3_64bits(listed, (size_t)changes - 8));
    return (size_t)(listed - file) + (size_t)changes;
}

static void mend_frames(unsigned char *file, size_t at, size_t size,
                        const rft_archive_header *header)
{
    const size_t head = rft_archive_frame_bytes(header);
    while (size - at >= head + RFT_ARCHIVE_HASH_BYTES) {
        rft_archive_frame frame = rft_archive_frame_decode(header, file + at);
        size_t left = size - at - head - RFT_ARCHIVE_HASH_BYTES;
        if (frame.blocks > left || frame.payload_bytes > left - frame.blocks) return;
        size_t hashed = head + frame.blocks;
        const unsigned char *payload = file + at + hashed + RFT_ARCHIVE_HASH_BYTES;
        rft_put_u64(file + at + 16, XXH3_64bits(payload, (size_t)frame.payload_bytes));
        rft_put_u64(file + at + hashed, XXH3_64bits(file + at, hashed));
        at += hashed + RFT_ARCHIVE_HASH_BYTES + (size_t)frame.payload_bytes;
    }
}

static void mend(unsigned char *file, size_t size)
{
    if (size < RFT_ARCHIVE_HEADER_BYTES) return;
    const rft_archive_header header = lengths_of(file);
    const size_t hashed = rft_archive_header_bytes(&header) - RFT_ARCHIVE_HASH_BYTES;
    rft_put_u64(file + 56, size);
    size_t frames = mend_lists(file, size, &header);
    if (frames != 0) mend_frames(file, frames, size, &header);
    rft_put_u64(file + hashed, XXH3_64bits(file, hashed));
}

static void check_status(refit_status status)
{
    FUZZ_REQUIRE(status == REFIT_OK || status == REFIT_ERR_INVALID || status == REFIT_ERR_CORRUPT ||
                 status == REFIT_ERR_UNSUPPORTED || status == REFIT_ERR_LIMIT ||
                 status == REFIT_ERR_STALE || status == REFIT_ERR_PROTOCOL);
}

/* A base of which every byte is known; an anchor begins with nothing. */
static void apply(rft_archive_reader *reader)
{
    size_t bytes = (size_t)reader->manifest->store_bytes;
    unsigned char *image = malloc(bytes);
    FUZZ_REQUIRE(image != NULL);
    memset(image, reader->header.base == 0 ? 0 : 0x5a, bytes);
    bool end = false;
    refit_status status = REFIT_OK;
    while (status == REFIT_OK && !end)
        status = rft_archive_reader_frame(reader, image, image, &end, NULL);
    check_status(status);
    if (status == REFIT_OK) {
        rft_image_cursor cursor = {0};
        status = rft_archive_reader_verify(reader, image, UINT64_MAX, &cursor, NULL);
        FUZZ_REQUIRE(status == REFIT_OK || status == REFIT_ERR_CORRUPT);
        fuzz_taken += status == REFIT_OK;
    }
    free(image);
}

static void read_file(int file, size_t size, bool applied)
{
    rft_archive_reader reader;
    refit_status status = rft_archive_reader_open(file, size, &limits, &reader, NULL);
    check_status(status);
    if (status != REFIT_OK) return;
    status = rft_archive_reader_lists(&reader, &limits, NULL);
    check_status(status);
    if (status == REFIT_OK && applied) apply(&reader);
    if (status == REFIT_OK && !applied) check_status(rft_archive_reader_frames(&reader, NULL));
    rft_archive_reader_close(&reader);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static unsigned char bytes[MOST];
    static int memory = -1;
    if (size == 0 || size > MOST) return 0;
    if (memory < 0) memory = memfd_create("archive", MFD_CLOEXEC);
    FUZZ_REQUIRE(memory >= 0);
    size_t count = size - 1;
    memcpy(bytes, data + 1, count);
    if ((data[0] & MENDED) != 0) mend(bytes, count);
    /* In this order the file's pages are kept from one input to the next. */
    FUZZ_REQUIRE(pwrite(memory, bytes, count, 0) == (ssize_t)count);
    FUZZ_REQUIRE(ftruncate(memory, (off_t)count) == 0);
    read_file(dup(memory), count, (data[0] & APPLIED) != 0);
    return 0;
}
