/* Connections of strangers to the port: scanners, browsers, half a greeting, silence, many at once.
 * Nothing that they send reaches the trainer, none of them stays, and a worker with its key is
 * served meanwhile.
 */
#include <stdio.h>
#include <stdlib.h>

#include <poll.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/support/descriptors.h"
#include "tests/support/key_fixture.h"
#include "tests/support/rollout_threads.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "tests/support/trainer.h"
#include "tests/support/zmtp_client.h"

#define WAIT_MS   50000
#define STRANGERS 48u

typedef struct scene {
    key_fixture smith;
    test_trainer trainer;
    uint16_t port;
    char endpoint[64];
} scene;

static void scene_open(scene *play)
{
    play->smith = key_fixture_open();
    refit_config config = trainer_config();
    key_fixture_admit(&play->smith, "w0");
    key_fixture_equip_trainer(&play->smith, &config);
    trainer_open(&play->trainer, &config);
    (void)snprintf(play->endpoint, sizeof play->endpoint, "%s",
                   refit_publisher_endpoint(play->trainer.publisher));
    play->port = (uint16_t)atoi(strrchr(play->endpoint, ':') + 1);
}

static void scene_close(scene *play)
{
    trainer_close(&play->trainer);
    key_fixture_close(&play->smith);
}

static int knock(const scene *play)
{
    int fd = zmtp_connect(play->port, WAIT_MS);
    assert_true(fd >= 0);
    return fd;
}

/* The numbers of the trainer before the worker has left. */
static refit_stats publish_to_a_worker(scene *play, uint64_t version)
{
    refit_config own = quick_config();
    rollout_thread member;
    key_fixture_equip_worker(&play->smith, "w0", &own);
    rollouts_start(&member, play->endpoint, &own, ROLLOUT_ACCEPT);
    trainer_wait_workers(&play->trainer, 1);
    trainer_start(&play->trainer, TRAINER_PUBLISH, version);
    assert_ok(trainer_join(&play->trainer));
    (void)rollouts_wait(&member, version, 1);
    const refit_stats stats = trainer_stats(&play->trainer);
    rollouts_stop(&member);
    int64_t deadline = rft_deadline(WAIT_MS);
    while (trainer_stats(&play->trainer).workers > 0 && rft_ms_until(deadline) > 0)
        (void)poll(NULL, 0, 5);
    assert_int_equal(trainer_stats(&play->trainer).workers, 0);
    return stats;
}

/* ---- What they say */

static void say_random(int fd, uint64_t seed)
{
    unsigned char bytes[8192];
    seed += 1; /* not 0 */
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)seeded_next(&seed);
    zmtp_say(fd, bytes, sizeof bytes);
}

static void say_noise(int fd)
{
    say_random(fd, 1);
}

static void say_http(int fd)
{
    static const char text[] = "GET / HTTP/1.1\r\nHost: trainer\r\nUser-Agent: scan\r\n\r\n";
    zmtp_say(fd, text, sizeof text - 1);
}

static void say_tls(int fd)
{
    static const unsigned char hello[] = {0x16, 3, 1, 0, 0x2f, 1, 0, 0, 0x2b, 3, 3};
    unsigned char record[52] = {0};
    memcpy(record, hello, sizeof hello);
    zmtp_say(fd, record, sizeof record);
}

/* In plain text, all that a worker would say. */
static void say_ready_without_keys(int fd)
{
    zmtp_say_ready(fd, NULL, 0);
    say_random(fd, 7);
}

/* The right mechanism, then rubbish where its HELLO belongs; a length of 2^63 in front of it. */
static void say_curve_rubbish(int fd)
{
    static const unsigned char frame[] = "\x06\x7f\xff\xff\xff\xff\xff\xff\xff\x05HELLO";
    zmtp_greet(fd, "CURVE", 64);
    zmtp_say(fd, frame, sizeof frame - 1);
    say_random(fd, 9);
}

static void (*const sayings[])(int fd) = {say_noise, say_http, say_tls, say_ready_without_keys,
                                          say_curve_rubbish};

TEST(what_strangers_say_is_never_heard)
{
    scene play;
    scene_open(&play);
    int fds[8];
    for (uint32_t i = 0; i < 8; i++)
        fds[i] = knock(&play);
    for (uint32_t i = 0; i < COUNT_OF(sayings); i++)
        sayings[i](fds[i]);
    zmtp_greet(fds[5], "CURVE", 33); /* cut short, and then silence */
    zmtp_greet(fds[6], "PLAIN", 64);
    /* fds[7] says nothing at all */
    assert_true(zmtp_is_hung_up(fds[3], WAIT_MS));
    assert_true(zmtp_is_hung_up(fds[4], WAIT_MS));
    assert_true(zmtp_is_hung_up(fds[6], WAIT_MS));
    const refit_stats stats = publish_to_a_worker(&play, 1);
    assert_int_equal(stats.messages_refused, 0);
    assert_int_equal(stats.workers_evicted, 0);
    for (uint32_t i = 0; i < 8; i++)
        close(fds[i]);
    scene_close(&play);
}

/* One byte now and then would keep a connection open, if its handshake had no time limit. */
TEST(a_peer_that_does_not_finish_the_handshake_is_disconnected)
{
    scene play;
    scene_open(&play);
    int silent = knock(&play), slow = knock(&play);
    unsigned char greeting[64] = {0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0};
    bool gone = false;
    memcpy(greeting + 12, "CURVE", 5);
    for (uint32_t i = 0; i < sizeof greeting && !gone; i++) {
        struct pollfd item = {.fd = slow, .events = POLLRDHUP};
        zmtp_say(slow, &greeting[i], 1);
        gone = poll(&item, 1, 150) > 0;
    }
    assert_true(gone || zmtp_is_hung_up(slow, WAIT_MS));
    assert_true(zmtp_is_hung_up(silent, WAIT_MS));
    close(silent);
    close(slow);
    scene_close(&play);
}

TEST(many_at_once_leave_nothing)
{
    scene play;
    scene_open(&play);
    (void)publish_to_a_worker(&play, 1);
    int before = count_descriptors();
    int fds[STRANGERS];
    for (uint32_t i = 0; i < STRANGERS; i++) {
        fds[i] = knock(&play);
        if (i % 6 < COUNT_OF(sayings))
            sayings[i % 6](fds[i]);
        else
            zmtp_greet(fds[i], "CURVE", i % 64);
    }
    assert_int_equal(publish_to_a_worker(&play, 2).messages_refused, 0);
    for (uint32_t i = 0; i < STRANGERS; i++)
        close(fds[i]);
    int64_t deadline = rft_deadline(WAIT_MS);
    while (count_descriptors() > before && rft_ms_until(deadline) > 0)
        (void)poll(NULL, 0, 10);
    assert_true(count_descriptors() <= before);
    scene_close(&play);
}

/* Workers whose keys are not allowed, all at once, again and again: the others are served. */
TEST(many_unknown_keys_do_not_keep_a_worker_out)
{
    scene play;
    rollout_thread strangers[8];
    scene_open(&play);
    for (uint32_t i = 0; i < 8; i++) {
        char name[16];
        refit_config own = quick_config();
        (void)snprintf(name, sizeof name, "s%u", i);
        key_fixture_make(&play.smith, name);
        key_fixture_equip_worker(&play.smith, name, &own);
        rollouts_start(&strangers[i], play.endpoint, &own, ROLLOUT_ACCEPT);
    }
    (void)publish_to_a_worker(&play, 1);
    (void)publish_to_a_worker(&play, 2);
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(rollouts_count(&strangers[i], 1), 0);
        rollouts_stop(&strangers[i]);
    }
    assert_int_equal(trainer_stats(&play.trainer).messages_refused, 0);
    scene_close(&play);
}

int main(void)
{
    return test_run("curve_strangers");
}
