/* One allocation, with equal room for every tensor. An update is loaded in both ways that there
 * are: at once, and, if it comes piece by piece and has an odd number, by its pieces. */
#include "on_gpu.h"

#include <stdio.h>

#include "model.h"
#include "tests/support/test_device.h"

#define ROOM      ((uint64_t)300 << 10) /* for any tensor of the model */
#define PIECES_MS 60000u

refit_status on_gpu_open(on_gpu *out, refit_error *error)
{
    *out = (on_gpu){0};
    refit_status status = refit_device_open("cuda:0", NULL, &out->device, error);
    if (status != REFIT_OK) return status;
    status = refit_memory_alloc(out->device, MODEL_TENSORS_MOST * ROOM, &out->memory, error);
    if (status != REFIT_OK) (void)on_gpu_close(out);
    return status;
}

bool on_gpu_close(on_gpu *one)
{
    if (one->device == NULL) return true;
    refit_error error = {0};
    refit_status status = REFIT_OK;
    if (one->memory != NULL) status = refit_memory_free(one->device, one->memory, &error);
    if (status == REFIT_OK) status = refit_device_close(one->device, &error);
    unsigned left = status == REFIT_OK ? test_device_left() : 0;
    *one = (on_gpu){0};
    if (status != REFIT_OK) fprintf(stderr, "the GPU does not close: %s\n", error.text);
    if (left != 0) fprintf(stderr, "%u objects of the GPU's driver are left\n", left);
    return test_device_quiet() && status == REFIT_OK && left == 0;
}

void *on_gpu_at(const on_gpu *one, uint32_t tensor)
{
    return (unsigned char *)one->memory + tensor * ROOM;
}

static refit_status load_at_once(const on_gpu *one, refit_update *update, refit_error *error)
{
    refit_target targets[MODEL_TENSORS_MOST];
    uint32_t count = 0;
    for (uint32_t i = 0; i < refit_update_count(update); i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        refit_status status = refit_update_tensor(update, i, &tensor, NULL, error);
        if (status != REFIT_OK) return status;
        if (tensor.alias_of != REFIT_NO_ALIAS) continue;
        targets[count++] = (refit_target){i, on_gpu_at(one, i), tensor.bytes, NULL};
    }
    return refit_update_copy(update, targets, count, REFIT_STREAM_NONE, error);
}

static refit_status load_pieces(const on_gpu *one, refit_update *update, refit_error *error)
{
    const refit_piece *pieces;
    uint32_t count = 0;
    refit_status status;
    do {
        status = refit_update_next_pieces(update, PIECES_MS, &pieces, &count, error);
        for (uint32_t i = 0; status == REFIT_OK && i < count; i++) {
            unsigned char *to = on_gpu_at(one, pieces[i].tensor);
            status = refit_stream_copy(one->device, REFIT_STREAM_NONE, to + pieces[i].offset,
                                       pieces[i].memory, pieces[i].bytes, error);
        }
    } while (status == REFIT_OK && count > 0);
    return status;
}

refit_status on_gpu_load(const on_gpu *one, refit_update *update, refit_error *error)
{
    bool odd = refit_update_version(update) % 2 != 0;
    return refit_update_is_streamed(update) && odd ? load_pieces(one, update, error)
                                                   : load_at_once(one, update, error);
}

refit_status on_gpu_read(const on_gpu *one, const void *memory, uint64_t bytes, const void **out,
                         refit_error *error)
{
    static unsigned char here[ROOM];
    *out = here;
    if (bytes == 0) return REFIT_OK;
    return refit_stream_copy(one->device, REFIT_STREAM_NONE, here, memory, bytes, error);
}
