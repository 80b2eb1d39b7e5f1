/*
 * refit_chaos: runs of a publisher and its workers to which everything happens that a network and
 * an operating system can do. README.md says what, and what must hold.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "run.h"

#define RUN_MOST_S 600 /* should every other deadline fail */

typedef struct arguments {
    uint64_t first, last; /* seeds */
    bool plan_only;
    bool ranks_only;
    chaos_options options;
} arguments;

static int usage(void)
{
    fprintf(stderr, "refit_chaos --seed N | --seeds A..B [--versions M] [--workers K] [--verbose] "
                    "[--plan] [--ranks] [--plant freed|leaked]\n"
                    "  --verbose  prints the plan and the event log while it runs\n"
                    "  --plan     prints the plan, and runs nothing\n"
                    "  --ranks    leaves out seeds whose trainer is one\n"
                    "  --plant    a worker frees, or leaks, 10 MiB before the last count\n");
    return 2;
}

static bool read_seeds(const char *text, arguments *out)
{
    char *end;
    out->first = strtoull(text, &end, 10);
    if (strncmp(end, "..", 2) != 0) return false;
    out->last = strtoull(end + 2, &end, 10);
    return *end == '\0' && out->first <= out->last;
}

static bool read_number(const char *text, uint32_t least, uint32_t most, uint32_t *out)
{
    char *end;
    unsigned long number = strtoul(text, &end, 10);
    if (*text == '\0' || *end != '\0' || number < least || number > most) return false;
    *out = (uint32_t)number;
    return true;
}

static bool read_plant(const char *text, chaos_plant *out)
{
    *out = strcmp(text, "leaked") == 0 ? PLANT_LEAKED : PLANT_FREED;
    return *out == PLANT_LEAKED || strcmp(text, "freed") == 0;
}

static bool read_option(arguments *out, const char *name, const char *value)
{
    if (value == NULL) return false;
    if (strcmp(name, "--seeds") == 0) return read_seeds(value, out);
    if (strcmp(name, "--versions") == 0)
        return read_number(value, 1, VERSIONS_MOST, &out->options.versions);
    if (strcmp(name, "--workers") == 0)
        return read_number(value, 1, WORKERS_MOST, &out->options.workers);
    if (strcmp(name, "--plant") == 0) return read_plant(value, &out->options.plant);
    if (strcmp(name, "--seed") != 0) return false;
    char *end;
    out->first = out->last = strtoull(value, &end, 10);
    return *value != '\0' && *end == '\0';
}

static bool read_arguments(int count, char **words, arguments *out)
{
    for (int i = 1; i < count; i++) {
        if (strcmp(words[i], "--verbose") == 0) {
            out->options.verbose = true;
        } else if (strcmp(words[i], "--plan") == 0) {
            out->plan_only = true;
        } else if (strcmp(words[i], "--ranks") == 0) {
            out->ranks_only = true;
        } else {
            if (!read_option(out, words[i], words[i + 1])) return false;
            i++;
        }
    }
    return true;
}

static void print_totals(const chaos_run *run)
{
    const run_totals *totals = &run->totals;
    printf("seed %" PRIu64 ": well. %.1f s, %" PRIu32 " versions committed and %" PRIu32
           " aborted, %" PRIu32 " faults, %" PRIu64 " frames damaged, %" PRIu32
           " trainers, blocks %" PRIu64 " same %" PRIu64 " changes %" PRIu64 " whole%s",
           run->plan.seed, rft_seconds(rft_now() - run->began), totals->committed, totals->aborted,
           totals->actions, totals->damaged, run->trainers, totals->blocks[0], totals->blocks[1],
           totals->blocks[2], totals->missed != 0 ? ", a version lacked after a flipped bit" : "");
    if (run->gpu)
        printf(", %" PRIu32 " taken on the GPU, %" PRIu32 " of them streamed, %" PRIu32 " lost",
               totals->on_gpu, totals->streamed, totals->lost);
    if (run->plan.ranks > 1)
        printf(", %" PRIu32 " ranks, %" PRIu32 " commits ended by a death, in %" PRIu32
               " ms at most, %" PRIu32 " decisions unheard, %" PRIu32 " of them for no fault",
               run->plan.ranks, totals->survived, totals->survived_ms, totals->untold,
               totals->unexplained);
    if (run->plan.linked) printf(", %" PRIu32 " faults of links of ranks", totals->links);
    if (run->plan.remote) printf(", %" PRIu32 " taken from a neighbor", totals->mapped);
    if (totals->parts != 0) printf(", %" PRIu32 " taken in part", totals->parts);
    if (totals->scarce != 0)
        printf(", %" PRIu32 " times scarce memory, %" PRIu32 " versions not shared, %" PRIu32
               " not received",
               totals->scarce, totals->unshared, totals->refused);
    if (run->users) printf(", two users, %" PRIu32 " segments of their own", totals->owners);
    printf("\n");
    fflush(stdout);
}

/* Its exit status. In a process of its own: one that fails takes everything with it. */
static int play(uint64_t seed, const chaos_options *options)
{
    static chaos_run run;
    int status = 0;
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0) return 1;
    if (pid == 0) {
        alarm(RUN_MOST_S);
        run_play(&run, seed, options);
        print_totals(&run);
        exit(0);
    }
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFSIGNALED(status)) printf("the run was ended by signal %d\n", WTERMSIG(status));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

static bool has_ranks(uint64_t seed, const chaos_options *options)
{
    static chaos_plan plan;
    plan_draw(&plan, seed, options->versions, options->workers);
    return plan.ranks > 1;
}

static void print_plan(uint64_t seed, const chaos_options *options)
{
    static chaos_plan plan;
    plan_draw(&plan, seed, options->versions, options->workers);
    plan_print(&plan, stdout);
}

int main(int count, char **words)
{
    arguments given = {.first = 1, .last = 1, .options = {.versions = 24, .workers = 8}};
    uint64_t failed = 0, played = 0;
    if (!read_arguments(count, words, &given)) return usage();
    for (uint64_t seed = given.first; seed <= given.last; seed++) {
        if (given.ranks_only && !has_ranks(seed, &given.options)) continue;
        played++;
        if (given.plan_only) {
            print_plan(seed, &given.options);
            continue;
        }
        int status = play(seed, &given.options);
        if (status != 0) {
            failed++;
            printf("seed %" PRIu64 " FAILED. Once more: %s --seed %" PRIu64 " --versions %" PRIu32
                   " --workers %" PRIu32 " --verbose\n",
                   seed, words[0], seed, given.options.versions, given.options.workers);
        }
    }
    if (!given.plan_only) printf("%" PRIu64 " of %" PRIu64 " seeds failed\n", failed, played);
    return failed == 0 ? 0 : 1;
}
