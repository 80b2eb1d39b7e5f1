/*
 * The whole library at once, at work. Every version has bytes of its own, and so has every `whole`:
 * a worker that is shown something old, half of something, or of another trainer, has the wrong
 * digest. Knows nothing of the faults.
 */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "tests/fault/whole.h"

#define LITTLE 97u /* one byte in so many changes */

/* ---- Bytes */

static void fill(whole *on, unsigned char *to, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++) {
        on->random = on->random * UINT64_C(6364136223846793005) + 1442695040888963407u;
        to[i] = (unsigned char)(on->random >> 56);
    }
}

static uint64_t digest_weights(const whole *on)
{
    const refit_tensor *tensors = sample_tensors();
    const void *bytes[SAMPLE_TENSORS];
    for (uint32_t i = 0; i < SAMPLE_TENSORS; i++) {
        bool tied = tensors[i].alias_of != REFIT_NO_ALIAS;
        bytes[i] = on->expected_weights + whole_weight_offset(tied ? tensors[i].alias_of : i);
    }
    return rollouts_digest(tensors, SAMPLE_TENSORS, bytes);
}

/* ---- The cycle */

/* The first tensor changes every other time, so that there is something to leave out; where what
 * changed is always coded, little of the others changes. */
static void step_weights(whole *on)
{
    bool little = on->version > 0 && on->config.broadcast_delta == REFIT_DELTA_ALWAYS;
    uint64_t end = whole_weight_offset(SAMPLE_TENSORS);
    uint64_t from = on->version % 2 == 0 ? 0 : whole_weight_offset(1);
    for (uint64_t at = from; at < end; at += little ? LITTLE : end)
        fill(on, on->expected_weights + at, little ? 1 : end - at);
}

refit_status whole_step(whole *on)
{
    for (uint32_t at = 0; at < WHOLE_REGIONS; at++) {
        fill(on, on->regions[at].expected, whole_region_bytes[at]);
        test_write(faulty_device_inner(on->device), on->regions[at].memory,
                   on->regions[at].expected, whole_region_bytes[at]);
    }
    step_weights(on);
    return refit_stream_copy(on->device, on->stream, on->weights, on->expected_weights,
                             whole_weight_offset(SAMPLE_TENSORS), &on->error);
}

refit_status whole_publish(whole *on)
{
    const refit_tensor *tensors = sample_tensors();
    refit_weight weights[SAMPLE_TENSORS];
    uint32_t count = 0;
    for (uint32_t i = 0; i < SAMPLE_TENSORS; i++) {
        if (tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        weights[count++] =
            (refit_weight){i, on->weights + whole_weight_offset(i), tensors[i].bytes};
    }
    assert_true(on->version < WHOLE_VERSIONS);
    on->digests[++on->version] = digest_weights(on);
    return refit_controller_publish(on->controller, on->version, weights, count, on->device,
                                    on->stream, &on->error);
}

/* A checkpoint writer looks at the image. */
static refit_status read_image(whole *on)
{
    refit_read_lock *lock;
    if (refit_offloader_get_state(on->offloader) != REFIT_OFFLOADED) return REFIT_OK;
    RFT_TRY(refit_read_lock_acquire(on->offloader, &lock, &on->error));
    for (uint32_t at = 0; at < WHOLE_REGIONS; at++) {
        const void *bytes;
        uint64_t count;
        if (whole_policies[at] != REFIT_KEEP) continue;
        assert_ok(refit_read_lock_read(lock, at, &bytes, &count, &on->error));
        assert_int_equal(count, whole_region_bytes[at]);
        assert_memory_equal(bytes, on->regions[at].expected, count);
    }
    refit_read_lock_release(lock);
    return REFIT_OK;
}

/* What the join left to the stream: its end. */
static refit_status await_states(whole *on)
{
    RFT_TRY(refit_stream_wait(on->device, on->stream, LONG_MS, &on->error));
    return refit_offloader_wait(on->offloader, LONG_MS, &on->error);
}

typedef refit_status (*whole_phase)(whole *on);

static refit_status clear(whole *on)
{
    return refit_controller_offload(on->controller, on->stream, &on->error);
}

static refit_status bring_back(whole *on)
{
    return refit_controller_restore(on->controller, on->stream, &on->error);
}

static refit_status join(whole *on)
{
    if (refit_controller_get_state(on->controller) != REFIT_RETURNING) return REFIT_OK;
    return refit_controller_wait(on->controller, on->stream, &on->error);
}

refit_status whole_cycle(whole *on)
{
    static const whole_phase phases[] = {clear,      read_image, whole_publish,
                                         bring_back, join,       await_states};
    refit_status first = whole_step(on);
    whole_check_told(first, &on->error);
    if (first != REFIT_OK) return first;
    for (size_t i = 0; i < sizeof phases / sizeof phases[0]; i++) {
        refit_status status = phases[i](on);
        whole_check_told(status, &on->error);
        first = rft_keep_first(first, status);
    }
    return first;
}

/* ---- After a fault */

void whole_check_told(refit_status status, const refit_error *error)
{
    if (status == REFIT_OK) return;
    assert_int_equal(error->status, status);
    assert_string_not_equal(refit_status_name(status), "ERR_UNKNOWN");
    assert_true(strlen(error->text) > 8);
}

/* KEEP regions hold what was filled in. */
static void check_states(const whole *on)
{
    for (uint32_t at = 0; at < WHOLE_REGIONS; at++) {
        if (whole_policies[at] != REFIT_KEEP) continue;
        assert_non_null(on->regions[at].memory);
        assert_device_equal(faulty_device_inner(on->device), on->regions[at].memory,
                            on->regions[at].expected, whole_region_bytes[at]);
    }
}

static void settle(whole *on)
{
    /* Both only find out how things stand: what has failed was told, or is told now. */
    refit_status told = refit_stream_wait(on->device, on->stream, LONG_MS, NULL);
    told = refit_offloader_wait(on->offloader, LONG_MS, NULL);
    (void)told;
    assert_ok(refit_controller_restore(on->controller, REFIT_STREAM_NONE, &on->error));
    assert_ok(refit_controller_wait(on->controller, REFIT_STREAM_NONE, &on->error));
    assert_int_equal(refit_offloader_get_state(on->offloader), REFIT_RESIDENT);
    check_states(on);
}

void whole_prove(whole *on)
{
    int64_t deadline = rft_deadline(LONG_MS);
    refit_status status;
    settle(on);
    do {
        /* A worker that has not noticed yet that it was evicted may cost another version. */
        assert_ok(refit_publisher_wait_workers(on->publisher, 1, LONG_MS, &on->error));
        status = whole_cycle(on);
        if (status != REFIT_OK) settle(on);
    } while ((status == REFIT_ERR_PEER || status == REFIT_ERR_TIMEOUT) &&
             rft_ms_until(deadline) > 0);
    if (status != REFIT_OK) fail_msg("%s: %s", refit_status_name(status), on->error.text);
    check_states(on);
    (void)rollouts_wait(&on->worker, on->version, 1);
}

/* ---- Where a sweep is */

static char doing[160];

void whole_say(const char *what, uint64_t nth)
{
    doing[0] = '\0';
    if (what == NULL) return;
    snprintf(doing, sizeof doing, "%s, fault %llu", what, (unsigned long long)nth);
}

int whole_tell(void **state)
{
    if (doing[0] != '\0') print_error("while: %s\n", doing);
    doing[0] = '\0';
    return 0;
}
