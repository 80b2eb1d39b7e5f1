/* The socket file of an ipc endpoint: one living owner, dead ones replaced, other files untouched.
 */
#include <stdio.h>
#include <stdlib.h>

#include <sched.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "net/ipc.h"
#include "tests/support/test.h"

typedef struct place {
    char folder[64];
    char path[80];
} place;

static int place_open(void **state)
{
    place *here = calloc(1, sizeof *here);
    if (here == NULL) return -1;
    strcpy(here->folder, "/tmp/refit-ipc-XXXXXX");
    if (mkdtemp(here->folder) == NULL) return -1;
    snprintf(here->path, sizeof here->path, "%s/s", here->folder);
    *state = here;
    return 0;
}

static int place_close(void **state)
{
    place *here = *state;
    unlink(here->path);
    int code = rmdir(here->folder);
    free(here);
    return code;
}

#define IN_A_PLACE(name) TEST_ON(place *here, name, place_open, place_close)

IN_A_PLACE(socket_is_ours_alone_to_connect)
{
    rft_ipc ipc;
    int fd;
    struct stat file;
    assert_ok(rft_ipc_open(&ipc, here->path, &fd, NULL));
    assert_int_equal(stat(here->path, &file), 0);
    assert_int_equal(file.st_mode & 0777, 0600);
    close(fd);
    rft_ipc_close(&ipc);
    rft_ipc_close(&ipc);
    assert_int_not_equal(access(here->path, F_OK), 0);
}

IN_A_PLACE(second_owner_is_refused_until_the_first_closes)
{
    rft_ipc first, second;
    int fd, other;
    refit_error error;
    assert_ok(rft_ipc_open(&first, here->path, &fd, NULL));
    assert_int_equal(rft_ipc_open(&second, here->path, &other, &error), REFIT_ERR_BUSY);
    assert_says(&error, here->path);
    assert_int_equal(access(here->path, F_OK), 0);
    close(fd);
    rft_ipc_close(&first);
    assert_ok(rft_ipc_open(&second, here->path, &other, NULL));
    close(other);
    rft_ipc_close(&second);
}

/* As when the system removes the folder of a user after logout. */
IN_A_PLACE(an_owner_whose_files_were_removed_leaves_those_of_the_next)
{
    rft_ipc first, second;
    int fds[2];
    assert_ok(rft_ipc_open(&first, here->path, &fds[0], NULL));
    assert_int_equal(unlink(first.lock), 0);
    assert_int_equal(unlink(here->path), 0);
    assert_ok(rft_ipc_open(&second, here->path, &fds[1], NULL));
    rft_ipc_close(&first);
    assert_int_equal(access(here->path, F_OK), 0);
    assert_int_equal(access(second.lock, F_OK), 0);
    rft_ipc_close(&second);
    assert_int_equal(access(here->path, F_OK), -1);
    close(fds[0]);
    close(fds[1]);
}

IN_A_PLACE(what_a_killed_owner_left_is_taken_over)
{
    pid_t child = fork();
    if (child == 0) {
        rft_ipc ipc;
        int fd;
        _exit(rft_ipc_open(&ipc, here->path, &fd, NULL) == REFIT_OK ? 0 : 1);
    }
    int code;
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_int_equal(code, 0);
    assert_int_equal(access(here->path, F_OK), 0);
    rft_ipc ipc;
    int fd;
    assert_ok(rft_ipc_open(&ipc, here->path, &fd, NULL));
    close(fd);
    rft_ipc_close(&ipc);
}

IN_A_PLACE(file_that_is_no_socket_is_left_alone)
{
    FILE *file = fopen(here->path, "w");
    assert_non_null(file);
    fclose(file);
    rft_ipc ipc;
    int fd;
    assert_int_equal(rft_ipc_open(&ipc, here->path, &fd, NULL), REFIT_ERR_EXISTS);
    assert_int_equal(access(here->path, F_OK), 0);
}

IN_A_PLACE(the_socket_of_a_stranger_is_left_alone)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, here->path, strlen(here->path));
    int stranger = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(stranger, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(stranger, 4), 0);
    rft_ipc ipc;
    int fd;
    assert_int_equal(rft_ipc_open(&ipc, here->path, &fd, NULL), REFIT_ERR_BUSY);
    assert_int_equal(access(here->path, F_OK), 0);
    close(stranger);
}

/* In a folder in which all users make files, the lock does not lie beside the socket. */
IN_A_PLACE(one_lock_guards_a_path_however_it_is_written)
{
    char own[80], lock[96], roundabout[128];
    rft_ipc first, second;
    int fd, other;
    (void)snprintf(own, sizeof own, "%s/own", here->folder);
    assert_int_equal(mkdir(own, 0700), 0);
    assert_int_equal(setenv("XDG_RUNTIME_DIR", own, 1), 0);
    (void)snprintf(lock, sizeof lock, "%s.lock", here->path);
    (void)snprintf(roundabout, sizeof roundabout, "%s/own/.././s", here->folder);
    assert_int_equal(chmod(here->folder, 01777), 0);
    assert_ok(rft_ipc_open(&first, here->path, &fd, NULL));
    assert_int_not_equal(access(lock, F_OK), 0);
    assert_int_equal(strncmp(first.lock, own, strlen(own)), 0);
    assert_int_equal(rft_ipc_open(&second, roundabout, &other, NULL), REFIT_ERR_BUSY);
    assert_int_equal(access(here->path, F_OK), 0);
    close(fd);
    rft_ipc_close(&first);
    assert_int_not_equal(access(first.lock, F_OK), 0);
    (void)snprintf(lock, sizeof lock, "%s/refit", own);
    assert_int_equal(rmdir(lock), 0);
    assert_int_equal(rmdir(own), 0);
}

TEST(only_this_user_and_root_may_listen)
{
    char own[64];
    (void)snprintf(own, sizeof own, "localhost:%u:5:6", (unsigned)geteuid());
    assert_ok(rft_ipc_check_peer("/s", own, NULL));
    assert_ok(rft_ipc_check_peer("/s", "localhost:0:0:1", NULL));
    assert_refused(rft_ipc_check_peer("/s", "localhost:61002:0:1", error), REFIT_ERR_SECURITY,
                   "user 61002 listens at ipc:///s");
}

TEST(a_listener_that_a_user_namespace_does_not_map_is_refused)
{
    pid_t child = fork();
    if (child == 0) {
        char peer[64];
        if (unshare(CLONE_NEWUSER) != 0) _exit(0); /* not everywhere */
        (void)snprintf(peer, sizeof peer, "localhost:%u:5:6", (unsigned)geteuid());
        _exit(rft_ipc_check_peer("/s", peer, NULL) == REFIT_ERR_SECURITY ? 0 : 1);
    }
    assert_child_succeeds(child);
}

TEST(a_listener_that_is_not_told_is_refused)
{
    static const char *const bad[] = {
        NULL,
        "",
        "localhost",
        "localhost:",
        "localhost:0",
        "localhost::",
        "127.0.0.1",
        "localhost:zero:0:1",
        "localhost:0x0:",
        "localhost:4294967296:0:1",
        "localhost:18446744073709551616:0:1",
    };
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        assert_refused(rft_ipc_check_peer("/s", bad[i], error), REFIT_ERR_SECURITY,
                       "use keys (security.key)");
    }
}

/* Of a peer in another PID namespace the kernel tells the user, and 0 for its process. */
static int pid_of_peer = -1;

int __wrap_getsockopt(int fd, int level, int name, void *value, socklen_t *size);
int __real_getsockopt(int fd, int level, int name, void *value, socklen_t *size);

int __wrap_getsockopt(int fd, int level, int name, void *value, socklen_t *size)
{
    int code = __real_getsockopt(fd, level, name, value, size);
    if (code == 0 && level == SOL_SOCKET && name == SO_PEERCRED && pid_of_peer == 0) {
        struct ucred *peer = value;
        peer->pid = 0;
        peer->uid = 61002;
    }
    return code;
}

TEST(a_peer_of_another_pid_namespace_is_checked_by_its_user)
{
    refit_error error;
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    assert_ok(rft_ipc_check_connection("/s", pair[0], NULL));
    pid_of_peer = 0;
    assert_int_equal(rft_ipc_check_connection("/s", pair[0], &error), REFIT_ERR_SECURITY);
    pid_of_peer = -1;
    assert_says(&error, "user 61002 listens at ipc:///s");
    close(pair[1]);
    close(pair[0]);
    int lone = socket(AF_UNIX, SOCK_STREAM, 0); /* it has no peer, as a descriptor used again */
    assert_ok(rft_ipc_check_connection("/s", lone, NULL));
    close(lone);
}

IN_A_PLACE(a_socket_is_known_by_its_path_until_it_is_removed)
{
    rft_ipc ipc;
    int fd;
    assert_false(rft_ipc_is_listening(here->path));
    assert_ok(rft_ipc_open(&ipc, here->path, &fd, NULL));
    assert_true(rft_ipc_is_named(&ipc));
    assert_true(rft_ipc_is_listening(here->path));
    assert_true(rft_ipc_hide(&ipc));
    assert_true(rft_ipc_is_named(&ipc));
    assert_true(rft_ipc_show(&ipc));
    assert_int_equal(unlink(here->path), 0);
    assert_false(rft_ipc_is_named(&ipc));
    close(fd);
    rft_ipc_close(&ipc);
}

IN_A_PLACE(a_folder_that_is_refused_is_named_with_a_way_out)
{
    refit_error error;
    assert_int_equal(chmod(here->folder, 0770), 0);
    assert_int_equal(rft_ipc_check_folder(here->path, &error), REFIT_ERR_SECURITY);
    assert_says(&error, "chmod go-w, or use another place: set XDG_RUNTIME_DIR");
    assert_null(strstr(error.text, "/.:"));
    assert_int_equal(chmod(here->folder, 0700), 0);
    if (geteuid() != 0) return;
    /* As /tmp in a container whose user namespace has no name for its owner. */
    assert_int_equal(chown(here->folder, 65534, 65534), 0);
    assert_int_equal(chmod(here->folder, 01777), 0);
    assert_int_equal(rft_ipc_check_folder(here->path, &error), REFIT_ERR_SECURITY);
    assert_says(&error, "belongs to user 65534");
    assert_says(&error, "set XDG_RUNTIME_DIR to a folder of yours (mode 0700), or "
                        "name ipc://PATH in one");
    assert_int_equal(chown(here->folder, 0, 0), 0);
    assert_int_equal(chmod(here->folder, 0700), 0);
}

TEST(missing_folder_is_an_error_of_the_system)
{
    rft_ipc ipc;
    int fd;
    refit_error error;
    assert_int_equal(rft_ipc_open(&ipc, "/tmp/refit-no-such/s", &fd, &error), REFIT_ERR_SYSTEM);
    assert_int_not_equal(error.subsystem, 0);
}

int main(void)
{
    return test_run("ipc");
}
