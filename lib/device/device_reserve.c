/*
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
#include "device/device_reserve.h"

#include <inttypes.h>

#include "base/alloc.h"
#include "base/clock.h"

typedef struct reserve_user {
    struct reserve_user *next;
    void *native;     /* NULL: has left; guarded by reserve_lock, like next */
    rft_event *event; /* owned */
    atomic_bool owed; /* it was recorded, and what it has taken since was not asked for */
} reserve_user;

/* All guarded by the device's reserve_lock. */
typedef struct rft_reservation {
    struct rft_reservation *next;
    uintptr_t base;
    uint64_t bytes;
    reserve_user *users;
    uint32_t waits; /* threads that walk `users` without the lock */
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

/* Takes off the list who has left, unless somebody walks it. */
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

/* The first record shows that there is such a stream. One that captures takes no event now, and
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
    atomic_init(&user->owed, status == REFIT_OK);
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

static refit_status wait_event(refit_device *device, reserve_user *user, int64_t deadline,
                               refit_error *error)
{
    uint32_t left_ms = (uint32_t)rft_ms_until(deadline);
    refit_status status = device->ops.event_wait(device->self, user->event, left_ms, error);
    atomic_store(&user->owed, status == REFIT_ERR_TIMEOUT);
    RFT_REFUSE_IF(status == REFIT_ERR_TIMEOUT, error, REFIT_ERR_TIMEOUT,
                  "a stream that uses an arena still had work after %" PRIu32
                  " ms, so the memory stays: call again later",
                  device->block_ms);
    return status;
}

/* Waits for what the stream has queued by now. A record would wipe out a failure that its event
 * has taken since a wait that timed out, so that one is asked for first. */
static refit_status settle(refit_device *device, reserve_user *user, int64_t deadline,
                           refit_error *error)
{
    if (atomic_load(&user->owed)) RFT_TRY(wait_event(device, user, deadline, error));
    rft_lock(&device->reserve_lock);
    bool left = user->native == NULL;
    refit_status status = left ? REFIT_OK : record(device, user, error);
    rft_unlock(&device->reserve_lock);
    if (left || status != REFIT_OK) return status;
    return wait_event(device, user, deadline, error);
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
    rft_unlock(&device->reserve_lock);
}

static refit_status wait_users(refit_device *device, const void *base, uint64_t bytes,
                               refit_error *error)
{
    reserve_user *user = NULL;
    rft_reservation *reservation = begin_wait(device, base, bytes, &user);
    if (reservation == NULL) return REFIT_OK;
    int64_t deadline = rft_deadline(device->block_ms);
    refit_status status = REFIT_OK;
    for (; user != NULL && status == REFIT_OK; user = user->next) {
        status = settle(device, user, deadline, error);
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
    rft_unlock(&device->reserve_lock);
    if (reservation != NULL) close_reservation(device, reservation);
    device->ops.unreserve(device->self, base, bytes);
}

refit_status rft_device_reserve_use(refit_device *device, void *base, refit_stream_ref stream,
                                    refit_error *error)
{
    if (stream.native == NULL) return REFIT_OK;
    rft_lock(&device->reserve_lock);
    refit_status status = add_user(device, base, stream, error);
    rft_unlock(&device->reserve_lock);
    return status;
}

refit_status rft_device_reserve_unuse(refit_device *device, void *base, refit_stream_ref stream,
                                      refit_error *error)
{
    if (stream.native == NULL) return REFIT_OK;
    reserve_user *user = NULL;
    rft_reservation *reservation = begin_wait(device, base, 1, &user);
    if (reservation == NULL) return REFIT_OK;
    rft_lock(&device->reserve_lock);
    user = find_user(reservation, stream);
    rft_unlock(&device->reserve_lock);
    refit_status status =
        user == NULL ? REFIT_OK : settle(device, user, rft_deadline(device->block_ms), error);
    bool stays = status == REFIT_ERR_TIMEOUT || status == REFIT_ERR_STATE;
    end_wait(device, reservation, stays ? NULL : user);
    return status;
}

/* Under the lock, so that nobody records on it between its end and its leaving the lists. */
static refit_status try_end(refit_device *device, refit_stream_ref stream, refit_error *error)
{
    rft_lock(&device->reserve_lock);
    refit_status status = device->ops.stream_close(device->self, stream, error);
    if (status == REFIT_OK) forget_stream(device, stream);
    rft_unlock(&device->reserve_lock);
    return status;
}

/* The lock is not held while the work on the stream goes on. */
refit_status rft_device_end_stream(refit_device *device, refit_stream_ref stream,
                                   refit_error *error)
{
    rft_looks looks = rft_looks_until(rft_deadline(device->block_ms));
    refit_status status = try_end(device, stream, error);
    while (status == REFIT_ERR_TIMEOUT && rft_look_again(&looks)) {
        status = try_end(device, stream, error);
    }
    RFT_REFUSE_IF(status == REFIT_ERR_TIMEOUT, error, status,
                  "the stream still has work after %" PRIu32
                  " ms and stays open: close it again later",
                  device->block_ms);
    return status;
}
