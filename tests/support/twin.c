#include "tests/support/twin.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/test.h"

extern char **environ;

twin twin_start(const char *program, const char *word)
{
    int to[2], from[2];
    twin other;
    char *words[] = {(char *)(uintptr_t)program, (char *)(uintptr_t)word, NULL};
    posix_spawn_file_actions_t actions;
    assert_int_equal(pipe2(to, O_CLOEXEC), 0);
    assert_int_equal(pipe2(from, O_CLOEXEC), 0);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
    assert_int_equal(posix_spawn(&other.pid, program, &actions, NULL, words, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(to[0]);
    close(from[1]);
    other.to = to[1];
    other.from = from[0];
    return other;
}

void twin_say(const twin *other, const void *bytes, size_t count)
{
    const char *at = bytes;
    for (size_t done = 0; done < count;) {
        ssize_t some = write(other->to, at + done, count - done);
        assert_true(some > 0);
        done += (size_t)some;
    }
}

void twin_hear(const twin *other, void *bytes, size_t count)
{
    char *at = bytes;
    for (size_t done = 0; done < count;) {
        ssize_t some = read(other->from, at + done, count - done);
        assert_true(some > 0);
        done += (size_t)some;
    }
}

int twin_leave(const twin *other)
{
    int status;
    close(other->to);
    assert_int_equal(waitpid(other->pid, &status, 0), other->pid);
    close(other->from);
    return status;
}

void twin_kill(const twin *other)
{
    assert_int_equal(kill(other->pid, SIGKILL), 0);
    assert_true(WIFSIGNALED(twin_leave(other)));
}
