/* Parts of a version: which bytes they are, that these alone travel and arrive, whatever else the
 * frames are; and lists that are refused. */
#include <stdlib.h>

#include "frame_rig.h"
#include "tensor_samples.h"
#include "tests/support/quick_config.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "wire/want.h"
#include "wire_samples.h"

#define SEEDS         40u
#define ELEMENTS      200000u
#define TENSOR_GROUPS 3u

typedef struct want_rig {
    frame_rig frames;
    rft_bytes list;
    rft_want *want;
    unsigned char *wanted; /* per byte of the image: 1 if it is */
    uint64_t count;
} want_rig;

static const refit_tensor last = {sizeof last, "last",        REFIT_BF16,    2,
                                  {512, 768},  512 * 768 * 2, REFIT_NO_ALIAS};

/* A few groups of rows of the tensor, noted byte by byte; or none, or all of it. */
static void draw_tensor(want_rig *rig, uint32_t index)
{
    uint64_t *seed = &rig->frames.seed;
    const rft_manifest_tensor *tensor = &rig->frames.manifest->tensors[index];
    uint64_t at = 0, groups = seeded_below(seed, TENSOR_GROUPS + 1);
    bool all = seeded_below(seed, 3) == 0;
    if (tensor->alias_of != REFIT_NO_ALIAS) return;
    for (uint64_t i = 0; i < groups && at < tensor->bytes; i++) {
        uint64_t left = tensor->bytes - at;
        rft_want_rows rows = {index, at + seeded_below(seed, left), 0, 0, 0};
        left = tensor->bytes - rows.offset;
        rows.bytes = 1 + seeded_below(seed, left < 3000 ? left : 3000);
        rows.stride = rows.bytes + seeded_below(seed, 5000);
        rows.count = 1 + seeded_below(seed, 1 + (left - rows.bytes) / rows.stride);
        if (all) rows = (rft_want_rows){index, 0, 1, tensor->bytes, tensor->bytes};
        assert_ok(rft_want_append(&rig->list, &rows, NULL));
        for (uint64_t row = 0; row < rows.count; row++)
            memset(rig->wanted + tensor->offset + rows.offset + row * rows.stride, 1, rows.bytes);
        at = rows.offset + (rows.count - 1) * rows.stride + rows.bytes;
    }
}

static void open_rig(want_rig *rig, uint64_t seed)
{
    *rig = (want_rig){0};
    frame_rig_open(&rig->frames, seed, ELEMENTS, &last, 400000);
    frame_rig *f = &rig->frames;
    f->image = sample_image(f->manifest, &f->seed);
    for (uint32_t i = 0; i < f->manifest->block_count; i += 2) {
        const rft_block *block = &f->manifest->blocks[i];
        memcpy(f->image + block->offset, f->base + block->offset, block->bytes);
        if (i % 4 == 0 && block->bytes > 8) f->image[block->offset] ^= 1;
    }
    frame_rig_seal(f);
    rig->wanted = calloc(1, f->manifest->store_bytes);
    assert_non_null(rig->wanted);
    for (uint32_t i = 0; i < f->manifest->count; i++)
        draw_tensor(rig, i);
    assert_ok(rft_want_open(f->manifest, rft_bytes_view(&rig->list), &rig->want, NULL));
    for (uint64_t i = 0; i < f->manifest->store_bytes; i++)
        rig->count += rig->wanted[i];
}

static void close_rig(want_rig *rig)
{
    rft_want_release(rig->want);
    rft_bytes_close(&rig->list);
    frame_rig_close(&rig->frames);
    free(rig->wanted);
}

static uint64_t count_wanted(const want_rig *rig, uint64_t offset, uint64_t bytes)
{
    uint64_t count = 0;
    for (uint64_t i = 0; i < bytes; i++)
        count += rig->wanted[offset + i];
    return count;
}

TEST(what_is_wanted_of_a_block_a_frame_and_a_tensor)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        want_rig rig;
        open_rig(&rig, seed);
        const rft_manifest *manifest = rig.frames.manifest;
        assert_int_equal(rig.want->bytes, rig.count);
        for (uint32_t i = 0; i < manifest->block_count; i++) {
            const rft_block *block = &manifest->blocks[i];
            uint64_t count = count_wanted(&rig, block->offset, block->bytes);
            assert_int_equal(rft_want_block(rig.want, block), count);
            assert_int_equal(
                rft_want_covers(rig.want, block->tensor, block->tensor_offset, block->bytes),
                count == block->bytes);
        }
        for (uint32_t i = 0; i < manifest->count; i++) {
            const rft_manifest_tensor *tensor = &manifest->tensors[i];
            uint64_t count = count_wanted(&rig, tensor->offset, tensor->bytes);
            assert_int_equal(rft_want_tensor(rig.want, i), count == tensor->bytes ? RFT_WANT_ALL
                                                           : count == 0           ? RFT_WANT_NONE
                                                                                  : RFT_WANT_SOME);
        }
        close_rig(&rig);
    }
}

/* Sends the frames that are wanted; `*bytes` is their payload. */
static void send_wanted(want_rig *rig, rft_frame_source source, uint64_t *bytes)
{
    frame_rig *f = &rig->frames;
    source.want = rig->want;
    *bytes = 0;
    for (uint32_t i = 0; i < f->manifest->frame_count; i++) {
        rft_view payload;
        if (rft_want_frame(rig->want, i) == RFT_WANT_NONE) continue;
        rft_message frame = frame_rig_encode(f, i, &source, &payload);
        assert_ok(frame_rig_take_copy(f, &frame, payload));
        *bytes += payload.count;
    }
}

static void assert_arrived(const want_rig *rig)
{
    const frame_rig *f = &rig->frames;
    assert_true(rft_reassembly_complete(f->reassembly));
    assert_ok(rft_reassembly_verify(f->reassembly, &f->seal, NULL));
    for (uint32_t i = 0; i < f->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &f->manifest->tensors[i];
        for (uint64_t at = tensor->offset; at < tensor->offset + tensor->bytes; at++) {
            unsigned char expected = rig->wanted[at] ? f->image[at] : 0xee;
            if (f->staging[at] != expected) fail_msg("byte %llu", (unsigned long long)at);
        }
    }
}

TEST(the_wanted_bytes_arrive_and_no_others)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        want_rig rig;
        uint64_t bytes;
        open_rig(&rig, seed);
        frame_rig *f = &rig.frames;
        frame_rig_assemble(f);
        const rft_frame_source sources[] = {
            {.image = f->image},
            {.image = f->image, .same = f->same},
            {.image = f->image, .same = f->same, .base = f->base},
        };
        for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) {
            memset(f->staging, 0xee, f->manifest->store_bytes);
            rft_reassembly_reset(f->reassembly, f->staging, i == 0 ? NULL : f->base);
            rft_reassembly_narrow(f->reassembly, rig.want);
            send_wanted(&rig, sources[i], &bytes);
            assert_arrived(&rig);
            uint64_t padding = (uint64_t)f->manifest->count * RFT_TENSOR_ALIGNMENT;
            if (i == 0) assert_in_range(bytes, rig.count, rig.count + padding);
            if (i > 0) assert_true(bytes <= rig.count + padding);
        }
        close_rig(&rig);
    }
}

/* Frames as changes, to a worker that holds other bytes. */
static uint32_t count_stale(want_rig *rig, const unsigned char *held)
{
    frame_rig *f = &rig->frames;
    const rft_frame_source source = {
        .image = f->image, .same = f->same, .base = f->base, .want = rig->want};
    uint32_t stale = 0;
    rft_reassembly_reset(f->reassembly, f->staging, held);
    rft_reassembly_narrow(f->reassembly, rig->want);
    for (uint32_t i = 0; i < f->manifest->frame_count; i++) {
        rft_view payload;
        /* Of frames that are wanted whole a packed one would be as good. */
        if (rft_want_frame(rig->want, i) != RFT_WANT_SOME) continue;
        rft_message frame = frame_rig_encode(f, i, &source, &payload);
        refit_status status = frame_rig_take_copy(f, &frame, payload);
        if (status != REFIT_ERR_STALE) assert_ok(status);
        stale += status == REFIT_ERR_STALE;
    }
    return stale;
}

TEST(what_changed_of_a_part_belongs_to_the_bytes_that_were_there)
{
    uint32_t stale = 0;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        want_rig rig;
        open_rig(&rig, seed);
        const rft_manifest *manifest = rig.frames.manifest;
        unsigned char *other = malloc(manifest->store_bytes);
        assert_non_null(other);
        frame_rig_assemble(&rig.frames);
        memcpy(other, rig.frames.base, manifest->store_bytes);
        assert_int_equal(count_stale(&rig, other), 0);
        for (uint64_t i = 0; i < manifest->store_bytes; i++)
            other[i] ^= (unsigned char)!rig.wanted[i];
        assert_int_equal(count_stale(&rig, other), 0); /* those that are not wanted do not count */
        for (uint64_t i = 0; i < manifest->store_bytes; i++)
            other[i] ^= 1;
        stale += count_stale(&rig, other);
        free(other);
        close_rig(&rig);
    }
    assert_true(stale > 0);
}

TEST(frames_that_another_one_placed_are_taken_in_part)
{
    want_rig rig;
    open_rig(&rig, 5);
    frame_rig *f = &rig.frames;
    frame_rig_assemble(f);
    rft_reassembly_reset(f->reassembly, f->staging, NULL);
    rft_reassembly_narrow(f->reassembly, rig.want);
    for (uint32_t i = 0; i < f->manifest->frame_count; i++)
        rft_reassembly_take_placed(f->reassembly, i, f->image);
    assert_arrived(&rig);
    close_rig(&rig);
}

/* ---- Several reassemblies, one image */

/* All that a rig's want leaves out. */
static rft_want *want_rest(const want_rig *rig)
{
    const rft_manifest *manifest = rig->frames.manifest;
    rft_bytes list = {0};
    rft_want *rest = NULL;
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        const unsigned char *wanted = rig->wanted + tensor->offset;
        for (uint64_t at = 0, end; tensor->alias_of == REFIT_NO_ALIAS && at < tensor->bytes;
             at = end + (end == at)) {
            for (end = at; end < tensor->bytes && !wanted[end]; end++)
                continue;
            const rft_want_rows rows = {i, at, 1, end - at, end - at};
            if (end > at) assert_ok(rft_want_append(&list, &rows, NULL));
        }
    }
    assert_ok(rft_want_open(manifest, rft_bytes_view(&list), &rest, NULL));
    rft_bytes_close(&list);
    return rest;
}

/* One half of the version through `rig`, into the image that it shares. */
static rft_reassembly *send_half(want_rig *rig, rft_want *half, rft_frame_source source)
{
    frame_rig *f = &rig->frames;
    rft_reassembly *assembled = NULL;
    uint64_t bytes;
    rft_want *own = rig->want;
    assert_ok(rft_reassembly_open(f->manifest, f->staging, f->base, &assembled, NULL));
    rft_reassembly_narrow(assembled, half);
    f->reassembly = assembled;
    rig->want = half;
    send_wanted(rig, source, &bytes);
    assert_true(rft_reassembly_complete(assembled));
    f->reassembly = NULL;
    rig->want = own;
    return assembled;
}

static refit_status check_joint(const frame_rig *f, rft_reassembly *const halves[2], uint64_t most)
{
    rft_joint_sums joint;
    assert_ok(rft_joint_sums_open(f->manifest, &joint, NULL));
    for (int i = 0; i < 2; i++)
        rft_joint_sums_add(&joint, halves[i]);
    while (!rft_joint_sums_digest(&joint, NULL, f->staging, most))
        continue;
    refit_status status = rft_seal_check(f->manifest, NULL, joint.sums, &f->seal, NULL);
    rft_joint_sums_close(&joint);
    return status;
}

TEST(two_halves_have_the_digests_of_the_whole)
{
    for (uint64_t seed = 1; seed <= SEEDS / 2; seed++) {
        want_rig rig;
        open_rig(&rig, seed);
        frame_rig *f = &rig.frames;
        rft_want *rest = want_rest(&rig);
        const rft_frame_source source = {.image = f->image, .same = f->same, .base = f->base};
        rft_reassembly *halves[2];
        halves[0] = send_half(&rig, rig.want, source);
        halves[1] = send_half(&rig, rest, source);
        for (uint64_t most = 1; most != 0; most = most == 1 ? 100000 : 0)
            assert_ok(check_joint(f, halves, most));
        assert_int_equal(rft_want_tensor(rig.want, f->manifest->count - 1) == RFT_WANT_SOME,
                         rft_want_tensor(rest, f->manifest->count - 1) == RFT_WANT_SOME);
        f->seal.as.seal.digest.bytes[0] ^= 1;
        assert_int_equal(check_joint(f, halves, UINT64_MAX), REFIT_ERR_CORRUPT);
        for (int i = 0; i < 2; i++)
            rft_reassembly_close(halves[i]);
        rft_want_release(rest);
        close_rig(&rig);
    }
}

/* ---- What is refused */

TEST(a_frame_of_another_part_is_refused)
{
    want_rig rig;
    rft_view payload;
    open_rig(&rig, 3);
    frame_rig *f = &rig.frames;
    frame_rig_assemble(f);
    rft_reassembly_reset(f->reassembly, f->staging, f->base);
    rft_reassembly_narrow(f->reassembly, rig.want);
    const rft_frame_source whole = {.image = f->image};
    uint32_t refused = 0;
    for (uint32_t i = 0; i < f->manifest->frame_count; i++) {
        if (rft_want_frame(rig.want, i) != RFT_WANT_SOME) continue;
        rft_message frame = frame_rig_encode(f, i, &whole, &payload);
        assert_int_equal(frame_rig_take_copy(f, &frame, payload), REFIT_ERR_PROTOCOL);
        assert_false(rft_reassembly_has(f->reassembly, i));
        refused++;
    }
    assert_true(refused > 0);
    close_rig(&rig);
}

TEST(damage_of_a_part_is_noticed)
{
    want_rig rig;
    open_rig(&rig, 3);
    frame_rig *f = &rig.frames;
    frame_rig_assemble(f);
    rft_reassembly_reset(f->reassembly, f->staging, NULL);
    rft_reassembly_narrow(f->reassembly, rig.want);
    const rft_frame_source source = {.image = f->image, .want = rig.want};
    for (uint32_t i = 0; i < f->manifest->frame_count; i++) {
        rft_view payload;
        if (rft_want_frame(rig.want, i) != RFT_WANT_SOME) continue;
        rft_message frame = frame_rig_encode(f, i, &source, &payload);
        ((unsigned char *)(uintptr_t)payload.data)[payload.count / 2] ^= 1;
        assert_int_equal(frame_rig_take_copy(f, &frame, payload), REFIT_ERR_CORRUPT);
    }
    close_rig(&rig);
}

static refit_status open_rows(const rft_manifest *manifest, const rft_want_rows *rows,
                              uint32_t count)
{
    unsigned char list[4 * RFT_WANT_ENTRY_BYTES];
    rft_want *want = NULL;
    for (uint32_t i = 0; i < count; i++) {
        unsigned char *entry = list + (size_t)i * RFT_WANT_ENTRY_BYTES;
        rft_put_u32(entry, rows[i].tensor);
        rft_put_u64(entry + 4, rows[i].offset);
        rft_put_u64(entry + 12, rows[i].count);
        rft_put_u64(entry + 20, rows[i].stride);
        rft_put_u64(entry + 28, rows[i].bytes);
    }
    rft_view view = {list, (size_t)count * RFT_WANT_ENTRY_BYTES};
    refit_status status = rft_want_open(manifest, view, &want, NULL);
    rft_want_release(want);
    return status;
}

TEST(lists_that_are_not_in_order_are_refused)
{
    want_rig rig;
    open_rig(&rig, 3);
    const rft_manifest *manifest = rig.frames.manifest;
    uint32_t at = manifest->count - 1;
    uint64_t bytes = manifest->tensors[at].bytes;
    const rft_want_rows lists[][2] = {
        {{manifest->count, 0, 1, 8, 8}},          /* of no tensor */
        {{at, 0, 0, 8, 8}},                       /* empty */
        {{at, 0, 1, 0, 0}},                       /* the same */
        {{at, 0, 1, 9, 8}},                       /* not in its form */
        {{at, 0, 2, 8, 8}},                       /* the same */
        {{at, 0, 2, 7, 8}},                       /* rows that meet */
        {{at, bytes - 7, 1, 8, 8}},               /* beyond the end */
        {{at, 8, UINT64_MAX, UINT64_MAX, 8}},     /* beyond all ends */
        {{at, UINT64_MAX - 4, 1, 8, 8}},          /* the same */
        {{at, 8, 1, 8, 8}, {at, 0, 1, 8, 8}},     /* backwards */
        {{at, 0, 1, 8, 8}, {at, 4, 1, 8, 8}},     /* that meet */
        {{at, 0, 1, 8, 8}, {at, 8, 1, 8, 8}},     /* that are one */
        {{at, 0, 1, 8, 8}, {at - 1, 0, 1, 8, 8}}, /* tensors backwards */
    };
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        uint32_t count = lists[i][1].count == 0 ? 1 : 2;
        if (open_rows(manifest, lists[i], count) != REFIT_ERR_PROTOCOL)
            fail_msg("list %zu is taken", i);
    }
    rft_want *want = NULL;
    rft_view odd = {rig.list.data, rig.list.count - 1};
    assert_int_equal(rft_want_open(manifest, odd, &want, NULL), REFIT_ERR_PROTOCOL);
    assert_ok(open_rows(manifest, (const rft_want_rows[]){{at, 0, 1, 8, 8}, {at, 9, 1, 8, 8}}, 2));
    close_rig(&rig);
}

TEST(an_empty_list_wants_nothing)
{
    want_rig rig;
    rft_want *want = NULL;
    open_rig(&rig, 3);
    frame_rig *f = &rig.frames;
    assert_ok(rft_want_open(f->manifest, (rft_view){0}, &want, NULL));
    frame_rig_assemble(f);
    rft_reassembly_reset(f->reassembly, f->staging, NULL);
    rft_reassembly_narrow(f->reassembly, want);
    assert_true(rft_reassembly_complete(f->reassembly));
    assert_ok(rft_reassembly_verify(f->reassembly, &f->seal, NULL));
    rft_want_release(want);
    close_rig(&rig);
}

/* ---- A list that travels in several messages */

/* Puts the slices together, all but one; returns whether the list is whole then. */
static bool send_slices(const rft_want *want, const rft_limits *limits, uint32_t lost,
                        rft_bytes *list, uint32_t *count)
{
    rft_want_slice slice = {0};
    bool whole = false;
    *count = 0;
    while (rft_want_slice_next(want, limits, &slice)) {
        assert_in_range(slice.rows.count, 0, limits->message_bytes / 2);
        if ((*count)++ != lost) assert_ok(rft_want_slice_add(list, &slice, limits, &whole, NULL));
    }
    return whole;
}

TEST(a_long_list_goes_in_several_messages)
{
    want_rig rig;
    rft_bytes list = {0};
    rft_limits limits = sample_limits();
    uint32_t count;
    limits.message_bytes = 3 * 2 * RFT_WANT_ENTRY_BYTES;
    open_rig(&rig, 5);
    assert_true(rig.want->row_count > 6);
    for (uint32_t i = 0; i < 2; i++) { /* and another one after it */
        assert_true(send_slices(rig.want, &limits, UINT32_MAX, &list, &count));
        assert_int_equal(count, (rig.want->row_count + 2) / 3);
        assert_int_equal(list.count, rig.list.count);
        assert_memory_equal(list.data, rig.list.data, list.count);
    }
    assert_false(send_slices(rig.want, &limits, 1, &list, &count));
    assert_false(send_slices(rig.want, &limits, count - 1, &list, &count));
    limits.manifest_bytes = rig.list.count - 1;
    rft_want_slice slice = {.rows = rft_bytes_view(&rig.list)};
    bool whole;
    assert_int_equal(rft_want_slice_add(&list, &slice, &limits, &whole, NULL), REFIT_ERR_LIMIT);
    close_rig(&rig);
    rft_bytes_close(&list);
}

TEST(an_empty_list_is_one_message)
{
    want_rig rig;
    rft_want *nothing = NULL;
    rft_bytes list = {0};
    rft_limits limits = sample_limits();
    uint32_t count;
    open_rig(&rig, 3);
    assert_ok(rft_want_open(rig.frames.manifest, (rft_view){0}, &nothing, NULL));
    assert_true(send_slices(nothing, &limits, UINT32_MAX, &list, &count));
    assert_int_equal(count, 1);
    assert_int_equal(list.count, 0);
    rft_want_release(nothing);
    close_rig(&rig);
    rft_bytes_close(&list);
}

/* ---- Two together */

/* Two wants of one manifest, the first rig's. */
static void open_two(want_rig *one, want_rig *other, uint64_t seed)
{
    open_rig(one, seed);
    open_rig(other, seed);
    rft_bytes_reset(&other->list);
    rft_want_release(other->want);
    memset(other->wanted, 0, other->frames.manifest->store_bytes);
    other->frames.seed += 77;
    for (uint32_t i = 0; i < other->frames.manifest->count; i++)
        draw_tensor(other, i);
    assert_ok(
        rft_want_open(one->frames.manifest, rft_bytes_view(&other->list), &other->want, NULL));
}

TEST(two_wants_together_have_what_either_has)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        want_rig one, other;
        rft_bytes list = {0}, again = {0};
        rft_want *both = NULL;
        open_two(&one, &other, seed);
        assert_ok(rft_want_merge(one.want, other.want, &list, NULL));
        assert_ok(rft_want_merge(other.want, one.want, &again, NULL));
        assert_int_equal(list.count, again.count);
        assert_memory_equal(list.data, again.data, list.count);
        assert_ok(rft_want_open(one.frames.manifest, rft_bytes_view(&list), &both, NULL));
        for (uint32_t i = 0; i < one.frames.manifest->count; i++) {
            const rft_manifest_tensor *tensor = &one.frames.manifest->tensors[i];
            for (uint64_t at = 0; tensor->alias_of == REFIT_NO_ALIAS && at < tensor->bytes;
                 at += 97)
                if (one.wanted[tensor->offset + at] || other.wanted[tensor->offset + at])
                    assert_true(rft_want_covers(both, i, at, 1));
        }
        rft_want_release(both);
        rft_bytes_close(&list);
        rft_bytes_close(&again);
        close_rig(&one);
        close_rig(&other);
    }
}

TEST(rows_and_columns_next_to_each_other_are_wider_ones_together)
{
    /* The same of two ranks: rows; columns; halves of which each has rows; unlike ones. */
    static const struct {
        rft_want_rows one[2], other[2], both[2];
    } ranks[] = {
        {{{0, 0, 1, 64, 64}}, {{0, 64, 1, 64, 64}}, {{0, 0, 1, 128, 128}}},
        {{{0, 16, 8, 128, 16}}, {{0, 32, 8, 128, 16}}, {{0, 16, 8, 128, 32}}},
        {{{0, 0, 8, 32, 16}}, {{0, 16, 8, 32, 16}}, {{0, 0, 1, 256, 256}}},
        {{{0, 0, 1, 32, 32}, {0, 512, 1, 32, 32}},
         {{0, 96, 1, 32, 32}, {0, 608, 1, 32, 32}},
         {{0, 0, 1, 128, 128}, {0, 512, 1, 128, 128}}},
        {{{0, 0, 1, 64, 64}}, {{0, 64, 8, 128, 16}}, {{0, 0, 1, 1024, 1024}}},
        {{{0, 0, 1, 32, 32}, {0, 64, 1, 32, 32}}, {{0, 64, 1, 32, 32}}, {{0, 0, 1, 1024, 1024}}},
        {{{0, 0, 1, 32, 32}, {0, 64, 1, 32, 32}},
         {{0, 80, 1, 32, 32}, {0, 128, 1, 32, 32}},
         {{0, 0, 1, 1024, 1024}}},
    };
    const refit_tensor tensor = {sizeof tensor, "w", REFIT_U8, 1, {1024}, 1024, REFIT_NO_ALIAS};
    refit_config config = quick_config();
    rft_limits limits = rft_limits_from(&config);
    rft_manifest *manifest = NULL;
    assert_ok(rft_manifest_open(&tensor, 1, 4096, &limits, &manifest, NULL));
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        const rft_want_rows *rows[] = {ranks[i].one, ranks[i].other, ranks[i].both};
        rft_want *wants[3] = {0}, *merged = NULL;
        rft_bytes list = {0};
        for (uint32_t k = 0; k < 3; k++) {
            rft_bytes_reset(&list);
            for (uint32_t at = 0; at < 2 && rows[k][at].count > 0; at++)
                assert_ok(rft_want_append(&list, &rows[k][at], NULL));
            assert_ok(rft_want_open(manifest, rft_bytes_view(&list), &wants[k], NULL));
        }
        rft_bytes_reset(&list);
        assert_ok(rft_want_merge(wants[0], wants[1], &list, NULL));
        assert_ok(rft_want_open(manifest, rft_bytes_view(&list), &merged, NULL));
        assert_true(rft_want_equal(merged, wants[2]));
        assert_true(rft_want_includes(merged, wants[0]));
        assert_true(rft_want_includes(merged, wants[1]));
        rft_want_release(merged);
        for (uint32_t k = 0; k < 3; k++)
            rft_want_release(wants[k]);
        rft_bytes_close(&list);
    }
    rft_manifest_close(manifest);
}

/* Byte by byte: the list's bytes are marked, and are those that both have. */
static void check_common(const want_rig *one, const want_rig *other, const rft_want *common)
{
    const rft_manifest *manifest = one->frames.manifest;
    unsigned char *found = calloc(1, manifest->store_bytes);
    assert_non_null(found);
    for (uint32_t i = 0; i < common->row_count; i++) {
        const rft_want_rows *rows = &common->rows[i];
        for (uint64_t row = 0; row < rows->count; row++)
            memset(found + manifest->tensors[rows->tensor].offset + rows->offset +
                       row * rows->stride,
                   1, rows->bytes);
    }
    for (uint64_t at = 0; at < manifest->store_bytes; at++)
        if (found[at] != (one->wanted[at] & other->wanted[at])) fail();
    free(found);
}

TEST(two_wants_have_in_common_what_both_have)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        want_rig one, other;
        rft_bytes list = {0};
        rft_want *common = NULL;
        open_two(&one, &other, seed);
        assert_ok(rft_want_intersect(one.want, other.want, &list, NULL));
        assert_ok(rft_want_open(one.frames.manifest, rft_bytes_view(&list), &common, NULL));
        check_common(&one, &other, common);
        rft_want_release(common);
        rft_bytes_close(&list);
        close_rig(&one);
        close_rig(&other);
    }
}

TEST(everything_and_a_want_have_that_in_common)
{
    want_rig rig;
    open_rig(&rig, 3);
    for (int first = 0; first < 2; first++) {
        rft_bytes list = {0};
        assert_ok(
            rft_want_intersect(first ? rig.want : NULL, first ? NULL : rig.want, &list, NULL));
        assert_int_equal(list.count, rig.want->encoded.count);
        assert_memory_equal(list.data, rig.want->encoded.data, list.count);
        rft_bytes_close(&list);
    }
    close_rig(&rig);
}

/* Half of a matrix by columns, and its upper rows: still one entry. */
TEST(columns_in_common_stay_one_entry)
{
    want_rig rig;
    open_rig(&rig, 1);
    const rft_manifest *manifest = rig.frames.manifest;
    const uint32_t index = manifest->count - 1;
    const uint64_t stride = 768 * 2;
    const rft_want_rows columns = {index, stride / 2, 512, stride, stride / 2};
    const rft_want_rows top = {index, 0, 1, 100 * stride, 100 * stride};
    rft_bytes lists[2] = {{0}}, list = {0};
    rft_want *wants[2], *common = NULL;
    assert_ok(rft_want_append(&lists[0], &columns, NULL));
    assert_ok(rft_want_append(&lists[1], &top, NULL));
    for (int i = 0; i < 2; i++)
        assert_ok(rft_want_open(manifest, rft_bytes_view(&lists[i]), &wants[i], NULL));
    assert_ok(rft_want_intersect(wants[0], wants[1], &list, NULL));
    assert_ok(rft_want_open(manifest, rft_bytes_view(&list), &common, NULL));
    assert_int_equal(common->row_count, 1);
    assert_int_equal(common->rows[0].count, 100);
    assert_int_equal(common->rows[0].stride, stride);
    assert_int_equal(common->bytes, 100 * stride / 2);
    rft_want_release(common);
    rft_bytes_close(&list);
    for (int i = 0; i < 2; i++) {
        rft_want_release(wants[i]);
        rft_bytes_close(&lists[i]);
    }
    close_rig(&rig);
}

TEST(everything_is_a_want_too)
{
    want_rig rig;
    open_rig(&rig, 1);
    const rft_manifest *manifest = rig.frames.manifest;
    assert_int_equal(rft_want_block(NULL, &manifest->blocks[0]), manifest->blocks[0].bytes);
    assert_int_equal(rft_want_frame(NULL, 0), RFT_WANT_ALL);
    assert_int_equal(rft_want_tensor(NULL, 0), RFT_WANT_ALL);
    assert_true(rft_want_covers(NULL, 0, 0, 1));
    assert_null(rft_want_acquire(NULL));
    rft_want_release(NULL);
    close_rig(&rig);
}

int main(void)
{
    return test_run("want");
}
