/*
 * Regions that live on the host under random calls of the window and the offloader, in any order,
 * on a device that fails at random: every byte is, at every moment, what a model says. Seeded, so
 * that what fails once fails again: REFIT_WINDOW_SEED runs one seed, REFIT_WINDOW_SEEDS so many.
 * In every other run two regions are masters of weights, which are their rounding or not.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <refit.h>

#include "kernels/cast.h"
#include "tests/support/faulty_device.h"
#include "tests/support/seeded.h"
#include "tests/support/test_device.h"

#define REGIONS     6
#define PARTS_MOST  64
#define BORN_MOST   512
#define LEASES      2
#define CALLS       400
#define SEEDS       40
#define PATIENCE_MS 20000u /* a deadline that only a hang reaches */
#define SLOTS_BYTES (4u * 131072u)

#define assert_ok(call) assert_int_equal((call), REFIT_OK)

static const uint64_t sizes[REGIONS] = {70000, 512, 1, 130000, 65536, 4099};

#define FIRST_MASTERS 3u
#define MASTERS       2u

/* What the calls so far must have led to. */
typedef enum model_state {
    AWAY,     /* in the image, no step is under way; copies out may be */
    STEPPING, /* between windows */
    IN_USE,
    RESIDENT,
} model_state;

typedef struct scene {
    refit_device *device;
    refit_device *plain; /* the one in it, which never fails */
    refit_offloader *offloader;
    refit_window *window;
    refit_stream_ref stream;
    unsigned char *expected[REGIONS];
    void *weights[REGIONS]; /* on the device; NULL: the region has none */
    model_state state;
    bool faulty; /* a fault was ordered, so a call may fail */
    bool copies; /* copies out of a step may be under way */
    void *memory[REGIONS];
    void *slots; /* for set_memory */
    bool borrowed;
    refit_window_part parts[PARTS_MOST];
    uint32_t count;
    refit_window_view view;
    void *born[BORN_MOST];
    uint32_t born_count;
    refit_lease *leases[LEASES];
    uint32_t stepped; /* parts of the list */
    uint32_t windows; /* that were stepped */
    uint64_t seed;
    refit_error error;
} scene;

static uint32_t below(scene *on, uint32_t limit)
{
    return (uint32_t)seeded_below(&on->seed, limit);
}

/* ---- Open and close ------------------------------------------------------------------------- */

static void set(scene *on, refit_config *config, const char *key, const char *value)
{
    assert_ok(refit_config_set(config, key, value, &on->error));
}

static void open_scene(scene *on, uint64_t seed)
{
    static const char *const counts[] = {"1", "2", "3", "4"};
    refit_config config;
    memset(on, 0, sizeof *on);
    on->seed = seed * 0x9E3779B97F4A7C15u + 1;
    refit_config_init(&config, sizeof config);
    set(on, &config, "offload.piece_bytes", "64KiB");
    set(on, &config, "offload.slab_bytes", "128KiB");
    set(on, &config, "offload.batch", "3");
    set(on, &config, "offload.timeout_ms", "20s");
    set(on, &config, "offload.take_turns", "false");
    set(on, &config, "offload.window_bytes", "64KiB");
    set(on, &config, "offload.windows", counts[below(on, 4)]);
    set(on, &config, "offload.verify", below(on, 3) == 0 ? "true" : "false");
    set(on, &config, "offload.background", below(on, 3) == 0 ? "true" : "false");
    if (below(on, 6) == 0) set(on, &config, "offload.rate_limit", "1GiB");
    assert_ok(faulty_device_open(test_device_spec("host"), &on->device, &on->error));
    on->plain = faulty_device_inner(on->device);
    assert_ok(refit_memory_alloc(on->device, SLOTS_BYTES, &on->slots, &on->error));
    assert_ok(refit_stream_open(on->device, &on->stream, &on->error));
    assert_ok(refit_offloader_open(on->device, &config, &on->offloader, &on->error));
    for (uint32_t at = FIRST_MASTERS; seed % 2 == 0 && at < FIRST_MASTERS + MASTERS; at++) {
        assert_ok(refit_memory_alloc(on->plain, sizes[at] / 2, &on->weights[at], &on->error));
        test_fill(on->plain, on->weights[at], 0, sizes[at] / 2);
    }
    for (uint32_t at = 0; at < REGIONS; at++) {
        char name[16];
        snprintf(name, sizeof name, "state.%u", at);
        refit_region_desc desc = {.size = sizeof desc,
                                  .name = name,
                                  .bytes = sizes[at],
                                  .group = at % 3,
                                  .home = REFIT_HOME_HOST,
                                  .weights = on->weights[at]};
        refit_region_id id;
        assert_ok(refit_offloader_add(on->offloader, &desc, &id, &on->error));
        on->expected[at] = calloc(1, sizes[at]);
        assert_non_null(on->expected[at]);
    }
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
    assert_ok(refit_window_open(on->offloader, &on->window, &on->error));
}

/* Device memory of the test's own; orders to fail are meant for others, but count these calls too.
 */
static void *take(scene *on, uint64_t bytes)
{
    void *memory = NULL;
    for (int tries = 0; refit_memory_alloc(on->device, bytes, &memory, &on->error); tries++) {
        assert_true(tries < 8);
    }
    return memory;
}

static void give(scene *on, void *memory)
{
    for (int tries = 0; refit_memory_free(on->device, memory, &on->error) != REFIT_OK; tries++) {
        assert_true(tries < 8);
    }
}

/* No call fails any more. */
static void heal(scene *on)
{
    faulty_device_reset(on->device);
    faulty_device_go(on->device);
}

static void free_born(scene *on)
{
    for (uint32_t at = 0; at < on->born_count; at++) {
        give(on, on->born[at]);
    }
    on->born_count = 0;
}

/* Brings it to AWAY with all bytes in the image. Failures of before are told, and then no more. */
static void settle(scene *on)
{
    heal(on);
    for (int tries = 0;; tries++) {
        if (tries >= 4) print_error("%s\n", on->error.text);
        assert_true(tries < 4);
        if (refit_window_end(on->window, &on->error) == REFIT_OK &&
            refit_window_wait(on->window, PATIENCE_MS, &on->error) == REFIT_OK) {
            break;
        }
    }
    if (on->state != RESIDENT) on->state = AWAY;
    on->faulty = on->copies = false;
    free_born(on);
}

static void release_leases(scene *on)
{
    for (uint32_t at = 0; at < LEASES; at++) {
        refit_lease_release(on->leases[at]);
        on->leases[at] = NULL;
    }
}

static void close_scene(scene *on)
{
    release_leases(on);
    settle(on);
    assert_ok(refit_window_close(on->window, &on->error));
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    assert_ok(refit_stream_close(on->device, on->stream, &on->error));
    assert_ok(refit_memory_free(on->device, on->slots, &on->error));
    for (uint32_t at = 0; at < REGIONS; at++) {
        assert_ok(refit_memory_free(on->device, on->memory[at], &on->error));
        assert_ok(refit_memory_free(on->plain, on->weights[at], &on->error));
        free(on->expected[at]);
    }
    refit_status status = refit_device_close(on->device, &on->error);
    if (status != REFIT_OK) print_error("%s\n", on->error.text);
    assert_ok(status);
    assert_true(test_device_quiet());
}

/* ---- What must hold ------------------------------------------------------------------------- */

/* REFIT_OK, unless a fault was ordered. */
static bool passed(scene *on, refit_status status)
{
    bool expected = on->faulty && status != REFIT_ERR_STATE && status != REFIT_ERR_CORRUPT;
    if (status != REFIT_OK && !expected) print_error("%d: %s\n", status, on->error.text);
    assert_true(status == REFIT_OK || on->faulty);
    if (status != REFIT_OK) {
        assert_true(on->error.text[0] != '\0');
        assert_int_not_equal(status, REFIT_ERR_STATE);
        assert_int_not_equal(status, REFIT_ERR_CORRUPT);
        assert_int_not_equal(status, REFIT_ERR_INVALID);
    }
    return status == REFIT_OK;
}

static bool is_leased(const scene *on)
{
    return on->leases[0] != NULL || on->leases[1] != NULL;
}

/* Is the region in the image as what its weights lack? */
static bool is_coded(scene *on, uint32_t region)
{
    refit_region_info info = {.size = sizeof info};
    assert_ok(refit_offloader_region(on->offloader, region, &info, &on->error));
    return info.host_bytes != info.bytes;
}

static void check_masters(scene *on, uint32_t region)
{
    refit_lease *lease;
    const void *bytes;
    uint64_t count;
    assert_ok(refit_lease_acquire(on->offloader, &lease, &on->error));
    if (passed(on, refit_lease_read(lease, region, &bytes, &count, &on->error))) {
        assert_int_equal(count, sizes[region]);
        assert_memory_equal(bytes, on->expected[region], count);
    }
    refit_lease_release(lease);
}

static void check_bytes(scene *on)
{
    for (uint32_t at = 0; at < REGIONS; at++) {
        void *bytes;
        uint64_t count;
        if (on->state != RESIDENT && is_coded(on, at)) {
            check_masters(on, at);
            continue;
        }
        if (on->state == RESIDENT) {
            assert_device_equal(on->plain, on->memory[at], on->expected[at], sizes[at]);
            continue;
        }
        assert_ok(refit_window_host(on->window, at, &bytes, &count, &on->error));
        assert_int_equal(count, sizes[at]);
        assert_memory_equal(bytes, on->expected[at], count);
    }
}

static void scramble(scene *on, unsigned char *bytes, uint64_t count)
{
    uint64_t key = seeded_next(&on->seed);
    for (uint64_t i = 0; i < count; i++) {
        bytes[i] = (unsigned char)(bytes[i] * 5u + key + i % 11);
    }
}

/* Weights of masters that are on the device, and are to leave by them. */
static void write_weights(scene *on, uint32_t region)
{
    uint64_t count = sizes[region] / 4;
    if (on->weights[region] == NULL) return;
    uint16_t *weights = malloc(2 * count);
    assert_non_null(weights);
    rft_cast_bf16(weights, (const void *)on->expected[region], count);
    uint64_t others = below(on, 3) == 0 ? below(on, (uint32_t)count) : 0;
    for (uint64_t i = 0; i < others; i++) {
        weights[i] = (uint16_t)seeded_next(&on->seed);
    }
    test_write(on->plain, on->weights[region], weights, 2 * count);
    free(weights);
}

/* ---- A step --------------------------------------------------------------------------------- */

static void make_list(scene *on)
{
    on->count = 0;
    bool together = below(on, 3) == 0, births = below(on, 3) == 0;
    uint64_t most = 1000 + below(on, 60000);
    for (uint32_t at = 0; at < REGIONS; at++) {
        if (below(on, 4) == 0) continue;
        uint32_t born = births && below(on, 3) == 0 ? REFIT_PART_BORN : 0;
        bool whole = is_coded(on, at);
        for (uint64_t offset = whole ? 0 : below(on, 2) * below(on, (uint32_t)sizes[at]);
             offset < sizes[at] && on->count < PARTS_MOST;) {
            uint64_t left = sizes[at] - offset, bytes = left < most || whole ? left : most;
            bool joins = together && on->count > 0 && below(on, 4) == 0;
            on->parts[on->count++] =
                (refit_window_part){.size = sizeof on->parts[0],
                                    .region = at,
                                    .flags = born | (joins ? REFIT_PART_TOGETHER : 0u),
                                    .offset = offset,
                                    .bytes = bytes};
            offset += bytes + 64 * below(on, 3);
        }
    }
}

/* After a failure: is a step still under way? */
static bool is_stepping(scene *on)
{
    return refit_window_set_memory(on->window, on->slots, 1, 1, &on->error) == REFIT_ERR_STATE;
}

static void call_begin(scene *on)
{
    if (on->state != STEPPING && on->state != IN_USE) make_list(on);
    refit_stream_ref after = below(on, 2) == 0 ? on->stream : REFIT_STREAM_NONE;
    refit_status status = refit_window_begin(on->window, on->parts, on->count, after, &on->error);
    if (on->state == RESIDENT || on->state == STEPPING || on->state == IN_USE) {
        assert_int_equal(status, REFIT_ERR_STATE);
        return;
    }
    if (is_leased(on)) {
        assert_true(status == REFIT_ERR_BUSY || on->faulty);
        assert_int_not_equal(status, REFIT_OK);
        return;
    }
    if (status == REFIT_ERR_LIMIT && on->borrowed) return; /* the caller's windows are too small */
    if (!passed(on, status)) {
        on->stepped = on->count = 0;
        if (is_stepping(on)) on->state = STEPPING; /* with copies in that only end can wait for */
        return;
    }
    on->copies = false; /* begin has waited */
    free_born(on);
    on->stepped = 0;
    on->state = STEPPING;
}

static void call_next(scene *on)
{
    refit_window_view view = {.size = sizeof view};
    refit_status status = refit_window_next(on->window, &view, &on->error);
    if (on->state == AWAY || on->state == RESIDENT) {
        assert_int_equal(status, REFIT_ERR_STATE);
        return;
    }
    if (!passed(on, status)) return;
    assert_int_equal(view.first, on->stepped);
    if (view.count == 0) {
        assert_int_equal(on->state, STEPPING);
        assert_int_equal(on->stepped, on->count);
        return;
    }
    if (on->state == IN_USE) assert_int_equal(view.count, on->view.count);
    bool again = on->state == IN_USE;
    on->state = IN_USE;
    on->view = view;
    for (uint32_t at = 0; at < view.count && !again; at++) {
        const refit_window_part *part = &on->parts[view.first + at];
        if ((part->flags & REFIT_PART_BORN) != 0) {
            assert_null(view.memory[at]);
            continue;
        }
        assert_device_equal(on->plain, view.memory[at], on->expected[part->region] + part->offset,
                            part->bytes);
    }
}

/* Where the bytes of the part are on the device. */
static void *memory_of(scene *on, uint32_t number)
{
    const refit_window_part *part = &on->parts[number];
    if ((part->flags & REFIT_PART_BORN) == 0) return on->view.memory[number - on->view.first];
    assert_true(on->born_count < BORN_MOST);
    void *memory = take(on, part->bytes);
    on->born[on->born_count++] = memory;
    assert_ok(refit_window_place(on->window, number, memory, &on->error));
    return memory;
}

/* The arithmetic on the window in use; counted only if `done` is to follow. */
static void step_parts(scene *on, bool counts)
{
    for (uint32_t at = 0; at < on->view.count; at++) {
        uint32_t number = on->view.first + at;
        const refit_window_part *part = &on->parts[number];
        unsigned char *expected = on->expected[part->region] + part->offset;
        unsigned char *bytes = malloc(part->bytes);
        assert_non_null(bytes);
        memcpy(bytes, expected, part->bytes);
        scramble(on, bytes, part->bytes);
        test_write(on->plain, memory_of(on, number), bytes, part->bytes);
        if (counts) memcpy(expected, bytes, part->bytes);
        if (counts && is_coded(on, part->region)) write_weights(on, part->region);
        free(bytes);
    }
}

static void call_done(scene *on)
{
    refit_stream_ref stream = below(on, 2) == 0 ? on->stream : REFIT_STREAM_NONE;
    if (on->state != IN_USE) {
        refit_status status = refit_window_done(on->window, stream, &on->error);
        assert_true(status == REFIT_ERR_STATE || on->faulty);
        return;
    }
    if (on->view.count > 0 && (on->parts[on->view.first].flags & REFIT_PART_BORN) != 0 &&
        on->born_count == 0 && below(on, 2) == 0) {
        assert_int_equal(refit_window_done(on->window, stream, &on->error), REFIT_ERR_INVALID);
    }
    step_parts(on, true);
    (void)passed(on, refit_window_done(on->window, stream, &on->error));
    on->stepped = on->view.first + on->view.count;
    on->windows++;
    on->state = STEPPING;
    on->copies = true;
    assert_int_equal(refit_window_progress(on->window), on->stepped);
}

static void call_end(scene *on)
{
    if (on->state == IN_USE && below(on, 2) == 0) step_parts(on, false);
    if (!passed(on, refit_window_end(on->window, &on->error)) && is_stepping(on)) return;
    if (on->state == AWAY || on->state == RESIDENT) return;
    on->state = AWAY;
}

static void call_wait(scene *on)
{
    uint32_t patience = below(on, 2) == 0 ? 0 : PATIENCE_MS;
    refit_status status = refit_window_wait(on->window, patience, &on->error);
    if (status == REFIT_ERR_TIMEOUT && patience == 0) return;
    if (!passed(on, status)) return;
    if (on->state != IN_USE) free_born(on);
    on->copies = false;
    if (on->state == AWAY && !is_leased(on) && below(on, 3) == 0) check_bytes(on);
}

/* ---- Between steps -------------------------------------------------------------------------- */

static void call_host(scene *on)
{
    void *bytes;
    uint64_t count;
    uint32_t region = below(on, REGIONS);
    refit_status status = refit_window_host(on->window, region, &bytes, &count, &on->error);
    if (on->state != AWAY) {
        assert_int_equal(status, REFIT_ERR_STATE);
    } else if (is_leased(on)) {
        assert_int_equal(status, REFIT_ERR_BUSY);
    } else if (on->copies && status == REFIT_ERR_BUSY) {
        return;
    } else if (status == REFIT_ERR_UNSUPPORTED) {
        assert_true(is_coded(on, region));
    } else if (passed(on, status)) {
        assert_memory_equal(bytes, on->expected[region], count);
        scramble(on, bytes, count);
        memcpy(on->expected[region], bytes, count);
    }
}

static void call_set_memory(scene *on)
{
    bool own = below(on, 2) == 0;
    uint32_t windows = 1 + below(on, 4);
    uint64_t bytes = 65536u * (1 + below(on, 2));
    refit_status status =
        refit_window_set_memory(on->window, own ? NULL : on->slots, bytes, windows, &on->error);
    if (on->state == STEPPING || on->state == IN_USE) {
        assert_int_equal(status, REFIT_ERR_STATE);
    } else if (!on->copies || status != REFIT_ERR_BUSY) {
        if (passed(on, status)) on->borrowed = !own;
    }
}

static void call_trim(scene *on)
{
    refit_status status = refit_window_trim(on->window, &on->error);
    if (on->state == STEPPING || on->state == IN_USE) {
        assert_int_equal(status, REFIT_ERR_STATE);
        return;
    }
    if (!passed(on, status)) return;
    on->borrowed = on->copies = false;
    free_born(on);
}

static void call_measure(scene *on)
{
    uint64_t bytes = 0;
    if (on->state == STEPPING || on->state == IN_USE) {
        assert_int_equal(refit_window_measure(on->window, on->parts, on->count, &bytes, &on->error),
                         REFIT_ERR_STATE);
        return;
    }
    make_list(on);
    refit_status status =
        refit_window_measure(on->window, on->parts, on->count, &bytes, &on->error);
    if (on->copies && status == REFIT_ERR_BUSY) return;
    if (passed(on, status)) assert_true(bytes % 512 == 0 && (bytes > 0) == (on->count > 0));
}

static void call_reopen(scene *on)
{
    if (on->state == STEPPING || on->state == IN_USE) on->state = AWAY;
    if (!passed(on, refit_window_close(on->window, &on->error))) {
        settle(on);
        assert_ok(refit_window_close(on->window, &on->error));
    }
    free_born(on);
    on->copies = on->borrowed = false;
    for (int tries = 0; tries < 2; tries++) {
        refit_status status = refit_window_open(on->offloader, &on->window, &on->error);
        assert_int_equal(status, tries == 0 ? REFIT_OK : REFIT_ERR_BUSY);
    }
}

/* ---- Leases --------------------------------------------------------------------------------- */

static void call_lease(scene *on)
{
    uint32_t at = below(on, LEASES);
    if (on->leases[at] == NULL) {
        refit_status status = refit_lease_acquire(on->offloader, &on->leases[at], &on->error);
        if (on->state == RESIDENT) {
            assert_int_equal(status, REFIT_ERR_STATE);
        } else if (on->state != AWAY) {
            assert_int_equal(status, REFIT_ERR_BUSY);
        } else if (status == REFIT_ERR_BUSY) { /* copies, or host memory that is still coming */
            return;
        } else {
            (void)passed(on, status);
        }
        return;
    }
    for (uint32_t region = 0; region < REGIONS; region++) {
        const void *bytes;
        uint64_t count;
        refit_status status = refit_lease_read(on->leases[at], region, &bytes, &count, &on->error);
        if (on->state != AWAY && on->weights[region] != NULL) continue; /* they may be others */
        if (passed(on, status) && on->state == AWAY)
            assert_memory_equal(bytes, on->expected[region], count);
    }
    refit_lease_release(on->leases[at]);
    on->leases[at] = NULL;
}

/* ---- The other schedule --------------------------------------------------------------------- */

static void bind(scene *on)
{
    for (uint32_t at = 0; at < REGIONS; at++) {
        refit_region_info info = {.size = sizeof info};
        assert_ok(refit_offloader_region(on->offloader, at, &info, &on->error));
        if (info.bound != 0) continue;
        if (on->memory[at] == NULL) {
            on->memory[at] = take(on, sizes[at]);
            test_fill(on->plain, on->memory[at], 0x77, sizes[at]);
        }
        assert_ok(refit_offloader_bind(on->offloader, at, on->memory[at], &on->error));
    }
}

static void call_restore(scene *on)
{
    bool idle = on->state == AWAY || on->state == RESIDENT;
    if (idle) bind(on);
    refit_status status =
        refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, NULL, &on->error);
    if (!idle) {
        assert_int_equal(status, REFIT_ERR_BUSY);
        return;
    }
    if (on->copies && status == REFIT_ERR_BUSY) return;
    if (status == REFIT_OK) status = refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error);
    if (!passed(on, status)) {
        heal(on);
        status = refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error); /* of before */
        assert_ok(refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, NULL, &on->error));
        assert_ok(refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error));
    }
    on->state = RESIDENT;
    on->copies = false;
    check_bytes(on);
    for (uint32_t at = 0; at < REGIONS; at++) { /* trained there for a while */
        scramble(on, on->expected[at], sizes[at]);
        test_write(on->plain, on->memory[at], on->expected[at], sizes[at]);
        write_weights(on, at);
    }
}

/* A second plan for regions that are on the device; sometimes the image goes meanwhile. */
static void plan_again(scene *on)
{
    if (is_leased(on)) {
        assert_int_equal(refit_offloader_unseal(on->offloader, &on->error), REFIT_ERR_BUSY);
        return;
    }
    if (below(on, 2) == 0) assert_ok(refit_offloader_trim(on->offloader, &on->error));
    assert_ok(refit_offloader_unseal(on->offloader, &on->error));
    if (!passed(on, refit_offloader_seal(on->offloader, &on->error))) {
        heal(on);
        assert_ok(refit_offloader_seal(on->offloader, &on->error));
    }
    assert_int_equal(refit_offloader_get_state(on->offloader), REFIT_RESIDENT);
}

/* Masters that do not fit into the plan leave by the next. */
static refit_status offload(scene *on)
{
    refit_status status = REFIT_ERR_LIMIT;
    for (int tries = 0; tries < 4 && status == REFIT_ERR_LIMIT; tries++) {
        RFT_TRY(refit_offloader_offload(on->offloader, REFIT_STREAM_NONE, NULL, &on->error));
        status = refit_offloader_finish(on->offloader, PATIENCE_MS, &on->error);
    }
    return status;
}

static void call_offload(scene *on)
{
    if (on->state != RESIDENT) {
        assert_ok(refit_offloader_offload(on->offloader, REFIT_STREAM_NONE, NULL, &on->error));
        assert_int_equal(refit_offloader_get_state(on->offloader), REFIT_OFFLOADED);
        return;
    }
    if (below(on, 4) == 0) plan_again(on);
    refit_status status = offload(on);
    if (is_leased(on)) {
        assert_int_equal(status, REFIT_ERR_BUSY);
        return;
    }
    if (!passed(on, status)) {
        heal(on);
        status = offload(on); /* copies of before may have broken, and that is told now */
        assert_ok(offload(on));
    }
    on->state = AWAY;
    for (uint32_t at = 0; at < REGIONS; at++) {
        test_fill(on->plain, on->memory[at], 0x77, sizes[at]); /* used by others */
        if (below(on, 3) == 0) continue;
        assert_ok(refit_offloader_unbind(on->offloader, at, &on->error));
        give(on, on->memory[at]);
        on->memory[at] = NULL;
    }
}

/* ---- Faults --------------------------------------------------------------------------------- */

static void order_fault(scene *on)
{
    static const faulty_slot slots[] = {
        FAULTY_COPY_BATCH,    FAULTY_COPY_BATCH,    FAULTY_EVENT_RECORD, FAULTY_EVENT_JOIN,
        FAULTY_MEMORY_ALLOC,  FAULTY_EVENT_WAIT,    FAULTY_STREAM_CALL,  FAULTY_MEMORY_FREE,
        FAULTY_MASTER_ENCODE, FAULTY_MASTER_DECODE, FAULTY_HOST_PIN};
    faulty_slot slot = slots[below(on, sizeof slots / sizeof slots[0])];
    uint32_t nth = 1 + below(on, 4);
    on->faulty = true;
    if (slot == FAULTY_COPY_BATCH && below(on, 2) == 0) {
        faulty_device_fail_later(on->device, slot, nth, REFIT_ERR_COPY);
    } else {
        refit_status status =
            slot == FAULTY_MEMORY_ALLOC ? REFIT_ERR_DEVICE_MEMORY : REFIT_ERR_DEVICE;
        /* An event that cannot be asked twice in a row counts as over. */
        uint32_t times = slot == FAULTY_EVENT_WAIT ? 1 : 1 + below(on, 3);
        faulty_device_fail_times(on->device, slot, nth, times, status);
    }
}

/* Calls that do not wait, while nothing moves. Not with faults: a copy that fails to start is
 * waited for. */
static void stand_still(scene *on)
{
    if (on->faulty) return;
    faulty_device_stop(on->device);
    for (uint32_t i = 0; i < 3; i++) {
        if (below(on, 2) == 0) {
            refit_status status = refit_window_wait(on->window, 0, &on->error);
            if (status != REFIT_ERR_TIMEOUT) (void)passed(on, status);
        }
        if (below(on, 2) == 0 && on->state == AWAY && on->leases[0] == NULL) call_lease(on);
        refit_stats stats;
        refit_stats_init(&stats, sizeof stats);
        assert_ok(refit_offloader_stats(on->offloader, &stats, &on->error));
    }
    faulty_device_go(on->device);
}

/* ---- The calls ------------------------------------------------------------------------------ */

typedef struct random_call {
    void (*call)(scene *on);
    uint32_t weight;
} random_call;

static const random_call calls[] = {
    {call_next, 34},    {call_done, 32},  {call_begin, 14},     {call_end, 2},
    {call_wait, 8},     {call_host, 3},   {call_set_memory, 2}, {call_trim, 1},
    {call_measure, 1},  {call_reopen, 1}, {call_lease, 3},      {call_restore, 1},
    {call_offload, 10}, {order_fault, 4}, {settle, 2},          {stand_still, 1},
};

static void call_any(scene *on)
{
    uint32_t all = 0;
    for (size_t at = 0; at < sizeof calls / sizeof calls[0]; at++) {
        all += calls[at].weight;
    }
    uint32_t drawn = below(on, all);
    size_t at = 0;
    while (drawn >= calls[at].weight) {
        drawn -= calls[at++].weight;
    }
    calls[at].call(on);
}

/* Returns how many windows were stepped. */
static uint32_t run(uint64_t seed)
{
    scene on;
    open_scene(&on, seed);
    for (uint32_t at = 0; at < CALLS; at++) {
        call_any(&on);
        if (at % 50 != 49) continue;
        release_leases(&on);
        settle(&on);
        check_bytes(&on);
    }
    close_scene(&on);
    return on.windows;
}

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text == NULL ? otherwise : strtoull(text, NULL, 10);
}

static void any_calls_in_any_order_lose_no_byte(void **state)
{
    (void)state;
    uint64_t one = from_environment("REFIT_WINDOW_SEED", 0), windows = 0;
    uint64_t seeds = from_environment("REFIT_WINDOW_SEEDS", SEEDS);
    for (uint64_t seed = one == 0 ? 1 : one; seed <= (one == 0 ? seeds : one); seed++) {
        windows += run(seed);
    }
    assert_true(one != 0 || windows > 4 * seeds); /* the calls reach something */
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(any_calls_in_any_order_lose_no_byte)};
    return cmocka_run_group_tests_name("window_random", tests, NULL, NULL);
}
