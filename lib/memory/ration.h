/*
 * ration: memory that is taken little by little, such as notes of old bytes, within what is really
 * free.
 *
 * The kernel gives such memory page by page, and ends a process rather than refuse one. To ask for
 * the worst case would refuse what fits as a rule, and to ask each time would cost more than the
 * work: what is free is read once for some megabytes.
 */
#ifndef RFT_RATION_H
#define RFT_RATION_H

#include <stdint.h>

#include "base/error.h"

typedef struct rft_ration {
    uint64_t left; /* may be taken without another look; {0} at first */
    uint64_t taken;
    uint64_t budget; /* offload.budget_bytes: the most in all; 0: what is free decides */
} rft_ration;

/* REFIT_ERR_HOST_MEMORY: the machine or the cgroup has not so much; REFIT_ERR_BUDGET: it would be
 * more than the budget. The sentence says what is there and ends without a remedy. Memory that was
 * granted before has been touched, but for the last megabytes. */
refit_status rft_ration_take(rft_ration *ration, uint64_t bytes, refit_error *error);

/* For `bytes` that were granted and not used. */
void rft_ration_return(rft_ration *ration, uint64_t bytes);

#endif
