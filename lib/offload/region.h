/*
 * region: what the offloader knows of one distinct device storage, and the table of them all.
 *
 * The table belongs to the offloader's one thread. Only what is marked "guarded" is also changed by
 * the thread that notices the end of an operation: while one is under way it is guarded by the
 * offloader's lock.
 */
#ifndef RFT_REGION_H
#define RFT_REGION_H

#include <refit/offload.h>

#include "memory/device_arena.h"

/* ---- A region and the table -------------------------------------------------------------- */

/* What every walk over all regions reads comes first, within 64 bytes. */
typedef struct rft_region {
    char *memory; /* NULL: the caller has taken it back; an arena's address stays */
    uint64_t bytes;
    uint64_t host_offset;   /* in the image; KEEP only, once sealed */
    refit_arena *arena;     /* that holds `memory`, or NULL; entered */
    const void *allocation; /* the allocation or arena that contains the memory. Only its identity
                          matters: two regions are joined into one copy only if it is the same */
    uint32_t group;
    refit_policy policy;
    refit_place place; /* guarded: see above */
    bool bound;        /* device memory is mapped at `memory`; after an arena failed to give it
                  back perhaps only some */
    bool coded;        /* once sealed: leaves as what its weights lack */
    bool rewritten;    /* in the image, since it went there: by windows, or by their caller;
                          or it never left the device, but began in the image */
    bool on_cpu;       /* a host step has it */
    bool reuse;        /* it leaves without a copy where it has not changed */
    bool imaged;       /* reuse: the image has the bytes whose digest `left` is */
    bool unchanged;    /* reuse: so has the device, when the offload under way began */
    int32_t priority;
    char *name;          /* owned */
    uint64_t host_bytes; /* that it takes in the image */
    uint64_t digest;     /* of the bytes that went out (offload.verify) */
    uint64_t left;       /* reuse: the sum of a digest of what left last */
    void *pageable; /* the host copy on the pageable path; owned, from malloc; guarded as `place` */
    const uint16_t *weights; /* borrowed; NULL: none */
    uint64_t chunk;          /* coded: elements that leave at a time */
    uint64_t head;           /* coded: bytes of the image before its units */
    struct rft_unit *units;  /* coded, and lives on the host: owned; see masters.h */
    uint32_t room;           /* coded: of each unit (kernels/master.h) */
    uint32_t need;           /* coded: the room that a unit wanted when it did not fit; guarded */
    uint32_t misfits;        /* coded: how often that was; guarded */
} rft_region;

typedef struct rft_name {
    const char *text; /* borrowed; NULL: the slot is free */
    uint64_t hash;
} rft_name;

/* Which names are taken: as fast for 100,000 of them as for ten. */
typedef struct rft_name_index {
    rft_name *slots; /* owned; a power of two of them, at most half taken */
    uint32_t room;
} rft_name_index;

#define RFT_NO_SPAN UINT32_MAX

/* The addresses of one region, as a node of the tree. */
typedef struct rft_span {
    uint64_t begin;
    uint64_t end;
    uint32_t left;
    uint32_t right;
    bool held; /* it is in the tree */
} rft_span;

/* Which addresses are taken. Spans never overlap, so ordering them by their first address finds a
 * clash, or its absence, in one walk down. Zeroed is not open: call rft_span_tree_reset once. */
typedef struct rft_span_tree {
    rft_span *spans; /* owned; numbered by the caller */
    uint32_t room;
    uint32_t root;
} rft_span_tree;

typedef struct rft_region_table {
    refit_device *device; /* where they live; borrowed */
    rft_region *items;    /* owned */
    uint32_t count;
    uint32_t room;
    uint64_t address_changes; /* so far: while it is the same, no address has changed */
    rft_name_index names;
    rft_span_tree spans;       /* of every region whose `memory` is not NULL, by its number */
    refit_placement placement; /* of all regions; of none, if there is none */
} rft_region_table;

void rft_region_table_open(rft_region_table *table, refit_device *device);
void rft_region_table_close(rft_region_table *table);

/* REFIT_ERR_EXISTS, _INVALID, _BUSY, _LIMIT, _HOST_MEMORY, _DEVICE_MEMORY. */
refit_status rft_region_table_add(rft_region_table *table, const refit_region_desc *given,
                                  refit_region_id *out, refit_error *error);

/* Where the regions live: all of them, for one table has regions of one placement. */
refit_placement rft_region_table_placement(const rft_region_table *table);

/* Removes all regions; the room stays. */
void rft_region_table_clear(rft_region_table *table);

/* Gives the region the address `memory`, in place of the one it may have; a piece of an arena whose
 * memory was given back gets it again. On failure the region keeps what it has. REFIT_ERR_EXISTS,
 * _INVALID, _BUSY (a piece that is held, or another offloader's), _DEVICE_MEMORY. */
refit_status rft_region_attach(rft_region_table *table, refit_region_id id, void *memory,
                               refit_error *error);

/* `weights`: of the region; a region that has some. REFIT_ERR_INVALID. */
refit_status rft_region_set_weights(rft_region_table *table, refit_region_id id,
                                    const uint16_t *weights, refit_error *error);

/* The region has no address any more. */
void rft_region_detach(rft_region_table *table, refit_region_id id);

/* ---- The index of names, used by region.c and its test ----------------------------------- */

/* Room for `count` names; afterwards adding up to so many allocates nothing. */
refit_status rft_name_index_reserve(rft_name_index *index, uint32_t count, refit_error *error);
void rft_name_index_reset(rft_name_index *index);
void rft_name_index_close(rft_name_index *index);

bool rft_name_index_has(const rft_name_index *index, const char *name);

/* `name` is not there yet, there is room, and it stays where it is as long as the index. */
void rft_name_index_add(rft_name_index *index, const char *name);

/* ---- The tree of addresses, used by region.c and its test -------------------------------- */

/* Room for spans numbered below `room`; afterwards inserting allocates nothing. */
refit_status rft_span_tree_reserve(rft_span_tree *tree, uint32_t room, refit_error *error);

/* Empties the tree; its room stays. */
void rft_span_tree_reset(rft_span_tree *tree);
void rft_span_tree_close(rft_span_tree *tree);

/* The span that [begin, begin + bytes) clashes with, or RFT_NO_SPAN. The sum must not overflow. */
uint32_t rft_span_tree_find(const rft_span_tree *tree, uint64_t begin, uint64_t bytes);

/* `id` is not in the tree, and nothing clashes with it. */
void rft_span_tree_insert(rft_span_tree *tree, uint32_t id, uint64_t begin, uint64_t bytes);

/* Harmless for one that is not in the tree. */
void rft_span_tree_remove(rft_span_tree *tree, uint32_t id);

#endif
