/*
 * A trainer that has turned this worker out overwrites a version in its shared memory while what
 * was applied is looked at again: here when the look begins, which the linker lets this file do.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "subscriber/apply_verify.h"
#include "tests/support/bound_engine.h"
#include "tests/support/pairing.h"

static rft_segment slot;
static bool marked; /* the trainer says that it overwrites */

refit_status __real_rft_apply_verify(const rft_in_place *place, const rft_in_place_source *source,
                                     refit_error *error);
refit_status __wrap_rft_apply_verify(const rft_in_place *place, const rft_in_place_source *source,
                                     refit_error *error);

refit_status __wrap_rft_apply_verify(const rft_in_place *place, const rft_in_place_source *source,
                                     refit_error *error)
{
    if (marked) atomic_fetch_add(&raw_slot_mark(&slot)->generation, 1);
    slot.memory[RFT_SEQLOCK_BYTES] ^= 1;
    return __real_rft_apply_verify(place, source, error);
}

static void verify_always(refit_config *config)
{
    config->broadcast_verify = REFIT_VERIFY_ALWAYS;
}

/* What applying says when a byte changes that has no destination. */
static refit_status apply_meanwhile(bool mark, refit_error *error)
{
    pairing pair;
    engine one;
    uint32_t left = 0;
    marked = mark;
    pair_open(&pair, true, verify_always);
    const sample_version *sample = &pair.samples[0];
    engine_open(&one, NULL, sample_tensors(), SAMPLE_TENSORS, 0, 1);
    assert_int_equal(refit_subscriber_bind(pair.subscriber, one.list + 1, one.count - 1, NULL),
                     REFIT_OK);
    raw_join(&pair.raw);
    raw_slot_open(&slot, sample);
    raw_say(&pair.raw, sample_manifest(sample, PAIR_EPOCH));
    raw_say(&pair.raw, sample_offer(sample, PAIR_EPOCH, 0, slot.name, RFT_SEQLOCK_BYTES));
    raw_say(&pair.raw, sample_seal(sample));
    raw_hear(&pair.raw, RFT_STAGED);
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

static void a_version_overwritten_while_it_is_looked_at_again_is_stale(void **state)
{
    (void)state;
    refit_error error;
    assert_int_equal(apply_meanwhile(true, &error), REFIT_ERR_STALE);
    assert_non_null(strstr(error.text, "overwrites version 1"));
}

static void bytes_that_change_without_a_word_are_damage(void **state)
{
    (void)state;
    refit_error error;
    assert_int_equal(apply_meanwhile(false, &error), REFIT_ERR_CORRUPT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_version_overwritten_while_it_is_looked_at_again_is_stale),
        cmocka_unit_test(bytes_that_change_without_a_word_are_damage),
    };
    return cmocka_run_group_tests_name("apply_overwritten", tests, NULL, NULL);
}
