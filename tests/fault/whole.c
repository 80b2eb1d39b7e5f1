/*
 * The whole library at once, opened and closed. It opens the modules from left to right and closes
 * them from right to left; each pointer that is not NULL is open, so that closing is right wherever
 * opening stopped. Knows nothing of the faults.
 */
#include "tests/fault/whole.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "tests/support/quick_config.h"

#define SOON_MS      1000
#define FIRST_HOOKED 4                   /* regions before it lie in the arena */
#define RESERVE      (UINT64_C(8) << 20) /* four pages of a GPU */

const uint64_t whole_region_bytes[WHOLE_REGIONS] = {70001, 300000, 4096, 512, 8192, 33333};
const refit_policy whole_policies[WHOLE_REGIONS] = {REFIT_KEEP, REFIT_KEEP, REFIT_ZERO,
                                                    REFIT_KEEP, REFIT_KEEP, REFIT_DISCARD};

const char *const whole_patient[] = {"broadcast.resend_limit", "1000", NULL};

/* ---- Bytes */

uint64_t whole_weight_offset(uint32_t tensor)
{
    uint64_t offset = 0;
    for (uint32_t i = 0; i < tensor; i++)
        offset += (sample_tensors()[i].bytes + 63) & ~UINT64_C(63);
    return offset;
}

static bool memory_make(whole *on)
{
    static uint64_t runs;
    on->random = ++runs;
    on->folder = file_tree_open();
    on->expected_weights = calloc(1, whole_weight_offset(SAMPLE_TENSORS));
    bool made = on->expected_weights != NULL;
    for (int i = 0; i < WHOLE_REGIONS; i++) {
        on->regions[i].expected = calloc(1, whole_region_bytes[i]);
        made = made && on->regions[i].expected != NULL;
    }
    return made;
}

static void memory_drop(whole *on)
{
    file_tree_close(&on->folder);
    free(on->expected_weights);
    for (int i = 0; i < WHOLE_REGIONS; i++)
        free(on->regions[i].expected);
}

/* ---- The offloader */

static int release_memory(void *user, refit_region_id region, void *memory, uint64_t bytes)
{
    whole *on = user;
    if (on->fail_release > 0 && --on->fail_release == 0) return 17;
    test_fill(faulty_device_inner(on->device), memory, 0xDD, bytes);
    if (refit_memory_free(on->device, memory, NULL) != REFIT_OK) return 1;
    on->regions[region].memory = NULL;
    return 0;
}

static int acquire_memory(void *user, refit_region_id region, uint64_t bytes, void **memory)
{
    whole *on = user;
    if (on->fail_acquire > 0 && --on->fail_acquire == 0) return 18;
    if (refit_memory_alloc(on->device, bytes, memory, NULL) != REFIT_OK) return 1;
    on->regions[region].memory = *memory;
    return 0;
}

static refit_status region_add(whole *on, uint32_t at)
{
    char name[32];
    void *memory = NULL;
    refit_region_id id;
    if (at < FIRST_HOOKED) {
        RFT_TRY(refit_arena_alloc(on->arena, whole_region_bytes[at], &memory, &on->error));
    } else {
        RFT_TRY(refit_memory_alloc(on->device, whole_region_bytes[at], &memory, &on->error));
    }
    test_fill(faulty_device_inner(on->device), memory, 0, whole_region_bytes[at]);
    on->regions[at].memory = memory;
    snprintf(name, sizeof name, "state.%u", at);
    refit_region_desc desc = {.size = sizeof desc,
                              .name = name,
                              .memory = memory,
                              .bytes = whole_region_bytes[at],
                              .policy = whole_policies[at],
                              .group = at % 3,
                              .priority = (int32_t)at};
    return refit_offloader_add(on->offloader, &desc, &id, &on->error);
}

static refit_status offloader_make(whole *on)
{
    refit_memory_hooks hooks = {sizeof hooks, release_memory, acquire_memory, on};
    RFT_TRY(refit_arena_open(on->device, RESERVE, &on->arena, &on->error));
    RFT_TRY(refit_offloader_open(on->device, &on->config, &on->offloader, &on->error));
    for (uint32_t at = 0; at < WHOLE_REGIONS; at++)
        RFT_TRY(region_add(on, at));
    RFT_TRY(refit_offloader_set_memory(on->offloader, &hooks, &on->error));
    return refit_offloader_seal(on->offloader, &on->error);
}

/* ---- Opening and closing */

static void configure(whole *on, whole_path path, const char *const *settings)
{
    on->config = quick_config();
    on->config.offload_slab_bytes = 128 * KIB;
    on->config.offload_piece_bytes = 64 * KIB;
    on->config.offload_batch = 3;
    on->config.offload_huge_pages = REFIT_HUGE_PAGES_NEVER;
    on->config.offload_timeout_ms = 30000;
    on->config.broadcast_slots = 2;
    on->config.broadcast_frame_bytes = SAMPLE_FRAME_BYTES;
    on->config.broadcast_heartbeat_ms = 20;
    if (on->order == NULL && settings != whole_patient) {
        on->config.broadcast_heartbeat_timeout_ms = SOON_MS;
        on->config.broadcast_stage_timeout_ms = SOON_MS;
        on->config.broadcast_commit_timeout_ms = SOON_MS;
    }
    on->config.broadcast_shm = path == WHOLE_SHM ? REFIT_SHM_AUTO : REFIT_SHM_OFF;
    for (const char *const *at = settings; at != NULL && *at != NULL; at += 2)
        assert_ok(refit_config_set(&on->config, at[0], at[1], NULL));
}

static refit_status device_open(whole *on)
{
    RFT_TRY(faulty_device_open(test_device_spec("host:capacity=32MiB"), &on->device, &on->error));
    if (on->order != NULL) faulty_device_order(on->device, on->order);
    return REFIT_OK;
}

bool whole_order_met(const whole *on)
{
    if (on->order == NULL || on->device == NULL) return on->order_met;
    return faulty_device_calls(on->device, on->order->slot) >= on->order->nth;
}

/* Until it is subscribed, or has given up. */
static refit_status await_worker(whole *on)
{
    int64_t deadline = rft_deadline(LONG_MS);
    refit_status status = REFIT_ERR_TIMEOUT;
    while (status == REFIT_ERR_TIMEOUT && rft_ms_until(deadline) > 0) {
        status = refit_publisher_wait_workers(on->publisher, 1, 200, &on->error);
        if (status == REFIT_OK) return REFIT_OK;
        refit_status end = rollouts_end(&on->worker);
        RFT_REFUSE_IF(end != REFIT_OK, &on->error, end, "the worker has given up");
    }
    return status;
}

static refit_status open_all(whole *on, const char *endpoint)
{
    const refit_tensor *tensors = sample_tensors();
    void *weights = NULL;
    RFT_TRY(device_open(on));
    RFT_TRY(refit_stream_open(on->device, &on->stream, &on->error));
    RFT_TRY(
        refit_memory_alloc(on->device, whole_weight_offset(SAMPLE_TENSORS), &weights, &on->error));
    on->weights = weights;
    RFT_TRY(offloader_make(on));
    RFT_TRY(refit_publisher_open(endpoint, &on->config, &on->publisher, &on->error));
    RFT_TRY(refit_publisher_declare(on->publisher, tensors, SAMPLE_TENSORS, &on->error));
    RFT_TRY(refit_controller_open(on->offloader, on->publisher, &on->config, &on->controller,
                                  &on->error));
    RFT_TRY(rollouts_open(&on->worker, refit_publisher_endpoint(on->publisher), &on->config,
                          ROLLOUT_ACCEPT, &on->error));
    return await_worker(on);
}

refit_status whole_open_ordered(whole *on, whole_path path, const char *const *settings,
                                const faulty_order *order)
{
    memset(on, 0, sizeof *on);
    on->order = order;
    configure(on, path, settings);
    assert_true(memory_make(on));
    char ipc[80];
    snprintf(ipc, sizeof ipc, "ipc://%s/s", on->folder.root);
    refit_status status = open_all(on, path == WHOLE_SHM ? ipc : "tcp://127.0.0.1:0");
    if (status == REFIT_OK) return REFIT_OK;
    refit_error why = on->error;
    whole_check_told(status, &why);
    whole_close(on);
    on->error = why;
    return status;
}

refit_status whole_open(whole *on, whole_path path, const char *const *settings)
{
    return whole_open_ordered(on, path, settings, NULL);
}

static void check_shown(const whole *on)
{
    const rollout_thread *worker = &on->worker;
    assert_false(worker->torn);
    for (uint32_t i = 0; i < worker->count; i++) {
        assert_in_range(worker->versions[i], 1, on->version);
        assert_int_equal(worker->digests[i], on->digests[worker->versions[i]]);
    }
}

/* Closing may fail once, where a fault is still due. */
#define CLOSE(on, call)                                                                            \
    do {                                                                                           \
        refit_status closed = (call);                                                              \
        whole_check_told(closed, &(on)->error);                                                    \
        if (closed != REFIT_OK) assert_ok(call);                                                   \
    } while (0)

static void close_memory(whole *on)
{
    for (uint32_t at = FIRST_HOOKED; at < WHOLE_REGIONS; at++)
        CLOSE(on, refit_memory_free(on->device, on->regions[at].memory, &on->error));
    CLOSE(on, refit_arena_close(on->arena, &on->error));
    CLOSE(on, refit_memory_free(on->device, on->weights, &on->error));
}

void whole_close(whole *on)
{
    if (on->worker.subscriber != NULL) {
        rollouts_stop(&on->worker);
        check_shown(on);
    }
    refit_controller_close(on->controller);
    refit_publisher_close(on->publisher);
    CLOSE(on, refit_offloader_close(on->offloader, &on->error));
    if (on->device != NULL) close_memory(on);
    if (on->stream.native != NULL) {
        CLOSE(on, refit_stream_close(on->device, on->stream, &on->error));
    }
    on->order_met = whole_order_met(on);
    CLOSE(on, refit_device_close(on->device, &on->error));
    on->device = NULL;
    memory_drop(on);
    assert_true(test_device_quiet());
}
