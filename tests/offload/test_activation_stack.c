/* The stack of activations: what is taken on top, what comes back, and the free pieces below. */
#include "tests/offload/offload.h"

#include "offload/activation_stack.h"
#include "tests/support/failing_alloc.h"

#define UNIT   RFT_STACK_ALIGNMENT
#define PIECES 200
#define ROOM   400 /* units */

/* Takes so many bytes; UINT64_MAX: there was no room. */
static uint64_t take(rft_stack *stack, uint64_t bytes, bool below)
{
    uint64_t at = UINT64_MAX;
    bool placed, is_below;
    refit_error error;
    assert_ok(rft_stack_take(stack, bytes, &at, &placed, &is_below, &error));
    if (!placed) return UINT64_MAX;
    assert_int_equal(is_below, below);
    assert_int_equal(at % UNIT, 0);
    return at;
}

TEST(what_is_given_back_in_reverse_leaves_nothing)
{
    rft_stack stack = {.room = 8 * UNIT};
    assert_int_equal(take(&stack, 1, false), 0);
    assert_int_equal(take(&stack, 513, false), UNIT);
    assert_int_equal(take(&stack, 5 * UNIT, false), 3 * UNIT);
    assert_int_equal(stack.used, 8 * UNIT);
    assert_int_equal(take(&stack, 1, false), UINT64_MAX);
    rft_stack_give(&stack, 3 * UNIT, 5 * UNIT);
    assert_int_equal(stack.top, 3 * UNIT);
    rft_stack_give(&stack, UNIT, 513);
    rft_stack_give(&stack, 0, 1);
    assert_int_equal(stack.top, 0);
    assert_int_equal(stack.used, 0);
    assert_int_equal(stack.free_count, 0);
    rft_stack_close(&stack);
}

TEST(free_pieces_join_their_neighbours)
{
    rft_stack stack = {.room = 8 * UNIT};
    for (uint64_t at = 0; at < 8; at++)
        assert_int_equal(take(&stack, UNIT, false), at * UNIT);
    rft_stack_give(&stack, 1 * UNIT, UNIT);
    rft_stack_give(&stack, 5 * UNIT, UNIT);
    rft_stack_give(&stack, 3 * UNIT, UNIT);
    assert_int_equal(stack.free_count, 3);
    rft_stack_give(&stack, 2 * UNIT, UNIT); /* between two */
    assert_int_equal(stack.free_count, 2);
    rft_stack_give(&stack, 4 * UNIT, UNIT);
    assert_int_equal(stack.free_count, 1);
    assert_int_equal(stack.free[0].at, UNIT);
    assert_int_equal(stack.free[0].bytes, 5 * UNIT);
    rft_stack_give(&stack, 0, UNIT); /* before one */
    assert_int_equal(stack.free[0].at, 0);
    rft_stack_give(&stack, 6 * UNIT, UNIT); /* after one */
    assert_int_equal(stack.free[0].bytes, 7 * UNIT);
    assert_int_equal(stack.top, 8 * UNIT);
    rft_stack_give(&stack, 7 * UNIT, UNIT); /* the top falls through it */
    assert_int_equal(stack.top, 0);
    assert_int_equal(stack.free_count, 0);
    rft_stack_close(&stack);
}

TEST(free_pieces_are_used_where_the_top_has_no_room)
{
    rft_stack stack = {.room = 10 * UNIT};
    assert_int_equal(take(&stack, 4 * UNIT, false), 0);
    assert_int_equal(take(&stack, UNIT, false), 4 * UNIT);
    assert_int_equal(take(&stack, 2 * UNIT, false), 5 * UNIT);
    assert_int_equal(take(&stack, UNIT, false), 7 * UNIT);
    rft_stack_give(&stack, 0, 4 * UNIT);
    rft_stack_give(&stack, 5 * UNIT, 2 * UNIT);
    assert_int_equal(take(&stack, 2 * UNIT, false), 8 * UNIT); /* on top */
    assert_int_equal(take(&stack, 5 * UNIT, true), UINT64_MAX);
    assert_int_equal(take(&stack, 3 * UNIT, true), 0);
    assert_int_equal(take(&stack, 2 * UNIT, true), 5 * UNIT); /* the first has 1 left */
    assert_int_equal(take(&stack, 2 * UNIT, true), UINT64_MAX);
    assert_int_equal(take(&stack, UNIT, true), 3 * UNIT);
    assert_int_equal(take(&stack, 1, true), UINT64_MAX);
    assert_int_equal(stack.used, stack.room);
    rft_stack_close(&stack);
}

TEST(sizes_beyond_all_addresses_have_no_room)
{
    rft_stack stack = {.room = 0};
    assert_int_equal(take(&stack, 1, false), UINT64_MAX);
    stack.room = 4 * UNIT;
    assert_int_equal(take(&stack, UINT64_MAX, false), UINT64_MAX);
    assert_int_equal(take(&stack, UINT64_MAX - 511, false), UINT64_MAX);
    assert_int_equal(take(&stack, 4 * UNIT, false), 0);
    rft_stack_close(&stack);
}

/* ---- Against a plain map of units -------------------------------------------------------------
 */

typedef struct model {
    bool taken[ROOM];
    uint64_t at[PIECES]; /* in units */
    uint64_t bytes[PIECES];
    uint32_t count;
} model;

static uint64_t units_of(uint64_t bytes)
{
    return (bytes + UNIT - 1) / UNIT;
}

static void mark(model *on, uint64_t at, uint64_t count, bool taken)
{
    for (uint64_t i = at; i < at + count; i++) {
        assert_true(i < ROOM && on->taken[i] != taken);
        on->taken[i] = taken;
    }
}

/* The longest run of units that are free. */
static uint64_t longest_free(const model *on)
{
    uint64_t most = 0;
    for (uint64_t i = 0, run = 0; i < ROOM; i++) {
        run = on->taken[i] ? 0 : run + 1;
        if (run > most) most = run;
    }
    return most;
}

/* The lists say the same as the map. */
static void check(const rft_stack *stack, const model *on)
{
    uint64_t used = 0, top = 0;
    for (uint64_t i = 0; i < ROOM; i++) {
        used += on->taken[i];
        if (on->taken[i]) top = i + 1;
    }
    assert_int_equal(stack->used, used * UNIT);
    assert_int_equal(stack->top, top * UNIT);
    assert_int_equal(stack->taken, on->count);
    assert_true(stack->free_count <= stack->free_room);
    uint64_t free = 0, before = UINT64_MAX;
    for (uint32_t i = 0; i < stack->free_count; i++) {
        const rft_stack_piece *piece = &stack->free[i];
        assert_true(piece->bytes > 0 && (i == 0 || piece->at > before));
        before = piece->at + piece->bytes;
        for (uint64_t at = piece->at; at < before; at += UNIT)
            assert_false(on->taken[at / UNIT]);
        free += piece->bytes;
    }
    assert_int_equal(free + stack->used, stack->top);
}

TEST(any_order_keeps_its_books)
{
    for (uint64_t run = 1; run <= 40; run++) {
        uint64_t seed = run * 7919;
        model on = {.count = 0};
        rft_stack stack = {.room = ROOM * UNIT};
        for (uint32_t step = 0; step < 1500; step++) {
            bool takes = on.count < PIECES && (on.count == 0 || seeded_below(&seed, 100) < 52);
            if (takes) {
                uint64_t bytes = 1 + seeded_below(&seed, run % 2 == 0 ? 4 * UNIT : 30 * UNIT);
                uint64_t longest = longest_free(&on), at = UINT64_MAX;
                bool placed, below;
                assert_int_equal(rft_stack_take(&stack, bytes, &at, &placed, &below, NULL), 0);
                assert_int_equal(placed, units_of(bytes) <= longest);
                if (!placed) continue;
                mark(&on, at / UNIT, units_of(bytes), true);
                on.at[on.count] = at / UNIT;
                on.bytes[on.count++] = bytes;
            } else {
                /* Often the last, as a stack has it. */
                uint32_t index = seeded_below(&seed, 3) == 0
                                     ? (uint32_t)seeded_below(&seed, on.count)
                                     : on.count - 1;
                rft_stack_give(&stack, on.at[index] * UNIT, on.bytes[index]);
                mark(&on, on.at[index], units_of(on.bytes[index]), false);
                on.count--;
                on.at[index] = on.at[on.count];
                on.bytes[index] = on.bytes[on.count];
            }
            check(&stack, &on);
        }
        rft_stack_close(&stack);
    }
}

TEST(a_take_without_memory_changes_nothing)
{
    failing_alloc_begin(2);
    rft_stack stack = {.room = 1000 * UNIT};
    for (uint64_t i = 0; i < 64; i++)
        assert_int_equal(take(&stack, 1, false), i * UNIT);
    uint64_t at;
    bool placed, below;
    refit_error error;
    assert_int_equal(rft_stack_take(&stack, 1, &at, &placed, &below, &error),
                     REFIT_ERR_HOST_MEMORY);
    assert_int_equal(stack.used, 64 * UNIT);
    for (uint64_t i = 0; i < 64; i += 2) {
        rft_stack_give(&stack, i * UNIT, 1); /* needs none */
    }
    assert_int_equal(take(&stack, 1, false), 64 * UNIT);
    rft_stack_close(&stack);
    assert_true(failing_alloc_end());
}

int main(void)
{
    return test_run("activation_stack");
}
