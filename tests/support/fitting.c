/* A trainer on a thread of its own while it commits; the test is the worker. */
#include "tests/support/fitting.h"

#include "tests/support/quick_config.h"
#include "tests/support/test.h"

#define WAIT_MS 50000u

static void declare(fitting *fit)
{
    refit_tensor tensors[FIT_TENSORS];
    memset(tensors, 0, sizeof tensors);
    for (uint32_t i = 0; i < fit->count; i++) {
        const fit_tensor *from = &fit->tensors[i];
        tensors[i] = (refit_tensor){
            .size = sizeof(refit_tensor),
            .name = from->name,
            .dtype = from->dtype,
            .rank = 1,
            .shape = {from->elements},
            .bytes = from->elements * refit_dtype_bits(from->dtype) / 8,
            .alias_of = from->tied ? 0 : REFIT_NO_ALIAS,
        };
    }
    assert_ok(refit_publisher_declare(fit->publisher, tensors, fit->count, NULL));
}

static void open_devices(fitting *fit)
{
    assert_ok(refit_device_open("cuda:0", NULL, &fit->device, NULL));
    assert_ok(refit_device_open("cuda:0", NULL, &fit->theirs, NULL));
    fit->config.broadcast_gpu = REFIT_GPU_REQUIRE;
}

void fit_open(fitting *fit, bool on_gpu, bool verify, const fit_tensor *tensors, uint32_t count)
{
    *fit = (fitting){.config = quick_config(), .count = count};
    assert_true(count <= FIT_TENSORS);
    memcpy(fit->tensors, tensors, count * sizeof *tensors);
    if (verify) fit->config.broadcast_verify = REFIT_VERIFY_ALWAYS;
    if (on_gpu) open_devices(fit);
    assert_ok(refit_publisher_open("tcp://127.0.0.1:0", &fit->config, &fit->publisher, NULL));
    assert_ok(refit_subscriber_open(refit_publisher_endpoint(fit->publisher), &fit->config,
                                    &fit->subscriber, NULL));
    if (on_gpu) {
        assert_ok(refit_publisher_use_device(fit->publisher, fit->device, NULL));
        assert_ok(refit_subscriber_use_device(fit->subscriber, fit->theirs, NULL));
    }
    declare(fit);
    assert_ok(refit_publisher_wait_workers(fit->publisher, 1, WAIT_MS, NULL));
}

void fit_close(fitting *fit)
{
    refit_subscriber_close(fit->subscriber);
    refit_publisher_close(fit->publisher);
    if (fit->theirs != NULL) assert_ok(refit_device_close(fit->theirs, NULL));
    if (fit->device != NULL) assert_ok(refit_device_close(fit->device, NULL));
}

static void *commit(void *user)
{
    fitting *fit = user;
    fit->status = refit_publisher_commit(fit->publisher, NULL);
    return NULL;
}

void fit_offer(fitting *fit)
{
    assert_ok(refit_publisher_begin(fit->publisher, 0, NULL));
    for (uint32_t i = 0; i < fit->count; i++) {
        const fit_tensor *one = &fit->tensors[i];
        uint64_t bytes = one->elements * refit_dtype_bits(one->dtype) / 8;
        if (one->tied) continue;
        assert_done(refit_publisher_write(fit->publisher, i, one->bytes, bytes, NULL,
                                          REFIT_STREAM_NONE, error));
    }
    assert_ok(rft_thread_start(&fit->thread, "trainer", commit, fit, NULL));
    assert_done(refit_subscriber_next(fit->subscriber, WAIT_MS, &fit->update, error));
    assert_int_equal(refit_update_device(fit->update) != NULL, fit->device != NULL);
}

void fit_end(fitting *fit)
{
    refit_update_close(fit->update);
    rft_thread_join(fit->thread);
}
