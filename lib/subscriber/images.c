/*
 * The images of a worker: memory of this process, mappings of the publisher's shared memory, and
 * mappings of its memory of a GPU.
 *
 * Uses are bits, because one image can be held and lent at once (an accepted update that is still
 * open). When the last bit is dropped the image forgets its manifest and its mapping; its private
 * memory stays for the next version until trim, so that versions of one manifest allocate nothing.
 * Memory that neighbors have mapped is not used again, and is given back at once.
 * Knows nothing of the protocol: the session, or the follower of an archive, decides which image is
 * taken when.
 */
#include "subscriber/images.h"

#include <string.h>
#include <sys/sysinfo.h>

#include "base/alloc.h"
#include "base/checked.h"

uint64_t rft_images_room(void)
{
    struct sysinfo info;
    if (sysinfo(&info) != 0) return 0;
    return ((uint64_t)info.totalram + info.totalswap) * info.mem_unit;
}

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
    rft_want_release(catalog->want);
    rft_manifest_close(catalog->manifest);
    rft_free(catalog);
}

/* ---- Host memory, and its page-lock */

static void memory_close(rft_segment *segment, rft_pinning *pinning)
{
    rft_pinning_close(pinning);
    rft_segment_close(segment);
}

const rft_pinning *rft_image_pinning(const rft_image *image, const refit_device *device)
{
    const rft_pinning *pinning =
        image->mapping != NULL ? &image->mapping->pinning : &image->pinning;
    return pinning->device == device ? pinning : NULL;
}

refit_status rft_image_pin(rft_image *image, refit_device *device, uint64_t piece_bytes,
                           refit_error *error)
{
    const rft_segment *segment = image->mapping != NULL ? &image->mapping->segment : &image->memory;
    rft_pinning *pinning = image->mapping != NULL ? &image->mapping->pinning : &image->pinning;
    bool read_only = image->mapping != NULL;
    rft_pinning_close(pinning);
    return rft_pinning_open(pinning, device, segment->memory, segment->bytes, piece_bytes,
                            read_only, error);
}

void rft_image_abandon(rft_image *image)
{
    if (image->gpu != NULL) {
        (void)rft_gpu_version_acquire(image->gpu);
        image->gpu->reading = false; /* its mark in the lock stays, too */
    } else if (image->pieces != NULL) {
        rft_piece_queue_abandon(image->pieces);
    } else if (image->mapping != NULL) {
        image->mapping->users++;
    } else {
        image->memory = (rft_segment){.fd = -1};
        image->pinning = (rft_pinning){0};
    }
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

/* Of so many bytes of an image, those that are written. */
static uint64_t written(const rft_want *want, uint64_t bytes)
{
    return want == NULL ? bytes : want->bytes;
}

refit_status rft_images_take_private(rft_images *images, rft_catalog *catalog, rft_want *want,
                                     rft_image **out, refit_error *error)
{
    rft_image *image = find_free(images->private, error);
    if (image == NULL) return REFIT_ERR_BUSY;
    uint64_t bytes = catalog->manifest->store_bytes;
    if (image->memory.bytes < bytes) {
        memory_close(&image->memory, &image->pinning);
        RFT_TRY(rft_segment_create_partial(&image->memory, bytes, written(want, bytes), error));
    }
    begin_use(image, catalog, image->memory.memory);
    image->filled = rft_want_acquire(want);
    *out = image;
    return REFIT_OK;
}

/* ---- Images shared among neighbors */

/* Where the tail begins, and the bytes of all. */
static bool lay_out(const rft_manifest *manifest, uint64_t *tail, uint64_t *bytes)
{
    return rft_align_u64(manifest->store_bytes, RFT_TENSOR_ALIGNMENT, tail) &&
           rft_add_u64(*tail, sizeof(rft_shared_tail), bytes) &&
           rft_add_u64(*bytes, manifest->frame_count, bytes);
}

static refit_status refuse_size(refit_error *error)
{
    return rft_fail(error, REFIT_ERR_LIMIT, "no memory has room for the version");
}

refit_status rft_images_take_shared(rft_images *images, rft_catalog *catalog, rft_want *want,
                                    uint64_t epoch, uint64_t version, rft_image **out,
                                    refit_error *error)
{
    uint64_t tail, bytes;
    rft_image *image = find_free(images->private, error);
    if (image == NULL) return REFIT_ERR_BUSY;
    if (!lay_out(catalog->manifest, &tail, &bytes)) return refuse_size(error);
    rft_images_trim_private(images);
    RFT_TRY(rft_segment_create_growing(&image->memory, bytes, written(want, bytes), error));
    begin_use(image, catalog, image->memory.memory);
    image->view = image->memory.view;
    image->filled = rft_want_acquire(want);
    image->tail = (rft_shared_tail *)(void *)(image->memory.memory + tail);
    image->tail->epoch = epoch;
    image->tail->version = version;
    *out = image;
    return REFIT_OK;
}

void rft_image_mark(rft_image *image, uint32_t sequence)
{
    if (image->tail == NULL) return;
    atomic_store_explicit(&image->tail->marks[sequence], 1, memory_order_release);
}

bool rft_image_is_marked(const rft_image *image, uint32_t sequence)
{
    return atomic_load_explicit(&image->tail->marks[sequence], memory_order_acquire) != 0;
}

bool rft_image_is_whole(const rft_image *image)
{
    for (uint32_t i = 0; i < image->catalog->manifest->frame_count; i++) {
        bool wanted = rft_want_frame(image->filled, i) != RFT_WANT_NONE;
        if (wanted && !rft_image_is_marked(image, i)) return false;
    }
    return image->filled != NULL || rft_segment_is_filled(&image->mapping->segment);
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

typedef refit_status (*attach_fn)(rft_segment *segment, const char *name, uint64_t bytes,
                                  refit_error *error);

/* A segment that is mapped already, or one that takes the place of an unused one. */
static refit_status get_mapping(rft_images *images, const char *name, uint64_t bytes,
                                attach_fn attach, rft_mapping **out, refit_error *error)
{
    *out = find_mapping(images, name, bytes);
    if (*out != NULL) return REFIT_OK;
    rft_mapping *unused = find_unused(images);
    memory_close(&unused->segment, &unused->pinning);
    RFT_TRY(attach(&unused->segment, name, bytes, error));
    *out = unused;
    return REFIT_OK;
}

refit_status rft_images_take_neighbor(rft_images *images, rft_catalog *catalog, rft_want *want,
                                      uint64_t epoch, uint64_t version, const char *name,
                                      rft_image **out, refit_error *error)
{
    refit_error why;
    uint64_t tail, bytes;
    rft_mapping *mapping;
    rft_image *image = find_free(images->shm, error);
    if (image == NULL) return REFIT_ERR_BUSY;
    if (!lay_out(catalog->manifest, &tail, &bytes)) return refuse_size(error);
    refit_status status =
        get_mapping(images, name, bytes, rft_segment_attach_growing, &mapping, &why);
    RFT_REFUSE_IF(status != REFIT_OK, error, REFIT_ERR_UNSUPPORTED,
                  "the image that another worker of this host receives cannot be mapped: %s",
                  why.text);
    rft_shared_tail *theirs = (rft_shared_tail *)(void *)(mapping->segment.memory + tail);
    bool other = theirs->epoch != epoch || theirs->version != version;
    if (other && mapping->users == 0) memory_close(&mapping->segment, &mapping->pinning);
    RFT_REFUSE_IF(other, error, REFIT_ERR_UNSUPPORTED,
                  "the image of another worker of this host has another version");
    rft_images_trim_private(images);
    mapping->users++;
    image->mapping = mapping;
    begin_use(image, catalog, mapping->segment.memory);
    image->view = mapping->segment.view;
    image->filled = rft_want_acquire(want);
    image->tail = theirs;
    *out = image;
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
    RFT_TRY(get_mapping(images, name, bytes, rft_segment_attach, &mapping, error));
    mapping->users++;
    image->mapping = mapping;
    image->seqlock =
        (const rft_seqlock *)(const void *)(mapping->segment.memory + offset - RFT_SEQLOCK_BYTES);
    begin_use(image, catalog, mapping->segment.memory + offset);
    image->view = mapping->segment.view + offset;
    *out = image;
    return REFIT_OK;
}

/* ---- Memory of a GPU (gpu_memory.c) */

refit_status rft_images_take_gpu(rft_images *images, rft_catalog *catalog, rft_image **out,
                                 refit_error *error)
{
    rft_image *image = find_free(images->gpu, error);
    if (image == NULL) return REFIT_ERR_BUSY;
    begin_use(image, catalog, NULL);
    *out = image;
    return REFIT_OK;
}

refit_status rft_image_map_gpu(rft_images *images, rft_image *image, const char *lock,
                               rft_view areas, rft_view places, refit_error *error)
{
    RFT_TRY(rft_gpu_memory_map(&images->gpu_memory, image->catalog->manifest, lock, areas, places,
                               &image->gpu, error));
    image->seqlock = rft_gpu_version_seqlock(image->gpu);
    return REFIT_OK;
}

/* ---- Uses */

const unsigned char *rft_image_tensor(const rft_image *image, uint32_t tensor)
{
    if (image->gpu != NULL) return image->gpu->tensors[tensor];
    return image->bytes + image->catalog->manifest->tensors[tensor].offset;
}

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
    if (image->gpu != NULL) RFT_TRY(rft_gpu_version_read(image->gpu, image->generation, error));
    rft_image_add_use(image, RFT_IMAGE_LENT);
    return REFIT_OK;
}

static void leave_mappings(rft_image *image)
{
    if (image->mapping != NULL && --image->mapping->users == 0 && image->tail != NULL)
        memory_close(&image->mapping->segment, &image->mapping->pinning);
    rft_gpu_version_release(image->gpu);
    rft_piece_queue_close(image->pieces);
    image->mapping = NULL;
    image->gpu = NULL;
    image->pieces = NULL;
    image->seqlock = NULL;
    image->tail = NULL;
}

void rft_image_drop_use(rft_image *image, rft_image_use use)
{
    if (image == NULL || image->uses == 0) return;
    bool returned = (image->uses & (unsigned)use & RFT_IMAGE_LENT) != 0;
    if (returned && image->gpu != NULL) rft_gpu_version_unread(image->gpu);
    if (returned && image->mapping != NULL) rft_segment_reset_view(&image->mapping->segment);
    image->uses &= ~(unsigned)use;
    if (image->uses != 0) return;
    rft_want_release(image->filled);
    image->filled = NULL;
    rft_catalog_release(image->catalog);
    image->catalog = NULL;
    image->bytes = NULL;
    image->view = NULL;
    if (image->memory.view != NULL) memory_close(&image->memory, &image->pinning);
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
        rft_image *image = &images->private[i];
        if (image->uses == 0) memory_close(&image->memory, &image->pinning);
    }
}

void rft_images_trim_mappings(rft_images *images)
{
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        rft_mapping *mapping = &images->mappings[i];
        if (mapping->users == 0) memory_close(&mapping->segment, &mapping->pinning);
    }
    rft_gpu_memory_trim(&images->gpu_memory, false);
}

void rft_images_trim_replaced(rft_images *images)
{
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        rft_mapping *mapping = &images->mappings[i];
        bool unused = mapping->segment.memory != NULL && mapping->users == 0;
        if (unused && rft_segment_is_retired(&mapping->segment))
            memory_close(&mapping->segment, &mapping->pinning);
    }
    rft_gpu_memory_trim(&images->gpu_memory, true);
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
