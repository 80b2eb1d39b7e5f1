/*
 * Notes one behind the other in reserved memory, each with the way to the one before it.
 *
 * The coder's RAW form is used for elements of every type: its notes hold old elements as they
 * were, where remainders would need the new ones to be still there when they are put back.
 */
#include "subscriber/rollback.h"

#include <string.h>

#include "base/checked.h"
#include "kernels/delta_exchange.h"

#define NOTHING UINT64_MAX

/* In front of the coded elements, on a boundary of 8 bytes. */
typedef struct note_head {
    uint64_t before; /* the note before it */
    rft_note_place place;
    rft_delta_shape shape;
    rft_delta_entry entry;
} note_head;

/* The coder may write so much for one block before the result is known. */
static uint64_t slack(void)
{
    return rft_delta_bound((rft_delta_shape){RFT_DELTA_ELEMENTS, 8, RFT_DELTA_RAW}) + 8;
}

refit_status rft_rollback_prepare(rft_rollback *rollback, uint64_t blocks, uint64_t bytes,
                                  refit_error *error)
{
    uint64_t room;
    if (rollback->memory.memory != NULL) return REFIT_OK;
    bool fits = rft_mul_u64(blocks, sizeof(note_head) + 8, &room) &&
                rft_add_u64(room, bytes, &room) && rft_add_u64(room, slack(), &room);
    RFT_REFUSE_IF(!fits, error, REFIT_ERR_HOST_MEMORY, "no memory to note the old bytes in");
    rollback->used = 0;
    rollback->last = NOTHING;
    return rft_segment_create_sparse(&rollback->memory, room, error);
}

bool rft_rollback_is_empty(const rft_rollback *rollback)
{
    return rollback->memory.memory == NULL || rollback->last == NOTHING;
}

void rft_rollback_reset(rft_rollback *rollback)
{
    rft_segment_close(&rollback->memory);
    *rollback = (rft_rollback){.last = NOTHING};
}

static uint64_t shape_bytes(rft_delta_shape shape)
{
    return (uint64_t)shape.elements * shape.width;
}

refit_status rft_rollback_change(rft_rollback *rollback, rft_note_place place,
                                 rft_delta_shape shape, void *block, const void *after,
                                 uint32_t *changed, refit_error *error)
{
    note_head head = {.before = rollback->last, .place = place, .shape = shape};
    uint64_t left = rollback->memory.bytes - rollback->used;
    head.shape.kind = RFT_DELTA_RAW;
    *changed = 0;
    if (left < sizeof head + rft_delta_bound(head.shape)) {
        if (memcmp(block, after, shape_bytes(shape)) == 0) return REFIT_OK;
        return rft_fail(error, REFIT_ERR_HOST_MEMORY,
                        "the destinations were changed so often during one update that there is "
                        "no room to note their old bytes");
    }
    unsigned char *to = rollback->memory.memory + rollback->used;
    bool coded = rft_delta_exchange(head.shape, block, after, to + sizeof head, &head.entry);
    *changed = head.entry.changed;
    if (*changed == 0) return REFIT_OK;
    if (!coded) head.entry.changed = 0;
    uint64_t bytes = coded ? head.entry.total : shape_bytes(shape);
    memcpy(to, &head, sizeof head);
    rollback->last = rollback->used;
    rollback->used += (sizeof head + bytes + 7) & ~UINT64_C(7);
    return REFIT_OK;
}

void rft_rollback_read(const rft_rollback *rollback, uint64_t at, rft_note *note)
{
    note_head head;
    memcpy(&head, rollback->memory.memory + at, sizeof head);
    *note = (rft_note){
        .place = head.place,
        .shape = head.shape,
        .next = head.before,
        .coded = rollback->memory.memory + at + sizeof head,
        .entry = head.entry,
    };
}

uint64_t rft_note_bytes(const rft_note *note)
{
    return shape_bytes(note->shape);
}

void rft_note_undo(const rft_note *note, unsigned char *block)
{
    if (note->entry.changed == 0) {
        memcpy(block, note->coded, rft_note_bytes(note));
    } else {
        (void)rft_delta_apply(note->shape, &note->entry, note->coded, block);
    }
}
