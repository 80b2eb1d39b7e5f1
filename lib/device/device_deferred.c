/*
 * What could not be given back when its owner closed: it stays with the device, which asks again.
 *
 * The list is taken away whole while its things are asked, so that no lock is held meanwhile, and
 * what is left of it is put back.
 */
#include "device/device.h"

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
