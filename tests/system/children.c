/* Child processes: two pipes each. */
#include "children.h"

#include <stdio.h>
#include <stdlib.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/support/test.h"

#define WAIT_MS 90000

/* ---- Processes */

static void become_child(const int in[2], const int out[2])
{
    dup2(in[0], STDIN_FILENO);
    dup2(out[1], STDOUT_FILENO);
    close(in[1]);
    close(out[0]);
    execl(CHILD_PATH, CHILD_PATH, (char *)NULL);
    _exit(127);
}

void child_start(child *one)
{
    int in[2], out[2];
    memset(one, 0, sizeof *one);
    assert_int_equal(pipe2(in, O_CLOEXEC), 0);
    assert_int_equal(pipe2(out, O_CLOEXEC), 0);
    one->pid = fork();
    assert_true(one->pid >= 0);
    if (one->pid == 0) become_child(in, out);
    close(in[0]);
    close(out[1]);
    one->to = in[1];
    one->from = out[0];
}

static int bury(child *one)
{
    int status = 0;
    if (one->to >= 0) close(one->to);
    while (waitpid(one->pid, &status, 0) < 0 && errno == EINTR) {
    }
    close(one->from);
    one->pid = 0;
    return status;
}

void child_end(child *one)
{
    if (one->pid == 0) return;
    close(one->to);
    one->to = -1;
    /* Its standard output ends when it does. */
    struct pollfd item = {.fd = one->from, .events = POLLIN};
    char rest[256];
    do {
        if (poll(&item, 1, WAIT_MS) <= 0) fail_msg("a process does not leave");
    } while (read(one->from, rest, sizeof rest) > 0);
    int status = bury(one);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        fail_msg("a process ended with status %#x", (unsigned)status);
    }
}

void child_kill(child *one)
{
    assert_int_equal(kill(one->pid, SIGKILL), 0);
    (void)bury(one);
}

void child_stop(child *one)
{
    int status;
    assert_int_equal(kill(one->pid, SIGSTOP), 0);
    assert_int_equal(waitpid(one->pid, &status, WUNTRACED), one->pid);
    assert_true(WIFSTOPPED(status));
    one->stopped = true;
}

void child_continue(child *one)
{
    assert_int_equal(kill(one->pid, SIGCONT), 0);
    one->stopped = false;
}

/* ---- Commands */

static void say(child *one, const char *format, va_list arguments)
{
    char line[512];
    int count = vsnprintf(line, sizeof line - 1, format, arguments);
    line[count++] = '\n';
    assert_int_equal(write(one->to, line, (size_t)count), count);
}

void child_say(child *one, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say(one, format, arguments);
    va_end(arguments);
}

bool child_has_answer(child *one, int timeout_ms)
{
    struct pollfd item = {.fd = one->from, .events = POLLIN};
    return poll(&item, 1, timeout_ms) == 1;
}

const char *child_hear(child *one)
{
    size_t count = 0;
    do {
        if (!child_has_answer(one, WAIT_MS)) fail_msg("a process does not answer");
        ssize_t got = read(one->from, one->answer + count, 1);
        if (got != 1) fail_msg("a process is gone");
        count++;
    } while (one->answer[count - 1] != '\n' && count < sizeof one->answer);
    one->answer[count - 1] = '\0';
    return one->answer;
}

static bool is_ok(const child *one)
{
    return strncmp(one->answer, "OK ", 3) == 0;
}

const char *child_ask(child *one, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    say(one, format, arguments);
    va_end(arguments);
    child_hear(one);
    if (!is_ok(one)) fail_msg("'%s' was answered: %s", format, one->answer);
    return one->answer + 3;
}

/* ---- Workers */

void worker_open(child *worker, const char *endpoint, bool shm)
{
    child_start(worker);
    (void)child_ask(worker, "worker %s %s", endpoint, shm ? "require" : "off");
}

void worker_await(child *worker, const char *state)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    size_t length = strlen(state);
    for (;;) {
        const char *words = child_ask(worker, "describe");
        if (strncmp(words, state, length) == 0 && words[length] == ' ') return;
        if (rft_ms_until(deadline) == 0) fail_msg("a worker is '%s', not %s", words, state);
        (void)poll(NULL, 0, 2); /* another process changes it, without an event */
    }
}

bool worker_take(child *worker, int timeout_ms)
{
    child_say(worker, "next %d", timeout_ms);
    child_hear(worker);
    if (strncmp(worker->answer, "ERR_TIMEOUT ", 12) == 0) return false;
    if (!is_ok(worker)) fail_msg("next was answered: %s", worker->answer);
    char *end;
    memcpy(worker->digest, worker->answer + 3, 16);
    worker->version = strtoull(worker->answer + 20, &end, 10);
    worker->open_update = true;
    worker->accepted = false;
    return true;
}

bool worker_accept(child *worker)
{
    child_say(worker, "accept");
    child_hear(worker);
    worker->accepted = is_ok(worker);
    if (!worker->accepted && strncmp(worker->answer, "ERR_STALE ", 10) != 0) {
        fail_msg("accept was answered: %s", worker->answer);
    }
    (void)child_ask(worker, "release");
    worker->open_update = false;
    return worker->accepted;
}

static void serve(child *worker, int timeout_ms)
{
    if (!worker->open_update && !worker_take(worker, timeout_ms)) return;
    (void)worker_accept(worker);
}

void worker_follow(child *worker, uint64_t version, const char *digest)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    while (!worker->accepted || worker->version != version || strcmp(worker->digest, digest) != 0) {
        if (rft_ms_until(deadline) == 0) {
            fail_msg("a worker has version %llu %s, not %llu %s",
                     (unsigned long long)worker->version, worker->digest,
                     (unsigned long long)version, digest);
        }
        serve(worker, 1000);
    }
}

/* ---- Trainers */

void trainer_open(child *trainer, char *endpoint, bool shm, unsigned slots, const char *setting)
{
    child_start(trainer);
    const char *found = child_ask(trainer, "trainer %s %s %u %s", endpoint, shm ? "require" : "off",
                                  slots, setting);
    snprintf(endpoint, 128, "%s", found);
}

void trainer_write(child *trainer, unsigned seed)
{
    (void)child_ask(trainer, "begin");
    snprintf(trainer->digest, sizeof trainer->digest, "%s",
             child_ask(trainer, "write %u %s", seed, trainer->lends ? "lend" : "-"));
}

bool trainer_finish(child *trainer, child *const workers[], unsigned count)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    while (!child_has_answer(trainer, 5)) {
        if (rft_ms_until(deadline) == 0) fail_msg("a trainer does not answer");
        for (unsigned i = 0; i < count; i++) {
            if (workers[i] != NULL && !workers[i]->stopped) serve(workers[i], 5);
        }
    }
    child_hear(trainer);
    return is_ok(trainer);
}

uint64_t trainer_version(child *trainer)
{
    return strtoull(child_ask(trainer, "version"), NULL, 10);
}

void trainer_publish(child *trainer, unsigned seed, child *const workers[], unsigned count)
{
    bool committed = false;
    for (unsigned i = 0; i < 5 && !committed; i++) {
        (void)child_ask(trainer, "wait %u %d", count, WAIT_MS);
        trainer_write(trainer, seed);
        child_say(trainer, "commit");
        committed = trainer_finish(trainer, workers, count);
    }
    if (!committed) fail_msg("commit was answered: %s", trainer->answer);
    uint64_t version = trainer_version(trainer);
    for (unsigned i = 0; i < count; i++)
        worker_follow(workers[i], version, trainer->digest);
}

/* ---- Shared memory */

unsigned process_segments(pid_t pid)
{
    char path[64], line[512];
    unsigned count = 0;
    snprintf(path, sizeof path, "/proc/%ld/maps", (long)pid);
    FILE *maps = fopen(path, "r");
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps) != NULL) {
        assert_null(strstr(line, "/dev/shm/refit-")); /* a killed process would leave a file */
        count += strstr(line, "/memfd:refit ") != NULL;
    }
    fclose(maps);
    return count;
}
