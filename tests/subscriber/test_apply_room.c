/* Old bytes: the first version replaces none, and notes nothing; where memory for those of a later
 * one ends, it is refused and the one before stays. */
#include "memory/budget.h"
#include "tests/support/bound_pair.h"
#include "tests/support/faulty_device.h"
#include "tests/support/test.h"

static uint64_t free_bytes;

void __wrap_rft_budget_free(const char *root, rft_budget *out);

void __wrap_rft_budget_free(const char *root, rft_budget *out)
{
    *out = (rft_budget){0, free_bytes, "cgroup memory limit"};
}

/* Version 1, taken while there was memory for it. */
static refit_update *take_first(bound_pair *it)
{
    free_bytes = UINT64_MAX;
    bound_begin(it, false);
    refit_update *update = bound_take(it, 0, 0);
    free_bytes = 0;
    return update;
}

BOUND_TEST(the_first_version_is_written_without_notes)
{
    refit_update *update = take_first(it);
    bound_apply(it, update);
    assert_true(engine_is_like(&it->engine, update));
    bound_accept(it, update);
    free_bytes = UINT64_MAX;
    update = bound_take(it, 1, 1);
    engine_save(&it->engine);
    free_bytes = 0;
    assert_refused(refit_update_apply(update, NULL, error), REFIT_ERR_HOST_MEMORY, "load_into");
    assert_true(engine_is_as_saved(&it->engine));
    free_bytes = UINT64_MAX;
    bound_apply(it, update);
    bound_accept(it, update);
}

static refit_stats figures(bound_pair *it)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_subscriber_stats(it->pair.subscriber, &stats, NULL));
    return stats;
}

BOUND_TEST(first_version_cannot_be_taken_back_but_next_is_applied)
{
    refit_update *update = take_first(it);
    bound_apply(it, update);
    assert_ok(refit_update_refuse(update, "no", 1, NULL));
    assert_true(engine_is_like(&it->engine, update));
    assert_int_equal(figures(it).receive_rollbacks, 0);
    raw_hear(&it->pair.raw, RFT_FAILED);
    assert_false(it->pair.raw.heard.as.failed.kept);
    refit_update_close(update);
    raw_join(&it->pair.raw);
    free_bytes = UINT64_MAX;
    update = bound_take(it, 1, 0);
    assert_int_equal(refit_update_accept(update, NULL), REFIT_ERR_STATE);
    bound_apply(it, update);
    bound_accept(it, update);
}

/* A failure in the middle of the first version leaves no version whole. */
BOUND_TEST(a_first_version_that_fails_leaves_none_until_one_is_applied)
{
    bound_begin(it, true);
    refit_update *update = bound_take(it, 0, 0);
    faulty_device_fail_times(it->device, FAULTY_COPY_BATCH, 4, FAULTY_ALWAYS, REFIT_ERR_COPY);
    assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_COPY);
    faulty_device_reset(it->device);
    assert_false(engine_is_as_saved(&it->engine));
    assert_refused(refit_update_accept(update, error), REFIT_ERR_STATE, "hold no version whole");
    bound_apply(it, update);
    bound_accept(it, update);
}

/* One that fails before its first byte leaves what was there. */
BOUND_TEST(a_first_version_that_does_not_fit_writes_nothing)
{
    bound_begin(it, false);
    assert_ok(refit_subscriber_unbind(it->pair.subscriber, NULL));
    assert_ok(refit_subscriber_bind(it->pair.subscriber, it->engine.list, 4, NULL));
    refit_update *update = bound_take(it, 0, 0);
    assert_int_equal(refit_update_apply(update, NULL, NULL), REFIT_ERR_NOT_FOUND);
    assert_true(engine_is_as_saved(&it->engine));
    assert_ok(refit_update_refuse(update, "no", 1, NULL));
    raw_hear(&it->pair.raw, RFT_FAILED);
    assert_true(it->pair.raw.heard.as.failed.kept);
    refit_update_close(update);
}

static void with_small_budget(refit_config *config)
{
    config->offload_budget_bytes = 8192;
}

/* Notes count against offload.budget_bytes. */
BOUND_TEST(old_bytes_beyond_the_budget_are_not_written_over)
{
    free_bytes = UINT64_MAX;
    bound_begin_with(it, false, with_small_budget);
    bound_run_first(it);
    refit_update *update = bound_take(it, 1, 1);
    assert_refused(refit_update_apply(update, NULL, error), REFIT_ERR_BUDGET,
                   "offload.budget_bytes is 8192");
    assert_true(engine_is_as_saved(&it->engine));
    assert_ok(refit_update_refuse(update, "no", 1, NULL));
    refit_update_close(update);
}

BOUND_TEST(what_cannot_be_taken_back_can_be_unbound)
{
    refit_update *update = take_first(it);
    bound_apply(it, update);
    refit_update_close(update);
    assert_ok(refit_subscriber_unbind(it->pair.subscriber, NULL));
}

int main(void)
{
    return test_run("apply_room");
}
