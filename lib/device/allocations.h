/* allocations: which addresses were given out, and how many bytes each. Not thread-safe. */
#ifndef RFT_ALLOCATIONS_H
#define RFT_ALLOCATIONS_H

#include "base/error.h"

typedef struct rft_allocation {
    void *memory; /* NULL: an empty place */
    uint64_t bytes;
} rft_allocation;

/* All zero is an empty table. */
typedef struct rft_allocations {
    rft_allocation *places;
    uint32_t count;
    uint32_t room; /* 0 or a power of two, more than count */
} rft_allocations;

void rft_allocations_close(rft_allocations *allocations);
refit_status rft_allocations_add(rft_allocations *allocations, void *memory, uint64_t bytes,
                                 refit_error *error);

/* Removes the allocation and returns its bytes; 0 if there is none at this address. */
uint64_t rft_allocations_take(rft_allocations *allocations, const void *memory);

#endif
