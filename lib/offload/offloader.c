/*
 * The offloader: opening, closing, and the states. Each verb has a file of its own.
 *
 *        seal            offload                copies end
 *   OPEN ────► RESIDENT ─────────► OFFLOADING ──────────────► OFFLOADED
 *        ◄────     ▲                  ▲  │ copies fail            │
 *       unseal     │          offload │  ▼                        │
 *                  │                FAILED                        │ restore
 *                  │          restore │  ▲                        │
 *                  │ copies end       ▼  │ copies fail            │
 *                  └───────────── RESTORING ◄─────────────────────┘
 *
 *   state       bytes of a region count       the image             device memory
 *   OPEN        on the device                 may be there, cached  all bound
 *   RESIDENT    on the device                 holds nothing         all bound
 *   OFFLOADING  on the device                 being written         all bound
 *   OFFLOADED   in the image                  whole                 bound until finish or unbind
 *   RESTORING   in the image                  whole, not written    all bound
 *   FAILED      where its `place` says        holds those away      bound if its bytes are there
 *
 * With offload.background the image's memory may still be coming in OPEN and RESIDENT: an
 * offload waits for it.
 *
 * Whoever looks moves the state on when copies have ended: the offloader's thread in its verbs, any
 * thread by a future or refit_offloader_get_state. An offload changes the place of all its regions
 * at once, when the last copy has ended well. A restore that fails has changed the place of the
 * groups that arrived whole: their users may have gone on with them. A verb that fails before its
 * copies are under way leaves the state as it was.
 *
 * Must not know: sockets, workers, what the bytes mean.
 */
#include "offload/offloader.h"

#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "config/resolve.h"

bool rft_offloader_is_moving(const refit_offloader *offloader)
{
    return offloader->state == REFIT_OFFLOADING || offloader->state == REFIT_RESTORING;
}

bool rft_offloader_is_away(const refit_offloader *offloader)
{
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        if (offloader->regions.items[id].place == REFIT_ON_HOST) return true;
    }
    return false;
}

refit_status rft_offloader_check_movers(refit_offloader *offloader, refit_error *error)
{
    refit_error why = {0};
    for (int direction = RFT_OFFLOAD; direction <= RFT_RESTORE; direction++) {
        rft_mover *mover = offloader->movers[direction];
        if (mover == NULL || rft_mover_check(mover, &why) == REFIT_OK) continue;
        return rft_fail(error, REFIT_ERR_DEVICE,
                        "copies that could not be waited for may still use the host image: close "
                        "the offloader (%s)",
                        why.text);
    }
    return REFIT_OK;
}

static refit_status open_movers(refit_offloader *offloader, refit_error *error)
{
    if (!offloader->config.use_pinned_optimizer_offload) return REFIT_OK;
    uint64_t limit = offloader->config.offload_rate_limit;
    RFT_TRY(rft_mover_open(offloader->device, limit, &offloader->movers[RFT_OFFLOAD], error));
    return rft_mover_open(offloader->device, limit, &offloader->movers[RFT_RESTORE], error);
}

/* Nothing is under way, so neither has anything to wait for. */
static refit_status close_movers(refit_offloader *offloader, uint32_t timeout_ms,
                                 refit_error *error)
{
    for (int direction = RFT_OFFLOAD; direction <= RFT_RESTORE; direction++) {
        if (offloader->movers[direction] == NULL) continue;
        RFT_TRY(rft_mover_close(offloader->movers[direction], timeout_ms, error));
        offloader->movers[direction] = NULL;
    }
    return REFIT_OK;
}

static refit_status open_parts(refit_offloader *offloader, refit_error *error)
{
    refit_status status;
    RFT_TRY_GOTO(rft_mutex_open(&offloader->lock, error), out);
    RFT_TRY_GOTO(rft_mutex_open(&offloader->checking, error), close_lock);
    RFT_TRY_GOTO(open_movers(offloader, error), close_opened);
    return REFIT_OK;

close_opened:
    (void)close_movers(offloader, 0, NULL);
    rft_mutex_close(&offloader->checking);
close_lock:
    rft_mutex_close(&offloader->lock);
out:
    return status;
}

refit_status refit_offloader_open(refit_device *device, const refit_config *config,
                                  refit_offloader **out, refit_error *error)
{
    RFT_REFUSE_IF(device == NULL || out == NULL, error, REFIT_ERR_INVALID,
                  "refit_offloader_open needs a device and a place for the result");
    refit_config own;
    RFT_TRY(rft_config_resolve(config, &own, error));
    refit_offloader *offloader = rft_calloc(1, sizeof *offloader);
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for an offloader");
    offloader->device = device;
    offloader->config = own;
    offloader->caps = rft_device_get_caps(device);
    rft_region_table_open(&offloader->regions, device);
    refit_status status = open_parts(offloader, error);
    if (status != REFIT_OK) {
        rft_free(offloader);
        return status;
    }
    rft_device_retain(device);
    *out = offloader;
    return REFIT_OK;
}

/* Lets copies under way end: how they do does not matter any more. */
static refit_status end_copies(refit_offloader *offloader, refit_error *error)
{
    rft_lock(&offloader->lock);
    bool leased = offloader->leases != 0;
    rft_mover *mover = rft_offloader_is_moving(offloader) ? offloader->operation.mover : NULL;
    rft_unlock(&offloader->lock);
    RFT_REFUSE_IF(leased, error, REFIT_ERR_BUSY,
                  "the offloader cannot close while a lease reads its image: release it first");
    if (mover == NULL) return REFIT_OK;
    rft_mover_hurry(mover);
    refit_status status = rft_mover_wait(mover, offloader->config.offload_timeout_ms, error);
    return status == REFIT_ERR_TIMEOUT ? status : REFIT_OK;
}

refit_status refit_offloader_close(refit_offloader *offloader, refit_error *error)
{
    if (offloader == NULL) return REFIT_OK;
    RFT_TRY(end_copies(offloader, error));
    RFT_TRY(rft_image_end(offloader, error));
    offloader->closing = true;
    RFT_TRY(close_movers(offloader, offloader->config.offload_timeout_ms, error));
    RFT_TRY(rft_image_drop(offloader, error));
    rft_schedule_close(&offloader->schedule);
    rft_region_table_close(&offloader->regions);
    rft_mutex_close(&offloader->checking);
    rft_mutex_close(&offloader->lock);
    rft_device_release(offloader->device);
    rft_free(offloader);
    return REFIT_OK;
}

refit_offloader_state refit_offloader_get_state(refit_offloader *offloader)
{
    if (offloader == NULL) return REFIT_OPEN;
    rft_lock(&offloader->lock);
    rft_operation_notice(offloader);
    refit_offloader_state state = offloader->state;
    rft_unlock(&offloader->lock);
    return state;
}

const char *refit_offloader_state_name(refit_offloader_state state)
{
    switch (state) {
    case REFIT_OPEN: return "OPEN";
    case REFIT_RESIDENT: return "RESIDENT";
    case REFIT_OFFLOADING: return "OFFLOADING";
    case REFIT_OFFLOADED: return "OFFLOADED";
    case REFIT_RESTORING: return "RESTORING";
    case REFIT_FAILED: return "FAILED";
    }
    return "UNKNOWN";
}

refit_status refit_offloader_set_accumulating(refit_offloader *offloader, int open,
                                              refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    offloader->accumulating = open != 0;
    return REFIT_OK;
}

refit_status refit_offloader_set_memory(refit_offloader *offloader, const refit_memory_hooks *hooks,
                                        refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    refit_offloader_state state = refit_offloader_get_state(offloader);
    RFT_REFUSE_IF(state != REFIT_OPEN && state != REFIT_RESIDENT, error, REFIT_ERR_STATE,
                  "hooks cannot change while states are away (%s): restore first",
                  refit_offloader_state_name(state));
    if (hooks == NULL) {
        offloader->hooks = (refit_memory_hooks){0};
        return REFIT_OK;
    }
    RFT_REFUSE_IF(hooks->size < offsetof(refit_memory_hooks, user), error, REFIT_ERR_INVALID,
                  "refit_memory_hooks.size is %zu: set it to sizeof(refit_memory_hooks)",
                  hooks->size);
    RFT_REFUSE_IF(hooks->release == NULL || hooks->acquire == NULL, error, REFIT_ERR_INVALID,
                  "the memory hooks come in a pair: give release and acquire");
    offloader->hooks = (refit_memory_hooks){0};
    memcpy(&offloader->hooks, hooks, rft_min_u64(hooks->size, sizeof *hooks));
    return REFIT_OK;
}
