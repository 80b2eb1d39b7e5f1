/*
 * What tests of activations stand on: a device that can be told to fail, an arena of activations,
 * and layers, whose tensors have random bytes of which a copy is kept.
 *
 *     scene *on = open_scene(&(opening){.host_bytes = "2MiB"});
 *     layer one;
 *     layer_make(on, &one, 5, 100000);       five tensors on the device
 *     layer_leave(on, &one, on->stream);     their bytes are in the arena, their memory is free
 *     layer_return(on, &one, on->stream);    they are back, bit for bit
 *     layer_end(on, &one);
 *     close_scene(on);                       nothing is lost, nothing has leaked
 *
 * SCENE(name, .host_bytes = "2MiB") is a test `on` such a scene.
 */
#ifndef OFFLOAD_LAYERS_H
#define OFFLOAD_LAYERS_H

#include "tests/offload/offload.h"

#define TENSORS_MOST 12

/* How a test's scene is: slabs of 64 KiB, copies of at most 16 KiB, batches of 3. */
struct opening {
    const char *host_bytes;      /* of the arena; NULL: 1MiB */
    const char *const *settings; /* more, as set_each takes them */
};

struct scene {
    refit_device *device;
    refit_device *plain; /* the one in it, for the test's own copies */
    refit_config config;
    refit_activations *activations;
    refit_stream_ref stream;
    uint64_t seed;
    refit_error error;
};

typedef struct layer_tensor {
    void *memory; /* on the device, or NULL */
    uint64_t bytes;
    uint32_t place; /* in the group, or REFIT_ACTIVATION_STAYS */
    unsigned char *expected;
} layer_tensor;

typedef struct layer {
    refit_activation_group group; /* 0: none */
    uint32_t count;
    layer_tensor tensors[TENSORS_MOST];
} layer;

/* New activations by the configuration and more settings. */
refit_status open_anew(scene *on, const char *const *settings);

refit_stats figures(scene *on);
void await_stream(scene *on);

/* The calls of a group. */
refit_status commit(scene *on, const layer *of, refit_stream_ref stream);
refit_status join(scene *on, const layer *of, refit_stream_ref stream);
refit_status wait_for(scene *on, const layer *of, uint32_t timeout_ms);
refit_status release(scene *on, const layer *of, refit_stream_ref stream);
refit_status layer_fetch(scene *on, const layer *of, refit_stream_ref stream);

/* `count` tensors of 1 to `most` random bytes, on the device. */
void layer_make(scene *on, layer *of, uint32_t count, uint64_t most);

/* Begins a group of its tensors, and adds them. */
void layer_add(scene *on, layer *of);

/* Frees the memory of what has a place. */
void layer_free(scene *on, layer *of);

/* layer_add, commit, join and layer_free, once the stream is idle. */
void layer_leave(scene *on, layer *of, refit_stream_ref stream);

/* New memory for what has a place and no memory, with other bytes in it. */
void layer_take(scene *on, layer *of);

/* The same for all tensors, which have some; `former` gets that. */
void layer_take_other(scene *on, layer *of, void *former[TENSORS_MOST]);
void layer_free_former(scene *on, const layer *of, void *former[TENSORS_MOST]);

/* The addresses of the tensors by their places; the number of them. */
uint32_t layer_memories(const layer *of, void *memories[TENSORS_MOST]);

/* Every byte is on the device. */
void layer_check(scene *on, const layer *of);

/* Waits for the group, whose bytes are back, and releases it; frees what the test has. */
void layer_finish(scene *on, layer *of);

/* layer_take, fetch, join, layer_check and release. */
void layer_return(scene *on, layer *of, refit_stream_ref stream);

/* Frees what the test has. The group is released. */
void layer_end(scene *on, layer *of);

/* layer_return on the scene's stream, and layer_end. */
void layer_return_and_end(scene *on, layer *of);

#endif
