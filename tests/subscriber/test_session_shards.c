/* A version that several publishers have the tensors of: its frames come through a link to each,
 * and all go into one image. */
#include <stdlib.h>

#include "tests/support/shard_bench.h"
#include "tests/support/test.h"

static uint32_t count_said(shard_bench *on, uint32_t rank, rft_message_kind kind)
{
    uint32_t count = 0;
    (void)shards_said(on, rank, kind);
    for (uint32_t i = 0; i < on->ranks[rank].said_count; i++)
        count += on->ranks[rank].said[i].kind == kind;
    return count;
}

static void seal(shard_bench *on, uint64_t version)
{
    bench_hear(&on->bench, sample_seal(bench_sample(&on->bench, version)));
    shards_work(on);
}

/* ---- One image */

SHARD_TEST(shards_of_all_ranks_are_one_version)
{
    shards_apply(on, 1, 0);
    shards_apply(on, 2, 0);
    shards_apply(on, 3, 2);
    assert_int_equal(on->bench.session.report.applied, 3);
    assert_true(on->bench.session.report.bytes_received > 0);
}

SHARD_TEST(a_rank_is_asked_for_its_rows_and_the_coordinator_for_nothing)
{
    shards_apply(on, 2, 0);
    shards_offer(on, shards_offer_of(on, 3, 2));
    assert_int_equal(bench_count(&on->bench, RFT_PULL), 0);
    for (uint32_t i = 0; i < SHARD_RANKS; i++) {
        const rft_message *pull = shards_said(on, i, RFT_PULL);
        assert_int_equal(pull->as.pull.version, 3);
        assert_int_equal(pull->as.pull.base, 2);
        assert_int_equal(pull->as.pull.have.count, 0);
        assert_int_equal(on->ranks[i].asked->encoded.count, on->ranks[i].rows.count);
        assert_memory_equal(on->ranks[i].asked->encoded.data, on->ranks[i].rows.data,
                            on->ranks[i].rows.count);
    }
}

SHARD_TEST(further_credits_are_granted_as_frames_come)
{
    uint32_t credits = 0;
    shards_offer(on, shards_offer_of(on, 1, 0));
    shards_frames(on, 0, 1, 0);
    assert_true(count_said(on, 0, RFT_PULL) > 1);
    assert_int_equal(shards_said(on, 0, RFT_PULL)->as.pull.manifest.count, 0);
    assert_int_equal(on->ranks[0].wants, 0);
    for (uint32_t i = 0; i < on->ranks[0].said_count; i++)
        if (on->ranks[0].said[i].kind == RFT_PULL) credits += on->ranks[0].said[i].as.pull.credits;
    uint32_t frames = 0;
    for (uint32_t i = 0; i < bench_sample(&on->bench, 1)->manifest->frame_count; i++)
        frames += rft_want_frame(on->ranks[0].asked, i) != RFT_WANT_NONE;
    assert_true(credits >= frames); /* a part of a frame takes a part of a credit */
    assert_int_equal(count_said(on, 1, RFT_PULL), 1);
}

SHARD_TEST(frames_from_the_coordinator_itself_are_passed_over)
{
    shards_offer(on, shards_offer_of(on, 1, 0));
    bench_frames(&on->bench, 1, 0);
    seal(on, 1);
    assert_int_equal(bench_state(&on->bench), STAGING);
    shards_all_frames(on, 1, 0);
    shards_work(on);
    assert_int_equal(bench_state(&on->bench), STAGED);
}

SHARD_TEST(a_rank_without_bytes_is_asked_for_nothing)
{
    rft_message all = shards_message(on, 0), none = shards_message(on, 1);
    rft_bytes list = {0};
    const rft_manifest *manifest = bench_sample(&on->bench, 1)->manifest;
    for (uint32_t i = 0; i < 5; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        const rft_want_rows rows = {i, 0, 1, tensor->bytes, tensor->bytes};
        if (tensor->alias_of == REFIT_NO_ALIAS && tensor->bytes > 0)
            assert_ok(rft_want_append(&list, &rows, NULL));
    }
    rft_bytes_close(&on->ranks[0].rows);
    on->ranks[0].rows = list;
    all.as.shard.rows = rft_bytes_view(&list);
    none.as.shard.rows = (rft_view){0};
    bench_hear(&on->bench, all);
    bench_hear(&on->bench, none);
    shards_apply(on, 1, 0);
    assert_null(on->ranks[1].asked);
}

/* Of a tensor that is wanted in part, and of one that is wanted whole. */
SHARD_TEST(a_part_of_the_version_is_asked_of_those_that_have_it)
{
    const sample_version *sample = bench_sample(&on->bench, 1);
    const rft_want_rows first = {0, 0, 1, 131072, 131072}, second = {1, 20, 3, 65569, 100};
    rft_bytes list = {0};
    assert_ok(rft_want_append(&list, &first, NULL));
    assert_ok(rft_want_append(&list, &second, NULL));
    rft_message offer = shards_offer_of(on, 1, 0);
    offer.as.offer.want = rft_bytes_view(&list);
    shards_offer(on, offer);
    shards_all_frames(on, 1, 0);
    assert_int_equal(on->ranks[0].asked->bytes, 100000 + 3 * 100);
    assert_int_equal(on->ranks[1].asked->bytes, 31072);
    assert_null(on->ranks[2].asked);
    seal(on, 1);
    bench_commit(&on->bench, 1);
    const rft_image *image = bench_take(&on->bench);
    assert_memory_equal(image->bytes, sample->image, 131072);
    for (uint32_t row = 0; row < 3; row++) {
        uint64_t at = sample->manifest->tensors[1].offset + row * 65569 + 20;
        assert_memory_equal(image->bytes + at, sample->image + at, 100);
    }
    rft_bytes_close(&list);
}

/* ---- Damage */

SHARD_TEST(a_damaged_frame_is_asked_for_again_where_it_came_from)
{
    shards_offer(on, shards_offer_of(on, 1, 0));
    shards_frames(on, 0, 1, 0);
    assert_non_null(shards_said(on, 1, RFT_PULL));
    shards_frame(on, 1, 1, 0, 1, true);
    assert_null(shards_said(on, 0, RFT_RESEND));
    assert_non_null(shards_said(on, 1, RFT_RESEND));
    assert_int_equal(on->ranks[1].resent, 1);
    assert_int_equal(on->bench.session.report.bad_frames, 1);
    shards_frames(on, 1, 1, 0);
    shards_frames(on, 2, 1, 0);
    seal(on, 1);
    assert_int_equal(bench_state(&on->bench), STAGED);
}

SHARD_TEST(a_frame_that_a_rank_has_lost_is_asked_for_again)
{
    const uint32_t beat = on->bench.config.broadcast_heartbeat_ms;
    shards_offer(on, shards_offer_of(on, 1, 0));
    for (uint32_t i = 0; i < 2; i++)
        shards_frames(on, i, 1, 0);
    seal(on, 1);
    for (int i = 0; i < 3; i++) {
        bench_tick(&on->bench, beat);
        for (uint32_t rank = 0; rank < SHARD_RANKS; rank++)
            shards_hear(on, rank, sample_beat(BENCH_EPOCH));
    }
    assert_null(shards_said(on, 0, RFT_RESEND));
    assert_null(shards_said(on, 1, RFT_RESEND));
    assert_non_null(shards_said(on, 2, RFT_RESEND));
    shards_frames(on, 2, 1, 0);
    shards_work(on);
    assert_int_equal(bench_state(&on->bench), STAGED);
}

/* Right hashes over other bytes, in a block that one rank has whole and in one that two divide. */
SHARD_TEST(other_bytes_with_right_hashes_are_found)
{
    const uint64_t places[] = {5, 99999, 100001};
    on->bench.session.receive.verify_bytes = 1;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        sample_version *sample = bench_sample(&on->bench, 1);
        shards_offer(on, shards_offer_of(on, 1, 0));
        sample->image[places[i]] ^= 1;
        shards_all_frames(on, 1, 0);
        sample->image[places[i]] ^= 1;
        seal(on, 1);
        assert_int_equal(bench_failed(&on->bench), REFIT_ERR_CORRUPT);
        assert_int_equal(bench_state(&on->bench), CURRENT);
        shards_forget(on);
    }
    shards_apply(on, 1, 0);
}

SHARD_TEST(a_breach_of_the_protocol_costs_the_link_and_the_version)
{
    shards_offer(on, shards_offer_of(on, 1, 0));
    rft_message frame = {.kind = RFT_FRAME};
    frame.as.frame.version = 1;
    frame.as.frame.sequence = 1000;
    shards_hear(on, 1, frame);
    assert_int_equal(bench_failed(&on->bench), REFIT_ERR_PEER);
    assert_int_equal(bench_state(&on->bench), CURRENT);
    assert_false(shards_link(on, 1)->joined);
    shards_hear(on, 2, sample_commit(bench_sample(&on->bench, 1)));
    assert_false(shards_link(on, 2)->joined);
    assert_true(shards_link(on, 0)->joined);
}

/* ---- A rank that is lost */

static void assert_failed(shard_bench *on, uint32_t rank, const char *words)
{
    assert_int_equal(bench_failed(&on->bench), REFIT_ERR_PEER);
    assert_int_equal(bench_state(&on->bench), CURRENT);
    assert_non_null(strstr(shards_link(on, rank)->why, words));
}

static void return_rank(shard_bench *on, uint32_t rank)
{
    shards_forget(on);
    bench_tick(&on->bench, on->bench.config.broadcast_heartbeat_ms);
    assert_int_equal(count_said(on, rank, RFT_HELLO), 1);
    shards_welcome(on, rank);
    shards_apply(on, 2, 0);
}

SHARD_TEST(a_rank_that_leaves_fails_the_version_and_serves_the_next)
{
    shards_offer(on, shards_offer_of(on, 1, 0));
    shards_frames(on, 0, 1, 0);
    shards_hear(on, 1, sample_bye());
    assert_failed(on, 1, "the trainer closed");
    assert_non_null(shards_said(on, 1, RFT_BYE));
    return_rank(on, 1);
}

SHARD_TEST(a_rank_that_refuses_fails_the_version)
{
    shards_offer(on, shards_offer_of(on, 1, 0));
    shards_hear(on, 2, sample_refuse(REFIT_ERR_BUSY, false));
    assert_failed(on, 2, "no room for you");
    return_rank(on, 2);
}

SHARD_TEST(a_connection_that_fails_fails_the_version)
{
    refit_error why = {.status = REFIT_ERR_SECURITY, .text = "no keys"};
    shards_offer(on, shards_offer_of(on, 1, 0));
    rft_session_link_failed(&on->bench.session, shards_link(on, 0), &why, on->bench.now);
    assert_failed(on, 0, "no keys");
    return_rank(on, 0);
}

SHARD_TEST(a_silent_rank_is_lost)
{
    const uint32_t silence = on->bench.config.broadcast_heartbeat_timeout_ms;
    shards_offer(on, shards_offer_of(on, 1, 0));
    for (uint32_t past = 0; past < silence; past += silence / 4) {
        bench_tick(&on->bench, silence / 4);
        bench_hear(&on->bench, sample_beat(BENCH_EPOCH));
        for (uint32_t i = 0; i < 2; i++)
            shards_hear(on, i, sample_beat(BENCH_EPOCH));
        assert_non_null(shards_said(on, 0, RFT_BEAT));
        shards_forget(on);
        if (past + silence / 4 < silence) assert_int_equal(bench_state(&on->bench), STAGING);
    }
    bench_tick(&on->bench, 1);
    assert_false(shards_link(on, 2)->joined);
    assert_non_null(strstr(shards_link(on, 2)->why, "silent"));
    assert_int_equal(bench_state(&on->bench), CURRENT);
    return_rank(on, 2);
}

SHARD_TEST(a_rank_that_is_done_may_leave)
{
    shards_offer(on, shards_offer_of(on, 1, 0));
    shards_all_frames(on, 1, 0);
    shards_hear(on, 1, sample_bye());
    shards_hear(on, 0, sample_abort(bench_sample(&on->bench, 1)));
    seal(on, 1);
    assert_int_equal(bench_state(&on->bench), STAGED);
}

SHARD_TEST(a_version_that_a_rank_does_not_serve_fails)
{
    rft_message abort_of = sample_abort(bench_sample(&on->bench, 1));
    abort_of.as.failed.code = REFIT_ERR_STALE;
    shards_offer(on, shards_offer_of(on, 1, 0));
    shards_hear(on, 1, sample_abort(bench_sample(&on->bench, 2))); /* of another */
    assert_int_equal(bench_state(&on->bench), STAGING);
    shards_hear(on, 1, abort_of);
    assert_int_equal(bench_failed(&on->bench), REFIT_ERR_STALE);
    assert_int_equal(bench_state(&on->bench), CURRENT);
    shards_forget(on);
    shards_apply(on, 2, 0);
}

/* ---- Joining */

SHARD_TEST(a_rank_of_an_earlier_epoch_is_waited_for)
{
    shards_hear(on, 1, sample_bye());
    bench_tick(&on->bench, on->bench.config.broadcast_heartbeat_ms);
    shards_offer(on, shards_offer_of(on, 1, 0));
    shards_forget(on);
    for (int i = 0; i < 3; i++) {
        shards_hear(on, 1, sample_welcome(BENCH_EPOCH - 1, NULL));
        assert_null(shards_said(on, 1, RFT_PULL));
        bench_tick(&on->bench, on->bench.config.broadcast_heartbeat_ms);
    }
    assert_int_equal(count_said(on, 1, RFT_HELLO), 3);
    assert_int_equal(bench_state(&on->bench), STAGING);
    shards_welcome(on, 1);
    assert_int_equal(count_said(on, 1, RFT_PULL), 1);
    shards_all_frames(on, 1, 0);
    seal(on, 1);
    assert_int_equal(bench_state(&on->bench), STAGED);
}

SHARD_TEST(a_rank_that_leaves_the_others_is_lost)
{
    shards_offer(on, shards_offer_of(on, 1, 0));
    shards_hear(on, 1, sample_welcome(BENCH_EPOCH + 1, NULL));
    assert_failed(on, 1, "left");
}

SHARD_TEST(a_worker_joins_a_rank_under_another_name)
{
    bench_renew(&on->bench);
    bench_join(&on->bench, BENCH_EPOCH);
    assert_true(bench_said(&on->bench, RFT_HELLO)->as.hello.shards);
    bench_hear(&on->bench, sample_manifest(bench_sample(&on->bench, 1), BENCH_EPOCH));
    shards_tell(on);
    bench_tick(&on->bench, 0);
    const rft_message *hello = shards_said(on, 0, RFT_HELLO);
    assert_true(hello->as.hello.fetches);
    assert_false(hello->as.hello.shards);
    assert_false(hello->as.hello.shm);
    assert_int_equal(hello->as.hello.instance, on->bench.identity.instance);
    assert_true(hello->as.hello.worker.count > strlen(on->bench.identity.worker));
}

/* ---- The list */

static void assert_broken_off(shard_bench *on, rft_message shard)
{
    shards_forget(on);
    bench_hear(&on->bench, shard);
    assert_int_equal(bench_said(&on->bench, RFT_BYE)->as.bye.code, REFIT_ERR_PROTOCOL);
    assert_int_equal(bench_state(&on->bench), CONNECTING);
    bench_join(&on->bench, BENCH_EPOCH);
    bench_hear(&on->bench, sample_manifest(bench_sample(&on->bench, 1), BENCH_EPOCH));
    shards_tell(on);
}

SHARD_TEST(a_shard_that_lies_breaks_the_protocol)
{
    unsigned char entry[RFT_WANT_ENTRY_BYTES];
    memcpy(entry, on->ranks[2].rows.data, sizeof entry);
    entry[0] = 200; /* there is no such tensor */
    rft_message rows = shards_message(on, 1);
    rows.as.shard.rows = (rft_view){entry, sizeof entry};
    assert_broken_off(on, rows);
    rft_message rank = shards_message(on, 1);
    rank.as.shard.rank = SHARD_RANKS;
    assert_broken_off(on, rank);
    rft_message ranks = shards_message(on, 1);
    ranks.as.shard.ranks = SHARD_RANKS + 1;
    assert_broken_off(on, ranks);
    shards_apply(on, 1, 0); /* its links are as they were */
}

SHARD_TEST(rows_that_do_not_tile_break_the_protocol)
{
    rft_message shard = shards_message(on, 2);
    shard.as.shard.rows = (rft_view){0};
    bench_hear(&on->bench, shard);
    shards_offer(on, shards_offer_of(on, 1, 0));
    assert_int_equal(bench_failed(&on->bench), REFIT_ERR_PROTOCOL);
    assert_int_equal(bench_state(&on->bench), CONNECTING);
}

SHARD_TEST(an_offer_without_all_shards_breaks_the_protocol)
{
    bench_hear(&on->bench, sample_manifest(bench_sample(&on->bench, 1), BENCH_EPOCH));
    for (uint32_t i = 0; i + 1 < SHARD_RANKS; i++)
        bench_hear(&on->bench, shards_message(on, i));
    shards_offer(on, shards_offer_of(on, 1, 0));
    assert_int_equal(bench_failed(&on->bench), REFIT_ERR_PROTOCOL);
    assert_int_equal(bench_state(&on->bench), CONNECTING);
}

SHARD_TEST(shards_of_another_manifest_or_epoch_are_passed_over)
{
    rft_message other = shards_message(on, 1), past = shards_message(on, 1);
    other.as.shard.manifest.bytes[3] ^= 1;
    other.as.shard.rows = (rft_view){0};
    past.as.shard.epoch = BENCH_EPOCH - 1;
    past.as.shard.rows = (rft_view){0};
    bench_hear(&on->bench, other);
    bench_hear(&on->bench, past);
    shards_apply(on, 1, 0);
}

SHARD_TEST(a_rank_at_another_endpoint_has_another_link)
{
    const uint64_t serial = shards_link(on, 1)->serial, kept = shards_link(on, 2)->serial;
    rft_message moved = shards_message(on, 1);
    moved.as.shard.endpoint = rft_view_text("tcp://127.0.0.1:9");
    shards_offer(on, shards_offer_of(on, 1, 0));
    bench_hear(&on->bench, moved);
    assert_int_equal(bench_failed(&on->bench), REFIT_ERR_PEER);
    assert_int_equal(bench_state(&on->bench), CURRENT);
    assert_int_not_equal(shards_link(on, 1)->serial, serial);
    assert_int_equal(shards_link(on, 2)->serial, kept);
    return_rank(on, 1);
}

SHARD_TEST(links_outlive_a_manifest_and_end_with_the_epoch)
{
    const uint64_t serial = shards_link(on, 1)->serial;
    bench_hear(&on->bench, sample_manifest(bench_sample(&on->bench, 1), BENCH_EPOCH));
    assert_int_equal(shards_link(on, 1)->serial, serial);
    shards_tell(on);
    assert_int_equal(shards_link(on, 1)->serial, serial);
    shards_apply(on, 1, 0);
    bench_hear(&on->bench, sample_bye());
    bench_join(&on->bench, BENCH_EPOCH + 1);
    assert_null(shards_link(on, 1));
}

SHARD_TEST(fewer_ranks_with_another_manifest_have_fewer_links)
{
    shards_offer(on, shards_offer_of(on, 1, 0));
    bench_hear(&on->bench, sample_manifest(bench_sample(&on->bench, 1), BENCH_EPOCH));
    rft_message shard = shards_message(on, 0);
    shard.as.shard.ranks = 2;
    bench_hear(&on->bench, shard);
    assert_null(shards_link(on, 2));
    assert_int_equal(bench_failed(&on->bench), REFIT_ERR_PEER);
    assert_int_equal(bench_state(&on->bench), CURRENT);
}

/* ---- Workers of one host */

typedef struct shared_host {
    shard_bench receiver;
    shard_bench neighbor;
} shared_host;

static int open_host(void **state)
{
    static shared_host host;
    shards_open(&host.receiver);
    shards_open(&host.neighbor);
    rft_segment_place(host.receiver.bench.session.place);
    rft_segment_place(host.neighbor.bench.session.place);
    *state = &host;
    return 0;
}

static int close_host(void **state)
{
    shared_host *host = *state;
    shards_close(&host->neighbor);
    shards_close(&host->receiver);
    return 0;
}

static void share(shared_host *on)
{
    rft_message offer = shards_offer_of(&on->receiver, 1, 0);
    offer.as.offer.share = true;
    shards_offer(&on->receiver, offer);
    const rft_message *pull = bench_said(&on->receiver.bench, RFT_PULL);
    assert_int_equal(pull->as.pull.credits, 1);
    assert_true(pull->as.pull.image.count > 0);
    offer = shards_offer_of(&on->neighbor, 1, 0);
    offer.as.offer.segment = rft_view_text(on->receiver.bench.session.receive.image->memory.name);
    offer.as.offer.neighbor = true;
    shards_offer(&on->neighbor, offer);
    assert_int_equal(bench_state(&on->neighbor.bench), STAGING);
}

TEST_ON(shared_host *on, a_neighbor_maps_what_all_ranks_have_sent, open_host, close_host)
{
    share(on);
    shards_all_frames(&on->receiver, 1, 0);
    seal(&on->receiver, 1);
    seal(&on->neighbor, 1);
    assert_int_equal(bench_state(&on->receiver.bench), STAGED);
    assert_int_equal(bench_state(&on->neighbor.bench), STAGED);
    assert_null(on->neighbor.ranks[0].asked);
}

/* Frames count as there once all ranks have sent their parts. */
TEST_ON(shared_host *on, a_neighbor_goes_on_with_frames_that_are_whole, open_host, close_host)
{
    share(on);
    on->neighbor.bench.session.receive.verify_bytes = 1;
    shards_frames(&on->receiver, 0, 1, 0);
    assert_non_null(shards_said(&on->receiver, 1, RFT_PULL));
    for (uint32_t i = 1; i < 3; i++)
        shards_frame(&on->receiver, 1, 1, 0, i, false);
    shards_close(&on->receiver);
    shards_open(&on->receiver);
    shards_offer(&on->neighbor, shards_offer_of(&on->neighbor, 1, 0));
    assert_true(rft_receive_is_busy(&on->neighbor.bench.session.receive));
    for (uint32_t i = 0; i < SHARD_RANKS; i++) {
        assert_non_null(shards_said(&on->neighbor, i, RFT_PULL));
        assert_true(on->neighbor.ranks[i].have.count > 0);
        assert_int_equal(on->neighbor.ranks[i].have.data[0] & 7, 7);
    }
    shards_all_frames(&on->neighbor, 1, 0);
    seal(&on->neighbor, 1);
    assert_int_equal(bench_state(&on->neighbor.bench), STAGED);
    bench_commit(&on->neighbor.bench, 1);
    assert_image_is(bench_take(&on->neighbor.bench), bench_sample(&on->neighbor.bench, 1));
}

int main(void)
{
    return test_run("session_shards");
}
