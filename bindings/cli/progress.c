/*
 * The progress line: drawn on stderr with a carriage return, at most ten times a second, cleared
 * before anything else is printed, and not at all if stderr is not a terminal. No colours.
 */
#include "progress.h"

#include <inttypes.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define REDRAW_NS 100000000
#define CLEAR     "\r\033[K"

static int64_t now(void)
{
    struct timespec time;
    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

double cli_seconds(void)
{
    return (double)now() * 1e-9;
}

const char *cli_size_text(uint64_t bytes, char text[CLI_SIZE_TEXT])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double size = (double)bytes;
    size_t unit = 0;
    while (size >= 1024.0 && unit + 1 < sizeof units / sizeof units[0]) {
        size /= 1024.0;
        unit++;
    }
    (void)snprintf(text, CLI_SIZE_TEXT, "%.*f %s", unit == 0 ? 0 : 1, size, units[unit]);
    return text;
}

void cli_progress_begin(cli_progress *progress, uint64_t total, const char *label)
{
    *progress = (cli_progress){.shown = isatty(STDERR_FILENO) == 1, .total = total};
    (void)snprintf(progress->label, sizeof progress->label, "%s", label);
    cli_progress_add(progress, 0);
}

void cli_progress_add(cli_progress *progress, uint64_t bytes)
{
    progress->done += bytes;
    if (!progress->shown || now() < progress->next_at) return;
    progress->next_at = now() + REDRAW_NS;
    char done[CLI_SIZE_TEXT], total[CLI_SIZE_TEXT];
    double share = progress->total > 0 ? (double)progress->done / (double)progress->total : 0.0;
    (void)fprintf(stderr, CLEAR "%s: %3.0f%%, %s of %s", progress->label, 100.0 * share,
                  cli_size_text(progress->done, done), cli_size_text(progress->total, total));
    (void)fflush(stderr);
}

void cli_progress_say(cli_progress *progress, const char *words)
{
    if (!progress->shown) return;
    (void)fprintf(stderr, CLEAR "%s: %s", progress->label, words);
    (void)fflush(stderr);
}

void cli_progress_clear(void)
{
    if (isatty(STDERR_FILENO) == 1) (void)fputs(CLEAR, stderr);
}

void cli_progress_end(cli_progress *progress)
{
    if (!progress->shown) return;
    (void)fputs(CLEAR, stderr);
    (void)fflush(stderr);
    progress->shown = false;
}
