/*
 * What a bay is made of: a stream, events, two halves of device memory, and sections of pinned host
 * memory in which the CPU writes entries for the GPU to read. All of it is taken when a bay opens.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "device/cuda_bay.h"
#include "device/cuda_memory.h"

#define SECTION_BYTES (RFT_CUDA_ENTRIES * sizeof(rft_pack_entry))

static refit_status open_event(rft_cuda_device *cuda, rft_cu_event *out, refit_error *error)
{
    return rft_cuda_check(&cuda->driver, cuda->driver.event_open(out, RFT_CU_EVENT_NO_TIMING),
                          error, "an event for small copies could not be opened");
}

static refit_status open_order(rft_cuda_device *cuda, rft_cuda_bay *bay, refit_error *error)
{
    rft_cu_result result = cuda->driver.stream_open(&bay->own, RFT_CU_STREAM_NON_BLOCKING, 0);
    RFT_TRY(rft_cuda_check(&cuda->driver, result, error,
                           "a stream for small copies could not be opened"));
    RFT_TRY(open_event(cuda, &bay->before, error));
    for (uint32_t i = 0; i < RFT_CUDA_HALVES; i++) {
        RFT_TRY(open_event(cuda, &bay->halves[i].filled, error));
        RFT_TRY(open_event(cuda, &bay->halves[i].free, error));
    }
    for (uint32_t i = 0; i < RFT_CUDA_SECTIONS; i++) {
        RFT_TRY(open_event(cuda, &bay->sections[i].done, error));
    }
    return REFIT_OK;
}

static refit_status open_halves(rft_cuda_device *cuda, rft_cuda_bay *bay, refit_error *error)
{
    RFT_TRY(rft_cuda_memory_alloc(cuda, RFT_CUDA_HALVES * bay->half_bytes, &bay->memory, error));
    for (uint32_t i = 0; i < RFT_CUDA_HALVES; i++) {
        bay->halves[i].memory = (uintptr_t)bay->memory + i * bay->half_bytes;
    }
    return REFIT_OK;
}

static refit_status open_sections(rft_cuda_device *cuda, rft_cuda_bay *bay, refit_error *error)
{
    const rft_cuda_driver *driver = &cuda->driver;
    rft_cu_ptr table = 0;
    unsigned flags = RFT_CU_HOST_ALLOC_PORTABLE | RFT_CU_HOST_ALLOC_DEVICEMAP;
    RFT_TRY(rft_cuda_check(driver,
                           driver->host_alloc(&bay->host, RFT_CUDA_SECTIONS * SECTION_BYTES, flags),
                           error, "no page-locked host memory for the table of small copies"));
    RFT_TRY(rft_cuda_check(driver, driver->host_pointer(&table, bay->host, 0), error,
                           "the GPU does not reach the table of small copies"));
    for (uint32_t i = 0; i < RFT_CUDA_SECTIONS; i++) {
        bay->sections[i].entries = (rft_pack_entry *)bay->host + (size_t)i * RFT_CUDA_ENTRIES;
        bay->sections[i].table = table + i * SECTION_BYTES;
    }
    return REFIT_OK;
}

refit_status rft_cuda_bay_open(rft_cuda_device *cuda, uint64_t half_bytes, rft_cuda_bay **out,
                               refit_error *error)
{
    refit_status status = REFIT_ERR_HOST_MEMORY;
    rft_cuda_bay *bay = rft_calloc(1, sizeof *bay);
    RFT_REFUSE_IF(bay == NULL, error, status, "no host memory for small copies");
    bay->half_bytes = half_bytes;
    bay->stretches = rft_calloc(1, sizeof *bay->stretches);
    if (bay->stretches == NULL) {
        (void)rft_fail(error, status, "no host memory for small copies");
        goto close_bay;
    }
    RFT_TRY_GOTO(open_halves(cuda, bay, error), close_bay);
    RFT_TRY_GOTO(open_sections(cuda, bay, error), close_bay);
    RFT_TRY_GOTO(open_order(cuda, bay, error), close_bay);
    *out = bay;
    return REFIT_OK;

close_bay:
    rft_cuda_bay_close(cuda, bay);
    return status;
}

/* Of the first that is not done. */
static rft_cu_result ask(rft_cuda_device *cuda, const rft_cuda_bay *bay)
{
    rft_cu_result result = RFT_CU_SUCCESS;
    if (bay->own != NULL) result = cuda->driver.stream_query(bay->own);
    for (uint32_t i = 0; i < RFT_CUDA_HALVES && result == RFT_CU_SUCCESS; i++) {
        if (bay->halves[i].free != NULL) result = cuda->driver.event_query(bay->halves[i].free);
    }
    return result;
}

bool rft_cuda_bay_is_idle(rft_cuda_device *cuda, const rft_cuda_bay *bay)
{
    return ask(cuda, bay) == RFT_CU_SUCCESS;
}

static void close_order(rft_cuda_device *cuda, rft_cuda_bay *bay)
{
    const rft_cuda_driver *driver = &cuda->driver;
    for (uint32_t i = 0; i < RFT_CUDA_SECTIONS; i++) {
        if (bay->sections[i].done != NULL) (void)driver->event_close(bay->sections[i].done);
    }
    for (uint32_t i = 0; i < RFT_CUDA_HALVES; i++) {
        if (bay->halves[i].filled != NULL) (void)driver->event_close(bay->halves[i].filled);
        if (bay->halves[i].free != NULL) (void)driver->event_close(bay->halves[i].free);
    }
    if (bay->before != NULL) (void)driver->event_close(bay->before);
    if (bay->own != NULL) (void)driver->stream_close(bay->own);
}

/* false: it is still at work. A lost GPU is never idle, but it does not answer NOT_READY either. */
static bool wait_idle(rft_cuda_device *cuda, const rft_cuda_bay *bay)
{
    rft_looks looks = rft_looks_until(rft_deadline(cuda->config.offload_timeout_ms));
    rft_cu_result result = ask(cuda, bay);
    while (result == RFT_CU_NOT_READY && rft_look_again(&looks)) {
        result = ask(cuda, bay);
    }
    return result != RFT_CU_NOT_READY;
}

static void close_memory(rft_cuda_device *cuda, rft_cuda_bay *bay)
{
    if (bay->host != NULL) (void)cuda->driver.host_free(bay->host);
    if (bay->memory != NULL) (void)rft_cuda_memory_free(cuda, bay->memory, NULL);
}

void rft_cuda_bay_close(rft_cuda_device *cuda, rft_cuda_bay *bay)
{
    bool idle = wait_idle(cuda, bay);
    close_order(cuda, bay); /* the driver keeps them until the work on them ends */
    if (idle) {
        close_memory(cuda, bay);
    } else {
        cuda->stuck = true;
    }
    rft_cuda_bay_forget(bay);
}

void rft_cuda_bay_forget(rft_cuda_bay *bay)
{
    rft_free(bay->stretches);
    rft_free(bay);
}
