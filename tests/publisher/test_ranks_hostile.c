/* Rank 0, and connections that say what the other ranks would, in every order and with every field
 * wrong by turns: it refuses with a status, keeps no more than it must, and goes on with honest
 * ranks. */
#include "ranks_bench.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"

#define SEEDS 60u
#define STEPS 400u

/* ---- Single lies */

static void expect_refused(ranks_bench *bench, rft_message shard, refit_status status,
                           const char *words)
{
    unsigned sender = FIRST;
    server_bench_forget(&bench->server);
    ranks_bench_say(bench, sender, shard);
    const rft_message *told = server_bench_told(&bench->server, sender, RFT_REFUSE);
    char reason[RFT_SENTENCE_BYTES];
    rft_view_print(told->as.refuse.reason, reason, sizeof reason);
    assert_int_equal(told->as.refuse.code, status);
    if (strstr(reason, words) == NULL) fail_msg("\"%s\" lacks \"%s\"", reason, words);
    assert_false(bench->server.server.ranks.complete);
}

ON_RANKS(shards_that_cannot_be_are_refused)
{
    ranks_bench_hello(bench, FIRST, 1, 1);
    rft_message shard = ranks_bench_shard(bench, 1);
    shard.as.shard.ranks = RANKS + 1;
    expect_refused(bench, shard, REFIT_ERR_INVALID, "rank 1 of 4 joins");
    shard = ranks_bench_shard(bench, 1);
    shard.as.shard.rank = 2;
    expect_refused(bench, shard, REFIT_ERR_INVALID, "rank 1 of 3 joins");
    shard = ranks_bench_shard(bench, 1);
    shard.as.shard.manifest.bytes[3] ^= 1;
    expect_refused(bench, shard, REFIT_ERR_INVALID, "other tensors than rank 0");
    unsigned char entry[RFT_WANT_ENTRY_BYTES] = {0};
    rft_put_u32(entry, SAMPLE_TENSORS);
    rft_put_u64(entry + 12, 1);
    rft_put_u64(entry + 20, 8);
    rft_put_u64(entry + 28, 8);
    shard = ranks_bench_shard(bench, 1);
    shard.as.shard.rows = (rft_view){entry, sizeof entry};
    expect_refused(bench, shard, REFIT_ERR_PROTOCOL, "not of this version");
    ranks_bench_hello(bench, FIRST + 1, 2, 2); /* the last one has what rank 0 has: all are told */
    ranks_bench_say(bench, FIRST + 1, ranks_bench_shard(bench, 2));
    shard = ranks_bench_shard(bench, 1);
    shard.as.shard.rows = rft_bytes_view(&bench->rows[0]);
    expect_refused(bench, shard, REFIT_ERR_INVALID, "ranks 0 and 1 both publish byte 0");
    assert_int_equal(server_bench_count(&bench->server, FIRST + 1, RFT_REFUSE), 1);
}

ON_RANKS(sums_that_cannot_be_end_the_version)
{
    for (uint32_t lie = 0; lie < 3; lie++) {
        ranks_bench_join(bench);
        assert_true(ranks_bench_begin(bench));
        ranks_bench_write(bench);
        server_bench_seal(&bench->server);
        rft_message sums = ranks_bench_sums(bench, 1);
        if (lie == 0) sums.as.sums.tensors.count -= 8;
        if (lie == 1) rft_put_u32(bench->words.data, SAMPLE_TENSORS);
        if (lie == 2) rft_put_u64(bench->words.data + 4, UINT64_MAX);
        ranks_bench_say(bench, SENDER + 1, sums);
        if (lie > 0) ranks_bench_say(bench, SENDER + 2, ranks_bench_sums(bench, 2));
        ranks_bench_expect_aborted(bench,
                                   lie == 0 ? "sums of other tensors" : "that no tensor has");
    }
    ranks_bench_join(bench);
    ranks_bench_publish(bench);
}

/* ---- Many lies */

static uint64_t draw(ranks_bench *bench, uint64_t bound)
{
    return seeded_below(&bench->seed, bound);
}

static void lie_shard(ranks_bench *bench, unsigned sender)
{
    static unsigned char rows[2 * RFT_WANT_ENTRY_BYTES];
    rft_message shard = ranks_bench_shard(bench, (uint32_t)draw(bench, RANKS));
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
    ranks_bench_say(bench, sender, shard);
}

static void lie_sums(ranks_bench *bench, unsigned sender)
{
    rft_message sums = ranks_bench_sums(bench, (uint32_t)draw(bench, RANKS));
    uint64_t versions[] = {bench->version, bench->version, bench->version + 1, 1, UINT64_MAX};
    sums.as.sums.version = versions[draw(bench, 5)];
    if (sums.as.sums.version == 0) sums.as.sums.version = 1;
    if (draw(bench, 4) == 0) sums.as.sums.tensors.count -= 8;
    if (draw(bench, 4) == 0) sums.as.sums.words.count = 0;
    for (uint64_t i = draw(bench, 3); i > 0 && bench->words.count > 0; i--)
        bench->words.data[draw(bench, bench->words.count)] ^= (unsigned char)draw(bench, 256);
    ranks_bench_say(bench, sender, sums);
}

static void lie(ranks_bench *bench)
{
    unsigned sender = FIRST + (unsigned)draw(bench, SENDER - FIRST);
    rft_message message = {.kind = RFT_BYE};
    switch (draw(bench, 9)) {
    case 0:
    case 1:
        ranks_bench_hello(bench, sender, (uint32_t)draw(bench, RANKS + 1), 1 + draw(bench, 6));
        break;
    case 2:
    case 3:
    case 4: lie_shard(bench, sender); break;
    case 5:
    case 6: lie_sums(bench, sender); break;
    case 7:
        message = server_failed(draw(bench, 2) == 0 ? bench->version : 9, REFIT_ERR_DEVICE, true);
        if (message.as.failed.version > 0) ranks_bench_say(bench, sender, message);
        break;
    default:
        message.as.bye.reason = rft_view_text("it leaves");
        if (draw(bench, 3) == 0) message = server_pull(1 + draw(bench, 3), 1);
        if (draw(bench, 2) == 0) message = (rft_message){.kind = RFT_BEAT};
        ranks_bench_say(bench, sender, message);
    }
}

static void step_trainer(ranks_bench *bench)
{
    const rft_transaction *transaction = &bench->server.server.transaction;
    switch (transaction->state) {
    case RFT_TRANSACTION_IDLE: (void)ranks_bench_begin(bench); break;
    case RFT_TRANSACTION_WRITING:
        ranks_bench_write(bench);
        server_bench_seal(&bench->server);
        break;
    case RFT_TRANSACTION_STAGING: ranks_bench_settle(bench); break;
    case RFT_TRANSACTION_ABORTED: server_bench_settle(&bench->server); break;
    default: break;
    }
}

/* Where shards are not the tensors, all ranks have to say once more which they have. */
static void join_after_lies(ranks_bench *bench)
{
    ranks_bench_say_shards(bench);
    if (bench->server.server.ranks.complete) return;
    assert_ok(rft_ranks_open(&bench->server.server, 0, RANKS, NULL));
    ranks_bench_join(bench);
}

/* Whatever was said, honest ranks publish what they have afterwards. */
TEST(liars_are_refused_and_end_no_more_than_a_version)
{
    uint64_t begun = 0;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        ranks_bench bench;
        ranks_bench_open(&bench);
        bench.seed = seed * 7919;
        for (uint32_t i = 0; i < STEPS; i++) {
            uint64_t kind = draw(&bench, 12);
            if (kind == 0)
                step_trainer(&bench);
            else if (kind == 1 && draw(&bench, 20) == 0)
                server_bench_tick(&bench.server, (uint32_t)draw(&bench, 30000));
            else if (kind == 2 && draw(&bench, 4) == 0)
                join_after_lies(&bench);
            else
                lie(&bench);
            server_bench_forget(&bench.server);
            if (bench.server.server.ranks.summed > RANKS) fail();
        }
        begun += bench.version;
        ranks_bench_settle(&bench);
        server_bench_tick(&bench.server, 60000); /* all of them are silent */
        server_bench_forget(&bench.server);
        join_after_lies(&bench);
        ranks_bench_publish(&bench);
        ranks_bench_close(&bench);
    }
    assert_true(begun > SEEDS);
}

int main(void)
{
    return test_run("ranks_hostile");
}
