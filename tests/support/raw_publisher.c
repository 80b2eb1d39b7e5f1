/* A publisher by hand, over a real channel. */
#include "tests/support/raw_publisher.h"

#include <stdlib.h>

#include <poll.h>

#include "base/clock.h"
#include "base/random.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

#define WAIT_MS 50000u

/* ZeroMQ releases an endpoint in the background and does not tell when. */
static void bind_when_free(raw_publisher *raw, const char *endpoint)
{
    refit_error error;
    int64_t deadline = rft_deadline(WAIT_MS);
    while (rft_channel_bind(endpoint, &raw->config, &raw->channel, &error) != REFIT_OK) {
        if (error.status != REFIT_ERR_BUSY || rft_ms_until(deadline) == 0) {
            fail_msg("%s", error.text);
        }
        (void)poll(NULL, 0, 5);
    }
}

void raw_open(raw_publisher *raw, const char *endpoint, uint64_t epoch, bool shm)
{
    memset(raw, 0, sizeof *raw);
    raw->config = quick_config();
    raw->limits = rft_limits_from(&raw->config);
    raw->epoch = epoch;
    bind_when_free(raw, endpoint);
    if (!shm) return;
    uint64_t proof;
    assert_ok(rft_segment_create(&raw->probe, sizeof proof, NULL));
    assert_ok(rft_random_u64(&proof, NULL));
    memcpy(raw->probe.memory, &proof, sizeof proof);
}

void raw_close(raw_publisher *raw)
{
    rft_channel_close(raw->channel);
    assert_true(rft_pending_wait(&raw->pending, rft_deadline(WAIT_MS)));
    rft_segment_close(&raw->probe);
    rft_bytes_close(&raw->heard_bytes);
}

/* One message if there is one. */
static bool hear_any(raw_publisher *raw)
{
    rft_envelope envelope;
    refit_error error;
    if (rft_channel_receive(raw->channel, &envelope, NULL) != REFIT_OK) return false;
    rft_bytes_reset(&raw->heard_bytes);
    assert_ok(
        rft_bytes_append(&raw->heard_bytes, envelope.message.data, envelope.message.count, NULL));
    if (rft_message_decode(rft_bytes_view(&raw->heard_bytes), &raw->limits, &raw->heard, &error) !=
        REFIT_OK) {
        fail_msg("a worker said what cannot be read: %s", error.text);
    }
    raw->worker = envelope.from;
    return true;
}

/* Waits for a message and takes it; false: none came in time. */
static bool await_any(raw_publisher *raw, int64_t deadline)
{
    while (rft_ms_until(deadline) > 0) {
        if (hear_any(raw)) return true;
        if (!raw->silent && raw->worker.count > 0) raw_say(raw, sample_beat(raw->epoch));
        rft_channel_poll(raw->channel, -1, (int)raw->config.broadcast_heartbeat_ms);
    }
    return false;
}

const rft_message *raw_hear(raw_publisher *raw, rft_message_kind kind)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    while (await_any(raw, deadline)) {
        if (raw->heard.kind == kind) return &raw->heard;
    }
    fail_msg("no %s came", rft_message_kind_name(kind));
    return NULL;
}

void raw_hear_staged(raw_publisher *raw, const sample_version *sample)
{
    do
        raw_hear(raw, RFT_STAGED);
    while (raw->heard.as.staged.version != sample->version);
    assert_memory_equal(&raw->heard.as.staged.digest, &sample->digest, sizeof sample->digest);
}

const rft_message *raw_hear_any(raw_publisher *raw)
{
    if (!await_any(raw, rft_deadline(WAIT_MS))) fail_msg("no message came");
    return &raw->heard;
}

/* A worker that is gone is not a failure: tests make it go. */
static void send(raw_publisher *raw, rft_view message, const rft_payload *payload)
{
    refit_status status = rft_channel_send(raw->channel, &raw->worker, message, payload, NULL);
    assert_true(status == REFIT_OK || status == REFIT_ERR_PEER);
}

void raw_say_bytes(raw_publisher *raw, rft_view message, const rft_view *payload)
{
    rft_payload part = {payload == NULL ? (rft_view){0} : *payload, &raw->pending};
    send(raw, message, payload == NULL ? NULL : &part);
}

void raw_say(raw_publisher *raw, rft_message message)
{
    rft_bytes bytes = {0};
    assert_ok(rft_message_encode(&message, &raw->limits, &bytes, NULL));
    send(raw, rft_bytes_view(&bytes), NULL);
    rft_bytes_close(&bytes);
}

void raw_join(raw_publisher *raw)
{
    raw_hear(raw, RFT_HELLO);
    raw_say(raw, sample_welcome(raw->epoch, raw->probe.memory == NULL ? NULL : raw->probe.name));
    raw_hear(raw, RFT_JOIN);
    raw_say(raw, sample_beat(raw->epoch));
}

void raw_offer(raw_publisher *raw, const sample_version *sample, uint64_t base)
{
    raw_say(raw, sample_manifest(sample, raw->epoch));
    raw_say(raw, sample_offer(sample, raw->epoch, base, NULL, 0));
}

void raw_frames(raw_publisher *raw, sample_version *sample, const sample_version *base)
{
    unsigned char *same = base == NULL ? NULL : sample_same(sample, base);
    for (uint32_t i = 0; i < sample->manifest->frame_count; i++) {
        rft_bytes bytes = {0};
        rft_view payload;
        rft_message frame = sample_frame(sample, i, same, &payload);
        assert_ok(rft_message_encode(&frame, &raw->limits, &bytes, NULL));
        raw_say_bytes(raw, rft_bytes_view(&bytes), &payload);
        rft_bytes_close(&bytes);
        /* A gathered payload lies in the sample's scratch, which the next frame takes. */
        assert_true(rft_pending_wait(&raw->pending, rft_deadline(WAIT_MS)));
    }
    free(same);
}

void raw_stage(raw_publisher *raw, sample_version *sample, const sample_version *base)
{
    raw_offer(raw, sample, base == NULL ? 0 : base->version);
    raw_hear(raw, RFT_PULL); /* frames that come before it are dropped */
    raw_frames(raw, sample, base);
    raw_say(raw, sample_seal(sample));
    raw_hear_staged(raw, sample);
}

void raw_slot_open(rft_segment *segment, const sample_version *sample)
{
    uint64_t bytes = sample->manifest->store_bytes;
    assert_ok(rft_segment_create(segment, RFT_SEQLOCK_BYTES + bytes, NULL));
    memcpy(segment->memory + RFT_SEQLOCK_BYTES, sample->image, bytes);
    atomic_store(&raw_slot_seqlock(segment)->generation, 2);
}

rft_seqlock *raw_slot_seqlock(const rft_segment *segment)
{
    return (rft_seqlock *)(void *)segment->memory;
}
