/*
 * Arenas on a GPU, by its driver's virtual memory management: the list of reserved ranges. A range
 * is a range of addresses; a chunk is one handle of memory mapped to it.
 *
 * device_calls.c waits for the streams that use a range before it calls decommit. Where the driver
 * or the platform has no such management there is no list, and reserve says so.
 */
#include "device/cuda/cuda_device.h"

#include <inttypes.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/log.h"
#include "device/cuda/cuda_memory.h"

/* ---- Chunks ----------------------------------------------------------------------------------
 * Physical memory of a GPU is mapped to reserved addresses and unmapped, one large handle at a
 * time: the cost of these calls grows with their number, hardly with the bytes. Knows one chunk and
 * the accounting, not what the memory holds.
 *
 * Such memory is accessible to those GPUs that are named when it is mapped, whatever
 * cuCtxEnablePeerAccess has allowed: its own, and every other one that this process uses by then
 * (its primary context is active) and that the machine lets reach it. A process with one GPU, as
 * trainers have, names that one.
 *
 *     EMPTY ──create──► HELD ──map──► MAPPED ──set_access──► OPEN
 *       ▲                │ ▲                                  │
 *       └────release─────┘ └──────────────unmap───────────────┘
 *
 * Both directions stop where the driver fails, and the state says where that is: the next call goes
 * on from there.
 */

typedef enum rft_cuda_chunk_state {
    RFT_CHUNK_EMPTY = 0,
    RFT_CHUNK_HELD = 1,   /* there is memory, without an address */
    RFT_CHUNK_MAPPED = 2, /* and an address, without access */
    RFT_CHUNK_OPEN = 3,
} rft_cuda_chunk_state;

typedef struct rft_cuda_chunk {
    rft_cu_handle handle; /* unless EMPTY */
    rft_cuda_chunk_state state;
    uint32_t live; /* granules of it that are committed */
} rft_cuda_chunk;

#define REACHED_MOST 32u

static rft_cu_access access_for(int ordinal)
{
    return (rft_cu_access){.location = {RFT_CU_LOCATION_DEVICE, ordinal},
                           .flags = RFT_CU_ACCESS_READWRITE};
}

/* Does this process use the GPU, and can the GPU reach memory of this one? No, where the driver
 * does not answer. */
static bool is_peer(const rft_cuda_device *cuda, int ordinal)
{
    const rft_cuda_driver *driver = &cuda->driver;
    rft_cu_device other;
    unsigned flags;
    int active = 0, reaches = 0;
    if (ordinal == cuda->ordinal || driver->device_get(&other, ordinal) != RFT_CU_SUCCESS) {
        return false;
    }
    if (driver->context_state(other, &flags, &active) != RFT_CU_SUCCESS || active == 0) {
        return false;
    }
    return driver->peer_reaches(&reaches, other, cuda->handle) == RFT_CU_SUCCESS && reaches != 0;
}

/* This GPU first, then its peers. Returns how many there are. */
static size_t list_reachers(const rft_cuda_device *cuda, rft_cu_access *list)
{
    const rft_cuda_driver *driver = &cuda->driver;
    int devices = 0;
    size_t count = 1;
    list[0] = access_for(cuda->ordinal);
    if (driver->context_state == NULL || driver->peer_reaches == NULL) return count;
    if (driver->device_count(&devices) != RFT_CU_SUCCESS) return count;
    for (int ordinal = 0; ordinal < devices && count < REACHED_MOST; ordinal++) {
        if (is_peer(cuda, ordinal)) list[count++] = access_for(ordinal);
    }
    return count;
}

static rft_cu_result open_access(rft_cuda_device *cuda, rft_cu_ptr at, uint64_t bytes)
{
    rft_cu_access list[REACHED_MOST];
    size_t count = list_reachers(cuda, list);
    rft_cu_result result = cuda->driver.set_access(at, bytes, list, count);
    if (result == RFT_CU_SUCCESS || count == 1) return result;
    rft_cu_result own = cuda->driver.set_access(at, bytes, list, 1);
    if (own == RFT_CU_SUCCESS) {
        rft_log(REFIT_LOG_WARNING, "memory of an arena on cuda:%d is closed to other GPUs: %s",
                cuda->ordinal, rft_cuda_name(&cuda->driver, result));
    }
    return own;
}

/* To OPEN, at the address `at`. `*what` is the sentence's beginning where it fails. The bytes of an
 * EMPTY one are reserved. Both are called inside a context guard. */
static rft_cu_result chunk_raise(rft_cuda_device *cuda, rft_cuda_chunk *chunk,
                                 const rft_cu_allocation *properties, rft_cu_ptr at, uint64_t bytes,
                                 const char **what)
{
    const rft_cuda_driver *driver = &cuda->driver;
    rft_cu_result result = RFT_CU_SUCCESS;
    if (chunk->state == RFT_CHUNK_EMPTY) {
        *what = "memory for an arena could not be allocated";
        result = driver->physical_create(&chunk->handle, bytes, properties, 0);
        if (result != RFT_CU_SUCCESS) return result;
        chunk->state = RFT_CHUNK_HELD;
    }
    if (chunk->state == RFT_CHUNK_HELD) {
        *what = "memory of an arena could not be mapped";
        result = driver->map(at, bytes, 0, chunk->handle, 0);
        if (result != RFT_CU_SUCCESS) return result;
        chunk->state = RFT_CHUNK_MAPPED;
    }
    if (chunk->state == RFT_CHUNK_MAPPED) {
        *what = "memory of an arena could not be made accessible";
        result = open_access(cuda, at, bytes);
        if (result == RFT_CU_SUCCESS) chunk->state = RFT_CHUNK_OPEN;
    }
    return result;
}

/* A lost GPU answers every call with that, and its memory is gone with it: that answer counts as
 * success. */
static bool is_gone(rft_cu_result result)
{
    return result == RFT_CU_SUCCESS || rft_cuda_is_lost(result);
}

/* To EMPTY, and `bytes` off the accounting; also where the answer is that the GPU is lost. */
static rft_cu_result chunk_lower(rft_cuda_device *cuda, rft_cuda_chunk *chunk, rft_cu_ptr at,
                                 uint64_t bytes, const char **what)
{
    const rft_cuda_driver *driver = &cuda->driver;
    rft_cu_result result = RFT_CU_SUCCESS;
    if (chunk->state >= RFT_CHUNK_MAPPED) {
        *what = "memory of an arena could not be unmapped";
        result = driver->unmap(at, bytes);
        if (!is_gone(result)) return result;
        chunk->state = RFT_CHUNK_HELD;
    }
    if (chunk->state == RFT_CHUNK_HELD) {
        *what = "memory of an arena could not be released";
        result = driver->physical_release(chunk->handle);
        if (!is_gone(result)) return result;
        chunk->state = RFT_CHUNK_EMPTY;
        rft_cuda_memory_unreserve(cuda, bytes);
    }
    return result;
}

/* ---- Ranges ----------------------------------------------------------------------------------
 * One reservation of addresses on a GPU, and the memory mapped to it.
 *
 * Which granules are committed is a bit each; a chunk has memory while one of its granules is, so
 * that few large handles come and go. Room for all bits is taken with the range: commit and
 * decommit ask the host for nothing.
 *
 * After every failure: a granule that is committed has open memory mapped to it and keeps its
 * bytes. A chunk without such a granule is EMPTY, or in the state where the driver stopped, and the
 * next call that touches it goes on from there. A failed commit gives back the memory that it took.
 */

/* How all ranges of a device are made. */
typedef struct rft_cuda_pages {
    uint64_t granule;             /* what addresses and bytes are multiples of; a power of two */
    uint64_t chunk_bytes;         /* a power of two and a multiple of the granule */
    rft_cu_allocation properties; /* of the physical memory */
} rft_cuda_pages;

typedef struct rft_cuda_range {
    struct rft_cuda_range *next; /* its owner's */
    const rft_cuda_pages *pages; /* borrowed */
    rft_cu_ptr base;
    uint64_t granules;
    uint64_t per_chunk; /* granules; the last chunk may have fewer */
    uint64_t chunk_count;
    rft_mutex lock;
    rft_cuda_chunk *chunks; /* owned; guarded by lock, like the rest */
    uint64_t *live;         /* owned; one bit a granule */
} rft_cuda_range;

/* Some granules of a range. */
typedef struct rft_cuda_part {
    uint64_t from;
    uint64_t to; /* the first after them */
} rft_cuda_part;

#define WORD_BITS 64u

/* ---- Granules, the lock held ------------------------------------------------------------- */

static bool is_live(const rft_cuda_range *range, uint64_t at)
{
    return range->live[at / WORD_BITS] >> at % WORD_BITS & 1;
}

static void set_live(rft_cuda_range *range, rft_cuda_part part, bool live)
{
    for (uint64_t at = part.from; at < part.to; at++) {
        if (is_live(range, at) == live) continue;
        rft_cuda_chunk *chunk = &range->chunks[at / range->per_chunk];
        range->live[at / WORD_BITS] ^= UINT64_C(1) << at % WORD_BITS;
        chunk->live += live ? 1 : UINT32_MAX; /* one less */
    }
}

static uint32_t count_live(const rft_cuda_range *range, rft_cuda_part part)
{
    uint32_t count = 0;
    for (uint64_t at = part.from; at < part.to; at++) {
        count += is_live(range, at);
    }
    return count;
}

/* ---- Chunks, the lock held --------------------------------------------------------------- */

/* The chunks that `part` touches. */
static rft_cuda_part touched(const rft_cuda_range *range, rft_cuda_part part)
{
    return (rft_cuda_part){part.from / range->per_chunk, (part.to - 1) / range->per_chunk + 1};
}

static rft_cuda_part granules_of(const rft_cuda_range *range, uint64_t chunk)
{
    uint64_t from = chunk * range->per_chunk;
    return (rft_cuda_part){from, rft_min_u64(from + range->per_chunk, range->granules)};
}

static rft_cuda_part shared(rft_cuda_part one, rft_cuda_part other)
{
    return (rft_cuda_part){rft_max_u64(one.from, other.from), rft_min_u64(one.to, other.to)};
}

static uint64_t size_of(const rft_cuda_range *range, uint64_t chunk)
{
    rft_cuda_part whole = granules_of(range, chunk);
    return (whole.to - whole.from) * range->pages->granule;
}

static rft_cu_ptr address_of(const rft_cuda_range *range, uint64_t chunk)
{
    return range->base + chunk * range->per_chunk * range->pages->granule;
}

static rft_cu_result lower(rft_cuda_device *cuda, rft_cuda_range *range, uint64_t chunk,
                           const char **what)
{
    return chunk_lower(cuda, &range->chunks[chunk], address_of(range, chunk), size_of(range, chunk),
                       what);
}

/* ---- Commit ------------------------------------------------------------------------------ */

static uint64_t bytes_missing(const rft_cuda_range *range, rft_cuda_part chunks)
{
    uint64_t bytes = 0;
    for (uint64_t at = chunks.from; at < chunks.to; at++) {
        if (range->chunks[at].state == RFT_CHUNK_EMPTY) bytes += size_of(range, at);
    }
    return bytes;
}

static rft_cu_result raise_all(rft_cuda_device *cuda, rft_cuda_range *range, rft_cuda_part chunks,
                               const char **what)
{
    rft_cu_result result = RFT_CU_SUCCESS;
    for (uint64_t at = chunks.from; at < chunks.to && result == RFT_CU_SUCCESS; at++) {
        result = chunk_raise(cuda, &range->chunks[at], &range->pages->properties,
                             address_of(range, at), size_of(range, at), what);
    }
    return result;
}

/* Takes bytes that were not taken off the accounting, then lowers chunks without live granules, one
 * by one: those that this call raised, and those that an earlier failure left half-way. */
static void undo_raise(rft_cuda_device *cuda, rft_cuda_range *range, rft_cuda_part chunks)
{
    const char *what;
    rft_cuda_memory_unreserve(cuda, bytes_missing(range, chunks));
    for (uint64_t at = chunks.from; at < chunks.to; at++) {
        if (range->chunks[at].live == 0) (void)lower(cuda, range, at, &what);
    }
}

static refit_status commit_locked(rft_cuda_device *cuda, rft_cuda_range *range, rft_cuda_part part,
                                  refit_error *error)
{
    const char *what = "";
    rft_cuda_part chunks = touched(range, part);
    uint64_t missing = bytes_missing(range, chunks);
    RFT_TRY(rft_cuda_memory_reserve(cuda, missing, error));
    rft_cu_result result = raise_all(cuda, range, chunks, &what);
    if (result == RFT_CU_SUCCESS) {
        set_live(range, part, true);
        return REFIT_OK;
    }
    undo_raise(cuda, range, chunks);
    if (result == RFT_CU_OUT_OF_MEMORY) return rft_cuda_memory_full(cuda, result, missing, error);
    return rft_cuda_check(&cuda->driver, result, error, what);
}

/* See device.h; `part` is not empty. */
static refit_status range_commit(rft_cuda_device *cuda, rft_cuda_range *range, rft_cuda_part part,
                                 refit_error *error)
{
    rft_lock(&range->lock);
    refit_status status = commit_locked(cuda, range, part, error);
    rft_unlock(&range->lock);
    return status;
}

/* ---- Decommit ---------------------------------------------------------------------------- */

/* The last granules of a chunk go, and with them its memory. If that cannot be unmapped they stay.
 */
static refit_status lower_last(rft_cuda_device *cuda, rft_cuda_range *range, uint64_t at,
                               rft_cuda_part part, uint64_t *freed, refit_error *error)
{
    const rft_cuda_chunk *chunk = &range->chunks[at];
    if (chunk->state == RFT_CHUNK_EMPTY) return REFIT_OK;
    const char *what = "";
    rft_cu_result result = lower(cuda, range, at, &what);
    if (chunk->state < RFT_CHUNK_MAPPED) set_live(range, part, false);
    if (chunk->state == RFT_CHUNK_EMPTY) *freed += size_of(range, at);
    return rft_cuda_check(&cuda->driver, result, error, what);
}

static refit_status decommit_locked(rft_cuda_device *cuda, rft_cuda_range *range,
                                    rft_cuda_part part, uint64_t *freed, refit_error *error)
{
    rft_cuda_part chunks = touched(range, part);
    for (uint64_t at = chunks.from; at < chunks.to; at++) {
        rft_cuda_part here = shared(granules_of(range, at), part);
        if (count_live(range, here) == range->chunks[at].live) {
            RFT_TRY(lower_last(cuda, range, at, here, freed, error));
        } else {
            set_live(range, here, false);
        }
    }
    return REFIT_OK;
}

static refit_status range_decommit(rft_cuda_device *cuda, rft_cuda_range *range, rft_cuda_part part,
                                   uint64_t *freed, refit_error *error)
{
    rft_lock(&range->lock);
    refit_status status = decommit_locked(cuda, range, part, freed, error);
    rft_unlock(&range->lock);
    return status;
}

/* ---- Open and close ---------------------------------------------------------------------- */

static void free_range(rft_cuda_range *range)
{
    if (range == NULL) return;
    rft_free(range->chunks);
    rft_free(range->live);
    rft_free(range);
}

/* The range without its lock and addresses, or NULL. */
static rft_cuda_range *make_range(const rft_cuda_pages *pages, uint64_t bytes)
{
    rft_cuda_range *range = rft_calloc(1, sizeof *range);
    if (range == NULL) return NULL;
    range->pages = pages;
    range->granules = bytes / pages->granule;
    range->per_chunk = rft_min_u64(pages->chunk_bytes, bytes) / pages->granule;
    range->chunk_count = (range->granules - 1) / range->per_chunk + 1;
    range->chunks = rft_calloc(range->chunk_count, sizeof *range->chunks);
    range->live = rft_calloc(range->granules / WORD_BITS + 1, sizeof *range->live);
    if (range->chunks != NULL && range->live != NULL) return range;
    free_range(range);
    return NULL;
}

static refit_status reserve_addresses(rft_cuda_device *cuda, rft_cuda_range *range, uint64_t bytes,
                                      refit_error *error)
{
    rft_cu_result result =
        cuda->driver.address_reserve(&range->base, bytes, range->pages->granule, 0, 0);
    if (result == RFT_CU_OUT_OF_MEMORY) {
        return rft_fail_sub(error, REFIT_ERR_DEVICE_MEMORY, result,
                            "%" PRIu64 " bytes of addresses could not be reserved in one range: "
                            "reserve less",
                            bytes);
    }
    return rft_cuda_check(&cuda->driver, result, error, "addresses could not be reserved");
}

/* Reserves `bytes`, whole granules, not none. REFIT_ERR_DEVICE_MEMORY: no such range of
 * addresses. */
static refit_status range_open(rft_cuda_device *cuda, const rft_cuda_pages *pages, uint64_t bytes,
                               rft_cuda_range **out, refit_error *error)
{
    rft_cuda_range *range = make_range(pages, bytes);
    RFT_REFUSE_IF(range == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the accounting of %" PRIu64 " bytes of addresses", bytes);
    refit_status status = REFIT_OK;
    RFT_TRY_GOTO(rft_mutex_open(&range->lock, error), free_range);
    RFT_TRY_GOTO(reserve_addresses(cuda, range, bytes, error), close_lock);
    *out = range;
    return REFIT_OK;

close_lock:
    rft_mutex_close(&range->lock);
free_range:
    free_range(range);
    return status;
}

/* Memory and addresses back to the driver; if not all of it can be unmapped, the addresses stay
 * with it, and on the accounting. Close frees our side. */
static rft_cu_result range_give_back(rft_cuda_device *cuda, rft_cuda_range *range)
{
    const char *what;
    rft_cu_result first = RFT_CU_SUCCESS;
    bool empty = true;
    for (uint64_t at = 0; at < range->chunk_count; at++) {
        rft_cu_result result = lower(cuda, range, at, &what);
        if (first == RFT_CU_SUCCESS) first = result;
        empty = empty && range->chunks[at].state == RFT_CHUNK_EMPTY;
    }
    if (!empty) return first;
    uint64_t bytes = range->granules * range->pages->granule;
    rft_cu_result freed = cuda->driver.address_free(range->base, bytes);
    return first == RFT_CU_SUCCESS ? freed : first;
}

static void range_close(rft_cuda_range *range)
{
    rft_mutex_close(&range->lock);
    free_range(range);
}

/* ---- Reservations ------------------------------------------------------------------------- */

struct rft_cuda_ranges {
    rft_cuda_pages pages;
    rft_mutex lock;
    rft_cuda_range *first; /* guarded by lock */
};

static bool has_vmm(const rft_cuda_device *cuda)
{
    const rft_cuda_driver *driver = &cuda->driver;
    return cuda->facts.vmm && driver->address_reserve != NULL && driver->address_free != NULL &&
           driver->physical_create != NULL && driver->physical_release != NULL &&
           driver->map != NULL && driver->unmap != NULL && driver->set_access != NULL &&
           driver->granularity != NULL;
}

/* Made for network cards to register where they can: elsewhere the flag would be refused. */
static rft_cu_allocation make_properties(const rft_cuda_device *cuda)
{
    int rdma = 0;
    rft_cu_result result =
        cuda->driver.device_attribute(&rdma, RFT_CU_ATTR_RDMA_WITH_VMM, cuda->handle);
    rft_cu_allocation properties = {.type = RFT_CU_ALLOCATION_PINNED,
                                    .requested_handle_types = RFT_CU_SHARE_NONE,
                                    .location = {RFT_CU_LOCATION_DEVICE, cuda->ordinal}};
    properties.flags.rdma_capable = result == RFT_CU_SUCCESS && rdma != 0;
    return properties;
}

static refit_status read_pages(rft_cuda_device *cuda, rft_cuda_pages *pages, refit_error *error)
{
    size_t granule = 0;
    pages->properties = make_properties(cuda);
    rft_cu_result result =
        cuda->driver.granularity(&granule, &pages->properties, RFT_CU_GRANULARITY_MINIMUM);
    RFT_TRY(rft_cuda_check(&cuda->driver, result, error,
                           "the size of the GPU's pages could not be read"));
    RFT_REFUSE_IF(
        !rft_is_power_of_two(granule), error, REFIT_ERR_DEVICE,
        "the driver says that the GPU has pages of %zu bytes, which is not a power of two",
        granule);
    pages->granule = granule;
    pages->chunk_bytes = rft_max_u64(cuda->config.offload_chunk_bytes, granule);
    return REFIT_OK;
}

refit_status rft_cuda_ranges_open(rft_cuda_device *cuda, rft_cuda_ranges **out, refit_error *error)
{
    if (!has_vmm(cuda)) return REFIT_OK;
    rft_cuda_ranges *ranges = rft_calloc(1, sizeof *ranges);
    RFT_REFUSE_IF(ranges == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the arenas of a GPU");
    refit_status status = REFIT_OK;
    RFT_TRY_GOTO(read_pages(cuda, &ranges->pages, error), free_ranges);
    RFT_TRY_GOTO(rft_mutex_open(&ranges->lock, error), free_ranges);
    *out = ranges;
    return REFIT_OK;

free_ranges:
    rft_free(ranges);
    return status;
}

uint64_t rft_cuda_ranges_chunk(const rft_cuda_ranges *ranges)
{
    return ranges == NULL ? 0 : ranges->pages.chunk_bytes;
}

static refit_status need_vmm(const rft_cuda_device *cuda, refit_error *error)
{
    RFT_REFUSE_IF(cuda->ranges == NULL, error, REFIT_ERR_UNSUPPORTED,
                  "cuda:%d has no virtual memory management, by its driver or its platform, so no "
                  "address can stay: let regions live in ordinary memory and bind them again",
                  cuda->ordinal);
    return REFIT_OK;
}

/* The range that holds the granule at `at`, or NULL. */
static rft_cuda_range *find_range(rft_cuda_ranges *ranges, uint64_t at)
{
    uint64_t granule = ranges->pages.granule;
    rft_lock(&ranges->lock);
    rft_cuda_range *it = ranges->first;
    while (it != NULL && (at < it->base || (at - it->base) / granule >= it->granules)) {
        it = it->next;
    }
    rft_unlock(&ranges->lock);
    return it;
}

static refit_status find_part(rft_cuda_device *cuda, const void *base, uint64_t bytes,
                              rft_cuda_range **out, rft_cuda_part *part, refit_error *error)
{
    RFT_TRY(need_vmm(cuda, error));
    uint64_t at = (uintptr_t)base;
    uint64_t granule = cuda->ranges->pages.granule;
    RFT_REFUSE_IF((at | bytes) % granule != 0, error, REFIT_ERR_INVALID,
                  "%" PRIu64 " bytes at %p are not whole pages of %" PRIu64 " bytes", bytes, base,
                  granule);
    rft_cuda_range *range = find_range(cuda->ranges, at);
    uint64_t from = range == NULL ? 0 : (at - range->base) / granule;
    RFT_REFUSE_IF(range == NULL || bytes / granule > range->granules - from, error,
                  REFIT_ERR_INVALID, "%" PRIu64 " bytes at %p lie in no reservation of this device",
                  bytes, base);
    *out = range;
    *part = (rft_cuda_part){from, from + bytes / granule};
    return REFIT_OK;
}

static refit_status commit(rft_cuda_device *cuda, void *base, uint64_t bytes, refit_error *error)
{
    rft_cuda_range *range;
    rft_cuda_part part;
    RFT_TRY(find_part(cuda, base, bytes, &range, &part, error));
    return bytes == 0 ? REFIT_OK : range_commit(cuda, range, part, error);
}

static refit_status decommit(rft_cuda_device *cuda, void *base, uint64_t bytes, uint64_t *freed,
                             refit_error *error)
{
    rft_cuda_range *range;
    rft_cuda_part part;
    RFT_TRY(find_part(cuda, base, bytes, &range, &part, error));
    return bytes == 0 ? REFIT_OK : range_decommit(cuda, range, part, freed, error);
}

/* The slots of device.h. The first three are called inside a context guard, unreserve enters the
 * context by itself: our side is freed whatever has happened to the GPU. */
static refit_status rft_cuda_reserve(rft_cuda_device *cuda, uint64_t bytes, void **out,
                                     uint64_t *granule, refit_error *error)
{
    RFT_TRY(need_vmm(cuda, error));
    rft_cuda_ranges *ranges = cuda->ranges;
    RFT_REFUSE_IF(!rft_align_u64(bytes, ranges->pages.granule, &bytes), error, REFIT_ERR_INVALID,
                  "%" PRIu64 " bytes exceed the address space", bytes);
    rft_cuda_range *range = NULL;
    RFT_TRY(range_open(cuda, &ranges->pages, bytes, &range, error));
    rft_lock(&ranges->lock);
    range->next = ranges->first;
    ranges->first = range;
    rft_unlock(&ranges->lock);
    *out = (void *)(uintptr_t)range->base;
    *granule = ranges->pages.granule;
    return REFIT_OK;
}

/* In a forked child only our side is freed. */
static void close_range(rft_cuda_device *cuda, rft_cuda_range *range)
{
    rft_cuda_guard guard;
    if (rft_cuda_enter(cuda, &guard, NULL) == REFIT_OK) {
        rft_cu_result result = range_give_back(cuda, range);
        rft_cuda_leave(cuda, &guard);
        if (result != RFT_CU_SUCCESS) {
            rft_log(REFIT_LOG_WARNING,
                    "the driver does not take back an arena of %" PRIu64 " bytes on cuda:%d: %s",
                    range->granules * range->pages->granule, cuda->ordinal,
                    rft_cuda_name(&cuda->driver, result));
        }
    }
    range_close(range);
}

static void unreserve(rft_cuda_device *cuda, void *base)
{
    rft_cuda_ranges *ranges = cuda->ranges;
    rft_lock(&ranges->lock);
    rft_cuda_range **link = &ranges->first;
    while (*link != NULL && (*link)->base != (uintptr_t)base) {
        link = &(*link)->next;
    }
    rft_cuda_range *range = *link;
    if (range != NULL) *link = range->next;
    rft_unlock(&ranges->lock);
    if (range != NULL) close_range(cuda, range);
}

void rft_cuda_ranges_close(rft_cuda_device *cuda, rft_cuda_ranges *ranges)
{
    if (ranges == NULL) return;
    while (ranges->first != NULL) {
        rft_cuda_range *range = ranges->first;
        ranges->first = range->next;
        close_range(cuda, range);
    }
    rft_mutex_close(&ranges->lock);
    rft_free(ranges);
}

/* ---- Slots -----------------------------------------------------------------------------------
 * Each enters the context; the work is done above. */

static refit_status cuda_reserve(void *self, uint64_t bytes, void **out, uint64_t *granule,
                                 refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_reserve(cuda, bytes, out, granule, error));
}

static refit_status cuda_commit(void *self, void *base, uint64_t bytes, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, commit(cuda, base, bytes, error));
}

static refit_status cuda_decommit(void *self, void *base, uint64_t bytes, uint64_t *freed,
                                  refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, decommit(cuda, base, bytes, freed, error));
}

static void cuda_unreserve(void *self, void *base, uint64_t bytes)
{
    (void)bytes;
    unreserve(self, base);
}

void rft_cuda_vmm_slots(rft_device_ops *ops)
{
    ops->reserve = cuda_reserve;
    ops->commit = cuda_commit;
    ops->decommit = cuda_decommit;
    ops->unreserve = cuda_unreserve;
}
