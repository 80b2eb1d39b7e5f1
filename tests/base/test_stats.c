/* Statistics as text: every figure once, well-formed, cut short whatever the size. */
#include <refit/stats.h>

#include "tests/support/test.h"

static refit_stats sample(void)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    stats.offload_count = UINT64_MAX;
    stats.offload_seconds_last = 1.25;
    stats.cycle_wait_seconds_last = 1234567.000000001;
    return stats;
}

TEST(every_figure_is_in_the_json_once)
{
    refit_stats stats = sample();
    char text[8192];
    size_t length = refit_stats_json(&stats, text, sizeof text);
    assert_int_equal(length, strlen(text));
    assert_int_equal(strncmp(text, "{\"offload_regions\":0,", 21), 0);
    assert_int_equal(text[length - 1], '}');
    assert_null(strchr(text, '\n'));
#define CHECK_FIGURE(type, name, kind, help)                                                       \
    assert_non_null(strstr(text, "\"" #name "\":"));                                               \
    assert_null(strstr(strstr(text, "\"" #name "\":") + 1, "\"" #name "\":"));
    REFIT_STATS_MAP(CHECK_FIGURE)
#undef CHECK_FIGURE
    assert_non_null(strstr(text, "\"offload_count\":18446744073709551615,"));
    assert_non_null(strstr(text, "\"offload_seconds_last\":1.250000000,"));
    assert_non_null(strstr(text, "\"cycle_wait_seconds_last\":1234567.000000001,"));
    assert_int_equal(text[strlen(text) - 1], '}');
}

TEST(every_figure_is_in_the_prometheus_text)
{
    refit_stats stats = sample();
    char text[16384];
    size_t length = refit_stats_prometheus(&stats, text, sizeof text);
    assert_int_equal(length, strlen(text));
    assert_int_equal(text[length - 1], '\n');
#define CHECK_FIGURE(type, name, kind, help)                                                       \
    assert_non_null(strstr(text, "# HELP refit_" #name " " help "\n# TYPE refit_" #name " " #kind  \
                                 "\nrefit_" #name " "));
    REFIT_STATS_MAP(CHECK_FIGURE)
#undef CHECK_FIGURE
    assert_non_null(strstr(text, "\nrefit_offload_seconds_last 1.250000000\n"));
}

typedef size_t (*write_fn)(const refit_stats *stats, char *text, size_t capacity);

/* At every capacity: the length in full, and as much of the text as fits. */
static void check_cuts(write_fn write)
{
    refit_stats stats = sample();
    char whole[16384];
    char cut[16384];
    size_t length = write(&stats, whole, sizeof whole);
    assert_int_equal(write(&stats, NULL, 0), length);
    for (size_t capacity = 1; capacity <= length + 2; capacity++) {
        memset(cut, '#', sizeof cut);
        assert_int_equal(write(&stats, cut, capacity), length);
        size_t fits = capacity - 1 < length ? capacity - 1 : length;
        assert_memory_equal(cut, whole, fits);
        assert_int_equal(cut[fits], '\0');
        assert_int_equal(cut[capacity], '#');
    }
}

TEST(text_that_does_not_fit_is_cut_and_terminated)
{
    check_cuts(refit_stats_json);
    check_cuts(refit_stats_prometheus);
}

/* An older caller's struct ends early; beyond its size nothing is read or written. */
TEST(a_shorter_struct_shows_what_it_has)
{
    refit_stats stats;
    char text[256];
    memset(&stats, 0xAB, sizeof stats);
    refit_stats_init(&stats, offsetof(refit_stats, offload_count));
    assert_int_equal(((unsigned char *)&stats)[offsetof(refit_stats, offload_count)], 0xAB);
    (void)refit_stats_json(&stats, text, sizeof text);
    assert_string_equal(text, "{\"offload_regions\":0,\"offload_copies_per_cycle\":0}");
}

TEST(no_statistics_are_an_empty_text)
{
    char text[16];
    assert_int_equal(refit_stats_json(NULL, text, sizeof text), 2);
    assert_string_equal(text, "{}");
    assert_int_equal(refit_stats_prometheus(NULL, text, sizeof text), 0);
    assert_string_equal(text, "");
    assert_int_equal(refit_stats_json(NULL, NULL, sizeof text), 2);
    assert_int_equal(refit_stats_prometheus(NULL, NULL, sizeof text), 0);
}

/* Two devices work side by side, and the caller waits for one after the other. */
TEST(figures_of_two_objects_are_merged)
{
    refit_stats one = sample(), other;
    refit_stats_init(&other, sizeof other);
    one.offload_count = 3, other.offload_count = 4;
    one.host_bytes = 100, other.host_bytes = 20;
    one.host_huge_pages = other.host_huge_pages = 1;
    one.publish_version = 7;
    other.offload_seconds_last = 1.5;
    one.offload_blocked_seconds_last = other.offload_blocked_seconds_last = 0.5;
    one.host_pin_seconds = 2, other.host_pin_seconds = 0.25;
    refit_stats_merge(&one, &other);
    assert_int_equal(one.offload_count, 7);
    assert_int_equal(one.host_bytes, 120);
    assert_int_equal(one.host_huge_pages, 1);
    assert_int_equal(one.publish_version, 7);
    assert_true(one.offload_seconds_last == 1.5);
    assert_true(one.offload_blocked_seconds_last == 1.0);
    assert_true(one.host_pin_seconds == 2.25);
    assert_true(one.cycle_wait_seconds_last == 1234567.000000001);
    refit_stats_merge(&one, NULL);
    refit_stats_merge(NULL, &other);
    assert_int_equal(one.offload_count, 7);
}

TEST(what_a_shorter_struct_lacks_is_not_merged)
{
    refit_stats whole = sample(), brief;
    memset(&brief, 0xAB, sizeof brief);
    refit_stats_init(&brief, offsetof(refit_stats, offload_count));
    brief.offload_regions = 2;
    whole.offload_regions = 1;
    refit_stats_merge(&whole, &brief);
    assert_int_equal(whole.offload_regions, 3);
    assert_true(whole.offload_count == UINT64_MAX);
    refit_stats_merge(&brief, &whole);
    assert_int_equal(brief.offload_regions, 5);
    assert_int_equal(((unsigned char *)&brief)[offsetof(refit_stats, offload_count)], 0xAB);
}

int main(void)
{
    return test_run("stats");
}
