/*
 * The device as an object: opened from its spec, described, counted, closed.
 *
 * An implementation is a table of slots and a state of its own (rft_device_make); this file holds
 * what is the same for all of them. The calls that are forwarded to the slots are in
 * device_calls.c. Knows no implementation but by its open function.
 */
#include "device/device.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/log.h"
#include "config/resolve.h"
#include "device/device_missing.h"
#include "device/device_spec.h"

#define BLOCK_MS 60000u /* of a device that was made without a configuration */

refit_status rft_device_make(const rft_device_ops *ops, void *self, refit_device **out,
                             refit_error *error)
{
    RFT_REFUSE_IF(ops->version != RFT_DEVICE_OPS_VERSION || ops->size != sizeof *ops, error,
                  REFIT_ERR_INVALID,
                  "a device with operations of version %u, %zu bytes, was made "
                  "for another refit: this one wants version %u, %zu bytes",
                  (unsigned)ops->version, ops->size, RFT_DEVICE_OPS_VERSION, sizeof *ops);
    refit_device *device = rft_calloc(1, sizeof *device);
    RFT_REFUSE_IF(device == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for a device");
    refit_status status = REFIT_OK;
    RFT_TRY_GOTO(rft_mutex_open(&device->lock, error), free_device);
    RFT_TRY_GOTO(rft_mutex_open(&device->reserve_lock, error), close_lock);
    device->ops = *ops;
    device->self = self;
    device->block_ms = BLOCK_MS;
    rft_device_fill_missing(&device->ops);
    *out = device;
    return REFIT_OK;

close_lock:
    rft_mutex_close(&device->lock);
free_device:
    rft_free(device);
    return status;
}

/* The first GPU; the host only where there is no driver or no GPU. A GPU that is there and cannot
 * be used is an error: whoever has one wants to know. */
static refit_status open_auto(const char *rest, const refit_config *config, refit_device **out,
                              refit_error *error)
{
    refit_error reason = {0};
    RFT_REFUSE_IF(rest[0] != '\0', error, REFIT_ERR_INVALID,
                  "\"auto:%.64s\" cannot be read: \"auto\" takes nothing behind it", rest);
    refit_status status = rft_device_cuda_open("", config, out, &reason);
    if (status == REFIT_OK) {
        rft_log(REFIT_LOG_INFO, "device auto: cuda:0");
    } else if (status == REFIT_ERR_NOT_FOUND) {
        rft_log(REFIT_LOG_INFO, "device auto: host, since %s", reason.text);
        status = rft_device_host_open("", config, out, error);
    } else if (error != NULL) {
        *error = reason;
    }
    return status;
}

static refit_status open_kind(const char *spec, const refit_config *config, refit_device **out,
                              refit_error *error)
{
    rft_device_spec parsed;
    RFT_TRY(rft_device_spec_parse(spec, &parsed, error));
    switch (parsed.kind) {
    case RFT_DEVICE_CUDA: return rft_device_cuda_open(parsed.rest, config, out, error);
    case RFT_DEVICE_AUTO: return open_auto(parsed.rest, config, out, error);
    case RFT_DEVICE_HOST: break;
    }
    return rft_device_host_open(parsed.rest, config, out, error);
}

refit_status refit_device_open(const char *spec, const refit_config *config, refit_device **out,
                               refit_error *error)
{
    RFT_REFUSE_IF(out == NULL, error, REFIT_ERR_INVALID, "no place to put the device: out is NULL");
    refit_config own;
    RFT_TRY(rft_config_resolve(config, &own, error));
    if (spec == NULL) spec = own.device;
    RFT_TRY(open_kind(spec, &own, out, error));
    (*out)->block_ms = own.offload_timeout_ms;
    return REFIT_OK;
}

refit_status refit_device_close(refit_device *device, refit_error *error)
{
    if (device == NULL) return REFIT_OK;
    RFT_REFUSE_IF(
        !rft_device_sweep(device), error, REFIT_ERR_BUSY,
        "memory of a closed publisher is not back: other processes have it mapped, or the driver "
        "refuses it; close the device again when they have let go");
    uint_fast32_t memories = atomic_load(&device->memories);
    uint_fast32_t streams = atomic_load(&device->streams);
    uint_fast32_t users = atomic_load(&device->users);
    RFT_REFUSE_IF(memories + streams + users != 0, error, REFIT_ERR_BUSY,
                  "the device is in use: %" PRIuFAST32 " allocations, %" PRIuFAST32
                  " streams and %" PRIuFAST32 " objects are open on it; close them first",
                  memories, streams, users);
    if (device->spare != NULL) device->ops.event_close(device->self, device->spare);
    device->ops.close(device->self);
    rft_mutex_close(&device->reserve_lock);
    rft_mutex_close(&device->lock);
    rft_free(device);
    return REFIT_OK;
}

refit_status refit_device_describe(refit_device *device, refit_device_info *info,
                                   refit_error *error)
{
    RFT_REFUSE_IF(device == NULL || info == NULL, error, REFIT_ERR_INVALID,
                  "a device and a place for its description are needed: one is NULL");
    RFT_REFUSE_IF(info->size < offsetof(refit_device_info, capacity_bytes), error,
                  REFIT_ERR_INVALID, "info->size is %zu: set it to sizeof(refit_device_info)",
                  info->size);
    refit_device_info full = {.capacity_bytes = UINT64_MAX, .numa_node = -1};
    device->ops.describe(device->self, &full);
    full.size = info->size;
    strncpy(full.kind, device->ops.kind, sizeof full.kind - 1);
    memcpy(info, &full, rft_min_u64(info->size, sizeof full));
    return REFIT_OK;
}

void rft_device_retain(refit_device *device)
{
    atomic_fetch_add(&device->users, 1);
}

void rft_device_release(refit_device *device)
{
    atomic_fetch_sub(&device->users, 1);
}

rft_device_caps rft_device_get_caps(refit_device *device)
{
    rft_device_caps caps = {.numa_node = -1};
    device->ops.caps(device->self, &caps);
    return caps;
}
