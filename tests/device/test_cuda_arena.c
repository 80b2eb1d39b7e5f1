/* Arenas on a GPU, against the fake driver: few handles, every driver call that fails, a full GPU,
 * streams of the caller's that still work, and GPUs that cannot do it. */
#include "tests/device/cuda_case.h"

#include "base/alloc.h"
#include "tests/support/failing_alloc.h"

#define PAGE  (2 * MIB)
#define CHUNK (8 * MIB)

typedef struct fixture {
    char *base;
    uint64_t bytes;
    refit_error error;
} fixture;

static fixture all;

static refit_status open_device(const char *spec, const char *chunk)
{
    refit_config config;
    refit_config_init(&config, sizeof config);
    RFT_TRY(refit_config_set(&config, "offload.chunk_bytes", chunk, &all.error));
    return refit_device_open(spec, &config, &gpu, &all.error);
}

static void reserve(uint64_t bytes)
{
    void *base;
    uint64_t granule;
    assert_ok(rft_device_reserve(gpu, bytes, &base, &granule, &all.error));
    assert_int_equal(granule, PAGE);
    all.base = base;
    all.bytes = bytes;
}

/* 5 chunks, the last of which has one page. */
static int begin(void **state)
{
    memset(&all, 0, sizeof all);
    (void)cuda_case_begin(state);
    assert_ok(open_device("cuda:0", "8MiB"));
    reserve(4 * CHUNK + PAGE);
    return 0;
}

static int end(void **state)
{
    fake_cuda_forget_faults();
    if (all.base != NULL) rft_device_unreserve(gpu, all.base, all.bytes);
    return gpu_case_end(state);
}

#define ARENA_TEST(name) TEST_WITH(name, begin, end)

static refit_status commit(uint64_t from, uint64_t bytes)
{
    return rft_device_commit(gpu, all.base + from, bytes, &all.error);
}

static refit_status decommit(uint64_t from, uint64_t bytes, uint64_t *freed)
{
    return rft_device_decommit(gpu, all.base + from, bytes, freed, &all.error);
}

/* Decommits, and returns what was freed. */
static uint64_t let_go(uint64_t from, uint64_t bytes)
{
    uint64_t freed = 77;
    assert_ok(decommit(from, bytes, &freed));
    return freed;
}

/* So much has the driver given, and refit says the same. */
static void assert_taken(uint64_t bytes)
{
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(gpu, &info, NULL));
    assert_int_equal(info.used_bytes, bytes);
    assert_int_equal(fake_cuda_used(0), bytes);
}

/* `bytes` of the arena hold `byte` from end to end. */
static void fill(uint64_t from, uint64_t bytes, int byte)
{
    char *memory = fake_cuda_bytes((uintptr_t)all.base + from, bytes);
    assert_non_null(memory);
    memset(memory, byte, bytes);
}

static void assert_filled(uint64_t from, uint64_t bytes, int byte)
{
    const char *memory = fake_cuda_bytes((uintptr_t)all.base + from, bytes);
    assert_non_null(memory);
    assert_int_equal(memory[0], byte);
    assert_int_equal(memcmp(memory, memory + 1, bytes - 1), 0); /* and so on to the end */
}

ARENA_TEST(memory_comes_and_goes_in_few_large_handles)
{
    assert_ok(commit(PAGE, 4 * CHUNK));
    assert_int_equal(fake_cuda_calls("cuMemCreate"), 5);
    assert_int_equal(fake_cuda_calls("cuMemMap"), 5);
    assert_int_equal(fake_cuda_calls("cuMemSetAccess"), 5);
    assert_taken(4 * CHUNK + PAGE);
    assert_ok(commit(0, PAGE));
    assert_int_equal(fake_cuda_calls("cuMemCreate"), 5);
    assert_int_equal(let_go(PAGE, 4 * CHUNK), 3 * CHUNK + PAGE);
    assert_taken(CHUNK);
    assert_int_equal(fake_cuda_calls("cuMemUnmap"), 4);
    assert_int_equal(let_go(0, all.bytes), CHUNK);
    assert_int_equal(fake_cuda_alive().physicals, 0);
    assert_int_equal(fake_cuda_alive().mappings, 0);
    assert_int_equal(fake_cuda_alive().reservations, 1);
}

ARENA_TEST(no_chunk_is_larger_than_its_reservation)
{
    char *first = all.base;
    uint64_t first_bytes = all.bytes;
    reserve(3 * PAGE);
    assert_ok(commit(PAGE, PAGE));
    assert_taken(3 * PAGE);
    assert_int_equal(let_go(PAGE, PAGE), 3 * PAGE);
    rft_device_unreserve(gpu, all.base, all.bytes);
    all.base = first;
    all.bytes = first_bytes;
}

/* The nth call of `symbol` fails: nothing is taken, what was there stays, and again it works. */
static void refuse_commit(const char *symbol, unsigned nth, rft_cu_result result,
                          refit_status expected)
{
    fake_cuda_live before = fake_cuda_alive();
    fake_cuda_fail(symbol, nth, 1, result);
    assert_int_equal(commit(PAGE, 3 * CHUNK), expected);
    fake_cuda_live after = fake_cuda_alive();
    assert_memory_equal(&after, &before, sizeof after);
    assert_taken(CHUNK);
    assert_filled(CHUNK, PAGE, 7);
    assert_int_equal(all.error.status, expected);
    assert_int_equal(all.error.subsystem, result);
}

ARENA_TEST(commit_is_all_or_nothing_at_every_call_of_the_driver)
{
    assert_ok(commit(CHUNK, PAGE));
    fill(CHUNK, PAGE, 7);
    for (unsigned nth = 1; nth <= 3; nth++) {
        refuse_commit("cuMemCreate", nth, RFT_CU_OUT_OF_MEMORY, REFIT_ERR_DEVICE_MEMORY);
        refuse_commit("cuMemCreate", nth, RFT_CU_INVALID_VALUE, REFIT_ERR_DEVICE);
        refuse_commit("cuMemMap", nth, RFT_CU_INVALID_VALUE, REFIT_ERR_DEVICE);
        refuse_commit("cuMemSetAccess", nth, RFT_CU_INVALID_VALUE, REFIT_ERR_DEVICE);
    }
    assert_ok(commit(PAGE, 3 * CHUNK));
    assert_taken(4 * CHUNK);
    assert_filled(CHUNK, PAGE, 7);
    assert_int_equal(let_go(0, all.bytes), 4 * CHUNK);
}

/* The way to the device fails too: what the driver kept is still counted, and used or given back
 * later. */
ARENA_TEST(a_rollback_that_fails_loses_nothing)
{
    static const char *const undo[] = {"cuMemUnmap", "cuMemRelease"};
    for (size_t i = 0; i < 2; i++) {
        for (int again = 0; again < 2; again++) {
            fake_cuda_fail("cuMemSetAccess", 2, 1, RFT_CU_INVALID_VALUE);
            fake_cuda_fail(undo[i], 1, 1, RFT_CU_INVALID_VALUE);
            assert_int_equal(commit(0, 3 * CHUNK), REFIT_ERR_DEVICE);
            assert_says(&all.error, "accessible");
            assert_taken(CHUNK);
            if (again == 0) assert_ok(commit(0, 3 * CHUNK));
            if (again == 0) assert_taken(3 * CHUNK);
            assert_int_equal(let_go(0, 3 * CHUNK), again == 0 ? 3 * CHUNK : CHUNK);
            assert_taken(0);
        }
    }
}

ARENA_TEST(decommit_that_fails_half_way_goes_on_where_it_was)
{
    static const char *const steps[] = {"cuMemUnmap", "cuMemRelease"};
    for (size_t i = 0; i < 2; i++) {
        uint64_t freed;
        assert_ok(commit(0, all.bytes));
        fill(3 * CHUNK, CHUNK, 9);
        fake_cuda_fail(steps[i], 3, 1, RFT_CU_INVALID_VALUE);
        assert_int_equal(decommit(0, 3 * CHUNK, &freed), REFIT_ERR_DEVICE);
        assert_int_equal(freed, 2 * CHUNK);
        assert_taken(2 * CHUNK + PAGE);
        assert_filled(3 * CHUNK, CHUNK, 9);
        assert_int_equal(let_go(0, 3 * CHUNK), CHUNK);
        assert_taken(CHUNK + PAGE);
        (void)let_go(0, all.bytes);
    }
}

/* What could not be unmapped keeps its bytes; what could not be released is mapped again. */
ARENA_TEST(memory_that_did_not_go_is_committed_again)
{
    uint64_t freed;
    assert_ok(commit(0, CHUNK));
    fill(0, CHUNK, 5);
    fake_cuda_fail("cuMemUnmap", 1, 1, RFT_CU_INVALID_VALUE);
    assert_int_equal(decommit(0, CHUNK, &freed), REFIT_ERR_DEVICE);
    assert_filled(0, CHUNK, 5);
    /* All of it is still there: a part that goes now takes nothing along. */
    assert_int_equal(let_go(PAGE, CHUNK - PAGE), 0);
    assert_filled(0, PAGE, 5);
    assert_ok(commit(0, CHUNK));
    fake_cuda_fail("cuMemRelease", 1, 1, RFT_CU_INVALID_VALUE);
    assert_int_equal(decommit(0, CHUNK, &freed), REFIT_ERR_DEVICE);
    assert_int_equal(freed, 0);
    assert_ok(commit(0, PAGE));
    assert_taken(CHUNK);
    assert_int_equal(fake_cuda_calls("cuMemCreate"), 1);
    assert_int_equal(let_go(0, PAGE), CHUNK);
}

ARENA_TEST(others_on_the_gpu_leave_too_little_until_they_go)
{
    fake_cuda_set_taken(0, 64 * MIB - 2 * CHUNK);
    assert_int_equal(commit(0, 3 * CHUNK), REFIT_ERR_DEVICE_MEMORY);
    assert_says(&all.error, "25165824 bytes were asked for");
    assert_says(&all.error, "16777216 of");
    assert_taken(0);
    assert_ok(commit(0, 2 * CHUNK));
    fake_cuda_set_taken(0, 0);
    assert_ok(commit(0, 3 * CHUNK));
    assert_taken(3 * CHUNK);
}

ARENA_TEST(an_ordered_capacity_holds_for_chunks)
{
    rft_device_unreserve(gpu, all.base, all.bytes);
    assert_ok(refit_device_close(gpu, &all.error));
    assert_ok(open_device("cuda:0:capacity=20MiB", "8MiB"));
    reserve(4 * CHUNK);
    assert_ok(commit(0, CHUNK + PAGE));
    assert_int_equal(commit(2 * CHUNK, PAGE), REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(commit(0, 3 * CHUNK), REFIT_ERR_DEVICE_MEMORY);
    assert_taken(2 * CHUNK);
    (void)let_go(0, CHUNK);
    assert_ok(commit(2 * CHUNK, PAGE));
    assert_taken(2 * CHUNK);
}

ARENA_TEST(reservations_that_touch_are_two)
{
    uint64_t freed;
    void *bases[8];
    uint64_t granule;
    for (int i = 0; i < 8; i++) {
        assert_ok(rft_device_reserve(gpu, PAGE, &bases[i], &granule, &all.error));
        assert_ok(rft_device_commit(gpu, bases[i], PAGE, &all.error));
        assert_invalid(rft_device_commit(gpu, bases[i], 2 * PAGE, &all.error));
    }
    for (int i = 0; i < 8; i += 2) {
        assert_ok(rft_device_decommit(gpu, bases[i], PAGE, &freed, &all.error));
        assert_int_equal(freed, PAGE);
    }
    assert_taken(4 * PAGE);
    for (int i = 0; i < 8; i++)
        rft_device_unreserve(gpu, bases[i], PAGE);
    assert_taken(0);
}

/* ---- Streams of the caller's */

ARENA_TEST(queued_work_of_a_callers_stream_keeps_its_memory)
{
    uint64_t freed = 1;
    rft_cu_stream native = fake_cuda_stream(fake_cuda_primary(0), RFT_CU_STREAM_NON_BLOCKING);
    const refit_stream_ref stream = {native};
    assert_ok(commit(0, all.bytes));
    assert_ok(rft_device_reserve_add_stream(gpu, all.base, stream, &all.error));
    fake_cuda_stop_stream(native);
    assert_ok(rft_device_zero(gpu, stream, all.base, all.bytes, &all.error));
    gpu->wait_most_ms = 1;
    assert_int_equal(decommit(0, all.bytes, &freed), REFIT_ERR_TIMEOUT);
    assert_int_equal(freed, 0);
    assert_int_equal(rft_device_reserve_remove_stream(gpu, all.base, stream, &all.error),
                     REFIT_ERR_TIMEOUT);
    assert_taken(all.bytes);
    assert_int_equal(fake_cuda_calls("cuMemUnmap"), 0);
    fake_cuda_go_stream(native);
    gpu->wait_most_ms = TIMEOUT_MS;
    assert_int_equal(let_go(0, all.bytes), all.bytes);
    /* Once its use has ended it may go, and is not asked again. */
    assert_ok(rft_device_reserve_remove_stream(gpu, all.base, stream, &all.error));
    fake_cuda_stream_free(native);
    (void)let_go(0, all.bytes);
}

ARENA_TEST(the_legacy_stream_may_use_it_too)
{
    const refit_stream_ref legacy = {RFT_CU_STREAM_LEGACY};
    assert_ok(commit(0, PAGE));
    assert_ok(rft_device_reserve_add_stream(gpu, all.base, legacy, &all.error));
    assert_int_equal(let_go(0, PAGE), CHUNK);
}

ARENA_TEST(a_stream_of_another_context_is_refused)
{
    rft_cu_stream native = fake_cuda_stream(fake_cuda_other_context(0), 0);
    assert_invalid(
        rft_device_reserve_add_stream(gpu, all.base, (refit_stream_ref){native}, &all.error));
    assert_int_equal(fake_cuda_alive().events, 0);
    fake_cuda_stream_free(native);
}

/* PyTorch allocates while it captures; memory goes only afterwards, and the capture stays whole. */
ARENA_TEST(memory_waits_for_the_end_of_a_capture)
{
    uint64_t freed;
    rft_cu_stream native = fake_cuda_stream(fake_cuda_primary(0), RFT_CU_STREAM_NON_BLOCKING);
    const refit_stream_ref stream = {native};
    fake_cuda_capture_begin(native);
    assert_ok(commit(0, PAGE));
    assert_ok(rft_device_reserve_add_stream(gpu, all.base, stream, &all.error));
    assert_int_equal(decommit(0, PAGE, &freed), REFIT_ERR_STATE);
    assert_int_equal(rft_device_reserve_remove_stream(gpu, all.base, stream, &all.error),
                     REFIT_ERR_STATE);
    assert_taken(CHUNK);
    assert_true(fake_cuda_capture_end(native));
    assert_int_equal(let_go(0, PAGE), CHUNK);
    assert_ok(rft_device_reserve_remove_stream(gpu, all.base, stream, &all.error));
    fake_cuda_stream_free(native);
}

/* ---- GPUs that are lost, or cannot do it */

ARENA_TEST(a_lost_gpu_is_reported_and_leaks_nothing)
{
    uint64_t freed;
    assert_ok(commit(0, all.bytes));
    fake_cuda_lose(0, RFT_CU_ECC_UNCORRECTABLE);
    assert_ok(commit(0, all.bytes)); /* it is there already */
    assert_int_equal(decommit(0, CHUNK, &freed), REFIT_ERR_DEVICE);
    assert_int_equal(commit(0, CHUNK), REFIT_ERR_DEVICE);
    rft_device_unreserve(gpu, all.base, all.bytes);
    all.base = NULL;
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(gpu, &info, NULL));
    assert_int_equal(info.used_bytes, 0);
}

ARENA_TEST(what_the_driver_does_not_take_back_is_logged)
{
    assert_ok(commit(0, CHUNK));
    fake_cuda_fail("cuMemUnmap", 1, 1, RFT_CU_INVALID_VALUE);
    rft_device_unreserve(gpu, all.base, all.bytes);
    all.base = NULL;
    assert_int_equal(heard_count("CUDA_ERROR_INVALID_VALUE"), 1);
    assert_int_equal(fake_cuda_alive().reservations, 1);
    assert_ok(refit_device_close(gpu, &all.error));
    gpu = NULL;
    fake_cuda_reset(); /* the violation is the context that was left with it */
}

/* Such a GPU does all else. */
static void assert_no_arena(void)
{
    void *base;
    uint64_t granule;
    refit_arena *arena;
    assert_ok(open_device("cuda:0", "8MiB"));
    rft_device_caps caps = rft_device_get_caps(gpu);
    assert_false(caps.stable_arena);
    assert_int_equal(caps.chunk_bytes, 0);
    assert_refused(rft_device_reserve(gpu, PAGE, &base, &granule, error), REFIT_ERR_UNSUPPORTED,
                   "virtual memory management");
    assert_int_equal(rft_device_commit(gpu, &granule, PAGE, &all.error), REFIT_ERR_UNSUPPORTED);
    assert_int_equal(refit_arena_open(gpu, PAGE, &arena, &all.error), REFIT_ERR_UNSUPPORTED);
    assert_ok(refit_memory_alloc(gpu, PAGE, &base, &all.error));
    assert_ok(refit_memory_free(gpu, base, &all.error));
    assert_ok(refit_device_close(gpu, &all.error));
}

TEST(gpus_without_virtual_memory_say_so)
{
    static const char *const needed[] = {"cuMemAddressReserve",
                                         "cuMemAddressFree",
                                         "cuMemCreate",
                                         "cuMemRelease",
                                         "cuMemMap",
                                         "cuMemUnmap",
                                         "cuMemSetAccess",
                                         "cuMemGetAllocationGranularity"};
    fake_cuda_reset();
    fake_cuda_set_attribute(0, RFT_CU_ATTR_VMM, 0, true);
    assert_no_arena();
    for (size_t i = 0; i < COUNT_OF(needed); i++) {
        fake_cuda_reset();
        fake_cuda_hide(needed[i], 0);
        assert_no_arena();
    }
    fake_cuda_reset();
}

TEST(pages_that_cannot_be_had_are_an_error)
{
    fake_cuda_reset();
    fake_cuda_fail("cuMemGetAllocationGranularity", 1, 1, RFT_CU_INVALID_VALUE);
    assert_int_equal(open_device("cuda:0", "8MiB"), REFIT_ERR_DEVICE);
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_ok(open_device("cuda:0", "4KiB")); /* rounded up to a page */
    assert_int_equal(rft_device_get_caps(gpu).chunk_bytes, PAGE);
    void *base;
    uint64_t granule;
    fake_cuda_fail("cuMemAddressReserve", 1, 1, RFT_CU_OUT_OF_MEMORY);
    assert_int_equal(rft_device_reserve(gpu, PAGE, &base, &granule, &all.error),
                     REFIT_ERR_DEVICE_MEMORY);
    fake_cuda_fail("cuMemAddressReserve", 1, 1, RFT_CU_INVALID_VALUE);
    assert_int_equal(rft_device_reserve(gpu, PAGE, &base, &granule, &all.error), REFIT_ERR_DEVICE);
    assert_ok(refit_device_close(gpu, &all.error));
    assert_int_equal(fake_cuda_leaks(), 0);
}

static refit_status use_arena(void)
{
    void *base;
    uint64_t granule, freed;
    refit_stream_ref stream = REFIT_STREAM_NONE;
    RFT_TRY(rft_device_reserve(gpu, 2 * CHUNK, &base, &granule, NULL));
    refit_status status = refit_stream_open(gpu, &stream, NULL);
    if (status == REFIT_OK) status = rft_device_reserve_add_stream(gpu, base, stream, NULL);
    uint64_t before = rft_alloc_count();
    if (status == REFIT_OK) status = rft_device_commit(gpu, base, 2 * CHUNK, NULL);
    if (status == REFIT_OK) {
        status = rft_device_decommit(gpu, base, 2 * CHUNK, &freed, NULL);
        assert_int_equal(rft_alloc_count(), before); /* a cycle takes nothing */
    }
    rft_device_unreserve(gpu, base, 2 * CHUNK);
    if (stream.native != NULL) assert_ok(refit_stream_close(gpu, stream, NULL));
    return status;
}

TEST(every_failed_allocation_is_an_error_and_leaks_nothing)
{
    fake_cuda_reset();
    uint64_t nth = 1;
    for (;; nth++) {
        failing_alloc_begin(nth);
        gpu = NULL;
        refit_status status = open_device("cuda:0", "8MiB");
        if (status == REFIT_OK) status = use_arena();
        assert_ok(refit_device_close(gpu, NULL));
        assert_int_equal(fake_cuda_leaks(), 0);
        if (!failing_alloc_end()) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
    assert_in_range(nth, 10, 100);
    assert_string_equal(fake_cuda_violation(), "");
}

/* ---- Other GPUs of the process */

static bool reached_by(int device, uint64_t from, uint64_t bytes)
{
    return fake_cuda_reaches(device, (rft_cu_ptr)(uintptr_t)(all.base + from), bytes);
}

ARENA_TEST(gpus_that_the_process_uses_reach_an_arena)
{
    refit_device *peer;
    assert_ok(commit(0, CHUNK));
    assert_true(reached_by(0, 0, CHUNK));
    assert_false(reached_by(1, 0, CHUNK)); /* no context is active there */
    assert_ok(refit_device_open("cuda:1", NULL, &peer, &all.error));
    assert_ok(commit(CHUNK, CHUNK));
    assert_true(reached_by(0, CHUNK, CHUNK));
    assert_true(reached_by(1, CHUNK, CHUNK));
    uint64_t freed;
    assert_ok(rft_device_decommit(gpu, all.base, 2 * CHUNK, &freed, &all.error));
    assert_false(reached_by(1, CHUNK, CHUNK));
    assert_ok(commit(0, 2 * CHUNK)); /* the first, too, from its return on */
    assert_true(reached_by(1, 0, CHUNK));
    assert_true(reached_by(1, CHUNK, CHUNK));
    assert_ok(refit_device_close(peer, &all.error));
}

ARENA_TEST(gpus_that_cannot_reach_it_are_left_out)
{
    refit_device *peer;
    assert_ok(refit_device_open("cuda:1", NULL, &peer, &all.error));
    fake_cuda_set_peers(false);
    assert_ok(commit(0, CHUNK));
    assert_true(reached_by(0, 0, CHUNK));
    assert_false(reached_by(1, 0, CHUNK));
    assert_ok(refit_device_close(peer, &all.error));
}

ARENA_TEST(an_arena_that_the_driver_closes_to_others_stays_ours)
{
    refit_device *peer;
    assert_ok(refit_device_open("cuda:1", NULL, &peer, &all.error));
    fake_cuda_fail("cuMemSetAccess", 1, 1, RFT_CU_INVALID_VALUE);
    assert_ok(commit(0, CHUNK));
    assert_true(reached_by(0, 0, CHUNK));
    assert_false(reached_by(1, 0, CHUNK));
    assert_int_equal(heard_count("is closed to other GPUs"), 1);
    assert_ok(refit_device_close(peer, &all.error));
}

int main(void)
{
    return test_run("cuda_arena");
}
