/* Activations on a device that fails: what failed is reported, once, by the group it belongs to;
 * the call can be repeated; no byte is lost, nothing leaks, no wait is without a limit. */
#include "tests/offload/layers.h"

#include <stdlib.h>
#include <string.h>

#include "tests/support/failing_alloc.h"

#define LAYERS 4
#define TRIES  4u

static const refit_stream_ref none = {NULL};

static refit_status commit(scene *on, const layer *of, refit_stream_ref stream)
{
    return refit_activations_commit(on->activations, of->group, stream, &on->error);
}

static refit_status wait_for(scene *on, const layer *of)
{
    return refit_activations_wait(on->activations, of->group, PATIENCE_MS, &on->error);
}

static refit_status release(scene *on, const layer *of, refit_stream_ref stream)
{
    return refit_activations_release(on->activations, of->group, stream, &on->error);
}

static void make_layers(scene *on, layer layers[LAYERS])
{
    for (int i = 0; i < LAYERS; i++) {
        layer_make(on, &layers[i], 5, 60000);
    }
}

static void end_layers(scene *on, layer layers[LAYERS])
{
    for (int i = 0; i < LAYERS; i++) {
        layer_end(on, &layers[i]);
    }
}

/* ---- Each call of the device fails once, and what failed is repeated ------------------------- */

/* Calls it until it succeeds; how often it failed. Each failure is the one that was ordered. */
#define UNTIL_OK(on, failures, call)                                                               \
    do {                                                                                           \
        for (uint32_t tries = 0; (call) != REFIT_OK; tries++) {                                    \
            if (tries >= TRIES) print_error("%s: %s\n", #call, (on)->error.text);                  \
            assert_true(tries < TRIES);                                                            \
            assert_non_null(strstr((on)->error.text, "as ordered by the test"));                   \
            (failures)++;                                                                          \
        }                                                                                          \
    } while (0)

/* Until the copies out have ended well. The bytes are in the arena then, and nowhere else. */
static uint32_t leave_stubbornly(scene *on, layer *of, refit_stream_ref stream)
{
    uint32_t failures = 0;
    refit_status status;
    UNTIL_OK(on, failures, refit_activations_begin(on->activations, &of->group, &on->error));
    for (uint32_t i = 0; i < of->count; i++) {
        layer_tensor *tensor = &of->tensors[i];
        UNTIL_OK(on, failures,
                 refit_activations_add(on->activations, of->group, tensor->memory, tensor->bytes,
                                       &tensor->place, &on->error));
        assert_int_equal(tensor->place, i);
    }
    do {
        UNTIL_OK(on, failures, commit(on, of, stream));
        UNTIL_OK(on, failures, wait_for(on, of)); /* a failure is told once, then it is over */
        status = refit_activations_join(on->activations, of->group, none, &on->error);
    } while (status == REFIT_ERR_STATE); /* OPEN again: the copies have failed */
    layer_free(on, of);
    return failures;
}

static uint32_t return_stubbornly(scene *on, layer *of, refit_stream_ref stream)
{
    uint32_t failures = 0, before;
    layer_take(on, of);
    do {
        UNTIL_OK(on, failures, layer_fetch(on, of, stream));
        before = failures;
        UNTIL_OK(on, failures, wait_for(on, of));
    } while (failures != before);
    layer_check(on, of);
    UNTIL_OK(on, failures, release(on, of, stream));
    return failures;
}

typedef struct fault_case {
    const char *name;
    faulty_slot slot;
    refit_status status;
    bool later;
    bool may_pass; /* another way leads to the same end */
} fault_case;

static const fault_case faults[] = {
    {"a copy is refused", FAULTY_COPY_BATCH, REFIT_ERR_COPY, false, false},
    {"a copy breaks", FAULTY_COPY_BATCH, REFIT_ERR_COPY, true, false},
    {"an event cannot be recorded", FAULTY_EVENT_RECORD, REFIT_ERR_DEVICE, false, false},
    {"an event cannot be joined", FAULTY_EVENT_JOIN, REFIT_ERR_DEVICE, false, true},
    {"an event cannot be waited for", FAULTY_EVENT_WAIT, REFIT_ERR_DEVICE, false, true},
    {"an event cannot be opened", FAULTY_EVENT_OPEN, REFIT_ERR_DEVICE, false, false},
};

static uint32_t run_stubbornly(scene *on)
{
    layer layers[LAYERS];
    uint32_t failures = 0;
    make_layers(on, layers);
    for (int i = 0; i < LAYERS; i++) {
        failures += leave_stubbornly(on, &layers[i], i % 2 == 0 ? on->stream : none);
    }
    for (int i = LAYERS; i-- > 0;) {
        failures += return_stubbornly(on, &layers[i], i % 2 == 0 ? on->stream : none);
    }
    end_layers(on, layers);
    return failures;
}

static void every_failure_can_be_repeated(void **state)
{
    (void)state;
    for (size_t at = 0; at < sizeof faults / sizeof faults[0]; at++) {
        const fault_case *fault = &faults[at];
        uint32_t calls = 1, failed = 0;
        for (uint32_t nth = 0; nth <= calls; nth++) { /* 0: none fails, and all are counted */
            scene on;
            scene_open(&on, "2MiB", NULL);
            faulty_device_reset(on.device);
            if (nth > 0 && fault->later) {
                faulty_device_fail_later(on.device, fault->slot, nth, fault->status);
            } else if (nth > 0) {
                faulty_device_fail(on.device, fault->slot, nth, fault->status);
            }
            uint32_t failures = run_stubbornly(&on);
            if (nth == 0) calls = faulty_device_calls(on.device, fault->slot);
            if (nth == 0) assert_int_equal(failures, 0);
            if (failures > 1) print_error("%s, call %u: %u\n", fault->name, nth, failures);
            assert_true(failures <= 1);
            failed += failures;
            if (fault->slot == FAULTY_COPY_BATCH) {
                assert_int_equal(scene_stats(&on).activation_failures, failures);
            }
            faulty_device_reset(on.device);
            assert_int_equal(run_stubbornly(&on), 0);
            scene_close(&on);
        }
        if (!fault->may_pass && failed != calls) print_error("%s: %u\n", fault->name, failed);
        assert_true(fault->may_pass || failed == calls);
        assert_true(calls > 0);
    }
}

/* What is opened: the arena, the streams, the events. Nothing stays open. */
static void an_open_that_fails_leaves_nothing(void **state)
{
    (void)state;
    static const faulty_slot slots[] = {FAULTY_EVENT_OPEN, FAULTY_STREAM_OPEN, FAULTY_HOST_PIN};
    for (size_t at = 0; at < sizeof slots / sizeof slots[0]; at++) {
        scene on;
        refit_activations *other;
        const char *const settings[] = {"offload.pin", "require", NULL};
        scene_open(&on, "1MiB", settings);
        refit_status status = REFIT_ERR_DEVICE;
        for (uint32_t nth = 1; status != REFIT_OK; nth++) {
            faulty_device_fail(on.device, slots[at], nth, REFIT_ERR_DEVICE);
            faulty_device_fail(on.device, FAULTY_STREAM_CLOSE, 1, REFIT_ERR_DEVICE);
            status = refit_activations_open(on.device, &on.config, &other, &on.error);
            assert_true(status == REFIT_OK || status == REFIT_ERR_DEVICE ||
                        status == REFIT_ERR_PIN);
            assert_true(nth > 1 || status != REFIT_OK);
        }
        faulty_device_reset(on.device);
        assert_ok(refit_activations_close(other, &on.error));
        scene_close(&on);
    }
}

static void each_allocation_may_fail(void **state)
{
    (void)state;
    bool came = true;
    for (uint64_t nth = 1; came; nth++) {
        scene on;
        layer of;
        refit_activations *other;
        failing_alloc_begin(0);
        scene_open(&on, "1MiB", NULL);
        layer_make(&on, &of, 5, 30000);
        failing_alloc_here(nth);
        refit_status status = refit_activations_open(on.device, &on.config, &other, &on.error);
        if (status == REFIT_OK) {
            refit_activations *first = on.activations;
            on.activations = other;
            uint32_t place = 0;
            status = refit_activations_begin(other, &of.group, &on.error);
            for (uint32_t i = 0; i < of.count && status == REFIT_OK; i++) {
                status = refit_activations_add(other, of.group, of.tensors[i].memory,
                                               of.tensors[i].bytes, &place, &on.error);
            }
            if (status == REFIT_OK) status = commit(&on, &of, on.stream);
            came = failing_alloc_stop_here();
            if (status == REFIT_OK) assert_ok(wait_for(&on, &of));
            assert_ok(refit_activations_close(other, &on.error));
            on.activations = first;
        } else {
            came = failing_alloc_stop_here();
            assert_true(came);
        }
        /* Threads of the host device are started with less memory, too. */
        assert_true(status == (came ? REFIT_ERR_HOST_MEMORY : REFIT_OK));
        layer_leave(&on, &of, on.stream);
        layer_return(&on, &of, on.stream);
        layer_end(&on, &of);
        scene_close(&on);
        assert_false(failing_alloc_end());
    }
}

/* ---- A failure belongs to one group ---------------------------------------------------------- */

/* All groups leave before the first is waited for. */
static void a_copy_out_that_breaks_is_reported_by_its_group(void **state)
{
    (void)state;
    uint32_t calls = 1;
    for (uint32_t nth = 0; nth <= calls; nth++) {
        scene on;
        layer layers[LAYERS];
        uint32_t failed = 0;
        scene_open(&on, "2MiB", NULL);
        make_layers(&on, layers);
        faulty_device_reset(on.device);
        if (nth > 0) faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, nth, REFIT_ERR_COPY);
        for (int i = 0; i < LAYERS; i++) {
            layer_add(&on, &layers[i]);
            assert_ok(commit(&on, &layers[i], on.stream));
        }
        if (nth == 0) calls = faulty_device_calls(on.device, FAULTY_COPY_BATCH);
        for (int i = 0; i < LAYERS; i++) {
            refit_status status = wait_for(&on, &layers[i]);
            if (status == REFIT_OK) continue;
            assert_int_equal(status, REFIT_ERR_COPY);
            assert_ok(wait_for(&on, &layers[i])); /* told once */
            failed++;
            layer_check(&on, &layers[i]);
            assert_ok(commit(&on, &layers[i], on.stream)); /* it is OPEN again */
            assert_ok(wait_for(&on, &layers[i]));
        }
        assert_int_equal(failed, nth > 0);
        assert_int_equal(scene_stats(&on).activation_failures, failed);
        for (int i = LAYERS; i-- > 0;) {
            layer_free(&on, &layers[i]);
            layer_return(&on, &layers[i], on.stream);
        }
        end_layers(&on, layers);
        scene_close(&on);
    }
}

static void a_copy_in_that_breaks_is_reported_by_its_group(void **state)
{
    (void)state;
    uint32_t calls = 1;
    for (uint32_t nth = 0; nth <= calls; nth++) {
        scene on;
        layer layers[LAYERS];
        uint32_t failed = 0;
        scene_open(&on, "2MiB", NULL);
        make_layers(&on, layers);
        for (int i = 0; i < LAYERS; i++) {
            layer_leave(&on, &layers[i], on.stream);
            layer_take(&on, &layers[i]);
        }
        faulty_device_reset(on.device);
        if (nth > 0) faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, nth, REFIT_ERR_COPY);
        for (int i = 0; i < LAYERS; i++) {
            assert_ok(layer_fetch(&on, &layers[i], on.stream));
        }
        if (nth == 0) calls = faulty_device_calls(on.device, FAULTY_COPY_BATCH);
        for (int i = 0; i < LAYERS; i++) {
            refit_status status = wait_for(&on, &layers[i]);
            if (status != REFIT_OK) {
                assert_int_equal(status, REFIT_ERR_COPY);
                assert_ok(layer_fetch(&on, &layers[i], on.stream)); /* the arena has the bytes */
                assert_ok(wait_for(&on, &layers[i]));
                failed++;
            }
            layer_check(&on, &layers[i]);
            assert_ok(release(&on, &layers[i], on.stream));
        }
        assert_int_equal(failed, nth > 0);
        end_layers(&on, layers);
        scene_close(&on);
    }
}

/* A group was fetched while it left, and the copies out break: that is what is reported, and its
 * memory on the device counts. */
static void copies_out_count_before_copies_in(void **state)
{
    (void)state;
    scene on;
    layer of;
    void *memories[TENSORS_MOST], *others[TENSORS_MOST];
    scene_open(&on, "1MiB", NULL);
    layer_make(&on, &of, 3, 10000);
    layer_add(&on, &of);
    layer_memories(&of, memories);
    faulty_device_stop(on.device);
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
    assert_ok(commit(&on, &of, on.stream));
    for (uint32_t i = 0; i < of.count; i++) {
        of.tensors[i].memory = NULL;
    }
    layer_take(&on, &of);
    assert_ok(layer_fetch(&on, &of, on.stream));
    faulty_device_go(on.device);
    assert_int_equal(wait_for(&on, &of), REFIT_ERR_COPY);
    assert_int_equal(layer_fetch(&on, &of, on.stream), REFIT_ERR_STATE); /* OPEN */
    layer_memories(&of, others);
    for (uint32_t i = 0; i < of.count; i++) {
        of.tensors[i].memory = memories[i];
    }
    layer_check(&on, &of);
    assert_ok(commit(&on, &of, on.stream));
    assert_ok(wait_for(&on, &of));
    layer_free(&on, &of);
    layer_return(&on, &of, on.stream);
    for (uint32_t i = 0; i < of.count; i++) {
        assert_ok(refit_memory_free(on.plain, others[i], &on.error));
    }
    layer_end(&on, &of);
    scene_close(&on);
}

/* Joined by the stream, so that the memory is gone when the failure comes to light: the fetch
 * reports it. */
static void a_fetch_reports_copies_out_that_have_failed(void **state)
{
    (void)state;
    scene on;
    layer of;
    scene_open(&on, "1MiB", NULL);
    layer_make(&on, &of, 3, 10000);
    layer_add(&on, &of);
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
    faulty_device_stop(on.device);
    assert_ok(commit(&on, &of, on.stream));
    assert_ok(refit_activations_join(on.activations, of.group, on.stream, &on.error));
    faulty_device_go(on.device);
    assert_ok(refit_stream_wait(on.device, on.stream, PATIENCE_MS, &on.error));
    assert_int_equal(layer_fetch(&on, &of, on.stream), REFIT_ERR_COPY);
    assert_ok(release(&on, &of, on.stream));
    layer_end(&on, &of);
    scene_close(&on);
}

/* Copies of a group that nothing asks for any more. */
static void a_released_group_takes_its_failure_along(void **state)
{
    (void)state;
    for (int back = 0; back < 2; back++) {
        scene on;
        layer old, new;
        scene_open(&on, "1MiB", NULL);
        layer_make(&on, &old, 3, 10000);
        layer_make(&on, &new, 3, 10000);
        if (back) {
            layer_leave(&on, &old, on.stream);
            layer_leave(&on, &new, on.stream);
            layer_take(&on, &old);
            layer_take(&on, &new);
        } else {
            layer_add(&on, &old);
        }
        faulty_device_stop(on.device);
        faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
        assert_ok(back ? layer_fetch(&on, &old, on.stream) : commit(&on, &old, on.stream));
        assert_ok(release(&on, &old, on.stream));
        if (!back) layer_add(&on, &new);
        assert_ok(back ? layer_fetch(&on, &new, on.stream) : commit(&on, &new, on.stream));
        faulty_device_go(on.device);
        assert_ok(wait_for(&on, &new));
        if (!back) layer_free(&on, &new);
        layer_return(&on, &new, on.stream);
        layer_end(&on, &old);
        layer_end(&on, &new);
        scene_close(&on);
    }
}

/* As many groups are released while they leave as there are records by then, and more: events are
 * not used again before the copies in front of them are over. The last of them breaks. */
static void many_released_groups_keep_their_failures(void **state)
{
    (void)state;
    for (uint32_t nth = 1; nth <= 40; nth++) {
        scene on;
        layer of;
        scene_open(&on, "1MiB", NULL);
        layer_make(&on, &of, 1, 100);
        faulty_device_stop(on.device);
        faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, nth, REFIT_ERR_COPY);
        for (uint32_t i = 0; i < nth; i++) {
            layer_add(&on, &of);
            assert_ok(commit(&on, &of, none));
            assert_ok(release(&on, &of, on.stream));
        }
        layer_add(&on, &of);
        assert_ok(commit(&on, &of, none));
        faulty_device_go(on.device);
        assert_ok(wait_for(&on, &of));
        layer_free(&on, &of);
        layer_return(&on, &of, on.stream);
        layer_end(&on, &of);
        scene_close(&on);
    }
}

/* ---- What the copies follow ------------------------------------------------------------------ */

/* The work that makes a tensor breaks: its copies have taken what was never made. */
static void work_that_breaks_fails_the_copies_behind_it(void **state)
{
    (void)state;
    for (int refused = 0; refused < 2; refused++) {
        scene on;
        layer of;
        scene_open(&on, "1MiB", NULL);
        layer_make(&on, &of, 1, 10000);
        void *source = test_host_alloc(on.plain, of.tensors[0].bytes);
        memcpy(source, of.tensors[0].expected, of.tensors[0].bytes);
        layer_add(&on, &of);
        faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_SYSTEM);
        assert_ok(refit_stream_copy(on.device, on.stream, of.tensors[0].memory, source,
                                    of.tensors[0].bytes, &on.error));
        if (refused) { /* its copies do not even start: the work's own failure is not lost */
            faulty_device_fail(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
            assert_int_equal(commit(&on, &of, on.stream), REFIT_ERR_SYSTEM);
        } else {
            assert_ok(commit(&on, &of, on.stream));
            assert_int_equal(wait_for(&on, &of), REFIT_ERR_SYSTEM);
        }
        assert_ok(refit_stream_copy(on.device, on.stream, of.tensors[0].memory, source,
                                    of.tensors[0].bytes, &on.error));
        assert_ok(commit(&on, &of, on.stream));
        assert_ok(wait_for(&on, &of));
        layer_free(&on, &of);
        layer_return(&on, &of, on.stream);
        test_host_free(on.plain, source, 10000);
        layer_end(&on, &of);
        scene_close(&on);
    }
}

/* The commit failed before it could follow the work, and the work then breaks: the next commit
 * waits for it, and reports it. */
static void work_that_breaks_behind_a_failed_commit_is_reported(void **state)
{
    (void)state;
    scene on;
    layer of;
    scene_open(&on, "1MiB", NULL);
    layer_make(&on, &of, 1, 10000);
    void *source = test_host_alloc(on.plain, of.tensors[0].bytes);
    memcpy(source, of.tensors[0].expected, of.tensors[0].bytes);
    layer_add(&on, &of);
    faulty_device_stop(on.device);
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_SYSTEM);
    assert_ok(refit_stream_copy(on.device, on.stream, of.tensors[0].memory, source,
                                of.tensors[0].bytes, &on.error));
    faulty_device_fail(on.device, FAULTY_EVENT_JOIN, 1, REFIT_ERR_DEVICE);
    assert_int_equal(commit(&on, &of, on.stream), REFIT_ERR_DEVICE);
    faulty_device_go(on.device);
    assert_int_equal(commit(&on, &of, on.stream), REFIT_ERR_SYSTEM);
    assert_ok(refit_stream_copy(on.device, on.stream, of.tensors[0].memory, source,
                                of.tensors[0].bytes, &on.error));
    assert_ok(commit(&on, &of, on.stream));
    assert_ok(wait_for(&on, &of));
    layer_free(&on, &of);
    layer_return(&on, &of, on.stream);
    test_host_free(on.plain, source, 10000);
    layer_end(&on, &of);
    scene_close(&on);
}

/* ---- Copies that cannot be waited for -------------------------------------------------------- */

/* The second batch is refused while the first stands: the call gives up at the deadline, and the
 * memory is not anyone's before those copies have ended. */
static void copies_of_a_failed_call_are_waited_for_by_the_next(void **state)
{
    (void)state;
    for (int back = 0; back < 2; back++) {
        scene on;
        layer of, other;
        const char *const settings[] = {"offload.timeout_ms", "50ms", NULL};
        scene_open(&on, "1MiB", settings);
        layer_make(&on, &of, 9, 20000);
        layer_make(&on, &other, 1, 100);
        if (back) {
            layer_leave(&on, &of, on.stream);
            layer_take(&on, &of);
        } else {
            layer_add(&on, &of);
        }
        layer_add(&on, &other);
        for (int round = 0; round < 2; round++) {
            faulty_device_stop(on.device);
            faulty_device_fail(on.device, FAULTY_COPY_BATCH, 2, REFIT_ERR_COPY);
            for (int tries = 0; tries < 2; tries++) {
                assert_int_equal(back ? layer_fetch(&on, &of, on.stream)
                                      : commit(&on, &of, on.stream),
                                 REFIT_ERR_TIMEOUT);
                assert_int_equal(refit_activations_wait(on.activations, of.group, 0, &on.error),
                                 REFIT_ERR_TIMEOUT);
                assert_int_equal(release(&on, &of, on.stream), REFIT_ERR_TIMEOUT);
            }
            faulty_device_go(on.device);
            assert_ok(wait_for(&on, &of));
        }
        assert_ok(back ? layer_fetch(&on, &of, on.stream) : commit(&on, &of, on.stream));
        assert_ok(wait_for(&on, &of));
        layer_check(&on, &of);
        assert_ok(release(&on, &of, on.stream));
        assert_ok(release(&on, &other, on.stream));
        layer_end(&on, &of);
        layer_end(&on, &other);
        scene_close(&on);
    }
}

/* A stream that takes no event is closed, and the next copies open another. */
static void a_stream_that_takes_no_event_is_replaced(void **state)
{
    (void)state;
    for (int back = 0; back < 2; back++) {
        scene on;
        layer of, away;
        scene_open(&on, "1MiB", NULL);
        layer_make(&on, &of, 4, 20000);
        layer_make(&on, &away, 4, 20000);
        layer_leave(&on, &away, on.stream);
        layer_add(&on, &of);
        if (back) {
            assert_ok(commit(&on, &of, on.stream));
            assert_ok(wait_for(&on, &of));
        }
        faulty_device_fail_times(on.device, FAULTY_EVENT_RECORD, 1, FAULTY_ALWAYS,
                                 REFIT_ERR_DEVICE);
        assert_int_equal(back ? layer_fetch(&on, &of, none) : commit(&on, &of, none),
                         REFIT_ERR_DEVICE);
        faulty_device_reset(on.device);
        faulty_device_fail(on.device, FAULTY_STREAM_OPEN, 1, REFIT_ERR_DEVICE);
        assert_int_equal(back ? layer_fetch(&on, &of, none) : commit(&on, &of, none),
                         REFIT_ERR_DEVICE);
        layer_return(&on, &away, on.stream); /* others go on, and a release finds no stream */
        assert_ok(back ? layer_fetch(&on, &of, none) : commit(&on, &of, none));
        assert_ok(wait_for(&on, &of));
        layer_check(&on, &of);
        assert_ok(release(&on, &of, on.stream));
        layer_end(&on, &of);
        layer_end(&on, &away);
        scene_close(&on);
    }
}

/* A release whose stream cannot be made to wait waits itself. */
static void a_release_waits_where_the_stream_cannot(void **state)
{
    (void)state;
    scene on;
    layer of;
    scene_open(&on, "1MiB", NULL);
    layer_make(&on, &of, 4, 20000);
    layer_leave(&on, &of, on.stream);
    layer_take(&on, &of);
    for (uint32_t nth = 1; nth <= 2; nth++) { /* the caller's stream, and that of copies out */
        assert_ok(layer_fetch(&on, &of, on.stream));
        faulty_device_fail(on.device, FAULTY_EVENT_JOIN, nth, REFIT_ERR_DEVICE);
        assert_ok(release(&on, &of, on.stream));
        faulty_device_reset(on.device);
        layer_check(&on, &of); /* without any wait of the test */
        layer_leave(&on, &of, on.stream);
        layer_take(&on, &of);
    }
    layer_return(&on, &of, on.stream);
    layer_end(&on, &of);
    scene_close(&on);
}

/* The device is lost in the middle of a copy: all can be given back. */
static void a_lost_device_lets_all_be_given_back(void **state)
{
    (void)state;
    for (uint32_t nth = 1; nth <= 6; nth++) {
        scene on;
        layer layers[LAYERS];
        scene_open(&on, "2MiB", NULL);
        make_layers(&on, layers);
        faulty_device_break(on.device, FAULTY_COPY_BATCH, nth, REFIT_ERR_DEVICE);
        faulty_device_fail_times(on.device, FAULTY_EVENT_WAIT, 2, FAULTY_ALWAYS, REFIT_ERR_DEVICE);
        for (int i = 0; i < LAYERS; i++) {
            layer_add(&on, &layers[i]);
            if (commit(&on, &layers[i], on.stream) == REFIT_OK) (void)wait_for(&on, &layers[i]);
        }
        for (int i = 0; i < LAYERS - 1; i++) {
            assert_ok(release(&on, &layers[i], on.stream));
        }
        assert_ok(refit_activations_close(on.activations, &on.error)); /* with a group */
        faulty_device_reset(on.device);
        assert_ok(refit_activations_open(on.device, &on.config, &on.activations, &on.error));
        end_layers(&on, layers);
        scene_close(&on);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_failure_can_be_repeated),
        cmocka_unit_test(an_open_that_fails_leaves_nothing),
        cmocka_unit_test(each_allocation_may_fail),
        cmocka_unit_test(a_copy_out_that_breaks_is_reported_by_its_group),
        cmocka_unit_test(a_copy_in_that_breaks_is_reported_by_its_group),
        cmocka_unit_test(copies_out_count_before_copies_in),
        cmocka_unit_test(a_fetch_reports_copies_out_that_have_failed),
        cmocka_unit_test(a_released_group_takes_its_failure_along),
        cmocka_unit_test(many_released_groups_keep_their_failures),
        cmocka_unit_test(work_that_breaks_fails_the_copies_behind_it),
        cmocka_unit_test(work_that_breaks_behind_a_failed_commit_is_reported),
        cmocka_unit_test(copies_of_a_failed_call_are_waited_for_by_the_next),
        cmocka_unit_test(a_stream_that_takes_no_event_is_replaced),
        cmocka_unit_test(a_release_waits_where_the_stream_cannot),
        cmocka_unit_test(a_lost_device_lets_all_be_given_back),
    };
    return cmocka_run_group_tests_name("activation_faults", tests, NULL, NULL);
}
