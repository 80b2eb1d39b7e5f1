/* The publisher's state machine on the bench: see hub_bench.h. */
#include "hub_bench.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "tests/support/quick_config.h"

void hub_bench_open(hub_bench *bench, uint32_t slots, bool shared)
{
    memset(bench, 0, sizeof *bench);
    bench->config = quick_config();
    bench->config.broadcast_frame_bytes = SAMPLE_FRAME_BYTES;
    bench->now = 1000;
    rft_hub_init(&bench->hub, &bench->config, HUB_EPOCH, bench->now);
    bench->hub.proof = HUB_PROOF;
    strcpy(bench->hub.probe, "/proc/1/fd/3:1");
    rft_manifest *manifest = NULL;
    assert_int_equal(rft_manifest_open(sample_tensors(), SAMPLE_TENSORS, SAMPLE_FRAME_BYTES,
                                       &bench->hub.limits, &manifest, NULL),
                     REFIT_OK);
    assert_int_equal(rft_store_open(manifest, slots, shared, &bench->attic, &bench->store, NULL),
                     REFIT_OK);
    rft_hub_adopt(&bench->hub, bench->store);
}

void hub_bench_close(hub_bench *bench)
{
    rft_store_close(bench->store);
    assert_int_equal(rft_attic_close(&bench->attic, 0), 0);
    assert_int_equal(rft_hub_close(&bench->hub, INT64_MIN), 0);
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

void hub_samples_forget(void)
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

/* Decodes what the hub has put into its outbox. */
static void listen(hub_bench *bench)
{
    rft_outgoing next;
    while (rft_outbox_take(&bench->hub.outbox, &next)) {
        assert_true(bench->told_count < HUB_TOLD);
        hub_told *told = &bench->told[bench->told_count++];
        told->worker = next.to.bytes[0];
        assert_int_equal(rft_message_decode(next.message, &bench->hub.limits, &told->message, NULL),
                         REFIT_OK);
    }
    rft_outbox_reset(&bench->hub.outbox);
}

void hub_bench_say(hub_bench *bench, unsigned worker, const rft_message *message)
{
    rft_peer_id id = id_of(worker);
    rft_hub_message(&bench->hub, &id, message, bench->now);
    listen(bench);
}

void hub_bench_tick(hub_bench *bench, uint32_t ms)
{
    bench->now = rft_after_ms(bench->now, ms);
    rft_hub_tick(&bench->hub, bench->now);
    listen(bench);
}

uint32_t hub_bench_count(hub_bench *bench, unsigned worker, rft_message_kind kind)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < bench->told_count; i++) {
        count += bench->told[i].worker == worker && bench->told[i].message.kind == kind;
    }
    return count;
}

const rft_message *hub_bench_told(hub_bench *bench, unsigned worker, rft_message_kind kind)
{
    for (uint32_t i = bench->told_count; i-- > 0;) {
        const hub_told *told = &bench->told[i];
        if (told->worker == worker && told->message.kind == kind) return &told->message;
    }
    fail_msg("worker %u was not told %s", worker, rft_message_kind_name(kind));
    return NULL;
}

void hub_bench_forget(hub_bench *bench)
{
    bench->told_count = 0;
}

/* ---- Steps */

void hub_bench_hello(hub_bench *bench, unsigned worker)
{
    char name[16];
    snprintf(name, sizeof name, "w%u", worker);
    rft_message message = {.kind = RFT_HELLO};
    message.as.hello.protocol = RFT_PROTOCOL;
    message.as.hello.worker = rft_view_text(name);
    message.as.hello.instance = worker;
    message.as.hello.window = 4;
    hub_bench_say(bench, worker, &message);
}

void hub_bench_join(hub_bench *bench, unsigned worker, bool shm)
{
    rft_message message = {.kind = RFT_JOIN};
    message.as.join.epoch = HUB_EPOCH;
    message.as.join.shm = shm;
    message.as.join.proof = HUB_PROOF;
    hub_bench_hello(bench, worker);
    hub_bench_say(bench, worker, &message);
}

void hub_bench_prepare(hub_bench *bench, uint64_t version)
{
    assert_int_equal(rft_round_prepare(&bench->hub, &version, NULL), REFIT_OK);
    listen(bench);
}

void hub_bench_begin(hub_bench *bench, uint64_t version)
{
    if (bench->hub.round.state != RFT_ROUND_PREPARING) hub_bench_prepare(bench, version);
    rft_store_begin(bench->store, version);
    rft_round_begin(&bench->hub, bench->now);
    bench->sample = sample_of(version);
    listen(bench);
}

static void add_ready(void *user, uint32_t frame)
{
    rft_store_add_ready(user, frame);
}

void hub_bench_write(hub_bench *bench)
{
    for (uint32_t i = 0; i < bench->store->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &bench->store->manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        assert_int_equal(rft_store_write(bench->store, i, bench->sample->image + tensor->offset,
                                         tensor->bytes, add_ready, bench->store, NULL),
                         REFIT_OK);
    }
}

void hub_bench_seal(hub_bench *bench)
{
    assert_int_equal(rft_store_seal(bench->store, NULL), REFIT_OK);
    rft_round_seal(&bench->hub, bench->now);
    listen(bench);
}

void hub_bench_settle(hub_bench *bench)
{
    rft_store_undo(bench->store);
    rft_store_rollback(bench->store, true);
    rft_round_settle(&bench->hub, bench->now);
    listen(bench);
}

void hub_bench_offer(hub_bench *bench, uint64_t version)
{
    hub_bench_begin(bench, version);
    hub_bench_write(bench);
    hub_bench_seal(bench);
}

rft_message hub_staged(uint64_t version)
{
    rft_message message = {.kind = RFT_STAGED};
    message.as.staged.version = version;
    message.as.staged.digest = sample_of(version)->digest;
    return message;
}

rft_message hub_committed(uint64_t version)
{
    rft_message message = hub_staged(version);
    message.kind = RFT_COMMITTED;
    return message;
}

rft_message hub_failed(uint64_t version, refit_status code, bool kept)
{
    rft_message message = {.kind = RFT_FAILED};
    message.as.failed.version = version;
    message.as.failed.code = (uint32_t)code;
    message.as.failed.kept = kept;
    message.as.failed.reason = rft_view_text("the test wants it so");
    return message;
}

rft_message hub_released(uint64_t version)
{
    rft_message message = {.kind = RFT_RELEASED};
    message.as.commit.version = version;
    return message;
}

rft_message hub_pull(uint64_t version, uint32_t credits)
{
    rft_message message = {.kind = RFT_PULL};
    message.as.pull.version = version;
    message.as.pull.credits = credits;
    return message;
}

rft_message hub_beat(uint64_t held, uint64_t staged)
{
    rft_message message = {.kind = RFT_BEAT};
    if (held != 0) message.as.beat.held = (rft_held){HUB_EPOCH, held, sample_of(held)->digest};
    message.as.beat.staged = staged;
    return message;
}

void hub_bench_stage(hub_bench *bench, unsigned worker)
{
    rft_message message = hub_staged(bench->sample->version);
    hub_bench_say(bench, worker, &message);
}

void hub_bench_apply(hub_bench *bench, unsigned worker)
{
    rft_message message = hub_committed(bench->sample->version);
    hub_bench_say(bench, worker, &message);
}

rft_peer *hub_bench_peer(hub_bench *bench, unsigned worker)
{
    rft_peer_id id = id_of(worker);
    return rft_peers_find(&bench->hub.peers, &id);
}
