/*
 * refit publish: safetensors files as versions 1, 2, ...
 *
 * All files are opened and checked before a worker is waited for, so that a bad one fails
 * before workers connect. A version counts when at least as many workers as were asked for have
 * applied it; the first that fails ends the command, and its workers are named. The tensors are
 * declared again only where a file has others than the one before it.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <refit/advanced/archive.h>
#include <refit/broadcast.h>

#include "args.h"
#include "cli.h"
#include "interrupt.h"
#include "progress.h"
#include "safetensors.h"
#include "settings.h"

#define SLICE_MS 200 /* how soon a signal ends a wait */

typedef struct publish_job {
    cli_settings settings;
    refit_config config;
    const char *endpoint; /* NULL: broadcast.endpoint */
    uint32_t workers;
    uint32_t timeout_s; /* 0: what the configuration says */
    const char **paths;
    cli_weights *files;
    int count;
    void *memory; /* for one tensor of any of the files, while it is written */
    refit_publisher *publisher;
} publish_job;

enum { FLAG_BIND, FLAG_WORKERS, FLAG_TIMEOUT, FLAG_CONFIG, FLAG_SET };

static const cli_flag flags[] = {
    [FLAG_BIND] = {"--bind", true},       [FLAG_WORKERS] = {"--workers", true},
    [FLAG_TIMEOUT] = {"--timeout", true}, [FLAG_CONFIG] = {"--config", true},
    [FLAG_SET] = {"--set", true},         {NULL, false},
};

static bool take_flag(publish_job *job, int flag, const char *value)
{
    switch (flag) {
    case FLAG_BIND: job->endpoint = value; return true;
    case FLAG_WORKERS: return cli_args_number("--workers", value, 1, 65536, &job->workers);
    case FLAG_TIMEOUT: return cli_args_number("--timeout", value, 1, 86400, &job->timeout_s);
    case FLAG_CONFIG: job->settings.file = value; return true;
    case FLAG_SET: return cli_settings_add(&job->settings, value);
    case CLI_ARGS_WORD: job->paths[job->count++] = value; return true;
    default: return false;
    }
}

/* --timeout stands for both of the publisher's deadlines. */
static int apply_timeout(publish_job *job)
{
    if (job->timeout_s == 0) return CLI_DONE;
    static const char *const keys[] = {"broadcast.stage_timeout_ms", "broadcast.commit_timeout_ms"};
    char text[16];
    (void)snprintf(text, sizeof text, "%us", job->timeout_s);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        refit_error error;
        if (refit_config_set(&job->config, keys[i], text, &error) != REFIT_OK) {
            return cli_complain_error(&error);
        }
    }
    return CLI_DONE;
}

static bool is_of_archive(const publish_job *job, const char *path)
{
    refit_error error;
    refit_snapshot *snapshot = NULL;
    refit_status status = refit_snapshot_open(path, &job->config, &snapshot, &error);
    refit_snapshot_close(snapshot);
    return status == REFIT_OK || status == REFIT_ERR_CORRUPT;
}

static refit_status check_name(const publish_job *job, const char *name, refit_error *error)
{
    const size_t length = strlen(name);
    if (length == 0) return cli_refuse(error, REFIT_ERR_INVALID, 0, "a tensor has an empty name");
    if (length <= job->config.limits_name_bytes) return REFIT_OK;
    return cli_refuse(error, REFIT_ERR_LIMIT, 0,
                      "the name of tensor %.32s... has %zu bytes: limits.name_bytes allows %u",
                      name, length, job->config.limits_name_bytes);
}

/* Refuses files that no version can be made of, as far as that shows without a publisher. */
static refit_status check_file(const publish_job *job, const cli_weights *file, refit_error *error)
{
    refit_status status = REFIT_OK;
    if (file->count == 0) return cli_refuse(error, REFIT_ERR_INVALID, 0, "it has no tensor");
    if (file->count > job->config.limits_tensors) {
        return cli_refuse(error, REFIT_ERR_LIMIT, 0, "it has %u tensors: limits.tensors allows %u",
                          file->count, job->config.limits_tensors);
    }
    for (uint32_t i = 0; i < file->count && status == REFIT_OK; i++)
        status = check_name(job, file->tensors[i].name, error);
    return status;
}

static int open_files(publish_job *job)
{
    for (int i = 0; i < job->count; i++) {
        refit_error error;
        const char *path = job->paths[i];
        refit_status status = cli_weights_open(path, &job->files[i], &error);
        if (status == REFIT_OK) {
            status = check_file(job, &job->files[i], &error);
        } else if (status != REFIT_ERR_IO && is_of_archive(job, path)) {
            return cli_complain(CLI_FILE,
                                "%s: it is a file of an archive: refit materialize makes a "
                                "safetensors file of it",
                                path);
        }
        if (status != REFIT_OK) return cli_complain_content(path, &error);
    }
    return CLI_DONE;
}

/* The publisher takes whole tensors: room for the largest of all files. */
static int take_memory(publish_job *job)
{
    uint64_t most = 1;
    for (int i = 0; i < job->count; i++) {
        for (uint32_t k = 0; k < job->files[i].count; k++) {
            const uint64_t bytes = job->files[i].tensors[k].bytes;
            if (bytes > most) most = bytes;
        }
    }
    job->memory = malloc((size_t)most);
    if (job->memory != NULL) return CLI_DONE;
    return cli_complain(CLI_FAILED, "no memory for the largest tensor, %" PRIu64 " bytes", most);
}

/* Waits in slices, so that a signal is noticed. */
static refit_status wait_for_workers(publish_job *job, refit_error *error)
{
    const double end = cli_seconds() + 1e-3 * job->config.broadcast_stage_timeout_ms;
    refit_status status;
    do {
        status = refit_publisher_wait_workers(job->publisher, job->workers, SLICE_MS, error);
    } while (status == REFIT_ERR_TIMEOUT && cli_interrupt_signal() == 0 && cli_seconds() < end);
    return status;
}

static int wait_workers(publish_job *job, cli_progress *progress)
{
    char words[64];
    (void)snprintf(words, sizeof words, "waiting for %u worker%s", job->workers,
                   job->workers == 1 ? "" : "s");
    cli_progress_say(progress, words);
    refit_error error;
    refit_stats stats;
    refit_status status = wait_for_workers(job, &error);
    if (status == REFIT_OK) return CLI_DONE;
    if (cli_interrupt_signal() != 0) return CLI_SIGNAL + cli_interrupt_signal();
    cli_progress_end(progress);
    if (status != REFIT_ERR_TIMEOUT) return cli_complain_error(&error);
    refit_stats_init(&stats, sizeof stats);
    (void)!refit_publisher_stats(job->publisher, &stats, NULL);
    return cli_complain(CLI_PEERS,
                        "%llu of %u workers have subscribed to %s within %.1f s: see whether they "
                        "run, and what they say",
                        (unsigned long long)stats.workers, job->workers,
                        refit_publisher_endpoint(job->publisher),
                        1e-3 * job->config.broadcast_stage_timeout_ms);
}

static refit_status write_tensors(publish_job *job, const cli_weights *file, cli_progress *progress,
                                  refit_error *error)
{
    for (uint32_t i = 0; i < file->count; i++) {
        const uint64_t bytes = file->tensors[i].bytes;
        refit_status status = cli_weights_load(file, i, job->memory, error);
        if (status == REFIT_OK) {
            status = refit_publisher_write(job->publisher, i, job->memory, bytes, NULL,
                                           REFIT_STREAM_NONE, error);
        }
        if (status != REFIT_OK) return status;
        cli_progress_add(progress, bytes);
    }
    return REFIT_OK;
}

/* A failure here drops the version. No worker caused it, so none is named. */
static int write_version(publish_job *job, int index, cli_progress *progress)
{
    refit_error error;
    refit_status status = refit_publisher_begin(job->publisher, 0, &error);
    if (status == REFIT_OK) {
        status = write_tensors(job, &job->files[index], progress, &error);
        if (status == REFIT_OK) return CLI_DONE;
        (void)!refit_publisher_abort(job->publisher, NULL);
    }
    cli_progress_end(progress);
    if (status != REFIT_ERR_IO) return cli_complain_error(&error);
    return cli_complain(CLI_IO, "%s: %s", job->paths[index], error.text);
}

/* Why a worker that was counted on has not committed; one may have failed at nothing. */
static const char *explain(const refit_worker_info *info, bool aborted)
{
    if (info->reason[0] != '\0') return info->reason;
    if (info->status != REFIT_OK) return refit_status_text(info->status);
    return aborted ? "the version was aborted" : "the version was committed without it";
}

/* Counts the workers that have applied the last version, and names the members that have not. */
static uint32_t count_committed(publish_job *job, bool aborted, cli_progress *progress)
{
    uint32_t committed = 0;
    refit_worker_info info = {.size = sizeof info};
    for (uint32_t i = 0; refit_publisher_worker(job->publisher, i, &info, NULL) == REFIT_OK; i++) {
        if (!info.member) continue;
        if (info.committed) {
            committed++;
            continue;
        }
        cli_progress_end(progress);
        (void)cli_complain(CLI_PEERS, "worker %s did not commit: %s", info.name,
                           explain(&info, aborted));
    }
    return committed;
}

/* The bytes of the version for workers that held the one before and received it through sockets. */
static void report_changes(const publish_job *job)
{
    char size[CLI_SIZE_TEXT];
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    if (refit_publisher_stats(job->publisher, &stats, NULL) != REFIT_OK) return;
    if (stats.publish_delta_bytes_last == 0) return;
    (void)printf(", %s of changes", cli_size_text(stats.publish_delta_bytes_last, size));
}

static int report_version(const publish_job *job, int index, uint32_t committed, double seconds)
{
    char size[CLI_SIZE_TEXT];
    (void)printf("version %" PRIu64 ": %s, %u tensors, %s, %u worker%s, %.2f s",
                 refit_publisher_version(job->publisher), job->paths[index],
                 job->files[index].count, cli_size_text(job->files[index].total, size), committed,
                 committed == 1 ? "" : "s", seconds);
    report_changes(job);
    (void)printf("\n");
    return cli_flush();
}

/* Where the tensors are others than those of the file before. */
static int declare_tensors(publish_job *job, int index, cli_progress *progress)
{
    refit_error error;
    const cli_weights *file = &job->files[index];
    if (index > 0 && cli_weights_alike(file, &job->files[index - 1])) return CLI_DONE;
    if (refit_publisher_declare(job->publisher, file->tensors, file->count, &error) == REFIT_OK) {
        return CLI_DONE;
    }
    cli_progress_end(progress);
    return cli_complain_content(job->paths[index], &error);
}

static int commit_version(publish_job *job, int index, cli_progress *progress, double start)
{
    refit_error error;
    const uint64_t before = refit_publisher_version(job->publisher);
    cli_progress_say(progress, "waiting for the workers to load it");
    const refit_status status = refit_publisher_commit(job->publisher, &error);
    const bool aborted = refit_publisher_version(job->publisher) == before;
    const uint32_t committed = count_committed(job, aborted, progress);
    cli_progress_end(progress);
    if (status != REFIT_OK) return cli_complain_error(&error);
    if (committed < job->workers) {
        return cli_complain(CLI_PEERS, "%s: %u of %u workers committed it", job->paths[index],
                            committed, job->workers);
    }
    return report_version(job, index, committed, cli_seconds() - start);
}

static int publish_version(publish_job *job, int index, cli_progress *progress)
{
    int status = declare_tensors(job, index, progress);
    if (status == CLI_DONE) status = wait_workers(job, progress);
    const double start = cli_seconds();
    if (status == CLI_DONE) status = write_version(job, index, progress);
    if (status == CLI_DONE) status = commit_version(job, index, progress, start);
    return status;
}

static int publish_all(publish_job *job)
{
    refit_error error;
    if (refit_publisher_open(job->endpoint, &job->config, &job->publisher, &error) != REFIT_OK) {
        return cli_complain_error(&error);
    }
    (void)printf("endpoint %s\n", refit_publisher_endpoint(job->publisher));
    int status = cli_flush();
    for (int i = 0; i < job->count && status == CLI_DONE; i++) {
        char label[64];
        cli_progress progress;
        (void)snprintf(label, sizeof label, "version %d", i + 1);
        cli_progress_begin(&progress, job->files[i].total, label);
        status = publish_version(job, i, &progress);
        cli_progress_end(&progress);
        if (status == CLI_DONE && cli_interrupt_signal() != 0) {
            status = CLI_SIGNAL + cli_interrupt_signal();
        }
    }
    refit_publisher_close(job->publisher);
    return status;
}

static int run_job(publish_job *job, int count, char **arguments)
{
    const char *value = NULL;
    cli_args args = {count, arguments, 0, false};
    for (int found; (found = cli_args_next(&args, flags, &value)) != CLI_ARGS_END;) {
        if (!take_flag(job, found, value)) return CLI_USAGE;
    }
    if (job->count == 0) {
        return cli_complain(CLI_USAGE, "which file? refit publish --help tells more");
    }
    int status = cli_settings_load(&job->settings, &job->config);
    if (status == CLI_DONE) status = apply_timeout(job);
    if (status == CLI_DONE) status = open_files(job);
    if (status == CLI_DONE) status = take_memory(job);
    if (status != CLI_DONE) return status;
    cli_interrupt_catch();
    return publish_all(job);
}

static int run_publish(int count, char **arguments)
{
    publish_job job = {.workers = 1};
    job.paths = calloc((size_t)count + 1, sizeof *job.paths);
    job.files = calloc((size_t)count + 1, sizeof *job.files);
    int status = job.paths != NULL && job.files != NULL ? run_job(&job, count, arguments)
                                                        : cli_complain(CLI_FAILED, "no memory");
    for (int i = 0; i < job.count && job.files != NULL; i++)
        cli_weights_close(&job.files[i]);
    free(job.memory);
    free(job.files);
    free(job.paths);
    return status;
}

const cli_command cli_publish = {
    .name = "publish",
    .summary = "publish safetensors files as versions 1, 2, ...",
    .usage = "usage: refit publish FILE.safetensors... [--bind ENDPOINT] [--workers N]\n"
             "                     [--timeout S] [--config FILE] [--set KEY=VALUE]...\n"
             "\n"
             "Publishes each file as one version, in order, waiting before and after each\n"
             "until N workers are there and have committed it. Prints the endpoint and one\n"
             "line a version.\n"
             "\n"
             "  --bind ENDPOINT  user://NAME (* any free one), ipc://PATH, tcp://HOST:PORT;\n"
             "                   default: broadcast.endpoint (user://refit)\n"
             "  --workers N      workers that must commit each version; default: 1\n"
             "  --timeout S      seconds that workers have to come, to fetch, and to load\n"
             "  --config FILE    read this configuration file\n"
             "  --set KEY=VALUE  set one option; refit config lists them\n"
             "\n"
             "Status 4 if workers are missing or do not commit: they are named on stderr.\n"
             "Tensors travel with name, dtype, shape and bytes; the optional __metadata__ of\n"
             "a file does not.\n",
    .run = run_publish,
};
