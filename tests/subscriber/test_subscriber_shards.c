/* A subscriber whose trainer has two ranks: sockets to both, of which one also is the coordinator.
 */
#include <poll.h>

#include "base/clock.h"
#include "tests/support/descriptors.h"
#include "tests/support/pairing.h"
#include "tests/support/test.h"

#define SILENCE_MS 1500u /* longer than a busy machine takes from WELCOME to the offer */
#define LONG_MS    60000u

typedef struct two_ranks {
    pairing pair;        /* the coordinator; its other connection, too */
    raw_publisher raw;   /* of rank 1 */
    char endpoint[64];   /* of the same */
    rft_peer_id session; /* the worker, not its link to the same publisher */
    rft_bytes rows[2];
} two_ranks;

static int setup(void **state)
{
    static two_ranks on;
    memset(&on, 0, sizeof on);
    *state = &on;
    return 0;
}

static int teardown(void **state)
{
    two_ranks *on = *state;
    pair_close(&on->pair);
    if (on->raw.channel != NULL) raw_close(&on->raw);
    for (int i = 0; i < 2; i++)
        rft_bytes_close(&on->rows[i]);
    return 0;
}

#define RANKS_TEST(name) TEST_ON(two_ranks *on, name, setup, teardown)

/* Of each tensor the first rank has the first half. */
static void divide(two_ranks *on)
{
    const rft_manifest *manifest = on->pair.samples[0].manifest;
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS || tensor->bytes == 0) continue;
        uint64_t half = tensor->bytes / 2, rest = tensor->bytes - half;
        const rft_want_rows first = {i, 0, 1, half, half}, second = {i, half, 1, rest, rest};
        assert_ok(rft_want_append(&on->rows[0], &first, NULL));
        assert_ok(rft_want_append(&on->rows[1], &second, NULL));
    }
}

static rft_message shard(const two_ranks *on, uint32_t rank, const char *endpoint)
{
    rft_message message = {.kind = RFT_SHARD};
    message.as.shard.epoch = PAIR_EPOCH;
    message.as.shard.manifest = on->pair.samples[0].manifest->digest;
    message.as.shard.rank = rank;
    message.as.shard.ranks = 2;
    message.as.shard.endpoint = rft_view_text(endpoint);
    message.as.shard.rows = rft_bytes_view(&on->rows[rank]);
    return message;
}

/* To the worker itself. */
static void tell(two_ranks *on, rft_message message)
{
    on->pair.raw.worker = on->session;
    raw_say(&on->pair.raw, message);
}

static void welcome_link(raw_publisher *raw, uint32_t silence_ms)
{
    while (raw_hear(raw, RFT_HELLO)->as.hello.fetches == false)
        continue;
    rft_message welcome = sample_welcome(PAIR_EPOCH, NULL);
    welcome.as.welcome.heartbeat_timeout_ms = silence_ms;
    raw_say(raw, welcome);
}

static void open_ranks(two_ranks *on, uint32_t silence_ms)
{
    pair_open(&on->pair, false, NULL);
    raw_open(&on->raw, "tcp://127.0.0.1:0", PAIR_EPOCH, false);
    strcpy(on->endpoint, rft_channel_endpoint(on->raw.channel));
    divide(on);
    raw_join(&on->pair.raw);
    on->session = on->pair.raw.worker;
    tell(on, sample_manifest(&on->pair.samples[0], PAIR_EPOCH));
    tell(on, shard(on, 0, NULL));
    tell(on, shard(on, 1, on->endpoint));
    welcome_link(&on->pair.raw, LONG_MS);
    welcome_link(&on->raw, silence_ms);
}

static void offer(two_ranks *on, uint32_t index)
{
    rft_message message = sample_offer(&on->pair.samples[index], PAIR_EPOCH, 0, NULL, 0);
    message.as.offer.ranks = 2;
    tell(on, message);
}

/* The frames that the rank is asked for, heedless of credits. */
static void send_frames(raw_publisher *raw, const rft_bytes *rows, sample_version *sample)
{
    rft_want *want = NULL;
    while (raw_hear(raw, RFT_PULL)->as.pull.manifest.count == 0)
        continue;
    assert_false(raw->heard.as.pull.part); /* all that the rank has */
    assert_ok(rft_want_open(sample->manifest, rft_bytes_view(rows), &want, NULL));
    assert_int_equal(raw->heard.as.pull.version, sample->version);
    const rft_frame_source source = {.image = sample->image, .want = want};
    for (uint32_t i = 0; i < sample->manifest->frame_count; i++) {
        rft_frame frame;
        rft_bytes bytes = {0};
        rft_message message = {.kind = RFT_FRAME};
        if (rft_want_frame(want, i) == RFT_WANT_NONE) continue;
        assert_ok(rft_frame_encode(sample->manifest, i, &source, &sample->modes, &sample->scratch,
                                   &frame, NULL));
        message.as.frame.version = sample->version;
        message.as.frame.sequence = i;
        message.as.frame.hash = frame.hash;
        message.as.frame.modes = rft_bytes_view(&sample->modes);
        assert_ok(rft_message_encode(&message, &raw->limits, &bytes, NULL));
        raw_say_bytes(raw, rft_bytes_view(&bytes), &frame.payload);
        rft_bytes_close(&bytes);
        assert_true(rft_pending_wait(&raw->pending, rft_deadline(PAIR_LONG)));
    }
    rft_want_release(want);
}

static void apply(two_ranks *on, uint32_t index)
{
    sample_version *sample = &on->pair.samples[index];
    offer(on, index);
    send_frames(&on->pair.raw, &on->rows[0], sample);
    send_frames(&on->raw, &on->rows[1], sample);
    tell(on, sample_seal(sample));
    raw_hear_staged(&on->pair.raw, sample);
    raw_say(&on->pair.raw, sample_commit(sample));
    refit_update *update = pair_next(&on->pair);
    assert_update_is(update, sample);
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
}

/* Waits for the reason of a version that fails. */
static void assert_fails(two_ranks *on, const char *words)
{
    char reason[512];
    on->pair.raw.worker = on->session;
    const rft_message *failed = raw_hear(&on->pair.raw, RFT_FAILED);
    assert_int_equal(failed->as.failed.code, REFIT_ERR_PEER);
    rft_view_print(failed->as.failed.reason, reason, sizeof reason);
    assert_non_null(strstr(reason, words));
}

RANKS_TEST(a_version_comes_from_both_ranks)
{
    open_ranks(on, LONG_MS);
    apply(on, 0);
    assert_int_equal(pair_describe(&on->pair).version, 1);
    apply(on, 1);
    refit_subscriber_close(on->pair.subscriber);
    on->pair.subscriber = NULL;
    raw_hear(&on->raw, RFT_BYE);
    raw_hear(&on->pair.raw, RFT_BYE);
    raw_hear(&on->pair.raw, RFT_BYE);
}

RANKS_TEST(a_rank_that_vanishes_fails_the_version_and_returns)
{
    open_ranks(on, SILENCE_MS);
    offer(on, 0);
    raw_close(&on->raw);
    assert_fails(on, on->endpoint);
    raw_open(&on->raw, on->endpoint, PAIR_EPOCH, false);
    welcome_link(&on->raw, LONG_MS);
    apply(on, 1);
}

RANKS_TEST(an_endpoint_that_cannot_be_opened_fails_the_version_and_is_tried_again)
{
    open_ranks(on, LONG_MS);
    offer(on, 0);
    tell(on, shard(on, 1, "tcp://192.0.2.1:7"));
    assert_fails(on, "another endpoint");
    offer(on, 0);
    assert_fails(on, "tcp://192.0.2.1:7");
    tell(on, shard(on, 1, on->endpoint));
    welcome_link(&on->raw, LONG_MS);
    apply(on, 0);
}

RANKS_TEST(a_subscriber_closes_while_ranks_are_silent)
{
    const int before = count_descriptors();
    open_ranks(on, LONG_MS);
    offer(on, 0);
    raw_hear(&on->raw, RFT_PULL);
    pair_close(&on->pair);
    raw_close(&on->raw);
    on->raw.channel = NULL;
    int64_t deadline = rft_deadline(PAIR_LONG);
    while (count_descriptors() > before && rft_ms_until(deadline) > 0)
        (void)poll(NULL, 0, 5);
    assert_true(count_descriptors() <= before);
}

int main(void)
{
    return test_run("subscriber_shards");
}
