/*
 * Destinations: a checked list, windows on memory of devices, and notes of what is overwritten.
 *
 * The whole list is checked before any of it is used: each name once, memory that overlaps only
 * where it is the same memory under two names (tied tensors), and a device's memory known to be its
 * own.
 *
 * The windows of a device are page-locked where that is possible. A put and the fetch after it
 * share a stream and one wait; it is the other window that is fetched into, so the bytes of a put
 * that failed are still there to be put again.
 */
#include "subscriber/destinations.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/log.h"
#include "kernels/delta_exchange.h"
#include "kernels/digest.h"

/* ---- The list */

static refit_status check_one(const refit_destination *one, refit_error *error)
{
    RFT_REFUSE_IF(one->size < sizeof *one, error, REFIT_ERR_INVALID,
                  "destination.size is %zu: set it to sizeof(refit_destination), %zu", one->size,
                  sizeof *one);
    RFT_REFUSE_IF(one->name == NULL || one->name[0] == '\0', error, REFIT_ERR_INVALID,
                  "a destination without a name");
    RFT_REFUSE_IF(one->memory == NULL && one->bytes > 0, error, REFIT_ERR_INVALID,
                  "the destination of '%.160s' has no memory", one->name);
    RFT_REFUSE_IF((int)one->dtype != 0 && refit_dtype_bits(one->dtype) == 0, error,
                  REFIT_ERR_INVALID, "the destination of '%.160s' has no type that is known",
                  one->name);
    RFT_REFUSE_IF(one->cast != 0 && one->cast != 1, error, REFIT_ERR_INVALID,
                  "destination.cast of '%.160s' is %d: it is 0 or 1", one->name, one->cast);
    RFT_REFUSE_IF(one->cast != 0 && (int)one->dtype == 0, error, REFIT_ERR_INVALID,
                  "the destination of '%.160s' is to be converted to, but has no type: set dtype",
                  one->name);
    RFT_REFUSE_IF(!rft_span_exists(one->memory, one->bytes), error, REFIT_ERR_INVALID,
                  "the destination of '%.160s' has %llu bytes and would end beyond the addresses "
                  "that there are: its size is wrong",
                  one->name, (unsigned long long)one->bytes);
    if (one->device == NULL || one->bytes == 0) return REFIT_OK;
    return rft_device_memory_check(one->device, one->memory, one->bytes, NULL, error);
}

static int by_name(const void *a, const void *b)
{
    const rft_bound_tensor *const *one = a, *const *other = b;
    return strcmp((*one)->name, (*other)->name);
}

/* The first in the list first. Addresses are a process's, whatever device they belong to. */
static int by_place(const void *a, const void *b)
{
    const rft_bound_tensor *one = *(const rft_bound_tensor *const *)a;
    const rft_bound_tensor *other = *(const rft_bound_tensor *const *)b;
    if (one->memory != other->memory) return one->memory < other->memory ? -1 : 1;
    if (one->bytes != other->bytes) return one->bytes < other->bytes ? -1 : 1;
    return one < other ? -1 : one > other;
}

static refit_status check_names(rft_bound_tensor **sorted, uint32_t count, refit_error *error)
{
    qsort(sorted, count, sizeof(rft_bound_tensor *), by_name);
    for (uint32_t i = 1; i < count; i++) {
        RFT_REFUSE_IF(strcmp(sorted[i - 1]->name, sorted[i]->name) == 0, error, REFIT_ERR_INVALID,
                      "two destinations have the name '%.160s'", sorted[i]->name);
    }
    return REFIT_OK;
}

/* Finds those of the same memory; any other overlap is an error. */
static refit_status check_places(rft_destinations *all, rft_bound_tensor **sorted,
                                 refit_error *error)
{
    rft_bound_tensor *before = NULL;
    qsort(sorted, all->count, sizeof(rft_bound_tensor *), by_place);
    for (uint32_t i = 0; i < all->count; i++) {
        rft_bound_tensor *one = sorted[i];
        one->twin = (uint32_t)(one - all->list);
        if (one->bytes == 0) continue;
        bool apart = before == NULL || one->memory >= before->memory + before->bytes;
        if (!apart && one->memory == before->memory && one->bytes == before->bytes &&
            one->port == before->port) {
            RFT_REFUSE_IF((one->cast || before->cast) && one->dtype != before->dtype, error,
                          REFIT_ERR_INVALID,
                          "the destinations of '%.100s' and '%.100s' are one memory of two types",
                          before->name, one->name);
            one->twin = before->twin;
            continue;
        }
        RFT_REFUSE_IF(!apart, error, REFIT_ERR_INVALID,
                      "the destinations of '%.100s' and '%.100s' overlap", before->name, one->name);
        before = one;
    }
    return REFIT_OK;
}

static refit_status check_list(rft_destinations *all, refit_error *error)
{
    rft_bound_tensor **sorted = rft_calloc((size_t)all->count + 1, sizeof(rft_bound_tensor *));
    RFT_REFUSE_IF(sorted == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for %u destinations",
                  all->count);
    for (uint32_t i = 0; i < all->count; i++)
        sorted[i] = &all->list[i];
    refit_status status = check_names(sorted, all->count, error);
    if (status == REFIT_OK) status = check_places(all, sorted, error);
    rft_free(sorted);
    return status;
}

/* ---- Ports */

static refit_status port_open(rft_port *port, refit_device *device, const refit_config *config,
                              refit_error *error)
{
    unsigned char *windows = rft_calloc(2, RFT_WINDOW_BYTES);
    RFT_REFUSE_IF(windows == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory for windows of a device's memory");
    refit_status status = rft_copy_queue_open(device, config, &port->copy_queue, error);
    if (status != REFIT_OK) {
        rft_free(windows);
        return status;
    }
    port->windows = windows;
    port->pinned =
        rft_device_get_caps(device).needs_pinned &&
        rft_device_host_pin(device, windows, 2 * RFT_WINDOW_BYTES, false, NULL) == REFIT_OK;
    return REFIT_OK;
}

/* Waits also where nothing seems to be under way: it may be the wait that failed, not the copy. */
static void port_close(rft_port *port, uint32_t linger_ms)
{
    refit_device *device = rft_copy_queue_device(port->copy_queue);
    (void)rft_copy_queue_wait(port->copy_queue, linger_ms, NULL);
    if (rft_copy_queue_is_busy(port->copy_queue)) return;
    if (port->pinned) rft_device_host_unpin(device, port->windows, 2 * RFT_WINDOW_BYTES);
    rft_free(port->windows);
    (void)rft_copy_queue_close(port->copy_queue, rft_deadline(linger_ms));
}

/* `device` NULL: host memory, which has none. */
static refit_status find_port(rft_destinations *all, refit_device *device,
                              const refit_config *config, rft_port **out, refit_error *error)
{
    *out = NULL;
    if (device == NULL) return REFIT_OK;
    for (uint32_t i = 0; i < all->port_count; i++) {
        if (rft_copy_queue_device(all->ports[i].copy_queue) == device) *out = &all->ports[i];
    }
    if (*out != NULL) return REFIT_OK;
    RFT_TRY(port_open(&all->ports[all->port_count], device, config, error));
    *out = &all->ports[all->port_count++];
    return REFIT_OK;
}

/* ---- Opening */

static uint32_t count_devices(const refit_destination *list, uint32_t count)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < count; i++) {
        bool known = list[i].device == NULL;
        for (uint32_t k = 0; k < i && !known; k++)
            known = list[k].device == list[i].device;
        most += known ? 0 : 1;
    }
    return most;
}

static refit_status take_memory(rft_destinations *all, const refit_destination *list,
                                uint32_t count, refit_error *error)
{
    size_t text = 1;
    bool casts = false;
    for (uint32_t i = 0; i < count; i++) {
        RFT_TRY(check_one(&list[i], error));
        text += strlen(list[i].name) + 1;
        casts = casts || list[i].cast != 0;
    }
    all->list = rft_calloc((size_t)count + 1, sizeof *all->list);
    all->names = rft_calloc(text, 1);
    all->ports = rft_calloc((size_t)count_devices(list, count) + 1, sizeof *all->ports);
    all->source = rft_calloc(1, RFT_WINDOW_BYTES);
    all->converted = casts ? rft_calloc(1, RFT_WINDOW_BYTES) : NULL;
    RFT_REFUSE_IF(all->list == NULL || all->names == NULL || all->ports == NULL ||
                      all->source == NULL || (casts && all->converted == NULL),
                  error, REFIT_ERR_HOST_MEMORY, "no memory for %u destinations", count);
    return REFIT_OK;
}

static refit_status fill(rft_destinations *all, const refit_destination *list, uint32_t count,
                         const refit_config *config, refit_error *error)
{
    RFT_TRY(take_memory(all, list, count, error));
    char *name = all->names;
    for (; all->count < count; all->count++) {
        const refit_destination *from = &list[all->count];
        rft_bound_tensor *one = &all->list[all->count];
        *one = (rft_bound_tensor){.name = strcpy(name, from->name),
                                  .memory = from->memory,
                                  .bytes = from->bytes,
                                  .dtype = from->dtype,
                                  .cast = from->cast != 0};
        RFT_TRY(find_port(all, from->device, config, &one->port, error));
        name += strlen(name) + 1;
    }
    return check_list(all, error);
}

refit_status rft_destinations_open(rft_destinations *all, const refit_destination *list,
                                   uint32_t count, const refit_config *config, refit_error *error)
{
    *all = (rft_destinations){.wait_ms = config->broadcast_stage_timeout_ms,
                              .linger_ms = config->broadcast_linger_ms};
    refit_status status = fill(all, list, count, config, error);
    if (status != REFIT_OK) rft_destinations_close(all);
    return status;
}

void rft_destinations_close(rft_destinations *all)
{
    for (uint32_t i = 0; i < all->port_count; i++)
        port_close(&all->ports[i], all->linger_ms);
    rft_free(all->source);
    rft_free(all->converted);
    rft_free(all->ports);
    rft_free(all->names);
    rft_free(all->list);
    *all = (rft_destinations){0};
}

/* ---- Windows */

static refit_status port_wait(const rft_destinations *all, rft_port *port, refit_error *error)
{
    RFT_TRY(rft_copy_queue_wait(port->copy_queue, all->wait_ms, error));
    port->unsure = NULL;
    return REFIT_OK;
}

static refit_status port_put(rft_port *port, refit_error *error)
{
    return rft_copy_queue_copy(port->copy_queue, port->unsure, port->bytes, port->unsure_bytes,
                               NULL, error);
}

refit_status rft_destinations_fetch(const rft_destinations *all, const rft_bound_tensor *one,
                                    uint64_t offset, uint64_t bytes, unsigned char **window,
                                    refit_error *error)
{
    rft_port *port = one->port;
    *window = one->memory + offset;
    if (port == NULL) return REFIT_OK;
    port->turn ^= 1;
    *window = port->windows + port->turn * RFT_WINDOW_BYTES;
    RFT_TRY(
        rft_copy_queue_copy(port->copy_queue, *window, one->memory + offset, bytes, NULL, error));
    return port_wait(all, port, error);
}

refit_status rft_destinations_put(const rft_bound_tensor *one, uint64_t offset,
                                  const unsigned char *window, uint64_t bytes, refit_error *error)
{
    rft_port *port = one->port;
    if (port == NULL) return REFIT_OK;
    port->unsure = one->memory + offset;
    port->bytes = window;
    port->unsure_bytes = bytes;
    return port_put(port, error);
}

refit_status rft_destinations_flush(const rft_destinations *all, refit_error *error)
{
    for (uint32_t i = 0; i < all->port_count; i++) {
        if (all->ports[i].unsure != NULL) RFT_TRY(port_wait(all, &all->ports[i], error));
    }
    return REFIT_OK;
}

/* An earlier failure may show only now: the work is waited for, and its status is known. */
refit_status rft_destinations_repair(const rft_destinations *all, refit_error *error)
{
    for (uint32_t i = 0; i < all->port_count; i++) {
        rft_port *port = &all->ports[i];
        if (rft_copy_queue_is_busy(port->copy_queue)) {
            (void)rft_copy_queue_wait(port->copy_queue, all->wait_ms, NULL);
        }
        if (port->unsure == NULL) continue;
        RFT_TRY(port_put(port, error));
        RFT_TRY(port_wait(all, port, error));
    }
    return REFIT_OK;
}

/* Up to RFT_DIGEST_BATCH_MOST destinations with one wait. */
typedef struct digest_work {
    rft_port *port;
    uint32_t count;
    uint32_t list[RFT_DIGEST_BATCH_MOST];
} digest_work;

static refit_status add_digests(const rft_destinations *all, const digest_work *work,
                                refit_error *error)
{
    rft_copy_queue *queue = work->port->copy_queue;
    RFT_TRY(rft_copy_queue_batch_open(queue, error));
    RFT_TRY(rft_copy_queue_batch_begin(queue, error));
    for (uint32_t i = 0; i < work->count; i++) {
        const rft_bound_tensor *one = &all->list[work->list[i]];
        rft_copy_queue_batch_add(queue, NULL, one->memory, one->bytes, 0);
    }
    return rft_copy_queue_batch_end(queue, error);
}

static refit_status run_digests(const rft_destinations *all, digest_work *work, uint64_t *sums,
                                refit_error *error)
{
    refit_error later;
    rft_port *port = work->port;
    if (work->count == 0) return REFIT_OK;
    refit_status issued = add_digests(all, work, error);
    refit_status status = port_wait(all, port, issued == REFIT_OK ? error : &later);
    RFT_TRY(rft_keep_first(issued, status));
    for (uint32_t i = 0; i < work->count; i++)
        sums[work->list[i]] = rft_copy_queue_batch_sum(port->copy_queue, i);
    work->count = 0;
    return REFIT_OK;
}

/* Of a device that takes no digests itself. */
static refit_status digest_one(const rft_destinations *all, const rft_bound_tensor *one,
                               uint64_t *sum, refit_error *error)
{
    RFT_TRY(rft_copy_queue_digest(one->port->copy_queue, one->memory, one->bytes, 0, error));
    RFT_TRY(rft_copy_queue_wait(one->port->copy_queue, all->wait_ms, error));
    *sum = rft_copy_queue_sum(one->port->copy_queue);
    return REFIT_OK;
}

static refit_status digest_port(const rft_destinations *all, rft_port *port,
                                const unsigned char *wanted, uint64_t *sums, refit_error *error)
{
    digest_work work = {.port = port};
    bool batches = rft_copy_queue_digests(port->copy_queue);
    for (uint32_t i = 0; i < all->count; i++) {
        const rft_bound_tensor *one = &all->list[i];
        if (!wanted[i] || one->port != port || one->bytes == 0) continue;
        if (!batches) RFT_TRY(digest_one(all, one, &sums[i], error));
        if (batches) work.list[work.count++] = i;
        if (work.count == RFT_DIGEST_BATCH_MOST) RFT_TRY(run_digests(all, &work, sums, error));
    }
    return run_digests(all, &work, sums, error);
}

refit_status rft_destinations_digest(const rft_destinations *all, const unsigned char *wanted,
                                     uint64_t *sums, refit_error *error)
{
    for (uint32_t i = 0; i < all->count; i++) {
        const rft_bound_tensor *one = &all->list[i];
        bool here = wanted[i] && one->port == NULL && one->bytes > 0; /* it may have no memory */
        sums[i] = here ? rft_digest_part(one->memory, one->bytes, 0) : 0;
    }
    for (uint32_t i = 0; i < all->port_count; i++)
        RFT_TRY(digest_port(all, &all->ports[i], wanted, sums, error));
    return REFIT_OK;
}

/* ---- Rollback
 *
 * Notes one after the other in reserved memory, each with the place of the one before it. The
 * coder's RAW form is used for elements of every type: its notes hold old elements as they were,
 * where remainders would need the new ones to be still there when they are put back.
 */

#define NOTHING UINT64_MAX

/* In front of the coded elements, on a boundary of 8 bytes. */
typedef struct note_head {
    uint64_t before; /* the note before it */
    rft_note_place place;
    rft_delta_shape shape;
    rft_delta_entry entry;
} note_head;

/* The coder may write so much for one block before the result is known. */
static uint64_t slack(void)
{
    return rft_delta_bound((rft_delta_shape){RFT_DELTA_ELEMENTS, 8, RFT_DELTA_RAW}) + 8;
}

refit_status rft_rollback_prepare(rft_rollback *rollback, uint64_t blocks, uint64_t bytes,
                                  refit_error *error)
{
    uint64_t room;
    if (rollback->memory.memory != NULL) return REFIT_OK;
    bool fits = rft_mul_u64(blocks, sizeof(note_head) + 8, &room) &&
                rft_add_u64(room, bytes, &room) && rft_add_u64(room, slack(), &room);
    RFT_REFUSE_IF(!fits, error, REFIT_ERR_HOST_MEMORY, "no memory to note the old bytes in");
    rollback->used = 0;
    rollback->last = NOTHING;
    return rft_segment_create_sparse(&rollback->memory, room, error);
}

bool rft_rollback_is_empty(const rft_rollback *rollback)
{
    return rollback->memory.memory == NULL || rollback->last == NOTHING;
}

void rft_rollback_reset(rft_rollback *rollback)
{
    rft_segment_close(&rollback->memory);
    *rollback = (rft_rollback){.last = NOTHING, .ration.budget = rollback->ration.budget};
}

static uint64_t shape_bytes(rft_delta_shape shape)
{
    return (uint64_t)shape.elements * shape.width;
}

refit_status rft_rollback_change(rft_rollback *rollback, rft_note_place place,
                                 rft_delta_shape shape, void *block, const void *after,
                                 uint32_t *changed, refit_error *error)
{
    note_head head = {.before = rollback->last, .place = place, .shape = shape};
    uint64_t left = rollback->memory.bytes - rollback->used;
    head.shape.kind = RFT_DELTA_RAW;
    *changed = 0;
    if (left < sizeof head + rft_delta_bound(head.shape)) {
        if (memcmp(block, after, shape_bytes(shape)) == 0) return REFIT_OK;
        return rft_fail(error, REFIT_ERR_HOST_MEMORY,
                        "the destinations were changed so often during one update that there is "
                        "no room to note their old bytes");
    }
    refit_error why;
    uint64_t most = sizeof head + rft_delta_bound(head.shape);
    refit_status status = rft_ration_take(&rollback->ration, most, &why);
    if (status != REFIT_OK) {
        if (memcmp(block, after, shape_bytes(shape)) == 0) return REFIT_OK;
        return rft_fail(error, status,
                        "the old bytes of the destinations cannot be noted: %s; make room, raise "
                        "the limit, or write the version with load_into, which notes nothing",
                        why.text);
    }
    unsigned char *to = rollback->memory.memory + rollback->used;
    bool coded = rft_delta_exchange(head.shape, block, after, to + sizeof head, &head.entry);
    *changed = head.entry.changed;
    if (*changed == 0) rft_ration_return(&rollback->ration, most);
    if (*changed == 0) return REFIT_OK;
    if (!coded) head.entry.changed = 0;
    uint64_t bytes = coded ? head.entry.total : shape_bytes(shape);
    rft_ration_return(&rollback->ration, most - rft_min_u64(sizeof head + bytes, most));
    memcpy(to, &head, sizeof head);
    rollback->last = rollback->used;
    rollback->used += (sizeof head + bytes + 7) & ~UINT64_C(7);
    return REFIT_OK;
}

void rft_rollback_read(const rft_rollback *rollback, uint64_t at, rft_note *note)
{
    note_head head;
    memcpy(&head, rollback->memory.memory + at, sizeof head);
    *note = (rft_note){
        .place = head.place,
        .shape = head.shape,
        .next = head.before,
        .coded = rollback->memory.memory + at + sizeof head,
        .entry = head.entry,
    };
}

uint64_t rft_note_bytes(const rft_note *note)
{
    return shape_bytes(note->shape);
}

void rft_note_undo(const rft_note *note, unsigned char *block)
{
    if (note->entry.changed == 0) {
        memcpy(block, note->coded, rft_note_bytes(note));
    } else {
        (void)rft_delta_apply(note->shape, &note->entry, note->coded, block);
    }
}
