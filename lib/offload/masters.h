/*
 * masters: regions of fp32 masters that leave as what their bf16 weights lack (kernels/master.h).
 *
 * Such a region is *coded*. It goes in chunks through device memory, a staging:
 *
 *     staging:  result, and up to 64 bytes │ the units of one chunk
 *     image:    head: results              │ the units of the region
 *
 * The result on chunks that follow each other reaches the image after the last of them, in
 * either direction. The head of a region that lives on the device is a result of 64 bytes. That of
 * one that lives on the host has a result of each unit: parts of it move by themselves, and units
 * may lie elsewhere.
 */
#ifndef RFT_MASTERS_H
#define RFT_MASTERS_H

#include "kernels/master.h"
#include "memory/layout.h"
#include "offload/region.h"
#include "transfer/plan.h"

#define RFT_MASTERS_HEAD 64u /* bytes of the result, and what follows it */

/* ---- Units of regions that live on the host
 * Such a region visits the device in windows, and between them its masters are in the image and
 * nowhere else. So a unit whose exceptions do not fit into the image goes whole into host memory of
 * its own, which it keeps for the next time; its next copies out try again to fit, after some steps
 * in which they do not. */

typedef enum rft_unit_place {
    RFT_UNIT_ZEROS = 0, /* nothing was ever copied out */
    RFT_UNIT_CODED,     /* in the image */
    RFT_UNIT_WHOLE,     /* in its own memory */
} rft_unit_place;

typedef struct rft_unit {
    void *block; /* owned: what `whole` lies in; NULL: there is none */
    char *whole; /* host memory for all its bytes */
    rft_unit_place place;
    bool pinned;   /* it is page-locked */
    bool misfit;   /* the copies out that are over were not enough: it has to go whole */
    uint8_t rest;  /* copies out that go whole without a try */
    uint8_t rests; /* what `rest` becomes with the next misfit */
} rft_unit;

/* Where the next copies find its bytes, or bring them at first. */
rft_unit_place rft_unit_route(const rft_unit *unit, bool out);

/* Units of so many elements. */
uint64_t rft_unit_count(uint64_t elements);

/* Elements of unit `number`. */
uint32_t rft_unit_elements(const rft_region *region, uint64_t number);

/* Units of the coded regions that live on the host, all of them zeros; none for others. The units
 * that were there go. REFIT_ERR_HOST_MEMORY. */
refit_status rft_units_open(refit_offloader *offloader, refit_error *error);

/* Frees them, and their memory. No copy is under way. */
void rft_units_drop(refit_offloader *offloader);

/* Frees memory that holds no bytes. No copy is under way. A read lock may be open, which may have
 * begun before a restore: it reads the units where they were. */
void rft_units_trim(refit_offloader *offloader);

/* Of regions on the device the image and the units hold nothing that counts, or that a read lock
 * reads: the next offload puts all of it into the image. */
void rft_units_reset(refit_offloader *offloader);

/* The copies out of units from element `first` on are over, without a failure. Takes memory for
 * those that do not fit, and counts them in `*misfits`: they are to be copied whole. On failure
 * all copies are to be made again. REFIT_ERR_HOST_MEMORY, REFIT_ERR_CORRUPT. */
refit_status rft_units_left(refit_offloader *offloader, rft_region *region, uint64_t first,
                            uint64_t count, uint32_t *misfits, refit_error *error);

/* The copies of these are over, too. */
void rft_units_went_whole(rft_region *region, uint64_t first, uint64_t count);

/* ---- Their way between the image and the device */

/* Pieces and chunks are added after those that are there; there is room. */
typedef struct rft_masters_way {
    const rft_layout *layout;
    char *image;
    char *staging; /* device memory that no other operation uses */
    bool out;
    rft_piece *pieces;
    uint32_t count;
    rft_recode *recodes;
    uint32_t recode_count;
} rft_masters_way;

/* Elements of a coded region, which are whole units (or end with the region), and where they are on
 * the device. */
typedef struct rft_masters_part {
    const rft_region *region;
    uint64_t first;
    uint64_t count;
    char *memory;
    const void *allocation; /* the allocation that contains it */
    uint32_t group;
} rft_masters_part;

/* The most that so many elements make of a plan, besides the ends of slabs. */
typedef struct rft_masters_need {
    uint64_t pieces;
    uint64_t chunks;
    uint64_t bytes;
} rft_masters_need;

rft_masters_need rft_masters_most(const rft_region *region, uint64_t elements);

/* Adds the part, as it moves now, and clears the results on it. */
void rft_masters_add(rft_masters_way *way, const rft_masters_part *part);

/* Adds units of the part that did not fit, whole. */
void rft_masters_add_misfits(rft_masters_way *way, const rft_masters_part *part);

/* What the results on these elements say, once their copies are over: RFT_MASTER_*. */
uint32_t rft_masters_found(const refit_offloader *offloader, const rft_region *region,
                           uint64_t first, uint64_t count);

/* Where in the image the unit lies that begins with element `first`. */
uint64_t rft_masters_at(const rft_region *region, uint64_t first);

/* ---- Which are coded */

/* Which regions are coded from now on, and what all of them take of the image. A seal decides it,
 * from what the offloads before it have found. REFIT_ERR_INVALID: weights that lie in a region,
 * with which they would leave, or that masters which live on the host share. REFIT_ERR_HOST_MEMORY.
 */
refit_status rft_masters_decide(refit_offloader *offloader, refit_error *error);

/* Takes the stagings that the coded regions need, or gives them back if there are none. No copy may
 * be under way. REFIT_ERR_DEVICE_MEMORY. */
refit_status rft_masters_take_staging(refit_offloader *offloader, refit_error *error);
refit_status rft_masters_drop_staging(refit_offloader *offloader, refit_error *error);

/* That of windows; cycles use the one out for both directions. */
char *rft_masters_staging(const refit_offloader *offloader, bool out);

/* ---- What is made of the results */

/* What the result on a coded region says, once the copies of its group are over. An offload:
 * REFIT_ERR_LIMIT, and the region remembers what it needed. A restore: REFIT_ERR_CORRUPT. Lock
 * held. */
refit_status rft_masters_check(refit_offloader *offloader, rft_region *region, bool out,
                               refit_error *error);

/* The same for elements that a window has brought in. REFIT_ERR_CORRUPT. */
refit_status rft_masters_arrived(const refit_offloader *offloader, const rft_region *region,
                                 uint64_t first, uint64_t count, refit_error *error);

/* offload.verify: is the coded image, with the weights, what the device has? REFIT_ERR_CORRUPT, or
 * the failure of a copy. Waits for the device. The region is on the device, and its own copies are
 * over. */
refit_status rft_masters_compare(const refit_offloader *offloader, const rft_region *region,
                                 refit_error *error);

/* The masters of a coded region, which is in the image, to host memory: `to` has room for its
 * bytes. Waits for the device. REFIT_ERR_CORRUPT: the weights are others; REFIT_ERR_HOST_MEMORY,
 * _COPY, _DEVICE. Any thread. */
refit_status rft_masters_read(const refit_offloader *offloader, const rft_region *region, void *to,
                              refit_error *error);

#endif
