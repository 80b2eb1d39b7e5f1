/* Memory of a device, with what a deferred free of it needs. */
#include "store/device_memory.h"

#include "base/alloc.h"

static bool give_back(rft_deferred_free *left, refit_device *device)
{
    rft_device_memory *memory = (rft_device_memory *)left;
    if (refit_memory_free(device, memory->memory, NULL) != REFIT_OK) return false;
    rft_free(memory);
    return true;
}

refit_status rft_device_memory_open(refit_device *device, uint64_t bytes, rft_device_memory **out,
                                    refit_error *error)
{
    void *taken = NULL;
    rft_device_memory *memory = rft_calloc(1, sizeof *memory);
    RFT_REFUSE_IF(memory == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory to keep account of a device's");
    refit_status status = refit_memory_alloc(device, bytes, &taken, error);
    if (status != REFIT_OK) {
        rft_free(memory);
        return status;
    }
    *memory = (rft_device_memory){.left.give_back = give_back, .memory = taken, .bytes = bytes};
    *out = memory;
    return REFIT_OK;
}

void rft_device_memory_close(rft_device_memory *memory, refit_device *device)
{
    if (memory == NULL) return;
    if (!give_back(&memory->left, device)) rft_device_defer_free(device, &memory->left);
}
