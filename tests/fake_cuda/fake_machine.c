/*
 * What tests set on the fake driver's machine.
 */
#include <stdlib.h>

#include "fake_state.h"

#define SET(field, value)                                                                          \
    do {                                                                                           \
        fake_lock();                                                                               \
        fake.field = (value);                                                                      \
        fake_unlock();                                                                             \
    } while (0)

FAKE_EXPORTED void fake_cuda_set_devices(int count)
{
    SET(device_count, count);
}

FAKE_EXPORTED void fake_cuda_set_version(int version)
{
    SET(version, version);
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
    SET(granule, bytes);
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
    SET(skew, on);
}

FAKE_EXPORTED void fake_cuda_set_peers(bool on)
{
    SET(no_peers, !on);
}

FAKE_EXPORTED void fake_cuda_set_register_cap(uint64_t bytes)
{
    SET(register_cap, bytes);
}

FAKE_EXPORTED void fake_cuda_set_batch_cap(uint64_t copies)
{
    SET(batch_cap, copies);
}

FAKE_EXPORTED void fake_cuda_set_taken(int device, uint64_t bytes)
{
    SET(devices[device].taken, bytes);
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
