/* Every device with arenas: addresses stay, memory comes and goes and counts against the capacity.
 */
#include "tests/device/every_device.h"

#include <string.h>

/* A reservation of `pages` granules, none of them committed. */
typedef struct arena {
    char *base;
    uint64_t page;
} arena;

static arena reserve(fixture *on, uint64_t pages)
{
    void *base;
    arena made;
    if (!rft_device_get_caps(on->device).stable_arena) skip();
    /* How large a page is, is known only afterwards. */
    assert_ok(rft_device_reserve(on->device, 1, &base, &made.page, &on->error));
    rft_device_unreserve(on->device, base, made.page);
    assert_ok(rft_device_reserve(on->device, pages * made.page, &base, &made.page, &on->error));
    assert_int_equal((uintptr_t)base % made.page, 0);
    made.base = base;
    return made;
}

static refit_status commit(fixture *on, arena in, uint64_t first, uint64_t pages)
{
    return rft_device_commit(on->device, in.base + first * in.page, pages * in.page, &on->error);
}

static refit_status decommit(fixture *on, arena in, uint64_t first, uint64_t pages)
{
    return rft_device_decommit(on->device, in.base + first * in.page, pages * in.page, NULL,
                               &on->error);
}

static void addresses_cost_nothing(void **state)
{
    fixture *on = *state;
    arena in = reserve(on, 100);
    assert_int_equal(device_used(on), 0);
    rft_device_unreserve(on->device, in.base, 100 * in.page);
    void *far;
    assert_ok(rft_device_reserve(on->device, 16 * DEVICE_BYTES, &far, &in.page, &on->error));
    assert_int_equal(device_used(on), 0);
    rft_device_unreserve(on->device, far, 16 * DEVICE_BYTES);
}

static void committed_pages_hold_bytes_until_they_go(void **state)
{
    fixture *on = *state;
    arena in = reserve(on, 8);
    assert_ok(commit(on, in, 0, 8));
    assert_int_equal(device_used(on), 8 * in.page);
    device_fill(on, in.base, 8 * in.page, 4);
    assert_ok(decommit(on, in, 2, 3));
    assert_int_equal(device_used(on), 5 * in.page);
    assert_int_equal(device_right(on, in.base, 2 * in.page, 4), 2 * in.page);
    assert_ok(commit(on, in, 2, 3));
    assert_int_equal(device_used(on), 8 * in.page);
    /* The neighbours were not touched; what was gone is not the pattern any more. */
    assert_int_equal(device_right(on, in.base, 2 * in.page, 4), 2 * in.page);
    assert_in_range(device_right(on, in.base, 8 * in.page, 4), 5 * in.page, 6 * in.page);
    rft_device_unreserve(on->device, in.base, 8 * in.page);
    assert_int_equal(device_used(on), 0);
}

static void commit_and_decommit_may_be_repeated(void **state)
{
    fixture *on = *state;
    arena in = reserve(on, 10);
    assert_ok(decommit(on, in, 0, 10));
    assert_ok(commit(on, in, 3, 2));
    assert_ok(commit(on, in, 3, 2));
    device_fill(on, in.base + 3 * in.page, in.page, 8);
    assert_ok(commit(on, in, 0, 10));
    assert_int_equal(device_used(on), 10 * in.page);
    assert_int_equal(device_right(on, in.base + 3 * in.page, in.page, 8), in.page);
    assert_ok(decommit(on, in, 1, 8));
    assert_ok(decommit(on, in, 0, 10));
    assert_ok(decommit(on, in, 0, 10));
    assert_int_equal(device_used(on), 0);
    rft_device_unreserve(on->device, in.base, 10 * in.page);
}

static void single_pages_add_up(void **state)
{
    fixture *on = *state;
    enum { PAGES = 101 };
    arena in = reserve(on, PAGES);
    for (uint64_t i = 0; i < PAGES; i++) {
        assert_ok(commit(on, in, i * 37 % PAGES, 1));
        assert_int_equal(device_used(on), (i + 1) * in.page);
    }
    for (uint64_t i = 0; i < PAGES; i++) {
        assert_ok(decommit(on, in, i * 53 % PAGES, 1));
        assert_int_equal(device_used(on), (PAGES - 1 - i) * in.page);
    }
    rft_device_unreserve(on->device, in.base, PAGES * in.page);
}

static void a_full_device_commits_nothing(void **state)
{
    fixture *on = *state;
    arena in = reserve(on, 4);
    uint64_t pages = DEVICE_BYTES / in.page;
    rft_device_unreserve(on->device, in.base, 4 * in.page);
    in = reserve(on, 2 * pages);
    void *memory;
    assert_ok(refit_memory_alloc(on->device, in.page * 2, &memory, &on->error));
    assert_ok(commit(on, in, 0, 1));
    assert_int_equal(commit(on, in, 0, pages - 1), REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(device_used(on), 3 * in.page);
    assert_ok(commit(on, in, 0, pages - 2));
    assert_int_equal(device_used(on), DEVICE_BYTES);
    void *extra;
    assert_int_equal(refit_memory_alloc(on->device, 1, &extra, NULL), REFIT_ERR_DEVICE_MEMORY);
    assert_ok(refit_memory_free(on->device, memory, &on->error));
    assert_ok(commit(on, in, pages, 2));
    rft_device_unreserve(on->device, in.base, 2 * pages * in.page);
    assert_int_equal(device_used(on), 0);
}

static void what_lies_outside_is_refused(void **state)
{
    fixture *on = *state;
    arena in = reserve(on, 4);
    assert_int_equal(commit(on, in, 3, 2), REFIT_ERR_INVALID);
    assert_int_equal(decommit(on, in, 4, 1), REFIT_ERR_INVALID);
    assert_int_equal(rft_device_commit(on->device, in.base + 1, in.page, NULL), REFIT_ERR_INVALID);
    assert_int_equal(rft_device_commit(on->device, in.base, in.page + 1, NULL), REFIT_ERR_INVALID);
    assert_int_equal(rft_device_commit(on->device, in.base, UINT64_MAX - in.page + 1, NULL),
                     REFIT_ERR_INVALID);
    void *base;
    uint64_t granule;
    assert_int_equal(rft_device_reserve(on->device, 0, &base, &granule, NULL), REFIT_ERR_INVALID);
    assert_int_not_equal(rft_device_reserve(on->device, UINT64_MAX, &base, &granule, NULL),
                         REFIT_OK);
    assert_int_equal(device_used(on), 0);
    rft_device_unreserve(on->device, in.base, 4 * in.page);
}

static void a_copy_to_memory_that_is_gone_fails_once(void **state)
{
    fixture *on = *state;
    arena in = reserve(on, 4);
    char bytes[64] = {0};
    rft_event *event;
    assert_ok(rft_device_event_open(on->device, &event, &on->error));
    assert_ok(commit(on, in, 0, 1));
    /* The second copy crosses the end of the committed page. */
    assert_ok(refit_stream_copy(on->device, on->stream, in.base, bytes, sizeof bytes, &on->error));
    assert_ok(refit_stream_copy(on->device, on->stream, in.base + in.page - 32, bytes, sizeof bytes,
                                &on->error));
    assert_ok(rft_device_event_record(on->device, event, on->stream, &on->error));
    assert_int_equal(rft_device_event_wait(on->device, event, PATIENCE_MS, &on->error),
                     REFIT_ERR_COPY);
    assert_int_equal(on->error.status, REFIT_ERR_COPY);
    /* Every waiter hears it, until the event is recorded again; then the stream is clean. */
    assert_int_equal(rft_device_event_wait(on->device, event, 0, NULL), REFIT_ERR_COPY);
    assert_ok(refit_stream_wait(on->device, on->stream, PATIENCE_MS, &on->error));
    assert_ok(rft_device_event_record(on->device, event, on->stream, &on->error));
    assert_ok(rft_device_event_wait(on->device, event, PATIENCE_MS, &on->error));

    assert_int_equal(refit_stream_copy(on->device, REFIT_STREAM_NONE, bytes, in.base + in.page,
                                       sizeof bytes, &on->error),
                     REFIT_ERR_COPY);
    assert_int_equal(rft_device_zero(on->device, REFIT_STREAM_NONE, in.base, 4 * in.page, NULL),
                     REFIT_ERR_COPY);
    rft_device_event_close(on->device, event);
    rft_device_unreserve(on->device, in.base, 4 * in.page);
}

static void a_failure_outlives_an_event_that_left(void **state)
{
    fixture *on = *state;
    arena in = reserve(on, 1);
    char byte = 0;
    stream_gate before;
    rft_event *event;
    assert_ok(rft_device_event_open(on->device, &event, &on->error));
    gate_put(&before, on, on->stream);
    assert_ok(refit_stream_copy(on->device, on->stream, in.base, &byte, 1, &on->error));
    assert_ok(rft_device_event_record(on->device, event, on->stream, &on->error));
    assert_int_equal(refit_stream_wait(on->device, on->stream, 0, NULL), REFIT_ERR_TIMEOUT);
    rft_device_event_close(on->device, event);
    gate_open(&before);
    assert_int_equal(refit_stream_wait(on->device, on->stream, PATIENCE_MS, &on->error),
                     REFIT_ERR_COPY);
    assert_ok(refit_stream_wait(on->device, on->stream, PATIENCE_MS, &on->error));
    gate_close(&before);
    rft_device_unreserve(on->device, in.base, in.page);
}

/* As when a wait times out just before the work fails, and its event is closed just after. */
static void a_failure_outlives_an_event_that_nobody_asked(void **state)
{
    fixture *on = *state;
    arena in = reserve(on, 1);
    char byte = 0;
    rft_event *first, *second;
    assert_ok(rft_device_event_open(on->device, &first, &on->error));
    assert_ok(rft_device_event_open(on->device, &second, &on->error));
    assert_ok(refit_stream_copy(on->device, on->stream, in.base, &byte, 1, &on->error));
    assert_ok(rft_device_event_record(on->device, first, on->stream, &on->error));
    assert_ok(rft_device_event_record(on->device, second, on->stream, &on->error));
    assert_ok(rft_device_event_wait(on->device, second, PATIENCE_MS, &on->error));
    rft_device_event_close(on->device, first);
    rft_device_event_close(on->device, second);
    assert_int_equal(refit_stream_wait(on->device, on->stream, PATIENCE_MS, &on->error),
                     REFIT_ERR_COPY);
    assert_ok(refit_stream_wait(on->device, on->stream, PATIENCE_MS, &on->error));
    rft_device_unreserve(on->device, in.base, in.page);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(addresses_cost_nothing),
        cmocka_unit_test(committed_pages_hold_bytes_until_they_go),
        cmocka_unit_test(commit_and_decommit_may_be_repeated),
        cmocka_unit_test(single_pages_add_up),
        cmocka_unit_test(a_full_device_commits_nothing),
        cmocka_unit_test(what_lies_outside_is_refused),
        cmocka_unit_test(a_copy_to_memory_that_is_gone_fails_once),
        cmocka_unit_test(a_failure_outlives_an_event_that_left),
        cmocka_unit_test(a_failure_outlives_an_event_that_nobody_asked),
    };
    return run_on_every_device("arena", tests, sizeof tests / sizeof tests[0]);
}
