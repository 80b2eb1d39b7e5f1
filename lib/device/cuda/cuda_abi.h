/*
 * cuda_abi: NVIDIA's driver interface as far as refit calls it, in declarations of our own, so that
 * nothing of the CUDA toolkit is needed to build.
 *
 * Names follow NVIDIA's with an rft_ before them; numbers and layouts are those of the driver's
 * binary interface, which never changes for a given symbol version. tests/device/test_cuda_abi.c
 * holds every one of them against <cuda.h> wherever a toolkit is installed. Only lib/device/cuda*
 * and the fake driver of the tests include this.
 */
#ifndef RFT_CUDA_ABI_H
#define RFT_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int rft_cu_result;
typedef int rft_cu_device;                /* an ordinal's handle */
typedef unsigned long long rft_cu_ptr;    /* an address: of the device, or of the host (one address
                                             space) */
typedef unsigned long long rft_cu_handle; /* physical memory */
typedef struct rft_cu_context_s *rft_cu_context;
typedef struct rft_cu_stream_s *rft_cu_stream;
typedef struct rft_cu_event_s *rft_cu_event;
typedef struct rft_cu_library_s *rft_cu_library;
typedef struct rft_cu_kernel_s *rft_cu_kernel;

/* CUresult: those that mean something to refit. */
#define RFT_CU_SUCCESS                        0
#define RFT_CU_INVALID_VALUE                  1
#define RFT_CU_OUT_OF_MEMORY                  2
#define RFT_CU_NOT_INITIALIZED                3
#define RFT_CU_DEINITIALIZED                  4
#define RFT_CU_STUB_LIBRARY                   34
#define RFT_CU_CALL_REQUIRES_NEWER_DRIVER     36
#define RFT_CU_DEVICE_UNAVAILABLE             46
#define RFT_CU_NO_DEVICE                      100
#define RFT_CU_INVALID_DEVICE                 101
#define RFT_CU_INVALID_IMAGE                  200
#define RFT_CU_INVALID_CONTEXT                201
#define RFT_CU_MAP_FAILED                     205
#define RFT_CU_NO_BINARY_FOR_GPU              209
#define RFT_CU_ECC_UNCORRECTABLE              214
#define RFT_CU_INVALID_PTX                    218
#define RFT_CU_NVLINK_UNCORRECTABLE           220
#define RFT_CU_JIT_COMPILER_NOT_FOUND         221
#define RFT_CU_UNSUPPORTED_PTX_VERSION        222
#define RFT_CU_JIT_COMPILATION_DISABLED       223
#define RFT_CU_CONTAINED                      226
#define RFT_CU_OPERATING_SYSTEM               304
#define RFT_CU_INVALID_HANDLE                 400
#define RFT_CU_ILLEGAL_STATE                  401
#define RFT_CU_NOT_FOUND                      500
#define RFT_CU_NOT_READY                      600
#define RFT_CU_ILLEGAL_ADDRESS                700
#define RFT_CU_LAUNCH_OUT_OF_RESOURCES        701
#define RFT_CU_LAUNCH_TIMEOUT                 702
#define RFT_CU_CONTEXT_IS_DESTROYED           709
#define RFT_CU_ASSERT                         710
#define RFT_CU_HOST_MEMORY_ALREADY_REGISTERED 712
#define RFT_CU_HOST_MEMORY_NOT_REGISTERED     713
#define RFT_CU_HARDWARE_STACK_ERROR           714
#define RFT_CU_ILLEGAL_INSTRUCTION            715
#define RFT_CU_MISALIGNED_ADDRESS             716
#define RFT_CU_INVALID_ADDRESS_SPACE          717
#define RFT_CU_INVALID_PC                     718
#define RFT_CU_LAUNCH_FAILED                  719
#define RFT_CU_TENSOR_MEMORY_LEAK             721
#define RFT_CU_NOT_PERMITTED                  800
#define RFT_CU_NOT_SUPPORTED                  801
#define RFT_CU_SYSTEM_NOT_READY               802
#define RFT_CU_SYSTEM_DRIVER_MISMATCH         803
#define RFT_CU_COMPAT_NOT_SUPPORTED           804
#define RFT_CU_MPS_CLIENT_TERMINATED          810
#define RFT_CU_STREAM_CAPTURE_UNSUPPORTED     900
#define RFT_CU_STREAM_CAPTURE_INVALIDATED     901
#define RFT_CU_STREAM_CAPTURE_ISOLATION       905
#define RFT_CU_STREAM_CAPTURE_IMPLICIT        906
#define RFT_CU_CAPTURED_EVENT                 907
#define RFT_CU_EXTERNAL_DEVICE                911
#define RFT_CU_UNKNOWN                        999

/* CUdevice_attribute */
#define RFT_CU_ATTR_MULTIPROCESSORS    16
#define RFT_CU_ATTR_INTEGRATED         18
#define RFT_CU_ATTR_COMPUTE_MODE       20
#define RFT_CU_ATTR_PCI_BUS            33
#define RFT_CU_ATTR_PCI_DEVICE         34
#define RFT_CU_ATTR_UNIFIED_ADDRESSING 41
#define RFT_CU_ATTR_PCI_DOMAIN         50
#define RFT_CU_ATTR_CAPABILITY_MAJOR   75
#define RFT_CU_ATTR_CAPABILITY_MINOR   76
#define RFT_CU_ATTR_HOST_POINTERS      91 /* registered memory is at the host's address there too */
#define RFT_CU_ATTR_HOST_REGISTER      99
#define RFT_CU_ATTR_HOST_PAGE_TABLES   100 /* Grace: pageable memory is as good as pinned */
#define RFT_CU_ATTR_VMM                102
#define RFT_CU_ATTR_POSIX_FD           103
#define RFT_CU_ATTR_RDMA_WITH_VMM      110 /* memory of cuMemCreate may be made for network cards */
#define RFT_CU_ATTR_HOST_NUMA          134 /* drivers before 12.x do not know it */

/* CUcomputemode */
#define RFT_CU_MODE_DEFAULT           0
#define RFT_CU_MODE_PROHIBITED        2
#define RFT_CU_MODE_EXCLUSIVE_PROCESS 3

/* CUpointer_attribute; what each writes */
#define RFT_CU_PTR_CONTEXT      1  /* rft_cu_context */
#define RFT_CU_PTR_MEMORY_TYPE  2  /* unsigned: RFT_CU_MEMORY_*; 0: the driver does not know it */
#define RFT_CU_PTR_SYNC_MEMOPS  6  /* bool (one byte of an int) */
#define RFT_CU_PTR_BUFFER_ID    7  /* 64 bits */
#define RFT_CU_PTR_IS_MANAGED   8  /* bool */
#define RFT_CU_PTR_ORDINAL      9  /* int; -2 for none */
#define RFT_CU_PTR_IPC_CAPABLE  10 /* bool: cuIpcGetMemHandle takes it */
#define RFT_CU_PTR_RANGE_START  11 /* rft_cu_ptr */
#define RFT_CU_PTR_RANGE_SIZE   12 /* size_t */
#define RFT_CU_PTR_MAPPED       13 /* bool */
#define RFT_CU_PTR_HANDLE_TYPES 14 /* 64 bits */

/* CUmemorytype */
#define RFT_CU_MEMORY_HOST    1
#define RFT_CU_MEMORY_DEVICE  2
#define RFT_CU_MEMORY_ARRAY   3
#define RFT_CU_MEMORY_UNIFIED 4

#define RFT_CU_STREAM_NON_BLOCKING 1u
#define RFT_CU_STREAM_LEGACY       ((rft_cu_stream)(uintptr_t)1) /* PyTorch's default stream */
#define RFT_CU_STREAM_PER_THREAD   ((rft_cu_stream)(uintptr_t)2)

#define RFT_CU_EVENT_TIMING        0u /* CU_EVENT_DEFAULT */
#define RFT_CU_EVENT_BLOCKING_SYNC 1u
#define RFT_CU_EVENT_NO_TIMING     2u

#define RFT_CU_CAPTURE_NONE        0 /* CUstreamCaptureStatus */
#define RFT_CU_CAPTURE_ACTIVE      1
#define RFT_CU_CAPTURE_INVALIDATED 2

#define RFT_CU_CAPTURE_MODE_GLOBAL  0 /* CUstreamCaptureMode */
#define RFT_CU_CAPTURE_MODE_RELAXED 2

#define RFT_CU_HOST_ALLOC_PORTABLE     1u
#define RFT_CU_HOST_ALLOC_DEVICEMAP    2u
#define RFT_CU_HOST_REGISTER_PORTABLE  1u
#define RFT_CU_HOST_REGISTER_DEVICEMAP 2u
#define RFT_CU_HOST_REGISTER_READ_ONLY 8u

#define RFT_CU_IPC_LAZY_PEER_ACCESS 1u

typedef struct rft_cu_uuid {
    unsigned char bytes[16];
} rft_cu_uuid;

typedef struct rft_cu_ipc_handle {
    unsigned char bytes[64];
} rft_cu_ipc_handle;

/* CUmemLocation */
#define RFT_CU_LOCATION_DEVICE 1
typedef struct rft_cu_location {
    int type;
    int id;
} rft_cu_location;

/* CUmemAllocationProp */
#define RFT_CU_ALLOCATION_PINNED 1
#define RFT_CU_SHARE_NONE        0
#define RFT_CU_SHARE_POSIX_FD    1
typedef struct rft_cu_allocation {
    int type;
    int requested_handle_types; /* RFT_CU_SHARE_* */
    rft_cu_location location;
    void *win32_meta;
    struct {
        unsigned char compression;
        unsigned char rdma_capable;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
} rft_cu_allocation;

#define RFT_CU_GRANULARITY_MINIMUM     0
#define RFT_CU_GRANULARITY_RECOMMENDED 1

/* CUmemAccessDesc */
#define RFT_CU_ACCESS_READ      1
#define RFT_CU_ACCESS_READWRITE 3
typedef struct rft_cu_access {
    rft_cu_location location;
    int flags;
} rft_cu_access;

/* CUmemcpyAttributes */
#define RFT_CU_SOURCE_STREAM 1
#define RFT_CU_SOURCE_CALL   2
#define RFT_CU_SOURCE_ANY    3
typedef struct rft_cu_copy_attributes {
    int source_order; /* RFT_CU_SOURCE_*; 0 is invalid */
    rft_cu_location source_hint;
    rft_cu_location target_hint;
    unsigned flags;
} rft_cu_copy_attributes;

/* CUDA_MEMCPY2D: rows of as many bytes, in which each side has its own distance */
typedef struct rft_cu_copy_2d {
    size_t from_x; /* 0, like the other places within a side */
    size_t from_y;
    int from_type; /* RFT_CU_MEMORY_*: which of the three addresses counts */
    const void *from_host;
    rft_cu_ptr from_device;
    void *from_array;
    size_t from_pitch; /* bytes from one row's beginning to the next */
    size_t to_x;
    size_t to_y;
    int to_type;
    void *to_host;
    rft_cu_ptr to_device;
    void *to_array;
    size_t to_pitch;
    size_t width; /* bytes of a row */
    size_t height;
} rft_cu_copy_2d;

/* CUdriverProcAddressQueryResult */
#define RFT_CU_SYMBOL_FOUND     0
#define RFT_CU_SYMBOL_NOT_FOUND 1
#define RFT_CU_SYMBOL_TOO_NEW   2 /* it exists only in versions above the one asked for */

typedef void (*rft_cu_host_fn)(void *user);

typedef rft_cu_result (*rft_cu_get_proc_address_fn)(const char *symbol, void **function,
                                                    int version, uint64_t flags, int *found);

#endif
