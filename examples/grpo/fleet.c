/*
 * fleet: each worker is this very program, started anew with --worker. (A process that only forked
 * would share the trainer's threads and sockets, which no library survives.)
 */
#include "fleet.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "or_die.h"
#include "worker.h"

extern char **environ;

enum { GATHER_TIMEOUT_MS = 60000, REPLACEMENTS_MOST = 8 };

static void start_one(fleet *it, uint32_t index)
{
    int pair[2];
    char number[16];
    char seed[32];
    snprintf(number, sizeof number, "%u", index);
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)it->options->seed);
    char *arguments[] = {
        "grpo",   "--worker", number, "--endpoint", (char *)(uintptr_t)it->endpoint,
        "--seed", seed,       NULL};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
        die("socketpair: %s", strerror(errno));

    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pair[1], WORKER_SOCKET);
    int code = posix_spawn(&it->pids[index], "/proc/self/exe", &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (code != 0) die("worker %u could not be started: %s", index, strerror(code));
    close(pair[1]);
    it->sockets[index] = pair[0];
}

void fleet_start(fleet *it, const run_options *options, const char *endpoint)
{
    *it = (fleet){.options = options, .endpoint = endpoint, .count = options->workers};
    for (uint32_t i = 0; i < it->count; i++)
        start_one(it, i);
}

static void replace(fleet *it, uint32_t index)
{
    int how = 0;
    kill(it->pids[index], SIGKILL);
    waitpid(it->pids[index], &how, 0);
    close(it->sockets[index]);
    fprintf(stderr, "grpo: worker %u (pid %d) died (%s %d); a new one takes its place\n", index,
            (int)it->pids[index], WIFSIGNALED(how) ? "signal" : "status",
            WIFSIGNALED(how) ? WTERMSIG(how) : WEXITSTATUS(how));
    start_one(it, index);
}

uint32_t fleet_repair(fleet *it)
{
    uint32_t replaced = 0;
    for (uint32_t i = 0; i < it->count; i++) {
        struct pollfd socket = {.fd = it->sockets[i]};
        if (poll(&socket, 1, 0) <= 0 || (socket.revents & POLLHUP) == 0) continue;
        replace(it, i);
        replaced++;
    }
    return replaced;
}

/* False if the worker is gone before the whole batch has come. */
static bool read_batch(int socket, batch *out)
{
    char *at = (char *)out;
    for (size_t have = 0; have < sizeof *out;) {
        struct pollfd ready = {.fd = socket, .events = POLLIN};
        if (poll(&ready, 1, GATHER_TIMEOUT_MS) == 0) return false;
        ssize_t now = recv(socket, at + have, sizeof *out - have, 0);
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) return false;
        have += (size_t)now;
    }
    return true;
}

void fleet_gather(fleet *it, uint64_t version, batch *batches)
{
    for (uint32_t i = 0; i < it->count; i++) {
        uint32_t tries = 0;
        do { /* a batch of an older version was under way when its publish had to be repeated */
            while (!read_batch(it->sockets[i], &batches[i])) {
                if (++tries > REPLACEMENTS_MOST)
                    die("worker %u died %u times: giving up", i, tries);
                replace(it, i);
            }
        } while (batches[i].version < version);
        if (batches[i].version != version || batches[i].worker != i)
            die("worker %u sent a strange batch", i);
    }
}

void fleet_stop(fleet *it)
{
    for (uint32_t i = 0; i < it->count; i++)
        close(it->sockets[i]);
    for (uint32_t i = 0; i < it->count; i++)
        waitpid(it->pids[i], NULL, 0);
}
