/* Three ranks on the bench. */
#include "tests/support/shard_bench.h"

#include <stdio.h>
#include <stdlib.h>

#include "tests/support/test.h"

#define SPLIT   100000u /* of the first tensor: within a frame */
#define COLUMNS 30000u

static void add(rft_bytes *list, uint32_t tensor, uint64_t offset, uint64_t count, uint64_t stride,
                uint64_t bytes)
{
    const rft_want_rows rows = {tensor, offset, count, stride, bytes};
    assert_ok(rft_want_append(list, &rows, NULL));
}

static void divide(shard_bench *on)
{
    const refit_tensor *tensors = sample_tensors();
    const uint64_t row = 65569;
    rft_bytes *first = &on->ranks[0].rows, *second = &on->ranks[1].rows,
              *third = &on->ranks[2].rows;
    add(first, 0, 0, 1, SPLIT, SPLIT);
    add(first, 1, 0, 3, row, COLUMNS);
    add(second, 0, SPLIT, 1, tensors[0].bytes - SPLIT, tensors[0].bytes - SPLIT);
    add(second, 1, COLUMNS, 3, row, row - COLUMNS);
    add(second, 4, 0, 1, 8, 8);
    add(third, 5, 0, 1, 5, 5);
}

/* ---- Opening and closing */

void shards_open(shard_bench *on)
{
    memset(on, 0, sizeof *on);
    bench_open(&on->bench);
    divide(on);
    bench_join(&on->bench, BENCH_EPOCH);
    bench_hear(&on->bench, sample_manifest(bench_sample(&on->bench, 1), BENCH_EPOCH));
    shards_tell(on);
    bench_tick(&on->bench, 0);
    for (uint32_t i = 0; i < SHARD_RANKS; i++) {
        assert_non_null(shards_said(on, i, RFT_HELLO));
        shards_welcome(on, i);
    }
    shards_forget(on);
}

void shards_close(shard_bench *on)
{
    bench_close(&on->bench);
    for (uint32_t i = 0; i < SHARD_RANKS; i++) {
        rft_bytes_close(&on->ranks[i].rows);
        rft_bytes_close(&on->ranks[i].wanted);
        rft_bytes_close(&on->ranks[i].have);
        rft_want_release(on->ranks[i].asked);
    }
}

int shards_setup(void **state)
{
    static shard_bench on;
    shards_open(&on);
    *state = &on;
    return 0;
}

int shards_teardown(void **state)
{
    shards_close(*state);
    return 0;
}

/* ---- What the coordinator says */

rft_message shards_message(const shard_bench *on, uint32_t rank)
{
    static const char *const endpoints[SHARD_RANKS] = {"", "tcp://127.0.0.1:2",
                                                       "tcp://127.0.0.1:3"};
    rft_message message = {.kind = RFT_SHARD};
    message.as.shard.epoch = BENCH_EPOCH;
    message.as.shard.manifest = on->bench.samples[0].manifest->digest;
    message.as.shard.rank = rank;
    message.as.shard.ranks = SHARD_RANKS;
    message.as.shard.endpoint = rft_view_text(endpoints[rank]);
    message.as.shard.rows = rft_bytes_view(&on->ranks[rank].rows);
    return message;
}

void shards_tell(shard_bench *on)
{
    for (uint32_t i = 0; i < SHARD_RANKS; i++)
        bench_hear(&on->bench, shards_message(on, i));
}

rft_message shards_offer_of(shard_bench *on, uint64_t version, uint64_t base)
{
    rft_message offer = sample_offer(bench_sample(&on->bench, version), BENCH_EPOCH, base, NULL, 0);
    offer.as.offer.ranks = SHARD_RANKS;
    return offer;
}

void shards_offer(shard_bench *on, rft_message offer)
{
    bench_hear(&on->bench, offer);
}

/* ---- Links */

rft_shard_link *shards_link(shard_bench *on, uint32_t rank)
{
    return rft_shard_links_find(&on->bench.session.links, rank);
}

static void note_want(shard_bench *on, shard_rank *rank, const rft_message *want)
{
    bool whole;
    const rft_want_slice slice = {
        .from = want->as.want.from, .more = want->as.want.more, .rows = want->as.want.rows};
    assert_ok(rft_want_slice_add(&rank->wanted, &slice, &on->bench.session.limits, &whole, NULL));
    rank->wants += whole;
}

static void note_pull(shard_bench *on, shard_rank *rank, const rft_message *pull)
{
    const rft_manifest *manifest = bench_sample(&on->bench, 1)->manifest;
    if (pull->as.pull.manifest.count == 0) return;
    const rft_bytes *rows = pull->as.pull.part ? &rank->wanted : &rank->rows;
    assert_int_equal(pull->as.pull.manifest.count, 16);
    assert_memory_equal(pull->as.pull.manifest.data, manifest->digest.bytes, 16);
    rft_want_release(rank->asked);
    assert_ok(rft_want_open(manifest, rft_bytes_view(rows), &rank->asked, NULL));
    rft_bytes_reset(&rank->have);
    assert_ok(
        rft_bytes_append(&rank->have, pull->as.pull.have.data, pull->as.pull.have.count, NULL));
}

/* Takes the messages out of the link's send queue. */
static void listen_to(shard_bench *on, uint32_t number)
{
    rft_outgoing next;
    shard_rank *rank = &on->ranks[number];
    rft_shard_link *link = shards_link(on, number);
    while (link != NULL && rft_send_queue_take(&link->send_queue, &next)) {
        rft_message *message = &rank->said[rank->said_count];
        assert_true(rank->said_count < SHARD_SAID);
        assert_ok(rft_message_decode(next.message, &on->bench.session.limits, message, NULL));
        rank->said_count++;
        if (message->kind == RFT_WANT) note_want(on, rank, message);
        if (message->kind == RFT_PULL) note_pull(on, rank, message);
        if (message->kind == RFT_RESEND)
            rank->resent = rft_get_u32(message->as.resend.sequences.data);
    }
    if (link != NULL) rft_send_queue_reset(&link->send_queue);
}

static void hear(shard_bench *on, uint32_t rank, const rft_message *message, rft_view payload)
{
    listen_to(on, rank);
    rft_session_link_message(&on->bench.session, shards_link(on, rank), message, payload,
                             on->bench.now);
    listen_to(on, rank);
}

void shards_hear(shard_bench *on, uint32_t rank, rft_message message)
{
    hear(on, rank, &message, (rft_view){0});
}

void shards_welcome(shard_bench *on, uint32_t rank)
{
    shards_hear(on, rank, sample_welcome(BENCH_EPOCH, NULL));
}

void shards_frame(shard_bench *on, uint32_t rank, uint64_t version, uint64_t base,
                  uint32_t sequence, bool damaged)
{
    sample_version *sample = bench_sample(&on->bench, version);
    unsigned char *same = base == 0 ? NULL : sample_same(sample, bench_sample(&on->bench, base));
    const rft_frame_source source = {
        .image = sample->image, .same = same, .want = on->ranks[rank].asked};
    rft_frame frame;
    rft_message message = {.kind = RFT_FRAME};
    assert_ok(rft_frame_encode(sample->manifest, sequence, &source, &sample->modes,
                               &sample->scratch, &frame, NULL));
    message.as.frame.version = version;
    message.as.frame.sequence = sequence;
    message.as.frame.hash = frame.hash ^ damaged;
    message.as.frame.modes = rft_bytes_view(&sample->modes);
    hear(on, rank, &message, frame.payload);
    free(same);
}

void shards_frames(shard_bench *on, uint32_t rank, uint64_t version, uint64_t base)
{
    const shard_rank *it = &on->ranks[rank];
    listen_to(on, rank);
    for (uint32_t i = 0; i < bench_sample(&on->bench, version)->manifest->frame_count; i++) {
        bool had = it->have.count > 0 && (it->have.data[i / 8] >> (i % 8) & 1) != 0;
        bool sent = it->asked != NULL && rft_want_frame(it->asked, i) != RFT_WANT_NONE && !had;
        if (sent) shards_frame(on, rank, version, base, i, false);
    }
}

void shards_all_frames(shard_bench *on, uint64_t version, uint64_t base)
{
    for (uint32_t i = 0; i < SHARD_RANKS; i++)
        shards_frames(on, i, version, base);
}

const rft_message *shards_said(shard_bench *on, uint32_t rank, rft_message_kind kind)
{
    listen_to(on, rank);
    for (uint32_t i = on->ranks[rank].said_count; i > 0; i--)
        if (on->ranks[rank].said[i - 1].kind == kind) return &on->ranks[rank].said[i - 1];
    return NULL;
}

void shards_forget(shard_bench *on)
{
    bench_forget(&on->bench);
    for (uint32_t i = 0; i < SHARD_RANKS; i++) {
        listen_to(on, i);
        on->ranks[i].said_count = 0;
    }
}

/* ---- One version */

void shards_work(shard_bench *on)
{
    while (rft_receive_is_busy(&on->bench.session.receive)) {
        assert_true(rft_session_tick_at(&on->bench.session) <= on->bench.now);
        bench_tick(&on->bench, 0);
    }
}

void shards_apply(shard_bench *on, uint64_t version, uint64_t base)
{
    session_bench *bench = &on->bench;
    shards_offer(on, shards_offer_of(on, version, base));
    shards_all_frames(on, version, base);
    bench_hear(bench, sample_seal(bench_sample(bench, version)));
    shards_work(on);
    assert_int_equal(bench_state(bench), STAGED);
    bench_commit(bench, version);
    assert_image_is(bench_take(bench), bench_sample(bench, version));
    rft_session_accept(&bench->session, bench->now);
    rft_session_release(&bench->session, bench->now);
    shards_forget(on);
}
