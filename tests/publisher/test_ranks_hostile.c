/* Rank 0, and connections that say what the other ranks would, in every order and with every field
 * wrong by turns: it refuses with a status, keeps no more than it must, and goes on with honest
 * ranks. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "tests/support/seeded.h"
#include "tests/support/server_bench.h"
#include "tests/support/test.h"

#define RANKS  3u
#define SEEDS  60u
#define STEPS  400u
#define FIRST  1u /* connections: those that may be ranks */
#define SENDER 7u /* and one after the last */

typedef struct ranks_bench {
    server_bench server;
    rft_bytes rows[RANKS];
    rft_want *shards[RANKS]; /* of the store's manifest */
    rft_bytes sums, words;   /* of the last message */
    uint64_t seed;
    uint64_t version;
} ranks_bench;

/* ---- What each rank has */

static void give(ranks_bench *bench, uint32_t rank, rft_want_rows rows)
{
    assert_ok(rft_want_append(&bench->rows[rank], &rows, NULL));
}

static void divide(ranks_bench *bench)
{
    const uint64_t cut = 65539, first = 65536 * 2, row = 65569;
    give(bench, 0, (rft_want_rows){0, 0, 1, cut, cut});
    give(bench, 1, (rft_want_rows){0, cut, 1, first - cut, first - cut});
    give(bench, 0, (rft_want_rows){1, 0, 3, row, 30001});
    give(bench, 1, (rft_want_rows){1, 30001, 3, row, 20002});
    give(bench, 2, (rft_want_rows){1, 50003, 3, row, row - 50003});
    give(bench, 2, (rft_want_rows){4, 0, 1, 8, 8});
    give(bench, 1, (rft_want_rows){5, 0, 1, 5, 5});
}

static void open_bench(ranks_bench *bench, uint64_t seed)
{
    rft_manifest *manifest = NULL;
    *bench = (ranks_bench){.seed = seed};
    server_bench *server = &bench->server;
    server_bench_open(server, 2, false);
    assert_ok(rft_manifest_open(sample_tensors(), SAMPLE_TENSORS, SAMPLE_FRAME_BYTES,
                                &server->server.limits, &manifest, NULL));
    divide(bench);
    for (uint32_t i = 0; i < RANKS; i++)
        assert_ok(
            rft_want_open(manifest, rft_bytes_view(&bench->rows[i]), &bench->shards[i], NULL));
    rft_store_close(server->store);
    assert_ok(rft_store_open_shard(manifest, bench->shards[0], 2, &server->retired, &server->store,
                                   NULL));
    for (uint32_t i = 0; i < 2; i++)
        assert_ok(rft_store_renew(server->store, i, NULL));
    rft_server_adopt(&server->server, server->store);
    assert_ok(rft_ranks_open(&server->server, 0, RANKS, NULL));
}

static void close_bench(ranks_bench *bench)
{
    for (uint32_t i = 0; i < RANKS; i++) {
        rft_want_release(bench->shards[i]);
        rft_bytes_close(&bench->rows[i]);
    }
    rft_bytes_close(&bench->sums);
    rft_bytes_close(&bench->words);
    server_bench_close(&bench->server);
}

/* ---- What ranks say */

static void say(ranks_bench *bench, unsigned sender, rft_message message)
{
    server_bench_say(&bench->server, sender, message);
}

static void say_hello(ranks_bench *bench, unsigned sender, uint32_t rank, uint64_t instance)
{
    char name[32];
    rft_message hello = {.kind = RFT_HELLO};
    (void)snprintf(name, sizeof name, "rank-%u:%llu", rank, (unsigned long long)instance);
    hello.as.hello.protocol = RFT_PROTOCOL;
    hello.as.hello.worker = rft_view_text(name);
    hello.as.hello.instance = instance;
    hello.as.hello.window = 1;
    hello.as.hello.rank = rank;
    say(bench, sender, hello);
}

static rft_message shard_of(const ranks_bench *bench, uint32_t rank)
{
    rft_message shard = {.kind = RFT_SHARD};
    shard.as.shard.epoch = SERVER_EPOCH;
    shard.as.shard.manifest = bench->server.store->manifest->digest;
    shard.as.shard.rank = rank;
    shard.as.shard.ranks = RANKS;
    shard.as.shard.endpoint = rft_view_text("tcp://127.0.0.1:1");
    shard.as.shard.rows = rft_bytes_view(&bench->rows[rank % RANKS]);
    return shard;
}

/* The tensor's bytes that the rank has, one after the other; free them. */
static unsigned char *cut_of(const ranks_bench *bench, uint32_t rank, uint32_t tensor)
{
    const rft_want *shard = bench->shards[rank];
    const unsigned char *from =
        bench->server.sample->image + shard->manifest->tensors[tensor].offset;
    uint64_t offset, bytes;
    unsigned char *cut = malloc(shard->bytes + 1), *to = cut;
    assert_non_null(cut);
    rft_want_walk walk = rft_want_walk_begin(shard, tensor, 0, UINT64_MAX);
    while (rft_want_walk_next(&walk, &offset, &bytes)) {
        memcpy(to, from + offset, bytes);
        to += bytes;
    }
    return cut;
}

/* What an honest rank says of the version; in the bench until the next call. */
static rft_message sums_of(ranks_bench *bench, uint32_t rank)
{
    const rft_manifest *manifest = bench->server.store->manifest;
    rft_message message = {.kind = RFT_SUMS};
    rft_bytes_reset(&bench->sums);
    rft_bytes_reset(&bench->words);
    for (uint32_t i = 0; i < manifest->count; i++) {
        uint64_t sum;
        unsigned char encoded[8];
        if (manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        unsigned char *cut = cut_of(bench, rank, i);
        assert_ok(rft_shard_sum(bench->shards[rank], i, cut, &sum, &bench->words, NULL));
        rft_put_u64(encoded, sum);
        assert_ok(rft_bytes_append(&bench->sums, encoded, sizeof encoded, NULL));
        free(cut);
    }
    message.as.sums.version = bench->version;
    message.as.sums.tensors = rft_bytes_view(&bench->sums);
    message.as.sums.words = rft_bytes_view(&bench->words);
    return message;
}

/* ---- The trainer's calls */

static bool begin(ranks_bench *bench)
{
    uint64_t version = 0;
    server_bench *server = &bench->server;
    if (rft_transaction_prepare(&server->server, &version, NULL) != REFIT_OK) return false;
    bench->version = version;
    server_bench_begin(server, version);
    bench->server.sample = NULL;
    return true;
}

static void add_ready(void *user, uint32_t frame)
{
    rft_store_add_ready(user, frame);
}

/* Of the values of version 3, whatever it is called. */
static void write_all(ranks_bench *bench, const sample_version *sample)
{
    rft_store *store = bench->server.store;
    bench->server.sample = sample;
    for (uint32_t i = 0; i < store->manifest->count; i++) {
        if (store->manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        unsigned char *cut = cut_of(bench, 0, i);
        assert_ok(rft_store_write(store, i, cut, store->layout->tensors[i].bytes, add_ready, store,
                                  NULL));
        free(cut);
    }
}

/* An aborted version goes, and one that is under way is given up. */
static void settle(ranks_bench *bench)
{
    server_bench *server = &bench->server;
    const rft_transaction *transaction = &server->server.transaction;
    if (transaction->state == RFT_TRANSACTION_WRITING ||
        transaction->state == RFT_TRANSACTION_STAGING)
        rft_transaction_abort(&server->server, REFIT_ERR_CANCELLED, "the test wants it so");
    if (transaction->state == RFT_TRANSACTION_ABORTED) server_bench_settle(server);
}

/* ---- Honest ranks */

static void join_all(ranks_bench *bench)
{
    for (uint32_t rank = 1; rank < RANKS; rank++) {
        unsigned sender = SENDER + rank;
        say_hello(bench, sender, rank, 100 + rank);
        server_bench_count(&bench->server, sender, RFT_WELCOME);
        say(bench, sender, shard_of(bench, rank));
    }
    assert_true(bench->server.server.ranks.complete);
}

static void publish(ranks_bench *bench, const sample_version *sample)
{
    assert_true(begin(bench));
    write_all(bench, sample);
    server_bench_seal(&bench->server);
    for (uint32_t rank = 1; rank < RANKS; rank++)
        say(bench, SENDER + rank, sums_of(bench, rank));
    assert_int_equal(bench->server.server.transaction.state, RFT_TRANSACTION_IDLE);
    assert_int_equal(bench->server.server.current.version, bench->version);
    assert_true(rft_digest128_equal(&bench->server.server.current.digest, &sample->digest));
}

TEST(honest_ranks_publish)
{
    ranks_bench bench;
    sample_version sample;
    sample_open(&sample, 3);
    open_bench(&bench, 1);
    join_all(&bench);
    publish(&bench, &sample);
    publish(&bench, &sample);
    close_bench(&bench);
    sample_close(&sample);
}

/* ---- Single lies */

static void expect_refused(ranks_bench *bench, rft_message shard, refit_status status,
                           const char *words)
{
    unsigned sender = FIRST;
    server_bench_forget(&bench->server);
    say(bench, sender, shard);
    const rft_message *told = server_bench_told(&bench->server, sender, RFT_REFUSE);
    char reason[RFT_SENTENCE_BYTES];
    rft_view_print(told->as.refuse.reason, reason, sizeof reason);
    assert_int_equal(told->as.refuse.code, status);
    if (strstr(reason, words) == NULL) fail_msg("\"%s\" lacks \"%s\"", reason, words);
    assert_false(bench->server.server.ranks.complete);
}

TEST(shards_that_cannot_be_are_refused)
{
    ranks_bench bench;
    open_bench(&bench, 1);
    say_hello(&bench, FIRST, 1, 1);
    rft_message shard = shard_of(&bench, 1);
    shard.as.shard.ranks = RANKS + 1;
    expect_refused(&bench, shard, REFIT_ERR_INVALID, "rank 1 of 4 joins");
    shard = shard_of(&bench, 1);
    shard.as.shard.rank = 2;
    expect_refused(&bench, shard, REFIT_ERR_INVALID, "rank 1 of 3 joins");
    shard = shard_of(&bench, 1);
    shard.as.shard.manifest.bytes[3] ^= 1;
    expect_refused(&bench, shard, REFIT_ERR_INVALID, "other tensors than rank 0");
    unsigned char entry[RFT_WANT_ENTRY_BYTES] = {0};
    rft_put_u32(entry, SAMPLE_TENSORS);
    rft_put_u64(entry + 12, 1);
    rft_put_u64(entry + 20, 8);
    rft_put_u64(entry + 28, 8);
    shard = shard_of(&bench, 1);
    shard.as.shard.rows = (rft_view){entry, sizeof entry};
    expect_refused(&bench, shard, REFIT_ERR_PROTOCOL, "not of this version");
    say_hello(&bench, FIRST + 1, 2, 2); /* the last one has what rank 0 has: all are told */
    say(&bench, FIRST + 1, shard_of(&bench, 2));
    shard = shard_of(&bench, 1);
    shard.as.shard.rows = rft_bytes_view(&bench.rows[0]);
    expect_refused(&bench, shard, REFIT_ERR_INVALID, "ranks 0 and 1 both publish byte 0");
    assert_int_equal(server_bench_count(&bench.server, FIRST + 1, RFT_REFUSE), 1);
    close_bench(&bench);
}

static void expect_aborted(ranks_bench *bench, const char *words)
{
    const rft_transaction *transaction = &bench->server.server.transaction;
    assert_int_equal(transaction->state, RFT_TRANSACTION_ABORTED);
    assert_says(&transaction->result, words);
    server_bench_settle(&bench->server);
}

TEST(sums_that_cannot_be_end_the_version)
{
    ranks_bench bench;
    sample_version sample;
    sample_open(&sample, 3);
    open_bench(&bench, 1);
    for (uint32_t lie = 0; lie < 3; lie++) {
        join_all(&bench);
        assert_true(begin(&bench));
        write_all(&bench, &sample);
        server_bench_seal(&bench.server);
        rft_message sums = sums_of(&bench, 1);
        if (lie == 0) sums.as.sums.tensors.count -= 8;
        if (lie == 1) rft_put_u32(bench.words.data, SAMPLE_TENSORS);
        if (lie == 2) rft_put_u64(bench.words.data + 4, UINT64_MAX);
        say(&bench, SENDER + 1, sums);
        if (lie > 0) say(&bench, SENDER + 2, sums_of(&bench, 2));
        expect_aborted(&bench, lie == 0 ? "sums of other tensors" : "that no tensor has");
    }
    join_all(&bench);
    publish(&bench, &sample);
    close_bench(&bench);
    sample_close(&sample);
}

/* Of another version, twice, or from a worker: not counted. */
TEST(sums_that_are_not_asked_for_are_passed_over)
{
    ranks_bench bench;
    sample_version sample;
    sample_open(&sample, 3);
    open_bench(&bench, 1);
    join_all(&bench);
    assert_true(begin(&bench));
    write_all(&bench, &sample);
    server_bench_seal(&bench.server);
    rft_message sums = sums_of(&bench, 1);
    for (uint64_t version = 1; version < 4; version++) {
        sums.as.sums.version = bench.version + version;
        say(&bench, SENDER + 1, sums);
    }
    assert_int_equal(bench.server.server.ranks.summed, 1);
    for (uint32_t i = 0; i < 5; i++)
        say(&bench, SENDER + 1, sums_of(&bench, 1));
    assert_int_equal(bench.server.server.ranks.summed, 2);
    assert_int_equal(bench.server.server.transaction.state, RFT_TRANSACTION_STAGING);
    say(&bench, SENDER + 2, sums_of(&bench, 2));
    assert_int_equal(bench.server.server.transaction.state, RFT_TRANSACTION_IDLE);
    assert_true(rft_digest128_equal(&bench.server.server.current.digest, &sample.digest));
    close_bench(&bench);
    sample_close(&sample);
}

/* The process of before had the version under way, and this one has not. */
TEST(a_rank_that_another_process_takes_over_ends_the_version)
{
    ranks_bench bench;
    sample_version sample;
    sample_open(&sample, 3);
    open_bench(&bench, 1);
    join_all(&bench);
    assert_true(begin(&bench));
    write_all(&bench, &sample);
    server_bench_seal(&bench.server);
    say(&bench, SENDER + 1, sums_of(&bench, 1));
    say_hello(&bench, FIRST, 1, 5);
    say(&bench, FIRST, shard_of(&bench, 1));
    expect_aborted(&bench, "rank 1 has joined anew");
    assert_true(bench.server.server.ranks.complete);
    close_bench(&bench);
    sample_close(&sample);
}

/* It has lost a connection, and nothing else. */
TEST(a_rank_that_joins_again_keeps_the_version)
{
    ranks_bench bench;
    sample_version sample;
    sample_open(&sample, 3);
    open_bench(&bench, 1);
    join_all(&bench);
    assert_true(begin(&bench));
    write_all(&bench, &sample);
    server_bench_seal(&bench.server);
    join_all(&bench);
    for (uint32_t rank = 1; rank < RANKS; rank++)
        say(&bench, SENDER + rank, sums_of(&bench, rank));
    assert_int_equal(bench.server.server.transaction.state, RFT_TRANSACTION_IDLE);
    assert_true(rft_digest128_equal(&bench.server.server.current.digest, &sample.digest));
    close_bench(&bench);
    sample_close(&sample);
}

static void say_failed(ranks_bench *bench, uint32_t rank, uint64_t version)
{
    rft_message failed = {.kind = RFT_FAILED};
    failed.as.failed.version = version;
    failed.as.failed.code = REFIT_ERR_TIMEOUT;
    failed.as.failed.kept = true;
    failed.as.failed.reason = rft_view_text("rank 0 has not decided in time");
    server_bench_forget(&bench->server);
    say(bench, SENDER + rank, failed);
}

/* It was lost when that was told, and waits for it. */
TEST(a_rank_that_asks_is_told_what_became_of_a_version)
{
    ranks_bench bench;
    sample_version sample;
    sample_open(&sample, 3);
    open_bench(&bench, 1);
    join_all(&bench);
    publish(&bench, &sample);
    uint64_t committed = bench.version;
    say_failed(&bench, 1, committed);
    const rft_message *told = server_bench_told(&bench.server, SENDER + 1, RFT_COMMIT);
    assert_int_equal(told->as.commit.version, committed);
    say_failed(&bench, 1, committed + 1);
    told = server_bench_told(&bench.server, SENDER + 1, RFT_ABORT);
    assert_int_equal(told->as.failed.version, committed + 1);
    publish(&bench, &sample);
    close_bench(&bench);
    sample_close(&sample);
}

/* And may begin it. */
TEST(a_rank_that_joins_again_hears_of_the_version_under_way)
{
    ranks_bench bench;
    sample_version sample;
    sample_open(&sample, 3);
    open_bench(&bench, 1);
    join_all(&bench);
    assert_true(begin(&bench));
    server_bench_forget(&bench.server);
    say(&bench, SENDER + 1, shard_of(&bench, 1));
    const rft_message *told = server_bench_told(&bench.server, SENDER + 1, RFT_OFFER);
    assert_int_equal(told->as.offer.version, bench.version);
    write_all(&bench, &sample);
    server_bench_seal(&bench.server);
    for (uint32_t rank = 1; rank < RANKS; rank++)
        say(&bench, SENDER + rank, sums_of(&bench, rank));
    assert_int_equal(bench.server.server.transaction.state, RFT_TRANSACTION_IDLE);
    close_bench(&bench);
    sample_close(&sample);
}

/* ---- A worker that loses a rank */

static void join_worker(ranks_bench *bench, unsigned sender)
{
    rft_message hello = {.kind = RFT_HELLO}, join = {.kind = RFT_JOIN};
    hello.as.hello.protocol = RFT_PROTOCOL;
    hello.as.hello.worker = rft_view_text("w");
    hello.as.hello.instance = sender;
    hello.as.hello.window = 1;
    hello.as.hello.shards = true;
    say(bench, sender, hello);
    join.as.join.epoch = SERVER_EPOCH;
    say(bench, sender, join);
}

/* It has no part of a version that is committed, and may have it once the two are connected. */
TEST(a_worker_that_lost_a_rank_is_offered_the_version_again)
{
    ranks_bench bench;
    sample_version sample;
    rft_message failed = {.kind = RFT_FAILED};
    sample_open(&sample, 3);
    open_bench(&bench, 1);
    join_all(&bench);
    publish(&bench, &sample);
    join_worker(&bench, FIRST);
    assert_int_equal(server_bench_count(&bench.server, FIRST, RFT_OFFER), 1);
    failed.as.failed.version = bench.version;
    failed.as.failed.kept = true;
    failed.as.failed.reason = rft_view_text("rank 1 is lost");
    failed.as.failed.code = REFIT_ERR_PEER;
    server_bench_forget(&bench.server);
    say(&bench, FIRST, failed);
    assert_int_equal(server_bench_count(&bench.server, FIRST, RFT_OFFER), 1);
    failed.as.failed.code = REFIT_ERR_HOST_MEMORY;
    server_bench_forget(&bench.server);
    say(&bench, FIRST, failed);
    assert_int_equal(server_bench_count(&bench.server, FIRST, RFT_OFFER), 0);
    close_bench(&bench);
    sample_close(&sample);
}

/* ---- Another rank, which loses rank 0 */

static void hear(server_bench *server, rft_message message, int64_t now)
{
    rft_rank_link_message(&server->server, &message, now);
}

static void hear_joined(server_bench *server, int64_t now)
{
    rft_message welcome = {.kind = RFT_WELCOME}, shard = {.kind = RFT_SHARD};
    welcome.as.welcome.protocol = RFT_PROTOCOL;
    welcome.as.welcome.epoch = SERVER_EPOCH + 1;
    welcome.as.welcome.frame_bytes = server->server.config->broadcast_frame_bytes;
    hear(server, welcome, now);
    shard.as.shard.epoch = SERVER_EPOCH + 1;
    hear(server, shard, now);
    assert_int_equal(server->server.ranks.link.state, RFT_LINK_JOINED);
}

/* Rank 0 has aborted the version, and could not say so. */
TEST(a_version_offered_before_rank_0_was_lost_is_not_begun_after)
{
    ranks_bench bench;
    rft_message offer = {.kind = RFT_OFFER};
    open_bench(&bench, 1);
    rft_server *server = &bench.server.server;
    assert_ok(rft_ranks_open(server, 1, RANKS, NULL));
    int64_t now = rft_now();
    rft_rank_link_open(server, "tcp://127.0.0.1:1", 5, now);
    hear_joined(&bench.server, now);
    offer.as.offer.epoch = SERVER_EPOCH + 1;
    offer.as.offer.version = 3;
    hear(&bench.server, offer, now);
    assert_int_equal(server->ranks.link.offered, 3);
    now = rft_after_ms(now, server->config->broadcast_heartbeat_timeout_ms);
    rft_rank_link_tick(server, now);
    assert_int_equal(server->ranks.link.state, RFT_LINK_CONNECTING);
    hear_joined(&bench.server, now);
    assert_int_equal(server->ranks.link.offered, 0);
    hear(&bench.server, offer, now);
    assert_int_equal(server->ranks.link.offered, 3);
    rft_send_queue_reset(&server->ranks.link.send_queue);
    close_bench(&bench);
}

/* ---- Many lies */

static uint64_t draw(ranks_bench *bench, uint64_t bound)
{
    return seeded_below(&bench->seed, bound);
}

static void lie_shard(ranks_bench *bench, unsigned sender)
{
    static unsigned char rows[2 * RFT_WANT_ENTRY_BYTES];
    rft_message shard = shard_of(bench, (uint32_t)draw(bench, RANKS));
    if (draw(bench, 5) == 0) shard.as.shard.rank = (uint32_t)draw(bench, RFT_RANKS_MOST);
    if (draw(bench, 8) == 0) shard.as.shard.ranks = 2 + (uint32_t)draw(bench, RANKS);
    if (draw(bench, 8) == 0) shard.as.shard.epoch++;
    if (draw(bench, 8) == 0) shard.as.shard.manifest.bytes[draw(bench, 16)] ^= 1;
    if (draw(bench, 3) == 0) shard.as.shard.rows = rft_bytes_view(&bench->rows[draw(bench, RANKS)]);
    if (draw(bench, 6) == 0 && shard.as.shard.rows.count > 0) {
        size_t count =
            shard.as.shard.rows.count < sizeof rows ? shard.as.shard.rows.count : sizeof rows;
        memcpy(rows, shard.as.shard.rows.data, count);
        rows[draw(bench, count)] ^= (unsigned char)(1 + draw(bench, 255));
        shard.as.shard.rows = (rft_view){rows, count};
    }
    say(bench, sender, shard);
}

static void lie_sums(ranks_bench *bench, unsigned sender, const sample_version *sample)
{
    bench->server.sample = sample;
    rft_message sums = sums_of(bench, (uint32_t)draw(bench, RANKS));
    uint64_t versions[] = {bench->version, bench->version, bench->version + 1, 1, UINT64_MAX};
    sums.as.sums.version = versions[draw(bench, 5)];
    if (sums.as.sums.version == 0) sums.as.sums.version = 1;
    if (draw(bench, 4) == 0) sums.as.sums.tensors.count -= 8;
    if (draw(bench, 4) == 0) sums.as.sums.words.count = 0;
    for (uint64_t i = draw(bench, 3); i > 0 && bench->words.count > 0; i--)
        bench->words.data[draw(bench, bench->words.count)] ^= (unsigned char)draw(bench, 256);
    say(bench, sender, sums);
}

static void lie(ranks_bench *bench, const sample_version *sample)
{
    unsigned sender = FIRST + (unsigned)draw(bench, SENDER - FIRST);
    rft_message message = {.kind = RFT_BYE};
    switch (draw(bench, 9)) {
    case 0:
    case 1: say_hello(bench, sender, (uint32_t)draw(bench, RANKS + 1), 1 + draw(bench, 6)); break;
    case 2:
    case 3:
    case 4: lie_shard(bench, sender); break;
    case 5:
    case 6: lie_sums(bench, sender, sample); break;
    case 7:
        message = server_failed(draw(bench, 2) == 0 ? bench->version : 9, REFIT_ERR_DEVICE, true);
        if (message.as.failed.version > 0) say(bench, sender, message);
        break;
    default:
        message.as.bye.reason = rft_view_text("it leaves");
        if (draw(bench, 3) == 0) message = server_pull(1 + draw(bench, 3), 1);
        if (draw(bench, 2) == 0) message = (rft_message){.kind = RFT_BEAT};
        say(bench, sender, message);
    }
}

static void step_trainer(ranks_bench *bench, const sample_version *sample)
{
    const rft_transaction *transaction = &bench->server.server.transaction;
    switch (transaction->state) {
    case RFT_TRANSACTION_IDLE: (void)begin(bench); break;
    case RFT_TRANSACTION_WRITING:
        write_all(bench, sample);
        server_bench_seal(&bench->server);
        break;
    case RFT_TRANSACTION_STAGING: settle(bench); break;
    case RFT_TRANSACTION_ABORTED: server_bench_settle(&bench->server); break;
    default: break;
    }
}

/* Whatever was said, honest ranks publish what they have afterwards. */
TEST(liars_are_refused_and_end_no_more_than_a_version)
{
    sample_version sample;
    uint64_t begun = 0;
    sample_open(&sample, 3);
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        ranks_bench bench;
        open_bench(&bench, seed * 7919);
        for (uint32_t i = 0; i < STEPS; i++) {
            uint64_t kind = draw(&bench, 12);
            if (kind == 0)
                step_trainer(&bench, &sample);
            else if (kind == 1 && draw(&bench, 20) == 0)
                server_bench_tick(&bench.server, (uint32_t)draw(&bench, 30000));
            else if (kind == 2 && draw(&bench, 4) == 0)
                join_all(&bench);
            else
                lie(&bench, &sample);
            server_bench_forget(&bench.server);
            if (bench.server.server.ranks.summed > RANKS) fail();
        }
        begun += bench.version;
        settle(&bench);
        server_bench_tick(&bench.server, 60000); /* all of them are silent */
        server_bench_forget(&bench.server);
        join_all(&bench);
        publish(&bench, &sample);
        close_bench(&bench);
    }
    assert_true(begun > SEEDS);
    sample_close(&sample);
}

int main(void)
{
    return test_run("ranks_hostile");
}
