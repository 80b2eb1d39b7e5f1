/*
 * Planning, undone and taken back: estimate, seal, prepare, unseal, clear, trim. The only places
 * where host memory for the image comes and goes, but for an offload after a trim. No bytes move
 * here.
 */
#include <inttypes.h>

#include "base/checked.h"
#include "memory/budget.h"
#include "offload/offloader.h"

static uint32_t batch_most(const refit_offloader *offloader)
{
    uint32_t most = offloader->caps.batch_most;
    return offloader->config.offload_batch < most ? offloader->config.offload_batch : most;
}

/* Host bytes that the sealed offloader would take at its most. */
static refit_status measure(refit_offloader *offloader, uint64_t *bytes, refit_error *error)
{
    uint64_t image_bytes;
    uint64_t payload_bytes;
    RFT_TRY(rft_schedule_measure(&offloader->regions, &offloader->config, &image_bytes,
                                 &payload_bytes, error));
    *bytes = offloader->config.use_pinned_optimizer_offload ? image_bytes : payload_bytes;
    return REFIT_OK;
}

refit_status refit_offloader_estimate(refit_offloader *offloader, uint64_t *host_bytes,
                                      uint64_t *budget_bytes, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL || host_bytes == NULL || budget_bytes == NULL, error,
                  REFIT_ERR_INVALID,
                  "refit_offloader_estimate needs an offloader and places for "
                  "the host bytes and the budget");
    uint64_t bytes;
    rft_budget budget;
    RFT_TRY(measure(offloader, &bytes, error));
    RFT_TRY(rft_budget_read("", &offloader->config, rft_image_held(offloader), &budget, error));
    *host_bytes = bytes;
    *budget_bytes = budget.bytes;
    return REFIT_OK;
}

/* The arena checks its own budget; single mallocs have nobody else who does. */
static refit_status check_pageable_budget(refit_offloader *offloader, refit_error *error)
{
    uint64_t need = offloader->schedule.layout.payload_bytes;
    rft_budget budget;
    if (offloader->config.use_pinned_optimizer_offload) return REFIT_OK;
    RFT_TRY(rft_budget_read("", &offloader->config, 0, &budget, error));
    RFT_REFUSE_IF(need > budget.bytes, error, REFIT_ERR_BUDGET,
                  "offloading needs %" PRIu64 " bytes of host memory, %s allows %" PRIu64
                  ": raise offload.budget_bytes or keep less",
                  need, budget.source, budget.bytes);
    return REFIT_OK;
}

static void set_state(refit_offloader *offloader, refit_offloader_state state)
{
    rft_lock(&offloader->lock);
    offloader->state = state;
    rft_unlock(&offloader->lock);
}

refit_status refit_offloader_seal(refit_offloader *offloader, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    if (refit_offloader_get_state(offloader) != REFIT_OPEN) return REFIT_OK;
    refit_status status = rft_schedule_open(&offloader->schedule, &offloader->regions,
                                            &offloader->config, batch_most(offloader), error);
    if (status != REFIT_OK) return status;
    RFT_TRY_GOTO(check_pageable_budget(offloader, error), close_schedule);
    RFT_TRY_GOTO(rft_image_begin(offloader, error), close_schedule);
    set_state(offloader, REFIT_RESIDENT);
    return REFIT_OK;

close_schedule:
    rft_schedule_close(&offloader->schedule);
    return status;
}

refit_status refit_offloader_prepare(refit_offloader *offloader, uint32_t timeout_ms,
                                     refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    refit_offloader_state state = refit_offloader_get_state(offloader);
    RFT_REFUSE_IF(state == REFIT_OPEN, error, REFIT_ERR_STATE,
                  "the offloader is not sealed: call refit_offloader_seal first");
    RFT_REFUSE_IF(offloader->closing, error, REFIT_ERR_STATE,
                  "the offloader is half closed: call refit_offloader_close again");
    return rft_image_await(offloader, timeout_ms, error);
}

/* Is the image, and the plan, nobody's concern? */
static refit_status check_unused(refit_offloader *offloader, refit_error *error)
{
    rft_lock(&offloader->lock);
    uint32_t leases = offloader->leases;
    rft_unlock(&offloader->lock);
    RFT_REFUSE_IF(leases != 0, error, REFIT_ERR_BUSY,
                  "%u lease(s) still read the host image: release them first", leases);
    return rft_offloader_check_movers(offloader, error);
}

refit_status refit_offloader_unseal(refit_offloader *offloader, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    refit_offloader_state state = refit_offloader_get_state(offloader);
    RFT_REFUSE_IF(state != REFIT_RESIDENT, error, REFIT_ERR_STATE,
                  "only a RESIDENT offloader can be planned anew, and this one is %s",
                  refit_offloader_state_name(state));
    RFT_TRY(check_unused(offloader, error));
    set_state(offloader, REFIT_OPEN);
    rft_schedule_close(&offloader->schedule);
    return REFIT_OK;
}

refit_status refit_offloader_clear(refit_offloader *offloader, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    refit_offloader_state state = refit_offloader_get_state(offloader);
    RFT_REFUSE_IF(
        state != REFIT_OPEN, error, REFIT_ERR_STATE,
        "regions can be removed only while OPEN, and the offloader is %s: unseal it first",
        refit_offloader_state_name(state));
    rft_region_table_clear(&offloader->regions);
    return REFIT_OK;
}

refit_status refit_offloader_trim(refit_offloader *offloader, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    refit_offloader_state state = refit_offloader_get_state(offloader);
    bool moving = state == REFIT_OFFLOADING || state == REFIT_RESTORING;
    RFT_REFUSE_IF(moving || rft_offloader_is_away(offloader), error, REFIT_ERR_STATE,
                  "the host image is in use (%s): restore before it is given back",
                  refit_offloader_state_name(state));
    RFT_TRY(check_unused(offloader, error));
    return rft_image_drop(offloader, error);
}
