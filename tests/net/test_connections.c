/* Connections of a real ROUTER, at times that the test makes up. */
#include <stdlib.h>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <zmq.h>

#include "base/clock.h"
#include "net/connections.h"
#include "net/socket.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"
#include "tests/support/zmtp_client.h"

#define WAIT_MS 50000
#define STAY_MS 20000u /* ten times the silence of scene_open */

typedef struct scene {
    void *context, *router;
    rft_connections *watched;
    uint16_t port;
    int64_t now;
} scene;

static void scene_open(scene *play)
{
    char endpoint[128];
    size_t room = sizeof endpoint;
    const int none = 0;
    refit_config config = quick_config();
    config.broadcast_heartbeat_timeout_ms = 2000;
    memset(play, 0, sizeof *play);
    assert_ok(rft_context_acquire(&play->context, NULL));
    play->router = rft_context_router(play->context);
    assert_non_null(play->router);
    assert_int_equal(zmq_setsockopt(play->router, ZMQ_LINGER, &none, sizeof none), 0);
    assert_ok(
        rft_connections_open(play->context, play->router, NULL, &config, &play->watched, NULL));
    assert_int_equal(zmq_bind(play->router, "tcp://127.0.0.1:*"), 0);
    assert_int_equal(zmq_getsockopt(play->router, ZMQ_LAST_ENDPOINT, endpoint, &room), 0);
    play->port = (uint16_t)atoi(strrchr(endpoint, ':') + 1);
    play->now = rft_now();
    rft_connections_tend(play->watched, play->now);
}

static void scene_close(scene *play)
{
    rft_connections_close(play->watched);
    zmq_close(play->router);
    rft_context_release(play->context);
}

static rft_connection_counts look(scene *play)
{
    rft_connections_tend(play->watched, play->now);
    return rft_connections_count(play->watched);
}

static void wait_unclaimed(scene *play, uint64_t count)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    while (look(play).unclaimed != count && rft_ms_until(deadline) > 0)
        (void)poll(NULL, 0, 2);
    assert_int_equal(look(play).unclaimed, count);
}

static void pass(scene *play, uint32_t ms)
{
    play->now = rft_after_ms(play->now, ms);
}

/* The descriptor that ZeroMQ has for the other end of this one. */
static int other_end(int fd)
{
    struct sockaddr_in ours = {0}, theirs = {0};
    socklen_t room = sizeof ours;
    assert_int_equal(getsockname(fd, (struct sockaddr *)&ours, &room), 0);
    for (int other = 0; other < 1024; other++) {
        room = sizeof theirs;
        if (getpeername(other, (struct sockaddr *)&theirs, &room) == 0 &&
            theirs.sin_family == AF_INET && theirs.sin_port == ours.sin_port)
            return other;
    }
    fail_msg("ZeroMQ has no such connection");
    return -1;
}

static int stranger(scene *play)
{
    int fd = zmtp_connect(play->port, WAIT_MS);
    assert_true(fd >= 0);
    return fd;
}

TEST(a_connection_that_is_not_claimed_is_ended_in_time)
{
    scene play;
    scene_open(&play);
    int fd = stranger(&play);
    wait_unclaimed(&play, 1);
    assert_true(rft_connections_tend_at(play.watched) <= rft_after_ms(play.now, STAY_MS));
    pass(&play, STAY_MS - 1);
    assert_int_equal(look(&play).ended, 0);
    pass(&play, 1);
    assert_int_equal(look(&play).ended, 1);
    assert_true(zmtp_is_hung_up(fd, WAIT_MS));
    close(fd);
    scene_close(&play);
}

TEST(a_worker_that_falls_silent_becomes_a_stranger)
{
    scene play;
    scene_open(&play);
    int fd = stranger(&play);
    wait_unclaimed(&play, 1);
    rft_connections_claim(play.watched, other_end(fd), play.now);
    assert_int_equal(look(&play).unclaimed, 0);
    pass(&play, STAY_MS - 1);
    rft_connections_claim(play.watched, other_end(fd), play.now);
    pass(&play, STAY_MS - 1);
    assert_int_equal(look(&play).unclaimed, 0);
    pass(&play, 1);
    assert_int_equal(look(&play).unclaimed, 1);
    assert_int_equal(look(&play).ended, 0); /* it may still speak */
    rft_connections_claim(play.watched, other_end(fd), play.now);
    assert_int_equal(look(&play).unclaimed, 0);
    pass(&play, STAY_MS);
    assert_int_equal(look(&play).unclaimed, 1);
    pass(&play, STAY_MS);
    assert_int_equal(look(&play).ended, 1);
    close(fd);
    scene_close(&play);
}

/* 256 parts of 255 bytes, of which none is the last. */
static void say_parts(int fd)
{
    unsigned char parts[256][257] = {{0}};
    for (size_t i = 0; i < COUNT_OF(parts); i++) {
        parts[i][0] = 1; /* more follow */
        parts[i][1] = 255;
    }
    zmtp_say(fd, parts, sizeof parts);
}

/* What was sent so far has come, whether or not it makes messages. */
TEST(a_message_without_an_end_costs_its_sender_the_connection)
{
    scene play;
    scene_open(&play);
    int fds[2];
    for (int i = 0; i < 2; i++)
        fds[i] = zmtp_open(play.port, NULL, 0, WAIT_MS);
    wait_unclaimed(&play, 2);
    int64_t deadline = rft_deadline(WAIT_MS);
    while (look(&play).ended == 0 && rft_ms_until(deadline) > 0) {
        for (int i = 0; i < 2; i++)
            say_parts(fds[i]);
        rft_connections_receive(play.watched, other_end(fds[1])); /* as if they had made messages */
        pass(&play, 100);
    }
    assert_true(zmtp_is_hung_up(fds[0], WAIT_MS));
    assert_int_equal(look(&play).ended, 1);
    for (int i = 0; i < 2; i++)
        close(fds[i]);
    scene_close(&play);
}

TEST(the_oldest_makes_room)
{
    scene play;
    int fds[66];
    scene_open(&play);
    for (int i = 0; i < 66; i++) {
        fds[i] = stranger(&play);
        if (i == 0) wait_unclaimed(&play, 1);
        if (i == 0) rft_connections_claim(play.watched, other_end(fds[0]), play.now);
        if (i > 0 && i <= 64) wait_unclaimed(&play, (uint64_t)i);
    }
    int64_t deadline = rft_deadline(WAIT_MS);
    while (look(&play).ended == 0 && rft_ms_until(deadline) > 0)
        (void)poll(NULL, 0, 2);
    assert_int_equal(look(&play).ended, 1);
    assert_true(zmtp_is_hung_up(fds[1], WAIT_MS));
    assert_int_equal(look(&play).unclaimed, 64);
    for (int i = 0; i < 66; i++)
        close(fds[i]);
    scene_close(&play);
}

/* ZeroMQ's descriptor becomes another socket, or a file: as if it had been closed and its number
 * been given out again, and nothing of it been told yet. */
TEST(what_else_has_its_number_is_left_alone)
{
    scene play;
    int pair[2];
    char byte = 0;
    scene_open(&play);
    int fd = stranger(&play);
    wait_unclaimed(&play, 1);
    int number = other_end(fd);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    int kept = fcntl(number, F_DUPFD_CLOEXEC, 0);
    assert_true(kept >= 0);
    assert_int_equal(dup2(pair[0], number), number);
    pass(&play, STAY_MS);
    assert_int_equal(look(&play).ended, 0);
    assert_int_equal(look(&play).unclaimed, 0);
    assert_int_equal(send(pair[1], "x", 1, MSG_NOSIGNAL), 1);
    assert_int_equal(recv(pair[0], &byte, 1, MSG_DONTWAIT), 1);
    assert_int_equal(dup2(kept, number), number);
    close(kept);
    close(fd);
    scene_close(&play);
    close(pair[0]);
    close(pair[1]);
}

TEST(a_connection_that_ends_is_forgotten)
{
    scene play;
    scene_open(&play);
    int fd = stranger(&play);
    wait_unclaimed(&play, 1);
    rft_connections_claim(play.watched, -1, play.now);
    rft_connections_claim(play.watched, 1 << 20, play.now);
    close(fd);
    wait_unclaimed(&play, 0);
    assert_int_equal(look(&play).ended, 0);
    assert_true(rft_connections_tend_at(play.watched) == INT64_MAX);
    scene_close(&play);
}

int main(void)
{
    return test_run("connections");
}
