/*
 * cuda_device: the state of one CUDA device, shared by the files that fill its slots.
 *
 * It lives in the device's primary context, the one that PyTorch uses too. Every call into the
 * driver is made between rft_cuda_enter and rft_cuda_leave, which make that context the thread's
 * current one and allow calls that a capture elsewhere in the process would otherwise forbid (and
 * be broken by); both are undone, so that a caller's context and mode stay as they were.
 *
 * The legacy stream takes no call but event records and waits, and none asks to wait for the whole
 * device. What the driver does by itself while memory is allocated, freed, registered or shared is
 * its own affair: some versions wait for the device there, others do not, so neither is relied on.
 */
#ifndef RFT_CUDA_DEVICE_H
#define RFT_CUDA_DEVICE_H

#include <sys/types.h>

#include <refit/config.h>

#include "base/thread.h"
#include "device/cuda/cuda_driver.h"
#include "device/device.h"

typedef struct rft_cuda_facts {
    char name[64];
    rft_cu_uuid uuid;
    uint64_t total_bytes;
    int capability; /* 90 for 9.0 */
    int multiprocessors;
    int numa_node;         /* closest host node, or -1 */
    bool vmm;              /* addresses that stay */
    bool posix_fd;         /* physical memory can be exported as a descriptor */
    bool host_page_tables; /* Grace: registering is cheap and pageable copies are fast */
    bool host_pointers;    /* the GPU finds registered memory at the host's addresses */
} rft_cuda_facts;

/* The parts are opaque here; each has its own header and is opened by cuda_device.c. */
typedef struct rft_cuda_memory rft_cuda_memory;   /* cuda_memory.h: allocations and their checks */
typedef struct rft_cuda_pins rft_cuda_pins;       /* cuda_memory.h: registered host memory */
typedef struct rft_cuda_ranges rft_cuda_ranges;   /* cuda_vmm.h: addresses that stay */
typedef struct rft_cuda_streams rft_cuda_streams; /* cuda_stream.h: own streams, callers' checked */
typedef struct rft_cuda_copier rft_cuda_copier;   /* cuda_copy.h: batches, small copies, cut-off */
typedef struct rft_cuda_kernels rft_cuda_kernels; /* cuda_kernels.h: the embedded image */
typedef struct rft_cuda_compute rft_cuda_compute; /* cuda_kernels.h: digests and casts */
typedef struct rft_cuda_shares rft_cuda_shares; /* cuda_share.h: memory shown to other processes */

typedef struct rft_cuda_device {
    rft_cuda_driver driver;
    rft_cu_device handle;
    int ordinal;
    pid_t pid; /* of the process that opened it: a forked child must not touch the driver */
    rft_cu_context context; /* primary, retained */
    rft_cuda_facts facts;
    refit_config config; /* resolved, copied */
    rft_cuda_memory *memory;
    rft_cuda_pins *pins;
    rft_cuda_ranges *ranges; /* NULL: the device has no VMM */
    rft_cuda_streams *streams;
    rft_cuda_kernels *kernels; /* NULL: the image could not be loaded; kernels_missing says why */
    refit_error kernels_missing;
    rft_cuda_compute *compute;
    rft_cuda_copier *copier;
    rft_cuda_shares *shares;
    atomic_bool batch_refused; /* the driver has refused a batch of copies: it is told once */
    bool stuck; /* while it closes: some work does not end; what that uses stays with the driver */
} rft_cuda_device;

/* What leave must bring back. */
typedef struct rft_cuda_guard {
    int capture_mode;
} rft_cuda_guard;

/*
 * Guards nest. A slot enters once (RFT_CUDA_GUARDED), and what it calls is inside. The functions
 * that close a part enter by themselves and leave the driver alone if they may not: they must free
 * our side whatever has happened to the device. REFIT_ERR_STATE in a forked child.
 */
refit_status rft_cuda_enter(rft_cuda_device *cuda, rft_cuda_guard *guard, refit_error *error);
void rft_cuda_leave(rft_cuda_device *cuda, const rft_cuda_guard *guard);

/* To free something whatever has happened to the GPU: REFIT_OK with `*inside` false means that its
 * context is lost, or the driver has ended with the process, and there is only our side to free. */
refit_status rft_cuda_enter_to_free(rft_cuda_device *cuda, rft_cuda_guard *guard, bool *inside,
                                    refit_error *error);

/* The body of a slot: the call, made inside. */
#define RFT_CUDA_GUARDED(cuda, error, call)                                                        \
    do {                                                                                           \
        rft_cuda_guard rft_guard;                                                                  \
        RFT_TRY(rft_cuda_enter((cuda), &rft_guard, (error)));                                      \
        refit_status rft_guard_status = (call);                                                    \
        rft_cuda_leave((cuda), &rft_guard);                                                        \
        return rft_guard_status;                                                                   \
    } while (0)

#endif
