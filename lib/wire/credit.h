/*
 * credit: what a frame takes of the window that bounds what is in flight to a worker.
 *
 * A PULL grants whole credits, and a credit is room for a whole frame. A frame of which less
 * travels, because it goes as what changed, takes as many sixteenths of a credit as that is of its
 * bytes, rounded up. So the window bounds bytes, and a long link is kept as busy by small frames as
 * by whole ones. Who sends sees the cost after coding: it may begin while any part of a credit is
 * left, and owes the rest. Both ends count alike, in parts.
 */
#ifndef RFT_CREDIT_H
#define RFT_CREDIT_H

#include <stdint.h>

/* Parts of a credit. */
#define RFT_CREDIT 16

/* In parts: 1 to RFT_CREDIT. `bytes` is what the frame takes in the store, `payload` what of it
 * travels. */
static inline int32_t rft_credit_cost(uint64_t payload, uint64_t bytes)
{
    if (payload >= bytes) return RFT_CREDIT;
    uint64_t part = (bytes + RFT_CREDIT - 1) / RFT_CREDIT;
    uint64_t parts = (payload + part - 1) / part;
    return parts == 0 ? 1 : (int32_t)parts;
}

#endif
