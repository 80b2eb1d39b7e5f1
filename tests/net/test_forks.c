/* A forked child that goes on keeps no endpoint, connection or lock of its parent taken. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/forks.h"
#include "base/thread.h"
#include "net/channel.h"
#include "net/socket.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

#define CHILDREN 20
#define CHILD_S  20u
#define FILES    8

typedef struct lasting {
    pid_t pid;
    int line; /* it ends when this is closed */
} lasting;

static lasting child_that_lasts(void)
{
    int line[2];
    char none;
    assert_int_equal(pipe2(line, O_CLOEXEC), 0);
    lasting child = {.pid = fork(), .line = line[1]};
    if (child.pid == 0) {
        close(line[1]);
        _exit((int)read(line[0], &none, 1));
    }
    close(line[0]);
    return child;
}

static void child_end(lasting *child)
{
    close(child->line);
    assert_child_succeeds(child->pid);
}

/* The port that was found stands in it. */
typedef struct found {
    char endpoint[128];
} found;

static rft_channel *bind_at(const char *endpoint, found *at)
{
    refit_config config = quick_config();
    rft_channel *channel;
    assert_ok(rft_channel_bind(endpoint, &config, &channel, NULL));
    (void)snprintf(at->endpoint, sizeof at->endpoint, "%s", rft_channel_endpoint(channel));
    return channel;
}

static void name_endpoint(found *out)
{
    (void)snprintf(out->endpoint, sizeof out->endpoint, "ipc:///tmp/refit-forks-%ld",
                   (long)getpid());
}

static void close_after_a_child(const char *endpoint)
{
    found at;
    rft_channel *channel = bind_at(endpoint, &at);
    lasting child = child_that_lasts();
    rft_channel_close(channel);
    rft_channel_close(bind_at(at.endpoint, &at));
    child_end(&child);
}

TEST(a_closed_endpoint_is_free_after_a_child)
{
    found own;
    name_endpoint(&own);
    close_after_a_child(own.endpoint);
    close_after_a_child("user://*");
    close_after_a_child("tcp://127.0.0.1:*");
}

/* A trainer that forks a child and is killed; the child lives until `line` is closed. */
static void trainer_with_child(const char *endpoint, int told, int line)
{
    found at;
    char none;
    (void)bind_at(endpoint, &at);
    if (fork() == 0) {
        (void)!write(told, &at, sizeof at); /* it has closed its copies */
        close(told);
        _exit((int)read(line, &none, 1));
    }
    child_waits();
}

static void kill_before_a_child(const char *endpoint)
{
    int told[2], line[2], how;
    found at;
    assert_int_equal(pipe2(told, O_CLOEXEC), 0);
    assert_int_equal(pipe2(line, O_CLOEXEC), 0);
    pid_t trainer = fork();
    if (trainer == 0) {
        close(line[1]);
        trainer_with_child(endpoint, told[1], line[0]);
    }
    assert_int_equal(read(told[0], &at, sizeof at), sizeof at);
    assert_int_equal(kill(trainer, SIGKILL), 0);
    assert_int_equal(waitpid(trainer, &how, 0), trainer);
    rft_channel_close(bind_at(at.endpoint, &at));
    for (int i = 0; i < 2; i++) {
        close(told[i]);
        close(line[i]);
    }
}

TEST(the_endpoint_of_a_killed_trainer_is_free_after_its_child)
{
    found own;
    name_endpoint(&own);
    kill_before_a_child(own.endpoint);
    kill_before_a_child("tcp://127.0.0.1:*");
}

TEST(a_number_that_was_used_again_is_left_to_the_child)
{
    int kept = dup(0);
    rft_forks_keep(kept);
    assert_int_equal(close(kept), 0);
    int other = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(other, kept);
    pid_t child = fork();
    if (child == 0) _exit(fcntl(other, F_GETFD) >= 0 ? 0 : 1);
    assert_child_succeeds(child);
    rft_forks_keep(other);
    child = fork();
    if (child == 0) _exit(fcntl(other, F_GETFD) >= 0 ? 1 : 0);
    assert_child_succeeds(child);
    rft_forks_close(other);
    rft_forks_close(-1);
}

/* Between two looks of the trainer a connection came and went, and files got its number. */
TEST(child_keeps_files_that_reuse_number_of_closed_connection)
{
    found at;
    int files[FILES];
    char greeting[64];
    struct sockaddr_in address = {.sin_family = AF_INET};
    rft_channel *channel = bind_at("tcp://127.0.0.1:*", &at);
    int peer = socket(AF_INET, SOCK_STREAM, 0);
    address.sin_port = htons((uint16_t)atoi(strrchr(at.endpoint, ':') + 1));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_equal(connect(peer, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(shutdown(peer, SHUT_WR), 0);
    while (recv(peer, greeting, sizeof greeting, 0) > 0) /* until ZeroMQ has closed it, too */
        continue;
    assert_int_equal(close(peer), 0);
    for (int i = 0; i < FILES; i++)
        files[i] = dup(0);
    rft_channel_poll(channel, -1, 50);
    pid_t child = fork();
    if (child == 0) {
        int lost = 0;
        for (int i = 0; i < FILES; i++)
            lost += fcntl(files[i], F_GETFD) < 0;
        _exit(lost);
    }
    assert_child_succeeds(child);
    for (int i = 0; i < FILES; i++)
        close(files[i]);
    rft_channel_close(channel);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) /* as in test_zap_fork.c */

static void *open_again_and_again(void *user)
{
    void *context;
    atomic_bool *ends = user;
    while (!atomic_load(ends))
        if (rft_context_acquire(&context, NULL) == REFIT_OK) rft_context_release(context);
    return NULL;
}

/* The alarm ends a child that waits for a lock of a thread that it does not have. */
TEST(child_opens_context_while_parent_thread_was_opening_one)
{
    rft_thread thread;
    atomic_bool ends;
    void *context;
    atomic_init(&ends, false);
    assert_ok(rft_thread_start(&thread, "opens", open_again_and_again, &ends, NULL));
    for (int i = 0; i < CHILDREN; i++) {
        pid_t child = fork();
        if (child == 0) {
            (void)alarm(CHILD_S);
            if (rft_context_acquire(&context, NULL) != REFIT_OK) _exit(1);
            rft_context_release(context);
            _exit(0);
        }
        assert_child_succeeds(child);
    }
    atomic_store(&ends, true);
    rft_thread_join(thread);
}

#endif

int main(void)
{
    return test_run("forks");
}
