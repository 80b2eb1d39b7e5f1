/* Random bits from the kernel: epochs, names that must not be guessed or met twice. */
#ifndef RFT_RANDOM_H
#define RFT_RANDOM_H

#include <stdint.h>

#include "base/error.h"

/* 64 bits, never 0: 0 stands for "none" wherever such a number is kept. */
refit_status rft_random_u64(uint64_t *out, refit_error *error);

#endif
