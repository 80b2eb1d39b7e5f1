/*
 * training: GRPO with refit in the loop. This is the file to copy from.
 *
 *     clear      states off the device            refit_controller_clear
 *     wake       the engine takes its cache: only now is there room for it
 *     publish    all workers switch to the new weights, or none does
 *     roll out   workers sample; meanwhile the engine evaluates
 *     sleep      the engine gives its cache back
 *     return     states start to come back        refit_controller_return
 *     backward   gradients, while the states are still on their way
 *     join       before the optimizer touches the states
 *     step
 */
#include "training.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "adamw.h"
#include "engine.h"
#include "fleet.h"
#include "learner.h"
#include "or_die.h"
#include "policy.h"
#include "show.h"
#include "states.h"

enum { EPOCHS = 2, PUBLISH_TRIES = 4, WORKERS_TIMEOUT_MS = 30000 };

static const adamw_options adamw = {
    .rate = 1e-3f, .beta1 = 0.9f, .beta2 = 0.99f, .epsilon = 1e-8f, .decay = 0.0f};
static const learner_options objective = {.clip = 0.2f, .entropy = 0.1f};

typedef struct trainer {
    const run_options *options;
    train_states states;
    engine engine;
    fleet fleet;
    refit_publisher *publisher;
    refit_controller *controller;
    float *compute; /* the bf16 weights, widened, as the arithmetic wants them */
    batch *batches; /* one per worker */
    uint64_t steps;
} trainer;

static void cast_weights(trainer *it)
{
    policy_to_bf16(it->states.master, it->states.weights, policy_parameters);
    policy_from_bf16(it->states.weights, it->compute, policy_parameters);
}

static void declare_weights(refit_publisher *publisher)
{
    refit_error error;
    refit_tensor tensors[POLICY_TENSORS];
    for (uint32_t i = 0; i < POLICY_TENSORS; i++) {
        const policy_tensor *tensor = &policy_tensors[i];
        tensors[i] = (refit_tensor){.size = sizeof tensors[i],
                                    .name = tensor->name,
                                    .dtype = REFIT_BF16,
                                    .rank = tensor->rank,
                                    .bytes = tensor->count * sizeof(uint16_t),
                                    .alias_of = REFIT_NO_ALIAS};
        memcpy(tensors[i].shape, tensor->shape, sizeof tensor->shape);
    }
    or_die(refit_publisher_declare(publisher, tensors, POLICY_TENSORS, &error), &error);
}

static void trainer_open(trainer *it, const run_options *options)
{
    refit_error error;
    const refit_config *config = &options->config;
    *it = (trainer){.options = options};
    it->compute = calloc_or_die(policy_parameters, sizeof *it->compute);
    it->batches = calloc_or_die(options->workers, sizeof *it->batches);
    states_open(&it->states, options->device, config);
    it->engine.device = it->states.device;
    policy_init(it->states.master, options->seed);
    cast_weights(it);

    or_die(refit_publisher_open("user://*", config, &it->publisher, &error), &error);
    declare_weights(it->publisher);
    or_die(
        refit_controller_open(it->states.offloader, it->publisher, config, &it->controller, &error),
        &error);
    fleet_start(&it->fleet, options, refit_publisher_endpoint(it->publisher));
    or_die(
        refit_publisher_wait_workers(it->publisher, options->workers, WORKERS_TIMEOUT_MS, &error),
        &error);
}

static void trainer_close(trainer *it)
{
    fleet_stop(&it->fleet);
    refit_controller_close(it->controller);
    refit_publisher_close(it->publisher);
    states_close(&it->states);
    free(it->batches);
    free(it->compute);
}

/* A worker was lost or failed: nobody switched. Say who, and see that all are there again. */
static void mend_workers(trainer *it, const refit_error *why)
{
    refit_error error;
    fprintf(stderr, "grpo: %s\n", why->text);
    fleet_repair(&it->fleet);
    or_die(refit_publisher_wait_workers(it->publisher, it->fleet.count, WORKERS_TIMEOUT_MS, &error),
           &error);
}

/* Version 0 asks for the next number; the bytes are read where they lie, in device memory. */
static void publish_weights(trainer *it)
{
    refit_error error;
    refit_weight weights[POLICY_TENSORS];
    for (uint32_t i = 0; i < POLICY_TENSORS; i++) {
        weights[i] = (refit_weight){.tensor = i,
                                    .memory = it->states.weights + policy_tensors[i].first,
                                    .bytes = policy_tensors[i].count * sizeof(uint16_t)};
    }
    for (int tries = 1;; tries++) {
        refit_status status =
            refit_controller_publish(it->controller, 0, weights, POLICY_TENSORS, it->states.device,
                                     REFIT_STREAM_NONE, &error);
        if (status == REFIT_OK) return;
        if (status != REFIT_ERR_PEER && status != REFIT_ERR_TIMEOUT) or_die(status, &error);
        if (tries == PUBLISH_TRIES) die("the workers do not hold: %s", error.text);
        mend_workers(it, &error);
    }
}

static void make_room(trainer *it)
{
    refit_error error;
    if (it->options->offload)
        or_die(refit_controller_clear(it->controller, REFIT_STREAM_NONE, &error), &error);
    if (engine_wake(&it->engine, &error) == REFIT_OK) return;
    if (it->options->offload) die("the engine's cache does not fit: %s", error.text);
    die("the engine's cache does not fit beside the optimizer's states, which refit would clear "
        "away "
        "without --no-offload: %s",
        error.text);
}

/* Gradients need the weights only, so they are computed while the states are still on their way. */
static float train_epoch(trainer *it)
{
    refit_error error;
    train_states *states = &it->states;
    memset(states->grads, 0, policy_parameters * sizeof *states->grads);
    float loss =
        learner_accumulate(&objective, it->compute, it->batches, it->fleet.count, states->grads);
    or_die(refit_controller_join(it->controller, REFIT_STREAM_NONE, &error), &error);
    adamw_step(&adamw, &(adamw_states){.master = states->master,
                                       .exp_avg = states->exp_avg,
                                       .exp_avg_sq = states->exp_avg_sq,
                                       .grads = states->grads,
                                       .count = policy_parameters,
                                       .step = ++it->steps});
    cast_weights(it);
    return loss;
}

static void run_cycle(trainer *it, cycle_report *report)
{
    refit_error error;
    make_room(it);
    publish_weights(it);
    report->version = refit_publisher_version(it->publisher);
    report->evaluation =
        engine_evaluate(&it->engine, it->compute, it->options->seed, report->version);
    fleet_gather(&it->fleet, report->version, it->batches);
    report->reward = learner_mean_reward(it->batches, it->fleet.count);
    engine_sleep(&it->engine);
    or_die(refit_controller_return(it->controller, REFIT_STREAM_NONE, &error), &error);
    for (int epoch = 0; epoch < EPOCHS; epoch++)
        report->loss = train_epoch(it);
    refit_stats_init(&report->stats, sizeof report->stats);
    or_die(refit_controller_stats(it->controller, &report->stats, &error), &error);
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static void keep_result(const trainer *it, run_result *out)
{
    size_t count = policy_parameters;
    memcpy(out->states, it->states.master, count * sizeof(float));
    memcpy(out->states + count, it->states.exp_avg, count * sizeof(float));
    memcpy(out->states + 2 * count, it->states.exp_avg_sq, count * sizeof(float));
    memcpy(out->weights, it->states.weights, count * sizeof(uint16_t));
}

void training_run(const run_options *options, run_result *out)
{
    trainer it;
    show lines;
    double start = now();
    *out = (run_result){.cycles = options->cycles};
    out->rewards = calloc_or_die(options->cycles, sizeof(float));
    out->losses = calloc_or_die(options->cycles, sizeof(float));
    out->states = calloc_or_die(3 * policy_parameters, sizeof(float));
    out->weights = calloc_or_die(policy_parameters, sizeof(uint16_t));
    trainer_open(&it, options);
    show_open(&lines, options);
    for (uint32_t cycle = 0; cycle < options->cycles; cycle++) {
        cycle_report report = {.cycle = cycle + 1};
        run_cycle(&it, &report);
        out->rewards[cycle] = report.reward;
        out->losses[cycle] = report.loss;
        show_cycle(&lines, &report);
    }
    show_close(&lines);
    keep_result(&it, out);
    trainer_close(&it);
    out->seconds = now() - start;
}

void run_result_free(run_result *it)
{
    free(it->rewards);
    free(it->losses);
    free(it->states);
    free(it->weights);
}
