/*
 * bench_step: what of the way back shows behind a training step that is twice as long.
 *
 * `behind a pause`: the CPU is idle meanwhile; exposed is the time for which refit's calls held the
 * caller. `behind work` (a GPU only): the caller's stream is busy writing device memory all the
 * while and joins the way back at its end; exposed is by how much that made it later.
 */
#ifndef BENCH_STEP_H
#define BENCH_STEP_H

#include "bench.h"
#include "bench_case.h"
#include "bench_cuda.h"

/* Both begin and end with the tensors on the device. `back`: seconds of a way back by itself. */
refit_status bench_behind_pause(bench_case *it, double back, bench_series *exposed,
                                refit_error *error);
refit_status bench_behind_work(bench_case *it, bench_cuda *cuda, double back, bench_series *exposed,
                               refit_error *error);

#endif
