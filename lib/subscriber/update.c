/*
 * One received version in the caller's hands: refit_update_*.
 *
 * The image and its manifest stay as they are while the update is open (the session's rule), so
 * they are read here without a lock. Decisions go to the desk as orders. Bytes in the trainer's
 * shared memory are trusted once more at accept: the mark before them tells whether the trainer had
 * turned this worker out and begun to overwrite them. What was written into bound memory
 * (in_place.h) is final with accept, and taken back by every other end.
 */
#include <string.h>

#include "base/log.h"
#include "subscriber/subscriber.h"

static const rft_manifest *manifest_of(const refit_update *update)
{
    return update->image->catalog->manifest;
}

uint64_t refit_update_version(const refit_update *update)
{
    return update == NULL || update->image == NULL ? 0 : update->image->held.version;
}

uint64_t refit_update_epoch(const refit_update *update)
{
    return update == NULL || update->image == NULL ? 0 : update->image->held.epoch;
}

uint32_t refit_update_count(const refit_update *update)
{
    return update == NULL || update->image == NULL ? 0 : manifest_of(update)->count;
}

static refit_status check_open(const refit_update *update, refit_error *error)
{
    RFT_REFUSE_IF(update == NULL, error, REFIT_ERR_INVALID, "there is no update: it is NULL");
    RFT_REFUSE_IF(update->image == NULL, error, REFIT_ERR_STATE, "the update is closed");
    return REFIT_OK;
}

refit_status refit_update_digest(const refit_update *update, unsigned char digest[16],
                                 refit_error *error)
{
    RFT_TRY(check_open(update, error));
    RFT_REFUSE_IF(digest == NULL, error, REFIT_ERR_INVALID, "refit_update_digest needs `digest`");
    memcpy(digest, update->image->held.digest.bytes, 16);
    return REFIT_OK;
}

refit_status refit_update_tensor(const refit_update *update, uint32_t index, refit_tensor *tensor,
                                 const void **bytes, refit_error *error)
{
    RFT_TRY(check_open(update, error));
    const rft_manifest *manifest = manifest_of(update);
    RFT_REFUSE_IF(index >= manifest->count, error, REFIT_ERR_NOT_FOUND,
                  "there is no tensor %u: the version has %u", index, manifest->count);
    RFT_REFUSE_IF(tensor != NULL && tensor->size < sizeof *tensor, error, REFIT_ERR_INVALID,
                  "tensor.size is %zu: set it to sizeof(refit_tensor), %zu", tensor->size,
                  sizeof *tensor);
    if (tensor != NULL) rft_manifest_describe(manifest, index, tensor);
    if (bytes != NULL) *bytes = update->image->bytes + manifest->tensors[index].offset;
    return REFIT_OK;
}

refit_device *refit_update_device(const refit_update *update)
{
    bool gpu = update != NULL && update->image != NULL && update->image->gpu != NULL;
    return gpu ? update->subscriber->device : NULL;
}

refit_status refit_update_find(const refit_update *update, const char *name, uint32_t *index,
                               refit_error *error)
{
    RFT_TRY(check_open(update, error));
    RFT_REFUSE_IF(name == NULL || index == NULL, error, REFIT_ERR_INVALID,
                  "refit_update_find needs a name and `index`");
    uint32_t found = rft_manifest_find(manifest_of(update), name);
    RFT_REFUSE_IF(found == UINT32_MAX, error, REFIT_ERR_NOT_FOUND, "there is no tensor '%.160s'",
                  name);
    *index = found;
    return REFIT_OK;
}

refit_status refit_update_keep(refit_update *update, size_t room, void **out, refit_error *error)
{
    RFT_TRY(check_open(update, error));
    RFT_REFUSE_IF(out == NULL, error, REFIT_ERR_INVALID, "refit_update_keep needs `out`");
    rft_image *image = update->image;
    RFT_REFUSE_IF(image->gpu != NULL, error, REFIT_ERR_UNSUPPORTED,
                  "a GPU's memory cannot be kept beyond the update");
    rft_segment *memory = image->mapping != NULL ? &image->mapping->segment : &image->memory;
    return rft_segment_keep(memory, room, out, error);
}

void refit_update_unkeep(void *kept)
{
    rft_segment_unkeep(kept);
}

static void decide(refit_update *update, const rft_order *order)
{
    update->decided = true;
    rft_mailbox_order(&update->subscriber->service.mailbox, order, update->image->held.version);
}

static void decide_refuse(refit_update *update, refit_status code, const char *reason, int kept)
{
    rft_order order = {.kind = RFT_ORDER_REFUSE, .code = code, .kept = kept != 0};
    rft_view_print(rft_view_text(reason), order.reason, sizeof order.reason);
    decide(update, &order);
}

static refit_status check_undecided(const refit_update *update, refit_error *error)
{
    RFT_TRY(check_open(update, error));
    RFT_REFUSE_IF(update->decided, error, REFIT_ERR_STATE,
                  "version %llu was accepted or refused before",
                  (unsigned long long)update->image->held.version);
    return REFIT_OK;
}

refit_status refit_update_apply(refit_update *update, uint32_t *left, refit_error *error)
{
    RFT_TRY(check_undecided(update, error));
    refit_subscriber *subscriber = update->subscriber;
    RFT_REFUSE_IF(!rft_in_place_is_bound(&subscriber->engine), error, REFIT_ERR_STATE,
                  "nothing is bound that version %llu could be applied into: call "
                  "refit_subscriber_bind first",
                  (unsigned long long)update->image->held.version);
    rft_in_place_source source = {
        .image = update->image,
        .device = refit_update_device(update),
        .verify = subscriber->service.config.broadcast_verify == REFIT_VERIFY_ALWAYS,
    };
    return rft_in_place_apply(&subscriber->engine, &source, left, error);
}

/* Destinations that this update was applied into are as they were before. */
static refit_status take_back(refit_update *update, refit_error *error)
{
    refit_error why;
    refit_status status = rft_in_place_undo(&update->subscriber->engine, &why);
    if (status == REFIT_OK) return REFIT_OK;
    rft_log(REFIT_LOG_ERROR, "version %llu could not be taken back: %s",
            (unsigned long long)update->image->held.version, why.text);
    return rft_fail(
        error, status,
        "version %llu could not be taken back, and the destinations hold neither it nor "
        "the one before: %s",
        (unsigned long long)update->image->held.version, why.text);
}

refit_status refit_update_accept(refit_update *update, refit_error *error)
{
    RFT_TRY(check_undecided(update, error));
    RFT_REFUSE_IF(
        rft_in_place_is_torn(&update->subscriber->engine), error, REFIT_ERR_STATE,
        "the destinations hold no version whole, since one could not be taken back: apply "
        "version %llu, or refuse it",
        (unsigned long long)update->image->held.version);
    RFT_REFUSE_IF(rft_in_place_has_failed(&update->subscriber->engine), error, REFIT_ERR_STATE,
                  "version %llu could not be applied: apply it again, or refuse it; if it was "
                  "loaded in another way, call refit_subscriber_unbind first",
                  (unsigned long long)update->image->held.version);
    if (!rft_image_is_intact(update->image)) {
        (void)take_back(update, NULL);
        decide_refuse(update, REFIT_ERR_STALE, "overwritten by the trainer before it was accepted",
                      0);
        return rft_fail(error, REFIT_ERR_STALE,
                        "the trainer had turned this worker out and overwrites version %llu: what "
                        "was read of it may be torn, wait for the next",
                        (unsigned long long)update->image->held.version);
    }
    rft_in_place_keep(&update->subscriber->engine);
    decide(update, &(rft_order){.kind = RFT_ORDER_ACCEPT});
    return REFIT_OK;
}

refit_status refit_update_refuse(refit_update *update, const char *reason, int kept,
                                 refit_error *error)
{
    RFT_TRY(check_undecided(update, error));
    refit_status status = take_back(update, error);
    decide_refuse(update, REFIT_ERR_PEER, reason == NULL ? "" : reason, kept && status == REFIT_OK);
    return status;
}

void refit_update_close(refit_update *update)
{
    if (update == NULL || update->image == NULL) return;
    if (!update->decided) {
        (void)take_back(update, NULL);
        decide_refuse(update, REFIT_ERR_CANCELLED, "closed without a decision", 0);
    }
    rft_order release = {.kind = RFT_ORDER_RELEASE};
    rft_mailbox_order(&update->subscriber->service.mailbox, &release, update->image->held.version);
    rft_in_place_forget(&update->subscriber->engine);
    update->image = NULL;
}
