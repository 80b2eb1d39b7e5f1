/* A pairing, an engine, and what binds them. */
#include "tests/support/bound_pair.h"

#include "tests/support/faulty_device.h"
#include "tests/support/test.h"
#include "tests/support/test_device.h"

void bound_begin_with(bound_pair *it, bool device, void (*change)(refit_config *config))
{
    bound_end(it);
    pair_open(&it->pair, false, change);
    if (device) assert_ok(faulty_device_open(test_device_spec("host"), &it->device, NULL));
    engine_open(&it->engine, it->device, sample_tensors(), SAMPLE_TENSORS, 0, 0xEE);
    assert_done(
        refit_subscriber_bind(it->pair.subscriber, it->engine.list, it->engine.count, error));
    raw_join(&it->pair.raw);
}

void bound_begin(bound_pair *it, bool device)
{
    bound_begin_with(it, device, NULL);
}

void bound_end(bound_pair *it)
{
    if (it->pair.raw.channel == NULL) return;
    pair_close(&it->pair);
    engine_close(&it->engine);
    if (it->device != NULL) assert_ok(refit_device_close(it->device, NULL));
    memset(it, 0, sizeof *it);
}

int bound_setup(void **state)
{
    static bound_pair it;
    *state = &it;
    return 0;
}

int bound_teardown(void **state)
{
    bound_end(*state);
    return 0;
}

refit_update *bound_take(bound_pair *it, uint32_t index, uint32_t base)
{
    return pair_take(&it->pair, index, base == 0 ? NULL : &it->pair.samples[base - 1]);
}

void bound_apply(bound_pair *it, refit_update *update)
{
    assert_done(refit_update_apply(update, NULL, error));
    assert_true(engine_is_like(&it->engine, update));
}

void bound_accept(bound_pair *it, refit_update *update)
{
    assert_done(refit_update_accept(update, error));
    refit_update_close(update);
    raw_hear(&it->pair.raw, RFT_RELEASED);
}

void bound_run_first(bound_pair *it)
{
    refit_update *update = bound_take(it, 0, 0);
    bound_apply(it, update);
    bound_accept(it, update);
    engine_save(&it->engine);
}

refit_update *bound_take_second(bound_pair *it, bool device)
{
    bound_begin(it, device);
    bound_run_first(it);
    return bound_take(it, 1, 1);
}
