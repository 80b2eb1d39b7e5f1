/* show: what a person watches while it trains. Nothing but text goes into a pipe. */
#include "show.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "or_die.h"

#define MB 1e-6

static const char header[] = "version  reward    eval     loss  out MB  freed MB  out GB/s  "
                             "publish ms  commit ms  return ms  "
                             "exposed ms  workers\n";

void show_open(show *it, const run_options *options)
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
        stats->restore_seconds_last * 1e3, stats->restore_exposed_seconds_last * 1e3,
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
void show_cycle(show *it, const cycle_report *report)
{
    if (it->json != NULL) print_json(it->json, report);
    if (it->quiet) return;
    if (it->terminal) fputs("\r\033[K", stdout);
    print_line(report);
    if (it->terminal) print_bar(it, report->cycle);
    fflush(stdout);
}

void show_close(show *it)
{
    if (it->terminal) fputs("\r\033[K", stdout);
    if (it->json != NULL && fclose(it->json) != 0)
        die("the JSON file could not be written: %s", strerror(errno));
    it->json = NULL;
}
