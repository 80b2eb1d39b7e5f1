/*
 * grpo: a small but whole GRPO loop on refit, to copy from. It uses the public headers only.
 *
 * One trainer process and several rollout workers learn to add two digits. The device is too small
 * for the trainer's states and the inference engine's cache at once, so every cycle offloads
 * the states, publishes the weights, rolls out, and brings the states back during the next
 * backward pass:
 *
 *     offload    states off the device            refit_controller_offload
 *     wake       the engine takes its cache: only now is there room for it
 *     publish    all workers switch to the new weights, or none does
 *     roll out   workers sample; meanwhile the engine evaluates
 *     sleep      the engine frees its cache
 *     restore    states start to come back        refit_controller_restore
 *     backward   gradients, while the states are still on their way
 *     wait       before the optimizer reads the states
 *     step
 *
 * With --window the optimizer's states live on the host instead, and visit the device during the
 * step alone, a few KiB at a time (refit/advanced/window.h); the first of them come in during the
 * backward pass.
 *
 * The first half is what to copy: the states, the loop (run_cycle) and the worker (worker_run). The
 * second half is this program's own: processes, printing, runs, the command line. grpo_model.h has
 * the network and its training; README.md explains what is printed.
 */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <refit.h>
#include <refit/advanced/window.h>

#include "grpo_model.h"

extern char **environ;

/* The choices of the command line. */
typedef struct run_options {
    uint32_t workers;
    uint32_t cycles;
    uint64_t seed;
    float target;       /* mean reward of the last cycles to be reached; 0: none */
    const char *device; /* as refit_device_open reads it */
    const char *json;   /* file for one object a line, or NULL */
    bool offload;       /* false: --no-offload */
    bool window;        /* --window: states live on the host */
    bool check;
    bool quiet;          /* no line per cycle: for --check */
    refit_config config; /* defaults, then --config, then the environment */
    /* A worker process, started by the trainer. */
    bool is_worker;
    uint32_t worker_index;
    const char *worker_endpoint;
} run_options;

/* ---- Errors ---- */

/* Ends the program with status 1 and a sentence, which `format` makes. */
__attribute__((format(printf, 1, 2))) static _Noreturn void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fflush(stdout);
    fputs("grpo: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

/* Ends the program with status 1 and refit's sentence unless `status` is REFIT_OK. A real training
 * loop would decide by status instead, as publish_weights does. */
static void or_die(refit_status status, const refit_error *error)
{
    if (status != REFIT_OK) die("%s (%s)", error->text, refit_status_name(status));
}

/* `count` zeroed elements, or the end. */
static void *calloc_or_die(size_t count, size_t bytes)
{
    void *block = calloc(count, bytes);
    if (block == NULL) die("no memory for %zu elements of %zu bytes", count, bytes);
    return block;
}

/* ---- The trainer's states, and which of them leave during the refit ---- */

/*
 *     master, exp_avg, exp_avg_sq   float, one per parameter; KEEP: they return bit for bit
 *     grads                         float; DISCARD: not copied, as each backward pass zeroes them
 *     weights                       bf16; stay: they are published, and the engine runs on them
 *
 * All but the weights are in a refit arena, so their addresses never change although their memory
 * comes and goes. With --window the first three are regions of a second offloader, which live in
 * its host image.
 */
enum { KEPT_STATES = 3, STEP_TIMEOUT_MS = 30000 };

typedef struct train_states {
    refit_device *device;
    refit_arena *arena;
    refit_offloader *offloader;
    float *master; /* with --window on the host, and to be read between steps only */
    float *exp_avg;
    float *exp_avg_sq;
    float *grads;
    uint16_t *weights;
    /* With --window, else NULL. */
    refit_offloader *host;
    refit_window *window;
    refit_window_part *parts; /* of a step: slices of the three states, the same of each together */
    uint32_t part_count;
} train_states;

/* States: 4 x 1.15 MB. Weights: 0.6 MB. Cache of the engine: 4.1 MB. The small device holds all
 * states, or the cache and what does not leave, but not both; the large one holds everything. */
static const char states_small_device[] = "host:capacity=6MiB";
static const char states_large_device[] = "host:capacity=64MiB";

static float *add_region(train_states *it, const char *name, refit_policy policy)
{
    refit_error error;
    refit_region_id id;
    refit_region_desc region = {.size = sizeof region, .name = name, .policy = policy};
    region.bytes = policy_parameters * sizeof(float);
    or_die(refit_arena_alloc(it->arena, region.bytes, &region.memory, &error), &error);
    or_die(refit_offloader_add(it->offloader, &region, &id, &error), &error);
    return region.memory;
}

/* ---- With --window: states that live on the host ---- */

/* As many elements as three states of them fill a window with, in whole units of 512 bytes. */
static uint64_t slice_elements(const refit_config *config)
{
    return config->offload_window_bytes / KEPT_STATES / 512 * 512 / sizeof(float);
}

/* The arithmetic is element by element, so a step takes the states slice by slice. */
static void list_parts(train_states *it, const refit_config *config)
{
    const uint64_t most = slice_elements(config);
    const uint64_t slices = (policy_parameters + most - 1) / most;
    it->parts = calloc_or_die(slices * KEPT_STATES, sizeof *it->parts);
    for (uint64_t first = 0; first < policy_parameters; first += most) {
        uint64_t left = policy_parameters - first;
        for (uint32_t region = 0; region < KEPT_STATES; region++)
            it->parts[it->part_count++] =
                (refit_window_part){.size = sizeof *it->parts,
                                    .region = region,
                                    .flags = region > 0 ? REFIT_PART_SAME_WINDOW : 0,
                                    .offset = first * sizeof(float),
                                    .bytes = (left < most ? left : most) * sizeof(float)};
    }
}

/* The state in the host image, zeros at first. */
static float *host_state(train_states *it, refit_region_id region)
{
    refit_error error;
    void *bytes;
    uint64_t count;
    or_die(refit_window_host(it->window, region, &bytes, &count, &error), &error);
    return bytes;
}

static void host_states_open(train_states *it, const refit_config *config)
{
    static const char *const names[KEPT_STATES] = {"master", "exp_avg", "exp_avg_sq"};
    refit_error error;
    or_die(refit_offloader_open(it->device, config, &it->host, &error), &error);
    for (uint32_t i = 0; i < KEPT_STATES; i++) {
        refit_region_id id;
        refit_region_desc region = {.size = sizeof region,
                                    .name = names[i],
                                    .bytes = policy_parameters * sizeof(float),
                                    .policy = REFIT_KEEP,
                                    .placement = REFIT_PLACEMENT_HOST};
        or_die(refit_offloader_add(it->host, &region, &id, &error), &error);
    }
    or_die(refit_offloader_seal(it->host, &error), &error);
    or_die(refit_window_open(it->host, &it->window, &error), &error);
    it->master = host_state(it, 0);
    it->exp_avg = host_state(it, 1);
    it->exp_avg_sq = host_state(it, 2);
    list_parts(it, config);
}

/* Waits until the image has every byte, so that it can be read. */
static void host_states_wait(train_states *it)
{
    refit_error error;
    if (it->window != NULL) or_die(refit_window_wait(it->window, STEP_TIMEOUT_MS, &error), &error);
}

static void host_states_close(train_states *it)
{
    refit_error error;
    or_die(refit_window_close(it->window, &error), &error);
    or_die(refit_offloader_close(it->host, &error), &error);
    free(it->parts);
}

/* ---- All states of the trainer ---- */

/* The CPU computes here, on the device's own memory: a GPU's cannot be used so. */
static void refuse_gpu(refit_device *device)
{
    refit_error error;
    refit_device_info info = {.size = sizeof info};
    or_die(refit_device_describe(device, &info, &error), &error);
    if (!info.host_addressable) die("this example computes on the CPU: give a host device");
}

static void states_open(train_states *out, const run_options *options)
{
    refit_error error;
    const refit_config *config = &options->config;
    uint64_t reservation = 8 * policy_parameters * sizeof(float);
    or_die(refit_device_open(options->device, config, &out->device, &error), &error);
    refuse_gpu(out->device);
    or_die(refit_arena_open(out->device, reservation, &out->arena, &error), &error);
    or_die(refit_offloader_open(out->device, config, &out->offloader, &error), &error);
    if (options->window) {
        host_states_open(out, config);
    } else {
        out->master = add_region(out, "master", REFIT_KEEP);
        out->exp_avg = add_region(out, "exp_avg", REFIT_KEEP);
        out->exp_avg_sq = add_region(out, "exp_avg_sq", REFIT_KEEP);
    }
    out->grads = add_region(out, "grads", REFIT_DISCARD);

    void *weights;
    or_die(refit_memory_alloc(out->device, policy_parameters * sizeof(uint16_t), &weights, &error),
           &error);
    out->weights = weights;
    memset(out->exp_avg, 0, policy_parameters * sizeof(float));
    memset(out->exp_avg_sq, 0, policy_parameters * sizeof(float));
}

static void states_close(train_states *it)
{
    refit_error error;
    host_states_close(it);
    or_die(refit_offloader_close(it->offloader, &error), &error);
    or_die(refit_arena_close(it->arena, &error), &error);
    or_die(refit_memory_free(it->device, it->weights, &error), &error);
    or_die(refit_device_close(it->device, &error), &error);
}

/* ---- The trainer's own inference engine, which shares the device with it ---- */

/* Awake it holds a cache of one context per sequence, as an LLM engine holds its KV cache; asleep
 * it holds nothing. It answers every prompt several times, to measure how good the policy is. */
enum { ENGINE_ANSWERS = 10, ENGINE_SEQUENCES = PROMPTS * ENGINE_ANSWERS };

typedef struct engine {
    refit_device *device;
    float (*cache)[WIDTH]; /* device memory, one context per sequence; NULL while asleep */
} engine;

/* Takes the cache. REFIT_ERR_DEVICE_MEMORY where the device has no room for it. */
static refit_status engine_wake(engine *it, refit_error *error)
{
    void *cache;
    uint64_t bytes = sizeof(float) * WIDTH * ENGINE_SEQUENCES;
    refit_status status = refit_memory_alloc(it->device, bytes, &cache, error);
    if (status == REFIT_OK) it->cache = cache;
    return status;
}

static void engine_sleep(engine *it)
{
    refit_error error;
    or_die(refit_memory_free(it->device, it->cache, &error), &error);
    it->cache = NULL;
}

/* The mean reward over all prompts, under `weights`. */
static float engine_evaluate(engine *it, const float *weights, uint64_t seed, uint64_t version)
{
    float sum = 0.0f;
    noise source = noise_start(seed, version, 0);
    uint8_t prompt[PROMPT_TOKENS];
    for (uint32_t i = 0; i < ENGINE_SEQUENCES; i++) {
        task_prompt(i / ENGINE_ANSWERS, prompt);
        rollout_prefill(weights, prompt, it->cache[i]);
    }
    for (uint32_t i = 0; i < ENGINE_SEQUENCES; i++) {
        sample answer;
        task_prompt(i / ENGINE_ANSWERS, prompt);
        rollout_decode(weights, &source, it->cache[i], &answer);
        sum += task_reward(prompt, answer.completion);
    }
    return sum / ENGINE_SEQUENCES;
}

/* ---- The workers, as the trainer sees them ---- */

/* Each worker is this program, started again with --worker. A process that only forked would share
 * the trainer's threads and sockets, which no library survives. */
enum { FLEET_MOST = 16, GATHER_TIMEOUT_MS = 60000, REPLACEMENTS_MOST = 8 };

typedef struct fleet {
    const run_options *options;
    const char *endpoint; /* of the publisher; borrowed */
    uint32_t count;
    pid_t pids[FLEET_MOST];
    int sockets[FLEET_MOST];
} fleet;

static void fleet_start(fleet *it, const run_options *options, const char *endpoint);
static uint32_t fleet_repair(fleet *it);
static void fleet_gather(fleet *it, uint64_t version, batch *batches);
static void fleet_stop(fleet *it);

/* ---- The loop: GRPO with refit in it ---- */

enum { EPOCHS = 2, PUBLISH_TRIES = 4, WORKERS_TIMEOUT_MS = 30000 };

static const adamw_options adamw = {
    .rate = 1e-3f, .beta1 = 0.9f, .beta2 = 0.99f, .epsilon = 1e-8f, .decay = 0.0f};
static const learner_options objective = {.clip = 0.2f, .entropy = 0.1f};

/* One cycle, as it is printed. */
typedef struct cycle_report {
    uint32_t cycle;
    uint64_t version;
    float reward;     /* of the workers' completions */
    float evaluation; /* of the engine's own */
    float loss;
    refit_stats stats; /* of this cycle */
} cycle_report;

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
    states_open(&it->states, options);
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

/* A worker was lost or failed: names it, replaces it, and waits until all are there. */
static void replace_lost_workers(trainer *it, const refit_error *why)
{
    refit_error error;
    fprintf(stderr, "grpo: %s\n", why->text);
    fleet_repair(&it->fleet);
    or_die(refit_publisher_wait_workers(it->publisher, it->fleet.count, WORKERS_TIMEOUT_MS, &error),
           &error);
}

/* Version 0 asks for the next number; the bytes are read where they lie, in device memory. A
 * publish that fails before its commit is repeated, and no worker has switched. After the commit
 * the version counts: the others have it, and a new worker is sent it. */
static void publish_weights(trainer *it)
{
    refit_error error;
    const uint64_t before = refit_publisher_version(it->publisher);
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
        replace_lost_workers(it, &error);
        if (refit_publisher_version(it->publisher) != before) return;
    }
}

/* Clears the states away, so that the engine's cache fits; the windows' memory, too. */
static void make_room(trainer *it)
{
    refit_error error;
    refit_window *window = it->states.window;
    if (window != NULL) or_die(refit_window_trim(window, &error), &error);
    if (it->options->offload)
        or_die(refit_controller_offload(it->controller, REFIT_STREAM_NONE, &error), &error);
    if (engine_wake(&it->engine, &error) == REFIT_OK) return;
    if (it->options->offload) die("the engine's cache does not fit: %s", error.text);
    die("the engine's cache does not fit beside the optimizer's states, which refit would offload "
        "away without --no-offload: %s",
        error.text);
}

/* All states are on the device. */
static void step_all(trainer *it)
{
    const train_states *states = &it->states;
    adamw_step(&adamw, &(adamw_states){.master = states->master,
                                       .exp_avg = states->exp_avg,
                                       .exp_avg_sq = states->exp_avg_sq,
                                       .grads = states->grads,
                                       .count = policy_parameters,
                                       .step = it->steps});
    cast_weights(it);
}

/* One slice of the states, at their addresses on the device. The weights are made from the master
 * while it is there. */
static void step_slice(trainer *it, const refit_window_part *part, void *const *memory)
{
    const train_states *states = &it->states;
    const size_t first = part->offset / sizeof(float), count = part->bytes / sizeof(float);
    adamw_step(&adamw, &(adamw_states){.master = memory[0],
                                       .exp_avg = memory[1],
                                       .exp_avg_sq = memory[2],
                                       .grads = states->grads + first,
                                       .count = count,
                                       .step = it->steps});
    policy_to_bf16(memory[0], states->weights + first, count);
    policy_from_bf16(states->weights + first, it->compute + first, count);
}

/* States visit the device, a window at a time; the step has been begun. On a GPU the arithmetic
 * would be queued on a stream, and that stream given to refit_window_done. */
static void step_in_windows(trainer *it)
{
    refit_error error;
    const train_states *states = &it->states;
    refit_window_view view = {.size = sizeof view};
    for (;;) {
        or_die(refit_window_next(states->window, &view, &error), &error);
        if (view.count == 0) break;
        for (uint32_t i = 0; i < view.count; i += KEPT_STATES)
            step_slice(it, &states->parts[view.first + i], view.memory + i);
        or_die(refit_window_done(states->window, REFIT_STREAM_NONE, &error), &error);
    }
    or_die(refit_window_end(states->window, &error), &error);
}

/* Gradients need the weights only, so they are computed while the states are still on their way:
 * back from the refit, or into the first windows. */
static float train_epoch(trainer *it)
{
    refit_error error;
    train_states *states = &it->states;
    if (states->window != NULL)
        or_die(refit_window_begin(states->window, states->parts, states->part_count,
                                  REFIT_STREAM_NONE, &error),
               &error);
    memset(states->grads, 0, policy_parameters * sizeof *states->grads);
    float loss =
        learner_accumulate(&objective, it->compute, it->batches, it->fleet.count, states->grads);
    or_die(refit_controller_wait(it->controller, REFIT_STREAM_NONE, &error), &error);
    it->steps++;
    if (states->window != NULL)
        step_in_windows(it);
    else
        step_all(it);
    return loss;
}

/* The figures of the cycle, with those of the steps in windows: the last step counts once its
 * copies have ended. */
static void read_stats(trainer *it, refit_stats *out)
{
    refit_error error;
    refit_stats steps;
    refit_stats_init(out, sizeof *out);
    or_die(refit_controller_stats(it->controller, out, &error), &error);
    if (it->states.host == NULL) return;
    host_states_wait(&it->states);
    refit_stats_init(&steps, sizeof steps);
    or_die(refit_offloader_stats(it->states.host, &steps, &error), &error);
    refit_stats_merge(out, &steps);
}

/* One refit cycle: the order of the calls is the one to copy. */
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
    or_die(refit_controller_restore(it->controller, REFIT_STREAM_NONE, &error), &error);
    for (int epoch = 0; epoch < EPOCHS; epoch++)
        report->loss = train_epoch(it);
    read_stats(it, &report->stats);
}

/* ---- A rollout worker, in a process of its own ---- */

/* refit_subscriber_next returns a whole version, verified and committed: the worker widens it into
 * its own copy, accepts it, and samples from it. */

/* The descriptor on which a worker finds the socket to its trainer. */
enum { WORKER_SOCKET = 3 };

/* By name: the publisher decides the order of the tensors. */
static void load_weights(const refit_update *update, float *weights)
{
    refit_error error;
    for (uint32_t i = 0; i < POLICY_TENSORS; i++) {
        const policy_tensor *wanted = &policy_tensors[i];
        refit_tensor tensor = {.size = sizeof tensor};
        const void *bytes;
        uint32_t index;
        or_die(refit_update_find(update, wanted->name, &index, &error), &error);
        or_die(refit_update_tensor(update, index, &tensor, &bytes, &error), &error);
        if (tensor.dtype != REFIT_BF16 || tensor.bytes != wanted->count * sizeof(uint16_t))
            die("tensor %s is not what this policy has", wanted->name);
        policy_from_bf16(bytes, weights + wanted->first, wanted->count);
    }
}

static bool trainer_gone(void)
{
    struct pollfd socket = {.fd = WORKER_SOCKET, .events = POLLIN};
    return poll(&socket, 1, 0) > 0; /* the trainer never writes: readable means closed */
}

static bool send_batch(const batch *out)
{
    const char *at = (const char *)out;
    for (size_t sent = 0; sent < sizeof *out;) {
        ssize_t now = send(WORKER_SOCKET, at + sent, sizeof *out - sent, MSG_NOSIGNAL);
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) return false;
        sent += (size_t)now;
    }
    return true;
}

/* One version: loads it, accepts it, gives refit's memory back, and samples. False: the trainer is
 * gone. */
static bool serve(refit_update *update, const run_options *options, float *weights, batch *out)
{
    refit_error error;
    uint64_t version = refit_update_version(update);
    load_weights(update, weights);
    or_die(refit_update_accept(update, &error), &error);
    refit_update_close(update);
    rollout_batch(weights, options->seed, version, options->worker_index, out);
    return send_batch(out);
}

/* Runs until the trainer is gone; returns the exit status. */
static int worker_run(const run_options *options)
{
    refit_error error;
    refit_subscriber *subscriber;
    float *weights = calloc_or_die(policy_parameters, sizeof *weights);
    batch *out = calloc_or_die(1, sizeof *out);
    or_die(refit_subscriber_open(options->worker_endpoint, &options->config, &subscriber, &error),
           &error);
    for (bool more = true; more;) {
        refit_update *update;
        refit_status status = refit_subscriber_next(subscriber, 500, &update, &error);
        if (status == REFIT_ERR_TIMEOUT) {
            more = !trainer_gone();
            continue;
        }
        or_die(status, &error);
        more = serve(update, options, weights, out);
    }
    refit_subscriber_close(subscriber);
    free(weights);
    free(out);
    return 0;
}

/* ---- The workers' processes ---- */

static void start_one(fleet *it, uint32_t index)
{
    int pair[2];
    char number[16];
    char seed[32];
    snprintf(number, sizeof number, "%u", index);
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)it->options->seed);
    char *arguments[] = {
        "grpo",   "--worker", number, "--endpoint", (char *)(uintptr_t)it->endpoint,
        "--seed", seed,       NULL};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
        die("socketpair: %s", strerror(errno));

    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pair[1], WORKER_SOCKET);
    int code = posix_spawn(&it->pids[index], "/proc/self/exe", &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    if (code != 0) die("worker %u could not be started: %s", index, strerror(code));
    close(pair[1]);
    it->sockets[index] = pair[0];
}

static void fleet_start(fleet *it, const run_options *options, const char *endpoint)
{
    *it = (fleet){.options = options, .endpoint = endpoint, .count = options->workers};
    for (uint32_t i = 0; i < it->count; i++)
        start_one(it, i);
}

static void replace(fleet *it, uint32_t index)
{
    int how = 0;
    kill(it->pids[index], SIGKILL);
    waitpid(it->pids[index], &how, 0);
    close(it->sockets[index]);
    fprintf(stderr, "grpo: worker %u (pid %d) died (%s %d); a new one takes its place\n", index,
            (int)it->pids[index], WIFSIGNALED(how) ? "signal" : "status",
            WIFSIGNALED(how) ? WTERMSIG(how) : WEXITSTATUS(how));
    start_one(it, index);
}

/* Replaces the workers that have died. Returns how many. */
static uint32_t fleet_repair(fleet *it)
{
    uint32_t replaced = 0;
    for (uint32_t i = 0; i < it->count; i++) {
        struct pollfd socket = {.fd = it->sockets[i]};
        if (poll(&socket, 1, 0) <= 0 || (socket.revents & POLLHUP) == 0) continue;
        replace(it, i);
        replaced++;
    }
    return replaced;
}

/* False if the worker is gone before the whole batch has come. */
static bool read_batch(int socket, batch *out)
{
    char *at = (char *)out;
    for (size_t have = 0; have < sizeof *out;) {
        struct pollfd ready = {.fd = socket, .events = POLLIN};
        if (poll(&ready, 1, GATHER_TIMEOUT_MS) == 0) return false;
        ssize_t now = recv(socket, at + have, sizeof *out - have, 0);
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) return false;
        have += (size_t)now;
    }
    return true;
}

/* Reads one batch of `version` from every worker. A worker that died is replaced: the new one is
 * late, so refit gives it the current version, and it samples the very batch that the old one owed.
 */
static void fleet_gather(fleet *it, uint64_t version, batch *batches)
{
    for (uint32_t i = 0; i < it->count; i++) {
        uint32_t tries = 0;
        do { /* a batch of an older version was under way when its publish had to be repeated */
            while (!read_batch(it->sockets[i], &batches[i])) {
                if (++tries > REPLACEMENTS_MOST)
                    die("worker %u died %u times: giving up", i, tries);
                replace(it, i);
            }
        } while (batches[i].version < version);
        if (batches[i].version != version || batches[i].worker != i)
            die("worker %u sent a strange batch", i);
    }
}

/* Closes their sockets, at which they end, and waits for them. */
static void fleet_stop(fleet *it)
{
    for (uint32_t i = 0; i < it->count; i++)
        close(it->sockets[i]);
    for (uint32_t i = 0; i < it->count; i++)
        waitpid(it->pids[i], NULL, 0);
}

/* ---- What is printed ---- */

typedef struct show {
    FILE *json; /* or NULL */
    bool quiet;
    bool terminal; /* stdout is one */
    uint32_t cycles;
} show;

#define MB 1e-6

static const char header[] = "version  reward    eval     loss  out MB  freed MB  out GB/s  "
                             "publish ms  commit ms  return ms  "
                             "blocked ms  workers\n";

static void show_open(show *it, const run_options *options)
{
    *it = (show){.quiet = options->quiet, .cycles = options->cycles};
    it->terminal = !it->quiet && isatty(STDOUT_FILENO);
    if (options->json != NULL) {
        it->json = fopen(options->json, "w");
        if (it->json == NULL) die("%s cannot be written: %s", options->json, strerror(errno));
    }
    if (!it->quiet) fputs(header, stdout);
}

static double gigabytes_per_second(uint64_t bytes, double seconds)
{
    return seconds > 0.0 ? (double)bytes / seconds * 1e-9 : 0.0;
}

static void print_line(const cycle_report *report)
{
    const refit_stats *stats = &report->stats;
    printf(
        "%7" PRIu64
        "  %6.3f  %6.3f  %7.4f  %6.2f  %8.2f  %8.2f  %10.2f  %9.2f  %9.2f  %10.2f  %7" PRIu64 "\n",
        report->version, (double)report->reward, (double)report->evaluation, (double)report->loss,
        (double)stats->offload_bytes_last * MB, (double)stats->offload_reclaimed_bytes_last * MB,
        gigabytes_per_second(stats->offload_bytes_last, stats->offload_seconds_last),
        stats->publish_stage_seconds_last * 1e3, stats->publish_commit_seconds_last * 1e3,
        stats->restore_seconds_last * 1e3, stats->restore_blocked_seconds_last * 1e3,
        stats->workers_committed_last);
}

static void print_json(FILE *file, const cycle_report *report)
{
    char stats[8192];
    if (refit_stats_json(&report->stats, stats, sizeof stats) >= sizeof stats)
        die("the statistics are too long");
    fprintf(file,
            "{\"cycle\":%" PRIu32 ",\"version\":%" PRIu64
            ",\"reward\":%.6f,\"evaluation\":%.6f,\"loss\":%.9g,\"stats\":%s}\n",
            report->cycle, report->version, (double)report->reward, (double)report->evaluation,
            (double)report->loss, stats);
}

static void print_bar(const show *it, uint32_t done)
{
    enum { CELLS = 40 };
    uint32_t full = it->cycles == 0 ? CELLS : (uint32_t)((uint64_t)done * CELLS / it->cycles);
    printf("[%.*s%*s] %" PRIu32 "/%" PRIu32, (int)full, "########################################",
           (int)(CELLS - full), "", done, it->cycles);
}

/* On a terminal the bar stands below the lines and each new line takes its place. */
static void show_cycle(show *it, const cycle_report *report)
{
    if (it->json != NULL) print_json(it->json, report);
    if (it->quiet) return;
    if (it->terminal) fputs("\r\033[K", stdout);
    print_line(report);
    if (it->terminal) print_bar(it, report->cycle);
    fflush(stdout);
}

/* Ends the progress bar's line; then other things may be printed. */
static void show_close(show *it)
{
    if (it->terminal) fputs("\r\033[K", stdout);
    if (it->json != NULL && fclose(it->json) != 0)
        die("the JSON file could not be written: %s", strerror(errno));
    it->json = NULL;
}

/* ---- Runs ---- */

/* The result of a training run, to be compared with another one. All arrays are owned. */
typedef struct run_result {
    uint32_t cycles;
    float *rewards;    /* per cycle */
    float *losses;     /* per cycle */
    float *states;     /* master, exp_avg, exp_avg_sq, one after the other */
    uint16_t *weights; /* bf16 */
    double seconds;
} run_result;

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static void keep_result(trainer *it, run_result *out)
{
    size_t count = policy_parameters;
    host_states_wait(&it->states);
    memcpy(out->states, it->states.master, count * sizeof(float));
    memcpy(out->states + count, it->states.exp_avg, count * sizeof(float));
    memcpy(out->states + 2 * count, it->states.exp_avg_sq, count * sizeof(float));
    memcpy(out->weights, it->states.weights, count * sizeof(uint16_t));
}

/* Trains from scratch. Ends the program after a failure that training cannot go on with. */
static void training_run(const run_options *options, run_result *out)
{
    trainer it;
    show lines;
    double start = now();
    const uint32_t cycles = options->cycles;
    *out = (run_result){.cycles = cycles};
    out->rewards = calloc_or_die(cycles, sizeof(float));
    out->losses = calloc_or_die(cycles, sizeof(float));
    out->states = calloc_or_die(3 * policy_parameters, sizeof(float));
    out->weights = calloc_or_die(policy_parameters, sizeof(uint16_t));
    trainer_open(&it, options);
    show_open(&lines, options);
    for (uint32_t cycle = 0; cycle < cycles; cycle++) {
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

static void run_result_free(run_result *it)
{
    free(it->rewards);
    free(it->losses);
    free(it->states);
    free(it->weights);
}

enum { LAST_CYCLES = 10 };

static float last_reward(const run_result *run)
{
    uint32_t count = run->cycles < LAST_CYCLES ? run->cycles : LAST_CYCLES;
    float sum = 0.0f;
    for (uint32_t i = run->cycles - count; i < run->cycles; i++)
        sum += run->rewards[i];
    return sum / (float)count;
}

static int train(const run_options *options)
{
    run_result run;
    training_run(options, &run);
    float reward = last_reward(&run);
    int reached = options->target <= 0.0f || reward >= options->target * REWARD_MOST;
    printf("\n%u cycles in %.1f s; reward %.3f -> %.3f of %.1f (mean of the last %d): target %.2f "
           "%s\n",
           run.cycles, run.seconds, (double)run.rewards[0], (double)reward, (double)REWARD_MOST,
           LAST_CYCLES, (double)options->target, reached ? "reached" : "NOT reached");
    run_result_free(&run);
    return reached ? 0 : 1;
}

/* 1 if the bytes are the same; says so either way. */
static int same(const char *what, const void *a, const void *b, size_t bytes)
{
    int equal = memcmp(a, b, bytes) == 0;
    printf("  %-8s %10zu bytes  %s\n", what, bytes, equal ? "identical" : "DIFFERENT");
    return equal;
}

static int compare(const run_result *a, const run_result *b)
{
    int equal = same("losses", a->losses, b->losses, a->cycles * sizeof(float));
    equal &= same("rewards", a->rewards, b->rewards, a->cycles * sizeof(float));
    equal &= same("weights", a->weights, b->weights, policy_parameters * sizeof(uint16_t));
    equal &= same("states", a->states, b->states, 3 * policy_parameters * sizeof(float));
    return equal;
}

static int check(run_options options)
{
    run_result with, without;
    options.device = states_large_device;
    options.quiet = true;
    options.offload = true;
    training_run(&options, &with);
    const char *how = options.window ? "states on the host" : "the refit cycle";
    options.offload = options.window = false;
    options.json = NULL;
    training_run(&options, &without);
    printf("%u cycles with %s (%.1f s) and without (%.1f s), compared bit for bit:\n", with.cycles,
           how, with.seconds, without.seconds);
    int equal = compare(&with, &without);
    puts(equal ? "Both runs are identical." : "The runs DIFFER.");
    run_result_free(&with);
    run_result_free(&without);
    return equal ? 0 : 1;
}

/* ---- The command line ---- */

static const char help[] =
    "Usage: grpo [option …]\n"
    "Teaches a small network to add two digits by GRPO: one trainer, several rollout\n"
    "worker processes, and a device too small for the trainer's states and the\n"
    "inference engine's cache at once. refit makes room, hands over the new weights,\n"
    "and brings the states back.\n\n"
    "  --workers N      rollout worker processes (2)\n"
    "  --cycles N       refit cycles: publish, roll out, train (150)\n"
    "  --seed N         of the weights and of all sampling (1)\n"
    "  --target R       mean reward of the last 10 cycles to be reached, or the exit\n"
    "                   status is 1 (0.9; 0: any)\n"
    "  --device SPEC    where states, weights and cache live (host:capacity=…)\n"
    "  --config FILE    refit's configuration, as in configs/grpo.yaml\n"
    "  --json FILE      the lines as JSON objects too\n"
    "  --no-offload     leave the states on the device: ends out of memory\n"
    "  --window SIZE    let the states live on the host, and step them on the device\n"
    "                   in windows of this size, such as 64KiB\n"
    "  --check          train twice, with and without offload (or --window), and\n"
    "                   compare all bits\n"
    "  --help           this text\n";

enum { OPTION_WORKER = 256, OPTION_ENDPOINT };

static const struct option known[] = {
    {"workers", required_argument, NULL, 'w'},
    {"cycles", required_argument, NULL, 'c'},
    {"seed", required_argument, NULL, 's'},
    {"target", required_argument, NULL, 't'},
    {"device", required_argument, NULL, 'd'},
    {"config", required_argument, NULL, 'f'},
    {"json", required_argument, NULL, 'j'},
    {"no-offload", no_argument, NULL, 'n'},
    {"window", required_argument, NULL, 'W'},
    {"check", no_argument, NULL, 'k'},
    {"help", no_argument, NULL, 'h'},
    {"worker", required_argument, NULL, OPTION_WORKER},
    {"endpoint", required_argument, NULL, OPTION_ENDPOINT},
    {NULL, 0, NULL, 0},
};

static uint64_t number(const char *text, uint64_t least, uint64_t most)
{
    char *end = NULL;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] == '-' || end == text || *end != '\0' || value < least || value > most)
        die("\"%s\" is not a number from %llu to %llu; see grpo --help", text,
            (unsigned long long)least, (unsigned long long)most);
    return value;
}

static float fraction(const char *text)
{
    char *end = NULL;
    float value = strtof(text, &end);
    if (end == text || *end != '\0' || !(value >= 0.0f && value <= 1.0f))
        die("\"%s\" is not a reward from 0 to 1; see grpo --help", text);
    return value;
}

static void read_one(run_options *out, int option, const char *value)
{
    refit_error error;
    switch (option) {
    case 'w': out->workers = (uint32_t)number(value, 1, 16); break;
    case 'c': out->cycles = (uint32_t)number(value, 1, 100000); break;
    case 's': out->seed = number(value, 0, UINT32_MAX); break;
    case 't': out->target = fraction(value); break;
    case 'd': out->device = value; break;
    case 'f': or_die(refit_config_load(&out->config, value, &error), &error); break;
    case 'j': out->json = value; break;
    case 'n': out->offload = false; break;
    case 'W':
        or_die(refit_config_set(&out->config, "offload.window_bytes", value, &error), &error);
        out->window = true;
        break;
    case 'k': out->check = true; break;
    case 'h': fputs(help, stdout); exit(0);
    case OPTION_WORKER:
        out->is_worker = true;
        out->worker_index = (uint32_t)number(value, 0, 15);
        break;
    case OPTION_ENDPOINT: out->worker_endpoint = value; break;
    default: exit(2); /* getopt has said what is wrong */
    }
}

/* Reads the command line; prints help or what is wrong and ends the program where that is what it
 * asks for. */
static void run_options_read(run_options *out, int argc, char **argv)
{
    refit_error error;
    *out = (run_options){.workers = 2,
                         .cycles = 150,
                         .seed = 1,
                         .target = 0.9f,
                         .offload = true,
                         .device = states_small_device};
    refit_config_init(&out->config, sizeof out->config);
    for (int option; (option = getopt_long(argc, argv, "", known, NULL)) != -1;)
        read_one(out, option, optarg);
    if (optind < argc) die("\"%s\" is not an option; see grpo --help", argv[optind]);
    if (out->window && !out->offload) die("--window and --no-offload exclude each other");
    or_die(refit_config_load_env(&out->config, &error), &error);
}

int main(int argc, char **argv)
{
    run_options options;
    run_options_read(&options, argc, argv);
    if (options.is_worker) return worker_run(&options);
    return options.check ? check(options) : train(&options);
}
