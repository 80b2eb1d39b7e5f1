/*
 * libcuda.so.1, found at run time.
 *
 *     dlopen ──► cuGetProcAddress_v2 (12.0 and later have it) ──► the table ──► cuInit
 *
 * The library is never unloaded: it starts threads and leaves exit handlers, so closing only
 * lets go of our hold on it. Knows nothing of devices and contexts.
 */
#include "device/cuda/cuda_driver.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

/* ---- The table ---------------------------------------------------------------------------- */

typedef struct driver_symbol {
    const char *name;
    size_t field; /* offset of the pointer in rft_cuda_driver */
    int version;
    bool required;
} driver_symbol;

#define REQUIRED(field, symbol, at, ...) {symbol, offsetof(rft_cuda_driver, field), at, true},
#define OPTIONAL(field, symbol, at, ...) {symbol, offsetof(rft_cuda_driver, field), at, false},
static const driver_symbol symbols[] = {RFT_CUDA_SYMBOLS(REQUIRED, OPTIONAL)};
#undef REQUIRED
#undef OPTIONAL

/* POSIX lets a pointer from dlsym be a function; ISO C has no conversion for it, so it is copied.
 */
static void put_function(void *place, void *function)
{
    memcpy(place, &function, sizeof function);
}

/* A driver before 12.0 lacks cuGetProcAddress_v2; its version makes the sentence better. */
static refit_status too_old(void *library, refit_error *error)
{
    rft_cu_result (*get_version)(int *version) = NULL;
    int version = 0;
    put_function(&get_version, dlsym(library, "cuDriverGetVersion"));
    RFT_REFUSE_IF(get_version == NULL, error, REFIT_ERR_DEVICE,
                  "libcuda.so.1 is there but is not a CUDA driver: it has no cuDriverGetVersion");
    rft_cu_result result = get_version(&version);
    RFT_REFUSE_IF(result == RFT_CU_STUB_LIBRARY, error, REFIT_ERR_NOT_FOUND,
                  "libcuda.so.1 is the toolkit's stub, not a driver: put the directory of the "
                  "driver's before it in LD_LIBRARY_PATH");
    return rft_fail_sub(error, REFIT_ERR_UNSUPPORTED, result,
                        "the NVIDIA driver is for CUDA %d.%d and refit needs 12.0: update it",
                        version / 1000, version % 1000 / 10);
}

/* A symbol that is missing, whatever way the driver says so, gives NULL. */
static rft_cu_result find(rft_cu_get_proc_address_fn get, const driver_symbol *symbol, void **out)
{
    int found = RFT_CU_SYMBOL_NOT_FOUND;
    *out = NULL;
    rft_cu_result result = get(symbol->name, out, symbol->version, 0, &found);
    if (result != RFT_CU_SUCCESS || found != RFT_CU_SYMBOL_FOUND) *out = NULL;
    return result;
}

static refit_status fill_table(rft_cuda_driver *driver, rft_cu_get_proc_address_fn get,
                               refit_error *error)
{
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        void *function;
        rft_cu_result result = find(get, &symbols[i], &function);
        if (result == RFT_CU_STUB_LIBRARY) {
            return rft_cuda_check(driver, result, error, "the CUDA driver was not found");
        }
        put_function((char *)driver + symbols[i].field, function);
        if (function != NULL || !symbols[i].required) continue;
        return rft_fail_sub(error, REFIT_ERR_UNSUPPORTED, result,
                            "the NVIDIA driver lacks %s (of CUDA %d.%d), which refit needs: update "
                            "the driver",
                            symbols[i].name, symbols[i].version / 1000,
                            symbols[i].version % 1000 / 10);
    }
    return REFIT_OK;
}

static refit_status check_version(rft_cuda_driver *driver, refit_error *error)
{
    RFT_TRY(rft_cuda_check(driver, driver->driver_version(&driver->version), error,
                           "the CUDA driver's version could not be read"));
    RFT_REFUSE_IF(driver->version < RFT_CUDA_DRIVER_LEAST, error, REFIT_ERR_UNSUPPORTED,
                  "the NVIDIA driver is for CUDA %d.%d and refit needs 12.0: update it",
                  driver->version / 1000, driver->version % 1000 / 10);
    return REFIT_OK;
}

static refit_status start(rft_cuda_driver *driver, refit_error *error)
{
    rft_cu_get_proc_address_fn get = NULL;
    put_function(&get, dlsym(driver->library, "cuGetProcAddress_v2"));
    if (get == NULL) return too_old(driver->library, error);
    RFT_TRY(fill_table(driver, get, error));
    RFT_TRY(check_version(driver, error));
    return rft_cuda_check(driver, driver->init(0), error, "CUDA did not start");
}

refit_status rft_cuda_driver_open(rft_cuda_driver *driver, refit_error *error)
{
    *driver =
        (rft_cuda_driver){.library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)};
    if (driver->library == NULL) {
        const char *reason = dlerror();
        return rft_fail(error, REFIT_ERR_NOT_FOUND,
                        "there is no CUDA driver: %.120s; install NVIDIA's, or start the container "
                        "with its GPUs (--gpus all)",
                        reason == NULL ? "libcuda.so.1 could not be loaded" : reason);
    }
    refit_status status = start(driver, error);
    if (status != REFIT_OK) rft_cuda_driver_close(driver);
    return status;
}

void rft_cuda_driver_close(rft_cuda_driver *driver)
{
    dlclose(driver->library);
    *driver = (rft_cuda_driver){0};
}

/* ---- Failures --------------------------------------------------------------------------------
 * The driver's answers as statuses, and as sentences: what failed, in the driver's own words, and
 * what to do.
 *
 * Advice is given only where it is right for every call that the answer may come from; advice that
 * depends on the call is the caller's. Knows nothing of devices.
 */

typedef struct meaning {
    rft_cu_result result;
    refit_status status;
    const char *advice;
} meaning;

static const char only_new_process[] = "the GPU's context is lost: only a new process helps";
static const char was_reset[] =
    "the GPU was reset (cudaDeviceReset) while refit used it: only a new process helps";
static const char after_fork[] =
    "in a forked child of a process that uses CUDA it never starts: start workers by spawn";
static const char fabric[] =
    "the machine's GPU service is not ready (nvidia-fabricmanager, nvidia-persistenced)";
static const char mismatch[] =
    "libcuda and the kernel module are of different versions: reboot, or reload the module";
static const char compat[] =
    "the compatibility libcuda does not run on this GPU: use the driver's own libcuda";

static const meaning meanings[] = {
    {RFT_CU_OUT_OF_MEMORY, REFIT_ERR_DEVICE_MEMORY, "free or offload something first"},
    {RFT_CU_NOT_INITIALIZED, REFIT_ERR_DEVICE, after_fork},
    {RFT_CU_DEINITIALIZED, REFIT_ERR_DEVICE, "the process is ending, and its driver with it"},
    {RFT_CU_STUB_LIBRARY, REFIT_ERR_NOT_FOUND,
     "libcuda.so.1 is the toolkit's stub: put the driver's before it in LD_LIBRARY_PATH"},
    {RFT_CU_CALL_REQUIRES_NEWER_DRIVER, REFIT_ERR_UNSUPPORTED, "update the NVIDIA driver"},
    {RFT_CU_DEVICE_UNAVAILABLE, REFIT_ERR_BUSY,
     "another process holds the GPU in exclusive mode: end it, or nvidia-smi -c DEFAULT"},
    {RFT_CU_NO_DEVICE, REFIT_ERR_NOT_FOUND, "no GPU is visible (see CUDA_VISIBLE_DEVICES)"},
    {RFT_CU_INVALID_IMAGE, REFIT_ERR_UNSUPPORTED, NULL},
    {RFT_CU_NO_BINARY_FOR_GPU, REFIT_ERR_UNSUPPORTED, NULL},
    {RFT_CU_INVALID_PTX, REFIT_ERR_UNSUPPORTED, NULL},
    {RFT_CU_JIT_COMPILER_NOT_FOUND, REFIT_ERR_UNSUPPORTED, NULL},
    {RFT_CU_UNSUPPORTED_PTX_VERSION, REFIT_ERR_UNSUPPORTED, "update the NVIDIA driver"},
    {RFT_CU_JIT_COMPILATION_DISABLED, REFIT_ERR_UNSUPPORTED, NULL},
    {RFT_CU_NOT_READY, REFIT_ERR_TIMEOUT, NULL},
    {RFT_CU_NOT_SUPPORTED, REFIT_ERR_UNSUPPORTED, NULL},
    {RFT_CU_SYSTEM_NOT_READY, REFIT_ERR_DEVICE, fabric},
    {RFT_CU_SYSTEM_DRIVER_MISMATCH, REFIT_ERR_DEVICE, mismatch},
    {RFT_CU_COMPAT_NOT_SUPPORTED, REFIT_ERR_DEVICE, compat},
    {RFT_CU_CONTEXT_IS_DESTROYED, REFIT_ERR_DEVICE, was_reset},
    {RFT_CU_STREAM_CAPTURE_UNSUPPORTED, REFIT_ERR_STATE, "end the capture first"},
    {RFT_CU_STREAM_CAPTURE_INVALIDATED, REFIT_ERR_STATE, "end the capture first"},
    {RFT_CU_STREAM_CAPTURE_ISOLATION, REFIT_ERR_STATE, "end the capture first"},
    {RFT_CU_STREAM_CAPTURE_IMPLICIT, REFIT_ERR_STATE, "end the capture first"},
    {RFT_CU_CAPTURED_EVENT, REFIT_ERR_STATE, "end the capture first"},
};

/* Results after which, by NVIDIA's documentation, all further work fails, and those that end the
 * process's use of the GPU. */
static const rft_cu_result lost[] = {
    RFT_CU_DEINITIALIZED,        RFT_CU_ECC_UNCORRECTABLE,
    RFT_CU_NVLINK_UNCORRECTABLE, RFT_CU_CONTAINED,
    RFT_CU_ILLEGAL_ADDRESS,      RFT_CU_LAUNCH_TIMEOUT,
    RFT_CU_CONTEXT_IS_DESTROYED, RFT_CU_ASSERT,
    RFT_CU_HARDWARE_STACK_ERROR, RFT_CU_ILLEGAL_INSTRUCTION,
    RFT_CU_MISALIGNED_ADDRESS,   RFT_CU_INVALID_ADDRESS_SPACE,
    RFT_CU_INVALID_PC,           RFT_CU_LAUNCH_FAILED,
    RFT_CU_TENSOR_MEMORY_LEAK,   RFT_CU_MPS_CLIENT_TERMINATED,
    RFT_CU_EXTERNAL_DEVICE,
};

bool rft_cuda_is_lost(rft_cu_result result)
{
    for (size_t i = 0; i < sizeof lost / sizeof lost[0]; i++) {
        if (lost[i] == result) return true;
    }
    return false;
}

static meaning meaning_of(rft_cu_result result)
{
    for (size_t i = 0; i < sizeof meanings / sizeof meanings[0]; i++) {
        if (meanings[i].result == result) return meanings[i];
    }
    return (meaning){result, REFIT_ERR_DEVICE, rft_cuda_is_lost(result) ? only_new_process : NULL};
}

refit_status rft_cuda_status(rft_cu_result result)
{
    return result == RFT_CU_SUCCESS ? REFIT_OK : meaning_of(result).status;
}

const char *rft_cuda_name(const rft_cuda_driver *driver, rft_cu_result result)
{
    const char *name = NULL;
    if (driver->get_error_name == NULL) return "an error";
    if (driver->get_error_name(result, &name) != RFT_CU_SUCCESS || name == NULL) {
        return "an unknown error";
    }
    return name;
}

static const char *words_for(const rft_cuda_driver *driver, rft_cu_result result)
{
    const char *text = NULL;
    if (driver->get_error_string == NULL) return "no words for it";
    if (driver->get_error_string(result, &text) != RFT_CU_SUCCESS || text == NULL) {
        return "no words for it";
    }
    return text;
}

refit_status rft_cuda_check(const rft_cuda_driver *driver, rft_cu_result result, refit_error *error,
                            const char *what)
{
    if (result == RFT_CU_SUCCESS) return REFIT_OK;
    meaning it = meaning_of(result);
    return rft_fail_sub(error, it.status, result, "%s: %s, %d (%.90s)%s%s", what,
                        rft_cuda_name(driver, result), result, words_for(driver, result),
                        it.advice == NULL ? "" : "; ", it.advice == NULL ? "" : it.advice);
}

refit_status rft_cuda_check_copy(const rft_cuda_driver *driver, rft_cu_result result,
                                 refit_error *error, const char *what)
{
    if (result != RFT_CU_INVALID_VALUE) return rft_cuda_check(driver, result, error, what);
    return rft_fail_sub(error, REFIT_ERR_COPY, result,
                        "%s: the driver refuses an address (%s): its memory was freed, is not "
                        "mapped now, or goes on in another allocation or registration",
                        what, rft_cuda_name(driver, result));
}
