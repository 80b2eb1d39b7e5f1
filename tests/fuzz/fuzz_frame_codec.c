/*
 * Planes into payloads. The input says which frame of fuzz_frame's version is meant, its block
 * modes, and its eight planes one after another:
 *
 *     frame | number of modes | modes… | plane × 8
 *     plane: flags | number of bytes, little-endian, two of them | repeats | bytes…
 *
 * The bytes of a plane are taken that many times over, and compressed here if a flag says so, as no
 * fuzzer writes what zstd reads; another says what length FRAME gives for it: none, as of a plane
 * that travels as it is, the right one, or one that is off by the last byte. What is unpacked is no
 * longer than the range of the image that it stands for; and a payload of which every entry holds
 * together is packed again and unpacked to the same.
 */
#include <zstd.h>

#include "frame_manifest.h"
#include "fuzz.h"
#include "wire/frame.h"
#include "wire/reassembly.h"

#define HEADER       4u
#define SHRUNK       1u
#define HAS_LENGTH   2u
#define WRONG_LENGTH 4u
#define PLANE_MOST   (1u << 16)

/* The frame as it travels. */
typedef struct travelling {
    unsigned char *modes;
    unsigned char planes[RFT_PACK_BYTES];
    unsigned char packed[RFT_PACK_PLANES * 2 * PLANE_MOST];
    size_t count;
} travelling;

typedef struct fixture {
    rft_manifest *manifest;
    rft_frame_codec *codec;
    rft_frame_codec *again; /* packs what the first has unpacked */
    ZSTD_CCtx *compressor;
    unsigned char plain[PLANE_MOST];
    travelling frame;
    fuzz_room modes, packed, payload;
} fixture;

static fixture *fixture_for_all(void)
{
    static fixture f;
    if (f.manifest != NULL) return &f;
    f.manifest = frame_manifest_open();
    f.compressor = ZSTD_createCCtx();
    FUZZ_REQUIRE(f.compressor != NULL);
    FUZZ_REQUIRE(rft_frame_codec_open(1, &f.codec, NULL) == REFIT_OK);
    FUZZ_REQUIRE(rft_frame_codec_open(1, &f.again, NULL) == REFIT_OK);
    return &f;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Modes as the assembly has checked them: as many as the frame has blocks, none unknown. */
static size_t take_modes(fixture *f, const rft_frame_span *span, const uint8_t *at, size_t left)
{
    size_t given = smaller(at[1], left - 2);
    f->frame.modes = fuzz_room_take(&f->modes, NULL, span->blocks);
    for (uint32_t i = 0; i < span->blocks; i++)
        f->frame.modes[i] = i < given ? at[2 + i] % (RFT_BLOCK_SPARSE + 1u) : RFT_BLOCK_SPARSE;
    return 2 + given;
}

static size_t repeat(unsigned char *to, const uint8_t *bytes, size_t count, size_t times)
{
    size_t made = 0;
    for (size_t i = 0; i < times && made + count <= PLANE_MOST; i++, made += count)
        memcpy(to + made, bytes, count);
    return made;
}

/* Returns how many bytes of input the plane took. */
static size_t take_plane(fixture *f, uint32_t plane, const uint8_t *at, size_t left)
{
    size_t count = smaller((size_t)at[1] | (size_t)at[2] << 8, left - HEADER);
    size_t plain = count == 0 ? 0 : repeat(f->plain, at + HEADER, count, 1 + (size_t)at[3]);
    unsigned char *to = f->frame.packed + f->frame.count;
    size_t made = plain;
    if ((at[0] & SHRUNK) != 0) {
        made = ZSTD_compressCCtx(f->compressor, to, 2 * PLANE_MOST, f->plain, plain, 1);
        FUZZ_REQUIRE(ZSTD_isError(made) == 0);
    } else {
        memcpy(to, f->plain, made);
    }
    f->frame.count += made;
    uint32_t length = (at[0] & HAS_LENGTH) != 0 ? (uint32_t)made : 0;
    if ((at[0] & WRONG_LENGTH) != 0) length++;
    rft_put_u32(f->frame.planes + 4 * (size_t)plane, length);
    return HEADER + count;
}

static void take_planes(fixture *f, const uint8_t *at, size_t left)
{
    f->frame.count = 0;
    memset(f->frame.planes, 0, sizeof f->frame.planes);
    for (uint32_t i = 0; i < RFT_PACK_PLANES && left >= HEADER; i++) {
        size_t used = take_plane(f, i, at, left);
        at += used;
        left -= used;
    }
}

/* Whether every block has the bytes that it needs, as the reassembly would find. */
static bool holds_together(const fixture *f, const rft_frame_span *span, rft_view payload)
{
    const unsigned char *entry = payload.data, *end = entry + payload.count, *next = entry;
    for (uint32_t i = 0; i < span->blocks; i++)
        next += f->frame.modes[i] == RFT_BLOCK_SPARSE ? RFT_SPARSE_ENTRY_BYTES : 0;
    for (uint32_t i = 0; i < span->blocks; i++) {
        const rft_block *block = &f->manifest->blocks[span->first_block + i];
        rft_sparse sparse = {0};
        size_t bytes = f->frame.modes[i] == RFT_BLOCK_DENSE ? block->bytes : 0;
        if (f->frame.modes[i] == RFT_BLOCK_SPARSE) {
            if (!rft_sparse_read(f->manifest, block, entry, next, (size_t)(end - next), &sparse))
                return false;
            entry += RFT_SPARSE_ENTRY_BYTES;
            bytes = sparse.delta.total;
        }
        if (bytes > (size_t)(end - next)) return false;
        next += bytes;
    }
    return next == end;
}

static void pack_again(fixture *f, const rft_frame_span *span, rft_view payload)
{
    rft_view packed, unpacked;
    unsigned char planes[RFT_PACK_BYTES];
    FUZZ_REQUIRE(rft_frame_codec_pack(f->again, f->manifest, span, f->frame.modes, payload, &packed,
                                      planes, NULL) == REFIT_OK);
    if (packed.count == 0) return;
    FUZZ_REQUIRE(packed.count < payload.count);
    packed.data = fuzz_room_take(&f->packed, packed.data, packed.count);
    FUZZ_REQUIRE(rft_frame_codec_unpack(f->codec, f->manifest, span, f->frame.modes,
                                        (rft_view){planes, sizeof planes}, packed, &unpacked,
                                        NULL) == REFIT_OK);
    FUZZ_REQUIRE(unpacked.count == payload.count &&
                 memcmp(unpacked.data, payload.data, payload.count) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fixture *f = fixture_for_all();
    if (size < 2) return 0;
    const rft_frame_span *span = &f->manifest->frames[data[0] % f->manifest->frame_count];
    size_t used = take_modes(f, span, data, size);
    take_planes(f, data + used, size - used);
    const rft_view packed = {fuzz_room_take(&f->packed, f->frame.packed, f->frame.count),
                             f->frame.count};
    rft_view payload, planes = {f->frame.planes, sizeof f->frame.planes};
    refit_status status = rft_frame_codec_unpack(f->codec, f->manifest, span, f->frame.modes,
                                                 planes, packed, &payload, NULL);
    FUZZ_REQUIRE(status == REFIT_OK || status == REFIT_ERR_PROTOCOL);
    if (status != REFIT_OK) return 0;
    fuzz_taken++;
    FUZZ_REQUIRE(payload.count <= span->bytes);
    payload.data = fuzz_room_take(&f->payload, payload.data, payload.count);
    if (holds_together(f, span, payload)) pack_again(f, span, payload);
    return 0;
}
