/* The publisher's state machine on the bench: see server_bench.h. */
#include "tests/support/server_bench.h"
#include "tests/support/hosted_store.h"

#include <stdio.h>

#include "base/clock.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

void server_bench_open(server_bench *bench, uint32_t slots, bool shared)
{
    memset(bench, 0, sizeof *bench);
    bench->config = quick_config();
    bench->config.broadcast_frame_bytes = SAMPLE_FRAME_BYTES;
    bench->now = 1000;
    rft_server_init(&bench->server, &bench->config, SERVER_EPOCH, bench->now);
    bench->server.proof = SERVER_PROOF;
    strcpy(bench->server.probe, "/proc/1/fd/3:1");
    rft_manifest *manifest = NULL;
    assert_ok(rft_manifest_open(sample_tensors(), SAMPLE_TENSORS, SAMPLE_FRAME_BYTES,
                                &bench->server.limits, &manifest, NULL));
    assert_ok(hosted_store_open(manifest, slots, shared, &bench->retired, &bench->store, NULL));
    rft_server_adopt(&bench->server, bench->store);
}

void server_bench_close(server_bench *bench)
{
    rft_store_close(bench->store);
    assert_int_equal(rft_retire_list_close(&bench->retired, 0), 0);
    assert_int_equal(rft_server_close(&bench->server, INT64_MIN), 0);
}

void server_bench_reopen(server_bench *bench, uint32_t slots, bool shared)
{
    server_bench_close(bench);
    server_bench_open(bench, slots, shared);
}

int server_bench_setup(void **state)
{
    static server_bench bench;
    server_bench_open(&bench, 2, false);
    *state = &bench;
    return 0;
}

int server_bench_teardown(void **state)
{
    server_bench_close(*state);
    return 0;
}

/* A version's bytes and digest follow from its number, so they are made once for all benches. */
#define SAMPLES_KNOWN 32u
static sample_version known[SAMPLES_KNOWN];

static const sample_version *sample_of(uint64_t version)
{
    assert_true(version < SAMPLES_KNOWN);
    if (known[version].manifest == NULL) sample_open(&known[version], version);
    return &known[version];
}

void server_samples_forget(void)
{
    for (uint32_t i = 0; i < SAMPLES_KNOWN; i++) {
        if (known[i].manifest == NULL) continue;
        sample_close(&known[i]);
        known[i].manifest = NULL;
    }
}

static rft_peer_id id_of(unsigned worker)
{
    return (rft_peer_id){.bytes = {(unsigned char)worker}, .count = 1};
}

/* Decodes the messages in the server's send queue. */
static void listen(server_bench *bench)
{
    rft_outgoing next;
    while (rft_send_queue_take(&bench->server.send_queue, &next)) {
        assert_true(bench->told_count < SERVER_TOLD);
        server_told *told = &bench->told[bench->told_count++];
        told->worker = next.to.bytes[0];
        assert_ok(rft_message_decode(next.message, &bench->server.limits, &told->message, NULL));
    }
    rft_send_queue_reset(&bench->server.send_queue);
}

void server_bench_say(server_bench *bench, unsigned worker, rft_message message)
{
    rft_peer_id id = id_of(worker);
    rft_server_message(&bench->server, &id, &message, bench->now);
    listen(bench);
}

void server_bench_tick(server_bench *bench, uint32_t ms)
{
    bench->now = rft_after_ms(bench->now, ms);
    rft_server_tick(&bench->server, bench->now);
    listen(bench);
}

uint32_t server_bench_count(server_bench *bench, unsigned worker, rft_message_kind kind)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < bench->told_count; i++)
        count += bench->told[i].worker == worker && bench->told[i].message.kind == kind;
    return count;
}

const rft_message *server_bench_told(server_bench *bench, unsigned worker, rft_message_kind kind)
{
    for (uint32_t i = bench->told_count; i-- > 0;) {
        const server_told *told = &bench->told[i];
        if (told->worker == worker && told->message.kind == kind) return &told->message;
    }
    fail_msg("worker %u was not told %s", worker, rft_message_kind_name(kind));
    return NULL;
}

void server_bench_forget(server_bench *bench)
{
    bench->told_count = 0;
}

/* ---- Steps */

void server_bench_hello(server_bench *bench, unsigned worker)
{
    char name[16];
    snprintf(name, sizeof name, "w%u", worker);
    rft_message message = {.kind = RFT_HELLO};
    message.as.hello.protocol = RFT_PROTOCOL;
    message.as.hello.worker = rft_view_text(name);
    message.as.hello.instance = worker;
    message.as.hello.window = 4;
    message.as.hello.image = rft_view_text(bench->place);
    server_bench_say(bench, worker, message);
}

void server_bench_join(server_bench *bench, unsigned worker, bool shm)
{
    rft_message message = {.kind = RFT_JOIN};
    message.as.join.epoch = SERVER_EPOCH;
    message.as.join.shm = shm;
    message.as.join.proof = SERVER_PROOF;
    message.as.join.selects = bench->selects;
    server_bench_hello(bench, worker);
    server_bench_say(bench, worker, message);
}

void server_bench_prepare(server_bench *bench, uint64_t version)
{
    assert_ok(rft_transaction_prepare(&bench->server, &version, NULL));
    listen(bench);
}

void server_bench_begin(server_bench *bench, uint64_t version)
{
    if (bench->server.transaction.state != RFT_TRANSACTION_PREPARING)
        server_bench_prepare(bench, version);
    rft_store_begin(bench->store, version);
    rft_transaction_begin(&bench->server, bench->now);
    bench->sample = sample_of(version);
    listen(bench);
}

static void add_ready(void *user, uint32_t frame)
{
    rft_store_add_ready(user, frame);
}

void server_bench_write(server_bench *bench)
{
    for (uint32_t i = 0; i < bench->store->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &bench->store->manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        assert_ok(rft_store_write(bench->store, i, bench->sample->image + tensor->offset,
                                  tensor->bytes, add_ready, bench->store, NULL));
    }
}

void server_bench_seal(server_bench *bench)
{
    assert_ok(rft_store_seal(bench->store, NULL));
    rft_transaction_seal(&bench->server, bench->now);
    listen(bench);
}

void server_bench_settle(server_bench *bench)
{
    rft_store_undo(bench->store);
    rft_store_rollback(bench->store, true);
    rft_transaction_end_rollback(&bench->server, bench->now);
    listen(bench);
}

void server_bench_offer(server_bench *bench, uint64_t version)
{
    server_bench_begin(bench, version);
    server_bench_write(bench);
    server_bench_seal(bench);
}

rft_message server_staged(uint64_t version)
{
    rft_message message = {.kind = RFT_STAGED};
    message.as.staged.version = version;
    message.as.staged.digest = sample_of(version)->digest;
    return message;
}

rft_message server_committed(uint64_t version)
{
    rft_message message = server_staged(version);
    message.kind = RFT_COMMITTED;
    return message;
}

rft_message server_failed(uint64_t version, refit_status code, bool kept)
{
    rft_message message = {.kind = RFT_FAILED};
    message.as.failed.version = version;
    message.as.failed.code = (uint32_t)code;
    message.as.failed.kept = kept;
    message.as.failed.reason = rft_view_text("the test wants it so");
    return message;
}

rft_message server_released(uint64_t version)
{
    rft_message message = {.kind = RFT_RELEASED};
    message.as.commit.version = version;
    return message;
}

rft_message server_pull(uint64_t version, uint32_t credits)
{
    rft_message message = {.kind = RFT_PULL};
    message.as.pull.version = version;
    message.as.pull.credits = credits;
    return message;
}

rft_message server_beat(uint64_t held, uint64_t staged)
{
    rft_message message = {.kind = RFT_BEAT};
    if (held != 0)
        message.as.beat.held = (rft_version_id){SERVER_EPOCH, held, sample_of(held)->digest};
    message.as.beat.staged = staged;
    return message;
}

void server_bench_stage(server_bench *bench, unsigned worker)
{
    server_bench_say(bench, worker, server_staged(bench->sample->version));
}

void server_bench_apply(server_bench *bench, unsigned worker)
{
    server_bench_say(bench, worker, server_committed(bench->sample->version));
}

void server_bench_publish(server_bench *bench, uint64_t version, unsigned worker)
{
    server_bench_offer(bench, version);
    server_bench_stage(bench, worker);
    server_bench_apply(bench, worker);
}

rft_peer *server_bench_peer(server_bench *bench, unsigned worker)
{
    rft_peer_id id = id_of(worker);
    return rft_peers_find(&bench->server.peers, &id);
}
