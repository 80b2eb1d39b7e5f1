/*
 * libcuda.so.1, found at run time.
 *
 *     dlopen ──► cuGetProcAddress_v2 (12.0 and later have it) ──► the table ──► cuInit
 *
 * The library is never unloaded: it starts threads and leaves exit handlers behind, so closing only
 * lets go of our hold on it. Knows nothing of devices and contexts.
 */
#include "device/cuda_driver.h"

#include <dlfcn.h>
#include <string.h>

#include "device/cuda_error.h"

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
                  "libcuda.so.1 is there but is no CUDA driver: it has no cuDriverGetVersion");
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
                           "the CUDA driver's version was not to be had"));
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
