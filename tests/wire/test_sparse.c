/* Sparse blocks: base and changes make the version, bit for bit; damage and false entries are
 * noticed. */
#include <stdlib.h>
#include <xxhash.h>

#include "base/alloc.h"
#include "frame_rig.h"
#include "kernels/digest.h"
#include "tensor_samples.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "wire/frame.h"
#include "wire_samples.h"

#ifndef LIES /* told of each of forty versions: fewer, where all takes many times as long */
#define LIES 15u
#endif

/* One of `every` elements gets a new value: for halves mostly the next one. */
static void change_block(frame_rig *f, const rft_block *block, uint64_t every)
{
    rft_delta_shape shape = rft_sparse_shape(f->manifest, block);
    unsigned char *at = f->image + block->offset;
    for (uint32_t i = 0; i < shape.elements; i++, at += shape.width) {
        if (seeded_below(&f->seed, every) != 0) continue;
        bool next = shape.kind == RFT_DELTA_HALF && seeded_below(&f->seed, 8) != 0;
        if (next) {
            at[0] = (unsigned char)(at[0] + 1);
            continue;
        }
        for (uint32_t byte = 0; byte < shape.width; byte++)
            at[byte] = (unsigned char)(seeded_next(&f->seed) >> 20);
    }
}

static void open_fixture(frame_rig *f, uint64_t seed)
{
    static const uint64_t every[] = {0, 1, 2, 5, 40, 1000, 30000};
    const refit_tensor last = sample_tensor("last", REFIT_BF16, 1, 200000, 0);
    frame_rig_open(f, seed, 100000, &last, 400000);
    f->image = malloc(f->manifest->store_bytes);
    assert_non_null(f->image);
    memcpy(f->image, f->base, f->manifest->store_bytes);
    for (uint32_t i = 0; i < f->manifest->block_count; i++) {
        uint64_t chosen = every[seeded_below(&f->seed, COUNT_OF(every))];
        if (i + 1 == f->manifest->block_count) chosen = 40;
        if (chosen != 0) change_block(f, &f->manifest->blocks[i], chosen);
    }
    frame_rig_seal(f);
    frame_rig_assemble(f);
}

static void open_packing(frame_rig *f, uint64_t seed)
{
    open_fixture(f, seed);
    assert_ok(rft_frame_codec_open(1 + (uint32_t)(seed % 5), &f->codec, NULL));
}

static rft_message encode(frame_rig *f, uint32_t sequence, uint64_t worth, rft_view *payload)
{
    const rft_frame_source source = {.image = f->image,
                                     .same = f->same,
                                     .base = f->base,
                                     .worth = worth,
                                     .codec = f->codec,
                                     .price = f->price,
                                     .before = f->before,
                                     .after = f->after};
    return frame_rig_encode(f, sequence, &source, payload);
}

static void take_rest(frame_rig *f)
{
    for (uint32_t i = 0; i < f->manifest->frame_count; i++) {
        rft_view payload;
        rft_message frame = encode(f, i, 0, &payload);
        assert_ok(rft_reassembly_take(f->reassembly, &frame, payload, NULL));
    }
}

/* The first frame that has a sparse block: the last block is always one. */
static rft_message sparse_frame(frame_rig *f, rft_view *payload)
{
    for (uint32_t i = 0; i < f->manifest->frame_count; i++) {
        rft_message frame = encode(f, i, 0, payload);
        if (f->counts.sparse > 0) return frame;
    }
    fail_msg("no frame has a sparse block");
    return (rft_message){0};
}

TEST(changes_make_the_version)
{
    uint64_t sparse = 0, same = 0, dense = 0;
    for (uint64_t seed = 1; seed <= 30; seed++) {
        frame_rig f;
        open_fixture(&f, seed);
        take_rest(&f);
        assert_staged(&f);
        for (uint32_t i = 0; i < f.manifest->frame_count; i++) {
            rft_view payload;
            (void)encode(&f, i, 0, &payload);
            sparse += f.counts.sparse;
            same += f.counts.same;
            dense += f.counts.dense;
        }
        frame_rig_close(&f);
    }
    assert_true(sparse > 0 && same > 0 && dense > 0);
}

/* The tensors are noise, and shrink nowhere but where they are as flat as a model's new ones. */
static void flatten(frame_rig *f)
{
    for (uint32_t i = 0; i < f->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &f->manifest->tensors[i];
        if (tensor->alias_of == REFIT_NO_ALIAS)
            memset(f->image + tensor->offset + tensor->bytes / 3, 7, tensor->bytes / 3);
    }
    frame_rig_seal(f);
}

/* The second time without an allocation. */
static void take_twice(frame_rig *f)
{
    take_rest(f);
    assert_staged(f);
    uint64_t before = rft_alloc_count();
    rft_reassembly_reset(f->reassembly, f->staging, f->base);
    take_rest(f);
    assert_int_equal(rft_alloc_count(), before);
    assert_staged(f);
}

TEST(packed_changes_make_the_version)
{
    uint64_t packed = 0, saved = 0;
    for (uint64_t seed = 1; seed <= 30; seed++) {
        frame_rig f;
        open_packing(&f, seed);
        if (seed % 2 == 0) flatten(&f);
        for (uint32_t i = 0; i < f.manifest->frame_count; i++) {
            rft_frame_codec *codec = f.codec;
            rft_view plain, payload;
            f.codec = NULL;
            (void)encode(&f, i, 0, &plain);
            f.codec = codec;
            rft_message frame = encode(&f, i, 0, &payload);
            assert_true(payload.count <= plain.count);
            packed += frame.as.frame.planes.count > 0;
            saved += plain.count - payload.count;
        }
        take_twice(&f);
        frame_rig_close(&f);
    }
    assert_true(packed > 0 && saved > 1000000);
}

TEST(nothing_is_packed_of_a_frame_without_changes)
{
    frame_rig f;
    rft_view packed = {"", 1};
    unsigned char modes[RFT_FRAME_BLOCKS];
    memset(modes, RFT_BLOCK_SAME, sizeof modes);
    open_packing(&f, 2); /* a packer that has no memory yet */
    assert_ok(rft_frame_codec_pack(f.codec, f.manifest, &f.manifest->frames[0], modes,
                                   bytes_view("", 0), &packed, f.planes, NULL));
    assert_int_equal(packed.count, 0);
    frame_rig_close(&f);
}

/* Zeroes shrink as soon as it is tried: from 32 bytes on. */
TEST(the_smallest_plane_that_is_compressed)
{
    static const unsigned char zeroes[33];
    for (uint64_t bytes = 31; bytes <= 33; bytes++) {
        const refit_tensor tensor = sample_tensor("t", REFIT_U8, 1, bytes, 0);
        rft_manifest *manifest = sample_manifest(&tensor, 1, 4096);
        const unsigned char mode = RFT_BLOCK_DENSE;
        unsigned char planes[RFT_PACK_BYTES];
        rft_frame_codec *codec = NULL;
        rft_view packed;
        assert_ok(rft_frame_codec_open(1, &codec, NULL));
        assert_ok(rft_frame_codec_pack(codec, manifest, &manifest->frames[0], &mode,
                                       bytes_view(zeroes, bytes), &packed, planes, NULL));
        assert_true(bytes < 32 ? packed.count == 0 : packed.count > 0 && packed.count < bytes);
        rft_frame_codec_close(codec);
        rft_manifest_close(manifest);
    }
}

/* The room that frames are gathered in is that of the largest, and not of several. */
TEST(frames_one_after_the_other_take_the_room_of_one)
{
    frame_rig f;
    rft_view payload;
    open_fixture(&f, 9);
    rft_message frame = sparse_frame(&f, &payload);
    size_t room = f.scratch.room;
    for (int i = 0; i < 5; i++) {
        (void)encode(&f, frame.as.frame.sequence, 0, &payload);
        assert_int_equal(f.scratch.room, room);
    }
    frame_rig_close(&f);
}

TEST(a_frame_is_never_longer_than_its_stretch)
{
    for (uint64_t seed = 50; seed < 60; seed++) {
        frame_rig f;
        open_fixture(&f, seed);
        for (uint32_t i = 0; i < f.manifest->frame_count; i++) {
            rft_view payload;
            (void)encode(&f, i, 0, &payload);
            assert_true(payload.count <= f.manifest->frames[i].bytes);
        }
        frame_rig_close(&f);
    }
}

TEST(what_saves_too_little_goes_whole)
{
    frame_rig f;
    open_fixture(&f, 3);
    for (uint32_t i = 0; i < f.manifest->frame_count; i++) {
        const rft_frame_span *span = &f.manifest->frames[i];
        rft_view small, payload;
        (void)encode(&f, i, 0, &small);
        uint64_t saved = span->bytes - small.count;
        bool coded = f.counts.dense < span->blocks;
        (void)encode(&f, i, saved, &payload);
        assert_int_equal(payload.count, small.count);
        (void)encode(&f, i, saved + 1, &payload);
        assert_ptr_equal(payload.data, f.image + span->offset);
        assert_int_equal(payload.count, span->bytes);
        assert_int_equal(f.counts.dense, span->blocks);
        assert_true(coded || saved == 0);
    }
    frame_rig_close(&f);
}

/* Of what is noise in half of its blocks, the others' changes are still sent as such. */
TEST(blocks_that_do_not_pay_go_whole)
{
    uint32_t fewer = 0;
    for (uint64_t seed = 1; seed <= 6; seed++) {
        frame_rig f;
        open_fixture(&f, seed);
        for (uint32_t i = 0; i < f.manifest->frame_count; i++) {
            rft_view payload;
            f.price = 0;
            (void)encode(&f, i, 0, &payload);
            rft_frame_counts cheap = f.counts;
            f.price = 3;
            (void)encode(&f, i, 0, &payload);
            assert_true(f.counts.sparse <= cheap.sparse);
            fewer += f.counts.sparse > 0 && f.counts.sparse < cheap.sparse;
        }
        take_rest(&f);
        assert_staged(&f);
        frame_rig_close(&f);
    }
    assert_true(fewer > 0);
}

/* What is known is taken as it is, and the rest of the bytes; here it is right in every other
 * block, and not asked for in the others. */
TEST(parts_that_are_known_are_not_taken_again)
{
    frame_rig f;
    open_fixture(&f, 4);
    uint32_t blocks = f.manifest->block_count;
    uint64_t *parts[2] = {calloc(blocks, 8), calloc(blocks, 8)};
    unsigned char *known = calloc(blocks, 1);
    assert_true(parts[0] != NULL && parts[1] != NULL && known != NULL);
    for (uint32_t i = 0; i < blocks; i++) {
        const rft_block *block = &f.manifest->blocks[i];
        known[i] = i % 2 == 0;
        for (uint32_t side = 0; side < 2; side++) {
            const unsigned char *image = side == 0 ? f.base : f.image;
            uint64_t part =
                rft_digest_part(image + block->offset, block->bytes, block->tensor_offset);
            parts[side][i] = known[i] ? part : ~part;
        }
    }
    f.before = (rft_parts){parts[0], known};
    f.after = (rft_parts){parts[1], known};
    take_rest(&f);
    assert_staged(&f);
    rft_reassembly_reset(f.reassembly, f.staging, f.base);
    memset(known, 1, blocks);
    uint32_t refused = 0;
    for (uint32_t i = 0; i < f.manifest->frame_count; i++) {
        rft_view payload;
        rft_message frame = encode(&f, i, 0, &payload);
        refused += rft_reassembly_take(f.reassembly, &frame, payload, NULL) == REFIT_ERR_STALE;
    }
    assert_true(refused > 0);
    free(parts[0]);
    free(parts[1]);
    free(known);
    frame_rig_close(&f);
}

TEST(the_same_frame_again_changes_nothing)
{
    frame_rig f;
    open_fixture(&f, 4);
    take_rest(&f);
    take_twice(&f);
    frame_rig_close(&f);
}

/* A copy to be changed, with a byte after it. */
static unsigned char *lie_of(rft_view payload)
{
    unsigned char *lie = calloc(1, payload.count + 1);
    assert_non_null(lie);
    memcpy(lie, payload.data, payload.count);
    return lie;
}

static void see_damage(frame_rig *f)
{
    rft_view payload;
    rft_message frame = sparse_frame(f, &payload);
    unsigned char *damaged = malloc(payload.count);
    assert_non_null(damaged);
    for (int i = 0; i < 500; i++) {
        memcpy(damaged, payload.data, payload.count);
        size_t at = i < 60 ? (size_t)i : seeded_below(&f->seed, payload.count);
        damaged[at % payload.count] ^= (unsigned char)(1u << seeded_below(&f->seed, 8));
        assert_int_equal(frame_rig_take_copy(f, &frame, bytes_view(damaged, payload.count)),
                         REFIT_ERR_CORRUPT);
    }
    assert_int_equal(rft_reassembly_taken(f->reassembly), 0);
    free(damaged);
    take_rest(f);
    assert_staged(f);
}

TEST(damage_is_seen_and_the_frame_asked_for_again)
{
    frame_rig f;
    open_fixture(&f, 5);
    see_damage(&f);
    frame_rig_close(&f);
    open_packing(&f, 5);
    flatten(&f);
    see_damage(&f);
    frame_rig_close(&f);
}

/* A frame whose hash is right, whatever it says. It may be taken for what it is not only where
 * dense blocks lie; the seal sees that. Whether it was refused. */
static bool tell_a_lie(frame_rig *f)
{
    rft_view payload;
    rft_message frame = sparse_frame(f, &payload);
    unsigned char *lie = lie_of(payload);
    for (uint64_t n = 1 + seeded_below(&f->seed, 4); n > 0; n--) {
        uint64_t reach = seeded_below(&f->seed, 2) != 0 ? 64 : payload.count;
        size_t at = seeded_below(&f->seed, reach) % payload.count;
        lie[at] = (unsigned char)seeded_next(&f->seed);
    }
    size_t count = payload.count - seeded_below(&f->seed, 3) % payload.count;
    if (f->codec != NULL && seeded_below(&f->seed, 2) != 0)
        f->planes[seeded_below(&f->seed, RFT_PACK_BYTES)] = (unsigned char)seeded_next(&f->seed);
    frame.as.frame.hash = XXH3_64bits(lie, count);
    refit_status status = frame_rig_take_copy(f, &frame, bytes_view(lie, count));
    free(lie);
    assert_true(status == REFIT_OK || status == REFIT_ERR_PROTOCOL || status == REFIT_ERR_STALE ||
                status == REFIT_ERR_CORRUPT);
    assert_int_equal(rft_reassembly_taken(f->reassembly), status == REFIT_OK ? 1 : 0);
    take_rest(f);
    if (rft_reassembly_verify(f->reassembly, &f->seal, NULL) == REFIT_OK) assert_staged(f);
    if (status != REFIT_OK) assert_staged(f);
    return status != REFIT_OK;
}

TEST(lies_never_make_another_version)
{
    uint32_t refused = 0;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        for (int packed = 0; packed < 2; packed++) {
            frame_rig f;
            (packed ? open_packing : open_fixture)(&f, seed);
            if (packed) flatten(&f);
            for (uint32_t i = 0; i < LIES; i++) {
                memset(f.staging, 0xee, f.manifest->store_bytes);
                rft_reassembly_reset(f.reassembly, f.staging, f.base);
                refused += tell_a_lie(&f);
            }
            frame_rig_close(&f);
        }
    }
    assert_true(refused > 40 * LIES / 3);
}

/* Whatever its bytes say, their hash is right. */
static void assert_lie_refused(frame_rig *f, const rft_message *frame, const unsigned char *payload,
                               size_t count)
{
    rft_message lying = *frame;
    lying.as.frame.hash = XXH3_64bits(payload, count);
    assert_frame_refused(f, &lying, bytes_view(payload, count));
}

TEST(lengths_that_lie_change_nothing)
{
    frame_rig f;
    open_fixture(&f, 6);
    rft_view payload;
    rft_message frame = sparse_frame(&f, &payload);
    unsigned char *lie = lie_of(payload);
    assert_lie_refused(&f, &frame, lie, payload.count - 1);
    assert_lie_refused(&f, &frame, lie, payload.count + 1);
    assert_lie_refused(&f, &frame, lie, RFT_SPARSE_ENTRY_BYTES - 1);
    assert_lie_refused(&f, &frame, lie, RFT_SPARSE_ENTRY_BYTES);
    assert_lie_refused(&f, &frame, lie, 0);
    memset(lie, 0xff, 4); /* more escapes than there can be */
    assert_lie_refused(&f, &frame, lie, payload.count);
    rft_reassembly_reset(f.reassembly, f.staging, NULL);
    assert_lie_refused(&f, &frame, payload.data, payload.count);
    free(lie);
    frame_rig_close(&f);
}

TEST(planes_that_lie_change_nothing)
{
    frame_rig f;
    open_packing(&f, 6);
    flatten(&f);
    rft_view payload;
    rft_message frame = sparse_frame(&f, &payload);
    assert_int_equal(frame.as.frame.planes.count, RFT_PACK_BYTES);
    unsigned char *lie = lie_of(payload);
    assert_lie_refused(&f, &frame, lie, payload.count - 1);
    assert_lie_refused(&f, &frame, lie, payload.count + 1);
    assert_lie_refused(&f, &frame, lie, 0);
    for (uint32_t i = 0; i < RFT_PACK_PLANES; i++) {
        uint32_t length = rft_get_u32(f.planes + 4 * i);
        rft_put_u32(f.planes + 4 * i, UINT32_MAX);
        assert_lie_refused(&f, &frame, lie, payload.count);
        rft_put_u32(f.planes + 4 * i, length + 1);
        assert_lie_refused(&f, &frame, lie, payload.count);
        rft_put_u32(f.planes + 4 * i, length);
    }
    memset(f.planes, 0, sizeof f.planes); /* all as they are: other bytes than came */
    assert_lie_refused(&f, &frame, lie, payload.count);
    free(lie);
    frame_rig_close(&f);
}

TEST(another_base_is_not_changed)
{
    frame_rig f;
    open_fixture(&f, 7);
    rft_view payload;
    rft_message frame = sparse_frame(&f, &payload);
    const rft_frame_span *span = &f.manifest->frames[frame.as.frame.sequence];
    const unsigned char *modes = frame.as.frame.modes.data;
    uint32_t at =
        (uint32_t)((const unsigned char *)memchr(modes, RFT_BLOCK_SPARSE, span->blocks) - modes);
    unsigned char *byte = f.base + f.manifest->blocks[span->first_block + at].offset;
    *byte ^= 1;
    assert_refused(rft_reassembly_take(f.reassembly, &frame, payload, error), REFIT_ERR_STALE,
                   "other bytes");
    *byte ^= 1;
    take_rest(&f);
    assert_staged(&f);
    frame_rig_close(&f);
}

/* What the entry promises is held against what came of the planes. */
TEST(a_wrong_result_is_asked_for_again)
{
    frame_rig f;
    open_fixture(&f, 8);
    rft_view payload;
    rft_message frame = sparse_frame(&f, &payload);
    unsigned char *lie = lie_of(payload);
    lie[12] ^= 1;
    frame.as.frame.hash = XXH3_64bits(lie, payload.count);
    assert_int_equal(frame_rig_take_copy(&f, &frame, bytes_view(lie, payload.count)),
                     REFIT_ERR_CORRUPT);
    free(lie);
    take_rest(&f);
    assert_staged(&f);
    frame_rig_close(&f);
}

/* ---- What a frame takes of its credit */

TEST(a_whole_frame_takes_a_whole_credit)
{
    assert_int_equal(rft_credit_cost(2097152, 2097152), RFT_CREDIT);
    assert_int_equal(rft_credit_cost(UINT64_MAX, 2097152), RFT_CREDIT);
    assert_int_equal(rft_credit_cost(1, 1), RFT_CREDIT);
}

TEST(less_takes_its_share_rounded_up)
{
    assert_int_equal(rft_credit_cost(2097151, 2097152), RFT_CREDIT);
    assert_int_equal(rft_credit_cost(131072, 2097152), 1);
    assert_int_equal(rft_credit_cost(131073, 2097152), 2);
    assert_int_equal(rft_credit_cost(1048576, 2097152), RFT_CREDIT / 2);
    assert_int_equal(rft_credit_cost(16, 17), 8);
}

TEST(nothing_takes_a_part_as_well)
{
    assert_int_equal(rft_credit_cost(0, 2097152), 1);
    assert_int_equal(rft_credit_cost(0, 1), 1);
}

int main(void)
{
    return test_run("sparse");
}
