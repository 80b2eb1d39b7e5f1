/* Workers that mean harm, on the publisher's bench: what they can make it keep, queue or send is
 * bounded by the configuration, however often they ask. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "hub_bench.h"
#include "tests/support/file_tree.h"
#include "tests/support/locksmith.h"

static int open_bench(void **state)
{
    static hub_bench bench;
    hub_bench_open(&bench, 2, false);
    *state = &bench;
    return 0;
}

static int close_bench(void **state)
{
    hub_bench_close(*state);
    return 0;
}

static int forget_samples(void **state)
{
    (void)state;
    hub_samples_forget();
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

/* HELLO and JOIN in turn, and nobody reads what comes of it. */
static size_t queue_after(hub_bench *bench, uint32_t rounds, bool new_names)
{
    rft_peer_id id = {.bytes = {9}, .count = 1};
    rft_message join = {.kind = RFT_JOIN};
    join.as.join.epoch = HUB_EPOCH;
    for (uint32_t i = 0; i < rounds; i++) {
        char name[16] = "w";
        if (new_names) (void)snprintf(name, sizeof name, "w%u", i);
        rft_message hello = hello_as(name, new_names ? i + 1 : 1);
        rft_hub_message(&bench->hub, &id, &hello, bench->now);
        rft_hub_message(&bench->hub, &id, &join, bench->now);
    }
    size_t queued = bench->hub.outbox.bytes.count;
    rft_outbox_reset(&bench->hub.outbox);
    return queued;
}

static void manifests_asked_for_again_and_again_are_one(void **state)
{
    hub_bench *bench = *state;
    hub_bench_join(bench, 1, false);
    hub_bench_offer(bench, 1);
    hub_bench_stage(bench, 1);
    hub_bench_apply(bench, 1);
    hub_bench_forget(bench);
    size_t manifest = bench->store->manifest->encoded.count;
    (void)queue_after(bench, 1, false);
    const rft_loan *first = bench->hub.manifest.loan;
    assert_non_null(first);
    assert_non_null(bench->hub.seal.loan);
    size_t queued = queue_after(bench, 200, false);
    assert_ptr_equal(bench->hub.manifest.loan, first);
    size_t others = queue_after(bench, 200, true);
    assert_ptr_equal(bench->hub.manifest.loan, first);
    /* What is queued for one of them is as large for a manifest of any size. */
    size_t small = 200 * (4 * sizeof(rft_peer_id) + 1200);
    assert_true(queued < small && others < small);
    assert_true(bench->hub.manifest.loan->gathered.count >= manifest);
    assert_int_equal(rft_pending_count(&bench->hub.manifest.loan->pending), 0);
    assert_true(bench->hub.peers.count <= 2);
}

static void a_notice_that_is_still_read_outlives_its_version(void **state)
{
    hub_bench *bench = *state;
    hub_bench_join(bench, 1, false);
    hub_bench_offer(bench, 1);
    hub_bench_stage(bench, 1);
    hub_bench_apply(bench, 1);
    rft_loan *seal = bench->hub.seal.loan;
    assert_non_null(seal);
    rft_pending_raise(&seal->pending); /* as a queue of the transport does */
    hub_bench_offer(bench, 2);
    assert_ptr_not_equal(bench->hub.seal.loan, seal);
    assert_ptr_equal(bench->hub.attic.first, seal);
    rft_pending_lower(&seal->pending);
    hub_bench_stage(bench, 1);
    hub_bench_apply(bench, 1);
    hub_bench_offer(bench, 3); /* the next one put away sweeps */
    assert_ptr_not_equal(bench->hub.attic.first, seal);
    hub_bench_stage(bench, 1);
    hub_bench_apply(bench, 1);
}

/* ---- Observers */

static uint32_t manifests_for(hub_bench *bench, unsigned char who, unsigned char more)
{
    rft_peer_id id = {.bytes = {who, more}, .count = 2};
    rft_message hello = hello_as("observer", 1);
    rft_outgoing out;
    uint32_t count = 0;
    hello.as.hello.observer = true;
    rft_hub_message(&bench->hub, &id, &hello, bench->now);
    while (rft_outbox_take(&bench->hub.outbox, &out)) {
        rft_message told;
        assert_true(rft_peer_id_equal(&out.to, &id));
        assert_int_equal(rft_message_decode(out.message, &bench->hub.limits, &told, NULL),
                         REFIT_OK);
        count += told.kind == RFT_MANIFEST;
    }
    rft_outbox_reset(&bench->hub.outbox);
    return count;
}

static void observers_that_ask_on_and_on_are_answered_once_a_second(void **state)
{
    hub_bench *bench = *state;
    hub_bench_join(bench, 1, false);
    hub_bench_forget(bench);
    for (uint32_t second = 0; second < 3; second++) {
        assert_int_equal(manifests_for(bench, 200, 0), 1);
        assert_int_equal(manifests_for(bench, 201, 0), 1);
        for (uint32_t i = 0; i < 100; i++) {
            assert_int_equal(manifests_for(bench, 200, 0), 0);
            assert_int_equal(manifests_for(bench, 201, 0), 0);
        }
        bench->now = rft_after_ms(bench->now, RFT_VISIT_MS);
    }
}

/* With a new connection for each question. */
static void a_crowd_of_observers_is_answered_in_part(void **state)
{
    hub_bench *bench = *state;
    for (uint32_t second = 0; second < 3; second++) {
        uint32_t answered = 0;
        for (uint32_t i = 0; i < 1000; i++) {
            answered += manifests_for(bench, (unsigned char)(second * 4 + i / 256),
                                      (unsigned char)(i % 256));
        }
        assert_int_equal(answered, RFT_VISITS_MOST);
        bench->now = rft_after_ms(bench->now, RFT_VISIT_MS);
    }
    hub_bench_join(bench, 1, false); /* workers come in as ever */
    assert_non_null(hub_bench_peer(bench, 1));
}

/* ---- Frames asked for again */

static void say_resend(hub_bench *bench, unsigned worker, uint32_t times)
{
    unsigned char wanted[64 * 4] = {0};
    rft_message again = {.kind = RFT_RESEND};
    again.as.resend.version = 1;
    again.as.resend.sequences = (rft_view){wanted, (size_t)times * 4};
    hub_bench_say(bench, worker, &again);
}

static uint32_t frames_to_send(hub_bench *bench)
{
    rft_frame_order order;
    uint32_t count = 0;
    while (rft_hub_next_frame(&bench->hub, &order))
        count++;
    return count;
}

static void no_more_frames_wait_than_the_window(void **state)
{
    hub_bench *bench = *state;
    hub_bench_join(bench, 1, false);
    hub_bench_offer(bench, 1);
    uint32_t window = hub_bench_peer(bench, 1)->window;
    uint32_t frames = bench->store->manifest->frame_count;
    assert_true(window < 64 && bench->config.broadcast_resend_limit * frames >= 2 * window);
    say_resend(bench, 1, window + 1);
    assert_int_equal(frames_to_send(bench), window);
}

static void who_asks_for_ever_is_turned_out(void **state)
{
    hub_bench *bench = *state;
    hub_bench_join(bench, 1, false);
    hub_bench_join(bench, 2, false);
    hub_bench_offer(bench, 1);
    uint32_t most = bench->config.broadcast_resend_limit * bench->store->manifest->frame_count,
             sent = 0;
    for (uint32_t i = 0; i < most; i++) {
        say_resend(bench, 1, 1);
        sent += frames_to_send(bench);
    }
    assert_int_equal(sent, most);
    assert_non_null(hub_bench_peer(bench, 1));
    say_resend(bench, 1, 1);
    assert_null(hub_bench_peer(bench, 1));
    assert_int_equal(frames_to_send(bench), 0);
    assert_int_equal(hub_bench_told(bench, 1, RFT_BYE)->as.bye.code, REFIT_ERR_LIMIT);
    assert_non_null(hub_bench_peer(bench, 2));
}

/* ---- Keys */

static void say_hello_with_key(hub_bench *bench, unsigned char id, const char *name,
                               uint64_t instance, const char *key)
{
    rft_peer_id from = {.bytes = {id}, .count = 1};
    strcpy(from.key, key);
    rft_message hello = hello_as(name, instance);
    rft_hub_message(&bench->hub, &from, &hello, bench->now);
}

static void allow(const locksmith *smith, const char *name, char key[RFT_KEY_TEXT])
{
    char path[256], file[64];
    rft_key public_key;
    locksmith_admit(smith, name);
    (void)snprintf(file, sizeof file, "allow/%s.public", name);
    locksmith_path(smith, file, path);
    assert_int_equal(rft_key_file_read(-1, path, RFT_KEY_PUBLIC, &public_key, NULL), REFIT_OK);
    rft_key_print(&public_key, key);
}

/* Knowing another's name and instance is not enough to take its place. */
static void a_place_goes_back_to_the_key_that_had_it(void **state)
{
    hub_bench *bench = *state;
    locksmith smith = locksmith_open();
    char w0[RFT_KEY_TEXT], w1[RFT_KEY_TEXT], folder[256];
    allow(&smith, "w0", w0);
    allow(&smith, "w1", w1);
    locksmith_path(&smith, "allow", folder);
    assert_int_equal(rft_allow_list_open(folder, &bench->hub.allow, NULL), REFIT_OK);
    say_hello_with_key(bench, 1, "rank0", 5, w0);
    const rft_peer *peer = hub_bench_peer(bench, 1);
    assert_non_null(peer);
    assert_string_equal(peer->key_name, "w0");
    say_hello_with_key(bench, 2, "rank0", 5, w1);
    assert_ptr_equal(hub_bench_peer(bench, 1), peer);
    assert_null(hub_bench_peer(bench, 2));
    say_hello_with_key(bench, 3, "rank0", 5, w0); /* the same worker, reconnected */
    assert_ptr_equal(hub_bench_peer(bench, 3), peer);

    /* Without a key, or with one that is not allowed, nobody is answered. */
    size_t queued = bench->hub.outbox.bytes.count;
    uint64_t refused = bench->hub.counts.refused;
    say_hello_with_key(bench, 4, "rank1", 6, "");
    say_hello_with_key(bench, 5, "rank1", 6, "0000000000000000000000000000000000000000");
    assert_int_equal(bench->hub.outbox.bytes.count, queued);
    assert_int_equal(bench->hub.counts.refused, refused + 2);
    rft_allow_list_close(bench->hub.allow);
    locksmith_close(&smith);
}

#define ON_BENCH(test) cmocka_unit_test_setup_teardown(test, open_bench, close_bench)

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON_BENCH(manifests_asked_for_again_and_again_are_one),
        ON_BENCH(a_notice_that_is_still_read_outlives_its_version),
        ON_BENCH(observers_that_ask_on_and_on_are_answered_once_a_second),
        ON_BENCH(a_crowd_of_observers_is_answered_in_part),
        ON_BENCH(no_more_frames_wait_than_the_window),
        ON_BENCH(who_asks_for_ever_is_turned_out),
        ON_BENCH(a_place_goes_back_to_the_key_that_had_it),
    };
    return cmocka_run_group_tests_name("hub_hostile", tests, NULL, forget_samples);
}
