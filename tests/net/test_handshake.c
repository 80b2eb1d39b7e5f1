/* A worker's connection that comes to nothing: whatever answered, the worker connects anew, and is
 * told why there was nobody. ZeroMQ alone gives up for good on who breaks its rules. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "net/channel.h"
#include "tests/support/quick_config.h"

#define WAIT_MS 20000

/* What answers in the trainer's place. */
typedef struct impostor {
    int fd;
    char endpoint[64];
} impostor;

static impostor impostor_open(void)
{
    impostor found;
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t room = sizeof address;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    found.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(found.fd >= 0);
    assert_int_equal(bind(found.fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(found.fd, 4), 0);
    assert_int_equal(getsockname(found.fd, (struct sockaddr *)&address, &room), 0);
    (void)snprintf(found.endpoint, sizeof found.endpoint, "tcp://127.0.0.1:%u",
                   ntohs(address.sin_port));
    return found;
}

static rft_channel *connect_to(const char *endpoint)
{
    refit_config config = quick_config();
    rft_channel *channel = NULL;
    assert_int_equal(rft_channel_connect(endpoint, &config, &channel, NULL), REFIT_OK);
    return channel;
}

/* Answers one connection with these bytes, reads until the other end hangs up, and is gone. */
static void answer_and_go(impostor *who, const void *bytes, size_t count)
{
    struct pollfd item = {.fd = who->fd, .events = POLLIN};
    char room[512];
    assert_int_equal(poll(&item, 1, WAIT_MS), 1);
    int fd = accept(who->fd, NULL, NULL);
    assert_true(fd >= 0);
    assert_int_equal(send(fd, bytes, count, MSG_NOSIGNAL), (ssize_t)count);
    item.fd = fd;
    while (poll(&item, 1, WAIT_MS) == 1 && recv(fd, room, sizeof room, 0) > 0)
        continue;
    struct linger at_once = {1, 0}; /* the port is free for the trainer */
    (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    close(fd);
    close(who->fd);
}

static refit_status failure_of(rft_channel *channel, refit_error *why)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    refit_status status;
    while ((status = rft_channel_take_failure(channel, why)) == REFIT_OK &&
           rft_ms_until(deadline) > 0) {
        rft_channel_poll(channel, -1, 50);
    }
    return status;
}

/* The trainer comes to the same port, and hears the worker. */
static void meets_its_trainer(rft_channel *worker, const char *endpoint)
{
    refit_config config = quick_config();
    rft_channel *trainer = NULL;
    rft_envelope got;
    int64_t deadline = rft_deadline(WAIT_MS);
    refit_status status;
    assert_int_equal(rft_channel_bind(endpoint, &config, &trainer, NULL), REFIT_OK);
    do {
        status = rft_channel_send(worker, NULL, rft_view_text("hello"), NULL, NULL);
        if (status == REFIT_ERR_BUSY) rft_channel_poll(worker, -1, 20);
    } while (status == REFIT_ERR_BUSY && rft_ms_until(deadline) > 0);
    assert_int_equal(status, REFIT_OK);
    rft_channel_poll(trainer, -1, WAIT_MS);
    assert_int_equal(rft_channel_receive(trainer, &got, NULL), REFIT_OK);
    rft_channel_close(trainer);
}

static void a_worker_outlives(const void *bytes, size_t count, bool told)
{
    impostor who = impostor_open();
    rft_channel *worker = connect_to(who.endpoint);
    refit_error why;
    answer_and_go(&who, bytes, count);
    if (told) {
        assert_int_equal(failure_of(worker, &why), REFIT_ERR_PEER);
        assert_non_null(strstr(why.text, "handshake failed"));
    }
    meets_its_trainer(worker, who.endpoint);
    rft_channel_close(worker);
}

/* ZMTP 3.0 with no mechanism, READY of a ROUTER, and then what no end may say. */
static const char greeting[] =
    "\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
    "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
static const char ready[] = "\x04\x1b\x05READY\x0bSocket-Type\0\0\0\x06ROUTER";
static const char endless[] = "\x02\x7f\xff\xff\xff\xff\xff\xff\xff";

static void another_mechanism(void **state)
{
    (void)state;
    char other[64];
    refit_error why;
    impostor who = impostor_open();
    rft_channel *worker = connect_to(who.endpoint);
    memcpy(other, greeting, sizeof other);
    memcpy(other + 12, "CURVE", 5);
    answer_and_go(&who, other, sizeof other);
    assert_int_equal(failure_of(worker, &why), REFIT_ERR_SECURITY);
    assert_non_null(strstr(why.text, "asks for keys"));
    meets_its_trainer(worker, who.endpoint);
    rft_channel_close(worker);
}

static void a_handshake_that_breaks_the_rules(void **state)
{
    (void)state;
    char bytes[64 + 16];
    memcpy(bytes, greeting, 64);
    memset(bytes + 64, 0x55, 16);
    memcpy(bytes + 64, "\x04\x0e\x05READX", 8);
    a_worker_outlives(bytes, sizeof bytes, true);
}

/* After a handshake that was all right: there is nothing to be told then. */
static void a_connection_that_breaks_the_rules(void **state)
{
    (void)state;
    char bytes[64 + sizeof ready + sizeof endless];
    memcpy(bytes, greeting, 64);
    memcpy(bytes + 64, ready, sizeof ready - 1);
    memcpy(bytes + 64 + sizeof ready - 1, endless, sizeof endless - 1);
    a_worker_outlives(bytes, 64 + sizeof ready + sizeof endless - 2, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(another_mechanism),
        cmocka_unit_test(a_handshake_that_breaks_the_rules),
        cmocka_unit_test(a_connection_that_breaks_the_rules),
    };
    return cmocka_run_group_tests_name("handshake", tests, NULL, NULL);
}
