/* Phases that fail: the cycle goes on from where it stands, and no byte is lost. */
#include "tests/controller/cycle_bench.h"

static refit_status clear(cycle_bench *on)
{
    return refit_controller_clear(on->controller, REFIT_STREAM_NONE, &on->error);
}

static refit_status bring_back(cycle_bench *on)
{
    return refit_controller_return(on->controller, REFIT_STREAM_NONE, &on->error);
}

static refit_status join(cycle_bench *on)
{
    return refit_controller_join(on->controller, REFIT_STREAM_NONE, &on->error);
}

static void finish_cycle(cycle_bench *on)
{
    assert_ok(bring_back(on));
    assert_ok(join(on));
    assert_int_equal(bench_state(on), REFIT_TRAINING);
    bench_check(on);
}

static void a_failed_offload_leaves_training(void **state)
{
    cycle_bench on;
    bench_open(&on, true, true);
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
    assert_int_equal(clear(&on), REFIT_ERR_COPY);
    assert_int_equal(bench_state(&on), REFIT_TRAINING);
    bench_check(&on);
    assert_ok(join(&on));
    assert_int_equal(bench_stats(&on).cycle_failures, 1);
    assert_ok(clear(&on));
    finish_cycle(&on);
    assert_int_equal(bench_stats(&on).cycles, 1);
    bench_close(&on);
}

static void a_failed_offload_can_be_given_up(void **state)
{
    cycle_bench on;
    bench_open(&on, true, false);
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
    assert_int_equal(clear(&on), REFIT_ERR_COPY);
    assert_ok(bring_back(&on));
    assert_int_equal(bench_state(&on), REFIT_RETURNING);
    assert_ok(join(&on));
    assert_int_equal(refit_offloader_get_state(on.offloader), REFIT_RESIDENT);
    bench_check(&on);
    bench_close(&on);
}

static void memory_that_is_not_given_back_leaves_cleared(void **state)
{
    cycle_bench on;
    bench_open(&on, true, true);
    on.fail_release = 1;
    assert_int_equal(clear(&on), REFIT_ERR_CALLBACK);
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    assert_non_null(on.memory);
    assert_ok(clear(&on));
    assert_null(on.memory);
    finish_cycle(&on);
    assert_int_equal(bench_stats(&on).cycle_failures, 1);
    bench_close(&on);
}

static void a_clear_that_times_out_is_gone_on_with(void **state)
{
    cycle_bench on;
    refit_config impatient;
    bench_open(&on, true, false);
    refit_controller_close(on.controller);
    impatient = on.config;
    assert_ok(refit_config_set(&impatient, "offload.timeout_ms", "1s", &on.error));
    assert_ok(refit_controller_open(on.offloader, NULL, &impatient, &on.controller, &on.error));
    faulty_device_stop(on.device);
    assert_int_equal(clear(&on), REFIT_ERR_TIMEOUT);
    assert_int_equal(bench_state(&on), REFIT_TRAINING);
    assert_int_equal(join(&on), REFIT_ERR_STATE);
    faulty_device_go(on.device);
    assert_ok(clear(&on));
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    finish_cycle(&on);
    bench_close(&on);
}

static void memory_that_is_not_to_be_had_can_be_asked_for_again(void **state)
{
    cycle_bench on;
    bench_open(&on, true, true);
    assert_ok(clear(&on));
    on.fail_acquire = 1;
    assert_int_equal(bring_back(&on), REFIT_ERR_CALLBACK);
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    finish_cycle(&on);
    bench_close(&on);
}

static void a_failed_restore_is_reported_by_join_and_retried(void **state)
{
    cycle_bench on;
    bench_open(&on, true, true);
    assert_ok(clear(&on));
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
    assert_ok(bring_back(&on));
    assert_int_equal(join(&on), REFIT_ERR_COPY);
    assert_int_equal(bench_state(&on), REFIT_RETURNING);
    assert_int_equal(join(&on), REFIT_ERR_COPY);
    finish_cycle(&on);
    bench_close(&on);
}

static void a_joined_stream_waits_on_the_device(void **state)
{
    cycle_bench on;
    refit_stream_ref stream;
    bench_open(&on, true, true);
    refit_device *plain = faulty_device_inner(on.device);
    unsigned char *copy = test_host_alloc(plain, BENCH_BYTES);
    assert_ok(refit_stream_open(on.device, &stream, &on.error));
    assert_ok(clear(&on));
    faulty_device_stop(on.device);
    assert_ok(bring_back(&on));
    assert_ok(refit_controller_join(on.controller, stream, &on.error));
    assert_int_equal(bench_state(&on), REFIT_TRAINING);
    assert_int_equal(refit_stream_wait(on.device, stream, 0, NULL), REFIT_ERR_TIMEOUT);
    assert_ok(refit_stream_copy(on.device, stream, copy, on.memory, BENCH_BYTES, &on.error));
    faulty_device_go(on.device);
    assert_ok(refit_stream_wait(on.device, stream, 20000, &on.error));
    assert_memory_equal(copy, on.expected, BENCH_BYTES);
    test_host_free(plain, copy, BENCH_BYTES);
    assert_ok(clear(&on));
    finish_cycle(&on);
    assert_ok(refit_stream_close(on.device, stream, &on.error));
    bench_close(&on);
}

static void a_restore_that_fails_behind_a_joined_stream_is_reported_by_clear(void **state)
{
    cycle_bench on;
    refit_stream_ref stream;
    bench_open(&on, true, true);
    assert_ok(refit_stream_open(on.device, &stream, &on.error));
    assert_ok(clear(&on));
    faulty_device_stop(on.device);
    faulty_device_fail_later(on.device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
    assert_ok(bring_back(&on));
    assert_ok(refit_controller_join(on.controller, stream, &on.error));
    faulty_device_go(on.device);
    assert_int_equal(clear(&on), REFIT_ERR_COPY);
    assert_int_equal(bench_state(&on), REFIT_TRAINING);
    finish_cycle(&on);
    assert_ok(refit_stream_close(on.device, stream, &on.error));
    bench_close(&on);
}

static void a_version_that_cannot_be_written_is_dropped(void **state)
{
    cycle_bench on;
    bench_open(&on, true, true);
    assert_ok(clear(&on));
    refit_weight wrong[2] = {{0, on.weights[0], sizeof on.weights[0]}, {7, on.weights[1], 1024}};
    assert_invalid(
        refit_controller_publish(on.controller, 0, wrong, 2, NULL, REFIT_STREAM_NONE, &on.error));
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    assert_int_equal(
        refit_controller_publish(on.controller, 0, wrong, 1, NULL, REFIT_STREAM_NONE, &on.error),
        REFIT_ERR_STATE);
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    assert_int_equal(refit_publisher_version(on.publisher), 0);
    assert_ok(bench_publish(&on, 0));
    assert_int_equal(bench_state(&on), REFIT_REFITTED);
    assert_int_equal(bench_stats(&on).cycle_failures, 1);
    finish_cycle(&on);
    bench_close(&on);
}

static void a_failed_publish_can_be_skipped(void **state)
{
    cycle_bench on;
    bench_open(&on, true, true);
    assert_ok(bench_publish(&on, 5));
    assert_ok(clear(&on));
    assert_int_equal(bench_publish(&on, 4), REFIT_ERR_STALE);
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    finish_cycle(&on);
    assert_int_equal(bench_stats(&on).cycles, 1);
    assert_int_equal(bench_stats(&on).cycle_failures, 1);
    bench_close(&on);
}

static void the_current_version_is_not_published_twice(void **state)
{
    cycle_bench on;
    bench_open(&on, false, true);
    assert_ok(clear(&on));
    assert_ok(bench_publish(&on, 3));
    assert_ok(bench_publish(&on, 3));
    assert_int_equal(bench_stats(&on).publish_count, 1);
    assert_int_equal(bench_state(&on), REFIT_REFITTED);
    bench_close(&on);
}

static void a_controller_closes_in_every_state(void **state)
{
    for (int steps = 0; steps <= 4; steps++) {
        cycle_bench on;
        bench_open(&on, true, true);
        if (steps > 0) assert_ok(clear(&on));
        if (steps > 1) assert_ok(bench_publish(&on, 0));
        if (steps > 2) assert_ok(bring_back(&on));
        if (steps > 3) assert_ok(join(&on));
        bench_close(&on);
    }
}

/* The controller has no future of its own then. */
static void states_that_the_offloader_brought_back_can_be_joined(void **state)
{
    cycle_bench on;
    refit_stream_ref stream;
    bench_open(&on, true, false);
    assert_ok(refit_stream_open(on.device, &stream, &on.error));
    assert_ok(clear(&on));
    assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
    assert_ok(bring_back(&on));
    assert_ok(refit_controller_join(on.controller, stream, &on.error));
    assert_int_equal(bench_state(&on), REFIT_TRAINING);
    assert_int_equal(refit_offloader_get_state(on.offloader), REFIT_RESIDENT);
    bench_check(&on);
    assert_ok(refit_stream_close(on.device, stream, &on.error));
    bench_close(&on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_failed_offload_leaves_training),
        cmocka_unit_test(a_failed_offload_can_be_given_up),
        cmocka_unit_test(memory_that_is_not_given_back_leaves_cleared),
        cmocka_unit_test(a_clear_that_times_out_is_gone_on_with),
        cmocka_unit_test(memory_that_is_not_to_be_had_can_be_asked_for_again),
        cmocka_unit_test(a_failed_restore_is_reported_by_join_and_retried),
        cmocka_unit_test(a_joined_stream_waits_on_the_device),
        cmocka_unit_test(a_restore_that_fails_behind_a_joined_stream_is_reported_by_clear),
        cmocka_unit_test(states_that_the_offloader_brought_back_can_be_joined),
        cmocka_unit_test(a_version_that_cannot_be_written_is_dropped),
        cmocka_unit_test(a_failed_publish_can_be_skipped),
        cmocka_unit_test(the_current_version_is_not_published_twice),
        cmocka_unit_test(a_controller_closes_in_every_state),
    };
    return cmocka_run_group_tests_name("controller_faults", tests, NULL, NULL);
}
