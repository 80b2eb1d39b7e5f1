/*
 * One version on its way in.
 *
 * Through the socket frames are fetched (fetch.h), and when all are in and SEAL is known, the
 * reassembly verifies; or, where several publishers sent them, their reassemblies together do.
 *
 * The image may be one that the other workers of the host map: its name goes out with the first
 * PULL, and each frame that is placed there is marked. Such a worker waits for SEAL, which the
 * publisher sends when the one that fills the image has verified it; if that one is lost first, it
 * copies the marked frames and fetches the rest.
 *
 * In memory of the publisher (its shared memory, or its memory of the GPU that both are on) the
 * version does not travel: it is mapped, and SEAL's digests are checked against each other, or,
 * with broadcast.verify: always, against the bytes, part by part. Or it lies there piece by piece
 * (piece_queue.h), and its user compares what it copies.
 *
 * Knows nothing of connections, commits or users.
 */
#include "subscriber/receive.h"

#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "wire/frame.h"

/* Some ten milliseconds of digesting, which no heartbeat notices. */
#define VERIFY_BYTES (UINT64_C(64) << 20)
/* A call waits for the GPU this long at most: work that is not done by then is asked for in the
 * next one. */
#define GPU_WAIT_MS 20u

/*
 * ---- Verifying an image in a GPU's memory (broadcast.verify: always)
 *
 * The device digests the tensors, one part after the other, on a stream of the worker's own; the
 * sums are compared with SEAL when all are there. A part that is under way when its version is
 * dropped still reads its bytes: until it has ended, the mapping counts as used, and the next
 * version waits.
 */

/* Begins with an image of the device. */
static void gpu_verify_begin(rft_gpu_verify *verify, refit_device *device,
                             const refit_config *config, rft_image *image)
{
    verify->device = device;
    verify->config = config;
    verify->image = image;
    verify->started = false;
    verify->done = false;
}

/* Drops the version if the GPU reads there no more. */
static void let_go(rft_gpu_verify *verify, uint32_t timeout_ms)
{
    if (rft_copy_queue_is_busy(verify->copy_queue)) {
        (void)rft_copy_queue_wait(verify->copy_queue, timeout_ms, NULL);
    }
    if (rft_copy_queue_is_busy(verify->copy_queue)) return;
    rft_gpu_version_release(verify->version);
    verify->version = NULL;
}

static refit_status start(rft_gpu_verify *verify, refit_error *error)
{
    if (verify->copy_queue == NULL) {
        RFT_TRY(rft_copy_queue_open(verify->device, verify->config, &verify->copy_queue, error));
    }
    uint32_t tensors = verify->image->catalog->manifest->count;
    rft_free(verify->sums);
    verify->sums = rft_calloc(tensors, sizeof *verify->sums);
    RFT_REFUSE_IF(verify->sums == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory for the digests of %u tensors", tensors);
    verify->tensor = 0;
    verify->offset = 0;
    verify->asked = 0;
    verify->version = rft_gpu_version_acquire(verify->image->gpu);
    verify->started = true;
    return REFIT_OK;
}

/* Asks for the next part, unless all are there. */
static refit_status ask(rft_gpu_verify *verify, uint64_t most, refit_error *error)
{
    const rft_manifest *manifest = verify->image->catalog->manifest;
    for (; verify->tensor < manifest->count; verify->tensor++, verify->offset = 0) {
        const rft_manifest_tensor *tensor = &manifest->tensors[verify->tensor];
        if (tensor->alias_of != REFIT_NO_ALIAS || verify->offset == tensor->bytes) continue;
        uint64_t left = tensor->bytes - verify->offset;
        verify->asked = left <= most ? left : most - most % sizeof(uint64_t);
        return rft_copy_queue_digest(
            verify->copy_queue, rft_image_tensor(verify->image, verify->tensor) + verify->offset,
            verify->asked, verify->offset, error);
    }
    return REFIT_OK;
}

/* The requested digest is there, or not yet. */
static refit_status answer(rft_gpu_verify *verify, refit_error *error)
{
    refit_status status = rft_copy_queue_wait(verify->copy_queue, GPU_WAIT_MS, error);
    if (status != REFIT_OK) return status == REFIT_ERR_TIMEOUT ? REFIT_OK : status;
    verify->sums[verify->tensor] += rft_copy_queue_sum(verify->copy_queue);
    verify->offset += verify->asked;
    verify->asked = 0;
    return REFIT_OK;
}

/* Goes on by `most` bytes (8 or more) at most. REFIT_ERR_CORRUPT, as rft_seal_check;
 * REFIT_ERR_HOST_MEMORY, and the device's errors. */
static refit_status gpu_verify_part(rft_gpu_verify *verify, const rft_message *seal, uint64_t most,
                                    refit_error *error)
{
    if (!verify->started) {
        let_go(verify, GPU_WAIT_MS);
        return verify->version == NULL ? start(verify, error) : REFIT_OK;
    }
    if (verify->asked == 0) RFT_TRY(ask(verify, most, error));
    if (verify->asked > 0) return answer(verify, error);
    RFT_TRY(rft_seal_check(verify->image->catalog->manifest, NULL, verify->sums, seal, error));
    verify->done = true;
    return REFIT_OK;
}

/* The image is wanted no longer. Memory that the device still reads stays mapped until it has
 * ended. */
static void gpu_verify_end(rft_gpu_verify *verify)
{
    verify->image = NULL;
    let_go(verify, 0);
}

/* Waits for that, at most `timeout_ms`. Memory that the device still reads then is never unmapped.
 */
static void gpu_verify_close(rft_gpu_verify *verify, uint32_t timeout_ms)
{
    let_go(verify, timeout_ms);
    if (!rft_copy_queue_close(verify->copy_queue, 0)) {
        rft_log(REFIT_LOG_ERROR, "a GPU does not end its work: it stays open");
    }
    rft_free(verify->sums);
    *verify = (rft_gpu_verify){0};
}

/* ---- Opening and dropping */

void rft_receive_init(rft_receive *receive, const refit_config *config, rft_images *images,
                      rft_shard_links *links, rft_send_queue *send_queue, const rft_limits *limits)
{
    *receive = (rft_receive){
        .config = config,
        .images = images,
        .links = links,
        .verify_bytes = VERIFY_BYTES,
    };
    rft_fetch_init(&receive->fetch, config, limits, send_queue, &receive->counts);
}

void rft_receive_close(rft_receive *receive)
{
    rft_receive_drop(receive);
    gpu_verify_close(&receive->gpu, receive->config->broadcast_linger_ms);
    rft_fetch_close(&receive->fetch);
    rft_bytes_close(&receive->tensor_digests);
    rft_bytes_close(&receive->areas);
    rft_bytes_close(&receive->places);
    rft_bytes_close(&receive->have);
}

void rft_receive_drop(rft_receive *receive)
{
    gpu_verify_end(&receive->gpu);
    rft_fetch_end(&receive->fetch);
    rft_shard_links_end(receive->links);
    rft_joint_sums_close(&receive->joint);
    rft_image_drop_use(receive->image, RFT_IMAGE_STAGED);
    receive->image = NULL;
    rft_image_drop_use(receive->left, RFT_IMAGE_STAGED);
    receive->left = NULL;
    rft_want_release(receive->want);
    receive->want = NULL;
    rft_catalog_release(receive->catalog);
    receive->catalog = NULL;
    receive->phase = RFT_RECEIVE_NONE;
    receive->version = 0;
}

rft_image *rft_receive_take(rft_receive *receive)
{
    rft_image *image = receive->image;
    receive->image = NULL;
    rft_receive_drop(receive);
    return image;
}

/* ---- The offer */

rft_image *rft_receive_leave(rft_receive *receive, uint64_t version)
{
    rft_image *image = receive->image;
    bool ours = receive->phase == RFT_RECEIVE_FETCHING && receive->path == REFIT_PATH_NEIGHBOR &&
                receive->version == version;
    if (!ours) return NULL;
    receive->image = NULL;
    return image;
}

/* Of another manifest, or of less than is to come, it is of no use. */
void rft_receive_resume(rft_receive *receive, rft_image *left)
{
    bool fits = left != NULL && receive->path == REFIT_PATH_SOCKET &&
                left->catalog->manifest == receive->catalog->manifest &&
                rft_want_includes(left->filled, receive->want);
    if (!fits) rft_image_drop_use(left, RFT_IMAGE_STAGED);
    receive->left = fits ? left : NULL;
    receive->left_next = 0;
}

/* Notes where the version lies, or that it comes in frames. */
static void place(rft_receive *receive, const rft_message *offer)
{
    rft_view name = offer->as.offer.segment;
    receive->path = offer->as.offer.lent       ? REFIT_PATH_CUDA_IPC
                    : offer->as.offer.neighbor ? REFIT_PATH_NEIGHBOR
                    : name.count > 0           ? REFIT_PATH_SHM
                                               : REFIT_PATH_SOCKET;
    receive->ranks = receive->path == REFIT_PATH_SOCKET ? offer->as.offer.ranks : 0;
    receive->share = offer->as.offer.share && receive->path == REFIT_PATH_SOCKET;
    rft_view_print(name, receive->segment, sizeof receive->segment);
    receive->segment_offset = offer->as.offer.segment_offset;
    receive->lock[0] = '\0';
    receive->unmappable = false;
}

/* Whether frames come, here or to another worker. */
static bool is_framed(const rft_message *offer)
{
    return !offer->as.offer.lent &&
           (offer->as.offer.segment.count == 0 || offer->as.offer.neighbor);
}

static refit_status check_offer(const rft_receive *receive, const rft_message *offer,
                                const rft_manifest *manifest, refit_error *error)
{
    RFT_REFUSE_IF(offer->as.offer.frames != manifest->frame_count ||
                      offer->as.offer.bytes != manifest->payload_bytes,
                  error, REFIT_ERR_PROTOCOL,
                  "version %llu is offered as %llu bytes in %u frames, but its manifest makes %llu "
                  "in %u",
                  (unsigned long long)offer->as.offer.version,
                  (unsigned long long)offer->as.offer.bytes, offer->as.offer.frames,
                  (unsigned long long)manifest->payload_bytes, manifest->frame_count);
    RFT_REFUSE_IF(offer->as.offer.segment.count >= RFT_SEGMENT_NAME_BYTES, error,
                  REFIT_ERR_PROTOCOL, "a segment's name of more than %u bytes is offered",
                  RFT_SEGMENT_NAME_BYTES - 1);
    bool linked = is_framed(offer) && !offer->as.offer.neighbor && offer->as.offer.ranks > 0;
    return linked ? rft_shard_links_check(receive->links, offer->as.offer.ranks, error) : REFIT_OK;
}

/* The part of the version that is offered. */
static refit_status find_want(const rft_message *offer, rft_catalog *catalog, rft_want *own,
                              rft_want **out, refit_error *error)
{
    *out = NULL;
    if (!is_framed(offer) || offer->as.offer.whole) return REFIT_OK;
    if (offer->as.offer.want.count > 0)
        return rft_want_open(catalog->manifest, offer->as.offer.want, out, error);
    *out = rft_want_acquire(own);
    return REFIT_OK;
}

refit_status rft_receive_offer(rft_receive *receive, const rft_message *offer, rft_catalog *catalog,
                               rft_want *own, uint32_t window, int64_t now, refit_error *error)
{
    rft_want *want;
    RFT_TRY(check_offer(receive, offer, catalog->manifest, error));
    RFT_TRY(find_want(offer, catalog, own, &want, error));
    rft_receive_drop(receive);
    receive->want = want;
    receive->phase = RFT_RECEIVE_WAITING;
    receive->catalog = rft_catalog_acquire(catalog);
    receive->epoch = offer->as.offer.epoch;
    receive->version = offer->as.offer.version;
    receive->base = offer->as.offer.base;
    place(receive, offer);
    receive->offered_at = now;
    receive->deadline = rft_after_ms(now, offer->as.offer.deadline_ms);
    receive->sealed = false;
    receive->window = window;
    return REFIT_OK;
}

/* ---- In frames */

static refit_status check_base(const rft_receive *receive, const rft_image *held,
                               refit_error *error)
{
    bool fits = receive->base == 0 || (held != NULL && held->id.version == receive->base &&
                                       rft_digest128_equal(&held->catalog->manifest->digest,
                                                           &receive->catalog->manifest->digest) &&
                                       rft_want_equal(held->filled, receive->want));
    RFT_REFUSE_IF(!fits, error, REFIT_ERR_STALE,
                  "version %llu builds on version %llu, whose bytes this worker does not have",
                  (unsigned long long)receive->version, (unsigned long long)receive->base);
    return REFIT_OK;
}

/* From the session's publisher, or from all ranks. */
static refit_status begin_fetch(rft_receive *receive, const unsigned char *base, refit_error *error)
{
    const rft_fetch_plan plan = {
        .catalog = receive->catalog,
        .version = receive->version,
        .want = receive->want,
        .memory = rft_image_writable(receive->image),
        .base = base,
        .window = receive->window,
    };
    return receive->ranks > 0 ? rft_shard_links_begin(receive->links, &plan, error)
                              : rft_fetch_begin(&receive->fetch, &plan, error);
}

/* The frames that the worker before has left, as PULL says them. Without memory for that they come
 * once more. */
static rft_view list_left(rft_receive *receive)
{
    uint32_t frames = receive->catalog->manifest->frame_count;
    rft_bytes_reset(&receive->have);
    for (uint32_t i = 0; i < frames && receive->left != NULL; i += 8) {
        unsigned char byte = 0;
        for (uint32_t bit = 0; bit < 8 && i + bit < frames; bit++) {
            byte |= (unsigned char)(rft_image_is_marked(receive->left, i + bit) << bit);
        }
        if (rft_bytes_append(&receive->have, &byte, 1, NULL) != REFIT_OK) return (rft_view){0};
    }
    return rft_bytes_view(&receive->have);
}

/* Asks the ranks. The coordinator is told where the frames go, and that this worker has begun, by a
 * PULL for which none come. */
static void pull_from_ranks(rft_receive *receive)
{
    rft_message pull = {.kind = RFT_PULL};
    rft_shard_links_pull(receive->links, receive->base, list_left(receive));
    if (!receive->share) return;
    pull.as.pull.version = receive->version;
    pull.as.pull.credits = 1;
    if (receive->image->tail != NULL)
        pull.as.pull.image = rft_view_text(receive->image->memory.name);
    (void)rft_send_queue_put(receive->fetch.send_queue, NULL, &pull, receive->fetch.limits, NULL);
}

/* Asks for the first frames. Of a shared image it says the name, and what is there already. */
static void first_pull(rft_receive *receive)
{
    if (receive->ranks > 0) {
        pull_from_ranks(receive);
        return;
    }
    if (receive->image->tail == NULL && receive->left == NULL) {
        rft_fetch_pull(&receive->fetch);
        return;
    }
    rft_message pull = {.kind = RFT_PULL};
    pull.as.pull.have = list_left(receive);
    if (receive->image->tail != NULL)
        pull.as.pull.image = rft_view_text(receive->image->memory.name);
    rft_fetch_announce(&receive->fetch, &pull);
}

/* ---- In the publisher's memory */

/* Gets the image in memory of the publisher or of a neighbor; where in a GPU's memory it lies, LEND
 * says. */
static refit_status take_mapped(rft_receive *receive, refit_error *error)
{
    if (receive->path == REFIT_PATH_NEIGHBOR) {
        return rft_images_take_neighbor(receive->images, receive->catalog, receive->want,
                                        receive->epoch, receive->version, receive->segment,
                                        &receive->image, error);
    }
    if (receive->path == REFIT_PATH_CUDA_IPC) {
        return rft_images_take_gpu(receive->images, receive->catalog, &receive->image, error);
    }
    return rft_images_take_shm(receive->images, receive->catalog, receive->segment,
                               receive->segment_offset, &receive->image, error);
}

/* The GPU's memory cannot be mapped here; other reasons are about this version alone. */
static bool is_unmappable(refit_status status)
{
    return status != REFIT_OK && status != REFIT_ERR_NOT_FOUND && status != REFIT_ERR_PROTOCOL &&
           status != REFIT_ERR_BUSY;
}

/* LEND has come, and SEAL. */
static refit_status map_gpu(rft_receive *receive, refit_error *error)
{
    refit_status status =
        rft_image_map_gpu(receive->images, receive->image, receive->lock,
                          rft_bytes_view(&receive->areas), rft_bytes_view(&receive->places), error);
    if (status == REFIT_OK) {
        rft_gpu_version_seal(receive->image->gpu, receive->catalog->manifest,
                             rft_bytes_view(&receive->tensor_digests));
    }
    receive->unmappable = is_unmappable(status);
    return status;
}

/* SEAL, as it came. */
static rft_message seal_of(const rft_receive *receive)
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

/* Whether the digests of SEAL belong together. */
static refit_status check_digests(const rft_receive *receive, refit_error *error)
{
    rft_digest128 expected = rft_version_digest_encoded(receive->catalog->manifest,
                                                        rft_bytes_view(&receive->tensor_digests));
    RFT_REFUSE_IF(!rft_digest128_equal(&expected, &receive->digest), error, REFIT_ERR_CORRUPT,
                  "the digest of version %llu does not follow from its tensors'",
                  (unsigned long long)receive->version);
    return REFIT_OK;
}

/* SEAL is there: the digests are checked here and now, or the bytes are from now on. */
static refit_status check_mapped(rft_receive *receive, refit_error *error)
{
    if (!rft_image_note_seqlock(receive->image)) return refuse_overwritten(receive, error);
    bool partial = receive->path == REFIT_PATH_NEIGHBOR && !rft_image_is_whole(receive->image);
    RFT_REFUSE_IF(partial, error, REFIT_ERR_SECURITY,
                  "the image that another worker of this host received has gaps");
    if (receive->config->broadcast_verify == REFIT_VERIFY_ALWAYS) {
        receive->cursor = (rft_image_cursor){.want = receive->image->filled};
        if (receive->path == REFIT_PATH_CUDA_IPC) {
            gpu_verify_begin(&receive->gpu, receive->images->gpu_memory.device, receive->config,
                             receive->image);
        }
        receive->phase = RFT_RECEIVE_VERIFYING;
        return REFIT_OK;
    }
    RFT_TRY(check_digests(receive, error));
    receive->phase = RFT_RECEIVE_COMPLETE;
    return REFIT_OK;
}

static refit_status check_pieces(rft_receive *receive, refit_error *error)
{
    RFT_TRY(check_digests(receive, error));
    RFT_TRY(rft_piece_queue_seal(receive->image->pieces, rft_bytes_view(&receive->tensor_digests),
                                 error));
    receive->phase = RFT_RECEIVE_COMPLETE;
    return REFIT_OK;
}

/* ---- From several publishers */

/* SEAL and all frames are there. */
static refit_status begin_joint(rft_receive *receive, refit_error *error)
{
    RFT_TRY(rft_joint_sums_open(receive->catalog->manifest, &receive->joint, error));
    receive->joined = 0;
    receive->phase = RFT_RECEIVE_VERIFYING;
    return REFIT_OK;
}

/* The sums of one link, or blocks that several have divided. */
static refit_status verify_joint(rft_receive *receive, refit_error *error)
{
    if (receive->joined < receive->links->count) {
        const rft_shard_link *link = rft_shard_links_find(receive->links, receive->joined++);
        if (rft_shard_link_is_fetching(link))
            rft_joint_sums_add(&receive->joint, link->fetch.reassembly);
        return REFIT_OK;
    }
    if (!rft_joint_sums_digest(&receive->joint, receive->want, receive->image->bytes,
                               receive->verify_bytes))
        return REFIT_OK;
    rft_message seal = seal_of(receive);
    RFT_TRY(rft_seal_check(receive->catalog->manifest, receive->want, receive->joint.sums, &seal,
                           error));
    receive->phase = RFT_RECEIVE_COMPLETE;
    return REFIT_OK;
}

/* ---- Its bytes, in the memory where they are */

static refit_status verify_part(rft_receive *receive, refit_error *error)
{
    if (!rft_image_is_intact(receive->image)) return refuse_overwritten(receive, error);
    rft_message seal = seal_of(receive);
    bool gpu = receive->path == REFIT_PATH_CUDA_IPC;
    if (gpu) {
        RFT_TRY(gpu_verify_part(&receive->gpu, &seal, receive->verify_bytes, error));
    } else {
        RFT_TRY(rft_image_verify_part(receive->catalog->manifest, receive->image->bytes, &seal,
                                      receive->verify_bytes, &receive->cursor, error));
    }
    if (gpu ? receive->gpu.done : receive->cursor.done) receive->phase = RFT_RECEIVE_COMPLETE;
    return REFIT_OK;
}

/* ---- Progress */

/* Verifies once SEAL and all frames are there. */
static refit_status check_complete(rft_receive *receive, refit_error *error)
{
    if (receive->phase != RFT_RECEIVE_FETCHING || !receive->sealed) return REFIT_OK;
    if (receive->image->pieces != NULL) return check_pieces(receive, error);
    bool gpu = receive->path == REFIT_PATH_CUDA_IPC;
    if (gpu && receive->lock[0] == '\0') return REFIT_OK;
    if (gpu) RFT_TRY(map_gpu(receive, error));
    if (receive->path != REFIT_PATH_SOCKET) return check_mapped(receive, error);
    if (receive->ranks > 0)
        return rft_shard_links_are_complete(receive->links) ? begin_joint(receive, error)
                                                            : REFIT_OK;
    if (!rft_reassembly_complete(receive->fetch.reassembly)) return REFIT_OK;
    rft_message seal = seal_of(receive);
    RFT_TRY(rft_reassembly_verify(receive->fetch.reassembly, &seal, error));
    receive->phase = RFT_RECEIVE_COMPLETE;
    return REFIT_OK;
}

/* Memory for the frames: such that neighbors can map it, if they are to and the system has it. */
static refit_status take_own(rft_receive *receive, refit_error *error)
{
    refit_error why;
    rft_images *images = receive->images;
    if (!receive->share)
        return rft_images_take_private(images, receive->catalog, receive->want, &receive->image,
                                       error);
    refit_status status =
        rft_images_take_shared(images, receive->catalog, receive->want, receive->epoch,
                               receive->version, &receive->image, &why);
    if (status == REFIT_OK) return REFIT_OK;
    RFT_REFUSE_IF(status != REFIT_ERR_SYSTEM, error, status, "%s", why.text);
    rft_log(REFIT_LOG_WARNING, "version %llu is not shared with other workers of this host: %s",
            (unsigned long long)receive->version, why.text);
    return rft_images_take_private(images, receive->catalog, receive->want, &receive->image, error);
}

static refit_status take_image(rft_receive *receive, const rft_image *held, refit_error *error)
{
    if (receive->path != REFIT_PATH_SOCKET) return take_mapped(receive, error);
    RFT_TRY(check_base(receive, held, error));
    RFT_TRY(take_own(receive, error));
    return begin_fetch(receive, receive->base == 0 ? NULL : held->bytes, error);
}

refit_status rft_receive_start(rft_receive *receive, const rft_image *held, refit_error *error)
{
    if (receive->phase == RFT_RECEIVE_FETCHING && receive->path == REFIT_PATH_CUDA_IPC)
        return check_complete(receive, error);
    if (receive->phase != RFT_RECEIVE_WAITING) return REFIT_OK;
    RFT_TRY(take_image(receive, held, error));
    receive->phase = receive->left == NULL ? RFT_RECEIVE_FETCHING : RFT_RECEIVE_RESUMING;
    if (receive->path == REFIT_PATH_SOCKET) first_pull(receive);
    return check_complete(receive, error);
}

/* Takes a frame from the image of the worker before. */
static void take_placed(rft_receive *receive, uint32_t sequence)
{
    const unsigned char *from = receive->left->bytes;
    if (receive->ranks > 0)
        rft_shard_links_take_placed(receive->links, sequence, from);
    else
        rft_reassembly_take_placed(receive->fetch.reassembly, sequence, from);
    rft_image_mark(receive->image, sequence);
}

/* Copies frames that the worker before has marked, while others come. Its digests are checked with
 * all others, at SEAL. */
static refit_status resume_part(rft_receive *receive, refit_error *error)
{
    const rft_manifest *manifest = receive->catalog->manifest;
    uint64_t bytes = 0;
    for (; receive->left_next < manifest->frame_count; receive->left_next++) {
        uint32_t sequence = receive->left_next;
        if (bytes >= receive->verify_bytes) return REFIT_OK;
        if (!rft_image_is_marked(receive->left, sequence)) continue;
        take_placed(receive, sequence);
        bytes += manifest->frames[sequence].bytes;
    }
    rft_image_drop_use(receive->left, RFT_IMAGE_STAGED);
    receive->left = NULL;
    receive->phase = RFT_RECEIVE_FETCHING;
    return check_complete(receive, error);
}

bool rft_receive_is_busy(const rft_receive *receive)
{
    return receive->phase == RFT_RECEIVE_VERIFYING || receive->phase == RFT_RECEIVE_RESUMING;
}

refit_status rft_receive_work(rft_receive *receive, refit_error *error)
{
    if (receive->phase == RFT_RECEIVE_RESUMING) return resume_part(receive, error);
    if (receive->phase != RFT_RECEIVE_VERIFYING) return REFIT_OK;
    return receive->ranks > 0 ? verify_joint(receive, error) : verify_part(receive, error);
}

static bool takes_frames(const rft_receive *receive)
{
    bool open = receive->phase == RFT_RECEIVE_FETCHING || receive->phase == RFT_RECEIVE_RESUMING;
    return open && receive->path == REFIT_PATH_SOCKET;
}

refit_status rft_receive_frame(rft_receive *receive, const rft_message *frame, rft_view payload,
                               refit_error *error)
{
    bool ours =
        takes_frames(receive) && receive->ranks == 0 && frame->as.frame.version == receive->version;
    if (!ours) return REFIT_OK;
    RFT_TRY(rft_fetch_frame(&receive->fetch, frame, payload, error));
    if (rft_reassembly_has(receive->fetch.reassembly, frame->as.frame.sequence))
        rft_image_mark(receive->image, frame->as.frame.sequence);
    return check_complete(receive, error);
}

/* A frame that the link has taken may be the last part of it, and of the version. */
static refit_status follow_frame(rft_receive *receive, uint32_t sequence, refit_error *error)
{
    if (!takes_frames(receive) || receive->ranks == 0) return REFIT_OK;
    bool marks = receive->image->tail != NULL && sequence < receive->catalog->manifest->frame_count;
    if (marks && rft_shard_links_have(receive->links, sequence))
        rft_image_mark(receive->image, sequence);
    return check_complete(receive, error);
}

refit_status rft_receive_link_message(rft_receive *receive, rft_shard_link *link,
                                      const rft_message *message, rft_view payload, int64_t now,
                                      refit_error *error)
{
    RFT_TRY(rft_shard_link_message(link, message, payload, now, error));
    if (message->kind == RFT_FRAME) return follow_frame(receive, message->as.frame.sequence, error);
    bool beats = message->kind == RFT_BEAT && link->asked && rft_shard_link_lacks(link) &&
                 receive->phase == RFT_RECEIVE_FETCHING && receive->sealed;
    return beats ? rft_fetch_beat(&link->fetch, link->heartbeat_ms, now, error) : REFIT_OK;
}

static bool is_expected(const rft_receive *receive, uint64_t version)
{
    bool open = receive->phase >= RFT_RECEIVE_WAITING && receive->phase <= RFT_RECEIVE_FETCHING;
    return open && version == receive->version;
}

refit_status rft_receive_lend(rft_receive *receive, const rft_message *lend, refit_error *error)
{
    if (!is_expected(receive, lend->as.lend.version) || receive->path != REFIT_PATH_CUDA_IPC)
        return REFIT_OK;
    RFT_REFUSE_IF(lend->as.lend.lock.count >= sizeof receive->lock, error, REFIT_ERR_PROTOCOL,
                  "a lock's name of more than %u bytes is lent", RFT_SEGMENT_NAME_BYTES - 1);
    rft_bytes_reset(&receive->areas);
    rft_bytes_reset(&receive->places);
    RFT_TRY(rft_bytes_append(&receive->areas, lend->as.lend.areas.data, lend->as.lend.areas.count,
                             error));
    RFT_TRY(rft_bytes_append(&receive->places, lend->as.lend.places.data,
                             lend->as.lend.places.count, error));
    rft_view_print(lend->as.lend.lock, receive->lock, sizeof receive->lock);
    return check_complete(receive, error);
}

refit_status rft_receive_pieces(rft_receive *receive, const rft_message *pieces, int wake_fd,
                                refit_error *error)
{
    bool ours = is_expected(receive, pieces->as.pieces.version) &&
                receive->path == REFIT_PATH_CUDA_IPC && !receive->sealed;
    if (!ours) return REFIT_OK;
    if (receive->phase == RFT_RECEIVE_WAITING) { /* the user has the update before, perhaps */
        RFT_TRY(take_mapped(receive, error));
        receive->phase = RFT_RECEIVE_FETCHING;
    }
    rft_image *image = receive->image;
    if (image->pieces == NULL)
        RFT_TRY(rft_piece_queue_open(receive->catalog->manifest, wake_fd, &image->pieces, error));
    refit_status status =
        rft_piece_queue_put(image->pieces, &receive->images->gpu_memory, pieces, error);
    receive->unmappable = is_unmappable(status);
    return status;
}

refit_status rft_receive_seal(rft_receive *receive, const rft_message *seal, refit_error *error)
{
    if (!is_expected(receive, seal->as.seal.version)) return REFIT_OK;
    const rft_manifest *manifest = receive->catalog->manifest;
    RFT_REFUSE_IF(
        seal->as.seal.tensors.count != (size_t)manifest->originals * 8, error, REFIT_ERR_PROTOCOL,
        "the seal of version %llu has %zu bytes of digests for %u tensors",
        (unsigned long long)receive->version, seal->as.seal.tensors.count, manifest->originals);
    rft_bytes_reset(&receive->tensor_digests);
    RFT_TRY(rft_bytes_append(&receive->tensor_digests, seal->as.seal.tensors.data,
                             seal->as.seal.tensors.count, error));
    receive->digest = seal->as.seal.digest;
    receive->sealed = true;
    return check_complete(receive, error);
}

refit_status rft_receive_beat(rft_receive *receive, uint32_t heartbeat_ms, int64_t now,
                              refit_error *error)
{
    bool fetching = receive->phase == RFT_RECEIVE_FETCHING && receive->path == REFIT_PATH_SOCKET &&
                    receive->ranks == 0;
    if (!fetching || !receive->sealed) return REFIT_OK;
    return rft_fetch_beat(&receive->fetch, heartbeat_ms, now, error);
}
