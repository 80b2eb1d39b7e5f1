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

/* The parts, opaque here: cuda_device.c opens them. */
typedef struct rft_cuda_memory rft_cuda_memory;   /* cuda_memory.h: allocations and their checks */
typedef struct rft_cuda_pins rft_cuda_pins;       /* cuda_memory.h: registered host memory */
typedef struct rft_cuda_ranges rft_cuda_ranges;   /* cuda_vmm.c: addresses that stay */
typedef struct rft_cuda_streams rft_cuda_streams; /* cuda_stream.h: own streams, callers' checked */
typedef struct rft_cuda_copier rft_cuda_copier;   /* cuda_copy.c: batches, small copies, cut-off */
typedef struct rft_cuda_kernels rft_cuda_kernels; /* cuda_kernels.h: the embedded image */
typedef struct rft_cuda_compute rft_cuda_compute; /* cuda_kernels.h: digests and casts */
typedef struct rft_cuda_shares rft_cuda_shares; /* cuda_share.c: memory shown to other processes */

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

/* Inside: has the context broken, so that nothing on the GPU goes on? */
bool rft_cuda_context_is_lost(const rft_cuda_device *cuda);

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

/* ---- Parts without a header of their own -----------------------------------------------------
 * Only cuda_device.c calls these. `slots` fills the slots of device.h that the part's file has.
 */

/* cuda_context.c: which GPU, what it can do, and its primary context. Fills ordinal, pid, handle,
 * facts and context; the driver is open. REFIT_ERR_NOT_FOUND: no such GPU; REFIT_ERR_BUSY: another
 * process holds it in exclusive mode; REFIT_ERR_DEVICE. */
refit_status rft_cuda_context_open(rft_cuda_device *cuda, int ordinal, refit_error *error);
/* Where cuda->stuck says so the context stays, for the work that is still in it. */
void rft_cuda_context_close(rft_cuda_device *cuda);

/* cuda_vmm.c: addresses of a GPU that stay while the memory mapped to them comes and goes, in
 * chunks of offload.chunk_bytes. Open is called inside a context guard. `*out` stays NULL, and it
 * is not a failure, where the GPU or its driver has no virtual memory management: reserve then
 * answers REFIT_ERR_UNSUPPORTED. */
refit_status rft_cuda_ranges_open(rft_cuda_device *cuda, rft_cuda_ranges **out, refit_error *error);

/* NULL is allowed. Gives back the ranges that are left. Enters the context by itself. */
void rft_cuda_ranges_close(rft_cuda_device *cuda, rft_cuda_ranges *ranges);

/* What caps.chunk_bytes says: 0 for NULL. */
uint64_t rft_cuda_ranges_chunk(const rft_cuda_ranges *ranges);

void rft_cuda_vmm_slots(rft_device_ops *ops);

/* cuda_copy.c: batches of copies: the large ones by the copy engines, the small ones gathered for
 * them by a kernel. */

/* The most copies of one batch. cuda_copy.c cuts a batch into calls of the driver; a large batch
 * keeps the kernel that gathers small copies ahead of the copy engines. */
#define RFT_CUDA_BATCH_MOST 65536u

/* NULL is allowed for close; it enters the context by itself. */
refit_status rft_cuda_copier_open(rft_cuda_device *cuda, rft_cuda_copier **out, refit_error *error);
void rft_cuda_copier_close(rft_cuda_device *cuda, rft_cuda_copier *copier);

/* Below so many bytes copies are small; 0: not known yet, or nothing is. Any thread. */
uint64_t rft_cuda_copier_small_bytes(const rft_cuda_device *cuda);

void rft_cuda_copy_slots(rft_device_ops *ops);

/* cuda_share.c: device memory shown to other processes on the same GPU. */

refit_status rft_cuda_shares_open(rft_cuda_device *cuda, rft_cuda_shares **out, refit_error *error);
/* NULL is allowed. Closes what is still mapped. */
void rft_cuda_shares_close(rft_cuda_device *cuda, rft_cuda_shares *shares);

/* Whether the driver has what sharing needs: caps.shares. */
bool rft_cuda_can_share(const rft_cuda_device *cuda);

void rft_cuda_share_slots(rft_device_ops *ops);

#endif
