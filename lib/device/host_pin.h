/* host_pin: page-locked memory of the host device, which is memory that is never paged out. */
#ifndef RFT_HOST_PIN_H
#define RFT_HOST_PIN_H

#include "base/error.h"

/* REFIT_ERR_PIN names the limit and how to raise it. */
refit_status rft_host_pin(const void *memory, uint64_t bytes, refit_error *error);
void rft_host_unpin(const void *memory, uint64_t bytes);

#endif
