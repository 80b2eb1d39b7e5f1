/* Workers that want parts of versions: when they are offered one, which frames they are sent, and
 * what a worker receives for others of its host. */
#include "tests/support/server_bench.h"
#include "tests/support/test.h"

#define HERE    "machine/1000/4026531836"
#define SEGMENT "/proc/1/fd/5:9"

/* Rows of the sample's tensors: its first one, some of it, and a piece of the large one. */
static const rft_want_rows first = {0, 0, 1, 65536 * 2, 65536 * 2};
static const rft_want_rows half = {0, 0, 1, 65536, 65536};
static const rft_want_rows stripe = {1, 0, 3, 65569, 100};

static void join(server_bench *bench, unsigned worker, const char *place, bool selects)
{
    bench->place = place;
    bench->selects = selects;
    server_bench_join(bench, worker, false);
    bench->selects = false;
}

static rft_message want_of(const server_bench *bench, const rft_want_rows *rows, rft_bytes *list)
{
    rft_message message = {.kind = RFT_WANT};
    rft_bytes_reset(list);
    if (rows != NULL) assert_ok(rft_want_append(list, rows, NULL));
    message.as.want.manifest = bench->store->manifest->digest;
    message.as.want.rows = rft_bytes_view(list);
    return message;
}

static void say_want(server_bench *bench, unsigned worker, const rft_want_rows *rows)
{
    rft_bytes list = {0};
    server_bench_say(bench, worker, want_of(bench, rows, &list));
    rft_bytes_close(&list);
}

static void open_bench(server_bench *bench)
{
    server_bench_reopen(bench, 2, false);
    bench->config.broadcast_commit = REFIT_COMMIT_QUORUM;
    bench->config.broadcast_quorum = 1;
}

static uint32_t count_offers(server_bench *bench, unsigned worker)
{
    return server_bench_count(bench, worker, RFT_OFFER);
}

/* All frames that the worker may be sent, with this want. */
static uint32_t count_frames(server_bench *bench, const rft_want_rows *rows)
{
    rft_frame_order order;
    uint32_t count = 0;
    while (rft_server_wants_frames(&bench->server)) {
        assert_true(rft_server_next_frame(&bench->server, &order));
        assert_int_not_equal(rft_want_frame(order.want, order.sequence), RFT_WANT_NONE);
        if (rows != NULL) assert_int_equal(order.want->rows[0].offset, rows->offset);
        rft_want_release(order.want);
        count++;
    }
    return count;
}

/* ---- One worker */

ON_BENCH(nothing_is_offered_before_the_want_is_known)
{
    open_bench(bench);
    join(bench, 1, NULL, true);
    server_bench_begin(bench, 1);
    assert_int_equal(server_bench_count(bench, 1, RFT_MANIFEST), 1);
    assert_int_equal(count_offers(bench, 1), 0);
    say_want(bench, 1, &first);
    assert_int_equal(count_offers(bench, 1), 1);
    assert_false(server_bench_told(bench, 1, RFT_OFFER)->as.offer.whole);
    assert_int_equal(server_bench_told(bench, 1, RFT_OFFER)->as.offer.want.count, 0);
    server_bench_write(bench);
    server_bench_say(bench, 1, server_pull(1, 4));
    assert_int_equal(count_frames(bench, &first), 2);
    server_bench_seal(bench);
    server_bench_stage(bench, 1);
    server_bench_apply(bench, 1);
    assert_int_equal(bench->server.current.version, 1);
    server_bench_forget(bench);
    server_bench_begin(bench, 2); /* it is known by now */
    assert_int_equal(count_offers(bench, 1), 1);
}

ON_BENCH(a_worker_may_want_nothing)
{
    open_bench(bench);
    join(bench, 1, NULL, true);
    server_bench_begin(bench, 1);
    say_want(bench, 1, NULL);
    server_bench_write(bench);
    server_bench_say(bench, 1, server_pull(1, 4));
    assert_int_equal(count_frames(bench, NULL), 0);
    server_bench_seal(bench);
    server_bench_stage(bench, 1);
    assert_int_equal(bench->server.current.version, 1);
}

ON_BENCH(wants_that_are_wrong_cost_the_connection)
{
    const rft_want_rows beyond = {0, 65536 * 2 - 4, 1, 8, 8};
    rft_bytes list = {0};
    open_bench(bench);
    join(bench, 1, NULL, true);
    server_bench_begin(bench, 1);
    rft_message message = want_of(bench, &first, &list);
    message.as.want.manifest.bytes[0] ^= 1; /* of a manifest before */
    server_bench_say(bench, 1, message);
    assert_int_equal(count_offers(bench, 1), 0);
    assert_non_null(server_bench_peer(bench, 1));
    server_bench_say(bench, 1, want_of(bench, &beyond, &list));
    assert_null(server_bench_peer(bench, 1));
    join(bench, 2, NULL, false);
    server_bench_say(bench, 2,
                     want_of(bench, &beyond, &list)); /* it has not said that it selects */
    assert_non_null(server_bench_peer(bench, 2));
    rft_bytes_close(&list);
}

ON_BENCH(a_base_is_of_the_same_part)
{
    open_bench(bench);
    bench->config.broadcast_delta = REFIT_DELTA_ALWAYS;
    join(bench, 1, NULL, true);
    server_bench_begin(bench, 1);
    say_want(bench, 1, &first);
    server_bench_write(bench);
    server_bench_seal(bench);
    server_bench_stage(bench, 1);
    server_bench_apply(bench, 1);
    server_bench_begin(bench, 2);
    assert_int_equal(server_bench_told(bench, 1, RFT_OFFER)->as.offer.base, 1);
    server_bench_write(bench);
    server_bench_seal(bench);
    server_bench_stage(bench, 1);
    server_bench_apply(bench, 1);
    say_want(bench, 1, &half); /* from the next version on */
    server_bench_begin(bench, 3);
    assert_int_equal(server_bench_told(bench, 1, RFT_OFFER)->as.offer.base, 0);
}

/* ---- A host */

ON_BENCH(a_receiver_is_sent_what_its_host_wants)
{
    open_bench(bench);
    join(bench, 1, HERE, true);
    join(bench, 2, HERE, true);
    server_bench_begin(bench, 1);
    say_want(bench, 1, &half);
    assert_int_equal(count_offers(bench, 1), 0); /* the other one was asked, too */
    say_want(bench, 2, &stripe);
    assert_int_equal(count_offers(bench, 1) + count_offers(bench, 2), 1);
    unsigned receiver = count_offers(bench, 1) == 1 ? 1 : 2, other = 3 - receiver;
    const rft_want *sent = server_bench_peer(bench, receiver)->sent;
    assert_int_equal(sent->bytes, 65536 + 3 * 100);
    assert_int_equal(server_bench_told(bench, receiver, RFT_OFFER)->as.offer.want.count,
                     2 * RFT_WANT_ENTRY_BYTES);
    rft_message pull = server_pull(1, 4);
    pull.as.pull.image = rft_view_text(SEGMENT);
    server_bench_say(bench, receiver, pull);
    const rft_message *offer = server_bench_told(bench, other, RFT_OFFER);
    assert_true(offer->as.offer.neighbor);
    assert_int_equal(offer->as.offer.want.count, 2 * RFT_WANT_ENTRY_BYTES);
}

ON_BENCH(one_that_wants_all_has_all_sent)
{
    open_bench(bench);
    join(bench, 1, HERE, true);
    join(bench, 2, HERE, false);
    server_bench_begin(bench, 1);
    assert_int_equal(count_offers(bench, 2), 0); /* the first one was asked, and may receive less */
    say_want(bench, 1, &half);
    unsigned receiver = count_offers(bench, 1) == 1 ? 1 : 2;
    assert_null(server_bench_peer(bench, receiver)->sent);
    assert_int_equal(server_bench_told(bench, receiver, RFT_OFFER)->as.offer.whole, receiver == 1);
}

ON_BENCH(one_that_does_not_say_what_it_wants_is_not_waited_for)
{
    open_bench(bench);
    join(bench, 1, HERE, true);
    join(bench, 2, HERE, true);
    server_bench_begin(bench, 1);
    say_want(bench, 1, &half);
    assert_int_equal(count_offers(bench, 1), 0);
    for (uint32_t i = 0; i < 4; i++) {
        server_bench_tick(bench, bench->config.broadcast_heartbeat_timeout_ms / 2);
        server_bench_say(bench, 1, server_beat(0, 0));
        server_bench_say(bench, 2, server_beat(0, 0));
    }
    assert_int_equal(count_offers(bench, 1), 1);
    assert_true(server_bench_told(bench, 1, RFT_OFFER)->as.offer.whole);
}

ON_BENCH(an_image_without_what_it_wants_is_not_mapped)
{
    open_bench(bench);
    join(bench, 1, HERE, true);
    join(bench, 2, HERE, true);
    server_bench_begin(bench, 1);
    say_want(bench, 1, &half);
    say_want(bench, 2, &half);
    rft_message pull = server_pull(1, 4);
    pull.as.pull.image = rft_view_text(SEGMENT);
    server_bench_say(bench, count_offers(bench, 1) == 1 ? 1 : 2, pull);
    server_bench_forget(bench);
    join(bench, 3, HERE, true);
    say_want(bench, 3, &stripe);
    assert_false(server_bench_told(bench, 3, RFT_OFFER)->as.offer.neighbor);
    join(bench, 4, HERE, true);
    say_want(bench, 4, &half);
    assert_true(server_bench_told(bench, 4, RFT_OFFER)->as.offer.neighbor);
}

ON_BENCH(one_whose_selection_fails_is_blamed_for_each_version)
{
    open_bench(bench);
    bench->config.broadcast_commit = REFIT_COMMIT_ALL;
    bench->config.broadcast_quorum = 0;
    join(bench, 1, HERE, true);
    join(bench, 2, HERE, true);
    for (uint64_t version = 1; version <= 3; version++) {
        server_bench_begin(bench, version);
        if (version == 1) {
            say_want(bench, 1, &half);
            server_bench_say(bench, 2, server_failed(0, REFIT_ERR_INVALID, true));
        }
        /* Nor is it sent what others want with it. */
        assert_int_equal(rft_want_frame(server_bench_peer(bench, 1)->sent, 0), RFT_WANT_ALL);
        assert_int_equal(rft_want_frame(server_bench_peer(bench, 1)->sent, 2), RFT_WANT_NONE);
        server_bench_write(bench);
        server_bench_seal(bench);
        assert_int_equal(bench->server.transaction.state, RFT_TRANSACTION_ABORTED);
        assert_int_equal(server_bench_peer(bench, 2)->status, REFIT_ERR_INVALID);
        server_bench_settle(bench);
    }
    say_want(bench, 2, &half); /* of a manifest that it fits */
    server_bench_begin(bench, 4);
    assert_int_equal(server_bench_peer(bench, 2)->status, REFIT_OK);
}

ON_BENCH(a_frame_that_is_not_wanted_is_not_sent_again)
{
    unsigned char sequence[4];
    open_bench(bench);
    join(bench, 1, NULL, true);
    server_bench_begin(bench, 1);
    say_want(bench, 1, &half);
    server_bench_write(bench);
    server_bench_say(bench, 1, server_pull(1, 4));
    (void)count_frames(bench, NULL);
    rft_put_u32(sequence, bench->store->manifest->frame_count - 1);
    rft_message message = {.kind = RFT_RESEND};
    message.as.resend.version = 1;
    message.as.resend.sequences = (rft_view){sequence, sizeof sequence};
    server_bench_say(bench, 1, message);
    rft_frame_order order;
    assert_false(rft_server_next_frame(&bench->server, &order));
}

int main(void)
{
    return test_run("wants");
}
