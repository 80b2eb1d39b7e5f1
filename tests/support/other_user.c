/* Another user in a child process: see other_user.h. */
#include "other_user.h"

#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/test.h"

#define WAIT_MS 50000

bool other_user_can_be(void)
{
    return geteuid() == 0;
}

/* By a name of the kernel's, which goes with the process. */
bool other_user_claim(uid_t user)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    (void)snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "refit-test-user-%u",
                   (unsigned)user);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    if (bind(fd, (const struct sockaddr *)&name, sizeof name) == 0) return true;
    (void)close(fd);
    return false;
}

static bool become(uid_t user)
{
    return setgroups(0, NULL) == 0 && setresgid(user, user, user) == 0 &&
           setresuid(user, user, user) == 0 && prctl(PR_SET_PDEATHSIG, SIGKILL) == 0;
}

static other_user start(uid_t user, bool (*act)(const other_self *self, const void *with),
                        const void *with)
{
    int line[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, line), 0);
    (void)fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        close(line[0]);
        const other_self self = {.line = line[1]};
        _exit(other_holds(become(user)) && act(&self, with) ? 0 : 1);
    }
    assert_true(pid > 0);
    close(line[1]);
    return (other_user){.pid = pid, .line = line[0]};
}

void other_user_await(other_user *other)
{
    char byte;
    struct pollfd heard = {.fd = other->line, .events = POLLIN};
    assert_int_equal(poll(&heard, 1, WAIT_MS), 1);
    assert_int_equal(read(other->line, &byte, 1), 1);
}

other_user other_user_ready(uid_t user, bool (*act)(const other_self *self, const void *with),
                            const void *with)
{
    other_user other = start(user, act, with);
    other_user_await(&other);
    return other;
}

void other_user_tell(other_user *other)
{
    (void)send(other->line, "", 1, MSG_NOSIGNAL); /* its end says whether it had ended already */
}

void other_user_end(other_user *other)
{
    int how = -1;
    other_user_tell(other);
    assert_int_equal(waitpid(other->pid, &how, 0), other->pid);
    close(other->line);
    assert_true(WIFEXITED(how));
    assert_int_equal(WEXITSTATUS(how), 0);
}

void other_user_do(uid_t user, bool (*act)(const other_self *self, const void *with),
                   const void *with)
{
    other_user other = start(user, act, with);
    other_user_end(&other);
}

bool other_ready(const other_self *self)
{
    return send(self->line, "", 1, MSG_NOSIGNAL) == 1;
}

bool other_until_told(const other_self *self)
{
    char byte;
    return read(self->line, &byte, 1) == 1;
}

bool other_check(bool holds, const char *what, const char *file, int line)
{
    if (!holds) (void)fprintf(stderr, "%s:%d: user %u: not so: %s\n", file, line, geteuid(), what);
    return holds;
}
