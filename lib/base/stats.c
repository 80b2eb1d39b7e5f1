/*
 * The statistics list: merged, and as JSON and as Prometheus text. All walk REFIT_STATS_MAP, so a
 * figure that is added there shows up everywhere; a struct of an older caller is read no further
 * than its size.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <refit/stats.h>

#define NS_PER_S UINT64_C(1000000000)

/* Text that may run out of room: `length` goes on counting. */
typedef struct stats_text {
    char *at;
    size_t room;
    size_t length;
} stats_text;

static void text_add(stats_text *text, const char *format, ...) REFIT_PRINTF(2, 3);

static void text_add(stats_text *text, const char *format, ...)
{
    char *end = text->length < text->room ? text->at + text->length : NULL;
    size_t left = end == NULL ? 0 : text->room - text->length;
    va_list arguments;
    va_start(arguments, format);
    int added = vsnprintf(end, left, format, arguments);
    va_end(arguments);
    if (added > 0) text->length += (size_t)added;
}

void refit_stats_init(refit_stats *stats, size_t size)
{
    if (stats == NULL || size < sizeof stats->size) return;
    memset(stats, 0, size);
    stats->size = size;
}

#define HELD(stats, name)                                                                          \
    ((stats) != NULL && offsetof(refit_stats, name) + sizeof((stats)->name) <= (stats)->size)

/* ---- Merged. A count or a number of bytes adds up and a time does not, but for these: */

/* Waits and page-locks come one after the other. */
static const size_t seconds_that_add_up[] = {
    offsetof(refit_stats, offload_blocked_seconds_last),
    offsetof(refit_stats, restore_blocked_seconds_last),
    offsetof(refit_stats, cycle_blocked_seconds_last),
    offsetof(refit_stats, step_blocked_seconds_last),
    offsetof(refit_stats, host_step_blocked_seconds_last),
    offsetof(refit_stats, host_step_compute_seconds_last),
    offsetof(refit_stats, activation_blocked_seconds_total),
    offsetof(refit_stats, host_pin_seconds),
};

/* They number or name something. */
static const size_t numbers_that_do_not[] = {
    offsetof(refit_stats, host_huge_pages),
    offsetof(refit_stats, publish_version),
    offsetof(refit_stats, receive_version),
};

static bool is_in(const size_t *list, size_t count, size_t offset)
{
    for (size_t at = 0; at < count; at++) {
        if (list[at] == offset) return true;
    }
    return false;
}

#define IS_IN(list, offset) is_in((list), sizeof(list) / sizeof(list)[0], (offset))

static uint64_t merged_u64(size_t offset, uint64_t one, uint64_t other)
{
    if (!IS_IN(numbers_that_do_not, offset)) return one + other;
    return one > other ? one : other;
}

static double merged_f64(size_t offset, double one, double other)
{
    if (IS_IN(seconds_that_add_up, offset)) return one + other;
    return one > other ? one : other;
}

void refit_stats_merge(refit_stats *into, const refit_stats *from)
{
#define MERGE_FIELD(type, name, kind, help)                                                        \
    if (HELD(into, name) && HELD(from, name)) {                                                    \
        into->name = merged_##type(offsetof(refit_stats, name), into->name, from->name);           \
    }
    REFIT_STATS_MAP(MERGE_FIELD)
#undef MERGE_FIELD
}

/* ---- As text */

/* Every f64 is a number of seconds. Whole nanoseconds, because printf would write the decimal point
 * of the locale that the process has set, which neither format allows. */
static void add_seconds(stats_text *text, const char *before, double seconds)
{
    uint64_t ns = seconds > 0 && seconds < 1e10 ? (uint64_t)(seconds * 1e9 + 0.5) : 0;
    text_add(text, "%s%" PRIu64 ".%09" PRIu64, before, ns / NS_PER_S, ns % NS_PER_S);
}

#define PRINT_u64(text, before, value) text_add((text), "%s%" PRIu64, (before), (value))
#define PRINT_f64(text, before, value) add_seconds((text), (before), (value))

size_t refit_stats_json(const refit_stats *stats, char *text, size_t capacity)
{
    stats_text out = {text, text == NULL ? 0 : capacity, 0};
    const char *comma = "";
    text_add(&out, "{");
#define JSON_FIELD(type, name, kind, help)                                                         \
    if (HELD(stats, name)) {                                                                       \
        text_add(&out, "%s\"" #name "\":", comma);                                                 \
        PRINT_##type(&out, "", stats->name);                                                       \
        comma = ",";                                                                               \
    }
    REFIT_STATS_MAP(JSON_FIELD)
#undef JSON_FIELD
    text_add(&out, "}");
    return out.length;
}

size_t refit_stats_prometheus(const refit_stats *stats, char *text, size_t capacity)
{
    stats_text out = {text, text == NULL ? 0 : capacity, 0};
    text_add(&out, "%s", "");
#define PROMETHEUS_FIELD(type, name, kind, help)                                                   \
    if (HELD(stats, name)) {                                                                       \
        text_add(&out, "# HELP refit_" #name " " help "\n# TYPE refit_" #name " " #kind "\n");     \
        PRINT_##type(&out, "refit_" #name " ", stats->name);                                       \
        text_add(&out, "\n");                                                                      \
    }
    REFIT_STATS_MAP(PROMETHEUS_FIELD)
#undef PROMETHEUS_FIELD
    return out.length;
}
