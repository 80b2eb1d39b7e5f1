/*
 * bench delta: the size of an update and the time to encode, decode and apply it, beside the
 * formats of other trainers: one row for each density of synthetic updates, or one for two files.
 * GB/s are of weights, on one thread. Each decoded version is compared with the expected bytes. The
 * kernels are called directly, but "apply_in_place" is a worker's refit_update_apply, through the
 * public API.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "bench_codec.h"
#include "bench_updates.h"
#include "cli.h"
#include "safetensors.h"

enum { ROUNDS = 9, BASELINES = BENCH_CODEC_BASELINES };
static const uint64_t default_bytes = UINT64_C(64) << 20;
static const double densities[] = {0.0001, 0.001, 0.003, 0.006, 0.01, 0.037, 0.063, 0.125, 0.26, 1};

/* The images, what the codecs work with, the way there, and what a trainer and a worker hold: so
 * many times the weights' bytes. */
enum { MEMORY_FACTOR = 14 };

/* ---- Two versions, made up or read from files: all is written before anything is timed ---- */

enum { ALIGNMENT = 64 };

static void pairs_close(bench_pairs *pairs)
{
    free(pairs->all);
    free(pairs->before);
    free(pairs->after);
    free(pairs->into);
    *pairs = (bench_pairs){0};
}

static void add_pair(bench_pairs *pairs, uint64_t bytes, uint32_t width, bool half)
{
    pairs->all[pairs->count++] = (bench_pair){pairs->image_bytes, bytes / width, width, half};
    pairs->image_bytes += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    pairs->bytes += bytes;
    pairs->elements += bytes / width;
}

static refit_status take_images(bench_pairs *pairs, refit_error *error)
{
    unsigned char **images[] = {&pairs->before, &pairs->after, &pairs->into};
    for (int i = 0; i < 3; i++) {
        *images[i] = aligned_alloc(ALIGNMENT, pairs->image_bytes + ALIGNMENT);
        if (*images[i] == NULL)
            return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for the two versions");
        memset(*images[i], 0, pairs->image_bytes + ALIGNMENT);
    }
    return REFIT_OK;
}

/* One bf16 tensor of `bytes`, which pairs_make fills. */
static refit_status pairs_open(uint64_t bytes, bench_pairs *out, refit_error *error)
{
    *out = (bench_pairs){.all = calloc(1, sizeof *out->all)};
    if (out->all == NULL)
        return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for the two versions");
    add_pair(out, bytes / 2 * 2, 2, true);
    refit_status status = take_images(out, error);
    if (status != REFIT_OK) pairs_close(out);
    return status;
}

/* Fills it with an update of that density, see bench_updates.h. */
static void pairs_make(const bench_pairs *pairs, double density)
{
    (void)bench_updates_make(1, density, (uint16_t *)(void *)pairs->before,
                             (uint16_t *)(void *)pairs->after, (size_t)pairs->elements);
}

/* As versions are cut: of what is smaller than a byte, bytes. */
static void add_tensor(bench_pairs *pairs, const refit_tensor *tensor)
{
    uint32_t bits = refit_dtype_bits(tensor->dtype);
    bool half = tensor->dtype == REFIT_BF16 || tensor->dtype == REFIT_F16;
    if (tensor->bytes > 0) add_pair(pairs, tensor->bytes, bits % 8 == 0 ? bits / 8 : 1, half);
}

/* A failure, with the file that it is about. */
static refit_status name_file(refit_status status, const char *path, refit_error *error)
{
    const refit_error unnamed = *error;
    if (status == REFIT_OK) return REFIT_OK;
    return cli_refuse(error, status, unnamed.subsystem, "%s: %s", path, unnamed.text);
}

static refit_status load_image(const char *path, const cli_weights *weights,
                               const bench_pairs *pairs, unsigned char *image, refit_error *error)
{
    const bench_pair *pair = pairs->all;
    for (uint32_t i = 0; i < weights->count; i++) {
        if (weights->tensors[i].bytes == 0) continue;
        refit_status status = cli_weights_load(weights, i, image + pair->offset, error);
        BENCH_TRY(name_file(status, path, error));
        pair++;
    }
    return REFIT_OK;
}

/* Two files that are open. */
typedef struct files {
    const char *from_path, *to_path;
    cli_weights from, to;
} files;

static refit_status load_both(const files *both, bench_pairs *out, refit_error *error)
{
    if (!cli_weights_alike(&both->from, &both->to))
        return cli_refuse(error, REFIT_ERR_INVALID, 0, "the two files have not the same tensors");
    *out = (bench_pairs){.all = calloc((size_t)both->from.count + 1, sizeof *out->all)};
    if (out->all == NULL)
        return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for the two versions");
    for (uint32_t i = 0; i < both->from.count; i++)
        add_tensor(out, &both->from.tensors[i]);
    refit_status status = take_images(out, error);
    if (status == REFIT_OK)
        status = load_image(both->from_path, &both->from, out, out->before, error);
    if (status == REFIT_OK) status = load_image(both->to_path, &both->to, out, out->after, error);
    if (status != REFIT_OK) pairs_close(out);
    return status;
}

/* The tensors of two safetensors files. REFIT_ERR_INVALID: not the same tensors. */
static refit_status pairs_load(const char *from, const char *to, bench_pairs *out,
                               refit_error *error)
{
    files both = {.from_path = from, .to_path = to};
    BENCH_TRY(name_file(cli_weights_open(from, &both.from, error), from, error));
    refit_status status = name_file(cli_weights_open(to, &both.to, error), to, error);
    if (status == REFIT_OK) {
        status = load_both(&both, out, error);
        cli_weights_close(&both.to);
    }
    cli_weights_close(&both.from);
    return status;
}

/* ---- A trainer and a worker in one process, whose engine is bound memory ---- */

/* The time of an update from the worker's verified copy into the engine, with undo data kept.
 * Versions travel through inproc, so that the worker has a copy of its own as one on another
 * machine has. The trainer commits on a thread; what is measured runs while it waits. */

enum { WAIT_MS = 60000, NAME_ROOM = 16 };

typedef struct piece {
    char name[NAME_ROOM];
} piece;

typedef struct bound_engine {
    const bench_pairs *pairs;
    refit_publisher *publisher;
    refit_subscriber *subscriber;
    piece *names;
    refit_tensor *tensors;
    refit_destination *places;
} bound_engine;

static refit_dtype dtype_of(const bench_pair *pair)
{
    switch (pair->width) {
    case 1: return REFIT_U8;
    case 2: return pair->half ? REFIT_BF16 : REFIT_I16;
    case 4: return REFIT_F32;
    default: return REFIT_F64;
    }
}

static void describe(bound_engine *it)
{
    for (uint32_t i = 0; i < it->pairs->count; i++) {
        const bench_pair *pair = &it->pairs->all[i];
        snprintf(it->names[i].name, NAME_ROOM, "%u", i);
        it->tensors[i] = (refit_tensor){.size = sizeof(refit_tensor),
                                        .name = it->names[i].name,
                                        .dtype = dtype_of(pair),
                                        .rank = 1,
                                        .shape = {pair->elements},
                                        .bytes = pair->elements * pair->width,
                                        .alias_of = REFIT_NO_ALIAS};
        it->places[i] = (refit_destination){.size = sizeof(refit_destination),
                                            .name = it->names[i].name,
                                            .memory = it->pairs->into + pair->offset,
                                            .bytes = it->tensors[i].bytes,
                                            .dtype = it->tensors[i].dtype};
    }
}

static refit_status open_ends(bound_engine *it, const bench_options *options, refit_error *error)
{
    refit_config config = options->config;
    config.broadcast_shm = REFIT_SHM_OFF;
    config.broadcast_slots = 1;
    BENCH_TRY(refit_publisher_open("inproc://bench-bound", &config, &it->publisher, error));
    BENCH_TRY(refit_publisher_declare(it->publisher, it->tensors, it->pairs->count, error));
    BENCH_TRY(refit_subscriber_open(refit_publisher_endpoint(it->publisher), &config,
                                    &it->subscriber, error));
    BENCH_TRY(refit_subscriber_bind(it->subscriber, it->places, it->pairs->count, error));
    return refit_publisher_wait_workers(it->publisher, 1, WAIT_MS, error);
}

static void bound_close(bound_engine *bound)
{
    if (bound == NULL) return;
    refit_subscriber_close(bound->subscriber);
    refit_publisher_close(bound->publisher);
    free(bound->places);
    free(bound->tensors);
    free(bound->names);
    free(bound);
}

/* Binds pairs->into, which stay the caller's. NULL is allowed for close. */
static refit_status bound_open(const bench_options *options, const bench_pairs *pairs,
                               bound_engine **out, refit_error *error)
{
    bound_engine *it = calloc(1, sizeof *it);
    if (it == NULL) return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for a worker");
    it->pairs = pairs;
    it->names = calloc(pairs->count, sizeof *it->names);
    it->tensors = calloc(pairs->count, sizeof *it->tensors);
    it->places = calloc(pairs->count, sizeof *it->places);
    bool taken = it->names != NULL && it->tensors != NULL && it->places != NULL;
    if (taken) describe(it);
    refit_status status =
        taken ? open_ends(it, options, error)
              : cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for a list of tensors");
    if (status == REFIT_OK) {
        *out = it;
    } else {
        bound_close(it);
    }
    return status;
}

typedef struct commit {
    refit_publisher *publisher;
    refit_status status;
    refit_error error;
} commit;

static void *run_commit(void *user)
{
    commit *it = user;
    it->status = refit_publisher_commit(it->publisher, &it->error);
    return NULL;
}

static refit_status apply(refit_subscriber *subscriber, double *seconds, refit_error *error)
{
    refit_update *update;
    BENCH_TRY(refit_subscriber_next(subscriber, WAIT_MS, &update, error));
    double start = bench_now();
    refit_status status = refit_update_apply(update, NULL, error);
    *seconds = bench_now() - start;
    if (status == REFIT_OK) status = refit_update_accept(update, error);
    refit_update_close(update);
    return status;
}

static refit_status write_all(const bound_engine *it, const unsigned char *image,
                              refit_error *error)
{
    BENCH_TRY(refit_publisher_begin(it->publisher, 0, error));
    for (uint32_t i = 0; i < it->pairs->count; i++)
        BENCH_TRY(refit_publisher_write(it->publisher, i, image + it->pairs->all[i].offset,
                                        it->tensors[i].bytes, NULL, REFIT_STREAM_NONE, error));
    return REFIT_OK;
}

static refit_status bring(bound_engine *it, const unsigned char *image, double *seconds,
                          refit_error *error)
{
    pthread_t thread;
    commit way = {.publisher = it->publisher};
    BENCH_TRY(write_all(it, image, error));
    if (pthread_create(&thread, NULL, run_commit, &way) != 0)
        return cli_refuse(error, REFIT_ERR_SYSTEM, 0, "no thread for a trainer");
    refit_status status = apply(it->subscriber, seconds, error);
    pthread_join(thread, NULL);
    if (status == REFIT_OK && way.status != REFIT_OK) *error = way.error;
    return status == REFIT_OK ? way.status : status;
}

/* Brings pairs->before into the engine, and then pairs->after: `seconds` of the apply of this one.
 */
static refit_status bound_run(bound_engine *bound, double *seconds, refit_error *error)
{
    BENCH_TRY(bring(bound, bound->pairs->before, seconds, error));
    return bring(bound, bound->pairs->after, seconds, error);
}

/* ---- The codecs ---- */

/* The figures of one codec. */
typedef struct result {
    uint64_t bytes;
    bench_series moves[BENCH_DELTA_MOVES];
} result;

typedef struct run_state {
    const bench_pairs *pairs;
    bench_coder coder;
    bound_engine *bound;
    uint64_t changed, same, sparse, dense;
    result refit, baselines[BASELINES];
    bench_series in_place;
} run_state;

/* ---- The rounds ---- */

static refit_status one_move(run_state *run, const bench_codec *codec, uint32_t at, uint32_t round,
                             result *out, refit_error *error)
{
    const bench_pairs *pairs = run->pairs;
    const bench_delta_move *move = &codec->moves[at];
    if (move->kind == BENCH_APPLIES) memcpy(pairs->into, pairs->before, pairs->image_bytes);
    if (move->kind == BENCH_COPIES) memset(pairs->into, 0, pairs->image_bytes);
    double start = bench_now();
    bool done = move->run(&run->coder, pairs);
    bench_add(&out->moves[at], round, bench_now() - start);
    if (done && move->kind != BENCH_ENCODES)
        done = memcmp(pairs->into, pairs->after, pairs->image_bytes) == 0;
    if (done) return REFIT_OK;
    return cli_refuse(error, REFIT_ERR_CORRUPT, 0, "%s: %s does not give the version it should",
                      codec->name, move->name);
}

static refit_status one_codec(run_state *run, const bench_codec *codec, uint32_t round, result *out,
                              refit_error *error)
{
    for (uint32_t i = 0; codec->moves[i].name != NULL; i++) {
        BENCH_TRY(one_move(run, codec, i, round, out, error));
    }
    out->bytes = run->coder.bytes;
    return REFIT_OK;
}

static refit_status one_apply(run_state *run, uint32_t round, refit_error *error)
{
    const bench_pairs *pairs = run->pairs;
    double seconds = 0.0;
    BENCH_TRY(bound_run(run->bound, &seconds, error));
    bench_add(&run->in_place, round, seconds);
    if (memcmp(pairs->into, pairs->after, pairs->image_bytes) == 0) return REFIT_OK;
    return cli_refuse(error, REFIT_ERR_CORRUPT, 0, "what was applied is not the version");
}

static refit_status one_round(run_state *run, uint32_t round, refit_error *error)
{
    BENCH_TRY(one_apply(run, round, error));
    BENCH_TRY(one_codec(run, &bench_codec_refit, round, &run->refit, error));
    run->changed = run->coder.changed;
    run->same = run->coder.same;
    run->sparse = run->coder.sparse;
    run->dense = run->coder.dense;
    for (int i = 0; i < BASELINES; i++) {
        BENCH_TRY(one_codec(run, &bench_codec_baselines[i], round, &run->baselines[i], error));
        if (run->coder.changed == run->changed) continue;
        return cli_refuse(error, REFIT_ERR_CORRUPT, 0, "%s counts other changes than refit",
                          bench_codec_baselines[i].name);
    }
    return REFIT_OK;
}

static refit_status run_rounds(run_state *run, uint32_t rounds, refit_error *error)
{
    BENCH_TRY(one_round(run, 0, error));
    if (run->changed == 0)
        return cli_refuse(error, REFIT_ERR_INVALID, 0, "the two versions are the same");
    for (uint32_t i = 1; i <= rounds; i++)
        BENCH_TRY(one_round(run, i, error));
    return REFIT_OK;
}

/* ---- The row ---- */

static void set_real(json_t *object, const char *name, const char *unit, double value)
{
    char key[64];
    snprintf(key, sizeof key, "%s%s", name, unit);
    json_object_set_new(object, key, json_real(value));
}

static void add_result(json_t *object, const run_state *run, const bench_codec *codec,
                       const result *of)
{
    set_real(object, "bytes_per_changed", "", (double)of->bytes / (double)run->changed);
    for (uint32_t i = 0; codec->moves[i].name != NULL; i++)
        set_real(object, codec->moves[i].name, "_gbps",
                 bench_gbps(run->pairs->bytes, &of->moves[i]));
    for (uint32_t i = 0; codec->moves[i].name != NULL; i++)
        set_real(object, codec->moves[i].name, "_seconds_p95", bench_p95(&of->moves[i]));
}

/* Ratios above 1 are for refit: it sends less, or is faster, without digests and in place as the
 * other is. */
static json_t *baseline_row(const run_state *run, int which)
{
    const result *refit = &run->refit, *baseline = &run->baselines[which];
    uint32_t apply = 0;
    while (strcmp(bench_codec_refit.moves[apply].name, "apply") != 0)
        apply++;
    json_t *object = json_object();
    add_result(object, run, &bench_codec_baselines[which], baseline);
    set_real(object, "size_ratio", "", (double)baseline->bytes / (double)refit->bytes);
    set_real(object, "encode_ratio", "", bench_ratio(&baseline->moves[0], &refit->moves[0]));
    set_real(object, "decode_ratio", "", bench_ratio(&baseline->moves[1], &refit->moves[apply]));
    return object;
}

static void report(const bench_options *options, const run_state *run, uint32_t rounds)
{
    const bench_pairs *pairs = run->pairs;
    json_t *object = json_pack("{s:s, s:i, s:I, s:I, s:I, s:f}", "bench", "delta", "rounds",
                               (int)rounds, "bytes", (json_int_t)pairs->bytes, "elements",
                               (json_int_t)pairs->elements, "changed", (json_int_t)run->changed,
                               "density", (double)run->changed / (double)pairs->elements);
    add_result(object, run, &bench_codec_refit, &run->refit);
    set_real(object, "apply_in_place", "_gbps", bench_gbps(pairs->bytes, &run->in_place));
    set_real(object, "apply_in_place", "_seconds_p95", bench_p95(&run->in_place));
    json_object_set_new(object, "mode_mix",
                        json_pack("{s:I, s:I, s:I}", "same", (json_int_t)run->same, "sparse",
                                  (json_int_t)run->sparse, "dense", (json_int_t)run->dense));
    for (int i = 0; i < BASELINES; i++)
        json_object_set_new(object, bench_codec_baselines[i].name, baseline_row(run, i));
    if (options->from != NULL) {
        json_object_set_new(object, "from", json_string(options->from));
        json_object_set_new(object, "to", json_string(options->to));
    }
    bench_machine(object);
    bench_print(options, object);
}

static refit_status measure(const bench_options *options, const bench_pairs *pairs,
                            refit_error *error)
{
    run_state run = {.pairs = pairs};
    uint32_t rounds = options->rounds > 0 ? options->rounds : ROUNDS;
    refit_status status = REFIT_OK;
    if (!bench_coder_open(&run.coder, pairs))
        status = cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0, "no memory for the benchmark itself");
    if (status == REFIT_OK) status = bound_open(options, pairs, &run.bound, error);
    if (status == REFIT_OK) status = run_rounds(&run, rounds, error);
    if (status == REFIT_OK) {
        report(options, &run, rounds);
        status = bench_written(error);
    }
    bound_close(run.bound);
    bench_coder_close(&run.coder);
    return status;
}

static int measure_files(const bench_options *options)
{
    refit_error error = {.text = "out of memory"};
    bench_pairs pairs = {0};
    if (pairs_load(options->from, options->to, &pairs, &error) != REFIT_OK)
        return cli_complain_file(&error);
    refit_status status = pairs.count == 0
                              ? cli_refuse(&error, REFIT_ERR_INVALID, 0, "the files are empty")
                              : measure(options, &pairs, &error);
    pairs_close(&pairs);
    if (status == REFIT_OK) return CLI_DONE;
    return status == REFIT_ERR_INVALID ? cli_complain_file(&error) : cli_complain_error(&error);
}

static int measure_densities(const bench_options *options)
{
    refit_error error = {.text = "out of memory"};
    bench_pairs pairs;
    uint64_t wanted = options->bytes ? options->bytes : default_bytes;
    uint64_t bytes = bench_memory_for(wanted, MEMORY_FACTOR);
    refit_status status = pairs_open(bytes, &pairs, &error);
    if (status != REFIT_OK) return cli_complain_error(&error);
    for (size_t i = 0; status == REFIT_OK && i < sizeof densities / sizeof *densities; i++) {
        pairs_make(&pairs, densities[i]);
        status = measure(options, &pairs, &error);
    }
    pairs_close(&pairs);
    return status == REFIT_OK ? CLI_DONE : cli_complain_error(&error);
}

int bench_delta(const bench_options *options)
{
    if ((options->from == NULL) != (options->to == NULL))
        return cli_complain(CLI_USAGE, "--from and --to are two versions: give both or neither");
    return options->from != NULL ? measure_files(options) : measure_densities(options);
}
