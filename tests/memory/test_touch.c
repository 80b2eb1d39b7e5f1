/* Touch and huge pages: pages get memory, keep what they held, and refusals are errors. */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory/host_arena.h"
#include "memory/slab_pins.h"
#include "tests/support/test.h"

#define BYTES (40 * MIB + 12288)

static uint64_t count_resident(char *from, uint64_t bytes)
{
    static unsigned char resident[16384];
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t count = 0;
    assert_true(bytes / page <= sizeof resident);
    assert_int_equal(mincore(from, bytes, resident), 0);
    for (uint64_t i = 0; i < bytes / page; i++)
        count += resident[i] & 1u;
    return count * page;
}

static char *base; /* BYTES without memory */
static rft_cancel_token token;
static rft_touch touch;
static atomic_uint_fast64_t left; /* as others see it */

static int begin(void **state)
{
    base = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(base, MAP_FAILED);
    assert_ok(rft_cancel_token_open(&token, NULL));
    assert_null(token.left);
    atomic_store(&left, BYTES);
    token.left = &left;
    return 0;
}

static int end(void **state)
{
    rft_cancel_token_close(&token);
    munmap(base, BYTES);
    return 0;
}

#define TOUCH_TEST(name) TEST_WITH(name, begin, end)

static void open_touch(uint64_t bytes, uint32_t threads, int near)
{
    assert_ok(rft_touch_open(&touch, base, bytes, 0, threads, near, &token, NULL));
}

TOUCH_TEST(every_page_is_touched_by_any_number_of_threads)
{
    const uint32_t threads[] = {0, 1, 2, 7, 1000};
    for (size_t i = 0; i < COUNT_OF(threads); i++) {
        (void)end(state);
        (void)begin(state);
        base[BYTES - 1] = 'x';
        open_touch(BYTES, threads[i], i % 2 == 0 ? -1 : 0);
        assert_ok(rft_touch_reach(&touch, BYTES, NULL));
        rft_touch_close(&touch);
        assert_int_equal(atomic_load(&token.taken), BYTES);
        assert_int_equal(atomic_load(&left), 0);
        assert_int_equal(count_resident(base, BYTES), BYTES);
        assert_int_equal(base[BYTES - 1], 'x');
        assert_int_equal(base[0], 0);
    }
}

TOUCH_TEST(pages_that_cannot_be_had_are_an_error)
{
    refit_error error = {0};
    munmap(base + BYTES - 4096, 4096);
    open_touch(BYTES, 2, -1);
    assert_int_equal(rft_touch_reach(&touch, BYTES, &error), REFIT_ERR_HOST_MEMORY);
    rft_touch_close(&touch);
    assert_int_equal(error.status, REFIT_ERR_HOST_MEMORY);
    assert_true(error.subsystem != 0);
}

/* One thread touches no further than it must, so that what is not there can be seen not to be. */
TOUCH_TEST(what_is_reached_is_touched_before_the_rest)
{
    open_touch(BYTES, 1, -1);
    assert_ok(rft_touch_reach(&touch, MIB, NULL));
    assert_int_equal(count_resident(base, MIB), MIB);
    assert_int_equal(count_resident(base + BYTES - MIB, MIB), 0);
    uint64_t taken = atomic_load(&token.taken);
    assert_in_range(taken, MIB, BYTES - MIB);
    assert_int_equal(count_resident(base, taken), taken);
    assert_int_equal(atomic_load(&left), BYTES - taken);
    rft_touch_close(&touch);
    assert_int_equal(count_resident(base + BYTES - MIB, MIB), 0);
}

TOUCH_TEST(a_stop_ends_it)
{
    rft_cancel_token_stop(&token);
    open_touch(BYTES, 3, -1);
    assert_refused(rft_touch_reach(&touch, 1, error), REFIT_ERR_CANCELLED, "");
    rft_touch_close(&touch);
    assert_int_equal(count_resident(base, BYTES), 0);
    assert_int_equal(atomic_load(&left), BYTES);
}

/* Helpers take their chunks one after another because of it. */
TOUCH_TEST(the_lock_lasts_until_it_is_closed)
{
    open_touch(BYTES, 2, -1);
    rft_lock(&touch.lock);
    assert_int_equal(pthread_mutex_trylock(&touch.lock), EBUSY);
    rft_unlock(&touch.lock);
    assert_ok(rft_touch_reach(&touch, BYTES, NULL));
    rft_touch_close(&touch);
}

TOUCH_TEST(touching_nothing_is_no_error)
{
    open_touch(0, 0, -1);
    assert_ok(rft_touch_reach(&touch, 0, NULL));
    rft_touch_close(&touch);
    assert_int_equal(count_resident(base, BYTES), 0);
    assert_int_equal(atomic_load(&left), BYTES);
}

TOUCH_TEST(huge_pages_are_asked_for_as_wanted)
{
    assert_false(rft_huge_pages_ask(base, BYTES, REFIT_HUGE_PAGES_NEVER, false));
    assert_false(rft_huge_pages_ask(base, MIB, REFIT_HUGE_PAGES_ALWAYS, false)); /* too small */
    assert_int_equal(count_resident(base, BYTES), 0);
    base[5] = 'x';
    (void)rft_huge_pages_ask(base, BYTES, REFIT_HUGE_PAGES_AUTO, false); /* the machine decides */
    assert_int_equal(base[5], 'x');
}

int main(void)
{
    return test_run("touch");
}
