/* Connections of a worker to a peer that is not a trainer: the worker connects again, which ZeroMQ
 * does not do after a protocol error, and is told why there was no trainer. */
#include <stdio.h>

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <refit/advanced/query.h>
#include <refit/broadcast.h>

#include "base/clock.h"
#include "base/thread.h"
#include "net/channel.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

#define WAIT_MS 50000

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
    own_tcp(found.endpoint);
    *strrchr(found.endpoint, ':') = '\0';
    assert_int_equal(inet_pton(AF_INET, found.endpoint + strlen("tcp://"), &address.sin_addr), 1);
    found.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(found.fd >= 0);
    assert_int_equal(bind(found.fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(found.fd, 4), 0);
    assert_int_equal(getsockname(found.fd, (struct sockaddr *)&address, &room), 0);
    (void)sprintf(strchr(found.endpoint, '\0'), ":%u", ntohs(address.sin_port));
    return found;
}

static rft_channel *connect_to(const char *endpoint)
{
    refit_config config = quick_config();
    rft_channel *channel = NULL;
    assert_ok(rft_channel_connect(endpoint, &config, &channel, NULL));
    return channel;
}

/* Answers one connection with these bytes, reads until the other end hangs up, and is gone. */
static void answer_and_go(impostor *it, const void *bytes, size_t count)
{
    struct pollfd item = {.fd = it->fd, .events = POLLIN};
    char room[512];
    assert_int_equal(poll(&item, 1, WAIT_MS), 1);
    int fd = accept(it->fd, NULL, NULL);
    assert_true(fd >= 0);
    assert_int_equal(send(fd, bytes, count, MSG_NOSIGNAL), (ssize_t)count);
    item.fd = fd;
    while (poll(&item, 1, WAIT_MS) == 1 && recv(fd, room, sizeof room, 0) > 0)
        continue;
    struct linger at_once = {1, 0}; /* the port is free for the trainer */
    (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    close(fd);
    close(it->fd);
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
    assert_ok(rft_channel_bind(endpoint, &config, &trainer, NULL));
    do {
        status = rft_channel_send(worker, NULL, rft_view_text("hello"), NULL, NULL);
        if (status == REFIT_ERR_BUSY) rft_channel_poll(worker, -1, 20);
    } while (status == REFIT_ERR_BUSY && rft_ms_until(deadline) > 0);
    assert_ok(status);
    do {
        rft_channel_poll(trainer, -1, WAIT_MS);
        status = rft_channel_receive(trainer, &got, NULL);
    } while (status == REFIT_ERR_TIMEOUT && rft_ms_until(deadline) > 0);
    assert_ok(status);
    rft_channel_close(trainer);
}

/* ZMTP 3.0 with no mechanism, READY of a ROUTER, and a message of more bytes than any may have. */
static const char greeting[64] = "\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL";
static const char curve_greeting[64] = "\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE";
static const char ready[] = "\x04\x1b\x05READY\x0bSocket-Type\0\0\0\x06ROUTER";
static const char wrong_ready[] = "\x04\x0e\x05READXUUUUUUUU";
static const char endless[] = "\x02\x7f\xff\xff\xff\xff\xff\xff\xff";

typedef struct answer {
    const char *name;
    const char *greeting;
    rft_view parts[2];
    refit_status status; /* of the failure; REFIT_OK: none is told */
    const char *words;
} answer;

#define PART(text)                                                                                 \
    {                                                                                              \
        text, sizeof text - 1                                                                      \
    }

static const answer answers[] = {
    {"another mechanism", curve_greeting, {{NULL, 0}}, REFIT_ERR_SECURITY, "asks for keys"},
    {"a handshake that breaks the rules",
     greeting,
     {PART(wrong_ready)},
     REFIT_ERR_PEER,
     "handshake failed"},
    /* After a handshake that succeeded. */
    {"a connection that breaks the rules", greeting, {PART(ready), PART(endless)}, REFIT_OK, ""},
};

static size_t answer_bytes(const answer *it, char room[256])
{
    size_t count = sizeof greeting;
    memcpy(room, it->greeting, count);
    for (size_t i = 0; i < 2; i++) {
        if (it->parts[i].count > 0) memcpy(room + count, it->parts[i].data, it->parts[i].count);
        count += it->parts[i].count;
    }
    return count;
}

TEST(a_worker_outlives_what_answers_in_the_trainers_place)
{
    for (size_t i = 0; i < COUNT_OF(answers); i++) {
        const answer *it = &answers[i];
        char bytes[256];
        refit_error why = {0};
        impostor other = impostor_open();
        rft_channel *worker = connect_to(other.endpoint);
        answer_and_go(&other, bytes, answer_bytes(it, bytes));
        if (it->status != REFIT_OK) {
            refit_status status = failure_of(worker, &why);
            if (status != it->status || strstr(why.text, it->words) == NULL)
                fail_msg("%s: status %d: %s", it->name, status, why.text);
        }
        meets_its_trainer(worker, other.endpoint);
        rft_channel_close(worker);
    }
}

/* Accepts connections and hangs up, until `it` is closed. */
static void *hang_up(void *user)
{
    const impostor *it = user;
    for (int fd; (fd = accept(it->fd, NULL, NULL)) >= 0;)
        close(fd);
    return NULL;
}

/* As a trainer with keys may do; the reason cannot be known, so it is not a failure of its own. */
TEST(query_with_ended_handshake_is_told_keys_may_be_missing)
{
    refit_config config = quick_config();
    refit_query *query = NULL;
    refit_error why = {0};
    rft_thread thread;
    impostor other = impostor_open();
    bool told = false;
    assert_ok(rft_thread_start(&thread, "hanging-up", hang_up, &other, NULL));
    for (uint32_t timeout_ms = 250; !told && timeout_ms <= WAIT_MS; timeout_ms *= 4) {
        assert_int_equal(refit_query_open(other.endpoint, &config, timeout_ms, &query, &why),
                         REFIT_ERR_TIMEOUT);
        told = strstr(why.text, "if the trainer asks for keys, set security.key") != NULL;
    }
    (void)shutdown(other.fd, SHUT_RDWR);
    rft_thread_join(thread);
    close(other.fd);
    if (!told) fail_msg("%s", why.text);
}

int main(void)
{
    return test_run("handshake");
}
