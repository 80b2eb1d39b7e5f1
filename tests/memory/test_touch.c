/* Touch and huge pages: pages get memory, keep what they held, and refusals are errors. */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory/host_arena.h"
#include "memory/slab_pins.h"
#include "tests/support/test.h"

#define BYTES (40 * MIB + 12288)

static char *map_fresh(uint64_t bytes)
{
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(base != MAP_FAILED);
    return base;
}

static uint64_t count_resident(char *base, uint64_t bytes)
{
    static unsigned char resident[16384];
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t count = 0;
    assert_true(bytes / page <= sizeof resident);
    assert_int_equal(mincore(base, bytes, resident), 0);
    for (uint64_t i = 0; i < bytes / page; i++) {
        count += resident[i] & 1u;
    }
    return count * page;
}

/* All of it, at once. */
static refit_status touch_all(void *base, uint64_t bytes, uint32_t threads, int near,
                              refit_error *error)
{
    rft_touch touch;
    rft_cancel_token token;
    assert_ok(rft_cancel_token_open(&token, NULL));
    assert_ok(rft_touch_open(&touch, base, bytes, threads, near, &token, NULL));
    refit_status status = rft_touch_reach(&touch, bytes, error);
    rft_touch_close(&touch);
    if (status == REFIT_OK) assert_int_equal(atomic_load(&token.taken), bytes);
    rft_cancel_token_close(&token);
    return status;
}

static void every_page_is_touched_by_any_number_of_threads(void **state)
{
    const uint32_t threads[] = {0, 1, 2, 7, 1000};
    for (size_t i = 0; i < COUNT_OF(threads); i++) {
        char *base = map_fresh(BYTES);
        base[BYTES - 1] = 'x';
        assert_ok(touch_all(base, BYTES, threads[i], i % 2 == 0 ? -1 : 0, NULL));
        assert_int_equal(count_resident(base, BYTES), BYTES);
        assert_int_equal(base[BYTES - 1], 'x');
        assert_int_equal(base[0], 0);
        munmap(base, BYTES);
    }
}

static void pages_that_cannot_be_had_are_an_error(void **state)
{
    char *base = map_fresh(BYTES);
    refit_error error = {0};
    munmap(base + BYTES - 4096, 4096);
    assert_int_equal(touch_all(base, BYTES, 2, -1, &error), REFIT_ERR_HOST_MEMORY);
    assert_int_equal(error.status, REFIT_ERR_HOST_MEMORY);
    assert_true(error.subsystem != 0);
    munmap(base, BYTES - 4096);
}

/* One thread touches no further than it must, so that what is behind can be seen not to be. */
static void what_is_reached_is_touched_before_the_rest(void **state)
{
    rft_touch touch;
    rft_cancel_token token;
    char *base = map_fresh(BYTES);
    assert_ok(rft_cancel_token_open(&token, NULL));
    assert_ok(rft_touch_open(&touch, base, BYTES, 1, -1, &token, NULL));
    assert_ok(rft_touch_reach(&touch, MIB, NULL));
    assert_int_equal(count_resident(base, MIB), MIB);
    assert_int_equal(count_resident(base + BYTES - MIB, MIB), 0);
    uint64_t taken = atomic_load(&token.taken);
    assert_in_range(taken, MIB, BYTES - MIB);
    assert_int_equal(count_resident(base, taken), taken);
    rft_touch_close(&touch);
    assert_int_equal(count_resident(base + BYTES - MIB, MIB), 0);
    rft_cancel_token_close(&token);
    munmap(base, BYTES);
}

static void a_stop_ends_it(void **state)
{
    rft_touch touch;
    rft_cancel_token token;
    refit_error error = {0};
    char *base = map_fresh(BYTES);
    assert_ok(rft_cancel_token_open(&token, NULL));
    rft_cancel_token_stop(&token);
    assert_ok(rft_touch_open(&touch, base, BYTES, 3, -1, &token, NULL));
    assert_int_equal(rft_touch_reach(&touch, 1, &error), REFIT_ERR_CANCELLED);
    assert_int_equal(error.status, REFIT_ERR_CANCELLED);
    rft_touch_close(&touch);
    assert_int_equal(count_resident(base, BYTES), 0);
    rft_cancel_token_close(&token);
    munmap(base, BYTES);
}

/* Helpers take their chunks one after another because of it. */
static void the_lock_lasts_until_it_is_closed(void **state)
{
    rft_touch touch;
    rft_cancel_token token;
    char *base = map_fresh(BYTES);
    assert_ok(rft_cancel_token_open(&token, NULL));
    assert_ok(rft_touch_open(&touch, base, BYTES, 2, -1, &token, NULL));
    rft_lock(&touch.lock);
    assert_int_equal(pthread_mutex_trylock(&touch.lock), EBUSY);
    rft_unlock(&touch.lock);
    assert_ok(rft_touch_reach(&touch, BYTES, NULL));
    rft_touch_close(&touch);
    rft_cancel_token_close(&token);
    munmap(base, BYTES);
}

static void touching_nothing_is_no_error(void **state)
{
    char *base = map_fresh(4096);
    assert_ok(touch_all(base, 0, 0, -1, NULL));
    assert_int_equal(count_resident(base, 4096), 0);
    munmap(base, 4096);
}

static void huge_pages_are_asked_for_as_wanted(void **state)
{
    char *base = map_fresh(BYTES);
    assert_false(rft_huge_pages_ask(base, BYTES, REFIT_HUGE_PAGES_NEVER));
    assert_false(rft_huge_pages_ask(base, MIB, REFIT_HUGE_PAGES_ALWAYS)); /* too small for one */
    assert_int_equal(count_resident(base, BYTES), 0);
    base[5] = 'x';
    (void)rft_huge_pages_ask(base, BYTES, REFIT_HUGE_PAGES_AUTO); /* the machine decides */
    assert_int_equal(base[5], 'x');
    munmap(base, BYTES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_page_is_touched_by_any_number_of_threads),
        cmocka_unit_test(pages_that_cannot_be_had_are_an_error),
        cmocka_unit_test(what_is_reached_is_touched_before_the_rest),
        cmocka_unit_test(a_stop_ends_it),
        cmocka_unit_test(the_lock_lasts_until_it_is_closed),
        cmocka_unit_test(touching_nothing_is_no_error),
        cmocka_unit_test(huge_pages_are_asked_for_as_wanted),
    };
    return cmocka_run_group_tests_name("touch", tests, NULL, NULL);
}
