/*
 * What tests of activations stand on: a device that can be told to fail, an arena of activations,
 * and layers, whose tensors have random bytes of which a copy is kept.
 *
 *     scene on;
 *     scene_open(&on, "1MiB", NULL);
 *     layer one;
 *     layer_make(&on, &one, 5, 100000);       five tensors on the device
 *     layer_leave(&on, &one, on.stream);      their bytes are in the arena, their memory is free
 *     layer_return(&on, &one, on.stream);     they are back, bit for bit
 *     layer_end(&on, &one);
 *     scene_close(&on);                       nothing is lost, nothing has leaked
 */
#ifndef OFFLOAD_LAYERS_H
#define OFFLOAD_LAYERS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include <cmocka.h>

#include <refit.h>

#include "tests/support/faulty_device.h"
#include "tests/support/test_device.h"

#define TENSORS_MOST 12
#define PATIENCE_MS  20000u /* a deadline that only a hang reaches */

#define assert_ok(call) assert_int_equal((call), REFIT_OK)

typedef struct scene {
    refit_device *device;
    refit_device *plain; /* the one in it, for the test's own copies */
    refit_config config;
    refit_activations *activations;
    refit_stream_ref stream;
    uint64_t seed;
    refit_error error;
} scene;

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

/* Slabs of 64 KiB, copies of at most 16 KiB, batches of 3. `settings`: "key", "value", … NULL; may
 * itself be NULL. */
void scene_open(scene *on, const char *host_bytes, const char *const *settings);

/* Other settings, with new activations. */
void scene_reopen(scene *on, const char *const *settings);

/* No group is left. */
void scene_close(scene *on);

void scene_set(scene *on, const char *key, const char *value);
refit_stats scene_stats(scene *on);

/* `count` tensors of 1 to `most` random bytes, on the device. */
void layer_make(scene *on, layer *of, uint32_t count, uint64_t most);

/* Begins a group of its tensors, and adds them. */
void layer_add(scene *on, layer *of);

/* Frees the memory of what has a place. */
void layer_free(scene *on, layer *of);

/* layer_add, commit, join and layer_free, once the stream is idle. */
void layer_leave(scene *on, layer *of, refit_stream_ref stream);

/* New memory for what has a place, with other bytes in it. */
void layer_take(scene *on, layer *of);

/* The addresses of the tensors by their places; the number of them. */
uint32_t layer_memories(const layer *of, void *memories[TENSORS_MOST]);
refit_status layer_fetch(scene *on, const layer *of, refit_stream_ref stream);

/* Every byte is on the device. */
void layer_check(scene *on, const layer *of);

/* layer_take, fetch, join, layer_check and release. */
void layer_return(scene *on, layer *of, refit_stream_ref stream);

/* Frees what the test has. The group is released. */
void layer_end(scene *on, layer *of);

#endif
