/*
 * A version that does not travel: it lies in the publisher's shared memory, or in its memory of the
 * GPU that both are on. It is mapped, and SEAL's digests are checked against each other, or, with
 * broadcast.verify: always, against the bytes, part by part.
 */
#include "subscriber/receive.h"
#include "wire/share.h"

void rft_receive_place(rft_receive *receive, const rft_message *offer)
{
    rft_view share = offer->as.offer.share;
    bool gpu = share.count > 0;
    rft_view name = gpu ? offer->as.offer.mark : offer->as.offer.segment;
    receive->path = gpu ? REFIT_PATH_CUDA_IPC : name.count > 0 ? REFIT_PATH_SHM : REFIT_PATH_SOCKET;
    rft_view_print(name, receive->segment, sizeof receive->segment);
    receive->segment_offset = offer->as.offer.segment_offset;
    if (gpu) (void)rft_share_read(share, &receive->share, NULL); /* its length is the decoder's */
}

refit_status rft_receive_map(rft_receive *receive, refit_error *error)
{
    if (receive->path == REFIT_PATH_CUDA_IPC) {
        return rft_images_take_gpu(receive->images, receive->catalog, &receive->share,
                                   receive->segment, &receive->image, error);
    }
    return rft_images_take_mapped(receive->images, receive->catalog, receive->segment,
                                  receive->segment_offset, &receive->image, error);
}

bool rft_receive_is_unmappable(const rft_receive *receive, const refit_error *why)
{
    bool mapping = receive->phase == RFT_RECEIVE_WAITING && receive->path == REFIT_PATH_CUDA_IPC;
    return mapping && why->status != REFIT_ERR_NOT_FOUND && why->status != REFIT_ERR_PROTOCOL;
}

rft_message rft_receive_seal_of(const rft_receive *receive)
{
    rft_message seal = {.kind = RFT_SEAL};
    seal.as.seal.version = receive->version;
    seal.as.seal.digest = receive->digest;
    seal.as.seal.tensors = (rft_view){receive->tensor_digests.data, receive->tensor_digests.count};
    return seal;
}

static refit_status refuse_overwritten(const rft_receive *receive, refit_error *error)
{
    return rft_fail(error, REFIT_ERR_STALE, "the publisher is writing over version %llu",
                    (unsigned long long)receive->version);
}

refit_status rft_receive_settle_mapped(rft_receive *receive, refit_error *error)
{
    if (!rft_image_note_mark(receive->image)) return refuse_overwritten(receive, error);
    if (receive->config->broadcast_verify == REFIT_VERIFY_ALWAYS) {
        receive->cursor = (rft_image_cursor){0};
        if (receive->path == REFIT_PATH_CUDA_IPC) {
            rft_gpu_verify_begin(&receive->gpu, receive->images->device, receive->config,
                                 receive->image);
        }
        receive->phase = RFT_RECEIVE_VERIFYING;
        return REFIT_OK;
    }
    rft_message seal = rft_receive_seal_of(receive);
    rft_digest128 expected =
        rft_version_digest_encoded(receive->catalog->manifest, seal.as.seal.tensors);
    RFT_REFUSE_IF(!rft_digest128_equal(&expected, &receive->digest), error, REFIT_ERR_CORRUPT,
                  "the digest of version %llu does not follow from its tensors'",
                  (unsigned long long)receive->version);
    receive->phase = RFT_RECEIVE_COMPLETE;
    return REFIT_OK;
}

refit_status rft_receive_verify(rft_receive *receive, refit_error *error)
{
    if (receive->phase != RFT_RECEIVE_VERIFYING) return REFIT_OK;
    if (!rft_image_is_intact(receive->image)) return refuse_overwritten(receive, error);
    rft_message seal = rft_receive_seal_of(receive);
    bool gpu = receive->path == REFIT_PATH_CUDA_IPC;
    if (gpu) {
        RFT_TRY(rft_gpu_verify_part(&receive->gpu, &seal, receive->verify_bytes, error));
    } else {
        RFT_TRY(rft_image_verify_part(receive->catalog->manifest, receive->image->bytes, &seal,
                                      receive->verify_bytes, &receive->cursor, error));
    }
    if (gpu ? receive->gpu.done : receive->cursor.done) receive->phase = RFT_RECEIVE_COMPLETE;
    return REFIT_OK;
}
