/* The refit cycle: verbs in order, each half alone, every verb from every state, the figures. */
#include "tests/controller/cycle_bench.h"

static cycle_bench on;

static int open_both(void **state)
{
    bench_open(&on, true, true);
    return 0;
}

static int open_verified(void **state)
{
    bench_open_verified(&on, true, true);
    return 0;
}

static int open_states(void **state)
{
    bench_open(&on, true, false);
    return 0;
}

static int open_weights(void **state)
{
    bench_open(&on, false, true);
    return 0;
}

static int close_all(void **state)
{
    bench_close(&on);
    return 0;
}

#define WEIGHTS(name) TEST_WITH(name, open_weights, close_all)

#define STATES(name) TEST_WITH(name, open_states, close_all)

#define BOTH(name) TEST_WITH(name, open_both, close_all)

#define VERIFIED(name) TEST_WITH(name, open_verified, close_all)

static refit_status clear(void)
{
    return bench_clear(&on);
}

static refit_status publish(void)
{
    return bench_publish(&on, 0);
}

static refit_status bring_back(void)
{
    return bench_return(&on);
}

static refit_status join(void)
{
    return bench_join(&on);
}

static void go_round(bool with_offloader, bool with_publisher)
{
    bench_open(&on, with_offloader, with_publisher);
    for (uint64_t round = 1; round <= 3; round++) {
        assert_int_equal(bench_state(&on), REFIT_TRAINING);
        assert_ok(clear());
        assert_int_equal(bench_state(&on), REFIT_CLEARED);
        if (with_offloader) assert_null(on.memory);
        assert_ok(publish());
        assert_int_equal(bench_state(&on), REFIT_REFITTED);
        if (with_publisher) assert_int_equal(refit_publisher_version(on.publisher), round);
        assert_ok(bring_back());
        assert_int_equal(bench_state(&on), REFIT_RETURNING);
        assert_ok(join());
        if (with_offloader) bench_check(&on);
    }
    assert_int_equal(bench_stats(&on).cycles, 3);
    assert_int_equal(bench_stats(&on).cycle_failures, 0);
    bench_close(&on);
}

TEST(a_cycle_passes_through_its_states)
{
    go_round(true, true);
    go_round(true, false);
    go_round(false, true);
}

typedef refit_status (*verb)(void);

/* From TRAINING. */
static void enter(refit_controller_state wanted)
{
    if (wanted == REFIT_TRAINING) return;
    assert_ok(clear());
    if (wanted == REFIT_REFITTED) assert_ok(publish());
    if (wanted == REFIT_RETURNING) assert_ok(bring_back());
    assert_int_equal(bench_state(&on), wanted);
}

TEST(every_verb_from_every_state)
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
        bench_open(&on, true, true);
        enter(rows[i].from);
        refit_status status = rows[i].call();
        if (status != rows[i].status || bench_state(&on) != rows[i].to) {
            fail_msg("%s: %s, then %s", rows[i].name, refit_status_name(status),
                     refit_controller_state_name(bench_state(&on)));
        }
        assert_ok(bring_back());
        assert_ok(join());
        bench_check(&on);
        bench_close(&on);
    }
}

BOTH(a_refusal_names_the_verb_that_would_do)
{
    enter(REFIT_CLEARED);
    assert_int_equal(join(), REFIT_ERR_STATE);
    assert_non_null(strstr(on.error.text, "refit_controller_restore"));
    assert_ok(bring_back());
    assert_int_equal(clear(), REFIT_ERR_STATE);
    assert_non_null(strstr(on.error.text, "refit_controller_wait"));
    assert_ok(join());
}

WEIGHTS(arguments_are_checked)
{
    refit_error error;
    refit_controller *controller = NULL;
    assert_invalid(refit_controller_open(NULL, NULL, NULL, &controller, &error));
    assert_null(controller);
    assert_invalid(refit_controller_offload(NULL, REFIT_STREAM_NONE, &error));
    assert_invalid(refit_controller_restore(NULL, REFIT_STREAM_NONE, &error));
    assert_invalid(refit_controller_wait(NULL, REFIT_STREAM_NONE, &error));
    refit_controller_close(NULL);
    assert_invalid(
        refit_controller_publish(on.controller, 0, NULL, 2, NULL, REFIT_STREAM_NONE, &on.error));
    assert_invalid(refit_controller_stats(on.controller, NULL, &on.error));
}

BOTH(a_controller_opens_where_the_states_are)
{
    enter(REFIT_REFITTED);
    refit_controller_close(on.controller);
    assert_ok(refit_controller_open(on.offloader, on.publisher, NULL, &on.controller, &on.error));
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    faulty_device_stop(on.device);
    assert_ok(bring_back());
    refit_controller_close(on.controller);
    assert_ok(refit_controller_open(on.offloader, on.publisher, NULL, &on.controller, &on.error));
    assert_int_equal(bench_state(&on), REFIT_RETURNING);
    faulty_device_go(on.device);
    assert_ok(join());
    bench_check(&on);
}

BOTH(figures_of_a_cycle)
{
    assert_ok(clear());
    assert_ok(publish());
    assert_ok(bring_back());
    assert_ok(join());
    refit_stats stats = bench_stats(&on);
    double phases = stats.cycle_offload_seconds_last + stats.cycle_publish_seconds_last +
                    stats.cycle_wait_seconds_last;
    assert_true(stats.cycle_offload_seconds_last > 0);
    assert_true(stats.cycle_publish_seconds_last > 0);
    assert_true(stats.cycle_restore_seconds_last > 0);
    assert_true(stats.cycle_wait_seconds_last > 0);
    assert_true(stats.cycle_blocked_seconds_last >= phases);
    assert_true(stats.cycle_seconds_last >= stats.cycle_blocked_seconds_last);
    assert_int_equal(stats.offload_bytes_last, BENCH_BYTES);
    assert_int_equal(stats.offload_reclaimed_bytes_last, BENCH_BYTES);
    assert_int_equal(stats.publish_version, 1);
}

BOTH(a_verb_called_again_adds_to_its_figure)
{
    assert_ok(clear());
    double once = bench_stats(&on).cycle_offload_seconds_last;
    assert_ok(clear());
    assert_true(bench_stats(&on).cycle_offload_seconds_last > once);
    assert_ok(bring_back());
    assert_ok(join());
    assert_ok(bring_back());
    assert_ok(join());
}

/* The version is aborted or has not begun, the states stay away, and the next publish goes. */
BOTH(a_cancelled_publish_leaves_the_cycle_where_it_was)
{
    enter(REFIT_CLEARED);
    uint64_t before = refit_publisher_version(on.publisher);
    refit_publisher_cancel(on.publisher);
    assert_int_equal(publish(), REFIT_ERR_CANCELLED);
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    assert_int_equal(refit_publisher_version(on.publisher), before);
    assert_ok(publish());
    assert_int_equal(bench_state(&on), REFIT_REFITTED);
}

TEST(state_names_are_constants)
{
    assert_string_equal(refit_controller_state_name(REFIT_TRAINING), "TRAINING");
    assert_string_equal(refit_controller_state_name(REFIT_CLEARED), "CLEARED");
    assert_string_equal(refit_controller_state_name(REFIT_REFITTED), "REFITTED");
    assert_string_equal(refit_controller_state_name(REFIT_RETURNING), "RETURNING");
    assert_string_equal(refit_controller_state_name((refit_controller_state)9), "UNKNOWN");
}

/* ---- Phases that fail: the cycle goes on from where it stands, and no byte is lost. */

static void finish_cycle(void)
{
    assert_ok(bring_back());
    assert_ok(bench_retry(&on, bench_join));
    assert_int_equal(bench_state(&on), REFIT_TRAINING);
    bench_check(&on);
}

VERIFIED(a_refused_offload_leaves_training)
{
    bench_tear(&on);
    assert_int_equal(clear(), REFIT_ERR_CORRUPT);
    assert_int_equal(bench_state(&on), REFIT_TRAINING);
    bench_check(&on);
    assert_ok(join());
    assert_int_equal(bench_stats(&on).cycle_failures, 1);
    assert_ok(clear());
    finish_cycle();
    assert_int_equal(bench_stats(&on).cycles, 1);
}

VERIFIED(a_refused_offload_can_be_given_up)
{
    bench_tear(&on);
    assert_int_equal(clear(), REFIT_ERR_CORRUPT);
    assert_ok(bring_back());
    assert_int_equal(bench_state(&on), REFIT_RETURNING);
    assert_ok(join());
    assert_int_equal(refit_offloader_get_state(on.offloader), REFIT_RESIDENT);
    bench_check(&on);
}

BOTH(memory_that_is_not_given_back_leaves_cleared)
{
    on.fail_release = 1;
    assert_int_equal(clear(), REFIT_ERR_CALLBACK);
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    assert_non_null(on.memory);
    assert_ok(clear());
    assert_null(on.memory);
    finish_cycle();
    assert_int_equal(bench_stats(&on).cycle_failures, 1);
}

STATES(a_clear_that_times_out_is_gone_on_with)
{
    refit_config impatient;
    refit_controller_close(on.controller);
    impatient = on.config;
    assert_ok(refit_config_set(&impatient, "offload.timeout_ms", "1s", &on.error));
    assert_ok(refit_controller_open(on.offloader, NULL, &impatient, &on.controller, &on.error));
    faulty_device_stop(on.device);
    assert_int_equal(clear(), REFIT_ERR_TIMEOUT);
    assert_int_equal(bench_state(&on), REFIT_TRAINING);
    assert_int_equal(join(), REFIT_ERR_STATE);
    faulty_device_go(on.device);
    assert_ok(bench_retry(&on, bench_clear));
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    finish_cycle();
}

BOTH(memory_that_is_not_to_be_had_can_be_asked_for_again)
{
    assert_ok(clear());
    on.fail_acquire = 1;
    assert_int_equal(bring_back(), REFIT_ERR_CALLBACK);
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    finish_cycle();
}

VERIFIED(a_refused_restore_is_reported_by_join_and_retried)
{
    assert_ok(clear());
    bench_tear(&on);
    assert_ok(bring_back());
    assert_int_equal(join(), REFIT_ERR_CORRUPT);
    assert_int_equal(bench_state(&on), REFIT_RETURNING);
    assert_int_equal(join(), REFIT_ERR_CORRUPT);
    finish_cycle();
}

BOTH(a_joined_stream_waits_on_the_device)
{
    refit_stream_ref stream;
    refit_device *plain = faulty_device_inner(on.device);
    unsigned char *copy = test_host_alloc(plain, BENCH_BYTES);
    assert_ok(refit_stream_open(on.device, &stream, &on.error));
    assert_ok(clear());
    faulty_device_stop(on.device);
    assert_ok(bring_back());
    assert_ok(refit_controller_wait(on.controller, stream, &on.error));
    assert_int_equal(bench_state(&on), REFIT_TRAINING);
    assert_int_equal(refit_stream_wait(on.device, stream, 0, NULL), REFIT_ERR_TIMEOUT);
    assert_ok(refit_stream_copy(on.device, stream, copy, on.memory, BENCH_BYTES, &on.error));
    faulty_device_go(on.device);
    assert_ok(refit_stream_wait(on.device, stream, TIMEOUT_MS, &on.error));
    assert_memory_equal(copy, on.expected, BENCH_BYTES);
    test_host_free(plain, copy, BENCH_BYTES);
    assert_ok(clear());
    finish_cycle();
    assert_ok(refit_stream_close(on.device, stream, &on.error));
}

BOTH(clear_reports_a_device_that_is_lost_after_a_joined_stream)
{
    refit_stream_ref stream;
    assert_ok(refit_stream_open(on.device, &stream, &on.error));
    assert_ok(clear());
    faulty_device_stop(on.device);
    faulty_device_lose(on.device, FAULTY_COPY_BATCH, 1);
    assert_ok(bring_back());
    assert_ok(refit_controller_wait(on.controller, stream, &on.error));
    faulty_device_go(on.device);
    assert_int_equal(clear(), REFIT_ERR_DEVICE);
    assert_non_null(strstr(on.error.text, "lost"));
    assert_int_equal(bench_state(&on), REFIT_TRAINING);
    assert_int_equal(bring_back(), REFIT_ERR_DEVICE);
    assert_int_equal(join(), REFIT_ERR_STATE);
    bench_check_image(&on);
    assert_ok(refit_stream_close(on.device, stream, &on.error));
}

BOTH(a_version_that_cannot_be_written_is_dropped)
{
    assert_ok(clear());
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
    finish_cycle();
}

BOTH(a_failed_publish_can_be_skipped)
{
    assert_ok(bench_publish(&on, 5));
    assert_ok(clear());
    assert_int_equal(bench_publish(&on, 4), REFIT_ERR_STALE);
    assert_int_equal(bench_state(&on), REFIT_CLEARED);
    finish_cycle();
    assert_int_equal(bench_stats(&on).cycles, 1);
    assert_int_equal(bench_stats(&on).cycle_failures, 1);
}

WEIGHTS(the_current_version_is_not_published_twice)
{
    assert_ok(clear());
    assert_ok(bench_publish(&on, 3));
    assert_ok(bench_publish(&on, 3));
    assert_int_equal(bench_stats(&on).publish_count, 1);
    assert_int_equal(bench_state(&on), REFIT_REFITTED);
}

TEST(a_controller_closes_in_every_state)
{
    for (int steps = 0; steps <= 4; steps++) {
        bench_open(&on, true, true);
        if (steps > 0) assert_ok(clear());
        if (steps > 1) assert_ok(bench_publish(&on, 0));
        if (steps > 2) assert_ok(bring_back());
        if (steps > 3) assert_ok(join());
        bench_close(&on);
    }
}

/* The controller has no future of its own then. */
STATES(states_that_the_offloader_brought_back_can_be_joined)
{
    refit_stream_ref stream;
    assert_ok(refit_stream_open(on.device, &stream, &on.error));
    assert_ok(clear());
    assert_ok(refit_offloader_restore(on.offloader, REFIT_STREAM_NONE, NULL, &on.error));
    assert_ok(bring_back());
    assert_ok(refit_controller_wait(on.controller, stream, &on.error));
    assert_int_equal(bench_state(&on), REFIT_TRAINING);
    assert_int_equal(refit_offloader_get_state(on.offloader), REFIT_RESIDENT);
    bench_check(&on);
    assert_ok(refit_stream_close(on.device, stream, &on.error));
}

int main(void)
{
    return test_run("controller");
}
