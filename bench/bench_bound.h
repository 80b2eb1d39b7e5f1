/* bench_bound: a trainer and a worker in one process, whose engine is bound memory: what an update
 * costs from the worker's verified copy into the engine, with the way back kept. */
#ifndef BENCH_BOUND_H
#define BENCH_BOUND_H

#include "bench.h"
#include "bench_pairs.h"

typedef struct bench_bound bench_bound;

/* Binds pairs->into, which stay the caller's. NULL is allowed for close. */
refit_status bench_bound_open(const bench_options *options, const bench_pairs *pairs,
                              bench_bound **out, refit_error *error);
void bench_bound_close(bench_bound *bound);

/* Brings pairs->before into the engine, and then pairs->after: `seconds` of the apply of this one.
 */
refit_status bench_bound_run(bench_bound *bound, double *seconds, refit_error *error);

#endif
