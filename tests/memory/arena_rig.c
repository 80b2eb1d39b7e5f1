/* The rig of the arena tests. */
#include "tests/memory/arena_rig.h"

arena_rig rig;

int arena_set_up(void **state)
{
    assert_ok(faulty_device_open("host:capacity=4MiB", &rig.device, NULL));
    assert_ok(refit_arena_open(rig.device, 16 * MIB, &rig.arena, NULL));
    return 0;
}

int arena_tear_down(void **state)
{
    assert_ok(refit_arena_close(rig.arena, NULL));
    return refit_device_close(rig.device, NULL) == REFIT_OK ? 0 : -1;
}

char *arena_take(uint64_t bytes)
{
    void *piece;
    assert_ok(refit_arena_alloc(rig.arena, bytes, &piece, NULL));
    return piece;
}

uint64_t arena_used(void)
{
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(rig.device, &info, NULL));
    return info.used_bytes;
}

refit_arena *arena_find(const void *memory, uint64_t bytes)
{
    refit_arena *arena = NULL;
    assert_ok(rft_arena_enter(rig.device, memory, bytes, &arena, NULL));
    if (arena != NULL) rft_arena_leave(arena, memory);
    return arena;
}

void arena_give(void *piece)
{
    assert_ok(refit_arena_free(rig.arena, piece, NULL));
}
