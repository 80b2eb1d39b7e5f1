/* How much is granted between two looks at what is free: never more than half of it. */
#include "memory/ration.h"

#include <inttypes.h>

#include "base/checked.h"
#include "memory/budget.h"

#define STEP_BYTES (UINT64_C(64) << 20)

static refit_status look(rft_ration *ration, uint64_t bytes, refit_error *error)
{
    rft_budget room;
    if (bytes <= ration->left) {
        ration->left -= bytes;
        return REFIT_OK;
    }
    rft_budget_free("", &room);
    ration->left = 0;
    RFT_REFUSE_IF(bytes > room.free_bytes, error, REFIT_ERR_HOST_MEMORY,
                  "%" PRIu64 " bytes of host memory are needed and %" PRIu64 " are free (%s)",
                  bytes, room.free_bytes, room.source);
    ration->left = rft_min_u64((room.free_bytes - bytes) / 2, STEP_BYTES);
    return REFIT_OK;
}

refit_status rft_ration_take(rft_ration *ration, uint64_t bytes, refit_error *error)
{
    uint64_t budget = ration->budget;
    RFT_REFUSE_IF(budget != 0 && bytes > budget - rft_min_u64(ration->taken, budget), error,
                  REFIT_ERR_BUDGET,
                  "%" PRIu64 " bytes of host memory are needed besides %" PRIu64
                  ", and offload.budget_bytes is %" PRIu64,
                  bytes, ration->taken, budget);
    RFT_TRY(look(ration, bytes, error));
    ration->taken += bytes;
    return REFIT_OK;
}

void rft_ration_return(rft_ration *ration, uint64_t bytes)
{
    ration->left += bytes;
    ration->taken -= bytes;
}
