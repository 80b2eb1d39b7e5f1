/*
 * The CUDA device: a GPU through its driver, in the primary context that PyTorch uses too.
 *
 * The parts do the work, a file each: memory, pins, streams, events, copies, kernels. This file
 * opens and closes them and describes the device; each part fills its slots. A part that this GPU
 * or driver cannot have stays NULL.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "device/cuda/cuda_kernels.h"
#include "device/cuda/cuda_memory.h"
#include "device/cuda/cuda_stream.h"
#include "device/device_uuid.h"

static void close_parts(rft_cuda_device *cuda)
{
    rft_cuda_shares_close(cuda, cuda->shares);
    rft_cuda_copier_close(cuda, cuda->copier);
    rft_cuda_compute_close(cuda, cuda->compute);
    rft_cuda_kernels_close(cuda, cuda->kernels);
    rft_cuda_streams_close(cuda, cuda->streams);
    rft_cuda_pins_close(cuda, cuda->pins);
    rft_cuda_ranges_close(cuda, cuda->ranges);
    rft_cuda_memory_close(cuda, cuda->memory);
}

/* Inside a context guard. On failure close_parts closes what is there. */
static refit_status open_parts(rft_cuda_device *cuda, uint64_t capacity, refit_error *error)
{
    RFT_TRY(rft_cuda_memory_open(cuda, capacity, &cuda->memory, error));
    RFT_TRY(rft_cuda_ranges_open(cuda, &cuda->ranges, error));
    RFT_TRY(rft_cuda_pins_open(cuda, &cuda->pins, error));
    RFT_TRY(rft_cuda_streams_open(cuda, &cuda->streams, error));
    RFT_TRY(rft_cuda_kernels_open(cuda, &cuda->kernels, error));
    RFT_TRY(rft_cuda_compute_open(cuda, &cuda->compute, error));
    RFT_TRY(rft_cuda_copier_open(cuda, &cuda->copier, error));
    RFT_TRY(rft_cuda_shares_open(cuda, &cuda->shares, error));
    return REFIT_OK;
}

static void cuda_close(void *self)
{
    rft_cuda_device *cuda = self;
    close_parts(cuda);
    rft_cuda_context_close(cuda);
    rft_cuda_driver_close(&cuda->driver);
    rft_free(cuda);
}

static void cuda_describe(void *self, refit_device_info *info)
{
    rft_cuda_device *cuda = self;
    snprintf(info->name, sizeof info->name, "%s", cuda->facts.name);
    info->capacity_bytes = rft_cuda_memory_capacity(cuda->memory);
    info->used_bytes = rft_cuda_memory_used(cuda->memory);
    info->stable_arena = cuda->ranges != NULL;
    info->kernels = cuda->kernels != NULL;
    info->numa_node = cuda->facts.numa_node;
    info->driver_version = cuda->driver.version;
    info->small_bytes = rft_cuda_copier_small_bytes(cuda);
    rft_uuid_print(cuda->facts.uuid.bytes, info->uuid);
}

static void cuda_caps(void *self, rft_device_caps *caps)
{
    const rft_cuda_device *cuda = self;
    *caps = (rft_device_caps){.stable_arena = cuda->ranges != NULL,
                              .chunk_bytes = rft_cuda_ranges_chunk(cuda->ranges),
                              .needs_pinned = true,
                              .digests = cuda->kernels != NULL,
                              .masters = cuda->kernels != NULL,
                              .deltas = cuda->kernels != NULL,
                              .shares = rft_cuda_can_share(cuda),
                              .batch_most = RFT_CUDA_BATCH_MOST,
                              .numa_node = cuda->facts.numa_node,
                              .ordinal = cuda->ordinal};
    memcpy(caps->uuid, cuda->facts.uuid.bytes, sizeof caps->uuid);
}

static bool cuda_is_lost(void *self)
{
    rft_cuda_device *cuda = self;
    bool inside;
    rft_cuda_guard guard;
    if (rft_cuda_enter_to_free(cuda, &guard, &inside, NULL) != REFIT_OK) return false;
    if (!inside) return true;
    bool lost = rft_cuda_context_is_lost(cuda);
    rft_cuda_leave(cuda, &guard);
    return lost;
}

/* "", "3", "3:capacity=2GiB". */
static refit_status read_rest(const char *rest, int *ordinal, uint64_t *capacity,
                              refit_error *error)
{
    size_t digits = strspn(rest, "0123456789");
    bool more = digits > 0 && rest[digits] == ':' && rest[digits + 1] != '\0';
    bool known = digits < 6 && (more || rest[digits] == '\0');
    const char *options = more ? rest + digits + 1 : "";
    RFT_REFUSE_IF(!known || !rft_device_read_capacity(options, capacity), error, REFIT_ERR_INVALID,
                  "\"cuda:%.64s\" cannot be read: say \"cuda\", \"cuda:0\" or "
                  "\"cuda:0:capacity=2GiB\"",
                  rest);
    *ordinal = atoi(rest);
    return REFIT_OK;
}

static refit_status open_inside(rft_cuda_device *cuda, uint64_t capacity, refit_error *error)
{
    RFT_CUDA_GUARDED(cuda, error, open_parts(cuda, capacity, error));
}

static refit_status make(rft_cuda_device *cuda, refit_device **out, refit_error *error)
{
    rft_device_ops ops = {.version = RFT_DEVICE_OPS_VERSION,
                          .size = sizeof ops,
                          .kind = "cuda",
                          .close = cuda_close,
                          .describe = cuda_describe,
                          .caps = cuda_caps,
                          .is_lost = cuda_is_lost};
    rft_cuda_memory_slots(&ops);
    rft_cuda_vmm_slots(&ops);
    rft_cuda_stream_slots(&ops);
    rft_cuda_copy_slots(&ops);
    rft_cuda_compute_slots(&ops);
    rft_cuda_share_slots(&ops);
    return rft_device_make(&ops, cuda, out, error);
}

static refit_status open_all(rft_cuda_device *cuda, int ordinal, uint64_t capacity,
                             refit_device **out, refit_error *error)
{
    refit_status status = REFIT_OK;
    RFT_TRY(rft_cuda_driver_open(&cuda->driver, error));
    RFT_TRY_GOTO(rft_cuda_context_open(cuda, ordinal, error), close_driver);
    RFT_TRY_GOTO(open_inside(cuda, capacity, error), close_parts);
    RFT_TRY_GOTO(make(cuda, out, error), close_parts);
    return REFIT_OK;

close_parts:
    close_parts(cuda);
    rft_cuda_context_close(cuda);
close_driver:
    rft_cuda_driver_close(&cuda->driver);
    return status;
}

refit_status rft_device_cuda_open(const char *rest, const refit_config *config, refit_device **out,
                                  refit_error *error)
{
    int ordinal = 0;
    uint64_t capacity = UINT64_MAX;
    RFT_TRY(read_rest(rest, &ordinal, &capacity, error));
    rft_cuda_device *cuda = rft_calloc(1, sizeof *cuda);
    RFT_REFUSE_IF(cuda == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for a device");
    cuda->config = *config;
    refit_status status = open_all(cuda, ordinal, capacity, out, error);
    if (status != REFIT_OK) rft_free(cuda);
    return status;
}
