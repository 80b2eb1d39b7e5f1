/*
 * refit bench: which benchmark, and with what. The measuring is in bench_*.c.
 *
 * A benchmark starts its worker processes as `refit bench worker KIND ENDPOINT BYTES`; users do not
 * call that.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "bench.h"
#include "bench_workers.h"
#include "cli.h"
#include "settings.h"

enum {
    FLAG_JSON,
    FLAG_MIB,
    FLAG_ROUNDS,
    FLAG_DEVICE,
    FLAG_TENSORS,
    FLAG_FROM,
    FLAG_TO,
    FLAG_DENSITY,
    FLAG_WORKERS,
    FLAG_BIND,
    FLAG_NETNS,
    FLAG_CONFIG,
    FLAG_SET
};

static const cli_flag flags[] = {
    [FLAG_JSON] = {"--json", false},      [FLAG_MIB] = {"--mib", true},
    [FLAG_ROUNDS] = {"--rounds", true},   [FLAG_DEVICE] = {"--device", true},
    [FLAG_TENSORS] = {"--tensors", true}, [FLAG_CONFIG] = {"--config", true},
    [FLAG_FROM] = {"--from", true},       [FLAG_TO] = {"--to", true},
    [FLAG_DENSITY] = {"--density", true}, [FLAG_WORKERS] = {"--workers", true},
    [FLAG_BIND] = {"--bind", true},       [FLAG_NETNS] = {"--netns", true},
    [FLAG_SET] = {"--set", true},         {NULL, false},
};

enum { WORDS_MOST = 4 };

typedef struct bench_request {
    const char *words[WORDS_MOST];
    int word_count;
    uint32_t given; /* a bit for each flag */
    cli_settings settings;
    bench_options options;
} bench_request;

static bool take_mib(const char *value, bench_request *request)
{
    uint32_t mib;
    if (!cli_args_number("--mib", value, 1, 1u << 24, &mib)) return false;
    request->options.bytes = (uint64_t)mib << 20;
    return true;
}

static bool take_word(const char *value, bench_request *request)
{
    if (request->word_count < WORDS_MOST) {
        request->words[request->word_count++] = value;
        return true;
    }
    cli_complain(CLI_USAGE, "%s is one argument too many: see refit bench --help", value);
    return false;
}

/* "auto" is refused: figures of unknown devices cannot be compared. */
static bool take_device(const char *value, bench_request *request)
{
    request->options.device = value;
    if (strncmp(value, "host", 4) == 0 || strncmp(value, "cuda:", 5) == 0) return true;
    cli_complain(CLI_USAGE, "--device is host or cuda:N, not %s", value);
    return false;
}

static bool take_density(const char *value, bench_request *request)
{
    char *end;
    double density = strtod(value, &end);
    request->options.density = density;
    if (end != value && *end == '\0' && density > 0.0 && density <= 1.0) return true;
    cli_complain(CLI_USAGE, "--density cannot be %s: write a share, such as 0.01, up to 1", value);
    return false;
}

/* "1,4,16" */
static bool take_workers(const char *value, bench_request *request)
{
    uint32_t *counts = request->options.workers, count = 0;
    for (const char *at = value; count < BENCH_COUNTS_MOST; at++) {
        char *end;
        unsigned long number = *at >= '1' && *at <= '9' ? strtoul(at, &end, 10) : 0;
        if (number == 0 || number > BENCH_WORKERS_MOST || (*end != ',' && *end != '\0')) break;
        counts[count++] = (uint32_t)number;
        if (*end == '\0') return true;
        at = end;
    }
    cli_complain(CLI_USAGE,
                 "--workers cannot be %s: write up to %d numbers of 1 to %d, with commas", value,
                 BENCH_COUNTS_MOST, BENCH_WORKERS_MOST);
    return false;
}

static bool take(int found, const char *value, bench_request *request)
{
    switch (found) {
    case FLAG_JSON: request->options.json = true; return true;
    case FLAG_MIB: return take_mib(value, request);
    case FLAG_ROUNDS:
        return cli_args_number("--rounds", value, 1, BENCH_ROUNDS_MOST, &request->options.rounds);
    case FLAG_DEVICE: return take_device(value, request);
    case FLAG_TENSORS: request->options.tensors = value; return true;
    case FLAG_FROM: request->options.from = value; return true;
    case FLAG_TO: request->options.to = value; return true;
    case FLAG_DENSITY: return take_density(value, request);
    case FLAG_WORKERS: return take_workers(value, request);
    case FLAG_BIND: request->options.bind = value; return true;
    case FLAG_NETNS: request->options.netns = value; return true;
    case FLAG_CONFIG: request->settings.file = value; return true;
    case FLAG_SET: return cli_settings_add(&request->settings, value);
    case CLI_ARGS_WORD: return take_word(value, request);
    default: return false; /* the complaint has been printed */
    }
}

/* Which benchmark takes which options; --config and --set are for all. */
#define TAKES(flag) (1u << FLAG_##flag)
#define MEASURES    (TAKES(JSON) | TAKES(MIB) | TAKES(ROUNDS) | TAKES(CONFIG) | TAKES(SET))
#define ON_DEVICE   (MEASURES | TAKES(DEVICE))

static const struct benchmark {
    const char *name;
    int (*run)(const bench_options *options);
    uint32_t takes;
} benchmarks[] = {
    {"offload", bench_offload, ON_DEVICE | TAKES(TENSORS)},
    {"remap", bench_remap, ON_DEVICE | TAKES(TENSORS)},
    {"handover", bench_handover, ON_DEVICE | TAKES(TENSORS)},
    {"pin", bench_pin, ON_DEVICE},
    {"broadcast", bench_broadcast, MEASURES | TAKES(DENSITY) | TAKES(WORKERS)},
    {"link", bench_link, MEASURES | TAKES(DENSITY) | TAKES(BIND) | TAKES(NETNS)},
    {"delta", bench_delta, MEASURES | TAKES(FROM) | TAKES(TO)},
    {"tensors", bench_show_list,
     TAKES(TENSORS) | TAKES(MIB) | TAKES(DEVICE) | TAKES(CONFIG) | TAKES(SET)},
};
enum { BENCHMARKS = sizeof benchmarks / sizeof benchmarks[0] };

/* "offload, remap and pin" */
static void name_takers(int flag, char *out, size_t room)
{
    const char *names[BENCHMARKS];
    size_t count = 0, length = 0;
    for (size_t i = 0; i < BENCHMARKS; i++)
        if ((benchmarks[i].takes & 1u << flag) != 0) names[count++] = benchmarks[i].name;
    out[0] = '\0';
    for (size_t i = 0; i < count && length < room; i++) {
        const char *before = i == 0 ? "" : i + 1 == count ? " and " : ", ";
        length += (size_t)snprintf(out + length, room - length, "%s%s", before, names[i]);
    }
}

/* An option that was ignored would give figures of something else. */
static int check_given(const struct benchmark *which, uint32_t given)
{
    char takers[128];
    for (int flag = 0; flags[flag].name != NULL; flag++) {
        if ((given & ~which->takes & 1u << flag) == 0) continue;
        name_takers(flag, takers, sizeof takers);
        return cli_complain(
            CLI_USAGE, "%s is for %s: bench %s %s", flags[flag].name, takers, which->name,
            flag == FLAG_DENSITY && which->run == bench_delta ? "takes all densities"
                                                              : "does not take it");
    }
    return CLI_DONE;
}

static int run_benchmark(const bench_request *request)
{
    const char *name = request->words[0];
    for (size_t i = 0; i < BENCHMARKS; i++) {
        if (strcmp(name, benchmarks[i].name) != 0) continue;
        int status = check_given(&benchmarks[i], request->given);
        return status == CLI_DONE ? benchmarks[i].run(&request->options) : status;
    }
    return cli_complain(CLI_USAGE, "there is no benchmark %s: see refit bench --help", name);
}

static int run(int count, char **arguments)
{
    bench_request request = {.options.device = "host"};
    request.options.settings = &request.settings;
    cli_args args = {count, arguments, 0, false};
    const char *value;
    for (int found; (found = cli_args_next(&args, flags, &value)) != CLI_ARGS_END;) {
        if (!take(found, value, &request)) return CLI_USAGE;
        if (found >= 0) request.given |= 1u << found;
    }
    int status = cli_settings_load(&request.settings, &request.options.config);
    if (status != CLI_DONE) return status;
    if (request.word_count == 4 && strcmp(request.words[0], "worker") == 0) {
        return bench_worker(request.words[1], request.words[2], request.words[3], &request.options);
    }
    if (request.word_count == 1) return run_benchmark(&request);
    return cli_complain(CLI_USAGE, "which benchmark? see refit bench --help");
}

const cli_command cli_bench = {
    .name = "bench",
    .summary = "measure this machine, each figure beside its baseline",
    .usage = "usage: refit bench NAME [OPTION...]\n\n"
             "  offload     states out and back, beside one large copy and today's trainers\n"
             "  remap       device memory given back and taken again at its addresses\n"
             "  handover    weights to a process on the same GPU, beside a copy of them there\n"
             "  broadcast   a version to 1 to 16 workers, beside a copy and raw ZeroMQ\n"
             "  link        an update over a link (--bind ADDRESS, workers in --netns NAME)\n"
             "  delta       updates of a density coded and applied, beside others' ways\n"
             "  pin         first use of the host memory, beside one thread that locks it\n"
             "  tensors     the list that offload takes: names and bytes\n\n"
             "  --json           one JSON object a line\n"
             "  --device SPEC    host (the default) or cuda:N; broadcast runs on the host\n"
             "  --tensors LIST   qwen3-0.6b, qwen2.5-1.5b, qwen2.5-3b, X-weights, small, FILE\n"
             "  --mib N          MiB of tensors; less where memory does not allow it\n"
             "  --density SHARE  of what changes: broadcast (all), link (0.01)\n"
             "  --workers N,N    broadcast: to so many workers\n"
             "  --from A --to B  delta: two safetensors files instead of made-up updates\n"
             "  --rounds N       counted rounds, after some that are not (5 to 15)\n"
             "  --config FILE, --set KEY=VALUE  options\n",
    .run = run,
};
