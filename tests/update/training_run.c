#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

#include "training_run.h"

void run_begin(training_run *run, uint32_t slots)
{
    memset(run, 0, sizeof *run);
    run->config = quick_config();
    run->config.broadcast_slots = slots;
}

void run_add_tensor(training_run *run, refit_dtype dtype, uint64_t elements, uint32_t alias_of)
{
    uint32_t index = run->count++;
    refit_tensor *tensor = &run->tensors[index];
    snprintf(run->names[index], sizeof run->names[index], "tensor.%u", index);
    *tensor = (refit_tensor){
        .size = sizeof *tensor,
        .name = run->names[index],
        .dtype = dtype,
        .rank = 1,
        .shape = {elements},
        .bytes = (elements * refit_dtype_bits(dtype) + 7) / 8,
        .alias_of = alias_of,
    };
    bool tied = alias_of != REFIT_NO_ALIAS;
    run->bytes[index] = tied ? run->bytes[alias_of] : calloc(tensor->bytes + 1, 1);
    assert_non_null(run->bytes[index]);
}

void run_open(training_run *run, const char *endpoint)
{
    refit_error error;
    refit_status status;
    /* Within one process ZeroMQ closes only after it. */
    if (strncmp(endpoint, "inproc:", 7) == 0) run->config.broadcast_linger_ms = 500;
    while ((status = refit_publisher_open(endpoint, &run->config, &run->publisher, &error)) ==
           REFIT_ERR_BUSY)
        (void)poll(NULL, 0, 5); /* ZeroMQ gives an endpoint up in the background */
    if (status != REFIT_OK) fail_msg("%s", error.text);
    snprintf(run->endpoint, sizeof run->endpoint, "%s", refit_publisher_endpoint(run->publisher));
    assert_ok(refit_publisher_declare(run->publisher, run->tensors, run->count, &error));
}

void run_end(training_run *run)
{
    for (uint32_t i = 0; i < run->rollouts_count; i++)
        rollouts_stop(&run->rollouts[i]);
    refit_publisher_close(run->publisher);
    for (uint32_t i = 0; i < run->count; i++)
        if (run->tensors[i].alias_of == REFIT_NO_ALIAS) free(run->bytes[i]);
}

void run_wait_workers(training_run *run, uint32_t count)
{
    assert_done(refit_publisher_wait_workers(run->publisher, count, RUN_WAIT_MS, error));
}

rollout_thread *run_add_worker(training_run *run, rollout_action action)
{
    rollout_thread *member = &run->rollouts[run->rollouts_count++];
    rollouts_start(member, run->endpoint, &run->config, action);
    run_wait_workers(run, run->rollouts_count);
    return member;
}

void run_change_tensor(training_run *run, uint32_t index, uint64_t every)
{
    const refit_tensor *tensor = &run->tensors[index];
    uint32_t bits = refit_dtype_bits(tensor->dtype), width = bits % 8 == 0 ? bits / 8 : 1;
    for (uint64_t at = 0; every != 0 && at + width <= tensor->bytes; at += width) {
        if (seeded_below(&run->seed, every) != 0) continue;
        unsigned char *element = run->bytes[index] + at;
        if (seeded_below(&run->seed, 10) == 0)
            element[width - 1] ^= (unsigned char)(1 + seeded_below(&run->seed, 255));
        else
            element[0] = (unsigned char)(element[0] + 1);
        run->changed++;
    }
}

void run_change(training_run *run)
{
    static const uint64_t densities[] = {0, 1, 3, 20, 100, 1000, 20000};
    for (uint32_t i = 0; i < run->count; i++)
        if (run->tensors[i].alias_of == REFIT_NO_ALIAS)
            run_change_tensor(run, i, densities[seeded_below(&run->seed, 7)]);
}

uint64_t run_digest(const training_run *run)
{
    return rollouts_digest(run->tensors, run->count, (const void *const *)run->bytes);
}

void run_write(training_run *run, uint64_t version)
{
    assert_done(refit_publisher_begin(run->publisher, version, error));
    for (uint32_t n = 0, at = (uint32_t)seeded_below(&run->seed, run->count); n < run->count; n++) {
        uint32_t i = (at + n) % run->count;
        if (run->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        assert_ok(refit_publisher_write(run->publisher, i, run->bytes[i], run->tensors[i].bytes,
                                        NULL, REFIT_STREAM_NONE, NULL));
    }
}

void run_commit(training_run *run)
{
    assert_done(refit_publisher_commit(run->publisher, error));
}

void *run_commit_on_thread(void *user)
{
    training_run *run = user;
    run->status = refit_publisher_commit(run->publisher, NULL);
    return NULL;
}

void run_expect(training_run *run, uint64_t version, uint64_t digest)
{
    for (uint32_t i = 0; i < run->rollouts_count; i++)
        assert_int_equal(rollouts_wait(&run->rollouts[i], version, 1), digest);
}

refit_stats run_stats(training_run *run)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_publisher_stats(run->publisher, &stats, NULL));
    return stats;
}
