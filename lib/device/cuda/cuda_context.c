/*
 * A GPU's facts, its primary context, and the guard under which calls use it.
 *
 * Entering pushes the context and sets the thread's capture mode to relaxed, so that a capture in
 * another thread forbids nothing here and is not broken by what is done here; leaving takes both
 * back. In a forked child entering is refused: the driver does not survive a fork.
 */
#include "device/cuda/cuda_device.h"

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

refit_status rft_cuda_enter(rft_cuda_device *cuda, rft_cuda_guard *guard, refit_error *error)
{
    RFT_REFUSE_IF(getpid() != cuda->pid, error, REFIT_ERR_STATE,
                  "the CUDA device belongs to process %d, which forked this one: CUDA does not "
                  "survive a fork; start workers by spawn and open the device there",
                  (int)cuda->pid);
    const rft_cuda_driver *driver = &cuda->driver;
    RFT_TRY(rft_cuda_check(driver, driver->context_push(cuda->context), error,
                           "the GPU's context could not be made current"));
    guard->capture_mode = RFT_CU_CAPTURE_MODE_RELAXED;
    rft_cu_result result = driver->capture_mode(&guard->capture_mode);
    if (result == RFT_CU_SUCCESS) return REFIT_OK;
    rft_cu_context ours;
    (void)driver->context_pop(&ours);
    return rft_cuda_check(driver, result, error, "the thread's capture mode could not be set");
}

void rft_cuda_leave(rft_cuda_device *cuda, const rft_cuda_guard *guard)
{
    int mode = guard->capture_mode;
    rft_cu_context ours;
    (void)cuda->driver.capture_mode(&mode);
    (void)cuda->driver.context_pop(&ours);
}

refit_status rft_cuda_enter_to_free(rft_cuda_device *cuda, rft_cuda_guard *guard, bool *inside,
                                    refit_error *error)
{
    refit_error why = {0};
    refit_status status = rft_cuda_enter(cuda, guard, &why);
    *inside = status == REFIT_OK;
    if (*inside || rft_cuda_is_lost((rft_cu_result)why.subsystem)) return REFIT_OK;
    if (error != NULL) *error = why;
    return status;
}

bool rft_cuda_context_is_lost(const rft_cuda_device *cuda)
{
    size_t left, total;
    return rft_cuda_is_lost(cuda->driver.memory_info(&left, &total));
}

/* An attribute that the driver does not know reads as `otherwise`. */
static int attribute(const rft_cuda_device *cuda, int which, int otherwise)
{
    int value = otherwise;
    if (cuda->driver.device_attribute(&value, which, cuda->handle) != RFT_CU_SUCCESS) {
        return otherwise;
    }
    return value;
}

/* The host node closest to the GPU: from the driver, or else from the bus. */
static int find_numa_node(const rft_cuda_device *cuda)
{
    int node = attribute(cuda, RFT_CU_ATTR_HOST_NUMA, -1);
    if (node >= 0) return node;
    char path[80];
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%04x:%02x:%02x.0/numa_node",
             (unsigned)attribute(cuda, RFT_CU_ATTR_PCI_DOMAIN, 0),
             (unsigned)attribute(cuda, RFT_CU_ATTR_PCI_BUS, 0),
             (unsigned)attribute(cuda, RFT_CU_ATTR_PCI_DEVICE, 0));
    FILE *file = fopen(path, "re");
    if (file == NULL) return -1;
    if (fscanf(file, "%d", &node) != 1) node = -1;
    fclose(file);
    return node;
}

static refit_status read_facts(rft_cuda_device *cuda, refit_error *error)
{
    const rft_cuda_driver *driver = &cuda->driver;
    rft_cuda_facts *facts = &cuda->facts;
    size_t total = 0;
    RFT_TRY(rft_cuda_check(driver,
                           driver->device_name(facts->name, sizeof facts->name, cuda->handle),
                           error, "the GPU's name could not be read"));
    RFT_TRY(rft_cuda_check(driver, driver->device_uuid(&facts->uuid, cuda->handle), error,
                           "the GPU's UUID could not be read"));
    RFT_TRY(rft_cuda_check(driver, driver->device_total(&total, cuda->handle), error,
                           "the size of the GPU's memory could not be read"));
    facts->total_bytes = total;
    facts->capability = attribute(cuda, RFT_CU_ATTR_CAPABILITY_MAJOR, 0) * 10 +
                        attribute(cuda, RFT_CU_ATTR_CAPABILITY_MINOR, 0);
    facts->multiprocessors = attribute(cuda, RFT_CU_ATTR_MULTIPROCESSORS, 1);
    facts->numa_node = find_numa_node(cuda);
    facts->vmm = attribute(cuda, RFT_CU_ATTR_VMM, 0) != 0;
    facts->posix_fd = attribute(cuda, RFT_CU_ATTR_POSIX_FD, 0) != 0;
    facts->host_page_tables = attribute(cuda, RFT_CU_ATTR_HOST_PAGE_TABLES, 0) != 0;
    facts->host_pointers = attribute(cuda, RFT_CU_ATTR_HOST_POINTERS, 0) != 0;
    return REFIT_OK;
}

static refit_status find_device(rft_cuda_device *cuda, refit_error *error)
{
    const rft_cuda_driver *driver = &cuda->driver;
    int count = 0;
    RFT_TRY(rft_cuda_check(driver, driver->device_count(&count), error,
                           "the number of GPUs could not be read"));
    RFT_REFUSE_IF(count == 0, error, REFIT_ERR_NOT_FOUND,
                  "there is a CUDA driver, but no GPU is visible (see CUDA_VISIBLE_DEVICES)");
    RFT_REFUSE_IF(cuda->ordinal >= count, error, REFIT_ERR_NOT_FOUND,
                  "there is no GPU \"cuda:%d\": this process sees %d, from cuda:0 on (see "
                  "CUDA_VISIBLE_DEVICES)",
                  cuda->ordinal, count);
    return rft_cuda_check(driver, driver->device_get(&cuda->handle, cuda->ordinal), error,
                          "the GPU could not be opened");
}

static refit_status open_relaxed(rft_cuda_device *cuda, refit_error *error)
{
    RFT_TRY(find_device(cuda, error));
    int mode = attribute(cuda, RFT_CU_ATTR_COMPUTE_MODE, RFT_CU_MODE_DEFAULT);
    RFT_REFUSE_IF(mode == RFT_CU_MODE_PROHIBITED, error, REFIT_ERR_DEVICE,
                  "cuda:%d is in prohibited mode: nvidia-smi -i %d -c DEFAULT allows its use",
                  cuda->ordinal, cuda->ordinal);
    RFT_TRY(read_facts(cuda, error));
    rft_cu_result result = cuda->driver.context_retain(&cuda->context, cuda->handle);
    /* The older name for a GPU that another process holds. */
    if (result == RFT_CU_INVALID_DEVICE && mode == RFT_CU_MODE_EXCLUSIVE_PROCESS) {
        result = RFT_CU_DEVICE_UNAVAILABLE;
    }
    return rft_cuda_check(&cuda->driver, result, error, "the GPU's context could not be opened");
}

refit_status rft_cuda_context_open(rft_cuda_device *cuda, int ordinal, refit_error *error)
{
    cuda->ordinal = ordinal;
    cuda->pid = getpid();
    int mode = RFT_CU_CAPTURE_MODE_RELAXED;
    bool relaxed = cuda->driver.capture_mode(&mode) == RFT_CU_SUCCESS;
    refit_status status = open_relaxed(cuda, error);
    if (relaxed) (void)cuda->driver.capture_mode(&mode);
    return status;
}

void rft_cuda_context_close(rft_cuda_device *cuda)
{
    if (getpid() != cuda->pid || cuda->stuck) return;
    int mode = RFT_CU_CAPTURE_MODE_RELAXED;
    bool relaxed = cuda->driver.capture_mode(&mode) == RFT_CU_SUCCESS;
    (void)cuda->driver.context_release(cuda->handle);
    if (relaxed) (void)cuda->driver.capture_mode(&mode);
}
