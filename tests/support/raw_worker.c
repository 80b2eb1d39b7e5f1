/* A worker by hand: see raw_worker.h. */
#include "tests/support/raw_worker.h"

#include <stdlib.h>

#include "base/clock.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

void raw_worker_open(raw_worker *worker, const char *endpoint, const char *name, bool shm)
{
    refit_config config = quick_config();
    raw_worker_open_as(worker, endpoint, name, shm, &config);
}

void raw_worker_open_as(raw_worker *worker, const char *endpoint, const char *name, bool shm,
                        const refit_config *config)
{
    static uint64_t instances;
    memset(worker, 0, sizeof *worker);
    worker->config = *config;
    worker->limits = rft_limits_from(&worker->config);
    strcpy(worker->name, name);
    worker->instance = ++instances;
    worker->shm = shm;
    assert_ok(rft_channel_connect(endpoint, &worker->config, &worker->channel, NULL));
}

static void drop_images(raw_worker *worker)
{
    rft_reassembly_close(worker->reassembly);
    free(worker->staging);
    free(worker->base);
    rft_segment_close(&worker->mapped);
    worker->reassembly = NULL;
    worker->staging = NULL;
    worker->base = NULL;
}

void raw_worker_close(raw_worker *worker)
{
    drop_images(worker);
    rft_manifest_close(worker->manifest);
    rft_bytes_close(&worker->scratch);
    rft_channel_close(worker->channel);
}

void raw_worker_send_bytes(raw_worker *worker, const void *bytes, size_t count)
{
    int64_t deadline = rft_deadline(RAW_WAIT_MS);
    rft_view view = {bytes, count};
    refit_status status;
    do {
        status = rft_channel_send(worker->channel, NULL, view, NULL, NULL);
        if (status == REFIT_ERR_BUSY) rft_channel_poll(worker->channel, -1, 5);
    } while (status == REFIT_ERR_BUSY && rft_ms_until(deadline) > 0);
    assert_ok(status);
}

static void encode(raw_worker *worker, const rft_message *message)
{
    rft_bytes_reset(&worker->scratch);
    assert_ok(rft_message_encode(message, &worker->limits, &worker->scratch, NULL));
}

void raw_worker_send(raw_worker *worker, const rft_message *message)
{
    encode(worker, message);
    raw_worker_send_bytes(worker, worker->scratch.data, worker->scratch.count);
}

/* ---- Hearing */

static void take_manifest(raw_worker *worker)
{
    drop_images(worker);
    rft_manifest_close(worker->manifest);
    worker->manifest = NULL;
    assert_ok(rft_manifest_decode(worker->heard.as.manifest.tensors, worker->frame_bytes,
                                  &worker->limits, &worker->manifest, NULL));
}

static void take_frame(raw_worker *worker)
{
    bool ours = worker->reassembly != NULL &&
                worker->heard.as.frame.version == worker->offer.as.offer.version;
    if (!ours) return;
    const unsigned char *modes = worker->heard.as.frame.modes.data;
    for (size_t i = 0; i < worker->heard.as.frame.modes.count; i++)
        worker->sparse_blocks += modes[i] == RFT_BLOCK_SPARSE;
    assert_ok(rft_reassembly_take(worker->reassembly, &worker->heard, worker->payload, NULL));
}

static void take_seal(raw_worker *worker)
{
    rft_view tensors = worker->heard.as.seal.tensors;
    assert_true(tensors.count <= sizeof worker->sums);
    memcpy(worker->sums, tensors.data, tensors.count);
    worker->digest = worker->heard.as.seal.digest;
    worker->sealed = true;
}

static bool hear(raw_worker *worker)
{
    rft_envelope envelope;
    refit_status status = rft_channel_receive(worker->channel, &envelope, NULL);
    if (status == REFIT_ERR_TIMEOUT) return false;
    assert_ok(status);
    assert_ok(rft_message_decode(envelope.message, &worker->limits, &worker->heard, NULL));
    worker->payload = envelope.payload;
    if (worker->heard.kind == RFT_MANIFEST) take_manifest(worker);
    if (worker->heard.kind == RFT_FRAME) take_frame(worker);
    if (worker->heard.kind == RFT_SEAL) take_seal(worker);
    return true;
}

/* Answers to an earlier message may come first: a second welcome; a refusal of a beat that a worker
 * sent before it knew that it was evicted; a second abort, for a beat that still said the version
 * was staged. */
static bool is_passed_over(rft_message_kind kind, rft_message_kind awaited)
{
    bool late = (kind == RFT_WELCOME && awaited == RFT_BEAT) ||
                (kind == RFT_REFUSE && awaited == RFT_WELCOME) ||
                (kind == RFT_ABORT && (awaited == RFT_OFFER || awaited == RFT_BEAT));
    return late || kind == RFT_MANIFEST || kind == RFT_FRAME || kind == RFT_SEAL ||
           kind == RFT_BEAT;
}

static rft_message beat_of(const raw_worker *worker, uint64_t staged)
{
    rft_message message = {.kind = RFT_BEAT};
    message.as.beat.held = worker->held;
    message.as.beat.staged = staged;
    return message;
}

/* Sends a beat if the channel takes one. A trainer that has closed takes none, but the message that
 * is waited for may have come before. */
static void try_beat(raw_worker *worker)
{
    const rft_message beat = beat_of(worker, 0);
    encode(worker, &beat);
    const rft_view view = {worker->scratch.data, worker->scratch.count};
    (void)rft_channel_send(worker->channel, NULL, view, NULL, NULL);
}

const rft_message *raw_worker_expect(raw_worker *worker, rft_message_kind kind)
{
    int64_t deadline = rft_deadline(RAW_WAIT_MS);
    while (rft_ms_until(deadline) > 0) {
        if (!hear(worker)) {
            rft_channel_poll(worker->channel, -1, (int)worker->config.broadcast_heartbeat_ms);
            continue;
        }
        if (worker->heard.kind == kind) return &worker->heard;
        if (worker->heard.kind == RFT_BEAT) try_beat(worker);
        if (!is_passed_over(worker->heard.kind, kind)) {
            fail_msg("%s: %s came instead of %s", worker->name,
                     rft_message_kind_name(worker->heard.kind), rft_message_kind_name(kind));
        }
    }
    fail_msg("%s: no %s came", worker->name, rft_message_kind_name(kind));
    return NULL;
}

bool raw_worker_has_heard(raw_worker *worker, rft_message_kind kind)
{
    bool found = false;
    while (hear(worker))
        found = found || worker->heard.kind == kind;
    return found;
}

/* ---- Steps */

void raw_worker_say_hello(raw_worker *worker)
{
    rft_message message = {.kind = RFT_HELLO};
    message.as.hello.protocol = RFT_PROTOCOL;
    message.as.hello.worker = rft_view_text(worker->name);
    message.as.hello.instance = worker->instance;
    message.as.hello.host = rft_view_text("test");
    message.as.hello.shm = worker->shm;
    message.as.hello.window = worker->config.broadcast_window;
    message.as.hello.held = worker->held;
    message.as.hello.delta = worker->delta;
    raw_worker_send(worker, &message);
}

static void read_proof(raw_worker *worker, rft_view name)
{
    rft_segment probe;
    char text[RFT_SEGMENT_NAME_BYTES];
    rft_view_print(name, text, sizeof text);
    assert_ok(rft_segment_attach(&probe, text, sizeof worker->proof, NULL));
    memcpy(&worker->proof, probe.memory, sizeof worker->proof);
    rft_segment_close(&probe);
}

void raw_worker_join(raw_worker *worker)
{
    raw_worker_say_hello(worker);
    const rft_message *welcome = raw_worker_expect(worker, RFT_WELCOME);
    worker->epoch = welcome->as.welcome.epoch;
    worker->frame_bytes = welcome->as.welcome.frame_bytes;
    if (worker->shm) read_proof(worker, welcome->as.welcome.probe);
    rft_message message = {.kind = RFT_JOIN};
    message.as.join.epoch = worker->epoch;
    message.as.join.shm = worker->shm;
    message.as.join.proof = worker->proof;
    raw_worker_send(worker, &message);
    (void)raw_worker_expect(worker, RFT_BEAT);
}

static void prepare_images(raw_worker *worker)
{
    bool base = worker->offer.as.offer.base != 0;
    rft_reassembly_close(worker->reassembly);
    worker->reassembly = NULL;
    if (!base) {
        free(worker->base);
        worker->base = NULL;
    }
    free(worker->staging);
    worker->staging = calloc(1, worker->manifest->store_bytes);
    assert_non_null(worker->staging);
    assert_true(!base || worker->base != NULL);
    assert_ok(rft_reassembly_open(worker->manifest, worker->staging, worker->base,
                                  &worker->reassembly, NULL));
}

void raw_worker_offer(raw_worker *worker)
{
    worker->sealed = false;
    worker->offer = *raw_worker_expect(worker, RFT_OFFER);
    rft_view_print(worker->offer.as.offer.segment, worker->segment, sizeof worker->segment);
    assert_int_equal(worker->offer.as.offer.epoch, worker->epoch);
    assert_non_null(worker->manifest);
    if (worker->segment[0] == '\0') prepare_images(worker);
}

void raw_worker_pull(raw_worker *worker, uint32_t credits)
{
    rft_message message = {.kind = RFT_PULL};
    message.as.pull.version = worker->offer.as.offer.version;
    message.as.pull.credits = credits;
    raw_worker_send(worker, &message);
}

void raw_worker_resend(raw_worker *worker, uint32_t sequence)
{
    unsigned char wire[4];
    rft_put_u32(wire, sequence);
    rft_message message = {.kind = RFT_RESEND};
    message.as.resend.version = worker->offer.as.offer.version;
    message.as.resend.sequences = (rft_view){wire, sizeof wire};
    raw_worker_send(worker, &message);
}

static void map_slot(raw_worker *worker)
{
    rft_segment_close(&worker->mapped);
    assert_ok(rft_segment_attach(
        &worker->mapped, worker->segment,
        worker->offer.as.offer.segment_offset + worker->manifest->store_bytes, NULL));
}

void raw_worker_fetch(raw_worker *worker)
{
    uint32_t asked = 0, frames = worker->offer.as.offer.frames;
    if (worker->segment[0] != '\0') map_slot(worker);
    while (worker->segment[0] == '\0' && !rft_reassembly_complete(worker->reassembly)) {
        if (rft_reassembly_taken(worker->reassembly) == asked && asked < frames) {
            raw_worker_pull(worker, 1);
            asked++;
        }
        (void)raw_worker_expect(worker, RFT_FRAME);
    }
    while (!worker->sealed)
        (void)raw_worker_expect(worker, RFT_SEAL);
}

const unsigned char *raw_worker_bytes(const raw_worker *worker)
{
    return worker->segment[0] == '\0'
               ? worker->staging
               : worker->mapped.memory + worker->offer.as.offer.segment_offset;
}

static void verify(raw_worker *worker)
{
    rft_message seal = {.kind = RFT_SEAL};
    seal.as.seal.version = worker->offer.as.offer.version;
    seal.as.seal.digest = worker->digest;
    seal.as.seal.tensors = (rft_view){worker->sums, (size_t)worker->manifest->originals * 8};
    assert_ok(rft_image_verify(worker->manifest, raw_worker_bytes(worker), &seal, NULL));
}

void raw_worker_say_staged(raw_worker *worker)
{
    rft_message message = {.kind = RFT_STAGED};
    message.as.staged.version = worker->offer.as.offer.version;
    message.as.staged.digest = worker->digest;
    raw_worker_send(worker, &message);
}

void raw_worker_stage(raw_worker *worker)
{
    raw_worker_offer(worker);
    raw_worker_fetch(worker);
    verify(worker);
    raw_worker_say_staged(worker);
}

void raw_worker_say_committed(raw_worker *worker)
{
    rft_message message = {.kind = RFT_COMMITTED};
    message.as.staged.version = worker->offer.as.offer.version;
    message.as.staged.digest = worker->digest;
    worker->held = (rft_version_id){worker->epoch, worker->offer.as.offer.version, worker->digest};
    raw_worker_send(worker, &message);
}

void raw_worker_apply(raw_worker *worker)
{
    const rft_message *commit = raw_worker_expect(worker, RFT_COMMIT);
    assert_int_equal(commit->as.commit.version, worker->offer.as.offer.version);
    raw_worker_say_committed(worker);
    if (worker->segment[0] != '\0') return;
    free(worker->base);
    worker->base = worker->staging;
    worker->staging = NULL;
}

void raw_worker_say_released(raw_worker *worker, uint64_t version)
{
    rft_message message = {.kind = RFT_RELEASED};
    message.as.commit.version = version;
    raw_worker_send(worker, &message);
}

void raw_worker_say_failed(raw_worker *worker, refit_status code, bool kept)
{
    rft_message message = {.kind = RFT_FAILED};
    message.as.failed.version = worker->offer.as.offer.version;
    message.as.failed.code = (uint32_t)code;
    message.as.failed.kept = kept;
    message.as.failed.reason = rft_view_text("the test wants it so");
    raw_worker_send(worker, &message);
}

void raw_worker_beat(raw_worker *worker, uint64_t staged)
{
    const rft_message message = beat_of(worker, staged);
    raw_worker_send(worker, &message);
}

void raw_worker_say_bye(raw_worker *worker)
{
    rft_message message = {.kind = RFT_BYE};
    message.as.bye.reason = rft_view_text("the test leaves");
    raw_worker_send(worker, &message);
}
