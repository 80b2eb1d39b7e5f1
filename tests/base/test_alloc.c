/* The allocation hook: whole or not at all, only while nothing is open, and sizes that never wrap.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <refit/host.h>

#include "base/alloc.h"
#include "tests/support/failing_alloc.h"

static void *allocate(void *user, size_t bytes)
{
    ++*(int *)user;
    return malloc(bytes);
}

static void *reallocate(void *user, void *block, size_t bytes)
{
    ++*(int *)user;
    return realloc(block, bytes);
}

static void release(void *user, void *block)
{
    --*(int *)user;
    free(block);
}

static void an_allocator_with_a_missing_function_is_refused(void **state)
{
    (void)state;
    refit_allocator whole = {sizeof whole, allocate, reallocate, release, NULL};
    refit_allocator part = whole;
    part.allocate = NULL;
    assert_int_equal(refit_set_allocator(&part), REFIT_ERR_INVALID);
    part = whole;
    part.reallocate = NULL;
    assert_int_equal(refit_set_allocator(&part), REFIT_ERR_INVALID);
    part = whole;
    part.release = NULL;
    assert_int_equal(refit_set_allocator(&part), REFIT_ERR_INVALID);
    part = whole;
    part.size = sizeof part - 1;
    assert_int_equal(refit_set_allocator(&part), REFIT_ERR_INVALID);
}

static void an_installed_allocator_serves_every_block(void **state)
{
    (void)state;
    int held = 0;
    refit_allocator counted = {sizeof counted, allocate, reallocate, release, &held};
    assert_int_equal(refit_set_allocator(&counted), REFIT_OK);
    void *block = rft_calloc(2, 8);
    assert_int_equal(held, 1);
    rft_free(block);
    assert_int_equal(held, 0);
    assert_int_equal(refit_set_allocator(NULL), REFIT_OK);
}

static void the_allocator_cannot_change_while_a_block_lives(void **state)
{
    (void)state;
    void *block = rft_calloc(1, 1);
    assert_int_equal(refit_set_allocator(NULL), REFIT_ERR_STATE);
    rft_free(block);
    assert_int_equal(refit_set_allocator(NULL), REFIT_OK);
}

static void sizes_that_overflow_or_are_nothing_give_no_block(void **state)
{
    (void)state;
    assert_null(rft_calloc(SIZE_MAX, 2));
    assert_null(rft_calloc(0, 8));
    void *block = rft_calloc(1, 8);
    assert_null(rft_realloc(block, SIZE_MAX / 2, 4));
    rft_free(block);
}

static void fresh_blocks_are_zeroed_and_grown_ones_keep_their_bytes(void **state)
{
    (void)state;
    unsigned char *block = rft_calloc(64, 1);
    for (int i = 0; i < 64; i++)
        assert_int_equal(block[i], 0);
    memset(block, 7, 64);
    block = rft_realloc(block, 4096, 1);
    for (int i = 0; i < 64; i++)
        assert_int_equal(block[i], 7);
    rft_free(block);
}

static void a_failed_request_leaves_the_old_block(void **state)
{
    (void)state;
    failing_alloc_begin(2);
    char *text = rft_strdup("kept");
    assert_null(rft_realloc(text, 100, 1));
    assert_string_equal(text, "kept");
    rft_free(text);
    assert_true(failing_alloc_end());
}

static void requests_are_counted(void **state)
{
    (void)state;
    uint64_t before = rft_alloc_count();
    rft_free(rft_calloc(1, 1));
    assert_int_equal(rft_alloc_count(), before + 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_allocator_with_a_missing_function_is_refused),
        cmocka_unit_test(an_installed_allocator_serves_every_block),
        cmocka_unit_test(the_allocator_cannot_change_while_a_block_lives),
        cmocka_unit_test(sizes_that_overflow_or_are_nothing_give_no_block),
        cmocka_unit_test(fresh_blocks_are_zeroed_and_grown_ones_keep_their_bytes),
        cmocka_unit_test(a_failed_request_leaves_the_old_block),
        cmocka_unit_test(requests_are_counted),
    };
    return cmocka_run_group_tests_name("alloc", tests, NULL, NULL);
}
