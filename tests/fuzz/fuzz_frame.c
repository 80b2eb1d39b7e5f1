/*
 * Frames into an assembly. The input is a list of frames, seven bytes, its block modes, and bytes
 * to begin the payload with:
 *
 *     flags | sequence | number of modes | bytes too many, signed | byte of the payload |
 *     number of bytes given, little-endian, two of them | modes… | given…
 *
 * The rest of the payload is made here, because frames of real size would hide what matters from
 * the fuzzer: one flag says that after what is given follows all that dense blocks need, another
 * that its hash is right, a third that the digests in its directory are those of the base and of
 * what its changes make of it. A fourth says that the payload is packed, and that what is given
 * begins with the lengths of its planes. However the frames come, nothing is written outside the
 * image, and a version that is complete must verify against the digests of the image that came of
 * it.
 */
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "frame_manifest.h"
#include "fuzz.h"
#include "kernels/digest.h"
#include "wire/frame.h"
#include "wire/reassembly.h"

#define HEADER     7u
#define PAYLOAD    (1u << 16)
#define HAS_LENGTH 1u
#define HAS_HASH   2u
#define HAS_BASE   4u
#define STARTS     8u
#define HAS_PARTS  16u
#define IS_PACKED  32u

typedef struct fixture {
    rft_manifest *manifest;
    rft_reassembly *reassembly;
    unsigned char *staging;
    unsigned char *base;
    fuzz_room room;         /* of the payload, as of all that a sanitizer watches */
    unsigned char *payload; /* in it */
    fuzz_room result;
} fixture;

/* Once for all inputs: a version of 66 KiB costs more to make than a frame to take. What one input
 * leaves in the image no other sees, as only what frames have filled is looked at. */
static fixture *fixture_for_all(void)
{
    static fixture f;
    if (f.manifest != NULL) return &f;
    f.manifest = frame_manifest_open();
    f.staging = calloc(1, f.manifest->store_bytes);
    f.base = calloc(1, f.manifest->store_bytes);
    FUZZ_REQUIRE(f.staging != NULL && f.base != NULL);
    memset(f.base, FRAME_BASE_BYTE, f.manifest->store_bytes);
    FUZZ_REQUIRE(rft_reassembly_open(f.manifest, f.staging, NULL, &f.reassembly, NULL) == REFIT_OK);
    return &f;
}

/* What such modes need besides what is given, found another way than the assembly finds it. */
static size_t needed_bytes(const rft_manifest *manifest, uint32_t sequence, rft_view modes)
{
    if (sequence >= manifest->frame_count) return 0;
    const rft_frame_span *span = &manifest->frames[sequence];
    const unsigned char *mode = modes.data;
    size_t bytes = 0;
    bool dense = true;
    for (uint32_t i = 0; i < span->blocks && i < modes.count; i++) {
        bool whole = mode[i] != RFT_BLOCK_SAME && mode[i] != RFT_BLOCK_SPARSE;
        dense = dense && whole;
        if (whole) bytes += manifest->blocks[span->first_block + i].bytes;
    }
    return dense ? span->bytes : bytes;
}

/* Puts the digests into an entry that the fuzzer has made up, where its planes hold together. */
static size_t set_parts(fixture *f, const rft_block *block, unsigned char *entry,
                        const unsigned char *planes, size_t room)
{
    rft_sparse sparse;
    const unsigned char *base = f->base + block->offset;
    if (!rft_sparse_read(f->manifest, block, entry, planes, room, &sparse)) return room;
    unsigned char *result = fuzz_room_take(&f->result, base, block->bytes);
    sparse.before = rft_digest_part(base, block->bytes, block->tensor_offset);
    if (rft_delta_apply(sparse.shape, &sparse.delta, planes, result))
        sparse.after = rft_digest_part(result, block->bytes, block->tensor_offset);
    rft_sparse_write_entry(&sparse, entry);
    return sparse.delta.total;
}

static void set_all_parts(fixture *f, uint32_t sequence, rft_view modes, size_t count)
{
    if (sequence >= f->manifest->frame_count) return;
    const rft_frame_span *span = &f->manifest->frames[sequence];
    const unsigned char *mode = modes.data;
    size_t sparse = 0;
    for (uint32_t i = 0; i < span->blocks && i < modes.count; i++)
        sparse += mode[i] == RFT_BLOCK_SPARSE;
    size_t at = sparse * RFT_SPARSE_ENTRY_BYTES;
    unsigned char *entry = f->payload;
    for (uint32_t i = 0; i < span->blocks && i < modes.count && at < count; i++) {
        const rft_block *block = &f->manifest->blocks[span->first_block + i];
        if (mode[i] == RFT_BLOCK_DENSE) at += block->bytes;
        if (mode[i] != RFT_BLOCK_SPARSE || at >= count) continue;
        at += set_parts(f, block, entry, f->payload + at, count - at);
        entry += RFT_SPARSE_ENTRY_BYTES;
    }
}

static void take(fixture *f, const rft_message *frame, size_t count)
{
    uint32_t before = rft_reassembly_taken(f->reassembly);
    refit_status status =
        rft_reassembly_take(f->reassembly, frame, (rft_view){f->payload, count}, NULL);
    uint32_t more = rft_reassembly_taken(f->reassembly) - before;
    FUZZ_REQUIRE(status == REFIT_OK ? more <= 1 : more == 0);
    FUZZ_REQUIRE(status == REFIT_OK || status == REFIT_ERR_PROTOCOL ||
                 status == REFIT_ERR_CORRUPT || status == REFIT_ERR_STALE);
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Returns how many bytes of input the frame took. */
static size_t run_frame(fixture *f, const uint8_t *at, size_t left)
{
    size_t modes = smaller(at[2], left - HEADER);
    size_t given = smaller((size_t)at[5] | (size_t)at[6] << 8, left - HEADER - modes);
    const uint8_t *start = at + HEADER + modes;
    rft_message frame = {.kind = RFT_FRAME};
    frame.as.frame.version = 1;
    frame.as.frame.sequence = at[1];
    frame.as.frame.modes = (rft_view){at + HEADER, modes};
    size_t used = HEADER + modes + given, needed = 0;
    bool packed = (at[0] & IS_PACKED) != 0 && given >= RFT_PACK_BYTES;
    if (packed) {
        frame.as.frame.planes = (rft_view){start, RFT_PACK_BYTES};
        start += RFT_PACK_BYTES;
        given -= RFT_PACK_BYTES;
    } else {
        needed = needed_bytes(f->manifest, at[1], frame.as.frame.modes);
    }
    size_t count = given + needed;
    if ((at[0] & HAS_LENGTH) == 0) count += (size_t)(int8_t)at[3];
    if (count > PAYLOAD) count = PAYLOAD;
    f->payload = fuzz_room_take(&f->room, NULL, count);
    memset(f->payload, at[4], count);
    memcpy(f->payload, start, smaller(given, count));
    if ((at[0] & HAS_PARTS) != 0 && !packed) set_all_parts(f, at[1], frame.as.frame.modes, count);
    frame.as.frame.hash = XXH3_64bits(f->payload, count) ^ ((at[0] & HAS_HASH) == 0 ? 1 : 0);
    if ((at[0] & STARTS) != 0)
        rft_reassembly_reset(f->reassembly, f->staging, (at[0] & HAS_BASE) != 0 ? f->base : NULL);
    take(f, &frame, count);
    return used;
}

static void check_complete(const fixture *f)
{
    uint64_t numbers[FRAME_TENSORS];
    unsigned char bytes[8 * FRAME_TENSORS];
    uint32_t next = 0;
    for (uint32_t i = 0; i < f->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &f->manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        uint64_t sum = rft_digest_part(f->staging + tensor->offset, tensor->bytes, 0);
        numbers[next] = rft_digest_finish(sum, tensor->bytes);
        rft_put_u64(bytes + 8 * (size_t)next, numbers[next]);
        next++;
    }
    rft_message seal = {.kind = RFT_SEAL};
    seal.as.seal.digest = rft_version_digest(f->manifest, numbers);
    seal.as.seal.tensors = (rft_view){bytes, 8 * (size_t)next};
    FUZZ_REQUIRE(rft_reassembly_verify(f->reassembly, &seal, NULL) == REFIT_OK);
    FUZZ_REQUIRE(rft_image_verify(f->manifest, f->staging, &seal, NULL) == REFIT_OK);
    bytes[0] ^= 1;
    FUZZ_REQUIRE(rft_reassembly_verify(f->reassembly, &seal, NULL) == REFIT_ERR_CORRUPT);
    fuzz_taken++;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fixture *f = fixture_for_all();
    rft_reassembly_reset(f->reassembly, f->staging, NULL);
    while (size >= HEADER) {
        size_t used = run_frame(f, data, size);
        data += used;
        size -= used;
    }
    if (rft_reassembly_complete(f->reassembly)) check_complete(f);
    return 0;
}
