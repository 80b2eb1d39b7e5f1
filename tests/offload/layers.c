/* Layers of random bytes that leave and return. */
#include "tests/offload/layers.h"

#include <stdlib.h>
#include <string.h>

#include "tests/support/seeded.h"

void scene_set(scene *on, const char *key, const char *value)
{
    assert_ok(refit_config_set(&on->config, key, value, &on->error));
}

static void set_all(scene *on, const char *const *settings)
{
    for (; settings != NULL && settings[0] != NULL; settings += 2) {
        scene_set(on, settings[0], settings[1]);
    }
}

void scene_open(scene *on, const char *host_bytes, const char *const *settings)
{
    *on = (scene){.seed = 88172645463325252u};
    refit_config_init(&on->config, sizeof on->config);
    scene_set(on, "offload.slab_bytes", "64KiB");
    scene_set(on, "offload.piece_bytes", "16KiB");
    scene_set(on, "offload.batch", "3");
    scene_set(on, "offload.timeout_ms", "20s");
    scene_set(on, "offload.take_turns", "false");
    scene_set(on, "activations.host_bytes", host_bytes);
    set_all(on, settings);
    assert_ok(faulty_device_open(test_device_spec("host"), &on->device, &on->error));
    on->plain = faulty_device_inner(on->device);
    assert_ok(refit_activations_open(on->device, &on->config, &on->activations, &on->error));
    assert_ok(refit_stream_open(on->device, &on->stream, &on->error));
}

void scene_reopen(scene *on, const char *const *settings)
{
    assert_ok(refit_activations_close(on->activations, &on->error));
    set_all(on, settings);
    assert_ok(refit_activations_open(on->device, &on->config, &on->activations, &on->error));
}

void scene_close(scene *on)
{
    faulty_device_reset(on->device);
    faulty_device_go(on->device);
    refit_stats stats = scene_stats(on);
    assert_int_equal(stats.activation_groups, 0);
    assert_int_equal(stats.activation_used_bytes, 0);
    assert_ok(refit_activations_close(on->activations, &on->error));
    assert_ok(refit_stream_close(on->device, on->stream, &on->error));
    assert_ok(refit_device_close(on->device, &on->error));
    assert_true(test_device_quiet());
}

refit_stats scene_stats(scene *on)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_activations_stats(on->activations, &stats, &on->error));
    return stats;
}

void layer_make(scene *on, layer *of, uint32_t count, uint64_t most)
{
    assert_true(count <= TENSORS_MOST);
    *of = (layer){.count = count};
    for (uint32_t i = 0; i < count; i++) {
        layer_tensor *tensor = &of->tensors[i];
        tensor->place = REFIT_ACTIVATION_STAYS;
        tensor->bytes = 1 + seeded_below(&on->seed, most);
        tensor->expected = malloc(tensor->bytes);
        assert_non_null(tensor->expected);
        for (uint64_t at = 0; at < tensor->bytes; at++) {
            tensor->expected[at] = (unsigned char)seeded_next(&on->seed);
        }
        assert_ok(refit_memory_alloc(on->plain, tensor->bytes, &tensor->memory, &on->error));
        test_write(on->plain, tensor->memory, tensor->expected, tensor->bytes);
    }
}

void layer_add(scene *on, layer *of)
{
    uint32_t next = 0;
    assert_ok(refit_activations_begin(on->activations, &of->group, &on->error));
    for (uint32_t i = 0; i < of->count; i++) {
        layer_tensor *tensor = &of->tensors[i];
        assert_ok(refit_activations_add(on->activations, of->group, tensor->memory, tensor->bytes,
                                        &tensor->place, &on->error));
        if (tensor->place != REFIT_ACTIVATION_STAYS) assert_int_equal(tensor->place, next++);
    }
}

void layer_free(scene *on, layer *of)
{
    for (uint32_t i = 0; i < of->count; i++) {
        layer_tensor *tensor = &of->tensors[i];
        if (tensor->place == REFIT_ACTIVATION_STAYS) continue;
        assert_ok(refit_memory_free(on->plain, tensor->memory, &on->error));
        tensor->memory = NULL;
    }
}

void layer_leave(scene *on, layer *of, refit_stream_ref stream)
{
    layer_add(on, of);
    assert_ok(refit_activations_commit(on->activations, of->group, stream, &on->error));
    assert_ok(refit_activations_join(on->activations, of->group, stream, &on->error));
    if (stream.native != NULL) {
        assert_ok(refit_stream_wait(on->device, stream, PATIENCE_MS, &on->error));
    }
    layer_free(on, of);
}

void layer_take(scene *on, layer *of)
{
    for (uint32_t i = 0; i < of->count; i++) {
        layer_tensor *tensor = &of->tensors[i];
        if (tensor->place == REFIT_ACTIVATION_STAYS || tensor->memory != NULL) continue;
        assert_ok(refit_memory_alloc(on->plain, tensor->bytes, &tensor->memory, &on->error));
        test_fill(on->plain, tensor->memory, 0xA5, tensor->bytes);
    }
}

uint32_t layer_memories(const layer *of, void *memories[TENSORS_MOST])
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < of->count; i++) {
        const layer_tensor *tensor = &of->tensors[i];
        if (tensor->place != REFIT_ACTIVATION_STAYS) memories[count++] = tensor->memory;
    }
    return count;
}

refit_status layer_fetch(scene *on, const layer *of, refit_stream_ref stream)
{
    void *memories[TENSORS_MOST];
    uint32_t count = layer_memories(of, memories);
    return refit_activations_fetch(on->activations, of->group, memories, count, stream, &on->error);
}

void layer_check(scene *on, const layer *of)
{
    for (uint32_t i = 0; i < of->count; i++) {
        const layer_tensor *tensor = &of->tensors[i];
        assert_device_equal(on->plain, tensor->memory, tensor->expected, tensor->bytes);
    }
}

void layer_return(scene *on, layer *of, refit_stream_ref stream)
{
    layer_take(on, of);
    assert_ok(layer_fetch(on, of, stream));
    assert_ok(refit_activations_join(on->activations, of->group, stream, &on->error));
    if (stream.native != NULL) {
        assert_ok(refit_stream_wait(on->device, stream, PATIENCE_MS, &on->error));
    }
    layer_check(on, of);
    assert_ok(refit_activations_release(on->activations, of->group, stream, &on->error));
    of->group = 0;
}

void layer_end(scene *on, layer *of)
{
    for (uint32_t i = 0; i < of->count; i++) {
        if (of->tensors[i].memory != NULL) {
            assert_ok(refit_memory_free(on->plain, of->tensors[i].memory, &on->error));
        }
        free(of->tensors[i].expected);
    }
    of->count = 0;
}
