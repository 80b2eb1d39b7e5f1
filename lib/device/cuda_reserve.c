/*
 * Arenas on a GPU, by its driver's virtual memory management: the list of reserved ranges, and
 * which one a call means. What becomes of the memory behind one is in cuda_range.c.
 *
 * Streams that use a range are waited for before decommit comes here (device_reserve.c). Where the
 * driver or the platform has no such management there is no list, and reserve says so.
 */
#include "device/cuda_reserve.h"

#include <inttypes.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/log.h"
#include "device/cuda_range.h"

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
                           "the size of the GPU's pages was not to be had"));
    RFT_REFUSE_IF(!rft_is_power_of_two(granule), error, REFIT_ERR_DEVICE,
                  "the driver says that the GPU has pages of %zu bytes, which is no power of two",
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

refit_status rft_cuda_commit(rft_cuda_device *cuda, void *base, uint64_t bytes, refit_error *error)
{
    rft_cuda_range *range;
    rft_cuda_part part;
    RFT_TRY(find_part(cuda, base, bytes, &range, &part, error));
    return bytes == 0 ? REFIT_OK : rft_cuda_range_commit(cuda, range, part, error);
}

refit_status rft_cuda_decommit(rft_cuda_device *cuda, void *base, uint64_t bytes, uint64_t *freed,
                               refit_error *error)
{
    rft_cuda_range *range;
    rft_cuda_part part;
    RFT_TRY(find_part(cuda, base, bytes, &range, &part, error));
    return bytes == 0 ? REFIT_OK : rft_cuda_range_decommit(cuda, range, part, freed, error);
}

refit_status rft_cuda_reserve(rft_cuda_device *cuda, uint64_t bytes, void **out, uint64_t *granule,
                              refit_error *error)
{
    RFT_TRY(need_vmm(cuda, error));
    rft_cuda_ranges *ranges = cuda->ranges;
    RFT_REFUSE_IF(!rft_align_u64(bytes, ranges->pages.granule, &bytes), error, REFIT_ERR_INVALID,
                  "%" PRIu64 " bytes are more than there are addresses", bytes);
    rft_cuda_range *range;
    RFT_TRY(rft_cuda_range_open(cuda, &ranges->pages, bytes, &range, error));
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
        rft_cu_result result = rft_cuda_range_give_back(cuda, range);
        rft_cuda_leave(cuda, &guard);
        if (result != RFT_CU_SUCCESS) {
            rft_log(REFIT_LOG_WARNING,
                    "the driver does not take back an arena of %" PRIu64 " bytes on cuda:%d: %s",
                    range->granules * range->pages->granule, cuda->ordinal,
                    rft_cuda_name(&cuda->driver, result));
        }
    }
    rft_cuda_range_close(range);
}

void rft_cuda_unreserve(rft_cuda_device *cuda, void *base)
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
