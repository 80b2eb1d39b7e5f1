/*
 * region: what the offloader knows of one distinct device storage, and the table of them all.
 *
 * The table belongs to the offloader's one thread. Only `place` and `pageable` are also changed by
 * whoever notices that an operation has ended: while one is under way they are guarded by the
 * offloader's lock.
 */
#ifndef RFT_REGION_H
#define RFT_REGION_H

#include "memory/device_arena.h"
#include "offload/name_index.h"
#include "offload/span_tree.h"
#include <refit/offload.h>

typedef struct rft_region {
    char *name;   /* owned */
    char *memory; /* NULL: the caller has taken it back; an arena's address stays */
    uint64_t bytes;
    uint64_t host_offset; /* in the image; KEEP only, once sealed */
    uint64_t digest;      /* of the bytes that went out (offload.verify) */
    void *pageable; /* the host copy on the pageable path; owned, from malloc; guarded likewise */
    refit_arena *arena; /* that holds `memory`, or NULL; entered */
    const void *whole;  /* what no copy may leave: the arena, or an allocation's mark */
    uint32_t group;
    int32_t priority;
    refit_policy policy;
    refit_place place; /* guarded: see above */
    bool bound;        /* there is device memory behind `memory`; after an arena failed to give it
                          back perhaps only some */
} rft_region;

typedef struct rft_region_table {
    refit_device *device; /* where they live; borrowed */
    rft_region *items;    /* owned */
    uint32_t count;
    uint32_t room;
    rft_name_index names;
    rft_span_tree spans; /* of every region whose `memory` is not NULL, by its number */
} rft_region_table;

void rft_region_table_open(rft_region_table *table, refit_device *device);
void rft_region_table_close(rft_region_table *table);

/* REFIT_ERR_EXISTS, _INVALID, _BUSY, _LIMIT, _HOST_MEMORY, _DEVICE_MEMORY. */
refit_status rft_region_table_add(rft_region_table *table, const refit_region_desc *given,
                                  refit_region_id *out, refit_error *error);

/* Removes all regions; the room stays. */
void rft_region_table_clear(rft_region_table *table);

/* Gives the region the address `memory`, in place of the one it may have; a piece of an arena whose
 * memory was given back gets it again. On failure the region keeps what it has. REFIT_ERR_EXISTS,
 * _INVALID, _BUSY (a piece that is held, or another offloader's), _DEVICE_MEMORY. */
refit_status rft_region_attach(rft_region_table *table, refit_region_id id, void *memory,
                               refit_error *error);

/* The region has no address any more. */
void rft_region_detach(rft_region_table *table, refit_region_id id);

#endif
