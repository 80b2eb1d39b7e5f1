/* A process without a descriptor or a thread to spare: ZeroMQ does not end it. */
#include <stdio.h>
#include <stdlib.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "net/channel.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

#define LIMIT  200
#define PEERS  8
#define ROUNDS 20

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *user);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *user);

static int threads_left = -1; /* -1: any number */

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                          void *user)
{
    if (threads_left == 0) return EAGAIN;
    if (threads_left > 0) threads_left--;
    return __real_pthread_create(thread, attributes, run, user);
}

typedef struct hoard {
    int fds[LIMIT];
    int count;
} hoard;

static void hoard_all(hoard *to, int but)
{
    to->count = 0;
    for (int fd = dup(0); fd >= 0; fd = dup(0))
        to->fds[to->count++] = fd;
    while (but-- > 0)
        close(to->fds[--to->count]);
}

static void hoard_end(hoard *of)
{
    while (of->count > 0)
        close(of->fds[--of->count]);
}

static void limit_descriptors(void)
{
    struct rlimit limit;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = LIMIT;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

/* Its sockets were made before, so that it needs no descriptor. */
static void connect_peers(const char *endpoint, const int fds[PEERS])
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, endpoint + strlen("ipc://"));
    for (int i = 0; i < PEERS; i++)
        assert_int_equal(connect(fds[i], (struct sockaddr *)&address, sizeof address), 0);
}

static bool hears(rft_channel *channel)
{
    rft_envelope heard;
    int64_t deadline = rft_deadline(TIMEOUT_MS);
    while (rft_channel_receive(channel, &heard, NULL) != REFIT_OK) {
        if (rft_ms_until(deadline) <= 0) return false;
        rft_channel_poll(channel, -1, 20);
    }
    return true;
}

/* A new worker is heard once there is room again. */
static void speak(const char *endpoint, const refit_config *config, rft_channel *to)
{
    const rft_view word = {(const unsigned char *)"hello", 5};
    rft_channel *worker;
    int64_t deadline = rft_deadline(TIMEOUT_MS);
    assert_ok(rft_channel_connect(endpoint, config, &worker, NULL));
    while (rft_channel_send(worker, NULL, word, NULL, NULL) != REFIT_OK) {
        assert_true(rft_ms_until(deadline) > 0);
        rft_channel_poll(worker, -1, 5);
        rft_channel_poll(to, -1, 5);
    }
    assert_true(hears(to));
    rft_channel_close(worker);
}

TEST(workers_do_not_end_trainer_that_is_out_of_descriptors)
{
    refit_config config = quick_config();
    int rounds = getenv("TEST_ROUNDS") == NULL ? ROUNDS : atoi(getenv("TEST_ROUNDS"));
    char endpoint[64];
    snprintf(endpoint, sizeof endpoint, "ipc:///tmp/refit-shortage-%ld", (long)getpid());
    limit_descriptors();
    for (int round = 0; round < rounds; round++) {
        int peers[PEERS];
        hoard files;
        rft_channel *channel;
        assert_ok(rft_channel_bind(endpoint, &config, &channel, NULL));
        for (int i = 0; i < PEERS; i++)
            peers[i] = socket(AF_UNIX, SOCK_STREAM, 0);
        hoard_all(&files, round % 4);
        connect_peers(endpoint, peers);
        for (int i = 0; i < 3; i++)
            rft_channel_poll(channel, -1, 2);
        hoard_end(&files);
        for (int i = 0; i < PEERS; i++)
            close(peers[i]);
        if (round + 1 == rounds) speak(endpoint, &config, channel);
        rft_channel_close(channel);
    }
}

/* Before the first: with it the context and its threads are there. */
static refit_status open_ends(const refit_config *config, refit_error *error)
{
    rft_channel *trainer = NULL, *worker = NULL;
    refit_status status = rft_channel_bind("user://*", config, &trainer, error);
    if (status == REFIT_OK)
        status = rft_channel_connect(rft_channel_endpoint(trainer), config, &worker, error);
    if (status == REFIT_OK) rft_channel_close(worker);
    if (trainer != NULL) rft_channel_close(trainer);
    return status;
}

TEST(ends_that_open_with_hardly_a_descriptor_fail_with_an_error)
{
    refit_config config = quick_config();
    hoard files;
    refit_error error;
    refit_status status = REFIT_ERR_SYSTEM;
    limit_descriptors();
    for (int left = 0; status != REFIT_OK; left++) {
        hoard_all(&files, left);
        status = open_ends(&config, &error);
        hoard_end(&files);
        assert_true(left < LIMIT / 2);
        if (status == REFIT_OK) break;
        assert_int_equal(status, left < 1 ? status : REFIT_ERR_SYSTEM);
        if (left == 8) assert_says(&error, "ulimit -n");
    }
}

/* With a context that is there, a second publisher is short of what binding takes alone. */
TEST(trainer_binding_port_with_few_descriptors_fails_with_error)
{
    refit_config config = quick_config();
    rft_channel *first, *channel;
    refit_status status = REFIT_ERR_SYSTEM;
    hoard files;
    limit_descriptors();
    assert_ok(rft_channel_bind("user://*", &config, &first, NULL));
    for (int left = 0; status != REFIT_OK; left++) {
        hoard_all(&files, left);
        status = rft_channel_bind("tcp://127.0.0.1:*", &config, &channel, NULL);
        hoard_end(&files);
        assert_true(left < LIMIT / 2);
        if (status != REFIT_OK) assert_int_equal(status, REFIT_ERR_SYSTEM);
    }
    rft_channel_close(channel);
    rft_channel_close(first);
}

TEST(ends_that_open_where_threads_cannot_start_fail_with_an_error)
{
    refit_config config = quick_config();
    refit_error error;
    for (int left = 0; left < 2; left++) {
        threads_left = left;
        assert_int_equal(open_ends(&config, &error), REFIT_ERR_SYSTEM);
        assert_says(&error, "pids.max");
    }
    threads_left = -1;
    assert_ok(open_ends(&config, NULL));
}

int main(void)
{
    return test_run("shortage");
}
