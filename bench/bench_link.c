/*
 * bench link: an update of a density to one worker over a link, as a whole version, as a delta, and
 * as a compressed delta; without keys and with them (CURVE).
 *
 * The caller makes the link (tests/system/bench_link.sh holds one to a rate): the publisher binds
 * an address of one end, and the worker runs at the other. Each way has a publisher and a worker of
 * its own; in each round all of them publish the same version, one after the other, and after them
 * a raw ZeroMQ socket sends as many bytes, which is what the link can carry. `seconds` runs from
 * begin until the publisher's commit has returned, `staged_seconds` until the worker has staged the
 * version. `cold_seconds` is the first version, which travels whole in every way.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <refit/config.h>
#include <refit/keys.h>

#include "bench.h"
#include "bench_raw.h"
#include "bench_versions.h"
#include "bench_workers.h"
#include "cli.h"
#include "interrupt.h"
#include "settings.h"

enum { ROUNDS = 5, WAIT_MS = 60000, WAYS = 3, CASES = 2 * WAYS };
static const uint64_t default_bytes = UINT64_C(256) << 20;
static const double default_density = 0.01;
static const char loopback[] = "tcp://127.0.0.1:0";

static const struct {
    const char *name;
    bool whole, compressed;
} ways[WAYS] = {{"dense", true, false}, {"delta", false, false}, {"delta+zstd", false, true}};

/* ---- Keys for both ends, in a folder of their own, for as long as the benchmark runs ---- */

typedef struct link_keys {
    char folder[128]; /* empty: none were made */
    char worker_sets[2][256];
} link_keys;

/* The worker's own pair lies in the folder of those that are allowed. */
static const char *const files[] = {"trainer.secret", "trainer.public", "allow/worker.secret",
                                    "allow/worker.public"};

/* On failure keys_close removes what there is. */
static refit_status keys_open(link_keys *keys, refit_error *error)
{
    char allow[sizeof keys->folder + 8];
    const char *where = getenv("TMPDIR");
    *keys = (link_keys){.folder = ""};
    if (where == NULL || where[0] == '\0' || strlen(where) > sizeof keys->folder - 32)
        where = "/tmp";
    snprintf(keys->folder, sizeof keys->folder, "%s/refit-bench-XXXXXX", where);
    if (mkdtemp(keys->folder) == NULL) {
        keys->folder[0] = '\0';
        return cli_refuse(error, REFIT_ERR_IO, errno, "no folder for keys can be made in %s",
                          where);
    }
    snprintf(allow, sizeof allow, "%s/allow", keys->folder);
    BENCH_TRY(refit_keys_generate(keys->folder, "trainer", 0, error));
    BENCH_TRY(refit_keys_generate(allow, "worker", 0, error));
    snprintf(keys->worker_sets[0], sizeof keys->worker_sets[0], "security.key=%s/%s", keys->folder,
             files[2]);
    snprintf(keys->worker_sets[1], sizeof keys->worker_sets[1], "security.server_key=%s/%s",
             keys->folder, files[1]);
    return REFIT_OK;
}

static void keys_close(link_keys *keys)
{
    char path[sizeof keys->folder + 32];
    if (keys->folder[0] == '\0') return;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "%s/%s", keys->folder, files[i]);
        (void)unlink(path);
    }
    snprintf(path, sizeof path, "%s/allow", keys->folder);
    (void)rmdir(path);
    (void)rmdir(keys->folder);
    keys->folder[0] = '\0';
}

/* Gives a configuration the trainer's; the settings the worker's, borrowed from `keys`. */
static refit_status keys_for_trainer(const link_keys *keys, refit_config *config,
                                     refit_error *error)
{
    char path[sizeof keys->folder + 32];
    snprintf(path, sizeof path, "%s/%s", keys->folder, files[0]);
    BENCH_TRY(refit_config_set(config, "security.key", path, error));
    snprintf(path, sizeof path, "%s/allow", keys->folder);
    return refit_config_set(config, "security.allow", path, error);
}

static bool keys_for_worker(const link_keys *keys, cli_settings *settings)
{
    return cli_settings_add(settings, keys->worker_sets[0]) &&
           cli_settings_add(settings, keys->worker_sets[1]);
}

/* ---- What is measured ---- */

/* One way, without keys or with them. */
typedef struct link_case {
    refit_publisher *publisher;
    bench_workers workers;
    bench_version_figures last;
    uint64_t cold_sent_bytes;
    bench_series seconds, staged;
} link_case;

typedef struct link_state {
    const bench_options *options;
    bench_versions versions;
    link_keys keys;
    link_case cases[CASES]; /* all ways without keys, then all with them */
    bench_raw *raw;
    bench_workers raw_workers;
    bench_series limit;
} link_state;

/* ---- Both ends of all cases ---- */

static const char *address_of(const link_state *it)
{
    return it->options->bind != NULL ? it->options->bind : loopback;
}

static refit_status case_config(const link_state *it, int which, refit_config *config,
                                refit_error *error)
{
    *config = it->options->config;
    config->broadcast_shm = REFIT_SHM_OFF;
    config->broadcast_insecure = 1; /* made-up weights are not a secret */
    if (ways[which % WAYS].whole) config->broadcast_delta = REFIT_DELTA_NEVER;
    config->broadcast_compress =
        ways[which % WAYS].compressed ? REFIT_COMPRESS_ZSTD : REFIT_COMPRESS_NONE;
    return which < WAYS ? REFIT_OK : keys_for_trainer(&it->keys, config, error);
}

static refit_status cannot_start(refit_error *error)
{
    return cli_refuse(error, REFIT_ERR_SYSTEM, 0, "a worker process could not be started");
}

static refit_status case_open(link_state *it, int which, refit_error *error)
{
    link_case *tested = &it->cases[which];
    refit_config config;
    cli_settings settings = *it->options->settings;
    BENCH_TRY(case_config(it, which, &config, error));
    BENCH_TRY(refit_publisher_open(address_of(it), &config, &tested->publisher, error));
    BENCH_TRY(bench_declare(tested->publisher, it->versions.bytes, error));
    if (!cli_settings_add(&settings, "broadcast.insecure=true")) return cannot_start(error);
    if (which >= WAYS && !keys_for_worker(&it->keys, &settings)) return cannot_start(error);
    bench_duty duty = {"tcp", refit_publisher_endpoint(tested->publisher), it->versions.bytes,
                       &settings, it->options->netns};
    if (!bench_workers_start(&tested->workers, 1, &duty)) return cannot_start(error);
    return refit_publisher_wait_workers(tested->publisher, 1, WAIT_MS, error);
}

static refit_status raw_open(link_state *it, refit_error *error)
{
    const refit_config *config = &it->options->config;
    it->raw = bench_raw_open(address_of(it), it->versions.bytes, config->broadcast_frame_bytes,
                             config->broadcast_window);
    if (it->raw == NULL)
        return cli_refuse(error, REFIT_ERR_SYSTEM, 0, "no raw socket can be bound to %s",
                          address_of(it));
    bench_duty duty = {"raw", bench_raw_endpoint(it->raw), it->versions.bytes,
                       it->options->settings, it->options->netns};
    if (!bench_workers_start(&it->raw_workers, 1, &duty) || !bench_raw_wait(it->raw, 1))
        return cannot_start(error);
    return REFIT_OK;
}

static refit_status open_all(link_state *it, uint64_t bytes, refit_error *error)
{
    double density = it->options->density > 0 ? it->options->density : default_density;
    BENCH_TRY(bench_versions_open(bytes, density, &it->versions, error));
    BENCH_TRY(keys_open(&it->keys, error));
    BENCH_TRY(raw_open(it, error));
    for (int i = 0; i < CASES; i++)
        BENCH_TRY(case_open(it, i, error));
    return REFIT_OK;
}

static void close_all(link_state *it)
{
    for (int i = 0; i < CASES; i++) {
        bench_workers_stop(&it->cases[i].workers);
        refit_publisher_close(it->cases[i].publisher);
    }
    bench_workers_stop(&it->raw_workers);
    bench_raw_close(it->raw);
    keys_close(&it->keys);
    bench_versions_close(&it->versions);
}

/* ---- The rounds ---- */

static refit_status publish(const link_state *it, link_case *tested, uint32_t round,
                            refit_error *error)
{
    BENCH_TRY(bench_versions_publish(&it->versions, tested->publisher, &tested->last, error));
    if (tested->seconds.cold == 0.0) tested->cold_sent_bytes = tested->last.sent_bytes;
    bench_add(&tested->seconds, round, tested->last.seconds);
    bench_add(&tested->staged, round, tested->last.stats.publish_stage_seconds_last);
    return REFIT_OK;
}

static refit_status run_rounds(link_state *it, uint32_t rounds, refit_error *error)
{
    for (uint32_t version = 1; version <= rounds + BENCH_FRESH_VERSIONS; version++) {
        uint32_t round = bench_versions_round(version);
        bench_versions_next(&it->versions);
        for (int i = 0; i < CASES; i++)
            BENCH_TRY(publish(it, &it->cases[i], round, error));
        double limit = bench_raw_send(it->raw, 1);
        if (limit < 0.0)
            return cli_refuse(error, REFIT_ERR_PEER, 0, "the raw socket's worker was lost");
        bench_add(&it->limit, round, limit);
        if (cli_interrupt_signal() != 0)
            return cli_refuse(error, REFIT_ERR_CANCELLED, 0, "interrupted");
    }
    return REFIT_OK;
}

/* ---- The rows ---- */

static json_t *describe(const link_state *it, int which, uint32_t rounds)
{
    const link_case *tested = &it->cases[which], *plain = &it->cases[which % WAYS],
                    *dense = &it->cases[which - which % WAYS];
    const refit_stats *stats = &tested->last.stats;
    uint64_t bytes = it->versions.bytes;
    json_t *object =
        json_pack("{s:s, s:s, s:b, s:i, s:I, s:f, s:I, s:I, s:I}", "bench", "link", "way",
                  ways[which % WAYS].name, "curve", which >= WAYS, "rounds", (int)rounds, "bytes",
                  (json_int_t)bytes, "density", it->versions.density, "sent_bytes",
                  (json_int_t)tested->last.sent_bytes, "sparse_blocks",
                  (json_int_t)stats->publish_sparse_blocks_last, "dense_blocks",
                  (json_int_t)stats->publish_dense_blocks_last);
    bench_set_seconds(object, "", &tested->seconds);
    json_object_set_new(object, "staged_seconds_median", json_real(bench_median(&tested->staged)));
    bench_set_cold(object, "", &tested->seconds);
    bench_extend(object,
                 json_pack("{s:I, s:f, s:f, s:f}", "cold_sent_bytes",
                           (json_int_t)tested->cold_sent_bytes, "speedup_over_dense",
                           bench_ratio(&dense->seconds, &tested->seconds), "times_without_keys",
                           bench_ratio(&tested->seconds, &plain->seconds), "link_gbit",
                           8.0 * bench_gbps(bytes, &it->limit)));
    bench_machine(object);
    return object;
}

static refit_status measure(link_state *it, uint64_t bytes, refit_error *error)
{
    uint32_t rounds = it->options->rounds > 0 ? it->options->rounds : ROUNDS;
    BENCH_TRY(open_all(it, bytes, error));
    BENCH_TRY(run_rounds(it, rounds, error));
    for (int i = 0; i < CASES; i++)
        bench_print(it->options, describe(it, i, rounds));
    return REFIT_OK;
}

/* ip makes a file for each. A worker that finds none would be awaited in vain. */
static bool has_netns(const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "/run/netns/%s", name);
    return access(path, F_OK) == 0;
}

int bench_link(const bench_options *options)
{
    if (options->netns != NULL && !has_netns(options->netns))
        return cli_complain(CLI_USAGE, "there is no network namespace %s: see ip netns",
                            options->netns);
    refit_error error = {.text = "out of memory"};
    link_state it = {.options = options};
    uint64_t wanted = options->bytes ? options->bytes : default_bytes;
    /* Two slots and a worker's two images for each case, and what the raw socket sends. */
    uint64_t bytes = bench_memory_for(wanted, BENCH_VERSIONS_IMAGES + 4 * CASES + 1);
    cli_interrupt_catch(); /* keys lie in a folder that is to be removed */
    refit_status status = measure(&it, bytes, &error);
    close_all(&it);
    if (cli_interrupt_signal() != 0) return CLI_SIGNAL + cli_interrupt_signal();
    return status == REFIT_OK ? CLI_DONE : cli_complain_error(&error);
}
