/* host_extents: a set of bytes, as sorted, disjoint stretches. Not thread-safe. */
#ifndef RFT_HOST_EXTENTS_H
#define RFT_HOST_EXTENTS_H

#include "base/error.h"

typedef struct rft_extent {
    uintptr_t from;
    uintptr_t to; /* the first byte behind it */
} rft_extent;

/* All zero is the empty set. */
typedef struct rft_host_extents {
    rft_extent *list;
    uint32_t count;
    uint32_t room;
} rft_host_extents;

void rft_host_extents_close(rft_host_extents *set);

/* Makes sure that the next add or remove has the memory it needs; those two cannot fail. */
refit_status rft_host_extents_prepare(rft_host_extents *set, refit_error *error);
void rft_host_extents_add(rft_host_extents *set, rft_extent added);
void rft_host_extents_remove(rft_host_extents *set, rft_extent removed);

/* How many bytes of `range` are in the set. */
uint64_t rft_host_extents_covered(const rft_host_extents *set, rft_extent range);

#endif
