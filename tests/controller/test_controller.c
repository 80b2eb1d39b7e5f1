/* The refit cycle: the verbs in order, each half alone, every verb from every state, the figures.
 */
#include "tests/controller/cycle_bench.h"

static refit_status clear(cycle_bench *on)
{
    return refit_controller_clear(on->controller, REFIT_STREAM_NONE, &on->error);
}

static refit_status publish(cycle_bench *on)
{
    return bench_publish(on, 0);
}

static refit_status bring_back(cycle_bench *on)
{
    return refit_controller_return(on->controller, REFIT_STREAM_NONE, &on->error);
}

static refit_status join(cycle_bench *on)
{
    return refit_controller_join(on->controller, REFIT_STREAM_NONE, &on->error);
}

static void go_round(bool with_offloader, bool with_publisher)
{
    cycle_bench on;
    bench_open(&on, with_offloader, with_publisher);
    for (uint64_t round = 1; round <= 3; round++) {
        assert_int_equal(bench_state(&on), REFIT_TRAINING);
        assert_ok(clear(&on));
        assert_int_equal(bench_state(&on), REFIT_CLEARED);
        if (with_offloader) assert_null(on.memory);
        assert_ok(publish(&on));
        assert_int_equal(bench_state(&on), REFIT_REFITTED);
        if (with_publisher) assert_int_equal(refit_publisher_version(on.publisher), round);
        assert_ok(bring_back(&on));
        assert_int_equal(bench_state(&on), REFIT_RETURNING);
        assert_ok(join(&on));
        if (with_offloader) bench_check(&on);
    }
    assert_int_equal(bench_stats(&on).cycles, 3);
    assert_int_equal(bench_stats(&on).cycle_failures, 0);
    bench_close(&on);
}

static void a_cycle_passes_through_its_states(void **state)
{
    go_round(true, true);
    go_round(true, false);
    go_round(false, true);
}

typedef refit_status (*verb)(cycle_bench *on);

/* Brings a fresh bench into a state. */
static void enter(cycle_bench *on, refit_controller_state wanted)
{
    bench_open(on, true, true);
    if (wanted == REFIT_TRAINING) return;
    assert_ok(clear(on));
    if (wanted == REFIT_REFITTED) assert_ok(publish(on));
    if (wanted == REFIT_RETURNING) assert_ok(bring_back(on));
    assert_int_equal(bench_state(on), wanted);
}

static void every_verb_from_every_state(void **state)
{
    static const struct {
        const char *name;
        refit_controller_state from;
        verb call;
        refit_status status;
        refit_controller_state to;
    } rows[] = {
        {"clear in TRAINING", REFIT_TRAINING, clear, REFIT_OK, REFIT_CLEARED},
        {"publish in TRAINING", REFIT_TRAINING, publish, REFIT_OK, REFIT_TRAINING},
        {"return in TRAINING", REFIT_TRAINING, bring_back, REFIT_OK, REFIT_TRAINING},
        {"join in TRAINING", REFIT_TRAINING, join, REFIT_OK, REFIT_TRAINING},
        {"clear in CLEARED", REFIT_CLEARED, clear, REFIT_OK, REFIT_CLEARED},
        {"publish in CLEARED", REFIT_CLEARED, publish, REFIT_OK, REFIT_REFITTED},
        {"return in CLEARED", REFIT_CLEARED, bring_back, REFIT_OK, REFIT_RETURNING},
        {"join in CLEARED", REFIT_CLEARED, join, REFIT_ERR_STATE, REFIT_CLEARED},
        {"clear in REFITTED", REFIT_REFITTED, clear, REFIT_OK, REFIT_REFITTED},
        {"publish in REFITTED", REFIT_REFITTED, publish, REFIT_OK, REFIT_REFITTED},
        {"return in REFITTED", REFIT_REFITTED, bring_back, REFIT_OK, REFIT_RETURNING},
        {"join in REFITTED", REFIT_REFITTED, join, REFIT_ERR_STATE, REFIT_REFITTED},
        {"clear in RETURNING", REFIT_RETURNING, clear, REFIT_ERR_STATE, REFIT_RETURNING},
        {"publish in RETURNING", REFIT_RETURNING, publish, REFIT_ERR_STATE, REFIT_RETURNING},
        {"return in RETURNING", REFIT_RETURNING, bring_back, REFIT_OK, REFIT_RETURNING},
        {"join in RETURNING", REFIT_RETURNING, join, REFIT_OK, REFIT_TRAINING},
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        cycle_bench on;
        enter(&on, rows[i].from);
        refit_status status = rows[i].call(&on);
        if (status != rows[i].status || bench_state(&on) != rows[i].to) {
            fail_msg("%s: %s, then %s", rows[i].name, refit_status_name(status),
                     refit_controller_state_name(bench_state(&on)));
        }
        assert_ok(refit_prepare_for_training(on.controller, REFIT_STREAM_NONE, &on.error));
        bench_check(&on);
        bench_close(&on);
    }
}

static void a_refusal_names_the_verb_that_would_do(void **state)
{
    cycle_bench on;
    enter(&on, REFIT_CLEARED);
    assert_int_equal(join(&on), REFIT_ERR_STATE);
    assert_non_null(strstr(on.error.text, "refit_controller_return"));
    assert_ok(bring_back(&on));
    assert_int_equal(clear(&on), REFIT_ERR_STATE);
    assert_non_null(strstr(on.error.text, "refit_controller_join"));
    assert_ok(join(&on));
    bench_close(&on);
}

static void other_names_do_the_same(void **state)
{
    cycle_bench on;
    bench_open(&on, true, true);
    assert_ok(refit_offload_before_refit(on.controller, REFIT_STREAM_NONE, &on.error));
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    assert_ok(publish(&on));
    assert_ok(refit_offload_after_refit(on.controller, REFIT_STREAM_NONE, &on.error));
    assert_int_equal(bench_state(&on), REFIT_REFITTED);
    assert_ok(refit_prepare_for_training(on.controller, REFIT_STREAM_NONE, &on.error));
    assert_int_equal(bench_state(&on), REFIT_TRAINING);
    assert_ok(refit_prepare_for_training(on.controller, REFIT_STREAM_NONE, &on.error));
    bench_check(&on);
    assert_ok(refit_offload_after_refit(on.controller, REFIT_STREAM_NONE, &on.error));
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    assert_ok(refit_prepare_for_training(on.controller, REFIT_STREAM_NONE, &on.error));
    bench_check(&on);
    bench_close(&on);
}

static void arguments_are_checked(void **state)
{
    refit_error error;
    refit_controller *controller = NULL;
    assert_invalid(refit_controller_open(NULL, NULL, NULL, &controller, &error));
    assert_null(controller);
    assert_invalid(refit_controller_clear(NULL, REFIT_STREAM_NONE, &error));
    assert_invalid(refit_controller_return(NULL, REFIT_STREAM_NONE, &error));
    assert_invalid(refit_controller_join(NULL, REFIT_STREAM_NONE, &error));
    assert_invalid(refit_offload_after_refit(NULL, REFIT_STREAM_NONE, &error));
    refit_controller_close(NULL);
    cycle_bench on;
    bench_open(&on, false, true);
    assert_invalid(
        refit_controller_publish(on.controller, 0, NULL, 2, NULL, REFIT_STREAM_NONE, &on.error));
    assert_invalid(refit_controller_stats(on.controller, NULL, &on.error));
    bench_close(&on);
}

static void a_controller_opens_where_the_states_are(void **state)
{
    cycle_bench on;
    enter(&on, REFIT_REFITTED);
    refit_controller_close(on.controller);
    assert_ok(refit_controller_open(on.offloader, on.publisher, NULL, &on.controller, &on.error));
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    faulty_device_stop(on.device);
    assert_ok(bring_back(&on));
    refit_controller_close(on.controller);
    assert_ok(refit_controller_open(on.offloader, on.publisher, NULL, &on.controller, &on.error));
    assert_int_equal(bench_state(&on), REFIT_RETURNING);
    faulty_device_go(on.device);
    assert_ok(join(&on));
    bench_check(&on);
    bench_close(&on);
}

static void figures_of_a_cycle(void **state)
{
    cycle_bench on;
    bench_open(&on, true, true);
    assert_ok(clear(&on));
    assert_ok(publish(&on));
    assert_ok(bring_back(&on));
    assert_ok(join(&on));
    refit_stats stats = bench_stats(&on);
    double phases = stats.clear_seconds_last + stats.refit_seconds_last + stats.join_seconds_last;
    assert_true(stats.clear_seconds_last > 0);
    assert_true(stats.refit_seconds_last > 0);
    assert_true(stats.return_seconds_last > 0);
    assert_true(stats.join_seconds_last > 0);
    assert_true(stats.cycle_exposed_seconds_last >= phases);
    assert_true(stats.cycle_seconds_last >= stats.cycle_exposed_seconds_last);
    assert_int_equal(stats.offload_bytes_last, BENCH_BYTES);
    assert_int_equal(stats.offload_reclaimed_bytes_last, BENCH_BYTES);
    assert_int_equal(stats.publish_version, 1);
    bench_close(&on);
}

static void a_verb_called_again_adds_to_its_figure(void **state)
{
    cycle_bench on;
    bench_open(&on, true, true);
    assert_ok(clear(&on));
    double once = bench_stats(&on).clear_seconds_last;
    assert_ok(clear(&on));
    assert_true(bench_stats(&on).clear_seconds_last > once);
    assert_ok(bring_back(&on));
    assert_ok(join(&on));
    assert_ok(refit_prepare_for_training(on.controller, REFIT_STREAM_NONE, &on.error));
    bench_close(&on);
}

/* The version is aborted or has not begun, the states stay away, and the next publish goes. */
static void a_cancelled_publish_leaves_the_cycle_where_it_was(void **state)
{
    cycle_bench on;
    enter(&on, REFIT_CLEARED);
    uint64_t before = refit_publisher_version(on.publisher);
    refit_publisher_cancel(on.publisher);
    assert_int_equal(publish(&on), REFIT_ERR_CANCELLED);
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    assert_int_equal(refit_publisher_version(on.publisher), before);
    assert_ok(publish(&on));
    assert_int_equal(bench_state(&on), REFIT_REFITTED);
    bench_close(&on);
}

static void state_names_are_constants(void **state)
{
    assert_string_equal(refit_controller_state_name(REFIT_TRAINING), "TRAINING");
    assert_string_equal(refit_controller_state_name(REFIT_CLEARED), "CLEARED");
    assert_string_equal(refit_controller_state_name(REFIT_REFITTED), "REFITTED");
    assert_string_equal(refit_controller_state_name(REFIT_RETURNING), "RETURNING");
    assert_string_equal(refit_controller_state_name((refit_controller_state)9), "UNKNOWN");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_cycle_passes_through_its_states),
        cmocka_unit_test(every_verb_from_every_state),
        cmocka_unit_test(a_refusal_names_the_verb_that_would_do),
        cmocka_unit_test(other_names_do_the_same),
        cmocka_unit_test(arguments_are_checked),
        cmocka_unit_test(a_controller_opens_where_the_states_are),
        cmocka_unit_test(figures_of_a_cycle),
        cmocka_unit_test(a_verb_called_again_adds_to_its_figure),
        cmocka_unit_test(a_cancelled_publish_leaves_the_cycle_where_it_was),
        cmocka_unit_test(state_names_are_constants),
    };
    return cmocka_run_group_tests_name("controller", tests, NULL, NULL);
}
