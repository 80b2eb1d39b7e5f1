/*
 * schedule: the plan that seal makes once: where each region lies in the host image, in which order
 * regions move, and room for the copies of either direction, so that a cycle allocates nothing.
 */
#ifndef RFT_SCHEDULE_H
#define RFT_SCHEDULE_H

#include "memory/layout.h"
#include "offload/region.h"
#include "transfer/plan.h"

/* All zero is closed. */
typedef struct rft_schedule {
    rft_layout layout;
    rft_plan plan;        /* of the operation under way, or the last one */
    uint32_t *order;      /* owned; regions as they are to come back */
    uint32_t *by_address; /* owned; regions by the addresses that they had when it was made */
    rft_piece *pieces;    /* owned; room for one a region, chunk and slab */
    rft_recode *recodes;  /* owned; room for one a chunk of coded regions */
    uint32_t count;       /* regions */
    uint32_t chunks;      /* of coded regions; 0: there are none */
    bool out;             /* the plan is of an offload */
    bool covers_all;      /* it copies all regions that are ever copied, and zeroes none */
    bool moved;           /* guarded by the offloader's lock while an operation is under way: all
                             that it copies has moved, so reversed it is the plan of the way back */
    uint64_t address_changes; /* of the regions, when it was made */
    const char *image;        /* where the image lay then */
    char *staging;            /* borrowed, set by the owner: see masters.c; NULL without chunks */
} rft_schedule;

/* Writes the regions' host offsets too. On failure nothing is owned. REFIT_ERR_LIMIT,
 * _HOST_MEMORY. */
refit_status rft_schedule_open(rft_schedule *schedule, rft_region_table *regions,
                               const refit_config *config, uint32_t batch_most, refit_error *error);
void rft_schedule_close(rft_schedule *schedule);

/* What the image of these regions would take, planning nothing. */
refit_status rft_schedule_measure(const rft_region_table *regions, const refit_config *config,
                                  uint64_t *image_bytes, uint64_t *payload_bytes,
                                  refit_error *error);

/* Fills the plan with what is on the device and has to be kept. The image lies at `image`. */
refit_status rft_schedule_offload(rft_schedule *schedule, const rft_region_table *regions,
                                  char *image, refit_error *error);

/* Fills the plan with what is away and is to be copied or zeroed. All such regions are bound. */
refit_status rft_schedule_restore(rft_schedule *schedule, const rft_region_table *regions,
                                  char *image, refit_error *error);

/* An operation by the plan has ended, and all regions are where it was to bring them. */
void rft_schedule_moved(rft_schedule *schedule);

#endif
