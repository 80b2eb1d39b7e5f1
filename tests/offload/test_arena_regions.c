/* Pieces of an arena as regions: one offloader at a time moves a piece, and an offloader that binds
 * a region again to its piece keeps it. */
#include "tests/support/test_device.h"

#include <string.h>

#include <refit.h>

#include "base/alloc.h"
#include "memory/device_arena.h"

#define assert_ok(call) assert_int_equal((call), REFIT_OK)

#define BYTES       UINT64_C(5000)
#define PATIENCE_MS 20000u

typedef struct fixture {
    refit_device *device;
    refit_arena *arena;
    refit_offloader *offloader;
    refit_offloader *other;
    void *piece;
    refit_error error;
} fixture;

static int set_up(void **state)
{
    static fixture all;
    refit_config config;
    memset(&all, 0, sizeof all);
    refit_config_init(&config, sizeof config);
    config.offload_take_turns = 0;
    assert_ok(test_device_open("host", &all.device, &all.error));
    assert_ok(refit_arena_open(all.device, UINT64_C(16) << 20, &all.arena, &all.error));
    assert_ok(refit_arena_alloc(all.arena, BYTES, &all.piece, &all.error));
    assert_ok(refit_offloader_open(all.device, &config, &all.offloader, &all.error));
    assert_ok(refit_offloader_open(all.device, &config, &all.other, &all.error));
    test_fill(all.device, all.piece, 0x5A, BYTES);
    *state = &all;
    return 0;
}

static int tear_down(void **state)
{
    fixture *all = *state;
    assert_ok(refit_offloader_close(all->offloader, &all->error));
    assert_ok(refit_offloader_close(all->other, &all->error));
    assert_ok(refit_arena_close(all->arena, &all->error));
    assert_ok(refit_device_close(all->device, &all->error));
    assert_true(test_device_quiet());
    return 0;
}

static refit_status add(fixture *all, refit_offloader *offloader, refit_region_id *id)
{
    const refit_region_desc desc = {
        .size = sizeof desc, .name = "piece", .memory = all->piece, .bytes = BYTES};
    return refit_offloader_add(offloader, &desc, id, &all->error);
}

static uint64_t used_bytes(fixture *all)
{
    refit_device_info info = {.size = sizeof info};
    assert_ok(refit_device_describe(all->device, &info, &all->error));
    return info.used_bytes;
}

static void offload(fixture *all)
{
    assert_ok(refit_offloader_offload(all->offloader, REFIT_STREAM_NONE, NULL, &all->error));
    assert_ok(refit_offloader_finish(all->offloader, PATIENCE_MS, &all->error));
    assert_int_equal(used_bytes(all), 0);
}

static void restore(fixture *all)
{
    assert_ok(refit_offloader_restore(all->offloader, REFIT_STREAM_NONE, NULL, &all->error));
    assert_ok(refit_offloader_finish(all->offloader, PATIENCE_MS, &all->error));
}

static void assert_back(fixture *all)
{
    unsigned char expected[BYTES];
    memset(expected, 0x5A, sizeof expected);
    assert_device_equal(all->device, all->piece, expected, BYTES);
}

/* While the first has the piece away, the second would get memory that the restore of the first
 * writes to.
 */
static void one_offloader_at_a_time_moves_a_piece(void **state)
{
    fixture *all = *state;
    refit_region_id id, plain;
    void *memory;
    assert_ok(add(all, all->offloader, &id));
    assert_ok(refit_offloader_seal(all->offloader, &all->error));
    assert_int_equal(add(all, all->other, &id), REFIT_ERR_BUSY);
    assert_non_null(strstr(all->error.text, "another offloader"));
    offload(all);
    assert_int_equal(add(all, all->other, &id), REFIT_ERR_BUSY);
    assert_int_equal(used_bytes(all), 0);
    assert_ok(refit_memory_alloc(all->device, BYTES, &memory, &all->error));
    const refit_region_desc desc = {
        .size = sizeof desc, .name = "plain", .memory = memory, .bytes = BYTES};
    assert_ok(refit_offloader_add(all->other, &desc, &plain, &all->error));
    assert_int_equal(refit_offloader_bind(all->other, plain, all->piece, &all->error),
                     REFIT_ERR_BUSY);
    restore(all);
    assert_back(all);
    assert_ok(refit_offloader_unseal(all->offloader, &all->error));
    assert_ok(refit_offloader_clear(all->offloader, &all->error));
    assert_ok(refit_offloader_bind(all->other, plain, all->piece, &all->error));
    assert_back(all);
    assert_ok(refit_offloader_clear(all->other, &all->error));
    assert_ok(refit_memory_free(all->device, memory, &all->error));
}

static void a_piece_left_without_memory_gets_it_again(void **state)
{
    fixture *all = *state;
    refit_region_id id;
    assert_ok(add(all, all->offloader, &id));
    assert_ok(refit_offloader_seal(all->offloader, &all->error));
    uint64_t before = used_bytes(all);
    offload(all);
    assert_ok(refit_offloader_close(all->offloader, &all->error));
    all->offloader = NULL;
    assert_ok(add(all, all->other, &id));
    assert_int_equal(used_bytes(all), before);
    test_fill(all->device, all->piece, 0x5A, BYTES);
    assert_back(all);
}

static void a_region_may_be_bound_to_the_piece_that_it_has(void **state)
{
    fixture *all = *state;
    refit_region_id id;
    refit_region_info info = {.size = sizeof info};
    assert_ok(add(all, all->offloader, &id));
    assert_ok(refit_offloader_seal(all->offloader, &all->error));
    uint64_t before = used_bytes(all);
    assert_ok(refit_offloader_bind(all->offloader, id, all->piece, &all->error));
    assert_back(all);
    offload(all);
    assert_ok(refit_offloader_bind(all->offloader, id, all->piece, &all->error));
    assert_int_equal(used_bytes(all), before);
    assert_ok(refit_offloader_region(all->offloader, id, &info, &all->error));
    assert_ptr_equal(info.memory, all->piece);
    assert_true(info.bound && info.in_arena);
    restore(all);
    assert_back(all);
    assert_ok(refit_offloader_unseal(all->offloader, &all->error));
    assert_ok(refit_offloader_clear(all->offloader, &all->error));
    assert_ok(refit_arena_free(all->arena, all->piece, &all->error)); /* no region any more */
}

/* Memory comes and goes behind a stream that uses it, and no bookkeeping grows. */
static void a_warm_cycle_allocates_nothing(void **state)
{
    fixture *all = *state;
    refit_region_id id;
    refit_stream_ref stream;
    assert_ok(add(all, all->offloader, &id));
    assert_ok(refit_offloader_seal(all->offloader, &all->error));
    assert_ok(refit_stream_open(all->device, &stream, &all->error));
    uint64_t before = 0;
    for (int i = 0; i < 4; i++) {
        assert_ok(refit_arena_use(all->arena, stream, &all->error));
        offload(all);
        restore(all);
        if (i == 0) before = rft_alloc_count();
    }
    assert_int_equal(rft_alloc_count(), before);
    assert_back(all);
    assert_ok(refit_stream_close(all->device, stream, &all->error));
}

/* Its memory may go at any moment, so it is neither listed nor taken for memory of another kind. */
static void a_piece_that_was_given_back_is_no_region(void **state)
{
    fixture *all = *state;
    refit_region_id id;
    void *memory;
    uint64_t bytes;
    assert_ok(add(all, all->offloader, &id));
    assert_int_equal(rft_arena_abandon(all->arena, all->piece, &all->error), REFIT_ERR_BUSY);
    assert_int_equal(refit_arena_piece(all->arena, 0, &memory, &bytes, &all->error),
                     REFIT_ERR_NOT_FOUND);
    assert_int_equal(add(all, all->other, &id), REFIT_ERR_INVALID);
    assert_non_null(strstr(all->error.text, "given back"));
    assert_ok(refit_offloader_clear(all->offloader, &all->error));
    assert_int_equal(used_bytes(all), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(one_offloader_at_a_time_moves_a_piece),
        TEST(a_piece_left_without_memory_gets_it_again),
        TEST(a_region_may_be_bound_to_the_piece_that_it_has),
        TEST(a_warm_cycle_allocates_nothing),
        TEST(a_piece_that_was_given_back_is_no_region),
    };
    return cmocka_run_group_tests_name("arena_regions", tests, NULL, NULL);
}
