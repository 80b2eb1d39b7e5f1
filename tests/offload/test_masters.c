/*
 * Masters whose weights stay on the device: half of their bytes leave, and every bit of them
 * returns, whatever the weights are and whatever fails; weights that were changed are found before
 * a master is lost.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <refit.h>
#include <refit/window.h>

#include "kernels/cast.h"
#include "offload/masters.h"
#include "offload/offloader.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/faulty_device.h"
#include "tests/support/seeded.h"
#include "tests/support/test_device.h"

#define PATIENCE_MS     20000u
#define REGIONS         5u
#define assert_ok(call) assert_int_equal((call), REFIT_OK)

/* The last two go whole: one is too small, one has no weights. */
static const uint64_t sizes[REGIONS] = {700001, 5000, 262144, 1000, 30000};
#define CODED  3u
#define MASTER 0u
#define PLAIN  4u

typedef struct fixture {
    refit_device *device, *plain; /* that fails as ordered, and the one in it */
    refit_config config;
    refit_offloader *offloader;
    refit_region_id ids[REGIONS];
    char *memory[REGIONS];
    uint16_t *weights[REGIONS]; /* on the device; NULL: none */
    uint32_t *expected[REGIONS];
    uint16_t *rounded[REGIONS]; /* the weights, on the host */
    uint64_t seed;
    refit_error error;
} fixture;

static void new_masters(fixture *on)
{
    for (uint32_t i = 0; i < REGIONS; i++) {
        for (uint64_t k = 0; k < sizes[i]; k++) {
            uint32_t bits = (uint32_t)(seeded_next(&on->seed) >> 20);
            on->expected[i][k] = seeded_below(&on->seed, 4000) == 0 ? bits : bits & 0xBFFFFFFFu;
        }
        test_write(on->plain, on->memory[i], on->expected[i], 4 * sizes[i]);
        if (on->weights[i] == NULL) continue;
        rft_cast_bf16(on->rounded[i], (const void *)on->expected[i], sizes[i]);
        test_write(on->plain, on->weights[i], on->rounded[i], 2 * sizes[i]);
    }
}

static refit_region_desc desc_of(const fixture *on, uint32_t i)
{
    static const char *const names[REGIONS] = {"master.0", "master.1", "master.2", "small",
                                               "exp_avg"};
    return (refit_region_desc){.size = sizeof(refit_region_desc),
                               .name = names[i],
                               .memory = on->memory[i],
                               .bytes = 4 * sizes[i],
                               .group = i % 3,
                               .priority = -(int32_t)i,
                               .weights = on->weights[i]};
}

static void add_regions(fixture *on)
{
    for (uint32_t i = 0; i < REGIONS; i++) {
        refit_region_desc desc = desc_of(on, i);
        assert_ok(refit_offloader_add(on->offloader, &desc, &on->ids[i], &on->error));
    }
}

/* `settings`: "key=value" strings, ended by NULL; may itself be NULL. Not sealed. */
static void open_fixture(fixture *on, const char *const *settings)
{
    void *memory;
    memset(on, 0, sizeof *on);
    on->seed = 17;
    refit_config_init(&on->config, sizeof on->config);
    for (; settings != NULL && *settings != NULL; settings++) {
        char key[64];
        const char *value = strchr(*settings, '=') + 1;
        memcpy(key, *settings, (size_t)(value - 1 - *settings));
        key[value - 1 - *settings] = '\0';
        assert_ok(refit_config_set(&on->config, key, value, &on->error));
    }
    assert_ok(faulty_device_open(test_device_spec("host:capacity=64MiB"), &on->device, &on->error));
    on->plain = faulty_device_inner(on->device);
    assert_ok(refit_offloader_open(on->device, &on->config, &on->offloader, &on->error));
    for (uint32_t i = 0; i < REGIONS; i++) {
        assert_ok(refit_memory_alloc(on->device, 4 * sizes[i], &memory, &on->error));
        on->memory[i] = memory;
        on->expected[i] = malloc(4 * sizes[i]);
        on->rounded[i] = malloc(2 * sizes[i]);
        assert_true(on->expected[i] != NULL && on->rounded[i] != NULL);
        if (i == PLAIN) continue;
        assert_ok(refit_memory_alloc(on->device, 2 * sizes[i], &memory, &on->error));
        on->weights[i] = memory;
    }
    new_masters(on);
    add_regions(on);
}

static void seal(fixture *on)
{
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
}

static void close_fixture(fixture *on)
{
    faulty_device_reset(on->device);
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    for (uint32_t i = 0; i < REGIONS; i++) {
        assert_ok(refit_memory_free(on->device, on->memory[i], &on->error));
        if (on->weights[i] != NULL)
            assert_ok(refit_memory_free(on->device, on->weights[i], &on->error));
        free(on->expected[i]);
        free(on->rounded[i]);
    }
    assert_ok(refit_device_close(on->device, &on->error));
    assert_true(test_device_quiet());
}

static refit_status offload(fixture *on)
{
    RFT_TRY(refit_offloader_offload(on->offloader, REFIT_STREAM_NONE, NULL, &on->error));
    return refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error);
}

static refit_status restore(fixture *on)
{
    RFT_TRY(refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, NULL, &on->error));
    return refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error);
}

/* What the device has meanwhile is nothing of the masters'. */
static void scrub(fixture *on)
{
    for (uint32_t i = 0; i < REGIONS; i++) {
        test_fill(on->plain, on->memory[i], 0x77, 4 * sizes[i]);
    }
}

static void check_region(fixture *on, uint32_t i)
{
    assert_device_equal(on->plain, on->memory[i], on->expected[i], 4 * sizes[i]);
}

static void check_bytes(fixture *on)
{
    for (uint32_t i = 0; i < REGIONS; i++) {
        check_region(on, i);
    }
}

static void cycle(fixture *on)
{
    assert_ok(offload(on));
    scrub(on);
    assert_ok(restore(on));
    check_bytes(on);
}

static refit_region_info info_of(fixture *on, uint32_t i)
{
    refit_region_info info = {.size = sizeof info};
    assert_ok(refit_offloader_region(on->offloader, on->ids[i], &info, &on->error));
    return info;
}

static refit_stats stats_of(fixture *on)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_offloader_stats(on->offloader, &stats, &on->error));
    return stats;
}

/* Weights that are no rounding: `count` of the region, from the first on. */
static void spoil(fixture *on, uint32_t i, uint64_t count)
{
    for (uint64_t k = 0; k < count; k++) {
        on->rounded[i][k] = (uint16_t)seeded_next(&on->seed);
    }
    test_write(on->plain, on->weights[i], on->rounded[i], 2 * sizes[i]);
}

static void half_of_the_bytes_leave_and_all_return(void **state)
{
    (void)state;
    fixture on;
    open_fixture(&on, NULL);
    seal(&on);
    cycle(&on);
    uint64_t all = 0, coded = 0;
    for (uint32_t i = 0; i < REGIONS; i++) {
        uint64_t most = i < CODED ? 2 * sizes[i] + sizes[i] / 20 + 1024 : 4 * sizes[i];
        assert_in_range(info_of(&on, i).host_bytes, i < CODED ? 2 * sizes[i] : 4 * sizes[i], most);
        all += info_of(&on, i).host_bytes;
        if (i < CODED) coded += sizes[i];
    }
    refit_stats stats = stats_of(&on);
    assert_in_range(stats.offload_bytes_last, all - CODED * RFT_MASTERS_HEAD, all);
    assert_int_equal(stats.restore_bytes_last, stats.offload_bytes_last);
    uint64_t moved = stats.offload_bytes_last - 4 * (sizes[3] + sizes[PLAIN]);
    assert_in_range(moved, 2 * coded, 205 * coded / 100);
    for (int round = 0; round < 3; round++) {
        new_masters(&on);
        cycle(&on);
    }
    close_fixture(&on);
}

static void whole_moves_all_bytes(void **state)
{
    (void)state;
    static const char *const whole[] = {"offload.masters=whole", NULL};
    static const char *const pageable[] = {"use_pinned_optimizer_offload=false", NULL};
    for (int way = 0; way < 2; way++) {
        fixture on;
        uint64_t all = 0;
        open_fixture(&on, way == 0 ? whole : pageable);
        seal(&on);
        cycle(&on);
        for (uint32_t i = 0; i < REGIONS; i++) {
            all += 4 * sizes[i];
            assert_int_equal(info_of(&on, i).host_bytes, 4 * sizes[i]);
        }
        assert_int_equal(stats_of(&on).offload_bytes_last, all);
        close_fixture(&on);
    }
}

/* Stretches of one unit, in copies across many page-locks. */
static void stretches_and_slabs_of_any_size_return(void **state)
{
    (void)state;
    static const char *const settings[][6] = {
        {"offload.staging_bytes=1MiB", "offload.slab_bytes=64KiB", "offload.piece_bytes=36KiB",
         "offload.batch=2", "offload.verify=true", NULL},
        {"offload.staging_bytes=1MiB", "offload.slab_bytes=1MiB", "offload.alignment_bytes=16",
         NULL},
        {"offload.rate_limit=200MiB", "offload.staging_bytes=2MiB", NULL},
    };
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        fixture on;
        open_fixture(&on, settings[i]);
        seal(&on);
        cycle(&on);
        new_masters(&on);
        cycle(&on);
        close_fixture(&on);
    }
}

static void some_weights_that_are_no_rounding_fit(void **state)
{
    (void)state;
    fixture on;
    open_fixture(&on, NULL);
    seal(&on);
    spoil(&on, 0, 1500);
    spoil(&on, 1, 40);
    spoil(&on, 2, 4096);
    cycle(&on);
    close_fixture(&on);
}

static void check_misfit(fixture *on, const char *name)
{
    assert_int_equal(offload(on), REFIT_ERR_LIMIT);
    assert_non_null(strstr(on->error.text, name));
    assert_int_equal(refit_offloader_get_state(on->offloader), REFIT_FAILED);
    for (uint32_t i = 0; i < REGIONS; i++) {
        assert_int_equal(info_of(on, i).place, REFIT_ON_DEVICE);
    }
    check_bytes(on);
}

static void masters_that_do_not_fit_stay_and_leave_by_the_next_plan(void **state)
{
    (void)state;
    fixture on;
    open_fixture(&on, NULL);
    seal(&on);
    cycle(&on);
    uint64_t before = info_of(&on, 2).host_bytes;
    spoil(&on, 2, 8000);
    check_misfit(&on, "master.2");
    cycle(&on);
    assert_in_range(info_of(&on, 2).host_bytes, before + 8000, 3 * sizes[2]);
    spoil(&on, 2, sizes[2]);
    check_misfit(&on, "master.2");
    cycle(&on);
    assert_int_equal(info_of(&on, 2).host_bytes, 4 * sizes[2]);
    assert_int_equal(stats_of(&on).offload_failures, 2);
    close_fixture(&on);
}

static void masters_of_random_weights_travel_whole_from_the_second_plan_on(void **state)
{
    (void)state;
    fixture on;
    open_fixture(&on, NULL);
    seal(&on);
    for (uint32_t i = 0; i < CODED; i++) {
        spoil(&on, i, sizes[i]);
    }
    check_misfit(&on, "master.0");
    assert_ok(restore(&on));
    check_bytes(&on);
    cycle(&on);
    for (uint32_t i = 0; i < CODED; i++) {
        assert_int_equal(info_of(&on, i).host_bytes, 4 * sizes[i]);
    }
    close_fixture(&on);
}

static void a_plan_that_cannot_be_made_anew_is_told(void **state)
{
    (void)state;
    fixture on;
    open_fixture(&on, NULL);
    seal(&on);
    assert_ok(offload(&on));
    on.rounded[1][7] ^= 1;
    test_write(on.plain, on.weights[1], on.rounded[1], 2 * sizes[1]);
    assert_int_equal(restore(&on), REFIT_ERR_CORRUPT);
    spoil(&on, 0, sizes[0]); /* which is back */
    assert_int_equal(offload(&on), REFIT_ERR_LIMIT);
    assert_int_equal(offload(&on), REFIT_ERR_LIMIT);
    assert_non_null(strstr(on.error.text, "restore first"));
    on.rounded[1][7] ^= 1;
    test_write(on.plain, on.weights[1], on.rounded[1], 2 * sizes[1]);
    assert_ok(restore(&on));
    check_bytes(&on);
    cycle(&on);
    close_fixture(&on);
}

static void changed_weights_are_found_and_the_masters_can_still_return(void **state)
{
    (void)state;
    fixture on;
    open_fixture(&on, NULL);
    seal(&on);
    assert_ok(offload(&on));
    scrub(&on);
    on.rounded[MASTER][555555] ^= 0x100;
    test_write(on.plain, on.weights[MASTER], on.rounded[MASTER], 2 * sizes[MASTER]);
    for (int round = 0; round < 2; round++) {
        assert_int_equal(restore(&on), REFIT_ERR_CORRUPT);
        assert_non_null(strstr(on.error.text, "weights of region master.0"));
        assert_int_equal(refit_offloader_get_state(on.offloader), REFIT_FAILED);
        assert_int_equal(info_of(&on, MASTER).place, REFIT_ON_HOST);
        assert_int_equal(info_of(&on, 1).place, REFIT_ON_DEVICE);
        assert_int_equal(info_of(&on, 2).place, REFIT_ON_DEVICE);
    }
    check_region(&on, 1);
    check_region(&on, 2);
    check_region(&on, PLAIN);
    /* The block of that weight was not written. */
    char untouched[4 * RFT_MASTER_BLOCK];
    uint64_t block = 555555 / RFT_MASTER_BLOCK * sizeof untouched;
    memset(untouched, 0x77, sizeof untouched);
    assert_device_equal(on.plain, on.memory[MASTER] + block, untouched, sizeof untouched);
    on.rounded[MASTER][555555] ^= 0x100;
    test_write(on.plain, on.weights[MASTER], on.rounded[MASTER], 2 * sizes[MASTER]);
    assert_ok(restore(&on));
    check_bytes(&on);
    cycle(&on);
    close_fixture(&on);
}

static void waits_for_a_group_and_joins_tell_of_changed_weights(void **state)
{
    (void)state;
    fixture on;
    refit_stream_ref stream;
    refit_future *future;
    open_fixture(&on, NULL);
    seal(&on);
    assert_ok(refit_stream_open(on.device, &stream, &on.error));
    for (int way = 0; way < 3; way++) {
        assert_ok(offload(&on));
        spoil(&on, 1, 5);
        assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, &future, &on.error));
        assert_ok(refit_future_wait_group(future, 2, PATIENCE_MS, &on.error));
        if (way == 0) {
            assert_int_equal(refit_future_wait_group(future, 1, PATIENCE_MS, &on.error),
                             REFIT_ERR_CORRUPT);
        } else if (way == 1) {
            assert_int_equal(refit_future_join(future, stream, &on.error), REFIT_ERR_CORRUPT);
        } else {
            assert_int_equal(refit_future_join_group(future, 1, stream, &on.error),
                             REFIT_ERR_CORRUPT);
        }
        assert_non_null(strstr(on.error.text, "master.1"));
        assert_int_equal(refit_future_wait(future, PATIENCE_MS, &on.error), REFIT_ERR_CORRUPT);
        refit_future_close(future);
        rft_cast_bf16(on.rounded[1], (const void *)on.expected[1], sizes[1]);
        test_write(on.plain, on.weights[1], on.rounded[1], 2 * sizes[1]);
        assert_ok(restore(&on));
        check_bytes(&on);
    }
    assert_ok(refit_stream_close(on.device, stream, &on.error));
    close_fixture(&on);
}

static void weights_may_move(void **state)
{
    (void)state;
    fixture on;
    void *elsewhere;
    open_fixture(&on, NULL);
    seal(&on);
    assert_ok(offload(&on));
    scrub(&on);
    assert_ok(refit_memory_alloc(on.device, 2 * sizes[MASTER], &elsewhere, &on.error));
    test_write(on.plain, elsewhere, on.rounded[MASTER], 2 * sizes[MASTER]);
    test_fill(on.plain, on.weights[MASTER], 0, 2 * sizes[MASTER]);
    assert_ok(refit_offloader_bind_weights(on.offloader, on.ids[MASTER], elsewhere, &on.error));
    assert_ok(refit_memory_free(on.device, on.weights[MASTER], &on.error));
    on.weights[MASTER] = elsewhere;
    assert_ok(restore(&on));
    check_bytes(&on);
    new_masters(&on);
    cycle(&on);
    close_fixture(&on);
}

static void a_lease_reads_masters_whole(void **state)
{
    (void)state;
    fixture on;
    refit_lease *lease;
    open_fixture(&on, NULL);
    seal(&on);
    assert_ok(offload(&on));
    scrub(&on);
    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error));
    for (uint32_t i = 0; i < REGIONS; i++) {
        const void *bytes, *again;
        uint64_t count;
        assert_ok(refit_lease_read(lease, on.ids[i], &bytes, &count, &on.error));
        assert_int_equal(count, 4 * sizes[i]);
        assert_memory_equal(bytes, on.expected[i], count);
        assert_ok(refit_lease_read(lease, on.ids[i], &again, &count, &on.error));
        assert_ptr_equal(bytes, again);
    }
    refit_lease_release(lease);
    spoil(&on, 1, 1);
    const void *bytes = NULL;
    uint64_t count;
    assert_ok(refit_lease_acquire(on.offloader, &lease, &on.error));
    assert_int_equal(refit_lease_read(lease, on.ids[1], &bytes, &count, &on.error),
                     REFIT_ERR_CORRUPT);
    refit_lease_release(lease);
    close_fixture(&on);
}

/* What verify looks for: bytes of the image that are others. */
static void verify_compares_the_coded_image(void **state)
{
    (void)state;
    static const char *const settings[] = {"offload.verify=true", "offload.slab_bytes=256KiB",
                                           NULL};
    fixture on;
    open_fixture(&on, settings);
    seal(&on);
    cycle(&on);
    assert_ok(offload(&on));
    for (uint32_t i = 0; i < CODED; i++) {
        const rft_region *region = &on.offloader->regions.items[on.ids[i]];
        assert_ok(rft_masters_compare(on.offloader, region, &on.error));
        char *image = rft_image_of(on.offloader, region);
        image[region->host_bytes - region->room - 2 * 100] ^= 4;
        assert_int_equal(rft_masters_compare(on.offloader, region, &on.error), REFIT_ERR_CORRUPT);
        assert_non_null(strstr(on.error.text, region->name));
        image[region->host_bytes - region->room - 2 * 100] ^= 4;
    }
    const rft_region *region = &on.offloader->regions.items[on.ids[1]];
    char *low = (char *)rft_image_of(on.offloader, region) + RFT_MASTERS_HEAD + 1000;
    *low ^= 1;
    assert_int_equal(restore(&on), REFIT_ERR_CORRUPT);
    assert_non_null(strstr(on.error.text, "digest"));
    *low ^= 1;
    assert_ok(restore(&on));
    check_bytes(&on);
    close_fixture(&on);
}

static void regions_with_impossible_weights_are_refused(void **state)
{
    (void)state;
    fixture on;
    refit_region_id id;
    open_fixture(&on, NULL);
    refit_region_desc desc = {.size = sizeof desc,
                              .name = "new",
                              .memory = on.weights[0],
                              .bytes = 4098,
                              .weights = on.weights[1]};
    assert_int_equal(refit_offloader_add(on.offloader, &desc, &id, &on.error), REFIT_ERR_INVALID);
    assert_non_null(strstr(on.error.text, "4098 bytes"));
    desc.bytes = 40960;
    desc.weights = (const void *)((const char *)on.weights[1] + 1);
    assert_int_equal(refit_offloader_add(on.offloader, &desc, &id, &on.error), REFIT_ERR_INVALID);
    desc.weights = on.weights[2];
    desc.memory = (char *)on.weights[0] + 2;
    assert_int_equal(refit_offloader_add(on.offloader, &desc, &id, &on.error), REFIT_ERR_INVALID);
    assert_int_equal(refit_offloader_count(on.offloader), REGIONS);
    refit_offloader *offloader = on.offloader;
    assert_int_equal(
        refit_offloader_bind_weights(offloader, on.ids[PLAIN], on.weights[0], &on.error),
        REFIT_ERR_INVALID);
    assert_int_equal(refit_offloader_bind_weights(offloader, on.ids[0], NULL, &on.error),
                     REFIT_ERR_INVALID);
    assert_int_equal(refit_offloader_bind_weights(offloader, 99, on.weights[0], &on.error),
                     REFIT_ERR_NOT_FOUND);
    assert_int_equal(refit_offloader_bind_weights(NULL, 0, on.weights[0], &on.error),
                     REFIT_ERR_INVALID);
    /* Weights that leave themselves. */
    desc.memory = on.weights[0];
    desc.weights = NULL;
    assert_ok(refit_offloader_add(offloader, &desc, &id, &on.error));
    assert_int_equal(refit_offloader_seal(offloader, &on.error), REFIT_ERR_INVALID);
    assert_non_null(strstr(on.error.text, "master.0"));
    assert_int_equal(refit_offloader_get_state(offloader), REFIT_OPEN);
    close_fixture(&on);
}

static void without_device_memory_for_the_staging_a_seal_fails(void **state)
{
    (void)state;
    fixture on;
    open_fixture(&on, NULL);
    faulty_device_fail(on.device, FAULTY_MEMORY_ALLOC, 1, REFIT_ERR_DEVICE_MEMORY);
    assert_int_equal(refit_offloader_seal(on.offloader, &on.error), REFIT_ERR_DEVICE_MEMORY);
    assert_non_null(strstr(on.error.text, "offload.masters"));
    assert_int_equal(refit_offloader_get_state(on.offloader), REFIT_OPEN);
    seal(&on);
    cycle(&on);
    close_fixture(&on);
}

static void the_staging_goes_with_the_plan(void **state)
{
    (void)state;
    fixture on;
    open_fixture(&on, NULL);
    refit_device_info before = {.size = sizeof before}, after = {.size = sizeof after};
    assert_ok(refit_device_describe(on.plain, &before, &on.error));
    seal(&on);
    assert_ok(refit_device_describe(on.plain, &after, &on.error));
    assert_in_range(after.used_bytes - before.used_bytes, 1, on.config.offload_staging_bytes);
    cycle(&on);
    assert_ok(refit_offloader_unseal(on.offloader, &on.error));
    assert_ok(refit_offloader_trim(on.offloader, &on.error));
    assert_ok(refit_device_describe(on.plain, &after, &on.error));
    assert_int_equal(after.used_bytes, before.used_bytes);
    assert_ok(refit_offloader_clear(on.offloader, &on.error));
    add_regions(&on);
    seal(&on);
    cycle(&on);
    close_fixture(&on);
}

/* ---- Faults: every call of every slot fails in turn */

static refit_status try_cycle(fixture *on)
{
    refit_status status = refit_offloader_seal(on->offloader, &on->error);
    if (status == REFIT_OK) status = offload(on);
    if (status == REFIT_OK) scrub(on);
    return status == REFIT_OK ? restore(on) : status;
}

static void recover(fixture *on)
{
    faulty_device_reset(on->device);
    seal(on);
    refit_status status = refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error);
    (void)status; /* how the operation failed */
    for (uint32_t i = 0; i < REGIONS; i++) {
        if (info_of(on, i).place == REFIT_ON_DEVICE) check_region(on, i);
    }
    if (refit_offloader_get_state(on->offloader) != REFIT_RESIDENT) assert_ok(restore(on));
    check_bytes(on);
    cycle(on);
}

static const char *const verified[] = {"offload.verify=true", "offload.staging_bytes=1MiB", NULL};

typedef void (*order_fault)(refit_device *device, faulty_slot slot, uint32_t nth,
                            refit_status status);

static void fail_each(faulty_slot slot, order_fault order, refit_status status)
{
    fixture on;
    open_fixture(&on, verified);
    faulty_device_reset(on.device);
    assert_ok(try_cycle(&on));
    uint32_t calls = faulty_device_calls(on.device, slot);
    close_fixture(&on);
    for (uint32_t nth = 1; nth <= calls; nth++) {
        open_fixture(&on, verified);
        order(on.device, slot, nth, status);
        refit_status found = try_cycle(&on);
        if (found == REFIT_OK) check_bytes(&on);
        recover(&on);
        close_fixture(&on);
    }
}

static void each_call_that_fails_loses_nothing(void **state)
{
    (void)state;
    static const faulty_slot slots[] = {
        FAULTY_MASTER_ENCODE, FAULTY_MASTER_DECODE, FAULTY_ZERO,         FAULTY_COPY_BATCH,
        FAULTY_MEMORY_ALLOC,  FAULTY_MEMORY_FREE,   FAULTY_EVENT_RECORD, FAULTY_DIGEST};
    for (size_t i = 0; i < sizeof slots / sizeof slots[0]; i++) {
        fail_each(slots[i], faulty_device_fail, REFIT_ERR_DEVICE);
    }
}

static void each_copy_that_breaks_under_way_loses_nothing(void **state)
{
    (void)state;
    fail_each(FAULTY_COPY_BATCH, faulty_device_fail_later, REFIT_ERR_COPY);
    fail_each(FAULTY_ZERO, faulty_device_fail_later, REFIT_ERR_COPY);
}

static refit_status try_misfit(fixture *on)
{
    refit_lease *lease;
    const void *bytes;
    uint64_t count;
    refit_status status = refit_offloader_seal(on->offloader, &on->error);
    if (status == REFIT_OK) status = offload(on);
    if (status == REFIT_ERR_LIMIT) status = offload(on);
    RFT_TRY(status);
    RFT_TRY(refit_lease_acquire(on->offloader, &lease, &on->error));
    status = refit_lease_read(lease, on->ids[MASTER], &bytes, &count, &on->error);
    if (status == REFIT_OK) assert_memory_equal(bytes, on->expected[MASTER], count);
    refit_lease_release(lease);
    return status;
}

static void each_allocation_that_fails_loses_nothing(void **state)
{
    (void)state;
    bool failed = true;
    for (uint64_t nth = 1; failed; nth++) {
        fixture on;
        failing_alloc_begin(0);
        open_fixture(&on, NULL);
        spoil(&on, 2, 9000);
        failing_alloc_here(nth);
        refit_status status = try_misfit(&on);
        failed = failing_alloc_stop_here();
        if (failed) assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
        if (!failed) assert_ok(status);
        while (status == REFIT_ERR_HOST_MEMORY || status == REFIT_ERR_LIMIT) {
            status = try_misfit(&on);
        }
        assert_ok(status);
        scrub(&on);
        assert_ok(restore(&on));
        check_bytes(&on);
        close_fixture(&on);
        (void)failing_alloc_end();
        assert_in_range(nth, 1, 500);
    }
}

static void a_controller_makes_the_plan_anew_by_itself(void **state)
{
    (void)state;
    fixture on;
    refit_controller *controller;
    open_fixture(&on, NULL);
    assert_ok(refit_controller_open(on.offloader, NULL, &on.config, &controller, &on.error));
    for (uint64_t spoiled = 0; spoiled < sizes[2]; spoiled += 130000) {
        spoil(&on, 2, spoiled);
        assert_ok(refit_controller_clear(controller, REFIT_STREAM_NONE, &on.error));
        assert_int_equal(refit_controller_get_state(controller), REFIT_CLEARED);
        scrub(&on);
        assert_ok(refit_controller_return(controller, REFIT_STREAM_NONE, &on.error));
        assert_ok(refit_controller_join(controller, REFIT_STREAM_NONE, &on.error));
        check_bytes(&on);
    }
    refit_controller_close(controller);
    close_fixture(&on);
}

/* Masters that left the device by their weights do not visit it in windows. Those that live on the
 * host do: test_window_masters.c. */
static void windows_refuse_masters_that_left_by_their_weights(void **state)
{
    (void)state;
    fixture on;
    refit_window *window;
    void *bytes;
    uint64_t count;
    open_fixture(&on, NULL);
    seal(&on);
    assert_ok(offload(&on));
    assert_ok(refit_window_open(on.offloader, &window, &on.error));
    refit_window_part part = {.size = sizeof part, .region = on.ids[1], .bytes = 4096};
    assert_int_equal(refit_window_begin(window, &part, 1, REFIT_STREAM_NONE, &on.error),
                     REFIT_ERR_UNSUPPORTED);
    assert_non_null(strstr(on.error.text, "master.1"));
    assert_int_equal(refit_window_host(window, on.ids[1], &bytes, &count, &on.error),
                     REFIT_ERR_UNSUPPORTED);
    assert_ok(refit_window_close(window, &on.error));
    assert_ok(restore(&on));
    check_bytes(&on);
    close_fixture(&on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(half_of_the_bytes_leave_and_all_return),
        cmocka_unit_test(whole_moves_all_bytes),
        cmocka_unit_test(stretches_and_slabs_of_any_size_return),
        cmocka_unit_test(some_weights_that_are_no_rounding_fit),
        cmocka_unit_test(masters_that_do_not_fit_stay_and_leave_by_the_next_plan),
        cmocka_unit_test(masters_of_random_weights_travel_whole_from_the_second_plan_on),
        cmocka_unit_test(a_plan_that_cannot_be_made_anew_is_told),
        cmocka_unit_test(changed_weights_are_found_and_the_masters_can_still_return),
        cmocka_unit_test(waits_for_a_group_and_joins_tell_of_changed_weights),
        cmocka_unit_test(weights_may_move),
        cmocka_unit_test(a_lease_reads_masters_whole),
        cmocka_unit_test(verify_compares_the_coded_image),
        cmocka_unit_test(regions_with_impossible_weights_are_refused),
        cmocka_unit_test(without_device_memory_for_the_staging_a_seal_fails),
        cmocka_unit_test(the_staging_goes_with_the_plan),
        cmocka_unit_test(each_call_that_fails_loses_nothing),
        cmocka_unit_test(each_copy_that_breaks_under_way_loses_nothing),
        cmocka_unit_test(each_allocation_that_fails_loses_nothing),
        cmocka_unit_test(windows_refuse_masters_that_left_by_their_weights),
        cmocka_unit_test(a_controller_makes_the_plan_anew_by_itself),
    };
    return cmocka_run_group_tests_name("masters", tests, NULL, NULL);
}
