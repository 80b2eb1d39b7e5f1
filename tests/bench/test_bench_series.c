/* bench_series: the figures of series.json, which refit.bench.series of the Python package gives as
 * well (tests/python/test_bench.py). */
#include <math.h>
#include <stdio.h>

#include <jansson.h>

#include "bench/bench_series.h"
#include "tests/support/test.h"

static double number(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    assert_true(json_is_number(value));
    return json_number_value(value);
}

static bench_series series_of(const json_t *samples)
{
    bench_series series = {0};
    size_t i;
    json_t *seconds;
    bench_add(&series, 0, number(samples, "cold"));
    json_array_foreach(json_object_get(samples, "seconds"), i, seconds)
        bench_add(&series, (uint32_t)i + 1, json_number_value(seconds));
    assert_int_equal(series.count, json_array_size(json_object_get(samples, "seconds")));
    return series;
}

static void same(const char *name, const char *figure, double found, double expected)
{
    if (fabs(found - expected) <= 1e-12 * fabs(expected)) return;
    print_error("%s: %s is %.17g, not %.17g\n", name, figure, found, expected);
    fail();
}

static void check(json_t *samples)
{
    const char *name = json_string_value(json_object_get(samples, "name")), *key;
    json_t *expected = json_object_get(samples, "figures"), *found = json_object(), *value;
    bench_series series = series_of(samples),
                 master = series_of(json_object_get(samples, "beside"));
    bench_set_seconds(found, "case_", &series);
    bench_set_cold(found, "case_", &series);
    assert_int_equal(json_object_size(found), json_object_size(expected));
    json_object_foreach(expected, key, value)
        same(name, key, number(found, key), json_number_value(value));
    same(name, "ratio", bench_ratio(&series, &master), number(samples, "ratio"));
    same(name, "gbps", bench_gbps((uint64_t)number(samples, "bytes"), &series),
         number(samples, "gbps"));
    json_decref(found);
}

TEST(samples_have_the_figures_that_python_gives_them)
{
    json_error_t why;
    json_t *all = json_load_file("tests/bench/series.json", 0, &why), *samples;
    size_t i;
    if (all == NULL) fail_msg("series.json, line %d: %s", why.line, why.text);
    assert_true(json_array_size(all) > 0);
    json_array_foreach(all, i, samples) check(samples);
    json_decref(all);
}

TEST(of_several_cold_rounds_the_first_stays)
{
    bench_series series = {0};
    bench_add(&series, 0, 3.0);
    bench_add(&series, 0, 2.0);
    assert_true(series.cold == 3.0);
    assert_int_equal(series.count, 0);
}

TEST(rounds_beyond_the_most_are_left_out)
{
    bench_series series = {0};
    for (uint32_t i = 0; i <= BENCH_ROUNDS_MOST + 2; i++)
        bench_add(&series, i, i <= BENCH_ROUNDS_MOST ? 1.0 : 100.0);
    assert_int_equal(series.count, BENCH_ROUNDS_MOST);
    assert_true(bench_p95(&series) == 1.0);
}

TEST(a_series_of_nothing_has_figures_of_0)
{
    const bench_series none = {0};
    assert_true(bench_median(&none) == 0.0);
    assert_true(bench_p95(&none) == 0.0);
    assert_true(bench_ratio(&none, &none) == 0.0);
    assert_true(bench_gbps(1, &none) == 0.0);
}

int main(void)
{
    return test_run("bench_series");
}
