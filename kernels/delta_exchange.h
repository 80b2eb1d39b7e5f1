/*
 * delta_exchange: changes a block in place and keeps its old content as a delta, in one walk over
 * both, which costs little more than reading them.
 */
#ifndef RFT_KERNEL_DELTA_EXCHANGE_H
#define RFT_KERNEL_DELTA_EXCHANGE_H

#include "kernels/delta.h"

/* Makes `block` as `after`, writing only elements that differ where those are few, and writes to
 * `out`, which has rft_delta_bound of room, what brings it back. entry->changed is how many
 * elements differed; 0: nothing was written. True: entry->total bytes for rft_delta_apply, of the
 * kind RFT_DELTA_RAW, whatever that of `shape`. False: the block as it was, whole. Where another
 * thread writes elements of `after` meanwhile, their new values are undefined, but `out` brings
 * back `block` all the same. */
bool rft_delta_exchange(rft_delta_shape shape, void *block, const void *after, unsigned char *out,
                        rft_delta_entry *entry);

#endif
