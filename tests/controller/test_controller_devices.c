/* One controller over the offloaders of two and three devices: all take part in each verb, and one
 * that fails does not stop the others. */
#include "tests/controller/cycle_bench.h"

#include "base/clock.h"

#define MOST 3

/* Benches whose offloaders are all in the first one's controller. */
typedef struct fleet {
    cycle_bench on[MOST];
    int count;
} fleet;

static fleet ours;

static refit_controller *controller_of(void)
{
    return ours.on[0].controller;
}

static refit_status add(int number, refit_stream_ref stream)
{
    return refit_controller_add(controller_of(), ours.on[number].offloader, stream,
                                &ours.on[0].error);
}

static void open_fleet_by(void (*open)(cycle_bench *on, bool with_offloader, bool with_publisher),
                          int count)
{
    ours.count = count;
    for (int i = 0; i < count; i++) {
        open(&ours.on[i], true, i == 0);
        if (i == 0) continue;
        refit_controller_close(ours.on[i].controller);
        ours.on[i].controller = NULL;
        assert_ok(add(i, REFIT_STREAM_NONE));
    }
}

static void open_fleet(int count)
{
    open_fleet_by(bench_open, count);
}

static void stop_copies(int count)
{
    for (int i = 0; i < count; i++)
        faulty_device_stop(ours.on[i].device);
}

static void let_copies_go(void)
{
    for (int i = 0; i < ours.count; i++)
        faulty_device_go(ours.on[i].device);
}

static void close_fleet(void)
{
    let_copies_go();
    for (int i = 0; i < ours.count; i++)
        bench_close(&ours.on[i]);
    ours.count = 0;
}

static int end(void **state)
{
    close_fleet();
    return 0;
}

#define FLEET(name) TEST_WITH(name, NULL, end)

static refit_status clear(void)
{
    return bench_clear(&ours.on[0]);
}

static refit_status bring_back(void)
{
    return bench_return(&ours.on[0]);
}

static refit_status join(void)
{
    return bench_join(&ours.on[0]);
}

static refit_controller_state state_of(void)
{
    return bench_state(&ours.on[0]);
}

static void check_cleared(void)
{
    assert_int_equal(state_of(), REFIT_CLEARED);
    for (int i = 0; i < ours.count; i++)
        assert_null(ours.on[i].memory);
}

static void check_home(void)
{
    assert_int_equal(state_of(), REFIT_TRAINING);
    for (int i = 0; i < ours.count; i++)
        bench_check(&ours.on[i]);
}

static void finish_cycle(void)
{
    assert_ok(bring_back());
    assert_int_equal(state_of(), REFIT_RETURNING);
    assert_ok(bench_retry(&ours.on[0], bench_join));
    check_home();
}

FLEET(all_devices_take_part_in_a_cycle)
{
    for (int count = 1; count <= MOST; count++) {
        open_fleet(count);
        for (int round = 0; round < 3; round++) {
            assert_ok(clear());
            check_cleared();
            assert_ok(bench_publish(&ours.on[0], 0));
            assert_int_equal(state_of(), REFIT_REFITTED);
            finish_cycle();
        }
        refit_stats stats = bench_stats(&ours.on[0]);
        assert_int_equal(stats.cycles, 3);
        assert_int_equal(stats.cycle_failures, 0);
        assert_int_equal(stats.offload_regions, count);
        assert_int_equal(stats.offload_count, 3 * count);
        assert_int_equal(stats.offload_bytes_last, count * BENCH_BYTES);
        assert_int_equal(stats.offload_reclaimed_bytes_last, count * BENCH_BYTES);
        assert_int_equal(stats.publish_version, 3);
        close_fleet();
    }
}

/* The states of the others leave; then the clear goes on with the rest, or `return` gives it up. */
FLEET(a_device_that_fails_during_the_offload)
{
    for (int broken = 0; broken < MOST; broken++) {
        for (int variant = 0; variant < 4; variant++) {
            bool starts = variant % 2 == 0;
            open_fleet_by(bench_open_verified, MOST);
            if (starts) {
                bench_tear(&ours.on[broken]);
            } else {
                faulty_device_fail(ours.on[broken].device, FAULTY_COPY_BATCH, 1, REFIT_ERR_COPY);
            }
            assert_int_equal(clear(), starts ? REFIT_ERR_CORRUPT : REFIT_ERR_COPY);
            assert_int_equal(state_of(), REFIT_TRAINING);
            for (int i = 0; i < MOST; i++) {
                if (i == broken) {
                    bench_check(&ours.on[i]);
                } else {
                    assert_null(ours.on[i].memory);
                }
            }
            assert_int_equal(join(), REFIT_ERR_STATE);
            assert_non_null(strstr(ours.on[0].error.text, "refit_controller_offload"));
            if (variant < 2) {
                assert_ok(clear());
                check_cleared();
            }
            finish_cycle();
            assert_int_equal(bench_stats(&ours.on[0]).cycle_failures, 1);
            close_fleet();
        }
    }
}

FLEET(memory_that_one_device_keeps_leaves_cleared)
{
    open_fleet(MOST);
    ours.on[1].fail_release = 1;
    assert_int_equal(clear(), REFIT_ERR_CALLBACK);
    assert_int_equal(state_of(), REFIT_CLEARED);
    assert_non_null(ours.on[1].memory);
    assert_null(ours.on[2].memory);
    assert_ok(clear());
    check_cleared();
    finish_cycle();
}

FLEET(memory_that_one_device_lacks_can_be_asked_for_again)
{
    for (int then_clear = 0; then_clear < 2; then_clear++) {
        for (int scarce = 0; scarce < MOST; scarce++) {
            open_fleet(MOST);
            assert_ok(clear());
            ours.on[scarce].fail_acquire = 1;
            assert_int_equal(bring_back(), REFIT_ERR_CALLBACK);
            assert_int_equal(state_of(), REFIT_CLEARED);
            assert_null(ours.on[scarce].memory);
            assert_non_null(ours.on[(scarce + 1) % MOST].memory);
            assert_int_equal(join(), REFIT_ERR_STATE);
            if (then_clear == 1) {
                assert_ok(clear());
                check_cleared();
            }
            finish_cycle();
            close_fleet();
        }
    }
}

FLEET(a_device_that_fails_during_the_restore_is_reported_by_join)
{
    for (int broken = 0; broken < MOST; broken++) {
        open_fleet_by(bench_open_verified, MOST);
        assert_ok(clear());
        bench_tear(&ours.on[broken]);
        assert_ok(bring_back());
        assert_int_equal(join(), REFIT_ERR_CORRUPT);
        assert_int_equal(state_of(), REFIT_RETURNING);
        finish_cycle();
        assert_int_equal(bench_stats(&ours.on[0]).cycles, 1);
        close_fleet();
    }
}

/* A controller that waits one second only, over the same offloaders. */
static void make_impatient(void)
{
    cycle_bench *on = &ours.on[0];
    refit_config impatient = on->config;
    refit_controller_close(on->controller);
    assert_ok(refit_config_set(&impatient, "offload.timeout_ms", "1s", &on->error));
    assert_ok(refit_controller_open(on->offloader, NULL, &impatient, &on->controller, &on->error));
    for (int i = 1; i < ours.count; i++)
        assert_ok(add(i, REFIT_STREAM_NONE));
}

/* Not on CUDA, whose host functions run one at a time: the stop of one device stops them all. */
FLEET(one_deadline_holds_for_all_devices)
{
    if (test_on_cuda()) skip();
    open_fleet(MOST);
    make_impatient();
    stop_copies(MOST - 1);
    do
        assert_int_equal(clear(), REFIT_ERR_TIMEOUT);
    while (ours.on[MOST - 1].memory != NULL); /* whose states leave meanwhile */
    assert_int_equal(state_of(), REFIT_TRAINING);
    assert_int_equal(join(), REFIT_ERR_STATE);
    let_copies_go();
    assert_ok(bench_retry(&ours.on[0], bench_clear));
    check_cleared();
    finish_cycle();
}

static void wait_until(refit_offloader *offloader, refit_offloader_state wanted)
{
    rft_looks looks = rft_looks_until(rft_deadline(30000));
    while (refit_offloader_get_state(offloader) != wanted)
        assert_true(rft_poll_again(&looks));
}

/* A step would be lost: what comes back are the bytes that have left. */
FLEET(states_that_left_after_a_deadline_are_not_joined)
{
    open_fleet(1);
    make_impatient();
    faulty_device_stop(ours.on[0].device);
    assert_int_equal(clear(), REFIT_ERR_TIMEOUT);
    faulty_device_go(ours.on[0].device);
    wait_until(ours.on[0].offloader, REFIT_OFFLOADED);
    assert_int_equal(state_of(), REFIT_TRAINING);
    assert_int_equal(join(), REFIT_ERR_STATE);
    finish_cycle();
}

static refit_stream_ref streams[MOST];

static void open_fleet_with_streams(void)
{
    open_fleet(MOST);
    for (int i = 0; i < MOST; i++) {
        assert_ok(refit_stream_open(ours.on[i].device, &streams[i], &ours.on[i].error));
        if (i > 0) assert_ok(add(i, streams[i]));
    }
    assert_ok(clear());
}

static void return_and_join(void)
{
    assert_ok(refit_controller_restore(controller_of(), streams[0], &ours.on[0].error));
    assert_ok(refit_controller_wait(controller_of(), streams[0], &ours.on[0].error));
    assert_int_equal(state_of(), REFIT_TRAINING);
}

static void wait_for_streams(void)
{
    for (int i = 0; i < MOST; i++)
        assert_ok(refit_stream_wait(ours.on[i].device, streams[i], TIMEOUT_MS, &ours.on[i].error));
    check_home();
}

static void close_streams(void)
{
    for (int i = 0; i < MOST; i++) {
        assert_ok(refit_stream_close(ours.on[i].device, streams[i], &ours.on[i].error));
        if (i > 0) assert_ok(add(i, REFIT_STREAM_NONE));
    }
}

FLEET(each_device_has_its_stream)
{
    open_fleet_with_streams();
    stop_copies(MOST);
    return_and_join();
    for (int i = 0; i < MOST; i++)
        assert_int_equal(refit_stream_wait(ours.on[i].device, streams[i], 0, NULL),
                         REFIT_ERR_TIMEOUT);
    let_copies_go();
    wait_for_streams();
    assert_ok(clear());
    assert_ok(bring_back());
    assert_ok(join()); /* blocks for the first device alone: the others have streams */
    wait_for_streams();
    close_streams();
}

/* All devices are lost after joined streams: `clear` tells one, and no step is agreed to. */
FLEET(clear_reports_devices_that_are_lost_after_joined_streams)
{
    open_fleet_with_streams();
    stop_copies(MOST);
    for (int i = 0; i < MOST; i++)
        faulty_device_lose(ours.on[i].device, FAULTY_COPY_BATCH, 1);
    return_and_join();
    let_copies_go();
    for (int i = 0; i < MOST; i++)
        wait_until(ours.on[i].offloader, REFIT_FAILED);
    assert_int_equal(join(), REFIT_ERR_STATE);
    assert_int_equal(clear(), REFIT_ERR_DEVICE);
    assert_int_equal(state_of(), REFIT_TRAINING);
    assert_int_equal(join(), REFIT_ERR_STATE);
    for (int i = 0; i < MOST; i++)
        bench_check_image(&ours.on[i]);
    for (int i = 0; i < MOST; i++)
        assert_ok(refit_stream_close(ours.on[i].device, streams[i], &ours.on[i].error));
}

FLEET(what_can_be_added)
{
    open_fleet(2);
    refit_error *error = &ours.on[0].error;
    refit_controller *alone;
    assert_invalid(refit_controller_add(NULL, ours.on[1].offloader, REFIT_STREAM_NONE, error));
    assert_invalid(refit_controller_add(controller_of(), NULL, REFIT_STREAM_NONE, error));
    assert_ok(refit_controller_open(NULL, ours.on[0].publisher, NULL, &alone, error));
    assert_ok(clear());
    assert_ok(add(1, REFIT_STREAM_NONE)); /* it is there already */
    assert_int_equal(refit_controller_add(alone, ours.on[1].offloader, REFIT_STREAM_NONE, error),
                     REFIT_ERR_STATE);
    assert_non_null(strstr(error->text, "refit_offloader_restore"));
    finish_cycle();
    assert_ok(refit_controller_offload(alone, REFIT_STREAM_NONE, error));
    assert_int_equal(refit_controller_add(alone, ours.on[1].offloader, REFIT_STREAM_NONE, error),
                     REFIT_ERR_STATE);
    assert_non_null(strstr(error->text, "CLEARED"));
    assert_ok(refit_controller_restore(alone, REFIT_STREAM_NONE, error));
    assert_ok(refit_controller_wait(alone, REFIT_STREAM_NONE, error));
    assert_ok(refit_controller_add(alone, ours.on[1].offloader, REFIT_STREAM_NONE, error));
    assert_ok(refit_controller_offload(alone, REFIT_STREAM_NONE, error));
    assert_null(ours.on[1].memory);
    assert_ok(refit_controller_restore(alone, REFIT_STREAM_NONE, error));
    assert_ok(refit_controller_wait(alone, REFIT_STREAM_NONE, error));
    refit_controller_close(alone);
    check_home();
}

int main(void)
{
    return test_run("controller_devices");
}
