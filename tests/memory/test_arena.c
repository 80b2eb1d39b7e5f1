/* Arenas: pieces share no page, leave and return one by one at their address, within capacity. */
#include "tests/memory/arena_rig.h"
#include "tests/support/failing_alloc.h"

ARENA_TEST(piece_leaves_and_returns_without_its_neighbours)
{
    char *first = arena_take(100);
    char *second = arena_take(5000);
    char *third = arena_take(1);
    memset(first, 1, 100);
    memset(second, 2, 5000);
    *third = 3;
    uint64_t used = arena_used();
    for (int i = 0; i < 2; i++) { /* both are idempotent */
        assert_ok(rft_arena_decommit(rig.arena, second, 5000, NULL, NULL));
    }
    assert_true(arena_used() < used);
    for (int i = 0; i < 2; i++)
        assert_ok(rft_arena_commit(rig.arena, second, 5000, NULL));
    assert_int_equal(arena_used(), used);
    assert_int_equal(first[99], 1);
    assert_int_equal(second[0] + second[4999], 0);
    assert_int_equal(*third, 3);
}

ARENA_TEST(piece_is_found_by_its_address_and_size)
{
    refit_arena *other;
    assert_ok(refit_arena_open(rig.device, MIB, &other, NULL));
    char *pieces[50];
    for (uint32_t i = 0; i < 50; i++)
        pieces[i] = arena_take(1 + i);
    void *elsewhere;
    assert_ok(refit_arena_alloc(other, 64, &elsewhere, NULL));
    for (uint32_t i = 0; i < 50; i++)
        assert_ptr_equal(arena_find(pieces[i], 1 + i), rig.arena);
    assert_ptr_equal(arena_find(elsewhere, 64), other);
    assert_null(arena_find(pieces[5], 7));
    assert_null(arena_find(pieces[5] + 1, 5));
    assert_null(arena_find(&other, sizeof other));
    assert_ok(refit_arena_close(other, NULL));
    assert_null(arena_find(elsewhere, 64));
}

ARENA_TEST(only_whole_pieces_come_and_go)
{
    const uint64_t page = PAGE;
    char *piece = arena_take(2 * page);
    assert_invalid(rft_arena_decommit(rig.arena, piece, page, NULL, NULL));
    assert_invalid(rft_arena_decommit(rig.arena, piece + page, page, NULL, NULL));
    assert_invalid(rft_arena_commit(rig.arena, piece - page, page, NULL));
    piece[2 * page - 1] = 1;
}

ARENA_TEST(full_device_refuses_and_keeps_its_place)
{
    void *piece = NULL;
    char *first = arena_take(3 * MIB);
    assert_int_equal(refit_arena_alloc(rig.arena, 2 * MIB, &piece, NULL), REFIT_ERR_DEVICE_MEMORY);
    assert_null(piece);
    char *second = arena_take(MIB);
    assert_ptr_equal(second, first + 3 * MIB);
    assert_ok(rft_arena_decommit(rig.arena, first, 3 * MIB, NULL, NULL));
    assert_ok(refit_arena_alloc(rig.arena, 2 * MIB, &piece, NULL));
    assert_int_equal(rft_arena_commit(rig.arena, first, 3 * MIB, NULL), REFIT_ERR_DEVICE_MEMORY);
}

ARENA_TEST(used_up_reservation_is_refused)
{
    void *piece;
    refit_error error;
    assert_int_equal(refit_arena_alloc(rig.arena, 17 * MIB, &piece, &error), REFIT_ERR_LIMIT);
    assert_int_equal(refit_arena_alloc(rig.arena, UINT64_MAX, &piece, &error), REFIT_ERR_LIMIT);
    refit_arena *small;
    assert_ok(refit_arena_open(rig.device, 1, &small, NULL));
    assert_ok(refit_arena_alloc(small, 1, &piece, NULL));
    assert_int_equal(refit_arena_alloc(small, 1, &piece, NULL), REFIT_ERR_LIMIT);
    assert_ok(refit_arena_close(small, NULL));
}

ARENA_TEST(close_is_refused_while_a_region_lies_in_it)
{
    refit_arena *arena;
    char *piece = arena_take(64);
    assert_ok(rft_arena_enter(rig.device, piece, 64, &arena, NULL));
    assert_ptr_equal(arena, rig.arena);
    assert_int_equal(refit_arena_close(rig.arena, NULL), REFIT_ERR_BUSY);
    assert_int_equal(refit_device_close(rig.device, NULL), REFIT_ERR_BUSY);
    rft_arena_leave(arena, piece);
}

ARENA_TEST(closing_gives_the_memory_back)
{
    refit_arena *other;
    void *piece;
    assert_ok(refit_arena_open(rig.device, MIB, &other, NULL));
    assert_ok(refit_arena_alloc(other, MIB, &piece, NULL));
    assert_int_equal(arena_used(), MIB);
    assert_ok(refit_arena_close(other, NULL));
    assert_int_equal(arena_used(), 0);
}

ARENA_TEST(bad_arguments_are_refused)
{
    refit_arena *arena;
    void *piece;
    assert_invalid(refit_arena_open(NULL, 1, &arena, NULL));
    assert_invalid(refit_arena_open(rig.device, 0, &arena, NULL));
    assert_invalid(refit_arena_open(rig.device, 1, NULL, NULL));
    assert_invalid(refit_arena_alloc(NULL, 1, &piece, NULL));
    assert_invalid(refit_arena_alloc(rig.arena, 0, &piece, NULL));
    assert_invalid(refit_arena_alloc(rig.arena, 1, NULL, NULL));
    assert_ok(refit_arena_close(NULL, NULL));
}

ARENA_TEST(device_that_fails_is_reported_and_leaves_no_piece)
{
    refit_arena *arena = NULL;
    void *piece = NULL;
    faulty_device_fail(rig.device, FAULTY_RESERVE, 1, REFIT_ERR_DEVICE);
    assert_int_equal(refit_arena_open(rig.device, MIB, &arena, NULL), REFIT_ERR_DEVICE);
    assert_null(arena);
    faulty_device_fail(rig.device, FAULTY_COMMIT, 1, REFIT_ERR_DEVICE);
    assert_int_equal(refit_arena_alloc(rig.arena, 64, &piece, NULL), REFIT_ERR_DEVICE);
    assert_null(piece);
    assert_int_equal(arena_used(), 0);
}

static refit_status open_and_fill(refit_device *device)
{
    refit_arena *arena = NULL;
    RFT_TRY(refit_arena_open(device, 8 * MIB, &arena, NULL));
    refit_status status = REFIT_OK;
    for (int i = 0; i < 70 && status == REFIT_OK; i++) {
        void *piece;
        status = refit_arena_alloc(arena, 64, &piece, NULL);
    }
    return rft_keep_first(status, refit_arena_close(arena, NULL));
}

TEST(every_failed_allocation_is_an_error)
{
    for (uint64_t nth = 1;; nth++) {
        refit_device *device = NULL;
        failing_alloc_begin(nth);
        refit_status status = refit_device_open("host", NULL, &device, NULL);
        if (status == REFIT_OK) status = open_and_fill(device);
        assert_ok(refit_device_close(device, NULL));
        if (!failing_alloc_end()) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
}

int main(void)
{
    return test_run("arena");
}
