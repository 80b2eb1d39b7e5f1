/*
 * All copies are put on one stream, and waited for at once. With digests there are as many waits as
 * the list has batches of RFT_DIGEST_BATCH_MOST, which is what a device holds; where it takes no
 * digest of a copy on its way, the copy is read once more.
 */
#include "subscriber/gpu_copy.h"

#include "base/clock.h"
#include "base/log.h"
#include "kernels/digest.h"

#define PIN_AGAIN_NS (INT64_C(30) * 1000 * 1000 * 1000)

static const rft_manifest_tensor *tensor_of(const rft_image *image, const refit_target *target)
{
    return &image->catalog->manifest->tensors[target->tensor];
}

static refit_status check_target(refit_device *device, const rft_image *image,
                                 const refit_target *target, refit_error *error)
{
    RFT_REFUSE_IF(target->tensor >= image->catalog->manifest->count, error, REFIT_ERR_INVALID,
                  "there is no tensor %u: the version has %u", target->tensor,
                  image->catalog->manifest->count);
    const rft_manifest_tensor *tensor = tensor_of(image, target);
    RFT_REFUSE_IF(target->bytes != tensor->bytes, error, REFIT_ERR_INVALID,
                  "'%.160s' has %llu bytes, and the memory for it %llu", tensor->name,
                  (unsigned long long)tensor->bytes, (unsigned long long)target->bytes);
    if (tensor->bytes == 0) return REFIT_OK;
    return rft_device_memory_check(device, target->memory, target->bytes, NULL, error);
}

/* A digest on the way writes on a boundary of 8 bytes. */
static refit_status issue_one(rft_copy_queue *queue, uint32_t index, const rft_image *image,
                              const refit_target *target, refit_error *error)
{
    const unsigned char *from = rft_image_tensor(image, target->tensor);
    if (target->bytes == 0) return REFIT_OK;
    if ((uintptr_t)target->memory % 8 == 0) {
        return rft_copy_queue_batch_add(queue, index, target->memory, from, target->bytes, error);
    }
    RFT_TRY(rft_copy_queue_copy_within(queue, target->memory, from, target->bytes, error));
    return rft_copy_queue_batch_add(queue, index, NULL, target->memory, target->bytes, error);
}

static refit_status issue(rft_copy_queue *queue, const rft_image *image, const refit_target *list,
                          uint32_t count, refit_error *error)
{
    RFT_TRY(rft_copy_queue_batch_begin(queue, error));
    for (uint32_t i = 0; i < count; i++)
        RFT_TRY(issue_one(queue, i, image, &list[i], error));
    return rft_copy_queue_batch_end(queue, count, error);
}

static refit_status compare(rft_copy_queue *queue, const rft_image *image, const refit_target *list,
                            uint32_t count, refit_error *error)
{
    const uint64_t *sums = rft_copy_queue_batch_sums(queue);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t digest = rft_digest_finish(list[i].bytes == 0 ? 0 : sums[i], list[i].bytes);
        RFT_REFUSE_IF(digest != image->gpu->digests[list[i].tensor], error, REFIT_ERR_CORRUPT,
                      "'%.160s' was changed by the trainer while it was read: the engine holds no "
                      "version whole, load the next one",
                      tensor_of(image, &list[i])->name);
    }
    return REFIT_OK;
}

/* A queue that is idle; `digests`: and takes them. */
static refit_status make_ready(rft_gpu_copy *copy, refit_device *device, const refit_config *config,
                               bool digests, refit_error *error)
{
    if (copy->copy_queue == NULL)
        RFT_TRY(rft_copy_queue_open(device, config, &copy->copy_queue, error));
    RFT_REFUSE_IF(!rft_gpu_copy_await(copy, config->broadcast_stage_timeout_ms), error,
                  REFIT_ERR_TIMEOUT, "copies of an earlier call are still under way");
    if (!digests) return REFIT_OK;
    RFT_REFUSE_IF(!rft_copy_queue_digests(copy->copy_queue), error, REFIT_ERR_UNSUPPORTED,
                  "this device takes no digests: copy from the tensors of the update");
    return rft_copy_queue_batch_open(copy->copy_queue, error);
}

static refit_status copy_within(rft_gpu_copy *copy, const refit_config *config,
                                const rft_image *image, const refit_target *list, uint32_t count,
                                refit_error *error)
{
    for (uint32_t at = 0, some; at < count; at += some) {
        refit_error later;
        some = count - at < RFT_DIGEST_BATCH_MOST ? count - at : RFT_DIGEST_BATCH_MOST;
        refit_status issued = issue(copy->copy_queue, image, list + at, some, error);
        refit_status status =
            rft_copy_queue_wait(copy->copy_queue, config->broadcast_stage_timeout_ms,
                                issued == REFIT_OK ? error : &later);
        RFT_TRY(rft_keep_first(issued, status));
        RFT_TRY(compare(copy->copy_queue, image, list + at, some, error));
    }
    return REFIT_OK;
}

/* ---- From the host */

const rft_pinning *rft_gpu_copy_pin(rft_gpu_copy *copy, refit_device *device,
                                    const refit_config *config, rft_image *image)
{
    refit_error why;
    bool wanted = rft_image_pinning(image, device) == NULL &&
                  rft_device_get_caps(device).needs_pinned && rft_now() >= copy->pin_at;
    if (wanted && rft_image_pin(image, device, config->offload_slab_bytes, &why) != REFIT_OK) {
        copy->pin_at = rft_now() + PIN_AGAIN_NS;
        rft_log(REFIT_LOG_WARNING,
                "a version's host memory cannot be page-locked, copies to the GPU are slow: %s",
                why.text);
    }
    return rft_image_pinning(image, device);
}

static refit_status copy_up(rft_gpu_copy *copy, refit_device *device, const refit_config *config,
                            rft_image *image, const refit_target *list, uint32_t count,
                            refit_error *error)
{
    refit_error later;
    refit_status issued = REFIT_OK;
    const rft_pinning *pinning = rft_gpu_copy_pin(copy, device, config, image);
    for (uint32_t i = 0; i < count && issued == REFIT_OK; i++)
        issued = rft_copy_queue_copy(copy->copy_queue, list[i].memory,
                                     rft_image_tensor(image, list[i].tensor), list[i].bytes,
                                     pinning, error);
    refit_status status = rft_copy_queue_wait(copy->copy_queue, config->broadcast_stage_timeout_ms,
                                              issued == REFIT_OK ? error : &later);
    return rft_keep_first(issued, status);
}

refit_status rft_gpu_copy_run(rft_gpu_copy *copy, refit_device *device, const refit_config *config,
                              rft_image *image, const refit_target *list, uint32_t count,
                              refit_stream_ref after, bool *begun, refit_error *error)
{
    *begun = false;
    for (uint32_t i = 0; i < count; i++)
        RFT_TRY(check_target(device, image, &list[i], error));
    if (count == 0) return REFIT_OK;
    RFT_TRY(make_ready(copy, device, config, image->gpu != NULL, error));
    RFT_TRY(rft_copy_queue_follow(copy->copy_queue, after, error));
    *begun = true;
    return image->gpu != NULL ? copy_within(copy, config, image, list, count, error)
                              : copy_up(copy, device, config, image, list, count, error);
}

bool rft_gpu_copy_await(const rft_gpu_copy *copy, uint32_t timeout_ms)
{
    if (!rft_copy_queue_is_busy(copy->copy_queue)) return true;
    (void)rft_copy_queue_wait(copy->copy_queue, timeout_ms, NULL);
    return !rft_copy_queue_is_busy(copy->copy_queue);
}

bool rft_gpu_copy_close(rft_gpu_copy *copy, int64_t deadline)
{
    bool closed = rft_copy_queue_close(copy->copy_queue, deadline);
    copy->copy_queue = NULL;
    return closed;
}
