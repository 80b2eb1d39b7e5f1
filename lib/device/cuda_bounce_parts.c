/*
 * What a bounce buffer is made of: a stream, events, two halves of device memory, and sections of
 * pinned host memory in which the CPU writes entries for the GPU to read. All of it is taken when a
 * bounce buffer opens.
 */
#include "base/alloc.h"
#include "base/clock.h"
#include "device/cuda_bounce.h"
#include "device/cuda_memory.h"

#define SECTION_BYTES (RFT_CUDA_ENTRIES * sizeof(rft_pack_entry))

static refit_status open_event(rft_cuda_device *cuda, rft_cu_event *out, refit_error *error)
{
    return rft_cuda_check(&cuda->driver, cuda->driver.event_open(out, RFT_CU_EVENT_NO_TIMING),
                          error, "an event for small copies could not be opened");
}

static refit_status open_order(rft_cuda_device *cuda, rft_cuda_bounce *bounce, refit_error *error)
{
    rft_cu_result result = cuda->driver.stream_open(&bounce->own, RFT_CU_STREAM_NON_BLOCKING, 0);
    RFT_TRY(rft_cuda_check(&cuda->driver, result, error,
                           "a stream for small copies could not be opened"));
    RFT_TRY(open_event(cuda, &bounce->before, error));
    for (uint32_t i = 0; i < RFT_CUDA_HALVES; i++) {
        RFT_TRY(open_event(cuda, &bounce->halves[i].filled, error));
        RFT_TRY(open_event(cuda, &bounce->halves[i].free, error));
    }
    for (uint32_t i = 0; i < RFT_CUDA_SECTIONS; i++) {
        RFT_TRY(open_event(cuda, &bounce->sections[i].done, error));
    }
    return REFIT_OK;
}

static refit_status open_halves(rft_cuda_device *cuda, rft_cuda_bounce *bounce, refit_error *error)
{
    RFT_TRY(
        rft_cuda_memory_alloc(cuda, RFT_CUDA_HALVES * bounce->half_bytes, &bounce->memory, error));
    for (uint32_t i = 0; i < RFT_CUDA_HALVES; i++) {
        bounce->halves[i].memory = (uintptr_t)bounce->memory + i * bounce->half_bytes;
    }
    return REFIT_OK;
}

static refit_status open_sections(rft_cuda_device *cuda, rft_cuda_bounce *bounce,
                                  refit_error *error)
{
    const rft_cuda_driver *driver = &cuda->driver;
    rft_cu_ptr table = 0;
    unsigned flags = RFT_CU_HOST_ALLOC_PORTABLE | RFT_CU_HOST_ALLOC_DEVICEMAP;
    RFT_TRY(rft_cuda_check(
        driver, driver->host_alloc(&bounce->host, RFT_CUDA_SECTIONS * SECTION_BYTES, flags), error,
        "no page-locked host memory for the table of small copies"));
    RFT_TRY(rft_cuda_check(driver, driver->host_pointer(&table, bounce->host, 0), error,
                           "the GPU does not reach the table of small copies"));
    for (uint32_t i = 0; i < RFT_CUDA_SECTIONS; i++) {
        bounce->sections[i].entries = (rft_pack_entry *)bounce->host + (size_t)i * RFT_CUDA_ENTRIES;
        bounce->sections[i].table = table + i * SECTION_BYTES;
    }
    return REFIT_OK;
}

refit_status rft_cuda_bounce_open(rft_cuda_device *cuda, uint64_t half_bytes, rft_cuda_bounce **out,
                                  refit_error *error)
{
    refit_status status = REFIT_ERR_HOST_MEMORY;
    rft_cuda_bounce *bounce = rft_calloc(1, sizeof *bounce);
    RFT_REFUSE_IF(bounce == NULL, error, status, "no host memory for small copies");
    bounce->half_bytes = half_bytes;
    bounce->stretches = rft_calloc(1, sizeof *bounce->stretches);
    if (bounce->stretches == NULL) {
        (void)rft_fail(error, status, "no host memory for small copies");
        goto close_bounce;
    }
    RFT_TRY_GOTO(open_halves(cuda, bounce, error), close_bounce);
    RFT_TRY_GOTO(open_sections(cuda, bounce, error), close_bounce);
    RFT_TRY_GOTO(open_order(cuda, bounce, error), close_bounce);
    *out = bounce;
    return REFIT_OK;

close_bounce:
    rft_cuda_bounce_close(cuda, bounce);
    return status;
}

/* Of the first that is not done. */
static rft_cu_result ask(rft_cuda_device *cuda, const rft_cuda_bounce *bounce)
{
    rft_cu_result result = RFT_CU_SUCCESS;
    if (bounce->own != NULL) result = cuda->driver.stream_query(bounce->own);
    for (uint32_t i = 0; i < RFT_CUDA_HALVES && result == RFT_CU_SUCCESS; i++) {
        if (bounce->halves[i].free != NULL)
            result = cuda->driver.event_query(bounce->halves[i].free);
    }
    return result;
}

bool rft_cuda_bounce_is_idle(rft_cuda_device *cuda, const rft_cuda_bounce *bounce)
{
    return ask(cuda, bounce) == RFT_CU_SUCCESS;
}

static void close_order(rft_cuda_device *cuda, rft_cuda_bounce *bounce)
{
    const rft_cuda_driver *driver = &cuda->driver;
    for (uint32_t i = 0; i < RFT_CUDA_SECTIONS; i++) {
        if (bounce->sections[i].done != NULL) (void)driver->event_close(bounce->sections[i].done);
    }
    for (uint32_t i = 0; i < RFT_CUDA_HALVES; i++) {
        if (bounce->halves[i].filled != NULL) (void)driver->event_close(bounce->halves[i].filled);
        if (bounce->halves[i].free != NULL) (void)driver->event_close(bounce->halves[i].free);
    }
    if (bounce->before != NULL) (void)driver->event_close(bounce->before);
    if (bounce->own != NULL) (void)driver->stream_close(bounce->own);
}

/* false: it is still at work. A lost GPU is never idle, but it does not answer NOT_READY either. */
static bool wait_idle(rft_cuda_device *cuda, const rft_cuda_bounce *bounce)
{
    rft_looks looks = rft_looks_until(rft_deadline(cuda->config.offload_timeout_ms));
    rft_cu_result result = ask(cuda, bounce);
    while (result == RFT_CU_NOT_READY && rft_look_again(&looks)) {
        result = ask(cuda, bounce);
    }
    return result != RFT_CU_NOT_READY;
}

static void close_memory(rft_cuda_device *cuda, rft_cuda_bounce *bounce)
{
    if (bounce->host != NULL) (void)cuda->driver.host_free(bounce->host);
    if (bounce->memory != NULL) (void)rft_cuda_memory_free(cuda, bounce->memory, NULL);
}

void rft_cuda_bounce_close(rft_cuda_device *cuda, rft_cuda_bounce *bounce)
{
    bool idle = wait_idle(cuda, bounce);
    close_order(cuda, bounce); /* the driver keeps them until the work on them ends */
    if (idle) {
        close_memory(cuda, bounce);
    } else {
        cuda->stuck = true;
    }
    rft_cuda_bounce_forget(bounce);
}

void rft_cuda_bounce_forget(rft_cuda_bounce *bounce)
{
    rft_free(bounce->stretches);
    rft_free(bounce);
}
