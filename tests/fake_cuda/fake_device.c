/*
 * The fake driver's machine: how it is loaded and initialised, its version, its devices and what
 * they say about themselves. Device 0 is a Hopper, by default, and so are the others.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fake_stream.h"

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text != NULL ? strtoull(text, NULL, 10) : otherwise;
}

static void set_attribute(fake_device *device, int attribute, int value)
{
    device->attributes[attribute] = value;
    device->known[attribute] = true;
}

static void make_device(fake_device *device, int ordinal)
{
    *device = (fake_device){.ordinal = ordinal, .heap_file = -1};
    device->total = from_environment("FAKE_CUDA_MEMORY", UINT64_C(64) << 20);
    for (unsigned i = 0; i < sizeof device->uuid.bytes; i++)
        device->uuid.bytes[i] = (unsigned char)(0xFA + 31 * i + 7 * (unsigned)ordinal);
    set_attribute(device, RFT_CU_ATTR_MULTIPROCESSORS, 132);
    set_attribute(device, RFT_CU_ATTR_INTEGRATED, 0);
    set_attribute(device, RFT_CU_ATTR_COMPUTE_MODE, RFT_CU_MODE_DEFAULT);
    set_attribute(device, RFT_CU_ATTR_PCI_BUS, 0x20 + ordinal);
    set_attribute(device, RFT_CU_ATTR_PCI_DEVICE, 0);
    set_attribute(device, RFT_CU_ATTR_PCI_DOMAIN, 0);
    set_attribute(device, RFT_CU_ATTR_UNIFIED_ADDRESSING, 1);
    set_attribute(device, RFT_CU_ATTR_CAPABILITY_MAJOR, 9);
    set_attribute(device, RFT_CU_ATTR_CAPABILITY_MINOR, 0);
    set_attribute(device, RFT_CU_ATTR_HOST_POINTERS, 1);
    set_attribute(device, RFT_CU_ATTR_HOST_REGISTER, 1);
    set_attribute(device, RFT_CU_ATTR_HOST_PAGE_TABLES, 0);
    set_attribute(device, RFT_CU_ATTR_VMM, 1);
    set_attribute(device, RFT_CU_ATTR_POSIX_FD, 1);
    set_attribute(device, RFT_CU_ATTR_HOST_NUMA, 0);
}

static void reset_devices(void)
{
    for (int i = 0; i < FAKE_CUDA_DEVICES_MOST; i++) {
        if (fake.devices[i].heap_file > 0) close(fake.devices[i].heap_file);
        make_device(&fake.devices[i], i);
    }
    fake.process = 0;
    fake.device_count = (int)from_environment("FAKE_CUDA_DEVICES", 2);
    fake.version = (int)from_environment("FAKE_CUDA_VERSION", 13000);
    fake.granule = from_environment("FAKE_CUDA_GRANULE", UINT64_C(2) << 20);
    fake.skew = false;
    fake.no_peers = false;
    fake.register_cap = UINT64_MAX;
    fake.batch_cap = UINT64_MAX;
}

static void reset(void)
{
    fake_streams_reset();
    fake_events_reset();
    fake_kernels_reset();
    fake_vmm_reset();
    fake_physicals_reset();
    fake_host_reset();
    fake_ipc_reset();
    fake_memory_reset();
    fake_contexts_reset();
    reset_devices();
    fake_space_reset();
    fake_script_reset();
    fake_calls_reset();
}

FAKE_EXPORTED void fake_cuda_reset(void)
{
    fake_lock();
    reset();
    fake_unlock();
}

__attribute__((constructor)) static void load(void)
{
    pthread_atfork(fake_lock, fake_unlock, fake_unlock);
    fake_cuda_reset();
}

rft_cu_result fake_cu_init(unsigned flags)
{
    FAKE_CALL(init, FAKE_NEEDS_NOTHING);
    FAKE_REFUSE_IF(flags != 0, RFT_CU_INVALID_VALUE);
    FAKE_REFUSE_IF(fake.process != 0 && fake.process != getpid(),
                   RFT_CU_NOT_INITIALIZED); /* the child of a fork */
    FAKE_REFUSE_IF(fake.device_count == 0, RFT_CU_NO_DEVICE);
    if (result == RFT_CU_SUCCESS) fake.process = getpid();
    return fake_end(&call, result);
}

rft_cu_result fake_cu_driver_version(int *version)
{
    FAKE_CALL(driver_version, FAKE_NEEDS_NOTHING);
    FAKE_REFUSE_IF(version == NULL, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) *version = fake.version;
    return fake_end(&call, result);
}

rft_cu_result fake_cu_device_count(int *count)
{
    FAKE_CALL(device_count, FAKE_NEEDS_INIT);
    FAKE_REFUSE_IF(count == NULL, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) *count = fake.device_count;
    return fake_end(&call, result);
}

fake_device *fake_device_of(rft_cu_device device)
{
    return device >= 0 && device < fake.device_count ? &fake.devices[device] : NULL;
}

rft_cu_result fake_cu_device_get(rft_cu_device *device, int ordinal)
{
    FAKE_CALL(device_get, FAKE_NEEDS_INIT);
    FAKE_REFUSE_IF(fake_device_of(ordinal) == NULL, RFT_CU_INVALID_DEVICE);
    if (result == RFT_CU_SUCCESS) *device = ordinal;
    return fake_end(&call, result);
}

rft_cu_result fake_cu_peer_reaches(int *reaches, rft_cu_device device, rft_cu_device peer)
{
    FAKE_CALL(peer_reaches, FAKE_NEEDS_INIT);
    if (result == RFT_CU_SUCCESS &&
        (fake_device_of(device) == NULL || fake_device_of(peer) == NULL))
        result = RFT_CU_INVALID_DEVICE;
    FAKE_REFUSE_IF(reaches == NULL, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) *reaches = device != peer && !fake.no_peers;
    return fake_end(&call, result);
}

rft_cu_result fake_cu_device_name(char *name, int size, rft_cu_device device)
{
    FAKE_CALL(device_name, FAKE_NEEDS_INIT);
    FAKE_REFUSE_IF(fake_device_of(device) == NULL, RFT_CU_INVALID_DEVICE);
    FAKE_REFUSE_IF(name == NULL || size <= 0, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) snprintf(name, (size_t)size, "Fake GPU %d", device);
    return fake_end(&call, result);
}

rft_cu_result fake_cu_device_uuid(rft_cu_uuid *uuid, rft_cu_device device)
{
    FAKE_CALL(device_uuid, FAKE_NEEDS_INIT);
    fake_device *found = fake_device_of(device);
    FAKE_REFUSE_IF(found == NULL, RFT_CU_INVALID_DEVICE);
    if (result == RFT_CU_SUCCESS) *uuid = found->uuid;
    return fake_end(&call, result);
}

rft_cu_result fake_cu_device_attribute(int *value, int attribute, rft_cu_device device)
{
    FAKE_CALL(device_attribute, FAKE_NEEDS_INIT);
    fake_device *found = fake_device_of(device);
    FAKE_REFUSE_IF(found == NULL, RFT_CU_INVALID_DEVICE);
    FAKE_REFUSE_IF(attribute < 0 || attribute > 255 || !found->known[attribute],
                   RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) *value = found->attributes[attribute];
    return fake_end(&call, result);
}

rft_cu_result fake_cu_device_total(size_t *bytes, rft_cu_device device)
{
    FAKE_CALL(device_total, FAKE_NEEDS_INIT);
    fake_device *found = fake_device_of(device);
    FAKE_REFUSE_IF(found == NULL, RFT_CU_INVALID_DEVICE);
    if (result == RFT_CU_SUCCESS) *bytes = found->total;
    return fake_end(&call, result);
}
