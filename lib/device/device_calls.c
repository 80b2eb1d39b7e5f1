/*
 * The calls on a device: arguments are checked here, once for all implementations, then the slot
 * does the work.
 *
 * What is open (memory, streams) is counted on the way, so that refit_device_close can refuse.
 */
#include <inttypes.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "device/device.h"

/* ---- Reservations ----------------------------------------------------------------------------
 * Addresses that stay, and the streams that use them, for all implementations at once.
 *
 * A reservation remembers each stream that uses it once, with an event of its own, opened when the
 * stream is first named so that a cycle allocates nothing. Before memory goes, each event is
 * recorded on its stream and waited for. No lock is held meanwhile: `waits` keeps the list as the
 * waiting threads saw it. A user that leaves then only loses its stream; the last thread that
 * waited takes it off.
 *
 * Knows nothing of chunks or pages: those are the slots' business.
 */

typedef struct reserve_user {
    struct reserve_user *next;
    void *native;     /* NULL: has left; guarded by reserve_lock, like next */
    rft_event *event; /* owned */
} reserve_user;

/* All guarded by the device's reserve_lock. */
typedef struct rft_reservation {
    struct rft_reservation *next;
    uintptr_t base;
    uint64_t bytes;
    reserve_user *users;
    uint32_t waits; /* threads that walk `users` without the lock */
    bool given_up;  /* off the list: the last of them closes it */
} rft_reservation;

/* ---- Reservations, the lock held --------------------------------------------------------- */

/* The one that holds the whole range, or NULL. */
static rft_reservation *find_range(refit_device *device, const void *base, uint64_t bytes)
{
    uintptr_t from = (uintptr_t)base;
    for (rft_reservation *it = device->reservations; it != NULL; it = it->next) {
        if (from >= it->base && from - it->base < it->bytes &&
            bytes <= it->bytes - (from - it->base)) {
            return it;
        }
    }
    return NULL;
}

static rft_reservation *take_out(refit_device *device, const void *base)
{
    rft_reservation **link = &device->reservations;
    while (*link != NULL && (*link)->base != (uintptr_t)base) {
        link = &(*link)->next;
    }
    rft_reservation *found = *link;
    if (found != NULL) *link = found->next;
    return found;
}

static void close_reservation(refit_device *device, rft_reservation *reservation)
{
    reserve_user *user = reservation->users;
    while (user != NULL) {
        reserve_user *next = user->next;
        device->ops.event_close(device->self, user->event);
        rft_free(user);
        user = next;
    }
    rft_free(reservation);
}

/* ---- Users, the lock held ---------------------------------------------------------------- */

static reserve_user *find_user(const rft_reservation *reservation, refit_stream_ref stream)
{
    reserve_user *user = reservation->users;
    while (user != NULL && user->native != stream.native) {
        user = user->next;
    }
    return user;
}

/* Takes users that have left off the list, unless a thread walks it. */
static void sweep(refit_device *device, rft_reservation *reservation)
{
    reserve_user **link = &reservation->users;
    while (*link != NULL && reservation->waits == 0) {
        reserve_user *user = *link;
        if (user->native != NULL) {
            link = &user->next;
            continue;
        }
        *link = user->next;
        device->ops.event_close(device->self, user->event);
        rft_free(user);
    }
}

static refit_status record(refit_device *device, const reserve_user *user, refit_error *error)
{
    const refit_stream_ref stream = {user->native};
    return device->ops.event_record(device->self, user->event, stream, error);
}

/* The first record shows that the stream exists. A stream that captures takes no event now, and
 * need not: what it captures has not run. */
static refit_status open_user(refit_device *device, refit_stream_ref stream, reserve_user **out,
                              refit_error *error)
{
    reserve_user *user = rft_calloc(1, sizeof *user);
    RFT_REFUSE_IF(user == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory to remember a stream");
    refit_status status = REFIT_OK;
    user->native = stream.native;
    RFT_TRY_GOTO(device->ops.event_open(device->self, &user->event, error), free_user);
    status = record(device, user, error);
    if (status != REFIT_OK && status != REFIT_ERR_STATE) goto close_event;
    *out = user;
    return REFIT_OK;

close_event:
    device->ops.event_close(device->self, user->event);
free_user:
    rft_free(user);
    return status;
}

static refit_status add_user(refit_device *device, const void *base, refit_stream_ref stream,
                             refit_error *error)
{
    reserve_user *user = NULL;
    rft_reservation *reservation = find_range(device, base, 1);
    RFT_REFUSE_IF(reservation == NULL, error, REFIT_ERR_INVALID,
                  "%p lies in no reservation of this device", base);
    if (find_user(reservation, stream) != NULL) return REFIT_OK;
    RFT_TRY(open_user(device, stream, &user, error));
    user->next = reservation->users;
    reservation->users = user;
    return REFIT_OK;
}

/* The stream has ended. */
static void forget_stream(refit_device *device, refit_stream_ref stream)
{
    for (rft_reservation *it = device->reservations; it != NULL; it = it->next) {
        reserve_user *user = find_user(it, stream);
        if (user == NULL) continue;
        user->native = NULL;
        sweep(device, it);
    }
}

/* ---- Waiting, without the lock ----------------------------------------------------------- */

/* Waits for what the stream has queued by now. */
static refit_status wait_for_stream(refit_device *device, const reserve_user *user,
                                    int64_t deadline, refit_error *error)
{
    rft_lock(&device->reserve_lock);
    bool left = user->native == NULL;
    refit_status status = left ? REFIT_OK : record(device, user, error);
    rft_unlock(&device->reserve_lock);
    if (left || status != REFIT_OK) return status;
    uint32_t left_ms = (uint32_t)rft_ms_until(deadline);
    status = device->ops.event_wait(device->self, user->event, left_ms, error);
    RFT_REFUSE_IF(status == REFIT_ERR_TIMEOUT, error, REFIT_ERR_TIMEOUT,
                  "a stream that uses an arena still had work after %" PRIu32
                  " ms, so the memory stays: call again later",
                  device->wait_most_ms);
    return status;
}

/* Keeps the users as they are until end_wait. NULL if none uses that range. */
static rft_reservation *begin_wait(refit_device *device, const void *base, uint64_t bytes,
                                   reserve_user **first)
{
    rft_lock(&device->reserve_lock);
    rft_reservation *reservation = find_range(device, base, bytes);
    if (reservation != NULL && reservation->users == NULL) reservation = NULL;
    if (reservation != NULL) {
        reservation->waits++;
        *first = reservation->users;
    }
    rft_unlock(&device->reserve_lock);
    return reservation;
}

static void end_wait(refit_device *device, rft_reservation *reservation, reserve_user *leaves)
{
    rft_lock(&device->reserve_lock);
    if (leaves != NULL) leaves->native = NULL;
    reservation->waits--;
    sweep(device, reservation);
    bool last = reservation->given_up && reservation->waits == 0;
    rft_unlock(&device->reserve_lock);
    if (last) close_reservation(device, reservation);
}

static refit_status wait_users(refit_device *device, const void *base, uint64_t bytes,
                               refit_error *error)
{
    reserve_user *user = NULL;
    rft_reservation *reservation = begin_wait(device, base, bytes, &user);
    if (reservation == NULL) return REFIT_OK;
    int64_t deadline = rft_deadline(device->wait_most_ms);
    refit_status status = REFIT_OK;
    for (; user != NULL && status == REFIT_OK; user = user->next) {
        status = wait_for_stream(device, user, deadline, error);
    }
    end_wait(device, reservation, NULL);
    return status;
}

/* ---- The calls --------------------------------------------------------------------------- */

refit_status rft_device_reserve(refit_device *device, uint64_t bytes, void **out, uint64_t *granule,
                                refit_error *error)
{
    RFT_REFUSE_IF(bytes == 0, error, REFIT_ERR_INVALID,
                  "0 bytes of addresses were asked for: ask for at least 1");
    rft_reservation *made = rft_calloc(1, sizeof *made);
    RFT_REFUSE_IF(made == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for a reservation");
    refit_status status = device->ops.reserve(device->self, bytes, out, granule, error);
    if (status != REFIT_OK) {
        rft_free(made);
        return status;
    }
    made->base = (uintptr_t)*out;
    made->bytes = (bytes + *granule - 1) & ~(*granule - 1);
    rft_lock(&device->reserve_lock);
    made->next = device->reservations;
    device->reservations = made;
    rft_unlock(&device->reserve_lock);
    return REFIT_OK;
}

refit_status rft_device_commit(refit_device *device, void *base, uint64_t bytes, refit_error *error)
{
    return device->ops.commit(device->self, base, bytes, error);
}

refit_status rft_device_decommit(refit_device *device, void *base, uint64_t bytes, uint64_t *freed,
                                 refit_error *error)
{
    uint64_t ignored;
    if (freed == NULL) freed = &ignored;
    *freed = 0;
    RFT_TRY(wait_users(device, base, bytes, error));
    return device->ops.decommit(device->self, base, bytes, freed, error);
}

void rft_device_unreserve(refit_device *device, void *base, uint64_t bytes)
{
    rft_lock(&device->reserve_lock);
    rft_reservation *reservation = take_out(device, base);
    bool waited = reservation != NULL && reservation->waits > 0;
    if (waited) reservation->given_up = true; /* the last to wait closes it */
    rft_unlock(&device->reserve_lock);
    if (reservation != NULL && !waited) close_reservation(device, reservation);
    device->ops.unreserve(device->self, base, bytes);
}

refit_status rft_device_reserve_add_stream(refit_device *device, void *base,
                                           refit_stream_ref stream, refit_error *error)
{
    if (stream.native == NULL) return REFIT_OK;
    rft_lock(&device->reserve_lock);
    refit_status status = add_user(device, base, stream, error);
    rft_unlock(&device->reserve_lock);
    return status;
}

refit_status rft_device_reserve_remove_stream(refit_device *device, void *base,
                                              refit_stream_ref stream, refit_error *error)
{
    if (stream.native == NULL) return REFIT_OK;
    reserve_user *user = NULL;
    rft_reservation *reservation = begin_wait(device, base, 1, &user);
    if (reservation == NULL) return REFIT_OK;
    rft_lock(&device->reserve_lock);
    user = find_user(reservation, stream);
    rft_unlock(&device->reserve_lock);
    refit_status status =
        user == NULL ? REFIT_OK
                     : wait_for_stream(device, user, rft_deadline(device->wait_most_ms), error);
    bool stays = status == REFIT_ERR_TIMEOUT || status == REFIT_ERR_STATE;
    end_wait(device, reservation, stays ? NULL : user);
    return status;
}

/* Under the lock, so that no thread records on the stream between its end and its leaving the
 * lists. */
static refit_status try_end(refit_device *device, refit_stream_ref stream, refit_error *error)
{
    rft_lock(&device->reserve_lock);
    refit_status status = device->ops.stream_close(device->self, stream, error);
    if (status == REFIT_OK) forget_stream(device, stream);
    rft_unlock(&device->reserve_lock);
    return status;
}

/* Closes a stream of the device's own, once its work is done; with it ends its use of all
 * reservations. Waits at most wait_most_ms: REFIT_ERR_TIMEOUT. The lock is not held while the work
 * on the stream goes on. */
static refit_status end_stream(refit_device *device, refit_stream_ref stream, refit_error *error)
{
    rft_looks looks = rft_looks_until(rft_deadline(device->wait_most_ms));
    refit_status status = try_end(device, stream, error);
    while (status == REFIT_ERR_TIMEOUT && rft_poll_again(&looks)) {
        status = try_end(device, stream, error);
    }
    RFT_REFUSE_IF(status == REFIT_ERR_TIMEOUT, error, status,
                  "the stream still has work after %" PRIu32
                  " ms and stays open: close it again later",
                  device->wait_most_ms);
    return status;
}

/* ---- The calls ---------------------------------------------------------------------------- */

#define NEED(condition, error, text)                                                               \
    RFT_REFUSE_IF(!(condition), (error), REFIT_ERR_INVALID, "%s", (text))

#define NEED_SPAN(memory, bytes, error)                                                            \
    NEED(rft_span_exists((memory), (bytes)), (error),                                              \
         "the memory would end beyond the last address: its size is wrong")

#define NEED_DEVICE(device, error) NEED((device) != NULL, (error), "the device is NULL")

refit_status refit_memory_alloc(refit_device *device, uint64_t bytes, void **out,
                                refit_error *error)
{
    NEED_DEVICE(device, error);
    NEED(out != NULL, error, "no place to put the memory: out is NULL");
    NEED(bytes != 0, error, "0 bytes of device memory were asked for: ask for at least 1");
    RFT_TRY(device->ops.memory_alloc(device->self, bytes, out, error));
    atomic_fetch_add(&device->memories, 1);
    return REFIT_OK;
}

refit_status refit_memory_free(refit_device *device, void *memory, refit_error *error)
{
    NEED_DEVICE(device, error);
    if (memory == NULL) return REFIT_OK;
    RFT_TRY(device->ops.memory_free(device->self, memory, error));
    atomic_fetch_sub(&device->memories, 1);
    return REFIT_OK;
}

refit_status rft_device_memory_check(refit_device *device, const void *memory, uint64_t bytes,
                                     rft_memory_range *allocation, refit_error *error)
{
    rft_memory_range ignored;
    NEED(memory != NULL && bytes != 0, error, "there is no memory to look at: NULL or 0 bytes");
    NEED_SPAN(memory, bytes, error);
    return device->ops.memory_check(device->self, memory, bytes,
                                    allocation == NULL ? &ignored : allocation, error);
}

refit_status rft_device_memory_check_next(refit_device *device, const void *memory, uint64_t bytes,
                                          rft_memory_range *last, refit_error *error)
{
    uint64_t at = (uintptr_t)memory - (uintptr_t)last->mapped;
    bool inside =
        memory != NULL && bytes != 0 && at < last->mapped_bytes && bytes <= last->mapped_bytes - at;
    return inside ? REFIT_OK : rft_device_memory_check(device, memory, bytes, last, error);
}

refit_status rft_device_host_pin(refit_device *device, void *memory, uint64_t bytes, bool read_only,
                                 refit_error *error)
{
    NEED(memory != NULL && bytes != 0, error, "there is no memory to page-lock: NULL or 0 bytes");
    NEED_SPAN(memory, bytes, error);
    return device->ops.host_pin(device->self, memory, bytes, read_only, error);
}

void rft_device_host_unpin(refit_device *device, void *memory, uint64_t bytes)
{
    device->ops.host_unpin(device->self, memory, bytes);
}

refit_status refit_stream_open(refit_device *device, refit_stream_ref *out, refit_error *error)
{
    NEED_DEVICE(device, error);
    NEED(out != NULL, error, "no place to put the stream: out is NULL");
    RFT_TRY(device->ops.stream_open(device->self, out, error));
    atomic_fetch_add(&device->streams, 1);
    return REFIT_OK;
}

refit_status refit_stream_close(refit_device *device, refit_stream_ref stream, refit_error *error)
{
    NEED_DEVICE(device, error);
    NEED(stream.native != NULL, error, "REFIT_STREAM_NONE was not opened and cannot be closed");
    RFT_TRY(end_stream(device, stream, error));
    atomic_fetch_sub(&device->streams, 1);
    return REFIT_OK;
}

static refit_status spare_take(refit_device *device, rft_event **out, refit_error *error)
{
    rft_lock(&device->lock);
    rft_event *event = device->spare;
    device->spare = NULL;
    rft_unlock(&device->lock);
    if (event == NULL) return device->ops.event_open(device->self, out, error);
    *out = event;
    return REFIT_OK;
}

static void spare_give(refit_device *device, rft_event *event)
{
    rft_lock(&device->lock);
    rft_event *extra = device->spare;
    device->spare = event;
    rft_unlock(&device->lock);
    if (extra != NULL) device->ops.event_close(device->self, extra);
}

refit_status refit_stream_wait(refit_device *device, refit_stream_ref stream, uint32_t timeout_ms,
                               refit_error *error)
{
    NEED_DEVICE(device, error);
    rft_event *event;
    RFT_TRY(spare_take(device, &event, error));
    refit_status status = device->ops.event_record(device->self, event, stream, error);
    if (status == REFIT_OK) {
        status = device->ops.event_wait(device->self, event, timeout_ms, error);
    }
    spare_give(device, event);
    return status;
}

refit_status refit_stream_call(refit_device *device, refit_stream_ref stream,
                               refit_stream_fn function, void *user, refit_error *error)
{
    NEED_DEVICE(device, error);
    NEED(function != NULL, error, "there is no function to call: it is NULL");
    return device->ops.stream_call(device->self, stream, function, user, error);
}

refit_status refit_stream_copy(refit_device *device, refit_stream_ref stream, void *to,
                               const void *from, uint64_t bytes, refit_error *error)
{
    NEED_DEVICE(device, error);
    rft_copy copy = {.to = to, .from = from, .bytes = bytes};
    return rft_device_copy_batch(device, stream, &copy, 1, RFT_COPY_STREAM, error);
}

refit_status rft_device_copy_batch(refit_device *device, refit_stream_ref stream,
                                   const rft_copy *copies, uint32_t count, rft_copy_order order,
                                   refit_error *error)
{
    if (count == 0) return REFIT_OK;
    uint32_t most = rft_device_get_caps(device).batch_most;
    RFT_REFUSE_IF(count > most, error, REFIT_ERR_INVALID,
                  "%u copies in one batch: the device takes at most %u", count, most);
    for (uint32_t i = 0; i < count; i++) {
        RFT_REFUSE_IF((copies[i].to == NULL || copies[i].from == NULL) && copies[i].bytes != 0,
                      error, REFIT_ERR_INVALID, "copy %u of %u has no source or no destination", i,
                      count);
        RFT_REFUSE_IF(!rft_span_exists(copies[i].to, copies[i].bytes) ||
                          !rft_span_exists(copies[i].from, copies[i].bytes),
                      error, REFIT_ERR_INVALID,
                      "copy %u of %u has %" PRIu64
                      " bytes and would end beyond the last address: its size is wrong",
                      i, count, copies[i].bytes);
    }
    return device->ops.copy_batch(device->self, stream, copies, count, order, error);
}

/* How many bytes lie between the first one and the last, both included. */
static bool rows_reach(uint64_t step, uint64_t bytes, uint64_t count, uint64_t *reach)
{
    uint64_t before;
    return rft_mul_u64(count - 1, step, &before) && rft_add_u64(before, bytes, reach);
}

static refit_status check_rows(const rft_rows *rows, refit_error *error)
{
    uint64_t to_reach, from_reach;
    NEED(rows->to != NULL && rows->from != NULL, error, "rows have no source or no destination");
    NEED(rows->bytes <= rows->to_step && rows->bytes <= rows->from_step, error,
         "rows overlap: the step from one to the next is less than a row");
    NEED(rows_reach(rows->to_step, rows->bytes, rows->count, &to_reach) &&
             rows_reach(rows->from_step, rows->bytes, rows->count, &from_reach),
         error, "rows would end beyond the last address: their size is wrong");
    NEED_SPAN(rows->to, to_reach, error);
    NEED_SPAN(rows->from, from_reach, error);
    return REFIT_OK;
}

#define ROWS_AT_ONCE 64u

static refit_status copy_row_by_row(refit_device *device, refit_stream_ref stream,
                                    const rft_rows *rows, refit_error *error)
{
    rft_copy copies[ROWS_AT_ONCE];
    uint64_t most = rft_min_u64(rft_device_get_caps(device).batch_most, ROWS_AT_ONCE);
    for (uint64_t at = 0; at < rows->count;) {
        uint32_t count = (uint32_t)rft_min_u64(rows->count - at, most);
        for (uint32_t i = 0; i < count; i++, at++)
            copies[i] = (rft_copy){.to = (unsigned char *)rows->to + at * rows->to_step,
                                   .from = (const unsigned char *)rows->from + at * rows->from_step,
                                   .bytes = rows->bytes,
                                   .known_memory = rows->from_host};
        RFT_TRY(rft_device_copy_batch(device, stream, copies, count, RFT_COPY_STREAM, error));
    }
    return REFIT_OK;
}

refit_status rft_device_copy_rows(refit_device *device, refit_stream_ref stream,
                                  const rft_rows *rows, refit_error *error)
{
    if (rows->count == 0 || rows->bytes == 0) return REFIT_OK;
    RFT_TRY(check_rows(rows, error));
    refit_status status = device->ops.copy_rows(device->self, stream, rows, error);
    if (status != REFIT_ERR_UNSUPPORTED) return status;
    return copy_row_by_row(device, stream, rows, error);
}

refit_status rft_device_zero(refit_device *device, refit_stream_ref stream, void *memory,
                             uint64_t bytes, refit_error *error)
{
    if (bytes == 0) return REFIT_OK;
    NEED(memory != NULL, error, "there is no memory to zero: it is NULL");
    NEED_SPAN(memory, bytes, error);
    return device->ops.zero(device->self, stream, memory, bytes, error);
}

refit_status rft_device_digest(refit_device *device, refit_stream_ref stream, const void *memory,
                               uint64_t bytes, uint64_t offset, uint64_t *sum, refit_error *error)
{
    NEED(memory != NULL && sum != NULL, error, "a digest needs memory and a place for its sum");
    NEED_SPAN(memory, bytes, error);
    NEED(offset % 8 == 0, error, "the part of a digest begins at a multiple of 8 bytes");
    return device->ops.digest(device->self, stream, memory, bytes, offset, sum, error);
}

refit_status rft_device_digest_list(refit_device *device, refit_stream_ref stream,
                                    rft_digest_job *jobs, uint32_t count, refit_error *error)
{
    if (count == 0) return REFIT_OK;
    NEED(jobs != NULL && (uintptr_t)jobs % 8 == 0, error,
         "a table of digests lies at a multiple of 8 bytes");
    return device->ops.digest_list(device->self, stream, jobs, count, error);
}

refit_status refit_stream_cast_bf16(refit_device *device, refit_stream_ref stream, uint16_t *to,
                                    const float *from, uint64_t count, refit_error *error)
{
    uint64_t bytes;
    NEED_DEVICE(device, error);
    if (count == 0) return REFIT_OK;
    NEED(to != NULL && from != NULL, error, "a cast needs a source and a destination: one is NULL");
    NEED(rft_mul_u64(count, sizeof *from, &bytes), error,
         "the count is wrong: so many numbers exceed the address space");
    NEED_SPAN(from, bytes, error);
    NEED_SPAN(to, count * sizeof *to, error);
    return device->ops.cast_bf16(device->self, stream, to, from, count, error);
}

static refit_status check_master(const rft_master_job *job, refit_error *error)
{
    uint64_t bytes, coded = rft_master_bytes(job->elements, job->room);
    NEED(job->master != NULL && job->weights != NULL && job->coded != NULL && job->result != NULL,
         error, "masters need weights, a place for what is coded and a result: one is NULL");
    NEED(rft_mul_u64(job->elements, 8, &bytes) && job->room <= RFT_MASTER_ROOM, error,
         "the count or the room is wrong: so many masters exceed the address space");
    NEED((uintptr_t)job->master % 4 == 0 && (uintptr_t)job->weights % 2 == 0, error,
         "masters lie at a multiple of 4 bytes, and their weights at one of 2");
    NEED(((uintptr_t)job->coded | (uintptr_t)job->result | job->room) % 16 == 0, error,
         "coded masters, their room and the result lie at multiples of 16 bytes");
    NEED_SPAN(job->master, 4 * job->elements, error);
    NEED_SPAN(job->weights, 2 * job->elements, error);
    NEED_SPAN(job->coded, coded, error);
    return REFIT_OK;
}

refit_status rft_device_master_encode(refit_device *device, refit_stream_ref stream,
                                      const rft_master_job *job, refit_error *error)
{
    if (job->elements == 0) return REFIT_OK;
    RFT_TRY(check_master(job, error));
    return device->ops.master_encode(device->self, stream, job, error);
}

refit_status rft_device_master_decode(refit_device *device, refit_stream_ref stream,
                                      const rft_master_job *job, refit_error *error)
{
    if (job->elements == 0) return REFIT_OK;
    RFT_TRY(check_master(job, error));
    return device->ops.master_decode(device->self, stream, job, error);
}

refit_status rft_device_delta_exchange(refit_device *device, refit_stream_ref stream,
                                       rft_delta_job *jobs, uint32_t count,
                                       const rft_delta_notes *notes, refit_error *error)
{
    if (count == 0) return REFIT_OK;
    NEED((uintptr_t)jobs % 8 == 0 && (uintptr_t)notes->memory % 16 == 0, error,
         "a table of blocks lies at a multiple of 8 bytes, and memory for notes at one of 16");
    return device->ops.delta_exchange(device->self, stream, jobs, count, notes, error);
}

refit_status rft_device_delta_apply(refit_device *device, refit_stream_ref stream,
                                    rft_delta_job *jobs, uint32_t count, refit_error *error)
{
    if (count == 0) return REFIT_OK;
    NEED((uintptr_t)jobs % 8 == 0, error, "a table of blocks lies at a multiple of 8 bytes");
    return device->ops.delta_apply(device->self, stream, jobs, count, error);
}

refit_status rft_device_share_export(refit_device *device, const void *memory, uint64_t bytes,
                                     rft_share *out, refit_error *error)
{
    NEED(memory != NULL && bytes != 0, error, "there is no memory to share: NULL or 0 bytes");
    NEED_SPAN(memory, bytes, error);
    return device->ops.share_export(device->self, memory, bytes, out, error);
}

refit_status rft_device_share_map(refit_device *device, const rft_share *share, void **out,
                                  refit_error *error)
{
    return device->ops.share_map(device->self, share, out, error);
}

void rft_device_share_unmap(refit_device *device, void *memory)
{
    if (memory != NULL) device->ops.share_unmap(device->self, memory);
}

refit_status rft_device_event_open(refit_device *device, rft_event **out, refit_error *error)
{
    return device->ops.event_open(device->self, out, error);
}

void rft_device_event_close(refit_device *device, rft_event *event)
{
    if (event != NULL) device->ops.event_close(device->self, event);
}

refit_status rft_device_event_record(refit_device *device, rft_event *event,
                                     refit_stream_ref stream, refit_error *error)
{
    return device->ops.event_record(device->self, event, stream, error);
}

refit_status rft_device_event_join(refit_device *device, rft_event *event, refit_stream_ref stream,
                                   refit_error *error)
{
    return device->ops.event_join(device->self, event, stream, error);
}

refit_status rft_device_event_wait(refit_device *device, rft_event *event, uint32_t timeout_ms,
                                   refit_error *error)
{
    return device->ops.event_wait(device->self, event, timeout_ms, error);
}

bool rft_device_is_lost(refit_device *device)
{
    return device->ops.is_lost(device->self);
}
