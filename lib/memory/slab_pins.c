/*
 * Touching and page-locking at once.
 *
 *     threads   touch ──────────────────────────────►
 *     caller      └ slab 0 touched: lock it ─ slab 1: lock it ─ … (helps to touch while it waits)
 *
 * A lock that fails undoes those before it. Knows nothing of what the bytes are.
 */
#include "memory/slab_pins.h"

#include <inttypes.h>

#include "base/log.h"
#include "memory/touch.h"

void rft_slab_pins_drop(rft_slab_pins *pins)
{
    while (pins->pinned > 0) {
        const rft_slab *slab = &pins->slabs[--pins->pinned];
        rft_device_host_unpin(pins->device, pins->base + slab->offset, slab->bytes);
    }
}

static refit_status pin_next(rft_slab_pins *pins, refit_error *error)
{
    refit_error why = {0};
    const rft_slab *slab = &pins->slabs[pins->pinned];
    char *memory = pins->base + slab->offset;
    refit_status status = rft_device_host_pin(pins->device, memory, slab->bytes, &why);
    if (status == REFIT_OK) {
        pins->pinned++;
        return REFIT_OK;
    }
    uint32_t nth = pins->pinned + 1;
    rft_slab_pins_drop(pins);
    if (status == REFIT_ERR_UNSUPPORTED) status = REFIT_ERR_PIN;
    return rft_fail_sub(error, status, why.subsystem, "slab %" PRIu32 " of %" PRIu32 ": %s", nth,
                        pins->count, why.text);
}

/* Page-locks the slab that was just touched; `*wanted` falls to OFF where that is only preferred.
 */
static refit_status pin_as_wanted(rft_slab_pins *pins, refit_pin *wanted, refit_error *error)
{
    refit_error why = {0};
    if (*wanted == REFIT_PIN_OFF) return REFIT_OK;
    refit_status status = pin_next(pins, &why);
    if (status == REFIT_ERR_PIN && *wanted == REFIT_PIN_PREFER) {
        rft_log(REFIT_LOG_WARNING, "the host image stays pageable: %s", why.text);
        *wanted = REFIT_PIN_OFF;
        return REFIT_OK;
    }
    if (status != REFIT_OK && error != NULL) *error = why;
    return status;
}

static refit_status take_slabs(rft_slab_pins *pins, rft_touch *touch, refit_pin wanted,
                               rft_cancel_token *token, refit_error *error)
{
    for (uint32_t i = 0; i < pins->count; i++) {
        uint64_t end = pins->slabs[i].offset + pins->slabs[i].bytes;
        RFT_TRY(rft_touch_reach(touch, end, error));
        RFT_TRY(pin_as_wanted(pins, &wanted, error));
        RFT_TRY(rft_cancel_token_check(token, error));
        atomic_store(&token->ready, end);
    }
    RFT_TRY(rft_touch_reach(touch, pins->bytes, error));
    atomic_store(&token->ready, pins->bytes);
    return REFIT_OK;
}

refit_status rft_slab_pins_take(rft_slab_pins *pins, refit_pin wanted, rft_cancel_token *token,
                                refit_error *error)
{
    rft_touch touch;
    pins->pinned = 0;
    RFT_TRY(rft_touch_open(&touch, pins->base, pins->bytes, pins->touch_threads, pins->near, token,
                           error));
    refit_status status = take_slabs(pins, &touch, wanted, token, error);
    rft_touch_close(&touch);
    if (status != REFIT_OK) rft_slab_pins_drop(pins);
    return status;
}
