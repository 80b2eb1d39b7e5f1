/*
 * What could not be given back when its owner closed: it stays with the device, which asks again.
 *
 * The list is taken away whole while its things are asked, so that no lock is held meanwhile, and
 * what is left of it is put back.
 */
#include "device/device.h"

void rft_device_leave(refit_device *device, rft_leftover *leftover)
{
    rft_lock(&device->lock);
    leftover->next = device->leftovers;
    device->leftovers = leftover;
    rft_unlock(&device->lock);
}

bool rft_device_sweep(refit_device *device)
{
    bool clean = true;
    rft_lock(&device->lock);
    rft_leftover *list = device->leftovers;
    device->leftovers = NULL;
    rft_unlock(&device->lock);
    while (list != NULL) {
        rft_leftover *next = list->next;
        if (!list->give_back(list, device)) {
            rft_device_leave(device, list);
            clean = false;
        }
        list = next;
    }
    return clean;
}
