/* Schedule: every kept byte has its place in the image, no copy lies across two registrations, and
 * the padding of a copy belongs to no region. */
#include "tests/offload/offload.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/checked.h"
#include "offload/schedule.h"
#include "tests/support/failing_alloc.h"

#define REGIONS 60

typedef struct fixture {
    refit_device *device;
    refit_config config;
    rft_region_table table;
    rft_schedule schedule;
    char *memory; /* of all regions, with holes between them */
    char *image;
} fixture;

static fixture on;

/* Sizes below, at and far above those of slabs; 128 KiB of addresses a region are enough. */
static const uint64_t sizes[] = {1, 511, 512, 513, 4096, 65535, 65536, 65537, 130000, 20000};
#define ROOM (128 * KIB)

static void add_regions(void)
{
    for (uint32_t i = 0; i < REGIONS; i++) {
        char name[16];
        refit_region_id id;
        snprintf(name, sizeof name, "r%u", i);
        refit_region_desc desc = {.size = sizeof desc,
                                  .name = name,
                                  .memory = on.memory + i * ROOM,
                                  .bytes = sizes[i * 7 % 10],
                                  .policy = i % 9 == 8 ? REFIT_ZERO : REFIT_KEEP,
                                  .group = i % 3};
        assert_ok(rft_region_table_add(&on.table, &desc, &id, NULL));
    }
}

static int open_test(void **state)
{
    memset(&on, 0, sizeof on);
    refit_config_init(&on.config, sizeof on.config);
    on.config.offload_slab_bytes = 64 * KIB;
    on.config.offload_piece_bytes = 48 * KIB;
    assert_ok(refit_device_open("host", NULL, &on.device, NULL));
    rft_region_table_open(&on.table, on.device);
    on.memory = malloc(REGIONS * ROOM);
    add_regions();
    return on.memory == NULL ? -1 : 0;
}

static int close_test(void **state)
{
    rft_schedule_close(&on.schedule);
    rft_region_table_close(&on.table);
    free(on.memory);
    free(on.image);
    return refit_device_close(on.device, NULL) == REFIT_OK ? 0 : -1;
}

#define SCHEDULE(name) TEST_WITH(name, open_test, close_test)

static void open_schedule(void)
{
    assert_ok(rft_schedule_open(&on.schedule, &on.table, &on.config, 16, NULL));
    on.image = malloc(on.schedule.layout.image_bytes);
    assert_non_null(on.image);
}

static void place_all(refit_place place)
{
    for (uint32_t id = 0; id < on.table.count; id++) {
        on.table.items[id].place = place;
        on.table.items[id].bound = true;
    }
}

static uint64_t slab_of(uint64_t offset)
{
    const rft_layout *layout = &on.schedule.layout;
    for (uint32_t i = 0; i < layout->slab_count; i++) {
        if (offset - layout->slabs[i].offset < layout->slabs[i].bytes) return i;
    }
    return UINT64_MAX;
}

/* Padding: bytes inside the slab that belong to no region. */
static void assert_padding(uint64_t from, uint64_t bytes)
{
    assert_int_equal(slab_of(from - 1), slab_of(from + bytes - 1));
    for (uint32_t id = 0; id < on.table.count; id++) {
        const rft_region *region = &on.table.items[id];
        if (region->policy != REFIT_KEEP) continue;
        assert_true(region->host_offset >= from + bytes ||
                    region->host_offset + region->bytes <= from);
    }
}

/* Does the copies, and returns the bytes of padding that were shown. */
static uint64_t carry_out(bool out)
{
    uint64_t padding = 0;
    for (uint32_t i = 0; i < on.schedule.plan.copy_count; i++) {
        const rft_copy *copy = &on.schedule.plan.copies[i];
        assert_true(copy->known_memory);
        if (copy->from == NULL) {
            memset(copy->to, 0, copy->bytes);
            assert_int_equal(copy->slack, 0);
            continue;
        }
        const char *host = out ? copy->to : copy->from;
        uint64_t offset = (uint64_t)(host - on.image);
        assert_int_equal(slab_of(offset), slab_of(offset + copy->bytes - 1));
        assert_true(slab_of(offset) != UINT64_MAX);
        if (copy->slack > 0) assert_padding(offset + copy->bytes, copy->slack);
        memcpy(copy->to, copy->from, copy->bytes);
        padding += copy->slack;
    }
    return padding;
}

SCHEDULE(bytes_go_and_come_back_within_slabs)
{
    for (uint64_t i = 0; i < REGIONS * ROOM; i++)
        on.memory[i] = (char)(i * 2654435761u >> 24);
    char *before = malloc(REGIONS * ROOM);
    memcpy(before, on.memory, REGIONS * ROOM);
    open_schedule();
    place_all(REFIT_ON_DEVICE);
    assert_ok(rft_schedule_offload(&on.schedule, &on.table, on.image, NULL));
    uint64_t padding = carry_out(true);
    assert_in_range(padding, 1, on.schedule.layout.image_bytes - on.schedule.layout.payload_bytes);
    place_all(REFIT_ON_HOST);
    for (uint32_t id = 0; id < REGIONS; id++)
        memset(on.table.items[id].memory, 'x', on.table.items[id].bytes);
    assert_ok(rft_schedule_restore(&on.schedule, &on.table, on.image, NULL));
    assert_int_equal(carry_out(false), padding);
    for (uint32_t id = 0; id < REGIONS; id++) {
        const rft_region *region = &on.table.items[id];
        if (region->policy == REFIT_ZERO) memset(before + id * ROOM, 0, region->bytes);
    }
    assert_memory_equal(on.memory, before, REGIONS * ROOM);
    free(before);
}

/* After a failure only some regions move: the walk over the slabs skips those of the others. */
SCHEDULE(a_part_of_the_regions_finds_its_slabs)
{
    open_schedule();
    place_all(REFIT_ON_DEVICE);
    uint64_t bytes = 0;
    for (uint32_t id = 0; id < REGIONS; id++) {
        if (id % 3 != 2) {
            on.table.items[id].place = REFIT_ON_HOST;
        } else if (on.table.items[id].policy == REFIT_KEEP) {
            bytes += on.table.items[id].bytes;
        }
    }
    assert_ok(rft_schedule_offload(&on.schedule, &on.table, on.image, NULL));
    assert_int_equal(on.schedule.plan.bytes, bytes);
    (void)carry_out(true);
}

static void open_schedule_without_zeroes(void)
{
    for (uint32_t id = 0; id < REGIONS; id++) {
        if (on.table.items[id].policy == REFIT_ZERO) on.table.items[id].policy = REFIT_DISCARD;
    }
    open_schedule();
}

static refit_status plan(bool out)
{
    return out ? rft_schedule_offload(&on.schedule, &on.table, on.image, NULL)
               : rft_schedule_restore(&on.schedule, &on.table, on.image, NULL);
}

/* Did a plan of this direction come of the one before it, without a look at the regions? */
static bool is_reversed(bool out)
{
    uint32_t count = on.schedule.plan.copy_count;
    on.schedule.pieces[0].to = NULL;
    assert_ok(plan(out));
    assert_int_equal(on.schedule.plan.copy_count, count);
    return on.schedule.pieces[0].to == NULL;
}

/* All that was planned was done. */
static void move(bool out)
{
    place_all(out ? REFIT_ON_HOST : REFIT_ON_DEVICE);
    rft_schedule_moved(&on.schedule);
}

SCHEDULE(a_plan_is_reversed_for_the_way_back)
{
    open_schedule_without_zeroes();
    place_all(REFIT_ON_DEVICE);
    assert_ok(plan(true));
    move(true);
    assert_true(is_reversed(false));
    size_t bytes = on.schedule.plan.copy_count * sizeof *on.schedule.plan.copies;
    rft_copy *reversed = malloc(bytes);
    memcpy(reversed, on.schedule.plan.copies, bytes);
    assert_false(is_reversed(false)); /* it has not moved: the next plan is made anew */
    for (uint32_t i = 0; i < on.schedule.plan.copy_count; i++) {
        const rft_copy *made = &on.schedule.plan.copies[i];
        assert_ptr_equal(reversed[i].to, made->to);
        assert_ptr_equal(reversed[i].from, made->from);
        assert_int_equal(reversed[i].bytes, made->bytes);
        assert_int_equal(reversed[i].slack, made->slack);
    }
    move(false);
    assert_true(is_reversed(true));
    free(reversed);
}

SCHEDULE(a_plan_is_made_anew_for_other_addresses)
{
    open_schedule_without_zeroes();
    place_all(REFIT_ON_DEVICE);
    assert_ok(plan(true));
    move(true);
    char *elsewhere = malloc(on.table.items[3].bytes);
    assert_ok(rft_region_attach(&on.table, 3, elsewhere, NULL));
    assert_false(is_reversed(false));
    move(false);
    char *image = on.image;
    on.image = malloc(on.schedule.layout.image_bytes);
    free(image);
    assert_false(is_reversed(true));
    (void)carry_out(true);
    free(elsewhere);
}

static void assert_way_back_is_made_anew(void)
{
    assert_ok(plan(true));
    move(true);
    on.schedule.pieces[0].to = NULL;
    assert_ok(plan(false));
    assert_non_null(on.schedule.pieces[0].to);
}

SCHEDULE(a_plan_of_some_regions_is_made_anew)
{
    open_schedule_without_zeroes();
    place_all(REFIT_ON_DEVICE);
    on.table.items[REGIONS - 1].place = REFIT_ON_HOST;
    assert_way_back_is_made_anew();
}

SCHEDULE(a_plan_is_not_reversed_for_its_own_direction)
{
    open_schedule_without_zeroes();
    place_all(REFIT_ON_DEVICE);
    assert_ok(plan(true));
    rft_schedule_moved(&on.schedule);
    assert_false(is_reversed(true));
    (void)carry_out(true);
}

SCHEDULE(a_plan_with_zeroes_is_made_anew)
{
    open_schedule();
    place_all(REFIT_ON_DEVICE);
    assert_way_back_is_made_anew();
}

SCHEDULE(a_rate_limit_bounds_the_bytes_of_a_batch)
{
    on.config.offload_rate_limit = KIB * KIB;
    open_schedule();
    place_all(REFIT_ON_DEVICE);
    assert_ok(rft_schedule_offload(&on.schedule, &on.table, on.image, NULL));
    for (uint32_t i = 0; i < on.schedule.plan.batch_count; i++)
        assert_in_range(on.schedule.plan.batches[i].bytes, 1, 64 * KIB);
}

static refit_status open_and_close(void)
{
    char byte;
    refit_config config;
    rft_region_table table;
    rft_schedule schedule;
    refit_region_id id;
    refit_region_desc desc = {.size = sizeof desc, .name = "r", .memory = &byte, .bytes = 1};
    refit_config_init(&config, sizeof config);
    rft_region_table_open(&table, on.device);
    refit_status status = rft_region_table_add(&table, &desc, &id, NULL);
    if (status == REFIT_OK) status = rft_schedule_open(&schedule, &table, &config, 16, NULL);
    if (status == REFIT_OK) rft_schedule_close(&schedule);
    rft_region_table_close(&table);
    return status;
}

TEST(every_failed_allocation_is_an_error)
{
    on.device = NULL;
    for (uint64_t nth = 1;; nth++) {
        failing_alloc_begin(nth);
        refit_status status = refit_device_open("host", NULL, &on.device, NULL);
        if (status == REFIT_OK) status = open_and_close();
        assert_ok(refit_device_close(on.device, NULL));
        on.device = NULL;
        if (!failing_alloc_end()) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
}

int main(void)
{
    return test_run("schedule");
}
