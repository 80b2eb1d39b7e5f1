/*
 * division: which part of each tensor each rank of a trainer has, and each worker that does not
 * take all of them, drawn from a seed. Among ranks a tensor is one rank's, or is cut into rows,
 * columns or a grid, at any place: some ranks have nothing of it.
 */
#ifndef CHAOS_DIVISION_H
#define CHAOS_DIVISION_H

#include "model.h"

#define RANKS_MOST 4u

typedef struct division_part {
    uint32_t tensor; /* that of a worker has a name instead */
    const char *name;
    uint32_t rank; /* dimensions that are cut; 0: all of the tensor */
    uint64_t first[2];
    uint64_t shape[2];
} division_part;

/* The parts of a rank, of one tensor each. Returns how many. */
uint32_t division_draw(const chaos_model *model, uint64_t seed, uint32_t rank, uint32_t ranks,
                       division_part parts[MODEL_TENSORS_MOST]);

/* What a worker takes, of whichever variant of the model: parts within every tensor of the name,
 * one a name, of some names. */
uint32_t division_select(uint64_t seed, division_part parts[MODEL_NAMES_MOST]);

/* As the library is told. */
refit_selection division_selection(const division_part *part, const char *name);

uint64_t division_bytes(const refit_tensor *tensor, const division_part *part);
/* Copies its bytes, in the order of its rows, from those of the tensor. */
void division_gather(const refit_tensor *tensor, const unsigned char *from,
                     const division_part *part, unsigned char *to);
/* Adds its bytes to a digest. */
uint64_t division_digest(uint64_t digest, const refit_tensor *tensor, const unsigned char *from,
                         const division_part *part);

#endif
