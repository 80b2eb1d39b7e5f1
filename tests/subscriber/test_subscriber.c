/* The subscriber's public functions: versions come whole, waits end, decisions are told. */
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include "base/alloc.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/pairing.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

/* ---- Opening and waiting */

TEST(arguments_are_checked)
{
    refit_subscriber *subscriber = NULL;
    refit_error error;
    refit_config config = quick_config();
    assert_invalid(refit_subscriber_open("tcp://127.0.0.1:1", &config, NULL, &error));
    assert_invalid(refit_subscriber_open("udp://somewhere", &config, &subscriber, &error));
    config.broadcast_heartbeat_timeout_ms = 1;
    assert_int_equal(refit_subscriber_open("tcp://127.0.0.1:1", &config, &subscriber, &error),
                     REFIT_ERR_CONFIG);
    assert_null(subscriber);
    assert_invalid(refit_subscriber_next(NULL, 0, NULL, &error));
    assert_invalid(refit_subscriber_describe(NULL, NULL, &error));
    assert_invalid(refit_subscriber_stats(NULL, NULL, &error));
    assert_int_equal(refit_subscriber_fd(NULL), -1);
    refit_subscriber_wake(NULL);
    refit_subscriber_close(NULL);
    refit_update_close(NULL);
    assert_int_equal(refit_update_version(NULL), 0);
    assert_int_equal(refit_update_count(NULL), 0);
    assert_invalid(refit_update_accept(NULL, &error));
    assert_invalid(refit_update_refuse(NULL, NULL, 0, &error));
    assert_invalid(refit_update_tensor(NULL, 0, NULL, NULL, &error));
    assert_invalid(refit_update_places(NULL, NULL, 0, &error));
    assert_invalid(refit_update_manifest(NULL, NULL, &error));
    assert_invalid(refit_update_find(NULL, "x", NULL, &error));
    assert_invalid(refit_update_retain(NULL, 0, NULL, &error));
    refit_update_release(NULL);
}

TEST(open_survives_every_failed_allocation)
{
    for (uint64_t nth = 1;; nth++) {
        refit_config config = quick_config();
        refit_subscriber *subscriber = NULL;
        failing_alloc_begin(nth);
        refit_status status =
            refit_subscriber_open("tcp://127.0.0.1:1", &config, &subscriber, NULL);
        refit_subscriber_close(subscriber);
        bool failed = failing_alloc_end();
        if (status == REFIT_OK) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
        assert_true(failed);
    }
}

PAIR_TEST(without_a_trainer_next_times_out_and_says_so)
{
    refit_update *update = NULL;
    pair_open(pair, false, NULL);
    assert_refused(refit_subscriber_next(pair->subscriber, 10, &update, error), REFIT_ERR_TIMEOUT,
                   "no trainer");
    assert_null(update);
    refit_subscriber_info info = pair_describe(pair);
    assert_string_equal(info.state, "connecting");
    assert_int_equal(info.connected, 0);
    assert_int_equal(info.version, 0);
}

static void name_it(refit_config *config)
{
    strcpy(config->broadcast_worker, "rank-7");
}

TEST(a_worker_goes_by_its_name)
{
    pairing pair;
    char pid[32];
    for (int named = 0; named < 2; named++) {
        pair_open(&pair, false, named ? name_it : NULL);
        refit_subscriber_info info = pair_describe(&pair);
        const rft_message *hello = raw_hear(&pair.raw, RFT_HELLO);
        char said[64];
        rft_view_print(hello->as.hello.worker, said, sizeof said);
        assert_string_equal(said, info.worker);
        snprintf(pid, sizeof pid, ":%ld:", (long)getpid());
        assert_true(named ? strcmp(said, "rank-7") == 0 : strstr(said, pid) != NULL);
        pair_close(&pair);
    }
}

PAIR_TEST(a_version_comes_whole)
{
    pair_open(pair, false, NULL);
    raw_join(&pair->raw);
    assert_int_equal(pair_readable(pair, 0), 0);
    raw_stage(&pair->raw, &pair->samples[0], NULL);
    assert_int_equal(pair_readable(pair, 0), 0); /* staged is not committed */
    pair_await_report(pair);
    assert_string_equal(pair_describe(pair).state, "staged");
    assert_int_equal(pair_describe(pair).path, REFIT_PATH_SOCKET);
    raw_say(&pair->raw, sample_commit(&pair->samples[0]));
    assert_int_equal(pair_readable(pair, PAIR_LONG), 1);
    refit_update *update = pair_next(pair);
    assert_int_equal(pair_readable(pair, 0), 0);
    assert_update_is(update, &pair->samples[0]);

    const void *original, *tied;
    uint32_t index = 0;
    assert_ok(refit_update_find(update, "tied", &index, NULL));
    assert_ok(refit_update_tensor(update, index, NULL, &tied, NULL));
    assert_ok(refit_update_tensor(update, 1, NULL, &original, NULL));
    assert_ptr_equal(tied, original);
    assert_int_equal(refit_update_find(update, "absent", &index, NULL), REFIT_ERR_NOT_FOUND);
    assert_int_equal(refit_update_tensor(update, SAMPLE_TENSORS, NULL, NULL, NULL),
                     REFIT_ERR_NOT_FOUND);
    refit_tensor small = {.size = 4};
    assert_invalid(refit_update_tensor(update, 0, &small, NULL, NULL));
    const void *places[SAMPLE_TENSORS];
    assert_ok(refit_update_places(update, places, SAMPLE_TENSORS, NULL));
    assert_ptr_equal(places[1], original);
    assert_invalid(refit_update_places(update, places, SAMPLE_TENSORS - 1, NULL));
    assert_invalid(refit_update_places(update, NULL, SAMPLE_TENSORS, NULL));
    unsigned char digest[16];
    assert_ok(refit_update_manifest(update, digest, NULL));
    assert_memory_equal(digest, pair->samples[0].manifest->digest.bytes, sizeof digest);
    assert_invalid(refit_update_manifest(update, NULL, NULL));

    assert_ok(refit_update_accept(update, NULL));
    assert_int_equal(pair_describe(pair).version, 1);
    raw_hear(&pair->raw, RFT_COMMITTED);
    refit_update_close(update);
    raw_hear(&pair->raw, RFT_RELEASED);
    assert_int_equal(pair->raw.heard.as.commit.version, 1);

    refit_stats stats;
    pair_await_report(pair);
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_subscriber_stats(pair->subscriber, &stats, NULL));
    assert_int_equal(stats.receive_version, 1);
    assert_int_equal(stats.receive_count, 1);
    assert_true(stats.receive_bytes_total >= pair->samples[0].manifest->payload_bytes);
}

PAIR_TEST(one_update_is_open_and_decided_once)
{
    refit_update *second = NULL;
    pair_open(pair, false, NULL);
    raw_join(&pair->raw);
    refit_update *update = pair_take(pair, 0, NULL);
    assert_int_equal(refit_subscriber_next(pair->subscriber, 0, &second, NULL), REFIT_ERR_STATE);
    assert_ok(refit_update_refuse(update, "bad \x01 \xff words", 1, NULL));
    assert_int_equal(refit_update_refuse(update, NULL, 1, NULL), REFIT_ERR_STATE);
    assert_int_equal(refit_update_accept(update, NULL), REFIT_ERR_STATE);
    raw_hear(&pair->raw, RFT_FAILED);
    assert_true(pair->raw.heard.as.failed.kept);
    char reason[64];
    rft_view_print(pair->raw.heard.as.failed.reason, reason, sizeof reason);
    assert_string_equal(reason, "bad ? ? words");
    assert_int_equal(refit_subscriber_next(pair->subscriber, 0, &second, NULL), REFIT_ERR_STATE);
    refit_update_close(update);
    refit_update_close(update);
    assert_int_equal(refit_update_version(update), 0);
    assert_int_equal(refit_update_accept(update, NULL), REFIT_ERR_STATE);
    assert_int_equal(refit_subscriber_next(pair->subscriber, 0, &second, NULL), REFIT_ERR_TIMEOUT);
}

PAIR_TEST(an_update_closed_undecided_holds_nothing)
{
    pair_open(pair, false, NULL);
    raw_join(&pair->raw);
    pair_apply(pair, 0, NULL);
    raw_stage(&pair->raw, &pair->samples[1], &pair->samples[0]);
    raw_say(&pair->raw, sample_commit(&pair->samples[1]));
    refit_update_close(pair_next(pair));
    assert_int_equal(pair_describe(pair).version, 0);
    raw_hear(&pair->raw, RFT_FAILED);
    assert_false(pair->raw.heard.as.failed.kept);
    assert_int_equal(pair->raw.heard.as.failed.version, 2);
    raw_hear(&pair->raw, RFT_HELLO); /* to be offered the current version again */
    assert_int_equal(pair->raw.heard.as.hello.held.version, 0);
}

PAIR_TEST(steady_versions_allocate_nothing)
{
    pair_open(pair, false, NULL);
    raw_join(&pair->raw);
    pair_apply(pair, 0, NULL);
    pair_apply(pair, 1, &pair->samples[0]);
    /* A MANIFEST is decoded into memory of its own, so the third version comes without one; the
     * publisher by hand, in this same process, takes one buffer for each message it says. */
    sample_version *third = &pair->samples[2];
    raw_publisher *raw = &pair->raw;
    raw_say(raw, sample_offer(third, PAIR_EPOCH, 0, NULL, 0));
    raw_hear(raw, RFT_PULL);
    uint64_t before = rft_alloc_count();
    raw_frames(raw, third, NULL);
    raw_say(raw, sample_seal(third));
    uint64_t said = third->manifest->frame_count + 1;
    raw->silent = true;
    raw_hear_staged(raw, third);
    assert_true(rft_alloc_count() - before <= 2 * said);
}

/* ---- Ending a wait */

static void *wake_later(void *user)
{
    refit_subscriber_wake(user);
    return NULL;
}

PAIR_TEST(wake_ends_a_wait_and_the_next_one)
{
    refit_update *update = NULL;
    pthread_t thread;
    pair_open(pair, false, NULL);
    refit_subscriber_wake(pair->subscriber);
    assert_int_equal(pair_readable(pair, 0), 1);
    assert_int_equal(refit_subscriber_next(pair->subscriber, PAIR_LONG, &update, NULL),
                     REFIT_ERR_CANCELLED);
    assert_int_equal(pair_readable(pair, 0), 0);
    assert_int_equal(pthread_create(&thread, NULL, wake_later, pair->subscriber), 0);
    assert_int_equal(refit_subscriber_next(pair->subscriber, PAIR_LONG, &update, NULL),
                     REFIT_ERR_CANCELLED);
    pthread_join(thread, NULL);
    assert_int_equal(refit_subscriber_next(pair->subscriber, 0, &update, NULL), REFIT_ERR_TIMEOUT);
}

static refit_subscriber *signalled; /* the one that the handler wakes */

static void on_signal(int number)
{
    (void)number;
    refit_subscriber_wake(signalled);
}

static void *signal_later(void *user)
{
    pthread_kill(*(pthread_t *)user, SIGUSR1);
    return NULL;
}

PAIR_TEST(wake_works_in_a_signal_handler)
{
    refit_update *update = NULL;
    pthread_t thread, self = pthread_self();
    pair_open(pair, false, NULL);
    signalled = pair->subscriber;
    struct sigaction action = {.sa_handler = on_signal}, before;
    sigaction(SIGUSR1, &action, &before);
    assert_int_equal(pthread_create(&thread, NULL, signal_later, &self), 0);
    assert_int_equal(refit_subscriber_next(pair->subscriber, PAIR_LONG, &update, NULL),
                     REFIT_ERR_CANCELLED);
    pthread_join(thread, NULL);
    sigaction(SIGUSR1, &before, NULL);
}

PAIR_TEST(a_final_refusal_is_the_answer_from_then_on)
{
    refit_update *update = NULL;
    pair_open(pair, false, NULL);
    raw_hear(&pair->raw, RFT_HELLO);
    raw_say(&pair->raw, sample_refuse(REFIT_ERR_SECURITY, true));
    for (int i = 0; i < 2; i++) {
        assert_refused(refit_subscriber_next(pair->subscriber, PAIR_LONG, &update, error),
                       REFIT_ERR_SECURITY, "no room for you");
        assert_int_equal(pair_readable(pair, 0), 1);
    }
}

static void small_messages(refit_config *config)
{
    config->limits_message_bytes = 4096;
    config->limits_manifest_bytes = 4096;
}

PAIR_TEST(manifest_above_limit_costs_versions_but_not_connection)
{
    static const unsigned char tensors[8192];
    pair_open(pair, false, small_messages);
    raw_join(&pair->raw);
    rft_message manifest = sample_manifest(&pair->samples[0], PAIR_EPOCH);
    manifest.as.manifest.tensors = (rft_view){tensors, sizeof tensors};
    raw_say(&pair->raw, manifest);
    raw_hear(&pair->raw, RFT_FAILED);
    assert_int_equal(pair->raw.heard.as.failed.version, 0);
    for (uint32_t i = 0; i < 2; i++) {
        raw_say(&pair->raw, sample_offer(&pair->samples[i], PAIR_EPOCH, 0, NULL, 0));
        raw_hear(&pair->raw, RFT_FAILED);
        assert_int_equal(pair->raw.heard.as.failed.version, i + 1);
        assert_int_equal(pair->raw.heard.as.failed.code, REFIT_ERR_LIMIT);
    }
    pair_await_report(pair);
    assert_true(pair_describe(pair).connected);
    pair_apply(pair, 2, NULL);
}

int main(void)
{
    return test_run("subscriber");
}
