/* bound_engine: memory of a worker's model, on the host or on a device, that versions are applied
 * into.
 */
#ifndef BOUND_ENGINE_H
#define BOUND_ENGINE_H

#include <refit/broadcast.h>

#define ENGINE_MOST 16u

typedef struct engine {
    refit_device *device; /* borrowed; NULL: host memory */
    refit_destination list[ENGINE_MOST];
    unsigned char *saved[ENGINE_MOST]; /* what engine_save found */
    uint32_t count;
} engine;

/* A destination for each tensor of the list, tied ones included; all bytes are `fill`. With
 * `shared` a tied one has the memory of its original. */
void engine_open(engine *it, refit_device *device, const refit_tensor *tensors, uint32_t count,
                 int shared, int fill);
void engine_close(engine *it);

void engine_read(const engine *it, uint32_t index, void *to);
void engine_write(const engine *it, uint32_t index, const void *from);
/* Notes all bytes, and whether they are those still. */
void engine_save(engine *it);
int engine_is_as_saved(const engine *it);
/* Whether all that has a destination is as in the update. */
int engine_is_like(const engine *it, const refit_update *update);

#endif
