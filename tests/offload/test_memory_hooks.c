/* Device memory of regions: hooks, binding by hand, and arenas, each in the states that allow it.
 */
#include "tests/offload/rig.h"

#include <stdlib.h>

#include "base/alloc.h"
#include "memory/device_arena.h"

static int refuse_to_release(void *user, refit_region_id region, void *memory, uint64_t bytes)
{
    (void)user, (void)region, (void)memory, (void)bytes;
    return 3;
}

static int give_nothing(void *user, refit_region_id region, uint64_t bytes, void **memory)
{
    (void)user, (void)region, (void)bytes, (void)memory;
    return 0;
}

static refit_status set_hooks(rig *on, const refit_memory_hooks *hooks)
{
    return refit_offloader_set_memory(on->offloader, hooks, &on->error);
}

SCENE(hooks_come_in_pairs_and_only_while_states_are_here, 0)
{
    refit_memory_hooks half = {.size = sizeof half, .release = refuse_to_release};
    refit_memory_hooks whole = {sizeof whole, refuse_to_release, give_nothing, NULL};
    assert_invalid(set_hooks(on, &half));
    half.size = 1;
    assert_invalid(set_hooks(on, &half));
    assert_ok(set_hooks(on, &whole));
    assert_ok(set_hooks(on, NULL));
    rig_offload(on);
    assert_int_equal(set_hooks(on, &whole), REFIT_ERR_STATE);
}

static void *hooks_user;

static int note_user(void *user, refit_region_id region, void *memory, uint64_t bytes)
{
    (void)region, (void)memory, (void)bytes;
    hooks_user = user;
    return 3;
}

/* Callers compiled against another refit. Memory of exactly that size shows what is read. */
TEST(hooks_of_an_older_or_newer_caller_are_taken)
{
    int own;
    const size_t known = sizeof(refit_memory_hooks);
    const size_t sizes[] = {offsetof(refit_memory_hooks, user), known, known + 16};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        rig *on = open_scene(&(opening){0});
        const refit_memory_hooks earlier = {known, note_user, give_nothing, on};
        assert_ok(set_hooks(on, &earlier));
        const refit_memory_hooks full = {sizes[i], note_user, give_nothing, &own};
        refit_memory_hooks *given = test_calloc(1, sizes[i]);
        memcpy(given, &full, sizes[i] < known ? sizes[i] : known);
        assert_ok(set_hooks(on, given));
        test_free(given);
        hooks_user = on;
        assert_int_equal(offload_all(on->offloader, &on->error), REFIT_ERR_CALLBACK);
        assert_ptr_equal(hooks_user, i == 0 ? NULL : &own);
        close_scene(on);
    }
}

SCENE(each_hook_is_called_once_a_region, .memory = RIG_HOOKS)
{
    rig_offload(on);
    assert_int_equal(on->releases, RIG_REGIONS);
    assert_ok(refit_offloader_wait(on->offloader, 0, &on->error));
    assert_ok(offload(on));
    assert_ok(refit_offloader_wait(on->offloader, 0, &on->error));
    assert_int_equal(on->releases, RIG_REGIONS);
    rig_restore(on);
    assert_int_equal(on->acquires, RIG_REGIONS);
}

/* A region whose memory the caller has freed: hooks that give nothing have failed, and without
 * hooks it cannot return before it is bound. */
SCENE(a_region_without_memory_cannot_return, 0)
{
    const refit_memory_hooks empty = {sizeof empty, refuse_to_release, give_nothing, NULL};
    assert_ok(set_hooks(on, &empty));
    assert_int_equal(offload_all(on->offloader, &on->error), REFIT_ERR_CALLBACK);
    for (int hooks = 1; hooks >= 0; hooks--) {
        rig_free(on, 6);
        assert_ok(unbind_region(on, 6));
        assert_int_equal(restore(on), hooks ? REFIT_ERR_CALLBACK : REFIT_ERR_STATE);
        assert_says(&on->error, "state.6");
        assert_int_equal(rig_state(on), REFIT_OFFLOADED);
        void *memory = rig_take(on, 6);
        assert_int_equal(bind_region(on, 6, on->regions[7].memory), REFIT_ERR_EXISTS);
        assert_invalid(bind_region(on, 6, NULL));
        assert_ok(bind_region(on, 6, memory));
        rig_restore(on);
        rig_check_bytes(on, true);
        assert_ok(set_hooks(on, NULL));
        rig_offload(on);
    }
}

SCENE(a_refused_bind_keeps_the_old_address, 0)
{
    assert_int_equal(bind_region(on, 1, on->regions[2].memory), REFIT_ERR_EXISTS);
    assert_ptr_equal(rig_region_info(on, 1).memory, on->regions[1].memory);
    assert_int_equal(bind_region(on, 2, on->regions[1].memory), REFIT_ERR_EXISTS);
    assert_ok(bind_region(on, 1, on->regions[1].memory));
    rig_cycle(on);
}

SCENE(a_caller_may_move_a_resident_storage, 0)
{
    void *former = on->regions[3].memory, *memory = rig_take(on, 3);
    test_write(on->plain, memory, on->regions[3].expected, on->regions[3].bytes);
    assert_ok(bind_region(on, 3, memory));
    assert_ok(refit_memory_free(on->device, former, &on->error));
    rig_cycle(on);
}

SCENE(unbinding_needs_bytes_on_the_host, .settings = SETTINGS("offload.verify=true"))
{
    assert_int_equal(unbind_region(on, 0), REFIT_ERR_STATE);
    rig_fail_offload(on);
    assert_int_equal(unbind_region(on, 0), REFIT_ERR_STATE);
    assert_int_equal(unbind_region(on, RIG_REGIONS), REFIT_ERR_NOT_FOUND);
    assert_int_equal(bind_region(on, RIG_REGIONS, on), REFIT_ERR_NOT_FOUND);
    rig_restore(on);
}

/* ---- Pieces of an arena ---------------------------------------------------------------------- */

/* A region may be bound to the piece that it has. */
SCENE(an_arena_keeps_its_addresses_to_itself, .memory = RIG_ARENA)
{
    assert_ok(bind_region(on, 0, on->regions[0].memory));
    rig_check(on, 0);
    rig_offload(on);
    assert_invalid(unbind_region(on, 0));
    assert_ok(bind_region(on, 0, on->regions[0].memory));
    refit_region_info info = rig_region_info(on, 0);
    assert_ptr_equal(info.memory, on->regions[0].memory);
    assert_true(info.bound && info.in_arena);
    assert_true(used_bytes(on->device) > 0);
    rig_restore(on);
    rig_check_bytes(on, true);
    assert_ok(unseal(on));
    assert_ok(clear(on));
    assert_ok(refit_arena_free(on->arena, on->regions[0].memory, &on->error)); /* not a region */
}

/* A bind for which there is no memory keeps what is bound. */
SCENE(a_region_moves_out_of_its_arena_and_back, .memory = RIG_ARENA)
{
    rig_offload(on);
    void *piece = on->regions[2].memory, *memory = rig_take(on, 2);
    assert_ok(bind_region(on, 2, memory));
    assert_int_equal(rig_region_info(on, 2).in_arena, 0);
    rig_restore(on);
    rig_check_bytes(on, true);
    faulty_device_fail(on->device, FAULTY_COMMIT, 1, REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(bind_region(on, 2, piece), REFIT_ERR_DEVICE_MEMORY);
    assert_ptr_equal(rig_region_info(on, 2).memory, memory);
    rig_fill(on);
    rig_cycle(on);
    assert_ok(bind_region(on, 2, piece));
    assert_int_equal(rig_region_info(on, 2).in_arena, 1);
    rig_free(on, 2);
}

static refit_status add_piece(rig *on, refit_offloader *offloader, uint32_t at)
{
    refit_region_id id;
    refit_region_desc desc = {.size = sizeof desc,
                              .name = "again",
                              .memory = on->regions[at].memory,
                              .bytes = on->regions[at].bytes};
    return refit_offloader_add(offloader, &desc, &id, &on->error);
}

/* The first offloader closes while its states are away: the piece has no memory any more. */
SCENE(a_piece_left_without_memory_gets_it_again, .memory = RIG_ARENA)
{
    rig_offload(on);
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    assert_ok(refit_offloader_open(on->device, &on->config, &on->offloader, &on->error));
    faulty_device_fail(on->device, FAULTY_COMMIT, 1, REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(add_piece(on, on->offloader, 2), REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(refit_offloader_count(on->offloader), 0);
    assert_ok(add_piece(on, on->offloader, 2));
    assert_true(used_bytes(on->device) > 0);
    test_write(on->plain, on->regions[2].memory, on->regions[2].expected, on->regions[2].bytes);
    assert_ok(seal(on));
    rig_offload(on);
    rig_restore(on);
    rig_check(on, 2);
}

/* While the first has the piece away, the second would get memory that the restore of the first
 * writes to. */
SCENE(one_offloader_at_a_time_moves_a_piece, .memory = RIG_ARENA)
{
    refit_offloader *other;
    void *piece = on->regions[2].memory, *memory = rig_extra(on, on->regions[2].bytes);
    assert_ok(refit_offloader_open(on->device, &on->config, &other, &on->error));
    assert_int_equal(add_piece(on, other, 2), REFIT_ERR_BUSY);
    assert_says(&on->error, "another offloader");
    rig_offload(on);
    uint64_t used = used_bytes(on->device);
    assert_int_equal(add_piece(on, other, 2), REFIT_ERR_BUSY);
    assert_int_equal(used_bytes(on->device), used);
    on->regions[2].memory = memory;
    assert_ok(add_piece(on, other, 2));
    on->regions[2].memory = piece;
    assert_int_equal(refit_offloader_bind(other, 0, piece, &on->error), REFIT_ERR_BUSY);
    rig_restore(on);
    rig_check_bytes(on, true);
    assert_ok(unseal(on));
    assert_ok(clear(on));
    assert_ok(refit_offloader_bind(other, 0, piece, &on->error));
    rig_check(on, 2);
    assert_ok(refit_offloader_close(other, &on->error));
}

/* Its memory may go at any moment, so it is neither listed nor taken for memory of another kind. */
SCENE(a_piece_that_was_given_back_is_not_added, .memory = RIG_ARENA, .unsealed = true)
{
    refit_offloader *other;
    void *memory;
    uint64_t bytes;
    assert_ok(refit_offloader_open(on->device, &on->config, &other, &on->error));
    for (uint32_t at = 0; at < RIG_REGIONS; at++) {
        assert_int_equal(rft_arena_abandon(on->arena, on->regions[at].memory, &on->error),
                         REFIT_ERR_BUSY);
    }
    assert_int_equal(refit_arena_piece(on->arena, 0, &memory, &bytes, &on->error),
                     REFIT_ERR_NOT_FOUND);
    assert_invalid(add_piece(on, other, 2));
    assert_says(&on->error, "given back");
    assert_ok(clear(on));
    assert_int_equal(used_bytes(on->device), 0);
    assert_ok(refit_offloader_close(other, &on->error));
}

/* Memory comes and goes after a stream that uses it, and no bookkeeping grows. */
SCENE(a_warm_cycle_of_a_used_arena_allocates_nothing, .memory = RIG_ARENA)
{
    refit_stream_ref stream;
    uint64_t before = 0;
    assert_ok(refit_stream_open(on->device, &stream, &on->error));
    for (int i = 0; i < 4; i++) {
        assert_ok(refit_arena_add_stream(on->arena, stream, &on->error));
        rig_offload(on);
        rig_restore(on);
        if (i == 0) before = rft_alloc_count();
    }
    assert_int_equal(rft_alloc_count(), before);
    rig_check_bytes(on, true);
    assert_ok(refit_stream_close(on->device, stream, &on->error));
}

SCENE(no_memory_to_restore_into_is_told_and_waited_out, .memory = RIG_ARENA)
{
    void *cache;
    rig_offload(on);
    assert_ok(
        refit_memory_alloc(on->device, (UINT64_C(63) << 20) + 512 * 1024, &cache, &on->error));
    assert_int_equal(restore(on), REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(rig_state(on), REFIT_OFFLOADED);
    assert_ok(refit_memory_free(on->device, cache, &on->error));
    rig_restore(on);
    rig_check_bytes(on, true);
}

int main(void)
{
    return test_run("memory_hooks");
}
