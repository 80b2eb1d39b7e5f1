/*
 * carrier: bytes between the memory of one device and the host, or within the device, on a stream
 * of its own behind the caller's; and their digests.
 *
 * Work is put on the stream by copy and digest, and waited for by wait. If it is not done by then,
 * the carrier stays busy, and so does the memory that was named by hold: nothing may be written
 * there or freed until a later wait has seen the end of it.
 *
 * Belongs to one thread.
 */
#ifndef RFT_CARRIER_H
#define RFT_CARRIER_H

#include "broadcast/pending.h"
#include "broadcast/pinning.h"
#include "broadcast/tally.h"

typedef struct rft_carrier rft_carrier;

refit_status rft_carrier_open(refit_device *device, const refit_config *config, rft_carrier **out,
                              refit_error *error);
/* Waits for what is under way until `deadline`. False: it was not done, and the carrier, its stream
 * and its device stay open for ever, since the device would write into freed memory otherwise. NULL
 * is allowed. */
bool rft_carrier_close(rft_carrier *carrier, int64_t deadline);

refit_device *rft_carrier_device(const rft_carrier *carrier);

/* What is put on the stream from now on waits for what the caller has put on `after`. */
refit_status rft_carrier_follow(rft_carrier *carrier, refit_stream_ref after, refit_error *error);
/* The memory that `pending` counts for is in use until a wait has seen the end of the work, of
 * which there may be none. On a carrier that is not busy; at most two at a time. */
void rft_carrier_hold(rft_carrier *carrier, rft_pending *pending);
/* Between host memory and the device's, which was checked before. `pinning`: of the slot on the
 * host side, or NULL. */
refit_status rft_carrier_copy(rft_carrier *carrier, void *to, const void *from, uint64_t bytes,
                              const rft_pinning *pinning, refit_error *error);
/* Within the device. */
refit_status rft_carrier_copy_within(rft_carrier *carrier, void *to, const void *from,
                                     uint64_t bytes, refit_error *error);
/* The digest of memory of the device that lies `offset` bytes into a whole. Where the device takes
 * none itself, the bytes are fetched piece by piece, and the call waits for that. */
refit_status rft_carrier_digest(rft_carrier *carrier, const void *memory, uint64_t bytes,
                                uint64_t offset, refit_error *error);
/* Whether the device takes digests itself. */
bool rft_carrier_digests(const rft_carrier *carrier);
/* What rft_carrier_digest asked for, after a wait: the sum of the parts. */
uint64_t rft_carrier_sum(const rft_carrier *carrier);

/* Up to RFT_TALLY_MOST digests without a wait for each, on a device that takes them itself. open
 * takes the room for them, once; begin makes them zero; add reads memory that was checked, and
 * copies it to `to`, within the device, on the way (NULL: does not); end brings the first `count`
 * to the host. What sums gives is good after a wait, until the next begin. */
refit_status rft_carrier_tally_open(rft_carrier *carrier, refit_error *error);
refit_status rft_carrier_tally_begin(rft_carrier *carrier, refit_error *error);
refit_status rft_carrier_tally_add(rft_carrier *carrier, uint32_t index, void *to, const void *from,
                                   uint64_t bytes, refit_error *error);
refit_status rft_carrier_tally_end(rft_carrier *carrier, uint32_t count, refit_error *error);
const uint64_t *rft_carrier_tally_sums(const rft_carrier *carrier);

/* Waits until all that is on the stream is done. REFIT_ERR_TIMEOUT: it is not, and the carrier is
 * busy; else how it went. */
refit_status rft_carrier_wait(rft_carrier *carrier, uint32_t timeout_ms, refit_error *error);
/* Whether work may be under way that nobody has seen the end of. NULL is not busy. */
bool rft_carrier_is_busy(const rft_carrier *carrier);
/* Likewise, in the memory that `pending` counts for. */
bool rft_carrier_holds(const rft_carrier *carrier, const rft_pending *pending);

#endif
