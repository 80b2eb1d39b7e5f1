/* The allocation hook: whole or not at all, only while nothing is open, and malloc afterwards. */
#include <stdlib.h>

#include <refit/host.h>

#include "base/alloc.h"
#include "tests/support/test.h"

static void *count_allocate(void *user, size_t bytes)
{
    ++*(unsigned *)user;
    void *block = malloc(bytes);
    if (block != NULL) memset(block, 0xCD, bytes);
    return block;
}

static void *count_reallocate(void *user, void *block, size_t bytes)
{
    ++*(unsigned *)user;
    return realloc(block, bytes);
}

static void just_release(void *user, void *block)
{
    (void)user;
    free(block);
}

static refit_allocator counting(unsigned *calls)
{
    return (refit_allocator){sizeof(refit_allocator), count_allocate, count_reallocate,
                             just_release, calls};
}

TEST(an_allocator_is_whole_or_refused)
{
    unsigned calls = 0;
    refit_allocator part = counting(&calls);
    part.allocate = NULL;
    assert_invalid(refit_set_allocator(&part));
    part = counting(&calls);
    part.reallocate = NULL;
    assert_invalid(refit_set_allocator(&part));
    part = counting(&calls);
    part.release = NULL;
    assert_invalid(refit_set_allocator(&part));
    part = counting(&calls);
    part.size--;
    assert_invalid(refit_set_allocator(&part));
    rft_free(rft_calloc(1, 1));
    assert_int_equal(calls, 0);
}

TEST(it_serves_all_until_malloc_is_back)
{
    unsigned calls = 0;
    refit_allocator allocator = counting(&calls);
    assert_ok(refit_set_allocator(&allocator));
    char *block = rft_calloc(3, 5);
    assert_non_null(block);
    assert_int_equal(calls, 1);
    for (size_t i = 0; i < 15; i++)
        assert_int_equal(block[i], 0);
    block = rft_realloc(block, 100, 1);
    assert_non_null(block);
    assert_int_equal(calls, 2);
    rft_free(block);
    assert_ok(refit_set_allocator(NULL));
    rft_free(rft_strdup("text"));
    assert_int_equal(calls, 2);
}

TEST(it_stays_while_a_block_lives)
{
    unsigned calls = 0;
    refit_allocator allocator = counting(&calls);
    void *block = rft_calloc(1, 8);
    assert_int_equal(refit_set_allocator(&allocator), REFIT_ERR_STATE);
    assert_int_equal(refit_set_allocator(NULL), REFIT_ERR_STATE);
    rft_free(block);
    assert_ok(refit_set_allocator(&allocator));
    assert_ok(refit_set_allocator(NULL));
}

TEST(sizes_that_overflow_get_nothing)
{
    void *block = rft_calloc(1, 8);
    uint64_t before = rft_alloc_count();
    assert_null(rft_calloc(SIZE_MAX / 2, 3));
    assert_null(rft_realloc(block, SIZE_MAX / 2, 3));
    assert_int_equal(rft_alloc_count(), before);
    rft_free(block);
    rft_free(NULL);
}

int main(void)
{
    return test_run("alloc");
}
