/* Endpoints: what can be read, what cannot, and which of them stay on this host. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "net/endpoint.h"
#include "net/ipc.h"
#include "tests/support/file_tree.h"
#include "tests/support/test.h"

/* Endpoints that can be read. `open`: a publisher alone may bind them, because they leave a port, a
 * name or an address to be chosen. */
static const struct {
    const char *text;
    bool local, open, ipv6;
} readable[] = {
    {"tcp://127.0.0.1:0", true, true, false},
    {"tcp://127.0.0.1:*", true, true, false},
    {"tcp://127.0.0.1:1", true, false, false},
    {"tcp://127.8.9.10:65535", true, false, false},
    {"tcp://localhost:*", true, true, false},
    {"tcp://localhost:5", true, false, false},
    {"tcp://[::1]:5555", true, false, true},
    {"tcp://[::1]:0", true, true, true},
    {"ipc:///run/refit.sock", true, false, false},
    {"ipc:///run/my folder/*", true, false, false},
    {"user://refit", true, false, false},
    {"user://0", true, false, false},
    {"user://*", true, true, false},
    {"inproc://weights", true, false, false},
    {"inproc://0", true, false, false},
    {"tcp://*:5555", false, true, false},
    {"tcp://0.0.0.0:5555", false, false, false},
    {"tcp://10.0.0.1:5555", false, false, false},
    {"tcp://128.0.0.1:5555", false, false, false},
    {"tcp://[::]:5555", false, false, true},
    {"tcp://eth0:5555", false, false, false},
    {"tcp://127.0.0.1.example.com:5555", false, false, false},
    {"tcp://localhost.example.com:5555", false, false, false},
};

TEST(an_endpoint_is_local_open_or_ipv6)
{
    for (size_t i = 0; i < COUNT_OF(readable); i++) {
        rft_endpoint endpoint;
        refit_error error = {0};
        if (rft_endpoint_parse(readable[i].text, &endpoint, &error) != REFIT_OK ||
            endpoint.local != readable[i].local || endpoint.open != readable[i].open ||
            endpoint.ipv6 != readable[i].ipv6)
            fail_msg("%s: local %d, open %d, ipv6 %d: %s", readable[i].text, endpoint.local,
                     endpoint.open, endpoint.ipv6, error.text);
    }
}

TEST(unreadable_endpoints_are_refused_with_a_sentence)
{
    static const char *const bad[] = {
        "",
        "127.0.0.1:5555",
        "udp://127.0.0.1:5555",
        "pgm://x:1",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://:5555",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:99999999999999999999",
        "tcp://127.0.0.1:12a",
        "tcp://::1:5555",
        "tcp://[::1:5555",
        "tcp:// :5555",
        "tcp://a b:5555",
        "tcp://127.0.0.1:5555 ",
        "ipc://",
        "ipc:// ",
        "ipc:// /run/refit.sock",
        "ipc:///run/refit.sock ",
        "ipc:///run/re\nfit.sock",
        "ipc:///run/\xff",
        "user://",
        "user://a/b",
        "user://..",
        "user://.hidden",
        "user://-x",
        "user://a b",
        "user://**",
        "user://0123456789012345678901234567890123456789012345678901234567890123",
        "inproc:// ",
        "ipc://@abstract",
        "ipc://*",
        "inproc://",
    };
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        rft_endpoint endpoint;
        refit_error error = {0};
        if (rft_endpoint_parse(bad[i], &endpoint, &error) != REFIT_ERR_INVALID ||
            strlen(error.text) <= 20)
            fail_msg("\"%s\": %s", bad[i], error.text);
    }
}

static rft_endpoint placed(const char *text)
{
    rft_endpoint endpoint;
    assert_ok(rft_endpoint_parse(text, &endpoint, NULL));
    assert_ok(rft_endpoint_place(&endpoint, NULL));
    return endpoint;
}

TEST(names_of_a_user_are_paths_in_a_folder_of_its_own)
{
    char expected[128];
    file_tree tree = file_tree_open();
    assert_int_equal(setenv("XDG_RUNTIME_DIR", tree.root, 1), 0);
    (void)snprintf(expected, sizeof expected, "ipc://%s/refit/train.sock", tree.root);
    rft_endpoint named = placed("user://train"), one = placed("user://*"),
                 other = placed("user://*"), path = placed("ipc:///run/x");
    assert_string_equal(named.text, expected);
    assert_int_equal(named.transport, RFT_TRANSPORT_IPC);
    assert_int_equal(one.transport, RFT_TRANSPORT_IPC);
    assert_false(one.open);
    assert_string_not_equal(one.text, other.text);
    assert_string_equal(path.text, "ipc:///run/x");
    file_tree_close(&tree);
}

TEST(a_folder_too_long_for_a_socket_is_passed_over)
{
    char below[256];
    file_tree tree = file_tree_open();
    (void)snprintf(below, sizeof below, "%s/%070d", tree.root, 0);
    assert_int_equal(mkdir(below, 0700), 0);
    assert_int_equal(setenv("XDG_RUNTIME_DIR", below, 1), 0);
    rft_endpoint name = placed("user://refit");
    assert_null(strstr(name.text, below));
    assert_int_equal(setenv("XDG_RUNTIME_DIR", tree.root, 1), 0);
    rft_endpoint longest =
        placed("user://012345678901234567890123456789012345678901234567890123456789012");
    assert_int_equal(longest.transport, RFT_TRANSPORT_IPC);
    file_tree_close(&tree);
}

/* As after kill -9: nothing is closed, and the kernel gives the lock back. */
static void leave_files(const char *path)
{
    pid_t child = fork();
    if (child == 0) {
        rft_ipc ipc;
        int fd;
        _exit(rft_ipc_open(&ipc, path, &fd, NULL) == REFIT_OK ? 0 : 1);
    }
    int code;
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_int_equal(code, 0);
    assert_int_equal(access(path, F_OK), 0);
}

TEST(files_of_dead_processes_are_removed_and_others_kept)
{
    char lock[128], fresh[128];
    rft_ipc living;
    int fd;
    file_tree tree = file_tree_open();
    assert_int_equal(setenv("XDG_RUNTIME_DIR", tree.root, 1), 0);
    rft_endpoint dead = placed("user://*"), held = placed("user://*"), alive = placed("user://*"),
                 named = placed("user://refit");
    const char *paths[] = {strchr(dead.text, '/') + 2, strchr(alive.text, '/') + 2,
                           strchr(named.text, '/') + 2};
    leave_files(paths[0]);
    leave_files(paths[2]);
    const char *held_path = strchr(held.text, '/') + 2;
    char hidden[128];
    leave_files(held_path); /* it had no descriptor left */
    (void)snprintf(hidden, sizeof hidden, "%s.held", held_path);
    assert_int_equal(rename(held_path, hidden), 0);
    assert_ok(rft_ipc_open(&living, paths[1], &fd, NULL));
    file_tree_write(&tree, "/refit/any-0.sock.lock", ""); /* about to be locked */
    (void)placed("user://refit");
    assert_int_equal(access(paths[0], F_OK), 0);
    (void)placed("user://*");
    (void)snprintf(lock, sizeof lock, "%s.lock", paths[0]);
    (void)snprintf(fresh, sizeof fresh, "%s/refit/any-0.sock.lock", tree.root);
    assert_int_not_equal(access(paths[0], F_OK), 0);
    assert_int_not_equal(access(hidden, F_OK), 0);
    assert_int_not_equal(access(lock, F_OK), 0);
    assert_int_equal(access(paths[1], F_OK), 0);
    assert_int_equal(access(living.lock, F_OK), 0);
    assert_int_equal(access(paths[2], F_OK), 0);
    assert_int_equal(access(fresh, F_OK), 0);
    close(fd);
    rft_ipc_close(&living);
    file_tree_close(&tree);
}

TEST(too_long_texts_and_paths_are_refused)
{
    rft_endpoint endpoint;
    char text[400] = "ipc:///";
    memset(text + 7, 'a', 110);
    assert_invalid(rft_endpoint_parse(text, &endpoint, NULL));
    memset(text + 7, 'a', 300);
    assert_invalid(rft_endpoint_parse(text, &endpoint, NULL));
}

int main(void)
{
    return test_run("endpoint");
}
