/*
 * All copies are put on one stream, and waited for at once. With digests there are as many waits as
 * the list has batches of RFT_DIGEST_BATCH_MOST. Whole tensors are copied with their digests, at
 * the end of their batch; one whose memory is not where that can be done is copied before, and the
 * copy is read once more.
 *
 * A part is read as few rows as it can be: dimensions that go on from one another on both sides are
 * one. What is left is one copy, or rows that lie apart, as often as outer dimensions say. A digest
 * is of a whole tensor, and parts need not be all of it; so the tensor is read once more, in the
 * order of the stream after its parts. What was changed before a part was copied is found by this,
 * since it is still changed then.
 */
#include "subscriber/gpu_copy.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/log.h"
#include "kernels/digest.h"

#define PIN_AGAIN_NS (INT64_C(30) * 1000 * 1000 * 1000)

static const rft_manifest_tensor *tensor_of(const rft_image *image, const refit_target *target)
{
    return &image->catalog->manifest->tensors[target->tensor];
}

/* ---- Parts */

/* A box with as few dimensions as it has: at least one. */
typedef struct part {
    uint32_t rank;
    uint64_t shape[REFIT_BOX_RANK_MAX];
    uint64_t from[REFIT_BOX_RANK_MAX]; /* strides in elements, as in the box */
    uint64_t to[REFIT_BOX_RANK_MAX];
    uint64_t from_width; /* bytes of an element */
    uint64_t to_width;
} part;

static bool goes_on(uint64_t outer, uint64_t inner, uint64_t length)
{
    uint64_t whole;
    return rft_mul_u64(inner, length, &whole) && whole == outer;
}

/* False: it has more elements than can be, or none. */
static bool part_add(part *it, uint64_t length, uint64_t from, uint64_t to)
{
    uint32_t last = it->rank - 1;
    if (length <= 1) return length == 1;
    if (it->rank > 0 && goes_on(it->from[last], from, length) &&
        goes_on(it->to[last], to, length)) {
        it->from[last] = from;
        it->to[last] = to;
        return rft_mul_u64(it->shape[last], length, &it->shape[last]);
    }
    it->shape[it->rank] = length;
    it->from[it->rank] = from;
    it->to[it->rank++] = to;
    return true;
}

/* How many elements lie from the first to the last on one side; false: some meet, or it is beyond
 * the last address. */
static bool part_reach(const part *it, const uint64_t *strides, uint64_t *reach)
{
    *reach = 1;
    for (uint32_t i = it->rank; i-- > 0;) {
        uint64_t before;
        if (strides[i] < *reach || !rft_mul_u64(it->shape[i] - 1, strides[i], &before) ||
            !rft_add_u64(before, *reach, reach)) {
            return false;
        }
    }
    return true;
}

static bool part_merge(part *it, const refit_box *box)
{
    it->rank = 0;
    for (uint32_t i = 0; i < box->rank; i++)
        if (!part_add(it, box->shape[i], box->from_strides[i], box->to_strides[i])) return false;
    if (it->rank == 0) { /* one element */
        it->rank = 1;
        it->shape[0] = it->from[0] = it->to[0] = 1;
    }
    return true;
}

/* Within the tensor, and as long as the target says. */
static refit_status part_check(const part *it, const rft_manifest_tensor *tensor,
                               const refit_target *target, refit_error *error)
{
    uint64_t from, to, end, bytes;
    RFT_REFUSE_IF(it->from[it->rank - 1] != 1 || it->to[it->rank - 1] != 1, error,
                  REFIT_ERR_UNSUPPORTED,
                  "a part of '%.160s' has no rows: its innermost elements lie apart", tensor->name);
    RFT_REFUSE_IF(!part_reach(it, it->from, &from) || !part_reach(it, it->to, &to), error,
                  REFIT_ERR_INVALID, "elements of a part of '%.160s' meet, or lie too far apart",
                  tensor->name);
    RFT_REFUSE_IF(!rft_add_u64(target->box->offset, from, &end) ||
                      end > tensor->bytes / it->from_width,
                  error, REFIT_ERR_INVALID, "a part of '%.160s' is not within it", tensor->name);
    RFT_REFUSE_IF(!rft_mul_u64(to, it->to_width, &bytes) || bytes != target->bytes, error,
                  REFIT_ERR_INVALID,
                  "a part of '%.160s' takes another number of bytes than the %llu of its memory",
                  tensor->name, (unsigned long long)target->bytes);
    return REFIT_OK;
}

static bool part_casts(const part *it)
{
    return it->from_width != it->to_width;
}

static refit_status part_read(part *it, const rft_image *image, const refit_target *target,
                              refit_error *error)
{
    const rft_manifest_tensor *tensor = tensor_of(image, target);
    const refit_box *box = target->box;
    uint32_t from_bits = refit_dtype_bits(tensor->dtype), to_bits = refit_dtype_bits(box->dtype);
    RFT_REFUSE_IF(box->rank == 0 || box->rank > REFIT_BOX_RANK_MAX || to_bits == 0, error,
                  REFIT_ERR_INVALID, "a part of '%.160s' has %u dimensions of type %d",
                  tensor->name, box->rank, (int)box->dtype);
    RFT_REFUSE_IF(from_bits % 8 != 0, error, REFIT_ERR_UNSUPPORTED,
                  "'%.160s' has elements of %u bits, and no parts", tensor->name, from_bits);
    bool same = box->dtype == tensor->dtype;
    bool casts = tensor->dtype == REFIT_F32 && box->dtype == REFIT_BF16 && image->gpu != NULL;
    *it = (part){.from_width = from_bits / 8, .to_width = to_bits / 8};
    RFT_REFUSE_IF(!part_merge(it, box), error, REFIT_ERR_INVALID,
                  "a part of '%.160s' has a wrong shape", tensor->name);
    RFT_TRY(part_check(it, tensor, target, error));
    RFT_REFUSE_IF(!same && (!casts || it->rank > 1), error, REFIT_ERR_UNSUPPORTED,
                  "a part of '%.160s' cannot be converted from %s to %s here", tensor->name,
                  refit_dtype_name(tensor->dtype), refit_dtype_name(box->dtype));
    return REFIT_OK;
}

/* The two inner dimensions, from and to these elements on. */
static refit_status issue_rows(rft_copy_queue *queue, const part *it, void *to, const void *from,
                               bool from_host, const rft_pinning *pinning, refit_error *error)
{
    uint32_t inner = it->rank - 1;
    uint64_t bytes = it->shape[inner] * it->from_width;
    if (inner == 0 && !from_host) return rft_copy_queue_copy_within(queue, to, from, bytes, error);
    if (inner == 0) return rft_copy_queue_copy_up(queue, to, from, bytes, pinning, error);
    const rft_rows rows = {.to = to,
                           .from = from,
                           .from_host = from_host,
                           .bytes = bytes,
                           .count = it->shape[inner - 1],
                           .to_step = it->to[inner - 1] * it->to_width,
                           .from_step = it->from[inner - 1] * it->from_width};
    return rft_copy_queue_copy_rows(queue, &rows, pinning, error);
}

static refit_status issue_part(rft_copy_queue *queue, const rft_image *image,
                               const refit_target *target, const rft_pinning *pinning,
                               refit_error *error)
{
    part it;
    uint64_t outer = 1;
    RFT_TRY(part_read(&it, image, target, error));
    const unsigned char *begin =
        rft_image_tensor(image, target->tensor) + target->box->offset * it.from_width;
    if (part_casts(&it)) {
        return rft_copy_queue_cast(queue, target->memory, (const void *)begin, it.shape[0], error);
    }
    for (uint32_t i = 0; i + 2 < it.rank; i++)
        outer *= it.shape[i];
    for (uint64_t at = 0; at < outer; at++) {
        const unsigned char *from = begin;
        unsigned char *to = target->memory;
        uint64_t left = at;
        for (uint32_t i = it.rank < 2 ? 0 : it.rank - 2; i-- > 0; left /= it.shape[i]) {
            from += left % it.shape[i] * it.from[i] * it.from_width;
            to += left % it.shape[i] * it.to[i] * it.to_width;
        }
        RFT_TRY(issue_rows(queue, &it, to, from, image->gpu == NULL, pinning, error));
    }
    return REFIT_OK;
}

/* ---- Within the GPU */

/* Whether the worker takes all that the target has; a part was checked. */
static bool is_selected(const rft_image *image, const refit_target *target)
{
    const rft_want *want = image->catalog->want;
    const refit_box *box = target->box;
    rft_want_part has = rft_want_tensor(want, target->tensor);
    if (box == NULL || has != RFT_WANT_SOME) return has == RFT_WANT_ALL;
    uint64_t width = refit_dtype_bits(tensor_of(image, target)->dtype) / 8, rows = 1;
    uint32_t inner = box->rank - 1;
    for (uint32_t i = 0; i < inner; i++)
        rows *= box->shape[i];
    for (uint64_t row = 0; row < rows; row++) {
        uint64_t at = box->offset, left = row;
        for (uint32_t i = inner; i-- > 0;) {
            at += left % box->shape[i] * box->from_strides[i];
            left /= box->shape[i];
        }
        if (!rft_want_covers(want, target->tensor, at * width, box->shape[inner] * width))
            return false;
    }
    return true;
}

static refit_status check_target(refit_device *device, const rft_image *image,
                                 const refit_target *target, rft_memory_range *last,
                                 refit_error *error)
{
    part ignored;
    RFT_REFUSE_IF(target->tensor >= image->catalog->manifest->count, error, REFIT_ERR_INVALID,
                  "there is no tensor %u: the version has %u", target->tensor,
                  image->catalog->manifest->count);
    const rft_manifest_tensor *tensor = tensor_of(image, target);
    RFT_REFUSE_IF(target->box == NULL && target->bytes != tensor->bytes, error, REFIT_ERR_INVALID,
                  "'%.160s' has %llu bytes, and the memory for it %llu", tensor->name,
                  (unsigned long long)tensor->bytes, (unsigned long long)target->bytes);
    if (target->box != NULL) RFT_TRY(part_read(&ignored, image, target, error));
    RFT_REFUSE_IF(!is_selected(image, target), error, REFIT_ERR_NOT_FOUND,
                  "'%.160s' was not selected, or not this part of it", tensor->name);
    if (target->bytes == 0) return REFIT_OK;
    return rft_device_memory_check_next(device, target->memory, target->bytes, last, error);
}

static refit_status check_targets(refit_device *device, const rft_image *image,
                                  const refit_target *list, uint32_t count, refit_error *error)
{
    rft_memory_range last = {0};
    for (uint32_t i = 0; i < count; i++)
        RFT_TRY(check_target(device, image, &list[i], &last, error));
    return REFIT_OK;
}

/* Whether a digest is taken with entry `i`: of parts that stand together with the last one. */
static bool is_digested(const refit_target *list, uint32_t count, uint32_t i)
{
    bool last = i + 1 == count || list[i + 1].box == NULL || list[i + 1].tensor != list[i].tensor;
    return list[i].box == NULL || last;
}

/* How many entries need no more digests than a batch has. */
static uint32_t batch_of(const refit_target *list, uint32_t count)
{
    uint32_t digests = 0, i = 0;
    for (; i < count; i++) {
        if (!is_digested(list, count, i)) continue;
        if (digests == RFT_DIGEST_BATCH_MOST) break;
        digests++;
    }
    return i;
}

/* A digest on the way writes on a boundary of 8 bytes. */
static refit_status copy_digested(rft_copy_queue *queue, unsigned char *to,
                                  const unsigned char *from, uint64_t bytes, uint64_t offset,
                                  refit_error *error)
{
    bool even = (uintptr_t)to % 8 == 0;
    if (!even) RFT_TRY(rft_copy_queue_copy_within(queue, to, from, bytes, error));
    rft_copy_queue_batch_add(queue, even ? to : NULL, even ? from : to, bytes, offset);
    return REFIT_OK;
}

/* The first `some` of the list. */
static refit_status issue(rft_copy_queue *queue, const rft_image *image, const refit_target *list,
                          uint32_t count, uint32_t some, refit_error *error)
{
    RFT_TRY(rft_copy_queue_batch_begin(queue, error));
    for (uint32_t i = 0; i < some; i++) {
        const unsigned char *from = rft_image_tensor(image, list[i].tensor);
        uint64_t bytes = tensor_of(image, &list[i])->bytes;
        if (list[i].box == NULL) {
            RFT_TRY(copy_digested(queue, list[i].memory, from, bytes, 0, error));
            continue;
        }
        RFT_TRY(issue_part(queue, image, &list[i], NULL, error));
        if (is_digested(list, count, i)) rft_copy_queue_batch_add(queue, NULL, from, bytes, 0);
    }
    return rft_copy_queue_batch_end(queue, error);
}

static refit_status compare(rft_copy_queue *queue, const rft_image *image, const refit_target *list,
                            uint32_t count, uint32_t some, refit_error *error)
{
    uint32_t digests = 0;
    for (uint32_t i = 0; i < some; i++) {
        if (!is_digested(list, count, i)) continue;
        uint64_t sum = rft_copy_queue_batch_sum(queue, digests++);
        uint64_t digest = rft_digest_finish(sum, tensor_of(image, &list[i])->bytes);
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
        some = batch_of(list + at, count - at);
        refit_status issued = issue(copy->copy_queue, image, list + at, count - at, some, error);
        refit_status status =
            rft_copy_queue_wait(copy->copy_queue, config->broadcast_stage_timeout_ms,
                                issued == REFIT_OK ? error : &later);
        RFT_TRY(rft_keep_first(issued, status));
        RFT_TRY(compare(copy->copy_queue, image, list + at, count - at, some, error));
    }
    return REFIT_OK;
}

/* ---- From the host */

const rft_pinning *rft_gpu_copy_pin(rft_gpu_copy *copy, refit_device *device,
                                    const refit_config *config, rft_image *image)
{
    refit_error why;
    /* The memory of a shared image serves one version: to lock all of it costs more than it saves.
     */
    bool wanted = rft_image_pinning(image, device) == NULL && image->tail == NULL &&
                  rft_device_get_caps(device).needs_pinned && rft_now() >= copy->pin_at;
    if (wanted && rft_image_pin(image, device, config->offload_slab_bytes, &why) != REFIT_OK) {
        copy->pin_at = rft_now() + PIN_AGAIN_NS;
        rft_log(REFIT_LOG_WARNING,
                "a version's host memory cannot be page-locked, so that it is copied to the GPU "
                "through memory that is, or slowly: %s",
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
    if (pinning == NULL) rft_copy_queue_open_staging(copy->copy_queue);
    for (uint32_t i = 0; i < count && issued == REFIT_OK; i++)
        issued = list[i].box != NULL
                     ? issue_part(copy->copy_queue, image, &list[i], pinning, error)
                     : rft_copy_queue_copy_up(copy->copy_queue, list[i].memory,
                                              rft_image_tensor(image, list[i].tensor),
                                              list[i].bytes, pinning, error);
    refit_status status = rft_copy_queue_wait(copy->copy_queue, config->broadcast_stage_timeout_ms,
                                              issued == REFIT_OK ? error : &later);
    return rft_keep_first(issued, status);
}

refit_status rft_gpu_copy_run(rft_gpu_copy *copy, refit_device *device, const refit_config *config,
                              rft_image *image, const refit_target *list, uint32_t count,
                              refit_stream_ref after, bool *begun, refit_error *error)
{
    *begun = false;
    RFT_TRY(check_targets(device, image, list, count, error));
    if (count == 0) return REFIT_OK;
    RFT_TRY(make_ready(copy, device, config, image->gpu != NULL, error));
    RFT_TRY(rft_copy_queue_follow(copy->copy_queue, after, error));
    *begun = true;
    return image->gpu != NULL ? copy_within(copy, config, image, list, count, error)
                              : copy_up(copy, device, config, image, list, count, error);
}

/*
 * ---- Piece by piece
 *
 * The sums of a tensor's pieces make its digest; they are kept with the queue of pieces until all
 * have come.
 */

/* For each tensor its first target + 1, and for each target the next one of its tensor + 1. */
typedef struct target_index {
    uint32_t *first; /* owned, as the next one */
    uint32_t *next;
} target_index;

static void index_close(target_index *index)
{
    rft_free(index->first);
    rft_free(index->next);
}

static refit_status index_open(target_index *index, const rft_manifest *manifest,
                               const refit_target *list, uint32_t count, refit_error *error)
{
    index->first = rft_calloc((size_t)manifest->count + 1, sizeof *index->first);
    index->next = rft_calloc((size_t)count + 1, sizeof *index->next);
    RFT_REFUSE_IF(index->first == NULL || index->next == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to follow %u targets", count);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t alias = manifest->tensors[list[i].tensor].alias_of;
        uint32_t tensor = alias == REFIT_NO_ALIAS ? list[i].tensor : alias;
        index->next[i] = index->first[tensor];
        index->first[tensor] = i + 1;
    }
    return REFIT_OK;
}

/* Copies a piece to each target of its tensor, and digests it. */
static refit_status issue_piece(rft_copy_queue *queue, const refit_piece *piece,
                                const target_index *index, const refit_target *list,
                                refit_error *error)
{
    uint32_t target = index == NULL ? 0 : index->first[piece->tensor];
    unsigned char *first = target == 0 ? NULL : (unsigned char *)list[target - 1].memory;
    for (uint32_t i = target == 0 ? 0 : index->next[target - 1]; i != 0; i = index->next[i - 1])
        RFT_TRY(rft_copy_queue_copy_within(queue,
                                           (unsigned char *)list[i - 1].memory + piece->offset,
                                           piece->memory, piece->bytes, error));
    if (first != NULL)
        return copy_digested(queue, first + piece->offset, piece->memory, piece->bytes,
                             piece->offset, error);
    rft_copy_queue_batch_add(queue, NULL, piece->memory, piece->bytes, piece->offset);
    return REFIT_OK;
}

static refit_status issue_pieces(rft_copy_queue *queue, const refit_piece *pieces, uint32_t count,
                                 const target_index *index, const refit_target *list,
                                 refit_error *error)
{
    RFT_TRY(rft_copy_queue_batch_begin(queue, error));
    for (uint32_t i = 0; i < count; i++)
        RFT_TRY(issue_piece(queue, &pieces[i], index, list, error));
    return rft_copy_queue_batch_end(queue, error);
}

/* Copies them where there is an index of targets, and adds their sums to those of their tensors. */
static refit_status run_pieces(rft_gpu_copy *copy, const refit_config *config,
                               rft_piece_queue *from, const rft_pieces *pieces,
                               const target_index *index, const refit_target *list,
                               refit_error *error)
{
    for (uint32_t at = 0, some; at < pieces->count; at += some) {
        refit_error later;
        some =
            pieces->count - at < RFT_DIGEST_BATCH_MOST ? pieces->count - at : RFT_DIGEST_BATCH_MOST;
        refit_status issued =
            issue_pieces(copy->copy_queue, pieces->list + at, some, index, list, error);
        refit_status status =
            rft_copy_queue_wait(copy->copy_queue, config->broadcast_stage_timeout_ms,
                                issued == REFIT_OK ? error : &later);
        RFT_TRY(rft_keep_first(issued, status));
        for (uint32_t i = 0; i < some; i++)
            from->sums[pieces->list[at + i].tensor] +=
                rft_copy_queue_batch_sum(copy->copy_queue, i);
    }
    return REFIT_OK;
}

/* All pieces have come. */
static refit_status compare_tensors(rft_piece_queue *from, refit_error *error)
{
    const rft_manifest *manifest = from->manifest;
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        RFT_REFUSE_IF(rft_digest_finish(from->sums[i], tensor->bytes) != from->digests[i], error,
                      REFIT_ERR_CORRUPT,
                      "'%.160s' was changed by the trainer while it was read: the engine holds no "
                      "version whole, load the next one",
                      tensor->name);
    }
    from->compared = true;
    return REFIT_OK;
}

refit_status rft_gpu_copy_verify(rft_gpu_copy *copy, refit_device *device,
                                 const refit_config *config, rft_image *image,
                                 const rft_pieces *pieces, refit_error *error)
{
    if (pieces == NULL) return compare_tensors(image->pieces, error);
    RFT_TRY(make_ready(copy, device, config, true, error));
    return run_pieces(copy, config, image->pieces, pieces, NULL, NULL, error);
}

static refit_status copy_all(rft_gpu_copy *copy, const refit_config *config, rft_piece_queue *from,
                             const target_index *index, const refit_target *list, bool *begun,
                             refit_error *error)
{
    for (;;) {
        const rft_pieces *pieces;
        int64_t deadline = rft_deadline(config->broadcast_stage_timeout_ms);
        RFT_TRY(rft_piece_queue_next(from, deadline, &pieces, error));
        if (pieces == NULL) return compare_tensors(from, error);
        *begun = true;
        RFT_TRY(run_pieces(copy, config, from, pieces, index, list, error));
    }
}

refit_status rft_gpu_copy_pieces(rft_gpu_copy *copy, refit_device *device,
                                 const refit_config *config, rft_image *image,
                                 const refit_target *list, uint32_t count, refit_stream_ref after,
                                 bool *begun, refit_error *error)
{
    target_index index = {0};
    *begun = false;
    RFT_TRY(check_targets(device, image, list, count, error));
    for (uint32_t i = 0; i < count; i++)
        RFT_REFUSE_IF(list[i].box != NULL, error, REFIT_ERR_UNSUPPORTED,
                      "parts of a version that comes piece by piece are copied by the caller, from "
                      "refit_update_next_pieces");
    RFT_REFUSE_IF(rft_piece_queue_was_read(image->pieces), error, REFIT_ERR_STATE,
                  "some of its pieces were taken already");
    RFT_TRY(make_ready(copy, device, config, true, error));
    RFT_TRY(rft_copy_queue_follow(copy->copy_queue, after, error));
    refit_status status = index_open(&index, image->catalog->manifest, list, count, error);
    if (status == REFIT_OK)
        status = copy_all(copy, config, image->pieces, &index, list, begun, error);
    index_close(&index);
    return status;
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
