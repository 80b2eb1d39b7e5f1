/*
 * loan: memory that the transport or a device may still hold after its owner has done with it, and
 * the attic where such memory waits to be freed. A torn version can only come from bytes that
 * change under somebody who still reads them: a loan that is not back is never written again, but
 * put away.
 */
#ifndef RFT_LOAN_H
#define RFT_LOAN_H

#include "broadcast/pending.h"
#include "broadcast/pinning.h"
#include "broadcast/segment.h"
#include "wire/bytes.h"

typedef struct rft_loan {
    rft_segment segment;   /* a slot's; may be closed */
    rft_pinning pinning;   /* of the segment */
    bool pin_tried;        /* once is enough */
    rft_bytes gathered;    /* a frame's; may be empty */
    rft_pending pending;   /* payloads of it in flight, and copies of a device */
    struct rft_loan *next; /* in an attic */
} rft_loan;

/* An empty one; the owner fills it. NULL: no memory. Both are freed by an attic alone. */
rft_loan *rft_loan_open(void);

/* {0} is empty. */
typedef struct rft_attic {
    rft_loan *first;
} rft_attic;

/* Takes the loan (NULL is allowed), and retires its segment. */
void rft_attic_put(rft_attic *attic, rft_loan *loan);
/* All that is in `from`. */
void rft_attic_move(rft_attic *attic, rft_attic *from);
/* Frees what is back. */
void rft_attic_sweep(rft_attic *attic);
/* Waits for all of it until `deadline`; what is not back then stays mapped for ever, since somebody
 * would read it otherwise. Returns how many those are. */
uint32_t rft_attic_close(rft_attic *attic, int64_t deadline);

#endif
