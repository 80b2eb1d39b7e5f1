/*
 * activation_stack: which bytes of the arena the tensors of activations have. Offsets alone: no
 * memory, no device.
 *
 * Room is taken on top, and comes back there. What comes back below the top is a free piece, joined
 * with free neighbours and with the top; free pieces are used, from the lowest address on, where
 * the top has no room.
 */
#ifndef RFT_ACTIVATION_STACK_H
#define RFT_ACTIVATION_STACK_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

/* Each tensor has a multiple of it, and begins at one. It suits copy engines. */
#define RFT_STACK_ALIGNMENT UINT64_C(512)

typedef struct rft_stack_piece {
    uint64_t at;
    uint64_t bytes;
} rft_stack_piece;

typedef struct rft_stack {
    uint64_t room;  /* bytes in all */
    uint64_t top;   /* what is above has never been taken, or has come back */
    uint64_t used;  /* bytes taken */
    uint32_t taken; /* pieces taken */
    rft_stack_piece
        *free; /* owned; below the top, in order of address, no two of them neighbours */
    uint32_t free_count;
    uint32_t free_room;
    uint64_t too_large; /* no free piece has so many bytes */
} rft_stack;

/* {0} with `room` set is an empty stack; `room` is a multiple of the alignment. */
void rft_stack_close(rft_stack *stack);

/* Takes `bytes` (> 0), rounded up to the alignment; give them back by the same number. `*placed`
 * false: there is no room. `*below`: in a free piece below the top. REFIT_ERR_HOST_MEMORY: for the
 * bookkeeping, so that a give needs none. */
refit_status rft_stack_take(rft_stack *stack, uint64_t bytes, uint64_t *at, bool *placed,
                            bool *below, refit_error *error);
void rft_stack_give(rft_stack *stack, uint64_t at, uint64_t bytes);

#endif
