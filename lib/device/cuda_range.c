/*
 * One reservation of addresses on a GPU, and the memory behind it.
 *
 * Which granules are committed is a bit each; a chunk has memory while one of its granules is, so
 * that few large handles come and go. Room for all bits is taken with the range: commit and
 * decommit ask the host for nothing.
 *
 * What holds after every failure: a granule that is committed has open memory behind it and keeps
 * its bytes; a chunk without one is EMPTY, or where the driver stopped (cuda_chunk.h), and the next
 * call that touches it goes on from there. The memory that a failed commit took it gives back.
 */
#include "device/cuda_range.h"

#include <inttypes.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "device/cuda_memory.h"

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

/* ---- Chunks, likewise -------------------------------------------------------------------- */

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
    return rft_cuda_chunk_lower(cuda, &range->chunks[chunk], address_of(range, chunk),
                                size_of(range, chunk), what);
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
        result = rft_cuda_chunk_raise(cuda, &range->chunks[at], &range->pages->properties,
                                      address_of(range, at), size_of(range, at), what);
    }
    return result;
}

/* What was not taken goes off the books; then what was, one by one. Nobody lives in it, nor in what
 * an earlier failure may have left half-way. */
static void undo_raise(rft_cuda_device *cuda, rft_cuda_range *range, rft_cuda_part chunks)
{
    const char *what;
    rft_cuda_memory_unbook(cuda, bytes_missing(range, chunks));
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
    RFT_TRY(rft_cuda_memory_book(cuda, missing, error));
    rft_cu_result result = raise_all(cuda, range, chunks, &what);
    if (result == RFT_CU_SUCCESS) {
        set_live(range, part, true);
        return REFIT_OK;
    }
    undo_raise(cuda, range, chunks);
    if (result == RFT_CU_OUT_OF_MEMORY) return rft_cuda_memory_full(cuda, result, missing, error);
    return rft_cuda_check(&cuda->driver, result, error, what);
}

refit_status rft_cuda_range_commit(rft_cuda_device *cuda, rft_cuda_range *range, rft_cuda_part part,
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

refit_status rft_cuda_range_decommit(rft_cuda_device *cuda, rft_cuda_range *range,
                                     rft_cuda_part part, uint64_t *freed, refit_error *error)
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
                            "%" PRIu64 " bytes of addresses are not to be had in one stretch: "
                            "reserve less",
                            bytes);
    }
    return rft_cuda_check(&cuda->driver, result, error, "addresses could not be reserved");
}

refit_status rft_cuda_range_open(rft_cuda_device *cuda, const rft_cuda_pages *pages, uint64_t bytes,
                                 rft_cuda_range **out, refit_error *error)
{
    rft_cuda_range *range = make_range(pages, bytes);
    RFT_REFUSE_IF(range == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the books of %" PRIu64 " bytes of addresses", bytes);
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

rft_cu_result rft_cuda_range_give_back(rft_cuda_device *cuda, rft_cuda_range *range)
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

void rft_cuda_range_close(rft_cuda_range *range)
{
    rft_mutex_close(&range->lock);
    free_range(range);
}
