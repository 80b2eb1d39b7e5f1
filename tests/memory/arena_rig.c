/* The rig of the arena tests. */
#include "tests/memory/arena_rig.h"

int arena_set_up(void **state)
{
    static arena_rig all;
    memset(&all, 0, sizeof all);
    assert_ok(faulty_device_open("host:capacity=4MiB", &all.device, NULL));
    assert_ok(refit_arena_open(all.device, 16 * MIB, &all.arena, NULL));
    *state = &all;
    return 0;
}

int arena_tear_down(void **state)
{
    arena_rig *all = *state;
    assert_ok(refit_arena_close(all->arena, NULL));
    return refit_device_close(all->device, NULL) == REFIT_OK ? 0 : -1;
}

char *arena_take(arena_rig *all, uint64_t bytes)
{
    void *piece;
    assert_ok(refit_arena_alloc(all->arena, bytes, &piece, NULL));
    return piece;
}

uint64_t arena_used(arena_rig *all)
{
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(all->device, &info, NULL));
    return info.used_bytes;
}

refit_arena *arena_find(arena_rig *all, const void *memory, uint64_t bytes)
{
    refit_arena *arena = NULL;
    assert_ok(rft_arena_enter(all->device, memory, bytes, &arena, NULL));
    if (arena != NULL) rft_arena_leave(arena, memory);
    return arena;
}

void arena_give(arena_rig *all, void *piece)
{
    assert_ok(refit_arena_free(all->arena, piece, NULL));
}
