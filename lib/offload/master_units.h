/*
 * master_units: where the masters of a coded region are that lives on the host, unit by unit
 * (kernels/master.h).
 *
 *     ZEROS ──copied out──► CODED ◄──fits───── copied out ─────does not──► WHOLE
 *
 * A region that lives on the host visits the device in windows, and between them its masters are
 * in the image and nowhere else. So a unit whose exceptions do not fit into the image goes whole
 * into host memory of its own, which it keeps for the next time; its next copies out try again to
 * fit, after some steps in which they do not.
 */
#ifndef RFT_MASTER_UNITS_H
#define RFT_MASTER_UNITS_H

#include "offload/masters.h"

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

/* Frees memory that holds no bytes. No copy is under way. A lease may be open, which may have begun
 * before a restore: it reads the units where they were. */
void rft_units_trim(refit_offloader *offloader);

/* Of regions on the device the image and the units hold nothing that counts, or that a lease reads:
 * the next offload puts all of it into the image. */
void rft_units_reset(refit_offloader *offloader);

/* The copies out of units from element `first` on are over, without a failure. Takes memory for
 * those that do not fit, and counts them in `*misfits`: they are to be copied whole. On failure
 * all copies are to be made again. REFIT_ERR_HOST_MEMORY, REFIT_ERR_CORRUPT. */
refit_status rft_units_left(refit_offloader *offloader, rft_region *region, uint64_t first,
                            uint64_t count, uint32_t *misfits, refit_error *error);

/* The copies of these are over, too. */
void rft_units_went_whole(rft_region *region, uint64_t first, uint64_t count);

#endif
