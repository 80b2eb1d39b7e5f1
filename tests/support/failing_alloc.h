/*
 * An allocator whose n-th request fails: how tests show that every failed allocation is an error
 * and leaks nothing.
 *
 *     for (uint64_t nth = 1;; nth++) {
 *         failing_alloc_begin(nth);
 *         refit_status status = thing_open(...);
 *         if (status == REFIT_OK) thing_close(...);
 *         if (!failing_alloc_end()) break;              the n-th request was never made: all tried
 *         assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
 *     }
 */
#ifndef FAILING_ALLOC_H
#define FAILING_ALLOC_H

#include <stdbool.h>
#include <stdint.h>

/* Installs it; no refit object may be open. The n-th request from now on fails, the first being 1;
 * 0: none. Requests of other threads count too. */
void failing_alloc_begin(uint64_t nth);

/* While it is installed: the n-th request of this thread from now on fails, whatever others ask
 * for. Objects may be open. */
void failing_alloc_here(uint64_t nth);
/* Ends that. True if the n-th one came. */
bool failing_alloc_stop_here(void);

/* No request fails from now on, though the allocator stays. True if the n-th one came before. */
bool failing_alloc_stop(void);

/* Brings malloc back and fails the test if a block is still held. True if the n-th request came,
 * and had not been called off. */
bool failing_alloc_end(void);

#endif
