/* Versions applied into the engine's memory on a GPU by its kernels: the bits after it and after it
 * was taken back, what crosses the link, what is waited for, and all that may fail. */
#include <stdlib.h>

#include <refit/broadcast.h>

#include "base/thread.h"
#include "device/device.h"
#include "kernels/delta_job.h"
#include "tests/fake_cuda/fake_cuda.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/quick_config.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"

#define MOST    480u
#define WAIT_MS 50000u

#ifndef STRIDE /* of what fails: larger, where all takes many times as long */
#define STRIDE 1u
#endif

/* How a version comes to the worker. */
typedef enum way { LENT, STORED, SHARED, SENT, WAYS } way;

/* A trainer and a worker on one GPU. */
typedef struct rig {
    way way;
    refit_config config;
    refit_device *device, *theirs;
    refit_device *bound; /* of the destinations: theirs, or the same GPU once more */
    refit_publisher *publisher;
    refit_subscriber *subscriber;
    uint32_t count;
    refit_tensor tensors[MOST];
    char names[MOST][8];
    unsigned char *bytes[MOST]; /* of the version */
    void *lent;
    uint64_t lent_at[MOST];
    void *memory; /* the engine's, with gaps */
    uint64_t memory_bytes;
    refit_destination list[MOST];
    unsigned char *saved; /* all of it */
    refit_update *update;
    rft_thread thread;
    refit_status status; /* of the commit */
    uint64_t seed;
} rig;

/* ---- Opening */

static void add(rig *on, refit_dtype dtype, uint64_t elements, uint32_t alias)
{
    uint32_t i = on->count++;
    assert_true(i < MOST);
    (void)snprintf(on->names[i], sizeof on->names[i], "t%u", i);
    on->tensors[i] = (refit_tensor){.size = sizeof(refit_tensor),
                                    .name = on->names[i],
                                    .dtype = dtype,
                                    .rank = 1,
                                    .shape = {elements},
                                    .bytes = elements * refit_dtype_bits(dtype) / 8,
                                    .alias_of = alias};
}

/* Odd sizes, empty ones, blocks that are whole and not, a tied one. */
static void add_usual(rig *on)
{
    add(on, REFIT_BF16, 200001, REFIT_NO_ALIAS);
    add(on, REFIT_F32, 70001, REFIT_NO_ALIAS);
    add(on, REFIT_F64, 65537, REFIT_NO_ALIAS);
    add(on, REFIT_U8, 131072 + 3, REFIT_NO_ALIAS);
    add(on, REFIT_F32, 0, REFIT_NO_ALIAS);
    add(on, REFIT_F16, 1, REFIT_NO_ALIAS);
    add(on, REFIT_BF16, 200001, 0);
    add(on, REFIT_BF16, 7, REFIT_NO_ALIAS);
}

static uint64_t place(uint64_t at, uint32_t index)
{
    static const uint64_t aside[] = {0, 2, 1, 8};
    return (at + 15) / 16 * 16 + 16 + aside[index % 4];
}

static void take_memory(rig *on)
{
    uint64_t at = 0, lent = 0;
    for (uint32_t i = 0; i < on->count; i++) {
        on->lent_at[i] = lent;
        lent += (on->tensors[i].bytes + 255) / 256 * 256;
        at = place(at, i) + on->tensors[i].bytes;
        on->bytes[i] = malloc(on->tensors[i].bytes + 1);
        assert_non_null(on->bytes[i]);
        for (uint64_t k = 0; k < on->tensors[i].bytes; k++)
            on->bytes[i][k] = (unsigned char)seeded_next(&on->seed);
    }
    on->memory_bytes = at + 16;
    on->saved = malloc(on->memory_bytes);
    assert_non_null(on->saved);
    assert_ok(refit_memory_alloc(on->theirs, on->memory_bytes, &on->memory, NULL));
    assert_ok(refit_memory_alloc(on->device, lent + 1, &on->lent, NULL));
}

static unsigned char *engine_bytes(const rig *on)
{
    return fake_cuda_bytes((rft_cu_ptr)(uintptr_t)on->memory, on->memory_bytes);
}

static void bind_all(rig *on)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < on->count; i++) {
        at = place(at, i);
        uint32_t alias = on->tensors[i].alias_of;
        bool tied = alias != REFIT_NO_ALIAS && i % 2 == 0;
        on->list[i] = (refit_destination){.size = sizeof(refit_destination),
                                          .name = on->names[i],
                                          .memory = tied ? on->list[alias].memory
                                                         : (unsigned char *)on->memory + at,
                                          .bytes = on->tensors[i].bytes,
                                          .device = on->bound,
                                          .dtype = on->tensors[i].dtype};
        at += on->tensors[i].bytes;
    }
    assert_done(refit_subscriber_bind(on->subscriber, on->list, on->count, error));
}

static void begin_rig(rig *on, way how, void (*change)(refit_config *config))
{
    fake_cuda_reset();
    fake_cuda_set_memory(0, UINT64_C(512) << 20);
    memset(on, 0, sizeof *on);
    on->way = how;
    on->seed = 7 + how;
    on->config = quick_config();
    on->config.broadcast_slots = 2;
    on->config.broadcast_commit_timeout_ms = 300000; /* an apply may take long in a sanitizer */
    on->config.broadcast_shm = how == SENT ? REFIT_SHM_OFF : REFIT_SHM_AUTO;
    on->config.broadcast_gpu = how == STORED ? REFIT_GPU_STORE : REFIT_GPU_AUTO;
    if (change != NULL) change(&on->config);
    assert_ok(refit_device_open("cuda:0", NULL, &on->device, NULL));
    assert_ok(refit_device_open("cuda:0", NULL, &on->theirs, NULL));
    on->bound = on->theirs;
    if (how % 2 == 1) assert_ok(refit_device_open("cuda:0", NULL, &on->bound, NULL));
}

static void open_ends(rig *on)
{
    take_memory(on);
    assert_ok(refit_publisher_open("tcp://127.0.0.1:0", &on->config, &on->publisher, NULL));
    assert_ok(refit_subscriber_open(refit_publisher_endpoint(on->publisher), &on->config,
                                    &on->subscriber, NULL));
    if (on->way <= STORED) assert_ok(refit_publisher_use_device(on->publisher, on->device, NULL));
    assert_ok(refit_subscriber_use_device(on->subscriber, on->theirs, NULL));
    assert_ok(refit_publisher_declare(on->publisher, on->tensors, on->count, NULL));
    bind_all(on);
    refit_stats stats;
    do {
        assert_ok(refit_publisher_wait_workers(on->publisher, 1, WAIT_MS, NULL));
        refit_stats_init(&stats, sizeof stats);
        assert_ok(refit_publisher_stats(on->publisher, &stats, NULL));
    } while (on->way <= STORED && stats.workers_gpu == 0);
}

static void close_rig(rig *on)
{
    refit_subscriber_close(on->subscriber);
    refit_publisher_close(on->publisher);
    assert_ok(refit_memory_free(on->theirs, on->memory, NULL));
    assert_ok(refit_memory_free(on->device, on->lent, NULL));
    assert_int_equal(atomic_load(&on->theirs->host_bytes), 0);
    if (on->bound != on->theirs) assert_ok(refit_device_close(on->bound, NULL));
    assert_ok(refit_device_close(on->theirs, NULL));
    assert_ok(refit_device_close(on->device, NULL));
    for (uint32_t i = 0; i < on->count; i++)
        free(on->bytes[i]);
    free(on->saved);
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
}

static void open_usual(rig *on, way how, void (*change)(refit_config *config))
{
    begin_rig(on, how, change);
    add_usual(on);
    open_ends(on);
}

/* ---- Versions */

static void *commit(void *user)
{
    rig *on = user;
    on->status = refit_publisher_commit(on->publisher, NULL);
    return NULL;
}

static uint32_t list_weights(const rig *on, refit_weight *weights)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < on->count; i++) {
        const refit_tensor *tensor = &on->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        bool gpu = on->way <= STORED;
        unsigned char *there = (unsigned char *)on->lent + on->lent_at[i];
        if (gpu && tensor->bytes > 0)
            memcpy(fake_cuda_bytes((rft_cu_ptr)(uintptr_t)there, tensor->bytes), on->bytes[i],
                   tensor->bytes);
        weights[count++] = (refit_weight){i, gpu ? there : on->bytes[i], tensor->bytes};
    }
    return count;
}

/* A version with the bytes as they are now, in the worker's hands. */
static void offer(rig *on)
{
    static refit_weight weights[MOST];
    uint32_t count = list_weights(on, weights);
    refit_device *device = on->way <= STORED ? on->device : NULL;
    assert_ok(refit_publisher_begin(on->publisher, 0, NULL));
    if (on->way == LENT) {
        assert_done(
            refit_publisher_lend(on->publisher, weights, count, device, REFIT_STREAM_NONE, error));
    } else {
        assert_done(refit_publisher_write_all(on->publisher, weights, count, device,
                                              REFIT_STREAM_NONE, error));
    }
    assert_ok(rft_thread_start(&on->thread, "trainer", commit, on, NULL));
    assert_done(refit_subscriber_next(on->subscriber, WAIT_MS, &on->update, error));
    assert_int_equal(refit_update_device(on->update) != NULL, on->way <= STORED);
}

static void end(rig *on)
{
    refit_update_close(on->update);
    rft_thread_join(on->thread);
}

/* One element of `one_in` changes; 0: none. */
static void change(rig *on, uint32_t one_in)
{
    for (uint32_t i = 0; one_in > 0 && i < on->count; i++) {
        uint32_t width = refit_dtype_bits(on->tensors[i].dtype) / 8;
        for (uint64_t at = 0; at < on->tensors[i].bytes; at += width) {
            if (seeded_below(&on->seed, one_in) != 0) continue;
            on->bytes[i][at + seeded_below(&on->seed, width)] ^=
                (unsigned char)(1 + seeded_below(&on->seed, 255));
        }
    }
}

static void save(rig *on)
{
    memcpy(on->saved, engine_bytes(on), on->memory_bytes);
}

static bool is_saved(const rig *on)
{
    return memcmp(on->saved, engine_bytes(on), on->memory_bytes) == 0;
}

/* The destinations have the version, and what lies between them is as it was. */
static bool is_new(const rig *on)
{
    unsigned char *whole = malloc(on->memory_bytes);
    assert_non_null(whole);
    memcpy(whole, on->saved, on->memory_bytes);
    for (uint32_t i = 0; i < on->count; i++) {
        uint32_t alias = on->tensors[i].alias_of;
        uint64_t at = (uint64_t)((unsigned char *)on->list[i].memory - (unsigned char *)on->memory);
        memcpy(whole + at, on->bytes[alias == REFIT_NO_ALIAS ? i : alias], on->tensors[i].bytes);
    }
    bool same = memcmp(whole, engine_bytes(on), on->memory_bytes) == 0;
    free(whole);
    return same;
}

static void apply(rig *on)
{
    assert_done(refit_update_apply(on->update, NULL, error));
    assert_true(is_new(on));
}

static void run_first(rig *on)
{
    save(on);
    offer(on);
    apply(on);
    assert_ok(refit_update_accept(on->update, NULL));
    end(on);
    assert_ok(on->status);
    save(on);
}

static refit_stats figures(rig *on)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_subscriber_stats(on->subscriber, &stats, NULL));
    return stats;
}

/* ---- Bits */

static void with_verify(refit_config *config)
{
    config->broadcast_verify = REFIT_VERIFY_ALWAYS;
}

/* Refused, it is as it was before; so it is after a second apply; then accepted. */
TEST(bits_are_those_of_the_version_and_of_the_one_before)
{
    static const uint32_t densities[] = {0, 100, 3, 1};
    for (way how = LENT; how < WAYS; how++) {
        rig on;
        open_usual(&on, how, how % 2 == 0 ? NULL : with_verify);
        run_first(&on);
        for (uint32_t i = 0; i < COUNT_OF(densities); i++) {
            change(&on, densities[i]);
            offer(&on);
            uint64_t kernels = fake_cuda_calls("cuLaunchKernel");
            apply(&on);
            assert_true(fake_cuda_calls("cuLaunchKernel") > kernels);
            if (i % 2 == 0) apply(&on);
            assert_ok(refit_update_refuse(on.update, NULL, 1, NULL));
            assert_true(is_saved(&on));
            end(&on);
            assert_int_equal(on.status, REFIT_ERR_PEER);
            offer(&on);
            apply(&on);
            assert_ok(refit_update_accept(on.update, NULL));
            end(&on);
            assert_ok(on.status);
            save(&on);
        }
        close_rig(&on);
    }
}

TEST(an_engine_that_was_changed_between_two_applies_is_as_before_the_first)
{
    rig on;
    open_usual(&on, LENT, NULL);
    run_first(&on);
    change(&on, 1);
    offer(&on);
    apply(&on);
    memset(fake_cuda_bytes((rft_cu_ptr)(uintptr_t)on.list[1].memory, 70000), 9, 70000);
    apply(&on);
    refit_update_close(on.update);
    assert_true(is_saved(&on));
    rft_thread_join(on.thread);
    close_rig(&on);
}

static uint64_t changed_bytes(const rig *on)
{
    uint64_t changed = 0;
    const unsigned char *now = engine_bytes(on);
    for (uint32_t i = 0; i < on->count; i++) {
        if (i % 2 == 0 && on->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        uint64_t at = (uint64_t)((unsigned char *)on->list[i].memory - (unsigned char *)on->memory);
        uint32_t width = refit_dtype_bits(on->tensors[i].dtype) / 8;
        for (uint64_t k = at; k < at + on->tensors[i].bytes; k += width)
            changed += memcmp(now + k, on->saved + k, width) == 0 ? 0 : width;
    }
    return changed;
}

TEST(figures_say_what_was_written_and_what_was_taken_back)
{
    rig on;
    open_usual(&on, LENT, NULL);
    run_first(&on);
    uint64_t before = figures(&on).receive_applied_bytes_total;
    change(&on, 30);
    offer(&on);
    apply(&on);
    uint64_t changed = changed_bytes(&on);
    apply(&on); /* finds nothing to do */
    assert_int_equal(figures(&on).receive_applied_bytes_total, before + changed);
    assert_int_equal(figures(&on).receive_rollbacks, 0);
    end(&on);
    assert_int_equal(figures(&on).receive_rollbacks, 1);
    assert_true(is_saved(&on));
    close_rig(&on);
}

/* ---- What it costs */

typedef struct costs {
    uint64_t waits, launches, allocations, pageable, link;
} costs;

static costs costs_now(void)
{
    return (costs){fake_cuda_calls("cuEventRecord"), fake_cuda_calls("cuLaunchKernel"),
                   fake_cuda_calls("cuMemAlloc"), fake_cuda_pageable_copies(),
                   fake_cuda_link_bytes()};
}

static costs costs_between(const costs *from, const costs *to)
{
    return (costs){to->waits - from->waits, to->launches - from->launches,
                   to->allocations - from->allocations, to->pageable - from->pageable,
                   to->link - from->link};
}

/* Of an apply, and of the refusal after it. */
static void measure(way how, uint32_t tensors, costs *applied, costs *refused)
{
    rig on;
    begin_rig(&on, how, NULL);
    for (uint32_t i = 0; i < tensors; i++)
        add(&on, REFIT_BF16, 3001, REFIT_NO_ALIAS);
    open_ends(&on);
    run_first(&on);
    for (uint32_t round = 0; round < 2; round++) { /* what is taken once is taken by the first */
        change(&on, 20);
        offer(&on);
        costs before = costs_now();
        apply(&on);
        costs after = costs_now();
        assert_ok(refit_update_refuse(on.update, NULL, 1, NULL));
        costs last = costs_now();
        assert_true(is_saved(&on));
        end(&on);
        *applied = costs_between(&before, &after);
        *refused = costs_between(&after, &last);
    }
    close_rig(&on);
}

TEST(waits_and_allocations_do_not_grow_with_the_tensors)
{
    for (way how = LENT; how < WAYS; how++) {
        costs few[2], many[2];
        measure(how, 40, &few[0], &few[1]);
        measure(how, 400, &many[0], &many[1]);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(many[i].allocations, few[i].allocations);
            assert_int_equal(many[i].pageable, 0);
        }
        assert_true(many[0].waits <= few[0].waits + 2); /* one more window */
        assert_true(few[0].waits <= 7 && many[0].allocations <= 2);
        assert_int_equal(many[1].waits, 1);
        assert_int_equal(many[1].launches, 1);
        assert_int_equal(many[1].link, 0);
    }
}

/* The second version lies in another slot. */
TEST(new_bytes_that_cannot_be_page_locked_go_through_memory_that_is)
{
    rig on;
    begin_rig(&on, SHARED, NULL);
    for (uint32_t i = 0; i < 20; i++)
        add(&on, REFIT_BF16, 3001, REFIT_NO_ALIAS);
    open_ends(&on);
    run_first(&on);
    change(&on, 20);
    offer(&on);
    fake_cuda_fail("cuMemHostRegister", 1, 1, RFT_CU_OUT_OF_MEMORY);
    uint64_t locks = fake_cuda_calls("cuMemHostRegister");
    costs before = costs_now();
    apply(&on);
    costs after = costs_now();
    assert_true(fake_cuda_calls("cuMemHostRegister") >= locks + 2);
    assert_int_equal(costs_between(&before, &after).pageable, 0);
    assert_ok(refit_update_accept(on.update, NULL));
    assert_true(is_new(&on));
    end(&on);
    close_rig(&on);
}

/* The tables of blocks and of digests go and come. */
TEST(no_byte_of_the_destinations_crosses_the_link)
{
    costs applied, refused;
    measure(LENT, 400, &applied, &refused);
    assert_int_equal(applied.waits, 2);
    assert_int_equal(applied.launches, 2);
    assert_int_equal(applied.link,
                     2 * (16 + 400 * (sizeof(rft_delta_job) + sizeof(rft_digest_job))));
    assert_int_equal(refused.link, 0);
}

/* ---- Notes beyond their memory on the GPU */

static void with_small_memory(refit_config *config)
{
    config->broadcast_gpu_bucket_bytes = UINT64_C(4) << 20;
    config->offload_staging_bytes = UINT64_C(1) << 20;
}

static void with_small_memory_and_budget(refit_config *config)
{
    with_small_memory(config);
    if (config->broadcast_gpu == REFIT_GPU_STORE) return;
    config->offload_budget_bytes = UINT64_C(6) << 20;
}

static void open_large(rig *on, way how, void (*changes)(refit_config *config))
{
    begin_rig(on, how, changes);
    add(on, REFIT_BF16, UINT64_C(3) << 20, REFIT_NO_ALIAS);
    add(on, REFIT_F32, 1234567, REFIT_NO_ALIAS);
    add(on, REFIT_BF16, 99, REFIT_NO_ALIAS);
    open_ends(on);
    run_first(on);
    change(on, 1);
}

TEST(notes_that_find_no_room_on_the_gpu_move_to_the_host)
{
    for (way how = LENT; how < WAYS; how++) {
        rig on;
        open_large(&on, how, with_small_memory);
        offer(&on);
        apply(&on);
        assert_in_range(atomic_load(&on.theirs->host_bytes), 1, 12 << 20);
        if (how % 2 == 0) apply(&on);
        assert_ok(refit_update_refuse(on.update, NULL, 1, NULL));
        assert_true(is_saved(&on));
        assert_int_equal(atomic_load(&on.theirs->host_bytes), 0);
        end(&on);
        offer(&on);
        apply(&on);
        assert_ok(refit_update_accept(on.update, NULL));
        assert_int_equal(atomic_load(&on.theirs->host_bytes), 0);
        end(&on);
        close_rig(&on);
    }
}

TEST(notes_beyond_the_budget_are_refused_and_nothing_written)
{
    for (way how = LENT; how < WAYS; how += SHARED) {
        rig on;
        open_large(&on, how, with_small_memory_and_budget);
        offer(&on);
        assert_refused(refit_update_apply(on.update, NULL, error), REFIT_ERR_BUDGET,
                       "offload.budget_bytes is 6291456");
        assert_true(is_saved(&on));
        assert_ok(refit_update_refuse(on.update, NULL, 1, NULL));
        end(&on);
        close_rig(&on);
    }
}

/* What the GPU has left bounds the notes there; none at all is refused. */
TEST(notes_take_what_the_gpu_has)
{
    for (int none = 0; none <= 1; none++) {
        rig on;
        open_large(&on, LENT, NULL);
        offer(&on);
        uint64_t left = none ? UINT64_C(1) << 20 : UINT64_C(7) << 20;
        fake_cuda_set_taken(0, (UINT64_C(512) << 20) - fake_cuda_used(0) - left);
        if (none == 0) {
            apply(&on);
            assert_true(atomic_load(&on.theirs->host_bytes) > 0);
        } else {
            assert_int_equal(refit_update_apply(on.update, NULL, NULL), REFIT_ERR_DEVICE_MEMORY);
        }
        assert_ok(refit_update_refuse(on.update, NULL, 1, NULL));
        assert_true(is_saved(&on));
        end(&on);
        close_rig(&on);
    }
}

/* ---- The first version */

TEST(the_first_version_notes_nothing)
{
    for (way how = LENT; how < WAYS; how++) {
        rig on;
        open_large(&on, how, with_small_memory);
        assert_ok(refit_subscriber_unbind(on.subscriber, NULL));
        bind_all(&on);
        offer(&on);
        uint64_t used = fake_cuda_used(0), windows = how >= SHARED ? UINT64_C(2) << 20 : 0;
        apply(&on);
        assert_int_equal(atomic_load(&on.theirs->host_bytes), 0);
        assert_in_range(fake_cuda_used(0) - used, 0, windows + (1 << 20));
        assert_ok(refit_update_refuse(on.update, NULL, 1, NULL));
        assert_true(is_new(&on));
        assert_int_equal(figures(&on).receive_rollbacks, 0);
        end(&on);
        assert_int_equal(on.status, REFIT_ERR_PEER);
        while (refit_publisher_wait_workers(on.publisher, 1, WAIT_MS, NULL) != REFIT_OK) {
        }
        close_rig(&on);
    }
}

/* ---- Failures */

/* Its notes do not fit into their memory on the GPU. */
static void open_full(rig *on, way how)
{
    begin_rig(on, how, with_small_memory);
    add(on, REFIT_BF16, UINT64_C(3) << 20, REFIT_NO_ALIAS);
    open_ends(on);
    run_first(on);
    change(on, 1);
    offer(on);
}

static void open_sparse(rig *on, way how)
{
    open_usual(on, how, NULL);
    run_first(on);
    change(on, 20);
    offer(on);
}

/* As far as the driver goes, all stays or comes back. */
static bool fail_call(way how, unsigned nth, void (*open)(rig *on, way how))
{
    rig on;
    refit_error error;
    open(&on, how);
    uint64_t calls = fake_cuda_calls(NULL);
    fake_cuda_fail("*", nth, 1, RFT_CU_UNKNOWN);
    refit_status status = refit_update_apply(on.update, NULL, &error);
    bool made = fake_cuda_calls(NULL) - calls >= nth;
    fake_cuda_forget_faults();
    if (status == REFIT_OK) {
        assert_true(is_new(&on));
    } else if (strstr(error.text, "could not be taken back") == NULL) {
        assert_true(is_saved(&on));
    } else {
        assert_int_equal(refit_update_accept(on.update, NULL), REFIT_ERR_STATE);
    }
    if (nth % 2 == 0) apply(&on);
    assert_ok(refit_update_refuse(on.update, NULL, 1, NULL));
    assert_true(is_saved(&on));
    end(&on);
    close_rig(&on);
    return made;
}

TEST(whichever_call_fails_the_old_bytes_are_there)
{
    for (way how = LENT; how < WAYS; how += SHARED) {
        unsigned nth = 1;
        while (fail_call(how, nth, open_sparse))
            nth += STRIDE;
        assert_true(nth > 10);
    }
}

TEST(so_they_are_where_notes_move_to_the_host)
{
    for (way how = LENT; how < WAYS; how += SHARED) {
        unsigned nth = 1 + how;
        while (fail_call(how, nth, open_full))
            nth += 7 * STRIDE;
        assert_true(nth > 10);
    }
}

/* One allocation of ours fails; page-locks that miss one are done without. */
TEST(without_memory_nothing_is_changed)
{
    uint64_t nth = 1;
    failing_alloc_begin(0);
    rig on;
    open_full(&on, LENT);
    for (bool came = true; came; nth++) {
        refit_error error;
        failing_alloc_here(nth);
        refit_status status = refit_update_apply(on.update, NULL, &error);
        came = failing_alloc_stop_here();
        if (status != REFIT_OK) assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
        assert_true(status == REFIT_OK ? is_new(&on) : is_saved(&on));
        if (status != REFIT_OK) assert_true(came);
    }
    assert_true(nth > 5);
    assert_ok(refit_update_refuse(on.update, NULL, 1, NULL));
    assert_true(is_saved(&on));
    end(&on);
    close_rig(&on);
    (void)failing_alloc_end();
}

/* A refusal that fails half-way is carried on with by the unbind. Other threads call the driver
 * after it, so that not every call is a candidate. */
static bool fail_refusal(bool full, const char *symbol, unsigned nth)
{
    rig on;
    if (full) open_full(&on, LENT);
    if (!full) open_sparse(&on, LENT);
    apply(&on);
    fake_cuda_fail(symbol, nth, 1, RFT_CU_UNKNOWN);
    bool failed = refit_update_refuse(on.update, NULL, 1, NULL) != REFIT_OK;
    fake_cuda_forget_faults();
    if (!failed) assert_true(is_saved(&on));
    end(&on);
    assert_ok(refit_subscriber_unbind(on.subscriber, NULL));
    assert_true(is_saved(&on));
    close_rig(&on);
    return failed;
}

TEST(a_refusal_that_fails_is_made_up_for_by_the_unbind)
{
    static const char *const symbols[] = {"cuMemcpyBatchAsync", "cuMemcpyAsync",
                                          "cuLaunchKernel",     "cuEventRecord",
                                          "cuEventSynchronize", "cuEventQuery"};
    unsigned failures = 0;
    for (int full = 0; full <= 1; full++) {
        for (size_t i = 0; i < COUNT_OF(symbols); i++) {
            unsigned nth = 1;
            while (fail_refusal(full == 1, symbols[i], nth))
                nth++;
            failures += nth - 1;
        }
    }
    assert_true(failures >= 4);
}

/* Calls fail until they are told not to, from that of the blocks or of the digests on: the bytes
 * come back later. */
TEST(what_cannot_be_taken_back_at_once_is_later)
{
    for (unsigned round = 0; round < 4; round++) {
        rig on;
        refit_error error;
        open_usual(&on, LENT, NULL);
        run_first(&on);
        change(&on, 20);
        offer(&on);
        fake_cuda_fail("cuLaunchKernel", 1 + round / 2, 1000, RFT_CU_UNKNOWN);
        refit_status status = refit_update_apply(on.update, NULL, &error);
        assert_int_not_equal(status, REFIT_OK);
        bool torn = strstr(error.text, "could not be taken back") != NULL;
        if (torn) assert_int_equal(refit_update_accept(on.update, NULL), REFIT_ERR_STATE);
        if (!torn) assert_true(is_saved(&on));
        fake_cuda_forget_faults();
        if (round % 2 == 0) apply(&on);
        assert_ok(refit_update_refuse(on.update, NULL, 1, NULL));
        assert_true(is_saved(&on));
        end(&on);
        close_rig(&on);
    }
}

/* Work fails on its stream: nothing is brought back, and the worker says so. */
TEST(a_lost_gpu_leaves_no_version)
{
    for (way how = LENT; how < WAYS; how += SHARED) {
        rig on;
        refit_error error;
        open_usual(&on, how, NULL);
        run_first(&on);
        change(&on, 20);
        offer(&on);
        fake_cuda_fail_later("cuLaunchKernel", 1, RFT_CU_ILLEGAL_ADDRESS);
        assert_int_equal(refit_update_apply(on.update, NULL, &error), REFIT_ERR_DEVICE);
        assert_int_equal(refit_update_accept(on.update, NULL), REFIT_ERR_STATE);
        assert_int_equal(refit_update_refuse(on.update, NULL, 1, &error), REFIT_ERR_DEVICE);
        assert_says(&error, "could not be taken back");
        end(&on);
        assert_int_equal(on.status, REFIT_ERR_PEER);
        close_rig(&on);
    }
}

/* The trainer changes what it has lent, after it has said what it is. */
TEST(lent_tensors_that_change_are_found_and_taken_back)
{
    for (int verify = 0; verify <= 1; verify++) {
        rig on;
        open_usual(&on, LENT, verify == 1 ? with_verify : NULL);
        run_first(&on);
        change(&on, 20);
        offer(&on);
        unsigned char *there = (unsigned char *)on.lent + on.lent_at[1];
        *(unsigned char *)fake_cuda_bytes((rft_cu_ptr)(uintptr_t)there, 1) ^= 4;
        assert_refused(refit_update_apply(on.update, NULL, error), REFIT_ERR_CORRUPT,
                       "'t1' was changed by the trainer");
        assert_true(is_saved(&on));
        assert_ok(refit_update_refuse(on.update, NULL, 1, NULL));
        end(&on);
        close_rig(&on);
    }
}

TEST(memory_that_the_engine_has_freed_is_refused)
{
    rig on;
    open_usual(&on, LENT, NULL);
    run_first(&on);
    change(&on, 20);
    offer(&on);
    assert_ok(refit_memory_free(on.theirs, on.memory, NULL));
    assert_int_equal(refit_update_apply(on.update, NULL, NULL), REFIT_ERR_INVALID);
    assert_ok(refit_update_refuse(on.update, NULL, 0, NULL));
    end(&on);
    assert_ok(refit_memory_alloc(on.theirs, on.memory_bytes, &on.memory, NULL));
    close_rig(&on);
}

static void with_short_timeout(refit_config *config)
{
    config->broadcast_stage_timeout_ms = 300;
}

/* The GPU stands still: the apply gives up, and what it was to write comes to nothing later. */
TEST(an_apply_that_does_not_end_is_taken_back_once_it_does)
{
    rig on;
    refit_error error;
    begin_rig(&on, LENT, NULL);
    add_usual(&on);
    refit_config patient = on.config;
    open_ends(&on);
    refit_subscriber_close(on.subscriber);
    with_short_timeout(&on.config); /* the worker's alone */
    assert_ok(refit_subscriber_open(refit_publisher_endpoint(on.publisher), &on.config,
                                    &on.subscriber, NULL));
    on.config = patient;
    assert_ok(refit_subscriber_use_device(on.subscriber, on.theirs, NULL));
    bind_all(&on);
    refit_stats stats;
    do {
        assert_ok(refit_publisher_wait_workers(on.publisher, 1, WAIT_MS, NULL));
        refit_stats_init(&stats, sizeof stats);
        assert_ok(refit_publisher_stats(on.publisher, &stats, NULL));
    } while (stats.workers_gpu == 0);
    save(&on);
    offer(&on);
    assert_ok(refit_update_accept(on.update, NULL)); /* loaded in another way */
    end(&on);
    change(&on, 20);
    offer(&on);
    fake_cuda_stop();
    assert_int_equal(refit_update_apply(on.update, NULL, &error), REFIT_ERR_TIMEOUT);
    assert_says(&error, "could not be taken back");
    assert_int_equal(refit_update_accept(on.update, NULL), REFIT_ERR_STATE);
    fake_cuda_go();
    fake_cuda_settle();
    assert_ok(refit_update_refuse(on.update, NULL, 1, NULL));
    assert_true(is_saved(&on));
    end(&on);
    close_rig(&on);
}

int main(void)
{
    return test_run("apply_kernels");
}
