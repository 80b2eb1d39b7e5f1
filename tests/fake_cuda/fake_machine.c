/*
 * What tests set on the fake driver's machine.
 */
#include <stdlib.h>

#include "fake_state.h"

FAKE_EXPORTED void fake_cuda_set_devices(int count)
{
    fake_lock();
    fake.device_count = count;
    fake_unlock();
}

FAKE_EXPORTED void fake_cuda_set_version(int version)
{
    fake_lock();
    fake.version = version;
    fake_unlock();
}

FAKE_EXPORTED void fake_cuda_set_memory(int device, uint64_t bytes)
{
    fake_lock();
    if (fake.devices[device].heap != 0) abort();
    fake.devices[device].total = bytes;
    fake_unlock();
}

FAKE_EXPORTED void fake_cuda_set_granule(uint64_t bytes)
{
    fake_lock();
    fake.granule = bytes;
    fake_unlock();
}

FAKE_EXPORTED void fake_cuda_set_attribute(int device, int attribute, int value, bool known)
{
    fake_lock();
    fake.devices[device].attributes[attribute] = value;
    fake.devices[device].known[attribute] = known;
    fake_unlock();
}

FAKE_EXPORTED void fake_cuda_set_skew(bool on)
{
    fake_lock();
    fake.skew = on;
    fake_unlock();
}

FAKE_EXPORTED void fake_cuda_set_peers(bool on)
{
    fake_lock();
    fake.no_peers = !on;
    fake_unlock();
}

FAKE_EXPORTED void fake_cuda_set_register_cap(uint64_t bytes)
{
    fake_lock();
    fake.register_cap = bytes;
    fake_unlock();
}

FAKE_EXPORTED void fake_cuda_set_batch_cap(uint64_t copies)
{
    fake_lock();
    fake.batch_cap = copies;
    fake_unlock();
}

FAKE_EXPORTED void fake_cuda_set_taken(int device, uint64_t bytes)
{
    fake_lock();
    fake.devices[device].taken = bytes;
    fake_unlock();
}

FAKE_EXPORTED fake_cuda_live fake_cuda_alive(void)
{
    fake_lock();
    fake_cuda_live live = {
        .memories = fake.kinds[FAKE_MEMORY],
        .reservations = fake.reservations.count,
        .physicals = fake.physicals.count,
        .mappings = fake.kinds[FAKE_MAPPING],
        .registrations = fake.kinds[FAKE_REGISTERED],
        .host_memories = fake.kinds[FAKE_HOST],
        .imports = fake.kinds[FAKE_IMPORT],
        .streams = fake.own_streams,
        .events = fake.events.count,
        .libraries = fake.libraries.count,
    };
    for (int i = 0; i < FAKE_CUDA_DEVICES_MOST; i++)
        if (fake.devices[i].primary != NULL) live.contexts += fake.devices[i].primary->retained;
    fake_unlock();
    return live;
}

FAKE_EXPORTED unsigned fake_cuda_leaks(void)
{
    fake_cuda_live live = fake_cuda_alive();
    return live.memories + live.reservations + live.physicals + live.mappings + live.registrations +
           live.host_memories + live.imports + live.streams + live.events + live.libraries +
           live.contexts;
}

FAKE_EXPORTED uint64_t fake_cuda_used(int device)
{
    fake_lock();
    uint64_t used = fake.devices[device].used;
    fake_unlock();
    return used;
}
