/* A worker's mappings of its trainer's memory of the GPU: each under its share lock, made once, and
 * never ended while a reader uses it. */
#include "fake_cuda.h"
#include "subscriber/images.h"
#include "tests/support/sample_version.h"
#include "tests/support/test.h"

#define BLOCKS 3

/* A publisher's, by hand. */
typedef struct block {
    void *memory;
    rft_share share;
    rft_share_lock share_lock;
} block;

typedef struct scene {
    refit_device *device;
    rft_images images;
    sample_version sample;
    rft_catalog *catalog;
    block blocks[BLOCKS];
} scene;

static void scene_open(scene *on)
{
    memset(on, 0, sizeof *on);
    fake_cuda_reset();
    sample_open(&on->sample, 1);
    assert_ok(rft_catalog_open(on->sample.manifest, &on->catalog, NULL));
    assert_ok(refit_device_open("cuda:0", NULL, &on->device, NULL));
    on->images.gpu_memory.device = on->device;
    for (int i = 0; i < BLOCKS; i++) {
        block *one = &on->blocks[i];
        uint64_t bytes = on->sample.manifest->store_bytes;
        assert_ok(refit_memory_alloc(on->device, bytes, &one->memory, NULL));
        assert_ok(rft_device_share_export(on->device, one->memory, bytes, &one->share, NULL));
        assert_ok(rft_share_lock_open(&one->share_lock, NULL));
    }
}

static void scene_close(scene *on)
{
    rft_images_close(&on->images);
    for (int i = 0; i < BLOCKS; i++) {
        assert_false(rft_share_lock_is_mapped(&on->blocks[i].share_lock));
        rft_share_lock_close(&on->blocks[i].share_lock);
        assert_ok(refit_memory_free(on->device, on->blocks[i].memory, NULL));
    }
    assert_int_equal(on->catalog->users, 1);
    rft_catalog_release(on->catalog);
    on->sample.manifest = NULL; /* it was the catalogue's */
    sample_close(&on->sample);
    assert_ok(refit_device_close(on->device, NULL));
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
}

static int open_scene(void **state)
{
    static scene on;
    scene_open(&on);
    *state = &on;
    return 0;
}

static int close_scene(void **state)
{
    scene_close(*state);
    return 0;
}

#define ON_SCENE(name) TEST_ON(scene *on, name, open_scene, close_scene)

static refit_status take(scene *on, int index, rft_image **out)
{
    const block *one = &on->blocks[index];
    unsigned char share[RFT_SHARE_BYTES], places[SAMPLE_TENSORS * RFT_PLACE_BYTES];
    rft_share_write(&one->share, share);
    RFT_TRY(rft_images_take_gpu(&on->images, on->catalog, out, NULL));
    refit_status status = rft_image_map_gpu(&on->images, *out, one->share_lock.segment.name,
                                            (rft_view){share, sizeof share},
                                            sample_places(&on->sample, places), NULL);
    if (status != REFIT_OK) rft_image_drop_use(*out, RFT_IMAGE_STAGED);
    return status;
}

static rft_image *take_ok(scene *on, int index)
{
    rft_image *image = NULL;
    assert_ok(take(on, index, &image));
    assert_ptr_equal(rft_image_tensor(image, 0), on->blocks[index].memory);
    return image;
}

static bool is_mapped(const scene *on, int index)
{
    return rft_share_lock_is_mapped(&on->blocks[index].share_lock);
}

ON_SCENE(a_mapping_is_kept_until_another_needs_its_place)
{
    for (int i = 0; i < 2; i++)
        rft_image_drop_use(take_ok(on, i), RFT_IMAGE_STAGED);
    assert_true(is_mapped(on, 0) && is_mapped(on, 1));
    uint64_t looks = fake_cuda_calls("cuIpcGetMemHandle");
    rft_image *kept = take_ok(on, 1);
    assert_int_equal(fake_cuda_calls("cuIpcGetMemHandle"), looks); /* it was there */
    rft_image_drop_use(take_ok(on, 2), RFT_IMAGE_STAGED);
    assert_false(is_mapped(on, 0));
    assert_true(is_mapped(on, 1) && is_mapped(on, 2));
    rft_image_drop_use(kept, RFT_IMAGE_STAGED);
}

ON_SCENE(a_third_image_waits)
{
    rft_image *third = NULL;
    rft_image *first = take_ok(on, 0), *second = take_ok(on, 1);
    assert_int_equal(take(on, 2, &third), REFIT_ERR_BUSY);
    rft_image_drop_use(first, RFT_IMAGE_STAGED);
    third = take_ok(on, 2);
    rft_image_drop_use(second, RFT_IMAGE_STAGED);
    rft_image_drop_use(third, RFT_IMAGE_STAGED);
}

/* As after a digest that was under way when its version was dropped: the image is free, the mapping
 * is in use. */
ON_SCENE(a_mapping_that_is_still_read_keeps_its_place)
{
    rft_image *third = NULL;
    rft_image *first = take_ok(on, 0), *second = take_ok(on, 1);
    rft_gpu_version *read = rft_gpu_version_acquire(second->gpu);
    rft_image_drop_use(second, RFT_IMAGE_STAGED);
    assert_int_equal(take(on, 2, &third), REFIT_ERR_BUSY);
    rft_images_trim_mappings(&on->images);
    assert_true(is_mapped(on, 0) && is_mapped(on, 1));
    rft_gpu_version_release(read);
    third = take_ok(on, 2);
    assert_false(is_mapped(on, 1));
    rft_image_drop_use(third, RFT_IMAGE_STAGED);
    rft_image_drop_use(first, RFT_IMAGE_STAGED);
}

ON_SCENE(memory_that_was_given_up_is_let_go_and_not_taken)
{
    rft_image *image = NULL;
    rft_image_drop_use(take_ok(on, 0), RFT_IMAGE_STAGED);
    rft_image *kept = take_ok(on, 1);
    for (int i = 0; i < BLOCKS; i++)
        rft_share_lock_retire(&on->blocks[i].share_lock);
    rft_images_trim_replaced(&on->images);
    assert_false(is_mapped(on, 0));
    assert_true(is_mapped(on, 1));
    assert_int_equal(take(on, 2, &image), REFIT_ERR_NOT_FOUND);
    assert_false(is_mapped(on, 2));
    rft_image_drop_use(kept, RFT_IMAGE_STAGED);
}

ON_SCENE(a_reader_is_seen_until_its_last_image_is_back)
{
    rft_image *first = take_ok(on, 0), *second = take_ok(on, 0);
    assert_ptr_equal(first->gpu->lock, second->gpu->lock);
    assert_true(rft_image_note_seqlock(first) && rft_image_note_seqlock(second));
    assert_ok(rft_image_lend(first, NULL));
    assert_ok(rft_image_lend(second, NULL));
    rft_image_drop_use(first, RFT_IMAGE_LENT);
    assert_true(rft_share_lock_is_read(&on->blocks[0].share_lock));
    rft_image_drop_use(second, RFT_IMAGE_LENT);
    assert_false(rft_share_lock_is_read(&on->blocks[0].share_lock));
    rft_image_drop_use(first, RFT_IMAGE_STAGED);
    rft_seqlock_begin(rft_share_lock_seqlock(&on->blocks[0].share_lock));
    assert_int_equal(rft_image_lend(second, NULL), REFIT_ERR_STALE);
    assert_false(rft_share_lock_is_read(&on->blocks[0].share_lock));
    rft_image_drop_use(second, RFT_IMAGE_STAGED);
}

int main(void)
{
    return test_run("gpu_stage");
}
