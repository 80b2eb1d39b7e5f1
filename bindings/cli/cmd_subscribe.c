/*
 * refit subscribe: each committed version as a safetensors file.
 *
 * A version is accepted once its bytes are on the disk, and its file gets its name after that: an
 * accept that fails (the bytes may be torn) leaves no file. A version that cannot be written is
 * refused, so that the publisher knows that this worker still has the version before. Ends after
 * --count versions, on a signal, or when nothing new has come for --timeout seconds.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <refit/broadcast.h>

#include "args.h"
#include "cli.h"
#include "interrupt.h"
#include "progress.h"
#include "safetensors_write.h"
#include "settings.h"

#define WAIT_MS 60000 /* one wait of those that have no end of their own */

typedef struct subscribe_job {
    cli_settings settings;
    refit_config config;
    const char *endpoint; /* NULL: broadcast.endpoint */
    const char *dir;
    const char *name;
    uint32_t count;     /* 0: no end */
    uint32_t timeout_s; /* 0: none */
    refit_subscriber *subscriber;
    uint32_t kept; /* versions written so far */
} subscribe_job;

enum { FLAG_OUT, FLAG_COUNT, FLAG_TIMEOUT, FLAG_NAME, FLAG_CONFIG, FLAG_SET };

static const cli_flag flags[] = {
    [FLAG_OUT] = {"--out", true},
    [FLAG_COUNT] = {"--count", true},
    [FLAG_TIMEOUT] = {"--timeout", true},
    [FLAG_NAME] = {"--name", true},
    [FLAG_CONFIG] = {"--config", true},
    [FLAG_SET] = {"--set", true},
    {NULL, false},
};

static bool take_endpoint(subscribe_job *job, const char *value)
{
    if (job->endpoint != NULL) {
        (void)cli_complain(CLI_USAGE, "%s and %s: subscribe at one endpoint", job->endpoint, value);
        return false;
    }
    job->endpoint = value;
    return true;
}

static bool take_flag(subscribe_job *job, int flag, const char *value)
{
    switch (flag) {
    case FLAG_OUT: job->dir = value; return true;
    case FLAG_COUNT: return cli_args_number("--count", value, 1, UINT32_MAX, &job->count);
    case FLAG_TIMEOUT: return cli_args_number("--timeout", value, 1, 86400, &job->timeout_s);
    case FLAG_NAME: job->name = value; return true;
    case FLAG_CONFIG: job->settings.file = value; return true;
    case FLAG_SET: return cli_settings_add(&job->settings, value);
    case CLI_ARGS_WORD: return take_endpoint(job, value);
    default: return false;
    }
}

static int make_folder(const char *path)
{
    struct stat stat_of;
    if (mkdir(path, 0777) == 0) return CLI_DONE;
    if (errno == EEXIST && stat(path, &stat_of) == 0) {
        if (S_ISDIR(stat_of.st_mode)) return CLI_DONE;
        errno = ENOTDIR;
    }
    return cli_complain(CLI_IO, "cannot make the folder %s: %s", path, strerror(errno));
}

static int prepare(subscribe_job *job)
{
    if (job->dir == NULL) return cli_complain(CLI_USAGE, "where to? --out DIR is missing");
    refit_error error;
    int status = cli_settings_load(&job->settings, &job->config);
    if (status != CLI_DONE) return status;
    if (job->name != NULL &&
        refit_config_set(&job->config, "broadcast.worker", job->name, &error) != REFIT_OK) {
        return cli_complain_error(&error);
    }
    return make_folder(job->dir);
}

/* The next version, or an exit status. */
static int wait_version(subscribe_job *job, refit_update **update)
{
    refit_error error;
    const uint32_t wait = job->timeout_s > 0 ? job->timeout_s * 1000 : WAIT_MS;
    for (;;) {
        refit_status status = refit_subscriber_next(job->subscriber, wait, update, &error);
        if (status == REFIT_OK) return CLI_DONE;
        if (cli_interrupt_signal() != 0) return CLI_SIGNAL + cli_interrupt_signal();
        if (status != REFIT_ERR_TIMEOUT || job->timeout_s > 0) return cli_complain_error(&error);
    }
}

static uint64_t count_bytes(const refit_update *update)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < refit_update_count(update); i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        const void *bytes;
        if (refit_update_tensor(update, i, &tensor, &bytes, NULL) == REFIT_OK) {
            total += tensor.bytes;
        }
    }
    return total;
}

/* Its bytes beside the file they are to be; a version that cannot be written is refused. */
static int write_version(subscribe_job *job, refit_update *update, uint64_t bytes,
                         cli_output *output)
{
    char label[64];
    cli_progress progress;
    refit_error error;
    (void)snprintf(label, sizeof label, "version %" PRIu64, refit_update_version(update));
    cli_progress_begin(&progress, bytes, label);
    refit_status status = cli_output_begin(update, job->dir, &progress, output, &error);
    cli_progress_end(&progress);
    if (status == REFIT_OK) return CLI_DONE;
    /* Whether the publisher still hears of it changes nothing here. */
    (void)!refit_update_refuse(update, error.text, job->kept > 0, NULL);
    return cli_complain_error(&error);
}

static int keep_version(subscribe_job *job, refit_update *update)
{
    char size[CLI_SIZE_TEXT];
    cli_output output;
    refit_error error;
    const uint64_t version = refit_update_version(update), bytes = count_bytes(update);
    int status = write_version(job, update, bytes, &output);
    if (status != CLI_DONE) return status;
    if (refit_update_accept(update, &error) != REFIT_OK) {
        cli_output_drop(&output);
        return cli_complain_error(&error);
    }
    if (cli_output_keep(&output, &error) != REFIT_OK) {
        return cli_complain(CLI_IO, "version %" PRIu64 " was accepted, but is not in place: %s",
                            version, error.text);
    }
    (void)printf("version %" PRIu64 ": %s/%" PRIu64 ".safetensors, %u tensors, %s\n", version,
                 job->dir, version, refit_update_count(update), cli_size_text(bytes, size));
    (void)fflush(stdout);
    return CLI_DONE;
}

static int subscribe(subscribe_job *job)
{
    refit_error error;
    if (refit_subscriber_open(job->endpoint, &job->config, &job->subscriber, &error) != REFIT_OK) {
        return cli_complain_error(&error);
    }
    cli_interrupt_wakes(job->subscriber);
    int status = CLI_DONE;
    while (status == CLI_DONE && (job->count == 0 || job->kept < job->count)) {
        refit_update *update = NULL;
        status = wait_version(job, &update);
        if (status == CLI_DONE) status = keep_version(job, update);
        refit_update_close(update);
        job->kept++;
    }
    cli_interrupt_wakes(NULL);
    refit_subscriber_close(job->subscriber);
    return status;
}

static int run_subscribe(int count, char **arguments)
{
    subscribe_job job = {0};
    const char *value = NULL;
    cli_args args = {count, arguments, 0, false};
    for (int found; (found = cli_args_next(&args, flags, &value)) != CLI_ARGS_END;) {
        if (!take_flag(&job, found, value)) return CLI_USAGE;
    }
    int status = prepare(&job);
    if (status != CLI_DONE) return status;
    cli_interrupt_catch();
    return subscribe(&job);
}

const cli_command cli_subscribe = {
    .name = "subscribe",
    .summary = "write each committed version as a safetensors file",
    .usage = "usage: refit subscribe [ENDPOINT] --out DIR [--count K] [--timeout S]\n"
             "                       [--name N] [--config FILE] [--set KEY=VALUE]...\n"
             "\n"
             "Writes each version as DIR/<version>.safetensors, beside first and then\n"
             "renamed, and points DIR/latest to it. Prints one line a version.\n"
             "\n"
             "  ENDPOINT         where the publisher binds; default: broadcast.endpoint\n"
             "  --out DIR        the folder, made if it is missing\n"
             "  --count K        end after K versions; default: go on until a signal\n"
             "  --timeout S      end with status 4 if nothing new came for S seconds\n"
             "  --name N         the name in the publisher's reports (broadcast.worker)\n"
             "  --config FILE    read this configuration file\n"
             "  --set KEY=VALUE  set one option; refit config lists them\n"
             "\n"
             "A version that cannot be written is refused and ends the command with status 6;\n"
             "the files before it stay. __metadata__ does not travel, so the files have none.\n"
             "A publisher that starts anew counts from 1 again and replaces files.\n",
    .run = run_subscribe,
};
