/*
 * Device memory of the host device, and the accounting that makes its capacity real.
 *
 * Allocations of a megabyte and more are mappings of their own: when they are freed the pages go
 * back to the operating system at once, as they do on a GPU. Smaller ones come from the C library.
 * Bytes are reserved before they are taken and given back after they are gone, so that the sum of
 * what exists never exceeds the capacity. Reservations, whose addresses stay while their memory
 * comes and goes, share the accounting. Page locks, and copies, digests and casts on the
 * calling thread, are here too.
 */
#include "device/host/host_memory.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "kernels/cast.h"
#include "kernels/copy.h"
#include "kernels/digest.h"

/* ---- Extents ---------------------------------------------------------------------------------
 * The committed part of a reservation. Neighbours are joined, so an arena that is resident as a
 * whole is one range however many regions it holds.
 */

#define ROOM_FIRST 16u

static void extents_close(rft_host_extents *set)
{
    rft_free(set->list);
}

/* Makes sure that the next add or remove has the memory it needs; those two cannot fail. */
static refit_status extents_prepare(rft_host_extents *set, refit_error *error)
{
    if (set->count < set->room) return REFIT_OK;
    uint32_t room = set->room == 0 ? ROOM_FIRST : set->room * 2;
    rft_extent *list = rft_realloc(set->list, room, sizeof *list);
    RFT_REFUSE_IF(list == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory to keep track of %u ranges of an arena", room);
    set->list = list;
    set->room = room;
    return REFIT_OK;
}

/* The first range that ends at or after `at`. */
static uint32_t first_reaching(const rft_host_extents *set, uintptr_t at)
{
    uint32_t low = 0, high = set->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (set->list[middle].to < at) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Puts `added` ranges of `with` in the place of those in [first, last). */
static void replace(rft_host_extents *set, uint32_t first, uint32_t last, const rft_extent *with,
                    uint32_t added)
{
    memmove(set->list + first + added, set->list + last, (set->count - last) * sizeof *set->list);
    memcpy(set->list + first, with, added * sizeof *with);
    set->count = set->count - (last - first) + added;
}

static void extents_add(rft_host_extents *set, rft_extent added)
{
    uint32_t first = first_reaching(set, added.from);
    uint32_t last = first;
    while (last < set->count && set->list[last].from <= added.to) {
        added.from = set->list[last].from < added.from ? set->list[last].from : added.from;
        added.to = set->list[last].to > added.to ? set->list[last].to : added.to;
        last++;
    }
    replace(set, first, last, &added, 1);
}

static void extents_remove(rft_host_extents *set, rft_extent removed)
{
    uint32_t first = first_reaching(set, removed.from + 1);
    uint32_t last = first;
    rft_extent left[2];
    uint32_t count = 0;
    while (last < set->count && set->list[last].from < removed.to) {
        rft_extent cut = set->list[last++];
        if (cut.from < removed.from) left[count++] = (rft_extent){cut.from, removed.from};
        if (cut.to > removed.to) left[count++] = (rft_extent){removed.to, cut.to};
    }
    replace(set, first, last, left, count);
}

/* How many bytes of `range` are in the set. */
static uint64_t extents_covered(const rft_host_extents *set, rft_extent range)
{
    uint64_t covered = 0;
    for (uint32_t i = first_reaching(set, range.from + 1); i < set->count; i++) {
        if (set->list[i].from >= range.to) break;
        covered +=
            rft_min_u64(set->list[i].to, range.to) - rft_max_u64(set->list[i].from, range.from);
    }
    return covered;
}

/* ---- Mappings --------------------------------------------------------------------------------
 * Mappings that begin where a huge page can. The kernel is asked for huge pages: memory that
 * returns to the device is written at once from end to end, and its page faults then cost a third.
 *
 * A machine without huge pages ignores the request; nothing else depends on it.
 */

#define HUGE_PAGE (UINT64_C(2) << 20)

/* Gives back what lies before the first place of a huge page, and what is left at the end. */
static char *trim(char *mapped, uint64_t mapped_bytes, uint64_t bytes)
{
    uint64_t before = -(uintptr_t)mapped % HUGE_PAGE;
    uint64_t after = mapped_bytes - before - bytes;
    if (before != 0) munmap(mapped, before);
    if (after != 0) munmap(mapped + before + bytes, after);
    return mapped + before;
}

/* Maps `bytes` (a multiple of a page) that can be read and written, or, for a reservation, that
 * have neither access nor memory. NULL with errno. Give back with munmap. */
static void *map(uint64_t bytes, bool reservation)
{
    int protection = reservation ? PROT_NONE : PROT_READ | PROT_WRITE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (reservation ? MAP_NORESERVE : 0);
    uint64_t mapped_bytes = bytes;
    if (bytes >= HUGE_PAGE && !rft_add_u64(bytes, HUGE_PAGE, &mapped_bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    void *mapped = mmap(NULL, mapped_bytes, protection, flags, -1, 0);
    if (mapped == MAP_FAILED) return NULL;
    if (bytes < HUGE_PAGE) return mapped;
    char *block = trim(mapped, mapped_bytes, bytes);
    (void)madvise(block, bytes, MADV_HUGEPAGE);
    return block;
}

/* ---- Memory ------------------------------------------------------------------------------- */

#define BLOCK_ALIGNMENT UINT64_C(512)
#define MAP_LEAST       (UINT64_C(1) << 20)

refit_status rft_host_memory_open(rft_host_memory *memory, uint64_t capacity, refit_error *error)
{
    *memory = (rft_host_memory){.capacity = capacity, .granule = (uint64_t)sysconf(_SC_PAGESIZE)};
    return rft_mutex_open(&memory->lock, error);
}

void rft_host_memory_close(rft_host_memory *memory)
{
    rft_allocations_close(&memory->allocations);
    rft_mutex_close(&memory->lock);
}

void rft_host_lose(rft_host_memory *memory, const refit_error *why)
{
    rft_lock(&memory->lock);
    if (!atomic_load(&memory->is_lost)) {
        (void)rft_fail(&memory->loss, REFIT_ERR_DEVICE,
                       "the device is lost, with all that its memory held: %s", why->text);
        atomic_store(&memory->is_lost, true);
    }
    rft_unlock(&memory->lock);
}

refit_status rft_host_check_lost(rft_host_memory *memory, refit_error *error)
{
    if (!atomic_load(&memory->is_lost)) return REFIT_OK;
    if (error != NULL) *error = memory->loss;
    return REFIT_ERR_DEVICE;
}

uint64_t rft_host_memory_used(rft_host_memory *memory)
{
    rft_lock(&memory->lock);
    uint64_t used = memory->used;
    rft_unlock(&memory->lock);
    return used;
}

/* Reserves `bytes`, the lock held, or refuses. give takes them off the accounting. */
static refit_status take(rft_host_memory *memory, uint64_t bytes, refit_error *error)
{
    RFT_REFUSE_IF(bytes > memory->capacity - memory->used, error, REFIT_ERR_DEVICE_MEMORY,
                  "the device is full: %" PRIu64 " bytes were asked for, %" PRIu64 " of %" PRIu64
                  " are free; free or offload something first",
                  bytes, memory->capacity - memory->used, memory->capacity);
    memory->used += bytes;
    return REFIT_OK;
}

static void give(rft_host_memory *memory, uint64_t bytes)
{
    memory->used -= bytes;
}

static void *take_block(uint64_t bytes)
{
    void *block = NULL;
    if (bytes < MAP_LEAST) {
        errno = posix_memalign(&block, BLOCK_ALIGNMENT, bytes);
        return errno == 0 ? block : NULL;
    }
    return map(bytes, false);
}

static void give_block(void *block, uint64_t bytes)
{
    if (bytes < MAP_LEAST) {
        free(block);
    } else {
        munmap(block, bytes);
    }
}

static refit_status reserve_block(rft_host_memory *memory, void *block, uint64_t bytes,
                                  refit_error *error)
{
    rft_lock(&memory->lock);
    refit_status status = rft_allocations_add(&memory->allocations, block, bytes, error);
    rft_unlock(&memory->lock);
    return status;
}

static void unreserve(rft_host_memory *memory, uint64_t bytes)
{
    rft_lock(&memory->lock);
    give(memory, bytes);
    rft_unlock(&memory->lock);
}

/* The block, once its bytes are reserved. */
static refit_status place_block(rft_host_memory *memory, uint64_t bytes, void **out,
                                refit_error *error)
{
    void *block = take_block(bytes);
    RFT_REFUSE_IF(block == NULL, error, REFIT_ERR_DEVICE_MEMORY,
                  "the machine has no %" PRIu64 " bytes for the host device: %s", bytes,
                  strerror(errno));
    refit_status status = reserve_block(memory, block, bytes, error);
    if (status != REFIT_OK) {
        give_block(block, bytes);
        return status;
    }
    *out = block;
    return REFIT_OK;
}

refit_status rft_host_memory_alloc(rft_host_memory *memory, uint64_t bytes, void **out,
                                   refit_error *error)
{
    uint64_t unit = bytes < MAP_LEAST ? BLOCK_ALIGNMENT : memory->granule;
    RFT_REFUSE_IF(!rft_align_u64(bytes, unit, &bytes), error, REFIT_ERR_DEVICE_MEMORY,
                  "%" PRIu64 " bytes exceed the address space", bytes);
    rft_lock(&memory->lock);
    refit_status status = take(memory, bytes, error);
    rft_unlock(&memory->lock);
    if (status != REFIT_OK) return status;
    status = place_block(memory, bytes, out, error);
    if (status != REFIT_OK) unreserve(memory, bytes);
    return status;
}

refit_status rft_host_memory_free(rft_host_memory *memory, void *block, refit_error *error)
{
    rft_lock(&memory->lock);
    uint64_t bytes = rft_allocations_take(&memory->allocations, block);
    rft_unlock(&memory->lock);
    RFT_REFUSE_IF(bytes == 0, error, REFIT_ERR_INVALID,
                  "%p was not given by refit_memory_alloc of this device, or was freed before",
                  block);
    give_block(block, bytes);
    unreserve(memory, bytes);
    return REFIT_OK;
}

/* ---- Reservations ----------------------------------------------------------------------------
 * Arenas of the host device: addresses that stay, memory that comes and goes.
 *
 * A reservation is a mapping without access. Commit makes pages accessible (the kernel fills them
 * with zeros when they are first touched); decommit takes the access and the pages away, so that a
 * stray pointer faults as it would on a GPU. All under the lock of the memory: these are short
 * system calls, and accounting and pages must agree.
 */

static rft_extent range_of(const void *base, uint64_t bytes)
{
    return (rft_extent){(uintptr_t)base, (uintptr_t)base + bytes};
}

refit_status rft_host_memory_reserve(rft_host_memory *memory, uint64_t bytes, void **out,
                                     uint64_t *granule, refit_error *error)
{
    RFT_REFUSE_IF(!rft_align_u64(bytes, memory->granule, &bytes), error, REFIT_ERR_INVALID,
                  "%" PRIu64 " bytes exceed the address space", bytes);
    rft_host_reservation *reservation = rft_calloc(1, sizeof *reservation);
    RFT_REFUSE_IF(reservation == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for a reservation");
    void *base = map(bytes, true);
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
    uint64_t missing = bytes - extents_covered(&reservation->committed, range);
    if (missing == 0) return REFIT_OK;
    RFT_TRY(extents_prepare(&reservation->committed, error));
    RFT_TRY(take(memory, missing, error));
    if (mprotect(base, bytes, PROT_READ | PROT_WRITE) != 0) {
        give(memory, missing);
        return fail_pages(error, "committed", bytes, errno);
    }
    extents_add(&reservation->committed, range);
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
    uint64_t there = extents_covered(&reservation->committed, range);
    if (there == 0) return REFIT_OK;
    RFT_TRY(extents_prepare(&reservation->committed, error));
    if (mprotect(base, bytes, PROT_NONE) != 0) {
        return fail_pages(error, "closed to access", bytes, errno);
    }
    if (madvise(base, bytes, MADV_DONTNEED) != 0) {
        int code = errno;
        (void)mprotect(base, bytes, PROT_READ | PROT_WRITE);
        return fail_pages(error, "given back", bytes, code);
    }
    extents_remove(&reservation->committed, range);
    give(memory, there);
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
        give(memory, extents_covered(&reservation->committed, reservation->range));
    }
    rft_unlock(&memory->lock);
    if (reservation == NULL) return;
    extents_close(&reservation->committed);
    rft_free(reservation);
}

/* Memory outside all reservations is not checked, nor is NULL, the source of zeros. */
static bool is_there_locked(const rft_host_memory *memory, rft_extent range)
{
    for (const rft_host_reservation *it = memory->reservations; it != NULL; it = it->next) {
        rft_extent shared = {rft_max_u64(range.from, it->range.from),
                             rft_min_u64(range.to, it->range.to)};
        if (shared.from >= shared.to) continue;
        if (extents_covered(&it->committed, shared) != shared.to - shared.from) {
            return false;
        }
    }
    return true;
}

/* The first of `copies` that touches bytes of a reservation which have no memory now; `count` if
 * none does. */
static uint32_t find_lost(rft_host_memory *memory, const rft_copy *copies, uint32_t count)
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

/* ---- Page locks ------------------------------------------------------------------------------
 * mlock and munlock, and the advice where the limit is too low.
 *
 * Whole pages are locked, and locks do not nest: two ranges that share a page are both unlocked by
 * the first to go. Callers pin only pages of their own.
 */

refit_status rft_host_pin(const void *memory, uint64_t bytes, refit_error *error)
{
    if (mlock(memory, bytes) == 0) return REFIT_OK;
    int code = errno;
    struct rlimit limit = {0};
    (void)getrlimit(RLIMIT_MEMLOCK, &limit);
    return rft_fail_sub(error, REFIT_ERR_PIN, code,
                        "%" PRIu64 " bytes could not be page-locked: %s; RLIMIT_MEMLOCK is %" PRIu64
                        " bytes: raise it (ulimit -l, docker --ulimit memlock=-1) or set "
                        "offload.pin: prefer",
                        bytes, strerror(code), (uint64_t)limit.rlim_cur);
}

void rft_host_unpin(const void *memory, uint64_t bytes)
{
    (void)munlock(memory, bytes);
}

/* ---- Copies ----------------------------------------------------------------------------------
 * Copies on the CPU: small ones by the thread that asks, large ones shared by bytes with the
 * threads of a pool.
 *
 * A job is a list of copies, with a cursor. Its threads claim the next part of it, some hundred
 * kilobytes that may hold many small copies or a piece of a large one. So the work is shared by
 * bytes, not by copies, and a helper that comes late finds less to do.
 */

/* Less than this is copied before a helper has woken up. */
#define SHARE_LEAST  (UINT64_C(512) << 10)
#define STREAM_LEAST (UINT64_C(1) << 20)
#define PART_MOST    (UINT64_C(4) << 20)
#define PART_LEAST   (UINT64_C(128) << 10)

/* A place in a list of copies. */
typedef struct cursor {
    const rft_copy *copy;
    uint64_t done; /* bytes of it */
} cursor;

typedef struct copy_job {
    rft_pool_job job; /* first, so that it is the job's address */
    cursor at;        /* guarded by the pool's lock, like left */
    uint64_t left;    /* bytes not claimed yet */
    uint32_t threads;
} copy_job;

refit_status rft_host_copy_open(rft_pool *pool, uint32_t threads, refit_error *error)
{
    static const rft_pool_kind copies = {.thread = "refit-copy", .work = "copies"};
    return rft_pool_open(pool, &copies, threads, error);
}

/* What happens to the bytes that a cursor passes. */
typedef void (*pass_fn)(void *to, const void *from, size_t bytes);

static void pass_by(void *to, const void *from, size_t bytes)
{
    (void)to;
    (void)from;
    (void)bytes;
}

/* Small copies of a large job are streamed too: together they are too large for the caches. */
static void copy_shared(void *to, const void *from, size_t bytes)
{
    if (from == NULL) {
        memset(to, 0, bytes);
    } else {
        rft_copy_piece(to, from, bytes);
    }
}

static void copy_alone(void *to, const void *from, size_t bytes)
{
    if (from == NULL) {
        memset(to, 0, bytes);
    } else {
        rft_copy_bytes(to, from, bytes);
    }
}

/* Moves `bytes` on from `at`. */
static cursor advance(cursor at, uint64_t bytes, pass_fn pass)
{
    while (bytes != 0) {
        const rft_copy *it = at.copy;
        uint64_t step = rft_min_u64(bytes, it->bytes - at.done);
        const char *from = it->from == NULL ? NULL : (const char *)it->from + at.done;
        if (step != 0) pass((char *)it->to + at.done, from, step);
        bytes -= step;
        at.done += step;
        if (at.done == it->bytes) at = (cursor){it + 1, 0};
    }
    return at;
}

/* Large parts at first, smaller ones towards the end, so that all finish together. */
static uint64_t part_of(const copy_job *copies)
{
    uint64_t part = copies->left / (2 * (uint64_t)copies->threads);
    part = rft_max_u64(rft_min_u64(part, PART_MOST), PART_LEAST);
    return rft_min_u64(part & ~UINT64_C(63), copies->left);
}

static bool claim_part(rft_pool_job *job, rft_pool_part *part)
{
    copy_job *copies = (copy_job *)job;
    if (copies->left == 0) return false;
    uint64_t bytes = part_of(copies);
    *part = (rft_pool_part){.at = copies->at.copy, .from = copies->at.done, .count = bytes};
    copies->at = advance(copies->at, bytes, pass_by);
    copies->left -= bytes;
    return true;
}

static void copy_part(rft_pool_job *job, const rft_pool_part *part, uint32_t worker)
{
    (void)job;
    (void)worker;
    (void)advance((cursor){part->at, part->from}, part->count, copy_shared);
}

/* Does all of them and returns when they are done. */
static void copy_all(rft_pool *pool, const rft_copy *copies, uint32_t count)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        bytes += copies[i].bytes;
    }
    if (pool->threads > 1 && bytes >= SHARE_LEAST) {
        copy_job shared = {.job = {.claim = claim_part, .run = copy_part},
                           .at = {copies, 0},
                           .left = bytes,
                           .threads = pool->threads};
        rft_pool_share(pool, &shared.job);
    } else {
        (void)advance((cursor){copies, 0}, bytes, bytes < STREAM_LEAST ? copy_alone : copy_shared);
    }
}

refit_status rft_host_check_copies(rft_host_memory *memory, const rft_copy *copies, uint32_t count,
                                   refit_error *error)
{
    uint32_t lost = find_lost(memory, copies, count);
    RFT_REFUSE_IF(lost != count, error, REFIT_ERR_COPY,
                  "%" PRIu64 " bytes from %p to %p touch memory of an arena that is not there now: "
                  "commit it first",
                  copies[lost].bytes, copies[lost].from, copies[lost].to);
    return REFIT_OK;
}

refit_status rft_host_copy_now(rft_host_memory *memory, rft_pool *pool, const rft_copy *copies,
                               uint32_t count, refit_error *error)
{
    RFT_TRY(rft_host_check_copies(memory, copies, count, error));
    copy_all(pool, copies, count);
    return REFIT_OK;
}

/* ---- Digests, casts and masters --------------------------------------------------------------
 * Digests, casts and the coding of masters by the C twins of the GPU's kernels. Memory is looked up
 * first, so that memory of an arena which is not committed is a failure and not a crash. Knows
 * nothing of streams.
 */

static refit_status check_there(rft_host_memory *memory, const void *at, uint64_t bytes,
                                refit_error *error)
{
    rft_copy touched = {.from = at, .bytes = bytes};
    RFT_REFUSE_IF(find_lost(memory, &touched, 1) == 0, error, REFIT_ERR_COPY,
                  "%" PRIu64 " bytes at %p are memory of an arena that is not there now: commit it "
                  "first",
                  bytes, at);
    return REFIT_OK;
}

refit_status rft_host_digest_now(rft_host_memory *memory, const void *from, uint64_t bytes,
                                 uint64_t offset, uint64_t *sum, refit_error *error)
{
    RFT_TRY(check_there(memory, from, bytes, error));
    *sum = rft_digest_part(from, bytes, offset);
    return REFIT_OK;
}

refit_status rft_host_digest_list_now(rft_host_memory *memory, rft_digest_job *jobs, uint32_t count,
                                      refit_error *error)
{
    RFT_TRY(check_there(memory, jobs, count * sizeof *jobs, error));
    for (uint32_t i = 0; i < count; i++) {
        const void *from = (const void *)(uintptr_t)jobs[i].from;
        const void *to = (const void *)(uintptr_t)jobs[i].to;
        RFT_TRY(check_there(memory, from, jobs[i].bytes, error));
        if (to != NULL) RFT_TRY(check_there(memory, to, jobs[i].bytes, error));
    }
    rft_digest_list(jobs, count);
    return REFIT_OK;
}

refit_status rft_host_cast_now(rft_host_memory *memory, uint16_t *to, const float *from,
                               uint64_t count, refit_error *error)
{
    RFT_TRY(check_there(memory, to, count * sizeof *to, error));
    RFT_TRY(check_there(memory, from, count * sizeof *from, error));
    rft_cast_bf16(to, from, count);
    return REFIT_OK;
}

static refit_status check_master(rft_host_memory *memory, const rft_master_job *job,
                                 refit_error *error)
{
    RFT_TRY(check_there(memory, job->master, 4 * job->elements, error));
    RFT_TRY(check_there(memory, job->weights, 2 * job->elements, error));
    RFT_TRY(check_there(memory, job->coded, rft_master_bytes(job->elements, job->room), error));
    return check_there(memory, job->result, sizeof *job->result, error);
}

/* One job, unit by unit. */
typedef struct unit_work {
    const rft_master_job *job;
    void (*code)(const rft_master_job *unit);
    atomic_uint found;
    atomic_uint need;
} unit_work;

static void encode_unit(const rft_master_job *unit)
{
    rft_master_split(unit);
    rft_master_list(unit);
}

static void add_result(unit_work *work, const rft_master_result *result)
{
    atomic_fetch_or(&work->found, result->found);
    unsigned need = atomic_load(&work->need);
    while (need < result->need && !atomic_compare_exchange_weak(&work->need, &need, result->need)) {
    }
}

static void do_unit(void *user, uint32_t item, uint32_t worker)
{
    unit_work *work = user;
    rft_master_result result = {0};
    rft_master_job unit = *work->job;
    uint64_t first = (uint64_t)item * RFT_MASTER_UNIT;
    (void)worker;
    unit.master = (char *)unit.master + 4 * first;
    unit.weights = (const char *)unit.weights + 2 * first;
    unit.coded = (char *)unit.coded + rft_master_bytes(first, unit.room);
    unit.result = &result;
    unit.elements = rft_min_u64(RFT_MASTER_UNIT, unit.elements - first);
    work->code(&unit);
    add_result(work, &result);
}

static refit_status code_units(rft_host_memory *memory, rft_pool *pool, const rft_master_job *job,
                               void (*code)(const rft_master_job *unit), refit_error *error)
{
    unit_work work = {.job = job, .code = code};
    RFT_TRY(check_master(memory, job, error));
    uint64_t units = (job->elements + RFT_MASTER_UNIT - 1) / RFT_MASTER_UNIT;
    RFT_REFUSE_IF(units > UINT32_MAX, error, REFIT_ERR_LIMIT,
                  "%" PRIu64 " masters are too many for one call", job->elements);
    atomic_init(&work.found, job->result->found);
    atomic_init(&work.need, job->result->need);
    rft_pool_items(pool, (uint32_t)units, do_unit, &work);
    *job->result = (rft_master_result){atomic_load(&work.found), atomic_load(&work.need)};
    return REFIT_OK;
}

refit_status rft_host_encode_now(rft_host_memory *memory, rft_pool *pool, const rft_master_job *job,
                                 refit_error *error)
{
    return code_units(memory, pool, job, encode_unit, error);
}

refit_status rft_host_decode_now(rft_host_memory *memory, rft_pool *pool, const rft_master_job *job,
                                 refit_error *error)
{
    return code_units(memory, pool, job, rft_master_join, error);
}
