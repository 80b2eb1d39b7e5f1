/* A subscriber whose publisher stops, lies, vanishes or comes back, in every state. */
#include "tests/support/pairing.h"
#include "tests/support/test.h"

#define SILENCE_MS 300u /* of a trainer that says no more */

/* ---- A publisher that vanishes */

enum {
    AT_HELLO,
    AT_WELCOME,
    AT_JOINED,
    AT_OFFER,
    AT_HALF,
    AT_STAGED,
    AT_COMMIT,
    AT_TAKEN,
    AT_ENDS
};

static refit_update *reach(pairing *pair, int point)
{
    raw_publisher *raw = &pair->raw;
    sample_version *sample = &pair->samples[1];
    pair_renew(pair, false, NULL);
    raw_hear(raw, RFT_HELLO);
    if (point == AT_HELLO) return NULL;
    raw_say(raw, sample_welcome(raw->epoch, NULL));
    raw_hear(raw, RFT_JOIN);
    if (point == AT_WELCOME) return NULL;
    raw_say(raw, sample_beat(raw->epoch));
    pair_apply(pair, 0, NULL);
    if (point == AT_JOINED) return NULL;
    if (point < AT_STAGED) raw_offer(raw, sample, 1);
    if (point < AT_STAGED) raw_hear(raw, RFT_PULL);
    if (point == AT_HALF) raw_say(raw, sample_seal(sample));
    if (point >= AT_STAGED) raw_stage(raw, sample, &pair->samples[0]);
    if (point >= AT_COMMIT) raw_say(raw, sample_commit(sample));
    if (point == AT_COMMIT) assert_int_equal(pair_readable(pair, PAIR_LONG), 1);
    return point == AT_TAKEN ? pair_next(pair) : NULL;
}

/* A publisher that does not know the worker refuses what it says, until it says HELLO. */
static void await_hello(raw_publisher *raw)
{
    while (raw_hear_any(raw)->kind != RFT_HELLO)
        raw_say(raw, sample_refuse(REFIT_ERR_STALE, false));
}

PAIR_TEST(returning_trainer_is_joined_again_from_every_state)
{
    for (int point = 0; point < AT_ENDS; point++) {
        char endpoint[64];
        refit_update *update = reach(pair, point);
        uint64_t held = point >= AT_JOINED ? 1 : 0;
        assert_int_equal(pair_describe(pair).version, held);
        strcpy(endpoint, rft_channel_endpoint(pair->raw.channel));
        raw_close(&pair->raw);
        raw_open(&pair->raw, endpoint, PAIR_EPOCH + 1, false);
        await_hello(&pair->raw);
        assert_int_equal(pair->raw.heard.as.hello.held.version, held);
        if (update != NULL) {
            assert_update_is(update, &pair->samples[1]);
            assert_ok(refit_update_accept(update, NULL));
            refit_update_close(update);
        }
        assert_int_equal(pair_readable(pair, 0), 0);
        raw_join(&pair->raw);
        pair_apply(pair, 0, NULL);
        assert_int_equal(pair_describe(pair).epoch, PAIR_EPOCH + 1);
    }
}

/* test_session.c has all states, with a clock of its own. */
PAIR_TEST(a_silent_trainer_is_noticed)
{
    pair_open(pair, false, NULL);
    raw_hear(&pair->raw, RFT_HELLO);
    rft_message welcome = sample_welcome(PAIR_EPOCH, NULL);
    welcome.as.welcome.heartbeat_timeout_ms = SILENCE_MS;
    raw_say(&pair->raw, welcome);
    raw_hear(&pair->raw, RFT_JOIN);
    pair->raw.silent = true;
    raw_hear(&pair->raw, RFT_HELLO);
}

PAIR_TEST(close_ends_every_state_with_a_goodbye)
{
    for (int point = 0; point < AT_ENDS; point++) {
        (void)reach(pair, point);
        refit_subscriber_close(pair->subscriber);
        pair->subscriber = NULL;
        if (point > AT_HELLO) raw_hear(&pair->raw, RFT_BYE);
    }
}

/* ---- A publisher that lies */

PAIR_TEST(garbage_makes_a_worker_connect_anew)
{
    static const unsigned char rubbish[] = "\x83\xa1k\xa5hello\xff\xff\xff\xff";
    const rft_view bytes = {rubbish, sizeof rubbish};
    for (int i = 0; i < 4; i++) {
        pair_renew(pair, false, NULL);
        raw_join(&pair->raw);
        pair_apply(pair, 0, NULL);
        if (i == 0) raw_say_bytes(&pair->raw, (rft_view){0}, NULL);
        if (i == 1) raw_say_bytes(&pair->raw, bytes, NULL);
        if (i == 2) raw_say_bytes(&pair->raw, bytes, &bytes);
        rft_message pull = {.kind = RFT_PULL};
        pull.as.pull.version = pull.as.pull.credits = 1;
        if (i == 3) raw_say(&pair->raw, pull);
        raw_hear(&pair->raw, RFT_BYE);
        raw_join(&pair->raw);
        pair_apply(pair, 1, &pair->samples[0]);
        refit_stats stats;
        refit_stats_init(&stats, sizeof stats);
        assert_ok(refit_subscriber_stats(pair->subscriber, &stats, NULL));
        assert_int_equal(stats.messages_refused, 1);
    }
}

int main(void)
{
    return test_run("subscriber_loss");
}
