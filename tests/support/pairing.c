/* A subscriber and a publisher by hand. */
#include "tests/support/pairing.h"

#include <poll.h>

#include "tests/support/quick_config.h"
#include "tests/support/test.h"

void pair_open(pairing *pair, bool shm, void (*change)(refit_config *config))
{
    refit_config config = quick_config();
    memset(pair, 0, sizeof *pair);
    config.broadcast_shm = shm ? REFIT_SHM_AUTO : REFIT_SHM_OFF;
    if (change != NULL) change(&config);
    for (uint32_t i = 0; i < 3; i++)
        sample_open(&pair->samples[i], i + 1);
    raw_open(&pair->raw, "tcp://127.0.0.1:0", PAIR_EPOCH, shm);
    assert_done(refit_subscriber_open(rft_channel_endpoint(pair->raw.channel), &config,
                                      &pair->subscriber, error));
}

void with_verify_always(refit_config *config)
{
    config->broadcast_verify = REFIT_VERIFY_ALWAYS;
}

int pair_setup(void **state)
{
    static pairing pair;
    *state = &pair;
    return 0;
}

int pair_teardown(void **state)
{
    pair_close(*state);
    return 0;
}

void pair_renew(pairing *pair, bool shm, void (*change)(refit_config *config))
{
    pair_close(pair);
    pair_open(pair, shm, change);
}

void pair_close(pairing *pair)
{
    if (pair->raw.channel == NULL) return;
    refit_subscriber_close(pair->subscriber);
    raw_close(&pair->raw);
    for (uint32_t i = 0; i < 3; i++)
        sample_close(&pair->samples[i]);
    memset(pair, 0, sizeof *pair);
}

refit_update *pair_next(pairing *pair)
{
    refit_update *update = NULL;
    assert_done(refit_subscriber_next(pair->subscriber, PAIR_LONG, &update, error));
    return update;
}

refit_update *pair_take(pairing *pair, uint32_t index, const sample_version *base)
{
    raw_stage(&pair->raw, &pair->samples[index], base);
    raw_say(&pair->raw, sample_commit(&pair->samples[index]));
    return pair_next(pair);
}

void pair_offer_slot(pairing *pair, uint32_t index, const char *name, uint64_t offset)
{
    const sample_version *sample = &pair->samples[index];
    raw_say(&pair->raw, sample_manifest(sample, PAIR_EPOCH));
    raw_say(&pair->raw, sample_offer(sample, PAIR_EPOCH, 0, name, offset));
}

refit_update *pair_take_slot(pairing *pair, uint32_t index, rft_segment *slot)
{
    const sample_version *sample = &pair->samples[index];
    raw_slot_open(slot, sample);
    pair_offer_slot(pair, index, slot->name, RFT_SEQLOCK_BYTES);
    raw_say(&pair->raw, sample_seal(sample));
    raw_hear_staged(&pair->raw, sample);
    raw_say(&pair->raw, sample_commit(sample));
    return pair_next(pair);
}

void assert_update_is(const refit_update *update, const sample_version *sample)
{
    assert_int_equal(refit_update_version(update), sample->version);
    assert_int_equal(refit_update_count(update), SAMPLE_TENSORS);
    for (uint32_t i = 0; i < SAMPLE_TENSORS; i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        const void *bytes = NULL;
        assert_ok(refit_update_tensor(update, i, &tensor, &bytes, NULL));
        assert_string_equal(tensor.name, sample_tensors()[i].name);
        assert_int_equal(tensor.bytes, sample_tensors()[i].bytes);
        assert_int_equal((uintptr_t)bytes % 64, 0);
        assert_memory_equal(bytes, sample->image + sample->manifest->tensors[i].offset,
                            tensor.bytes);
    }
}

void pair_await_report(pairing *pair)
{
    raw_hear(&pair->raw, RFT_BEAT);
    raw_hear(&pair->raw, RFT_BEAT);
}

refit_subscriber_info pair_describe(pairing *pair)
{
    refit_subscriber_info info = {.size = sizeof info};
    assert_ok(refit_subscriber_describe(pair->subscriber, &info, NULL));
    return info;
}

int pair_readable(pairing *pair, int timeout_ms)
{
    struct pollfd item = {.fd = refit_subscriber_fd(pair->subscriber), .events = POLLIN};
    return poll(&item, 1, timeout_ms);
}

/* Staged, committed, taken, accepted and closed. */
void pair_apply(pairing *pair, uint32_t index, const sample_version *base)
{
    refit_update *update = pair_take(pair, index, base);
    assert_update_is(update, &pair->samples[index]);
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    raw_hear(&pair->raw, RFT_RELEASED);
}
