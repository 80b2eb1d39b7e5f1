/* Whole refits that a reader, a close or a fork interrupts. */
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/fault/ledger.h"
#include "tests/fault/whole.h"

/* ---- Ways into the middle */

static void arrive_open(whole *on)
{
    (void)on;
}

static void arrive_leaving(whole *on)
{
    assert_ok(whole_step(on));
    faulty_device_stop(on->device);
    assert_ok(refit_offloader_offload(on->offloader, on->stream, NULL, &on->error));
}

static void arrive_cleared(whole *on)
{
    assert_ok(whole_step(on));
    assert_ok(refit_controller_offload(on->controller, on->stream, &on->error));
}

static void arrive_begun(whole *on)
{
    arrive_cleared(on);
    assert_ok(refit_publisher_begin(on->publisher, ++on->version, &on->error));
}

static void arrive_written(whole *on)
{
    arrive_begun(on);
    assert_ok(refit_publisher_write(on->publisher, 0, on->weights, sample_tensors()[0].bytes,
                                    on->device, on->stream, &on->error));
}

static void arrive_refitted(whole *on)
{
    arrive_cleared(on);
    assert_ok(whole_publish(on));
}

/* The worker still has its update open. */
static void arrive_kept(whole *on)
{
    rollout_set_action(&on->worker, ROLLOUT_KEEP);
    arrive_refitted(on);
    rollout_set_action(&on->worker, ROLLOUT_ACCEPT);
}

static void arrive_returning(whole *on)
{
    arrive_refitted(on);
    faulty_device_stop(on->device);
    assert_ok(refit_controller_restore(on->controller, on->stream, &on->error));
}

static void arrive_joined(whole *on)
{
    arrive_returning(on);
    assert_ok(refit_controller_wait(on->controller, on->stream, &on->error));
}

typedef struct place {
    const char *name;
    void (*arrive)(whole *on);
} place;

static const place places[] = {
    {"open", arrive_open},   {"leaving", arrive_leaving},     {"cleared", arrive_cleared},
    {"begun", arrive_begun}, {"written", arrive_written},     {"refitted", arrive_refitted},
    {"kept", arrive_kept},   {"returning", arrive_returning}, {"joined", arrive_joined},
};

#define PLACES (sizeof places / sizeof places[0])

/* ---- Closing */

whole_test(nothing_is_left_of_what_is_closed_in_the_middle)
{
    for (size_t i = 0; i < PLACES; i++) {
        for (uint64_t trainer_first = 0; trainer_first < 2; trainer_first++) {
            for (int path = 0; path < 2; path++) {
                whole on;
                whole_say(places[i].name, trainer_first);
                ledger_open();
                assert_ok(whole_open(&on, path == 0 ? WHOLE_FRAMES : WHOLE_SHM, whole_patient));
                places[i].arrive(&on);
                faulty_device_go(on.device);
                if (trainer_first == 1) {
                    refit_publisher_close(on.publisher);
                    on.publisher = NULL;
                }
                whole_close(&on);
                ledger_check();
            }
        }
    }
    whole_say(NULL, 0);
}

/* ---- Forking */

static void fork_and_exit(void)
{
    int how;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) _exit(0);
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how)); /* With which status, valgrind decides: its threads are gone. */
}

/* Ends what the way into the middle has left open. */
static void go_on(whole *on)
{
    faulty_device_go(on->device);
    rollouts_let_go(&on->worker);
    refit_status none_under_way = refit_publisher_abort(on->publisher, NULL);
    (void)none_under_way;
}

whole_test(a_child_that_only_exits_disturbs_nothing)
{
    for (size_t i = 0; i < PLACES; i++) {
        whole on;
        whole_say(places[i].name, i);
        ledger_open();
        assert_ok(whole_open(&on, i % 2 == 0 ? WHOLE_FRAMES : WHOLE_SHM, whole_patient));
        places[i].arrive(&on);
        fork_and_exit();
        go_on(&on);
        whole_prove(&on);
        whole_close(&on);
        ledger_check();
    }
    whole_say(NULL, 0);
}

/* ---- Reading and stepping */

whole_test(a_checkpoint_that_is_being_read_is_not_overwritten)
{
    whole on;
    refit_read_lock *lock;
    const void *bytes;
    uint64_t count;
    assert_ok(whole_open(&on, WHOLE_FRAMES, whole_patient));
    arrive_cleared(&on);
    assert_ok(refit_read_lock_acquire(on.offloader, &lock, &on.error));
    assert_ok(refit_read_lock_read(lock, 0, &bytes, &count, &on.error));
    assert_memory_equal(bytes, on.regions[0].expected, count);
    unsigned char *before = test_malloc(count);
    memcpy(before, bytes, count);
    assert_ok(refit_controller_restore(on.controller, REFIT_STREAM_NONE, &on.error));
    assert_ok(refit_controller_wait(on.controller, REFIT_STREAM_NONE, &on.error));
    assert_ok(whole_step(&on));
    refit_status status = refit_controller_offload(on.controller, on.stream, &on.error);
    assert_int_equal(status, REFIT_ERR_BUSY);
    whole_check_told(status, &on.error);
    assert_int_equal(refit_controller_get_state(on.controller), REFIT_TRAINING);
    assert_int_equal(refit_offloader_close(on.offloader, &on.error), REFIT_ERR_BUSY);
    assert_memory_equal(bytes, before, count);
    assert_ok(whole_publish(&on));
    refit_read_lock_release(lock);
    test_free(before);
    whole_prove(&on);
    whole_close(&on);
}

whole_test(a_step_before_the_return_is_refused)
{
    whole on;
    assert_ok(whole_open(&on, WHOLE_FRAMES, whole_patient));
    arrive_cleared(&on);
    refit_status status = refit_controller_wait(on.controller, on.stream, &on.error);
    assert_int_equal(status, REFIT_ERR_STATE);
    whole_check_told(status, &on.error);
    for (uint32_t at = 0; at < refit_offloader_count(on.offloader); at++) {
        refit_region_info info = {.size = sizeof info};
        assert_ok(refit_offloader_region(on.offloader, at, &info, &on.error));
        assert_int_equal(info.place, REFIT_ON_HOST);
        assert_int_equal(info.bound, 0);
    }
    assert_ok(refit_controller_offload(on.controller, on.stream, &on.error));
    whole_prove(&on);
    whole_close(&on);
}

int main(void)
{
    return test_run("fault_states");
}
