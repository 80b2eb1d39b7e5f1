/*
 * span_tree: which addresses are taken. Spans never overlap, so ordering them by their first
 * address finds a clash, or its absence, in one walk down.
 */
#ifndef RFT_SPAN_TREE_H
#define RFT_SPAN_TREE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

#define RFT_NO_SPAN UINT32_MAX

typedef struct rft_span {
    uint64_t begin;
    uint64_t end;
    uint32_t left;
    uint32_t right;
    bool held; /* it is in the tree */
} rft_span;

/* Zeroed is not open: call rft_span_tree_reset once. */
typedef struct rft_span_tree {
    rft_span *spans; /* owned; numbered by the caller */
    uint32_t room;
    uint32_t root;
} rft_span_tree;

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
