/*
 * Arenas of the host device: addresses that stay, memory that comes and goes.
 *
 * A reservation is a mapping without access. Commit makes pages accessible (the kernel fills them
 * with zeros when they are first touched); decommit takes the access and the pages away, so that a
 * stray pointer faults as it would on a GPU. All under the lock of the memory: these are short
 * system calls, and books and pages must agree.
 */
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "device/host_map.h"
#include "device/host_memory.h"

static rft_extent range_of(const void *base, uint64_t bytes)
{
    return (rft_extent){(uintptr_t)base, (uintptr_t)base + bytes};
}

refit_status rft_host_memory_reserve(rft_host_memory *memory, uint64_t bytes, void **out,
                                     uint64_t *granule, refit_error *error)
{
    RFT_REFUSE_IF(!rft_align_u64(bytes, memory->granule, &bytes), error, REFIT_ERR_INVALID,
                  "%" PRIu64 " bytes are more than there are addresses", bytes);
    rft_host_reservation *reservation = rft_calloc(1, sizeof *reservation);
    RFT_REFUSE_IF(reservation == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for a reservation");
    void *base = rft_host_map(bytes, true);
    if (base == NULL) {
        rft_free(reservation);
        return rft_fail_sub(error, REFIT_ERR_DEVICE_MEMORY, errno,
                            "%" PRIu64 " bytes of addresses could not be reserved: %s", bytes,
                            strerror(errno));
    }
    reservation->range = range_of(base, bytes);
    rft_lock(&memory->lock);
    reservation->next = memory->reservations;
    memory->reservations = reservation;
    rft_unlock(&memory->lock);
    *out = base;
    *granule = memory->granule;
    return REFIT_OK;
}

/* The reservation that holds the whole range, the lock held. */
static refit_status find_reservation(rft_host_memory *memory, const void *base, uint64_t bytes,
                                     rft_host_reservation **out, refit_error *error)
{
    rft_extent range = range_of(base, bytes);
    RFT_REFUSE_IF((range.from | bytes) % memory->granule != 0, error, REFIT_ERR_INVALID,
                  "%" PRIu64 " bytes at %p are not whole pages of %" PRIu64 " bytes", bytes, base,
                  memory->granule);
    for (rft_host_reservation *it = memory->reservations; it != NULL; it = it->next) {
        if (range.from < it->range.from || range.from > it->range.to) continue;
        if (bytes > it->range.to - range.from) continue;
        *out = it;
        return REFIT_OK;
    }
    return rft_fail(error, REFIT_ERR_INVALID,
                    "%" PRIu64 " bytes at %p lie in no reservation of this device", bytes, base);
}

static refit_status fail_pages(refit_error *error, const char *what, uint64_t bytes, int code)
{
    return rft_fail_sub(error, REFIT_ERR_DEVICE_MEMORY, code,
                        "%" PRIu64 " bytes of an arena could not be %s: %s; vm.max_map_count "
                        "bounds how many pieces a process may have",
                        bytes, what, strerror(code));
}

static refit_status commit_locked(rft_host_memory *memory, void *base, uint64_t bytes,
                                  refit_error *error)
{
    rft_host_reservation *reservation;
    RFT_TRY(find_reservation(memory, base, bytes, &reservation, error));
    rft_extent range = range_of(base, bytes);
    uint64_t missing = bytes - rft_host_extents_covered(&reservation->committed, range);
    if (missing == 0) return REFIT_OK;
    RFT_TRY(rft_host_extents_prepare(&reservation->committed, error));
    RFT_TRY(rft_host_memory_take(memory, missing, error));
    if (mprotect(base, bytes, PROT_READ | PROT_WRITE) != 0) {
        rft_host_memory_give(memory, missing);
        return fail_pages(error, "committed", bytes, errno);
    }
    rft_host_extents_add(&reservation->committed, range);
    return REFIT_OK;
}

refit_status rft_host_memory_commit(rft_host_memory *memory, void *base, uint64_t bytes,
                                    refit_error *error)
{
    rft_lock(&memory->lock);
    refit_status status = commit_locked(memory, base, bytes, error);
    rft_unlock(&memory->lock);
    return status;
}

/* Access goes first: if that is refused nothing has changed. The kernel refuses the second step for
 * pages that the process has locked (mlockall). */
static refit_status decommit_locked(rft_host_memory *memory, void *base, uint64_t bytes,
                                    uint64_t *freed, refit_error *error)
{
    rft_host_reservation *reservation;
    RFT_TRY(find_reservation(memory, base, bytes, &reservation, error));
    rft_extent range = range_of(base, bytes);
    uint64_t there = rft_host_extents_covered(&reservation->committed, range);
    if (there == 0) return REFIT_OK;
    RFT_TRY(rft_host_extents_prepare(&reservation->committed, error));
    if (mprotect(base, bytes, PROT_NONE) != 0) {
        return fail_pages(error, "closed to access", bytes, errno);
    }
    if (madvise(base, bytes, MADV_DONTNEED) != 0) {
        int code = errno;
        (void)mprotect(base, bytes, PROT_READ | PROT_WRITE);
        return fail_pages(error, "given back", bytes, code);
    }
    rft_host_extents_remove(&reservation->committed, range);
    rft_host_memory_give(memory, there);
    *freed = there;
    return REFIT_OK;
}

refit_status rft_host_memory_decommit(rft_host_memory *memory, void *base, uint64_t bytes,
                                      uint64_t *freed, refit_error *error)
{
    rft_lock(&memory->lock);
    refit_status status = decommit_locked(memory, base, bytes, freed, error);
    rft_unlock(&memory->lock);
    return status;
}

static rft_host_reservation *unlink_locked(rft_host_memory *memory, const void *base)
{
    rft_host_reservation **link = &memory->reservations;
    while (*link != NULL && (*link)->range.from != (uintptr_t)base) {
        link = &(*link)->next;
    }
    rft_host_reservation *found = *link;
    if (found != NULL) *link = found->next;
    return found;
}

void rft_host_memory_unreserve(rft_host_memory *memory, void *base)
{
    rft_lock(&memory->lock);
    rft_host_reservation *reservation = unlink_locked(memory, base);
    if (reservation != NULL) {
        munmap(base, reservation->range.to - reservation->range.from);
        rft_host_memory_give(memory,
                             rft_host_extents_covered(&reservation->committed, reservation->range));
    }
    rft_unlock(&memory->lock);
    if (reservation == NULL) return;
    rft_host_extents_close(&reservation->committed);
    rft_free(reservation);
}

/* What lies outside all reservations is the caller's business; so is NULL, the source of zeros. */
static bool is_there_locked(const rft_host_memory *memory, rft_extent range)
{
    for (const rft_host_reservation *it = memory->reservations; it != NULL; it = it->next) {
        rft_extent shared = {rft_max_u64(range.from, it->range.from),
                             rft_min_u64(range.to, it->range.to)};
        if (shared.from >= shared.to) continue;
        if (rft_host_extents_covered(&it->committed, shared) != shared.to - shared.from) {
            return false;
        }
    }
    return true;
}

uint32_t rft_host_memory_find_lost(rft_host_memory *memory, const rft_copy *copies, uint32_t count)
{
    rft_lock(&memory->lock);
    uint32_t at = memory->reservations == NULL ? count : 0;
    while (at < count && is_there_locked(memory, range_of(copies[at].to, copies[at].bytes)) &&
           is_there_locked(memory, range_of(copies[at].from, copies[at].bytes))) {
        at++;
    }
    rft_unlock(&memory->lock);
    return at;
}
