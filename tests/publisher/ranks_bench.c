/* Ranks on the bench: see ranks_bench.h. */
#include "ranks_bench.h"

#include <stdio.h>
#include <stdlib.h>

#include "tests/support/test.h"

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

void ranks_bench_open(ranks_bench *bench)
{
    rft_manifest *manifest = NULL;
    *bench = (ranks_bench){.version = 0};
    sample_open(&bench->sample, 3);
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

void ranks_bench_close(ranks_bench *bench)
{
    for (uint32_t i = 0; i < RANKS; i++) {
        rft_want_release(bench->shards[i]);
        rft_bytes_close(&bench->rows[i]);
    }
    rft_bytes_close(&bench->sums);
    rft_bytes_close(&bench->words);
    server_bench_close(&bench->server);
    sample_close(&bench->sample);
}

int ranks_bench_setup(void **state)
{
    static ranks_bench bench;
    ranks_bench_open(&bench);
    *state = &bench;
    return 0;
}

int ranks_bench_teardown(void **state)
{
    ranks_bench_close(*state);
    return 0;
}

/* ---- What ranks say */

void ranks_bench_say(ranks_bench *bench, unsigned sender, rft_message message)
{
    server_bench_say(&bench->server, sender, message);
}

void ranks_bench_hello(ranks_bench *bench, unsigned sender, uint32_t rank, uint64_t instance)
{
    char name[32];
    rft_message hello = {.kind = RFT_HELLO};
    (void)snprintf(name, sizeof name, "rank-%u:%llu", rank, (unsigned long long)instance);
    hello.as.hello.protocol = RFT_PROTOCOL;
    hello.as.hello.worker = rft_view_text(name);
    hello.as.hello.instance = instance;
    hello.as.hello.window = 1;
    hello.as.hello.rank = rank;
    ranks_bench_say(bench, sender, hello);
}

rft_message ranks_bench_shard(const ranks_bench *bench, uint32_t rank)
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
    const unsigned char *from = bench->sample.image + shard->manifest->tensors[tensor].offset;
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
rft_message ranks_bench_sums(ranks_bench *bench, uint32_t rank)
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

bool ranks_bench_begin(ranks_bench *bench)
{
    uint64_t version = 0;
    server_bench *server = &bench->server;
    if (rft_transaction_prepare(&server->server, &version, NULL) != REFIT_OK) return false;
    bench->version = version;
    server_bench_begin(server, version);
    return true;
}

static void add_ready(void *user, uint32_t frame)
{
    rft_store_add_ready(user, frame);
}

void ranks_bench_write(ranks_bench *bench)
{
    rft_store *store = bench->server.store;
    bench->server.sample = &bench->sample;
    for (uint32_t i = 0; i < store->manifest->count; i++) {
        if (store->manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        unsigned char *cut = cut_of(bench, 0, i);
        assert_ok(rft_store_write(store, i, cut, store->layout->tensors[i].bytes, add_ready, store,
                                  NULL));
        free(cut);
    }
}

/* An aborted version goes, and one that is under way is given up. */
void ranks_bench_settle(ranks_bench *bench)
{
    server_bench *server = &bench->server;
    const rft_transaction *transaction = &server->server.transaction;
    if (transaction->state == RFT_TRANSACTION_WRITING ||
        transaction->state == RFT_TRANSACTION_STAGING)
        rft_transaction_abort(&server->server, REFIT_ERR_CANCELLED, "the test wants it so");
    if (transaction->state == RFT_TRANSACTION_ABORTED) server_bench_settle(server);
}

void ranks_bench_expect_aborted(ranks_bench *bench, const char *words)
{
    const rft_transaction *transaction = &bench->server.server.transaction;
    assert_int_equal(transaction->state, RFT_TRANSACTION_ABORTED);
    assert_says(&transaction->result, words);
    server_bench_settle(&bench->server);
}

/* ---- Honest ranks */

void ranks_bench_say_shards(ranks_bench *bench)
{
    for (uint32_t rank = 1; rank < RANKS; rank++) {
        unsigned sender = SENDER + rank;
        ranks_bench_hello(bench, sender, rank, 100 + rank);
        server_bench_count(&bench->server, sender, RFT_WELCOME);
        ranks_bench_say(bench, sender, ranks_bench_shard(bench, rank));
    }
}

void ranks_bench_join(ranks_bench *bench)
{
    ranks_bench_say_shards(bench);
    assert_true(bench->server.server.ranks.complete);
}

void ranks_bench_publish(ranks_bench *bench)
{
    assert_true(ranks_bench_begin(bench));
    ranks_bench_write(bench);
    server_bench_seal(&bench->server);
    for (uint32_t rank = 1; rank < RANKS; rank++)
        ranks_bench_say(bench, SENDER + rank, ranks_bench_sums(bench, rank));
    assert_int_equal(bench->server.server.transaction.state, RFT_TRANSACTION_IDLE);
    assert_int_equal(bench->server.server.current.version, bench->version);
    assert_true(rft_digest128_equal(&bench->server.server.current.digest, &bench->sample.digest));
}
