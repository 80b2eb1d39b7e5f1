/*
 * division: which part of each tensor each rank of a trainer has, drawn from a seed. A tensor is
 * one rank's, or is cut into rows, columns or a grid, at any place: some ranks have nothing of it.
 */
#ifndef CHAOS_DIVISION_H
#define CHAOS_DIVISION_H

#include "model.h"

#define RANKS_MOST 4u

typedef struct division_part {
    uint32_t tensor;
    uint32_t rank; /* dimensions that are cut; 0: all of the tensor */
    uint64_t first[2];
    uint64_t shape[2];
} division_part;

/* The parts of a rank, of one tensor each. Returns how many. */
uint32_t division_draw(const chaos_model *model, uint64_t seed, uint32_t rank, uint32_t ranks,
                       division_part parts[MODEL_TENSORS_MOST]);

uint64_t division_bytes(const chaos_model *model, const division_part *part);
/* Copies its bytes, in the order of its rows. */
void division_gather(const chaos_model *model, const division_part *part, unsigned char *to);

#endif
