/*
 * loan: memory that the transport or a device may still hold after its owner has done with it, and
 * the attic where such memory waits to be freed. A torn version can only come from bytes that
 * change under somebody who still reads them: a loan that is not back is never written again, but
 * put away.
 */
#ifndef RFT_BUFFER_H
#define RFT_BUFFER_H

#include "net/pending.h"
#include "store/pinning.h"
#include "store/segment.h"
#include "wire/bytes.h"

typedef struct rft_buffer {
    rft_segment segment;     /* a slot's; may be closed */
    rft_pinning pinning;     /* of the segment */
    bool pin_tried;          /* once is enough */
    rft_bytes gathered;      /* a frame's; may be empty */
    rft_pending pending;     /* payloads of it in flight, and copies of a device */
    struct rft_buffer *next; /* in an attic */
} rft_buffer;

/* An empty one; the owner fills it. NULL: no memory. Both are freed by an attic alone. */
rft_buffer *rft_buffer_open(void);

/* {0} is empty. */
typedef struct rft_retire_list {
    rft_buffer *first;
} rft_retire_list;

/* Takes the loan (NULL is allowed), and retires its segment. */
void rft_retire_list_put(rft_retire_list *retired, rft_buffer *buffer);
/* All that is in `from`. */
void rft_retire_list_move(rft_retire_list *retired, rft_retire_list *from);
/* Frees what is back. */
void rft_retire_list_sweep(rft_retire_list *retired);
/* Waits for all of it until `deadline`; what is not back then stays mapped for ever, since somebody
 * would read it otherwise. Returns how many those are. */
uint32_t rft_retire_list_close(rft_retire_list *retired, int64_t deadline);

#endif
