/*
 * images: the memory that a worker's versions lie in.
 *
 * There are two of each kind. A private image is memory of this process, filled with frames (the
 * socket path), and allocated when it is first needed. Two kinds are mapped and read where they
 * are: `shm`, a slot of the publisher's store, or an image that a neighbor shares; and `gpu`, the
 * publisher's memory of the GPU that both are on. An image is in use while it is being staged,
 * while it is the base of the next version, or while it is lent to the user as an open update.
 *
 * A private image can be shared with the neighbors, the other workers of the host: then it is a
 * segment that says after the bytes which version they are, with a mark for each frame that is
 * there. It serves that version alone, after which nothing is written there again, and its memory
 * is given back as soon as nothing here uses it. A neighbor maps it from the first frame on, so
 * that it can go on from the marks where the worker that fills it is lost.
 *
 * The rule: an image is taken for a new version only when nothing uses it. So with two private
 * images a version can be fetched while the update before it, accepted, is still open; and while an
 * update is undecided, if nothing that comes builds on the base, which is then let go of. Mapped
 * images are never written: what a user writes lands in copies of pages, which end when the image
 * is returned.
 *
 * Belongs to the subscriber's service thread; the user reads bytes and manifest of a lent image.
 */
#ifndef RFT_IMAGES_H
#define RFT_IMAGES_H

#include <stdatomic.h>

#include "store/buffer.h"
#include "store/segment.h"
#include "subscriber/gpu_memory.h"
#include "subscriber/piece_queue.h"
#include "wire/want.h"

/* A manifest and how many images and sessions refer to it. */
typedef struct rft_catalog {
    rft_manifest *manifest; /* owned */
    rft_want *want;         /* owned; what this worker selects of its versions; NULL: all */
    uint32_t users;
} rft_catalog;

/* Takes the manifest (also on failure, which closes it); the caller is its first user. */
refit_status rft_catalog_open(rft_manifest *manifest, rft_catalog **out, refit_error *error);
rft_catalog *rft_catalog_acquire(rft_catalog *catalog);
/* NULL is allowed. */
void rft_catalog_release(rft_catalog *catalog);

typedef enum rft_image_use {
    RFT_IMAGE_STAGED = 1, /* being filled, or complete and not yet committed */
    RFT_IMAGE_BASE = 2,   /* that of the next version's `same` blocks */
    RFT_IMAGE_LENT = 4,   /* an update is waiting for the user, or open */
} rft_image_use;

/* One segment of the publisher or a neighbor, mapped once for all images in it. */
typedef struct rft_mapping {
    rft_segment segment;
    rft_pinning pinning; /* of all of it, once the user copied from there to a GPU */
    uint32_t users;
} rft_mapping;

/* What follows the bytes of a shared image, at the next multiple of RFT_TENSOR_ALIGNMENT; written
 * by the worker that fills it. */
typedef struct rft_shared_tail {
    uint64_t epoch;
    uint64_t version;
    atomic_uchar marks[]; /* a frame: 1 if it is there */
} rft_shared_tail;

typedef struct rft_image {
    unsigned uses;              /* of rft_image_use; 0: free */
    const unsigned char *bytes; /* catalog->manifest->store_bytes of them; NULL: of the GPU */
    const unsigned char *view;  /* what the user is given of them: the same, or such that what is
                                   written there stays there */
    rft_catalog *catalog;       /* NULL when free */
    rft_version_id id;          /* which version it is, once verified */
    uint32_t run;               /* and of which run, if it is of an archive */
    rft_want *filled;           /* acquired; what of its bytes is there; NULL: all */
    rft_segment memory;         /* private images: kept while free, for the next version, unless
                                   it is shared */
    rft_pinning pinning;        /* of `memory`, as of a mapping */
    rft_mapping *mapping;       /* images in shared memory */
    rft_shared_tail *tail;      /* of an image shared among neighbors; NULL: it is not */
    rft_gpu_version *gpu;       /* images in a GPU's memory, once it is mapped */
    rft_piece_queue *pieces;    /* of those that come piece by piece, and lie nowhere as a whole */
    const rft_seqlock *seqlock; /* of the publisher's memory; NULL: a private image, or a
                                   neighbor's, whose bytes are final once it is whole */
    uint64_t generation;        /* of the seqlock when the image was verified */
} rft_image;

#define RFT_IMAGES_MOST 2u

typedef struct rft_images {
    rft_image private[RFT_IMAGES_MOST];
    rft_image shm[RFT_IMAGES_MOST];
    rft_mapping mappings[RFT_IMAGES_MOST];

    rft_image gpu[RFT_IMAGES_MOST];
    rft_gpu_memory gpu_memory;
} rft_images;

/* Bytes of this machine's memory: no version can be larger, wherever it lies, for shared memory can
 * be swapped out. 0: not known. */
uint64_t rft_images_room(void);

/* {0} is an empty one. Close frees all, also images in use. */
void rft_images_close(rft_images *images);

/* A private image for as much as is wanted of a version of `catalog`, in use as STAGED.
 * REFIT_ERR_BUSY: both are in use, try again after the next drop. REFIT_ERR_HOST_MEMORY. */
refit_status rft_images_take_private(rft_images *images, rft_catalog *catalog, rft_want *want,
                                     rft_image **out, refit_error *error);

/* The same in memory that neighbors can map by the name image->memory.name. Private images that
 * nothing uses give their memory back. Also REFIT_ERR_SYSTEM: there is no such memory. */
refit_status rft_images_take_shared(rft_images *images, rft_catalog *catalog, rft_want *want,
                                    uint64_t epoch, uint64_t version, rft_image **out,
                                    refit_error *error);
/* Such an image of a neighbor, which may still be filling it. REFIT_ERR_BUSY;
 * REFIT_ERR_UNSUPPORTED: it cannot be mapped, or is of another version. */
refit_status rft_images_take_neighbor(rft_images *images, rft_catalog *catalog, rft_want *want,
                                      uint64_t epoch, uint64_t version, const char *name,
                                      rft_image **out, refit_error *error);
/* Marks a frame as there, in the image that this worker fills. Nothing for one that is not shared.
 */
void rft_image_mark(rft_image *image, uint32_t sequence);
/* Whether the neighbor has. */
bool rft_image_is_marked(const rft_image *image, uint32_t sequence);
/* Whether the neighbor has marked all frames of what is wanted; and, of a whole version, no page is
 * missing. */
bool rft_image_is_whole(const rft_image *image);

/* The same as rft_images_take_private for the slot at `offset` of the segment `name`. Also
 * REFIT_ERR_PROTOCOL (the offset is not aligned, or the segment is too short), REFIT_ERR_NOT_FOUND,
 * REFIT_ERR_SECURITY, REFIT_ERR_SYSTEM.
 */
refit_status rft_images_take_shm(rft_images *images, rft_catalog *catalog, const char *name,
                                 uint64_t offset, rft_image **out, refit_error *error);

/* An image for a version in the GPU's memory, in use as STAGED. REFIT_ERR_BUSY: as for the other
 * kinds. */
refit_status rft_images_take_gpu(rft_images *images, rft_catalog *catalog, rft_image **out,
                                 refit_error *error);
/* Where its bytes are, as LEND says; what rft_gpu_memory_map answers. */
refit_status rft_image_map_gpu(rft_images *images, rft_image *image, const char *lock,
                               rft_view areas, rft_view places, refit_error *error);

/* The page-lock of the image's host memory for copies to a device; NULL: there is none. By the
 * user, who has the image lent, as the next one. */
const rft_pinning *rft_image_pinning(const rft_image *image, const refit_device *device);
/* Takes it; it stays until the memory is given back. REFIT_ERR_PIN, REFIT_ERR_HOST_MEMORY. */
refit_status rft_image_pin(rft_image *image, refit_device *device, uint64_t piece_bytes,
                           refit_error *error);
/* A device may read the image for ever: its memory is never given back. Once no other thread uses
 * the images. */
void rft_image_abandon(rft_image *image);

/* The first byte of a tensor: of the device where `gpu` is not NULL. */
const unsigned char *rft_image_tensor(const rft_image *image, uint32_t tensor);

/* The memory to write frames to: of a private image that is STAGED and nothing else. */
unsigned char *rft_image_writable(rft_image *image);

void rft_image_add_use(rft_image *image, rft_image_use use);
/* Adds LENT. REFIT_ERR_STALE: the bytes are no longer the verified ones; REFIT_ERR_SYSTEM. */
refit_status rft_image_lend(rft_image *image, refit_error *error);
/* NULL is allowed. */
void rft_image_drop_use(rft_image *image, rft_image_use use);

/* Notes the seqlock. False while the publisher is writing there. */
bool rft_image_note_seqlock(rft_image *image);
/* Whether the bytes are still the verified ones: always where there is no seqlock. Any thread that
 * has the image lent. */
bool rft_image_is_intact(const rft_image *image);

/* Gives back the memory of private images that nothing uses. */
void rft_images_trim_private(rft_images *images);
/* Gives back the mappings that nothing uses, of shared memory and of the GPU's. */
void rft_images_trim_mappings(rft_images *images);
/* The same, but only of memory that the publisher has replaced or given up: it would stay there for
 * their sake. */
void rft_images_trim_replaced(rft_images *images);

#endif
