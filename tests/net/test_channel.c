/* Channels: messages and zero-copy payloads both ways, and which endpoints may be bound. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <refit/host.h>

#include "base/checked.h"
#include "base/clock.h"
#include "net/channel.h"
#include "tests/support/file_tree.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"
#include "tests/support/zmtp_client.h"

#define WAIT_MS 50000

static file_tree tree;
static char ipc[80]; /* an endpoint in it */

static int make_tree(void **state)
{
    tree = file_tree_open();
    (void)snprintf(ipc, sizeof ipc, "ipc://%s/s", tree.root);
    return 0;
}

static int remove_tree(void **state)
{
    return rmdir(tree.root);
}

static rft_channel *bind_at(const char *endpoint)
{
    refit_config config = quick_config();
    rft_channel *channel = NULL;
    assert_ok(rft_channel_bind(endpoint, &config, &channel, NULL));
    return channel;
}

static rft_channel *connect_to(const rft_channel *bound)
{
    refit_config config = quick_config();
    rft_channel *channel = NULL;
    assert_ok(rft_channel_connect(rft_channel_endpoint(bound), &config, &channel, NULL));
    return channel;
}

/* A DEALER takes messages only once its connection stands. */
static void send_soon(rft_channel *channel, const char *text)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    refit_status status;
    do {
        status = rft_channel_send(channel, NULL, rft_view_text(text), NULL, NULL);
        if (status == REFIT_ERR_BUSY) rft_channel_poll(channel, -1, 5);
    } while (status == REFIT_ERR_BUSY && rft_ms_until(deadline) > 0);
    assert_ok(status);
}

static refit_status receive_soon(rft_channel *channel, rft_envelope *out)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    refit_status status;
    do {
        rft_channel_poll(channel, -1, rft_ms_until(deadline));
        status = rft_channel_receive(channel, out, NULL);
    } while (status == REFIT_ERR_TIMEOUT && rft_ms_until(deadline) > 0);
    return status;
}

static void assert_view(rft_view view, const void *bytes, size_t count)
{
    assert_int_equal(view.count, count);
    assert_memory_equal(view.data, bytes, count);
}

/* The next message is this one, without a payload; its sender. */
static rft_peer_id hear(rft_channel *channel, const char *text)
{
    rft_envelope got;
    assert_ok(receive_soon(channel, &got));
    assert_view(got.message, text, strlen(text));
    assert_int_equal(got.payload.count, 0);
    return got.from;
}

static unsigned char megabyte[1 << 20];

static void carry_both_ways(const char *endpoint)
{
    rft_channel *server = bind_at(endpoint), *client = connect_to(server);
    rft_envelope got;
    rft_pending pending = {0};
    rft_payload payload = {{megabyte, sizeof megabyte}, &pending};
    memset(megabyte, 7, sizeof megabyte);
    send_soon(client, "hello");
    const rft_peer_id to = hear(server, "hello");
    assert_ok(rft_channel_send(server, &to, rft_view_text("frame"), &payload, NULL));
    assert_ok(receive_soon(client, &got));
    assert_view(got.message, "frame", 5);
    assert_view(got.payload, megabyte, sizeof megabyte);
    assert_int_equal(rft_channel_receive(client, &got, NULL), REFIT_ERR_TIMEOUT);
    rft_channel_close(client);
    rft_channel_close(server);
    assert_true(rft_pending_wait(&pending, rft_deadline(WAIT_MS)));
}

/* A worker that sends a part as large as only a trainer sends is disconnected, and may connect
 * again. */
TEST(workers_send_no_parts_as_large_as_frames)
{
    rft_channel *server = bind_at("tcp://127.0.0.1:0"), *client = connect_to(server);
    rft_envelope got;
    rft_pending pending = {0};
    rft_payload payload = {{megabyte, sizeof megabyte}, &pending};
    send_soon(client, "hello");
    (void)hear(server, "hello");
    assert_ok(rft_channel_send(client, NULL, rft_view_text("frame"), &payload, NULL));
    int64_t deadline = rft_deadline(WAIT_MS);
    refit_status status;
    do { /* what is sent before the connection is seen to be cut is lost with it */
        (void)!rft_channel_send(client, NULL, rft_view_text("again"), NULL, NULL);
        rft_channel_poll(server, -1, 5);
        status = rft_channel_receive(server, &got, NULL);
    } while (status == REFIT_ERR_TIMEOUT && rft_ms_until(deadline) > 0);
    assert_ok(status);
    assert_view(got.message, "again", 5);
    rft_channel_close(client);
    rft_channel_close(server);
    assert_true(rft_pending_wait(&pending, rft_deadline(WAIT_MS)));
}

TEST(ipv6_loopback_carries_both_ways)
{
    refit_config config = quick_config();
    rft_channel *probe = NULL;
    if (rft_channel_bind("tcp://[::1]:0", &config, &probe, NULL) != REFIT_OK) skip();
    rft_channel_close(probe);
    carry_both_ways("tcp://[::1]:0");
}

TEST(tcp_inproc_and_ipc_carry_both_ways_and_can_be_bound_again)
{
    const char *const endpoints[] = {"tcp://127.0.0.1:0", "inproc://carries", ipc, ipc};
    for (size_t i = 0; i < COUNT_OF(endpoints); i++)
        carry_both_ways(endpoints[i]);
}

TEST(found_port_is_named)
{
    rft_channel *server = bind_at("tcp://127.0.0.1:0");
    const char *endpoint = rft_channel_endpoint(server);
    assert_non_null(strstr(endpoint, "tcp://127.0.0.1:"));
    assert_string_not_equal(endpoint, "tcp://127.0.0.1:0");
    rft_channel_close(server);
}

/* Also while the context lives on: another channel holds it. */
TEST(closed_port_can_be_bound_at_once)
{
    char endpoint[64];
    rft_channel *holder = bind_at("inproc://holder");
    own_tcp(endpoint);
    rft_channel *server = bind_at(endpoint);
    strcpy(endpoint, rft_channel_endpoint(server));
    for (int i = 0; i < 20; i++) {
        rft_channel_close(server);
        server = bind_at(endpoint);
    }
    rft_channel_close(server);
    rft_channel_close(holder);
}

TEST(second_publisher_is_busy)
{
    const char *const endpoints[] = {"tcp://127.0.0.1:0", "inproc://second", ipc};
    for (size_t i = 0; i < COUNT_OF(endpoints); i++) {
        refit_config config = quick_config();
        rft_channel *first = bind_at(endpoints[i]), *second = NULL;
        assert_int_equal(rft_channel_bind(rft_channel_endpoint(first), &config, &second, NULL),
                         REFIT_ERR_BUSY);
        assert_null(second);
        rft_channel_close(first);
    }
}

TEST(addresses_beyond_this_host_need_leave)
{
    refit_config config = quick_config();
    rft_channel *channel = NULL;
    assert_refused(rft_channel_bind("tcp://0.0.0.0:0", &config, &channel, error),
                   REFIT_ERR_SECURITY, "broadcast.insecure");
    config.broadcast_insecure = 1;
    assert_ok(rft_channel_bind("tcp://0.0.0.0:0", &config, &channel, NULL));
    rft_channel_close(channel);
}

static void count_line(void *user, refit_log_level level, const char *line)
{
    uint32_t *warnings = user;
    if (level == REFIT_LOG_WARNING &&
        strstr(line, "has no keys: every user of this machine") != NULL)
        ++*warnings;
}

/* How often both ends say that the endpoint is open to all users. */
static uint32_t warnings_at(const char *endpoint, bool insecure)
{
    uint32_t warnings = 0;
    refit_config config = quick_config();
    rft_channel *server = NULL, *client = NULL;
    config.broadcast_insecure = insecure;
    refit_set_log(count_line, &warnings, REFIT_LOG_DEBUG);
    assert_ok(rft_channel_bind(endpoint, &config, &server, NULL));
    assert_ok(rft_channel_connect(rft_channel_endpoint(server), &config, &client, NULL));
    rft_channel_close(client);
    rft_channel_close(server);
    refit_set_log(NULL, NULL, REFIT_LOG_ERROR);
    return warnings;
}

TEST(endpoints_that_every_user_reaches_are_warned_of)
{
    char own[80], name[64];
    assert_int_equal(setenv("XDG_RUNTIME_DIR", tree.root, 1), 0);
    (void)snprintf(name, sizeof name, "user://channel-%ld", (long)getpid());
    assert_int_equal(warnings_at("tcp://127.0.0.1:0", false), 2);
    assert_int_equal(warnings_at("tcp://127.0.0.1:0", true), 0);
    assert_int_equal(warnings_at(name, false), 0);
    assert_int_equal(warnings_at("user://*", false), 0);
    assert_int_equal(warnings_at("inproc://warned", false), 0);
    (void)snprintf(own, sizeof own, "%s/refit", tree.root);
    assert_int_equal(rmdir(own), 0); /* nothing is left in it */
}

/* Any host that answers there could send any weights. */
TEST(addresses_beyond_this_host_need_leave_to_connect)
{
    static const char *const beyond[] = {"tcp://192.0.2.1:7711", "tcp://trainer.invalid:7711",
                                         "tcp://[2001:db8::1]:7711", "tcp://0.0.0.0:7711"};
    const char *const here[] = {"tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1", ipc,
                                "inproc://absent"};
    for (size_t i = 0; i < COUNT_OF(beyond); i++) {
        refit_config config = quick_config();
        refit_error error;
        rft_channel *channel = NULL;
        assert_int_equal(rft_channel_connect(beyond[i], &config, &channel, &error),
                         REFIT_ERR_SECURITY);
        assert_null(channel);
        assert_says(&error, beyond[i]);
        assert_says(&error, "security.server_key");
        assert_says(&error, "broadcast.insecure: true");
        config.broadcast_insecure = 1;
        if (strstr(beyond[i], "invalid") != NULL) continue; /* a resolver may be slow */
        assert_ok(rft_channel_connect(beyond[i], &config, &channel, NULL));
        rft_channel_close(channel);
    }
    for (size_t i = 0; i < COUNT_OF(here); i++) {
        refit_config config = quick_config();
        rft_channel *channel = NULL;
        assert_ok(rft_channel_connect(here[i], &config, &channel, NULL));
        rft_channel_close(channel);
    }
}

/* The length alone is enough: nothing is reserved for it, nothing of it awaited. */
TEST(a_peer_that_announces_more_than_the_limits_is_disconnected)
{
    static const unsigned char small[] = {0, 5, 'h', 'e', 'l', 'l', 'o'};
    refit_config config = quick_config();
    const uint64_t most = rft_max_u64(config.limits_frame_bytes, config.limits_manifest_bytes);
    const uint64_t sizes[] = {most + (1 << 20), UINT64_C(1) << 40, UINT64_MAX >> 1, UINT64_MAX};
    rft_channel *server = bind_at("tcp://127.0.0.1:0");
    rft_channel *other = connect_to(server);
    const char *port = strrchr(rft_channel_endpoint(server), ':') + 1;
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        unsigned char large[9] = {2};
        for (int byte = 0; byte < 8; byte++) {
            large[1 + byte] = (unsigned char)(sizes[i] >> (56 - 8 * byte));
        }
        int fd = zmtp_open((uint16_t)atoi(port), NULL, 0, WAIT_MS);
        assert_true(fd >= 0);
        zmtp_say(fd, small, sizeof small);
        hear(server, "hello");
        zmtp_say(fd, large, sizeof large);
        assert_true(zmtp_is_hung_up(fd, WAIT_MS));
        close(fd);
        send_soon(other, "still here");
        hear(server, "still here");
    }
    rft_channel_close(other);
    rft_channel_close(server);
}

TEST(bad_endpoints_leave_nothing_open)
{
    refit_config config = quick_config();
    rft_channel *channel = NULL;
    assert_invalid(rft_channel_bind("nonsense", &config, &channel, NULL));
    assert_invalid(rft_channel_connect("udp://x:1", &config, &channel, NULL));
    assert_invalid(rft_channel_bind("tcp://127.0.0.1:1x", &config, &channel, NULL));
    assert_refused(rft_channel_bind("tcp://localhost:0", &config, &channel, error),
                   REFIT_ERR_SYSTEM, "no host name");
    assert_null(channel);
    rft_channel_close(bind_at("inproc://localhost:0"));
    config.broadcast_insecure = 1;
    static const char *const open_ones[] = {"tcp://127.0.0.1:0", "tcp://127.0.0.1:*", "tcp://*:7",
                                            "user://*"};
    for (size_t i = 0; i < COUNT_OF(open_ones); i++) {
        assert_refused(rft_channel_connect(open_ones[i], &config, &channel, error),
                       REFIT_ERR_INVALID, "name the endpoint that it found");
    }
    assert_null(channel);
}

/* Connecting would ask a resolver for a host called lo, which may be any. */
TEST(an_interface_is_bound_and_not_connected_to)
{
    refit_config config = quick_config();
    rft_channel *channel = NULL;
    rft_channel *server = bind_at("tcp://lo:0");
    assert_memory_equal(rft_channel_endpoint(server), "tcp://127.", 10);
    assert_refused(rft_channel_connect("tcp://lo:5757", &config, &channel, error),
                   REFIT_ERR_INVALID, "127.0.0.1");
    config.broadcast_insecure = 1;
    assert_invalid(rft_channel_connect("tcp://lo:5757", &config, &channel, NULL));
    rft_channel_close(server);
}

TEST(unknown_peer_is_reported)
{
    rft_channel *server = bind_at("tcp://127.0.0.1:0");
    rft_peer_id unknown = {.bytes = {0, 1, 2, 3, 4}, .count = 5};
    rft_pending pending = {0};
    rft_payload payload = {rft_view_text("bytes"), &pending};
    assert_int_equal(rft_channel_send(server, &unknown, rft_view_text("x"), &payload, NULL),
                     REFIT_ERR_PEER);
    assert_int_equal(rft_pending_count(&pending), 0);
    rft_channel_close(server);
}

TEST(peer_that_does_not_read_is_busy_in_the_end)
{
    rft_channel *server = bind_at("inproc://unread"), *client = connect_to(server);
    send_soon(client, "hello");
    const rft_peer_id to = hear(server, "hello");
    refit_status status = REFIT_OK;
    for (int i = 0; i < 100000 && status == REFIT_OK; i++) {
        status = rft_channel_send(server, &to, rft_view_text("beat"), NULL, NULL);
    }
    assert_int_equal(status, REFIT_ERR_BUSY);
    rft_channel_close(client);
    rft_channel_close(server);
}

TEST(dealer_without_a_trainer_is_busy)
{
    refit_config config = quick_config();
    rft_channel *client = NULL;
    assert_ok(rft_channel_connect("tcp://127.0.0.1:1", &config, &client, NULL));
    assert_int_equal(rft_channel_send(client, NULL, rft_view_text("x"), NULL, NULL),
                     REFIT_ERR_BUSY);
    rft_channel_close(client);
}

TEST(room_for_what_was_refused_ends_the_poll)
{
    char endpoint[64];
    refit_config config = quick_config();
    own_tcp(endpoint);
    rft_channel *client = NULL, *server = bind_at(endpoint);
    snprintf(endpoint, sizeof endpoint, "%s", rft_channel_endpoint(server));
    rft_channel_close(server);
    assert_ok(rft_channel_connect(endpoint, &config, &client, NULL));
    assert_int_equal(rft_channel_send(client, NULL, rft_view_text("x"), NULL, NULL),
                     REFIT_ERR_BUSY);
    server = bind_at(endpoint);
    rft_channel_poll(client, -1, 60 * 60 * 1000);
    assert_ok(rft_channel_send(client, NULL, rft_view_text("x"), NULL, NULL));
    rft_channel_close(client);
    rft_channel_close(server);
}

/* More of them than fit where memory is not asked for, and each in turn. */
TEST(several_channels_are_waited_for_at_once)
{
    rft_channel *bound[6], *connected[6];
    rft_envelope envelope;
    for (int i = 0; i < 6; i++) {
        char endpoint[32];
        (void)snprintf(endpoint, sizeof endpoint, "inproc://several-%d", i);
        bound[i] = bind_at(endpoint);
        connected[i] = connect_to(bound[i]);
    }
    for (uint32_t count = 1; count <= 6; count++) {
        send_soon(connected[count - 1], "here");
        int64_t before = rft_now();
        rft_channels_poll(bound, count, -1, WAIT_MS);
        assert_true(rft_now() < rft_after_ms(before, WAIT_MS));
        for (uint32_t i = 0; i < count; i++) {
            refit_status status = rft_channel_receive(bound[i], &envelope, NULL);
            assert_int_equal(status, i + 1 == count ? REFIT_OK : REFIT_ERR_TIMEOUT);
        }
        rft_channels_poll(bound, count, -1, 1);
    }
    for (int i = 0; i < 6; i++) {
        rft_channel_close(connected[i]);
        rft_channel_close(bound[i]);
    }
}

TEST(descriptor_wakes_the_poll)
{
    rft_channel *server = bind_at("inproc://wakes");
    int wake = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
    rft_channel_poll(server, wake, 60 * 60 * 1000);
    close(wake);
    rft_channel_close(server);
}

TEST(forked_child_gets_a_context_of_its_own)
{
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
    /* Their runtimes do not survive a fork next to other threads: the child may find the allocator
     * locked, or its threads taken for the parent's. */
    skip();
#endif
    static rft_channel *server; /* where the child's leak checker finds it */
    server = bind_at("inproc://forked");
    pid_t child = fork();
    if (child == 0) {
        refit_config config = quick_config();
        rft_channel *own = NULL;
        refit_status status = rft_channel_bind("inproc://forked", &config, &own, NULL);
        rft_channel_close(own);
        _exit(status == REFIT_OK ? 0 : 1);
    }
    int code;
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_int_equal(code, 0);
    rft_channel_close(server);
}

int main(void)
{
    return test_run_within("channel", make_tree, remove_tree);
}
