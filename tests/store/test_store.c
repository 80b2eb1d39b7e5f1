/* The store: slots, digests, what is the same as before, and the old version back bit for bit. */
#include <stdlib.h>

#include "kernels/digest.h"
#include "store/store.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/file_size_limit.h"
#include "tests/support/hosted_store.h"
#include "tests/support/quick_config.h"
#include "tests/support/sample_version.h"
#include "tests/support/test.h"

typedef struct store_bench {
    rft_retire_list retired;
    rft_store *store;
} store_bench;

static rft_manifest *make_manifest(void)
{
    refit_config config = quick_config();
    rft_limits limits = rft_limits_from(&config);
    rft_manifest *manifest = NULL;
    (void)rft_manifest_open(sample_tensors(), SAMPLE_TENSORS, SAMPLE_FRAME_BYTES, &limits,
                            &manifest, NULL);
    return manifest;
}

static void open_store(store_bench *bench, uint32_t slots)
{
    *bench = (store_bench){0};
    assert_ok(
        hosted_store_open(make_manifest(), slots, true, &bench->retired, &bench->store, NULL));
}

static void close_store(store_bench *bench)
{
    rft_store_close(bench->store);
    assert_int_equal(rft_retire_list_close(&bench->retired, 0), 0);
}

static void add_ready(void *user, uint32_t frame)
{
    rft_store_add_ready(user, frame);
}

static refit_status write_tensor(rft_store *store, const sample_version *sample, uint32_t tensor)
{
    const rft_manifest_tensor *place = &store->manifest->tensors[tensor];
    return rft_store_write(store, tensor, sample->image + place->offset, place->bytes, add_ready,
                           store, NULL);
}

static void write_version(rft_store *store, uint64_t version)
{
    sample_version sample;
    sample_open(&sample, version);
    rft_store_begin(store, version);
    for (uint32_t i = 0; i < store->manifest->count; i++) {
        if (store->manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        assert_ok(write_tensor(store, &sample, i));
    }
    assert_int_equal(store->ready_count, store->manifest->frame_count);
    assert_ok(rft_store_seal(store, NULL));
    assert_true(rft_digest128_equal(&store->next.digest, &sample.digest));
    sample_close(&sample);
}

static void commit_version(rft_store *store, uint64_t version)
{
    write_version(store, version);
    rft_store_commit(store);
}

static void check_served(const rft_store *store, uint64_t version)
{
    sample_version sample;
    sample_open(&sample, version);
    assert_int_equal(rft_store_served(store)->version, version);
    assert_memory_equal(rft_slot_image(rft_store_served_slot(store)), sample.image,
                        store->manifest->store_bytes);
    assert_true(rft_digest128_equal(&rft_store_served(store)->digest, &sample.digest));
    sample_close(&sample);
}

static uint64_t generation(const rft_store *store, uint32_t slot)
{
    const rft_seqlock *mark =
        (const rft_seqlock *)(const void *)store->slots[slot].buffer->segment.memory;
    return atomic_load(&mark->generation);
}

TEST(committed_versions_are_served)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        store_bench bench;
        open_store(&bench, slots);
        assert_null(rft_store_served(bench.store));
        for (uint64_t version = 1; version <= 4; version++) {
            commit_version(bench.store, version);
            check_served(bench.store, version);
            assert_int_equal(bench.store->committed_slot, slots == 1 ? 0 : (version + 1) % 2);
        }
        close_store(&bench);
    }
}

/* Begun and dropped at every point: after any number of tensors, and sealed. */
TEST(version_before_comes_back_bit_for_bit)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        store_bench bench;
        open_store(&bench, slots);
        commit_version(bench.store, 1);
        for (uint32_t tensors = 0; tensors <= SAMPLE_TENSORS; tensors++) {
            sample_version sample;
            sample_open(&sample, 2 + tensors);
            rft_store_begin(bench.store, 2 + tensors);
            for (uint32_t i = 0; i < tensors; i++) {
                if (bench.store->manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
                assert_ok(write_tensor(bench.store, &sample, i));
            }
            bool complete = tensors == SAMPLE_TENSORS;
            assert_int_equal(rft_store_seal(bench.store, NULL),
                             complete ? REFIT_OK : REFIT_ERR_STATE);
            rft_store_undo(bench.store);
            rft_store_rollback(bench.store, true);
            check_served(bench.store, 1);
            assert_int_equal(bench.store->ready_count, bench.store->manifest->frame_count);
            assert_int_equal(bench.store->base, 0);
            sample_close(&sample);
        }
        commit_version(bench.store, 20);
        check_served(bench.store, 20);
        close_store(&bench);
    }
}

TEST(nothing_is_served_after_the_first_version_is_dropped)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        store_bench bench;
        open_store(&bench, slots);
        write_version(bench.store, 1);
        rft_store_undo(bench.store);
        rft_store_rollback(bench.store, true);
        assert_null(rft_store_served(bench.store));
        commit_version(bench.store, 2);
        check_served(bench.store, 2);
        close_store(&bench);
    }
}

TEST(seqlock_is_odd_while_bytes_change)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        store_bench bench;
        uint64_t last = 0;
        open_store(&bench, slots);
        for (uint64_t version = 1; version <= 6; version++) {
            uint32_t slot = rft_store_target(bench.store);
            uint64_t before = generation(bench.store, slot);
            rft_store_begin(bench.store, version);
            assert_true(generation(bench.store, slot) > before);
            assert_int_equal(generation(bench.store, slot) % 2, 1);
            rft_store_undo(bench.store);
            rft_store_rollback(bench.store, true);
            if (slots == 1 && version > 1) assert_int_equal(generation(bench.store, slot) % 2, 0);
            commit_version(bench.store, 10 + version);
            assert_int_equal(generation(bench.store, slot) % 2, 0);
            assert_true(generation(bench.store, slot) > before);
            last = generation(bench.store, slot);
        }
        assert_true(last >= 4);
        close_store(&bench);
    }
}

TEST(same_blocks_are_those_that_did_not_change)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        store_bench bench;
        sample_version before, now;
        open_store(&bench, slots);
        commit_version(bench.store, 2);
        assert_int_equal(bench.store->base, 0);
        commit_version(bench.store, 3);
        sample_open(&before, 2);
        sample_open(&now, 3);
        unsigned char *same = sample_same(&now, &before);
        assert_int_equal(bench.store->base, 2);
        assert_memory_equal(bench.store->same, same, bench.store->manifest->block_count);
        assert_int_equal(bench.store->same_blocks, 2);
        free(same);
        sample_close(&before);
        sample_close(&now);
        close_store(&bench);
    }
}

TEST(renewed_slot_has_the_committed_bytes_in_other_memory)
{
    store_bench bench;
    open_store(&bench, 1);
    commit_version(bench.store, 1);
    rft_buffer *old = bench.store->slots[0].buffer;
    const unsigned char *kept = old->segment.memory;
    rft_pending_raise(&old->pending);
    bench.store->slots[0].tainted = true;
    assert_ok(rft_store_renew(bench.store, 0, NULL));
    assert_false(bench.store->slots[0].tainted);
    check_served(bench.store, 1);
    commit_version(bench.store, 2);
    sample_version sample;
    sample_open(&sample, 1);
    assert_memory_equal(kept + RFT_SEQLOCK_BYTES, sample.image, bench.store->manifest->store_bytes);
    sample_close(&sample);
    rft_retire_list_sweep(&bench.retired);
    assert_ptr_equal(bench.retired.first, old);
    rft_pending_lower(&old->pending);
    rft_retire_list_sweep(&bench.retired);
    assert_null(bench.retired.first);
    close_store(&bench);
}

TEST(slot_without_the_committed_bytes_gives_its_memory_back_first)
{
    store_bench bench;
    open_store(&bench, 2);
    commit_version(bench.store, 1);
    uint32_t slot = rft_store_target(bench.store);
    char name[RFT_SEGMENT_NAME_BYTES];
    rft_segment found;
    strcpy(name, bench.store->slots[slot].buffer->segment.name);
    struct rlimit before = file_size_limit_to(0);
    refit_status status = rft_store_renew(bench.store, slot, NULL);
    file_size_limit_back(&before);
    assert_int_equal(status, REFIT_ERR_SYSTEM);
    assert_int_equal(rft_segment_attach(&found, name, 1, NULL), REFIT_ERR_NOT_FOUND);
    assert_null(bench.store->slots[slot].buffer);
    check_served(bench.store, 1);
    assert_ok(rft_store_renew(bench.store, slot, NULL));
    commit_version(bench.store, 2);
    check_served(bench.store, 2);
    close_store(&bench);
}

static void check_parts(const rft_store *store, const rft_version_digests *digests,
                        uint64_t version)
{
    sample_version sample;
    sample_open(&sample, version);
    assert_int_equal(digests->version, version);
    for (uint32_t i = 0; i < store->manifest->block_count; i++) {
        const rft_block *block = &store->manifest->blocks[i];
        assert_int_equal(digests->has_block_sum[i], 1);
        assert_int_equal(
            digests->block_sums[i],
            rft_digest_part(sample.image + block->offset, block->bytes, block->tensor_offset));
    }
    sample_close(&sample);
}

/* Of the version and of its base, while it is written and once it is committed; also where a block
 * is as it was and stays where it is. */
TEST(parts_of_blocks_are_kept_of_two_versions)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        store_bench bench;
        open_store(&bench, slots);
        commit_version(bench.store, 2);
        for (uint64_t version = 3; version <= 5; version++) {
            write_version(bench.store, version);
            check_parts(bench.store, rft_store_served(bench.store), version);
            check_parts(bench.store, rft_store_base_digests(bench.store), version - 1);
            rft_store_commit(bench.store);
            check_parts(bench.store, rft_store_served(bench.store), version);
            check_parts(bench.store, rft_store_base_digests(bench.store), version - 1);
        }
        write_version(bench.store, 6);
        rft_store_undo(bench.store);
        rft_store_rollback(bench.store, true);
        check_parts(bench.store, rft_store_served(bench.store), 5);
        close_store(&bench);
    }
}

/* A device that gives a tensor's sum says nothing of its blocks. */
TEST(parts_are_known_only_where_they_were_taken)
{
    store_bench bench;
    sample_version sample;
    open_store(&bench, 2);
    commit_version(bench.store, 2);
    sample_open(&sample, 3);
    rft_store_begin(bench.store, 3);
    for (uint32_t i = 0; i < 2; i++) {
        const rft_manifest_tensor *place = &bench.store->manifest->tensors[i];
        const unsigned char *from = sample.image + place->offset;
        uint64_t sum = rft_digest_part(from, place->bytes, 0);
        assert_true(place->alias_of == REFIT_NO_ALIAS && place->blocks > 0);
        memcpy(rft_store_begin_device_write(bench.store, i), from, place->bytes);
        rft_store_end_device_write(bench.store, i);
        rft_store_compare(bench.store, i, i == 0 ? &sum : NULL, add_ready, bench.store);
        for (uint32_t b = place->first_block; b < place->first_block + place->blocks; b++) {
            const rft_block *block = &bench.store->manifest->blocks[b];
            assert_int_equal(bench.store->next.has_block_sum[b], i);
            if (i == 0) continue;
            assert_int_equal(
                bench.store->next.block_sums[b],
                rft_digest_part(sample.image + block->offset, block->bytes, block->tensor_offset));
        }
    }
    rft_store_undo(bench.store);
    rft_store_rollback(bench.store, true);
    sample_close(&sample);
    close_store(&bench);
}

TEST(failed_allocations_leave_nothing)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        for (uint64_t nth = 1;; nth++) {
            store_bench bench = {0};
            failing_alloc_begin(nth);
            rft_manifest *manifest = make_manifest();
            refit_status status =
                manifest == NULL
                    ? REFIT_ERR_HOST_MEMORY
                    : hosted_store_open(manifest, slots, true, &bench.retired, &bench.store, NULL);
            if (status == REFIT_OK) close_store(&bench);
            if (!failing_alloc_end()) break;
            assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
        }
    }
}

int main(void)
{
    return test_run("store");
}
