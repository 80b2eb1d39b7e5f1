/* Forked without exec: the conductor has one thread and has opened nothing of refit's. */
#include "processes.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

#define DESCRIPTORS_MOST 1024

static bool is_kept(int fd, int line, const int *keep)
{
    if (fd <= STDERR_FILENO || fd == line) return true;
    for (; keep != NULL && *keep >= 0; keep++) {
        if (fd == *keep) return true;
    }
    return false;
}

static void become_process(process_fn run, const actor_part *part, int line, const int *keep)
{
    actor_part own = *part;
    own.line = line;
    for (int fd = 0; fd < DESCRIPTORS_MOST; fd++) {
        if (!is_kept(fd, line, keep)) close(fd);
    }
    int status = run(&own);
#if defined(__SANITIZE_ADDRESS__)
    if (status == 0 && __lsan_do_recoverable_leak_check() != 0)
        status = 1; /* _exit looks for none */
#endif
    _exit(status);
}

bool process_start(process *one, process_fn run, const actor_part *part, const int *keep)
{
    int lines[2];
    pid_t parent = getpid();
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, lines) != 0) return false;
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0) return false;
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        become_process(run, part, lines[1], keep);
    }
    close(lines[1]);
    *one = (process){.pid = pid, .line = lines[0]};
    return true;
}

static void bury(process *one, int *status)
{
    while (waitpid(one->pid, status, 0) < 0 && errno == EINTR) {
    }
    close(one->line);
    *one = (process){.line = -1};
}

void process_kill(process *one)
{
    int status;
    if (one->pid == 0) return;
    (void)kill(one->pid, SIGKILL);
    bury(one, &status);
}

void process_stop(process *one)
{
    int status;
    if (one->stopped) return;
    (void)kill(one->pid, SIGSTOP);
    one->stopped = waitpid(one->pid, &status, WUNTRACED) == one->pid && WIFSTOPPED(status);
}

void process_continue(process *one)
{
    (void)kill(one->pid, SIGCONT);
    one->stopped = false;
}

/* Its line ends when it does. */
bool process_await_end(process *one, uint32_t timeout_ms)
{
    int status = 0;
    int64_t deadline = rft_deadline(timeout_ms);
    struct pollfd item = {.fd = one->line, .events = POLLIN};
    chaos_note rest;
    while (note_receive(one->line, &rest) >= 0) {
        int left = rft_ms_until(deadline);
        if (left == 0) return false;
        (void)poll(&item, 1, left);
    }
    bury(one, &status);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}
