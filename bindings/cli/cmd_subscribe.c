/*
 * refit subscribe: each committed version as a safetensors file, in an archive, or both. It comes
 * from a trainer, or from the folder of an archive that another process writes.
 *
 * A version is accepted once its bytes are on the disk, and its files get their names after that:
 * an accept that fails (the bytes may be torn) leaves no file. A version that cannot be written, or
 * whose file cannot get its name, is refused, so that the publisher knows that this worker still
 * has the version before. It ends after --count versions, on a signal, or when nothing new has come
 * for --timeout seconds.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <refit/broadcast.h>

#include "archiving.h"
#include "args.h"
#include "cli.h"
#include "interrupt.h"
#include "progress.h"
#include "safetensors_write.h"
#include "say.h"
#include "settings.h"

#define WAIT_MS 60000 /* one wait of those that have no end of their own */
#define HINT_MS 5000  /* until the hint that no trainer has answered */

#define PATH_ROOM 4096

typedef struct subscribe_job {
    cli_settings settings;
    refit_config config;
    const char *endpoint;     /* NULL: broadcast.endpoint */
    char followed[PATH_ROOM]; /* that of a folder */
    const char *dir;          /* NULL: no safetensors files */
    const char *archive;      /* NULL: none */
    const char *name;
    uint32_t count;         /* 0: no end */
    uint32_t keep;          /* anchors of the archive; 0: all */
    uint32_t timeout_s;     /* 0: none */
    refit_archive *kept_in; /* or NULL */
    refit_subscriber *subscriber;
    uint32_t kept; /* versions written so far */
    bool hinted;   /* the hint that no trainer has answered was printed */
    uint32_t said; /* cli_said() when it began to wait */
} subscribe_job;

enum {
    FLAG_OUT,
    FLAG_ARCHIVE,
    FLAG_KEEP,
    FLAG_COUNT,
    FLAG_TIMEOUT,
    FLAG_NAME,
    FLAG_CONFIG,
    FLAG_SET
};

static const cli_flag flags[] = {
    [FLAG_OUT] = {"--out", true},
    [FLAG_ARCHIVE] = {"--archive", true},
    [FLAG_KEEP] = {"--keep", true},
    [FLAG_COUNT] = {"--count", true},
    [FLAG_TIMEOUT] = {"--timeout", true},
    [FLAG_NAME] = {"--name", true},
    [FLAG_CONFIG] = {"--config", true},
    [FLAG_SET] = {"--set", true},
    {NULL, false},
};

/* An endpoint has ://, as of refit inspect; else it is a folder, which need not be there yet. */
static bool take_endpoint(subscribe_job *job, const char *value)
{
    if (job->endpoint != NULL) {
        (void)cli_complain(CLI_USAGE, "%s and %s: subscribe at one endpoint", job->endpoint, value);
        return false;
    }
    job->endpoint = value;
    if (strstr(value, "://") != NULL) return true;
    const int length =
        snprintf(job->followed, sizeof job->followed, CLI_ARCHIVE_SCHEME "%s", value);
    job->endpoint = job->followed;
    if (length < (int)sizeof job->followed) return true;
    (void)cli_complain(CLI_USAGE, "the path of the folder is too long");
    return false;
}

static bool take_flag(subscribe_job *job, int flag, const char *value)
{
    switch (flag) {
    case FLAG_OUT: job->dir = value; return true;
    case FLAG_ARCHIVE: job->archive = value; return true;
    case FLAG_KEEP: return cli_args_number("--keep", value, 1, UINT32_MAX, &job->keep);
    case FLAG_COUNT: return cli_args_number("--count", value, 1, UINT32_MAX, &job->count);
    case FLAG_TIMEOUT: return cli_args_number("--timeout", value, 1, 86400, &job->timeout_s);
    case FLAG_NAME: job->name = value; return true;
    case FLAG_CONFIG: job->settings.file = value; return true;
    case FLAG_SET: return cli_settings_add(&job->settings, value);
    case CLI_ARGS_WORD: return take_endpoint(job, value);
    default: return false;
    }
}

/* Closed to others: weights are secrets to many. The maker of a folder that was there has decided.
 */
static int make_folder(const char *path)
{
    struct stat stat_of;
    if (mkdir(path, 0700) == 0) return CLI_DONE;
    if (errno == EEXIST && stat(path, &stat_of) == 0) {
        if (S_ISDIR(stat_of.st_mode)) return CLI_DONE;
        errno = ENOTDIR;
    }
    return cli_complain(CLI_IO, "cannot make the folder %s: %s", path, strerror(errno));
}

static int prepare(subscribe_job *job)
{
    if (job->dir == NULL && job->archive == NULL) {
        return cli_complain(CLI_USAGE, "where to? --out DIR or --archive DIR is missing");
    }
    if (job->keep > 0 && job->archive == NULL) {
        return cli_complain(CLI_USAGE, "--keep N is for an archive: --archive DIR is missing");
    }
    refit_error error;
    int status = cli_settings_load(&job->settings, &job->config);
    if (status != CLI_DONE) return status;
    if (job->name != NULL &&
        refit_config_set(&job->config, "broadcast.worker", job->name, &error) != REFIT_OK) {
        return cli_complain_error(&error);
    }
    if (job->dir != NULL && (status = make_folder(job->dir)) != CLI_DONE) return status;
    if (job->dir != NULL) cli_output_sweep(job->dir);
    if (job->archive == NULL) return CLI_DONE;
    if (refit_archive_open(job->archive, REFIT_ARCHIVE_WRITE, &job->config, &job->kept_in,
                           &error) == REFIT_OK) {
        return CLI_DONE;
    }
    return cli_complain(CLI_IO, "%s: %s", job->archive, error.text);
}

/* Says once that no trainer has answered: it may be down, or at another endpoint. An endpoint that
 * was given without its scheme is waited for as a folder. */
static void hint(subscribe_job *job)
{
    refit_subscriber_info info = {.size = sizeof info};
    const char *endpoint = job->endpoint != NULL ? job->endpoint : job->config.broadcast_endpoint;
    const char *end = job->timeout_s > 0 ? "" : " (--timeout S ends that)";
    if (job->hinted) return;
    job->hinted = true;
    if (refit_subscriber_describe(job->subscriber, &info, NULL) != REFIT_OK) return;
    if (info.epoch == 0 && job->endpoint == job->followed) {
        (void)cli_complain(CLI_DONE,
                           "no version is in the folder %s yet: waiting%s; an endpoint has ://",
                           job->followed + strlen(CLI_ARCHIVE_SCHEME), end);
        return;
    }
    if (info.epoch != 0 || cli_said() != job->said) return;
    const bool archive = strstr(endpoint, CLI_ARCHIVE_SCHEME) == endpoint;
    (void)cli_complain(CLI_DONE, "no %s at %s yet: waiting%s",
                       archive ? "version is" : "trainer has answered", endpoint, end);
}

/* The milliseconds of the next wait, after `waited` seconds. */
static uint32_t slice(const subscribe_job *job, double waited)
{
    const double all = job->timeout_s > 0 ? 1e3 * job->timeout_s : 1e3 * waited + WAIT_MS;
    const double end = !job->hinted && HINT_MS < all ? HINT_MS : all;
    const double left = end - 1e3 * waited;
    return left > 0 ? (uint32_t)left + 1 : 0;
}

/* The next version, or an exit status. */
static int wait_version(subscribe_job *job, refit_update **update)
{
    refit_error error;
    const double start = cli_seconds();
    for (;;) {
        const uint32_t wait = slice(job, cli_seconds() - start);
        refit_status status = refit_subscriber_next(job->subscriber, wait, update, &error);
        if (status == REFIT_OK) return CLI_DONE;
        if (cli_interrupt_signal() != 0) return CLI_SIGNAL + cli_interrupt_signal();
        const double waited = cli_seconds() - start;
        const bool late = job->timeout_s > 0 && waited >= job->timeout_s;
        if (status != REFIT_ERR_TIMEOUT || late) return cli_complain_error(&error);
        if (1e3 * waited >= HINT_MS) hint(job);
    }
}

/* The files that a version is written to. */
typedef struct version_files {
    const refit_update *update;
    cli_source source;
    uint64_t bytes;
    cli_output output;  /* with job->dir */
    bool out, archived; /* which of the two wait for their names */
} version_files;

static void drop_files(subscribe_job *job, version_files *files)
{
    if (files->out) cli_output_drop(&files->output);
    if (files->archived) (void)!refit_archive_abort(job->kept_in, NULL);
}

static refit_status write_files(subscribe_job *job, version_files *files, cli_progress *progress,
                                refit_error *error)
{
    refit_status status = REFIT_OK;
    if (job->dir != NULL) {
        status = cli_output_begin(&files->source, job->dir, progress, &files->output, error);
        files->out = status == REFIT_OK;
    }
    if (status == REFIT_OK && job->kept_in != NULL) {
        status = cli_archive_write(job->kept_in, files->update, error);
        files->archived = status == REFIT_OK;
    }
    if (status != REFIT_OK) drop_files(job, files);
    return status;
}

/* Its bytes beside the files they are to be; a version that cannot be written is refused. */
static int write_version(subscribe_job *job, refit_update *update, version_files *files)
{
    char label[64];
    cli_progress progress;
    refit_error error;
    (void)snprintf(label, sizeof label, "version %" PRIu64, files->source.number);
    cli_progress_begin(&progress, files->bytes, label);
    refit_status status = write_files(job, files, &progress, &error);
    cli_progress_end(&progress);
    if (status == REFIT_OK) return CLI_DONE;
    /* Whether the publisher still hears of it changes nothing here. */
    (void)!refit_update_refuse(update, error.text, job->kept > 0, NULL);
    return cli_complain_file(&error);
}

/* After the version was accepted: each of them gets its name, whatever became of the other. */
static refit_status name_files(subscribe_job *job, version_files *files, refit_archive_info *info,
                               refit_error *error)
{
    refit_error second;
    refit_status out = REFIT_OK, archived = REFIT_OK;
    if (files->out) out = cli_output_keep(&files->output, error);
    if (files->archived) archived = refit_archive_commit(job->kept_in, info, &second);
    if (out != REFIT_OK) return out;
    if (archived != REFIT_OK) *error = second;
    return archived;
}

/* Removes versions that are too old. A failure is reported, and the command goes on. */
static uint32_t prune(const subscribe_job *job)
{
    refit_error error;
    uint32_t removed = 0;
    if (job->keep == 0) return 0;
    if (refit_archive_prune(job->kept_in, job->keep, &removed, &error) != REFIT_OK) {
        (void)cli_complain(CLI_IO, "%s: old versions stay: %s", job->archive, error.text);
    }
    return removed;
}

/* The text between a folder, as it was given, and a name in it. */
static const char *slash_after(const char *folder)
{
    const size_t length = strlen(folder);
    return length > 0 && folder[length - 1] == '/' ? "" : "/";
}

static void report_archived(const subscribe_job *job, const version_files *files,
                            const refit_archive_info *info, uint32_t removed)
{
    char size[CLI_SIZE_TEXT], kept[CLI_SIZE_TEXT];
    (void)printf("version %" PRIu64 ": %s%s%s, %u tensors, %s as %s", files->source.number,
                 job->archive, slash_after(job->archive), info->name, files->source.count,
                 cli_size_text(files->bytes, size), cli_size_text(info->file_bytes, kept));
    (void)fputs(info->base == 0 ? ", anchor" : ", delta", stdout);
    if (removed > 0) (void)printf("; %u old file%s removed", removed, removed == 1 ? "" : "s");
    (void)putchar('\n');
}

static int report_version(const subscribe_job *job, const version_files *files,
                          const refit_archive_info *info)
{
    char size[CLI_SIZE_TEXT];
    const uint64_t version = files->source.number;
    if (job->dir != NULL) {
        (void)printf("version %" PRIu64 ": %s%s%" PRIu64 ".safetensors, %u tensors, %s\n", version,
                     job->dir, slash_after(job->dir), version, files->source.count,
                     cli_size_text(files->bytes, size));
    }
    if (job->kept_in != NULL) report_archived(job, files, info, prune(job));
    return cli_flush();
}

static int keep_version(subscribe_job *job, refit_update *update)
{
    refit_error error;
    refit_archive_info info = {.size = sizeof info};
    version_files files = {.update = update, .source = cli_source_received(update)};
    files.bytes = cli_source_bytes(&files.source);
    int status = write_version(job, update, &files);
    if (status != CLI_DONE) return status;
    if (refit_update_accept(update, &error) != REFIT_OK) {
        drop_files(job, &files);
        return cli_complain_error(&error);
    }
    if (name_files(job, &files, &info, &error) != REFIT_OK) {
        return cli_complain(CLI_IO, "version %" PRIu64 " was accepted, but is not in place: %s",
                            files.source.number, error.text);
    }
    return report_version(job, &files, &info);
}

static int subscribe(subscribe_job *job)
{
    refit_error error;
    if (refit_subscriber_open(job->endpoint, &job->config, &job->subscriber, &error) != REFIT_OK) {
        return cli_complain_error(&error);
    }
    cli_interrupt_wakes(job->subscriber);
    job->said = cli_said();
    int status = CLI_DONE;
    while (status == CLI_DONE && (job->count == 0 || job->kept < job->count)) {
        refit_update *update = NULL;
        status = wait_version(job, &update);
        if (status == CLI_DONE) status = keep_version(job, update);
        job->hinted = true;
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
    cli_interrupt_catch();
    int status = prepare(&job);
    if (status == CLI_DONE) status = subscribe(&job);
    refit_archive_close(job.kept_in);
    return status;
}

const cli_command cli_subscribe = {
    .name = "subscribe",
    .summary = "write each committed version to files",
    .usage = "usage: refit subscribe [ENDPOINT|FOLDER] [--out DIR] [--archive DIR [--keep N]]\n"
             "                       [--count K] [--timeout S] [--name N] [--config FILE]\n"
             "                       [--set KEY=VALUE]...\n"
             "\n"
             "Writes each version as DIR/<version>.safetensors, beside first and then\n"
             "renamed, and points DIR/latest to it; or to an archive, in which versions\n"
             "between anchors are kept as what changed. Prints one line for each file.\n"
             "\n"
             "  ENDPOINT|FOLDER  where the publisher binds (default: broadcast.endpoint), or\n"
             "                   an archive to follow, waited for if it is not there\n"
             "  --out DIR        safetensors files; made if missing, for this user alone\n"
             "  --archive DIR    an archive, made the same way; refit materialize reads it\n"
             "  --keep N         only the last N anchors of it and what builds on them\n"
             "  --count K        end after K versions; default: go on until a signal\n"
             "  --timeout S      end with status 4 if nothing new came for S seconds\n"
             "  --name N         the name in the publisher's reports (broadcast.worker)\n"
             "  --config FILE    read this configuration file\n"
             "  --set KEY=VALUE  set one option; refit config lists them\n"
             "\n"
             "broadcast.idle_timeout_ms=10min ends it, with status 4, without a trainer. A\n"
             "version that cannot be written is refused and ends it with status 6; the files\n"
             "before it stay. __metadata__ does not travel, so the files have none.\n"
             "A publisher that restarts counts from 1 again: it replaces files in --out.\n",
    .run = run_subscribe,
};
