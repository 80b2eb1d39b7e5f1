/* Messages come out in order and whole, each with its peer; a put that fails puts nothing in. */
#include "net/send_queue.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

static rft_limits limits(void)
{
    refit_config config = quick_config();
    return rft_limits_from(&config);
}

static refit_status put(rft_send_queue *queue, unsigned char to, uint64_t version)
{
    rft_limits allowed = limits();
    rft_peer_id id = {.bytes = {to}, .count = 1};
    rft_message message = {.kind = RFT_COMMIT};
    message.as.commit.version = version;
    return rft_send_queue_put(queue, &id, &message, &allowed, NULL);
}

TEST(messages_come_out_in_order)
{
    rft_send_queue queue = {0};
    rft_limits allowed = limits();
    for (int round = 0; round < 3; round++) {
        assert_true(rft_send_queue_is_empty(&queue));
        for (unsigned char i = 1; i <= 100; i++)
            assert_ok(put(&queue, i, i * 1000u));
        for (unsigned char i = 1; i <= 100; i++) {
            rft_outgoing next;
            rft_message message;
            assert_true(rft_send_queue_take(&queue, &next));
            assert_int_equal(next.to.bytes[0], i);
            assert_ok(rft_message_decode(next.message, &allowed, &message, NULL));
            assert_int_equal(message.as.commit.version, i * 1000u);
        }
        rft_outgoing none;
        assert_false(rft_send_queue_take(&queue, &none));
        rft_send_queue_reset(&queue);
    }
    rft_send_queue_close(&queue);
}

TEST(failed_put_leaves_what_was_there)
{
    for (uint64_t nth = 1;; nth++) {
        rft_send_queue queue = {0};
        rft_outgoing next;
        refit_status status = REFIT_OK;
        uint32_t taken = 0, there = 0;
        failing_alloc_begin(nth);
        for (unsigned char i = 1; i <= 40; i++) {
            refit_status one = put(&queue, i, i);
            there += one == REFIT_OK;
            if (one != REFIT_OK) status = one;
        }
        while (rft_send_queue_take(&queue, &next))
            taken++;
        rft_send_queue_close(&queue);
        bool failed = failing_alloc_end();
        assert_int_equal(taken, there);
        if (!failed) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
}

int main(void)
{
    return test_run("send_queue");
}
