/*
 * A trainer that has evicted this worker overwrites a version in its shared memory while the
 * applied bytes are verified: the linker puts this file's function before the first digest.
 */
#include <stdatomic.h>

#include "subscriber/destinations.h"
#include "tests/support/bound_engine.h"
#include "tests/support/pairing.h"
#include "tests/support/unit.h"

static rft_segment slot;
static bool marked;      /* the trainer says that it overwrites */
static bool overwritten; /* it has */

refit_status __real_rft_destinations_digest(const rft_destinations *all,
                                            const rft_bound_tensor *one, uint64_t *sum,
                                            refit_error *error);
refit_status __wrap_rft_destinations_digest(const rft_destinations *all,
                                            const rft_bound_tensor *one, uint64_t *sum,
                                            refit_error *error);

/* Overwrites the version at the first digest. */
refit_status __wrap_rft_destinations_digest(const rft_destinations *all,
                                            const rft_bound_tensor *one, uint64_t *sum,
                                            refit_error *error)
{
    if (!overwritten) {
        if (marked) atomic_fetch_add(&raw_slot_seqlock(&slot)->generation, 1);
        slot.memory[RFT_SEQLOCK_BYTES] ^= 1;
        overwritten = true;
    }
    return __real_rft_destinations_digest(all, one, sum, error);
}

static void verify_always(refit_config *config)
{
    config->broadcast_verify = REFIT_VERIFY_ALWAYS;
}

/* The status of an apply during which a byte changes that has no destination. */
static refit_status apply_meanwhile(bool mark, refit_error *error)
{
    pairing pair;
    engine one;
    uint32_t left = 0;
    marked = mark;
    overwritten = false;
    pair_open(&pair, true, verify_always);
    const sample_version *sample = &pair.samples[0];
    engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 1);
    assert_ok(refit_subscriber_bind(pair.subscriber, one.list + 1, one.count - 1, NULL));
    raw_join(&pair.raw);
    raw_slot_open(&slot, sample);
    raw_say(&pair.raw, sample_manifest(sample, PAIR_EPOCH));
    raw_say(&pair.raw, sample_offer(sample, PAIR_EPOCH, 0, slot.name, RFT_SEQLOCK_BYTES));
    raw_say(&pair.raw, sample_seal(sample));
    raw_hear_staged(&pair.raw, sample);
    raw_say(&pair.raw, sample_commit(sample));
    refit_update *update = pair_next(&pair);
    refit_status status = refit_update_apply(update, &left, error);
    assert_true(engine_is_as_saved(&one));
    refit_update_close(update);
    pair_close(&pair);
    rft_segment_close(&slot);
    engine_close(&one);
    return status;
}

static void a_version_overwritten_while_it_is_verified_is_stale(void **state)
{
    refit_error error;
    assert_int_equal(apply_meanwhile(true, &error), REFIT_ERR_STALE);
    assert_non_null(strstr(error.text, "overwrites version 1"));
}

static void bytes_that_change_unannounced_are_corrupt(void **state)
{
    refit_error error;
    assert_int_equal(apply_meanwhile(false, &error), REFIT_ERR_CORRUPT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_version_overwritten_while_it_is_verified_is_stale),
        cmocka_unit_test(bytes_that_change_unannounced_are_corrupt),
    };
    return cmocka_run_group_tests_name("apply_overwritten", tests, NULL, NULL);
}
