/* A worker's model. Each destination on the host has a margin around it that must not be written.
 */
#include "tests/support/bound_engine.h"
#include "tests/support/test.h"

#include <stdlib.h>

#define MARGIN      24u
#define MARGIN_BYTE 0x5A

static void *take(refit_device *device, uint64_t bytes)
{
    void *memory = NULL;
    if (device != NULL) {
        assert_ok(refit_memory_alloc(device, bytes == 0 ? 1 : bytes, &memory, NULL));
        return memory;
    }
    unsigned char *whole = malloc(bytes + 2 * MARGIN);
    assert_non_null(whole);
    memset(whole, MARGIN_BYTE, bytes + 2 * MARGIN);
    return whole + MARGIN;
}

static void give(refit_device *device, void *memory, uint64_t bytes)
{
    if (device != NULL) {
        assert_ok(refit_memory_free(device, memory, NULL));
        return;
    }
    unsigned char *whole = (unsigned char *)memory - MARGIN;
    for (uint32_t i = 0; i < MARGIN; i++) {
        assert_int_equal(whole[i], MARGIN_BYTE);
        assert_int_equal(whole[MARGIN + bytes + i], MARGIN_BYTE);
    }
    free(whole);
}

static int owns(const engine *it, uint32_t index)
{
    for (uint32_t i = 0; i < index; i++) {
        if (it->list[i].memory == it->list[index].memory) return 0;
    }
    return 1;
}

void engine_open(engine *it, refit_device *device, const refit_tensor *tensors, uint32_t count,
                 int shared, int fill)
{
    memset(it, 0, sizeof *it);
    it->device = device;
    it->count = count;
    assert_true(count <= ENGINE_MOST);
    for (uint32_t i = 0; i < count; i++) {
        int tied = shared && tensors[i].alias_of != REFIT_NO_ALIAS;
        it->list[i] = (refit_destination){
            .size = sizeof(refit_destination),
            .name = tensors[i].name,
            .memory = tied ? it->list[tensors[i].alias_of].memory : take(device, tensors[i].bytes),
            .bytes = tensors[i].bytes,
            .device = device,
            .dtype = tensors[i].dtype,
        };
        it->saved[i] = malloc(tensors[i].bytes + 1);
        assert_non_null(it->saved[i]);
        memset(it->saved[i], fill, tensors[i].bytes);
        engine_write(it, i, it->saved[i]);
    }
}

void engine_close(engine *it)
{
    for (uint32_t i = it->count; i-- > 0;) {
        if (owns(it, i)) give(it->device, it->list[i].memory, it->list[i].bytes);
        free(it->saved[i]);
    }
}

static void copy(refit_device *device, void *to, const void *from, uint64_t bytes)
{
    if (device == NULL) {
        memcpy(to, from, bytes);
    } else if (bytes > 0) {
        assert_ok(refit_stream_copy(device, REFIT_STREAM_NONE, to, from, bytes, NULL));
    }
}

void engine_read(const engine *it, uint32_t index, void *to)
{
    copy(it->device, to, it->list[index].memory, it->list[index].bytes);
}

void engine_write(const engine *it, uint32_t index, const void *from)
{
    copy(it->device, it->list[index].memory, from, it->list[index].bytes);
}

void engine_save(engine *it)
{
    for (uint32_t i = 0; i < it->count; i++)
        engine_read(it, i, it->saved[i]);
}

static int is_like(const engine *it, uint32_t index, const void *bytes)
{
    unsigned char *now = malloc(it->list[index].bytes + 1);
    assert_non_null(now);
    engine_read(it, index, now);
    int same = memcmp(now, bytes, it->list[index].bytes) == 0;
    free(now);
    return same;
}

int engine_is_as_saved(const engine *it)
{
    int same = 1;
    for (uint32_t i = 0; i < it->count; i++)
        same = same && is_like(it, i, it->saved[i]);
    return same;
}

/* Device memory is copied to the host first. */
static int is_like_there(const engine *it, uint32_t index, refit_device *device, const void *bytes)
{
    unsigned char *here = malloc(it->list[index].bytes + 1);
    assert_non_null(here);
    copy(device, here, bytes, it->list[index].bytes);
    int same = is_like(it, index, here);
    free(here);
    return same;
}

int engine_is_like(const engine *it, const refit_update *update)
{
    int same = 1;
    for (uint32_t i = 0; i < it->count; i++) {
        const void *bytes = NULL;
        uint32_t index = 0;
        assert_ok(refit_update_find(update, it->list[i].name, &index, NULL));
        assert_ok(refit_update_tensor(update, index, NULL, &bytes, NULL));
        same = same && is_like_there(it, i, refit_update_device(update), bytes);
    }
    return same;
}
