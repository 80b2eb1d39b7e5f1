/*
 * touch: gives fresh pages their memory, by several threads at once.
 *
 * The first touch is what costs (the kernel zeroes every page), and it decides on which node a page
 * lies. Asked of the kernel by MADV_POPULATE_WRITE, which answers with an error where a plain write
 * would raise a signal; kernels older than 5.14 do not know it and get the write.
 */
#ifndef RFT_TOUCH_H
#define RFT_TOUCH_H

#include <stdint.h>

#include "base/error.h"

/* Touches whole pages on the calling thread. What they held stays. REFIT_ERR_HOST_MEMORY. */
refit_status rft_touch_range(void *base, uint64_t bytes, refit_error *error);

/* Likewise by `threads` threads, the caller's among them (0: one per core, at most 8), which are
 * gone when it returns. Fewer, if some cannot be started. Blocks. */
refit_status rft_touch(void *base, uint64_t bytes, uint32_t threads, refit_error *error);

#endif
