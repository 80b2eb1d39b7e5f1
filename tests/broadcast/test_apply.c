/* Versions applied into the engine's own memory: whole, or as if nothing had been done. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/thread.h"
#include "bound_engine.h"
#include "pairing.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/faulty_device.h"
#include "tests/support/seeded.h"
#include "tests/support/test_device.h"

#ifndef STRIDE /* of what fails: larger, where all takes many times as long */
#define STRIDE 1u
#endif

/* A worker whose engine is bound; on a device, or on the host with NULL. */
typedef struct bound_pair {
    pairing pair;
    refit_device *device;
    engine engine;
} bound_pair;

static void begin_with(bound_pair *it, bool device, void (*change)(refit_config *config))
{
    refit_error error;
    memset(it, 0, sizeof *it);
    pair_open(&it->pair, false, change);
    if (device)
        assert_int_equal(faulty_device_open(test_device_spec("host"), &it->device, NULL), REFIT_OK);
    engine_open(&it->engine, it->device, sample_tensors(), SAMPLE_TENSORS, 0, 0xEE);
    if (refit_subscriber_bind(it->pair.subscriber, it->engine.list, it->engine.count, &error) !=
        REFIT_OK)
        fail_msg("%s", error.text);
    raw_join(&it->pair.raw);
}

static void begin(bound_pair *it, bool device)
{
    begin_with(it, device, NULL);
}

static void end(bound_pair *it)
{
    pair_close(&it->pair);
    engine_close(&it->engine);
    if (it->device != NULL) assert_int_equal(refit_device_close(it->device, NULL), REFIT_OK);
}

/* Version `index` + 1, complete, committed, and taken. */
static refit_update *take(bound_pair *it, uint32_t index, uint32_t base)
{
    raw_stage(&it->pair.raw, &it->pair.samples[index],
              base == 0 ? NULL : &it->pair.samples[base - 1]);
    raw_say(&it->pair.raw, sample_commit(&it->pair.samples[index]));
    return pair_next(&it->pair);
}

static void apply(bound_pair *it, refit_update *update)
{
    refit_error error;
    if (refit_update_apply(update, NULL, &error) != REFIT_OK) fail_msg("%s", error.text);
    assert_true(engine_is_like(&it->engine, update));
}

static void accept(bound_pair *it, refit_update *update)
{
    refit_error error;
    if (refit_update_accept(update, &error) != REFIT_OK) fail_msg("%s", error.text);
    refit_update_close(update);
    raw_hear(&it->pair.raw, RFT_RELEASED);
}

/* Version 1 is in the engine, and accepted. */
static void run_first(bound_pair *it)
{
    refit_update *update = take(it, 0, 0);
    apply(it, update);
    accept(it, update);
    engine_save(&it->engine);
}

/* ---- It is there */

static void what_is_applied_and_accepted_is_what_the_trainer_sent(void **state)
{
    (void)state;
    for (int device = 0; device <= 1; device++) {
        bound_pair it;
        begin(&it, device == 1);
        run_first(&it);
        for (uint32_t i = 1; i < 3; i++) {
            refit_update *update = take(&it, i, i);
            apply(&it, update);
            assert_false(engine_is_as_saved(&it.engine));
            accept(&it, update);
        }
        end(&it);
    }
}

static void applying_twice_is_applying_once(void **state)
{
    (void)state;
    for (int device = 0; device <= 1; device++) {
        bound_pair it;
        begin(&it, device == 1);
        run_first(&it);
        refit_update *update = take(&it, 1, 1);
        apply(&it, update);
        apply(&it, update);
        assert_int_equal(refit_update_refuse(update, NULL, 1, NULL), REFIT_OK);
        assert_true(engine_is_as_saved(&it.engine));
        assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_STATE);
        refit_update_close(update);
        end(&it);
    }
}

/* Whatever was done to it meanwhile: the version is what the engine has. */
static void what_the_engine_had_does_not_matter(void **state)
{
    (void)state;
    bound_pair it;
    unsigned char other[65536 * 2];
    begin(&it, false);
    run_first(&it);
    memset(other, 3, sizeof other);
    engine_write(&it.engine, 0, other);
    refit_update *update = take(&it, 1, 1);
    apply(&it, update);
    memset(it.engine.list[1].memory, 9, 70000);
    apply(&it, update);
    accept(&it, update);
    end(&it);
}

static void tied_tensors_may_have_one_memory(void **state)
{
    (void)state;
    pairing pair;
    engine one;
    pair_open(&pair, false, NULL);
    engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 1, 0);
    assert_ptr_equal(one.list[3].memory, one.list[1].memory);
    assert_int_equal(refit_subscriber_bind(pair.subscriber, one.list, one.count, NULL), REFIT_OK);
    raw_join(&pair.raw);
    raw_stage(&pair.raw, &pair.samples[0], NULL);
    raw_say(&pair.raw, sample_commit(&pair.samples[0]));
    refit_update *update = pair_next(&pair);
    assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_OK);
    assert_true(engine_is_like(&one, update));
    refit_update_close(update);
    assert_true(engine_is_as_saved(&one));
    pair_close(&pair);
    engine_close(&one);
}

/* The trainer changes its mind or turns the worker out, too late: the version was committed. */
static void what_the_trainer_says_after_its_commit_changes_nothing(void **state)
{
    (void)state;
    for (int bye = 0; bye <= 1; bye++) {
        bound_pair it;
        begin(&it, false);
        refit_update *update = take(&it, 0, 0);
        if (bye == 0) apply(&it, update);
        raw_say(&it.pair.raw, bye == 1 ? sample_bye() : sample_abort(&it.pair.samples[0]));
        if (bye == 1) raw_join(&it.pair.raw);
        apply(&it, update);
        accept(&it, update);
        engine_save(&it.engine);
        update = take(&it, 1, bye == 1 ? 0 : 1);
        apply(&it, update);
        refit_update_close(update);
        assert_true(engine_is_as_saved(&it.engine));
        end(&it);
    }
}

static refit_stats figures(bound_pair *it)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_int_equal(refit_subscriber_stats(it->pair.subscriber, &stats, NULL), REFIT_OK);
    return stats;
}

/* Of the elements that are not as they were saved. */
static uint64_t changed_bytes(const engine *one)
{
    uint64_t changed = 0;
    for (uint32_t i = 0; i < one->count; i++) {
        uint32_t bits = refit_dtype_bits(one->list[i].dtype), width = bits % 8 == 0 ? bits / 8 : 1;
        const unsigned char *now = one->list[i].memory;
        for (uint64_t at = 0; at < one->list[i].bytes; at += width)
            changed += memcmp(now + at, one->saved[i] + at, width) == 0 ? 0 : width;
    }
    return changed;
}

static void figures_say_what_was_written_and_what_was_taken_back(void **state)
{
    (void)state;
    bound_pair it;
    begin(&it, false);
    assert_int_equal(figures(&it).receive_bound, SAMPLE_TENSORS);
    assert_int_equal(figures(&it).receive_applied_bytes_total, 0);
    run_first(&it);
    refit_stats before = figures(&it);
    assert_true(before.receive_apply_seconds_last > 0);
    refit_update *update = take(&it, 1, 1);
    apply(&it, update);
    uint64_t changed = changed_bytes(&it.engine);
    assert_true(changed > 0);
    apply(&it, update); /* finds nothing to do */
    assert_int_equal(figures(&it).receive_applied_bytes_total,
                     before.receive_applied_bytes_total + changed);
    assert_int_equal(figures(&it).receive_rollbacks, 0);
    refit_update_close(update);
    assert_int_equal(figures(&it).receive_rollbacks, 1);
    assert_int_equal(refit_subscriber_unbind(it.pair.subscriber, NULL), REFIT_OK);
    assert_int_equal(figures(&it).receive_bound, 0);
    end(&it);
}

/* ---- It is taken back */

typedef enum ending { REFUSED_KEPT, REFUSED_LOST, CLOSED, SUBSCRIBER_CLOSED } ending;

static void end_update(bound_pair *it, refit_update *update, ending how)
{
    switch (how) {
    case REFUSED_KEPT:
    case REFUSED_LOST:
        assert_int_equal(refit_update_refuse(update, "no", how == REFUSED_KEPT, NULL), REFIT_OK);
        break;
    case CLOSED: refit_update_close(update); break;
    case SUBSCRIBER_CLOSED:
        refit_subscriber_close(it->pair.subscriber);
        it->pair.subscriber = NULL;
        break;
    }
    assert_true(engine_is_as_saved(&it->engine));
    raw_hear(&it->pair.raw, RFT_FAILED);
    assert_int_equal(it->pair.raw.heard.as.failed.kept, how == REFUSED_KEPT);
    if (how == REFUSED_KEPT || how == REFUSED_LOST) refit_update_close(update);
}

static void what_is_not_accepted_was_never_there(void **state)
{
    (void)state;
    for (int device = 0; device <= 1; device++) {
        for (ending how = REFUSED_KEPT; how <= SUBSCRIBER_CLOSED; how++) {
            bound_pair it;
            begin(&it, device == 1);
            run_first(&it);
            refit_update *update = take(&it, 1, 1);
            apply(&it, update);
            end_update(&it, update, how);
            end(&it);
        }
    }
}

static void after_a_refusal_the_next_version_applies(void **state)
{
    (void)state;
    bound_pair it;
    begin(&it, true);
    run_first(&it);
    refit_update *update = take(&it, 1, 1);
    apply(&it, update);
    assert_int_equal(refit_update_refuse(update, NULL, 1, NULL), REFIT_OK);
    refit_update_close(update);
    raw_hear(&it.pair.raw, RFT_RELEASED);
    update = take(&it, 2, 1);
    apply(&it, update);
    accept(&it, update);
    end(&it);
}

static void every_change_of_the_engine_is_taken_back_to_before_the_first(void **state)
{
    (void)state;
    bound_pair it;
    begin(&it, false);
    run_first(&it);
    refit_update *update = take(&it, 1, 1);
    apply(&it, update);
    memset(it.engine.list[1].memory, 9, 70000);
    apply(&it, update);
    refit_update_close(update);
    assert_true(engine_is_as_saved(&it.engine));
    end(&it);
}

/* The trainer writes over its shared memory: before the apply, or between it and accept. */
static void bytes_overwritten_under_an_update_are_taken_back(void **state)
{
    (void)state;
    for (int late = 0; late <= 1; late++) {
        pairing pair;
        engine one;
        rft_segment slot;
        pair_open(&pair, true, NULL);
        engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 7);
        assert_int_equal(refit_subscriber_bind(pair.subscriber, one.list, one.count, NULL),
                         REFIT_OK);
        raw_join(&pair.raw);
        raw_slot_open(&slot, &pair.samples[0]);
        raw_say(&pair.raw, sample_manifest(&pair.samples[0], PAIR_EPOCH));
        raw_say(&pair.raw,
                sample_offer(&pair.samples[0], PAIR_EPOCH, 0, slot.name, RFT_MARK_BYTES));
        raw_say(&pair.raw, sample_seal(&pair.samples[0]));
        raw_hear(&pair.raw, RFT_STAGED);
        raw_say(&pair.raw, sample_commit(&pair.samples[0]));
        refit_update *update = pair_next(&pair);
        if (late == 1) {
            assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_OK);
            assert_true(engine_is_like(&one, update));
        }
        atomic_fetch_add(&raw_slot_mark(&slot)->generation, 1);
        memset(slot.memory + RFT_MARK_BYTES, 1, 100000);
        refit_status status =
            late == 1 ? refit_update_accept(update, NULL) : refit_update_apply(update, NULL, NULL);
        assert_int_equal(status, REFIT_ERR_STALE);
        assert_true(engine_is_as_saved(&one));
        refit_update_close(update);
        pair_close(&pair);
        rft_segment_close(&slot);
        engine_close(&one);
    }
}

/* A trainer that writes there all the time. */
typedef struct scribbler {
    rft_thread thread;
    unsigned char *memory;
    atomic_bool ending;
} scribbler;

static void *scribble(void *user)
{
    scribbler *it = user;
    uint64_t seed = 7;
    while (!atomic_load(&it->ending)) {
        for (uint32_t i = 0; i < 4096; i++) {
            uint64_t next = seeded_next(&seed);
            it->memory[next % 300000] = (unsigned char)(next >> 40);
        }
    }
    return NULL;
}

static void bytes_that_change_while_they_are_applied_are_taken_back(void **state)
{
    (void)state;
    pairing pair;
    engine one;
    rft_segment slot;
    pair_open(&pair, true, NULL);
    engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 7);
    assert_int_equal(refit_subscriber_bind(pair.subscriber, one.list, one.count, NULL), REFIT_OK);
    raw_join(&pair.raw);
    raw_slot_open(&slot, &pair.samples[0]);
    raw_say(&pair.raw, sample_manifest(&pair.samples[0], PAIR_EPOCH));
    raw_say(&pair.raw, sample_offer(&pair.samples[0], PAIR_EPOCH, 0, slot.name, RFT_MARK_BYTES));
    raw_say(&pair.raw, sample_seal(&pair.samples[0]));
    raw_hear(&pair.raw, RFT_STAGED);
    raw_say(&pair.raw, sample_commit(&pair.samples[0]));
    refit_update *update = pair_next(&pair);
    for (uint32_t i = 0; i < one.count; i++)
        memcpy(one.list[i].memory,
               slot.memory + RFT_MARK_BYTES + pair.samples[0].manifest->tensors[i].offset,
               one.list[i].bytes);
    engine_save(&one);
    scribbler trainer = {.memory = slot.memory + RFT_MARK_BYTES};
    atomic_fetch_add(&raw_slot_mark(&slot)->generation, 1);
    assert_int_equal(rft_thread_start(&trainer.thread, "scribbler", scribble, &trainer, NULL),
                     REFIT_OK);
    for (uint32_t i = 0; i < 300; i++) {
        assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_STALE);
        assert_true(engine_is_as_saved(&one));
    }
    atomic_store(&trainer.ending, true);
    rft_thread_join(trainer.thread);
    refit_update_close(update);
    pair_close(&pair);
    rft_segment_close(&slot);
    engine_close(&one);
}

static void verify_always(refit_config *config)
{
    config->broadcast_verify = REFIT_VERIFY_ALWAYS;
}

/* A device that loses half of what it copies without a word. */
static void a_wrong_digest_is_taken_back(void **state)
{
    (void)state;
    uint32_t found = 0;
    for (uint32_t nth = 1;; nth++) {
        bound_pair it;
        begin_with(&it, true, verify_always);
        run_first(&it);
        refit_update *update = take(&it, 1, 1);
        faulty_device_reset(it.device);
        faulty_device_fail_later(it.device, FAULTY_COPY_BATCH, nth, REFIT_OK);
        refit_status status = refit_update_apply(update, NULL, NULL);
        bool made = faulty_device_calls(it.device, FAULTY_COPY_BATCH) >= nth;
        faulty_device_reset(it.device);
        if (status == REFIT_OK) {
            assert_true(engine_is_like(&it.engine, update));
        } else {
            assert_int_equal(status, REFIT_ERR_CORRUPT);
            found++;
            apply(&it, update);
        }
        refit_update_close(update);
        end(&it);
        if (!made) break;
    }
    assert_true(found > 0);
}

/* ---- Whatever fails */

static bool fail_one(faulty_slot slot, uint32_t nth, bool later, bool again)
{
    bound_pair it;
    begin(&it, true);
    run_first(&it);
    refit_update *update = take(&it, 1, 1);
    faulty_device_reset(it.device);
    if (later) {
        faulty_device_fail_later(it.device, slot, nth, REFIT_ERR_COPY);
    } else {
        faulty_device_fail(it.device, slot, nth, REFIT_ERR_COPY);
    }
    refit_status status = refit_update_apply(update, NULL, NULL);
    bool made = faulty_device_calls(it.device, slot) >= nth;
    faulty_device_reset(it.device);
    assert_int_equal(status, made ? REFIT_ERR_COPY : REFIT_OK);
    if (made) assert_true(engine_is_as_saved(&it.engine));
    if (again || !made) {
        apply(&it, update);
        accept(&it, update);
    } else {
        refit_update_close(update);
        assert_true(engine_is_as_saved(&it.engine));
    }
    end(&it);
    return made;
}

static void a_device_that_fails_at_any_step_leaves_the_old_version(void **state)
{
    (void)state;
    const faulty_slot slots[] = {FAULTY_COPY_BATCH, FAULTY_EVENT_RECORD, FAULTY_EVENT_WAIT};
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++) {
        uint32_t nth = 1;
        while (fail_one(slots[i], nth, false, nth / STRIDE % 2 == 0))
            nth += STRIDE;
        assert_true(nth > 5);
    }
    uint32_t nth = 1;
    while (fail_one(FAULTY_COPY_BATCH, nth, true, nth / STRIDE % 2 == 1))
        nth += STRIDE;
    assert_true(nth > 5);
}

/* The device is gone when it is to be taken back, too. */
static void what_cannot_be_taken_back_serves_nobody(void **state)
{
    (void)state;
    bound_pair it;
    refit_error error;
    begin(&it, true);
    run_first(&it);
    refit_update *update = take(&it, 1, 1);
    faulty_device_fail_times(it.device, FAULTY_COPY_BATCH, 4, FAULTY_ALWAYS, REFIT_ERR_COPY);
    assert_int_equal(refit_update_apply(update, NULL, &error), REFIT_ERR_COPY);
    assert_non_null(strstr(error.text, "could not be taken back"));
    assert_int_equal(refit_update_accept(update, &error), REFIT_ERR_STATE);
    assert_int_equal(refit_update_refuse(update, "torn", 1, &error), REFIT_ERR_COPY);
    raw_hear(&it.pair.raw, RFT_FAILED);
    assert_false(it.pair.raw.heard.as.failed.kept);
    assert_int_equal(pair_describe(&it.pair).version, 0);
    refit_update_close(update);
    raw_join(&it.pair.raw);
    faulty_device_reset(it.device);
    update = take(&it, 2, 0);
    assert_int_equal(refit_update_accept(update, &error), REFIT_ERR_STATE);
    apply(&it, update);
    accept(&it, update);
    end(&it);
}

/* Once the device is well again, even what was torn comes back. */
static void a_second_attempt_to_take_back_does(void **state)
{
    (void)state;
    for (int later = 0; later <= 1; later++) {
        bound_pair it;
        begin(&it, true);
        run_first(&it);
        refit_update *update = take(&it, 1, 1);
        faulty_device_fail_times(it.device, FAULTY_COPY_BATCH, 4, FAULTY_ALWAYS, REFIT_ERR_COPY);
        assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_COPY);
        faulty_device_reset(it.device);
        if (later == 1) apply(&it, update);
        assert_int_equal(refit_update_refuse(update, NULL, 1, NULL), REFIT_OK);
        assert_true(engine_is_as_saved(&it.engine));
        raw_hear(&it.pair.raw, RFT_FAILED);
        assert_true(it.pair.raw.heard.as.failed.kept);
        refit_update_close(update);
        end(&it);
    }
}

/* What is in the engine is the update but for the last byte of each tensor. */
static void make_almost(bound_pair *it, const refit_update *update)
{
    for (uint32_t i = 0; i < it->engine.count; i++) {
        uint32_t index;
        const void *bytes;
        refit_tensor tensor = {.size = sizeof tensor};
        assert_int_equal(refit_update_find(update, it->engine.list[i].name, &index, NULL),
                         REFIT_OK);
        assert_int_equal(refit_update_tensor(update, index, &tensor, &bytes, NULL), REFIT_OK);
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

/* The device goes amid its nth copy, and comes back before the version is applied again; then it is
 * refused. Whether there was such a copy, and whether it was one into the engine. */
static bool tear_and_refuse(uint32_t nth, bool *torn)
{
    bound_pair it;
    refit_error error;
    begin(&it, true);
    run_first(&it);
    refit_update *update = take(&it, 1, 1);
    make_almost(&it, update);
    faulty_device_reset(it.device);
    faulty_device_break(it.device, FAULTY_COPY_BATCH, nth, REFIT_ERR_COPY);
    refit_status status = refit_update_apply(update, NULL, &error);
    *torn = status != REFIT_OK && strstr(error.text, "could not be taken back") != NULL;
    faulty_device_reset(it.device);
    apply(&it, update);
    assert_int_equal(refit_update_refuse(update, NULL, 1, NULL), REFIT_OK);
    assert_true(engine_is_as_saved(&it.engine));
    raw_hear(&it.pair.raw, RFT_FAILED);
    assert_true(it.pair.raw.heard.as.failed.kept);
    refit_update_close(update);
    end(&it);
    return status != REFIT_OK;
}

/* Bytes that a broken copy left are never taken for what the engine had. */
static void what_a_broken_copy_left_is_not_what_was_there(void **state)
{
    (void)state;
    uint32_t nth = 1, tears = 0;
    for (bool torn = false; tear_and_refuse(nth, &torn); nth++)
        tears += torn ? 1 : 0;
    assert_true(tears >= 3);
}

static void unbinding_takes_back_what_is_torn_or_does_not_unbind(void **state)
{
    (void)state;
    bound_pair it;
    begin(&it, true);
    run_first(&it);
    refit_update *update = take(&it, 1, 1);
    faulty_device_fail_times(it.device, FAULTY_COPY_BATCH, 4, FAULTY_ALWAYS, REFIT_ERR_COPY);
    assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_COPY);
    assert_int_equal(refit_subscriber_unbind(it.pair.subscriber, NULL), REFIT_ERR_COPY);
    assert_int_equal(refit_update_accept(update, NULL), REFIT_ERR_STATE);
    faulty_device_reset(it.device);
    assert_int_equal(refit_subscriber_unbind(it.pair.subscriber, NULL), REFIT_OK);
    assert_true(engine_is_as_saved(&it.engine));
    refit_update_close(update);
    end(&it);
}

/* An engine without the version must not say that it has it. */
static void what_could_not_be_applied_is_not_accepted(void **state)
{
    (void)state;
    bound_pair it;
    refit_error error;
    uint32_t left;
    begin(&it, false);
    run_first(&it);
    refit_update *update = take(&it, 1, 1);
    assert_int_equal(refit_subscriber_unbind(it.pair.subscriber, NULL), REFIT_OK);
    assert_int_equal(refit_subscriber_bind(it.pair.subscriber, it.engine.list, 4, NULL), REFIT_OK);
    assert_int_equal(refit_update_apply(update, &left, NULL), REFIT_OK);
    assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_NOT_FOUND);
    assert_true(engine_is_as_saved(&it.engine));
    assert_int_equal(refit_update_accept(update, &error), REFIT_ERR_STATE);
    assert_non_null(strstr(error.text, "could not be applied"));
    assert_int_equal(refit_update_apply(update, &left, NULL), REFIT_OK);
    assert_int_equal(refit_update_refuse(update, NULL, 1, NULL), REFIT_OK);
    refit_update_close(update);
    update = take(&it, 2, 1);
    assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_NOT_FOUND);
    assert_int_equal(refit_subscriber_unbind(it.pair.subscriber, NULL), REFIT_OK);
    accept(&it, update); /* loaded by hand, the caller says */
    end(&it);
}

static void without_memory_nothing_is_changed(void **state)
{
    (void)state;
    bound_pair it;
    uint64_t nth = 1;
    failing_alloc_begin(0);
    begin_with(&it, true, verify_always);
    run_first(&it);
    refit_update *update = take(&it, 1, 1);
    for (bool came = true; came; nth++) {
        failing_alloc_here(nth);
        refit_status status = refit_update_apply(update, NULL, NULL);
        came = failing_alloc_stop_here();
        assert_int_equal(status, came ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
        if (came) assert_true(engine_is_as_saved(&it.engine));
    }
    assert_true(nth > 3);
    assert_true(engine_is_like(&it.engine, update));
    accept(&it, update);
    end(&it);
    (void)failing_alloc_end();
}

/* ---- What does not fit */

static refit_status try_apply(engine *one, uint32_t count, uint32_t *left, refit_error *error)
{
    pairing pair;
    pair_open(&pair, false, NULL);
    assert_int_equal(refit_subscriber_bind(pair.subscriber, one->list, count, NULL), REFIT_OK);
    raw_join(&pair.raw);
    raw_stage(&pair.raw, &pair.samples[0], NULL);
    raw_say(&pair.raw, sample_commit(&pair.samples[0]));
    refit_update *update = pair_next(&pair);
    refit_status status = refit_update_apply(update, left, error);
    if (status != REFIT_OK) assert_true(engine_is_as_saved(one));
    if (status == REFIT_OK) assert_int_equal(refit_update_accept(update, NULL), REFIT_OK);
    refit_update_close(update);
    pair_close(&pair);
    return status;
}

static void tensors_without_a_destination_are_counted_or_refused(void **state)
{
    (void)state;
    engine one;
    refit_error error;
    uint32_t left = 99;
    engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 1);
    assert_int_equal(try_apply(&one, 4, NULL, &error), REFIT_ERR_NOT_FOUND);
    assert_non_null(strstr(error.text, "2 tensors"));
    assert_non_null(strstr(error.text, "scalar"));
    assert_int_equal(try_apply(&one, 4, &left, NULL), REFIT_OK);
    assert_int_equal(left, 2);
    assert_false(engine_is_as_saved(&one));
    engine_close(&one);
}

/* One of two tied names is enough; one of a name that no version has is too much. */
static void names_on_one_side_only(void **state)
{
    (void)state;
    engine one;
    refit_error error;
    uint32_t left = 99;
    engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 1);
    refit_destination large = one.list[1];
    one.list[1].name = "nobody";
    assert_int_equal(try_apply(&one, SAMPLE_TENSORS, NULL, &error), REFIT_ERR_NOT_FOUND);
    assert_non_null(strstr(error.text, "nobody"));
    assert_int_equal(try_apply(&one, SAMPLE_TENSORS, &left, &error), REFIT_OK);
    assert_int_equal(left, 0);
    for (uint64_t i = 0; i < large.bytes; i++)
        assert_int_equal(((unsigned char *)large.memory)[i], 1);
    engine_close(&one);
}

static void bytes_and_types_are_those_of_the_version(void **state)
{
    (void)state;
    engine one;
    refit_error error;
    engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 1);
    one.list[4].bytes = 7;
    assert_int_equal(try_apply(&one, SAMPLE_TENSORS, NULL, &error), REFIT_ERR_INVALID);
    assert_non_null(strstr(error.text, "8 bytes"));
    one.list[4].bytes = 8;
    one.list[4].dtype = REFIT_I64;
    assert_int_equal(try_apply(&one, SAMPLE_TENSORS, NULL, &error), REFIT_ERR_INVALID);
    assert_non_null(strstr(error.text, "F64"));
    one.list[4].dtype = 0;
    assert_int_equal(try_apply(&one, SAMPLE_TENSORS, NULL, NULL), REFIT_OK);
    engine_close(&one);
}

/* Two tensors in one memory could not both be right. */
static void one_memory_for_two_tensors_is_refused(void **state)
{
    (void)state;
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
    assert_int_equal(try_apply(&few, 3, &left, &error), REFIT_ERR_INVALID);
    assert_int_equal(try_apply(&few, 2, &left, &error), REFIT_OK);
    assert_int_not_equal(memcmp(scalar, "\1\1\1\1\1\1\1\1", 8), 0);
    engine_close(&one);
}

/* ---- Binding */

static refit_status bind_two(refit_subscriber *subscriber, refit_destination a, refit_destination b)
{
    const refit_destination list[] = {a, b};
    return refit_subscriber_bind(subscriber, list, 2, NULL);
}

static void lists_with_mistakes_are_refused(void **state)
{
    (void)state;
    pairing pair;
    unsigned char memory[64] = {0};
    const refit_destination good = {
        .size = sizeof good, .name = "a", .memory = memory, .bytes = 32};
    refit_destination bad[8];
    pair_open(&pair, false, NULL);
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
        assert_int_equal(bind_two(pair.subscriber, good, bad[i]), REFIT_ERR_INVALID);
        assert_int_equal(bind_two(pair.subscriber, bad[i], good), REFIT_ERR_INVALID);
    }
    assert_int_equal(bind_two(pair.subscriber, good, good), REFIT_ERR_INVALID);
    assert_int_equal(refit_subscriber_bind(NULL, &good, 1, NULL), REFIT_ERR_INVALID);
    assert_int_equal(refit_subscriber_bind(pair.subscriber, NULL, 1, NULL), REFIT_ERR_INVALID);
    assert_int_equal(refit_subscriber_bind(pair.subscriber, &good, 0, NULL), REFIT_ERR_INVALID);
    assert_int_equal(refit_subscriber_unbind(NULL, NULL), REFIT_ERR_INVALID);
    assert_int_equal(refit_subscriber_unbind(pair.subscriber, NULL), REFIT_OK);
    pair_close(&pair);
}

/* One device's memory, by itself and as plain memory of the host, is one memory. */
static void overlaps_are_seen_across_devices(void **state)
{
    (void)state;
    pairing pair;
    refit_device *device;
    void *memory;
    if (test_on_cuda()) return; /* whose memory is none of the host's */
    pair_open(&pair, false, NULL);
    assert_int_equal(test_device_open("host", &device, NULL), REFIT_OK);
    assert_int_equal(refit_memory_alloc(device, 4096, &memory, NULL), REFIT_OK);
    refit_destination plain = {.size = sizeof plain, .name = "a", .memory = memory, .bytes = 4096};
    refit_destination within = {.size = sizeof within, .name = "b", .device = device};
    for (uint64_t bytes = 2048; bytes <= 4096; bytes += 2048) {
        within.memory = (unsigned char *)memory + (4096 - bytes);
        within.bytes = bytes;
        assert_int_equal(bind_two(pair.subscriber, plain, within), REFIT_ERR_INVALID);
        assert_int_equal(bind_two(pair.subscriber, within, plain), REFIT_ERR_INVALID);
    }
    plain.bytes = 2048;
    within.memory = (unsigned char *)memory + 2048;
    within.bytes = 2048;
    assert_int_equal(bind_two(pair.subscriber, plain, within), REFIT_OK);
    pair_close(&pair);
    assert_int_equal(refit_memory_free(device, memory, NULL), REFIT_OK);
    assert_int_equal(refit_device_close(device, NULL), REFIT_OK);
}

static void memory_of_another_device_is_refused(void **state)
{
    (void)state;
    pairing pair;
    refit_device *device;
    unsigned char memory[8];
    if (!test_on_cuda()) return; /* any memory is the host device's */
    pair_open(&pair, false, NULL);
    assert_int_equal(test_device_open("host", &device, NULL), REFIT_OK);
    const refit_destination one = {.size = sizeof one,
                                   .name = "a",
                                   .memory = memory,
                                   .bytes = sizeof memory,
                                   .device = device};
    assert_int_equal(refit_subscriber_bind(pair.subscriber, &one, 1, NULL), REFIT_ERR_INVALID);
    pair_close(&pair);
    assert_int_equal(refit_device_close(device, NULL), REFIT_OK);
}

static void bound_and_unbound_in_turn(void **state)
{
    (void)state;
    bound_pair it;
    refit_error error;
    begin(&it, true);
    assert_int_equal(
        refit_subscriber_bind(it.pair.subscriber, it.engine.list, it.engine.count, &error),
        REFIT_ERR_STATE);
    assert_int_equal(refit_device_close(it.device, NULL), REFIT_ERR_BUSY);
    run_first(&it);
    refit_update *update = take(&it, 1, 1);
    apply(&it, update);
    assert_int_equal(refit_subscriber_unbind(it.pair.subscriber, &error), REFIT_ERR_STATE);
    assert_int_equal(refit_update_accept(update, NULL), REFIT_OK);
    assert_int_equal(refit_subscriber_unbind(it.pair.subscriber, &error), REFIT_OK);
    assert_true(engine_is_like(&it.engine, update));
    refit_update_close(update);
    update = take(&it, 2, 2);
    assert_int_equal(refit_update_apply(update, NULL, &error), REFIT_ERR_STATE);
    refit_update_close(update);
    assert_int_equal(refit_update_apply(update, NULL, &error), REFIT_ERR_STATE);
    assert_int_equal(refit_update_apply(NULL, NULL, &error), REFIT_ERR_INVALID);
    end(&it);
}

/* Amid an update that is not applied: it goes where things are bound by then. */
static void bound_elsewhere_amid_an_update(void **state)
{
    (void)state;
    bound_pair it;
    engine other;
    begin(&it, false);
    run_first(&it);
    refit_update *update = take(&it, 1, 1);
    assert_int_equal(refit_subscriber_unbind(it.pair.subscriber, NULL), REFIT_OK);
    assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_STATE);
    engine_open(&other, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 1);
    assert_int_equal(refit_subscriber_bind(it.pair.subscriber, other.list, other.count, NULL),
                     REFIT_OK);
    assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_OK);
    assert_true(engine_is_like(&other, update));
    assert_true(engine_is_as_saved(&it.engine));
    refit_update_close(update);
    assert_true(engine_is_as_saved(&other));
    end(&it);
    engine_close(&other);
}

/* Nothing is written any more when the subscriber is closed, so its memory may go at once. */
static void what_was_bound_may_be_freed_once_the_subscriber_is_closed(void **state)
{
    (void)state;
    for (int device = 0; device <= 1; device++) {
        bound_pair it;
        begin(&it, device == 1);
        run_first(&it);
        refit_update *update = take(&it, 1, 1);
        apply(&it, update);
        refit_subscriber_close(it.pair.subscriber);
        it.pair.subscriber = NULL;
        assert_true(engine_is_as_saved(&it.engine));
        engine_close(&it.engine);
        if (it.device != NULL) assert_int_equal(refit_device_close(it.device, NULL), REFIT_OK);
        pair_close(&it.pair);
    }
}

static void a_bind_that_fails_leaves_nothing(void **state)
{
    (void)state;
    const struct {
        faulty_slot slot;
        uint32_t nth;
    } faults[] = {{FAULTY_STREAM_OPEN, 1}, {FAULTY_EVENT_OPEN, 1}, {FAULTY_EVENT_OPEN, 2}};
    pairing pair;
    engine one;
    refit_device *device;
    failing_alloc_begin(0);
    pair_open(&pair, false, NULL);
    assert_int_equal(faulty_device_open(test_device_spec("host"), &device, NULL), REFIT_OK);
    engine_open(&one, device, sample_tensors(), SAMPLE_TENSORS, 0, 1);
    for (uint32_t i = 0; i < 3; i++) {
        faulty_device_fail(device, faults[i].slot, faults[i].nth, REFIT_ERR_DEVICE);
        assert_int_equal(refit_subscriber_bind(pair.subscriber, one.list, one.count, NULL),
                         REFIT_ERR_DEVICE);
        faulty_device_reset(device);
    }
    uint64_t nth = 1;
    for (bool came = true; came; nth++) {
        failing_alloc_here(nth);
        refit_status status = refit_subscriber_bind(pair.subscriber, one.list, one.count, NULL);
        came = failing_alloc_stop_here();
        if (status == REFIT_OK) { /* without a page-lock, perhaps */
            assert_int_equal(refit_subscriber_unbind(pair.subscriber, NULL), REFIT_OK);
        } else {
            assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
        }
    }
    assert_true(nth > 6);
    pair_close(&pair);
    engine_close(&one);
    assert_int_equal(refit_device_close(device, NULL), REFIT_OK);
    (void)failing_alloc_end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_applied_and_accepted_is_what_the_trainer_sent),
        cmocka_unit_test(applying_twice_is_applying_once),
        cmocka_unit_test(what_the_engine_had_does_not_matter),
        cmocka_unit_test(tied_tensors_may_have_one_memory),
        cmocka_unit_test(what_the_trainer_says_after_its_commit_changes_nothing),
        cmocka_unit_test(figures_say_what_was_written_and_what_was_taken_back),
        cmocka_unit_test(what_is_not_accepted_was_never_there),
        cmocka_unit_test(after_a_refusal_the_next_version_applies),
        cmocka_unit_test(every_change_of_the_engine_is_taken_back_to_before_the_first),
        cmocka_unit_test(bytes_overwritten_under_an_update_are_taken_back),
        cmocka_unit_test(bytes_that_change_while_they_are_applied_are_taken_back),
        cmocka_unit_test(a_wrong_digest_is_taken_back),
        cmocka_unit_test(a_device_that_fails_at_any_step_leaves_the_old_version),
        cmocka_unit_test(what_cannot_be_taken_back_serves_nobody),
        cmocka_unit_test(a_second_attempt_to_take_back_does),
        cmocka_unit_test(what_a_broken_copy_left_is_not_what_was_there),
        cmocka_unit_test(unbinding_takes_back_what_is_torn_or_does_not_unbind),
        cmocka_unit_test(what_could_not_be_applied_is_not_accepted),
        cmocka_unit_test(without_memory_nothing_is_changed),
        cmocka_unit_test(tensors_without_a_destination_are_counted_or_refused),
        cmocka_unit_test(names_on_one_side_only),
        cmocka_unit_test(bytes_and_types_are_those_of_the_version),
        cmocka_unit_test(one_memory_for_two_tensors_is_refused),
        cmocka_unit_test(lists_with_mistakes_are_refused),
        cmocka_unit_test(overlaps_are_seen_across_devices),
        cmocka_unit_test(memory_of_another_device_is_refused),
        cmocka_unit_test(bound_and_unbound_in_turn),
        cmocka_unit_test(bound_elsewhere_amid_an_update),
        cmocka_unit_test(what_was_bound_may_be_freed_once_the_subscriber_is_closed),
        cmocka_unit_test(a_bind_that_fails_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
