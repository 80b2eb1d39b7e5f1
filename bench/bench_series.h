/*
 * bench_series: the seconds of one case, round by round, and the figures made from them.
 *
 * refit.bench.series of the Python package has the same definitions; tests/bench/series.json holds
 * samples and figures that both must give. Independent of where the samples come from.
 */
#ifndef BENCH_SERIES_H
#define BENCH_SERIES_H

#include <jansson.h>
#include <stdint.h>

enum { BENCH_ROUNDS_MOST = 64 };

typedef struct bench_series {
    double cold; /* the first round: memory is taken then, so it is not counted */
    double seconds[BENCH_ROUNDS_MOST]; /* of the counted rounds */
    uint32_t count;
} bench_series;

double bench_now(void);

/* Round 0 is the cold one, later rounds are counted. Of several rounds 0 the first stays. */
void bench_add(bench_series *series, uint32_t round, double seconds);

/* The figures of a series without counted rounds are those of its cold one. */

/* The mean of the two middle values where their number is even. */
double bench_median(const bench_series *series);

/* The smallest value that at least 95 of 100 do not exceed: the largest of fewer than 20. */
double bench_p95(const bench_series *series);

/* The median of a[i] / b[i]: rounds that ran next to each other are compared with each other. */
double bench_ratio(const bench_series *a, const bench_series *b);

/* GB/s (10^9) of `bytes` moved in the median time. */
double bench_gbps(uint64_t bytes, const bench_series *series);

/* Sets PREFIXseconds_median and PREFIXseconds_p95, and cold_PREFIXseconds. */
void bench_set_seconds(json_t *object, const char *prefix, const bench_series *series);
void bench_set_cold(json_t *object, const char *prefix, const bench_series *series);

#endif
