/* Statistics: one list as struct, JSON and Prometheus text; older callers and short buffers are
 * safe. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <refit/stats.h>

static void json_names_every_figure(void **state)
{
    (void)state;
    char text[8192];
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    stats.offload_bytes_last = UINT64_MAX;
    stats.join_seconds_last = 0.25;
    size_t length = refit_stats_json(&stats, text, sizeof text);
    assert_true(length < sizeof text);
    assert_int_equal(length, strlen(text));
    assert_non_null(strstr(text, "\"offload_bytes_last\":18446744073709551615,"));
    assert_non_null(strstr(text, "\"join_seconds_last\":0.25}"));
#define CHECK_FIELD(type, name, kind, help) assert_non_null(strstr(text, "\"" #name "\":"));
    REFIT_STATS_MAP(CHECK_FIELD)
#undef CHECK_FIELD
}

static void prometheus_text_has_help_type_and_value(void **state)
{
    (void)state;
    char text[16384];
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    stats.cycles = 7;
    assert_true(refit_stats_prometheus(&stats, text, sizeof text) < sizeof text);
    assert_non_null(strstr(text, "# HELP refit_cycles refit cycles completed\n"
                                 "# TYPE refit_cycles counter\nrefit_cycles 7\n"));
}

static void a_short_buffer_is_cut_and_the_full_length_returned(void **state)
{
    (void)state;
    char text[16];
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    size_t whole = refit_stats_json(&stats, NULL, 0);
    assert_int_equal(refit_stats_json(&stats, text, sizeof text), whole);
    assert_int_equal(strlen(text), sizeof text - 1);
    whole = refit_stats_prometheus(&stats, NULL, 0);
    assert_int_equal(refit_stats_prometheus(&stats, text, sizeof text), whole);
    assert_int_equal(strlen(text), sizeof text - 1);
}

static void an_older_struct_shows_only_what_it_has(void **state)
{
    (void)state;
    char text[8192];
    refit_stats stats;
    memset(&stats, 0xFF, sizeof stats);
    refit_stats_init(&stats, offsetof(refit_stats, offload_count));
    refit_stats_json(&stats, text, sizeof text);
    assert_string_equal(text, "{\"offload_regions\":0,\"offload_copies_per_cycle\":0}");
}

static void nothing_is_written_where_there_is_no_room_for_the_size(void **state)
{
    (void)state;
    refit_stats stats;
    memset(&stats, 0x55, sizeof stats);
    refit_stats_init(&stats, sizeof stats.size - 1);
    refit_stats_init(NULL, sizeof stats);
    assert_int_equal(((unsigned char *)&stats)[0], 0x55);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(json_names_every_figure),
        cmocka_unit_test(prometheus_text_has_help_type_and_value),
        cmocka_unit_test(a_short_buffer_is_cut_and_the_full_length_returned),
        cmocka_unit_test(an_older_struct_shows_only_what_it_has),
        cmocka_unit_test(nothing_is_written_where_there_is_no_room_for_the_size),
    };
    return cmocka_run_group_tests_name("stats", tests, NULL, NULL);
}
