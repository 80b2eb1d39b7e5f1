/*
 * Physical memory: a file of its own, which is also what is exported. It is the device's until its
 * handle is released and it is mapped nowhere.
 */
#include "fake_physical.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define POISON (UINT64_C(1) << 20)

bool fake_granular(uint64_t number)
{
    return number % fake.granule == 0;
}

static bool fits(const rft_cu_allocation *properties)
{
    return properties != NULL && properties->type == RFT_CU_ALLOCATION_PINNED &&
           properties->location.type == RFT_CU_LOCATION_DEVICE &&
           fake_device_of(properties->location.id) != NULL;
}

rft_cu_result fake_cu_granularity(size_t *bytes, const rft_cu_allocation *properties, int option)
{
    FAKE_CALL(granularity, FAKE_NEEDS_INIT);
    FAKE_REFUSE_IF(!fits(properties) || option < 0 || option > 1, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) *bytes = fake.granule;
    return fake_end(&call, result);
}

fake_physical *fake_physical_find(rft_cu_handle handle)
{
    return fake_object(&fake.physicals, handle, "physical memory");
}

static rft_cu_handle keep(fake_device *device, uint64_t bytes, uint64_t charged, int file,
                          int types)
{
    fake_physical *physical = fake_new(sizeof *physical);
    physical->device = device;
    physical->bytes = bytes;
    physical->charged = charged;
    physical->file = file;
    physical->types = types;
    physical->users = 1;
    device->used += charged;
    return fake_handle(&fake.physicals, &physical->node);
}

/* Fresh memory is not zero. */
static void poison(int file, uint64_t bytes)
{
    uint64_t length = bytes < POISON ? bytes : POISON;
    void *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) return;
    memset(memory, 0xA5, length);
    munmap(memory, length);
}

static rft_cu_result create(rft_cu_handle *handle, uint64_t bytes,
                            const rft_cu_allocation *properties)
{
    if (!fits(properties) || bytes == 0 || !fake_granular(bytes)) return RFT_CU_INVALID_VALUE;
    fake_device *device = fake_device_of(properties->location.id);
    int types = properties->requested_handle_types;
    if ((types & ~RFT_CU_SHARE_POSIX_FD) != 0) return RFT_CU_NOT_SUPPORTED;
    if (bytes > device->total || device->used + device->taken + bytes > device->total)
        return RFT_CU_OUT_OF_MEMORY;
    int file = fake_space_file(bytes);
    poison(file, bytes);
    *handle = keep(device, bytes, bytes, file, types);
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_physical_create(rft_cu_handle *handle, size_t bytes,
                                      const rft_cu_allocation *properties, unsigned long long flags)
{
    FAKE_CALL(physical_create, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    FAKE_REFUSE_IF(handle == NULL || flags != 0, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS) result = create(handle, bytes, properties);
    return fake_end(&call, result);
}

void fake_physical_leave(fake_physical *physical)
{
    if (--physical->users > 0) return;
    physical->device->used -= physical->charged;
    close(physical->file);
    free(physical);
}

rft_cu_result fake_cu_physical_release(rft_cu_handle handle)
{
    FAKE_CALL(physical_release, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    if (fake_ends(&call, result)) {
        fake_physical *physical = fake_physical_find(handle);
        if (physical != NULL) {
            fake_tree_take(&fake.physicals, &physical->node);
            fake_physical_leave(physical);
        } else if (result == RFT_CU_SUCCESS) {
            result = RFT_CU_INVALID_VALUE;
        }
    }
    return fake_end(&call, result);
}

rft_cu_result fake_cu_physical_export(void *shareable, rft_cu_handle handle, int type,
                                      unsigned long long flags)
{
    FAKE_CALL(physical_export, FAKE_NEEDS_INIT);
    FAKE_REFUSE_IF(shareable == NULL || flags != 0, RFT_CU_INVALID_VALUE);
    const fake_physical *physical = result == RFT_CU_SUCCESS ? fake_physical_find(handle) : NULL;
    if (result == RFT_CU_SUCCESS &&
        (physical == NULL || type != RFT_CU_SHARE_POSIX_FD || (physical->types & type) == 0))
        result = RFT_CU_INVALID_VALUE;
    if (result == RFT_CU_SUCCESS) {
        int file = fcntl(physical->file, F_DUPFD_CLOEXEC, 0);
        if (file < 0) result = RFT_CU_OPERATING_SYSTEM;
        if (file >= 0) memcpy(shareable, &file, sizeof file);
    }
    return fake_end(&call, result);
}

/* The descriptor itself, not its address, travels in the pointer. */
static rft_cu_result import(rft_cu_handle *handle, int from, fake_device *device)
{
    struct stat about;
    int file = fcntl(from, F_DUPFD_CLOEXEC, 0);
    if (file < 0) return RFT_CU_INVALID_VALUE;
    if (fstat(file, &about) != 0 || about.st_size <= 0 || !fake_granular((uint64_t)about.st_size)) {
        close(file);
        return RFT_CU_INVALID_VALUE;
    }
    *handle = keep(device, (uint64_t)about.st_size, 0, file, RFT_CU_SHARE_POSIX_FD);
    return RFT_CU_SUCCESS;
}

rft_cu_result fake_cu_physical_import(rft_cu_handle *handle, void *shareable, int type)
{
    FAKE_CALL(physical_import, FAKE_NEEDS_CONTEXT | FAKE_UNSAFE);
    FAKE_REFUSE_IF(handle == NULL || type != RFT_CU_SHARE_POSIX_FD, RFT_CU_INVALID_VALUE);
    if (result == RFT_CU_SUCCESS)
        result = import(handle, (int)(uintptr_t)shareable, call.context->device);
    return fake_end(&call, result);
}

void fake_physicals_reset(void)
{
    while (fake.physicals.root != NULL) {
        fake_physical *physical = (fake_physical *)fake.physicals.root;
        fake_tree_take(&fake.physicals, &physical->node);
        fake_physical_leave(physical);
    }
}
