/* Layers of random bytes that leave and return. */
#include "tests/offload/layers.h"

#include <stdlib.h>

/* ---- Open and close -------------------------------------------------------------------------- */

scene *open_scene(const opening *how)
{
    static scene only;
    scene *on = &only;
    static const char *const common[] = {"offload.slab_bytes=64KiB", "offload.piece_bytes=16KiB",
                                         "offload.batch=3",          "offload.timeout_ms=20s",
                                         "offload.take_turns=false", NULL};
    begin_without_blocks();
    *on = (scene){.seed = 88172645463325252u};
    refit_config_init(&on->config, sizeof on->config);
    set_each(&on->config, common);
    assert_ok(refit_config_set(&on->config, "activations.host_bytes",
                               how->host_bytes == NULL ? "1MiB" : how->host_bytes, &on->error));
    assert_ok(faulty_device_open(test_device_spec("host"), &on->device, &on->error));
    on->plain = faulty_device_inner(on->device);
    assert_ok(refit_stream_open(on->device, &on->stream, &on->error));
    assert_ok(open_anew(on, how->settings));
    return on;
}

refit_status open_anew(scene *on, const char *const *settings)
{
    set_each(&on->config, settings);
    return refit_activations_open(on->device, &on->config, &on->activations, &on->error);
}

void close_scene(scene *on)
{
    faulty_device_reset(on->device);
    faulty_device_let_pins(on->device);
    faulty_device_go(on->device);
    if (on->activations != NULL) {
        refit_stats stats = figures(on);
        assert_int_equal(stats.activation_groups, 0);
        assert_int_equal(stats.activation_used_bytes, 0);
    }
    assert_ok(refit_activations_close(on->activations, &on->error));
    assert_ok(refit_stream_close(on->device, on->stream, &on->error));
    assert_ok(refit_device_close(on->device, &on->error));
    assert_true(test_device_quiet());
    end_without_blocks();
}

refit_stats figures(scene *on)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_activations_stats(on->activations, &stats, &on->error));
    return stats;
}

void await_stream(scene *on)
{
    assert_ok(refit_stream_wait(on->device, on->stream, TIMEOUT_MS, &on->error));
}

/* ---- The calls of a group -------------------------------------------------------------------- */

refit_status commit(scene *on, const layer *of, refit_stream_ref stream)
{
    return refit_activations_commit(on->activations, of->group, stream, &on->error);
}

refit_status join(scene *on, const layer *of, refit_stream_ref stream)
{
    return refit_activations_join(on->activations, of->group, stream, &on->error);
}

refit_status wait_for(scene *on, const layer *of, uint32_t timeout_ms)
{
    return refit_activations_wait(on->activations, of->group, timeout_ms, &on->error);
}

refit_status release(scene *on, const layer *of, refit_stream_ref stream)
{
    return refit_activations_release(on->activations, of->group, stream, &on->error);
}

refit_status layer_fetch(scene *on, const layer *of, refit_stream_ref stream)
{
    void *memories[TENSORS_MOST];
    uint32_t count = layer_memories(of, memories);
    return refit_activations_fetch(on->activations, of->group, memories, count, stream, &on->error);
}

/* ---- Layers ---------------------------------------------------------------------------------- */

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
        for (uint64_t at = 0; at < tensor->bytes; at++)
            tensor->expected[at] = (unsigned char)seeded_next(&on->seed);
        assert_ok(refit_memory_alloc(on->plain, tensor->bytes, &tensor->memory, &on->error));
        test_write(on->plain, tensor->memory, tensor->expected, tensor->bytes);
    }
}

void layer_add(scene *on, layer *of)
{
    uint32_t place = 0;
    assert_ok(refit_activations_begin(on->activations, &of->group, &on->error));
    for (uint32_t i = 0; i < of->count; i++) {
        layer_tensor *tensor = &of->tensors[i];
        assert_ok(refit_activations_add(on->activations, of->group, &tensor->memory, &tensor->bytes,
                                        1, &tensor->place, &on->error));
        if (tensor->place != REFIT_ACTIVATION_STAYS) assert_int_equal(tensor->place, place++);
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

/* Once the copies that `stream` has joined are over. */
static void join_and_wait(scene *on, const layer *of, refit_stream_ref stream)
{
    assert_ok(join(on, of, stream));
    if (stream.native == NULL) return;
    assert_ok(refit_stream_wait(on->device, stream, TIMEOUT_MS, &on->error));
}

void layer_leave(scene *on, layer *of, refit_stream_ref stream)
{
    layer_add(on, of);
    assert_ok(commit(on, of, stream));
    join_and_wait(on, of, stream);
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

void layer_take_other(scene *on, layer *of, void *former[TENSORS_MOST])
{
    for (uint32_t i = 0; i < of->count; i++) {
        former[i] = of->tensors[i].memory;
        of->tensors[i].memory = NULL;
    }
    layer_take(on, of);
}

void layer_free_former(scene *on, const layer *of, void *former[TENSORS_MOST])
{
    for (uint32_t i = 0; i < of->count; i++)
        assert_ok(refit_memory_free(on->plain, former[i], &on->error));
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

void layer_check(scene *on, const layer *of)
{
    for (uint32_t i = 0; i < of->count; i++) {
        const layer_tensor *tensor = &of->tensors[i];
        assert_device_equal(on->plain, tensor->memory, tensor->expected, tensor->bytes);
    }
}

void layer_finish(scene *on, layer *of)
{
    assert_ok(wait_for(on, of, TIMEOUT_MS));
    layer_check(on, of);
    assert_ok(release(on, of, on->stream));
    layer_end(on, of);
}

void layer_return(scene *on, layer *of, refit_stream_ref stream)
{
    layer_take(on, of);
    assert_ok(layer_fetch(on, of, stream));
    join_and_wait(on, of, stream);
    layer_check(on, of);
    assert_ok(release(on, of, stream));
    of->group = 0;
}

void layer_end(scene *on, layer *of)
{
    for (uint32_t i = 0; i < of->count; i++) {
        assert_ok(refit_memory_free(on->plain, of->tensors[i].memory, &on->error));
        free(of->tensors[i].expected);
    }
    of->count = 0;
}

void layer_return_and_end(scene *on, layer *of)
{
    layer_return(on, of, on->stream);
    layer_end(on, of);
}
