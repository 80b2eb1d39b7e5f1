/* Regions, holds and streams keep the pieces that they need; a piece that its owner let go of goes
 * later.
 */
#include "tests/memory/arena_rig.h"

ARENA_TEST(memory_that_is_held_stays)
{
    refit_arena *arena = NULL;
    char *first = arena_take(PAGE);
    char *second = arena_take(PAGE);
    assert_ok(refit_arena_pin(rig.arena, second, NULL));
    assert_ok(refit_arena_pin(rig.arena, second, NULL));
    for (int held = 2; held > 0; held--) {
        assert_refused(rft_arena_enter(rig.device, second, PAGE, &arena, error), REFIT_ERR_BUSY,
                       "NCCL_GRAPH_REGISTER");
        assert_null(arena);
        assert_int_equal(refit_arena_free(rig.arena, second, NULL), REFIT_ERR_BUSY);
        assert_int_equal(refit_arena_close(rig.arena, NULL), REFIT_ERR_BUSY);
        assert_int_equal(rft_arena_decommit(rig.arena, second, PAGE, NULL, NULL), REFIT_ERR_BUSY);
        assert_int_equal(rft_arena_decommit(rig.arena, first, 2 * PAGE, NULL, NULL),
                         REFIT_ERR_BUSY);
        assert_int_equal(arena_used(), 2 * PAGE);
        assert_ok(refit_arena_unpin(rig.arena, second, NULL));
    }
    assert_invalid(refit_arena_unpin(rig.arena, second, NULL));
    assert_ptr_equal(arena_find(second, PAGE), rig.arena);
    arena_give(second);
    assert_invalid(refit_arena_pin(rig.arena, second, NULL));
    assert_invalid(refit_arena_unpin(rig.arena, second, NULL));
    assert_invalid(refit_arena_pin(NULL, first, NULL));
    assert_invalid(refit_arena_unpin(NULL, first, NULL));
}

ARENA_TEST(what_an_offloader_moves_cannot_be_held)
{
    refit_arena *arena;
    char *piece = arena_take(PAGE);
    assert_ok(rft_arena_enter(rig.device, piece, PAGE, &arena, NULL));
    assert_refused(refit_arena_pin(rig.arena, piece, error), REFIT_ERR_BUSY, "NCCL_GRAPH_REGISTER");
    rft_arena_leave(arena, piece);
    /* It was left without memory, and gets it back to hold it. */
    assert_ok(rft_arena_decommit(rig.arena, piece, PAGE, NULL, NULL));
    faulty_device_fail(rig.device, FAULTY_COMMIT, 1, REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(refit_arena_pin(rig.arena, piece, NULL), REFIT_ERR_DEVICE_MEMORY);
    assert_invalid(refit_arena_unpin(rig.arena, piece, NULL));
    assert_ok(refit_arena_pin(rig.arena, piece, NULL));
    piece[PAGE - 1] = 1;
    assert_ok(refit_arena_unpin(rig.arena, piece, NULL));
}

ARENA_TEST(an_abandoned_piece_goes_with_its_last_reference)
{
    refit_arena *arena;
    char *first = arena_take(PAGE);
    char *second = arena_take(PAGE);
    char *third = arena_take(PAGE);
    refit_arena *second_time = NULL;
    assert_ok(rft_arena_enter(rig.device, first, PAGE, &arena, NULL));
    assert_int_equal(rft_arena_enter(rig.device, first, PAGE, &second_time, NULL), REFIT_ERR_BUSY);
    assert_null(second_time);
    assert_ok(refit_arena_pin(rig.arena, second, NULL));
    assert_int_equal(rft_arena_abandon(rig.arena, first, NULL), REFIT_ERR_BUSY);
    assert_int_equal(rft_arena_abandon(rig.arena, first, NULL), REFIT_ERR_BUSY);
    assert_int_equal(rft_arena_abandon(rig.arena, second, NULL), REFIT_ERR_BUSY);
    assert_ok(rft_arena_abandon(rig.arena, third, NULL));
    assert_invalid(rft_arena_abandon(rig.arena, third, NULL));
    assert_int_equal(arena_used(), 2 * PAGE);
    assert_null(arena_find(second + PAGE, PAGE));
    rft_arena_leave(arena, first);
    assert_int_equal(arena_used(), PAGE);
    assert_ok(refit_arena_unpin(rig.arena, second, NULL));
    assert_int_equal(arena_used(), 0);
}

ARENA_TEST(an_abandoned_piece_that_the_device_kept_goes_at_a_sweep)
{
    refit_arena *arena = NULL;
    char *first = arena_take(PAGE);
    char *second = arena_take(PAGE);
    faulty_device_fail_times(rig.device, FAULTY_DECOMMIT, 1, 3, REFIT_ERR_DEVICE);
    assert_int_equal(rft_arena_abandon(rig.arena, first, NULL), REFIT_ERR_DEVICE);
    assert_invalid(rft_arena_enter(rig.device, first, PAGE, &arena, NULL));
    assert_null(arena); /* not entered */
    assert_int_equal(rft_arena_abandon(rig.arena, second, NULL), REFIT_ERR_DEVICE);
    assert_int_equal(arena_used(), 2 * PAGE);
    rft_arena_sweep(rig.arena);
    assert_int_equal(arena_used(), 0);
    rft_arena_sweep(rig.arena);
    assert_ptr_equal(arena_take(2 * PAGE), first);
}

ARENA_TEST(memory_waits_for_streams_that_use_the_arena)
{
    refit_stream_ref stream;
    char byte = 5;
    char *piece = arena_take(PAGE);
    assert_ok(refit_stream_open(rig.device, &stream, NULL));
    assert_ok(refit_arena_add_stream(rig.arena, stream, NULL));
    faulty_device_stop(rig.device);
    assert_ok(refit_stream_copy(rig.device, stream, piece, &byte, 1, NULL));
    rig.device->wait_most_ms = 1;
    assert_int_equal(refit_arena_free(rig.arena, piece, NULL), REFIT_ERR_TIMEOUT);
    assert_int_equal(refit_arena_close(rig.arena, NULL), REFIT_ERR_TIMEOUT);
    assert_int_equal(refit_arena_remove_stream(rig.arena, stream, NULL), REFIT_ERR_TIMEOUT);
    assert_int_equal(arena_used(), PAGE);
    rig.device->wait_most_ms = TIMEOUT_MS;
    faulty_device_go(rig.device);
    arena_give(piece);
    assert_ok(refit_stream_wait(rig.device, stream, TIMEOUT_MS, NULL));
    assert_ok(refit_arena_remove_stream(rig.arena, stream, NULL));
    assert_ok(refit_arena_add_stream(rig.arena, stream, NULL));
    assert_ok(refit_stream_close(rig.device, stream, NULL));
    assert_invalid(refit_arena_add_stream(NULL, stream, NULL));
    assert_invalid(refit_arena_remove_stream(NULL, stream, NULL));
}

ARENA_TEST(a_close_waits_for_every_stream)
{
    refit_arena *arena;
    void *piece;
    refit_stream_ref slow, idle;
    char byte = 5;
    assert_ok(refit_arena_open(rig.device, PAGE, &arena, NULL));
    assert_ok(refit_arena_alloc(arena, PAGE, &piece, NULL));
    assert_ok(refit_stream_open(rig.device, &slow, NULL));
    assert_ok(refit_stream_open(rig.device, &idle, NULL));
    for (int i = 0; i < 2; i++) { /* in either order */
        assert_ok(refit_arena_add_stream(arena, i == 0 ? slow : idle, NULL));
        assert_ok(refit_arena_add_stream(arena, i == 0 ? idle : slow, NULL));
        faulty_device_stop(rig.device);
        assert_ok(refit_stream_copy(rig.device, slow, piece, &byte, 1, NULL));
        rig.device->wait_most_ms = 10;
        assert_int_equal(refit_arena_close(arena, NULL), REFIT_ERR_TIMEOUT);
        rig.device->wait_most_ms = TIMEOUT_MS;
        faulty_device_go(rig.device);
        assert_ok(refit_arena_remove_stream(arena, slow, NULL));
        assert_ok(refit_arena_remove_stream(arena, idle, NULL));
    }
    assert_ok(refit_arena_close(arena, NULL));
    assert_ok(refit_stream_close(rig.device, slow, NULL));
    assert_ok(refit_stream_close(rig.device, idle, NULL));
}

/* Nothing is waited for, and all is given back. */
ARENA_TEST(an_arena_of_a_lost_device_is_closed)
{
    refit_arena *arena;
    void *piece;
    refit_stream_ref stream;
    assert_ok(refit_arena_open(rig.device, PAGE, &arena, NULL));
    assert_ok(refit_arena_alloc(arena, PAGE, &piece, NULL));
    assert_ok(refit_stream_open(rig.device, &stream, NULL));
    assert_ok(refit_arena_add_stream(arena, stream, NULL));
    faulty_device_lose(rig.device, FAULTY_ZERO, 1);
    assert_int_equal(rft_device_zero(rig.device, REFIT_STREAM_NONE, piece, 1, NULL),
                     REFIT_ERR_DEVICE);
    assert_ok(refit_arena_close(arena, NULL));
    assert_ok(refit_stream_close(rig.device, stream, NULL));
}

ARENA_TEST(a_stream_that_takes_no_event_keeps_the_memory)
{
    refit_stream_ref stream;
    char *piece = arena_take(PAGE);
    assert_ok(refit_stream_open(rig.device, &stream, NULL));
    faulty_device_fail(rig.device, FAULTY_EVENT_OPEN, 1, REFIT_ERR_DEVICE);
    assert_int_equal(refit_arena_add_stream(rig.arena, stream, NULL), REFIT_ERR_DEVICE);
    faulty_device_fail(rig.device, FAULTY_EVENT_RECORD, 1, REFIT_ERR_DEVICE);
    assert_int_equal(refit_arena_add_stream(rig.arena, stream, NULL), REFIT_ERR_DEVICE);
    /* As on a GPU while a graph is being captured. */
    faulty_device_fail(rig.device, FAULTY_EVENT_RECORD, 1, REFIT_ERR_STATE);
    assert_ok(refit_arena_add_stream(rig.arena, stream, NULL));
    faulty_device_fail(rig.device, FAULTY_EVENT_RECORD, 1, REFIT_ERR_STATE);
    assert_int_equal(refit_arena_free(rig.arena, piece, NULL), REFIT_ERR_STATE);
    faulty_device_fail(rig.device, FAULTY_EVENT_RECORD, 1, REFIT_ERR_STATE);
    assert_int_equal(refit_arena_close(rig.arena, NULL), REFIT_ERR_STATE);
    assert_int_equal(arena_used(), PAGE);
    arena_give(piece);
    assert_ok(refit_stream_close(rig.device, stream, NULL));
}

int main(void)
{
    return test_run("arena_references");
}
