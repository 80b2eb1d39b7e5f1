/*
 * bench_report: how results are printed, which machine and device they are of, and how much memory
 * a benchmark may take there. Free memory is checked as the library checks it for its arena.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "bench.h"
#include "cli.h"
#include "memory/budget.h"
#include "progress.h"

/* ---- Memory ---- */

/* Three quarters of what is free: the rest is for the process itself and for other processes. */
static uint64_t room(void)
{
    refit_config config;
    rft_budget budget;
    refit_config_init(&config, sizeof config);
    if (rft_budget_read("", &config, 0, 0, &budget, NULL) != REFIT_OK) return UINT64_MAX;
    return budget.free_bytes / 4 * 3;
}

uint64_t bench_memory_for(uint64_t wanted, uint64_t copies)
{
    char asked[CLI_SIZE_TEXT], there[CLI_SIZE_TEXT], taken[CLI_SIZE_TEXT];
    const uint64_t fits = room() / copies;
    if (wanted <= fits) return wanted;
    if (wanted != UINT64_MAX) {
        (void)cli_complain(CLI_DONE,
                           "%s are taken %" PRIu64 " times, and there is room for %s: %s are "
                           "measured",
                           cli_size_text(wanted, asked), copies,
                           cli_size_text(fits * copies, there), cli_size_text(fits, taken));
    }
    return fits;
}

refit_status bench_memory_check(uint64_t bytes, uint64_t copies, refit_error *error)
{
    char asked[CLI_SIZE_TEXT], there[CLI_SIZE_TEXT];
    const uint64_t fits = room() / copies;
    if (bytes <= fits) return REFIT_OK;
    return cli_refuse(error, REFIT_ERR_HOST_MEMORY, 0,
                      "%s of tensors are taken %" PRIu64 " times, and there is room for %s: list "
                      "less, or end something",
                      cli_size_text(bytes, asked), copies, cli_size_text(fits * copies, there));
}

/* ---- The machine and the device ---- */

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

/* ---- Results ---- */

void bench_extend(json_t *object, json_t *more)
{
    json_object_update(object, more);
    json_decref(more);
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
