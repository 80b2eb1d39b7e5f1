/* host_map: addresses from the operating system, where huge pages fit. */
#ifndef RFT_HOST_MAP_H
#define RFT_HOST_MAP_H

#include <stdbool.h>
#include <stdint.h>

/* Maps `bytes` (a multiple of a page) that can be read and written, or, for a reservation, that
 * have neither access nor memory. NULL with errno. Give back with munmap. */
void *rft_host_map(uint64_t bytes, bool reservation);

#endif
