/*
 * refit inspect: what a safetensors file, a file of an archive, an archive, or a publisher holds.
 *
 * The first bytes of a file tell its kind. A file is read and checked whole: its digests are those
 * of a version with the same tensors, so files, archives and versions can be compared.
 * inspect_archive.c shows archives and their files. The command asks a publisher as an observer: no
 * version waits for the answer, and no weights travel.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "args.h"
#include "cli.h"
#include "inspect_archive.h"
#include "progress.h"
#include "safetensors.h"

enum { FLAG_JSON, FLAG_TIMEOUT, FLAG_CONFIG, FLAG_SET };

static const cli_flag flags[] = {
    [FLAG_JSON] = {"--json", false},
    [FLAG_TIMEOUT] = {"--timeout", true},
    [FLAG_CONFIG] = {"--config", true},
    [FLAG_SET] = {"--set", true},
    {NULL, false},
};

static bool take_flag(inspect_job *job, int flag, const char *value)
{
    switch (flag) {
    case FLAG_JSON: job->json = true; return true;
    case FLAG_TIMEOUT: return cli_args_number("--timeout", value, 1, 86400, &job->timeout_s);
    case FLAG_CONFIG: job->settings.file = value; return true;
    case FLAG_SET: return cli_settings_add(&job->settings, value);
    case CLI_ARGS_WORD: break;
    default: return false;
    }
    if (job->path != NULL) {
        (void)cli_complain(CLI_USAGE, "%s and %s: inspect one thing", job->path, value);
        return false;
    }
    job->path = value;
    return true;
}

/* ---- A safetensors file ---- */

static refit_status digest_tensors(const cli_weights *weights, uint64_t *digests,
                                   refit_error *error)
{
    for (uint32_t i = 0; i < weights->count; i++) {
        const uint64_t bytes = weights->tensors[i].bytes;
        void *memory = malloc((size_t)bytes + 1);
        if (memory == NULL) {
            return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for %" PRIu64 " bytes",
                              bytes);
        }
        refit_status status = cli_weights_load(weights, i, memory, error);
        if (status == REFIT_OK) digests[i] = refit_tensor_digest(memory, bytes);
        free(memory);
        if (status != REFIT_OK) return status;
    }
    return REFIT_OK;
}

static int show_weights(const inspect_job *job, const cli_weights *weights, const uint64_t *digests,
                        const unsigned char digest[16])
{
    char size[CLI_SIZE_TEXT], text[33];
    json_t *tensors = job->json ? json_array() : NULL;
    if (!job->json) {
        (void)printf("file      %s, safetensors\nweights   %s in %u tensors\ndigest    %s\n",
                     job->path, cli_size_text(weights->total, size), weights->count,
                     cli_digest_text(digest, text));
        cli_inspect_print_table(CLI_COLUMNS_BYTES);
    }
    for (uint32_t i = 0; i < weights->count; i++) {
        if (job->json)
            (void)json_array_append_new(
                tensors, cli_inspect_json_tensor(&weights->tensors[i], &digests[i], NULL));
        else
            cli_inspect_print_tensor(CLI_COLUMNS_BYTES, &weights->tensors[i], &digests[i], NULL);
    }
    if (!job->json) return CLI_DONE;
    return cli_inspect_print_json(
        json_pack("{s:s, s:s, s:I, s:i, s:s, s:o}", "kind", "safetensors", "file", job->path,
                  "weight_bytes", (json_int_t)weights->total, "tensor_count", (int)weights->count,
                  "digest", cli_digest_text(digest, text), "tensors", tensors));
}

static int inspect_weights(const inspect_job *job, const cli_weights *weights)
{
    unsigned char digest[16];
    refit_error error;
    uint64_t *digests = calloc((size_t)weights->count + 1, sizeof *digests);
    refit_status status =
        digests == NULL ? cli_refuse(&error, REFIT_ERR_HOST_MEMORY, 0, "no memory for digests")
                        : digest_tensors(weights, digests, &error);
    if (status == REFIT_OK) {
        status = refit_version_digest(weights->tensors, weights->count, digests, digest, &error);
    }
    int result = status == REFIT_OK ? show_weights(job, weights, digests, digest)
                                    : cli_complain_content(job->path, &error);
    free(digests);
    return result;
}

/* ---- A publisher ---- */

static int show_query(const inspect_job *job, const refit_query *query)
{
    refit_error error;
    refit_query_info info = {.size = sizeof info};
    if (refit_query_describe(query, &info, &error) != REFIT_OK) {
        return cli_complain_error(&error);
    }
    json_t *tensors = job->json ? json_array() : NULL;
    if (!job->json) cli_inspect_print_query(job->path, &info);
    if (!job->json && info.tensors > 0) cli_inspect_print_table(CLI_COLUMNS_BYTES);
    for (uint32_t i = 0; i < info.tensors; i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        uint64_t digest = 0;
        const uint64_t *told = info.sealed ? &digest : NULL;
        (void)!refit_query_tensor(query, i, &tensor, &digest, NULL);
        if (job->json)
            (void)json_array_append_new(tensors, cli_inspect_json_tensor(&tensor, told, NULL));
        else
            cli_inspect_print_tensor(CLI_COLUMNS_BYTES, &tensor, told, NULL);
    }
    if (!job->json) return CLI_DONE;
    json_t *object = cli_inspect_json_query(job->path, &info);
    (void)json_object_set_new(object, "tensors", tensors);
    return cli_inspect_print_json(object);
}

static int inspect_endpoint(const inspect_job *job)
{
    refit_error error;
    refit_query *query;
    if (refit_query_open(job->path, &job->config, job->timeout_s * 1000, &query, &error) !=
        REFIT_OK) {
        return cli_complain_error(&error);
    }
    int result = show_query(job, query);
    refit_query_close(query);
    return result;
}

/* ---- Which of them ---- */

static int inspect_file(const inspect_job *job)
{
    refit_error error;
    refit_snapshot *snapshot;
    refit_status status = refit_snapshot_open(job->path, &job->config, &snapshot, &error);
    if (status == REFIT_OK) {
        int result = cli_inspect_snapshot(job, snapshot);
        refit_snapshot_close(snapshot);
        return result;
    }
    if (status != REFIT_ERR_INVALID) return cli_complain_file(&error);
    cli_weights weights;
    status = cli_weights_open(job->path, &weights, &error);
    if (status != REFIT_OK) {
        return cli_complain(status == REFIT_ERR_IO ? CLI_IO : CLI_FILE,
                            "%s is neither a file of an archive nor a safetensors file: %s",
                            job->path, error.text);
    }
    int result = inspect_weights(job, &weights);
    cli_weights_close(&weights);
    return result;
}

static int run_inspect(int count, char **arguments)
{
    inspect_job job = {.timeout_s = 5};
    struct stat found;
    const char *value = NULL;
    cli_args args = {count, arguments, 0, false};
    for (int flag; (flag = cli_args_next(&args, flags, &value)) != CLI_ARGS_END;) {
        if (!take_flag(&job, flag, value)) return CLI_USAGE;
    }
    if (job.path == NULL)
        return cli_complain(CLI_USAGE, "inspect what? A file, a folder or an endpoint");
    int status = cli_settings_load(&job.settings, &job.config);
    if (status != CLI_DONE) return status;
    if (strstr(job.path, CLI_ARCHIVE_SCHEME) == job.path) job.path += strlen(CLI_ARCHIVE_SCHEME);
    if (strstr(job.path, "://") != NULL) return inspect_endpoint(&job);
    bool folder = stat(job.path, &found) == 0 && S_ISDIR(found.st_mode);
    return folder ? cli_inspect_folder(&job) : inspect_file(&job);
}

const cli_command cli_inspect = {
    .name = "inspect",
    .summary = "show what a file, an archive or a publisher holds",
    .usage = "usage: refit inspect PATH|ENDPOINT [--json] [--timeout S] [--config FILE]\n"
             "                     [--set KEY=VALUE]...\n"
             "\n"
             "Shows what PATH holds: a safetensors file, a file of an archive, or an archive,\n"
             "that is, a folder that refit subscribe --archive has written. A file is read\n"
             "whole and checked. Of an archive's file, and in the sum of an archive, you see\n"
             "how much of each tensor changed, and its blocks by mode; of an archive's files\n"
             "only lists are read. ENDPOINT (user://NAME, tcp://...) is asked which version\n"
             "it has committed; no version waits for that, and no weights travel.\n"
             "\n"
             "  --json           one JSON object instead of words\n"
             "  --timeout S      seconds that a publisher has to answer; default: 5\n"
             "  --config FILE    read this configuration file\n"
             "  --set KEY=VALUE  set one option (limits.*, security.*)\n"
             "\n"
             "A tensor's digest and a version's are those that workers check: equal digests\n"
             "are equal weights. Status 4 if no publisher answers, 5 if a file cannot be\n"
             "used, 6 if it cannot be read.\n",
    .run = run_inspect,
};
