/* After any failure while a version is applied, the engine has the old version, or the worker
 * reports that it has none. */
#include <stdlib.h>

#include "tests/support/bound_pair.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/faulty_device.h"
#include "tests/support/test.h"

#ifndef STRIDE /* of what fails: larger, where all takes many times as long */
#define STRIDE 1u
#endif

/* A device that loses half of each copy and reports no error. */
BOUND_TEST(a_wrong_digest_is_taken_back)
{
    uint32_t found = 0;
    for (uint32_t nth = 1;; nth++) {
        bound_begin_with(it, true, with_verify_always);
        bound_run_first(it);
        refit_update *update = bound_take(it, 1, 1);
        faulty_device_reset(it->device);
        faulty_device_order(
            it->device,
            &(faulty_order){.slot = FAULTY_COPY_BATCH, .nth = nth, .kind = FAULTY_TEARS});
        refit_status status = refit_update_apply(update, NULL, NULL);
        bool made = faulty_device_calls(it->device, FAULTY_COPY_BATCH) >= nth;
        faulty_device_reset(it->device);
        if (status == REFIT_OK) {
            assert_true(engine_is_like(&it->engine, update));
        } else {
            assert_int_equal(status, REFIT_ERR_CORRUPT);
            found++;
            bound_apply(it, update);
        }
        refit_update_close(update);
        if (!made) break;
    }
    assert_true(found > 0);
}

/* ---- Whatever fails */

static bool fail_one(bound_pair *it, const faulty_order *order, bool again)
{
    refit_update *update = bound_take_second(it, true);
    faulty_device_reset(it->device);
    faulty_device_order(it->device, order);
    refit_status status = refit_update_apply(update, NULL, NULL);
    bool made = faulty_device_calls(it->device, order->slot) >= order->nth;
    faulty_device_reset(it->device);
    assert_int_equal(status, made ? REFIT_ERR_COPY : REFIT_OK);
    if (made) assert_true(engine_is_as_saved(&it->engine));
    if (again || !made) {
        bound_apply(it, update);
        bound_accept(it, update);
    } else {
        refit_update_close(update);
        assert_true(engine_is_as_saved(&it->engine));
    }
    return made;
}

BOUND_TEST(a_device_that_fails_at_any_step_leaves_the_old_version)
{
    const faulty_order orders[] = {
        {FAULTY_COPY_BATCH, .status = REFIT_ERR_COPY},
        {FAULTY_COPY_BATCH, .status = REFIT_ERR_COPY, .kind = FAULTY_HALVES},
        {FAULTY_EVENT_RECORD, .status = REFIT_ERR_COPY},
    };
    for (size_t i = 0; i < COUNT_OF(orders); i++) {
        faulty_order order = orders[i];
        order.nth = 1;
        while (fail_one(it, &order, (order.nth / STRIDE + i) % 2 == 0))
            order.nth += STRIDE;
        assert_true(order.nth > 5);
    }
}

/* The device also fails when the version is to be taken back. */
BOUND_TEST(destinations_that_cannot_be_restored_serve_no_version)
{
    refit_error error;
    refit_update *update = bound_take_second(it, true);
    faulty_device_fail_times(it->device, FAULTY_COPY_BATCH, 4, FAULTY_ALWAYS, REFIT_ERR_COPY);
    assert_int_equal(refit_update_apply(update, NULL, &error), REFIT_ERR_COPY);
    assert_says(&error, "could not be taken back");
    assert_int_equal(refit_update_accept(update, &error), REFIT_ERR_STATE);
    assert_int_equal(refit_update_refuse(update, "torn", 1, &error), REFIT_ERR_COPY);
    raw_hear(&it->pair.raw, RFT_FAILED);
    assert_false(it->pair.raw.heard.as.failed.kept);
    assert_int_equal(pair_describe(&it->pair).version, 0);
    refit_update_close(update);
    raw_join(&it->pair.raw);
    faulty_device_reset(it->device);
    update = bound_take(it, 2, 0);
    assert_int_equal(refit_update_accept(update, &error), REFIT_ERR_STATE);
    bound_apply(it, update);
    bound_accept(it, update);
}

static void refuse(bound_pair *it, refit_update *update)
{
    assert_ok(refit_update_refuse(update, NULL, 1, NULL));
    assert_true(engine_is_as_saved(&it->engine));
    raw_hear(&it->pair.raw, RFT_FAILED);
    assert_true(it->pair.raw.heard.as.failed.kept);
    refit_update_close(update);
}

/* Once the device works again, torn destinations get the old version back. */
BOUND_TEST(a_second_attempt_to_take_back_does)
{
    for (int later = 0; later <= 1; later++) {
        refit_update *update = bound_take_second(it, true);
        faulty_device_fail_times(it->device, FAULTY_COPY_BATCH, 4, FAULTY_ALWAYS, REFIT_ERR_COPY);
        assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_COPY);
        faulty_device_reset(it->device);
        if (later == 1) bound_apply(it, update);
        refuse(it, update);
    }
}

/* The engine has the update except for the last byte of each tensor. */
static void make_almost(bound_pair *it, const refit_update *update)
{
    for (uint32_t i = 0; i < it->engine.count; i++) {
        uint32_t index;
        const void *bytes;
        refit_tensor tensor = {.size = sizeof tensor};
        assert_ok(refit_update_find(update, it->engine.list[i].name, &index, NULL));
        assert_ok(refit_update_tensor(update, index, &tensor, &bytes, NULL));
        if (tensor.bytes == 0) continue;
        unsigned char *own = malloc(tensor.bytes);
        assert_non_null(own);
        memcpy(own, bytes, tensor.bytes);
        own[tensor.bytes - 1] ^= 0x5A;
        engine_write(&it->engine, i, own);
        free(own);
    }
    engine_save(&it->engine);
}

/* The device takes no copy any more, and half of the nth; it does again before the version is
 * applied again; then it is refused. Whether there was such a copy, and whether it was one into the
 * engine. */
static bool tear_and_refuse(bound_pair *it, uint32_t nth, bool *torn)
{
    refit_error error;
    refit_update *update = bound_take_second(it, true);
    make_almost(it, update);
    faulty_device_reset(it->device);
    faulty_device_order(it->device, &(faulty_order){.slot = FAULTY_COPY_BATCH,
                                                    .nth = nth,
                                                    .times = FAULTY_ALWAYS,
                                                    .status = REFIT_ERR_COPY,
                                                    .kind = FAULTY_HALVES});
    refit_status status = refit_update_apply(update, NULL, &error);
    *torn = status != REFIT_OK && strstr(error.text, "could not be taken back") != NULL;
    faulty_device_reset(it->device);
    bound_apply(it, update);
    refuse(it, update);
    return status != REFIT_OK;
}

/* Bytes that a broken copy left are never noted as the engine's old bytes. */
BOUND_TEST(what_a_broken_copy_left_is_not_what_was_there)
{
    uint32_t nth = 1, tears = 0;
    for (bool torn = false; tear_and_refuse(it, nth, &torn); nth++)
        tears += torn ? 1 : 0;
    assert_true(tears >= 3);
}

BOUND_TEST(unbinding_takes_back_what_is_torn_or_does_not_unbind)
{
    refit_update *update = bound_take_second(it, true);
    faulty_device_fail_times(it->device, FAULTY_COPY_BATCH, 4, FAULTY_ALWAYS, REFIT_ERR_COPY);
    assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_COPY);
    assert_int_equal(refit_subscriber_unbind(it->pair.subscriber, NULL), REFIT_ERR_COPY);
    assert_int_equal(refit_update_accept(update, NULL), REFIT_ERR_STATE);
    faulty_device_reset(it->device);
    assert_ok(refit_subscriber_unbind(it->pair.subscriber, NULL));
    assert_true(engine_is_as_saved(&it->engine));
    refit_update_close(update);
}

/* An engine without the version must not say that it has it. */
BOUND_TEST(what_could_not_be_applied_is_not_accepted)
{
    uint32_t left;
    bound_begin(it, false);
    assert_ok(refit_subscriber_unbind(it->pair.subscriber, NULL));
    assert_ok(refit_subscriber_bind(it->pair.subscriber, it->engine.list, 4, NULL));
    refit_update *update = bound_take(it, 0, 0);
    assert_ok(refit_update_apply(update, &left, NULL));
    bound_accept(it, update);
    engine_save(&it->engine);
    update = bound_take(it, 1, 1);
    assert_ok(refit_update_apply(update, &left, NULL));
    assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_NOT_FOUND);
    assert_true(engine_is_as_saved(&it->engine));
    assert_refused(refit_update_accept(update, error), REFIT_ERR_STATE, "could not be applied");
    assert_ok(refit_update_apply(update, &left, NULL));
    assert_ok(refit_update_refuse(update, NULL, 1, NULL));
    refit_update_close(update);
    update = bound_take(it, 2, 1);
    assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_NOT_FOUND);
    assert_ok(refit_subscriber_unbind(it->pair.subscriber, NULL));
    bound_accept(it, update); /* loaded by hand, the caller says */
}

BOUND_TEST(without_memory_nothing_is_changed)
{
    uint64_t nth = 1;
    failing_alloc_begin(0);
    bound_begin_with(it, true, with_verify_always);
    bound_run_first(it);
    refit_update *update = bound_take(it, 1, 1);
    for (bool came = true; came; nth++) {
        failing_alloc_here(nth);
        refit_status status = refit_update_apply(update, NULL, NULL);
        came = failing_alloc_stop_here();
        assert_int_equal(status, came ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
        if (came) assert_true(engine_is_as_saved(&it->engine));
    }
    assert_true(nth > 3);
    assert_true(engine_is_like(&it->engine, update));
    bound_accept(it, update);
    bound_end(it);
    (void)failing_alloc_end();
}

int main(void)
{
    return test_run("apply_faults");
}
