/* Notes of overwritten bytes: undone from the newest on they restore all; if there is no room
 * nothing is changed; a reset gives their memory back. */
#include "subscriber/destinations.h"
#include "tests/support/mapped.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"

#define ELEMENTS 1000u

static const rft_delta_shape shape = {ELEMENTS, 4, RFT_DELTA_RAW};

/* Another value in one of `every` elements. */
static void make_next(uint32_t *next, const uint32_t *block, uint64_t *seed, uint64_t every)
{
    memcpy(next, block, ELEMENTS * sizeof *next);
    for (uint32_t i = 0; i < ELEMENTS; i++)
        if (seeded_below(seed, every) == 0) next[i] ^= 1u + (uint32_t)seeded_below(seed, 1000);
}

static uint32_t count_changed(const uint32_t *a, const uint32_t *b)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < ELEMENTS; i++)
        count += a[i] != b[i];
    return count;
}

TEST(notes_undone_from_the_newest_on_bring_all_back)
{
    static const uint64_t every[] = {1, 2, 7, 100, 1000000};
    rft_rollback rollback = {.last = UINT64_MAX};
    static uint32_t block[ELEMENTS], next[ELEMENTS], versions[6][ELEMENTS];
    uint64_t seed = 3;
    uint32_t changed, notes = 0;
    assert_true(rft_rollback_is_empty(&rollback));
    assert_ok(rft_rollback_prepare(&rollback, 5, 5 * sizeof block, NULL));
    assert_true(rft_rollback_is_empty(&rollback));
    for (uint32_t i = 0; i < 5; i++) {
        memcpy(versions[i], block, sizeof block);
        make_next(next, block, &seed, every[i]);
        uint32_t expected = count_changed(block, next);
        rft_note_place place = {.destination = i, .offset = 8 * i};
        assert_ok(rft_rollback_change(&rollback, place, shape, block, next, &changed, NULL));
        assert_int_equal(changed, expected);
        assert_memory_equal(block, next, sizeof block);
        notes += expected > 0;
    }
    assert_false(rft_rollback_is_empty(&rollback));
    rft_note note = {.next = rollback.last};
    for (; note.next != UINT64_MAX; notes--) {
        rft_rollback_read(&rollback, note.next, &note);
        assert_int_equal(note.place.offset, 8 * note.place.destination);
        assert_int_equal(rft_note_bytes(&note), sizeof block);
        rft_note_undo(&note, (unsigned char *)block);
        assert_memory_equal(block, versions[note.place.destination], sizeof block);
    }
    assert_int_equal(notes, 0);
    rft_rollback_reset(&rollback);
}

TEST(without_room_nothing_is_changed)
{
    rft_rollback rollback = {.last = UINT64_MAX};
    static uint32_t block[ELEMENTS], next[ELEMENTS], before[ELEMENTS];
    uint64_t seed = 4;
    uint32_t changed = 77;
    refit_error error;
    refit_status status = REFIT_OK;
    assert_ok(rft_rollback_prepare(&rollback, 1, sizeof block, NULL));
    while (status == REFIT_OK) {
        memcpy(before, block, sizeof block);
        make_next(next, block, &seed, 1);
        status = rft_rollback_change(&rollback, (rft_note_place){0}, shape, block, next, &changed,
                                     &error);
    }
    assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    assert_says(&error, "no room");
    assert_memory_equal(block, before, sizeof block);
    assert_int_equal(changed, 0);
    assert_ok(rft_rollback_change(&rollback, (rft_note_place){0}, shape, block, before, &changed,
                                  &error)); /* what changes nothing needs no room */
    rft_rollback_reset(&rollback);
}

TEST(a_reset_gives_the_memory_back)
{
    rft_rollback rollback = {.last = UINT64_MAX};
    static uint32_t block[ELEMENTS], next[ELEMENTS] = {5};
    uint32_t changed;
    rft_rollback_reset(&rollback);
    for (int round = 0; round < 2; round++) {
        assert_ok(rft_rollback_prepare(&rollback, 1, sizeof block, NULL));
        const unsigned char *there = rollback.memory.memory;
        block[0] = 1;
        assert_ok(rft_rollback_change(&rollback, (rft_note_place){0}, shape, block, next, &changed,
                                      NULL));
        assert_ok(rft_rollback_prepare(&rollback, 1, sizeof block, NULL));
        assert_ptr_equal(rollback.memory.memory, there); /* what is noted stays */
        assert_false(rft_rollback_is_empty(&rollback));
        rft_rollback_reset(&rollback);
        assert_true(rft_rollback_is_empty(&rollback));
        assert_false(is_mapped(there));
    }
}

TEST(sizes_beyond_64_bits_are_refused)
{
    rft_rollback rollback = {.last = UINT64_MAX};
    assert_int_equal(rft_rollback_prepare(&rollback, UINT64_MAX, 1, NULL), REFIT_ERR_HOST_MEMORY);
    assert_int_equal(rft_rollback_prepare(&rollback, 1, UINT64_MAX, NULL), REFIT_ERR_HOST_MEMORY);
    assert_int_equal(rft_rollback_prepare(&rollback, 1, UINT64_MAX - 200, NULL),
                     REFIT_ERR_HOST_MEMORY);
    assert_true(rft_rollback_is_empty(&rollback));
    rft_rollback_reset(&rollback);
}

int main(void)
{
    return test_run("rollback");
}
