/* Memory that is taken little by little: never more than is free, and few looks at what is. */
#include "memory/budget.h"
#include "memory/ration.h"
#include "tests/support/test.h"

static uint64_t free_bytes;
static unsigned looks;

void __wrap_rft_budget_free(const char *root, rft_budget *out);

void __wrap_rft_budget_free(const char *root, rft_budget *out)
{
    looks++;
    *out = (rft_budget){0, free_bytes, "cgroup memory limit"};
}

TEST(what_is_free_is_looked_at_once_for_many_small_pieces)
{
    rft_ration ration = {0};
    free_bytes = UINT64_C(1) << 40;
    looks = 0;
    for (int i = 0; i < 1000; i++)
        assert_ok(rft_ration_take(&ration, 16 * KIB, NULL));
    assert_int_equal(looks, 1);
    for (int i = 0; i < 10; i++)
        assert_ok(rft_ration_take(&ration, 100 * MIB, NULL));
    assert_int_equal(looks, 11);
}

/* As the memory that was granted is used, less is free. */
TEST(never_more_is_granted_than_is_free)
{
    rft_ration ration = {0};
    uint64_t taken = 0;
    refit_error error;
    refit_status status = REFIT_OK;
    for (looks = 0; status == REFIT_OK; taken += status == REFIT_OK ? 64 * KIB : 0) {
        free_bytes = 100 * MIB - taken;
        status = rft_ration_take(&ration, 64 * KIB, &error);
    }
    assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    assert_non_null(strstr(error.text, "65536 bytes of host memory are needed and 0 are free"));
    assert_non_null(strstr(error.text, "cgroup memory limit"));
    assert_int_equal(taken, 100 * MIB);
    assert_true(looks < 30);
}

TEST(what_was_not_used_can_be_taken_again)
{
    rft_ration ration = {0};
    free_bytes = MIB;
    looks = 0;
    assert_ok(rft_ration_take(&ration, MIB, NULL));
    rft_ration_return(&ration, MIB);
    assert_ok(rft_ration_take(&ration, MIB, NULL));
    assert_int_equal(looks, 1);
    free_bytes = 0;
    assert_int_equal(rft_ration_take(&ration, 1, NULL), REFIT_ERR_HOST_MEMORY);
    assert_ok(rft_ration_take(&ration, 0, NULL));
}

TEST(never_more_is_granted_than_the_budget_in_all)
{
    rft_ration ration = {.budget = 3 * KIB};
    free_bytes = UINT64_MAX;
    assert_ok(rft_ration_take(&ration, 2 * KIB, NULL));
    assert_refused(rft_ration_take(&ration, 2 * KIB, error), REFIT_ERR_BUDGET,
                   "offload.budget_bytes is 3072");
    assert_ok(rft_ration_take(&ration, KIB, NULL));
    assert_int_equal(rft_ration_take(&ration, 1, NULL), REFIT_ERR_BUDGET);
    rft_ration_return(&ration, 2 * KIB);
    assert_ok(rft_ration_take(&ration, 2 * KIB, NULL));
}

int main(void)
{
    return test_run("ration");
}
