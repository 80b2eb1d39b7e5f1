/*
 * The stack of activations: a top, and a sorted list of the free pieces below it.
 *
 * There are never more free pieces than taken ones, since a taken piece lies between two of them
 * and above the last. So the list grows when a piece is taken, and giving one back cannot fail. Of
 * a size that no free piece has, the least is remembered until a piece comes back: an arena that is
 * full is not searched again for each tensor.
 */
#include "offload/activation_stack.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"

void rft_stack_close(rft_stack *stack)
{
    rft_free(stack->free);
    memset(stack, 0, sizeof *stack);
}

static refit_status grow_free(rft_stack *stack, refit_error *error)
{
    if (stack->taken < stack->free_room) return REFIT_OK;
    uint32_t room = stack->free_room == 0 ? 64 : 2 * stack->free_room;
    rft_stack_piece *pieces = NULL;
    if (room > stack->free_room) pieces = rft_realloc(stack->free, room, sizeof *pieces);
    RFT_REFUSE_IF(pieces == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory to keep the places of %" PRIu32 " tensors", room);
    stack->free = pieces;
    stack->free_room = room;
    return REFIT_OK;
}

/* Free piece `index` and all after it move by one place. */
static void open_gap(rft_stack *stack, uint32_t index)
{
    for (uint32_t at = stack->free_count++; at > index; at--) {
        stack->free[at] = stack->free[at - 1];
    }
}

static void close_gap(rft_stack *stack, uint32_t index)
{
    rft_stack_piece *to = &stack->free[index];
    stack->free_count--;
    memmove(to, to + 1, (stack->free_count - index) * sizeof *to);
}

/* The first free piece of so many bytes, or free_count. */
static uint32_t find_room(rft_stack *stack, uint64_t bytes)
{
    if (bytes >= stack->too_large && stack->too_large != 0) return stack->free_count;
    uint32_t index = 0;
    while (index < stack->free_count && stack->free[index].bytes < bytes) {
        index++;
    }
    if (index == stack->free_count) stack->too_large = bytes;
    return index;
}

static bool take_below(rft_stack *stack, uint64_t bytes, uint64_t *at)
{
    uint32_t index = find_room(stack, bytes);
    if (index == stack->free_count) return false;
    rft_stack_piece *piece = &stack->free[index];
    *at = piece->at;
    piece->at += bytes;
    piece->bytes -= bytes;
    if (piece->bytes == 0) close_gap(stack, index);
    return true;
}

refit_status rft_stack_take(rft_stack *stack, uint64_t bytes, uint64_t *at, bool *placed,
                            bool *below, refit_error *error)
{
    RFT_TRY(grow_free(stack, error));
    *placed = *below = false;
    if (!rft_align_u64(bytes, RFT_STACK_ALIGNMENT, &bytes)) return REFIT_OK;
    if (bytes <= stack->room - stack->top) {
        *at = stack->top;
        stack->top += bytes;
        *placed = true;
    } else {
        *placed = *below = take_below(stack, bytes, at);
    }
    if (!*placed) return REFIT_OK;
    stack->used += bytes;
    stack->taken++;
    return REFIT_OK;
}

/* The first free piece that begins above `at`, or free_count. */
static uint32_t find_above(const rft_stack *stack, uint64_t at)
{
    uint32_t low = 0, high = stack->free_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (stack->free[middle].at > at) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* Adds a piece to the list, joined with its neighbours. */
static void add_free(rft_stack *stack, uint64_t at, uint64_t bytes)
{
    uint32_t index = find_above(stack, at);
    rft_stack_piece *before = index > 0 ? &stack->free[index - 1] : NULL;
    rft_stack_piece *after = index < stack->free_count ? &stack->free[index] : NULL;
    bool joins_before = before != NULL && before->at + before->bytes == at;
    bool joins_after = after != NULL && at + bytes == after->at;
    if (joins_before && joins_after) {
        before->bytes += bytes + after->bytes;
        close_gap(stack, index);
    } else if (joins_before) {
        before->bytes += bytes;
    } else if (joins_after) {
        after->at = at;
        after->bytes += bytes;
    } else {
        open_gap(stack, index);
        stack->free[index] = (rft_stack_piece){at, bytes};
    }
}

void rft_stack_give(rft_stack *stack, uint64_t at, uint64_t bytes)
{
    (void)rft_align_u64(bytes, RFT_STACK_ALIGNMENT, &bytes); /* it could when they were taken */
    stack->used -= bytes;
    stack->taken--;
    stack->too_large = 0;
    if (at + bytes < stack->top) {
        add_free(stack, at, bytes);
        return;
    }
    stack->top = at;
    if (stack->free_count == 0) return;
    const rft_stack_piece *last = &stack->free[stack->free_count - 1];
    if (last->at + last->bytes != stack->top) return;
    stack->top = last->at;
    stack->free_count--;
}
