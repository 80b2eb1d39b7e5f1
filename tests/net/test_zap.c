/* The ZAP handler, asked as ZeroMQ asks it: a key of the list is admitted, one that was removed is
 * not, and no number of requests keeps the disk busy. */
#include <fcntl.h>
#include <poll.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <zmq.h>

#include "base/clock.h"
#include "base/thread.h"
#include "net/socket.h"
#include "net/zap.h"
#include "tests/support/key_fixture.h"
#include "tests/support/test.h"

#define WAIT_MS  50000
#define REQUESTS 300

typedef struct scene {
    key_fixture smith;
    char folder[256];
    void *context, *socket;
    rft_zap *zap;
    rft_key key; /* of "w0", allowed */
} scene;

static void scene_open(scene *it)
{
    char path[256];
    it->smith = key_fixture_open();
    key_fixture_admit(&it->smith, "w0");
    key_fixture_path(&it->smith, "allow", it->folder);
    key_fixture_path(&it->smith, "keys/w0.public", path);
    assert_ok(rft_key_file_read(AT_FDCWD, path, RFT_KEY_PUBLIC, &it->key, NULL));
    assert_ok(rft_context_acquire(&it->context, NULL));
    assert_ok(rft_zap_open(it->context, it->folder, &it->zap, NULL));
    const int most = WAIT_MS, none = 0;
    it->socket = zmq_socket(it->context, ZMQ_REQ);
    assert_non_null(it->socket);
    assert_int_equal(zmq_setsockopt(it->socket, ZMQ_LINGER, &none, sizeof none), 0);
    assert_int_equal(zmq_setsockopt(it->socket, ZMQ_RCVTIMEO, &most, sizeof most), 0);
    assert_int_equal(zmq_connect(it->socket, "inproc://zeromq.zap.01"), 0);
}

static void scene_close(scene *it)
{
    zmq_close(it->socket);
    rft_zap_close(it->zap);
    rft_context_release(it->context);
    key_fixture_close(&it->smith);
}

/* Whether this key is admitted. */
static bool is_admitted(const scene *it, const rft_key *key)
{
    const char *domain = rft_zap_domain(it->zap);
    const struct {
        const void *bytes;
        size_t count;
    } parts[] = {{"1.0", 3}, {"1", 1},     {domain, strlen(domain)},   {"127.0.0.1", 9},
                 {"", 0},    {"CURVE", 5}, {key->bytes, RFT_KEY_BYTES}};
    char code[4] = "";
    for (size_t i = 0; i < 7; i++) {
        int flags = i < 6 ? ZMQ_SNDMORE : 0;
        assert_int_equal(zmq_send(it->socket, parts[i].bytes, parts[i].count, flags),
                         parts[i].count);
    }
    for (int i = 0; i < 6; i++) {
        char part[64];
        int count = zmq_recv(it->socket, part, sizeof part, 0);
        assert_in_range(count, 0, sizeof part);
        if (i == 2) memcpy(code, part, 3);
    }
    return strcmp(code, "200") == 0;
}

TEST(a_key_that_is_removed_is_admitted_no_more)
{
    scene play;
    int wake;
    scene_open(&play);
    assert_ok(rft_wake_fd_open(&wake, NULL));
    rft_zap_set_wake(play.zap, wake);
    rft_key other = play.key;
    other.bytes[0] ^= 1;
    assert_true(is_admitted(&play, &play.key));
    assert_false(is_admitted(&play, &other));

    key_fixture_revoke(&play.smith, "w0");
    int64_t deadline = rft_deadline(WAIT_MS);
    bool in = true;
    while (in && rft_ms_until(deadline) > 0)
        in = is_admitted(&play, &play.key);
    assert_false(in);
    struct pollfd woken = {.fd = wake, .events = POLLIN}; /* so that its workers are evicted */
    assert_int_equal(poll(&woken, 1, WAIT_MS), 1);

    key_fixture_allow(&play.smith, "w0");
    while (!in && rft_ms_until(deadline) > 0)
        in = is_admitted(&play, &play.key);
    assert_true(in);
    scene_close(&play);
    rft_wake_fd_close(wake);
}

/* Counts the events of the folder itself that wait, not those of its files. */
static int count_looks(int watch)
{
    char buffer[4096] __attribute__((aligned(__alignof__(struct inotify_event))));
    int looks = 0;
    for (ssize_t got; (got = read(watch, buffer, sizeof buffer)) > 0;) {
        for (const char *at = buffer; at < buffer + got;) {
            struct inotify_event event;
            memcpy(&event, at, sizeof event);
            looks += event.len == 0 && (event.mask & IN_ISDIR) != 0;
            at += sizeof event + event.len;
        }
    }
    return looks;
}

/* Looks are counted where they happen, and held against the time that they had. */
TEST(requests_do_not_keep_the_disk_busy)
{
    scene play;
    scene_open(&play);
    rft_key other = play.key;
    other.bytes[0] ^= 1;
    int watch = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    assert_true(watch >= 0);
    assert_true(inotify_add_watch(watch, play.folder, IN_OPEN) >= 0);
    int64_t began = rft_now();
    for (int i = 0; i < REQUESTS; i++) {
        assert_true(is_admitted(&play, &play.key));
        assert_false(is_admitted(&play, &other));
    }
    int64_t took_ms = (rft_now() - began) / 1000000;
    assert_in_range(count_looks(watch), 0, (uint64_t)took_ms / 10 + 2);
    assert_int_equal(close(watch), 0);
    scene_close(&play);
}

int main(void)
{
    return test_run("zap");
}
