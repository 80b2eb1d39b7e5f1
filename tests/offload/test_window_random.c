/*
 * Regions that live on the host under random calls of the window and the offloader, in any order,
 * on a device that fails at random: every byte is, at every moment, what a model says. Seeded, so
 * that what fails once fails again: REFIT_WINDOW_SEED runs one seed, REFIT_WINDOW_SEEDS so many.
 * In every other run two regions are masters of weights, which are their rounding or not.
 */
#include "tests/offload/windows.h"

#include <stdlib.h>

#include "kernels/cast.h"

#define LIST_MOST   64
#define BORN_MOST   512
#define READ_LOCKS  2
#define CALLS       400
#define SEEDS       40
#define SLOTS_BYTES (4u * 131072u)

/* What the calls so far must have led to. */
typedef enum model_state {
    AWAY,     /* in the image, no step is under way; copies out may be */
    STEPPING, /* between windows */
    IN_USE,
    RESIDENT,
} model_state;

static struct model {
    model_state state;
    bool faulty; /* a fault was ordered, so a call may fail */
    bool copies; /* copies out of a step may be under way */
    void *slots; /* for set_memory */
    bool borrowed;
    void *born[BORN_MOST];
    uint32_t born_count;
    refit_read_lock *read_locks[READ_LOCKS];
    uint32_t stepped; /* parts of the list */
    uint32_t windows; /* that were stepped */
} now;

static uint32_t below(scene *on, uint32_t limit)
{
    return (uint32_t)seeded_below(&on->seed, limit);
}

/* ---- Open and close -------------------------------------------------------------------------- */

static scene *open_model(uint64_t seed)
{
    static const char *const counts[] = {"1", "2", "3", "4"};
    uint64_t draw = seed * 0x9E3779B97F4A7C15u + 1;
    const char *windows = counts[seeded_below(&draw, 4)];
    const char *const settings[] = {
        seeded_below(&draw, 3) == 0 ? "offload.verify=true" : "offload.verify=false",
        seeded_below(&draw, 3) == 0 ? "offload.background=true" : "offload.background=false",
        seeded_below(&draw, 6) == 0 ? "offload.rate_limit=1GiB" : NULL, NULL};
    scene *on = open_scene(&(opening){.kind = seed % 2 == 0 ? MIXED_MASTERS : MIXED,
                                      .windows = windows,
                                      .settings = settings,
                                      .empty = true});
    on->seed = draw;
    now = (struct model){.state = AWAY};
    assert_ok(refit_memory_alloc(on->plain, SLOTS_BYTES, &now.slots, &on->error));
    return on;
}

/* Device memory of the test's own; orders to fail are meant for others, but count these calls too.
 */
static void *take(scene *on, uint64_t bytes)
{
    void *memory = NULL;
    for (int tries = 0; refit_memory_alloc(on->device, bytes, &memory, &on->error); tries++)
        assert_true(tries < 8);
    return memory;
}

static void give(scene *on, void *memory)
{
    for (int tries = 0; refit_memory_free(on->device, memory, &on->error) != REFIT_OK; tries++)
        assert_true(tries < 8);
}

/* No call fails any more. */
static void heal(scene *on)
{
    faulty_device_reset(on->device);
    faulty_device_go(on->device);
}

static void free_born(scene *on)
{
    for (uint32_t at = 0; at < now.born_count; at++)
        give(on, now.born[at]);
    now.born_count = 0;
}

/* Brings it to AWAY with all bytes in the image. Failures of before are told, and then no more. */
static void settle_model(scene *on)
{
    heal(on);
    uint32_t failures = 0;
    UNTIL_OK(on, failures, end(on));
    UNTIL_OK(on, failures, wait_for(on, TIMEOUT_MS));
    if (now.state != RESIDENT) now.state = AWAY;
    now.faulty = now.copies = false;
    free_born(on);
}

static void release_leases(void)
{
    for (uint32_t at = 0; at < READ_LOCKS; at++) {
        refit_read_lock_release(now.read_locks[at]);
        now.read_locks[at] = NULL;
    }
}

static void close_model(scene *on)
{
    release_leases();
    settle_model(on);
    assert_ok(refit_window_close(on->window, &on->error)); /* it may have these slots */
    assert_ok(refit_window_open(on->offloader, &on->window, &on->error));
    assert_ok(refit_memory_free(on->plain, now.slots, &on->error));
    for (uint32_t at = 0; at < on->regions; at++) {
        give(on, on->memory[at]);
        on->memory[at] = NULL;
    }
    close_scene(on);
}

/* ---- What must hold ------------------------------------------------------------------------- */

/* REFIT_OK, unless a fault was ordered. */
static bool passed(scene *on, refit_status status)
{
    bool expected = now.faulty && status != REFIT_ERR_STATE && status != REFIT_ERR_CORRUPT &&
                    status != REFIT_ERR_INVALID && on->error.text[0] != '\0';
    if (status != REFIT_OK && !expected) fail_msg("%d: %s", status, on->error.text);
    return status == REFIT_OK;
}

/* A call that a step which is under way refuses; true: it is. */
static bool refused_in_step(refit_status status)
{
    if (now.state != STEPPING && now.state != IN_USE) return false;
    assert_int_equal(status, REFIT_ERR_STATE);
    return true;
}

static bool is_read_locked(void)
{
    return now.read_locks[0] != NULL || now.read_locks[1] != NULL;
}

/* Is the region in the image as what its weights lack? */
static bool is_coded(scene *on, uint32_t region)
{
    refit_region_info info = region_of(on->offloader, region);
    return info.host_bytes != info.bytes;
}

static void check_model(scene *on)
{
    /* Host memory may still be coming. */
    if (!passed(on, refit_offloader_prepare(on->offloader, TIMEOUT_MS, &on->error))) return;
    if (now.state == RESIDENT) check_device(on);
    for (uint32_t at = 0; at < on->regions && now.state != RESIDENT; at++) {
        refit_read_lock *held = NULL;
        void *bytes;
        const void *read;
        uint64_t count;
        if (is_coded(on, at)) {
            assert_ok(refit_read_lock_acquire(on->offloader, &held, &on->error));
            bool can = passed(on, refit_read_lock_read(held, at, &read, &count, &on->error));
            if (can) assert_memory_equal(read, on->expected[at], count);
            refit_read_lock_release(held);
            continue;
        }
        assert_ok(refit_window_host(on->window, at, &bytes, &count, &on->error));
        assert_int_equal(count, on->bytes[at]);
        assert_memory_equal(bytes, on->expected[at], count);
    }
}

static void scramble(scene *on, unsigned char *bytes, uint64_t count)
{
    uint64_t key = seeded_next(&on->seed);
    for (uint64_t i = 0; i < count; i++)
        bytes[i] = (unsigned char)(bytes[i] * 5u + key + i % 11);
}

/* Weights of masters that are on the device, and are to leave by them. */
static void round_weights(scene *on, uint32_t region)
{
    uint64_t count = on->bytes[region] / 4;
    if (on->weights[region] == NULL) return;
    uint16_t *weights = malloc(2 * count);
    assert_non_null(weights);
    rft_cast_bf16(weights, (const void *)on->expected[region], count);
    uint64_t others = below(on, 3) == 0 ? below(on, (uint32_t)count) : 0;
    for (uint64_t i = 0; i < others; i++)
        weights[i] = (uint16_t)seeded_next(&on->seed);
    test_write(on->plain, on->weights[region], weights, 2 * count);
    free(weights);
}

/* ---- A step --------------------------------------------------------------------------------- */

static void make_list(scene *on)
{
    on->count = 0;
    bool together = below(on, 3) == 0, births = below(on, 3) == 0;
    uint64_t most = 1000 + below(on, 60000);
    for (uint32_t at = 0; at < on->regions; at++) {
        if (below(on, 4) == 0) continue;
        uint32_t born = births && below(on, 3) == 0 ? REFIT_PART_NEW : 0;
        bool whole = is_coded(on, at);
        for (uint64_t offset = whole ? 0 : below(on, 2) * below(on, (uint32_t)on->bytes[at]);
             offset < on->bytes[at] && on->count < LIST_MOST;) {
            uint64_t left = on->bytes[at] - offset, bytes = left < most || whole ? left : most;
            bool joins = together && on->count > 0 && below(on, 4) == 0;
            add_part(on, at, born | (joins ? REFIT_PART_SAME_WINDOW : 0u), offset, bytes);
            offset += bytes + 64 * below(on, 3);
        }
    }
}

/* After a failure: is a step still under way? */
static bool is_stepping(scene *on)
{
    return refit_window_set_memory(on->window, now.slots, 1, 1, &on->error) == REFIT_ERR_STATE;
}

static void call_begin(scene *on)
{
    if (now.state != STEPPING && now.state != IN_USE) make_list(on);
    refit_stream_ref after = below(on, 2) == 0 ? on->stream : REFIT_STREAM_NONE;
    refit_status status = refit_window_begin(on->window, on->parts, on->count, after, &on->error);
    if (refused_in_step(status)) return;
    if (now.state == RESIDENT) assert_int_equal(status, REFIT_ERR_STATE);
    if (now.state == RESIDENT) return;
    if (is_read_locked()) {
        assert_true(status == REFIT_ERR_BUSY || now.faulty);
        assert_int_not_equal(status, REFIT_OK);
        return;
    }
    if (status == REFIT_ERR_LIMIT && now.borrowed) return; /* the caller's windows are too small */
    if (!passed(on, status)) {
        now.stepped = on->count = 0;
        if (is_stepping(on)) now.state = STEPPING; /* with copies in that only end can wait for */
        return;
    }
    now.copies = false; /* begin has waited */
    free_born(on);
    now.stepped = 0;
    now.state = STEPPING;
}

static void call_next(scene *on)
{
    refit_window_view before = on->view;
    refit_status status = next(on);
    if (now.state == AWAY || now.state == RESIDENT) {
        assert_int_equal(status, REFIT_ERR_STATE);
        return;
    }
    if (!passed(on, status)) return;
    assert_int_equal(on->view.first, now.stepped);
    if (now.state == IN_USE) assert_int_equal(on->view.count, before.count);
    bool again = now.state == IN_USE;
    now.state = on->view.count > 0 ? IN_USE : STEPPING;
    if (on->view.count == 0) assert_int_equal(now.stepped, on->count);
    for (uint32_t at = 0; at < on->view.count && !again; at++) {
        const refit_window_part *part = &on->parts[on->view.first + at];
        const void *memory = on->view.memory[at], *expected = on->expected[part->region];
        if ((part->flags & REFIT_PART_NEW) != 0) assert_null(memory);
        if ((part->flags & REFIT_PART_NEW) != 0) continue;
        assert_device_equal(on->plain, memory, (const char *)expected + part->offset, part->bytes);
    }
}

/* Where the bytes of the part are on the device. */
static void *memory_of(scene *on, uint32_t number)
{
    const refit_window_part *part = &on->parts[number];
    if ((part->flags & REFIT_PART_NEW) == 0) return on->view.memory[number - on->view.first];
    assert_true(now.born_count < BORN_MOST);
    void *memory = take(on, part->bytes);
    now.born[now.born_count++] = memory;
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
        if (counts && is_coded(on, part->region)) round_weights(on, part->region);
        free(bytes);
    }
}

static void call_done(scene *on)
{
    refit_stream_ref stream = below(on, 2) == 0 ? on->stream : REFIT_STREAM_NONE;
    if (now.state != IN_USE) {
        refit_status status = refit_window_done(on->window, stream, &on->error);
        assert_true(status == REFIT_ERR_STATE || now.faulty);
        return;
    }
    if (on->view.count > 0 && (on->parts[on->view.first].flags & REFIT_PART_NEW) != 0 &&
        now.born_count == 0 && below(on, 2) == 0) {
        assert_invalid(refit_window_done(on->window, stream, &on->error));
    }
    step_parts(on, true);
    (void)passed(on, refit_window_done(on->window, stream, &on->error));
    now.stepped = on->view.first + on->view.count;
    now.windows++;
    now.state = STEPPING;
    now.copies = true;
    assert_int_equal(refit_window_progress(on->window), now.stepped);
}

static void call_end(scene *on)
{
    if (now.state == IN_USE && below(on, 2) == 0) step_parts(on, false);
    if (!passed(on, end(on)) && is_stepping(on)) return;
    if (now.state == AWAY || now.state == RESIDENT) return;
    now.state = AWAY;
}

static void call_wait(scene *on)
{
    uint32_t timeout_ms = below(on, 2) == 0 ? 0 : TIMEOUT_MS;
    refit_status status = wait_for(on, timeout_ms);
    if (status == REFIT_ERR_TIMEOUT && timeout_ms == 0) return;
    if (!passed(on, status)) return;
    if (now.state != IN_USE) free_born(on);
    now.copies = false;
    if (now.state == AWAY && !is_read_locked() && below(on, 3) == 0) check_model(on);
}

/* ---- Between steps -------------------------------------------------------------------------- */

static void call_host(scene *on)
{
    void *bytes;
    uint64_t count;
    uint32_t region = below(on, on->regions);
    refit_status status = refit_window_host(on->window, region, &bytes, &count, &on->error);
    if (now.state != AWAY) {
        assert_int_equal(status, REFIT_ERR_STATE);
    } else if (is_read_locked()) {
        assert_int_equal(status, REFIT_ERR_BUSY);
    } else if (now.copies && status == REFIT_ERR_BUSY) {
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
        refit_window_set_memory(on->window, own ? NULL : now.slots, bytes, windows, &on->error);
    if (refused_in_step(status) || (now.copies && status == REFIT_ERR_BUSY)) return;
    if (passed(on, status)) now.borrowed = !own;
}

static void call_trim(scene *on)
{
    refit_status status = refit_window_trim(on->window, &on->error);
    if (refused_in_step(status) || !passed(on, status)) return;
    now.borrowed = now.copies = false;
    free_born(on);
}

static void call_measure(scene *on)
{
    uint64_t bytes = 0;
    if (now.state != STEPPING && now.state != IN_USE) make_list(on);
    refit_status status =
        refit_window_measure(on->window, on->parts, on->count, &bytes, &on->error);
    if (refused_in_step(status) || (now.copies && status == REFIT_ERR_BUSY)) return;
    if (passed(on, status)) assert_true(bytes % 512 == 0 && (bytes > 0) == (on->count > 0));
}

static void call_reopen(scene *on)
{
    if (now.state == STEPPING || now.state == IN_USE) now.state = AWAY;
    if (!passed(on, refit_window_close(on->window, &on->error))) {
        settle_model(on);
        assert_ok(refit_window_close(on->window, &on->error));
    }
    free_born(on);
    now.copies = now.borrowed = false;
    for (int tries = 0; tries < 2; tries++) {
        refit_status status = refit_window_open(on->offloader, &on->window, &on->error);
        assert_int_equal(status, tries == 0 ? REFIT_OK : REFIT_ERR_BUSY);
    }
}

/* ---- Read locks ---------------------------------------------------------------------------------
 */

static void call_read_lock(scene *on)
{
    uint32_t at = below(on, READ_LOCKS);
    if (now.read_locks[at] == NULL) {
        refit_status status =
            refit_read_lock_acquire(on->offloader, &now.read_locks[at], &on->error);
        if (now.state == RESIDENT) assert_int_equal(status, REFIT_ERR_STATE);
        if (now.state == STEPPING || now.state == IN_USE) assert_int_equal(status, REFIT_ERR_BUSY);
        /* BUSY also with copies, or host memory that is still coming. */
        if (now.state == AWAY && status != REFIT_ERR_BUSY) (void)passed(on, status);
        return;
    }
    for (uint32_t region = 0; region < on->regions; region++) {
        const void *bytes;
        uint64_t count;
        refit_status status =
            refit_read_lock_read(now.read_locks[at], region, &bytes, &count, &on->error);
        if (now.state != AWAY && on->weights[region] != NULL) continue; /* they may be others */
        if (passed(on, status) && now.state == AWAY)
            assert_memory_equal(bytes, on->expected[region], count);
    }
    refit_read_lock_release(now.read_locks[at]);
    now.read_locks[at] = NULL;
}

/* ---- The other schedule --------------------------------------------------------------------- */

static void bind_some(scene *on)
{
    for (uint32_t at = 0; at < on->regions; at++) {
        if (region_of(on->offloader, at).bound != 0) continue;
        if (on->memory[at] == NULL) {
            on->memory[at] = take(on, on->bytes[at]);
            test_fill(on->plain, on->memory[at], 0x77, on->bytes[at]);
        }
        assert_ok(refit_offloader_bind(on->offloader, at, on->memory[at], &on->error));
    }
}

static void call_restore(scene *on)
{
    bool idle = now.state == AWAY || now.state == RESIDENT;
    if (idle) bind_some(on);
    refit_status status =
        refit_offloader_restore(on->offloader, REFIT_STREAM_NONE, NULL, &on->error);
    if (!idle) {
        assert_int_equal(status, REFIT_ERR_BUSY);
        return;
    }
    if (now.copies && status == REFIT_ERR_BUSY) return;
    if (status == REFIT_OK) status = refit_offloader_wait(on->offloader, TIMEOUT_MS, &on->error);
    if (!passed(on, status)) {
        heal(on);
        status = refit_offloader_wait(on->offloader, TIMEOUT_MS, &on->error); /* of before */
        assert_ok(restore_all(on->offloader, &on->error));
    }
    now.state = RESIDENT;
    now.copies = false;
    check_model(on);
    for (uint32_t at = 0; at < on->regions; at++) { /* trained there for a while */
        scramble(on, on->expected[at], on->bytes[at]);
        test_write(on->plain, on->memory[at], on->expected[at], on->bytes[at]);
        round_weights(on, at);
    }
}

/* A second plan for regions that are on the device; sometimes the image goes meanwhile. */
static void plan_again(scene *on)
{
    if (is_read_locked()) {
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
    for (int tries = 0; tries < 4 && status == REFIT_ERR_LIMIT; tries++)
        status = offload_all(on->offloader, &on->error);
    return status;
}

static void call_offload(scene *on)
{
    if (now.state != RESIDENT) {
        assert_ok(refit_offloader_offload(on->offloader, REFIT_STREAM_NONE, NULL, &on->error));
        assert_int_equal(refit_offloader_get_state(on->offloader), REFIT_OFFLOADED);
        return;
    }
    if (below(on, 4) == 0) plan_again(on);
    refit_status status = offload(on);
    if (is_read_locked()) {
        assert_int_equal(status, REFIT_ERR_BUSY);
        return;
    }
    if (!passed(on, status)) {
        heal(on);
        status = offload(on); /* copies of before may have broken, and that is told now */
        assert_ok(offload(on));
    }
    now.state = AWAY;
    for (uint32_t at = 0; at < on->regions; at++) {
        test_fill(on->plain, on->memory[at], 0x77, on->bytes[at]); /* used by others */
        if (below(on, 3) == 0) continue;
        assert_ok(refit_offloader_unbind(on->offloader, at, &on->error));
        give(on, on->memory[at]);
        on->memory[at] = NULL;
    }
}

/* ---- Faults --------------------------------------------------------------------------------- */

static void order_any(scene *on)
{
    static const faulty_slot slots[] = {
        FAULTY_COPY_BATCH,    FAULTY_COPY_BATCH,  FAULTY_EVENT_RECORD, FAULTY_EVENT_JOIN,
        FAULTY_MEMORY_ALLOC,  FAULTY_STREAM_CALL, FAULTY_MEMORY_FREE,  FAULTY_MASTER_ENCODE,
        FAULTY_MASTER_DECODE, FAULTY_HOST_PIN};
    faulty_slot slot = slots[below(on, COUNT_OF(slots))];
    uint32_t nth = 1 + below(on, 4);
    now.faulty = true;
    refit_status status = slot == FAULTY_MEMORY_ALLOC ? REFIT_ERR_DEVICE_MEMORY : REFIT_ERR_DEVICE;
    faulty_device_fail_times(on->device, slot, nth, 1 + below(on, 3), status);
}

/* Calls that do not wait, while nothing moves. Not with faults: a copy that fails to start is
 * waited for. */
static void stand_still(scene *on)
{
    if (now.faulty) return;
    faulty_device_stop(on->device);
    for (uint32_t i = 0; i < 3; i++) {
        if (below(on, 2) == 0) {
            refit_status status = wait_for(on, 0);
            if (status != REFIT_ERR_TIMEOUT) (void)passed(on, status);
        }
        if (below(on, 2) == 0 && now.state == AWAY && now.read_locks[0] == NULL) call_read_lock(on);
        (void)stats_of(on->offloader);
    }
    faulty_device_go(on->device);
}

/* ---- The calls ------------------------------------------------------------------------------ */

static const struct {
    void (*call)(scene *on);
    uint32_t weight;
} calls[] = {
    {call_next, 34},    {call_done, 32},  {call_begin, 14},     {call_end, 2},
    {call_wait, 8},     {call_host, 3},   {call_set_memory, 2}, {call_trim, 1},
    {call_measure, 1},  {call_reopen, 1}, {call_read_lock, 3},  {call_restore, 1},
    {call_offload, 10}, {order_any, 4},   {settle_model, 2},    {stand_still, 1},
};

static void call_any(scene *on)
{
    uint32_t all = 0;
    for (size_t at = 0; at < COUNT_OF(calls); at++)
        all += calls[at].weight;
    uint32_t drawn = below(on, all);
    size_t at = 0;
    while (drawn >= calls[at].weight)
        drawn -= calls[at++].weight;
    calls[at].call(on);
}

/* Returns how many windows were stepped. */
static uint32_t run(uint64_t seed)
{
    scene *on = open_model(seed);
    for (uint32_t at = 0; at < CALLS; at++) {
        call_any(on);
        if (at % 50 != 49) continue;
        release_leases();
        settle_model(on);
        check_model(on);
    }
    close_model(on);
    return now.windows;
}

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text == NULL ? otherwise : strtoull(text, NULL, 10);
}

TEST(any_calls_in_any_order_lose_no_byte)
{
    uint64_t one = from_environment("REFIT_WINDOW_SEED", 0), windows = 0;
    uint64_t seeds = from_environment("REFIT_WINDOW_SEEDS", SEEDS);
    for (uint64_t seed = one == 0 ? 1 : one; seed <= (one == 0 ? seeds : one); seed++)
        windows += run(seed);
    assert_true(one != 0 || windows > 4 * seeds); /* the calls reach something */
}

int main(void)
{
    return test_run("window_random");
}
