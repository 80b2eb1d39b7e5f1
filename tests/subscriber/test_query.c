/* An observer learns which version a publisher holds, and no version waits for it. */
#include <stdatomic.h>
#include <stdio.h>

#include <refit/advanced/query.h>

#include "base/clock.h"
#include "tests/support/raw_publisher.h"
#include "tests/support/test.h"
#include "tests/support/trainer.h"

#define WAIT_MS 20000u

static refit_query_info look_at(const char *endpoint, refit_query **query)
{
    refit_query_info info = {.size = sizeof info};
    const refit_config config = quick_config();
    assert_done(refit_query_open(endpoint, &config, WAIT_MS, query, error));
    assert_ok(refit_query_describe(*query, &info, NULL));
    return info;
}

static refit_query_info look(const char *endpoint)
{
    refit_query *query;
    refit_query_info info = look_at(endpoint, &query);
    refit_query_close(query);
    return info;
}

TEST(what_is_not_there_yet_is_not_told)
{
    refit_publisher *publisher;
    const refit_config config = quick_config();
    assert_ok(refit_publisher_open(NULL, &config, &publisher, NULL));
    refit_query_info info = look(refit_publisher_endpoint(publisher));
    assert_true(info.epoch != 0);
    assert_int_equal(info.version, 0);
    assert_int_equal(info.tensors, 0);
    assert_int_equal(info.sealed, 0);
    assert_ok(refit_publisher_declare(publisher, sample_tensors(), SAMPLE_TENSORS, NULL));
    info = look(refit_publisher_endpoint(publisher));
    assert_int_equal(info.version, 0);
    assert_int_equal(info.tensors, SAMPLE_TENSORS);
    assert_int_equal(info.sealed, 0);
    refit_publisher_close(publisher);
}

static void publish(test_trainer *trainer, uint64_t version)
{
    trainer_start(trainer, TRAINER_PUBLISH, version);
    assert_ok(trainer_join(trainer));
}

TEST(a_committed_version_is_told_with_its_digests)
{
    test_trainer trainer;
    refit_query *query;
    const refit_config config = trainer_config();
    trainer_open(&trainer, &config);
    publish(&trainer, 3);
    refit_query_info info = look_at(refit_publisher_endpoint(trainer.publisher), &query);
    const rft_manifest *manifest = trainer.sample.manifest;
    assert_int_equal(info.version, 3);
    assert_int_equal(info.sealed, 1);
    assert_int_equal(info.weight_bytes, manifest->payload_bytes);
    assert_memory_equal(info.digest, trainer.sample.digest.bytes, 16);
    assert_memory_equal(info.manifest, manifest->digest.bytes, 16);
    for (uint32_t i = 0; i < manifest->count; i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        uint64_t digest;
        assert_ok(refit_query_tensor(query, i, &tensor, &digest, NULL));
        assert_string_equal(tensor.name, manifest->tensors[i].name);
        assert_true(digest ==
                    refit_tensor_digest(trainer.sample.image + manifest->tensors[i].offset,
                                        manifest->tensors[i].bytes));
    }
    assert_int_equal(refit_query_tensor(query, manifest->count, NULL, NULL, NULL),
                     REFIT_ERR_NOT_FOUND);
    refit_query_close(query);
    trainer_close(&trainer);
}

static void assert_no_workers(refit_publisher *publisher)
{
    refit_worker_info worker = {.size = sizeof worker};
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_publisher_stats(publisher, &stats, NULL));
    assert_int_equal(stats.workers, 0);
    assert_int_equal(refit_publisher_worker(publisher, 0, &worker, NULL), REFIT_ERR_NOT_FOUND);
}

TEST(no_version_waits_for_an_observer)
{
    test_trainer trainer;
    const refit_config config = trainer_config();
    trainer_open(&trainer, &config);
    const char *endpoint = refit_publisher_endpoint(trainer.publisher);
    publish(&trainer, 1);
    trainer_begin(&trainer, 2);
    assert_int_equal(look(endpoint).version, 1); /* a version that is not committed is not told */
    assert_no_workers(trainer.publisher);
    trainer_write(&trainer);
    refit_query_info info = look(endpoint);
    assert_int_equal(info.version, 1);
    assert_int_equal(info.sealed, 1);
    assert_ok(refit_publisher_commit(trainer.publisher, NULL));
    assert_int_equal(look(endpoint).version, 2);
    assert_no_workers(trainer.publisher);
    trainer_close(&trainer);
}

TEST(without_an_answer_the_wait_ends)
{
    refit_query *query;
    refit_config config = quick_config();
    assert_refused(refit_query_open("ipc:///nowhere/refit", &config, 50, &query, error),
                   REFIT_ERR_TIMEOUT, "no trainer has answered");
    assert_invalid(refit_query_open("nonsense", &config, 50, &query, NULL));
    assert_invalid(refit_query_open("ipc:///nowhere/refit", &config, 50, NULL, NULL));
    refit_query_info info = {.size = 4};
    assert_invalid(refit_query_describe(NULL, &info, NULL));
    assert_invalid(refit_query_tensor(NULL, 0, NULL, NULL, NULL));
    refit_query_close(NULL);
}

/* ---- Publishers that are none of ours */

typedef struct asker {
    const char *endpoint;
    uint32_t timeout_ms;
    refit_status status;
    refit_query_info info;
    uint64_t digests; /* of all tensors, one or the other */
    atomic_bool done;
} asker;

static uint64_t any_digest(const refit_query *query, uint32_t tensors)
{
    uint64_t digest, any = 0;
    for (uint32_t i = 0; i < tensors; i++)
        if (refit_query_tensor(query, i, NULL, &digest, NULL) == REFIT_OK) any |= digest;
    return any;
}

static void *ask(void *user)
{
    asker *it = user;
    refit_query *query = NULL;
    const refit_config config = quick_config();
    it->status = refit_query_open(it->endpoint, &config, it->timeout_ms, &query, NULL);
    it->info = (refit_query_info){.size = sizeof it->info};
    if (it->status == REFIT_OK) (void)!refit_query_describe(query, &it->info, NULL);
    it->digests = any_digest(query, it->info.tensors);
    refit_query_close(query);
    atomic_store(&it->done, true);
    return NULL;
}

/* Hears HELLO, answers with so many of these messages, and returns what the observer got. */
static asker answer(const rft_message *messages, uint32_t count, uint32_t timeout_ms)
{
    raw_publisher raw;
    rft_thread thread;
    raw_open(&raw, "tcp://127.0.0.1:0", 7, false);
    asker it = {.endpoint = rft_channel_endpoint(raw.channel), .timeout_ms = timeout_ms};
    assert_ok(rft_thread_start(&thread, "asker", ask, &it, NULL));
    const rft_message *hello = raw_hear(&raw, RFT_HELLO);
    assert_true(hello->as.hello.observer);
    for (uint32_t i = 0; i < count; i++)
        raw_say(&raw, messages[i]);
    rft_thread_join(thread);
    raw_close(&raw);
    return it;
}

/* It tells what it knows once the wait ends, which is as short as the machine lets it be. */
TEST(a_publisher_that_knows_no_observers_tells_its_version)
{
    rft_message welcome = sample_welcome(7, "");
    welcome.as.welcome.version = 5;
    asker it = {.status = REFIT_ERR_TIMEOUT};
    for (uint32_t ms = 100; it.status == REFIT_ERR_TIMEOUT && ms < WAIT_MS; ms *= 2)
        it = answer(&welcome, 1, ms);
    assert_ok(it.status);
    assert_int_equal(it.info.version, 5);
    assert_int_equal(it.info.sealed, 0);
}

TEST(a_refusal_is_told)
{
    const rft_message refuse = sample_refuse(REFIT_ERR_LIMIT, false);
    assert_int_equal(answer(&refuse, 1, WAIT_MS).status, REFIT_ERR_PEER);
    const rft_message bye = sample_bye();
    assert_int_equal(answer(&bye, 1, WAIT_MS).status, REFIT_ERR_CLOSED);
}

TEST(lies_are_found)
{
    sample_version sample;
    sample_open(&sample, 3);
    const rft_message welcome = sample_welcome(7, ""), manifest = sample_manifest(&sample, 7);
    rft_message seal = sample_seal(&sample), other = sample_seal(&sample);
    seal.as.seal.digest.bytes[3] ^= 1;
    other.as.seal.tensors.count -= 8;
    const rft_message wrong[] = {welcome, manifest, seal}, fewer[] = {welcome, manifest, other},
                      early[] = {welcome, sample_seal(&sample)}, twice[] = {welcome,
                                                                            manifest,
                                                                            manifest,
                                                                            sample_seal(&sample),
                                                                            sample_seal(&sample),
                                                                            sample_bye()};
    assert_int_equal(answer(wrong, 3, WAIT_MS).status, REFIT_ERR_CORRUPT);
    assert_int_equal(answer(fewer, 3, WAIT_MS).status, REFIT_ERR_PROTOCOL);
    assert_int_equal(answer(early, 2, WAIT_MS).status, REFIT_ERR_PROTOCOL);
    assert_ok(answer(twice, 6, WAIT_MS).status);
    sample_close(&sample);
}

/* More of them than any sample has. */
#define MANY 900u

static rft_manifest *many_tensors(void)
{
    const refit_config config = quick_config();
    const rft_limits limits = rft_limits_from(&config);
    static char names[MANY][16];
    static refit_tensor tensors[MANY];
    rft_manifest *manifest;
    for (uint32_t i = 0; i < MANY; i++) {
        (void)snprintf(names[i], sizeof names[i], "t%u", i);
        tensors[i] = (refit_tensor){.size = sizeof tensors[i],
                                    .name = names[i],
                                    .dtype = REFIT_F32,
                                    .rank = 1,
                                    .shape = {1},
                                    .bytes = 4,
                                    .alias_of = REFIT_NO_ALIAS};
    }
    assert_ok(rft_manifest_open(tensors, MANY, SAMPLE_FRAME_BYTES, &limits, &manifest, NULL));
    return manifest;
}

static rft_message say_many(const sample_version *sample, const rft_manifest *many)
{
    rft_message message = sample_manifest(sample, 7);
    message.as.manifest.digest = many->digest;
    message.as.manifest.tensors = (rft_view){many->encoded.data, many->encoded.count};
    return message;
}

TEST(a_seal_is_of_the_tensors_before_it_and_of_no_others)
{
    sample_version sample;
    sample_open(&sample, 3);
    rft_manifest *many = many_tensors();
    const rft_message welcome = sample_welcome(7, ""), manifest = sample_manifest(&sample, 7),
                      seal = sample_seal(&sample), others = say_many(&sample, many);
    const rft_message late[] = {welcome, manifest, seal, others, sample_bye()},
                      again[] = {welcome, manifest, seal, sample_welcome(8, ""), sample_bye()};
    asker it = answer(late, 5, WAIT_MS);
    assert_ok(it.status);
    assert_int_equal(it.info.tensors, MANY);
    assert_int_equal(it.info.sealed, 0);
    assert_true(it.digests == 0);
    it = answer(again, 5, WAIT_MS);
    assert_ok(it.status);
    assert_int_equal(it.info.epoch, 8);
    assert_int_equal(it.info.tensors, 0);
    assert_int_equal(it.info.sealed, 0);
    rft_manifest_close(many);
    sample_close(&sample);
}

TEST(what_comes_after_bye_is_not_heard)
{
    sample_version sample;
    sample_open(&sample, 3);
    const rft_message said[] = {sample_welcome(7, ""), sample_bye(), sample_seal(&sample),
                                sample_refuse(REFIT_ERR_LIMIT, false)};
    assert_ok(answer(said, 4, WAIT_MS).status);
    sample_close(&sample);
}

/* It sends its tensors faster than they can be read. */
TEST(a_trainer_that_never_stops_sending_does_not_extend_the_wait)
{
    raw_publisher raw;
    sample_version sample;
    rft_thread thread;
    rft_bytes bytes = {0};
    raw_open(&raw, "tcp://127.0.0.1:0", 7, false);
    sample_open(&sample, 3);
    rft_manifest *many = many_tensors();
    const rft_message message = say_many(&sample, many);
    assert_ok(rft_message_encode(&message, &raw.limits, &bytes, NULL));
    asker it = {.endpoint = rft_channel_endpoint(raw.channel), .timeout_ms = 300};
    assert_ok(rft_thread_start(&thread, "asker", ask, &it, NULL));
    (void)raw_hear(&raw, RFT_HELLO);
    raw_say(&raw, sample_welcome(7, ""));
    for (int64_t until = rft_deadline(WAIT_MS); !atomic_load(&it.done);) {
        (void)!rft_channel_send(raw.channel, &raw.worker, rft_bytes_view(&bytes), NULL, NULL);
        if (rft_ms_until(until) == 0) fail_msg("a query of 300 ms has not ended");
    }
    rft_thread_join(thread);
    assert_true(it.status == REFIT_OK ||
                it.status == REFIT_ERR_TIMEOUT); /* or too slow to hear it */
    assert_int_equal(it.info.sealed, 0);
    rft_bytes_close(&bytes);
    rft_manifest_close(many);
    sample_close(&sample);
    raw_close(&raw);
}

int main(void)
{
    return test_run("query");
}
