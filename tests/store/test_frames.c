/* Encoded frames: made once, shared, and never overwritten while the transport holds them. */
#include <stdlib.h>

#include "base/alloc.h"
#include "store/frames.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/hosted_store.h"
#include "tests/support/quick_config.h"
#include "tests/support/sample_version.h"
#include "tests/support/test.h"

typedef struct frames_bench {
    rft_limits limits;
    rft_retire_list retired;
    rft_store *store;
    rft_frames *frames;
} frames_bench;

static void add_ready(void *user, uint32_t frame)
{
    rft_store_add_ready(user, frame);
}

static void write_and_commit(rft_store *store, const sample_version *sample)
{
    for (uint32_t i = 0; i < store->manifest->count; i++) {
        const rft_manifest_tensor *place = &store->manifest->tensors[i];
        if (place->alias_of != REFIT_NO_ALIAS) continue;
        assert_ok(rft_store_write(store, i, sample->image + place->offset, place->bytes, add_ready,
                                  store, NULL));
    }
    assert_ok(rft_store_seal(store, NULL));
    rft_store_commit(store);
}

static void commit_version(rft_store *store, uint64_t version)
{
    sample_version sample;
    sample_open(&sample, version);
    rft_store_begin(store, version);
    write_and_commit(store, &sample);
    sample_close(&sample);
}

/* Frames of two blocks, so that version 3, of which the first tensor is as in 2, has mixed ones. */
static void open_bench(frames_bench *bench)
{
    refit_config config = quick_config();
    rft_manifest *manifest = NULL;
    *bench = (frames_bench){.limits = rft_limits_from(&config)};
    assert_ok(rft_manifest_open(sample_tensors(), SAMPLE_TENSORS, 3 * 65536 + 1024, &bench->limits,
                                &manifest, NULL));
    assert_ok(hosted_store_open(manifest, 2, false, &bench->retired, &bench->store, NULL));
    assert_ok(rft_frames_open(manifest, &config, NULL, &bench->frames, NULL));
    commit_version(bench->store, 2);
    commit_version(bench->store, 3);
}

static void close_bench(frames_bench *bench)
{
    rft_frames_close(bench->frames, &bench->retired);
    rft_store_close(bench->store);
    assert_int_equal(rft_retire_list_close(&bench->retired, 0), 0);
}

static rft_encoded encode(frames_bench *bench, uint32_t sequence, rft_coding coding)
{
    rft_encoded frame;
    assert_ok(
        rft_frames_encode(bench->frames, bench->store, sequence, coding, NULL, 0, &frame, NULL));
    return frame;
}

TEST(whole_frames_are_the_slots_own_bytes)
{
    frames_bench bench;
    open_bench(&bench);
    const rft_slot *slot = rft_store_served_slot(bench.store);
    for (uint32_t i = 0; i < bench.store->manifest->frame_count; i++) {
        rft_encoded frame = encode(&bench, i, RFT_CODING_WHOLE);
        assert_ptr_equal(frame.payload.bytes.data,
                         rft_slot_image(slot) + bench.store->manifest->frames[i].offset);
        assert_ptr_equal(frame.payload.pending, &slot->buffer->pending);
    }
    close_bench(&bench);
}

TEST(frames_make_the_version_again)
{
    for (rft_coding coding = 0; coding < RFT_CODINGS; coding++) {
        frames_bench bench;
        sample_version base, now;
        rft_reassembly *reassembly = NULL;
        open_bench(&bench);
        const rft_manifest *manifest = bench.store->manifest;
        sample_open(&base, 2);
        sample_open(&now, 3);
        unsigned char *image = calloc(1, manifest->store_bytes);
        assert_non_null(image);
        assert_ok(rft_reassembly_open(
            manifest, image, coding == RFT_CODING_WHOLE ? NULL : base.image, &reassembly, NULL));
        for (uint32_t i = 0; i < manifest->frame_count; i++) {
            rft_message message;
            rft_encoded frame = encode(&bench, i, coding);
            assert_ok(rft_message_decode(frame.message, &bench.limits, &message, NULL));
            assert_ok(rft_reassembly_take(reassembly, &message, frame.payload.bytes, NULL));
        }
        assert_true(rft_reassembly_complete(reassembly));
        for (uint32_t i = 0; i < manifest->count; i++) {
            const rft_manifest_tensor *tensor = &manifest->tensors[i];
            assert_memory_equal(image + tensor->offset, now.image + tensor->offset, tensor->bytes);
        }
        rft_reassembly_close(reassembly);
        free(image);
        sample_close(&base);
        sample_close(&now);
        close_bench(&bench);
    }
}

TEST(frame_is_encoded_once_for_all)
{
    frames_bench bench;
    open_bench(&bench);
    for (rft_coding coding = 0; coding < RFT_CODINGS; coding++) {
        rft_encoded first = encode(&bench, 0, coding);
        uint64_t requests = rft_alloc_count();
        rft_encoded second = encode(&bench, 0, coding);
        assert_int_equal(rft_alloc_count(), requests);
        assert_ptr_equal(first.message.data, second.message.data);
        assert_ptr_equal(first.payload.bytes.data, second.payload.bytes.data);
    }
    close_bench(&bench);
}

TEST(gathered_bytes_stay_while_they_are_in_flight)
{
    frames_bench bench;
    open_bench(&bench);
    rft_encoded frame = encode(&bench, 0, RFT_CODING_SPARSE);
    assert_true(frame.payload.bytes.count > 0);
    assert_ptr_not_equal(frame.payload.pending,
                         &rft_store_served_slot(bench.store)->buffer->pending);
    unsigned char *copy = malloc(frame.payload.bytes.count);
    assert_non_null(copy);
    memcpy(copy, frame.payload.bytes.data, frame.payload.bytes.count);
    rft_pending_raise(frame.payload.pending);
    for (uint64_t version = 4; version < 10; version++) {
        commit_version(bench.store, version);
        (void)encode(&bench, 0, RFT_CODING_SPARSE);
        (void)encode(&bench, 1, RFT_CODING_SPARSE);
    }
    assert_memory_equal(copy, frame.payload.bytes.data, frame.payload.bytes.count);
    rft_pending_lower(frame.payload.pending);
    free(copy);
    close_bench(&bench);
}

TEST(versions_after_the_first_allocate_nothing)
{
    frames_bench bench;
    open_bench(&bench);
    for (uint64_t version = 4; version < 12; version++) {
        commit_version(bench.store, version);
        uint64_t requests = rft_alloc_count();
        for (uint32_t i = 0; i < bench.store->manifest->frame_count; i++) {
            (void)encode(&bench, i, RFT_CODING_WHOLE);
            (void)encode(&bench, i, RFT_CODING_SPARSE);
        }
        if (version > 7) assert_int_equal(rft_alloc_count(), requests);
    }
    close_bench(&bench);
}

/* A version of which every block but one of each tensor has a few bytes changed. */
static void commit_near(rft_store *store, uint64_t version)
{
    sample_version sample;
    sample_open(&sample, 2);
    rft_store_begin(store, version);
    for (uint64_t at = 0; at < store->manifest->store_bytes; at += 1000)
        sample.image[at] = (unsigned char)(sample.image[at] + version);
    write_and_commit(store, &sample);
    sample_close(&sample);
}

TEST(frames_that_are_wanted_next_are_made_along)
{
    rft_pool encoders;
    assert_ok(rft_frames_open_pool(&encoders, 3, NULL));
    for (uint64_t version = 4; version < 8; version++) {
        frames_bench alone, helped;
        refit_config config = quick_config();
        open_bench(&alone);
        open_bench(&helped);
        rft_frames_close(helped.frames, &helped.retired);
        assert_ok(
            rft_frames_open(helped.store->manifest, &config, &encoders, &helped.frames, NULL));
        commit_near(alone.store, version);
        commit_near(helped.store, version);
        uint32_t ready = helped.store->ready_count;
        for (uint32_t i = 0; i < helped.store->manifest->frame_count; i++) {
            rft_encoded one = encode(&alone, i, RFT_CODING_SPARSE), other;
            uint64_t requests = rft_alloc_count();
            assert_ok(rft_frames_encode(helped.frames, helped.store, i, RFT_CODING_SPARSE, NULL,
                                        ready, &other, NULL));
            if (i > 0) assert_int_equal(rft_alloc_count(), requests); /* made with the first */
            assert_int_equal(one.message.count, other.message.count);
            assert_memory_equal(one.message.data, other.message.data, one.message.count);
            assert_int_equal(one.payload.bytes.count, other.payload.bytes.count);
            assert_memory_equal(one.payload.bytes.data, other.payload.bytes.data,
                                one.payload.bytes.count);
        }
        rft_frames_counts counts = rft_frames_count(helped.frames);
        assert_int_equal(counts.version, version);
        assert_true(counts.blocks.sparse > 0);
        rft_frames_counts same = rft_frames_count(alone.frames);
        assert_int_equal(counts.blocks.sparse, same.blocks.sparse);
        assert_int_equal(counts.blocks.changed, same.blocks.changed);
        assert_int_equal(counts.bytes, same.bytes);
        close_bench(&alone);
        close_bench(&helped);
    }
    rft_pool_close(&encoders);
}

/* With one slot the bytes before go when the version is committed: what was coded by then stays as
 * it is, and the rest goes whole. */
TEST(what_was_coded_outlives_its_base)
{
    refit_config config = quick_config();
    frames_bench bench = {.limits = rft_limits_from(&config)};
    rft_manifest *manifest = NULL;
    assert_ok(rft_manifest_open(sample_tensors(), SAMPLE_TENSORS, 3 * 65536 + 1024, &bench.limits,
                                &manifest, NULL));
    assert_ok(hosted_store_open(manifest, 1, false, &bench.retired, &bench.store, NULL));
    assert_ok(rft_frames_open(manifest, &config, NULL, &bench.frames, NULL));
    commit_near(bench.store, 4);
    rft_store_begin(bench.store, 5);
    assert_non_null(rft_store_base_image(bench.store));
    rft_store_rollback(bench.store, true);
    assert_null(rft_store_base_image(bench.store));
    commit_near(bench.store, 6);
    assert_null(rft_store_base_image(bench.store));
    rft_encoded frame = encode(&bench, 0, RFT_CODING_SPARSE);
    assert_int_equal(rft_frames_count(bench.frames).blocks.sparse, 0);
    assert_true(frame.payload.bytes.count >= 65536);
    close_bench(&bench);
}

TEST(failed_allocations_are_errors_and_leave_nothing)
{
    frames_bench bench;
    uint64_t before = rft_alloc_count();
    open_bench(&bench);
    commit_near(bench.store, 4);
    uint64_t opening = rft_alloc_count() - before;
    close_bench(&bench);
    for (uint64_t nth = 1;; nth++) {
        rft_encoded frame;
        failing_alloc_begin(opening + nth);
        open_bench(&bench);
        commit_near(bench.store, 4);
        refit_status status = rft_frames_encode(bench.frames, bench.store, 0, RFT_CODING_SPARSE,
                                                NULL, 0, &frame, NULL);
        bool failed = failing_alloc_stop();
        (void)encode(&bench, 0, RFT_CODING_SPARSE);
        close_bench(&bench);
        (void)failing_alloc_end();
        assert_int_equal(status, failed ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
        if (!failed) break;
    }
}

int main(void)
{
    return test_run("frames");
}
