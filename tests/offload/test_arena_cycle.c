/* States in an arena of a GPU, whose memory comes and goes in chunks: what is given back is what
 * the device really got, and a GPU that is full, fails half-way or is still in use loses nothing.
 */
#include "tests/offload/offload.h"

#include <stdio.h>

#include "base/alloc.h"
#include "fake_cuda.h"

#define PAGE   (UINT64_C(64) << 10) /* small, so that the tests are fast */
#define CHUNK  (4 * PAGE)
#define STATES 6

/* 6 states in 12 pages, side by side: chunks hold {0, 1, 2}, {2, 3, 4} and {4, 5}. */
static const uint64_t sizes[STATES] = {PAGE, 2 * PAGE - 512, 3 * PAGE, 512, 3 * PAGE, 2 * PAGE};

typedef struct fixture {
    refit_device *device;
    refit_arena *arena;
    refit_offloader *offloader;
    void *states[STATES];
    refit_error error;
} fixture;

static fixture all;

static unsigned char byte_of(uint32_t at)
{
    return (unsigned char)(0x11 * (at + 1));
}

static void fill(uint32_t at)
{
    char *bytes = fake_cuda_bytes((uintptr_t)all.states[at], sizes[at]);
    assert_non_null(bytes);
    memset(bytes, byte_of(at), sizes[at]);
}

/* Bit for bit. */
static void assert_back(uint32_t at)
{
    const unsigned char *bytes = fake_cuda_bytes((uintptr_t)all.states[at], sizes[at]);
    assert_non_null(bytes);
    assert_int_equal(bytes[0], byte_of(at));
    assert_int_equal(memcmp(bytes, bytes + 1, sizes[at] - 1), 0); /* and so on to the end */
}

static void assert_all_back(void)
{
    assert_int_equal(refit_offloader_get_state(all.offloader), REFIT_RESIDENT);
    for (uint32_t at = 0; at < STATES; at++)
        assert_back(at);
}

static void open_arena(void)
{
    static const char *const settings[] = {"offload.chunk_bytes=256KiB", "offload.slab_bytes=8MiB",
                                           "offload.timeout_ms=20s", "offload.take_turns=false",
                                           NULL};
    refit_config config;
    refit_config_init(&config, sizeof config);
    set_each(&config, settings);
    assert_ok(refit_device_open("cuda:0", &config, &all.device, &all.error));
    assert_ok(refit_arena_open(all.device, 4 * CHUNK, &all.arena, &all.error));
    assert_ok(refit_offloader_open(all.device, &config, &all.offloader, &all.error));
    for (uint32_t at = 0; at < STATES; at++) {
        assert_ok(refit_arena_alloc(all.arena, sizes[at], &all.states[at], &all.error));
        fill(at);
    }
}

static void add(uint32_t at)
{
    char name[16];
    refit_region_id id;
    snprintf(name, sizeof name, "state.%u", at);
    refit_region_desc region = {
        .size = sizeof region, .name = name, .memory = all.states[at], .bytes = sizes[at]};
    assert_ok(refit_offloader_add(all.offloader, &region, &id, &all.error));
}

/* All but `but` are regions, added in an order that is not that of their addresses. */
static void open_but(uint32_t but)
{
    memset(&all, 0, sizeof all);
    fake_cuda_reset();
    fake_cuda_set_granule(PAGE);
    open_arena();
    for (uint32_t i = 0; i < STATES; i++) {
        uint32_t at = (i * 5 + 2) % STATES;
        if (at != but) add(at);
    }
    assert_ok(refit_offloader_seal(all.offloader, &all.error));
}

static int open_test(void **state)
{
    open_but(STATES);
    return 0;
}

static int close_test(void **state)
{
    fake_cuda_forget_faults();
    assert_ok(refit_offloader_close(all.offloader, &all.error));
    assert_ok(refit_arena_close(all.arena, &all.error));
    assert_ok(refit_device_close(all.device, &all.error));
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
    return 0;
}

#define CYCLE(name) TEST_WITH(name, open_test, close_test)

static void offload(void)
{
    assert_ok(refit_offloader_offload(all.offloader, REFIT_STREAM_NONE, NULL, &all.error));
}

static refit_status finish(void)
{
    return refit_offloader_wait(all.offloader, TIMEOUT_MS, &all.error);
}

static refit_status restore(void)
{
    return refit_offloader_restore(all.offloader, REFIT_STREAM_NONE, NULL, &all.error);
}

static void go_away(void)
{
    offload();
    assert_ok(finish());
}

static void come_back(void)
{
    assert_ok(restore());
    assert_ok(finish());
    assert_all_back();
}

static uint64_t reclaimed(void)
{
    return stats_of(all.offloader).offload_reclaimed_bytes_last;
}

CYCLE(states_side_by_side_go_in_whole_chunks)
{
    for (int cycle = 0; cycle < 3; cycle++) {
        uint64_t unmaps = fake_cuda_calls("cuMemUnmap"), maps = fake_cuda_calls("cuMemMap");
        uint64_t taken = rft_alloc_count();
        go_away();
        assert_int_equal(fake_cuda_used(0), 0);
        assert_int_equal(reclaimed(), 3 * CHUNK);
        assert_int_equal(fake_cuda_calls("cuMemUnmap") - unmaps, 3);
        come_back();
        assert_int_equal(fake_cuda_calls("cuMemMap") - maps, 3);
        /* From the second cycle on nothing is taken from the host. */
        if (cycle > 0) assert_int_equal(rft_alloc_count(), taken);
    }
}

/* State 3, in the second chunk, is not a region: its chunk stays, and is not reported as freed. */
CYCLE(a_chunk_of_which_a_piece_stays_is_not_counted)
{
    assert_int_equal(close_test(NULL), 0);
    open_but(3);
    go_away();
    assert_back(3);
    assert_int_equal(reclaimed(), 2 * CHUNK);
    assert_int_equal(fake_cuda_used(0), CHUNK);
    come_back();
}

CYCLE(a_gpu_that_is_full_at_the_restore_loses_nothing)
{
    go_away();
    fake_cuda_set_taken(0, 64 * MIB - 2 * CHUNK);
    for (int again = 0; again < 2; again++) {
        assert_int_equal(restore(), REFIT_ERR_DEVICE_MEMORY);
        assert_says(&all.error, "free");
        assert_int_equal(refit_offloader_get_state(all.offloader), REFIT_OFFLOADED);
        assert_int_equal(fake_cuda_used(0), 0);
    }
    fake_cuda_set_taken(0, 0);
    come_back();
}

/* Each driver call on the offload fails once; then either verb may come next. */
CYCLE(giving_back_that_fails_half_way_goes_on_or_turns_back)
{
    static const char *const steps[] = {"cuMemUnmap", "cuMemRelease"};
    for (unsigned nth = 1; nth <= 3; nth++) {
        for (unsigned i = 0; i < 4; i++) {
            offload();
            fake_cuda_fail(steps[i % 2], nth, 1, RFT_CU_INVALID_VALUE);
            assert_int_equal(finish(), REFIT_ERR_DEVICE);
            assert_int_equal(reclaimed(), (nth - 1) * CHUNK);
            if (i < 2) {
                assert_ok(finish());
                assert_int_equal(fake_cuda_used(0), 0);
                assert_int_equal(reclaimed(), 3 * CHUNK);
            }
            come_back();
        }
    }
}

CYCLE(taking_that_fails_half_way_takes_nothing)
{
    static const char *const steps[] = {"cuMemCreate", "cuMemMap", "cuMemSetAccess"};
    for (unsigned nth = 1; nth <= 3; nth++) {
        for (unsigned i = 0; i < 3; i++) {
            go_away();
            fake_cuda_fail(steps[i], nth, 1, RFT_CU_INVALID_VALUE);
            assert_int_equal(restore(), REFIT_ERR_DEVICE);
            assert_int_equal(fake_cuda_used(0), 0);
            assert_int_equal(refit_offloader_get_state(all.offloader), REFIT_OFFLOADED);
            come_back();
        }
    }
}

/* A kernel of the caller's that was queued after the offload still reads a state. */
CYCLE(memory_waits_for_the_callers_stream)
{
    rft_cu_stream native = fake_cuda_stream(fake_cuda_primary(0), RFT_CU_STREAM_NON_BLOCKING);
    const refit_stream_ref stream = {native};
    void *out;
    assert_ok(refit_memory_alloc(all.device, 512, &out, &all.error));
    assert_ok(refit_arena_add_stream(all.arena, stream, &all.error));
    offload();
    fake_cuda_stop_stream(native);
    assert_ok(refit_stream_copy(all.device, stream, out, all.states[0], 512, &all.error));
    all.device->wait_most_ms = 1;
    assert_int_equal(finish(), REFIT_ERR_TIMEOUT);
    assert_int_equal(fake_cuda_used(0), 3 * CHUNK + 512);
    assert_int_equal(reclaimed(), 0);
    all.device->wait_most_ms = TIMEOUT_MS;
    fake_cuda_go_stream(native);
    assert_ok(finish());
    assert_int_equal(reclaimed(), 3 * CHUNK);
    come_back();
    assert_ok(refit_arena_remove_stream(all.arena, stream, &all.error));
    assert_ok(refit_memory_free(all.device, out, &all.error));
    fake_cuda_stream_free(native);
}

CYCLE(memory_waits_for_the_end_of_a_capture)
{
    rft_cu_stream native = fake_cuda_stream(fake_cuda_primary(0), RFT_CU_STREAM_NON_BLOCKING);
    const refit_stream_ref stream = {native};
    assert_ok(refit_arena_add_stream(all.arena, stream, &all.error));
    offload();
    fake_cuda_capture_begin(native);
    assert_int_equal(finish(), REFIT_ERR_STATE);
    assert_int_equal(refit_offloader_get_state(all.offloader), REFIT_OFFLOADED);
    assert_true(fake_cuda_capture_end(native));
    assert_ok(finish());
    come_back();
    assert_ok(refit_arena_remove_stream(all.arena, stream, &all.error));
    fake_cuda_stream_free(native);
}

CYCLE(a_piece_that_is_held_is_not_a_region)
{
    void *buffer;
    refit_region_id id;
    assert_int_equal(refit_arena_pin(all.arena, all.states[1], &all.error), REFIT_ERR_BUSY);
    assert_ok(refit_offloader_unseal(all.offloader, &all.error));
    assert_ok(refit_arena_alloc(all.arena, PAGE, &buffer, &all.error));
    assert_ok(refit_arena_pin(all.arena, buffer, &all.error));
    refit_region_desc region = {
        .size = sizeof region, .name = "registered", .memory = buffer, .bytes = PAGE};
    assert_int_equal(refit_offloader_add(all.offloader, &region, &id, &all.error), REFIT_ERR_BUSY);
    assert_says(&all.error, "NCCL_GRAPH_REGISTER");
    assert_ok(refit_offloader_seal(all.offloader, &all.error));
    go_away();
    /* What is registered keeps its chunk, the fourth, which it has to itself. */
    assert_int_equal(fake_cuda_used(0), CHUNK);
    assert_int_equal(reclaimed(), 3 * CHUNK);
    come_back();
    assert_ok(refit_arena_unpin(all.arena, buffer, &all.error));
}

CYCLE(a_lost_gpu_is_reported_and_everything_closes)
{
    const refit_stream_ref legacy = {RFT_CU_STREAM_LEGACY};
    assert_ok(refit_arena_add_stream(all.arena, legacy, &all.error));
    offload();
    fake_cuda_settle();
    fake_cuda_lose(0, RFT_CU_ILLEGAL_ADDRESS);
    assert_int_equal(finish(), REFIT_ERR_DEVICE);
    assert_int_not_equal(restore(), REFIT_OK);
}

int main(void)
{
    return test_run("arena_cycle");
}
