/* Regions that live on the host, and the windows in which they visit the device. */
#include "tests/offload/windows.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cast.h"

static const uint64_t states[] = {4096, 70000, 512, 1, 300000, 65536, 65536, 4099, 600000, 33333};
static const uint64_t masters[] = {5 * UNIT - 404, UNIT, 16384, 16380, 120004};
static const uint64_t little[] = {160000, 131072, 16384, 16380, 120004};
static const uint64_t three[] = {70000, 70000, 70000};

static const uint64_t mixed[] = {130000, 65536, 70000, 512, 1, 4099};

#define REGIONS(kind) (kind), COUNT_OF(kind)

static const struct {
    const uint64_t *bytes;
    uint32_t regions, coded, weights; /* the first so many have them */
} kinds[] = {[STATES] = {REGIONS(states), 0, 0}, [MASTERS] = {REGIONS(masters), 3, 4},
             [LITTLE] = {REGIONS(little), 3, 4}, [THREE] = {REGIONS(three), 0, 0},
             [MIXED] = {REGIONS(mixed), 0, 0},   [MIXED_MASTERS] = {REGIONS(mixed), 2, 2}};

/* ---- Open and close -------------------------------------------------------------------------- */

#define MIXED_SETTINGS                                                                             \
    {                                                                                              \
        "offload.piece_bytes=64KiB", "offload.slab_bytes=128KiB", "offload.batch=3",               \
            "offload.window_bytes=64KiB", NULL                                                     \
    }

static void configure(scene *on, const opening *how)
{
    static const char *const common[] = {"offload.timeout_ms=20s", "offload.take_turns=false",
                                         NULL};
    static const char *const of_kind[][6] = {
        [STATES] = {"offload.piece_bytes=64KiB", "offload.slab_bytes=512KiB", "offload.batch=3",
                    "offload.window_bytes=128KiB", NULL},
        [MASTERS] = {"offload.window_bytes=1MiB", NULL},
        [LITTLE] = {"offload.window_bytes=64KiB", NULL},
        [THREE] = {"offload.slab_bytes=64KiB", "offload.pin=require", "offload.window_bytes=128KiB",
                   NULL},
        [MIXED] = MIXED_SETTINGS,
        [MIXED_MASTERS] = MIXED_SETTINGS,
    };
    const char *windows = how->windows == NULL ? "2" : how->windows;
    refit_config_init(&on->config, sizeof on->config);
    set_each(&on->config, common);
    set_each(&on->config, of_kind[on->kind]);
    assert_ok(refit_config_set(&on->config, "offload.windows", windows, &on->error));
    set_each(&on->config, how->settings);
}

refit_status add_regions(scene *on)
{
    for (uint32_t at = 0; at < on->regions; at++) {
        char name[24];
        refit_region_id id;
        snprintf(name, sizeof name, "region.%u", at);
        refit_region_desc desc = {.size = sizeof desc,
                                  .name = name,
                                  .bytes = on->bytes[at],
                                  .memory = on->on_device ? on->memory[at] : NULL,
                                  .group = on->on_device || on->kind >= THREE ? at % 3 : 0,
                                  .priority = on->on_device ? -(int32_t)at : 0,
                                  .placement =
                                      on->on_device ? REFIT_PLACEMENT_DEVICE : REFIT_PLACEMENT_HOST,
                                  .weights = on->weights[at]};
        RFT_TRY(refit_offloader_add(on->offloader, &desc, &id, &on->error));
        assert_int_equal(id, at);
    }
    return REFIT_OK;
}

void seal(scene *on)
{
    assert_ok(refit_offloader_seal(on->offloader, &on->error));
    assert_int_equal(refit_offloader_get_state(on->offloader),
                     on->on_device ? REFIT_RESIDENT : REFIT_OFFLOADED);
    if (on->on_device) return;
    assert_ok(refit_window_open(on->offloader, &on->window, &on->error));
}

static void open_offloader(scene *on)
{
    assert_ok(refit_offloader_open(on->device, &on->config, &on->offloader, &on->error));
    assert_ok(add_regions(on));
}

void reopen_with(scene *on, const char *setting)
{
    const char *const settings[] = {setting, NULL};
    assert_ok(refit_window_close(on->window, &on->error));
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    set_each(&on->config, settings);
    open_offloader(on);
    seal(on);
}

static void open_arrays(scene *on)
{
    for (uint32_t at = 0; at < on->regions; at++) {
        on->expected[at] = calloc(1, on->bytes[at]);
        on->rounded[at] = calloc(1, on->bytes[at]);
        assert_true(on->expected[at] != NULL && on->rounded[at] != NULL);
        if (on->on_device) {
            assert_ok(refit_memory_alloc(on->plain, on->bytes[at], &on->memory[at], &on->error));
        }
        if (at >= kinds[on->kind].weights) continue;
        assert_ok(refit_memory_alloc(on->plain, on->bytes[at] / 2, &on->weights[at], &on->error));
        test_fill(on->plain, on->weights[at], 0, on->bytes[at] / 2);
    }
}

scene *open_scene(const opening *how)
{
    static scene only;
    scene *on = &only;
    begin_without_blocks();
    *on = (scene){.kind = how->kind,
                  .on_device = how->on_device,
                  .seed = 88172645463325252u,
                  .view = {.size = sizeof on->view}};
    on->bytes = kinds[how->kind].bytes;
    on->regions = kinds[how->kind].regions;
    on->coded = kinds[how->kind].coded;
    configure(on, how);
    assert_ok(faulty_device_open(test_device_spec(how->device == NULL ? "host" : how->device),
                                 &on->device, &on->error));
    on->plain = faulty_device_inner(on->device);
    assert_ok(refit_stream_open(on->device, &on->stream, &on->error));
    open_arrays(on);
    if (on->on_device) renew(on);
    open_offloader(on);
    if (how->unsealed) return on;
    seal(on);
    if (!how->empty && !on->on_device) fill(on);
    return on;
}

void close_scene(scene *on)
{
    faulty_device_reset(on->device);
    faulty_device_let_pins(on->device);
    faulty_device_go(on->device);
    assert_ok(refit_window_close(on->window, &on->error));
    assert_ok(refit_offloader_close(on->offloader, &on->error));
    assert_ok(refit_stream_close(on->device, on->stream, &on->error));
    for (uint32_t at = 0; at < PARTS_MOST; at++)
        assert_ok(refit_memory_free(on->plain, on->born[at], &on->error));
    for (uint32_t at = 0; at < on->regions; at++) {
        assert_ok(refit_memory_free(on->plain, on->memory[at], &on->error));
        assert_ok(refit_memory_free(on->plain, on->weights[at], &on->error));
        free(on->expected[at]);
        free(on->rounded[at]);
    }
    assert_ok(refit_device_close(on->device, &on->error));
    assert_true(test_device_quiet());
    end_without_blocks();
}

/* ---- What the regions must hold -------------------------------------------------------------- */

void fill(scene *on)
{
    list_all(on, on->coded > 0 ? REFIT_PART_NEW : 0);
    if (on->coded > 0) step_all(on); /* masters come from memory of their own */
    for (uint32_t at = 0; at < on->regions && on->coded == 0; at++) {
        void *bytes;
        uint64_t count;
        assert_ok(refit_window_host(on->window, at, &bytes, &count, &on->error));
        assert_int_equal(count, on->bytes[at]);
        for (uint64_t i = 0; i < count; i++)
            on->expected[at][i] = (unsigned char)seeded_next(&on->seed);
        memcpy(bytes, on->expected[at], count);
    }
    settle(on);
    list_all(on, 0);
}

void settle(scene *on)
{
    assert_ok(wait_for(on, TIMEOUT_MS));
}

void check_region(scene *on, const refit_read_lock *held, uint32_t region)
{
    const void *bytes;
    uint64_t count;
    assert_ok(refit_read_lock_read(held, region, &bytes, &count, &on->error));
    assert_int_equal(count, on->bytes[region]);
    assert_memory_equal(bytes, on->expected[region], count);
}

void check_image(scene *on)
{
    refit_read_lock *held;
    settle(on);
    assert_ok(refit_read_lock_acquire(on->offloader, &held, &on->error));
    for (uint32_t region = 0; region < on->regions; region++)
        check_region(on, held, region);
    refit_read_lock_release(held);
}

void check_device(scene *on)
{
    for (uint32_t at = 0; at < on->regions; at++)
        assert_device_equal(on->plain, on->memory[at], on->expected[at], on->bytes[at]);
}

/* ---- Lists of parts -------------------------------------------------------------------------- */

void add_part(scene *on, uint32_t region, uint32_t flags, uint64_t offset, uint64_t bytes)
{
    assert_true(on->count < PARTS_MOST);
    on->parts[on->count++] = (refit_window_part){.size = sizeof(refit_window_part),
                                                 .region = region,
                                                 .flags = flags,
                                                 .offset = offset,
                                                 .bytes = bytes};
}

void list_part(scene *on, uint32_t region, uint32_t flags, uint64_t offset, uint64_t bytes)
{
    on->count = 0;
    add_part(on, region, flags, offset, bytes);
}

void list_all(scene *on, uint32_t flags)
{
    on->count = 0;
    for (uint32_t at = 0; at < on->regions; at++)
        add_part(on, at, flags, 0, on->bytes[at]);
}

void add_parts(scene *on, uint32_t region, uint64_t most)
{
    for (uint64_t offset = 0; offset < on->bytes[region]; offset += most) {
        uint64_t left = on->bytes[region] - offset;
        add_part(on, region, 0, offset, left < most ? left : most);
    }
}

/* Masters are listed in whole units, some of which are left out. */
void list_some(scene *on, bool with_born)
{
    on->count = 0;
    for (uint32_t at = 0; at < on->regions; at++) {
        bool units = on->coded > 0;
        if (seeded_below(&on->seed, 4) == 0) continue;
        uint32_t born = with_born && seeded_below(&on->seed, 5) == 0 ? REFIT_PART_NEW : 0;
        uint64_t most = units ? UNIT * (1 + seeded_below(&on->seed, 3))
                              : 1 + on->bytes[at] / 6 + seeded_below(&on->seed, 90000);
        uint64_t offset = units ? 0 : seeded_below(&on->seed, on->bytes[at]);
        while (offset < on->bytes[at]) {
            uint64_t left = on->bytes[at] - offset, bytes = left < most ? left : most;
            bool joins = on->count > 0 && seeded_below(&on->seed, 4) == 0;
            bool left_out = units && seeded_below(&on->seed, 5) == 0;
            uint32_t together = joins ? REFIT_PART_SAME_WINDOW : 0;
            if (!left_out) add_part(on, at, born | together, offset, bytes);
            offset += bytes + (units ? 0 : 100 * seeded_below(&on->seed, 3));
        }
    }
}

uint64_t bytes_of_list(const scene *on, bool coded, bool born)
{
    uint64_t bytes = 0;
    for (uint32_t at = 0; at < on->count; at++) {
        const refit_window_part *part = &on->parts[at];
        bool is_coded = part->region < on->coded;
        bool counts = born || (part->flags & REFIT_PART_NEW) == 0;
        if (is_coded == coded && counts) bytes += part->bytes;
    }
    return bytes;
}

/* ---- A step ---------------------------------------------------------------------------------- */

refit_status begin(scene *on)
{
    on->windows = 0;
    return refit_window_begin(on->window, on->parts, on->count, REFIT_STREAM_NONE, &on->error);
}

refit_status next(scene *on)
{
    return refit_window_next(on->window, &on->view, &on->error);
}

refit_status done(scene *on)
{
    return refit_window_done(on->window, REFIT_STREAM_NONE, &on->error);
}

refit_status end(scene *on)
{
    return refit_window_end(on->window, &on->error);
}

refit_status wait_for(scene *on, uint32_t timeout_ms)
{
    return refit_window_wait(on->window, timeout_ms, &on->error);
}

unsigned char stepped(unsigned char byte, uint64_t at)
{
    return (unsigned char)(byte * 5u + 1u + at % 7);
}

/* New masters, and their rounding but for some. */
static void new_masters(scene *on, const refit_window_part *part)
{
    unsigned char *to = on->expected[part->region] + part->offset; /* may be at any address */
    uint16_t *weights = on->rounded[part->region] + part->offset / 4;
    uint64_t count = part->bytes / 4;
    for (uint64_t k = 0; k < count; k++) {
        uint64_t drawn = seeded_next(&on->seed);
        uint32_t bits = (uint32_t)(drawn >> 20) & (drawn % 4096 == 0 ? UINT32_MAX : 0xBFFFFFFFu);
        float master;
        memcpy(&master, &bits, sizeof master);
        memcpy(to + 4 * k, &bits, sizeof bits);
        rft_cast_bf16(weights + k, &master, 1);
    }
    for (uint64_t k = on->spared; k < on->spared + on->spoiled && k < count; k++)
        weights[k] = (uint16_t)seeded_next(&on->seed);
}

void new_bytes(scene *on, const refit_window_part *part)
{
    unsigned char *expected = on->expected[part->region] + part->offset;
    if (on->coded > 0) new_masters(on, part);
    for (uint64_t i = 0; i < part->bytes && on->coded == 0; i++)
        expected[i] = stepped(expected[i], i);
}

static void write_weights(scene *on, const refit_window_part *part)
{
    if (on->weights[part->region] == NULL) return;
    test_write(on->plain, (char *)on->weights[part->region] + part->offset / 2,
               on->rounded[part->region] + part->offset / 4, part->bytes / 2);
}

/* Memory of the part's own, of this step. */
static void *give_birth(scene *on, uint32_t number, uint64_t bytes)
{
    void **born = &on->born[number];
    assert_ok(refit_memory_free(on->plain, *born, &on->error));
    assert_ok(refit_memory_alloc(on->plain, bytes, born, &on->error));
    assert_ok(refit_window_place(on->window, number, *born, &on->error));
    return *born;
}

static void step_part(scene *on, uint32_t number, void *memory)
{
    const refit_window_part *part = &on->parts[number];
    const unsigned char *expected = on->expected[part->region] + part->offset;
    if ((part->flags & REFIT_PART_NEW) != 0) {
        assert_null(memory);
        memory = give_birth(on, number, part->bytes);
    } else {
        assert_int_equal((uintptr_t)memory % 64, 0);
        assert_device_equal(on->plain, memory, expected, part->bytes);
    }
    new_bytes(on, part);
    test_write(on->plain, memory, expected, part->bytes);
    write_weights(on, part);
}

void step_window(scene *on)
{
    for (uint32_t at = 0; at < on->view.count; at++)
        step_part(on, on->view.first + at, on->view.memory[at]);
    on->windows++;
}

void step_next(scene *on)
{
    assert_ok(next(on));
    step_window(on);
}

bool step_windows(scene *on, uint32_t most)
{
    for (uint32_t at = 0; at < most; at++) {
        assert_ok(next(on));
        if (on->view.count == 0) {
            assert_int_equal(on->view.first, on->count);
            return false;
        }
        assert_int_equal(on->view.first, refit_window_progress(on->window));
        step_window(on);
        assert_ok(done(on));
        assert_int_equal(refit_window_progress(on->window), on->view.first + on->view.count);
    }
    return true;
}

void step_rest(scene *on)
{
    assert_false(step_windows(on, UINT32_MAX));
    assert_int_equal(refit_window_progress(on->window), on->count);
    assert_ok(end(on));
}

void step_all(scene *on)
{
    assert_ok(begin(on));
    step_rest(on);
}

/* ---- Failures -------------------------------------------------------------------------------- */

/* One step in which calls that fail are repeated. Returns how many failed. */
static uint32_t step_stubbornly(scene *on)
{
    uint32_t failures = 0;
    UNTIL_OK(on, failures, begin(on));
    for (;;) {
        UNTIL_OK(on, failures, next(on));
        if (on->view.count == 0) break;
        step_window(on);
        if (done(on) == REFIT_OK) continue;
        failures++;
        assert_int_equal(refit_window_progress(on->window), on->view.first + on->view.count);
    }
    UNTIL_OK(on, failures, end(on));
    UNTIL_OK(on, failures, wait_for(on, TIMEOUT_MS));
    return failures;
}

/* Steps meet each failure in turn: each part is stepped once all the same. Masters fit, do not fit,
 * and fit again. */
static void fail_calls(const fault *it, scene_kind kind)
{
    uint32_t calls = 1, failed = 0;
    for (uint32_t nth = 0; nth <= calls; nth++) { /* 0: none fails, and all are counted */
        scene *on = open_scene(&(opening){.kind = kind, .windows = nth % 2 == 0 ? "2" : "3"});
        if (kind == LITTLE) on->parts[2].flags = REFIT_PART_SAME_WINDOW;
        faulty_device_reset(on->device);
        if (nth > 0) order_fault(on->device, it, nth);
        uint32_t failures = step_stubbornly(on);
        for (int round = 0; kind == LITTLE && round < 2; round++) {
            on->spoiled = round == 0 ? 9000 : 0;
            failures += step_stubbornly(on);
        }
        refit_stats stats = stats_of(on->offloader);
        assert_int_equal(stats.step_failures, failures);
        if (kind == STATES) {
            assert_int_equal(stats.step_in_bytes_last, bytes_of_list(on, false, false));
            assert_int_equal(stats.step_out_bytes_last, bytes_of_list(on, false, true));
        }
        if (nth == 0) calls = faulty_device_calls(on->device, it->slot);
        if (nth == 0) assert_int_equal(failures, 0);
        failed += failures > 0;
        faulty_device_reset(on->device); /* this time there may have been fewer calls */
        check_image(on);
        step_all(on);
        check_image(on);
        close_scene(on);
    }
    if (!it->may_succeed && failed < calls / 2) print_error("%s: %u\n", it->name, failed);
    assert_true(it->may_succeed || failed >= calls / 2);
}

static bool is_met(faulty_slot slot, scene_kind kind)
{
    bool of_masters =
        slot == FAULTY_MASTER_ENCODE || slot == FAULTY_MASTER_DECODE || slot == FAULTY_ZERO;
    return kind == STATES ? !of_masters : slot != FAULTY_MEMORY_ALLOC;
}

void fail_each(scene_kind kind)
{
    static const fault faults[] = {
        {"a copy is refused", FAULTY_COPY_BATCH, REFIT_ERR_COPY, false},
        {"an event cannot be recorded", FAULTY_EVENT_RECORD, REFIT_ERR_DEVICE, false},
        {"no memory for windows", FAULTY_MEMORY_ALLOC, REFIT_ERR_DEVICE_MEMORY, true},
        {"masters are not encoded", FAULTY_MASTER_ENCODE, REFIT_ERR_DEVICE, false},
        {"masters are not decoded", FAULTY_MASTER_DECODE, REFIT_ERR_DEVICE, false},
        {"zeroing is refused", FAULTY_ZERO, REFIT_ERR_DEVICE, false},
    };
    for (size_t at = 0; at < COUNT_OF(faults); at++) {
        if (is_met(faults[at].slot, kind)) fail_calls(&faults[at], kind);
    }
}

/* ---- Others ---------------------------------------------------------------------------------- */

refit_status try_read_lock(scene *on)
{
    refit_read_lock *held;
    RFT_TRY(refit_read_lock_acquire(on->offloader, &held, &on->error));
    refit_read_lock_release(held);
    return REFIT_OK;
}

void renew(scene *on)
{
    for (uint32_t at = 0; at < on->regions; at++) {
        const refit_window_part all = {.region = at, .bytes = on->bytes[at]};
        new_bytes(on, &all);
        test_write(on->plain, on->memory[at], on->expected[at], all.bytes);
        write_weights(on, &all);
    }
}

void spoil(scene *on, uint32_t region, uint64_t count)
{
    for (uint64_t k = 0; k < count; k++)
        on->rounded[region][k] = (uint16_t)seeded_next(&on->seed);
    test_write(on->plain, on->weights[region], on->rounded[region], on->bytes[region] / 2);
}

void change_weight(scene *on, uint32_t region, uint64_t element)
{
    uint16_t weight = on->rounded[region][element] ^= 0x100;
    test_write(on->plain, (char *)on->weights[region] + 2 * element, &weight, sizeof weight);
}

void scrub(scene *on)
{
    for (uint32_t at = 0; at < on->regions; at++)
        test_fill(on->plain, on->memory[at], 0x77, on->bytes[at]);
}

void bind_all(scene *on)
{
    for (uint32_t at = 0; at < on->regions; at++) {
        if (on->memory[at] == NULL) {
            assert_ok(refit_memory_alloc(on->plain, on->bytes[at], &on->memory[at], &on->error));
        }
        assert_ok(refit_offloader_bind(on->offloader, at, on->memory[at], &on->error));
    }
    scrub(on);
}

void unbind_all(scene *on)
{
    for (uint32_t at = 0; at < on->regions; at++) {
        assert_ok(refit_offloader_unbind(on->offloader, at, &on->error));
        assert_ok(refit_memory_free(on->plain, on->memory[at], &on->error));
        on->memory[at] = NULL;
    }
}
