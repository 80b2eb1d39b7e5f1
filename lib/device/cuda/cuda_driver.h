/*
 * cuda_driver: the one place that opens libcuda.so.1, and the table of what refit calls in it.
 *
 * Every symbol is asked for at the version whose binary interface the declaration below was written
 * for (cuGetProcAddress_v2), never at the driver's own: a newer driver then gives the old
 * interface, not another one. An optional symbol is NULL where the driver lacks it, and its callers
 * have another way. Without a required one the driver is too old. The driver must know CUDA 12.0.
 */
#ifndef RFT_CUDA_DRIVER_H
#define RFT_CUDA_DRIVER_H

#include <stdbool.h>

#include "base/error.h"
#include "device/cuda/cuda_abi.h"

/* ---- The table ---------------------------------------------------------------------------- */

#define RFT_CUDA_DRIVER_LEAST 12000

/*
 * The table: R(field, "symbol", version, arguments…) is required, O(…) optional. A field is a
 * pointer to a function that returns an rft_cu_result.
 */
#define RFT_CUDA_SYMBOLS(R, O)                                                                     \
    R(get_error_name, "cuGetErrorName", 6000, rft_cu_result result, const char **name)             \
    R(get_error_string, "cuGetErrorString", 6000, rft_cu_result result, const char **text)         \
    R(init, "cuInit", 2000, unsigned flags)                                                        \
    R(driver_version, "cuDriverGetVersion", 2020, int *version)                                    \
    R(device_count, "cuDeviceGetCount", 2000, int *count)                                          \
    R(device_get, "cuDeviceGet", 2000, rft_cu_device *device, int ordinal)                         \
    R(device_name, "cuDeviceGetName", 2000, char *name, int size, rft_cu_device device)            \
    R(device_uuid, "cuDeviceGetUuid", 11040, rft_cu_uuid *uuid, rft_cu_device device)              \
    R(device_attribute, "cuDeviceGetAttribute", 2000, int *value, int attribute,                   \
      rft_cu_device device)                                                                        \
    R(device_total, "cuDeviceTotalMem", 3020, size_t *bytes, rft_cu_device device)                 \
    R(context_retain, "cuDevicePrimaryCtxRetain", 7000, rft_cu_context *context,                   \
      rft_cu_device device)                                                                        \
    R(context_release, "cuDevicePrimaryCtxRelease", 11000, rft_cu_device device)                   \
    O(context_state, "cuDevicePrimaryCtxGetState", 7000, rft_cu_device device, unsigned *flags,    \
      int *active)                                                                                 \
    O(peer_reaches, "cuDeviceCanAccessPeer", 4000, int *reaches, rft_cu_device device,             \
      rft_cu_device peer)                                                                          \
    R(context_push, "cuCtxPushCurrent", 4000, rft_cu_context context)                              \
    R(context_pop, "cuCtxPopCurrent", 4000, rft_cu_context *context)                               \
    R(capture_mode, "cuThreadExchangeStreamCaptureMode", 10010, int *mode)                         \
    R(memory_info, "cuMemGetInfo", 3020, size_t *free, size_t *total)                              \
    R(memory_alloc, "cuMemAlloc", 3020, rft_cu_ptr *memory, size_t bytes)                          \
    R(memory_free, "cuMemFree", 3020, rft_cu_ptr memory)                                           \
    R(memory_range, "cuMemGetAddressRange", 3020, rft_cu_ptr *base, size_t *bytes,                 \
      rft_cu_ptr memory)                                                                           \
    R(pointer_attributes, "cuPointerGetAttributes", 7000, unsigned count, int *attributes,         \
      void **values, rft_cu_ptr memory)                                                            \
    R(host_alloc, "cuMemHostAlloc", 2020, void **memory, size_t bytes, unsigned flags)             \
    R(host_free, "cuMemFreeHost", 2000, void *memory)                                              \
    R(host_pointer, "cuMemHostGetDevicePointer", 3020, rft_cu_ptr *mapped, void *memory,           \
      unsigned flags)                                                                              \
    R(host_register, "cuMemHostRegister", 6050, void *memory, size_t bytes, unsigned flags)        \
    R(host_unregister, "cuMemHostUnregister", 4000, void *memory)                                  \
    R(copy, "cuMemcpyAsync", 4000, rft_cu_ptr to, rft_cu_ptr from, size_t bytes,                   \
      rft_cu_stream stream)                                                                        \
    R(copy_2d, "cuMemcpy2DAsync", 3020, const rft_cu_copy_2d *copy, rft_cu_stream stream)          \
    O(copy_batch, "cuMemcpyBatchAsync", 13000, rft_cu_ptr *to, rft_cu_ptr *from, size_t *bytes,    \
      size_t count, rft_cu_copy_attributes *attributes, size_t *starts, size_t attribute_count,    \
      rft_cu_stream stream)                                                                        \
    O(copy_batch_12080, "cuMemcpyBatchAsync", 12080, rft_cu_ptr *to, rft_cu_ptr *from,             \
      size_t *bytes, size_t count, rft_cu_copy_attributes *attributes, size_t *starts,             \
      size_t attribute_count, size_t *failed, rft_cu_stream stream)                                \
    R(fill, "cuMemsetD8Async", 3020, rft_cu_ptr to, unsigned char value, size_t bytes,             \
      rft_cu_stream stream)                                                                        \
    R(stream_open, "cuStreamCreateWithPriority", 5050, rft_cu_stream *stream, unsigned flags,      \
      int priority)                                                                                \
    R(stream_close, "cuStreamDestroy", 4000, rft_cu_stream stream)                                 \
    R(stream_query, "cuStreamQuery", 2000, rft_cu_stream stream)                                   \
    R(stream_wait_event, "cuStreamWaitEvent", 3020, rft_cu_stream stream, rft_cu_event event,      \
      unsigned flags)                                                                              \
    R(stream_context, "cuStreamGetCtx", 9020, rft_cu_stream stream, rft_cu_context *context)       \
    R(stream_capturing, "cuStreamIsCapturing", 10000, rft_cu_stream stream, int *status)           \
    R(stream_call, "cuLaunchHostFunc", 10000, rft_cu_stream stream, rft_cu_host_fn function,       \
      void *user)                                                                                  \
    R(event_open, "cuEventCreate", 2000, rft_cu_event *event, unsigned flags)                      \
    R(event_close, "cuEventDestroy", 4000, rft_cu_event event)                                     \
    R(event_record, "cuEventRecord", 2000, rft_cu_event event, rft_cu_stream stream)               \
    R(event_query, "cuEventQuery", 2000, rft_cu_event event)                                       \
    R(event_elapsed, "cuEventElapsedTime", 2000, float *milliseconds, rft_cu_event start,          \
      rft_cu_event end)                                                                            \
    O(address_reserve, "cuMemAddressReserve", 10020, rft_cu_ptr *base, size_t bytes,               \
      size_t alignment, rft_cu_ptr wish, unsigned long long flags)                                 \
    O(address_free, "cuMemAddressFree", 10020, rft_cu_ptr base, size_t bytes)                      \
    O(physical_create, "cuMemCreate", 10020, rft_cu_handle *handle, size_t bytes,                  \
      const rft_cu_allocation *properties, unsigned long long flags)                               \
    O(physical_release, "cuMemRelease", 10020, rft_cu_handle handle)                               \
    O(map, "cuMemMap", 10020, rft_cu_ptr at, size_t bytes, size_t offset, rft_cu_handle handle,    \
      unsigned long long flags)                                                                    \
    O(unmap, "cuMemUnmap", 10020, rft_cu_ptr at, size_t bytes)                                     \
    O(set_access, "cuMemSetAccess", 10020, rft_cu_ptr at, size_t bytes,                            \
      const rft_cu_access *access, size_t count)                                                   \
    O(granularity, "cuMemGetAllocationGranularity", 10020, size_t *bytes,                          \
      const rft_cu_allocation *properties, int option)                                             \
    O(physical_export, "cuMemExportToShareableHandle", 10020, void *shareable,                     \
      rft_cu_handle handle, int type, unsigned long long flags)                                    \
    O(physical_import, "cuMemImportFromShareableHandle", 10020, rft_cu_handle *handle,             \
      void *shareable, int type)                                                                   \
    O(ipc_export, "cuIpcGetMemHandle", 4010, rft_cu_ipc_handle *handle, rft_cu_ptr memory)         \
    O(ipc_import, "cuIpcOpenMemHandle", 11000, rft_cu_ptr *memory, rft_cu_ipc_handle handle,       \
      unsigned flags)                                                                              \
    O(ipc_close, "cuIpcCloseMemHandle", 4010, rft_cu_ptr memory)                                   \
    O(library_load, "cuLibraryLoadData", 12000, rft_cu_library *library, const void *image,        \
      int *jit_options, void **jit_values, unsigned jit_count, int *options, void **values,        \
      unsigned count)                                                                              \
    O(library_unload, "cuLibraryUnload", 12000, rft_cu_library library)                            \
    O(library_kernel, "cuLibraryGetKernel", 12000, rft_cu_kernel *kernel, rft_cu_library library,  \
      const char *name)                                                                            \
    O(kernel_function, "cuKernelGetFunction", 12000, rft_cu_kernel *function,                      \
      rft_cu_kernel kernel) /* a CUfunction, which launch takes as well */                         \
    O(function_load, "cuFuncLoad", 12040, rft_cu_kernel function)                                  \
    R(launch, "cuLaunchKernel", 4000, rft_cu_kernel kernel, unsigned grid_x, unsigned grid_y,      \
      unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,      \
      rft_cu_stream stream, void **arguments, void **extra)

typedef struct rft_cuda_driver {
    void *library; /* of dlopen */
    int version;   /* 12040 for 12.4 */
#define RFT_CUDA_FIELD(field, symbol, at, ...) rft_cu_result (*field)(__VA_ARGS__);
    RFT_CUDA_SYMBOLS(RFT_CUDA_FIELD, RFT_CUDA_FIELD)
#undef RFT_CUDA_FIELD
} rft_cuda_driver;

/*
 * Opens the driver, reads the table and initialises it (cuInit). REFIT_ERR_NOT_FOUND: no driver
 * library, or no GPU (what "auto" takes for an answer); REFIT_ERR_UNSUPPORTED: it is too old, or
 * lacks a required symbol, which the sentence names; REFIT_ERR_DEVICE: it does not start. On
 * failure nothing is open.
 */
refit_status rft_cuda_driver_open(rft_cuda_driver *driver, refit_error *error);
void rft_cuda_driver_close(rft_cuda_driver *driver);

/* ---- Failures --------------------------------------------------------------------------------
 * From a driver's answer to a status and a sentence. error->subsystem is the CUresult.
 */

/* What the answer means when nothing better is known: OUT_OF_MEMORY is REFIT_ERR_DEVICE_MEMORY,
 * NOT_READY is REFIT_ERR_TIMEOUT, captures are REFIT_ERR_STATE, no GPU and a stub library are
 * REFIT_ERR_NOT_FOUND, a GPU that is taken is REFIT_ERR_BUSY, …; the rest is REFIT_ERR_DEVICE. */
refit_status rft_cuda_status(rft_cu_result result);

/* After one of these the context is lost: every further call gives the same answer, and only a new
 * process helps (an illegal address, a device-side assert, an ECC error, …). */
bool rft_cuda_is_lost(rft_cu_result result);

/* "CUDA_ERROR_INVALID_VALUE": the driver's name for it, for sentences of one's own. Never NULL. */
const char *rft_cuda_name(const rft_cuda_driver *driver, rft_cu_result result);

/* REFIT_OK, or a failure: "`what`: CUDA_ERROR_NAME (the driver's words); advice". */
refit_status rft_cuda_check(const rft_cuda_driver *driver, rft_cu_result result, refit_error *error,
                            const char *what);

/* As rft_cuda_check, for work on memory: an address that the driver refuses is REFIT_ERR_COPY, and
 * the sentence says what may be wrong with it. Nothing was queued, and the GPU is as it was. */
refit_status rft_cuda_check_copy(const rft_cuda_driver *driver, rft_cu_result result,
                                 refit_error *error, const char *what);

#endif
