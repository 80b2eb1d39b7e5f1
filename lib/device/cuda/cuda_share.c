/*
 * Device memory shown to other processes on the same GPU, by CUDA's inter-process handles: those of
 * memory that cuMemAlloc gave. A handle stands for a whole allocation; the place of the memory in
 * it travels beside it.
 *
 * The importer opens a handle once, however often it is asked for, and closes it when the last user
 * has let go. The process that made a handle cannot open it: it is known by the allocation that the
 * share names, whose handle is the same, and that memory is given as it is.
 *
 * Export looks at the pointer first, because the driver's answer for memory that cannot be shared
 * is a bare "invalid value". Import trusts only what the driver confirms: the GPU is compared by
 * UUID, the driver is asked for the mapped range, which must hold what the share names, and the
 * address in it is a hint, good only if the allocation there has the very same handle. A driver
 * knows processes by their numbers, which two containers may have in common, and with them
 * addresses and handles: so the address is mixed with a number that only one process of this
 * machine has.
 *
 * The list of imports is short (one for each allocation that is lent) and walked under a lock,
 * which is also held while a handle is opened: two threads that want one allocation must not open
 * it twice. Knows nothing of what the memory holds.
 */
#include "device/cuda/cuda_device.h"

#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/log.h"
#include "device/device_uuid.h"

/* ---- Shares ------------------------------------------------------------------------------- */

typedef struct share_import {
    struct share_import *next;
    rft_cu_ipc_handle handle;
    rft_cu_ptr base;
    uint64_t bytes;
    uint32_t users;
} share_import;

struct rft_cuda_shares {
    uint64_t process; /* this one, among all that are alive on this machine */
    rft_mutex lock;
    share_import *imports; /* guarded by lock */
};

static rft_cu_ptr as_address(const void *memory)
{
    return (rft_cu_ptr)(uintptr_t)memory;
}

static void *as_memory(rft_cu_ptr address)
{
    return (void *)(uintptr_t)address; // NOLINT(performance-no-int-to-ptr)
}

/* A process is its number in its PID namespace. Without /proc only the number is left. */
static uint64_t name_process(void)
{
    struct stat namespace = {0};
    (void)!stat("/proc/self/ns/pid", &namespace);
    uint64_t name = (uint64_t) namespace.st_ino << 32 ^ (uint64_t) namespace.st_dev << 24;
    name = (name ^ (uint64_t)getpid()) * UINT64_C(0x9E3779B97F4A7C15);
    return name ^ name >> 32;
}

bool rft_cuda_can_share(const rft_cuda_device *cuda)
{
    const rft_cuda_driver *driver = &cuda->driver;
    return driver->ipc_export != NULL && driver->ipc_import != NULL && driver->ipc_close != NULL;
}

refit_status rft_cuda_shares_open(rft_cuda_device *cuda, rft_cuda_shares **out, refit_error *error)
{
    (void)cuda;
    rft_cuda_shares *shares = rft_calloc(1, sizeof *shares);
    RFT_REFUSE_IF(shares == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory to share device memory");
    shares->process = name_process();
    refit_status status = rft_mutex_open(&shares->lock, error);
    if (status == REFIT_OK) {
        *out = shares;
    } else {
        rft_free(shares);
    }
    return status;
}

static void import_close(rft_cuda_device *cuda, share_import *import)
{
    refit_error why;
    rft_cuda_guard guard;
    refit_status status = rft_cuda_enter(cuda, &guard, &why);
    if (status == REFIT_OK) {
        status = rft_cuda_check(&cuda->driver, cuda->driver.ipc_close(import->base), &why,
                                "memory of another process could not be unmapped");
        rft_cuda_leave(cuda, &guard);
    }
    if (status != REFIT_OK) rft_log(REFIT_LOG_WARNING, "%s", why.text);
    rft_free(import);
}

void rft_cuda_shares_close(rft_cuda_device *cuda, rft_cuda_shares *shares)
{
    if (shares == NULL) return;
    while (shares->imports != NULL) {
        share_import *import = shares->imports;
        shares->imports = import->next;
        import_close(cuda, import);
    }
    rft_mutex_close(&shares->lock);
    rft_free(shares);
}

static refit_status check_driver(const rft_cuda_device *cuda, refit_error *error)
{
    RFT_REFUSE_IF(!rft_cuda_can_share(cuda), error, REFIT_ERR_UNSUPPORTED,
                  "this CUDA driver cannot share memory between processes");
    return REFIT_OK;
}

/* ---- Exporting */

/* The allocation that holds [address, address + bytes). */
static refit_status find_range(const rft_cuda_device *cuda, rft_cu_ptr address, uint64_t bytes,
                               rft_cu_ptr *base, uint64_t *offset, refit_error *error)
{
    size_t size = 0;
    uint64_t end;
    RFT_TRY(rft_cuda_check(&cuda->driver, cuda->driver.memory_range(base, &size, address), error,
                           "the GPU does not know the memory to be shared"));
    *offset = address - *base;
    RFT_REFUSE_IF(!rft_add_u64(*offset, bytes, &end) || end > size, error, REFIT_ERR_INVALID,
                  "%" PRIu64 " bytes are to be shared, but the allocation ends %" PRIu64
                  " bytes after their start: share what one allocation holds",
                  bytes, (uint64_t)size - *offset);
    return REFIT_OK;
}

static refit_status check_kind(const rft_cuda_device *cuda, rft_cu_ptr address, refit_error *error)
{
    unsigned type = 0;
    int capable = 0;
    int attributes[] = {RFT_CU_PTR_MEMORY_TYPE, RFT_CU_PTR_IPC_CAPABLE};
    void *values[] = {&type, &capable};
    RFT_TRY(rft_cuda_check(&cuda->driver,
                           cuda->driver.pointer_attributes(2, attributes, values, address), error,
                           "the GPU does not know the memory to be shared"));
    RFT_REFUSE_IF(type != RFT_CU_MEMORY_DEVICE, error, REFIT_ERR_INVALID,
                  "the memory to be shared is not memory of a GPU");
    RFT_REFUSE_IF(capable == 0, error, REFIT_ERR_UNSUPPORTED,
                  "this memory cannot be shown to other processes: it came from virtual memory "
                  "(PyTorch's expandable_segments:True) or a cudaMallocAsync pool; only memory of "
                  "cuMemAlloc can");
    return REFIT_OK;
}

/* REFIT_ERR_UNSUPPORTED: memory of another kind than cuMemAlloc's (expandable_segments, a
 * cudaMallocAsync pool, a stable arena), or a driver that shares none. REFIT_ERR_INVALID: not
 * memory of this device, or not all of it in one allocation. */
static refit_status share_export(rft_cuda_device *cuda, const void *memory, uint64_t bytes,
                                 rft_share *out, refit_error *error)
{
    rft_cu_ptr base;
    rft_cu_ipc_handle handle;
    rft_share share = {.bytes = bytes};
    RFT_TRY(check_driver(cuda, error));
    RFT_TRY(check_kind(cuda, as_address(memory), error));
    RFT_TRY(find_range(cuda, as_address(memory), bytes, &base, &share.offset, error));
    RFT_TRY(rft_cuda_check(&cuda->driver, cuda->driver.ipc_export(&handle, base), error,
                           "the memory cannot be shown to other processes"));
    share.address = base ^ cuda->shares->process;
    memcpy(share.uuid, cuda->facts.uuid.bytes, sizeof share.uuid);
    memcpy(share.handle, handle.bytes, sizeof share.handle);
    *out = share;
    return REFIT_OK;
}

/* ---- Importing */

static refit_status check_gpu(const rft_cuda_device *cuda, const rft_share *share,
                              refit_error *error)
{
    char theirs[RFT_UUID_TEXT_BYTES], ours[RFT_UUID_TEXT_BYTES];
    rft_uuid_print(share->uuid, theirs);
    rft_uuid_print(cuda->facts.uuid.bytes, ours);
    RFT_REFUSE_IF(!rft_uuid_equal(share->uuid, cuda->facts.uuid.bytes), error, REFIT_ERR_INVALID,
                  "the shared memory lies on %s, and this device is %s", theirs, ours);
    return REFIT_OK;
}

static refit_status check_span(const rft_share *share, uint64_t bytes, refit_error *error)
{
    uint64_t end;
    RFT_REFUSE_IF(share->bytes == 0 || !rft_add_u64(share->offset, share->bytes, &end) ||
                      end > bytes,
                  error, REFIT_ERR_INVALID,
                  "%" PRIu64 " bytes at %" PRIu64 " are said to be shared of an allocation of "
                  "%" PRIu64,
                  share->bytes, share->offset, bytes);
    return REFIT_OK;
}

/* Whether this process made the handle: the allocation that the share names is there, and has it.
 */
static bool is_own(const rft_cuda_device *cuda, const rft_share *share, rft_cu_ptr *base,
                   uint64_t *bytes)
{
    rft_cu_ptr named = share->address ^ cuda->shares->process;
    size_t size = 0;
    rft_cu_ipc_handle handle;
    if (cuda->driver.memory_range(base, &size, named) != RFT_CU_SUCCESS) return false;
    if (*base != named) return false;
    if (cuda->driver.ipc_export(&handle, *base) != RFT_CU_SUCCESS) return false;
    *bytes = size;
    return memcmp(handle.bytes, share->handle, sizeof handle.bytes) == 0;
}

static share_import *find_import(const rft_cuda_shares *shares, const rft_share *share)
{
    share_import *import = shares->imports;
    while (import != NULL &&
           memcmp(import->handle.bytes, share->handle, sizeof share->handle) != 0) {
        import = import->next;
    }
    return import;
}

/* For processes in different containers the driver answers only "invalid". */
static refit_status not_opened(const rft_cuda_device *cuda, rft_cu_result result,
                               refit_error *error)
{
    if (result == RFT_CU_OUT_OF_MEMORY || rft_cuda_is_lost(result)) {
        return rft_cuda_check(&cuda->driver, result, error,
                              "memory of another process could not be mapped");
    }
    return rft_fail_sub(error, rft_cuda_status(result), result,
                        "memory of another process could not be mapped: %s; it has ended, or is in "
                        "another container: give both one PID and IPC namespace (docker "
                        "--pid=host --ipc=host)",
                        rft_cuda_name(&cuda->driver, result));
}

static refit_status import_fill(const rft_cuda_device *cuda, const rft_share *share,
                                share_import *import, refit_error *error)
{
    rft_cu_ptr base = 0;
    size_t size = 0;
    memcpy(import->handle.bytes, share->handle, sizeof share->handle);
    rft_cu_result result =
        cuda->driver.ipc_import(&import->base, import->handle, RFT_CU_IPC_LAZY_PEER_ACCESS);
    if (result != RFT_CU_SUCCESS) return not_opened(cuda, result, error);
    refit_status status =
        rft_cuda_check(&cuda->driver, cuda->driver.memory_range(&base, &size, import->base), error,
                       "the size of memory of another process could not be read");
    import->bytes = size;
    if (status == REFIT_OK) status = check_span(share, size, error);
    if (status != REFIT_OK) (void)cuda->driver.ipc_close(import->base);
    return status;
}

/* The lock is held. */
static refit_status get_import(rft_cuda_device *cuda, const rft_share *share, share_import **out,
                               refit_error *error)
{
    rft_cuda_shares *shares = cuda->shares;
    *out = find_import(shares, share);
    if (*out != NULL) return check_span(share, (*out)->bytes, error);
    share_import *import = rft_calloc(1, sizeof *import);
    RFT_REFUSE_IF(import == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to map a GPU's");
    refit_status status = import_fill(cuda, share, import, error);
    if (status != REFIT_OK) {
        rft_free(import);
        return status;
    }
    import->next = shares->imports;
    shares->imports = import;
    *out = import;
    return REFIT_OK;
}

/* `share` comes from another process and is not trusted. REFIT_ERR_INVALID: it is of another GPU,
 * or names more bytes than its allocation has; REFIT_ERR_UNSUPPORTED; and what the driver says of
 * the handle. */
static refit_status share_map(rft_cuda_device *cuda, const rft_share *share, void **out,
                              refit_error *error)
{
    rft_cu_ptr base = 0;
    uint64_t bytes = 0;
    share_import *import = NULL;
    RFT_TRY(check_driver(cuda, error));
    RFT_TRY(check_gpu(cuda, share, error));
    if (is_own(cuda, share, &base, &bytes)) {
        RFT_TRY(check_span(share, bytes, error));
        *out = as_memory(base + share->offset);
        return REFIT_OK;
    }
    rft_lock(&cuda->shares->lock);
    refit_status status = get_import(cuda, share, &import, error);
    if (status == REFIT_OK) {
        import->users++;
        *out = as_memory(import->base + share->offset);
    }
    rft_unlock(&cuda->shares->lock);
    return status;
}

/* One user less. Takes the import out of the list and returns it if that was the last. The lock is
 * held. */
static share_import *release_import(rft_cuda_shares *shares, rft_cu_ptr address)
{
    share_import **at = &shares->imports;
    while (*at != NULL && address - (*at)->base >= (*at)->bytes) {
        at = &(*at)->next;
    }
    share_import *import = *at;
    if (import == NULL || --import->users > 0) return NULL;
    *at = import->next;
    return import;
}

/* Memory that is in no import is this process's own, and stays. */
static void share_unmap(rft_cuda_device *cuda, void *memory)
{
    rft_lock(&cuda->shares->lock);
    share_import *last = release_import(cuda->shares, as_address(memory));
    if (last != NULL) import_close(cuda, last);
    rft_unlock(&cuda->shares->lock);
}

/* ---- Slots -----------------------------------------------------------------------------------
 * Each enters the context; the work is done above. */

static refit_status cuda_share_export(void *self, const void *memory, uint64_t bytes,
                                      rft_share *out, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, share_export(cuda, memory, bytes, out, error));
}

static refit_status cuda_share_map(void *self, const rft_share *share, void **out,
                                   refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, share_map(cuda, share, out, error));
}

static void cuda_share_unmap(void *self, void *memory)
{
    share_unmap(self, memory);
}

void rft_cuda_share_slots(rft_device_ops *ops)
{
    ops->share_export = cuda_share_export;
    ops->share_map = cuda_share_map;
    ops->share_unmap = cuda_share_unmap;
}
