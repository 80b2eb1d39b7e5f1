/* Activations on a device that fails: what failed is reported, once, by the group it belongs to;
 * the call can be repeated; no byte is lost, nothing leaks, no wait is without a limit. */
#include "tests/offload/layers.h"

#include "tests/support/failing_alloc.h"

#define LAYERS 4
#define TRIES  4u

static const char *const pinned[] = {"offload.pin=require", NULL};

static const refit_stream_ref none = {NULL};

static void make_layers(scene *on, layer layers[LAYERS])
{
    for (int i = 0; i < LAYERS; i++)
        layer_make(on, &layers[i], 5, 60000);
}

/* The nth copy from now on breaks when its stream comes to it. */
static void break_copy(scene *on, uint32_t nth, refit_status status)
{
    faulty_device_fail_later(on->device, FAULTY_COPY_BATCH, nth, status);
}

/* A trip of the layer out, or back. */
static refit_status start(scene *on, const layer *of, bool back, refit_stream_ref stream)
{
    return back ? layer_fetch(on, of, stream) : commit(on, of, stream);
}

/* Brings the layer to where such a trip starts. */
static void get_ready(scene *on, layer *of, bool back)
{
    if (!back) layer_add(on, of);
    if (back) layer_leave(on, of, on->stream);
    if (back) layer_take(on, of);
}

/* ---- Each call of the device fails once, and what failed is repeated ------------------------- */

/* Calls it until it succeeds; how often it failed. Each failure is the one that was ordered. */
#define UNTIL_OK(on, failures, call)                                                               \
    do {                                                                                           \
        for (uint32_t tries = 0; (call) != REFIT_OK; tries++) {                                    \
            if (tries >= TRIES) print_error("%s: %s\n", #call, (on)->error.text);                  \
            assert_true(tries < TRIES);                                                            \
            assert_says(&(on)->error, "as ordered by the test");                                   \
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
        /* A failure is told once, then it is over. */
        UNTIL_OK(on, failures, wait_for(on, of, TIMEOUT_MS));
        status = join(on, of, none);
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
        UNTIL_OK(on, failures, wait_for(on, of, TIMEOUT_MS));
    } while (failures != before);
    layer_check(on, of);
    UNTIL_OK(on, failures, release(on, of, stream));
    layer_end(on, of);
    return failures;
}

static uint32_t run_stubbornly(scene *on)
{
    layer layers[LAYERS];
    uint32_t failures = 0;
    make_layers(on, layers);
    for (int i = 0; i < LAYERS; i++)
        failures += leave_stubbornly(on, &layers[i], i % 2 == 0 ? on->stream : none);
    for (int i = LAYERS; i-- > 0;)
        failures += return_stubbornly(on, &layers[i], i % 2 == 0 ? on->stream : none);
    return failures;
}

SCENE(every_failure_can_be_repeated, .host_bytes = "2MiB")
{
    static const fault faults[] = {
        {"a copy is refused", FAULTY_COPY_BATCH, false, REFIT_ERR_COPY, false},
        {"a copy breaks", FAULTY_COPY_BATCH, true, REFIT_ERR_COPY, false},
        {"an event cannot be recorded", FAULTY_EVENT_RECORD, false, REFIT_ERR_DEVICE, false},
        {"an event cannot be joined", FAULTY_EVENT_JOIN, false, REFIT_ERR_DEVICE, true},
        {"an event cannot be waited for", FAULTY_EVENT_WAIT, false, REFIT_ERR_DEVICE, true},
        {"an event cannot be opened", FAULTY_EVENT_OPEN, false, REFIT_ERR_DEVICE, false},
    };
    const uint64_t seed = on->seed;
    for (size_t at = 0; at < COUNT_OF(faults); at++) {
        const fault *it = &faults[at];
        uint32_t calls = 1, failed = 0;
        for (uint32_t nth = 0; nth <= calls; nth++) { /* 0: none fails, and all are counted */
            assert_ok(refit_activations_close(on->activations, &on->error));
            assert_ok(open_anew(on, NULL));
            faulty_device_reset(on->device);
            on->seed = seed; /* the same calls each time */
            if (nth > 0) order_fault(on->device, it, nth);
            uint32_t failures = run_stubbornly(on);
            if (nth == 0) calls = faulty_device_calls(on->device, it->slot);
            if (failures > (nth > 0)) fail_msg("%s, call %u: %u", it->name, nth, failures);
            failed += failures;
            if (it->slot == FAULTY_COPY_BATCH) {
                assert_int_equal(figures(on).activation_failures, failures);
            }
            faulty_device_reset(on->device);
            assert_int_equal(run_stubbornly(on), 0);
        }
        if (!it->may_succeed && failed != calls) print_error("%s: %u\n", it->name, failed);
        assert_true(it->may_succeed || failed == calls);
        assert_true(calls > 0);
    }
}

/* What is opened: the arena, the streams, the events. Nothing stays open. */
SCENE(an_open_that_fails_leaves_nothing, .settings = pinned)
{
    static const faulty_slot slots[] = {FAULTY_EVENT_OPEN, FAULTY_STREAM_OPEN, FAULTY_HOST_PIN};
    for (size_t at = 0; at < COUNT_OF(slots); at++) {
        refit_activations *other;
        refit_status status = REFIT_ERR_DEVICE;
        for (uint32_t nth = 1; status != REFIT_OK; nth++) {
            faulty_device_fail(on->device, slots[at], nth, REFIT_ERR_DEVICE);
            faulty_device_fail(on->device, FAULTY_STREAM_CLOSE, 1, REFIT_ERR_DEVICE);
            status = refit_activations_open(on->device, &on->config, &other, &on->error);
            assert_true(status == REFIT_ERR_DEVICE || status == REFIT_ERR_PIN ||
                        (status == REFIT_OK && nth > 1));
        }
        faulty_device_reset(on->device);
        assert_ok(refit_activations_close(other, &on->error));
    }
}

/* Opens activations, and starts copies out of them; the first failure. */
static refit_status try_to_leave(scene *on, layer *of)
{
    RFT_TRY(refit_activations_open(on->device, &on->config, &on->activations, &on->error));
    RFT_TRY(refit_activations_begin(on->activations, &of->group, &on->error));
    for (uint32_t i = 0; i < of->count; i++) {
        uint32_t place;
        RFT_TRY(refit_activations_add(on->activations, of->group, of->tensors[i].memory,
                                      of->tensors[i].bytes, &place, &on->error));
    }
    return commit(on, of, on->stream);
}

TEST(each_allocation_may_fail)
{
    bool came = true;
    for (uint64_t nth = 1; came; nth++) {
        layer of;
        scene *on = open_scene(&(opening){0});
        refit_activations *first = on->activations;
        layer_make(on, &of, 5, 30000);
        on->activations = NULL;
        failing_alloc_here(nth);
        refit_status status = try_to_leave(on, &of);
        came = failing_alloc_stop_here();
        assert_int_equal(status, came ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
        assert_ok(refit_activations_close(on->activations, &on->error));
        on->activations = first;
        layer_leave(on, &of, on->stream);
        layer_return_and_end(on, &of);
        close_scene(on);
    }
}

/* ---- A failure belongs to one group ---------------------------------------------------------- */

/* All groups leave, or return, before the first is waited for. */
TEST(copies_that_break_are_reported_by_their_group)
{
    for (int back = 0; back < 2; back++) {
        uint32_t calls = 1;
        for (uint32_t nth = 0; nth <= calls; nth++) {
            layer layers[LAYERS];
            uint32_t failed = 0;
            scene *on = open_scene(&(opening){.host_bytes = "2MiB"});
            make_layers(on, layers);
            for (int i = 0; i < LAYERS; i++)
                get_ready(on, &layers[i], back);
            faulty_device_reset(on->device);
            if (nth > 0) break_copy(on, nth, REFIT_ERR_COPY);
            for (int i = 0; i < LAYERS; i++)
                assert_ok(start(on, &layers[i], back, on->stream));
            if (nth == 0) calls = faulty_device_calls(on->device, FAULTY_COPY_BATCH);
            for (int i = 0; i < LAYERS; i++) {
                refit_status status = wait_for(on, &layers[i], TIMEOUT_MS);
                if (status == REFIT_OK) continue;
                assert_int_equal(status, REFIT_ERR_COPY);
                assert_ok(wait_for(on, &layers[i], TIMEOUT_MS)); /* told once */
                failed++;
                if (!back) layer_check(on, &layers[i]); /* it is OPEN again */
                assert_ok(start(on, &layers[i], back, on->stream));
            }
            assert_int_equal(failed, nth > 0);
            assert_int_equal(figures(on).activation_failures, failed);
            for (int i = LAYERS; i-- > 0;) {
                if (!back) assert_ok(wait_for(on, &layers[i], TIMEOUT_MS));
                if (!back) layer_free(on, &layers[i]);
                if (!back) layer_return_and_end(on, &layers[i]);
                if (back) layer_finish(on, &layers[i]);
            }
            close_scene(on);
        }
    }
}

/* A group was fetched while it left, and the copies out break: that is what is reported, and its
 * memory on the device counts. */
SCENE(copies_out_count_before_copies_in, 0)
{
    layer of;
    void *former[TENSORS_MOST], *others[TENSORS_MOST];
    layer_make(on, &of, 3, 10000);
    layer_add(on, &of);
    faulty_device_stop(on->device);
    break_copy(on, 1, REFIT_ERR_COPY);
    assert_ok(commit(on, &of, on->stream));
    layer_take_other(on, &of, former);
    assert_ok(layer_fetch(on, &of, on->stream));
    faulty_device_go(on->device);
    assert_int_equal(wait_for(on, &of, TIMEOUT_MS), REFIT_ERR_COPY);
    assert_int_equal(layer_fetch(on, &of, on->stream), REFIT_ERR_STATE); /* OPEN */
    layer_memories(&of, others);
    for (uint32_t i = 0; i < of.count; i++)
        of.tensors[i].memory = former[i];
    layer_check(on, &of);
    assert_ok(commit(on, &of, on->stream));
    assert_ok(wait_for(on, &of, TIMEOUT_MS));
    layer_free(on, &of);
    layer_free_former(on, &of, others);
    layer_return_and_end(on, &of);
}

/* Joined by the stream, so that the memory is gone when the failure comes to light: the fetch
 * reports it. */
SCENE(a_fetch_reports_copies_out_that_have_failed, 0)
{
    layer of;
    layer_make(on, &of, 3, 10000);
    layer_add(on, &of);
    break_copy(on, 1, REFIT_ERR_COPY);
    faulty_device_stop(on->device);
    assert_ok(commit(on, &of, on->stream));
    assert_ok(join(on, &of, on->stream));
    faulty_device_go(on->device);
    await_stream(on);
    assert_int_equal(layer_fetch(on, &of, on->stream), REFIT_ERR_COPY);
    assert_ok(release(on, &of, on->stream));
    layer_end(on, &of);
}

/* Copies of a group that nothing asks for any more. */
SCENE(a_released_group_takes_its_failure_along, 0)
{
    for (int back = 0; back < 2; back++) {
        layer old, new;
        layer_make(on, &old, 3, 10000);
        layer_make(on, &new, 3, 10000);
        get_ready(on, &old, back);
        if (back) get_ready(on, &new, back);
        faulty_device_stop(on->device);
        break_copy(on, 1, REFIT_ERR_COPY);
        assert_ok(start(on, &old, back, on->stream));
        assert_ok(release(on, &old, on->stream));
        if (!back) get_ready(on, &new, back);
        assert_ok(start(on, &new, back, on->stream));
        faulty_device_go(on->device);
        assert_ok(wait_for(on, &new, TIMEOUT_MS));
        if (!back) layer_free(on, &new);
        layer_return_and_end(on, &new);
        layer_end(on, &old);
    }
}

/* As many groups are released while they leave as there are records by then, and more: records are
 * not used again before the copies in front of them are over. The last of them breaks. */
SCENE(many_released_groups_keep_their_failures, 0)
{
    for (uint32_t nth = 1; nth <= 40; nth++) {
        layer of;
        layer_make(on, &of, 1, 100);
        faulty_device_stop(on->device);
        break_copy(on, nth, REFIT_ERR_COPY);
        for (uint32_t i = 0; i <= nth; i++) {
            layer_add(on, &of);
            assert_ok(wait_for(on, &of, 0)); /* it has no copies of others */
            assert_ok(commit(on, &of, none));
            if (i < nth) assert_ok(release(on, &of, on->stream));
        }
        faulty_device_go(on->device);
        assert_ok(wait_for(on, &of, TIMEOUT_MS));
        layer_free(on, &of);
        layer_return_and_end(on, &of);
    }
}

/* ---- What the copies follow ------------------------------------------------------------------ */

/* The work that makes a tensor breaks: its copies have taken what was never made, or do not even
 * start, or their commit failed before it could follow the work, and the next one waits for it. */
SCENE(work_that_breaks_fails_the_copies_after_it, 0)
{
    enum { COPIES_FOLLOW, COPY_IS_REFUSED, JOIN_IS_REFUSED, CASES };
    for (int at = 0; at < CASES; at++) {
        layer of;
        layer_make(on, &of, 1, 10000);
        const uint64_t bytes = of.tensors[0].bytes;
        void *memory = of.tensors[0].memory, *source = test_host_alloc(on->plain, bytes);
        memcpy(source, of.tensors[0].expected, bytes);
        layer_add(on, &of);
        if (at == JOIN_IS_REFUSED) faulty_device_stop(on->device);
        break_copy(on, 1, REFIT_ERR_SYSTEM);
        assert_ok(refit_stream_copy(on->device, on->stream, memory, source, bytes, &on->error));
        if (at == COPIES_FOLLOW) {
            assert_ok(commit(on, &of, on->stream));
            assert_int_equal(wait_for(on, &of, TIMEOUT_MS), REFIT_ERR_SYSTEM);
        } else {
            faulty_device_fail(on->device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
            if (at == JOIN_IS_REFUSED) {
                faulty_device_fail(on->device, FAULTY_EVENT_JOIN, 1, REFIT_ERR_DEVICE);
                assert_int_equal(commit(on, &of, on->stream), REFIT_ERR_DEVICE);
                faulty_device_go(on->device);
            }
            assert_int_equal(commit(on, &of, on->stream), REFIT_ERR_SYSTEM);
            faulty_device_reset(on->device);
        }
        assert_ok(refit_stream_copy(on->device, on->stream, memory, source, bytes, &on->error));
        assert_ok(commit(on, &of, on->stream));
        assert_ok(wait_for(on, &of, TIMEOUT_MS));
        layer_free(on, &of);
        layer_return_and_end(on, &of);
        test_host_free(on->plain, source, bytes);
    }
}

/* ---- Copies that cannot be waited for -------------------------------------------------------- */

/* A look that fails does not wait, and does not take the copies for over. */
SCENE(a_look_that_fails_does_not_wait, 0)
{
    layer of;
    layer_make(on, &of, 1, 100);
    layer_add(on, &of);
    faulty_device_stop_until_awaited(on->device);
    assert_ok(commit(on, &of, on->stream));
    faulty_device_fail(on->device, FAULTY_EVENT_WAIT, 1, REFIT_ERR_DEVICE);
    assert_int_equal(wait_for(on, &of, 0), REFIT_ERR_DEVICE);
    assert_int_equal(wait_for(on, &of, 0), REFIT_ERR_TIMEOUT);
    layer_finish(on, &of);
}

/* The second batch is refused while the first hangs: the call gives up at the deadline, and the
 * memory is not anyone's before those copies have ended. */
SCENE(copies_of_a_failed_call_are_waited_for_by_the_next, 0)
{
    for (int back = 0; back < 2; back++) {
        layer of, other;
        layer_make(on, &of, 9, 20000);
        layer_make(on, &other, 1, 100);
        get_ready(on, &of, back);
        layer_add(on, &other);
        for (int round = 0; round < 2; round++) {
            faulty_device_hang(on->device);
            faulty_device_fail(on->device, FAULTY_COPY_BATCH, 2, REFIT_ERR_COPY);
            for (int tries = 0; tries < 2; tries++) {
                assert_hung(on, start(on, &of, back, on->stream));
                assert_int_equal(wait_for(on, &of, 0), REFIT_ERR_TIMEOUT);
                assert_hung(on, release(on, &of, on->stream));
            }
            faulty_device_go(on->device);
            assert_ok(wait_for(on, &of, TIMEOUT_MS));
        }
        assert_ok(start(on, &of, back, on->stream));
        layer_finish(on, &of);
        layer_finish(on, &other);
    }
}

/* A stream that takes no event is closed, and the next copies open another. */
SCENE(a_stream_that_takes_no_event_is_replaced, 0)
{
    for (int back = 0; back < 2; back++) {
        layer of, away;
        layer_make(on, &of, 4, 20000);
        layer_make(on, &away, 4, 20000);
        layer_leave(on, &away, on->stream);
        layer_add(on, &of);
        if (back) assert_ok(commit(on, &of, on->stream));
        if (back) assert_ok(wait_for(on, &of, TIMEOUT_MS));
        faulty_device_fail_times(on->device, FAULTY_EVENT_RECORD, 1, FAULTY_ALWAYS,
                                 REFIT_ERR_DEVICE);
        assert_int_equal(start(on, &of, back, none), REFIT_ERR_DEVICE);
        faulty_device_reset(on->device);
        faulty_device_fail(on->device, FAULTY_STREAM_OPEN, 1, REFIT_ERR_DEVICE);
        assert_int_equal(start(on, &of, back, none), REFIT_ERR_DEVICE);
        layer_return_and_end(on, &away); /* others go on, and a release finds no stream */
        assert_ok(start(on, &of, back, none));
        layer_finish(on, &of);
    }
}

/* A release whose stream cannot be made to wait waits itself. */
SCENE(a_release_waits_where_the_stream_cannot, 0)
{
    for (uint32_t nth = 1; nth <= 2; nth++) { /* the caller's stream, and that of copies out */
        layer of;
        layer_make(on, &of, 4, 20000);
        get_ready(on, &of, true);
        assert_ok(layer_fetch(on, &of, on->stream));
        faulty_device_fail(on->device, FAULTY_EVENT_JOIN, nth, REFIT_ERR_DEVICE);
        assert_ok(release(on, &of, on->stream));
        faulty_device_reset(on->device);
        layer_check(on, &of); /* without any wait of the test */
        layer_end(on, &of);
    }
}

/* The device is lost in the middle of a copy: all can be given back. */
SCENE(a_lost_device_lets_all_be_given_back, .host_bytes = "2MiB")
{
    for (uint32_t nth = 1; nth <= 6; nth++) {
        layer layers[LAYERS];
        make_layers(on, layers);
        faulty_device_break(on->device, FAULTY_COPY_BATCH, nth, REFIT_ERR_DEVICE);
        faulty_device_fail_times(on->device, FAULTY_EVENT_WAIT, 2, FAULTY_ALWAYS, REFIT_ERR_DEVICE);
        for (int i = 0; i < LAYERS; i++) {
            layer_add(on, &layers[i]);
            if (commit(on, &layers[i], on->stream) == REFIT_OK)
                (void)wait_for(on, &layers[i], TIMEOUT_MS);
        }
        for (int i = 0; i < LAYERS - 1; i++)
            assert_ok(release(on, &layers[i], on->stream));
        assert_ok(refit_activations_close(on->activations, &on->error)); /* with a group */
        faulty_device_reset(on->device);
        assert_ok(open_anew(on, NULL));
        for (int i = 0; i < LAYERS; i++)
            layer_end(on, &layers[i]);
    }
}

int main(void)
{
    return test_run("activation_faults");
}
