/* Connections that never become a worker's: half open, or silent after their handshake, more than
 * the process may have descriptors, or faster than workers come. A worker comes in all the same,
 * the trainer still opens files, and what is open stays bounded. And a trainer that has used up its
 * descriptors itself. */
#include "tests/support/test.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <refit/broadcast.h>

#include "base/clock.h"
#include "tests/support/key_fixture.h"
#include "tests/support/quick_config.h"
#include "tests/support/rollout_threads.h"
#include "tests/support/trainer_process.h"
#include "tests/support/zmtp_client.h"

#define WAIT_MS     50000
#define DESCRIPTORS 256u
#define RESERVE     64u /* as in connections.c, as are the next two */
#define BOUND       64u /* connections that belong to no worker, of quick_config's 16 workers */
#define BURST       1024u
#define STRANGERS   1400u
#define HOLD_MS     1000 /* as in connections.c */

static int fds[STRANGERS];

static void hang_up(uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        close(fds[i]);
}

static void join(rollout_thread *member, trainer_process *trainer, const refit_config *config)
{
    rollouts_start(member, trainer->endpoint, config, ROLLOUT_ACCEPT);
    assert_int_equal(trainer_process_await(trainer, workers, 1), 1);
}

static bool has_strangers(trainer_process *trainer)
{
    return trainer_process_ask(trainer).stats.connections_unclaimed > 0;
}

/* Waits until that many were ended, or more, no more than that many belong to no worker, and files
 * can be opened: on a machine that is busy the trainer may notice a crowd late. */
static void await_bounded(trainer_process *trainer, uint64_t ended, uint64_t unclaimed)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    for (trainer_report now = trainer_process_ask(trainer);
         now.stats.connections_ended < ended || now.stats.connections_unclaimed > unclaimed ||
         !now.can_open;
         now = trainer_process_ask(trainer)) {
        assert_true(rft_ms_until(deadline) > 0);
        (void)poll(NULL, 0, 5);
    }
}

/* Waits for a second of which it uses little: what spins uses all of each. */
static void await_idle(trainer_process *trainer)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    double used = 1, passed = 1;
    while (used >= 0.7 * passed) {
        assert_true(rft_ms_until(deadline) > 0);
        int64_t began = rft_now();
        double before = trainer_process_ask(trainer).cpu_seconds;
        (void)poll(NULL, 0, 1000);
        used = trainer_process_ask(trainer).cpu_seconds - before;
        passed = rft_seconds(rft_now() - began);
    }
}

TEST(half_open_connections_leave_descriptors_and_a_way_in)
{
    trainer_process trainer;
    rollout_thread member;
    refit_config config = quick_config(), own = quick_config();
    key_fixture smith = key_fixture_open();
    key_fixture_admit(&smith, "w0");
    if (*state != NULL) {
        key_fixture_equip_trainer(&smith, &config);
        key_fixture_equip_worker(&smith, "w0", &own);
    }
    config.limits_workers = 1024; /* so that the descriptors are what is short */
    trainer_process_start(&trainer, &config, DESCRIPTORS);
    for (uint32_t i = 0; i < STRANGERS; i++)
        assert_true((fds[i] = zmtp_knock(trainer.port)) >= 0);
    await_bounded(&trainer, 1, DESCRIPTORS - RESERVE);
    join(&member, &trainer, &own);
    await_idle(&trainer);
    rollouts_stop(&member);
    hang_up(STRANGERS);
    assert_true(trainer_process_end(&trainer));
    key_fixture_close(&smith);
}

static void open_strangers(const trainer_process *trainer, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        assert_true((fds[i] = zmtp_open(trainer->port, NULL, 0, WAIT_MS)) >= 0);
}

TEST(strangers_after_their_handshake_are_few)
{
    trainer_process trainer;
    rollout_thread member;
    refit_config config = quick_config();
    trainer_process_start(&trainer, &config, 0);
    join(&member, &trainer, &config);
    open_strangers(&trainer, 4 * BOUND);
    await_bounded(&trainer, 3 * BOUND, BOUND);
    assert_true(zmtp_is_hung_up(fds[0], WAIT_MS));
    trainer_report report = trainer_process_ask(&trainer);
    assert_int_equal(report.stats.workers, 1);
    assert_int_equal(report.stats.workers_evicted, 0);
    rollouts_stop(&member);
    hang_up(4 * BOUND);
    assert_true(trainer_process_end(&trainer));
}

/* Ten times as long as silence lasts, and five seconds at the least. */
TEST(strangers_after_their_handshake_do_not_stay)
{
    trainer_process trainer;
    refit_config config = quick_config();
    config.broadcast_heartbeat_timeout_ms = 500;
    trainer_process_start(&trainer, &config, 0);
    open_strangers(&trainer, BOUND);
    await_bounded(&trainer, BOUND, 0);
    hang_up(BOUND);
    assert_true(trainer_process_end(&trainer));
}

/* How many are refused is chance: ZeroMQ may take the spare descriptor before they are. */
TEST(no_descriptor_at_all_costs_no_core_and_ends_by_itself)
{
    trainer_process trainer;
    rollout_thread member;
    refit_config config = quick_config();
    trainer_process_start(&trainer, &config, DESCRIPTORS);
    trainer_process_fill(&trainer);
    for (uint32_t i = 0; i < 8; i++)
        assert_true((fds[i] = zmtp_connect(trainer.port, WAIT_MS)) >= 0 || i > 0);
    (void)trainer_process_await(&trainer, connections_held_off, 1);
    await_idle(&trainer);
    trainer_process_empty(&trainer);
    join(&member, &trainer, &config);
    rollouts_stop(&member);
    hang_up(8);
    assert_true(trainer_process_end(&trainer));
}

/* ---- On ipc, ZeroMQ would abort */

typedef struct ipc_place {
    file_tree tree;
    struct sockaddr_un address;
    refit_config config;
    trainer_process trainer;
} ipc_place;

static int ipc_place_make(void **state)
{
    static ipc_place place;
    place = (ipc_place){.tree = file_tree_open(), .address.sun_family = AF_UNIX};
    place.config = quick_config();
    (void)snprintf(place.address.sun_path, sizeof place.address.sun_path, "%s/s", place.tree.root);
    (void)snprintf(place.config.broadcast_endpoint, sizeof place.config.broadcast_endpoint,
                   "ipc://%s", place.address.sun_path);
    *state = &place;
    return 0;
}

/* Nothing is left in it. */
static int ipc_place_remove(void **state)
{
    const ipc_place *place = *state;
    return rmdir(place->tree.root);
}

#define ON_IPC(name) TEST_ON(ipc_place *place, name, ipc_place_make, ipc_place_remove)

static bool can_connect(const ipc_place *place)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    bool can = connect(fd, (const struct sockaddr *)&place->address, sizeof place->address) == 0;
    close(fd);
    return can;
}

static void start_on_ipc(ipc_place *place)
{
    trainer_process_start(&place->trainer, &place->config, DESCRIPTORS);
}

/* It has no descriptors, and takes no connections any more. */
static void hold_off_on_ipc(ipc_place *place)
{
    trainer_process_fill(&place->trainer);
    assert_true(trainer_process_await(&place->trainer, connections_held_off, 1) >= 1);
}

/* A few low numbers are free again, as when workers have left: they are still few. */
ON_IPC(a_gap_among_the_descriptors_does_not_open_the_listener)
{
    start_on_ipc(place);
    hold_off_on_ipc(place);
    trainer_process_free(&place->trainer, 3);
    (void)poll(NULL, 0, 2 * HOLD_MS);
    for (int i = 0; i < 20; i++)
        assert_false(can_connect(place));
    assert_int_equal(trainer_process_ask(&place->trainer).stats.connections_held_off, 1);
    assert_true(trainer_process_end(&place->trainer));
}

ON_IPC(another_file_with_the_second_name_stays_and_is_refused)
{
    refit_error why;
    refit_publisher *publisher;
    char second[128];
    (void)snprintf(second, sizeof second, "%s.held", place->address.sun_path);
    file_tree_write(&place->tree, "/s.held", "");
    assert_int_equal(
        refit_publisher_open(place->config.broadcast_endpoint, &place->config, &publisher, &why),
        REFIT_ERR_EXISTS);
    assert_says(&why, second);
    assert_int_equal(unlink(second), 0);
}

ON_IPC(ipc_trainer_without_descriptors_takes_workers_later)
{
    rollout_thread member, late;
    start_on_ipc(place);
    join(&member, &place->trainer, &place->config);
    hold_off_on_ipc(place);
    for (int i = 0; i < 100; i++)
        assert_false(can_connect(place));
    assert_int_equal(trainer_process_ask(&place->trainer).stats.workers, 1);
    trainer_process_empty(&place->trainer);
    rollouts_start(&late, place->trainer.endpoint, &place->config, ROLLOUT_ACCEPT);
    assert_int_equal(trainer_process_await(&place->trainer, workers, 2), 2);
    trainer_report report = trainer_process_ask(&place->trainer);
    assert_int_equal(report.stats.workers_evicted, 0);
    assert_true(report.stats.connections_held_off >= 1);
    rollouts_stop(&late);
    rollouts_stop(&member);
    assert_true(trainer_process_end(&place->trainer));
}

ON_IPC(ipc_trainer_ending_while_held_off_leaves_path_to_bind)
{
    start_on_ipc(place);
    hold_off_on_ipc(place);
    trainer_process_kill(&place->trainer);
    assert_false(can_connect(place));
    start_on_ipc(place);
    /* A connection that has come and gone: none waits to be accepted. */
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&place->address, sizeof place->address),
                     0);
    (void)trainer_process_await(&place->trainer, connections_unclaimed, 1);
    close(fd);
    hold_off_on_ipc(place);
    assert_true(trainer_process_end(&place->trainer));
}

/* ---- After the handshake */

/* And waits until the trainer has counted it: handshakes beyond the burst make it hold off longer.
 */
static void shake_hands_once(trainer_process *trainer)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    int fd = zmtp_open(trainer->port, NULL, 0, 1000);
    if (fd < 0) return;
    (void)trainer_process_await(trainer, connections_unclaimed, 1);
    close(fd);
    while (has_strangers(trainer) && rft_ms_until(deadline) > 0)
        (void)poll(NULL, 0, 5);
}

TEST(more_handshakes_than_workers_make_are_held_off)
{
    trainer_process trainer;
    rollout_thread member;
    refit_config config = quick_config();
    trainer_process_start(&trainer, &config, 0);
    join(&member, &trainer, &config);
    for (uint32_t i = 0; i < BURST - 16; i++)
        close(zmtp_open(trainer.port, NULL, 0, WAIT_MS));
    assert_int_equal(trainer_process_ask(&trainer).stats.connections_held_off, 0);
    int64_t deadline = rft_deadline(3 * WAIT_MS);
    while (trainer_process_ask(&trainer).stats.connections_held_off == 0 &&
           rft_ms_until(deadline) > 0)
        shake_hands_once(&trainer);
    assert_true(trainer_process_ask(&trainer).stats.connections_held_off >= 1);
    int fd = -1;
    for (deadline = rft_deadline(2 * WAIT_MS); fd < 0 && rft_ms_until(deadline) > 0;)
        fd = zmtp_open(trainer.port, NULL, 0, 1000);
    assert_true(fd >= 0); /* the rate has made up for it */
    trainer_report report = trainer_process_ask(&trainer);
    assert_int_equal(report.stats.workers, 1);
    assert_int_equal(report.stats.workers_evicted, 0);
    close(fd);
    rollouts_stop(&member);
    assert_true(trainer_process_end(&trainer));
}

int main(void)
{
    static int keys = 1;
    test_list((struct CMUnitTest){"half_open_connections_with_keys",
                                  half_open_connections_leave_descriptors_and_a_way_in, NULL, NULL,
                                  &keys});
    return test_run("strangers");
}
