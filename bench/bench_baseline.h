/*
 * bench_baseline: other methods to move the same tensors off the device and back, in turn with
 * refit: the ceiling of the machine, and the methods of trainers.
 *
 * The first round of each is cold: a method that keeps its memory takes it then. A method that
 * takes fresh memory in every round is slow in every round.
 */
#ifndef BENCH_BASELINE_H
#define BENCH_BASELINE_H

#include "bench.h"
#include "bench_case.h"
#include "bench_cuda.h"

typedef struct bench_times {
    bench_series out;
    bench_series back;
    bench_series both;
} bench_times;

/* Moves once out and once back; `round` 0 is the cold one. */
typedef refit_status (*bench_move)(void *self, refit_error *error);
refit_status bench_time_both(void *self, bench_move out, bench_move back, uint32_t round,
                             bench_times *times, refit_error *error);

typedef struct bench_baseline {
    const char *name;
    void *self;
    bench_move out;
    bench_move back;
    void (*close)(void *self);
    bool failed; /* complained of, and not run again */
    bench_times times;
} bench_baseline;

enum { BENCH_BASELINES_MOST = 4 };

/* The first one is the ceiling, the second the per-tensor pageable path. */
typedef struct bench_baselines {
    bench_baseline all[BENCH_BASELINES_MOST];
    uint32_t count;
    uint32_t failures;
    const char *ceiling; /* in words */
    bench_cuda *cuda;    /* NULL: they run on the host */
} bench_baselines;

/* Those that suit the device of `tested`, whose tensors they move too if its memory stays; else
 * they have memory of their own, which they give back as it does. `threads`: of one large copy on
 * the host. On failure, too, bench_baselines_close gives back what there is. */
refit_status bench_baselines_open(bench_baselines *baselines, const bench_options *options,
                                  const bench_case *tested, uint32_t threads, refit_error *error);
void bench_baselines_close(bench_baselines *baselines);

/* Each of them once; not one that has been timed twice and for 25 seconds. One that fails is
 * complained of, and the others go on. */
void bench_baselines_round(bench_baselines *baselines, uint32_t round);

/* The baseline cannot go on, for this reason. */
void bench_baseline_fails(bench_baselines *baselines, bench_baseline *baseline,
                          const refit_error *error);

/* The two kinds. */
refit_status bench_baselines_on_host(bench_baselines *baselines, const bench_options *options,
                                     const bench_case *tested, uint32_t threads,
                                     refit_error *error);
refit_status bench_baselines_on_cuda(bench_baselines *baselines, const bench_case *tested,
                                     refit_error *error);

#endif
