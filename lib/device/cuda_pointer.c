/*
 * The driver is asked what an address is, piece by piece: memory of many mappings (PyTorch's
 * expandable_segments) is one range to its owner, and may have holes.
 *
 * Drivers differ in what they say of memory that they did not allocate, so that each refusal rests
 * on an answer that means one thing alone; where the pieces end is asked twice, of
 * cuMemGetAddressRange and of the attributes. Knows nothing of what refit has allocated.
 */
#include "device/cuda_pointer.h"

#include <inttypes.h>

#include "base/checked.h"

/* The range is the reservation where there is one, not what is mapped in it. */
typedef struct pointer_facts {
    unsigned type; /* RFT_CU_MEMORY_*; 0: nothing */
    int managed;
    int mapped;
    int ordinal;
    rft_cu_ptr range_start;
    size_t range_bytes;
} pointer_facts;

static refit_status ask_pointer(rft_cuda_device *cuda, uint64_t at, pointer_facts *facts,
                                refit_error *error)
{
    int asked[] = {RFT_CU_PTR_MEMORY_TYPE, RFT_CU_PTR_IS_MANAGED,  RFT_CU_PTR_MAPPED,
                   RFT_CU_PTR_ORDINAL,     RFT_CU_PTR_RANGE_START, RFT_CU_PTR_RANGE_SIZE};
    void *values[] = {&facts->type,    &facts->managed,     &facts->mapped,
                      &facts->ordinal, &facts->range_start, &facts->range_bytes};
    *facts = (pointer_facts){.ordinal = -2};
    rft_cu_result result = cuda->driver.pointer_attributes(
        (unsigned)(sizeof asked / sizeof asked[0]), asked, values, at);
    /* Some drivers refuse to speak of memory that is not theirs. */
    if (result == RFT_CU_INVALID_VALUE) return REFIT_OK;
    return rft_cuda_check(&cuda->driver, result, error,
                          "the driver did not say what memory this is");
}

static refit_status check_kind(const rft_cuda_device *cuda, uint64_t at, const pointer_facts *facts,
                               refit_error *error)
{
    RFT_REFUSE_IF(facts->managed != 0, error, REFIT_ERR_INVALID,
                  "0x%" PRIx64 " is managed memory (cudaMallocManaged), which moves by itself: "
                  "bring memory of cuda:%d",
                  at, cuda->ordinal);
    RFT_REFUSE_IF(facts->type == RFT_CU_MEMORY_HOST, error, REFIT_ERR_INVALID,
                  "0x%" PRIx64 " is page-locked host memory, not memory of cuda:%d", at,
                  cuda->ordinal);
    RFT_REFUSE_IF(facts->type == 0 && facts->range_bytes == 0, error, REFIT_ERR_INVALID,
                  "0x%" PRIx64 " is not memory of cuda:%d: it is ordinary host memory, was freed, "
                  "or never was allocated",
                  at, cuda->ordinal);
    return REFIT_OK;
}

/* Where the mapping that holds `at` ends; false: nothing is mapped there. */
static bool find_end(rft_cuda_device *cuda, uint64_t at, const pointer_facts *facts, uint64_t *end)
{
    rft_cu_ptr base = 0;
    size_t bytes = 0;
    if (cuda->driver.memory_range(&base, &bytes, at) != RFT_CU_SUCCESS) {
        if (facts->mapped == 0) return false;
        base = facts->range_start;
        bytes = facts->range_bytes;
    }
    return rft_add_u64(base, bytes, end) && *end > at;
}

/* `*end`: of the piece that begins at `at`. */
static refit_status check_piece(rft_cuda_device *cuda, uint64_t at, const pointer_facts *facts,
                                uint64_t *end, refit_error *error)
{
    RFT_TRY(check_kind(cuda, at, facts, error));
    RFT_REFUSE_IF(!find_end(cuda, at, facts, end), error, REFIT_ERR_INVALID,
                  "0x%" PRIx64 " is a reserved address of cuda:%d with no memory mapped behind it",
                  at, cuda->ordinal);
    RFT_REFUSE_IF(facts->ordinal != cuda->ordinal, error, REFIT_ERR_INVALID,
                  "0x%" PRIx64 " is memory of cuda:%d, and this device is cuda:%d", at,
                  facts->ordinal, cuda->ordinal);
    return REFIT_OK;
}

refit_status rft_cuda_pointer_check(rft_cuda_device *cuda, const void *memory, uint64_t bytes,
                                    const void **whole, refit_error *error)
{
    uint64_t at = (uintptr_t)memory;
    const uint64_t end = at + bytes; /* device_calls.c refuses an end beyond the last address */
    const void *first = NULL;
    while (at < end) {
        pointer_facts facts;
        uint64_t next = end;
        RFT_TRY(ask_pointer(cuda, at, &facts, error));
        RFT_TRY(check_piece(cuda, at, &facts, &next, error));
        if (at == (uintptr_t)memory) first = (const void *)(uintptr_t)facts.range_start;
        at = next;
    }
    *whole = first;
    return REFIT_OK;
}
