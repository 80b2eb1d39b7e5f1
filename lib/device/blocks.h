/* blocks: which addresses were given out, and how many bytes each. Not thread-safe. */
#ifndef RFT_BLOCKS_H
#define RFT_BLOCKS_H

#include "base/error.h"

typedef struct rft_block {
    void *memory; /* NULL: an empty place */
    uint64_t bytes;
} rft_block;

/* All zero is an empty table. */
typedef struct rft_blocks {
    rft_block *places;
    uint32_t count;
    uint32_t room; /* 0 or a power of two, more than count */
} rft_blocks;

void rft_blocks_close(rft_blocks *blocks);
refit_status rft_blocks_add(rft_blocks *blocks, void *memory, uint64_t bytes, refit_error *error);

/* Removes the block and returns its bytes; 0 if there is none at this address. */
uint64_t rft_blocks_take(rft_blocks *blocks, const void *memory);

#endif
