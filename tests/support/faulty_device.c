/*
 * The faulty device: every slot asks `meet` whether an order is due, then forwards to the device
 * inside.
 *
 * It is lost, when that is ordered, by a call in the order of the stream, after work that writes
 * half of what it should. The device inside is not: what it has queued goes on, and waits for it
 * are forwarded before they answer that the device is lost. It takes memory from malloc, so that a
 * failing allocator meets the code under test only.
 */
#include "tests/support/faulty_device.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define STREAMS_MOST 64
#define HANG_MS      20

typedef struct joined_stream {
    void *native; /* NULL: an empty place */
    uint32_t joins;
} joined_stream;

typedef struct faulty_device {
    refit_device *inner;
    rft_mutex lock;
    rft_cond go;                       /* signalled when a state below changes */
    faulty_order orders[FAULTY_SLOTS]; /* guarded by lock, like the rest; nth 0: none */
    uint32_t calls[FAULTY_SLOTS];
    joined_stream joined[STREAMS_MOST];
    bool lost;
    bool stopped;
    bool go_at_wait;       /* the next wait for an event lets the streams go */
    bool hangs;            /* a wait for an event takes no longer than HANG_MS */
    uint32_t longest_wait; /* in milliseconds, that was asked for while it hangs */
    uint32_t hold_pins;    /* page-locks until one stands, 0: none does */
    uint32_t held_pins;    /* that stand now */
} faulty_device;

static faulty_device *faulty_of(refit_device *device)
{
    return device->self;
}

static const char *slot_name(faulty_slot slot)
{
    static const char *const names[FAULTY_SLOTS] = {
        "memory_alloc", "memory_free",  "reserve",       "commit",        "decommit",
        "host_pin",     "stream_open",  "stream_close",  "stream_call",   "copy_batch",
        "zero",         "event_open",   "event_record",  "event_join",    "event_wait",
        "digest",       "digest_list",  "master_encode", "master_decode", "delta_exchange",
        "delta_apply",  "share_export", "share_map",
    };
    return names[slot];
}

static refit_status fail_lost(refit_error *error)
{
    return rft_fail(error, REFIT_ERR_DEVICE, "the device was lost, as ordered by the test");
}

static refit_status check_lost(faulty_device *faulty, refit_error *error)
{
    rft_lock(&faulty->lock);
    bool lost = faulty->lost;
    rft_unlock(&faulty->lock);
    return lost ? fail_lost(error) : REFIT_OK;
}

/* Counts a call, and says what is ordered for it; the order's `nth` is 0: nothing. */
static faulty_order meet(faulty_device *faulty, faulty_slot slot)
{
    rft_lock(&faulty->lock);
    faulty_order met = {0}, *due = &faulty->orders[slot];
    faulty->calls[slot]++;
    if (due->nth > 1) {
        due->nth--;
    } else if (due->nth == 1) {
        met = *due;
        if (due->times != FAULTY_ALWAYS && --due->times == 0) due->nth = 0;
    }
    rft_unlock(&faulty->lock);
    return met;
}

static refit_status answer(const faulty_order *met, refit_error *error)
{
    if (met->nth == 0 || met->status == REFIT_OK) return REFIT_OK;
    return rft_fail(error, met->status, "%s fails as ordered by the test", slot_name(met->slot));
}

/* A call that frees is made on a lost device, too. */
#define MEET_FREE(faulty, slot, error)                                                             \
    do {                                                                                           \
        faulty_order met = meet((faulty), (slot));                                                 \
        RFT_TRY(answer(&met, (error)));                                                            \
    } while (0)

#define MEET(faulty, slot, error)                                                                  \
    do {                                                                                           \
        RFT_TRY(check_lost((faulty), (error)));                                                    \
        MEET_FREE((faulty), (slot), (error));                                                      \
    } while (0)

/* On the stream's thread. */
static void lose(void *user)
{
    faulty_device *faulty = user;
    rft_lock(&faulty->lock);
    faulty->lost = true;
    rft_unlock(&faulty->lock);
}

static void stand(void *user)
{
    faulty_device *faulty = user;
    rft_lock(&faulty->lock);
    while (faulty->stopped)
        rft_cond_wait_idle(&faulty->go, &faulty->lock);
    rft_unlock(&faulty->lock);
}

static void set_stopped(faulty_device *faulty, bool stopped, bool go_at_wait, bool hangs)
{
    rft_lock(&faulty->lock);
    faulty->stopped = stopped;
    faulty->go_at_wait = go_at_wait;
    faulty->hangs = hangs;
    if (hangs) faulty->longest_wait = 0;
    rft_cond_wake_all(&faulty->go);
    rft_unlock(&faulty->lock);
}

/* A wait for an event begins. Returns how long it may take. */
static uint32_t note_wait(faulty_device *faulty, uint32_t timeout_ms)
{
    rft_lock(&faulty->lock);
    bool go = faulty->go_at_wait && timeout_ms > 0;
    bool hangs = faulty->hangs;
    if (timeout_ms > faulty->longest_wait) faulty->longest_wait = timeout_ms;
    rft_unlock(&faulty->lock);
    if (go) set_stopped(faulty, false, false, false);
    return hangs && timeout_ms > HANG_MS ? HANG_MS : timeout_ms;
}

/* Puts the stop, if one is ordered, before the next work on the stream. */
static refit_status put_stop(faulty_device *faulty, refit_stream_ref stream, refit_error *error)
{
    rft_lock(&faulty->lock);
    bool stopped = faulty->stopped;
    rft_unlock(&faulty->lock);
    if (!stopped || stream.native == NULL) return REFIT_OK;
    return refit_stream_call(faulty->inner, stream, stand, faulty, error);
}

static void free_faulty(faulty_device *faulty)
{
    rft_cond_close(&faulty->go);
    rft_mutex_close(&faulty->lock);
    free(faulty);
}

static void faulty_close(void *self)
{
    faulty_device *faulty = self;
    refit_status status = refit_device_close(faulty->inner, NULL);
    free_faulty(faulty);
    if (status != REFIT_OK) fail_msg("the device inside the faulty one is still in use");
}

static void faulty_describe(void *self, refit_device_info *info)
{
    faulty_device *faulty = self;
    faulty->inner->ops.describe(faulty->inner->self, info);
}

static void faulty_caps(void *self, rft_device_caps *caps)
{
    faulty_device *faulty = self;
    *caps = rft_device_get_caps(faulty->inner);
}

static bool faulty_is_lost(void *self)
{
    faulty_device *faulty = self;
    return check_lost(faulty, NULL) != REFIT_OK || rft_device_is_lost(faulty->inner);
}

static refit_status faulty_memory_alloc(void *self, uint64_t bytes, void **out, refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_MEMORY_ALLOC, error);
    return refit_memory_alloc(faulty->inner, bytes, out, error);
}

static refit_status faulty_memory_free(void *self, void *memory, refit_error *error)
{
    faulty_device *faulty = self;
    MEET_FREE(faulty, FAULTY_MEMORY_FREE, error);
    return refit_memory_free(faulty->inner, memory, error);
}

static refit_status faulty_reserve(void *self, uint64_t bytes, void **out, uint64_t *granule,
                                   refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_RESERVE, error);
    return rft_device_reserve(faulty->inner, bytes, out, granule, error);
}

static refit_status faulty_commit(void *self, void *base, uint64_t bytes, refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_COMMIT, error);
    return rft_device_commit(faulty->inner, base, bytes, error);
}

static refit_status faulty_decommit(void *self, void *base, uint64_t bytes, uint64_t *freed,
                                    refit_error *error)
{
    faulty_device *faulty = self;
    MEET_FREE(faulty, FAULTY_DECOMMIT, error);
    return rft_device_decommit(faulty->inner, base, bytes, freed, error);
}

static refit_status faulty_memory_check(void *self, const void *memory, uint64_t bytes,
                                        rft_memory_range *allocation, refit_error *error)
{
    faulty_device *faulty = self;
    return rft_device_memory_check(faulty->inner, memory, bytes, allocation, error);
}

static refit_status faulty_digest(void *self, refit_stream_ref stream, const void *memory,
                                  uint64_t bytes, uint64_t offset, uint64_t *sum,
                                  refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_DIGEST, error);
    return rft_device_digest(faulty->inner, stream, memory, bytes, offset, sum, error);
}

static refit_status faulty_digest_list(void *self, refit_stream_ref stream, rft_digest_job *jobs,
                                       uint32_t count, refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_DIGEST_LIST, error);
    return rft_device_digest_list(faulty->inner, stream, jobs, count, error);
}

static refit_status faulty_cast_bf16(void *self, refit_stream_ref stream, uint16_t *to,
                                     const float *from, uint64_t count, refit_error *error)
{
    faulty_device *faulty = self;
    return faulty->inner->ops.cast_bf16(faulty->inner->self, stream, to, from, count, error);
}

static refit_status faulty_master_encode(void *self, refit_stream_ref stream,
                                         const rft_master_job *job, refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_MASTER_ENCODE, error);
    return rft_device_master_encode(faulty->inner, stream, job, error);
}

static refit_status faulty_master_decode(void *self, refit_stream_ref stream,
                                         const rft_master_job *job, refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_MASTER_DECODE, error);
    return rft_device_master_decode(faulty->inner, stream, job, error);
}

static refit_status faulty_delta_exchange(void *self, refit_stream_ref stream, rft_delta_job *jobs,
                                          uint32_t count, const rft_delta_notes *notes,
                                          refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_DELTA_EXCHANGE, error);
    return rft_device_delta_exchange(faulty->inner, stream, jobs, count, notes, error);
}

static refit_status faulty_delta_apply(void *self, refit_stream_ref stream, rft_delta_job *jobs,
                                       uint32_t count, refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_DELTA_APPLY, error);
    return rft_device_delta_apply(faulty->inner, stream, jobs, count, error);
}

static refit_status faulty_share_export(void *self, const void *memory, uint64_t bytes,
                                        rft_share *out, refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_SHARE_EXPORT, error);
    return rft_device_share_export(faulty->inner, memory, bytes, out, error);
}

static refit_status faulty_share_map(void *self, const rft_share *share, void **out,
                                     refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_SHARE_MAP, error);
    return rft_device_share_map(faulty->inner, share, out, error);
}

static void faulty_share_unmap(void *self, void *memory)
{
    faulty_device *faulty = self;
    rft_device_share_unmap(faulty->inner, memory);
}

static void faulty_unreserve(void *self, void *base, uint64_t bytes)
{
    faulty_device *faulty = self;
    rft_device_unreserve(faulty->inner, base, bytes);
}

static void hold_pin(faulty_device *faulty)
{
    rft_lock(&faulty->lock);
    if (faulty->hold_pins > 1) {
        faulty->hold_pins--;
    } else if (faulty->hold_pins == 1) {
        faulty->held_pins++;
        rft_cond_wake_all(&faulty->go);
        while (faulty->hold_pins != 0)
            rft_cond_wait_idle(&faulty->go, &faulty->lock);
        faulty->held_pins--;
    }
    rft_unlock(&faulty->lock);
}

static refit_status faulty_host_pin(void *self, void *memory, uint64_t bytes, bool read_only,
                                    refit_error *error)
{
    faulty_device *faulty = self;
    hold_pin(faulty);
    MEET(faulty, FAULTY_HOST_PIN, error);
    return rft_device_host_pin(faulty->inner, memory, bytes, read_only, error);
}

static void faulty_host_unpin(void *self, void *memory, uint64_t bytes)
{
    faulty_device *faulty = self;
    rft_device_host_unpin(faulty->inner, memory, bytes);
}

static refit_status faulty_stream_open(void *self, refit_stream_ref *out, refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_STREAM_OPEN, error);
    return refit_stream_open(faulty->inner, out, error);
}

static refit_status faulty_stream_close(void *self, refit_stream_ref stream, refit_error *error)
{
    faulty_device *faulty = self;
    MEET_FREE(faulty, FAULTY_STREAM_CLOSE, error);
    return refit_stream_close(faulty->inner, stream, error);
}

static refit_status faulty_stream_call(void *self, refit_stream_ref stream,
                                       refit_stream_fn function, void *user, refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_STREAM_CALL, error);
    return refit_stream_call(faulty->inner, stream, function, user, error);
}

/* Zeroes half of it, in stream order but for pageable host memory, which is written while the
 * caller waits. */
static void tear_one(faulty_device *faulty, refit_stream_ref stream, const rft_copy *copy)
{
    uint64_t half = copy->bytes / 2;
    if (rft_device_zero(faulty->inner, stream, copy->to, half, NULL) == REFIT_OK) return;
    assert_true(stream.native == NULL);
    memset(copy->to, 0, half);
}

/* Work of which a half is written. */
static refit_status tear(faulty_device *faulty, const faulty_order *met, refit_stream_ref stream,
                         const rft_copy *copies, uint32_t count, refit_error *error)
{
    for (uint32_t i = 0; i < count; i++)
        tear_one(faulty, stream, &copies[i]);
    if (met->kind != FAULTY_LOSES) return answer(met, error);
    RFT_TRY(refit_stream_call(faulty->inner, stream, lose, faulty, error));
    return stream.native == NULL ? fail_lost(error) : REFIT_OK;
}

/* Meets the order for work that writes. `*torn`: it has been done, as ordered. */
static refit_status meet_work(faulty_device *faulty, faulty_slot slot, refit_stream_ref stream,
                              const rft_copy *copies, uint32_t count, bool *torn,
                              refit_error *error)
{
    RFT_TRY(check_lost(faulty, error));
    faulty_order met = meet(faulty, slot);
    *torn = met.nth != 0 && met.kind != FAULTY_REFUSES;
    if (!*torn) RFT_TRY(answer(&met, error));
    RFT_TRY(put_stop(faulty, stream, error));
    return *torn ? tear(faulty, &met, stream, copies, count, error) : REFIT_OK;
}

static refit_status faulty_copy_batch(void *self, refit_stream_ref stream, const rft_copy *copies,
                                      uint32_t count, rft_copy_order copy_order, refit_error *error)
{
    faulty_device *faulty = self;
    bool torn;
    RFT_TRY(meet_work(faulty, FAULTY_COPY_BATCH, stream, copies, count, &torn, error));
    if (torn) return REFIT_OK;
    return rft_device_copy_batch(faulty->inner, stream, copies, count, copy_order, error);
}

static refit_status faulty_zero(void *self, refit_stream_ref stream, void *memory, uint64_t bytes,
                                refit_error *error)
{
    faulty_device *faulty = self;
    bool torn;
    const rft_copy zeroed = {.to = memory, .bytes = bytes};
    RFT_TRY(meet_work(faulty, FAULTY_ZERO, stream, &zeroed, 1, &torn, error));
    if (torn) return REFIT_OK;
    return rft_device_zero(faulty->inner, stream, memory, bytes, error);
}

static refit_status faulty_event_open(void *self, rft_event **out, refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_EVENT_OPEN, error);
    return rft_device_event_open(faulty->inner, out, error);
}

static void faulty_event_close(void *self, rft_event *event)
{
    faulty_device *faulty = self;
    rft_device_event_close(faulty->inner, event);
}

static refit_status faulty_event_record(void *self, rft_event *event, refit_stream_ref stream,
                                        refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_EVENT_RECORD, error);
    return rft_device_event_record(faulty->inner, event, stream, error);
}

/* The place of a stream, or an empty one that becomes it. The lock is held. */
static joined_stream *find_joined(faulty_device *faulty, refit_stream_ref stream)
{
    for (size_t i = 0; i < STREAMS_MOST; i++) {
        joined_stream *it = &faulty->joined[i];
        if (it->native == NULL) it->native = stream.native;
        if (it->native == stream.native) return it;
    }
    fail_msg("events were joined to more than %d streams", STREAMS_MOST);
    return NULL;
}

static refit_status faulty_event_join(void *self, rft_event *event, refit_stream_ref stream,
                                      refit_error *error)
{
    faulty_device *faulty = self;
    MEET(faulty, FAULTY_EVENT_JOIN, error);
    RFT_TRY(rft_device_event_join(faulty->inner, event, stream, error));
    rft_lock(&faulty->lock);
    find_joined(faulty, stream)->joins++;
    rft_unlock(&faulty->lock);
    return REFIT_OK;
}

static refit_status faulty_event_wait(void *self, rft_event *event, uint32_t timeout_ms,
                                      refit_error *error)
{
    faulty_device *faulty = self;
    MEET_FREE(faulty, FAULTY_EVENT_WAIT, error);
    uint32_t most_ms = note_wait(faulty, timeout_ms);
    RFT_TRY(rft_device_event_wait(faulty->inner, event, most_ms, error));
    return check_lost(faulty, error);
}

static const rft_device_ops faulty_ops = {
    .version = RFT_DEVICE_OPS_VERSION,
    .size = sizeof(rft_device_ops),
    .kind = "faulty",
    .close = faulty_close,
    .describe = faulty_describe,
    .caps = faulty_caps,
    .is_lost = faulty_is_lost,
    .memory_alloc = faulty_memory_alloc,
    .memory_free = faulty_memory_free,
    .reserve = faulty_reserve,
    .commit = faulty_commit,
    .decommit = faulty_decommit,
    .memory_check = faulty_memory_check,
    .digest = faulty_digest,
    .digest_list = faulty_digest_list,
    .cast_bf16 = faulty_cast_bf16,
    .master_encode = faulty_master_encode,
    .master_decode = faulty_master_decode,
    .delta_exchange = faulty_delta_exchange,
    .delta_apply = faulty_delta_apply,
    .share_export = faulty_share_export,
    .share_map = faulty_share_map,
    .share_unmap = faulty_share_unmap,
    .unreserve = faulty_unreserve,
    .host_pin = faulty_host_pin,
    .host_unpin = faulty_host_unpin,
    .stream_open = faulty_stream_open,
    .stream_close = faulty_stream_close,
    .stream_call = faulty_stream_call,
    .copy_batch = faulty_copy_batch,
    .zero = faulty_zero,
    .event_open = faulty_event_open,
    .event_close = faulty_event_close,
    .event_record = faulty_event_record,
    .event_join = faulty_event_join,
    .event_wait = faulty_event_wait,
};

refit_status faulty_device_open(const char *spec, refit_device **out, refit_error *error)
{
    return faulty_device_open_with(spec, NULL, out, error);
}

refit_status faulty_device_open_with(const char *spec, const refit_config *config,
                                     refit_device **out, refit_error *error)
{
    faulty_device *faulty = calloc(1, sizeof *faulty);
    refit_status status;
    assert_non_null(faulty);
    RFT_TRY_GOTO(rft_mutex_open(&faulty->lock, error), undo_memory);
    RFT_TRY_GOTO(rft_cond_open(&faulty->go, error), undo_lock);
    RFT_TRY_GOTO(refit_device_open(spec, config, &faulty->inner, error), undo_cond);
    status = rft_device_make(&faulty_ops, faulty, out, error);
    if (status != REFIT_OK) faulty_close(faulty);
    return status;

undo_cond:
    rft_cond_close(&faulty->go);
undo_lock:
    rft_mutex_close(&faulty->lock);
undo_memory:
    free(faulty);
    return status;
}

refit_device *faulty_device_inner(refit_device *device)
{
    return faulty_of(device)->inner;
}

void faulty_device_order(refit_device *device, const faulty_order *order)
{
    faulty_device *faulty = faulty_of(device);
    assert_true(order->kind == FAULTY_REFUSES || order->slot == FAULTY_COPY_BATCH ||
                order->slot == FAULTY_ZERO);
    rft_lock(&faulty->lock);
    faulty->orders[order->slot] = *order;
    if (order->times == 0) faulty->orders[order->slot].times = 1;
    rft_unlock(&faulty->lock);
}

void faulty_device_fail(refit_device *device, faulty_slot slot, uint32_t nth, refit_status status)
{
    faulty_device_order(device, &(faulty_order){.slot = slot, .nth = nth, .status = status});
}

void faulty_device_fail_times(refit_device *device, faulty_slot slot, uint32_t nth, uint32_t times,
                              refit_status status)
{
    faulty_device_order(
        device, &(faulty_order){.slot = slot, .nth = nth, .times = times, .status = status});
}

void faulty_device_lose(refit_device *device, faulty_slot slot, uint32_t nth)
{
    faulty_device_order(device, &(faulty_order){.slot = slot, .nth = nth, .kind = FAULTY_LOSES});
}

void faulty_device_stop(refit_device *device)
{
    set_stopped(faulty_of(device), true, false, false);
}

void faulty_device_hang(refit_device *device)
{
    set_stopped(faulty_of(device), true, false, true);
}

uint32_t faulty_device_longest_wait(refit_device *device)
{
    faulty_device *faulty = faulty_of(device);
    rft_lock(&faulty->lock);
    uint32_t longest = faulty->longest_wait;
    rft_unlock(&faulty->lock);
    return longest;
}

void faulty_device_stop_until_awaited(refit_device *device)
{
    set_stopped(faulty_of(device), true, true, false);
}

void faulty_device_go(refit_device *device)
{
    set_stopped(faulty_of(device), false, false, false);
}

static void set_hold(refit_device *device, uint32_t nth)
{
    faulty_device *faulty = faulty_of(device);
    rft_lock(&faulty->lock);
    faulty->hold_pins = nth;
    rft_cond_wake_all(&faulty->go);
    rft_unlock(&faulty->lock);
}

void faulty_device_hold_pins(refit_device *device, uint32_t nth)
{
    set_hold(device, nth);
}

void faulty_device_let_pins(refit_device *device)
{
    set_hold(device, 0);
}

void faulty_device_await_pin(refit_device *device)
{
    faulty_device *faulty = faulty_of(device);
    rft_lock(&faulty->lock);
    while (faulty->held_pins == 0)
        rft_cond_wait_idle(&faulty->go, &faulty->lock);
    rft_unlock(&faulty->lock);
}

void faulty_device_reset(refit_device *device)
{
    faulty_device *faulty = faulty_of(device);
    rft_lock(&faulty->lock);
    memset(faulty->orders, 0, sizeof faulty->orders);
    memset(faulty->calls, 0, sizeof faulty->calls);
    memset(faulty->joined, 0, sizeof faulty->joined);
    rft_unlock(&faulty->lock);
}

uint32_t faulty_device_calls(refit_device *device, faulty_slot slot)
{
    faulty_device *faulty = faulty_of(device);
    rft_lock(&faulty->lock);
    uint32_t calls = faulty->calls[slot];
    rft_unlock(&faulty->lock);
    return calls;
}

uint32_t faulty_device_joins(refit_device *device, refit_stream_ref stream)
{
    faulty_device *faulty = faulty_of(device);
    rft_lock(&faulty->lock);
    uint32_t joins = find_joined(faulty, stream)->joins;
    rft_unlock(&faulty->lock);
    return joins;
}
