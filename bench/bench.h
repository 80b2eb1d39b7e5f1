/*
 * bench: refit measured beside its ceilings and other methods, in one run on one machine.
 *
 * Every figure of speed stands beside a baseline that was measured in turn with it, and is given as
 * a ratio. Figures are medians and 95th percentiles, never the best round. The first use is
 * reported apart from the steady state.
 */
#ifndef BENCH_H
#define BENCH_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <refit.h>

#include "bench_series.h"
#include "settings.h"

enum { BENCH_COUNTS_MOST = 8 };

typedef struct bench_options {
    bool json;             /* objects instead of a table */
    uint64_t bytes;        /* of tensors; 0: the benchmark's default */
    uint32_t rounds;       /* counted ones; one more comes first as a warm-up */
    const char *device;    /* a spec: "host" or "cuda:N" */
    const char *tensors;   /* a list's name, or a file's; NULL: what suits the device */
    const char *from, *to; /* bench_delta: two safetensors files; NULL: made-up updates */
    double density;        /* of updates; 0: the benchmark's default */
    uint32_t workers[BENCH_COUNTS_MOST]; /* of bench_broadcast, up to a 0; none: its default */
    const char *bind;                    /* bench_link: where; NULL: loopback */
    const char *netns; /* bench_link: the network namespace of the workers; NULL: this one */
    const cli_settings *settings; /* what `config` was made from */
    refit_config config;
} bench_options;

/* The benchmarks; each prints its results and returns an exit status. */
int bench_offload(const bench_options *options);
int bench_remap(const bench_options *options);
int bench_handover(const bench_options *options);
int bench_broadcast(const bench_options *options);
int bench_link(const bench_options *options);
int bench_pin(const bench_options *options);
int bench_delta(const bench_options *options);

/* The tensors that bench_offload takes, one a line: their name and their bytes. */
int bench_show_list(const bench_options *options);

/* Declares BENCH_TENSORS equal bf16 tensors of `bytes` in all. */
enum { BENCH_TENSORS = 16 };
refit_status bench_declare(refit_publisher *publisher, uint64_t bytes, refit_error *error);

/* A worker process of a benchmark: takes versions of `bytes` until its standard input ends. `kind`:
 * "shm", "tcp", "raw", or the spec of a GPU to read them on. */
int bench_worker(const char *kind, const char *endpoint, const char *bytes,
                 const bench_options *options);

#define BENCH_TRY(call)                                                                            \
    do {                                                                                           \
        refit_status status_ = (call);                                                             \
        if (status_ != REFIT_OK) return status_;                                                   \
    } while (0)

/* ---- bench_report.c ---- */

/* Memory for `copies` of the tensors, all that the benchmark and its baselines hold at once:
 * returns `wanted`, or the bytes that fit, and says on stderr that they are fewer. UINT64_MAX: as
 * many bytes as fit. */
uint64_t bench_memory_for(uint64_t wanted, uint64_t copies);

/* For a list that cannot be made smaller. REFIT_ERR_HOST_MEMORY if it does not fit. */
refit_status bench_memory_check(uint64_t bytes, uint64_t copies, refit_error *error);

/* This machine, for the reader of a figure: processor, cores, memory. */
void bench_machine(json_t *object);

/* The device that was measured, unless it is the host: its spec, name and driver. */
void bench_device(json_t *object, const bench_options *options, refit_device *device);

/* Moves the members of `more` after those of `object`. */
void bench_extend(json_t *object, json_t *more);

/* One object on one line, or its members as a table of two columns. Takes `object`. */
void bench_print(const bench_options *options, json_t *object);

/* REFIT_ERR_IO if the output could not be written: its reader has gone, so the bench can stop. */
refit_status bench_written(refit_error *error);

/* ---- bench_allocations.c ---- */

/* Counts the allocations of refit from now on; call it before the first refit object is opened.
 * False: refit takes no allocator now. */
bool bench_count_allocations(void);

/* How many there were. Any thread. */
uint64_t bench_allocations(void);

/* ---- bench_list.c ---- */

enum { BENCH_NAME = 96 };
typedef struct bench_tensor {
    char name[BENCH_NAME];
    uint64_t bytes;
} bench_tensor;

typedef struct bench_list {
    bench_tensor *all;
    uint32_t count;
    uint32_t room;
    uint64_t bytes;   /* of all together */
    const char *name; /* what it was asked for by */
    bool apart;       /* other memory lies between them on the device */
    bool from_file;   /* and not the list of a model, which can be cut */
} bench_list;

/* The optimizer states of a model: "qwen3-0.6b" (620 tensors), "qwen2.5-1.5b", "qwen2.5-3b"; its
 * weights: "qwen2.5-1.5b-weights"; "small"; or what a file lists. Of a model as many bytes as are
 * asked for, 0: all. */
refit_status bench_list_open(const char *which, uint64_t bytes, bench_list *out,
                             refit_error *error);
void bench_list_close(bench_list *list);

/* ---- bench_limit.c: the machine's own ceilings ---- */

typedef struct bench_limit bench_limit;

/* Two large buffers, huge pages where they are to be had, and the fastest copy loop found for them.
 */
bench_limit *bench_limit_open(uint64_t bytes, uint32_t threads);
void bench_limit_close(bench_limit *limit);

/* Copies all bytes once with all threads; seconds. */
double bench_limit_copy(bench_limit *limit);

/* Reads all bytes once with a fast hash, on one thread; seconds. */
double bench_limit_digest(bench_limit *limit);
const char *bench_limit_loop(const bench_limit *limit);

#endif
