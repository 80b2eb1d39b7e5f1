/*
 * bench_series: medians, percentiles and ratios of samples. A series is sorted in a copy, because
 * the order of its rounds pairs it with other series.
 */
#include "bench_series.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

double bench_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void bench_add(bench_series *series, uint32_t round, double seconds)
{
    if (round > 0 && series->count < BENCH_ROUNDS_MOST) series->seconds[series->count++] = seconds;
    if (round == 0 && series->cold == 0.0) series->cold = seconds;
}

static int compare_seconds(const void *a, const void *b)
{
    double left = *(const double *)a;
    double right = *(const double *)b;
    return (left > right) - (left < right);
}

/* The counted rounds in order of size, or the cold one. */
static bench_series sorted(const bench_series *series)
{
    bench_series copy = *series;
    if (copy.count == 0) copy.seconds[copy.count++] = copy.cold;
    qsort(copy.seconds, copy.count, sizeof copy.seconds[0], compare_seconds);
    return copy;
}

double bench_median(const bench_series *series)
{
    bench_series all = sorted(series);
    return (all.seconds[(all.count - 1) / 2] + all.seconds[all.count / 2]) / 2;
}

double bench_p95(const bench_series *series)
{
    bench_series all = sorted(series);
    return all.seconds[(all.count * 95 + 99) / 100 - 1];
}

double bench_ratio(const bench_series *a, const bench_series *b)
{
    bench_series ratios = {.cold = b->cold > 0.0 ? a->cold / b->cold : 0.0};
    for (uint32_t i = 0; i < a->count && i < b->count; i++)
        bench_add(&ratios, i + 1, a->seconds[i] / b->seconds[i]);
    return bench_median(&ratios);
}

double bench_gbps(uint64_t bytes, const bench_series *series)
{
    double seconds = bench_median(series);
    return seconds > 0.0 ? (double)bytes / seconds * 1e-9 : 0.0;
}

static void set_figure(json_t *object, const char *first, const char *prefix, const char *last,
                       double value)
{
    char key[64];
    snprintf(key, sizeof key, "%s%s%s", first, prefix, last);
    json_object_set_new(object, key, json_real(value));
}

void bench_set_seconds(json_t *object, const char *prefix, const bench_series *series)
{
    set_figure(object, "", prefix, "seconds_median", bench_median(series));
    set_figure(object, "", prefix, "seconds_p95", bench_p95(series));
}

void bench_set_cold(json_t *object, const char *prefix, const bench_series *series)
{
    set_figure(object, "cold_", prefix, "seconds", series->cold);
}
