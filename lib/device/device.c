/*
 * The device as an object: made by an implementation, described, counted, closed; and what could
 * not be given back when its owner closed (deferred frees).
 *
 * An implementation is a table of slots and a state of its own (rft_device_make); this file holds
 * what is the same for all of them. The calls that are forwarded to the slots are in
 * device_calls.c. Opening one from its spec is in device_open.c.
 */
#include "device/device.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "config/options.h"

/* ---- The object --------------------------------------------------------------------------- */

#define WAIT_MOST_MS 60000u /* of a device that was made without a configuration */

refit_status rft_device_make(const rft_device_ops *ops, void *self, refit_device **out,
                             refit_error *error)
{
    RFT_REFUSE_IF(ops->version != RFT_DEVICE_OPS_VERSION || ops->size != sizeof *ops, error,
                  REFIT_ERR_INVALID,
                  "a device with operations of version %u, %zu bytes, was made "
                  "for another refit: this one wants version %u, %zu bytes",
                  (unsigned)ops->version, ops->size, RFT_DEVICE_OPS_VERSION, sizeof *ops);
    rft_device_ops filled = *ops;
    RFT_TRY(rft_device_fill_optional(&filled, error));
    refit_device *device = rft_calloc(1, sizeof *device);
    RFT_REFUSE_IF(device == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for a device");
    refit_status status = REFIT_OK;
    RFT_TRY_GOTO(rft_mutex_open(&device->lock, error), free_device);
    RFT_TRY_GOTO(rft_mutex_open(&device->reserve_lock, error), close_lock);
    device->ops = filled;
    device->self = self;
    device->wait_most_ms = WAIT_MOST_MS;
    *out = device;
    return REFIT_OK;

close_lock:
    rft_mutex_close(&device->lock);
free_device:
    rft_free(device);
    return status;
}

bool rft_device_read_capacity(const char *text, uint64_t *bytes)
{
    static const char key[] = "capacity=";
    *bytes = UINT64_MAX;
    if (text[0] == '\0') return true;
    return strncmp(text, key, sizeof key - 1) == 0 && rft_size_read(text + sizeof key - 1, bytes) &&
           *bytes != 0;
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

/* ---- Deferred frees --------------------------------------------------------------------------
 * What could not be given back when its owner closed: it stays with the device, which asks again.
 *
 * The list is taken away whole while its things are asked, so that no lock is held meanwhile, and
 * what is left of it is put back.
 */

void rft_device_defer_free(refit_device *device, rft_deferred_free *deferred)
{
    rft_lock(&device->lock);
    deferred->next = device->deferred;
    device->deferred = deferred;
    rft_unlock(&device->lock);
}

bool rft_device_sweep(refit_device *device)
{
    bool clean = true;
    rft_lock(&device->lock);
    rft_deferred_free *list = device->deferred;
    device->deferred = NULL;
    rft_unlock(&device->lock);
    while (list != NULL) {
        rft_deferred_free *next = list->next;
        if (!list->give_back(list, device)) {
            rft_device_defer_free(device, list);
            clean = false;
        }
        list = next;
    }
    return clean;
}
