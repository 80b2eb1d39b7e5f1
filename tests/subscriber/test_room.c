/* What is as large as the model, at both ends, is refused beyond what the machine or the cgroup has
 * free: the kernel would end the process for it. */
#include "memory/budget.h"
#include "store/store.h"
#include "subscriber/destinations.h"
#include "subscriber/images.h"
#include "tests/support/hosted_store.h"
#include "tests/support/quick_config.h"
#include "tests/support/raw_publisher.h"
#include "tests/support/test.h"

static uint64_t free_bytes;

void __wrap_rft_budget_free(const char *root, rft_budget *out);

void __wrap_rft_budget_free(const char *root, rft_budget *out)
{
    *out = (rft_budget){0, free_bytes, "cgroup memory limit"};
}

static rft_manifest *make_manifest(void)
{
    refit_config config = quick_config();
    rft_limits limits = rft_limits_from(&config);
    rft_manifest *manifest = NULL;
    assert_ok(rft_manifest_open(sample_tensors(), SAMPLE_TENSORS, SAMPLE_FRAME_BYTES, &limits,
                                &manifest, NULL));
    return manifest;
}

static uint64_t version_bytes(void)
{
    rft_manifest *manifest = make_manifest();
    uint64_t bytes = manifest->store_bytes;
    rft_manifest_close(manifest);
    return bytes;
}

static refit_status try_store(uint32_t slots, bool shared, refit_error *error)
{
    rft_retire_list retired = {0};
    rft_store *store = NULL;
    refit_status status =
        hosted_store_open(make_manifest(), slots, shared, &retired, &store, error);
    if (status == REFIT_OK) rft_store_close(store);
    assert_int_equal(rft_retire_list_close(&retired, 0), 0);
    return status;
}

/* Without shared memory no less is needed. */
TEST(a_store_beyond_what_is_free_is_refused_shared_and_private)
{
    free_bytes = version_bytes() - 1;
    assert_refused(try_store(2, true, error), REFIT_ERR_SYSTEM, "cgroup memory limit");
    assert_refused(try_store(2, false, error), REFIT_ERR_HOST_MEMORY, "cgroup memory limit");
    assert_refused(try_store(2, false, error), REFIT_ERR_HOST_MEMORY, "broadcast.slots: 1");
    free_bytes = 2 * version_bytes();
    assert_ok(try_store(2, true, NULL));
    assert_ok(try_store(2, false, NULL));
}

TEST(overwritten_bytes_are_kept_within_free_memory)
{
    rft_retire_list retired = {0};
    rft_store *store = NULL;
    uint64_t bytes = version_bytes();
    free_bytes = UINT64_MAX;
    assert_ok(hosted_store_open(make_manifest(), 1, false, &retired, &store, NULL));
    rft_store_begin(store, 1);
    free_bytes = 0;
    assert_ok(rft_store_afford(store, bytes, NULL)); /* there is nothing below the first */
    store->committed_slot = store->writing_slot;
    store->base = 1;
    assert_refused(rft_store_afford(store, bytes, error), REFIT_ERR_HOST_MEMORY, "rollback");
    free_bytes = bytes;
    assert_ok(rft_store_afford(store, bytes, NULL));
    rft_store_close(store);
    assert_int_equal(rft_retire_list_close(&retired, 0), 0);
}

TEST(a_version_beyond_what_is_free_is_not_received)
{
    rft_images images = {0};
    rft_image *image = NULL;
    rft_catalog *catalog;
    assert_ok(rft_catalog_open(make_manifest(), &catalog, NULL));
    free_bytes = catalog->manifest->store_bytes - 1;
    assert_refused(rft_images_take_private(&images, catalog, NULL, &image, error),
                   REFIT_ERR_HOST_MEMORY, "raise the limit of the container");
    assert_null(image);
    free_bytes++;
    assert_ok(rft_images_take_private(&images, catalog, NULL, &image, NULL));
    rft_images_close(&images);
    rft_catalog_release(catalog);
}

TEST(old_bytes_are_not_noted_without_memory_and_nothing_changes)
{
    static unsigned char block[4000], next[4000], before[4000];
    const rft_delta_shape shape = {1000, 4, RFT_DELTA_RAW};
    rft_rollback rollback = {.last = UINT64_MAX};
    uint32_t changed = 77;
    memset(next, 1, sizeof next);
    assert_ok(rft_rollback_prepare(&rollback, 4, 4 * sizeof block, NULL));
    free_bytes = 100;
    assert_refused(
        rft_rollback_change(&rollback, (rft_note_place){0}, shape, block, next, &changed, error),
        REFIT_ERR_HOST_MEMORY, "load_into");
    assert_memory_equal(block, before, sizeof block);
    assert_true(rft_rollback_is_empty(&rollback));
    assert_ok(rft_rollback_change(&rollback, (rft_note_place){0}, shape, block, before, &changed,
                                  NULL)); /* equal bytes need no note */
    free_bytes = MIB;
    assert_ok(
        rft_rollback_change(&rollback, (rft_note_place){0}, shape, block, next, &changed, NULL));
    assert_int_equal(changed, 1000);
    rft_rollback_reset(&rollback);
}

int main(void)
{
    return test_run("room");
}
