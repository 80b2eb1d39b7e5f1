/* Numbers, layouts and calls of cuda_abi.h and cuda_driver.h are NVIDIA's, where <cuda.h> is. */
#include <ctype.h>
#include <stdio.h>

#include <cuda.h>

#include "device/cuda/cuda_driver.h"
#include "tests/device/cuda_abi_calls.h"
#include "tests/support/test.h"

#define EQUAL(ours, theirs) #ours, (long long)(ours), #theirs, (long long)(theirs)

static const struct abi_number {
    const char *ours;
    long long our_value;
    const char *theirs;
    long long their_value;
} numbers[] = {
    {EQUAL(RFT_CU_SUCCESS, CUDA_SUCCESS)},
    {EQUAL(RFT_CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE)},
    {EQUAL(RFT_CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY)},
    {EQUAL(RFT_CU_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED)},
    {EQUAL(RFT_CU_DEINITIALIZED, CUDA_ERROR_DEINITIALIZED)},
    {EQUAL(RFT_CU_STUB_LIBRARY, CUDA_ERROR_STUB_LIBRARY)},
    {EQUAL(RFT_CU_CALL_REQUIRES_NEWER_DRIVER, CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER)},
    {EQUAL(RFT_CU_DEVICE_UNAVAILABLE, CUDA_ERROR_DEVICE_UNAVAILABLE)},
    {EQUAL(RFT_CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE)},
    {EQUAL(RFT_CU_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE)},
    {EQUAL(RFT_CU_INVALID_IMAGE, CUDA_ERROR_INVALID_IMAGE)},
    {EQUAL(RFT_CU_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT)},
    {EQUAL(RFT_CU_MAP_FAILED, CUDA_ERROR_MAP_FAILED)},
    {EQUAL(RFT_CU_NO_BINARY_FOR_GPU, CUDA_ERROR_NO_BINARY_FOR_GPU)},
    {EQUAL(RFT_CU_ECC_UNCORRECTABLE, CUDA_ERROR_ECC_UNCORRECTABLE)},
    {EQUAL(RFT_CU_INVALID_PTX, CUDA_ERROR_INVALID_PTX)},
    {EQUAL(RFT_CU_NVLINK_UNCORRECTABLE, CUDA_ERROR_NVLINK_UNCORRECTABLE)},
    {EQUAL(RFT_CU_JIT_COMPILER_NOT_FOUND, CUDA_ERROR_JIT_COMPILER_NOT_FOUND)},
    {EQUAL(RFT_CU_UNSUPPORTED_PTX_VERSION, CUDA_ERROR_UNSUPPORTED_PTX_VERSION)},
    {EQUAL(RFT_CU_JIT_COMPILATION_DISABLED, CUDA_ERROR_JIT_COMPILATION_DISABLED)},
    {EQUAL(RFT_CU_CONTAINED, CUDA_ERROR_CONTAINED)},
    {EQUAL(RFT_CU_OPERATING_SYSTEM, CUDA_ERROR_OPERATING_SYSTEM)},
    {EQUAL(RFT_CU_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE)},
    {EQUAL(RFT_CU_ILLEGAL_STATE, CUDA_ERROR_ILLEGAL_STATE)},
    {EQUAL(RFT_CU_NOT_FOUND, CUDA_ERROR_NOT_FOUND)},
    {EQUAL(RFT_CU_NOT_READY, CUDA_ERROR_NOT_READY)},
    {EQUAL(RFT_CU_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS)},
    {EQUAL(RFT_CU_LAUNCH_OUT_OF_RESOURCES, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)},
    {EQUAL(RFT_CU_LAUNCH_TIMEOUT, CUDA_ERROR_LAUNCH_TIMEOUT)},
    {EQUAL(RFT_CU_CONTEXT_IS_DESTROYED, CUDA_ERROR_CONTEXT_IS_DESTROYED)},
    {EQUAL(RFT_CU_ASSERT, CUDA_ERROR_ASSERT)},
    {EQUAL(RFT_CU_HOST_MEMORY_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)},
    {EQUAL(RFT_CU_HOST_MEMORY_NOT_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)},
    {EQUAL(RFT_CU_HARDWARE_STACK_ERROR, CUDA_ERROR_HARDWARE_STACK_ERROR)},
    {EQUAL(RFT_CU_ILLEGAL_INSTRUCTION, CUDA_ERROR_ILLEGAL_INSTRUCTION)},
    {EQUAL(RFT_CU_MISALIGNED_ADDRESS, CUDA_ERROR_MISALIGNED_ADDRESS)},
    {EQUAL(RFT_CU_INVALID_ADDRESS_SPACE, CUDA_ERROR_INVALID_ADDRESS_SPACE)},
    {EQUAL(RFT_CU_INVALID_PC, CUDA_ERROR_INVALID_PC)},
    {EQUAL(RFT_CU_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_FAILED)},
    {EQUAL(RFT_CU_TENSOR_MEMORY_LEAK, CUDA_ERROR_TENSOR_MEMORY_LEAK)},
    {EQUAL(RFT_CU_NOT_PERMITTED, CUDA_ERROR_NOT_PERMITTED)},
    {EQUAL(RFT_CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED)},
    {EQUAL(RFT_CU_SYSTEM_NOT_READY, CUDA_ERROR_SYSTEM_NOT_READY)},
    {EQUAL(RFT_CU_SYSTEM_DRIVER_MISMATCH, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)},
    {EQUAL(RFT_CU_COMPAT_NOT_SUPPORTED, CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE)},
    {EQUAL(RFT_CU_MPS_CLIENT_TERMINATED, CUDA_ERROR_MPS_CLIENT_TERMINATED)},
    {EQUAL(RFT_CU_STREAM_CAPTURE_UNSUPPORTED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)},
    {EQUAL(RFT_CU_STREAM_CAPTURE_INVALIDATED, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)},
    {EQUAL(RFT_CU_STREAM_CAPTURE_ISOLATION, CUDA_ERROR_STREAM_CAPTURE_ISOLATION)},
    {EQUAL(RFT_CU_STREAM_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)},
    {EQUAL(RFT_CU_CAPTURED_EVENT, CUDA_ERROR_CAPTURED_EVENT)},
    {EQUAL(RFT_CU_EXTERNAL_DEVICE, CUDA_ERROR_EXTERNAL_DEVICE)},
    {EQUAL(RFT_CU_UNKNOWN, CUDA_ERROR_UNKNOWN)},
    {EQUAL(RFT_CU_ATTR_MULTIPROCESSORS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)},
    {EQUAL(RFT_CU_ATTR_INTEGRATED, CU_DEVICE_ATTRIBUTE_INTEGRATED)},
    {EQUAL(RFT_CU_ATTR_COMPUTE_MODE, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)},
    {EQUAL(RFT_CU_ATTR_PCI_BUS, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)},
    {EQUAL(RFT_CU_ATTR_PCI_DEVICE, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)},
    {EQUAL(RFT_CU_ATTR_UNIFIED_ADDRESSING, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)},
    {EQUAL(RFT_CU_ATTR_PCI_DOMAIN, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)},
    {EQUAL(RFT_CU_ATTR_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)},
    {EQUAL(RFT_CU_ATTR_CAPABILITY_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)},
    {EQUAL(RFT_CU_ATTR_HOST_POINTERS, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)},
    {EQUAL(RFT_CU_ATTR_HOST_REGISTER, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)},
    {EQUAL(RFT_CU_ATTR_HOST_PAGE_TABLES,
           CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES)},
    {EQUAL(RFT_CU_ATTR_VMM, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)},
    {EQUAL(RFT_CU_ATTR_RDMA_WITH_VMM, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)},
    {EQUAL(RFT_CU_ATTR_POSIX_FD, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)},
    {EQUAL(RFT_CU_ATTR_HOST_NUMA, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID)},
    {EQUAL(RFT_CU_MODE_DEFAULT, CU_COMPUTEMODE_DEFAULT)},
    {EQUAL(RFT_CU_MODE_PROHIBITED, CU_COMPUTEMODE_PROHIBITED)},
    {EQUAL(RFT_CU_MODE_EXCLUSIVE_PROCESS, CU_COMPUTEMODE_EXCLUSIVE_PROCESS)},
    {EQUAL(RFT_CU_PTR_CONTEXT, CU_POINTER_ATTRIBUTE_CONTEXT)},
    {EQUAL(RFT_CU_PTR_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE)},
    {EQUAL(RFT_CU_PTR_SYNC_MEMOPS, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)},
    {EQUAL(RFT_CU_PTR_BUFFER_ID, CU_POINTER_ATTRIBUTE_BUFFER_ID)},
    {EQUAL(RFT_CU_PTR_IS_MANAGED, CU_POINTER_ATTRIBUTE_IS_MANAGED)},
    {EQUAL(RFT_CU_PTR_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)},
    {EQUAL(RFT_CU_PTR_IPC_CAPABLE, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)},
    {EQUAL(RFT_CU_PTR_RANGE_START, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)},
    {EQUAL(RFT_CU_PTR_RANGE_SIZE, CU_POINTER_ATTRIBUTE_RANGE_SIZE)},
    {EQUAL(RFT_CU_PTR_MAPPED, CU_POINTER_ATTRIBUTE_MAPPED)},
    {EQUAL(RFT_CU_PTR_HANDLE_TYPES, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES)},
    {EQUAL(RFT_CU_MEMORY_HOST, CU_MEMORYTYPE_HOST)},
    {EQUAL(RFT_CU_MEMORY_DEVICE, CU_MEMORYTYPE_DEVICE)},
    {EQUAL(RFT_CU_MEMORY_ARRAY, CU_MEMORYTYPE_ARRAY)},
    {EQUAL(RFT_CU_MEMORY_UNIFIED, CU_MEMORYTYPE_UNIFIED)},
    {EQUAL(RFT_CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING)},
    {EQUAL(RFT_CU_EVENT_TIMING, CU_EVENT_DEFAULT)},
    {EQUAL(RFT_CU_EVENT_BLOCKING_SYNC, CU_EVENT_BLOCKING_SYNC)},
    {EQUAL(RFT_CU_EVENT_NO_TIMING, CU_EVENT_DISABLE_TIMING)},
    {EQUAL(RFT_CU_CAPTURE_NONE, CU_STREAM_CAPTURE_STATUS_NONE)},
    {EQUAL(RFT_CU_CAPTURE_ACTIVE, CU_STREAM_CAPTURE_STATUS_ACTIVE)},
    {EQUAL(RFT_CU_CAPTURE_INVALIDATED, CU_STREAM_CAPTURE_STATUS_INVALIDATED)},
    {EQUAL(RFT_CU_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_GLOBAL)},
    {EQUAL(RFT_CU_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED)},
    {EQUAL(RFT_CU_HOST_ALLOC_PORTABLE, CU_MEMHOSTALLOC_PORTABLE)},
    {EQUAL(RFT_CU_HOST_ALLOC_DEVICEMAP, CU_MEMHOSTALLOC_DEVICEMAP)},
    {EQUAL(RFT_CU_HOST_REGISTER_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE)},
    {EQUAL(RFT_CU_HOST_REGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_DEVICEMAP)},
    {EQUAL(RFT_CU_HOST_REGISTER_READ_ONLY, CU_MEMHOSTREGISTER_READ_ONLY)},
    {EQUAL(RFT_CU_IPC_LAZY_PEER_ACCESS, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)},
    {EQUAL(RFT_CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE)},
    {EQUAL(RFT_CU_ALLOCATION_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED)},
    {EQUAL(RFT_CU_SHARE_NONE, CU_MEM_HANDLE_TYPE_NONE)},
    {EQUAL(RFT_CU_SHARE_POSIX_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)},
    {EQUAL(RFT_CU_GRANULARITY_MINIMUM, CU_MEM_ALLOC_GRANULARITY_MINIMUM)},
    {EQUAL(RFT_CU_GRANULARITY_RECOMMENDED, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)},
    {EQUAL(RFT_CU_ACCESS_READ, CU_MEM_ACCESS_FLAGS_PROT_READ)},
    {EQUAL(RFT_CU_ACCESS_READWRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)},
    {EQUAL(RFT_CU_SOURCE_STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)},
    {EQUAL(RFT_CU_SOURCE_CALL, CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL)},
    {EQUAL(RFT_CU_SOURCE_ANY, CU_MEMCPY_SRC_ACCESS_ORDER_ANY)},
    {EQUAL(RFT_CU_SYMBOL_FOUND, CU_GET_PROC_ADDRESS_SUCCESS)},
    {EQUAL(RFT_CU_SYMBOL_NOT_FOUND, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND)},
    {EQUAL(RFT_CU_SYMBOL_TOO_NEW, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT)},
    {EQUAL((uintptr_t)RFT_CU_STREAM_LEGACY, (uintptr_t)CU_STREAM_LEGACY)},
    {EQUAL((uintptr_t)RFT_CU_STREAM_PER_THREAD, (uintptr_t)CU_STREAM_PER_THREAD)},
};

static const size_t number_count = COUNT_OF(numbers);

#define SIZE(ours, theirs) #ours, sizeof(ours), sizeof(theirs)
#define PLACE(ours, field, theirs, their_field)                                                    \
#ours "." #field, offsetof(ours, field), offsetof(theirs, their_field)

static const struct abi_layout {
    const char *what;
    size_t ours;
    size_t theirs;
} layouts[] = {
    {SIZE(rft_cu_result, CUresult)},
    {SIZE(rft_cu_device, CUdevice)},
    {SIZE(rft_cu_ptr, CUdeviceptr)},
    {SIZE(rft_cu_handle, CUmemGenericAllocationHandle)},
    {SIZE(rft_cu_context, CUcontext)},
    {SIZE(rft_cu_stream, CUstream)},
    {SIZE(rft_cu_event, CUevent)},
    {SIZE(rft_cu_library, CUlibrary)},
    {SIZE(rft_cu_kernel, CUkernel)},
    {SIZE(rft_cu_uuid, CUuuid)},
    {SIZE(rft_cu_ipc_handle, CUipcMemHandle)},
    {SIZE(rft_cu_location, CUmemLocation)},
    {PLACE(rft_cu_location, type, CUmemLocation, type)},
    {PLACE(rft_cu_location, id, CUmemLocation, id)},
    {SIZE(rft_cu_allocation, CUmemAllocationProp)},
    {PLACE(rft_cu_allocation, type, CUmemAllocationProp, type)},
    {PLACE(rft_cu_allocation, requested_handle_types, CUmemAllocationProp, requestedHandleTypes)},
    {PLACE(rft_cu_allocation, location, CUmemAllocationProp, location)},
    {PLACE(rft_cu_allocation, win32_meta, CUmemAllocationProp, win32HandleMetaData)},
    {PLACE(rft_cu_allocation, flags, CUmemAllocationProp, allocFlags)},
    {PLACE(rft_cu_allocation, flags.rdma_capable, CUmemAllocationProp,
           allocFlags.gpuDirectRDMACapable)},
    {PLACE(rft_cu_allocation, flags.usage, CUmemAllocationProp, allocFlags.usage)},
    {SIZE(rft_cu_access, CUmemAccessDesc)},
    {PLACE(rft_cu_access, location, CUmemAccessDesc, location)},
    {PLACE(rft_cu_access, flags, CUmemAccessDesc, flags)},
    {SIZE(rft_cu_copy_attributes, CUmemcpyAttributes)},
    {PLACE(rft_cu_copy_attributes, source_order, CUmemcpyAttributes, srcAccessOrder)},
    {PLACE(rft_cu_copy_attributes, source_hint, CUmemcpyAttributes, srcLocHint)},
    {PLACE(rft_cu_copy_attributes, target_hint, CUmemcpyAttributes, dstLocHint)},
    {PLACE(rft_cu_copy_attributes, flags, CUmemcpyAttributes, flags)},
    {SIZE(rft_cu_copy_2d, CUDA_MEMCPY2D)},
    {PLACE(rft_cu_copy_2d, from_x, CUDA_MEMCPY2D, srcXInBytes)},
    {PLACE(rft_cu_copy_2d, from_y, CUDA_MEMCPY2D, srcY)},
    {PLACE(rft_cu_copy_2d, from_type, CUDA_MEMCPY2D, srcMemoryType)},
    {PLACE(rft_cu_copy_2d, from_host, CUDA_MEMCPY2D, srcHost)},
    {PLACE(rft_cu_copy_2d, from_device, CUDA_MEMCPY2D, srcDevice)},
    {PLACE(rft_cu_copy_2d, from_array, CUDA_MEMCPY2D, srcArray)},
    {PLACE(rft_cu_copy_2d, from_pitch, CUDA_MEMCPY2D, srcPitch)},
    {PLACE(rft_cu_copy_2d, to_x, CUDA_MEMCPY2D, dstXInBytes)},
    {PLACE(rft_cu_copy_2d, to_y, CUDA_MEMCPY2D, dstY)},
    {PLACE(rft_cu_copy_2d, to_type, CUDA_MEMCPY2D, dstMemoryType)},
    {PLACE(rft_cu_copy_2d, to_host, CUDA_MEMCPY2D, dstHost)},
    {PLACE(rft_cu_copy_2d, to_device, CUDA_MEMCPY2D, dstDevice)},
    {PLACE(rft_cu_copy_2d, to_array, CUDA_MEMCPY2D, dstArray)},
    {PLACE(rft_cu_copy_2d, to_pitch, CUDA_MEMCPY2D, dstPitch)},
    {PLACE(rft_cu_copy_2d, width, CUDA_MEMCPY2D, WidthInBytes)},
    {PLACE(rft_cu_copy_2d, height, CUDA_MEMCPY2D, Height)},
};

TEST(numbers_are_those_of_the_toolkit)
{
    unsigned wrong = 0;
    for (size_t i = 0; i < number_count; i++) {
        if (numbers[i].our_value == numbers[i].their_value) continue;
        print_error("%s is %lld, %s is %lld\n", numbers[i].ours, numbers[i].our_value,
                    numbers[i].theirs, numbers[i].their_value);
        wrong++;
    }
    assert_int_equal(wrong, 0);
}

static bool compared(const char *name)
{
    for (size_t i = 0; i < number_count; i++)
        if (strstr(numbers[i].ours, name) != NULL) return true;
    return false;
}

/* The name that "#define RFT_CU_NAME …" defines; false: it is another line. */
static bool defines(const char *line, char name[64])
{
    int length = 0;
    if (sscanf(line, "#define %63[A-Z0-9_]%n", name, &length) != 1) return false;
    return strncmp(name, "RFT_CU_", 7) == 0 && isspace((unsigned char)line[length]);
}

TEST(every_number_is_compared)
{
    char line[256], name[64];
    unsigned found = 0, missing = 0;
    FILE *header = fopen("lib/device/cuda/cuda_abi.h", "r");
    assert_non_null(header);
    while (fgets(line, sizeof line, header) != NULL) {
        if (!defines(line, name)) continue;
        found++;
        if (compared(name)) continue;
        print_error("%s is not compared\n", name);
        missing++;
    }
    fclose(header);
    assert_int_equal(missing, 0);
    assert_int_equal(found, number_count);
}

TEST(layouts_are_those_of_the_toolkit)
{
    unsigned wrong = 0;
    for (size_t i = 0; i < COUNT_OF(layouts); i++) {
        if (layouts[i].ours == layouts[i].theirs) continue;
        print_error("%s: %zu, but NVIDIA's %zu\n", layouts[i].what, layouts[i].ours,
                    layouts[i].theirs);
        wrong++;
    }
    assert_int_equal(wrong, 0);
}

static const struct abi_symbol {
    const char *field;
    const char *symbol;
    int version;
} symbols[] = {
#define ROW(field, symbol, version, ...) {#field, symbol, version},
    RFT_CUDA_SYMBOLS(ROW, ROW)
#undef ROW
};

/* The row of the field, under the type that a symbol of this version has. */
static const abi_call *call_of(const struct abi_symbol *symbol)
{
    char type[96];
    snprintf(type, sizeof type, "PFN_%s_v%d", symbol->symbol, symbol->version);
    for (size_t i = 0; i < abi_call_count; i++)
        if (strcmp(abi_calls[i].field, symbol->field) == 0)
            return strcmp(abi_calls[i].type, type) == 0 ? &abi_calls[i] : NULL;
    return NULL;
}

TEST(calls_are_those_of_the_toolkit)
{
    unsigned wrong = 0;
    for (size_t i = 0; i < COUNT_OF(symbols); i++) {
        const abi_call *call = call_of(&symbols[i]);
        if (call != NULL && call->same) continue;
        print_error("%s, version %d: %s\n", symbols[i].symbol, symbols[i].version,
                    call == NULL ? "not compared" : "another type than NVIDIA's");
        wrong++;
    }
    assert_int_equal(wrong, 0);
    assert_int_equal(COUNT_OF(symbols), abi_call_count);
}

/* What <cuda.h> says after the list of errors' comments: `*value` of the error that this line
 * defines; false: it is another line. */
static bool defines_error(const char *line, char name[64], int *value)
{
    return sscanf(line, " %63[A-Z0-9_] = %d", name, value) == 2 &&
           strncmp(name, "CUDA_ERROR_", 11) == 0;
}

static bool says_lost(const char *line)
{
    return strstr(line, "relaunched") != NULL || strstr(line, "cannot be used anymore") != NULL;
}

TEST(every_error_that_ends_all_work_is_known_as_such)
{
    char line[512], name[64];
    int value;
    bool ends = false;
    unsigned found = 0, missing = 0;
    FILE *header = fopen(CUDA_HEADER, "r");
    assert_non_null(header);
    while (fgets(line, sizeof line, header) != NULL) {
        if (strstr(line, "/**") != NULL) ends = false;
        ends = ends || says_lost(line);
        if (!ends || !defines_error(line, name, &value)) continue;
        found++;
        if (rft_cuda_is_lost(value)) continue;
        print_error("%s, %d\n", name, value);
        missing++;
    }
    fclose(header);
    assert_int_equal(missing, 0);
    assert_in_range(found, 10, 30);
}

int main(void)
{
    return test_run("cuda_abi");
}
