/* Which destinations may be bound, and which versions fit them. */
#include "tests/support/bound_pair.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/faulty_device.h"
#include "tests/support/test.h"
#include "tests/support/test_device.h"

/* ---- What does not fit */

static refit_status try_apply_with(engine *one, uint32_t count, uint32_t *left,
                                   void (*change)(refit_config *config), refit_error *error)
{
    pairing pair;
    pair_open(&pair, false, change);
    assert_ok(refit_subscriber_bind(pair.subscriber, one->list, count, NULL));
    raw_join(&pair.raw);
    refit_update *update = pair_take(&pair, 0, NULL);
    refit_status status = refit_update_apply(update, left, error);
    if (status != REFIT_OK) assert_true(engine_is_as_saved(one));
    if (status == REFIT_OK) assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    pair_close(&pair);
    return status;
}

static refit_status try_apply(engine *one, uint32_t count, uint32_t *left, refit_error *error)
{
    return try_apply_with(one, count, left, NULL, error);
}

TEST(tensors_without_a_destination_are_counted_or_refused)
{
    engine one;
    refit_error error;
    uint32_t left = 99;
    engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 1);
    assert_int_equal(try_apply(&one, 4, NULL, &error), REFIT_ERR_NOT_FOUND);
    assert_says(&error, "2 tensors");
    assert_says(&error, "scalar");
    assert_ok(try_apply(&one, 4, &left, NULL));
    assert_int_equal(left, 2);
    assert_false(engine_is_as_saved(&one));
    engine_close(&one);
}

/* One of two tied names is enough; one of a name that no version has is too much. */
TEST(names_on_one_side_only)
{
    engine one;
    refit_error error;
    uint32_t left = 99;
    engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 1);
    refit_destination large = one.list[1];
    one.list[1].name = "nobody";
    assert_int_equal(try_apply(&one, SAMPLE_TENSORS, NULL, &error), REFIT_ERR_NOT_FOUND);
    assert_says(&error, "nobody");
    assert_ok(try_apply(&one, SAMPLE_TENSORS, &left, &error));
    assert_int_equal(left, 0);
    for (uint64_t i = 0; i < large.bytes; i++)
        assert_int_equal(((unsigned char *)large.memory)[i], 1);
    engine_close(&one);
}

TEST(bytes_and_types_are_those_of_the_version)
{
    engine one;
    engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 1);
    one.list[4].bytes = 7;
    assert_refused(try_apply(&one, SAMPLE_TENSORS, NULL, error), REFIT_ERR_INVALID, "8 bytes");
    one.list[4].bytes = 8;
    one.list[4].dtype = REFIT_I64;
    assert_refused(try_apply(&one, SAMPLE_TENSORS, NULL, error), REFIT_ERR_INVALID, "F64");
    one.list[4].dtype = 0;
    assert_ok(try_apply(&one, SAMPLE_TENSORS, NULL, NULL));
    engine_close(&one);
}

/* A tensor without elements has no address in some frameworks. */
TEST(what_has_no_bytes_needs_no_memory)
{
    for (int on_device = 0; on_device <= 1; on_device++) {
        engine one;
        refit_error error;
        refit_device *device = NULL;
        if (on_device == 1) assert_ok(test_device_open("host", &device, NULL));
        engine_open(&one, device, sample_tensors(), SAMPLE_TENSORS, 0, 1);
        void *unused = one.list[2].memory;
        assert_int_equal(one.list[2].bytes, 0);
        one.list[2].memory = NULL;
        if (try_apply_with(&one, SAMPLE_TENSORS, NULL, with_verify_always, &error) != REFIT_OK)
            fail_msg("%s", error.text);
        assert_ok(try_apply(&one, SAMPLE_TENSORS, NULL, NULL));
        one.list[2].memory = unused;
        engine_close(&one);
        if (device != NULL) assert_ok(refit_device_close(device, NULL));
    }
}

/* Two tensors in one memory could not both be right. */
TEST(one_memory_for_two_tensors_is_refused)
{
    engine one;
    refit_error error;
    unsigned char scalar[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 1);
    refit_destination twins[3] = {one.list[4], one.list[4], one.list[4]};
    twins[0].name = "nobody";
    twins[1].name = "scalar";
    twins[2].name = "halves";
    twins[0].memory = twins[1].memory = twins[2].memory = scalar;
    uint32_t left;
    engine few = one;
    memcpy(few.list, twins, sizeof twins);
    few.count = 0;
    assert_invalid(try_apply(&few, 3, &left, &error));
    assert_ok(try_apply(&few, 2, &left, &error));
    assert_int_not_equal(memcmp(scalar, "\1\1\1\1\1\1\1\1", 8), 0);
    engine_close(&one);
}

/* ---- Binding */

static refit_status bind_two(refit_subscriber *subscriber, refit_destination a, refit_destination b)
{
    const refit_destination list[] = {a, b};
    return refit_subscriber_bind(subscriber, list, 2, NULL);
}

PAIR_TEST(lists_with_mistakes_are_refused)
{
    unsigned char memory[64] = {0};
    const refit_destination good = {
        .size = sizeof good, .name = "a", .memory = memory, .bytes = 32};
    refit_destination bad[8];
    pair_open(pair, false, NULL);
    for (int i = 0; i < 8; i++) {
        bad[i] = good;
        bad[i].name = "b";
        bad[i].memory = memory + 32;
    }
    bad[0].size = 8;
    bad[1].name = NULL;
    bad[2].name = "";
    bad[3].memory = NULL;
    bad[4].dtype = (refit_dtype)77;
    bad[5].bytes = UINT64_MAX;
    bad[6].memory = memory + 31;
    bad[7].memory = memory; /* as if they were tied, but not whole */
    bad[7].bytes = 16;
    for (int i = 0; i < 8; i++) {
        assert_invalid(bind_two(pair->subscriber, good, bad[i]));
        assert_invalid(bind_two(pair->subscriber, bad[i], good));
    }
    assert_invalid(bind_two(pair->subscriber, good, good));
    assert_invalid(refit_subscriber_bind(NULL, &good, 1, NULL));
    assert_invalid(refit_subscriber_bind(pair->subscriber, NULL, 1, NULL));
    assert_invalid(refit_subscriber_bind(pair->subscriber, &good, 0, NULL));
    assert_invalid(refit_subscriber_unbind(NULL, NULL));
    assert_ok(refit_subscriber_unbind(pair->subscriber, NULL));
}

/* One device's memory, by itself and as plain memory of the host, is one memory. */
PAIR_TEST(overlaps_are_seen_across_devices)
{
    refit_device *device;
    void *memory;
    if (test_on_cuda()) return; /* whose memory is none of the host's */
    pair_open(pair, false, NULL);
    assert_ok(test_device_open("host", &device, NULL));
    assert_ok(refit_memory_alloc(device, 4096, &memory, NULL));
    refit_destination plain = {.size = sizeof plain, .name = "a", .memory = memory, .bytes = 4096};
    refit_destination within = {.size = sizeof within, .name = "b", .device = device};
    for (uint64_t bytes = 2048; bytes <= 4096; bytes += 2048) {
        within.memory = (unsigned char *)memory + (4096 - bytes);
        within.bytes = bytes;
        assert_invalid(bind_two(pair->subscriber, plain, within));
        assert_invalid(bind_two(pair->subscriber, within, plain));
    }
    plain.bytes = 2048;
    within.memory = (unsigned char *)memory + 2048;
    within.bytes = 2048;
    assert_ok(bind_two(pair->subscriber, plain, within));
    pair_close(pair);
    assert_ok(refit_memory_free(device, memory, NULL));
    assert_ok(refit_device_close(device, NULL));
}

PAIR_TEST(memory_of_another_device_is_refused)
{
    refit_device *device;
    unsigned char memory[8];
    if (!test_on_cuda()) return; /* any memory is the host device's */
    pair_open(pair, false, NULL);
    assert_ok(test_device_open("host", &device, NULL));
    const refit_destination one = {.size = sizeof one,
                                   .name = "a",
                                   .memory = memory,
                                   .bytes = sizeof memory,
                                   .device = device};
    assert_invalid(refit_subscriber_bind(pair->subscriber, &one, 1, NULL));
    pair_close(pair);
    assert_ok(refit_device_close(device, NULL));
}

BOUND_TEST(bound_and_unbound_in_turn)
{
    refit_error error;
    bound_begin(it, true);
    assert_int_equal(
        refit_subscriber_bind(it->pair.subscriber, it->engine.list, it->engine.count, &error),
        REFIT_ERR_STATE);
    assert_int_equal(refit_device_close(it->device, NULL), REFIT_ERR_BUSY);
    bound_run_first(it);
    refit_update *update = bound_take(it, 1, 1);
    bound_apply(it, update);
    assert_int_equal(refit_subscriber_unbind(it->pair.subscriber, &error), REFIT_ERR_STATE);
    assert_ok(refit_update_accept(update, NULL));
    assert_ok(refit_subscriber_unbind(it->pair.subscriber, &error));
    assert_true(engine_is_like(&it->engine, update));
    refit_update_close(update);
    update = bound_take(it, 2, 2);
    assert_int_equal(refit_update_apply(update, NULL, &error), REFIT_ERR_STATE);
    refit_update_close(update);
    assert_int_equal(refit_update_apply(update, NULL, &error), REFIT_ERR_STATE);
    assert_invalid(refit_update_apply(NULL, NULL, &error));
}

/* Destinations are bound while an update is open: it is applied into those that are bound then,
 * which hold no version to go back to. */
BOUND_TEST(bound_elsewhere_amid_an_update)
{
    engine other;
    refit_update *update = bound_take_second(it, false);
    assert_ok(refit_subscriber_unbind(it->pair.subscriber, NULL));
    assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_STATE);
    engine_open(&other, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 1);
    assert_ok(refit_subscriber_bind(it->pair.subscriber, other.list, other.count, NULL));
    assert_ok(refit_update_apply(update, NULL, NULL));
    assert_true(engine_is_like(&other, update));
    assert_true(engine_is_as_saved(&it->engine));
    refit_update_close(update);
    assert_false(engine_is_as_saved(&other));
    bound_end(it);
    engine_close(&other);
}

/* A closed subscriber writes no more, so the destinations may be freed at once. */
BOUND_TEST(what_was_bound_may_be_freed_once_the_subscriber_is_closed)
{
    for (int device = 0; device <= 1; device++) {
        refit_update *update = bound_take_second(it, device == 1);
        bound_apply(it, update);
        refit_subscriber_close(it->pair.subscriber);
        it->pair.subscriber = NULL;
        assert_true(engine_is_as_saved(&it->engine));
        engine_close(&it->engine);
        it->engine.count = 0;
        if (it->device != NULL) assert_ok(refit_device_close(it->device, NULL));
        it->device = NULL;
    }
}

PAIR_TEST(a_bind_that_fails_leaves_nothing)
{
    const struct {
        faulty_slot slot;
        uint32_t nth;
    } faults[] = {{FAULTY_STREAM_OPEN, 1}, {FAULTY_EVENT_OPEN, 1}, {FAULTY_EVENT_OPEN, 2}};
    engine one;
    refit_device *device;
    failing_alloc_begin(0);
    pair_open(pair, false, NULL);
    assert_ok(faulty_device_open(test_device_spec("host"), &device, NULL));
    engine_open(&one, device, sample_tensors(), SAMPLE_TENSORS, 0, 1);
    for (uint32_t i = 0; i < 3; i++) {
        faulty_device_fail(device, faults[i].slot, faults[i].nth, REFIT_ERR_DEVICE);
        assert_int_equal(refit_subscriber_bind(pair->subscriber, one.list, one.count, NULL),
                         REFIT_ERR_DEVICE);
        faulty_device_reset(device);
    }
    uint64_t nth = 1;
    for (bool came = true; came; nth++) {
        failing_alloc_here(nth);
        refit_status status = refit_subscriber_bind(pair->subscriber, one.list, one.count, NULL);
        came = failing_alloc_stop_here();
        if (status == REFIT_OK) /* without a page-lock, perhaps */
            assert_ok(refit_subscriber_unbind(pair->subscriber, NULL));
        else
            assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
    assert_true(nth > 6);
    pair_close(pair);
    engine_close(&one);
    assert_ok(refit_device_close(device, NULL));
    (void)failing_alloc_end();
}

int main(void)
{
    return test_run("bind");
}
