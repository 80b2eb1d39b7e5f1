/*
 * bench_series: times as medians and percentiles, and the printing that the benchmarks share.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "cli.h"

double bench_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void bench_add(bench_series *series, double seconds)
{
    if (series->count < BENCH_ROUNDS_MOST) series->seconds[series->count++] = seconds;
}

static int compare_seconds(const void *a, const void *b)
{
    double left = *(const double *)a;
    double right = *(const double *)b;
    return (left > right) - (left < right);
}

/* The value that `share` of the series does not exceed. */
static double percentile(const bench_series *series, double share)
{
    bench_series sorted = *series;
    if (sorted.count == 0) return 0.0;
    qsort(sorted.seconds, sorted.count, sizeof sorted.seconds[0], compare_seconds);
    uint32_t at = (uint32_t)(share * (double)(sorted.count - 1) + 0.5);
    return sorted.seconds[at];
}

double bench_median(const bench_series *series)
{
    return percentile(series, 0.5);
}

double bench_p95(const bench_series *series)
{
    return percentile(series, 0.95);
}

double bench_ratio(const bench_series *a, const bench_series *b)
{
    bench_series ratios = {0};
    for (uint32_t i = 0; i < a->count && i < b->count; i++)
        bench_add(&ratios, a->seconds[i] / b->seconds[i]);
    return bench_median(&ratios);
}

double bench_gbps(uint64_t bytes, const bench_series *series)
{
    double seconds = bench_median(series);
    return seconds > 0.0 ? (double)bytes / seconds * 1e-9 : 0.0;
}

static void processor_name(char *out, size_t room)
{
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "re");
    snprintf(out, room, "unknown");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        char *colon = strncmp(line, "model name", 10) == 0 ? strchr(line, ':') : NULL;
        if (colon == NULL) continue;
        colon[strcspn(colon, "\n")] = '\0';
        snprintf(out, room, "%s", colon + 2);
        break;
    }
    if (file != NULL) fclose(file);
}

void bench_machine(json_t *object)
{
    char processor[128];
    processor_name(processor, sizeof processor);
    uint64_t memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    json_object_set_new(object, "processor", json_string(processor));
    json_object_set_new(object, "cores", json_integer(sysconf(_SC_NPROCESSORS_ONLN)));
    json_object_set_new(object, "memory_gib", json_integer((json_int_t)(memory >> 30)));
}

void bench_device(json_t *object, const bench_options *options, refit_device *device)
{
    refit_device_info info = {.size = sizeof info};
    refit_error error;
    if (refit_device_describe(device, &info, &error) != REFIT_OK) return;
    if (strcmp(info.kind, "host") == 0) return;
    json_object_set_new(object, "device", json_string(options->device));
    json_object_set_new(object, "device_name", json_string(info.name));
}

/* Four digits that say something, whatever the figure's size. */
static void print_real(const char *key, double value)
{
    if (value >= 1000 || value <= -1000)
        printf("  %-28s %.0f\n", key, value);
    else
        printf("  %-28s %.4g\n", key, value);
}

static void print_value(const char *key, const json_t *value)
{
    if (json_is_real(value)) print_real(key, json_real_value(value));
    if (json_is_integer(value))
        printf("  %-28s %" JSON_INTEGER_FORMAT "\n", key, json_integer_value(value));
    if (json_is_string(value)) printf("  %-28s %s\n", key, json_string_value(value));
    if (json_is_boolean(value)) printf("  %-28s %s\n", key, json_is_true(value) ? "yes" : "no");
}

/* Objects within it are one level deep. */
static void print_member(const char *key, json_t *value)
{
    char full[96];
    const char *inner;
    json_t *member;
    if (!json_is_object(value)) print_value(key, value);
    json_object_foreach(value, inner, member)
    {
        snprintf(full, sizeof full, "%s.%s", key, inner);
        print_value(full, member);
    }
}

void bench_print(const bench_options *options, json_t *object)
{
    const char *key;
    json_t *value;
    if (options->json) {
        json_dumpf(object, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6));
    } else {
        json_object_foreach(object, key, value) print_member(key, value);
    }
    putchar('\n');
    fflush(stdout);
    json_decref(object);
}

refit_status bench_written(refit_error *error)
{
    if (ferror(stdout) == 0) return REFIT_OK;
    return cli_refuse(error, REFIT_ERR_IO, 0, "cannot write to standard output");
}

int bench_input_ended(void)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    return poll(&input, 1, 0) > 0;
}
