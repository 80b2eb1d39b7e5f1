/*
 * The kernels' image in the driver, and their launches.
 *
 * The fatbin is tried first; then, for drivers older than the machine code in it, the PTX alone,
 * which they compile for their GPU. Each kernel is loaded onto the GPU when the device is opened
 * (asking for its function does that, and drivers from 12.4 on can be told to): left to itself the
 * driver does so at the first launch, which may then wait for the whole device.
 *
 * A grid is as large as fills the GPU, or smaller for little work; any grid gives the same result.
 * Knows nothing of what the bytes are.
 */
#include "device/cuda/cuda_kernels.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/log.h"
#include "kernels/cuda_image.h"
#include "kernels/gpu.h"

/* Blocks in a row of the grid, which share a run of entries. */
#define PACK_ROW 4u

typedef enum kernel_name {
    PACK,
    CAST,
    DIGEST,
    DIGEST_COPY,
    DELTA_ENCODE,
    DELTA_APPLY,
    KERNELS,
} kernel_name;

static const char *const names[KERNELS] = {[PACK] = "rft_pack_kernel",
                                           [CAST] = "rft_cast_kernel",
                                           [DIGEST] = "rft_digest_kernel",
                                           [DIGEST_COPY] = "rft_digest_copy_kernel",
                                           [DELTA_ENCODE] = "rft_delta_encode_kernel",
                                           [DELTA_APPLY] = "rft_delta_apply_kernel"};

struct rft_cuda_kernels {
    rft_cu_library library;
    rft_cu_kernel all[KERNELS];
};

static rft_cu_result load_kernels(const rft_cuda_driver *driver, rft_cuda_kernels *kernels)
{
    rft_cu_result result = RFT_CU_SUCCESS;
    for (int name = 0; name < KERNELS && result == RFT_CU_SUCCESS; name++) {
        rft_cu_kernel kernel = NULL;
        result = driver->library_kernel(&kernel, kernels->library, names[name]);
        if (result != RFT_CU_SUCCESS) break;
        result = driver->kernel_function(&kernels->all[name], kernel);
        if (result != RFT_CU_SUCCESS || driver->function_load == NULL) continue;
        result = driver->function_load(kernels->all[name]);
    }
    return result;
}

/* On failure nothing is loaded. */
static rft_cu_result load_image(const rft_cuda_driver *driver, const unsigned char *image,
                                rft_cuda_kernels *kernels)
{
    rft_cu_result result =
        driver->library_load(&kernels->library, image, NULL, NULL, 0, NULL, NULL, 0);
    if (result != RFT_CU_SUCCESS) return result;
    result = load_kernels(driver, kernels);
    if (result != RFT_CU_SUCCESS) (void)driver->library_unload(kernels->library);
    return result;
}

static bool takes_libraries(const rft_cuda_driver *driver)
{
    return driver->library_load != NULL && driver->library_unload != NULL &&
           driver->library_kernel != NULL && driver->kernel_function != NULL;
}

#define INSTEAD "small copies go through the copy engines, and digests are taken on the host"

/* REFIT_ERR_UNSUPPORTED: this driver and GPU cannot have the kernels; the sentence says why. */
static refit_status load(const rft_cuda_driver *driver, rft_cuda_kernels *kernels,
                         refit_error *error)
{
    RFT_REFUSE_IF(!takes_libraries(driver), error, REFIT_ERR_UNSUPPORTED,
                  "the driver cannot load the GPU's kernels; " INSTEAD);
    rft_cu_result binary = load_image(driver, rft_cuda_image, kernels);
    if (binary == RFT_CU_SUCCESS) return REFIT_OK;
    rft_cu_result ptx = load_image(driver, rft_cuda_ptx, kernels);
    if (ptx == RFT_CU_SUCCESS) return REFIT_OK;
    if (rft_cuda_is_lost(ptx)) {
        return rft_cuda_check(driver, ptx, error, "the GPU's kernels could not be loaded");
    }
    return rft_fail_sub(
        error, REFIT_ERR_UNSUPPORTED, ptx,
        "the GPU's kernels could not be loaded (machine code: %s, PTX: %s); " INSTEAD,
        rft_cuda_name(driver, binary), rft_cuda_name(driver, ptx));
}

refit_status rft_cuda_kernels_open(rft_cuda_device *cuda, rft_cuda_kernels **out,
                                   refit_error *error)
{
    refit_error why;
    rft_cuda_kernels *kernels = rft_calloc(1, sizeof *kernels);
    RFT_REFUSE_IF(kernels == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for kernels");
    refit_status status = load(&cuda->driver, kernels, &why);
    if (status == REFIT_OK) {
        *out = kernels;
        return REFIT_OK;
    }
    rft_free(kernels);
    if (status != REFIT_ERR_UNSUPPORTED) {
        if (error != NULL) *error = why;
        return status;
    }
    cuda->kernels_missing = why;
    rft_log(REFIT_LOG_WARNING, "cuda:%d: %s", cuda->ordinal, why.text);
    return REFIT_OK;
}

void rft_cuda_kernels_close(rft_cuda_device *cuda, rft_cuda_kernels *kernels)
{
    if (kernels == NULL) return;
    rft_cuda_guard guard;
    if (!cuda->stuck && rft_cuda_enter(cuda, &guard, NULL) == REFIT_OK) {
        (void)cuda->driver.library_unload(kernels->library);
        rft_cuda_leave(cuda, &guard);
    }
    rft_free(kernels);
}

refit_status rft_cuda_kernels_check(const rft_cuda_device *cuda, refit_error *error)
{
    if (cuda->kernels != NULL) return REFIT_OK;
    if (error != NULL) *error = cuda->kernels_missing;
    return REFIT_ERR_UNSUPPORTED;
}

typedef struct grid {
    unsigned x;
    unsigned y;
} grid;

static refit_status launch(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_kernel kernel,
                           grid blocks, void **arguments, refit_error *error)
{
    rft_cu_result result = cuda->driver.launch(kernel, blocks.x, blocks.y, 1, RFT_GPU_THREADS, 1, 1,
                                               0, stream, arguments, NULL);
    return rft_cuda_check(&cuda->driver, result, error, "a kernel could not be put on a stream");
}

/* How many blocks `shares` of work are worth: all that the GPU runs at once, or fewer. */
static unsigned count_blocks(const rft_cuda_device *cuda, uint64_t shares)
{
    uint64_t most = (uint64_t)cuda->facts.multiprocessors * RFT_GPU_BLOCKS;
    return (unsigned)rft_max_u64(rft_min_u64(shares, most), 1);
}

/* Every entry is at least one chunk, and every warp takes one. */
refit_status rft_cuda_launch_pack(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_ptr entries,
                                  uint32_t count, uint64_t bytes, refit_error *error)
{
    RFT_TRY(rft_cuda_kernels_check(cuda, error));
    if (count == 0) return REFIT_OK;
    uint64_t chunks = bytes / RFT_GPU_CHUNK + count;
    unsigned blocks = count_blocks(cuda, chunks / (RFT_GPU_THREADS / RFT_GPU_WARP) + 1);
    grid shape;
    shape.x = (unsigned)rft_min_u64((blocks + PACK_ROW - 1) / PACK_ROW, count);
    shape.y = (blocks + shape.x - 1) / shape.x;
    void *arguments[] = {&entries, &count};
    return launch(cuda, stream, cuda->kernels->all[PACK], shape, arguments, error);
}

refit_status rft_cuda_launch_cast(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_ptr to,
                                  rft_cu_ptr from, uint64_t count, refit_error *error)
{
    RFT_TRY(rft_cuda_kernels_check(cuda, error));
    if (count == 0) return REFIT_OK;
    grid shape = {count_blocks(cuda, count / (RFT_GPU_SHARE / sizeof(float)) + 1), 1};
    void *arguments[] = {&to, &from, &count};
    return launch(cuda, stream, cuda->kernels->all[CAST], shape, arguments, error);
}

refit_status rft_cuda_launch_digest(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_ptr data,
                                    uint64_t bytes, uint64_t offset, rft_cu_ptr sum,
                                    refit_error *error)
{
    RFT_TRY(rft_cuda_kernels_check(cuda, error));
    if (bytes == 0) return REFIT_OK;
    grid shape = {count_blocks(cuda, bytes / RFT_GPU_SHARE + 1), 1};
    void *arguments[] = {&data, &bytes, &offset, &sum};
    return launch(cuda, stream, cuda->kernels->all[DIGEST], shape, arguments, error);
}

refit_status rft_cuda_launch_digest_copy(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_ptr to,
                                         rft_cu_ptr data, uint64_t bytes, uint64_t offset,
                                         rft_cu_ptr sum, refit_error *error)
{
    RFT_TRY(rft_cuda_kernels_check(cuda, error));
    if (bytes == 0) return REFIT_OK;
    grid shape = {count_blocks(cuda, bytes / RFT_GPU_SHARE + 1), 1};
    void *arguments[] = {&to, &data, &bytes, &offset, &sum};
    return launch(cuda, stream, cuda->kernels->all[DIGEST_COPY], shape, arguments, error);
}

/* A block takes a job at a time. */
static refit_status launch_delta(rft_cuda_device *cuda, rft_cu_stream stream, kernel_name name,
                                 rft_cu_ptr jobs, uint32_t count, refit_error *error)
{
    RFT_TRY(rft_cuda_kernels_check(cuda, error));
    if (count == 0) return REFIT_OK;
    grid shape = {count_blocks(cuda, count), 1};
    void *arguments[] = {&jobs, &count};
    return launch(cuda, stream, cuda->kernels->all[name], shape, arguments, error);
}

refit_status rft_cuda_launch_delta_encode(rft_cuda_device *cuda, rft_cu_stream stream,
                                          rft_cu_ptr jobs, uint32_t count, refit_error *error)
{
    return launch_delta(cuda, stream, DELTA_ENCODE, jobs, count, error);
}

refit_status rft_cuda_launch_delta_apply(rft_cuda_device *cuda, rft_cu_stream stream,
                                         rft_cu_ptr jobs, uint32_t count, refit_error *error)
{
    return launch_delta(cuda, stream, DELTA_APPLY, jobs, count, error);
}
