/*
 * The ring: how a version leaves through a bounded part of the GPU's memory, piece by piece.
 *
 * Tensors that the trainer makes on the way cannot be lent, and there may be more of them than
 * broadcast.gpu_bucket_bytes. Then the version is streamed. What is written of it so far is
 * announced to the workers as it lies there. From then on tensors are copied into buckets, one
 * after the other, a large one in several pieces; a full bucket is announced, and the next one is
 * filled while the workers copy it. A bucket is written again when every worker has said that it
 * has copied what was there.
 *
 *     fill ──full──► announced (PIECES) ──all workers have TAKEN it──► fill again
 *
 * So nothing of the version is kept: a worker that comes later, or comes back, gets the next one,
 * and one that does not take its pieces in time is evicted. Workers on the host read the same
 * version in the store, into which it is copied meanwhile.
 *
 * The caller's thread only.
 */
#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "publisher/publisher.h"

#define BUCKETS      4u
#define BUCKET_LEAST (UINT64_C(1) << 20) /* less is not tried where the GPU is full */

/* ---- Announcing */

static refit_status note_piece(refit_publisher *publisher, uint32_t tensor,
                               const unsigned char place[RFT_PLACE_BYTES], uint64_t offset,
                               uint64_t bytes, refit_error *error)
{
    unsigned char piece[RFT_PIECE_BYTES];
    rft_put_u32(piece, tensor);
    memcpy(piece + 4, place, RFT_PLACE_BYTES);
    rft_put_u64(piece + 4 + RFT_PLACE_BYTES, offset);
    rft_put_u64(piece + 12 + RFT_PLACE_BYTES, bytes);
    return rft_bytes_append(&publisher->ring.pieces, piece, sizeof piece, error);
}

/* Tells the workers where the noted pieces lie. */
static refit_status announce(refit_publisher *publisher, refit_error *error)
{
    rft_ring *ring = &publisher->ring;
    if (ring->pieces.count == 0) return REFIT_OK;
    rft_bytes_reset(&ring->areas);
    RFT_TRY(rft_gpu_store_describe_areas(publisher->gpu, &ring->areas, error));
    const rft_gpu_block *block = rft_gpu_store_writing(publisher->gpu);
    rft_message message = {.kind = RFT_PIECES};
    message.as.pieces.sequence = ++ring->sequence;
    message.as.pieces.lock = rft_view_text(block->share_lock.segment.name);
    message.as.pieces.areas = rft_bytes_view(&ring->areas);
    message.as.pieces.list = rft_bytes_view(&ring->pieces);
    rft_lock(&publisher->lock);
    message.as.pieces.version = publisher->server.transaction.version;
    rft_transaction_send_pieces(&publisher->server, &message);
    rft_unlock(&publisher->lock);
    rft_wake_fd_set(publisher->wake);
    rft_bytes_reset(&ring->pieces);
    return REFIT_OK;
}

/* What is written of the version so far, where it lies. */
static refit_status announce_written(refit_publisher *publisher, refit_error *error)
{
    const rft_store *store = publisher->store;
    for (uint32_t i = 0; i < store->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &store->manifest->tensors[i];
        unsigned char place[RFT_PLACE_BYTES];
        bool there = store->written[i] && tensor->alias_of == REFIT_NO_ALIAS && tensor->bytes > 0;
        if (!there) continue;
        rft_gpu_store_describe_place(publisher->gpu, store->originals[i], place);
        RFT_TRY(note_piece(publisher, i, place, 0, tensor->bytes, error));
    }
    return announce(publisher, error);
}

/* ---- Buckets */

/* Parts of the block's chunks, all of which may hold what is announced by now. */
static void make_buckets(rft_ring *ring, const rft_gpu_block *block, uint64_t bucket_bytes)
{
    ring->bucket_count = ring->current = 0;
    for (uint32_t i = 0; i < block->chunk_count; i++) {
        const rft_gpu_chunk *chunk = &block->chunks[i];
        for (uint64_t at = 0, bytes; at < chunk->bytes; at += bytes) {
            bytes = rft_min_u64(chunk->bytes - at, bucket_bytes);
            bytes -= bytes % RFT_TENSOR_ALIGNMENT;
            if (bytes == 0 || ring->bucket_count == RFT_BUCKETS_MOST) break;
            ring->buckets[ring->bucket_count++] =
                (rft_bucket){chunk->memory + at, bytes, 0, i, at, ring->sequence};
        }
    }
}

/* As much memory as it may have, or as there is. */
static refit_status take_memory(refit_publisher *publisher, refit_error *error)
{
    uint64_t most = publisher->config.broadcast_gpu_bucket_bytes;
    uint64_t taken = rft_gpu_store_block_bytes(publisher->gpu);
    uint64_t room = taken < most ? most - taken : 0;
    uint64_t wanted = rft_min_u64(room, publisher->store->manifest->store_bytes);
    refit_status status = REFIT_OK;
    do {
        wanted -= wanted % RFT_TENSOR_ALIGNMENT;
        status = wanted > 0 ? rft_gpu_store_grow(publisher->gpu, wanted, error) : REFIT_OK;
        if (status == REFIT_ERR_DEVICE_MEMORY) wanted /= 2;
    } while (status == REFIT_ERR_DEVICE_MEMORY && wanted >= BUCKET_LEAST);
    RFT_REFUSE_IF(status == REFIT_OK && taken + wanted < RFT_TENSOR_ALIGNMENT, error,
                  REFIT_ERR_DEVICE_MEMORY, "broadcast.gpu_bucket_bytes is %" PRIu64, most);
    return taken >= RFT_TENSOR_ALIGNMENT ? REFIT_OK : status;
}

/* From here on no further worker is offered the version in the GPU's memory. */
static refit_status mark(refit_publisher *publisher, refit_error *error)
{
    rft_lock(&publisher->lock);
    bool may = rft_transaction_may_stream(&publisher->server);
    if (may) rft_gpu_store_stream(publisher->gpu);
    rft_unlock(&publisher->lock);
    RFT_REFUSE_IF(!may, error, REFIT_ERR_UNSUPPORTED,
                  "a worker takes its versions as a whole alone, since it has bound destinations");
    return REFIT_OK;
}

refit_status rft_publisher_stream(refit_publisher *publisher, refit_error *error)
{
    rft_ring *ring = &publisher->ring;
    RFT_REFUSE_IF(!rft_device_get_caps(publisher->gpu->device).digests, error,
                  REFIT_ERR_UNSUPPORTED, "the GPU takes no digests");
    rft_copy_queue *queue;
    RFT_TRY(rft_publisher_gpu_queue(publisher, &queue, error));
    RFT_TRY(rft_copy_queue_batch_open(queue, error));
    ring->sums = rft_calloc((size_t)publisher->store->manifest->count + 1, sizeof *ring->sums);
    RFT_REFUSE_IF(ring->sums == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to follow the tensors of a version");
    refit_status status = take_memory(publisher, error);
    rft_publisher_compare_written(publisher);
    if (status == REFIT_OK) status = mark(publisher, error);
    if (status != REFIT_OK) {
        rft_publisher_end_streaming(publisher);
        return status;
    }
    ring->on = true;
    ring->broken = announce_written(publisher, error) != REFIT_OK;
    const rft_gpu_block *block = rft_gpu_store_writing(publisher->gpu);
    uint64_t bytes = rft_gpu_store_block_bytes(publisher->gpu);
    make_buckets(ring, block, rft_max_u64(bytes / BUCKETS, RFT_TENSOR_ALIGNMENT));
    return ring->broken ? REFIT_ERR_HOST_MEMORY : REFIT_OK;
}

void rft_publisher_end_streaming(refit_publisher *publisher)
{
    rft_ring *ring = &publisher->ring;
    rft_free(ring->sums);
    rft_bytes_close(&ring->areas);
    rft_bytes_close(&ring->pieces);
    *ring = (rft_ring){0};
}

/* ---- Writing */

/* Copies and digests that are on the stream are done: their tensors are written. */
static refit_status land(refit_publisher *publisher, rft_copy_queue *queue, refit_error *error)
{
    rft_ring *ring = &publisher->ring;
    uint32_t timeout_ms = publisher->config.broadcast_stage_timeout_ms;
    if (ring->batch_count == 0) return REFIT_OK;
    refit_error later;
    refit_status issued = rft_copy_queue_batch_end(queue, error);
    refit_status status =
        rft_copy_queue_wait(queue, timeout_ms, issued == REFIT_OK ? error : &later);
    RFT_TRY(rft_keep_first(issued, status));
    for (uint32_t i = 0; i < ring->batch_count; i++) {
        const rft_ring_piece *piece = &ring->batch[i];
        ring->sums[piece->tensor] += rft_copy_queue_batch_sum(queue, i);
        if (piece->last)
            rft_publisher_note_written(publisher, piece->tensor, ring->sums[piece->tensor]);
    }
    ring->batch_count = 0;
    return REFIT_OK;
}

/* A place in the batch. */
static refit_status make_place(refit_publisher *publisher, rft_copy_queue *queue,
                               refit_error *error)
{
    rft_ring *ring = &publisher->ring;
    if (ring->batch_count == RFT_DIGEST_BATCH_MOST) RFT_TRY(land(publisher, queue, error));
    if (ring->batch_count > 0) return REFIT_OK;
    rft_publisher_hold(publisher, queue); /* a wait has let go of it */
    return rft_copy_queue_batch_begin(queue, error);
}

/* And a bucket with room. */
static refit_status make_room(refit_publisher *publisher, rft_copy_queue *queue, rft_bucket **out,
                              refit_error *error)
{
    rft_ring *ring = &publisher->ring;
    rft_bucket *bucket = &ring->buckets[ring->current];
    if (bucket->used == bucket->bytes) {
        RFT_TRY(land(publisher, queue, error));
        RFT_TRY(announce(publisher, error));
        bucket->sequence = ring->sequence;
        bucket->used = 0;
        ring->current = (ring->current + 1) % ring->bucket_count;
        bucket = &ring->buckets[ring->current];
    }
    if (bucket->sequence > 0) {
        RFT_TRY(rft_publisher_await_taken(publisher, bucket->sequence, error));
        bucket->sequence = 0;
    }
    *out = bucket;
    return make_place(publisher, queue, error);
}

/* One tensor on its way. */
typedef struct source {
    uint32_t tensor;
    const unsigned char *memory;
    uint64_t bytes;
    bool on_host;
    unsigned char *image; /* its place in the store, which gets it as well; NULL: none */
    const rft_pinning *pinning;
    bool written; /* the store has it already */
} source;

/* Where it lies, for the store. */
static refit_status issue_image(rft_copy_queue *queue, const source *from, uint64_t offset,
                                uint64_t bytes, refit_error *error)
{
    if (from->image == NULL) return REFIT_OK;
    return rft_copy_queue_copy(queue, from->image + offset, from->memory + offset, bytes,
                               from->pinning, error);
}

static void note_issued(rft_ring *ring, const source *from, uint64_t end)
{
    bool last = end == from->bytes && !from->written;
    ring->batch[ring->batch_count++] = (rft_ring_piece){from->tensor, last};
}

static refit_status issue_piece(refit_publisher *publisher, rft_copy_queue *queue,
                                const source *from, uint64_t offset, uint64_t bytes,
                                rft_bucket *bucket, refit_error *error)
{
    unsigned char place[RFT_PLACE_BYTES], *to = bucket->memory + bucket->used;
    const unsigned char *memory = from->memory + offset;
    rft_put_u32(place, bucket->chunk);
    rft_put_u64(place + 4, bucket->offset + bucket->used);
    RFT_TRY(note_piece(publisher, from->tensor, place, offset, bytes, error));
    RFT_TRY(issue_image(queue, from, offset, bytes, error));
    if (from->on_host) {
        RFT_TRY(rft_copy_queue_copy(queue, to, memory, bytes, from->pinning, error));
        rft_copy_queue_batch_add(queue, NULL, to, bytes, offset);
    } else {
        rft_copy_queue_batch_add(queue, to, memory, bytes, offset);
    }
    note_issued(&publisher->ring, from, offset + bytes);
    (void)rft_align_u64(bucket->used + bytes, RFT_TENSOR_ALIGNMENT, &bucket->used);
    return REFIT_OK;
}

static refit_status write_pieces(refit_publisher *publisher, rft_copy_queue *queue,
                                 const source *from, refit_error *error)
{
    for (uint64_t done = 0, some; done < from->bytes; done += some) {
        rft_bucket *bucket;
        RFT_TRY(make_room(publisher, queue, &bucket, error));
        some = rft_min_u64(from->bytes - done, bucket->bytes - bucket->used);
        RFT_TRY(issue_piece(publisher, queue, from, done, some, bucket, error));
    }
    return REFIT_OK;
}

/* One that is lent: read where it lies. */
static refit_status show(refit_publisher *publisher, rft_copy_queue *queue, const source *from,
                         refit_error *error)
{
    unsigned char place[RFT_PLACE_BYTES];
    RFT_TRY(make_place(publisher, queue, error));
    rft_gpu_store_describe_place(publisher->gpu, publisher->store->originals[from->tensor], place);
    RFT_TRY(note_piece(publisher, from->tensor, place, 0, from->bytes, error));
    RFT_TRY(issue_image(queue, from, 0, from->bytes, error));
    rft_copy_queue_batch_add(queue, NULL, from->memory, from->bytes, 0);
    note_issued(&publisher->ring, from, from->bytes);
    return REFIT_OK;
}

/* Where the tensors of a call lie. */
typedef struct origin {
    refit_device *device;
    refit_stream_ref after;
    bool on_host;
    bool elsewhere; /* on another GPU: they come over the store */
} origin;

/* The store, where it keeps the version for workers on the host, gets the tensor too, before or
 * with its pieces. */
static refit_status find_source(refit_publisher *publisher, const refit_weight *weight,
                                const origin *of, source *out, refit_error *error)
{
    rft_store *store = publisher->store;
    const rft_slot *slot = &store->slots[store->writing_slot];
    *out = (source){.tensor = weight->tensor,
                    .memory = weight->memory,
                    .bytes = weight->bytes,
                    .on_host = of->on_host || of->elsewhere,
                    .pinning = slot->buffer == NULL ? NULL : &slot->buffer->pinning};
    if (slot->buffer == NULL || weight->bytes == 0) return REFIT_OK;
    out->written = out->on_host;
    if (of->elsewhere) {
        RFT_TRY(rft_publisher_fetch_to_store(publisher, weight, of->device, of->after, error));
        out->memory = rft_slot_image(slot) + store->manifest->tensors[weight->tensor].offset;
    } else if (of->on_host) {
        RFT_TRY(rft_publisher_write_to_store(publisher, weight, error));
    } else {
        out->image = rft_store_begin_device_write(store, weight->tensor);
    }
    return REFIT_OK;
}

static refit_status write_tensor(refit_publisher *publisher, rft_copy_queue *queue,
                                 const refit_weight *weight, const origin *of, refit_error *error)
{
    source from;
    uint32_t original = publisher->store->originals[weight->tensor];
    RFT_TRY(rft_store_afford(publisher->store, weight->bytes, error));
    RFT_TRY(find_source(publisher, weight, of, &from, error));
    if (weight->bytes == 0) rft_publisher_note_written(publisher, weight->tensor, 0);
    if (weight->bytes > 0 && rft_gpu_store_is_lent(publisher->gpu, original))
        return show(publisher, queue, &from, error);
    return write_pieces(publisher, queue, &from, error);
}

static refit_status write_all(refit_publisher *publisher, rft_copy_queue *queue,
                              const refit_weight *weights, uint32_t count, const origin *of,
                              refit_error *error)
{
    for (uint32_t i = 0; i < count; i++)
        RFT_TRY(write_tensor(publisher, queue, &weights[i], of, error));
    return land(publisher, queue, error);
}

/* The GPU's copy queue, after what the caller has put on its stream. */
static refit_status make_ready(refit_publisher *publisher, const origin *of, rft_copy_queue **out,
                               refit_error *error)
{
    RFT_TRY(rft_publisher_gpu_queue(publisher, out, error));
    RFT_TRY(rft_copy_queue_batch_open(*out, error));
    rft_publisher_pin_slot(publisher, publisher->gpu->device);
    if (of->elsewhere) return REFIT_OK;
    if (of->on_host) return rft_publisher_await_stream(publisher, of->device, of->after, error);
    return rft_copy_queue_follow(*out, of->after, error);
}

refit_status rft_publisher_write_ring(refit_publisher *publisher, const refit_weight *weights,
                                      uint32_t count, refit_device *device, refit_stream_ref after,
                                      refit_error *error)
{
    rft_ring *ring = &publisher->ring;
    const rft_store *store = publisher->store;
    rft_copy_queue *queue;
    origin of = {device, after, device == NULL || rft_device_get_caps(device).host_addressable,
                 false};
    of.elsewhere = !of.on_host && !rft_publisher_is_gpu(publisher, device);
    RFT_REFUSE_IF(ring->broken, error, REFIT_ERR_STATE,
                  "a write of this version failed after its first pieces were sent: abort it");
    if (of.elsewhere) publisher->over_host = true;
    RFT_REFUSE_IF(of.elsewhere && store->slots[store->writing_slot].buffer == NULL, error,
                  REFIT_ERR_INVALID,
                  "this version is sent piece by piece from another GPU's memory: copy the tensor "
                  "to that GPU, or abort the version and publish it again, over the host");
    RFT_TRY(make_ready(publisher, &of, &queue, error));
    refit_status status = write_all(publisher, queue, weights, count, &of, error);
    ring->broken = status != REFIT_OK;
    if (ring->broken) {
        (void)rft_copy_queue_wait(queue, publisher->config.broadcast_stage_timeout_ms, NULL);
        ring->batch_count = 0;
    }
    return status;
}

refit_status rft_publisher_flush_ring(refit_publisher *publisher, refit_error *error)
{
    if (!publisher->ring.on) return REFIT_OK;
    RFT_REFUSE_IF(publisher->ring.broken, error, REFIT_ERR_STATE,
                  "a write of this version failed after its first pieces were sent: abort it");
    return announce(publisher, error);
}
