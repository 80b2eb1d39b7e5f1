/* Activations on a device that fails: a call that failed can be repeated; no byte is lost, nothing
 * leaks, no wait is without a limit. On a lost device all can be given back. */
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

/* A transfer of the layer out, or back. */
static refit_status start(scene *on, const layer *of, bool back, refit_stream_ref stream)
{
    return back ? layer_fetch(on, of, stream) : commit(on, of, stream);
}

/* Brings the layer to where such a transfer starts. */
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
    UNTIL_OK(on, failures, refit_activations_begin(on->activations, &of->group, &on->error));
    for (uint32_t i = 0; i < of->count; i++) {
        layer_tensor *tensor = &of->tensors[i];
        UNTIL_OK(on, failures,
                 refit_activations_add(on->activations, of->group, &tensor->memory, &tensor->bytes,
                                       1, &tensor->place, &on->error));
        assert_int_equal(tensor->place, i);
    }
    UNTIL_OK(on, failures, commit(on, of, stream));
    assert_ok(wait_for(on, of, TIMEOUT_MS));
    layer_free(on, of);
    return failures;
}

static uint32_t return_stubbornly(scene *on, layer *of, refit_stream_ref stream)
{
    uint32_t failures = 0;
    layer_take(on, of);
    UNTIL_OK(on, failures, layer_fetch(on, of, stream));
    assert_ok(wait_for(on, of, TIMEOUT_MS));
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
        {"a copy is refused", FAULTY_COPY_BATCH, REFIT_ERR_COPY, false},
        {"an event cannot be recorded", FAULTY_EVENT_RECORD, REFIT_ERR_DEVICE, false},
        {"an event cannot be joined", FAULTY_EVENT_JOIN, REFIT_ERR_DEVICE, true},
        {"an event cannot be opened", FAULTY_EVENT_OPEN, REFIT_ERR_DEVICE, false},
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
        RFT_TRY(refit_activations_add(on->activations, of->group, &of->tensors[i].memory,
                                      &of->tensors[i].bytes, 1, &place, &on->error));
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

/* As many groups are released while they leave as there are records by then, and more: what uses a
 * record again has its own copies, not those in front of them. */
SCENE(many_groups_are_released_while_they_leave, 0)
{
    for (uint32_t released = 1; released <= 40; released++) {
        layer of;
        layer_make(on, &of, 1, 100);
        faulty_device_stop(on->device);
        for (uint32_t i = 0; i <= released; i++) {
            layer_add(on, &of);
            assert_ok(wait_for(on, &of, 0)); /* it has no copies of others */
            assert_ok(commit(on, &of, none));
            if (i < released) assert_ok(release(on, &of, on->stream));
        }
        assert_int_equal(wait_for(on, &of, 0), REFIT_ERR_TIMEOUT);
        faulty_device_go(on->device);
        assert_ok(wait_for(on, &of, TIMEOUT_MS));
        layer_free(on, &of);
        layer_return_and_end(on, &of);
    }
}

/* ---- Copies that cannot be waited for -------------------------------------------------------- */

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

/* ---- A lost device --------------------------------------------------------------------------- */

/* The device is lost in the middle of a copy out, or back: every call says so, and all can be given
 * back. */
TEST(a_lost_device_lets_all_be_given_back)
{
    for (uint32_t nth = 1; nth <= 12; nth++) {
        layer layers[LAYERS];
        bool lost = false;
        scene *on = open_scene(&(opening){.host_bytes = "2MiB"});
        make_layers(on, layers);
        for (int i = 0; i < LAYERS; i++)
            get_ready(on, &layers[i], nth > 6);
        faulty_device_lose(on->device, FAULTY_COPY_BATCH, nth > 6 ? nth - 6 : nth);
        for (int i = 0; i < LAYERS; i++) {
            refit_status status = start(on, &layers[i], nth > 6, on->stream);
            if (status == REFIT_OK) status = wait_for(on, &layers[i], TIMEOUT_MS);
            assert_int_equal(status, lost || status != REFIT_OK ? REFIT_ERR_DEVICE : REFIT_OK);
            lost = status != REFIT_OK;
        }
        assert_true(lost);
        assert_int_not_equal(figures(on).activation_failures, 0);
        for (int i = 0; i < LAYERS - 1; i++)
            assert_ok(release(on, &layers[i], on->stream));
        assert_ok(refit_activations_close(on->activations, &on->error)); /* with a group */
        on->activations = NULL;
        for (int i = 0; i < LAYERS; i++)
            layer_end(on, &layers[i]);
        close_scene(on);
    }
}

int main(void)
{
    return test_run("activation_faults");
}
