/*
 * Copies, batches of them, and fills: checked when they are called and again when the stream gets
 * to them. What is to be read when it is called is read then.
 */
#include <stdlib.h>
#include <string.h>

#include "fake_stream.h"

static bool copies_use(const fake_op *op, uint64_t base, uint64_t bytes)
{
    for (size_t i = 0; i < op->count; i++) {
        const fake_copy *copy = &op->copies[i];
        if (fake_meets(copy->to, copy->bytes, base, bytes)) return true;
        if (fake_meets(copy->from, copy->bytes, base, bytes)) return true;
    }
    return false;
}

static void copies_drop(fake_op *op)
{
    for (size_t i = 0; i < op->count; i++)
        free(op->copies[i].early);
    free(op->copies);
}

static rft_cu_result copy_one(const fake_copy *copy)
{
    unsigned char *to = fake_reach(copy->to, copy->bytes, true);
    const unsigned char *from = fake_reach(copy->from, copy->bytes, false);
    if (to == NULL || from == NULL) return RFT_CU_ILLEGAL_ADDRESS;
    fake_touch();
    bool same = copy->early == NULL || memcmp(copy->early, from, copy->bytes) == 0;
    memcpy(to, copy->early != NULL ? copy->early : from, copy->bytes);
    fake_touched();
    if (!same)
        fake_violation("the source at 0x%llx changed under a copy of order ANY",
                       (unsigned long long)copy->from);
    return RFT_CU_SUCCESS;
}

static rft_cu_result copies_run(fake_op *op)
{
    for (size_t i = 0; i < op->count; i++) {
        rft_cu_result result = copy_one(&op->copies[i]);
        if (result != RFT_CU_SUCCESS) return result;
    }
    return RFT_CU_SUCCESS;
}

static bool is_registered(uint64_t at)
{
    const fake_span *span = fake_span_at(at);
    return span != NULL && span->kind == FAKE_REGISTERED;
}

/* The device takes addresses as they are, whether registered memory is there or not. */
static rft_cu_result batch_run(fake_op *op)
{
    bool found = fake.devices[op->device].attributes[RFT_CU_ATTR_HOST_POINTERS] != 0;
    for (size_t i = 0; i < op->count && !found; i++)
        if (is_registered(op->copies[i].to) || is_registered(op->copies[i].from))
            return RFT_CU_ILLEGAL_ADDRESS;
    return copies_run(op);
}

static fake_op *copies_new(size_t count)
{
    fake_op *op = fake_op_new(copies_run);
    op->uses = copies_use;
    op->drop = copies_drop;
    op->count = count;
    op->copies = fake_new(count * sizeof *op->copies);
    return op;
}

static bool is_on_host(uint64_t at)
{
    const fake_span *span = fake_span_at(at);
    return span == NULL || span->kind == FAKE_HOST || span->kind == FAKE_REGISTERED;
}

/* Both sides as they are when the copy is called. `*waits`: the caller waits for it. */
static rft_cu_result check(const fake_copy *copy, bool *waits)
{
    fake_side to = fake_side_of(copy->to, copy->bytes);
    fake_side from = fake_side_of(copy->from, copy->bytes);
    if (to == FAKE_SIDE_BAD || from == FAKE_SIDE_BAD) return RFT_CU_INVALID_VALUE;
    if (to == FAKE_SIDE_PAGEABLE || from == FAKE_SIDE_PAGEABLE) {
        *waits = true;
        fake_count_pageable();
    }
    if (is_on_host(copy->to) != is_on_host(copy->from)) fake_count_link(copy->bytes);
    *waits = *waits || (is_on_host(copy->to) && is_on_host(copy->from));
    return RFT_CU_SUCCESS;
}

/* Queues what has been checked. */
static void queue(fake_call *call, fake_stream *stream, fake_op *op, bool waits)
{
    fake_stream_put(stream, op, call);
    if (waits) fake_stream_drain(stream);
}

rft_cu_result fake_cu_copy(rft_cu_ptr to, rft_cu_ptr from, size_t bytes, rft_cu_stream stream)
{
    fake_call call;
    bool waits = false;
    fake_copy copy = {.to = to, .from = from, .bytes = bytes};
    rft_cu_result result = fake_begin(&call, FAKE_copy, FAKE_NEEDS_CONTEXT);
    if (result == RFT_CU_SUCCESS && bytes > 0) result = check(&copy, &waits);
    if (result == RFT_CU_SUCCESS) {
        fake_stream *target = fake_stream_for(&call, stream, &result);
        if (target != NULL && bytes > 0) {
            fake_op *op = copies_new(1);
            op->copies[0] = copy;
            queue(&call, target, op, waits);
        }
    }
    return fake_end(&call, result);
}

#define PITCH_MOST INT32_MAX

/* The addresses of both sides; 0 for an array, or a place within a side. */
static void sides_of(const rft_cu_copy_2d *from, uint64_t *to, uint64_t *source)
{
    *to = from->to_type == RFT_CU_MEMORY_HOST ? (uintptr_t)from->to_host : from->to_device;
    *source =
        from->from_type == RFT_CU_MEMORY_HOST ? (uintptr_t)from->from_host : from->from_device;
    bool within = from->from_x != 0 || from->from_y != 0 || from->to_x != 0 || from->to_y != 0;
    if (within || from->to_type == RFT_CU_MEMORY_ARRAY) *to = 0;
    if (from->from_type == RFT_CU_MEMORY_ARRAY) *source = 0;
}

/* A copy for each row. */
static rft_cu_result fill_rows(const rft_cu_copy_2d *from, fake_op *op, bool *waits)
{
    uint64_t to, source;
    rft_cu_result result = RFT_CU_SUCCESS;
    sides_of(from, &to, &source);
    if (to == 0 || source == 0) return RFT_CU_INVALID_VALUE;
    for (size_t i = 0; i < from->height && result == RFT_CU_SUCCESS; i++) {
        op->copies[i] = (fake_copy){.to = to + i * from->to_pitch,
                                    .from = source + i * from->from_pitch,
                                    .bytes = from->width};
        result = check(&op->copies[i], waits);
    }
    return result;
}

rft_cu_result fake_cu_copy_2d(const rft_cu_copy_2d *copy, rft_cu_stream stream)
{
    fake_call call;
    bool waits = false;
    rft_cu_result result = fake_begin(&call, FAKE_copy_2d, FAKE_NEEDS_CONTEXT);
    if (result == RFT_CU_SUCCESS &&
        (copy == NULL || copy->width == 0 || copy->height == 0 || copy->to_pitch < copy->width ||
         copy->from_pitch < copy->width || copy->to_pitch > PITCH_MOST ||
         copy->from_pitch > PITCH_MOST))
        result = RFT_CU_INVALID_VALUE;
    fake_stream *target = result == RFT_CU_SUCCESS ? fake_stream_for(&call, stream, &result) : NULL;
    if (target != NULL) {
        fake_op *op = copies_new(copy->height);
        result = fill_rows(copy, op, &waits);
        if (result == RFT_CU_SUCCESS) {
            queue(&call, target, op, waits);
        } else {
            copies_drop(op);
            free(op);
        }
    }
    return fake_end(&call, result);
}

/* The arguments of a batch, whichever version brings them. */
typedef struct fake_batch {
    rft_cu_ptr *to;
    rft_cu_ptr *from;
    size_t *bytes;
    size_t count;
    rft_cu_copy_attributes *attributes;
    size_t *starts;
    size_t attribute_count;
    rft_cu_stream stream;
} fake_batch;

static bool attributes_fit(const fake_batch *batch)
{
    if (batch->attributes == NULL || batch->starts == NULL) return false;
    if (batch->attribute_count == 0 || batch->attribute_count > batch->count) return false;
    for (size_t i = 0; i < batch->attribute_count; i++) {
        int order = batch->attributes[i].source_order;
        if (order < RFT_CU_SOURCE_STREAM || order > RFT_CU_SOURCE_ANY) return false;
        if (i == 0 && batch->starts[0] != 0) return false;
        if (i > 0 && batch->starts[i] <= batch->starts[i - 1]) return false;
        if (batch->starts[i] >= batch->count) return false;
    }
    return true;
}

static rft_cu_result batch_fits(const fake_batch *batch)
{
    /* It takes neither the legacy stream nor the per-thread one. */
    if ((uintptr_t)batch->stream <= 2) return RFT_CU_INVALID_VALUE;
    if (batch->to == NULL || batch->from == NULL || batch->bytes == NULL || batch->count == 0)
        return RFT_CU_INVALID_VALUE;
    if (batch->count > fake.batch_cap) {
        fake_violation("a batch of %zu copies", batch->count);
        return RFT_CU_INVALID_VALUE;
    }
    return attributes_fit(batch) ? RFT_CU_SUCCESS : RFT_CU_INVALID_VALUE;
}

/* Reads the source of a copy whose order allows it at once. */
static rft_cu_result read_early(fake_copy *copy)
{
    const unsigned char *from = fake_reach(copy->from, copy->bytes, false);
    if (from == NULL) return RFT_CU_ILLEGAL_ADDRESS;
    copy->early = fake_new(copy->bytes);
    memcpy(copy->early, from, copy->bytes);
    return RFT_CU_SUCCESS;
}

static rft_cu_result fill_batch(const fake_batch *batch, fake_op *op, size_t *failed, bool *waits)
{
    rft_cu_result result = RFT_CU_SUCCESS;
    size_t attribute = 0;
    for (size_t i = 0; i < batch->count && result == RFT_CU_SUCCESS; i++) {
        fake_copy *copy = &op->copies[i];
        *copy = (fake_copy){.to = batch->to[i], .from = batch->from[i], .bytes = batch->bytes[i]};
        if (attribute + 1 < batch->attribute_count && batch->starts[attribute + 1] == i)
            attribute++;
        result = copy->bytes > 0 ? check(copy, waits) : RFT_CU_INVALID_VALUE;
        if (result == RFT_CU_SUCCESS &&
            batch->attributes[attribute].source_order != RFT_CU_SOURCE_STREAM)
            result = read_early(copy);
        if (result != RFT_CU_SUCCESS) *failed = i;
    }
    return result;
}

static rft_cu_result put_batch(fake_call *call, const fake_batch *batch, size_t *failed)
{
    *failed = SIZE_MAX;
    rft_cu_result result = batch_fits(batch);
    if (result != RFT_CU_SUCCESS) return result;
    fake_stream *stream = fake_stream_find(call, batch->stream);
    if (stream == NULL || stream->context != call->context) return RFT_CU_INVALID_HANDLE;
    if (stream->capture != RFT_CU_CAPTURE_NONE) {
        stream->capture = RFT_CU_CAPTURE_INVALIDATED;
        return RFT_CU_STREAM_CAPTURE_UNSUPPORTED;
    }
    fake_count_batch(batch->count);
    bool waits = false;
    fake_op *op = copies_new(batch->count);
    op->run = batch_run;
    op->device = call->context->device->ordinal;
    result = fill_batch(batch, op, failed, &waits);
    if (result == RFT_CU_SUCCESS) {
        queue(call, stream, op, waits);
    } else {
        copies_drop(op);
        free(op);
    }
    return result;
}

rft_cu_result fake_cu_copy_batch(rft_cu_ptr *to, rft_cu_ptr *from, size_t *bytes, size_t count,
                                 rft_cu_copy_attributes *attributes, size_t *starts,
                                 size_t attribute_count, rft_cu_stream stream)
{
    fake_call call;
    size_t failed;
    fake_batch batch = {to, from, bytes, count, attributes, starts, attribute_count, stream};
    rft_cu_result result = fake_begin(&call, FAKE_copy_batch, FAKE_NEEDS_CONTEXT);
    if (result == RFT_CU_SUCCESS) result = put_batch(&call, &batch, &failed);
    return fake_end(&call, result);
}

rft_cu_result fake_cu_copy_batch_12080(rft_cu_ptr *to, rft_cu_ptr *from, size_t *bytes,
                                       size_t count, rft_cu_copy_attributes *attributes,
                                       size_t *starts, size_t attribute_count, size_t *failed,
                                       rft_cu_stream stream)
{
    fake_call call;
    size_t index = SIZE_MAX;
    fake_batch batch = {to, from, bytes, count, attributes, starts, attribute_count, stream};
    rft_cu_result result = fake_begin(&call, FAKE_copy_batch_12080, FAKE_NEEDS_CONTEXT);
    if (result == RFT_CU_SUCCESS) result = put_batch(&call, &batch, &index);
    if (failed != NULL) *failed = index;
    return fake_end(&call, result);
}

static rft_cu_result fill_run(fake_op *op)
{
    unsigned char *to = fake_reach(op->copies[0].to, op->copies[0].bytes, true);
    if (to == NULL) return RFT_CU_ILLEGAL_ADDRESS;
    fake_touch();
    memset(to, op->value, op->copies[0].bytes);
    fake_touched();
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_fill(rft_cu_ptr to, unsigned char value, size_t bytes, rft_cu_stream stream)
{
    FAKE_CALL(fill, FAKE_NEEDS_CONTEXT);
    FAKE_REFUSE_IF(bytes > 0 && fake_side_of(to, bytes) != FAKE_SIDE_DRIVER, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) {
        fake_stream *target = fake_stream_for(&call, stream, &result);
        if (target != NULL && bytes > 0) {
            fake_op *op = copies_new(1);
            op->run = fill_run;
            op->copies[0] = (fake_copy){.to = to, .from = to, .bytes = bytes};
            op->value = value;
            fake_stream_put(target, op, &call);
        }
    }
    return fake_end(&call, result);
}

static rft_cu_result call_run(fake_op *op)
{
    fake_unlock();
    fake_set_in_callback(true);
    op->function(op->user);
    fake_set_in_callback(false);
    fake_lock();
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_stream_call(rft_cu_stream stream, rft_cu_host_fn function, void *user)
{
    FAKE_CALL(stream_call, FAKE_NEEDS_CONTEXT);
    FAKE_REFUSE_IF(function == NULL, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) {
        fake_stream *target = fake_stream_for(&call, stream, &result);
        if (target != NULL) {
            fake_op *op = fake_op_new(call_run);
            op->function = function;
            op->user = user;
            fake_stream_put(target, op, &call);
        }
    }
    return fake_end(&call, result);
}
