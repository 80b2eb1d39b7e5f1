/* Reassembly: frames in any order make the publisher's version; damage is noticed, false messages
 * are refused. */
#include <stdlib.h>

#include "base/alloc.h"
#include "frame_rig.h"
#include "tensor_samples.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "wire_samples.h"

/* Every second block is as in the base. */
static void open_fixture_with(frame_rig *f, uint64_t seed, uint64_t most_elements)
{
    const refit_tensor last = sample_tensor("last", REFIT_F32, 1, 70000, 0);
    frame_rig_open(f, seed, most_elements, &last, 200000);
    f->image = sample_image(f->manifest, &f->seed);
    for (uint32_t i = 0; i < f->manifest->block_count; i += 2) {
        const rft_block *block = &f->manifest->blocks[i];
        memcpy(f->image + block->offset, f->base + block->offset, block->bytes);
    }
    frame_rig_seal(f);
    frame_rig_assemble(f);
}

static void open_fixture(frame_rig *f)
{
    open_fixture_with(f, 5, 100000);
}

static rft_message encode(frame_rig *f, uint32_t sequence, const unsigned char *same,
                          rft_view *payload)
{
    const rft_frame_source source = {.image = f->image, .same = same};
    return frame_rig_encode(f, sequence, &source, payload);
}

static void take(frame_rig *f, uint32_t sequence, const unsigned char *same)
{
    rft_view payload;
    rft_message frame = encode(f, sequence, same, &payload);
    assert_ok(rft_reassembly_take(f->reassembly, &frame, payload, NULL));
}

static void take_all(frame_rig *f, const unsigned char *same)
{
    for (uint32_t i = 0; i < f->manifest->frame_count; i++)
        take(f, i, same);
}

static refit_status verify(const frame_rig *f)
{
    return rft_reassembly_verify(f->reassembly, &f->seal, NULL);
}

TEST(any_order_with_repeats_makes_the_version)
{
    for (uint64_t seed = 1; seed <= 20; seed++) {
        frame_rig f;
        open_fixture_with(&f, seed, 60000);
        uint32_t count = f.manifest->frame_count;
        while (!rft_reassembly_complete(f.reassembly)) {
            uint32_t before = rft_reassembly_taken(f.reassembly);
            uint32_t sequence = (uint32_t)seeded_below(&f.seed, count);
            bool is_new = rft_reassembly_missing(f.reassembly, sequence, sequence + 1) == sequence;
            take(&f, sequence, seeded_below(&f.seed, 2) != 0 ? f.same : NULL);
            assert_int_equal(rft_reassembly_taken(f.reassembly), before + (is_new ? 1 : 0));
        }
        assert_staged(&f);
        frame_rig_close(&f);
    }
}

TEST(a_dense_frame_is_not_copied_to_be_sent)
{
    frame_rig f;
    open_fixture(&f);
    for (uint32_t i = 0; i < f.manifest->frame_count; i++) {
        rft_view payload;
        (void)encode(&f, i, NULL, &payload);
        assert_ptr_equal(payload.data, f.image + f.manifest->frames[i].offset);
        assert_int_equal(payload.count, f.manifest->frames[i].bytes);
    }
    assert_int_equal(f.scratch.room, 0);
    frame_rig_close(&f);
}

TEST(same_blocks_do_not_travel)
{
    frame_rig f;
    open_fixture(&f);
    uint64_t sent = 0;
    uint64_t changed = 0;
    for (uint32_t i = 0; i < f.manifest->frame_count; i++) {
        rft_view payload;
        rft_message frame = encode(&f, i, f.same, &payload);
        sent += memchr(f.modes.data, RFT_BLOCK_SAME, f.modes.count) == NULL ? 0 : payload.count;
        if (memchr(f.modes.data, RFT_BLOCK_SAME, f.modes.count) == NULL) continue;
        for (uint32_t b = 0; b < f.manifest->frames[i].blocks; b++) {
            uint32_t block = f.manifest->frames[i].first_block + b;
            if (!f.same[block]) changed += f.manifest->blocks[block].bytes;
        }
        assert_int_equal(frame.as.frame.modes.count, f.manifest->frames[i].blocks);
    }
    assert_int_equal(sent, changed);
    assert_true(sent < f.manifest->payload_bytes);
    take_all(&f, f.same);
    assert_staged(&f);
    frame_rig_close(&f);
}

TEST(a_frame_of_nothing_new_has_no_payload)
{
    frame_rig f;
    open_fixture(&f);
    memset(f.same, 1, f.manifest->block_count);
    memcpy(f.image, f.base, f.manifest->store_bytes);
    f.seal = sample_seal(f.manifest, f.image, f.digests);
    for (uint32_t i = 0; i < f.manifest->frame_count; i++) {
        rft_view payload;
        rft_message frame = encode(&f, i, f.same, &payload);
        assert_int_equal(payload.count, 0);
        payload.data = NULL;
        assert_ok(rft_reassembly_take(f.reassembly, &frame, payload, NULL));
    }
    assert_staged(&f);
    frame_rig_close(&f);
}

TEST(a_damaged_payload_is_seen_and_can_be_sent_again)
{
    frame_rig f;
    open_fixture(&f);
    for (uint32_t i = 0; i < f.manifest->frame_count; i++) {
        rft_view payload;
        rft_message frame = encode(&f, i, NULL, &payload);
        unsigned char *damaged = malloc(payload.count);
        assert_non_null(damaged);
        memcpy(damaged, payload.data, payload.count);
        damaged[seeded_below(&f.seed, payload.count)] ^= 0x10;
        assert_int_equal(
            rft_reassembly_take(f.reassembly, &frame, bytes_view(damaged, payload.count), NULL),
            REFIT_ERR_CORRUPT);
        assert_int_equal(rft_reassembly_missing(f.reassembly, 0, UINT32_MAX), i);
        assert_ok(rft_reassembly_take(f.reassembly, &frame, payload, NULL));
        free(damaged);
    }
    assert_staged(&f);
    frame_rig_close(&f);
}

TEST(frames_that_break_the_rules_are_refused)
{
    frame_rig f;
    open_fixture(&f);
    rft_view payload;
    rft_message good = encode(&f, 0, NULL, &payload);
    rft_message frame = good;
    frame.as.frame.sequence = f.manifest->frame_count;
    assert_frame_refused(&f, &frame, payload);
    frame = good;
    frame.as.frame.modes.count--;
    assert_frame_refused(&f, &frame, payload);
    assert_frame_refused(&f, &good, bytes_view(payload.data, payload.count - 1));
    assert_frame_refused(&f, &good, bytes_view(NULL, 0));
    f.modes.data[0] = RFT_BLOCK_SAME;
    assert_frame_refused(&f, &good, payload);
    f.modes.data[0] = RFT_BLOCK_SPARSE;
    assert_frame_refused(&f, &good, payload);
    f.modes.data[0] = 3;
    assert_frame_refused(&f, &good, payload);
    frame_rig_close(&f);
}

TEST(same_without_a_base_is_refused)
{
    frame_rig f;
    open_fixture(&f);
    rft_reassembly_reset(f.reassembly, f.staging, NULL);
    rft_view payload;
    rft_message frame = encode(&f, 0, f.same, &payload);
    assert_int_equal(f.modes.data[0], RFT_BLOCK_SAME);
    assert_frame_refused(&f, &frame, payload);
    take_all(&f, NULL);
    assert_staged(&f);
    frame_rig_close(&f);
}

TEST(missing_frames_are_named)
{
    frame_rig f;
    open_fixture(&f);
    uint32_t count = f.manifest->frame_count;
    assert_true(count >= 3);
    take(&f, 0, NULL);
    take(&f, 2, NULL);
    assert_int_equal(rft_reassembly_missing(f.reassembly, 0, count), 1);
    assert_int_equal(rft_reassembly_missing(f.reassembly, 2, 3), UINT32_MAX);
    assert_int_equal(rft_reassembly_missing(f.reassembly, 0, 1), UINT32_MAX);
    assert_int_equal(rft_reassembly_missing(f.reassembly, count, UINT32_MAX), UINT32_MAX);
    assert_false(rft_reassembly_complete(f.reassembly));
    assert_int_equal(verify(&f), REFIT_ERR_STATE);
    frame_rig_close(&f);
}

TEST(a_wrong_digest_names_the_first_tensor)
{
    frame_rig f;
    open_fixture(&f);
    take_all(&f, NULL);
    size_t last = 8 * ((size_t)f.manifest->originals - 1);
    f.digests[last] ^= 1;
    assert_refused(rft_reassembly_verify(f.reassembly, &f.seal, error), REFIT_ERR_CORRUPT,
                   "'last'");
    assert_refused(rft_image_verify(f.manifest, f.image, &f.seal, error), REFIT_ERR_CORRUPT,
                   "'last'");
    f.digests[0] ^= 1;
    assert_refused(rft_reassembly_verify(f.reassembly, &f.seal, error), REFIT_ERR_CORRUPT,
                   f.manifest->tensors[0].name);
    frame_rig_close(&f);
}

TEST(a_seal_of_another_version_is_seen)
{
    frame_rig f;
    open_fixture(&f);
    take_all(&f, NULL);
    f.seal.as.seal.digest.bytes[15] ^= 1;
    assert_int_equal(verify(&f), REFIT_ERR_CORRUPT);
    f.seal.as.seal.digest.bytes[15] ^= 1;
    f.seal.as.seal.tensors.count -= 8;
    assert_int_equal(verify(&f), REFIT_ERR_PROTOCOL);
    assert_int_equal(rft_image_verify(f.manifest, f.image, &f.seal, NULL), REFIT_ERR_PROTOCOL);
    frame_rig_close(&f);
}

/* A version whose base was not what the publisher thinks. */
TEST(a_wrong_base_is_seen)
{
    frame_rig f;
    open_fixture(&f);
    f.base[f.manifest->blocks[0].offset] ^= 1;
    take_all(&f, f.same);
    assert_int_equal(verify(&f), REFIT_ERR_CORRUPT);
    frame_rig_close(&f);
}

TEST(an_image_is_verified_where_it_lies)
{
    frame_rig f;
    open_fixture(&f);
    assert_ok(rft_image_verify(f.manifest, f.image, &f.seal, NULL));
    f.image[f.manifest->tensors[FRAME_RIG_TENSORS - 1].offset + 3] ^= 0x80;
    assert_int_equal(rft_image_verify(f.manifest, f.image, &f.seal, NULL), REFIT_ERR_CORRUPT);
    frame_rig_close(&f);
}

/* Calls until the image is verified in parts of `most` bytes, or refused. */
static refit_status verify_in_parts(frame_rig *f, uint64_t most, uint64_t *calls)
{
    rft_image_cursor cursor = {0};
    refit_status status = REFIT_OK;
    for (*calls = 0; status == REFIT_OK && !cursor.done; ++*calls)
        status = rft_image_verify_part(f->manifest, f->image, &f->seal, most, &cursor, NULL);
    return status;
}

TEST(parts_of_any_size_verify_the_same_image)
{
    const uint64_t sizes[] = {8, 13, 64, 4096, 100001, UINT64_MAX};
    uint64_t calls;
    frame_rig f;
    open_fixture(&f);
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        assert_ok(verify_in_parts(&f, sizes[i], &calls));
        assert_true(calls >= f.manifest->payload_bytes / sizes[i]);
    }
    assert_int_equal(calls, 1);
    f.image[f.manifest->tensors[FRAME_RIG_TENSORS - 1].offset + 3] ^= 0x80;
    for (size_t i = 0; i < COUNT_OF(sizes); i++)
        assert_int_equal(verify_in_parts(&f, sizes[i], &calls), REFIT_ERR_CORRUPT);
    frame_rig_close(&f);
}

TEST(padding_belongs_to_no_tensor)
{
    const refit_tensor tensors[] = {sample_tensor("a", REFIT_U8, 1, 5, 0),
                                    sample_tensor("b", REFIT_U8, 1, 5, 0)};
    rft_manifest *manifest = sample_manifest(tensors, 2, 4096);
    unsigned char image[128] = "first";
    unsigned char staging[128];
    unsigned char digests[16];
    memset(staging, 0xee, sizeof staging);
    memcpy(image + 64, "other", 5);
    rft_message seal = sample_seal(manifest, image, digests);
    memset(image + 5, 0xaa, 59); /* a publisher should send zeros there; they are not checked */
    frame_rig f = {.manifest = manifest, .image = image};
    rft_view payload;
    rft_message frame = encode(&f, 0, NULL, &payload);
    assert_int_equal(payload.count, 69);
    assert_ok(rft_reassembly_open(manifest, staging, NULL, &f.reassembly, NULL));
    assert_ok(rft_reassembly_take(f.reassembly, &frame, payload, NULL));
    assert_ok(rft_reassembly_verify(f.reassembly, &seal, NULL));
    assert_int_equal(staging[5], 0xee);
    assert_int_equal(staging[69], 0xee);
    rft_reassembly_close(f.reassembly);
    rft_bytes_close(&f.modes);
    rft_manifest_close(manifest);
}

TEST(a_version_of_empty_tensors_is_complete_at_once)
{
    refit_tensor tensor = sample_tensor("empty", REFIT_F32, 1, 0, 0);
    frame_rig f = {.manifest = sample_manifest(&tensor, 1, 4096)};
    unsigned char image[64] = {0};
    f.seal = sample_seal(f.manifest, image, f.digests);
    assert_ok(rft_reassembly_open(f.manifest, image, NULL, &f.reassembly, NULL));
    assert_true(rft_reassembly_complete(f.reassembly));
    assert_int_equal(rft_reassembly_missing(f.reassembly, 0, UINT32_MAX), UINT32_MAX);
    assert_ok(verify(&f));
    const rft_frame_source source = {.image = image};
    rft_frame frame;
    assert_invalid(rft_frame_encode(f.manifest, 0, &source, &f.modes, &f.scratch, &frame, NULL));
    rft_reassembly_close(f.reassembly);
    rft_manifest_close(f.manifest);
}

TEST(a_second_version_starts_over_and_allocates_nothing)
{
    frame_rig f;
    open_fixture(&f);
    take_all(&f, f.same);
    assert_staged(&f);
    uint64_t before = rft_alloc_count();
    rft_reassembly_reset(f.reassembly, f.staging, f.base);
    assert_int_equal(rft_reassembly_taken(f.reassembly), 0);
    memset(f.staging, 0, f.manifest->store_bytes);
    take_all(&f, f.same);
    assert_staged(&f);
    assert_int_equal(rft_alloc_count(), before);
    frame_rig_close(&f);
}

TEST(failed_allocations_are_errors)
{
    frame_rig f;
    open_fixture(&f);
    rft_reassembly_close(f.reassembly);
    f.reassembly = NULL;
    rft_manifest *kept = f.manifest;
    rft_manifest copy = *kept; /* the manifest's own blocks may not be held while it is swapped */
    copy.tensors = malloc(kept->count * sizeof *kept->tensors);
    copy.blocks = malloc(kept->block_count * sizeof *kept->blocks);
    copy.frames = malloc(kept->frame_count * sizeof *kept->frames);
    assert_true(copy.tensors != NULL && copy.blocks != NULL && copy.frames != NULL);
    memcpy(copy.tensors, kept->tensors, kept->count * sizeof *kept->tensors);
    memcpy(copy.blocks, kept->blocks, kept->block_count * sizeof *kept->blocks);
    memcpy(copy.frames, kept->frames, kept->frame_count * sizeof *kept->frames);
    rft_manifest_close(kept);
    f.manifest = NULL;
    for (uint64_t nth = 1;; nth++) {
        rft_reassembly *reassembly = NULL;
        const rft_frame_source source = {.image = f.image, .same = f.same, .base = f.base};
        rft_frame frame;
        failing_alloc_begin(nth);
        refit_status status = rft_reassembly_open(&copy, f.staging, f.base, &reassembly, NULL);
        if (status == REFIT_OK)
            status = rft_frame_encode(&copy, 0, &source, &f.modes, &f.scratch, &frame, NULL);
        rft_reassembly_close(reassembly);
        rft_bytes_close(&f.modes);
        rft_bytes_close(&f.scratch);
        if (!failing_alloc_end()) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
    free(copy.tensors);
    free(copy.blocks);
    free(copy.frames);
    frame_rig_close(&f);
}

int main(void)
{
    return test_run("reassembly");
}
