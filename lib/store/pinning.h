/*
 * pinning: the page-lock of one slot, by which a device copies into it at full speed. Taken in
 * pieces, because drivers and kernels bound one registration; a copy must not lie across two.
 */
#ifndef RFT_PINNING_H
#define RFT_PINNING_H

#include "device/device.h"

/* {0} is open on nothing: closing it is harmless. */
typedef struct rft_pinning {
    refit_device *device; /* that locked it; NULL: nothing is */
    unsigned char *memory;
    uint64_t bytes;
    uint64_t piece_bytes;
} rft_pinning;

/* All of it or nothing. The device stays in use until close. */
refit_status rft_pinning_open(rft_pinning *pinning, refit_device *device, void *memory,
                              uint64_t bytes, uint64_t piece_bytes, refit_error *error);
/* Before the memory is unmapped, and with no copy under way. */
void rft_pinning_close(rft_pinning *pinning);

/* How many of `bytes` at `memory` may be one copy: those up to the next piece; all where nothing is
 * locked. NULL is allowed. */
uint64_t rft_pinning_reach(const rft_pinning *pinning, const void *memory, uint64_t bytes);

#endif
