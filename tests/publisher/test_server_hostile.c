/* Hostile workers and the publisher's state machine: the memory that they make it keep, and the
 * messages that they make it queue or send, are bounded by the configuration, however often they
 * ask. */
#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"
#include "tests/support/file_tree.h"
#include "tests/support/key_fixture.h"
#include "tests/support/server_bench.h"
#include "tests/support/test.h"

static int forget_samples(void **state)
{
    server_samples_forget();
    return 0;
}

/* ---- Manifests */

static rft_message hello_as(const char *name, uint64_t instance)
{
    rft_message hello = {.kind = RFT_HELLO};
    hello.as.hello.protocol = RFT_PROTOCOL;
    hello.as.hello.worker = rft_view_text(name);
    hello.as.hello.instance = instance;
    hello.as.hello.host = rft_view_text("host");
    hello.as.hello.window = 1;
    return hello;
}

/* HELLO and JOIN by turns from a sender that reads no answer. */
static size_t queue_after(server_bench *bench, uint32_t rounds, bool new_names)
{
    rft_peer_id id = {.bytes = {9}, .count = 1};
    rft_message join = {.kind = RFT_JOIN};
    join.as.join.epoch = SERVER_EPOCH;
    for (uint32_t i = 0; i < rounds; i++) {
        char name[16] = "w";
        if (new_names) (void)snprintf(name, sizeof name, "w%u", i);
        rft_message hello = hello_as(name, new_names ? i + 1 : 1);
        rft_server_message(&bench->server, &id, &hello, bench->now);
        rft_server_message(&bench->server, &id, &join, bench->now);
    }
    size_t queued = bench->server.send_queue.bytes.count;
    rft_send_queue_reset(&bench->server.send_queue);
    return queued;
}

ON_BENCH(manifests_asked_for_again_and_again_are_one)
{
    server_bench_join(bench, 1, false);
    server_bench_publish(bench, 1, 1);
    server_bench_forget(bench);
    size_t manifest = bench->store->manifest->encoded.count;
    (void)queue_after(bench, 1, false);
    const rft_buffer *first = bench->server.manifest.buffer;
    assert_non_null(first);
    assert_non_null(bench->server.seal.buffer);
    size_t queued = queue_after(bench, 200, false);
    assert_ptr_equal(bench->server.manifest.buffer, first);
    size_t others = queue_after(bench, 200, true);
    assert_ptr_equal(bench->server.manifest.buffer, first);
    /* What is queued for one of them is as large for a manifest of any size. */
    size_t small = 200 * (4 * sizeof(rft_peer_id) + 1200);
    assert_true(queued < small && others < small);
    assert_true(bench->server.manifest.buffer->gathered.count >= manifest);
    assert_int_equal(rft_pending_count(&bench->server.manifest.buffer->pending), 0);
    assert_true(bench->server.peers.count <= 2);
}

ON_BENCH(a_cached_message_that_is_still_read_outlives_its_version)
{
    server_bench_join(bench, 1, false);
    server_bench_publish(bench, 1, 1);
    rft_buffer *seal = bench->server.seal.buffer;
    assert_non_null(seal);
    rft_pending_raise(&seal->pending); /* as a queue of the transport does */
    server_bench_offer(bench, 2);
    assert_ptr_not_equal(bench->server.seal.buffer, seal);
    assert_ptr_equal(bench->server.retired.first, seal);
    rft_pending_lower(&seal->pending);
    server_bench_stage(bench, 1);
    server_bench_apply(bench, 1);
    server_bench_offer(bench, 3); /* retiring the next buffer frees those that are unused */
    assert_ptr_not_equal(bench->server.retired.first, seal);
    server_bench_stage(bench, 1);
    server_bench_apply(bench, 1);
}

/* ---- Observers */

static uint32_t manifests_for(server_bench *bench, unsigned char who, unsigned char more)
{
    rft_peer_id id = {.bytes = {who, more}, .count = 2};
    rft_message hello = hello_as("observer", 1);
    rft_outgoing out;
    uint32_t count = 0;
    hello.as.hello.observer = true;
    rft_server_message(&bench->server, &id, &hello, bench->now);
    while (rft_send_queue_take(&bench->server.send_queue, &out)) {
        rft_message told;
        assert_true(rft_peer_id_equal(&out.to, &id));
        assert_ok(rft_message_decode(out.message, &bench->server.limits, &told, NULL));
        count += told.kind == RFT_MANIFEST;
    }
    rft_send_queue_reset(&bench->server.send_queue);
    return count;
}

ON_BENCH(observers_that_ask_on_and_on_are_answered_once_a_second)
{
    server_bench_join(bench, 1, false);
    server_bench_forget(bench);
    for (uint32_t second = 0; second < 3; second++) {
        assert_int_equal(manifests_for(bench, 200, 0), 1);
        assert_int_equal(manifests_for(bench, 201, 0), 1);
        for (uint32_t i = 0; i < 100; i++) {
            assert_int_equal(manifests_for(bench, 200, 0), 0);
            assert_int_equal(manifests_for(bench, 201, 0), 0);
        }
        bench->now = rft_after_ms(bench->now, RFT_QUERY_LIMIT_MS);
    }
}

/* With a new connection for each query. */
ON_BENCH(a_crowd_of_observers_is_answered_in_part)
{
    for (uint32_t second = 0; second < 3; second++) {
        uint32_t answered = 0;
        for (uint32_t i = 0; i < 1000; i++) {
            answered += manifests_for(bench, (unsigned char)(second * 4 + i / 256),
                                      (unsigned char)(i % 256));
        }
        assert_int_equal(answered, RFT_QUERY_LIMIT_MOST);
        bench->now = rft_after_ms(bench->now, RFT_QUERY_LIMIT_MS);
    }
    server_bench_join(bench, 1, false); /* workers can still join */
    assert_non_null(server_bench_peer(bench, 1));
}

/* ---- Frames asked for again */

static void say_resend(server_bench *bench, unsigned worker, uint32_t times)
{
    unsigned char wanted[64 * 4] = {0};
    rft_message again = {.kind = RFT_RESEND};
    again.as.resend.version = 1;
    again.as.resend.sequences = (rft_view){wanted, (size_t)times * 4};
    server_bench_say(bench, worker, again);
}

static uint32_t frames_to_send(server_bench *bench)
{
    rft_frame_order order;
    uint32_t count = 0;
    while (rft_server_next_frame(&bench->server, &order))
        count++;
    return count;
}

ON_BENCH(no_more_frames_wait_than_the_window)
{
    server_bench_join(bench, 1, false);
    server_bench_offer(bench, 1);
    uint32_t window = server_bench_peer(bench, 1)->window;
    uint32_t frames = bench->store->manifest->frame_count;
    assert_true(window < 64 && bench->config.broadcast_resend_limit * frames >= 2 * window);
    say_resend(bench, 1, window + 1);
    assert_int_equal(frames_to_send(bench), window);
}

ON_BENCH(worker_that_asks_for_ever_is_evicted)
{
    server_bench_join(bench, 1, false);
    server_bench_join(bench, 2, false);
    server_bench_offer(bench, 1);
    uint32_t most = bench->config.broadcast_resend_limit * bench->store->manifest->frame_count,
             sent = 0;
    for (uint32_t i = 0; i < most; i++) {
        say_resend(bench, 1, 1);
        sent += frames_to_send(bench);
    }
    assert_int_equal(sent, most);
    assert_non_null(server_bench_peer(bench, 1));
    say_resend(bench, 1, 1);
    assert_null(server_bench_peer(bench, 1));
    assert_int_equal(frames_to_send(bench), 0);
    assert_int_equal(server_bench_told(bench, 1, RFT_BYE)->as.bye.code, REFIT_ERR_LIMIT);
    assert_non_null(server_bench_peer(bench, 2));
}

/* ---- Versions that do not exist */

ON_BENCH(a_version_that_was_never_committed_is_held_by_no_worker)
{
    rft_peer_id id = {.bytes = {9}, .count = 1};
    rft_message hello = hello_as("liar", 1);
    server_bench_join(bench, 1, false);
    server_bench_publish(bench, 1, 1);
    hello.as.hello.held = (rft_version_id){SERVER_EPOCH, 2, bench->server.current.digest};
    rft_server_message(&bench->server, &id, &hello, bench->now);
    const rft_peer *liar = rft_peers_find_name(&bench->server.peers, "liar");
    assert_non_null(liar);
    assert_int_equal(liar->held.version, 0);
    hello.as.hello.held.version = 1;
    rft_server_message(&bench->server, &id, &hello, bench->now);
    assert_int_equal(liar->held.version, 1);
}

/* ---- Keys */

static void say_hello_with_key(server_bench *bench, unsigned char id, const char *name,
                               uint64_t instance, const char *key)
{
    rft_peer_id from = {.bytes = {id}, .count = 1};
    strcpy(from.key, key);
    rft_message hello = hello_as(name, instance);
    rft_server_message(&bench->server, &from, &hello, bench->now);
}

static const rft_peer *peer_with_key(const server_bench *bench, unsigned char id, const char *key)
{
    rft_peer_id from = {.bytes = {id}, .count = 1};
    strcpy(from.key, key);
    return rft_peers_find(&bench->server.peers, &from);
}

static void allow(const key_fixture *smith, const char *name, char key[RFT_KEY_TEXT])
{
    char path[256], file[64];
    rft_key public_key;
    key_fixture_admit(smith, name);
    (void)snprintf(file, sizeof file, "allow/%s.public", name);
    key_fixture_path(smith, file, path);
    assert_ok(rft_key_file_read(-1, path, RFT_KEY_PUBLIC, &public_key, NULL));
    rft_key_print(&public_key, key);
}

static void open_two_keys(server_bench *bench, key_fixture *smith, char w0[RFT_KEY_TEXT],
                          char w1[RFT_KEY_TEXT])
{
    char folder[256];
    *smith = key_fixture_open();
    allow(smith, "w0", w0);
    allow(smith, "w1", w1);
    key_fixture_path(smith, "allow", folder);
    assert_ok(rft_allow_list_open(folder, &bench->server.allow, NULL));
}

static void close_keys(server_bench *bench, key_fixture *smith)
{
    rft_allow_list_close(bench->server.allow);
    key_fixture_close(smith);
}

/* Knowing another's name and instance is not enough to take its place. */
ON_BENCH(a_place_goes_back_to_the_key_that_had_it)
{
    key_fixture smith;
    char w0[RFT_KEY_TEXT], w1[RFT_KEY_TEXT];
    open_two_keys(bench, &smith, w0, w1);
    say_hello_with_key(bench, 1, "rank0", 5, w0);
    const rft_peer *peer = peer_with_key(bench, 1, w0);
    assert_non_null(peer);
    assert_string_equal(peer->key_name, "w0");
    say_hello_with_key(bench, 2, "rank0", 5, w1);
    assert_ptr_equal(peer_with_key(bench, 1, w0), peer);
    assert_string_equal(peer_with_key(bench, 2, w1)->name, "w1/rank0");
    say_hello_with_key(bench, 3, "rank0", 5, w0); /* the same worker, reconnected */
    assert_ptr_equal(peer_with_key(bench, 3, w0), peer);

    /* A sender without a key, or with one that is not allowed, gets no answer. */
    size_t queued = bench->server.send_queue.bytes.count;
    uint64_t refused = bench->server.counts.refused;
    say_hello_with_key(bench, 4, "rank1", 6, "");
    say_hello_with_key(bench, 5, "rank1", 6, "0000000000000000000000000000000000000000");
    assert_int_equal(bench->server.send_queue.bytes.count, queued);
    assert_int_equal(bench->server.counts.refused, refused + 2);
    close_keys(bench, &smith);
}

static const char *name_given(server_bench *bench, const char *said, const char *key)
{
    static unsigned char id = 100;
    id++;
    say_hello_with_key(bench, id, said, id, key);
    return peer_with_key(bench, id, key)->name;
}

ON_BENCH(a_name_begins_with_that_of_the_key)
{
    key_fixture smith;
    char w0[RFT_KEY_TEXT], w1[RFT_KEY_TEXT], w10[RFT_KEY_TEXT];
    open_two_keys(bench, &smith, w0, w1);
    allow(&smith, "w10", w10);
    rft_allow_list_refresh(bench->server.allow);
    assert_string_equal(name_given(bench, "w1", w1), "w1");
    assert_string_equal(name_given(bench, "w1/3", w1), "w1/3");
    assert_string_equal(name_given(bench, "w10", w1), "w1/w10");
    assert_string_equal(name_given(bench, "w10/3", w1), "w1/w10/3");
    assert_string_equal(name_given(bench, "w1", w10), "w10/w1");
    assert_string_equal(name_given(bench, "w10", w10), "w10");
    close_keys(bench, &smith);
}

TEST(a_name_that_is_too_long_keeps_its_key_and_its_end)
{
    static const char own[] = "a-host-of-a-name-as-long-as-can-be:4194304:0123abcd";
    char key_name[RFT_KEY_NAME_BYTES] = "", name[RFT_PEER_NAME_BYTES];
    for (size_t length = 1; length < sizeof key_name; length++) {
        memset(key_name, 'k', length);
        rft_peer_name_bind(key_name, own, name);
        assert_memory_equal(name, key_name, length);
        if (length + 2 > sizeof name - 1) {
            assert_string_equal(name, key_name);
            continue;
        }
        size_t tail = strlen(name) - length - 1;
        assert_int_equal(name[length], RFT_PEER_NAME_MARK);
        assert_true(tail == sizeof own - 1 || strlen(name) == sizeof name - 1);
        assert_string_equal(name + length + 1, own + sizeof own - 1 - tail);
    }
    memset(key_name, 'k', 59); /* where three bytes are left, for characters of two */
    key_name[59] = '\0';
    rft_peer_name_bind(key_name, "\xc3\xa4\xc3\xb6", name);
    assert_string_equal(name + 59, "/\xc3\xb6");
}

/* ZeroMQ may give the id of a connection that has ended to another one. Messages of that connection
 * do not count as the worker's, and answers to it do not change the worker's state. */
ON_BENCH(what_another_key_says_by_the_id_of_a_worker_is_not_heard)
{
    key_fixture smith;
    char w0[RFT_KEY_TEXT], w1[RFT_KEY_TEXT];
    const rft_message bye = {.kind = RFT_BYE};
    const refit_error garbage = {.status = REFIT_ERR_PROTOCOL, .text = "no message"};
    open_two_keys(bench, &smith, w0, w1);
    say_hello_with_key(bench, 1, "w0", 5, w0);
    const rft_peer *peer = peer_with_key(bench, 1, w0);
    rft_peer_id from = {.bytes = {1}, .count = 1};
    strcpy(from.key, w1);
    rft_server_message(&bench->server, &from, &bye, bench->now);
    rft_server_garbage(&bench->server, &from, &garbage, bench->now);
    from.key[0] = '\0';
    rft_server_garbage(&bench->server, &from, &garbage, bench->now);
    assert_ptr_equal(peer_with_key(bench, 1, w0), peer);
    say_hello_with_key(bench, 1, "w1", 6, w1);
    assert_ptr_equal(peer_with_key(bench, 1, w0), peer);
    assert_string_equal(peer->name, "w0");
    assert_string_equal(peer_with_key(bench, 1, w1)->name, "w1");
    close_keys(bench, &smith);
}

static void rename_key(const key_fixture *smith, const char *from, const char *to)
{
    char before[256], after[256];
    key_fixture_path(smith, from, before);
    key_fixture_path(smith, to, after);
    assert_int_equal(rename(before, after), 0);
}

/* Two workers of one key, of which one already has the name that the other one gets. */
ON_BENCH(names_that_fall_together_are_not_shared)
{
    key_fixture smith;
    char w0[RFT_KEY_TEXT], w1[RFT_KEY_TEXT];
    open_two_keys(bench, &smith, w0, w1);
    say_hello_with_key(bench, 1, "x", 5, w0);
    say_hello_with_key(bench, 2, "w7/x", 6, w0);
    say_hello_with_key(bench, 3, "x", 7, w1);
    assert_string_equal(peer_with_key(bench, 2, w0)->name, "w0/w7/x");
    rename_key(&smith, "allow/w0.public", "allow/w7.public");
    rft_allow_list_refresh(bench->server.allow);
    rft_server_check_keys(&bench->server, bench->now);
    assert_string_equal(peer_with_key(bench, 1, w0)->name, "w7/x");
    assert_null(peer_with_key(bench, 2, w0));
    assert_string_equal(peer_with_key(bench, 3, w1)->name, "w1/x");
    assert_int_equal(bench->server.counts.evicted, 1);
    close_keys(bench, &smith);
}

/* A key that has two files has the first of their names, and is allowed while it has one file. */
ON_BENCH(a_key_with_two_files_has_the_first_name)
{
    key_fixture smith;
    char w0[RFT_KEY_TEXT], w1[RFT_KEY_TEXT], from[256], to[256];
    open_two_keys(bench, &smith, w0, w1);
    key_fixture_path(&smith, "allow/w0.public", from);
    key_fixture_path(&smith, "allow/a.public", to);
    assert_int_equal(link(from, to), 0);
    rft_allow_list_refresh(bench->server.allow);
    say_hello_with_key(bench, 1, "w0", 5, w0);
    assert_string_equal(peer_with_key(bench, 1, w0)->name, "a/w0");
    assert_int_equal(unlink(to), 0);
    rft_allow_list_refresh(bench->server.allow);
    rft_server_check_keys(&bench->server, bench->now);
    assert_string_equal(peer_with_key(bench, 1, w0)->name, "w0");
    close_keys(bench, &smith);
}

int main(void)
{
    return test_run_within("server_hostile", NULL, forget_samples);
}
