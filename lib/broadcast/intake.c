/*
 * One version on its way in.
 *
 * Through the socket: the window of credits is kept full, frames go into the assembly (which copies
 * and digests them), and when all are in and SEAL is known, the assembly verifies. What lies in
 * memory of the publisher is in intake_mapped.c. The window bounds the credits granted with PULL
 * (wire/credit.h); as many frames may be asked for again with RESEND, and no more wait at once.
 * Knows nothing of connections, commits or users.
 */
#include "broadcast/intake.h"

#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "wire/credit.h"

/* Missing frames named in one RESEND; what is missing beyond them follows at the next beat. */
#define RESEND_MOST 64u
/* Some ten milliseconds of digesting, which no heartbeat notices. */
#define VERIFY_BYTES (UINT64_C(64) << 20)

void rft_intake_init(rft_intake *intake, const refit_config *config, rft_staging *staging,
                     rft_sender sender)
{
    *intake = (rft_intake){
        .config = config, .staging = staging, .sender = sender, .verify_bytes = VERIFY_BYTES};
}

static void close_assembly(rft_intake *intake)
{
    rft_assembly_close(intake->assembly);
    intake->assembly = NULL;
    rft_free(intake->resends);
    intake->resends = NULL;
    rft_catalog_release(intake->assembly_catalog);
    intake->assembly_catalog = NULL;
}

void rft_intake_close(rft_intake *intake)
{
    rft_intake_drop(intake);
    rft_gpu_verify_close(&intake->gpu, intake->config->broadcast_linger_ms);
    close_assembly(intake);
    rft_bytes_close(&intake->tensor_digests);
}

void rft_intake_drop(rft_intake *intake)
{
    rft_gpu_verify_end(&intake->gpu);
    rft_image_drop_use(intake->image, RFT_IMAGE_STAGED);
    intake->image = NULL;
    rft_catalog_release(intake->catalog);
    intake->catalog = NULL;
    intake->phase = RFT_INTAKE_NONE;
    intake->version = 0;
}

rft_image *rft_intake_take(rft_intake *intake)
{
    rft_image *image = intake->image;
    intake->image = NULL;
    rft_intake_drop(intake);
    return image;
}

static refit_status check_offer(const rft_message *offer, const rft_manifest *manifest,
                                refit_error *error)
{
    RFT_REFUSE_IF(offer->as.offer.frames != manifest->frame_count ||
                      offer->as.offer.bytes != manifest->payload_bytes,
                  error, REFIT_ERR_PROTOCOL,
                  "version %llu is offered as %llu bytes in %u frames, but its manifest makes %llu "
                  "in %u",
                  (unsigned long long)offer->as.offer.version,
                  (unsigned long long)offer->as.offer.bytes, offer->as.offer.frames,
                  (unsigned long long)manifest->payload_bytes, manifest->frame_count);
    RFT_REFUSE_IF(offer->as.offer.segment.count >= RFT_SEGMENT_NAME_BYTES ||
                      offer->as.offer.mark.count >= RFT_SEGMENT_NAME_BYTES,
                  error, REFIT_ERR_PROTOCOL, "a segment's name of more than %u bytes is offered",
                  RFT_SEGMENT_NAME_BYTES - 1);
    return REFIT_OK;
}

refit_status rft_intake_offer(rft_intake *intake, const rft_message *offer, rft_catalog *catalog,
                              uint32_t window, int64_t now, refit_error *error)
{
    RFT_TRY(check_offer(offer, catalog->manifest, error));
    rft_intake_drop(intake);
    intake->phase = RFT_INTAKE_WAITING;
    intake->catalog = rft_catalog_acquire(catalog);
    intake->version = offer->as.offer.version;
    intake->base = offer->as.offer.base;
    rft_intake_place(intake, offer);
    intake->offered_at = now;
    intake->deadline = rft_after_ms(now, offer->as.offer.deadline_ms);
    intake->sealed = false;
    intake->window = window;
    intake->in_flight = 0;
    intake->quiet_since = 0;
    return REFIT_OK;
}

static refit_status check_base(const rft_intake *intake, const rft_image *held, refit_error *error)
{
    bool fits = intake->base == 0 || (held != NULL && held->held.version == intake->base &&
                                      rft_digest128_equal(&held->catalog->manifest->digest,
                                                          &intake->catalog->manifest->digest));
    RFT_REFUSE_IF(!fits, error, REFIT_ERR_STALE,
                  "version %llu builds on version %llu, whose bytes this worker does not have",
                  (unsigned long long)intake->version, (unsigned long long)intake->base);
    return REFIT_OK;
}

/* The assembly belongs to a manifest; versions of one manifest share it. */
static refit_status prepare_assembly(rft_intake *intake, const unsigned char *base,
                                     refit_error *error)
{
    const rft_manifest *manifest = intake->catalog->manifest;
    unsigned char *staging = rft_image_writable(intake->image);
    if (intake->assembly_catalog == intake->catalog) {
        rft_assembly_reset(intake->assembly, staging, base);
        memset(intake->resends, 0, manifest->frame_count * sizeof *intake->resends);
        return REFIT_OK;
    }
    close_assembly(intake);
    intake->resends = rft_calloc((size_t)manifest->frame_count + 1, sizeof *intake->resends);
    RFT_REFUSE_IF(intake->resends == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to follow %u frames", manifest->frame_count);
    RFT_TRY(rft_assembly_open(manifest, staging, base, &intake->assembly, error));
    intake->assembly_catalog = rft_catalog_acquire(intake->catalog);
    return REFIT_OK;
}

/* Tops up the window once half of it is used, so that credits do not cost a message a frame, and
 * grants none that no frame is left for. */
static void pull(rft_intake *intake)
{
    uint32_t left = intake->catalog->manifest->frame_count - rft_assembly_taken(intake->assembly);
    bool last = left <= intake->window;
    int32_t room = (int32_t)(last ? left : intake->window) * RFT_CREDIT - intake->in_flight;
    bool waits = !last && intake->in_flight > (int32_t)intake->window * RFT_CREDIT / 2;
    if (room < RFT_CREDIT || waits) return;
    rft_message message = {.kind = RFT_PULL};
    message.as.pull.version = intake->version;
    message.as.pull.credits = (uint32_t)(room / RFT_CREDIT);
    intake->in_flight += room / RFT_CREDIT * RFT_CREDIT;
    intake->sender.send(intake->sender.user, &message);
}

/* What has arrived no longer counts. One that comes twice counts twice, though it was sent once
 * without a credit: then a frame more may be in flight, never one less. */
static void use_credit(rft_intake *intake, uint32_t sequence, uint64_t payload)
{
    const rft_manifest *manifest = intake->catalog->manifest;
    if (sequence >= manifest->frame_count || intake->in_flight <= 0) return;
    intake->in_flight -= rft_credit_cost(payload, manifest->frames[sequence].bytes);
}

/* Verifies once SEAL and all frames are there. */
static refit_status settle(rft_intake *intake, refit_error *error)
{
    if (intake->phase != RFT_INTAKE_FETCHING || !intake->sealed) return REFIT_OK;
    if (intake->path != REFIT_PATH_SOCKET) return rft_intake_settle_mapped(intake, error);
    if (!rft_assembly_complete(intake->assembly)) return REFIT_OK;
    rft_message seal = rft_intake_seal_of(intake);
    RFT_TRY(rft_assembly_verify(intake->assembly, &seal, error));
    intake->phase = RFT_INTAKE_COMPLETE;
    return REFIT_OK;
}

static refit_status take_image(rft_intake *intake, const rft_image *held, refit_error *error)
{
    if (intake->path != REFIT_PATH_SOCKET) return rft_intake_map(intake, error);
    RFT_TRY(check_base(intake, held, error));
    RFT_TRY(rft_staging_take_owned(intake->staging, intake->catalog, &intake->image, error));
    return prepare_assembly(intake, intake->base == 0 ? NULL : held->bytes, error);
}

refit_status rft_intake_start(rft_intake *intake, const rft_image *held, refit_error *error)
{
    if (intake->phase != RFT_INTAKE_WAITING) return REFIT_OK;
    RFT_TRY(take_image(intake, held, error));
    intake->phase = RFT_INTAKE_FETCHING;
    if (intake->path == REFIT_PATH_SOCKET) pull(intake);
    return settle(intake, error);
}

static refit_status ask_again(rft_intake *intake, const uint32_t *sequences, uint32_t count,
                              refit_error *error)
{
    unsigned char wire[RESEND_MOST * 4];
    for (uint32_t i = 0; i < count; i++) {
        uint16_t *tries = &intake->resends[sequences[i]];
        RFT_REFUSE_IF(
            *tries >= intake->config->broadcast_resend_limit, error, REFIT_ERR_CORRUPT,
            "frame %u of version %llu was damaged or lost %u times; broadcast.resend_limit "
            "allows no more",
            sequences[i], (unsigned long long)intake->version, *tries + 1u);
        ++*tries;
        rft_put_u32(wire + (size_t)i * 4, sequences[i]);
    }
    rft_message message = {.kind = RFT_RESEND};
    message.as.resend.version = intake->version;
    message.as.resend.sequences = (rft_view){wire, (size_t)count * 4};
    intake->sender.send(intake->sender.user, &message);
    return REFIT_OK;
}

refit_status rft_intake_frame(rft_intake *intake, const rft_message *frame, rft_view payload,
                              refit_error *error)
{
    bool ours = intake->phase == RFT_INTAKE_FETCHING && intake->path == REFIT_PATH_SOCKET &&
                frame->as.frame.version == intake->version;
    if (!ours) return REFIT_OK;
    intake->quiet_since = 0;
    intake->bytes_received += payload.count;
    refit_status status = rft_assembly_take(intake->assembly, frame, payload, error);
    if (status == REFIT_ERR_CORRUPT) {
        intake->bad_frames++;
        status = ask_again(intake, &frame->as.frame.sequence, 1, error);
    } else {
        use_credit(intake, frame->as.frame.sequence, payload.count);
    }
    RFT_TRY(status);
    pull(intake);
    return settle(intake, error);
}

refit_status rft_intake_seal(rft_intake *intake, const rft_message *seal, refit_error *error)
{
    bool ours = intake->phase == RFT_INTAKE_WAITING || intake->phase == RFT_INTAKE_FETCHING;
    if (!ours || seal->as.seal.version != intake->version) return REFIT_OK;
    const rft_manifest *manifest = intake->catalog->manifest;
    RFT_REFUSE_IF(
        seal->as.seal.tensors.count != (size_t)manifest->originals * 8, error, REFIT_ERR_PROTOCOL,
        "the seal of version %llu has %zu bytes of digests for %u tensors",
        (unsigned long long)intake->version, seal->as.seal.tensors.count, manifest->originals);
    rft_bytes_reset(&intake->tensor_digests);
    RFT_TRY(rft_bytes_append(&intake->tensor_digests, seal->as.seal.tensors.data,
                             seal->as.seal.tensors.count, error));
    intake->digest = seal->as.seal.digest;
    intake->sealed = true;
    return settle(intake, error);
}

/* Whether beats have come for a heartbeat and a half with no frame and no asking among them: two of
 * them were sent after the first, so late that what was asked for before would have been sent. The
 * clock is this worker's own, because beats that queued up while it did not run are read at once.
 */
static bool is_quiet(rft_intake *intake, uint32_t heartbeat_ms, int64_t now)
{
    if (intake->quiet_since == 0) intake->quiet_since = now;
    return now >= rft_after_ms(intake->quiet_since, heartbeat_ms + heartbeat_ms / 2);
}

refit_status rft_intake_beat(rft_intake *intake, uint32_t heartbeat_ms, int64_t now,
                             refit_error *error)
{
    bool fetching = intake->phase == RFT_INTAKE_FETCHING && intake->path == REFIT_PATH_SOCKET;
    if (!fetching || !intake->sealed || !is_quiet(intake, heartbeat_ms, now)) return REFIT_OK;
    intake->quiet_since = now;
    uint32_t frames = intake->catalog->manifest->frame_count;
    /* Which of the missing frames were sent and lost cannot be known. While some are not sent yet,
     * it is the window that lost ones have used up. */
    uint32_t lost = intake->window;
    uint32_t missing[RESEND_MOST];
    uint32_t count = 0;
    uint32_t next = rft_assembly_missing(intake->assembly, 0, frames);
    while (next != UINT32_MAX && count < lost && count < RESEND_MOST) {
        missing[count++] = next;
        next = rft_assembly_missing(intake->assembly, next + 1, frames);
    }
    return count == 0 ? REFIT_OK : ask_again(intake, missing, count, error);
}
