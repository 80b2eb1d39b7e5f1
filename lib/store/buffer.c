/*
 * A stopped worker can keep frames in a queue for as long as its connection stands; the publisher
 * goes on with other memory meanwhile, and frees the old when its count of readers is 0. Looking
 * costs one atomic read a buffer, and there are few.
 */
#include "store/buffer.h"

#include <stddef.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "wire/manifest.h"

/* ---- Page-locks: pieces of one size from the start on, the last one shorter, so that where a
 * piece ends follows from where the memory begins */

static void unpin_until(const rft_pinning *pinning, uint64_t end)
{
    for (uint64_t at = 0; at < end; at += pinning->piece_bytes) {
        uint64_t bytes = rft_min_u64(pinning->piece_bytes, pinning->bytes - at);
        rft_device_host_unpin(pinning->device, pinning->memory + at, bytes);
    }
}

refit_status rft_pinning_open(rft_pinning *pinning, refit_device *device, void *memory,
                              uint64_t bytes, uint64_t piece_bytes, bool read_only,
                              refit_error *error)
{
    const rft_pinning wanted = {device, memory, bytes, piece_bytes};
    for (uint64_t at = 0; at < bytes; at += piece_bytes) {
        refit_status status = rft_device_host_pin(
            device, wanted.memory + at, rft_min_u64(piece_bytes, bytes - at), read_only, error);
        if (status != REFIT_OK) {
            unpin_until(&wanted, at);
            return status;
        }
    }
    *pinning = wanted;
    rft_device_retain(device);
    return REFIT_OK;
}

void rft_pinning_close(rft_pinning *pinning)
{
    if (pinning->device == NULL) return;
    unpin_until(pinning, pinning->bytes);
    rft_device_release(pinning->device);
    *pinning = (rft_pinning){0};
}

uint64_t rft_pinning_reach(const rft_pinning *pinning, const void *memory, uint64_t bytes)
{
    if (pinning == NULL || pinning->device == NULL) return bytes;
    uint64_t offset = (uintptr_t)memory - (uintptr_t)pinning->memory;
    if (offset >= pinning->bytes) return bytes;
    return rft_min_u64(bytes, pinning->piece_bytes - offset % pinning->piece_bytes);
}

/* ---- Buffers */

rft_buffer *rft_buffer_open(void)
{
    rft_buffer *buffer = rft_calloc(1, sizeof *buffer);
    if (buffer != NULL) buffer->segment.fd = -1;
    return buffer;
}

static void buffer_close(rft_buffer *buffer)
{
    rft_pinning_close(&buffer->pinning);
    rft_segment_close(&buffer->segment);
    rft_bytes_close(&buffer->gathered);
    rft_free(buffer);
}

/* ---- The retire list */

void rft_retire_list_put(rft_retire_list *retired, rft_buffer *buffer)
{
    if (buffer == NULL) return;
    rft_segment_retire(&buffer->segment);
    buffer->next = retired->first;
    retired->first = buffer;
    rft_retire_list_sweep(retired);
}

void rft_retire_list_move(rft_retire_list *retired, rft_retire_list *from)
{
    while (from->first != NULL) {
        rft_buffer *buffer = from->first;
        from->first = buffer->next;
        rft_retire_list_put(retired, buffer);
    }
}

void rft_retire_list_sweep(rft_retire_list *retired)
{
    for (rft_buffer **at = &retired->first; *at != NULL;) {
        rft_buffer *buffer = *at;
        if (rft_pending_count(&buffer->pending) == 0) {
            *at = buffer->next;
            buffer_close(buffer);
        } else {
            at = &buffer->next;
        }
    }
}

uint32_t rft_retire_list_close(rft_retire_list *retired, int64_t deadline)
{
    uint32_t left = 0;
    for (rft_buffer *buffer = retired->first; buffer != NULL; buffer = buffer->next) {
        if (!rft_pending_wait(&buffer->pending, deadline)) left++;
    }
    rft_retire_list_sweep(retired);
    retired->first = NULL;
    return left;
}

/* ---- Messages encoded once */

bool rft_cached_message_is_about(const rft_cached_message *cached, uint64_t version,
                                 const rft_digest128 *digest)
{
    return cached->buffer != NULL && cached->version == version &&
           rft_digest128_equal(&cached->digest, digest);
}

refit_status rft_cached_message_write(rft_cached_message *cached, const rft_message *message,
                                      uint64_t version, const rft_digest128 *digest,
                                      const rft_limits *limits, rft_retire_list *retired,
                                      refit_error *error)
{
    rft_cached_message_close(cached, retired);
    rft_buffer *buffer = rft_buffer_open();
    RFT_REFUSE_IF(buffer == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a message");
    refit_status status = rft_message_encode(message, limits, &buffer->gathered, error);
    if (status == REFIT_OK) {
        *cached = (rft_cached_message){buffer, version, *digest};
    } else {
        rft_retire_list_put(retired, buffer);
    }
    return status;
}

void rft_cached_message_close(rft_cached_message *cached, rft_retire_list *retired)
{
    rft_retire_list_put(retired, cached->buffer);
    *cached = (rft_cached_message){0};
}
