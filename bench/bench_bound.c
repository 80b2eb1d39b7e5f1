/* bench_bound: versions travel through inproc, so that the worker has a copy of its own as one on
 * another machine has. The trainer commits on a thread; what is measured runs while it waits. */
#include "bench_bound.h"

#include <pthread.h>
#include <stdlib.h>

#include "cli.h"

enum { WAIT_MS = 60000, NAME_ROOM = 16 };

typedef struct piece {
    char name[NAME_ROOM];
} piece;

struct bench_bound {
    const bench_pairs *pairs;
    refit_publisher *publisher;
    refit_subscriber *subscriber;
    piece *names;
    refit_tensor *tensors;
    refit_destination *places;
};

/* ---- Opening ---- */

static refit_dtype dtype_of(const bench_pair *pair)
{
    switch (pair->width) {
    case 1: return REFIT_U8;
    case 2: return pair->half ? REFIT_BF16 : REFIT_I16;
    case 4: return REFIT_F32;
    default: return REFIT_F64;
    }
}

static void describe(bench_bound *it)
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

static refit_status open_ends(bench_bound *it, const bench_options *options, refit_error *error)
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

refit_status bench_bound_open(const bench_options *options, const bench_pairs *pairs,
                              bench_bound **out, refit_error *error)
{
    bench_bound *it = calloc(1, sizeof *it);
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
        bench_bound_close(it);
    }
    return status;
}

void bench_bound_close(bench_bound *bound)
{
    if (bound == NULL) return;
    refit_subscriber_close(bound->subscriber);
    refit_publisher_close(bound->publisher);
    free(bound->places);
    free(bound->tensors);
    free(bound->names);
    free(bound);
}

/* ---- A version ---- */

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

static refit_status write_all(const bench_bound *it, const unsigned char *image, refit_error *error)
{
    BENCH_TRY(refit_publisher_begin(it->publisher, 0, error));
    for (uint32_t i = 0; i < it->pairs->count; i++)
        BENCH_TRY(refit_publisher_write(it->publisher, i, image + it->pairs->all[i].offset,
                                        it->tensors[i].bytes, NULL, REFIT_STREAM_NONE, error));
    return REFIT_OK;
}

static refit_status bring(bench_bound *it, const unsigned char *image, double *seconds,
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

refit_status bench_bound_run(bench_bound *bound, double *seconds, refit_error *error)
{
    BENCH_TRY(bring(bound, bound->pairs->before, seconds, error));
    return bring(bound, bound->pairs->after, seconds, error);
}
