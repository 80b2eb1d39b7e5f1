/* Connections that never become a worker's: half open, or silent after their handshake, more than
 * the process may have descriptors, or faster than workers come. A worker comes in all the same,
 * the trainer still opens files, and what is open stays bounded. And a trainer that has used up its
 * descriptors itself. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <refit/broadcast.h>

#include "base/clock.h"
#include "tests/support/crew.h"
#include "tests/support/locksmith.h"
#include "tests/support/quick_config.h"
#include "tests/support/trainer_process.h"
#include "tests/support/zmtp_client.h"

#define WAIT_MS     30000
#define DESCRIPTORS 256u
#define RESERVE     64u /* as in connections.c, as are the next two */
#define BOUND       64u /* connections that belong to no worker, of quick_config's 16 workers */
#define BURST       1024u
#define STRANGERS   1400u
#define HOLD_US     1000000u /* HOLD_MS of connections.c */

static int fds[STRANGERS];

static void hang_up(uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        close(fds[i]);
}

static bool is_bounded(const trainer_report *report, uint64_t ended, uint64_t unclaimed)
{
    return report->stats.connections_ended >= ended &&
           report->stats.connections_unclaimed <= unclaimed && report->can_open;
}

/* Waits until that many were ended, or more, no more than that many belong to no worker, and files
 * can be opened: on a machine that is busy the trainer may notice a crowd late. */
static trainer_report wait_until_bounded(trainer_process *trainer, uint64_t ended,
                                         uint64_t unclaimed)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    trainer_report report = trainer_process_ask(trainer);
    while (!is_bounded(&report, ended, unclaimed) && rft_ms_until(deadline) > 0) {
        (void)usleep(5000);
        report = trainer_process_ask(trainer);
    }
    assert_true(is_bounded(&report, ended, unclaimed));
    return report;
}

static void wait_for_a_worker(trainer_process *trainer)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    while (trainer_process_ask(trainer).stats.workers == 0 && rft_ms_until(deadline) > 0)
        (void)usleep(5000);
    assert_int_equal(trainer_process_ask(trainer).stats.workers, 1);
}

/* Loosely: what spins uses all of it. */
static void check_idle(trainer_process *trainer)
{
    int64_t began = rft_now();
    double before = trainer_process_ask(trainer).cpu_seconds;
    (void)usleep(1000000);
    double used = trainer_process_ask(trainer).cpu_seconds - before;
    assert_true(used < 0.7 * rft_seconds(rft_now() - began));
}

static void half_open_connections_leave_descriptors_and_a_way_in(void **state)
{
    trainer_process trainer;
    crew_member member;
    refit_config config = quick_config(), own = quick_config();
    locksmith smith = locksmith_open();
    locksmith_admit(&smith, "w0");
    if (*state != NULL) {
        locksmith_equip_trainer(&smith, &config);
        locksmith_equip_worker(&smith, "w0", &own);
    }
    config.limits_workers = 1024; /* so that the descriptors are what is short */
    trainer_process_start(&trainer, &config, DESCRIPTORS);
    for (uint32_t i = 0; i < STRANGERS; i++)
        assert_true((fds[i] = zmtp_knock(trainer.port)) >= 0);
    (void)wait_until_bounded(&trainer, 1, DESCRIPTORS - RESERVE);
    crew_start(&member, trainer.endpoint, &own, CREW_ACCEPT);
    wait_for_a_worker(&trainer);
    check_idle(&trainer);
    crew_stop(&member);
    hang_up(STRANGERS);
    assert_true(trainer_process_end(&trainer));
    locksmith_close(&smith);
}

static void strangers_after_their_handshake_are_few_and_do_not_stay(void **state)
{
    (void)state;
    trainer_process trainer;
    crew_member member;
    refit_config config = quick_config();
    config.broadcast_heartbeat_timeout_ms = 500; /* they stay ten times as long */
    trainer_process_start(&trainer, &config, 0);
    crew_start(&member, trainer.endpoint, &config, CREW_ACCEPT);
    wait_for_a_worker(&trainer);
    for (uint32_t i = 0; i < 4 * BOUND; i++)
        assert_true((fds[i] = zmtp_open(trainer.port, NULL, 0, WAIT_MS)) >= 0);
    (void)wait_until_bounded(&trainer, 3 * BOUND, BOUND);
    assert_true(zmtp_is_hung_up(fds[0], WAIT_MS));
    trainer_report report = wait_until_bounded(&trainer, 4 * BOUND, 0);
    assert_int_equal(report.stats.workers, 1);
    assert_int_equal(report.stats.workers_evicted, 0);
    crew_stop(&member);
    hang_up(4 * BOUND);
    assert_true(trainer_process_end(&trainer));
}

/* How many are refused is chance: ZeroMQ may take the spare descriptor before they are. */
static void no_descriptor_at_all_costs_no_core_and_ends_by_itself(void **state)
{
    (void)state;
    trainer_process trainer;
    crew_member member;
    refit_config config = quick_config();
    trainer_process_start(&trainer, &config, 256);
    trainer_process_fill(&trainer);
    for (uint32_t i = 0; i < 8; i++)
        assert_true((fds[i] = zmtp_connect(trainer.port, WAIT_MS)) >= 0 || i > 0);
    int64_t deadline = rft_deadline(WAIT_MS);
    while (trainer_process_ask(&trainer).stats.connections_held_off == 0 &&
           rft_ms_until(deadline) > 0)
        (void)usleep(5000);
    assert_true(trainer_process_ask(&trainer).stats.connections_held_off > 0);
    check_idle(&trainer);
    trainer_process_empty(&trainer);
    crew_start(&member, trainer.endpoint, &config, CREW_ACCEPT);
    wait_for_a_worker(&trainer);
    crew_stop(&member);
    hang_up(8);
    assert_true(trainer_process_end(&trainer));
}

static bool has_strangers(trainer_process *trainer)
{
    return trainer_process_ask(trainer).stats.connections_unclaimed > 0;
}

/* ---- On ipc, ZeroMQ would abort */

typedef struct ipc_place {
    char folder[32];
    struct sockaddr_un address;
    refit_config config;
} ipc_place;

static ipc_place ipc_place_make(void)
{
    ipc_place place = {.folder = "/tmp/refit-test-XXXXXX", .address.sun_family = AF_UNIX};
    place.config = quick_config();
    assert_non_null(mkdtemp(place.folder));
    (void)snprintf(place.address.sun_path, sizeof place.address.sun_path, "%s/s", place.folder);
    (void)snprintf(place.config.broadcast_endpoint, sizeof place.config.broadcast_endpoint,
                   "ipc://%s", place.address.sun_path);
    return place;
}

/* Nothing is left in it. */
static void ipc_place_remove(const ipc_place *place)
{
    assert_int_equal(rmdir(place->folder), 0);
}

static bool can_connect(const ipc_place *place)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    bool can = connect(fd, (const struct sockaddr *)&place->address, sizeof place->address) == 0;
    close(fd);
    return can;
}

static void wait_until_held_off(trainer_process *trainer, uint64_t times)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    while (trainer_process_ask(trainer).stats.connections_held_off < times &&
           rft_ms_until(deadline) > 0)
        (void)usleep(5000);
    assert_int_equal(trainer_process_ask(trainer).stats.connections_held_off, times);
}

/* One that has come and gone: none waits to be accepted. */
static void wait_for_a_connection(trainer_process *trainer, const ipc_place *place)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&place->address, sizeof place->address),
                     0);
    while (!has_strangers(trainer) && rft_ms_until(deadline) > 0)
        (void)usleep(5000);
    assert_true(has_strangers(trainer));
    close(fd);
}

/* A few low numbers are free again, as when workers have left: they are still few. */
static void a_gap_among_the_descriptors_does_not_open_the_listener(void **state)
{
    (void)state;
    trainer_process trainer;
    ipc_place place = ipc_place_make();
    trainer_process_start(&trainer, &place.config, DESCRIPTORS);
    trainer_process_fill(&trainer);
    wait_until_held_off(&trainer, 1);
    trainer_process_free(&trainer, 3);
    (void)usleep(2 * HOLD_US);
    for (int i = 0; i < 20; i++)
        assert_false(can_connect(&place));
    assert_int_equal(trainer_process_ask(&trainer).stats.connections_held_off, 1);
    assert_true(trainer_process_end(&trainer));
    ipc_place_remove(&place);
}

static void another_file_with_the_second_name_stays_and_is_refused(void **state)
{
    (void)state;
    refit_error why;
    refit_publisher *publisher;
    char second[128];
    ipc_place place = ipc_place_make();
    (void)snprintf(second, sizeof second, "%s.held", place.address.sun_path);
    int fd = open(second, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(
        refit_publisher_open(place.config.broadcast_endpoint, &place.config, &publisher, &why),
        REFIT_ERR_EXISTS);
    assert_non_null(strstr(why.text, second));
    assert_int_equal(unlink(second), 0);
    ipc_place_remove(&place);
}

static void an_ipc_trainer_without_descriptors_goes_on_and_takes_workers_later(void **state)
{
    (void)state;
    trainer_process trainer;
    crew_member member, late;
    ipc_place place = ipc_place_make();
    trainer_process_start(&trainer, &place.config, DESCRIPTORS);
    crew_start(&member, trainer.endpoint, &place.config, CREW_ACCEPT);
    wait_for_a_worker(&trainer);
    trainer_process_fill(&trainer);
    wait_until_held_off(&trainer, 1);
    for (int i = 0; i < 100; i++)
        assert_false(can_connect(&place));
    assert_int_equal(trainer_process_ask(&trainer).stats.workers, 1);
    trainer_process_empty(&trainer);
    crew_start(&late, trainer.endpoint, &place.config, CREW_ACCEPT);
    int64_t deadline = rft_deadline(WAIT_MS);
    while (trainer_process_ask(&trainer).stats.workers < 2 && rft_ms_until(deadline) > 0)
        (void)usleep(5000);
    trainer_report report = trainer_process_ask(&trainer);
    assert_int_equal(report.stats.workers, 2);
    assert_int_equal(report.stats.workers_evicted, 0);
    assert_int_equal(report.stats.connections_held_off, 1);
    crew_stop(&late);
    crew_stop(&member);
    assert_true(trainer_process_end(&trainer));
    ipc_place_remove(&place);
}

static void an_ipc_trainer_that_closes_or_dies_held_off_leaves_a_path_to_bind(void **state)
{
    (void)state;
    trainer_process trainer;
    ipc_place place = ipc_place_make();
    trainer_process_start(&trainer, &place.config, DESCRIPTORS);
    trainer_process_fill(&trainer);
    wait_until_held_off(&trainer, 1);
    trainer_process_kill(&trainer);
    assert_false(can_connect(&place));
    trainer_process_start(&trainer, &place.config, DESCRIPTORS);
    wait_for_a_connection(&trainer, &place);
    trainer_process_fill(&trainer);
    wait_until_held_off(&trainer, 1);
    assert_true(trainer_process_end(&trainer));
    ipc_place_remove(&place);
}

/* ---- After the handshake */

/* And waits until the trainer has counted it: handshakes beyond the burst make it hold off longer.
 */
static void shake_hands_once(trainer_process *trainer)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    int fd = zmtp_open(trainer->port, NULL, 0, 1000);
    if (fd < 0) return;
    while (!has_strangers(trainer) && rft_ms_until(deadline) > 0)
        (void)usleep(5000);
    close(fd);
    while (has_strangers(trainer) && rft_ms_until(deadline) > 0)
        (void)usleep(5000);
}

static void more_handshakes_than_workers_make_are_held_off(void **state)
{
    (void)state;
    trainer_process trainer;
    crew_member member;
    refit_config config = quick_config();
    trainer_process_start(&trainer, &config, 0);
    crew_start(&member, trainer.endpoint, &config, CREW_ACCEPT);
    wait_for_a_worker(&trainer);
    for (uint32_t i = 0; i < BURST - 16; i++)
        close(zmtp_open(trainer.port, NULL, 0, WAIT_MS));
    assert_int_equal(trainer_process_ask(&trainer).stats.connections_held_off, 0);
    int64_t deadline = rft_deadline(3 * WAIT_MS);
    while (trainer_process_ask(&trainer).stats.connections_held_off == 0 &&
           rft_ms_until(deadline) > 0)
        shake_hands_once(&trainer);
    assert_int_equal(trainer_process_ask(&trainer).stats.connections_held_off, 1);
    int fd = -1;
    for (deadline = rft_deadline(2 * WAIT_MS); fd < 0 && rft_ms_until(deadline) > 0;)
        fd = zmtp_open(trainer.port, NULL, 0, 1000);
    assert_true(fd >= 0); /* the rate has made up for it */
    trainer_report report = trainer_process_ask(&trainer);
    assert_int_equal(report.stats.workers, 1);
    assert_int_equal(report.stats.workers_evicted, 0);
    close(fd);
    crew_stop(&member);
    assert_true(trainer_process_end(&trainer));
}

int main(void)
{
    static int keys = 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(half_open_connections_leave_descriptors_and_a_way_in),
        cmocka_unit_test_prestate(half_open_connections_leave_descriptors_and_a_way_in, &keys),
        cmocka_unit_test(strangers_after_their_handshake_are_few_and_do_not_stay),
        cmocka_unit_test(no_descriptor_at_all_costs_no_core_and_ends_by_itself),
        cmocka_unit_test(more_handshakes_than_workers_make_are_held_off),
        cmocka_unit_test(an_ipc_trainer_without_descriptors_goes_on_and_takes_workers_later),
        cmocka_unit_test(an_ipc_trainer_that_closes_or_dies_held_off_leaves_a_path_to_bind),
        cmocka_unit_test(a_gap_among_the_descriptors_does_not_open_the_listener),
        cmocka_unit_test(another_file_with_the_second_name_stays_and_is_refused),
    };
    return cmocka_run_group_tests_name("strangers", tests, NULL, NULL);
}
