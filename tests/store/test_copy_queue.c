/* Bytes on a stream of their own: what they lie in is in use until the end of the work was seen. */
#include <stdlib.h>

#include "base/clock.h"
#include "fake_cuda.h"
#include "kernels/digest.h"
#include "store/copy_queue.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

#define BYTES   (64u * 1024)
#define LONG_MS 20000u

typedef struct scene {
    refit_config config;
    refit_device *device;
    rft_copy_queue *copy_queue;
    unsigned char *memory; /* of the device: two times BYTES, the first half numbered */
    unsigned char host[BYTES];
    rft_pending pending[2];
} scene;

static void scene_open_as(scene *on, const refit_config *config)
{
    void *memory = NULL;
    memset(on, 0, sizeof *on);
    fake_cuda_reset();
    on->config = *config;
    assert_ok(refit_device_open("cuda:0", &on->config, &on->device, NULL));
    assert_ok(refit_memory_alloc(on->device, 2 * BYTES, &memory, NULL));
    on->memory = memory;
    for (size_t i = 0; i < BYTES; i++)
        on->host[i] = (unsigned char)(i * 7 + i / 256);
    assert_ok(refit_stream_copy(on->device, REFIT_STREAM_NONE, memory, on->host, BYTES, NULL));
    assert_ok(rft_copy_queue_open(on->device, &on->config, &on->copy_queue, NULL));
}

static void scene_open(scene *on)
{
    refit_config config = quick_config();
    config.offload_piece_bytes = BYTES / 4;
    scene_open_as(on, &config);
}

static void scene_close(scene *on)
{
    assert_true(rft_copy_queue_close(on->copy_queue, rft_deadline(LONG_MS)));
    assert_int_equal(rft_pending_count(&on->pending[0]), 0);
    assert_int_equal(rft_pending_count(&on->pending[1]), 0);
    assert_ok(refit_memory_free(on->device, on->memory, NULL));
    assert_ok(refit_device_close(on->device, NULL));
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
}

TEST(bytes_and_their_digest_arrive)
{
    scene on;
    unsigned char here[BYTES] = {0};
    scene_open(&on);
    assert_ok(rft_copy_queue_copy(on.copy_queue, here, on.memory, BYTES, NULL, NULL));
    assert_ok(rft_copy_queue_digest(on.copy_queue, on.memory, BYTES, 0, NULL));
    assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
    assert_memory_equal(here, on.host, BYTES);
    assert_true(rft_copy_queue_sum(on.copy_queue) == rft_digest_part(on.host, BYTES, 0));
    assert_false(rft_copy_queue_is_busy(on.copy_queue));
    scene_close(&on);
}

/* It does not take the link, so it is not cut for the copies of other streams. */
TEST(within_the_device_a_copy_is_one)
{
    scene on;
    unsigned char here[BYTES] = {0};
    scene_open(&on);
    uint64_t copies = fake_cuda_calls("cuMemcpyAsync");
    assert_ok(rft_copy_queue_copy_within(on.copy_queue, on.memory + BYTES, on.memory, BYTES, NULL));
    assert_int_equal(fake_cuda_calls("cuMemcpyAsync"), copies + 1);
    assert_ok(rft_copy_queue_copy(on.copy_queue, here, on.memory + BYTES, BYTES, NULL, NULL));
    assert_int_equal(fake_cuda_calls("cuMemcpyAsync"), copies + 5);
    assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
    assert_memory_equal(here, on.host, BYTES);
    scene_close(&on);
}

/* Pieces below offload.small_bytes are carried by a kernel, as small copies are. */
TEST(small_pieces_to_pinned_memory_are_gathered)
{
    scene on;
    rft_pinning pinning = {0};
    refit_config config = quick_config();
    config.offload_piece_bytes = 4096;
    config.offload_small_bytes = BYTES;
    scene_open_as(&on, &config);
    unsigned char *here = aligned_alloc(4096, BYTES);
    assert_non_null(here);
    memset(here, 0, BYTES);
    assert_ok(rft_pinning_open(&pinning, on.device, here, BYTES, BYTES, false, NULL));
    uint64_t launches = fake_cuda_calls("cuLaunchKernel");
    assert_ok(rft_copy_queue_copy(on.copy_queue, here, on.memory, BYTES, &pinning, NULL));
    assert_true(fake_cuda_calls("cuLaunchKernel") > launches);
    assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
    assert_memory_equal(here, on.host, BYTES);
    rft_pinning_close(&pinning);
    free(here);
    scene_close(&on);
}

/* Memory that is not page-locked, more than both halves, whole and in rows. */
#define LARGE (3 * RFT_STAGING_BYTES + 12345)

static unsigned char *numbered(uint64_t bytes)
{
    unsigned char *made = malloc(bytes);
    assert_non_null(made);
    for (uint64_t i = 0; i < bytes; i++)
        made[i] = (unsigned char)(i * 13 + i / 4096 + i / RFT_STAGING_BYTES);
    return made;
}

static void expect_on_device(const scene *on, const void *memory, const void *bytes, uint64_t count)
{
    unsigned char *back = malloc(count);
    assert_non_null(back);
    assert_ok(refit_stream_copy(on->device, REFIT_STREAM_NONE, back, memory, count, NULL));
    assert_memory_equal(back, bytes, count);
    free(back);
}

TEST(memory_that_is_not_page_locked_goes_through_memory_that_is)
{
    scene on;
    void *there = NULL;
    unsigned char *from = numbered(LARGE);
    scene_open(&on);
    assert_ok(refit_memory_alloc(on.device, LARGE, &there, NULL));
    rft_copy_queue_open_staging(on.copy_queue);
    rft_copy_queue_open_staging(on.copy_queue);
    uint64_t pageable = fake_cuda_pageable_copies();
    for (uint64_t bytes = 1; bytes <= LARGE; bytes = bytes * 11 + 5) {
        assert_ok(rft_copy_queue_copy_up(on.copy_queue, there, from, bytes, NULL, NULL));
        assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
        expect_on_device(&on, there, from, bytes);
        pageable = fake_cuda_pageable_copies();
    }
    assert_ok(rft_copy_queue_copy_up(on.copy_queue, there, from, LARGE, NULL, NULL));
    assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
    assert_int_equal(fake_cuda_pageable_copies(), pageable);
    expect_on_device(&on, there, from, LARGE);
    assert_ok(refit_memory_free(on.device, there, NULL));
    free(from);
    scene_close(&on);
}

TEST(rows_that_are_not_page_locked_go_there_packed)
{
    scene on;
    void *there = NULL;
    unsigned char *from = numbered(LARGE), *expected = calloc(1, LARGE);
    static const uint64_t widths[] = {1, 1000, RFT_STAGING_BYTES, RFT_STAGING_BYTES + 77};
    assert_non_null(expected);
    scene_open(&on);
    assert_ok(refit_memory_alloc(on.device, LARGE, &there, NULL));
    rft_copy_queue_open_staging(on.copy_queue);
    for (size_t i = 0; i < COUNT_OF(widths); i++) {
        uint64_t bytes = widths[i], count = (LARGE - bytes) / (bytes + 9) + 1;
        rft_rows rows = {.to = there,
                         .from = from,
                         .from_host = true,
                         .bytes = bytes,
                         .count = count,
                         .to_step = bytes + 3,
                         .from_step = bytes + 9};
        memset(expected, 0, LARGE);
        assert_ok(refit_stream_copy(on.device, REFIT_STREAM_NONE, there, expected, LARGE, NULL));
        for (uint64_t row = 0; row < count; row++)
            memcpy(expected + row * rows.to_step, from + row * rows.from_step, bytes);
        uint64_t pageable = fake_cuda_pageable_copies();
        assert_ok(rft_copy_queue_copy_rows(on.copy_queue, &rows, NULL, NULL));
        assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
        assert_int_equal(fake_cuda_pageable_copies(), pageable);
        expect_on_device(&on, there, expected, LARGE);
    }
    assert_ok(refit_memory_free(on.device, there, NULL));
    free(from);
    free(expected);
    scene_close(&on);
}

/* A half is not written again before the device has read it. */
TEST(a_half_that_is_not_read_in_time_ends_the_call)
{
    scene on;
    void *there = NULL;
    unsigned char *from = numbered(LARGE);
    refit_config config = quick_config();
    config.broadcast_stage_timeout_ms = 100;
    scene_open_as(&on, &config);
    assert_ok(refit_memory_alloc(on.device, LARGE, &there, NULL));
    rft_copy_queue_open_staging(on.copy_queue);
    fake_cuda_stop();
    assert_int_equal(rft_copy_queue_copy_up(on.copy_queue, there, from, LARGE, NULL, NULL),
                     REFIT_ERR_TIMEOUT);
    fake_cuda_go();
    assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
    expect_on_device(&on, there, from, 2 * RFT_STAGING_BYTES);
    assert_ok(refit_memory_free(on.device, there, NULL));
    free(from);
    scene_close(&on);
}

/* All of it or nothing; it is not tried again at once. */
TEST(without_the_halves_copies_go_as_they_are)
{
    static const char *const calls[] = {"cuEventCreate", "cuMemHostRegister"};
    for (size_t i = 0; i < COUNT_OF(calls); i++) {
        scene on;
        scene_open(&on);
        fake_cuda_fail(calls[i], 1, 1, RFT_CU_OUT_OF_MEMORY);
        rft_copy_queue_open_staging(on.copy_queue);
        rft_copy_queue_open_staging(on.copy_queue);
        uint64_t pageable = fake_cuda_pageable_copies();
        assert_ok(
            rft_copy_queue_copy_up(on.copy_queue, on.memory + BYTES, on.host, BYTES, NULL, NULL));
        assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
        assert_true(fake_cuda_pageable_copies() > pageable);
        expect_on_device(&on, on.memory + BYTES, on.host, BYTES);
        scene_close(&on);
    }
}

/* They share a half, and the device is not waited for. */
TEST(small_copies_share_a_half)
{
    scene on;
    scene_open(&on);
    rft_copy_queue_open_staging(on.copy_queue);
    fake_cuda_stop();
    for (uint64_t at = 0; at < BYTES; at += 64)
        assert_ok(rft_copy_queue_copy_up(on.copy_queue, on.memory + BYTES + at, on.host + at, 64,
                                         NULL, NULL));
    fake_cuda_go();
    assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
    expect_on_device(&on, on.memory + BYTES, on.host, BYTES);
    scene_close(&on);
}

/* The kernel is not given what would lose the context. */
TEST(a_batch_with_a_wrong_digest_is_refused)
{
    scene on;
    refit_error error;
    scene_open(&on);
    assert_ok(rft_copy_queue_batch_open(on.copy_queue, NULL));
    for (int wrong = 0; wrong < 3; wrong++) {
        uint64_t launches = fake_cuda_calls("cuLaunchKernel");
        assert_ok(rft_copy_queue_batch_begin(on.copy_queue, NULL));
        uint32_t count = wrong == 0 ? RFT_DIGEST_BATCH_MOST + 1 : 1;
        for (uint32_t i = 0; i < count; i++)
            rft_copy_queue_batch_add(on.copy_queue, wrong == 1 ? on.memory + BYTES + 4 : NULL,
                                     on.memory, 64, wrong == 2 ? 4 : 0);
        assert_invalid(rft_copy_queue_batch_end(on.copy_queue, &error));
        assert_int_equal(fake_cuda_calls("cuLaunchKernel"), launches);
    }
    assert_ok(rft_copy_queue_batch_begin(on.copy_queue, NULL));
    rft_copy_queue_batch_add(on.copy_queue, NULL, on.memory, BYTES, 0);
    assert_ok(rft_copy_queue_batch_end(on.copy_queue, NULL));
    assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
    assert_true(rft_copy_queue_batch_sum(on.copy_queue, 0) == rft_digest_part(on.host, BYTES, 0));
    scene_close(&on);
}

TEST(what_is_held_is_in_use_until_the_work_is_done)
{
    scene on;
    scene_open(&on);
    fake_cuda_stop();
    rft_copy_queue_hold(on.copy_queue, &on.pending[0]);
    rft_copy_queue_hold(on.copy_queue, &on.pending[1]);
    assert_ok(rft_copy_queue_copy_within(on.copy_queue, on.memory + BYTES, on.memory, BYTES, NULL));
    assert_int_equal(rft_copy_queue_wait(on.copy_queue, 1, NULL), REFIT_ERR_TIMEOUT);
    assert_true(rft_copy_queue_is_busy(on.copy_queue));
    assert_true(rft_copy_queue_holds(on.copy_queue, &on.pending[0]));
    assert_true(rft_copy_queue_holds(on.copy_queue, &on.pending[1]));
    assert_int_equal(rft_pending_count(&on.pending[1]), 1);
    fake_cuda_go();
    assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
    assert_false(rft_copy_queue_holds(on.copy_queue, &on.pending[0]));
    assert_int_equal(rft_pending_count(&on.pending[0]), 0);
    assert_false(rft_copy_queue_holds(NULL, &on.pending[0]));
    scene_close(&on);
}

/* Neither the caller's stream can be followed nor our own be looked at: what was held is let go by
 * the next wait, and not held a second time before. */
TEST(what_is_held_for_no_work_is_let_go_by_a_wait)
{
    scene on;
    refit_stream_ref stream;
    scene_open(&on);
    assert_ok(refit_stream_open(on.device, &stream, NULL));
    rft_copy_queue_hold(on.copy_queue, &on.pending[0]);
    rft_copy_queue_hold(on.copy_queue, &on.pending[1]);
    fake_cuda_fail("cuEventRecord", 1, 2, RFT_CU_OUT_OF_MEMORY);
    assert_int_equal(rft_copy_queue_follow(on.copy_queue, stream, NULL), REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL), REFIT_ERR_DEVICE_MEMORY);
    assert_true(rft_copy_queue_is_busy(on.copy_queue));
    assert_int_equal(rft_pending_count(&on.pending[0]), 1);
    assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
    assert_false(rft_copy_queue_is_busy(on.copy_queue));
    assert_int_equal(rft_pending_count(&on.pending[0]), 0);
    assert_ok(refit_stream_close(on.device, stream, NULL));
    scene_close(&on);
}

TEST(a_device_that_takes_no_digests_has_its_bytes_fetched)
{
    scene on;
    scene_open(&on);
    assert_true(rft_copy_queue_close(on.copy_queue, 0));
    assert_ok(refit_memory_free(on.device, on.memory, NULL));
    assert_ok(refit_device_close(on.device, NULL));
    fake_cuda_reset();
    fake_cuda_hide("cuLibraryLoadData", 0);
    void *memory = NULL;
    assert_ok(refit_device_open("cuda:0", NULL, &on.device, NULL));
    assert_ok(refit_memory_alloc(on.device, BYTES, &memory, NULL));
    on.memory = memory;
    assert_ok(refit_stream_copy(on.device, REFIT_STREAM_NONE, memory, on.host, BYTES, NULL));
    assert_ok(rft_copy_queue_open(on.device, &on.config, &on.copy_queue, NULL));
    assert_false(rft_copy_queue_digests(on.copy_queue));
    assert_ok(rft_copy_queue_digest(on.copy_queue, on.memory + 3, BYTES - 8, 16, NULL));
    assert_true(rft_copy_queue_sum(on.copy_queue) == rft_digest_part(on.host + 3, BYTES - 8, 16));
    scene_close(&on);
}

/* ---- Many digests */

#define SUMS 400u

static uint64_t random_state = 5;

static uint64_t below(uint64_t bound)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (random_state >> 33) % bound;
}

/* Adds `count` of them, of the first half; every third one is copied, each to a place of its own.
 * `there`: what the device's memory should be then. */
static void add_digests(scene *on, unsigned char *there, uint64_t *sums, uint32_t count)
{
    uint64_t to = BYTES;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bytes = below(16) == 0 ? below(BYTES / 2) : below(100), offset = 8 * below(1000);
        uint64_t from = below(BYTES - bytes);
        bool copies = i % 3 == 0 && to + bytes <= 2 * BYTES;
        rft_copy_queue_batch_add(on->copy_queue, copies ? on->memory + to : NULL,
                                 bytes == 0 ? NULL : on->memory + from, bytes, offset);
        sums[i] = rft_digest_part(there + from, bytes, offset);
        if (!copies) continue;
        memcpy(there + to, there + from, bytes);
        to += (bytes + 7) / 8 * 8;
    }
}

static void check_digests(scene *on, const unsigned char *there, const uint64_t *sums,
                          uint32_t count)
{
    static unsigned char found[2 * BYTES];
    assert_ok(rft_copy_queue_wait(on->copy_queue, LONG_MS, NULL));
    for (uint32_t i = 0; i < count; i++)
        assert_true(rft_copy_queue_batch_sum(on->copy_queue, i) == sums[i]);
    assert_ok(
        refit_stream_copy(on->device, REFIT_STREAM_NONE, found, on->memory, sizeof found, NULL));
    assert_memory_equal(found, there, sizeof found);
}

static void read_all(scene *on, unsigned char *there)
{
    assert_ok(refit_stream_copy(on->device, REFIT_STREAM_NONE, there, on->memory, 2 * BYTES, NULL));
}

/* However many they are, one kernel and the copies of their table. */
TEST(many_digests_are_one_piece_of_work)
{
    scene on;
    static unsigned char there[2 * BYTES];
    static uint64_t sums[SUMS];
    static const uint32_t counts[] = {4, 40, SUMS, 0, 1};
    scene_open(&on);
    read_all(&on, there);
    assert_ok(rft_copy_queue_batch_open(on.copy_queue, NULL));
    assert_ok(rft_copy_queue_batch_open(on.copy_queue, NULL)); /* once */
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        assert_ok(rft_copy_queue_batch_begin(on.copy_queue, NULL));
        uint64_t launches = fake_cuda_calls("cuLaunchKernel"), works = counts[i] > 0 ? 1 : 0;
        uint64_t copies = fake_cuda_calls("cuMemcpyAsync"), filled = fake_cuda_calls("cuMemAlloc");
        add_digests(&on, there, sums, counts[i]);
        assert_int_equal(fake_cuda_calls("cuLaunchKernel"), launches);
        assert_ok(rft_copy_queue_batch_end(on.copy_queue, NULL));
        assert_int_equal(fake_cuda_calls("cuLaunchKernel"), launches + works);
        assert_true(fake_cuda_calls("cuMemcpyAsync") <= copies + 4 * works);
        assert_int_equal(fake_cuda_calls("cuMemAlloc"), filled);
        check_digests(&on, there, sums, counts[i]);
    }
    scene_close(&on);
}

/* All that a batch takes; the last one reads. */
TEST(a_batch_of_digests_can_be_full)
{
    scene on;
    scene_open(&on);
    assert_ok(rft_copy_queue_batch_open(on.copy_queue, NULL));
    assert_ok(rft_copy_queue_batch_begin(on.copy_queue, NULL));
    for (uint32_t i = 0; i < RFT_DIGEST_BATCH_MOST; i++)
        rft_copy_queue_batch_add(on.copy_queue, NULL, on.memory + i, 9, 0);
    assert_ok(rft_copy_queue_batch_end(on.copy_queue, NULL));
    assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
    for (uint32_t i = 0; i < RFT_DIGEST_BATCH_MOST; i++)
        assert_true(rft_copy_queue_batch_sum(on.copy_queue, i) ==
                    rft_digest_part(on.host + i, 9, 0));
    scene_close(&on);
}

/* Also of what was put on the stream after they were added. */
TEST(digests_are_taken_after_the_copies_before_their_end)
{
    scene on;
    scene_open(&on);
    unsigned char *to = on.memory + BYTES + 4; /* to where a digest does not copy */
    assert_ok(rft_copy_queue_batch_open(on.copy_queue, NULL));
    assert_ok(rft_copy_queue_batch_begin(on.copy_queue, NULL));
    rft_copy_queue_batch_add(on.copy_queue, NULL, to, 1000, 0);
    assert_ok(rft_copy_queue_copy_within(on.copy_queue, to, on.memory, 500, NULL));
    assert_ok(rft_copy_queue_copy(on.copy_queue, to + 500, on.host + 500, 500, NULL, NULL));
    assert_ok(rft_copy_queue_batch_end(on.copy_queue, NULL));
    assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
    assert_true(rft_copy_queue_batch_sum(on.copy_queue, 0) == rft_digest_part(on.host, 1000, 0));
    scene_close(&on);
}

/* The device may still read the table, or write sums there. */
TEST(digests_are_not_begun_while_others_are_under_way)
{
    scene on;
    refit_error error;
    scene_open(&on);
    assert_ok(rft_copy_queue_batch_open(on.copy_queue, NULL));
    assert_ok(rft_copy_queue_batch_begin(on.copy_queue, NULL));
    rft_copy_queue_batch_add(on.copy_queue, NULL, on.memory, BYTES, 0);
    assert_ok(rft_copy_queue_batch_begin(on.copy_queue, NULL)); /* nothing was put on the stream */
    rft_copy_queue_batch_add(on.copy_queue, NULL, on.memory, 100, 0);
    fake_cuda_stop();
    assert_ok(rft_copy_queue_batch_end(on.copy_queue, NULL));
    assert_int_equal(rft_copy_queue_wait(on.copy_queue, 1, NULL), REFIT_ERR_TIMEOUT);
    assert_int_equal(rft_copy_queue_batch_begin(on.copy_queue, &error), REFIT_ERR_TIMEOUT);
    assert_non_null(strstr(error.text, "still under way"));
    fake_cuda_go();
    assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
    assert_true(rft_copy_queue_batch_sum(on.copy_queue, 0) == rft_digest_part(on.host, 100, 0));
    assert_ok(rft_copy_queue_batch_begin(on.copy_queue, NULL));
    scene_close(&on);
}

/* Up, the kernel, down: a batch that failed is followed by one that does not. */
TEST(digests_that_fail_can_be_begun_again)
{
    static const char *const calls[] = {"cuMemcpyAsync", "cuLaunchKernel", "cuMemcpyAsync"};
    static const unsigned nth[] = {1, 1, 2};
    for (size_t i = 0; i < COUNT_OF(calls); i++) {
        scene on;
        scene_open(&on);
        assert_ok(rft_copy_queue_batch_open(on.copy_queue, NULL));
        for (int fails = 1; fails >= 0; fails--) {
            assert_ok(rft_copy_queue_batch_begin(on.copy_queue, NULL));
            rft_copy_queue_batch_add(on.copy_queue, NULL, on.memory, 1000, 8);
            if (fails == 1) fake_cuda_fail(calls[i], nth[i], 1, RFT_CU_UNKNOWN);
            refit_status status = rft_copy_queue_batch_end(on.copy_queue, NULL);
            if (fails == 1) assert_int_not_equal(status, REFIT_OK);
            if (fails == 0) assert_ok(status);
            assert_ok(rft_copy_queue_wait(on.copy_queue, LONG_MS, NULL));
        }
        assert_true(rft_copy_queue_batch_sum(on.copy_queue, 0) ==
                    rft_digest_part(on.host, 1000, 8));
        scene_close(&on);
    }
}

/* All of their room or none of it, and the next try has it. */
TEST(digests_without_room_are_refused)
{
    static const char *const calls[] = {"cuMemAlloc", "cuMemHostRegister"};
    for (size_t i = 0; i < COUNT_OF(calls); i++) {
        scene on;
        scene_open(&on);
        fake_cuda_fail(calls[i], 1, 1, RFT_CU_OUT_OF_MEMORY);
        assert_int_not_equal(rft_copy_queue_batch_open(on.copy_queue, NULL), REFIT_OK);
        assert_ok(rft_copy_queue_batch_open(on.copy_queue, NULL));
        scene_close(&on);
    }
}

int main(void)
{
    return test_run("copy_queue");
}
