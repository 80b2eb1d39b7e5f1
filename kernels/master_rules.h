/*
 * master_rules: what master.h says of elements and places, as code: one text for the C forms and
 * for the GPU's.
 */
#ifndef RFT_KERNEL_MASTER_RULES_H
#define RFT_KERNEL_MASTER_RULES_H

#include "kernels/master.h"

#ifdef __CUDACC__
#include "kernels/gpu.h"
#define RFT_MASTER_RULE RFT_GPU_PART
#else
#define RFT_MASTER_RULE static inline
#endif

/* The upper half that weight and remainder stand for. */
RFT_MASTER_RULE uint32_t rft_master_upper(uint32_t weight, uint32_t low)
{
    return (weight - (low > 0x8000u ? 1u : 0u)) & 0xFFFFu;
}

RFT_MASTER_RULE bool rft_master_is_exception(uint32_t master, uint32_t weight)
{
    return rft_master_upper(weight, master & 0xFFFFu) != master >> 16;
}

RFT_MASTER_RULE bool rft_master_is_whole(uint32_t elements, uint32_t exceptions)
{
    return 2 * exceptions >= elements;
}

/* What a block's exceptions take of the room. */
RFT_MASTER_RULE uint32_t rft_master_extra(uint32_t elements, uint32_t exceptions)
{
    if (exceptions == 0) return 0;
    if (!rft_master_is_whole(elements, exceptions)) return 4 * exceptions;
    return (2 * elements + 3) / 4 * 4;
}

/* The entry can be followed. */
RFT_MASTER_RULE bool rft_master_is_placed(const rft_master_entry *entry, uint32_t elements,
                                          uint32_t room)
{
    if (entry->exceptions > elements) return false;
    if (entry->exceptions == 0) return true;
    uint32_t extra = rft_master_extra(elements, entry->exceptions);
    return entry->at % 4 == 0 && entry->at <= room && extra <= room - entry->at;
}

/* One unit of a job: where its parts lie. */
typedef struct rft_master_place {
    unsigned char *table;
    unsigned char *low;
    unsigned char *room;
    uint64_t first;    /* element of the job */
    uint32_t elements; /* of this unit */
    uint32_t blocks;
} rft_master_place;

RFT_MASTER_RULE uint32_t rft_master_blocks(uint32_t elements)
{
    return (elements + RFT_MASTER_BLOCK - 1) / RFT_MASTER_BLOCK;
}

/* The remainders of a unit, with what is after them. */
RFT_MASTER_RULE uint32_t rft_master_low_bytes(uint32_t elements)
{
    return (2 * elements + 15) / 16 * 16;
}

RFT_MASTER_RULE uint32_t rft_master_unit_bytes(uint32_t elements, uint32_t room)
{
    return rft_master_blocks(elements) * (uint32_t)sizeof(rft_master_entry) +
           rft_master_low_bytes(elements) + room;
}

/* There are so many elements. */
RFT_MASTER_RULE rft_master_place rft_master_find(void *coded, uint64_t elements, uint32_t room,
                                                 uint64_t unit)
{
    rft_master_place place;
    uint64_t left = elements - unit * RFT_MASTER_UNIT;
    place.first = unit * RFT_MASTER_UNIT;
    place.elements = left < RFT_MASTER_UNIT ? (uint32_t)left : RFT_MASTER_UNIT;
    place.blocks = rft_master_blocks(place.elements);
    place.table = (unsigned char *)coded + unit * rft_master_unit_bytes(RFT_MASTER_UNIT, room);
    place.low = place.table + place.blocks * sizeof(rft_master_entry);
    place.room = place.low + rft_master_low_bytes(place.elements);
    return place;
}

/* Elements of a block of the unit. */
RFT_MASTER_RULE uint32_t rft_master_block_elements(const rft_master_place *place, uint32_t block)
{
    uint32_t left = place->elements - block * RFT_MASTER_BLOCK;
    return left < RFT_MASTER_BLOCK ? left : RFT_MASTER_BLOCK;
}

#endif
