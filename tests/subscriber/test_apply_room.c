/* Where memory for old bytes ends: a version is refused and the one before stays; the first one,
 * which replaces none, is written all the same. */
#include "memory/budget.h"
#include "tests/support/bound_pair.h"
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

BOUND_TEST(first_version_cannot_be_taken_back_but_next_is_applied)
{
    refit_update *update = take_first(it);
    refit_error error;
    bound_apply(it, update);
    assert_int_equal(refit_update_refuse(update, "no", 1, &error), REFIT_ERR_HOST_MEMORY);
    assert_non_null(strstr(error.text, "apply a version, or load the weights anew"));
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
