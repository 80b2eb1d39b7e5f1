/* A full socket: messages are sent in order as far as the socket takes them, the rest waits, and
 * messages that wait for a trainer that is lost are not sent to it later. */
#include <stdatomic.h>

#include <refit/host.h>

#include "net/send_queue.h"
#include "tests/support/pairing.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

/* ---- A socket that is full when the test says so */

static atomic_uint room = UINT32_MAX; /* messages that a worker's socket takes */
#define MOST 512u                     /* as session.c has it */

static uint64_t sent[MOST + 32]; /* versions of COMMITs that no real socket took */
static uint32_t sent_count;
static rft_limits limits;

refit_status __real_rft_channel_send(rft_channel *channel, const rft_peer_id *to, rft_view message,
                                     const rft_payload *payload, refit_error *error);
refit_status __wrap_rft_channel_send(rft_channel *channel, const rft_peer_id *to, rft_view message,
                                     const rft_payload *payload, refit_error *error);

refit_status __wrap_rft_channel_send(rft_channel *channel, const rft_peer_id *to, rft_view message,
                                     const rft_payload *payload, refit_error *error)
{
    rft_message said;
    if (to != NULL) return __real_rft_channel_send(channel, to, message, payload, error);
    if (atomic_load(&room) == 0) return REFIT_ERR_BUSY;
    if (channel != NULL) return __real_rft_channel_send(channel, to, message, payload, error);
    atomic_fetch_sub(&room, 1);
    assert_ok(rft_message_decode(message, &limits, &said, NULL));
    sent[sent_count++] = said.as.commit.version;
    return REFIT_OK;
}

static int make_room(void **state)
{
    refit_config config = quick_config();
    limits = rft_limits_from(&config);
    *state = NULL;
    sent_count = 0;
    atomic_store(&room, 0);
    return 0;
}

/* ---- In order */

static refit_status put(rft_send_queue *queue, uint64_t version, refit_error *error)
{
    rft_message message = {.kind = RFT_RELEASED};
    message.as.commit.version = version;
    return rft_send_queue_put(queue, NULL, &message, &limits, error);
}

TEST_WITH(messages_go_out_in_order_as_far_as_the_socket_takes_them, make_room, NULL)
{
    rft_send_queue queue = {.most = MOST};
    uint64_t next = 1, expected = 1;
    for (uint32_t turn = 0; turn < 10; turn++) { /* what is left moves to the front */
        for (uint32_t i = 0; i < 5; i++)
            assert_ok(put(&queue, next++, NULL));
        assert_false(rft_send_queue_flush(&queue, NULL));
        assert_int_equal(sent_count, 0);
        atomic_store(&room, 3);
        assert_false(rft_send_queue_flush(&queue, NULL));
        assert_int_equal(sent_count, 3);
        atomic_store(&room, 2);
        assert_true(rft_send_queue_flush(&queue, NULL));
        assert_true(rft_send_queue_flush(&queue, NULL));
        assert_int_equal(sent_count, 5);
        for (uint32_t i = 0; i < 5; i++)
            assert_int_equal(sent[i], expected++);
        sent_count = 0;
    }
    rft_send_queue_close(&queue);
}

TEST_WITH(a_full_queue_takes_no_more_and_loses_nothing, make_room, NULL)
{
    rft_send_queue queue = {.most = MOST};
    for (uint64_t i = 1; i <= MOST; i++)
        assert_ok(put(&queue, i, NULL));
    assert_refused(put(&queue, 77, error), REFIT_ERR_BUSY, "512 messages");
    atomic_store(&room, 1);
    assert_false(rft_send_queue_flush(&queue, NULL));
    assert_ok(put(&queue, 88, NULL));
    atomic_store(&room, UINT32_MAX);
    assert_true(rft_send_queue_flush(&queue, NULL));
    assert_int_equal(sent_count, MOST + 1);
    assert_int_equal(sent[MOST - 1], MOST);
    assert_int_equal(sent[MOST], 88);
    rft_send_queue_close(&queue);
}

TEST_WITH(what_cannot_be_encoded_is_not_in, make_room, NULL)
{
    rft_send_queue queue = {.most = MOST};
    static char name[200];
    rft_message message = {.kind = RFT_BYE};
    memset(name, 'x', sizeof name);
    message.as.bye.reason = (rft_view){name, sizeof name};
    rft_limits tight = limits;
    tight.message_bytes = 100;
    assert_int_equal(rft_send_queue_put(&queue, NULL, &message, &tight, NULL), REFIT_ERR_LIMIT);
    atomic_store(&room, UINT32_MAX);
    assert_true(rft_send_queue_flush(&queue, NULL));
    assert_int_equal(sent_count, 0);
    assert_ok(put(&queue, 5, NULL));
    rft_send_queue_reset(&queue);
    assert_true(rft_send_queue_flush(&queue, NULL));
    assert_int_equal(sent_count, 0);
    rft_send_queue_close(&queue);
}

/* ---- A trainer that takes nothing */

/* The socket takes messages again from the moment on when the worker gives its trainer up. */
static void open_when_lost(void *user, refit_log_level level, const char *line)
{
    (void)user, (void)level;
    if (strstr(line, "its messages could not be sent") != NULL) atomic_store(&room, UINT32_MAX);
}

/* Each WELCOME is answered with a JOIN; beats are too rare to come between. */
PAIR_TEST(what_waited_for_a_lost_trainer_is_not_sent)
{
    atomic_store(&room, UINT32_MAX);
    pair_open(pair, false, NULL);
    rft_message welcome = sample_welcome(pair->raw.epoch, NULL);
    welcome.as.welcome.heartbeat_ms = 600000;
    welcome.as.welcome.heartbeat_timeout_ms = 1200000;
    raw_hear(&pair->raw, RFT_HELLO);
    raw_say(&pair->raw, welcome);
    raw_hear(&pair->raw, RFT_JOIN);
    refit_set_log(open_when_lost, NULL, REFIT_LOG_WARNING);
    atomic_store(&room, 0);
    for (uint32_t i = 0; i <= MOST; i++)
        raw_say(&pair->raw, welcome);
    while (raw_hear_any(&pair->raw)->kind != RFT_HELLO)
        assert_int_not_equal(pair->raw.heard.kind, RFT_JOIN);
    refit_set_log(NULL, NULL, REFIT_LOG_WARNING);
    raw_say(&pair->raw, welcome);
    raw_hear(&pair->raw, RFT_JOIN);
    pair_apply(pair, 0, NULL);
}

int main(void)
{
    return test_run("full_socket");
}
