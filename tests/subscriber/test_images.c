/* A worker's images: two of each kind, never taken while in use, remembered while they are free. */
#include "base/alloc.h"
#include "subscriber/images.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/raw_publisher.h"
#include "tests/support/test.h"

typedef struct pool {
    rft_images images;
    sample_version sample;
    rft_catalog *catalog;
} pool;

static void open_bench(pool *bench)
{
    memset(bench, 0, sizeof *bench);
    sample_open(&bench->sample, 1);
    rft_manifest *manifest = bench->sample.manifest;
    assert_ok(rft_catalog_open(manifest, &bench->catalog, NULL));
}

static void close_bench(pool *bench)
{
    rft_images_close(&bench->images);
    assert_int_equal(bench->catalog->users, 1);
    rft_catalog_release(bench->catalog);
    bench->sample.manifest = NULL; /* it was the catalogue's */
    sample_close(&bench->sample);
}

static rft_image *take_owned(pool *bench)
{
    rft_image *image = NULL;
    assert_ok(rft_images_take_private(&bench->images, bench->catalog, NULL, &image, NULL));
    assert_int_equal(image->uses, RFT_IMAGE_STAGED);
    return image;
}

TEST(there_are_two_private_images_and_no_third)
{
    pool bench;
    rft_image *third = NULL;
    open_bench(&bench);
    rft_image *first = take_owned(&bench), *second = take_owned(&bench);
    assert_ptr_not_equal(first->bytes, second->bytes);
    assert_int_equal((uintptr_t)first->bytes % 4096, 0);
    memset(rft_image_writable(first), 1, bench.sample.manifest->store_bytes);
    assert_int_equal(rft_images_take_private(&bench.images, bench.catalog, NULL, &third, NULL),
                     REFIT_ERR_BUSY);
    assert_null(third);
    const unsigned char *bytes = first->bytes;
    rft_image_drop_use(first, RFT_IMAGE_STAGED);
    assert_ptr_equal(take_owned(&bench)->bytes, bytes); /* its memory was kept */
    close_bench(&bench);
}

TEST(an_image_is_free_when_its_last_use_is_dropped)
{
    pool bench;
    rft_image *other = NULL;
    open_bench(&bench);
    rft_image *image = take_owned(&bench);
    (void)take_owned(&bench);
    rft_image_add_use(image, RFT_IMAGE_BASE);
    rft_image_add_use(image, RFT_IMAGE_LENT);
    assert_null(rft_image_writable(image));
    rft_image_drop_use(image, RFT_IMAGE_STAGED);
    rft_image_drop_use(image, RFT_IMAGE_BASE);
    rft_image_drop_use(image, RFT_IMAGE_BASE);
    assert_int_equal(rft_images_take_private(&bench.images, bench.catalog, NULL, &other, NULL),
                     REFIT_ERR_BUSY);
    rft_image_drop_use(image, RFT_IMAGE_LENT);
    rft_image_drop_use(NULL, RFT_IMAGE_LENT);
    assert_ptr_equal(take_owned(&bench), image);
    close_bench(&bench);
}

TEST(trimming_gives_back_what_nothing_uses)
{
    pool bench;
    open_bench(&bench);
    rft_image *used = take_owned(&bench), *idle = take_owned(&bench);
    rft_image_drop_use(idle, RFT_IMAGE_STAGED);
    assert_non_null(idle->memory.memory);
    rft_images_trim_private(&bench.images);
    assert_null(idle->memory.memory);
    assert_non_null(used->memory.memory);
    close_bench(&bench);
}

TEST(a_segment_is_mapped_once_for_all_its_images)
{
    pool bench;
    rft_segment slot;
    rft_image *first = NULL, *second = NULL, *third = NULL;
    open_bench(&bench);
    raw_slot_open(&slot, &bench.sample);
    assert_ok(rft_images_take_shm(&bench.images, bench.catalog, slot.name, RFT_SEQLOCK_BYTES,
                                  &first, NULL));
    assert_ok(rft_images_take_shm(&bench.images, bench.catalog, slot.name, RFT_SEQLOCK_BYTES,
                                  &second, NULL));
    assert_ptr_equal(first->bytes, second->bytes);
    assert_memory_equal(first->bytes, bench.sample.image, bench.sample.manifest->store_bytes);
    assert_null(rft_image_writable(first));
    assert_int_equal(rft_images_take_shm(&bench.images, bench.catalog, slot.name, RFT_SEQLOCK_BYTES,
                                         &third, NULL),
                     REFIT_ERR_BUSY);
    rft_mapping *mapping = first->mapping;
    rft_images_trim_mappings(&bench.images);
    assert_non_null(mapping->segment.memory);
    rft_image_drop_use(first, RFT_IMAGE_STAGED);
    rft_image_drop_use(second, RFT_IMAGE_STAGED);
    rft_images_trim_mappings(&bench.images);
    assert_null(mapping->segment.memory);
    rft_segment_close(&slot);
    close_bench(&bench);
}

TEST(what_a_user_writes_ends_with_the_loan)
{
    pool bench;
    rft_segment slot;
    rft_image *image = NULL, *again = NULL;
    open_bench(&bench);
    raw_slot_open(&slot, &bench.sample);
    assert_ok(rft_images_take_shm(&bench.images, bench.catalog, slot.name, RFT_SEQLOCK_BYTES,
                                  &image, NULL));
    assert_ok(rft_image_lend(image, NULL));
    rft_image_add_use(image, RFT_IMAGE_BASE);
    memset((unsigned char *)(uintptr_t)image->view, 7, bench.sample.manifest->store_bytes);
    assert_memory_equal(image->bytes, bench.sample.image, bench.sample.manifest->store_bytes);
    rft_image_drop_use(image, RFT_IMAGE_LENT);
    assert_memory_equal(image->view, bench.sample.image, bench.sample.manifest->store_bytes);
    assert_ok(rft_images_take_shm(&bench.images, bench.catalog, slot.name, RFT_SEQLOCK_BYTES,
                                  &again, NULL));
    assert_memory_equal(again->view, bench.sample.image, bench.sample.manifest->store_bytes);
    rft_segment_close(&slot);
    close_bench(&bench);
}

static void take_and_leave(pool *bench, const rft_segment *slot)
{
    rft_image *image = NULL;
    assert_ok(rft_images_take_shm(&bench->images, bench->catalog, slot->name, RFT_SEQLOCK_BYTES,
                                  &image, NULL));
    rft_image_drop_use(image, RFT_IMAGE_STAGED);
}

TEST(both_slots_of_a_publisher_stay_mapped)
{
    pool bench;
    rft_segment slots[3];
    const rft_mapping *mappings = bench.images.mappings;
    open_bench(&bench);
    for (int i = 0; i < 3; i++)
        raw_slot_open(&slots[i], &bench.sample);
    for (int i = 0; i < 4; i++)
        take_and_leave(&bench, &slots[i % 2]);
    assert_string_equal(mappings[0].segment.name, slots[0].name);
    assert_string_equal(mappings[1].segment.name, slots[1].name);
    take_and_leave(&bench, &slots[2]);
    assert_string_equal(mappings[1].segment.name, slots[2].name);
    for (int i = 0; i < 3; i++)
        rft_segment_close(&slots[i]);
    close_bench(&bench);
}

TEST(what_the_publisher_has_replaced_is_not_kept)
{
    pool bench;
    rft_segment slots[2];
    rft_image *images[2];
    open_bench(&bench);
    for (int i = 0; i < 2; i++) {
        raw_slot_open(&slots[i], &bench.sample);
        assert_ok(rft_images_take_shm(&bench.images, bench.catalog, slots[i].name,
                                      RFT_SEQLOCK_BYTES, &images[i], NULL));
    }
    rft_mapping *replaced = images[0]->mapping, *standing = images[1]->mapping;
    rft_segment_close(&slots[0]);
    rft_images_trim_replaced(&bench.images);
    assert_non_null(replaced->segment.memory); /* it is read yet */
    rft_image_drop_use(images[0], RFT_IMAGE_STAGED);
    rft_image_drop_use(images[1], RFT_IMAGE_STAGED);
    rft_images_trim_replaced(&bench.images);
    assert_null(replaced->segment.memory);
    assert_non_null(standing->segment.memory);
    rft_segment_close(&slots[1]);
    close_bench(&bench);
}

TEST(the_seqlock_tells_whether_the_bytes_were_overwritten)
{
    pool bench;
    rft_segment slot;
    rft_image *image = NULL;
    open_bench(&bench);
    assert_true(rft_image_is_intact(take_owned(&bench)));
    raw_slot_open(&slot, &bench.sample);
    assert_ok(rft_images_take_shm(&bench.images, bench.catalog, slot.name, RFT_SEQLOCK_BYTES,
                                  &image, NULL));
    atomic_store(&raw_slot_seqlock(&slot)->generation, 3);
    assert_false(rft_image_note_seqlock(image)); /* being written */
    atomic_store(&raw_slot_seqlock(&slot)->generation, 4);
    assert_true(rft_image_note_seqlock(image));
    assert_true(rft_image_is_intact(image));
    atomic_store(&raw_slot_seqlock(&slot)->generation, 6);
    assert_false(rft_image_is_intact(image));
    rft_segment_close(&slot);
    close_bench(&bench);
}

TEST(a_manifest_is_closed_where_it_cannot_be_kept)
{
    sample_version sample;
    failing_alloc_begin(0);
    uint64_t before = rft_alloc_count();
    sample_open(&sample, 1);
    uint64_t requests = rft_alloc_count() - before;
    rft_manifest_close(sample.manifest);
    sample.manifest = NULL;
    sample_close(&sample);
    (void)failing_alloc_end();

    rft_catalog *catalog = NULL;
    failing_alloc_begin(requests + 1);
    sample_open(&sample, 1);
    assert_int_equal(rft_catalog_open(sample.manifest, &catalog, NULL), REFIT_ERR_HOST_MEMORY);
    assert_null(catalog);
    sample.manifest = NULL;
    sample_close(&sample);
    assert_true(failing_alloc_end()); /* and nothing is left */
}

int main(void)
{
    return test_run("images");
}
