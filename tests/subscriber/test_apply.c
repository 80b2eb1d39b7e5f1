/* Versions applied into the engine's own memory: whole, or as if nothing had been done. */
#include "base/thread.h"
#include "subscriber/destinations.h"
#include "tests/support/bound_pair.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"

/* ---- It is there */

BOUND_TEST(what_is_applied_and_accepted_is_what_the_trainer_sent)
{
    for (int device = 0; device <= 1; device++) {
        bound_begin(it, device == 1);
        bound_run_first(it);
        for (uint32_t i = 1; i < 3; i++) {
            refit_update *update = bound_take(it, i, i);
            bound_apply(it, update);
            assert_false(engine_is_as_saved(&it->engine));
            bound_accept(it, update);
        }
    }
}

BOUND_TEST(applying_twice_is_applying_once)
{
    for (int device = 0; device <= 1; device++) {
        refit_update *update = bound_take_second(it, device == 1);
        bound_apply(it, update);
        bound_apply(it, update);
        assert_ok(refit_update_refuse(update, NULL, 1, NULL));
        assert_true(engine_is_as_saved(&it->engine));
        assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_STATE);
        refit_update_close(update);
    }
}

/* The engine has the version, also after its memory was changed meanwhile. */
BOUND_TEST(what_the_engine_had_does_not_matter)
{
    unsigned char other[65536 * 2];
    bound_begin(it, false);
    bound_run_first(it);
    memset(other, 3, sizeof other);
    engine_write(&it->engine, 0, other);
    refit_update *update = bound_take(it, 1, 1);
    bound_apply(it, update);
    memset(it->engine.list[1].memory, 9, 70000);
    bound_apply(it, update);
    bound_accept(it, update);
}

PAIR_TEST(tied_tensors_may_have_one_memory)
{
    engine one;
    pair_open(pair, false, NULL);
    engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 1, 0);
    assert_ptr_equal(one.list[3].memory, one.list[1].memory);
    assert_ok(refit_subscriber_bind(pair->subscriber, one.list, one.count, NULL));
    raw_join(&pair->raw);
    pair_apply(pair, 0, NULL);
    refit_update *update = pair_take(pair, 1, &pair->samples[0]);
    assert_ok(refit_update_apply(update, NULL, NULL));
    assert_true(engine_is_like(&one, update));
    refit_update_close(update);
    assert_true(engine_is_as_saved(&one));
    pair_close(pair);
    engine_close(&one);
}

/* The trainer aborts or evicts the worker too late: the version was committed. */
BOUND_TEST(what_the_trainer_says_after_its_commit_changes_nothing)
{
    for (int bye = 0; bye <= 1; bye++) {
        bound_begin(it, false);
        refit_update *update = bound_take(it, 0, 0);
        if (bye == 0) bound_apply(it, update);
        raw_say(&it->pair.raw, bye == 1 ? sample_bye() : sample_abort(&it->pair.samples[0]));
        if (bye == 1) raw_join(&it->pair.raw);
        bound_apply(it, update);
        bound_accept(it, update);
        engine_save(&it->engine);
        update = bound_take(it, 1, bye == 1 ? 0 : 1);
        bound_apply(it, update);
        refit_update_close(update);
        assert_true(engine_is_as_saved(&it->engine));
    }
}

static refit_stats figures(bound_pair *it)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_subscriber_stats(it->pair.subscriber, &stats, NULL));
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

BOUND_TEST(figures_say_what_was_written_and_what_was_taken_back)
{
    bound_begin(it, false);
    assert_int_equal(figures(it).receive_bound, SAMPLE_TENSORS);
    assert_int_equal(figures(it).receive_applied_bytes_total, 0);
    bound_run_first(it);
    refit_stats before = figures(it);
    assert_true(before.receive_apply_seconds_last > 0);
    refit_update *update = bound_take(it, 1, 1);
    bound_apply(it, update);
    uint64_t changed = changed_bytes(&it->engine);
    assert_true(changed > 0);
    bound_apply(it, update); /* finds nothing to do */
    assert_int_equal(figures(it).receive_applied_bytes_total,
                     before.receive_applied_bytes_total + changed);
    assert_int_equal(figures(it).receive_rollbacks, 0);
    refit_update_close(update);
    assert_int_equal(figures(it).receive_rollbacks, 1);
    assert_ok(refit_subscriber_unbind(it->pair.subscriber, NULL));
    assert_int_equal(figures(it).receive_bound, 0);
}

/* ---- It is taken back */

typedef enum ending { REFUSED_KEPT, REFUSED_LOST, CLOSED, SUBSCRIBER_CLOSED } ending;

static void end_update(bound_pair *it, refit_update *update, ending how)
{
    switch (how) {
    case REFUSED_KEPT:
    case REFUSED_LOST:
        assert_ok(refit_update_refuse(update, "no", how == REFUSED_KEPT, NULL));
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

BOUND_TEST(what_is_not_accepted_was_never_there)
{
    for (int device = 0; device <= 1; device++) {
        for (ending how = REFUSED_KEPT; how <= SUBSCRIBER_CLOSED; how++) {
            refit_update *update = bound_take_second(it, device == 1);
            bound_apply(it, update);
            end_update(it, update, how);
        }
    }
}

BOUND_TEST(after_a_refusal_the_next_version_applies)
{
    refit_update *update = bound_take_second(it, true);
    bound_apply(it, update);
    assert_ok(refit_update_refuse(update, NULL, 1, NULL));
    refit_update_close(update);
    raw_hear(&it->pair.raw, RFT_RELEASED);
    update = bound_take(it, 2, 1);
    bound_apply(it, update);
    bound_accept(it, update);
}

BOUND_TEST(every_change_of_the_engine_is_taken_back_to_before_the_first)
{
    refit_update *update = bound_take_second(it, false);
    bound_apply(it, update);
    memset(it->engine.list[1].memory, 9, 70000);
    bound_apply(it, update);
    refit_update_close(update);
    assert_true(engine_is_as_saved(&it->engine));
}

/* Version 1 is taken from a slot, and what the engine has is it, the caller says. */
static void hold_first(pairing *pair)
{
    rft_segment slot;
    refit_update *update = pair_take_slot(pair, 0, &slot);
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    raw_hear(&pair->raw, RFT_RELEASED);
    rft_segment_close(&slot);
}

/* The trainer writes over its shared memory: before the apply, or between it and accept. */
PAIR_TEST(bytes_overwritten_under_an_update_are_taken_back)
{
    for (int late = 0; late <= 1; late++) {
        engine one;
        rft_segment slot;
        pair_renew(pair, true, NULL);
        engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 7);
        assert_ok(refit_subscriber_bind(pair->subscriber, one.list, one.count, NULL));
        raw_join(&pair->raw);
        hold_first(pair);
        refit_update *update = pair_take_slot(pair, 1, &slot);
        if (late == 1) {
            assert_ok(refit_update_apply(update, NULL, NULL));
            assert_true(engine_is_like(&one, update));
        }
        atomic_fetch_add(&raw_slot_seqlock(&slot)->generation, 1);
        memset(slot.memory + RFT_SEQLOCK_BYTES, 1, 100000);
        refit_status status =
            late == 1 ? refit_update_accept(update, NULL) : refit_update_apply(update, NULL, NULL);
        assert_int_equal(status, REFIT_ERR_STALE);
        assert_true(engine_is_as_saved(&one));
        refit_update_close(update);
        rft_segment_close(&slot);
        pair_close(pair);
        engine_close(&one);
    }
}

/* A trainer that overwrites its shared memory all the time. */
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

PAIR_TEST(bytes_that_change_while_they_are_applied_are_taken_back)
{
    engine one;
    rft_segment slot;
    pair_open(pair, true, NULL);
    engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 7);
    assert_ok(refit_subscriber_bind(pair->subscriber, one.list, one.count, NULL));
    raw_join(&pair->raw);
    hold_first(pair);
    refit_update *update = pair_take_slot(pair, 1, &slot);
    for (uint32_t i = 0; i < one.count; i++)
        memcpy(one.list[i].memory,
               slot.memory + RFT_SEQLOCK_BYTES + pair->samples[1].manifest->tensors[i].offset,
               one.list[i].bytes);
    engine_save(&one);
    scribbler trainer = {.memory = slot.memory + RFT_SEQLOCK_BYTES};
    atomic_fetch_add(&raw_slot_seqlock(&slot)->generation, 1);
    assert_ok(rft_thread_start(&trainer.thread, "scribbler", scribble, &trainer, NULL));
    for (uint32_t i = 0; i < 300; i++) {
        assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_STALE);
        assert_true(engine_is_as_saved(&one));
    }
    atomic_store(&trainer.ending, true);
    rft_thread_join(trainer.thread);
    refit_update_close(update);
    rft_segment_close(&slot);
    pair_close(pair);
    engine_close(&one);
}

/* ---- A trainer that has evicted this worker overwrites a version while the applied bytes are
 * verified: the linker puts this file's function before the first digest. */

static rft_segment scribbled;
static bool marked;             /* the trainer says that it overwrites */
static bool overwritten = true; /* it has, or is not to */

refit_status __real_rft_destinations_digest(const rft_destinations *all,
                                            const unsigned char *wanted, uint64_t *sums,
                                            refit_error *error);
refit_status __wrap_rft_destinations_digest(const rft_destinations *all,
                                            const unsigned char *wanted, uint64_t *sums,
                                            refit_error *error);

refit_status __wrap_rft_destinations_digest(const rft_destinations *all,
                                            const unsigned char *wanted, uint64_t *sums,
                                            refit_error *error)
{
    if (!overwritten) {
        if (marked) atomic_fetch_add(&raw_slot_seqlock(&scribbled)->generation, 1);
        scribbled.memory[RFT_SEQLOCK_BYTES] ^= 1;
        overwritten = true;
    }
    return __real_rft_destinations_digest(all, wanted, sums, error);
}

/* A byte changes that has no destination. */
PAIR_TEST(a_version_overwritten_while_it_is_verified_is_taken_back)
{
    for (int told = 0; told < 2; told++) {
        engine one;
        refit_error error;
        uint32_t left = 0;
        pair_renew(pair, true, with_verify_always);
        engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 1);
        assert_ok(refit_subscriber_bind(pair->subscriber, one.list + 1, one.count - 1, NULL));
        raw_join(&pair->raw);
        hold_first(pair);
        refit_update *update = pair_take_slot(pair, 1, &scribbled);
        marked = told == 1;
        overwritten = false;
        assert_int_equal(refit_update_apply(update, &left, &error),
                         told ? REFIT_ERR_STALE : REFIT_ERR_CORRUPT);
        if (told) assert_says(&error, "overwrites version 2");
        assert_true(overwritten);
        assert_true(engine_is_as_saved(&one));
        refit_update_close(update);
        pair_close(pair);
        rft_segment_close(&scribbled);
        engine_close(&one);
    }
}

int main(void)
{
    return test_run("apply");
}
