/*
 * An update into destinations, step by step: apply_plan.c checks that it fits, apply_write.c writes
 * what differs, apply_verify.c looks again where that is wanted, and here what fails is taken back.
 */
#include "subscriber/in_place.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "subscriber/apply_plan.h"
#include "subscriber/apply_verify.h"
#include "subscriber/apply_write.h"

/* ---- Binding */

refit_status rft_in_place_bind(rft_in_place *place, const refit_destination *list, uint32_t count,
                               const refit_config *config, refit_error *error)
{
    uint32_t *tensors = rft_calloc((size_t)count + 1, sizeof *tensors);
    RFT_REFUSE_IF(tensors == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for %u destinations",
                  count);
    refit_status status = rft_destinations_open(&place->to, list, count, config, error);
    if (status == REFIT_OK) {
        place->tensors = tensors;
        atomic_store(&place->figures.bound, count);
    } else {
        rft_free(tensors);
    }
    return status;
}

refit_status rft_in_place_unbind(rft_in_place *place, refit_error *error)
{
    if (rft_in_place_is_torn(place)) RFT_TRY(rft_in_place_undo(place, error));
    rft_in_place_close(place);
    return REFIT_OK;
}

void rft_in_place_close(rft_in_place *place)
{
    rft_rollback_reset(&place->old);
    rft_destinations_close(&place->to);
    rft_free(place->tensors);
    place->tensors = NULL;
    place->applied = place->failed = false;
    atomic_store(&place->figures.bound, 0);
}

bool rft_in_place_is_bound(const rft_in_place *place)
{
    return place->tensors != NULL;
}

bool rft_in_place_is_torn(const rft_in_place *place)
{
    return !place->applied && !rft_rollback_is_empty(&place->old);
}

bool rft_in_place_has_failed(const rft_in_place *place)
{
    return place->failed;
}

/* ---- The verbs */

static refit_status check_mark(const rft_in_place_source *source, refit_error *error)
{
    RFT_REFUSE_IF(!rft_image_is_intact(source->image), error, REFIT_ERR_STALE,
                  "the trainer had turned this worker out and overwrites version %llu",
                  (unsigned long long)source->image->held.version);
    return REFIT_OK;
}

/* Both read the image as well: what is found wrong there may be the next version. */
static refit_status plan_all(rft_in_place *place, const rft_in_place_source *source, bool strict,
                             rft_apply_plan *plan, refit_error *error)
{
    refit_status status = rft_apply_plan_make(place, source, strict, plan, error);
    if (status == REFIT_ERR_INVALID) RFT_TRY(check_mark(source, error));
    return status;
}

static refit_status verify(const rft_in_place *place, const rft_in_place_source *source,
                           refit_error *error)
{
    refit_status status = rft_apply_verify(place, source, error);
    if (status == REFIT_ERR_CORRUPT) RFT_TRY(check_mark(source, error));
    return status;
}

static refit_status write_all(rft_in_place *place, const rft_in_place_source *source,
                              const rft_apply_plan *plan, refit_error *error)
{
    /* What an apply before this one left half put is no old bytes: first it is there. */
    if (!rft_rollback_is_empty(&place->old)) RFT_TRY(rft_destinations_repair(&place->to, error));
    RFT_TRY(rft_rollback_prepare(&place->old, plan->blocks, plan->bytes, error));
    for (uint32_t i = 0; i < place->to.count; i++) {
        if (place->tensors[i] != RFT_NO_TENSOR) RFT_TRY(rft_apply_write(place, i, source, error));
    }
    RFT_TRY(rft_destinations_flush(&place->to, error));
    RFT_TRY(check_mark(source, error));
    return source->verify ? verify(place, source, error) : REFIT_OK;
}

/* What failed is told; that it could not be taken back is told as well. */
static void take_back(rft_in_place *place, refit_error *error)
{
    refit_error why;
    if (rft_in_place_undo(place, &why) == REFIT_OK) return;
    rft_log(REFIT_LOG_ERROR, "a version was written in part, and could not be taken back: %s",
            why.text);
    if (error == NULL) return;
    refit_error first = *error;
    (void)rft_fail(error, (refit_status)first.status, "%s; and it could not be taken back: %s",
                   first.text, why.text);
}

refit_status rft_in_place_apply(rft_in_place *place, const rft_in_place_source *source,
                                uint32_t *left, refit_error *error)
{
    rft_apply_plan plan;
    int64_t began = rft_now();
    place->changed = 0;
    refit_status status = plan_all(place, source, left == NULL, &plan, error);
    if (status == REFIT_OK) status = write_all(place, source, &plan, error);
    place->applied = status == REFIT_OK;
    place->failed = !place->applied;
    if (status != REFIT_OK) {
        take_back(place, error);
        return status;
    }
    atomic_fetch_add(&place->figures.bytes, place->changed);
    atomic_store(&place->figures.last_ns, rft_now() - began);
    if (left != NULL) *left = plan.left;
    return REFIT_OK;
}

void rft_in_place_forget(rft_in_place *place)
{
    place->failed = false;
}

void rft_in_place_keep(rft_in_place *place)
{
    if (place->applied) rft_rollback_reset(&place->old);
    place->applied = false;
}

static refit_status undo_one(rft_in_place *place, const rft_note *note, refit_error *error)
{
    const rft_destination *one = &place->to.list[note->place.destination];
    uint64_t bytes = rft_note_bytes(note), offset = note->place.offset;
    unsigned char *window;
    RFT_TRY(rft_destinations_fetch(&place->to, one, offset, bytes, &window, error));
    rft_note_undo(note, window);
    return rft_destinations_put(one, offset, window, bytes, error);
}

refit_status rft_in_place_undo(rft_in_place *place, refit_error *error)
{
    place->applied = false;
    if (rft_rollback_is_empty(&place->old)) {
        rft_rollback_reset(&place->old);
        return REFIT_OK;
    }
    RFT_TRY(rft_destinations_repair(&place->to, error));
    rft_note note = {.next = place->old.last};
    while (note.next != UINT64_MAX) {
        rft_rollback_read(&place->old, note.next, &note);
        RFT_TRY(undo_one(place, &note, error));
    }
    RFT_TRY(rft_destinations_flush(&place->to, error));
    rft_rollback_reset(&place->old);
    atomic_fetch_add(&place->figures.taken_back, 1);
    return REFIT_OK;
}

void rft_in_place_report(const rft_in_place *place, refit_stats *stats)
{
    const rft_in_place_figures *figures = &place->figures;
    stats->receive_bound += atomic_load(&figures->bound);
    stats->receive_applied_bytes_total += atomic_load(&figures->bytes);
    stats->receive_rollbacks += atomic_load(&figures->taken_back);
    stats->receive_apply_seconds_last = (double)atomic_load(&figures->last_ns) * 1e-9;
}
