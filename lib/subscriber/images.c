/*
 * The images of a worker: memory of this process, mappings of the publisher's shared memory, and
 * mappings of its memory of a GPU.
 *
 * Uses are bits, because one image can be held and lent at once (an accepted update that is still
 * open). When the last bit is dropped the image forgets its manifest and its mapping; its private
 * memory stays for the next version until trim, so that versions of one manifest allocate nothing.
 * Knows nothing of the protocol: the session decides which image is taken when.
 */
#include "subscriber/images.h"

#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"

/* ---- Catalogs */

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

/* ---- Private images */

/* Of RFT_IMAGES_MOST; NULL: REFIT_ERR_BUSY. */
static rft_image *find_free(rft_image *images, refit_error *error)
{
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        if (images[i].uses == 0) return &images[i];
    }
    (void)rft_fail(error, REFIT_ERR_BUSY, "both images of the worker are in use");
    return NULL;
}

/* As STAGED. */
static void begin_use(rft_image *image, rft_catalog *catalog, const unsigned char *bytes)
{
    image->uses = RFT_IMAGE_STAGED;
    image->catalog = rft_catalog_acquire(catalog);
    image->bytes = bytes;
    image->view = bytes;
    image->id = (rft_version_id){0};
}

refit_status rft_images_take_private(rft_images *images, rft_catalog *catalog, rft_image **out,
                                     refit_error *error)
{
    rft_image *image = find_free(images->private, error);
    if (image == NULL) return REFIT_ERR_BUSY;
    uint64_t bytes = catalog->manifest->store_bytes;
    if (image->memory.bytes < bytes) {
        rft_segment_close(&image->memory);
        RFT_TRY(rft_segment_create_private(&image->memory, bytes, error));
    }
    begin_use(image, catalog, image->memory.memory);
    *out = image;
    return REFIT_OK;
}

/* ---- Shared memory */

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

refit_status rft_images_take_shm(rft_images *images, rft_catalog *catalog, const char *name,
                                 uint64_t offset, rft_image **out, refit_error *error)
{
    rft_image *image = find_free(images->shm, error);
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
    image->seqlock =
        (const rft_seqlock *)(const void *)(mapping->segment.memory + offset - RFT_SEQLOCK_BYTES);
    begin_use(image, catalog, mapping->segment.memory + offset);
    image->view = mapping->segment.view + offset;
    *out = image;
    return REFIT_OK;
}

/*
 * ---- Memory of a GPU
 *
 * Each block of the publisher is mapped once and kept from version to version, under its share lock
 * (store/segment.h), by whose name it is known; it is unmapped when the publisher has given it
 * up or another one needs the place. The order is that of segment.h: the lock is taken before
 * the memory is mapped and given back after it is unmapped, so that the publisher never frees
 * memory that is mapped here; and a reader marks itself first and then looks at the seqlock. A
 * publisher's offer is believed only as far as the device confirms it.
 *
 * An image that is lent to the user is marked on the lock as being read, so that the publisher,
 * should it have evicted this worker, does not write there. The user's own reads, on whatever
 * stream, are over before the update is closed.
 */

static void gpu_mapping_close(rft_images *images, rft_gpu_mapping *mapping)
{
    if (mapping->memory == NULL) return;
    rft_device_share_unmap(images->device, mapping->memory);
    rft_share_lock_close(&mapping->share_lock);
    *mapping = (rft_gpu_mapping){0};
}

static bool gpu_mapping_is_retired(const rft_gpu_mapping *mapping)
{
    return rft_seqlock_is_retired(rft_share_lock_seqlock(&mapping->share_lock));
}

static void trim_gpu(rft_images *images, bool retired_only)
{
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        rft_gpu_mapping *mapping = &images->gpu_mappings[i];
        if (mapping->memory == NULL || mapping->users > 0) continue;
        if (!retired_only || gpu_mapping_is_retired(mapping)) gpu_mapping_close(images, mapping);
    }
}

void rft_images_trim_gpu(rft_images *images)
{
    trim_gpu(images, false);
}

void rft_images_trim_retired(rft_images *images)
{
    trim_gpu(images, true);
}

static rft_gpu_mapping *gpu_mapping_find(rft_images *images, const char *seqlock)
{
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        rft_gpu_mapping *mapping = &images->gpu_mappings[i];
        if (mapping->memory != NULL && strcmp(mapping->share_lock.segment.name, seqlock) == 0) {
            return mapping;
        }
    }
    return NULL;
}

/* An empty place, or one that nothing uses. NULL: there is none, though an image is free: the GPU
 * still reads for one that was dropped. */
static rft_gpu_mapping *gpu_mapping_make_place(rft_images *images)
{
    rft_gpu_mapping *unused = NULL;
    rft_images_trim_retired(images);
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        rft_gpu_mapping *mapping = &images->gpu_mappings[i];
        if (mapping->memory == NULL) return mapping;
        if (mapping->users == 0) unused = mapping;
    }
    if (unused != NULL) gpu_mapping_close(images, unused);
    return unused;
}

static refit_status gpu_mapping_fill(rft_images *images, rft_gpu_mapping *mapping,
                                     const rft_share *share, refit_error *error)
{
    void *memory = NULL;
    RFT_TRY(rft_device_share_map(images->device, share, &memory, error));
    if ((uintptr_t)memory % RFT_TENSOR_ALIGNMENT != 0) {
        rft_device_share_unmap(images->device, memory);
        return rft_fail(error, REFIT_ERR_PROTOCOL,
                        "no version can lie where the publisher says in the GPU's memory");
    }
    mapping->memory = memory;
    mapping->share = *share;
    return REFIT_OK;
}

static refit_status gpu_mapping_open(rft_images *images, const rft_share *share,
                                     const char *seqlock, rft_gpu_mapping **out, refit_error *error)
{
    rft_gpu_mapping *mapping = gpu_mapping_make_place(images);
    RFT_REFUSE_IF(mapping == NULL, error, REFIT_ERR_BUSY,
                  "the GPU still reads all of the publisher's memory that is mapped");
    RFT_TRY(rft_share_lock_hold(&mapping->share_lock, seqlock, error));
    refit_status status = gpu_mapping_fill(images, mapping, share, error);
    if (status == REFIT_OK) {
        *out = mapping;
    } else {
        rft_share_lock_close(&mapping->share_lock);
    }
    return status;
}

static bool is_same_share(const rft_share *a, const rft_share *b)
{
    return memcmp(a->handle, b->handle, sizeof a->handle) == 0 && a->offset == b->offset &&
           a->bytes == b->bytes;
}

refit_status rft_images_take_gpu(rft_images *images, rft_catalog *catalog, const rft_share *share,
                                 const char *lock, rft_image **out, refit_error *error)
{
    rft_image *image = find_free(images->gpu, error);
    if (image == NULL) return REFIT_ERR_BUSY;
    rft_gpu_mapping *mapping = gpu_mapping_find(images, lock);
    RFT_REFUSE_IF(share->bytes < catalog->manifest->store_bytes ||
                      (mapping != NULL && !is_same_share(&mapping->share, share)),
                  error, REFIT_ERR_PROTOCOL,
                  "the publisher offers another piece of the GPU's memory than the version needs");
    if (mapping == NULL) RFT_TRY(gpu_mapping_open(images, share, lock, &mapping, error));
    mapping->users++;
    image->gpu = mapping;
    image->seqlock = rft_share_lock_seqlock(&mapping->share_lock);
    begin_use(image, catalog, mapping->memory);
    *out = image;
    return REFIT_OK;
}

static void gpu_mapping_unread(rft_gpu_mapping *mapping)
{
    if (--mapping->readers == 0) rft_share_lock_unread(&mapping->share_lock);
}

/* Marks on the share lock that the user reads it. REFIT_ERR_STALE: the publisher has evicted this
 * worker, and the bytes are no longer the verified ones. */
static refit_status gpu_mapping_read(rft_gpu_mapping *mapping, uint64_t generation,
                                     refit_error *error)
{
    RFT_TRY(rft_share_lock_read(&mapping->share_lock, error));
    mapping->readers++;
    if (rft_seqlock_holds(rft_share_lock_seqlock(&mapping->share_lock), generation))
        return REFIT_OK;
    gpu_mapping_unread(mapping);
    return rft_fail(error, REFIT_ERR_STALE,
                    "the publisher has evicted this worker and writes over the version");
}

/* ---- Uses */

unsigned char *rft_image_writable(rft_image *image)
{
    bool ours = image->seqlock == NULL && image->uses == RFT_IMAGE_STAGED;
    return ours ? image->memory.memory : NULL;
}

void rft_image_add_use(rft_image *image, rft_image_use use)
{
    image->uses |= (unsigned)use;
}

refit_status rft_image_lend(rft_image *image, refit_error *error)
{
    if (image->gpu != NULL) RFT_TRY(gpu_mapping_read(image->gpu, image->generation, error));
    rft_image_add_use(image, RFT_IMAGE_LENT);
    return REFIT_OK;
}

static void leave_mappings(rft_image *image)
{
    if (image->mapping != NULL) image->mapping->users--;
    if (image->gpu != NULL) image->gpu->users--;
    image->mapping = NULL;
    image->gpu = NULL;
    image->seqlock = NULL;
}

void rft_image_drop_use(rft_image *image, rft_image_use use)
{
    if (image == NULL || image->uses == 0) return;
    bool returned = (image->uses & (unsigned)use & RFT_IMAGE_LENT) != 0;
    if (returned && image->gpu != NULL) gpu_mapping_unread(image->gpu);
    if (returned && image->mapping != NULL) rft_segment_reset_view(&image->mapping->segment);
    image->uses &= ~(unsigned)use;
    if (image->uses != 0) return;
    rft_catalog_release(image->catalog);
    image->catalog = NULL;
    image->bytes = NULL;
    image->view = NULL;
    leave_mappings(image);
}

bool rft_image_note_seqlock(rft_image *image)
{
    return image->seqlock == NULL || rft_seqlock_note(image->seqlock, &image->generation);
}

bool rft_image_is_intact(const rft_image *image)
{
    return image->seqlock == NULL || rft_seqlock_holds(image->seqlock, image->generation);
}

/* ---- Giving memory back */

void rft_images_trim_private(rft_images *images)
{
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        if (images->private[i].uses == 0) rft_segment_close(&images->private[i].memory);
    }
}

void rft_images_trim_mappings(rft_images *images)
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
    const rft_image_use uses[] = {RFT_IMAGE_STAGED, RFT_IMAGE_BASE, RFT_IMAGE_LENT};
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        for (size_t use = 0; use < sizeof uses / sizeof *uses; use++) {
            rft_image_drop_use(&images->private[i], uses[use]);
            rft_image_drop_use(&images->shm[i], uses[use]);
            rft_image_drop_use(&images->gpu[i], uses[use]);
        }
    }
    rft_images_trim_private(images);
    rft_images_trim_mappings(images);
}
