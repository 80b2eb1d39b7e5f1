/*
 * The images of a worker.
 *
 * Uses are bits, because one image can be held and lent at once (an accepted update that is still
 * open). When the last bit is dropped the image forgets its manifest and its mapping; its private
 * memory stays for the next version until trim, so that versions of one manifest allocate nothing.
 * Knows nothing of the protocol: who may take which image when is the session's business.
 */
#include "subscriber/images.h"

#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "subscriber/gpu_stage.h"

refit_status rft_catalog_open(rft_manifest *manifest, rft_catalog **out, refit_error *error)
{
    rft_catalog *catalog = rft_calloc(1, sizeof *catalog);
    if (catalog == NULL) {
        rft_manifest_close(manifest);
        return rft_fail(error, REFIT_ERR_HOST_MEMORY, "no memory to keep a manifest");
    }
    *catalog = (rft_catalog){.manifest = manifest, .users = 1};
    *out = catalog;
    return REFIT_OK;
}

rft_catalog *rft_catalog_acquire(rft_catalog *catalog)
{
    catalog->users++;
    return catalog;
}

void rft_catalog_release(rft_catalog *catalog)
{
    if (catalog == NULL || --catalog->users > 0) return;
    rft_manifest_close(catalog->manifest);
    rft_free(catalog);
}

rft_image *rft_image_find_free(rft_image *images, refit_error *error)
{
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        if (images[i].uses == 0) return &images[i];
    }
    (void)rft_fail(error, REFIT_ERR_BUSY, "both images of the worker are in use");
    return NULL;
}

void rft_image_begin_use(rft_image *image, rft_catalog *catalog, const unsigned char *bytes)
{
    image->uses = RFT_IMAGE_STAGED;
    image->catalog = rft_catalog_acquire(catalog);
    image->bytes = bytes;
    image->held = (rft_held){0};
}

refit_status rft_images_take_owned(rft_images *images, rft_catalog *catalog, rft_image **out,
                                   refit_error *error)
{
    rft_image *image = rft_image_find_free(images->owned, error);
    if (image == NULL) return REFIT_ERR_BUSY;
    uint64_t bytes = catalog->manifest->store_bytes;
    if (image->memory.bytes < bytes) {
        rft_segment_close(&image->memory);
        RFT_TRY(rft_segment_create_private(&image->memory, bytes, error));
    }
    rft_image_begin_use(image, catalog, image->memory.memory);
    *out = image;
    return REFIT_OK;
}

static rft_mapping *find_mapping(rft_images *images, const char *name, uint64_t bytes)
{
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        rft_mapping *mapping = &images->mappings[i];
        if (mapping->segment.memory != NULL && mapping->segment.bytes >= bytes &&
            strcmp(mapping->segment.name, name) == 0) {
            return mapping;
        }
    }
    return NULL;
}

/* One that maps nothing yet, or else one that nothing uses: both slots of a publisher stay mapped.
 * There is always one, as there are no fewer mappings than mapped images and one of those is free.
 */
static rft_mapping *find_unused(rft_images *images)
{
    rft_mapping *unused = NULL;
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        rft_mapping *mapping = &images->mappings[i];
        if (mapping->segment.memory == NULL) return mapping;
        if (mapping->users == 0) unused = mapping;
    }
    return unused;
}

/* A segment that is mapped already, or one that takes the place of an unused one. */
static refit_status get_mapping(rft_images *images, const char *name, uint64_t bytes,
                                rft_mapping **out, refit_error *error)
{
    *out = find_mapping(images, name, bytes);
    if (*out != NULL) return REFIT_OK;
    rft_mapping *unused = find_unused(images);
    rft_segment_close(&unused->segment);
    RFT_TRY(rft_segment_attach(&unused->segment, name, bytes, error));
    *out = unused;
    return REFIT_OK;
}

refit_status rft_images_take_mapped(rft_images *images, rft_catalog *catalog, const char *name,
                                    uint64_t offset, rft_image **out, refit_error *error)
{
    rft_image *image = rft_image_find_free(images->mapped, error);
    if (image == NULL) return REFIT_ERR_BUSY;
    uint64_t bytes;
    bool fits = offset >= RFT_SEQLOCK_BYTES && offset % RFT_TENSOR_ALIGNMENT == 0 &&
                rft_add_u64(offset, catalog->manifest->store_bytes, &bytes);
    RFT_REFUSE_IF(!fits, error, REFIT_ERR_PROTOCOL,
                  "no version can lie at offset %llu of the publisher's segment",
                  (unsigned long long)offset);
    rft_mapping *mapping;
    RFT_TRY(get_mapping(images, name, bytes, &mapping, error));
    mapping->users++;
    image->mapping = mapping;
    image->mark =
        (const rft_seqlock *)(const void *)(mapping->segment.memory + offset - RFT_SEQLOCK_BYTES);
    rft_image_begin_use(image, catalog, mapping->segment.memory + offset);
    *out = image;
    return REFIT_OK;
}

unsigned char *rft_image_writable(rft_image *image)
{
    bool ours = image->mark == NULL && image->uses == RFT_IMAGE_STAGED;
    return ours ? image->memory.memory : NULL;
}

void rft_image_add_use(rft_image *image, rft_image_use use)
{
    image->uses |= (unsigned)use;
}

refit_status rft_image_lend(rft_image *image, refit_error *error)
{
    if (image->gpu != NULL) RFT_TRY(rft_gpu_mapping_read(image->gpu, image->generation, error));
    rft_image_add_use(image, RFT_IMAGE_LENT);
    return REFIT_OK;
}

static void leave_mappings(rft_image *image)
{
    if (image->mapping != NULL) image->mapping->users--;
    if (image->gpu != NULL) image->gpu->users--;
    image->mapping = NULL;
    image->gpu = NULL;
    image->mark = NULL;
}

void rft_image_drop_use(rft_image *image, rft_image_use use)
{
    if (image == NULL || image->uses == 0) return;
    bool returned = (image->uses & (unsigned)use & RFT_IMAGE_LENT) != 0;
    if (returned && image->gpu != NULL) rft_gpu_mapping_unread(image->gpu);
    image->uses &= ~(unsigned)use;
    if (image->uses != 0) return;
    rft_catalog_release(image->catalog);
    image->catalog = NULL;
    image->bytes = NULL;
    leave_mappings(image);
}

bool rft_image_note_mark(rft_image *image)
{
    return image->mark == NULL || rft_seqlock_note(image->mark, &image->generation);
}

bool rft_image_is_intact(const rft_image *image)
{
    return image->mark == NULL || rft_seqlock_holds(image->mark, image->generation);
}

void rft_images_trim_owned(rft_images *images)
{
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        if (images->owned[i].uses == 0) rft_segment_close(&images->owned[i].memory);
    }
}

void rft_images_trim_mapped(rft_images *images)
{
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        if (images->mappings[i].users == 0) rft_segment_close(&images->mappings[i].segment);
    }
    rft_images_trim_gpu(images);
}

void rft_images_trim_replaced(rft_images *images)
{
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        rft_mapping *mapping = &images->mappings[i];
        bool unused = mapping->segment.memory != NULL && mapping->users == 0;
        if (unused && rft_segment_is_retired(&mapping->segment))
            rft_segment_close(&mapping->segment);
    }
}

void rft_images_close(rft_images *images)
{
    const rft_image_use uses[] = {RFT_IMAGE_STAGED, RFT_IMAGE_HELD, RFT_IMAGE_LENT};
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        for (size_t use = 0; use < sizeof uses / sizeof *uses; use++) {
            rft_image_drop_use(&images->owned[i], uses[use]);
            rft_image_drop_use(&images->mapped[i], uses[use]);
            rft_image_drop_use(&images->shared[i], uses[use]);
        }
    }
    rft_images_trim_owned(images);
    rft_images_trim_mapped(images);
}
