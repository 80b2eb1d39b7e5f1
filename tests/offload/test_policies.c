/* Policies: what is kept returns, what is discarded is not copied, what is zeroed returns zeroed.
 */
#include "tests/offload/rig.h"

#include <string.h>

#define DISCARDED 5
#define ZEROED    9

static void only_kept_bytes_are_copied(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_HOOKS, NULL);
    rig_offload(&on);
    refit_stats stats = rig_stats(&on);
    assert_int_equal(stats.offload_bytes_last, rig_kept_bytes(&on));
    assert_int_equal(stats.host_payload_bytes, rig_kept_bytes(&on));
    assert_int_equal(stats.offload_reclaimed_bytes_last, rig_all_bytes(&on));
    rig_restore(&on);
    rig_close(&on);
}

/* The hooks hand out memory full of 0xEE: only refit can have zeroed it. */
static void zeroed_regions_return_zeroed(const char *const *settings)
{
    rig on;
    rig_open(&on, RIG_HOOKS, settings);
    rig_offload(&on);
    rig_restore(&on);
    rig_check_bytes(&on, true);
    assert_device_equal(on.plain, on.regions[DISCARDED].memory, "\xEE", 1);
    rig_close(&on);
}

static void zeroing_is_done_on_both_paths(void **state)
{
    (void)state;
    const char *const pageable[] = {"use_pinned_optimizer_offload=false", NULL};
    zeroed_regions_return_zeroed(NULL);
    zeroed_regions_return_zeroed(pageable);
}

static void zeroed_regions_that_stayed_bound_are_zeroed(void **state)
{
    (void)state;
    rig on;
    rig_open(&on, RIG_BOUND, NULL);
    rig_offload(&on);
    rig_restore(&on);
    rig_check_bytes(&on, true);
    rig_close(&on);
}

static void an_open_accumulation_keeps_grads_from_being_lost(void **state)
{
    (void)state;
    rig on;
    refit_future *future = NULL;
    rig_open(&on, RIG_HOOKS, NULL);
    assert_ok(refit_offloader_set_accumulating(on.offloader, 1, &on.error));
    assert_int_equal(refit_offloader_offload(on.offloader, REFIT_STREAM_NONE, &future, &on.error),
                     REFIT_ERR_STATE);
    assert_non_null(strstr(on.error.text, "state.5"));
    assert_null(future);
    assert_int_equal(rig_state(&on), REFIT_RESIDENT);
    rig_check_bytes(&on, false);
    assert_ok(refit_offloader_set_accumulating(on.offloader, 0, &on.error));
    rig_offload(&on);
    assert_ok(refit_offloader_set_accumulating(on.offloader, 1, &on.error));
    rig_restore(&on);
    rig_close(&on);
}

static void kept_regions_may_leave_while_accumulating(void **state)
{
    (void)state;
    rig on;
    const unsigned char right[1000] = {[999] = 0x21};
    refit_region_id id;
    rig_open_unsealed(&on, RIG_BOUND, NULL);
    assert_ok(refit_offloader_clear(on.offloader, &on.error));
    void *grads = rig_extra(&on, sizeof right);
    refit_region_desc desc = {
        .size = sizeof desc, .name = "grads", .memory = grads, .bytes = sizeof right};
    assert_ok(refit_offloader_add(on.offloader, &desc, &id, &on.error));
    assert_ok(refit_offloader_seal(on.offloader, &on.error));
    assert_ok(refit_offloader_set_accumulating(on.offloader, 1, &on.error));
    test_write(on.plain, grads, right, sizeof right);
    rig_offload(&on);
    test_fill(on.plain, grads, 0xEE, sizeof right);
    rig_restore(&on);
    assert_device_equal(on.plain, grads, right, sizeof right);
    rig_close(&on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_kept_bytes_are_copied),
        cmocka_unit_test(zeroing_is_done_on_both_paths),
        cmocka_unit_test(zeroed_regions_that_stayed_bound_are_zeroed),
        cmocka_unit_test(an_open_accumulation_keeps_grads_from_being_lost),
        cmocka_unit_test(kept_regions_may_leave_while_accumulating),
    };
    return cmocka_run_group_tests_name("policies", tests, NULL, NULL);
}
