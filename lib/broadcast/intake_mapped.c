/*
 * A version that does not travel: it lies in the publisher's shared memory, or in its memory of the
 * GPU that both are on. It is mapped, and SEAL's digests are checked against each other, or, with
 * broadcast.verify: always, against the bytes, part by part.
 */
#include "broadcast/intake.h"
#include "wire/share.h"

void rft_intake_place(rft_intake *intake, const rft_message *offer)
{
    rft_view share = offer->as.offer.share;
    bool gpu = share.count > 0;
    rft_view name = gpu ? offer->as.offer.mark : offer->as.offer.segment;
    intake->path = gpu ? REFIT_PATH_CUDA_IPC : name.count > 0 ? REFIT_PATH_SHM : REFIT_PATH_SOCKET;
    rft_view_print(name, intake->segment, sizeof intake->segment);
    intake->segment_offset = offer->as.offer.segment_offset;
    if (gpu) (void)rft_share_read(share, &intake->share, NULL); /* its length is the decoder's */
}

refit_status rft_intake_map(rft_intake *intake, refit_error *error)
{
    if (intake->path == REFIT_PATH_CUDA_IPC) {
        return rft_staging_take_gpu(intake->staging, intake->catalog, &intake->share,
                                    intake->segment, &intake->image, error);
    }
    return rft_staging_take_mapped(intake->staging, intake->catalog, intake->segment,
                                   intake->segment_offset, &intake->image, error);
}

bool rft_intake_is_unmappable(const rft_intake *intake, const refit_error *why)
{
    bool mapping = intake->phase == RFT_INTAKE_WAITING && intake->path == REFIT_PATH_CUDA_IPC;
    return mapping && why->status != REFIT_ERR_NOT_FOUND && why->status != REFIT_ERR_PROTOCOL;
}

rft_message rft_intake_seal_of(const rft_intake *intake)
{
    rft_message seal = {.kind = RFT_SEAL};
    seal.as.seal.version = intake->version;
    seal.as.seal.digest = intake->digest;
    seal.as.seal.tensors = (rft_view){intake->tensor_digests.data, intake->tensor_digests.count};
    return seal;
}

static refit_status refuse_overwritten(const rft_intake *intake, refit_error *error)
{
    return rft_fail(error, REFIT_ERR_STALE, "the publisher is writing over version %llu",
                    (unsigned long long)intake->version);
}

refit_status rft_intake_settle_mapped(rft_intake *intake, refit_error *error)
{
    if (!rft_image_note_mark(intake->image)) return refuse_overwritten(intake, error);
    if (intake->config->broadcast_verify == REFIT_VERIFY_ALWAYS) {
        intake->cursor = (rft_image_cursor){0};
        if (intake->path == REFIT_PATH_CUDA_IPC) {
            rft_gpu_verify_begin(&intake->gpu, intake->staging->device, intake->config,
                                 intake->image);
        }
        intake->phase = RFT_INTAKE_VERIFYING;
        return REFIT_OK;
    }
    rft_message seal = rft_intake_seal_of(intake);
    rft_digest128 expected =
        rft_version_digest_encoded(intake->catalog->manifest, seal.as.seal.tensors);
    RFT_REFUSE_IF(!rft_digest128_equal(&expected, &intake->digest), error, REFIT_ERR_CORRUPT,
                  "the digest of version %llu does not follow from its tensors'",
                  (unsigned long long)intake->version);
    intake->phase = RFT_INTAKE_COMPLETE;
    return REFIT_OK;
}

refit_status rft_intake_verify(rft_intake *intake, refit_error *error)
{
    if (intake->phase != RFT_INTAKE_VERIFYING) return REFIT_OK;
    if (!rft_image_is_intact(intake->image)) return refuse_overwritten(intake, error);
    rft_message seal = rft_intake_seal_of(intake);
    bool gpu = intake->path == REFIT_PATH_CUDA_IPC;
    if (gpu) {
        RFT_TRY(rft_gpu_verify_part(&intake->gpu, &seal, intake->verify_bytes, error));
    } else {
        RFT_TRY(rft_image_verify_part(intake->catalog->manifest, intake->image->bytes, &seal,
                                      intake->verify_bytes, &intake->cursor, error));
    }
    if (gpu ? intake->gpu.done : intake->cursor.done) intake->phase = RFT_INTAKE_COMPLETE;
    return REFIT_OK;
}
