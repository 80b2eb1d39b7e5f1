/*
 * A treap: a search tree by address that is also a heap by a hash of the span's number, which keeps
 * it shallow whatever order the addresses come in. Nodes lie in one array, so adding 100,000
 * regions costs a few milliseconds and binding one again allocates nothing. Knows nothing about
 * regions.
 */
#include "offload/span_tree.h"

#include "base/alloc.h"

refit_status rft_span_tree_reserve(rft_span_tree *tree, uint32_t room, refit_error *error)
{
    if (room <= tree->room) return REFIT_OK;
    rft_span *spans = rft_realloc(tree->spans, room, sizeof *spans);
    RFT_REFUSE_IF(spans == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the addresses of %u regions", room);
    for (uint32_t id = tree->room; id < room; id++) {
        spans[id] = (rft_span){.left = RFT_NO_SPAN, .right = RFT_NO_SPAN};
    }
    tree->spans = spans;
    tree->room = room;
    return REFIT_OK;
}

void rft_span_tree_reset(rft_span_tree *tree)
{
    for (uint32_t id = 0; id < tree->room; id++) {
        tree->spans[id].held = false;
    }
    tree->root = RFT_NO_SPAN;
}

void rft_span_tree_close(rft_span_tree *tree)
{
    rft_free(tree->spans);
    *tree = (rft_span_tree){.root = RFT_NO_SPAN};
}

uint32_t rft_span_tree_find(const rft_span_tree *tree, uint64_t begin, uint64_t bytes)
{
    uint64_t end = begin + bytes;
    uint32_t at = tree->root;
    while (at != RFT_NO_SPAN) {
        const rft_span *span = &tree->spans[at];
        if (end <= span->begin) {
            at = span->left;
        } else if (begin >= span->end) {
            at = span->right;
        } else {
            break;
        }
    }
    return at;
}

/* The heap's key: a bijection that scatters neighbouring numbers, so no two are equal. */
static uint32_t rank_of(uint32_t id)
{
    uint32_t x = id;
    x = (x ^ (x >> 16)) * UINT32_C(0x7feb352d);
    x = (x ^ (x >> 15)) * UINT32_C(0x846ca68b);
    return x ^ (x >> 16);
}

/* Parts the tree below `at` into what begins below `begin` and the rest. */
static void split(rft_span *spans, uint32_t at, uint64_t begin, uint32_t *below, uint32_t *rest)
{
    while (at != RFT_NO_SPAN) {
        if (spans[at].begin < begin) {
            *below = at;
            below = &spans[at].right;
            at = spans[at].right;
        } else {
            *rest = at;
            rest = &spans[at].left;
            at = spans[at].left;
        }
    }
    *below = RFT_NO_SPAN;
    *rest = RFT_NO_SPAN;
}

/* Joins two trees at `link`; all of `low` lies below all of `high`. */
static void merge(rft_span *spans, uint32_t *link, uint32_t low, uint32_t high)
{
    while (low != RFT_NO_SPAN && high != RFT_NO_SPAN) {
        if (rank_of(low) > rank_of(high)) {
            *link = low;
            link = &spans[low].right;
            low = spans[low].right;
        } else {
            *link = high;
            link = &spans[high].left;
            high = spans[high].left;
        }
    }
    *link = low != RFT_NO_SPAN ? low : high;
}

void rft_span_tree_insert(rft_span_tree *tree, uint32_t id, uint64_t begin, uint64_t bytes)
{
    rft_span *spans = tree->spans;
    uint32_t *link = &tree->root;
    while (*link != RFT_NO_SPAN && rank_of(*link) > rank_of(id)) {
        link = begin < spans[*link].begin ? &spans[*link].left : &spans[*link].right;
    }
    spans[id] = (rft_span){.begin = begin, .end = begin + bytes, .held = true};
    split(spans, *link, begin, &spans[id].left, &spans[id].right);
    *link = id;
}

void rft_span_tree_remove(rft_span_tree *tree, uint32_t id)
{
    rft_span *spans = tree->spans;
    if (!spans[id].held) return;
    uint32_t *link = &tree->root;
    while (*link != id) {
        link = spans[id].begin < spans[*link].begin ? &spans[*link].left : &spans[*link].right;
    }
    merge(spans, link, spans[id].left, spans[id].right);
    spans[id].held = false;
}
