/*
 * huge_pages: pages of 2 MiB make the first touch and the page-lock many times cheaper, unless the
 * machine's memory is so fragmented that the kernel must move things about for each of them. A
 * short probe tells.
 */
#ifndef RFT_HUGE_PAGES_H
#define RFT_HUGE_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#include <refit/config.h>

#define RFT_HUGE_PAGE (UINT64_C(2) << 20)

/* Asks for huge pages in [base, base + bytes), or for none, as `wanted` says; true if they were
 * asked for. REFIT_HUGE_PAGES_AUTO touches up to 80 MiB of the range to find out. */
bool rft_huge_pages_ask(void *base, uint64_t bytes, refit_huge_pages wanted);

#endif
