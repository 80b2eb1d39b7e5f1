/* bench_workers: posix_spawn, a pipe each, and the wait for their end. */
#include "bench_workers.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

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
