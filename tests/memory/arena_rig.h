/* What the tests of arenas stand on: a faulty host device of 4 MiB and an arena of 16 MiB on it. */
#ifndef ARENA_RIG_H
#define ARENA_RIG_H

#include <unistd.h>

#include "memory/device_arena.h"
#include "tests/support/faulty_device.h"
#include "tests/support/test.h"

#define PAGE ((uint64_t)sysconf(_SC_PAGESIZE))

typedef struct arena_rig {
    refit_device *device;
    refit_arena *arena;
} arena_rig;

extern arena_rig rig;

int arena_set_up(void **state);
int arena_tear_down(void **state);

#define ARENA_TEST(name) TEST_WITH(name, arena_set_up, arena_tear_down)

/* A piece; its end; what the device has given. */
char *arena_take(uint64_t bytes);
void arena_give(void *piece);
uint64_t arena_used(void);

/* The arena that a region at that address would lie in, or NULL. */
refit_arena *arena_find(const void *memory, uint64_t bytes);

#endif
