/* Slab pins: each slab is locked once it is touched, in order, and a failure leaves none locked. */
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "memory/slab_pins.h"
#include "tests/support/bare_device.h"
#include "tests/support/test.h"

#define SLABS      4
#define SLAB_BYTES (16 * MIB)
#define BYTES      (SLABS * SLAB_BYTES)

/* A device that can only page-lock, and looks at what it is given. */
typedef struct locker {
    char *base;
    uint32_t locks;
    uint32_t unlocks;
    uint32_t fail_nth; /* 0: none */
    refit_status status;
    uint32_t stop_nth; /* tells `token` to stop */
    rft_cancel_token *token;
    uint32_t untouched; /* slabs that were not whole when they came */
    bool tail_touched;  /* the last slab was there when the first one came */
    bool no_tail;       /* the last slab is not mapped */
} locker;

static uint64_t count_resident(char *base, uint64_t bytes)
{
    static unsigned char resident[SLAB_BYTES / 4096];
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t count = 0;
    assert_int_equal(mincore(base, bytes, resident), 0);
    for (uint64_t i = 0; i < bytes / page; i++)
        count += resident[i] & 1u;
    return count * page;
}

static refit_status lock_slab(void *self, void *memory, uint64_t bytes, bool read_only,
                              refit_error *error)
{
    (void)read_only;
    locker *it = self;
    uint32_t nth = ++it->locks;
    if (nth == 1 && !it->no_tail) {
        it->tail_touched = count_resident(it->base + 3 * SLAB_BYTES, SLAB_BYTES) > 0;
    }
    if (count_resident(memory, bytes) != bytes) it->untouched++;
    if ((char *)memory != it->base + (nth - 1) * SLAB_BYTES) it->untouched++;
    if (nth == it->stop_nth) rft_cancel_token_stop(it->token);
    if (nth != it->fail_nth) return REFIT_OK;
    return rft_fail_sub(error, it->status, 12, "%llu bytes stay as they are",
                        (unsigned long long)bytes);
}

static void unlock_slab(void *self, void *memory, uint64_t bytes)
{
    (void)memory, (void)bytes;
    ((locker *)self)->unlocks++;
}

typedef struct fixture {
    locker locker;
    refit_device *device;
    rft_cancel_token token;
    rft_slab slabs[SLABS];
    rft_slab_pins pins;
    refit_error error;
} fixture;

static fixture all;

static int set_up(void **state)
{
    rft_device_ops ops = bare_device_ops;
    ops.kind = "locker";
    ops.host_pin = lock_slab;
    ops.host_unpin = unlock_slab;
    memset(&all, 0, sizeof all);
    assert_ok(rft_cancel_token_open(&all.token, NULL));
    assert_ok(rft_device_make(&ops, &all.locker, &all.device, NULL));
    for (uint32_t i = 0; i < SLABS; i++)
        all.slabs[i] = (rft_slab){i * SLAB_BYTES, SLAB_BYTES};
    char *base = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(base != MAP_FAILED);
    all.locker.base = base;
    all.locker.token = &all.token;
    all.pins = (rft_slab_pins){.device = all.device,
                               .base = base,
                               .bytes = BYTES,
                               .slabs = all.slabs,
                               .count = SLABS,
                               .near = -1};
    return 0;
}

static int tear_down(void **state)
{
    munmap(all.locker.base, BYTES);
    rft_cancel_token_close(&all.token);
    return refit_device_close(all.device, NULL) == REFIT_OK ? 0 : -1;
}

#define PINS_TEST(name) TEST_WITH(name, set_up, tear_down)

static refit_status take(refit_pin wanted)
{
    return rft_slab_pins_take(&all.pins, wanted, &all.token, &all.error);
}

PINS_TEST(each_slab_is_locked_once_it_is_touched)
{
    const uint32_t threads[] = {0, 1, 2, 5};
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(madvise(all.locker.base, BYTES, MADV_DONTNEED), 0);
        all.locker.locks = 0;
        all.pins.touch_threads = threads[i];
        assert_ok(take(REFIT_PIN_REQUIRE));
        assert_int_equal(all.locker.locks, SLABS);
        assert_int_equal(all.locker.untouched, 0);
        assert_int_equal(all.pins.pinned, SLABS);
        assert_int_equal(atomic_load(&all.token.ready), BYTES);
        rft_slab_pins_drop(&all.pins);
        assert_int_equal(all.locker.unlocks, SLABS * (i + 1));
        assert_int_equal(all.pins.pinned, 0);
    }
}

/* One thread does both, so what it has not come to yet is not there. */
PINS_TEST(the_first_slab_does_not_wait_for_the_last)
{
    all.pins.touch_threads = 1;
    assert_ok(take(REFIT_PIN_REQUIRE));
    assert_false(all.locker.tail_touched);
    rft_slab_pins_drop(&all.pins);
}

PINS_TEST(a_lock_that_fails_undoes_those_before_it)
{
    all.locker.status = REFIT_ERR_PIN;
    for (uint32_t nth = 1; nth <= SLABS; nth++) {
        all.locker.locks = all.locker.unlocks = 0;
        all.locker.fail_nth = nth;
        assert_int_equal(take(REFIT_PIN_REQUIRE), REFIT_ERR_PIN);
        assert_int_equal(all.locker.unlocks, nth - 1);
        assert_int_equal(all.pins.pinned, 0);
        assert_int_equal(all.error.status, REFIT_ERR_PIN);
        assert_int_equal(all.error.subsystem, 12);
        char text[80];
        snprintf(text, sizeof text, "slab %u of 4: 16777216 bytes stay as they are", nth);
        assert_string_equal(all.error.text, text);
    }
}

PINS_TEST(a_preferred_lock_that_fails_leaves_all_of_it_touched)
{
    const refit_status forgiven[] = {REFIT_ERR_PIN, REFIT_ERR_UNSUPPORTED};
    for (size_t i = 0; i < 2; i++) {
        all.locker.locks = all.locker.unlocks = 0;
        all.locker.fail_nth = 3;
        all.locker.status = forgiven[i];
        assert_int_equal(madvise(all.locker.base, BYTES, MADV_DONTNEED), 0);
        assert_ok(take(REFIT_PIN_PREFER));
        assert_int_equal(all.locker.locks, 3);
        assert_int_equal(all.locker.unlocks, 2);
        assert_int_equal(all.pins.pinned, 0);
        assert_int_equal(count_resident(all.locker.base + 3 * SLAB_BYTES, SLAB_BYTES), SLAB_BYTES);
        assert_int_equal(atomic_load(&all.token.ready), BYTES);
    }
}

/* One call, and the locks that it made and undid. */
typedef struct take_case {
    const char *name;
    refit_pin wanted;
    uint32_t fail_nth; /* with `fault` */
    refit_status fault;
    uint32_t stop_nth;
    refit_status status;
    uint32_t locks;
    uint32_t unlocks;
} take_case;

static const take_case takes[] = {
    /* Pageable memory would not help: the device is lost. */
    {"a lost device, where locks are preferred", REFIT_PIN_PREFER, 2, REFIT_ERR_DEVICE, 0,
     REFIT_ERR_DEVICE, 2, 1},
    {"a lost device, where locks are required", REFIT_PIN_REQUIRE, 2, REFIT_ERR_DEVICE, 0,
     REFIT_ERR_DEVICE, 2, 1},
    {"a device without locks", REFIT_PIN_REQUIRE, 1, REFIT_ERR_UNSUPPORTED, 0, REFIT_ERR_PIN, 1, 0},
    {"no locks wanted", REFIT_PIN_OFF, 0, REFIT_OK, 0, REFIT_OK, 0, 0},
    {"a stop between two slabs", REFIT_PIN_REQUIRE, 0, REFIT_OK, 2, REFIT_ERR_CANCELLED, 2, 2},
    {"a stop after the last slab", REFIT_PIN_REQUIRE, 0, REFIT_OK, SLABS, REFIT_ERR_CANCELLED,
     SLABS, SLABS},
};

static void each_end_leaves_all_locks_or_none(void **state)
{
    const take_case *it = *state;
    all.locker.fail_nth = it->fail_nth;
    all.locker.status = it->fault;
    all.locker.stop_nth = it->stop_nth;
    assert_int_equal(take(it->wanted), it->status);
    if (it->status != REFIT_OK) assert_int_equal(all.error.status, it->status);
    assert_int_equal(all.locker.locks, it->locks);
    assert_int_equal(all.locker.unlocks, it->unlocks);
    assert_int_equal(all.pins.pinned, 0);
    assert_int_equal(count_resident(all.locker.base, SLAB_BYTES), SLAB_BYTES);
}

PINS_TEST(memory_that_cannot_be_touched_undoes_the_locks)
{
    munmap(all.locker.base + BYTES - SLAB_BYTES, SLAB_BYTES);
    all.pins.touch_threads = 1;
    all.locker.no_tail = true;
    assert_int_equal(take(REFIT_PIN_REQUIRE), REFIT_ERR_HOST_MEMORY);
    assert_int_equal(all.locker.locks, SLABS - 1);
    assert_int_equal(all.locker.unlocks, SLABS - 1);
    assert_int_equal(all.pins.pinned, 0);
}

int main(void)
{
    for (size_t i = 0; i < COUNT_OF(takes); i++)
        test_list((struct CMUnitTest){.name = takes[i].name,
                                      .test_func = each_end_leaves_all_locks_or_none,
                                      .setup_func = set_up,
                                      .teardown_func = tear_down,
                                      .initial_state = (void *)(uintptr_t)&takes[i]});
    return test_run("slab_pins");
}
