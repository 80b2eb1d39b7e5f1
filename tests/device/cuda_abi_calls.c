/*
 * The function types of cuda_driver.h, written in NVIDIA's types, compared with NVIDIA's by the
 * compiler. Where theirs has an enum or another name for the same pointer, both are spelled out.
 */
#include <cuda.h>
#include <cudaTypedefs.h>

/* Instead of cuda_abi.h. */
#define RFT_CUDA_ABI_H
#include <stdint.h>
#define rft_cu_result          CUresult
#define rft_cu_device          CUdevice
#define rft_cu_ptr             CUdeviceptr
#define rft_cu_handle          CUmemGenericAllocationHandle
#define rft_cu_context         CUcontext
#define rft_cu_stream          CUstream
#define rft_cu_event           CUevent
#define rft_cu_library         CUlibrary
#define rft_cu_kernel          CUkernel
#define rft_cu_uuid            CUuuid
#define rft_cu_ipc_handle      CUipcMemHandle
#define rft_cu_location        CUmemLocation
#define rft_cu_allocation      CUmemAllocationProp
#define rft_cu_access          CUmemAccessDesc
#define rft_cu_copy_attributes CUmemcpyAttributes
#define rft_cu_copy_2d         CUDA_MEMCPY2D
#define rft_cu_host_fn         CUhostFn
#include "device/cuda/cuda_driver.h"

#include "tests/device/cuda_abi_calls.h"

#define TYPE_OF(field)    __typeof__(((rft_cuda_driver *)0)->field)
#define COMPATIBLE(a, b)  __builtin_types_compatible_p(a, b)
#define SAME(field, type) #field, #type, COMPATIBLE(TYPE_OF(field), type)
/* `ours` and `theirs` are parameter lists that differ only in how they name an int or a pointer. */
#define ALIKE(field, type, ours, theirs)                                                           \
    (COMPATIBLE(TYPE_OF(field), CUresult(*) ours) && COMPATIBLE(type, CUresult(*) theirs))
#define LIKE(field, type, ours, theirs) #field, #type, ALIKE(field, type, ours, theirs)

_Static_assert(sizeof(CUdevice_attribute) == sizeof(int), "an enum is an int");
_Static_assert(sizeof(CUpointer_attribute) == sizeof(int), "an enum is an int");
_Static_assert(sizeof(CUstreamCaptureMode) == sizeof(int), "an enum is an int");
_Static_assert(sizeof(CUstreamCaptureStatus) == sizeof(int), "an enum is an int");
_Static_assert(sizeof(CUmemAllocationHandleType) == sizeof(int), "an enum is an int");
_Static_assert(sizeof(CUmemAllocationGranularity_flags) == sizeof(int), "an enum is an int");
_Static_assert(sizeof(CUjit_option) == sizeof(int), "an enum is an int");
_Static_assert(sizeof(CUlibraryOption) == sizeof(int), "an enum is an int");

const abi_call abi_calls[] = {
    {SAME(get_error_name, PFN_cuGetErrorName_v6000)},
    {SAME(get_error_string, PFN_cuGetErrorString_v6000)},
    {SAME(init, PFN_cuInit_v2000)},
    {SAME(driver_version, PFN_cuDriverGetVersion_v2020)},
    {SAME(device_count, PFN_cuDeviceGetCount_v2000)},
    {SAME(device_get, PFN_cuDeviceGet_v2000)},
    {SAME(device_name, PFN_cuDeviceGetName_v2000)},
    {SAME(device_uuid, PFN_cuDeviceGetUuid_v11040)},
    {LIKE(device_attribute, PFN_cuDeviceGetAttribute_v2000, (int *, int, CUdevice),
          (int *, CUdevice_attribute, CUdevice))},
    {SAME(device_total, PFN_cuDeviceTotalMem_v3020)},
    {SAME(context_retain, PFN_cuDevicePrimaryCtxRetain_v7000)},
    {SAME(context_state, PFN_cuDevicePrimaryCtxGetState_v7000)},
    {SAME(peer_reaches, PFN_cuDeviceCanAccessPeer_v4000)},
    {SAME(context_release, PFN_cuDevicePrimaryCtxRelease_v11000)},
    {SAME(context_push, PFN_cuCtxPushCurrent_v4000)},
    {SAME(context_pop, PFN_cuCtxPopCurrent_v4000)},
    {LIKE(capture_mode, PFN_cuThreadExchangeStreamCaptureMode_v10010, (int *),
          (CUstreamCaptureMode *))},
    {SAME(memory_info, PFN_cuMemGetInfo_v3020)},
    {SAME(memory_alloc, PFN_cuMemAlloc_v3020)},
    {SAME(memory_free, PFN_cuMemFree_v3020)},
    {SAME(memory_range, PFN_cuMemGetAddressRange_v3020)},
    {LIKE(pointer_attributes, PFN_cuPointerGetAttributes_v7000,
          (unsigned, int *, void **, CUdeviceptr),
          (unsigned, CUpointer_attribute *, void **, CUdeviceptr))},
    {SAME(host_alloc, PFN_cuMemHostAlloc_v2020)},
    {SAME(host_free, PFN_cuMemFreeHost_v2000)},
    {SAME(host_pointer, PFN_cuMemHostGetDevicePointer_v3020)},
    {SAME(host_register, PFN_cuMemHostRegister_v6050)},
    {SAME(host_unregister, PFN_cuMemHostUnregister_v4000)},
    {SAME(copy, PFN_cuMemcpyAsync_v4000)},
    {SAME(copy_2d, PFN_cuMemcpy2DAsync_v3020)},
    {SAME(copy_batch, PFN_cuMemcpyBatchAsync_v13000)},
    {SAME(copy_batch_12080, PFN_cuMemcpyBatchAsync_v12080)},
    {SAME(fill, PFN_cuMemsetD8Async_v3020)},
    {SAME(stream_open, PFN_cuStreamCreateWithPriority_v5050)},
    {SAME(stream_close, PFN_cuStreamDestroy_v4000)},
    {SAME(stream_query, PFN_cuStreamQuery_v2000)},
    {SAME(stream_wait_event, PFN_cuStreamWaitEvent_v3020)},
    {SAME(stream_context, PFN_cuStreamGetCtx_v9020)},
    {LIKE(stream_capturing, PFN_cuStreamIsCapturing_v10000, (CUstream, int *),
          (CUstream, CUstreamCaptureStatus *))},
    {SAME(stream_call, PFN_cuLaunchHostFunc_v10000)},
    {SAME(event_open, PFN_cuEventCreate_v2000)},
    {SAME(event_close, PFN_cuEventDestroy_v4000)},
    {SAME(event_record, PFN_cuEventRecord_v2000)},
    {SAME(event_query, PFN_cuEventQuery_v2000)},
    {SAME(event_elapsed, PFN_cuEventElapsedTime_v2000)},
    {SAME(address_reserve, PFN_cuMemAddressReserve_v10020)},
    {SAME(address_free, PFN_cuMemAddressFree_v10020)},
    {SAME(physical_create, PFN_cuMemCreate_v10020)},
    {SAME(physical_release, PFN_cuMemRelease_v10020)},
    {SAME(map, PFN_cuMemMap_v10020)},
    {SAME(unmap, PFN_cuMemUnmap_v10020)},
    {SAME(set_access, PFN_cuMemSetAccess_v10020)},
    {LIKE(granularity, PFN_cuMemGetAllocationGranularity_v10020,
          (size_t *, const CUmemAllocationProp *, int),
          (size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags))},
    {LIKE(physical_export, PFN_cuMemExportToShareableHandle_v10020,
          (void *, CUmemGenericAllocationHandle, int, unsigned long long),
          (void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long))},
    {LIKE(physical_import, PFN_cuMemImportFromShareableHandle_v10020,
          (CUmemGenericAllocationHandle *, void *, int),
          (CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType))},
    {SAME(ipc_export, PFN_cuIpcGetMemHandle_v4010)},
    {SAME(ipc_import, PFN_cuIpcOpenMemHandle_v11000)},
    {SAME(ipc_close, PFN_cuIpcCloseMemHandle_v4010)},
    {LIKE(library_load, PFN_cuLibraryLoadData_v12000,
          (CUlibrary *, const void *, int *, void **, unsigned, int *, void **, unsigned),
          (CUlibrary *, const void *, CUjit_option *, void **, unsigned, CUlibraryOption *, void **,
           unsigned))},
    {SAME(library_unload, PFN_cuLibraryUnload_v12000)},
    {SAME(library_kernel, PFN_cuLibraryGetKernel_v12000)},
    /* A CUkernel may be launched as if it were a CUfunction, so both have one type here. */
    {LIKE(kernel_function, PFN_cuKernelGetFunction_v12000, (CUkernel *, CUkernel),
          (CUfunction *, CUkernel))},
    {LIKE(function_load, PFN_cuFuncLoad_v12040, (CUkernel), (CUfunction))},
    {LIKE(launch, PFN_cuLaunchKernel_v4000,
          (CUkernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
           void **, void **),
          (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
           CUstream, void **, void **))},
};

const size_t abi_call_count = sizeof abi_calls / sizeof abi_calls[0];
