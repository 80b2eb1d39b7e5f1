/* Every device: copies and zeroing put the right bytes in the right place in stream order. */
#include "tests/device/every_device.h"

#include <stdlib.h>

#include "base/alloc.h"

TEST(bytes_travel_there_and_back)
{
    static const uint64_t sizes[] = {1, 7, 511, 4097, MIB + 3, 9 * MIB - 1};
    for (unsigned i = 0; i < COUNT_OF(sizes); i++) {
        char *there = malloc(sizes[i]);
        char *back = calloc(1, sizes[i]);
        pattern_fill(there, sizes[i], i);
        void *memory = device_alloc(sizes[i]);
        assert_ok(refit_stream_copy(on.device, on.stream, memory, there, sizes[i], &on.error));
        assert_ok(refit_stream_copy(on.device, on.stream, back, memory, sizes[i], &on.error));
        wait_stream();
        assert_int_equal(pattern_right(back, sizes[i], i), sizes[i]);
        device_free(memory);
        free(back);
        free(there);
    }
}

/* Pieces of one memory in reverse order: sizes around all that a device might split at. */
static uint32_t cut(rft_copy *copies, uint32_t most, char *to, const char *from, uint64_t bytes)
{
    static const uint64_t sizes[] = {1, 0, 8, 63, 64, 65, 4096, 70000, 3 * MIB, 512, 100};
    uint32_t count = 0;
    while (bytes > 0 && count < most) {
        uint64_t piece = sizes[count % (COUNT_OF(sizes))];
        if (piece > bytes || count == most - 1) piece = bytes;
        bytes -= piece;
        copies[count++] = (rft_copy){.to = to + bytes, .from = from + bytes, .bytes = piece};
    }
    return count;
}

TEST(a_batch_copies_every_piece)
{
    enum { MOST = 500 };
    static rft_copy copies[MOST];
    const uint64_t bytes = 24 * MIB + 17;
    const refit_stream_ref streams[] = {on.stream, REFIT_STREAM_NONE};
    char *there = malloc(bytes);
    pattern_fill(there, bytes, 5);
    void *memory = device_alloc(bytes);
    uint32_t count = cut(copies, MOST, memory, there, bytes);
    for (unsigned i = 0; i < 2; i++) {
        assert_ok(rft_device_zero(on.device, on.stream, memory, bytes, &on.error));
        wait_stream();
        assert_ok(rft_device_copy_batch(on.device, streams[i], copies, count, RFT_COPY_STREAM,
                                        &on.error));
        assert_ok(refit_stream_wait(on.device, streams[i], TIMEOUT_MS, &on.error));
        assert_int_equal(device_right(memory, bytes, 5), bytes);
    }
    device_free(memory);
    free(there);
}

#define ROWS 97u

static rft_rows rows_from(const void *from, void *to, bool from_host)
{
    return (rft_rows){.to = to,
                      .from = from,
                      .from_host = from_host,
                      .bytes = 13,
                      .count = ROWS,
                      .to_step = 17,
                      .from_step = from_host ? 29 : 17};
}

TEST(rows_go_to_rows_that_lie_apart)
{
    unsigned char *host = steady_alloc(ROWS * 29), *back = steady_alloc(2 * ROWS * 17);
    unsigned char *memory = device_alloc(2 * ROWS * 17), *other = memory + ROWS * 17;
    const rft_rows up = rows_from(host + 1, memory, true), on_it = rows_from(memory, other, false);
    pattern_fill(host, ROWS * 29, 3);
    assert_ok(rft_device_zero(on.device, on.stream, memory, 2 * ROWS * 17, &on.error));
    assert_ok(rft_device_copy_rows(on.device, on.stream, &up, &on.error));
    assert_ok(rft_device_copy_rows(on.device, on.stream, &on_it, &on.error));
    assert_ok(refit_stream_copy(on.device, on.stream, back, memory, 2 * ROWS * 17, &on.error));
    wait_stream();
    for (unsigned i = 0; i < 2 * ROWS; i++) {
        assert_memory_equal(back + i * 17, host + 1 + i % ROWS * 29, 13);
        for (unsigned at = 13; at < 17; at++)
            assert_int_equal(back[i * 17 + at], 0);
    }
    device_free(memory);
    steady_free(back, 2 * ROWS * 17);
    steady_free(host, ROWS * 29);
}

TEST(rows_that_are_wrong_are_refused)
{
    unsigned char *memory = device_alloc(4096);
    rft_rows good = rows_from(memory, memory + 2048, false), rows = good;
    rows.to_step = 12;
    assert_invalid(rft_device_copy_rows(on.device, on.stream, &rows, &on.error));
    rows = good;
    rows.from_step = 12;
    assert_invalid(rft_device_copy_rows(on.device, on.stream, &rows, &on.error));
    rows = good;
    rows.to = NULL;
    assert_invalid(rft_device_copy_rows(on.device, on.stream, &rows, &on.error));
    rows = good;
    rows.count = UINT64_MAX;
    assert_invalid(rft_device_copy_rows(on.device, on.stream, &rows, &on.error));
    rows = good;
    rows.from_step = UINT64_MAX / 2;
    assert_invalid(rft_device_copy_rows(on.device, on.stream, &rows, &on.error));
    rows.count = 0;
    assert_ok(rft_device_copy_rows(on.device, on.stream, &rows, &on.error));
    device_free(memory);
}

TEST(the_list_of_a_batch_may_be_reused_at_once)
{
    enum { PIECES = 64 };
    char *there = steady_alloc(PIECES), *back = steady_alloc(PIECES);
    pattern_fill(there, PIECES, 9);
    void *memory = device_alloc(PIECES);
    gate_put(on.stream);
    for (unsigned i = 0; i < PIECES; i++) {
        rft_copy copy = {.to = (char *)memory + i, .from = there + i, .bytes = 1};
        assert_ok(rft_device_copy_batch(on.device, on.stream, &copy, 1, RFT_COPY_ANY, &on.error));
    }
    assert_ok(refit_stream_copy(on.device, on.stream, back, memory, PIECES, &on.error));
    gate_open();
    wait_stream();
    assert_int_equal(pattern_right(back, PIECES, 9), PIECES);
    steady_free(back, PIECES);
    steady_free(there, PIECES);
    device_free(memory);
}

TEST(batches_have_a_bound)
{
    uint32_t most = rft_device_get_caps(on.device).batch_most;
    char from = 1, to = 0;
    assert_in_range(most, 1, 1 << 20);
    rft_copy *copies = calloc(most + 1, sizeof *copies);
    for (uint32_t i = 0; i <= most; i++)
        copies[i] = (rft_copy){.to = &to, .from = &from, .bytes = i == 0 ? 1 : 0};
    assert_invalid(
        rft_device_copy_batch(on.device, on.stream, copies, most + 1, RFT_COPY_STREAM, &on.error));
    assert_ok(
        rft_device_copy_batch(on.device, on.stream, copies, most, RFT_COPY_STREAM, &on.error));
    assert_ok(rft_device_copy_batch(on.device, on.stream, copies, 0, RFT_COPY_STREAM, &on.error));
    wait_stream();
    assert_int_equal(to, 1);
    free(copies);
}

TEST(copies_without_an_end_are_refused)
{
    char byte = 0;
    assert_invalid(refit_stream_copy(on.device, on.stream, NULL, &byte, 1, NULL));
    assert_invalid(refit_stream_copy(on.device, on.stream, &byte, NULL, 1, NULL));
    assert_invalid(refit_stream_copy(NULL, on.stream, &byte, &byte, 1, NULL));
    assert_invalid(rft_device_zero(on.device, on.stream, NULL, 1, NULL));
    assert_ok(rft_device_zero(on.device, on.stream, NULL, 0, NULL));
}

/* It is refused before anything is queued: the stream has nothing to do. */
TEST(sizes_that_no_memory_has_are_refused)
{
    char bytes[2] = {0};
    void *last = (void *)(UINTPTR_MAX - 3);
    static const uint64_t sizes[] = {UINT64_MAX, UINT64_MAX - 511, UINT64_C(1) << 63, INT64_MAX,
                                     UINT64_C(1) << 58};
    refit_stream_ref streams[] = {on.stream, REFIT_STREAM_NONE};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        for (size_t k = 0; k < 2; k++) {
            assert_refused(
                refit_stream_copy(on.device, streams[k], bytes, bytes + 1, sizes[i], error),
                REFIT_ERR_INVALID, "its size is wrong");
            assert_invalid(rft_device_zero(on.device, streams[k], bytes, sizes[i], NULL));
        }
        assert_invalid(rft_device_host_pin(on.device, bytes, sizes[i], false, NULL));
        assert_invalid(rft_device_memory_check(on.device, bytes, sizes[i], NULL, NULL));
    }
    assert_invalid(refit_stream_copy(on.device, on.stream, last, bytes, 5, NULL));
    assert_invalid(refit_stream_copy(on.device, on.stream, bytes, last, 5, NULL));
    wait_stream();
}

TEST(zero_clears_its_range_and_no_more)
{
    enum { PART = 4099 };
    static char back[3 * PART], expected[3 * PART];
    char *memory = device_alloc(sizeof back);
    device_fill(memory, sizeof back, 3);
    assert_ok(rft_device_zero(on.device, on.stream, memory + PART, PART, &on.error));
    assert_ok(refit_stream_copy(on.device, on.stream, back, memory, sizeof back, &on.error));
    wait_stream();
    pattern_fill(expected, sizeof expected, 3);
    memset(expected + PART, 0, PART);
    assert_memory_equal(back, expected, sizeof back);
    device_free(memory);
}

/* One cycle as a mover makes it. */
static void cycle(rft_event *event, const rft_copy *copies, uint32_t count)
{
    assert_ok(rft_device_event_record(on.device, event, on.stream, &on.error));
    assert_ok(rft_device_event_join(on.device, event, on.stream, &on.error));
    assert_ok(
        rft_device_copy_batch(on.device, on.stream, copies, count, RFT_COPY_STREAM, &on.error));
    assert_ok(rft_device_event_record(on.device, event, on.stream, &on.error));
    assert_ok(rft_device_event_wait(on.device, event, TIMEOUT_MS, &on.error));
    wait_stream();
}

TEST(the_steady_state_allocates_nothing)
{
    enum { MOST = 300 };
    static rft_copy copies[MOST];
    const uint64_t bytes = 8 * MIB;
    char *there = calloc(1, bytes);
    void *memory = device_alloc(bytes);
    rft_event *event = open_event();
    uint32_t count = cut(copies, MOST, memory, there, bytes);
    cycle(event, copies, count);
    uint64_t before = rft_alloc_count();
    for (unsigned i = 0; i < 50; i++)
        cycle(event, copies, count);
    assert_int_equal(rft_alloc_count(), before);
    rft_device_event_close(on.device, event);
    device_free(memory);
    free(there);
}

int main(void)
{
    return run_on_every_device("copies");
}
