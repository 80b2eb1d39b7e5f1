/*
 * refit bench: which benchmark, and with what. The measuring is in bench_*.c.
 *
 * `refit bench worker KIND ENDPOINT BYTES` is not for people: it is how a benchmark starts its
 * worker processes.
 */
#include <string.h>

#include "args.h"
#include "bench.h"
#include "cli.h"
#include "settings.h"

enum { FLAG_JSON, FLAG_MIB, FLAG_ROUNDS, FLAG_CONFIG, FLAG_SET };

static const cli_flag flags[] = {
    [FLAG_JSON] = {"--json", false},    [FLAG_MIB] = {"--mib", true},
    [FLAG_ROUNDS] = {"--rounds", true}, [FLAG_CONFIG] = {"--config", true},
    [FLAG_SET] = {"--set", true},       {NULL, false},
};

enum { WORDS_MOST = 4 };

typedef struct bench_request {
    const char *words[WORDS_MOST];
    int word_count;
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

static bool take(int found, const char *value, bench_request *request)
{
    switch (found) {
    case FLAG_JSON: request->options.json = true; return true;
    case FLAG_MIB: return take_mib(value, request);
    case FLAG_ROUNDS:
        return cli_args_number("--rounds", value, 1, BENCH_ROUNDS_MOST, &request->options.rounds);
    case FLAG_CONFIG: request->settings.file = value; return true;
    case FLAG_SET: return cli_settings_add(&request->settings, value);
    case CLI_ARGS_WORD: return take_word(value, request);
    default: return false; /* the complaint has been printed */
    }
}

static int run_benchmark(const char *name, const bench_options *options)
{
    if (strcmp(name, "offload") == 0) return bench_offload(options);
    if (strcmp(name, "broadcast") == 0) return bench_broadcast(options);
    if (strcmp(name, "pin") == 0) return bench_pin(options);
    return cli_complain(CLI_USAGE, "there is no benchmark %s: offload, broadcast or pin", name);
}

static int run(int count, char **arguments)
{
    bench_request request = {0};
    cli_args args = {count, arguments, 0, false};
    const char *value;
    for (int found; (found = cli_args_next(&args, flags, &value)) != CLI_ARGS_END;) {
        if (!take(found, value, &request)) return CLI_USAGE;
    }
    int status = cli_settings_load(&request.settings, &request.options.config);
    if (status != CLI_DONE) return status;
    if (request.word_count == 4 && strcmp(request.words[0], "worker") == 0) {
        return bench_worker(request.words[1], request.words[2], request.words[3], &request.options);
    }
    if (request.word_count == 1) return run_benchmark(request.words[0], &request.options);
    return cli_complain(CLI_USAGE, "which benchmark? offload, broadcast or pin");
}

const cli_command cli_bench = {
    .name = "bench",
    .summary = "measure this machine, each figure beside its baseline",
    .usage = "usage: refit bench offload|broadcast|pin [OPTION...]\n\n"
             "  offload     states out and back, beside one large copy with as many threads\n"
             "              and beside the per-tensor pageable path of today's trainers\n"
             "  broadcast   one version to 1, 2, 4 and 8 workers through shared memory and\n"
             "              TCP, beside a copy and a hash, and beside a raw ZeroMQ socket\n"
             "  pin         first use of the host memory, beside one thread that touches and\n"
             "              locks the same bytes\n\n"
             "  --json           one JSON object a line\n"
             "  --mib N          MiB of tensors (offload and pin: 1907, broadcast: 256; less\n"
             "                   where a quarter of the free memory is less)\n"
             "  --rounds N       counted rounds, behind one that is not (offload: 9,\n"
             "                   broadcast: 7, pin: 5)\n"
             "  --config FILE    options\n"
             "  --set KEY=VALUE  one option\n",
    .run = run,
};
