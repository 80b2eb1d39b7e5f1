/* Device memory of regions: hooks, binding by hand, and arenas, each in the states that allow it.
 */
#include "tests/offload/rig.h"

#include <stdlib.h>

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

static void hooks_come_in_pairs_and_only_while_states_are_here(void **state)
{
    rig *on = *state;
    refit_memory_hooks half = {.size = sizeof half, .release = refuse_to_release};
    refit_memory_hooks whole = {sizeof whole, refuse_to_release, give_nothing, NULL};
    assert_int_equal(refit_offloader_set_memory(on->offloader, &half, &on->error),
                     REFIT_ERR_INVALID);
    half.size = 1;
    assert_int_equal(refit_offloader_set_memory(on->offloader, &half, &on->error),
                     REFIT_ERR_INVALID);
    assert_ok(refit_offloader_set_memory(on->offloader, &whole, &on->error));
    assert_ok(refit_offloader_set_memory(on->offloader, NULL, &on->error));
    rig_offload(on);
    assert_int_equal(refit_offloader_set_memory(on->offloader, &whole, &on->error),
                     REFIT_ERR_STATE);
    rig_restore(on);
}

static void *hooks_user;

static int note_user(void *user, refit_region_id region, void *memory, uint64_t bytes)
{
    (void)region, (void)memory, (void)bytes;
    hooks_user = user;
    return 3;
}

/* Callers compiled against another refit. Memory of exactly that size shows what is read. */
static void hooks_of_an_older_or_newer_caller_are_taken(void **state)
{
    (void)state;
    rig on;
    int own;
    const size_t known = sizeof(refit_memory_hooks);
    const size_t sizes[] = {offsetof(refit_memory_hooks, user), known, known + 16};
    for (size_t i = 0; i < 3; i++) {
        rig_open(&on, RIG_BOUND, NULL);
        const refit_memory_hooks earlier = {known, note_user, give_nothing, &on};
        assert_ok(refit_offloader_set_memory(on.offloader, &earlier, &on.error));
        const refit_memory_hooks full = {sizes[i], note_user, give_nothing, &own};
        refit_memory_hooks *given = test_calloc(1, sizes[i]);
        memcpy(given, &full, sizes[i] < known ? sizes[i] : known);
        assert_ok(refit_offloader_set_memory(on.offloader, given, &on.error));
        test_free(given);
        hooks_user = &on;
        assert_ok(offload(&on));
        assert_int_equal(finish(&on), REFIT_ERR_CALLBACK);
        assert_ptr_equal(hooks_user, i == 0 ? NULL : &own);
        rig_close(&on);
    }
}

static void each_hook_is_called_once_a_region(void **state)
{
    rig *on = *state;
    rig_offload(on);
    assert_int_equal(on->releases, RIG_REGIONS);
    assert_ok(refit_offloader_finish(on->offloader, 0, &on->error));
    assert_ok(offload(on));
    assert_ok(refit_offloader_finish(on->offloader, 0, &on->error));
    assert_int_equal(on->releases, RIG_REGIONS);
    rig_restore(on);
    assert_int_equal(on->acquires, RIG_REGIONS);
}

static void an_acquire_hook_that_gives_nothing_has_failed(void **state)
{
    rig *on = *state;
    void *memory;
    refit_memory_hooks empty = {sizeof empty, refuse_to_release, give_nothing, NULL};
    assert_ok(refit_offloader_set_memory(on->offloader, &empty, &on->error));
    assert_ok(offload(on));
    assert_int_equal(finish(on), REFIT_ERR_CALLBACK);
    assert_ok(refit_memory_free(on->device, on->regions[4].memory, &on->error));
    assert_ok(unbind(on, 4));
    on->regions[4].memory = NULL;
    assert_int_equal(restore(on), REFIT_ERR_CALLBACK);
    assert_told(on->error, "state.4");
    assert_ok(refit_memory_alloc(on->device, on->regions[4].bytes, &memory, &on->error));
    on->regions[4].memory = memory;
    assert_ok(bind(on, 4, memory));
    rig_restore(on);
    rig_check_bytes(on, true);
}

static void a_region_without_memory_cannot_return(void **state)
{
    rig *on = *state;
    void *memory;
    rig_offload(on);
    assert_ok(refit_memory_free(on->device, on->regions[6].memory, &on->error));
    assert_ok(unbind(on, 6));
    assert_int_equal(restore(on), REFIT_ERR_STATE);
    assert_told(on->error, "state.6");
    assert_int_equal(rig_state(on), REFIT_OFFLOADED);
    assert_ok(refit_memory_alloc(on->device, on->regions[6].bytes, &memory, &on->error));
    on->regions[6].memory = memory;
    assert_int_equal(bind(on, 6, on->regions[7].memory), REFIT_ERR_EXISTS);
    assert_int_equal(bind(on, 6, NULL), REFIT_ERR_INVALID);
    assert_ok(bind(on, 6, memory));
    rig_restore(on);
    rig_check_bytes(on, true);
}

static void a_refused_bind_keeps_the_old_address(void **state)
{
    rig *on = *state;
    assert_int_equal(bind(on, 1, on->regions[2].memory), REFIT_ERR_EXISTS);
    assert_ptr_equal(rig_region_info(on, 1).memory, on->regions[1].memory);
    assert_int_equal(bind(on, 2, on->regions[1].memory), REFIT_ERR_EXISTS);
    assert_ok(bind(on, 1, on->regions[1].memory));
    rig_cycle(on);
}

static void a_caller_may_move_a_resident_storage(void **state)
{
    rig *on = *state;
    void *memory;
    assert_ok(refit_memory_alloc(on->device, on->regions[3].bytes, &memory, &on->error));
    test_write(on->plain, memory, on->regions[3].memory, on->regions[3].bytes);
    assert_ok(bind(on, 3, memory));
    assert_ok(refit_memory_free(on->device, on->regions[3].memory, &on->error));
    on->regions[3].memory = memory;
    rig_cycle(on);
}

static void unbinding_needs_bytes_on_the_host(void **state)
{
    rig *on = *state;
    assert_int_equal(unbind(on, 0), REFIT_ERR_STATE);
    faulty_device_fail_later(on->device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
    assert_ok(offload(on));
    assert_int_equal(finish(on), REFIT_ERR_COPY);
    assert_int_equal(unbind(on, 0), REFIT_ERR_STATE);
    assert_int_equal(unbind(on, RIG_REGIONS), REFIT_ERR_NOT_FOUND);
    assert_int_equal(bind(on, RIG_REGIONS, on), REFIT_ERR_NOT_FOUND);
    rig_restore(on);
}

static void an_arena_keeps_its_addresses_to_itself(void **state)
{
    rig *on = *state;
    rig_offload(on);
    assert_int_equal(unbind(on, 0), REFIT_ERR_INVALID);
    assert_ok(bind(on, 0, on->regions[0].memory));
    assert_int_equal(rig_region_info(on, 0).bound, 1);
    rig_restore(on);
    rig_check_bytes(on, true);
}

static void a_region_moves_out_of_its_arena(void **state)
{
    rig *on = *state;
    void *memory;
    void *piece;
    rig_offload(on);
    piece = on->regions[2].memory;
    assert_ok(refit_memory_alloc(on->device, on->regions[2].bytes, &memory, &on->error));
    on->regions[2].memory = memory;
    assert_ok(bind(on, 2, memory));
    assert_int_equal(rig_region_info(on, 2).in_arena, 0);
    rig_restore(on);
    rig_check_bytes(on, true);
    on->regions[2].memory = piece;
    assert_ok(bind(on, 2, piece));
    assert_int_equal(rig_region_info(on, 2).in_arena, 1);
    assert_ok(refit_memory_free(on->device, memory, &on->error));
}

/* The first offloader closes while its states are away: the piece has no memory any more. */
static void a_piece_left_without_memory_gets_it_again(void **state)
{
    rig *on = *state;
    refit_offloader *second;
    refit_region_id id;
    rig_offload(on);
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    assert_ok(refit_offloader_open(on->device, &on->config, &second, &on->error));
    on->offloader = second;
    refit_region_desc desc = {.size = sizeof desc,
                              .name = "again",
                              .memory = on->regions[2].memory,
                              .bytes = on->regions[2].bytes};
    faulty_device_fail(on->device, FAULTY_COMMIT, 1, REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(refit_offloader_add(second, &desc, &id, &on->error), REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(refit_offloader_count(second), 0);
    assert_ok(refit_offloader_add(second, &desc, &id, &on->error));
    test_write(on->plain, desc.memory, on->regions[2].expected, desc.bytes);
    assert_ok(refit_offloader_seal(second, &on->error));
    rig_offload(on);
    rig_restore(on);
    rig_check(on, 2);
}

static void a_bind_without_memory_keeps_what_is_bound(void **state)
{
    rig *on = *state;
    void *memory;
    void *piece;
    rig_offload(on);
    piece = on->regions[2].memory;
    assert_ok(refit_memory_alloc(on->device, on->regions[2].bytes, &memory, &on->error));
    assert_ok(bind(on, 2, memory));
    rig_restore(on);
    faulty_device_fail(on->device, FAULTY_COMMIT, 1, REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(bind(on, 2, piece), REFIT_ERR_DEVICE_MEMORY);
    assert_ptr_equal(rig_region_info(on, 2).memory, memory);
    rig_offload(on);
    rig_restore(on);
    on->regions[2].memory = memory;
    rig_check_bytes(on, true);
    assert_ok(bind(on, 2, piece));
    assert_ok(refit_memory_free(on->device, memory, &on->error));
}

static void no_memory_to_restore_into_is_told_and_waited_out(void **state)
{
    rig *on = *state;
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
    const struct CMUnitTest tests[] = {
        TEST(hooks_come_in_pairs_and_only_while_states_are_here),
        cmocka_unit_test(hooks_of_an_older_or_newer_caller_are_taken),
        TEST_WITH(each_hook_is_called_once_a_region, .memory = RIG_HOOKS),
        TEST(an_acquire_hook_that_gives_nothing_has_failed),
        TEST(a_region_without_memory_cannot_return),
        TEST(a_refused_bind_keeps_the_old_address),
        TEST(a_caller_may_move_a_resident_storage),
        TEST(unbinding_needs_bytes_on_the_host),
        TEST_WITH(an_arena_keeps_its_addresses_to_itself, .memory = RIG_ARENA),
        TEST_WITH(a_region_moves_out_of_its_arena, .memory = RIG_ARENA),
        TEST_WITH(a_piece_left_without_memory_gets_it_again, .memory = RIG_ARENA),
        TEST_WITH(a_bind_without_memory_keeps_what_is_bound, .memory = RIG_ARENA),
        TEST_WITH(no_memory_to_restore_into_is_told_and_waited_out, .memory = RIG_ARENA),
    };
    return cmocka_run_group_tests_name("memory_hooks", tests, NULL, NULL);
}
