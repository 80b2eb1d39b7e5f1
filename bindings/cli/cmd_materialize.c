/*
 * refit materialize: a version of an archive as a safetensors file.
 *
 * The version is rebuilt and its digests checked before the file is begun; the file gets its name
 * when its bytes are on the disk.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "archiving.h"
#include "args.h"
#include "cli.h"
#include "interrupt.h"
#include "progress.h"
#include "safetensors_write.h"
#include "settings.h"

typedef struct materialize_job {
    cli_settings settings;
    refit_config config;
    const char *dir;
    const char *version_text;
    const char *out;
    uint64_t version;
    uint64_t epoch; /* 0: whichever */
} materialize_job;

enum { FLAG_OUT, FLAG_EPOCH, FLAG_CONFIG, FLAG_SET };

static const cli_flag flags[] = {
    [FLAG_OUT] = {"--out", true},
    [FLAG_EPOCH] = {"--epoch", true},
    [FLAG_CONFIG] = {"--config", true},
    [FLAG_SET] = {"--set", true},
    {NULL, false},
};

static bool take_word(materialize_job *job, const char *value)
{
    if (job->dir == NULL)
        job->dir = value;
    else if (job->version_text == NULL)
        job->version_text = value;
    else
        return (void)cli_complain(CLI_USAGE, "what is %s? One archive and one version", value),
               false;
    return true;
}

static bool take_flag(materialize_job *job, int flag, const char *value)
{
    switch (flag) {
    case FLAG_OUT: job->out = value; return true;
    case FLAG_EPOCH: return cli_archive_epoch(value, &job->epoch);
    case FLAG_CONFIG: job->settings.file = value; return true;
    case FLAG_SET: return cli_settings_add(&job->settings, value);
    case CLI_ARGS_WORD: return take_word(job, value);
    default: return false;
    }
}

static int read_version(materialize_job *job)
{
    char *end;
    const char *text = job->version_text;
    errno = 0;
    job->version = strtoull(text, &end, 10);
    if (text[0] >= '0' && text[0] <= '9' && *end == '\0' && errno == 0 && job->version > 0) {
        return CLI_DONE;
    }
    return cli_complain(CLI_USAGE, "%s is not a version: write a whole number, from 1", text);
}

static int prepare(materialize_job *job)
{
    if (job->dir == NULL || job->version_text == NULL) {
        return cli_complain(CLI_USAGE, "which archive, and which version of it?");
    }
    if (job->out == NULL) return cli_complain(CLI_USAGE, "where to? --out FILE is missing");
    int status = read_version(job);
    return status == CLI_DONE ? cli_settings_load(&job->settings, &job->config) : status;
}

static int write_file(const materialize_job *job, const refit_snapshot *snapshot)
{
    char size[CLI_SIZE_TEXT];
    refit_error error;
    cli_progress progress;
    cli_output output;
    const cli_source source = cli_source_read(snapshot, job->version);
    const uint64_t bytes = cli_source_bytes(&source);
    cli_progress_begin(&progress, bytes, "writing");
    refit_status status = cli_output_begin_file(&source, job->out, &progress, &output, &error);
    cli_progress_end(&progress);
    if (status == REFIT_OK && cli_interrupt_signal() != 0) {
        cli_output_drop(&output);
        return CLI_SIGNAL + cli_interrupt_signal();
    }
    if (status == REFIT_OK) status = cli_output_keep(&output, &error);
    if (status != REFIT_OK) return cli_complain_file(&error);
    (void)printf("version %" PRIu64 ": %s, %u tensors, %s\n", job->version, job->out, source.count,
                 cli_size_text(bytes, size));
    return CLI_DONE;
}

static int materialize(const materialize_job *job)
{
    refit_error error;
    refit_archive *archive;
    refit_snapshot *snapshot = NULL;
    cli_progress progress;
    if (refit_archive_open(job->dir, REFIT_ARCHIVE_READ, &job->config, &archive, &error) !=
        REFIT_OK) {
        return cli_complain_file(&error);
    }
    if (cli_archive_is_none(job->dir, archive)) {
        refit_archive_close(archive);
        return cli_complain(CLI_IO, CLI_ARCHIVE_NONE, job->dir);
    }
    cli_progress_begin(&progress, 0, "version");
    cli_progress_say(&progress, "reading the archive");
    refit_status status = refit_archive_read(archive, job->epoch, job->version, &snapshot, &error);
    cli_progress_end(&progress);
    refit_archive_close(archive);
    if (status == REFIT_ERR_EXISTS) return cli_complain(CLI_USAGE, "%s", error.text);
    if (status != REFIT_OK) return cli_complain_file(&error);
    int result = cli_interrupt_signal() != 0 ? CLI_SIGNAL + cli_interrupt_signal()
                                             : write_file(job, snapshot);
    refit_snapshot_close(snapshot);
    return result;
}

static int run_materialize(int count, char **arguments)
{
    materialize_job job = {0};
    const char *value = NULL;
    cli_args args = {count, arguments, 0, false};
    for (int found; (found = cli_args_next(&args, flags, &value)) != CLI_ARGS_END;) {
        if (!take_flag(&job, found, value)) return CLI_USAGE;
    }
    int status = prepare(&job);
    if (status != CLI_DONE) return status;
    cli_interrupt_catch();
    return materialize(&job);
}

const cli_command cli_materialize = {
    .name = "materialize",
    .summary = "rebuild a version of an archive as a safetensors file",
    .usage = "usage: refit materialize DIR VERSION --out FILE.safetensors [--epoch E]\n"
             "                         [--config FILE] [--set KEY=VALUE]...\n"
             "\n"
             "Rebuilds a version from an archive that refit subscribe --archive has written,\n"
             "checks the digest of every tensor, and writes the file that --out would have\n"
             "written, byte for byte. It needs memory for the weights once.\n"
             "\n"
             "  DIR              the archive\n"
             "  VERSION          its number; refit inspect DIR lists them\n"
             "  --out FILE       is replaced as a whole, or not at all\n"
             "  --epoch E        of which trainer, where several have this version\n"
             "  --config FILE    read this configuration file\n"
             "  --set KEY=VALUE  set one option (limits.*); refit config lists them\n"
             "\n"
             "Status 5 if a file that it needs is damaged or does not belong to the others,\n"
             "6 if it is missing: it is named on stderr, and no file is written.\n",
    .run = run_materialize,
};
