/*
 * bench_workers: worker processes. The benchmark's side: posix_spawn, a pipe each, and the wait for
 * their end. The worker's side: it takes versions until its standard input ends.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "bench_cuda.h"
#include "bench_raw.h"
#include "bench_workers.h"
#include "cli.h"

/* ---- The benchmark's side ---- */

extern char **environ;

/* A command line. What it points to is only read. */
typedef struct command_line {
    char program[PATH_MAX];
    char bytes[32];
    char *words[2 * CLI_SETS_MOST + 16];
    int count;
} command_line;

static void add_word(command_line *line, const char *word)
{
    line->words[line->count++] = (char *)(uintptr_t)word;
}

static void add_words(command_line *line, const char *const *words)
{
    for (int i = 0; words[i] != NULL; i++)
        add_word(line, words[i]);
}

static void add_settings(command_line *line, const cli_settings *settings)
{
    if (settings->file != NULL)
        add_words(line, (const char *const[]){"--config", settings->file, NULL});
    for (int i = 0; i < settings->set_count; i++)
        add_words(line, (const char *const[]){"--set", settings->sets[i], NULL});
}

/* This program by the name of its file: another one starts it where there is a namespace. */
static bool write_line(command_line *line, const bench_duty *duty)
{
    ssize_t length = readlink("/proc/self/exe", line->program, sizeof line->program - 1);
    if (length < 0) return false;
    line->program[length] = '\0';
    line->count = 0;
    snprintf(line->bytes, sizeof line->bytes, "%" PRIu64, duty->bytes);
    if (duty->netns != NULL)
        add_words(line, (const char *const[]){"ip", "netns", "exec", duty->netns, NULL});
    add_words(line, (const char *const[]){line->program, "bench", "worker", duty->kind,
                                          duty->endpoint, line->bytes, NULL});
    if (duty->settings != NULL) add_settings(line, duty->settings);
    add_word(line, NULL);
    return true;
}

static bool start_one(bench_workers *workers, const command_line *line)
{
    int ends[2];
    posix_spawn_file_actions_t actions;
    if (pipe2(ends, O_CLOEXEC) != 0) return false;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[0], STDIN_FILENO);
    int code = posix_spawnp(&workers->pids[workers->count], line->words[0], &actions, NULL,
                            line->words, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[0]);
    if (code != 0) {
        close(ends[1]);
        return false;
    }
    workers->inputs[workers->count++] = ends[1];
    return true;
}

bool bench_workers_start(bench_workers *workers, uint32_t count, const bench_duty *duty)
{
    command_line line;
    *workers = (bench_workers){0};
    if (!write_line(&line, duty)) return false;
    while (workers->count < count && workers->count < BENCH_WORKERS_MOST)
        if (!start_one(workers, &line)) return false;
    return workers->count == count;
}

void bench_workers_stop(bench_workers *workers)
{
    for (uint32_t i = 0; i < workers->count; i++)
        close(workers->inputs[i]);
    for (uint32_t i = 0; i < workers->count; i++)
        waitpid(workers->pids[i], NULL, 0);
    workers->count = 0;
}

/* ---- The worker's side: refit bench worker ---- */

/* The weights of an engine on a GPU, one tensor after the other. {0}: none yet. */
typedef struct gpu_engine {
    refit_device *device;
    void *memory;
    refit_target *targets;
    uint32_t count;
} gpu_engine;

/* Room for the tensors of the update. */
static refit_status engine_open(gpu_engine *engine, const refit_update *update, refit_error *error)
{
    uint64_t bytes = 0;
    uint32_t count = refit_update_count(update);
    refit_tensor tensor = {.size = sizeof tensor};
    engine->device = refit_update_device(update);
    engine->targets = calloc(count, sizeof *engine->targets);
    if (engine->targets == NULL) return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory");
    for (uint32_t i = 0; i < count; i++) {
        BENCH_TRY(refit_update_tensor(update, i, &tensor, NULL, error));
        engine->targets[i] = (refit_target){i, NULL, tensor.bytes, NULL};
        bytes += (tensor.bytes + 511) / 512 * 512;
    }
    BENCH_TRY(refit_memory_alloc(engine->device, bytes, &engine->memory, error));
    char *at = engine->memory;
    for (uint32_t i = 0; i < count; i++) {
        engine->targets[i].memory = at;
        at += (engine->targets[i].bytes + 511) / 512 * 512;
    }
    engine->count = count;
    return REFIT_OK;
}

static void engine_close(gpu_engine *engine)
{
    if (engine->memory != NULL) (void)!refit_memory_free(engine->device, engine->memory, NULL);
    free(engine->targets);
}

/* A version in a GPU's memory is copied to the engine's; any other is read where it is. */
static refit_status load(gpu_engine *engine, refit_update *update, refit_error *error)
{
    if (refit_update_device(update) == NULL) return REFIT_OK;
    if (engine->count == 0) BENCH_TRY(engine_open(engine, update, error));
    return refit_update_copy(update, engine->targets, engine->count, REFIT_STREAM_NONE, error);
}

static refit_status take_versions(refit_subscriber *subscriber, gpu_engine *engine,
                                  refit_error *error)
{
    refit_update *update;
    for (;;) {
        refit_status status = refit_subscriber_next(subscriber, 200, &update, error);
        if (status == REFIT_ERR_TIMEOUT && bench_input_ended()) return REFIT_OK;
        if (status == REFIT_ERR_TIMEOUT) continue;
        if (status != REFIT_OK) return status;
        BENCH_TRY(load(engine, update, error));
        BENCH_TRY(refit_update_accept(update, error));
        refit_update_close(update);
    }
}

static int work(const char *endpoint, const bench_options *options)
{
    refit_error error;
    refit_subscriber *subscriber = NULL;
    refit_device *device = NULL;
    gpu_engine engine = {0};
    refit_status status = refit_subscriber_open(endpoint, &options->config, &subscriber, &error);
    if (status == REFIT_OK && options->device != NULL)
        status = refit_device_open(options->device, &options->config, &device, &error);
    if (status == REFIT_OK && device != NULL)
        status = refit_subscriber_use_device(subscriber, device, &error);
    if (status == REFIT_OK) status = take_versions(subscriber, &engine, &error);
    if (status != REFIT_OK) cli_complain_error(&error);
    refit_subscriber_close(subscriber);
    engine_close(&engine);
    if (refit_device_close(device, &error) != REFIT_OK) return cli_complain_error(&error);
    return status == REFIT_OK ? 0 : 1;
}

int bench_worker(const char *kind, const char *endpoint, const char *bytes,
                 const bench_options *options)
{
    bench_options mine = *options;
    mine.bytes = strtoull(bytes, NULL, 10);
    if (strcmp(kind, "raw") == 0)
        return bench_raw_receive(endpoint, mine.bytes, mine.config.broadcast_window);
    mine.config.broadcast_shm = strcmp(kind, "shm") == 0 ? REFIT_SHM_REQUIRE : REFIT_SHM_OFF;
    mine.device = bench_cuda_ordinal(kind) >= 0 ? kind : NULL;
    if (mine.device != NULL) {
        mine.config.broadcast_gpu = REFIT_GPU_REQUIRE;
        mine.config.broadcast_shm = options->config.broadcast_shm;
    }
    return work(endpoint, &mine);
}
