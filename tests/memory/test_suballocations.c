/* Pieces of an arena are given back and their addresses used again; neighbours come and go in one
 * call; threads may do so at once. */
#include "tests/memory/arena_rig.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>

#include "tests/support/seeded.h"

ARENA_TEST(addresses_of_a_freed_piece_are_used_again)
{
    char *first = arena_take(3 * PAGE);
    char *second = arena_take(PAGE);
    char *third = arena_take(2 * PAGE);
    char *last = arena_take(PAGE);
    memset(first, 1, 3 * PAGE);
    arena_give(first);
    arena_give(third);
    assert_int_equal(arena_used(), 2 * PAGE);
    assert_ptr_equal(arena_take(2 * PAGE), third); /* the smallest hole that fits */
    assert_ptr_equal(arena_take(PAGE + 1), first);
    assert_ptr_equal(arena_take(5), first + 2 * PAGE);
    assert_ptr_equal(arena_take(2 * PAGE), last + PAGE);
    assert_int_equal(first[0], 0); /* zeroed like any other */
    arena_give(third);
    arena_give(last);
    assert_ptr_equal(arena_take(PAGE), third);
    arena_give(first);
    assert_ptr_equal(arena_take(2 * PAGE), first); /* also where it comes first */
    arena_give(second);
    assert_ptr_equal(arena_take(PAGE), second);
}

ARENA_TEST(neighbours_that_are_freed_are_one_hole)
{
    char *pieces[5];
    for (int i = 0; i < 5; i++)
        pieces[i] = arena_take(PAGE);
    arena_give(pieces[1]);
    arena_give(pieces[3]);
    arena_give(pieces[2]);
    assert_ptr_equal(arena_take(3 * PAGE), pieces[1]);
    arena_give(pieces[1]);
    arena_give(pieces[4]); /* the last one: what is after the others is free again */
    assert_ptr_equal(arena_take(20 * PAGE), pieces[1]);
    arena_give(pieces[0]);
    arena_give(pieces[1]);
    assert_ptr_equal(arena_take(50 * PAGE), pieces[0]);
}

ARENA_TEST(a_refusal_tells_the_longest_hole)
{
    const uint64_t pages[] = {1, 3, 1, 2, 1};
    void *pieces[5], *piece;
    char expected[80];
    refit_arena *arena;
    refit_error error;
    assert_ok(refit_arena_open(rig.device, 8 * PAGE, &arena, NULL));
    for (int i = 0; i < 5; i++)
        assert_ok(refit_arena_alloc(arena, pages[i] * PAGE, &pieces[i], NULL));
    assert_ok(refit_arena_free(arena, pieces[1], NULL));
    assert_ok(refit_arena_free(arena, pieces[3], NULL));
    assert_int_equal(refit_arena_alloc(arena, 4 * PAGE, &piece, &error), REFIT_ERR_LIMIT);
    (void)snprintf(expected, sizeof expected, ": %" PRIu64 " of %" PRIu64 " are left in one range",
                   3 * PAGE, 8 * PAGE);
    assert_non_null(strstr(error.text, expected));
    assert_ok(refit_arena_close(arena, NULL));
}

/* Against a map of pages, from a seed: no two share a page, and what is free is found. */
ARENA_TEST(any_order_of_pieces_keeps_the_books_right)
{
    enum { PAGES = 64, PIECES = 40 };
    refit_arena *arena;
    char *pieces[PIECES] = {0};
    uint64_t sizes[PIECES] = {0};
    unsigned char owner[PAGES] = {0};
    uint64_t random = 88172645463325252u;
    assert_ok(refit_arena_open(rig.device, PAGES * PAGE, &arena, NULL));
    char *base = NULL;
    for (int step = 0; step < 3000; step++) {
        unsigned at = (unsigned)(seeded_next(&random) % PIECES);
        if (pieces[at] != NULL) {
            assert_ok(refit_arena_free(arena, pieces[at], NULL));
            memset(owner + (pieces[at] - base) / (int64_t)PAGE, 0, sizes[at]);
            pieces[at] = NULL;
            continue;
        }
        sizes[at] = 1 + (random >> 20) % 6;
        void *piece = NULL;
        refit_status status = refit_arena_alloc(arena, sizes[at] * PAGE - 7, &piece, NULL);
        if (base == NULL) base = piece;
        unsigned run = 0, longest = 0;
        for (unsigned page = 0; page < PAGES; page++) {
            run = owner[page] == 0 ? run + 1 : 0;
            if (run > longest) longest = run;
        }
        assert_int_equal(status, longest >= sizes[at] ? REFIT_OK : REFIT_ERR_LIMIT);
        if (status != REFIT_OK) continue;
        pieces[at] = piece;
        for (uint64_t page = 0; page < sizes[at]; page++) {
            unsigned char *mark = &owner[(uint64_t)(pieces[at] - base) / PAGE + page];
            assert_int_equal(*mark, 0);
            *mark = 1;
        }
        uint64_t owned = 0;
        for (unsigned page = 0; page < PAGES; page++)
            owned += owner[page];
        assert_int_equal(arena_used(), owned * PAGE);
    }
    assert_ok(refit_arena_close(arena, NULL));
}

ARENA_TEST(what_is_needed_or_unknown_is_not_freed)
{
    refit_arena *arena;
    char *piece = arena_take(2 * PAGE);
    assert_invalid(refit_arena_free(rig.arena, piece + PAGE, NULL));
    assert_invalid(refit_arena_free(rig.arena, &arena, NULL));
    assert_invalid(refit_arena_free(NULL, piece, NULL));
    assert_ok(refit_arena_free(rig.arena, NULL, NULL));
    assert_ok(rft_arena_enter(rig.device, piece, 2 * PAGE, &arena, NULL));
    assert_int_equal(refit_arena_free(rig.arena, piece, NULL), REFIT_ERR_BUSY);
    rft_arena_leave(arena, piece);
    faulty_device_fail(rig.device, FAULTY_DECOMMIT, 1, REFIT_ERR_DEVICE);
    assert_int_equal(refit_arena_free(rig.arena, piece, NULL), REFIT_ERR_DEVICE);
    assert_ptr_equal(arena_find(piece, 2 * PAGE), rig.arena);
    arena_give(piece);
    assert_null(arena_find(piece, 2 * PAGE));
    assert_invalid(refit_arena_free(rig.arena, piece, NULL));
}

ARENA_TEST(pieces_are_listed_by_address)
{
    void *memory = NULL;
    uint64_t bytes = 0;
    char *pieces[3] = {arena_take(100), arena_take(PAGE + 1), arena_take(7)};
    arena_give(pieces[0]);
    pieces[0] = arena_take(200);
    const uint64_t sizes[3] = {200, PAGE + 1, 7};
    for (uint32_t i = 0; i < 3; i++) {
        assert_ok(refit_arena_piece(rig.arena, i, &memory, &bytes, NULL));
        assert_ptr_equal(memory, pieces[i]);
        assert_int_equal(bytes, sizes[i]);
    }
    assert_refused(refit_arena_piece(rig.arena, 3, &memory, &bytes, error), REFIT_ERR_NOT_FOUND,
                   "has 3");
    assert_invalid(refit_arena_piece(NULL, 0, &memory, &bytes, NULL));
    assert_invalid(refit_arena_piece(rig.arena, 0, NULL, &bytes, NULL));
    assert_invalid(refit_arena_piece(rig.arena, 0, &memory, NULL, NULL));
}

ARENA_TEST(pieces_side_by_side_come_and_go_in_one_call)
{
    uint64_t freed;
    char *first = arena_take(100);
    char *second = arena_take(2 * PAGE);
    char *third = arena_take(5);
    char *fourth = arena_take(5);
    faulty_device_reset(rig.device);
    assert_ok(rft_arena_decommit(rig.arena, first, 3 * PAGE + 5, &freed, NULL));
    assert_int_equal(faulty_device_calls(rig.device, FAULTY_DECOMMIT), 1);
    assert_int_equal(freed, 4 * PAGE);
    assert_int_equal(arena_used(), PAGE);
    assert_ok(rft_arena_commit(rig.arena, first, 4 * PAGE, NULL));
    assert_int_equal(arena_used(), 5 * PAGE);
    /* From the middle of one, up to the middle of one, and over a hole. */
    assert_invalid(rft_arena_commit(rig.arena, second + PAGE, 2 * PAGE, NULL));
    assert_invalid(rft_arena_commit(rig.arena, first, 2 * PAGE, NULL));
    assert_invalid(rft_arena_commit(rig.arena, fourth, 2 * PAGE, NULL));
    arena_give(third);
    assert_invalid(rft_arena_decommit(rig.arena, first, 5 * PAGE, &freed, NULL));
    assert_int_equal(freed, 0);
    assert_int_equal(arena_used(), 4 * PAGE);
}

typedef struct taker {
    void *piece;
    unsigned char mark;
    rft_thread thread;
    bool right;
} taker;

static void *take_and_give(void *user)
{
    taker *it = user;
    it->right = true;
    for (int i = 0; i < 50 && it->right; i++) {
        void *piece = NULL;
        refit_arena *arena = NULL;
        size_t bytes = (size_t)(1 + i % 3) * PAGE;
        it->right = refit_arena_alloc(rig.arena, bytes, &piece, NULL) == REFIT_OK &&
                    rft_arena_enter(rig.device, piece, bytes, &arena, NULL) == REFIT_OK &&
                    arena == rig.arena;
        if (!it->right) break;
        memset(piece, it->mark, bytes);
        it->right = refit_arena_free(arena, piece, NULL) == REFIT_ERR_BUSY &&
                    ((unsigned char *)piece)[bytes - 1] == it->mark;
        rft_arena_leave(arena, piece);
        it->right = it->right && refit_arena_free(arena, piece, NULL) == REFIT_OK;
    }
    return NULL;
}

ARENA_TEST(threads_take_and_give_at_once)
{
    taker takers[4];
    for (unsigned i = 0; i < 4; i++) {
        takers[i] = (taker){.mark = (unsigned char)(i + 1)};
        assert_ok(rft_thread_start(&takers[i].thread, "taker", take_and_give, &takers[i], NULL));
    }
    for (unsigned i = 0; i < 4; i++) {
        rft_thread_join(takers[i].thread);
        assert_true(takers[i].right);
    }
    assert_int_equal(arena_used(), 0);
}

static void *free_piece(void *user)
{
    taker *it = user;
    it->right = refit_arena_free(rig.arena, it->piece, NULL) == REFIT_OK;
    return NULL;
}

/* From the call on, though its memory still waits for a stream. */
ARENA_TEST(a_piece_that_is_going_cannot_be_used)
{
    refit_stream_ref stream;
    char byte = 5;
    void *memory;
    uint64_t bytes;
    taker it = {.piece = arena_take(PAGE)};
    assert_ok(refit_stream_open(rig.device, &stream, NULL));
    assert_ok(refit_arena_add_stream(rig.arena, stream, NULL));
    faulty_device_stop(rig.device);
    assert_ok(refit_stream_copy(rig.device, stream, it.piece, &byte, 1, NULL));
    assert_ok(rft_thread_start(&it.thread, "taker", free_piece, &it, NULL));
    while (refit_arena_piece(rig.arena, 0, &memory, &bytes, NULL) == REFIT_OK)
        sched_yield();
    assert_null(arena_find(it.piece, PAGE));
    assert_invalid(refit_arena_free(rig.arena, it.piece, NULL));
    assert_invalid(refit_arena_pin(rig.arena, it.piece, NULL));
    assert_ptr_not_equal(arena_take(PAGE), it.piece);
    faulty_device_go(rig.device);
    rft_thread_join(it.thread);
    assert_true(it.right);
    assert_ptr_equal(arena_take(PAGE), it.piece);
    assert_ok(refit_stream_close(rig.device, stream, NULL));
}

int main(void)
{
    return test_run("suballocations");
}
