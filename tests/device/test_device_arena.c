/* Every device with arenas: addresses stay, memory comes, goes and counts against the capacity. */
#include "tests/device/every_device.h"

#include "base/checked.h"
#include "tests/support/seeded.h"
#include "tests/support/test_device.h"

#define PAGES_MOST 512

/* A reservation, and which of its granules should have memory. */
typedef struct arena {
    char *base;
    uint64_t page;  /* a granule */
    uint64_t chunk; /* what comes and goes together: a multiple of it */
    uint64_t pages;
    bool live[PAGES_MOST];
} arena;

static arena reserve(uint64_t pages)
{
    void *base;
    arena made = {.pages = pages};
    rft_device_caps caps = rft_device_get_caps(on.device);
    if (!caps.stable_arena) skip();
    /* How large a page is, is known only afterwards. */
    assert_ok(rft_device_reserve(on.device, 1, &base, &made.page, &on.error));
    rft_device_unreserve(on.device, base, made.page);
    assert_ok(rft_device_reserve(on.device, pages * made.page, &base, &made.page, &on.error));
    assert_int_equal((uintptr_t)base % made.page, 0);
    assert_int_equal(caps.chunk_bytes % made.page, 0);
    assert_int_not_equal(caps.chunk_bytes, 0);
    made.base = base;
    made.chunk = rft_min_u64(caps.chunk_bytes, pages * made.page);
    return made;
}

/* As many whole chunks as that, whatever their size. */
static arena reserve_chunks(uint64_t chunks)
{
    arena probe = reserve(1);
    rft_device_unreserve(on.device, probe.base, probe.page);
    uint64_t chunk = rft_device_get_caps(on.device).chunk_bytes;
    return reserve(chunks * (chunk / probe.page));
}

static void unreserve(const arena *in)
{
    rft_device_unreserve(on.device, in->base, in->pages * in->page);
    assert_int_equal(device_used(), 0);
}

static refit_status commit(const arena *in, uint64_t first, uint64_t pages)
{
    return rft_device_commit(on.device, in->base + first * in->page, pages * in->page, &on.error);
}

static refit_status decommit(const arena *in, uint64_t first, uint64_t pages)
{
    return rft_device_decommit(on.device, in->base + first * in->page, pages * in->page, NULL,
                               &on.error);
}

static void mark(arena *in, uint64_t first, uint64_t pages, bool live)
{
    assert_in_range(first + pages, 1, PAGES_MOST);
    for (uint64_t i = first; i < first + pages; i++)
        in->live[i] = live;
}

/* A chunk is there while one granule in it is. */
static uint64_t taken(const arena *in)
{
    uint64_t bytes = 0, counted = 0;
    for (uint64_t i = 0; i < in->pages; i++) {
        uint64_t chunk = i * in->page / in->chunk;
        if (!in->live[i] || counted > chunk) continue;
        bytes += rft_min_u64(in->chunk, in->pages * in->page - chunk * in->chunk);
        counted = chunk + 1;
    }
    return bytes;
}

/* Both say exactly what became of the device's memory. */
static void come(arena *in, uint64_t first, uint64_t pages)
{
    mark(in, first, pages, true);
    assert_ok(commit(in, first, pages));
    assert_int_equal(device_used(), taken(in));
}

static void go(arena *in, uint64_t first, uint64_t pages)
{
    uint64_t before = taken(in), freed = 77;
    mark(in, first, pages, false);
    assert_ok(rft_device_decommit(on.device, in->base + first * in->page, pages * in->page, &freed,
                                  &on.error));
    assert_int_equal(device_used(), taken(in));
    assert_int_equal(freed, before - taken(in));
}

TEST(addresses_cost_nothing)
{
    arena in = reserve(100);
    assert_int_equal(device_used(), 0);
    unreserve(&in);
    void *far;
    assert_ok(rft_device_reserve(on.device, 16 * DEVICE_BYTES, &far, &in.page, &on.error));
    assert_int_equal(device_used(), 0);
    rft_device_unreserve(on.device, far, 16 * DEVICE_BYTES);
}

TEST(committed_pages_hold_bytes_until_they_go)
{
    arena in = reserve(8);
    come(&in, 0, 8);
    device_fill(in.base, 8 * in.page, 4);
    go(&in, 2, 3);
    assert_int_equal(device_right(in.base, 2 * in.page, 4), 2 * in.page);
    come(&in, 2, 3);
    /* The neighbours were not touched. */
    assert_int_equal(device_right(in.base, 2 * in.page, 4), 2 * in.page);
    assert_true(device_right(in.base, 8 * in.page, 4) >= 5 * in.page);
    unreserve(&in);
}

/* What was gone with its chunk is not the pattern now; a GPU may give the same memory again. */
TEST(bytes_are_gone_with_their_chunk)
{
    arena in = reserve_chunks(3);
    uint64_t pages = in.pages / 3;
    come(&in, 0, in.pages);
    device_fill(in.base, 3 * in.chunk, 4);
    go(&in, pages, pages);
    come(&in, pages, pages);
    assert_int_equal(device_right(in.base, in.chunk, 4), in.chunk);
    uint64_t right = device_right(in.base, 3 * in.chunk, 4);
    if (!test_on_real_gpu()) assert_in_range(right, 2 * in.chunk, 2 * in.chunk + in.chunk / 2);
    unreserve(&in);
}

TEST(commit_and_decommit_may_be_repeated)
{
    arena in = reserve(10);
    go(&in, 0, 10);
    come(&in, 3, 2);
    come(&in, 3, 2);
    device_fill(in.base + 3 * in.page, in.page, 8);
    come(&in, 0, 10);
    assert_int_equal(device_right(in.base + 3 * in.page, in.page, 8), in.page);
    go(&in, 1, 8);
    go(&in, 0, 10);
    go(&in, 0, 10);
    unreserve(&in);
}

/* Ranges that begin and end anywhere, from a seed. */
TEST(any_order_of_ranges_adds_up)
{
    enum { PAGES = 29 }; /* a prime, and 58 MiB where a granule is 2 MiB */
    arena in = reserve(PAGES);
    uint64_t random = 88172645463325252u;
    for (int step = 0; step < 300; step++) {
        uint64_t first = seeded_below(&random, PAGES);
        uint64_t pages = 1 + seeded_below(&random, PAGES - first);
        (seeded_below(&random, 2) == 0 ? come : go)(&in, first, pages);
    }
    unreserve(&in);
}

TEST(a_full_device_commits_nothing)
{
    uint64_t chunk = rft_device_get_caps(on.device).chunk_bytes;
    if (chunk == 0) skip();
    uint64_t chunks = DEVICE_BYTES / chunk;
    void *base;
    uint64_t page;
    assert_ok(rft_device_reserve(on.device, 2 * chunks * chunk, &base, &page, &on.error));
    char *at = base;
    void *memory = device_alloc(chunk * 2);
    assert_ok(rft_device_commit(on.device, at, chunk, &on.error));
    assert_refused(rft_device_commit(on.device, at, (chunks - 1) * chunk, error),
                   REFIT_ERR_DEVICE_MEMORY, "free");
    assert_int_equal(device_used(), 3 * chunk);
    assert_ok(rft_device_commit(on.device, at, (chunks - 2) * chunk, &on.error));
    assert_int_equal(device_used(), DEVICE_BYTES);
    void *extra;
    assert_int_equal(refit_memory_alloc(on.device, 1, &extra, NULL), REFIT_ERR_DEVICE_MEMORY);
    device_free(memory);
    assert_ok(rft_device_commit(on.device, at + chunks * chunk, 2 * chunk, &on.error));
    rft_device_unreserve(on.device, base, 2 * chunks * chunk);
    assert_int_equal(device_used(), 0);
}

TEST(what_lies_outside_is_refused)
{
    arena in = reserve(4);
    assert_invalid(commit(&in, 3, 2));
    assert_invalid(decommit(&in, 4, 1));
    assert_invalid(rft_device_commit(on.device, in.base + 1, in.page, NULL));
    assert_invalid(rft_device_commit(on.device, in.base, in.page + 1, NULL));
    assert_invalid(rft_device_commit(on.device, in.base, UINT64_MAX - in.page + 1, NULL));
    void *base;
    uint64_t granule;
    assert_invalid(rft_device_reserve(on.device, 0, &base, &granule, NULL));
    assert_int_not_equal(rft_device_reserve(on.device, UINT64_MAX, &base, &granule, NULL),
                         REFIT_OK);
    unreserve(&in);
}

/* By the call, or by the work that it queued; what is there is copied as before. A real driver does
 * not promise to look at both ends before it loses the GPU. */
TEST(a_copy_to_memory_that_is_gone_fails)
{
    if (test_on_real_gpu()) skip();
    arena in = reserve_chunks(2);
    char *bytes = steady_alloc(64);
    come(&in, 0, 1);
    refit_status status =
        refit_stream_copy(on.device, on.stream, in.base + in.chunk - 32, bytes, 64, &on.error);
    refit_status waited = refit_stream_wait(on.device, on.stream, TIMEOUT_MS, &on.error);
    assert_int_not_equal(rft_keep_first(status, waited), REFIT_OK);
    device_fill(in.base, in.page, 3);
    assert_int_equal(device_right(in.base, in.page, 3), in.page);
    steady_free(bytes, 64);
    unreserve(&in);
}

TEST(a_copy_to_memory_that_is_gone_is_not_queued)
{
    if (!on.strict) skip();
    arena in = reserve(4);
    char bytes[64] = {0};
    const refit_stream_ref streams[] = {on.stream, REFIT_STREAM_NONE};
    assert_ok(commit(&in, 0, 1));
    for (unsigned i = 0; i < COUNT_OF(streams); i++) {
        /* It crosses the end of the committed page. */
        assert_refused(refit_stream_copy(on.device, streams[i], in.base + in.page - 32, bytes,
                                         sizeof bytes, error),
                       REFIT_ERR_COPY, "commit it");
        assert_refused(
            refit_stream_copy(on.device, streams[i], bytes, in.base + in.page, sizeof bytes, error),
            REFIT_ERR_COPY, "commit it");
        assert_refused(rft_device_zero(on.device, streams[i], in.base, 4 * in.page, error),
                       REFIT_ERR_COPY, "commit it");
    }
    assert_ok(refit_stream_copy(on.device, on.stream, in.base, bytes, sizeof bytes, &on.error));
    wait_stream();
    rft_device_unreserve(on.device, in.base, 4 * in.page);
}

/* The memory goes after the copy was queued: by a caller who has not said that the stream uses it.
 */
TEST(work_that_fails_in_a_queue_loses_the_device)
{
    if (!on.strict) skip();
    arena in = reserve(1);
    char from = 1, to = 2;
    void *memory = device_alloc(1);
    refit_stream_ref other;
    rft_event *event = open_event(), *passed = open_event();
    refit_error first, next;
    assert_ok(refit_stream_open(on.device, &other, &on.error));
    assert_ok(rft_device_event_record(on.device, passed, other, &on.error));
    assert_ok(rft_device_event_wait(on.device, passed, TIMEOUT_MS, &on.error));
    assert_ok(commit(&in, 0, 1));
    gate_put(on.stream);
    assert_ok(refit_stream_copy(on.device, on.stream, in.base, &from, 1, &on.error));
    assert_ok(rft_device_event_record(on.device, event, on.stream, &on.error));
    assert_ok(rft_device_event_join(on.device, event, other, &on.error));
    assert_ok(refit_stream_copy(on.device, other, &to, &from, 1, &on.error));
    assert_ok(decommit(&in, 0, 1));
    assert_false(rft_device_is_lost(on.device));
    gate_open();

    assert_int_equal(rft_device_event_wait(on.device, event, TIMEOUT_MS, &first), REFIT_ERR_DEVICE);
    assert_non_null(strstr(first.text, "lost"));
    assert_true(rft_device_is_lost(on.device));
    /* One sentence, whoever asks, whatever for; what was queued after it is not done. */
    assert_int_equal(rft_device_event_wait(on.device, passed, 0, &next), REFIT_ERR_DEVICE);
    assert_string_equal(next.text, first.text);
    assert_int_equal(refit_stream_copy(on.device, other, &to, &from, 1, &next), REFIT_ERR_DEVICE);
    assert_string_equal(next.text, first.text);
    void *more;
    assert_int_equal(refit_memory_alloc(on.device, 1, &more, &next), REFIT_ERR_DEVICE);
    assert_string_equal(next.text, first.text);
    assert_int_equal(rft_device_commit(on.device, in.base, in.page, NULL), REFIT_ERR_DEVICE);
    assert_int_equal(rft_device_event_record(on.device, event, other, NULL), REFIT_ERR_DEVICE);
    assert_int_equal(rft_device_event_join(on.device, event, other, NULL), REFIT_ERR_DEVICE);
    assert_ok(refit_stream_close(on.device, other, &on.error));
    assert_int_equal(to, 2);

    rft_device_event_close(on.device, passed);
    rft_device_event_close(on.device, event);
    device_free(memory);
    rft_device_unreserve(on.device, in.base, in.page);
}

/* ---- Streams that use it ------------------------------------------------------------------ */

TEST(memory_stays_while_a_stream_uses_it)
{
    arena in = reserve(2);
    char *bytes = steady_alloc(64);
    come(&in, 0, 2);
    assert_ok(rft_device_reserve_add_stream(on.device, in.base, on.stream, &on.error));
    assert_ok(rft_device_reserve_add_stream(on.device, in.base, on.stream, &on.error));
    gate_put(on.stream);
    assert_ok(refit_stream_copy(on.device, on.stream, in.base, bytes, 64, &on.error));
    on.device->wait_most_ms = 1;
    uint64_t freed = 77;
    assert_int_equal(rft_device_decommit(on.device, in.base, 2 * in.page, &freed, &on.error),
                     REFIT_ERR_TIMEOUT);
    assert_int_equal(freed, 0);
    assert_int_equal(device_used(), taken(&in));
    gate_open();
    /* The copy found its memory. */
    wait_stream();
    on.device->wait_most_ms = TIMEOUT_MS;
    go(&in, 0, 2);
    steady_free(bytes, 64);
    unreserve(&in);
}

TEST(a_stream_that_has_ended_its_use_is_not_waited_for)
{
    arena in = reserve(1);
    assert_ok(rft_device_reserve_add_stream(on.device, in.base, on.stream, &on.error));
    come(&in, 0, 1);
    gate_put(on.stream);
    on.device->wait_most_ms = 1;
    assert_int_equal(rft_device_reserve_remove_stream(on.device, in.base, on.stream, &on.error),
                     REFIT_ERR_TIMEOUT);
    assert_int_equal(decommit(&in, 0, 1), REFIT_ERR_TIMEOUT);
    gate_open();
    on.device->wait_most_ms = TIMEOUT_MS;
    assert_ok(rft_device_reserve_remove_stream(on.device, in.base, on.stream, &on.error));
    assert_ok(rft_device_reserve_remove_stream(on.device, in.base, on.stream, &on.error));
    wait_stream();
    gate_put(on.stream);
    go(&in, 0, 1);
    gate_open();
    wait_stream();
    unreserve(&in);
}

TEST(a_closed_stream_uses_nothing)
{
    arena in = reserve(1);
    arena other = reserve(1);
    for (int i = 0; i < 3; i++) { /* the handle of the second may be that of the first */
        refit_stream_ref stream;
        come(&in, 0, 1);
        assert_ok(refit_stream_open(on.device, &stream, &on.error));
        assert_ok(rft_device_reserve_add_stream(on.device, in.base, stream, &on.error));
        assert_ok(rft_device_reserve_add_stream(on.device, other.base, stream, &on.error));
        assert_ok(rft_device_reserve_add_stream(on.device, in.base, on.stream, &on.error));
        assert_ok(refit_stream_close(on.device, stream, &on.error));
        go(&in, 0, 1);
    }
    unreserve(&other);
    unreserve(&in);
}

TEST(only_streams_and_reservations_are_used)
{
    arena in = reserve(1);
    assert_invalid(rft_device_reserve_add_stream(on.device, &on, on.stream, &on.error));
    assert_ok(rft_device_reserve_add_stream(on.device, in.base, REFIT_STREAM_NONE, &on.error));
    assert_ok(rft_device_reserve_remove_stream(on.device, in.base, REFIT_STREAM_NONE, &on.error));
    assert_ok(rft_device_reserve_remove_stream(on.device, &on, on.stream, &on.error));
    /* Forgotten with the reservation. */
    assert_ok(rft_device_reserve_add_stream(on.device, in.base, on.stream, &on.error));
    unreserve(&in);
}

typedef struct user_thread {
    refit_device *device;
    void *base;
    char *at; /* the byte that only this thread writes */
    rft_thread thread;
    refit_status status;
} user_thread;

/* Streams come, use the arena and go. */
static void *come_and_go(void *user)
{
    user_thread *it = user;
    char byte = 1;
    for (int i = 0; i < 20 && it->status == REFIT_OK; i++) {
        refit_stream_ref stream = REFIT_STREAM_NONE;
        it->status = refit_stream_open(it->device, &stream, NULL);
        if (it->status != REFIT_OK) break;
        refit_status used = rft_device_reserve_add_stream(it->device, it->base, stream, NULL);
        if (used == REFIT_OK) used = refit_stream_copy(it->device, stream, it->at, &byte, 1, NULL);
        if (used == REFIT_OK && i % 2 == 0)
            used = rft_device_reserve_remove_stream(it->device, it->base, stream, NULL);
        it->status = rft_keep_first(used, refit_stream_close(it->device, stream, NULL));
    }
    return NULL;
}

TEST(streams_of_many_threads_come_and_go)
{
    arena in = reserve_chunks(2);
    user_thread threads[3];
    uint64_t half = in.pages / 2;
    come(&in, 0, in.pages);
    for (size_t i = 0; i < 3; i++) {
        threads[i] = (user_thread){.device = on.device, .base = in.base, .at = in.base + i};
        assert_ok(
            rft_thread_start(&threads[i].thread, "user", come_and_go, &threads[i], &on.error));
    }
    for (int i = 0; i < 20; i++) {
        go(&in, half, half);
        come(&in, half, half);
    }
    for (size_t i = 0; i < 3; i++) {
        rft_thread_join(threads[i].thread);
        assert_ok(threads[i].status);
    }
    unreserve(&in);
}

int main(void)
{
    return run_on_every_device("arena");
}
