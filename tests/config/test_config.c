/* The configuration struct: defaults, sizes of other releases, all-or-nothing changes, checks. */
#include <math.h>

#include "config/config.h"
#include "config/options.h"
#include "tests/support/test.h"

static refit_config config;
static refit_error error;

static int start(void **state)
{
    refit_config_init(&config, sizeof config);
    memset(&error, 0, sizeof error);
    return 0;
}

TEST_WITH(defaults_are_those_of_the_table_and_fit_together, start, NULL)
{
    assert_int_equal(config.size, sizeof config);
    assert_ok(refit_config_check(&config, &error));
    for (size_t i = 0; i < rft_option_count; i++) {
        char text[RFT_VALUE_TEXT];
        rft_option_print(&rft_options[i], &config, text);
        assert_string_equal(text, rft_options[i].standard);
        assert_int_equal(config.origin[i], REFIT_CONFIG_DEFAULT);
    }
    assert_int_equal(config.offload_slab_bytes, (uint64_t)1 << 30);
    assert_int_equal(config.broadcast_commit_timeout_ms, 30000);
    assert_int_equal(config.offload_numa, REFIT_NUMA_AUTO);
    assert_string_equal(config.broadcast_endpoint, "user://refit");
    assert_true(config.offload_budget_share > 0.799 && config.offload_budget_share < 0.801);
}

TEST_WITH(keys_differ_and_are_as_wide_as_their_fields, start, NULL)
{
    static const size_t widths[RFT_KINDS] = {1, 4, 8, 4, 8, 4, 4, 0};
    for (size_t i = 0; i < rft_option_count; i++) {
        const rft_option *option = &rft_options[i];
        assert_ptr_equal(rft_option_find(option->key), option);
        if (option->kind != RFT_TEXT) assert_int_equal(option->width, widths[option->kind]);
    }
}

/* The field that begins at `at`, or after padding; NULL if there is none. */
static const rft_option *field_at(size_t at)
{
    const rft_option *nearest = NULL;
    for (size_t i = 0; i < rft_option_count; i++) {
        const rft_option *option = &rft_options[i];
        if (option->offset < at || option->offset >= at + 8) continue;
        if (nearest == NULL || option->offset < nearest->offset) nearest = option;
    }
    return nearest;
}

TEST_WITH(every_field_has_a_row, start, NULL)
{
    size_t end = offsetof(refit_config, device);
    for (size_t i = 0; i < rft_option_count; i++) {
        const rft_option *option = field_at(end);
        if (option == NULL) print_error("no row for the field at byte %zu\n", end);
        assert_non_null(option);
        end = option->offset + option->width;
    }
    assert_in_range(sizeof(refit_config), end, end + 7);
}

TEST_WITH(smaller_struct_is_left_alone_after_its_end, start, NULL)
{
    unsigned char room[sizeof(refit_config)];
    memset(room, 0xa5, sizeof room);
    const size_t small = offsetof(refit_config, broadcast_endpoint);
    refit_config *old = (refit_config *)(void *)room;
    refit_config_init(old, small);
    assert_int_equal(old->size, small);
    assert_ok(refit_config_set(old, "offload.batch", "7", &error));
    assert_int_equal(old->offload_batch, 7);
    assert_ok(refit_config_check(old, &error));
    for (size_t i = small; i < sizeof room; i++)
        assert_int_equal(room[i], 0xa5);
}

TEST_WITH(smaller_struct_cannot_hold_newer_options, start, NULL)
{
    config.size = offsetof(refit_config, broadcast_endpoint);
    assert_int_equal(refit_config_set(&config, "broadcast.window", "4", &error), REFIT_ERR_CONFIG);
    assert_says(&error, "newer than this program");
    refit_config own;
    config.broadcast_window = 9999999; /* beyond the caller's struct: not looked at */
    assert_ok(rft_config_resolve(&config, &own, &error));
    assert_int_equal(own.broadcast_window, 8);
    assert_int_equal(own.size, sizeof own);
}

TEST_WITH(larger_struct_keeps_its_size, start, NULL)
{
    union {
        refit_config config;
        unsigned char bytes[sizeof(refit_config) + 64];
    } newer;
    memset(&newer, 0xa5, sizeof newer);
    refit_config_init(&newer.config, sizeof newer);
    assert_int_equal(newer.config.size, sizeof newer);
    for (size_t i = sizeof(refit_config); i < sizeof newer; i++)
        assert_int_equal(newer.bytes[i], 0);
    assert_ok(refit_config_set(&newer.config, "device", "host", &error));
    assert_string_equal(newer.config.device, "host");
}

TEST_WITH(too_small_a_size_writes_nothing, start, NULL)
{
    refit_config untouched = config;
    refit_config_init(&config, sizeof(size_t));
    refit_config_init(NULL, sizeof config);
    assert_memory_equal(&config, &untouched, sizeof config);
}

TEST_WITH(struct_that_was_never_initialised_is_refused, start, NULL)
{
    refit_config empty;
    memset(&empty, 0, sizeof empty);
    assert_invalid(refit_config_set(&empty, "device", "host", &error));
    assert_says(&error, "refit_config_init");
    assert_invalid(refit_config_check(&empty, NULL));
    assert_invalid(refit_config_check(NULL, NULL));
    assert_invalid(refit_config_set(NULL, "device", "host", NULL));
}

TEST_WITH(set_remembers_the_origin, start, NULL)
{
    assert_ok(refit_config_set(&config, "broadcast.heartbeat_ms", "250ms", &error));
    assert_int_equal(config.broadcast_heartbeat_ms, 250);
    const rft_option *option = rft_option_find("broadcast.heartbeat_ms");
    assert_int_equal(config.origin[option - rft_options], REFIT_CONFIG_EXPLICIT);
}

TEST_WITH(failed_set_changes_nothing, start, NULL)
{
    refit_config before = config;
    assert_int_equal(refit_config_set(&config, "offload.batch", "0", &error), REFIT_ERR_CONFIG);
    assert_says(&error, "offload.batch cannot be 0: it must be 1 to 65536");
    assert_int_equal(refit_config_set(&config, "offload.bach", "1", &error), REFIT_ERR_NOT_FOUND);
    assert_says(&error, "the nearest is offload.batch");
    assert_invalid(refit_config_set(&config, NULL, "1", &error));
    assert_invalid(refit_config_set(&config, "offload.batch", NULL, &error));
    assert_memory_equal(&config, &before, sizeof config);
}

static void assert_check_refuses(const char *part)
{
    assert_int_equal(refit_config_check(&config, &error), REFIT_ERR_CONFIG);
    assert_says(&error, part);
    refit_config own;
    memset(&own, 0x5a, sizeof own);
    assert_int_equal(rft_config_resolve(&config, &own, NULL), REFIT_ERR_CONFIG);
    assert_int_equal(((unsigned char *)&own)[0], 0x5a);
    refit_config_init(&config, sizeof config);
}

/* Each value is in its range; together they are not taken. */
static const struct {
    const char *set[2][2]; /* keys and values */
    const char *part;
} misfits[] = {
    {{{"offload.slab_bytes", "3MiB"}}, "offload.slab_bytes cannot be 3145728"},
    {{{"offload.alignment_bytes", "768"}}, "offload.alignment_bytes cannot be 768"},
    {{{"offload.slab_bytes", "4KiB"}, {"offload.alignment_bytes", "8KiB"}},
     "below offload.alignment_bytes"},
    {{{"offload.pin", "require"}, {"use_pinned_optimizer_offload", "false"}},
     "use_pinned_optimizer_offload is false"},
    {{{"broadcast.frame_bytes", "32MiB"}}, "above limits.frame_bytes"},
    {{{"broadcast.window", "65"}}, "above limits.window"},
    {{{"broadcast.heartbeat_ms", "5s"}}, "must be below broadcast.heartbeat_timeout_ms"},
    {{{"broadcast.idle_timeout_ms", "5s"}},
     "must be 0 or above broadcast.heartbeat_timeout_ms (5000)"},
    {{{"limits.manifest_bytes", "4KiB"}}, "above limits.manifest_bytes"},
    {{{"broadcast.quorum", "2"}}, "broadcast.commit is all"},
    {{{"broadcast.commit", "quorum"}}, "it must be 1 to limits.workers (256)"},
    {{{"broadcast.commit", "quorum"}, {"broadcast.quorum", "257"}},
     "it must be 1 to limits.workers (256)"},
};

TEST_WITH(values_that_do_not_fit_together_are_refused, start, NULL)
{
    for (size_t i = 0; i < COUNT_OF(misfits); i++) {
        for (size_t n = 0; n < 2 && misfits[i].set[n][0] != NULL; n++) {
            const char *const *set = misfits[i].set[n];
            if (refit_config_set(&config, set[0], set[1], &error) != REFIT_OK)
                fail_msg("%s: %s", misfits[i].part, error.text);
        }
        assert_check_refuses(misfits[i].part);
    }
}

TEST_WITH(values_written_by_hand_are_checked_too, start, NULL)
{
    config.broadcast_slots = 3;
    assert_check_refuses("broadcast.slots cannot be 3: it must be 1 to 2");
    config.offload_pin = -1;
    assert_check_refuses("offload.pin cannot be -1: it must be one of auto|require|prefer|off");
    config.offload_pin = 4;
    assert_check_refuses("offload.pin cannot be 4: it must be one of auto|require|prefer|off");
    config.offload_numa = -4;
    assert_check_refuses("offload.numa cannot be -4: it must be one of auto|off|interleave|N");
    config.offload_verify = 77;
    assert_check_refuses("offload.verify cannot be 77: it must be 0 (false) or 1 (true)");
    memset(config.device, 'x', sizeof config.device);
    assert_check_refuses("device does not end within its 64 bytes");
}

TEST_WITH(shares_written_by_hand_are_shown_as_they_are, start, NULL)
{
    static const struct {
        double share;
        const char *part;
    } cases[] = {
        {(double)NAN, "cannot be NaN: it must be 0.001 to 1"},
        {(double)INFINITY, "cannot be above 1000000000: it must be 0.001 to 1"},
        {-(double)INFINITY, "cannot be below -1000000000: it must be 0.001 to 1"},
        {-0.25, "cannot be -0.25: it must be 0.001 to 1"},
        {-1e300, "cannot be below -1000000000: it must be 0.001 to 1"},
        {2.5, "cannot be 2.5: it must be 0.001 to 1"},
        {0.0, "cannot be 0: it must be 0.001 to 1"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        config.offload_budget_share = cases[i].share;
        assert_check_refuses(cases[i].part);
    }
}

/* Each text is checked alike, whether a call sets it or a program has written it. */
TEST_WITH(texts_are_utf8_without_control_characters, start, NULL)
{
    static const struct {
        const char *text;
        const char *part;
    } cases[] = {
        {"ra\nnk", "has a control character (byte 3), or is not UTF-8 there: leave it out"},
        {"\x7f", "has a control character (byte 1), or is not UTF-8 there"},
        {"rank\xff", "has a control character (byte 5), or is not UTF-8 there"},
        {"r\xe5\xb1", "has a control character (byte 2), or is not UTF-8 there"},
        {"r\xc2\x85", "has a control character (byte 2), or is not UTF-8 there"},
    };
    for (size_t i = 0; i < rft_option_count; i++) {
        const rft_option *option = &rft_options[i];
        for (size_t n = 0; option->kind == RFT_TEXT && n < COUNT_OF(cases); n++) {
            assert_int_equal(refit_config_set(&config, option->key, cases[n].text, &error),
                             REFIT_ERR_CONFIG);
            assert_says(&error, cases[n].part);
            strcpy((char *)&config + option->offset, cases[n].text);
            assert_check_refuses(cases[n].part);
            assert_says(&error, option->key);
        }
    }
}

static void note_value(void *user, const refit_option *option)
{
    char(*values)[RFT_VALUE_TEXT] = user;
    const rft_option *row = rft_option_find(option->key);
    strcpy(values[row - rft_options], option->value);
}

/* Showing an invalid configuration shows what is wrong with it. */
TEST_WITH(wrong_values_are_shown_as_they_are, start, NULL)
{
    char values[REFIT_CONFIG_ORIGINS][RFT_VALUE_TEXT];
    config.offload_pin = -1;
    config.offload_verify = 77;
    config.offload_budget_share = (double)NAN;
    strcpy(config.broadcast_worker, "rank\xff\n");
    refit_config_each(&config, note_value, values);
    assert_string_equal(values[rft_option_find("offload.pin") - rft_options], "-1");
    assert_string_equal(values[rft_option_find("offload.verify") - rft_options], "77");
    assert_string_equal(values[rft_option_find("offload.budget_share") - rft_options], "NaN");
    assert_string_equal(values[rft_option_find("broadcast.worker") - rft_options], "rank??");
}

TEST_WITH(null_means_defaults, start, NULL)
{
    refit_config own;
    assert_ok(rft_config_resolve(NULL, &own, &error));
    assert_memory_equal(&own, &config, sizeof own);
}

typedef struct tally {
    size_t count;
    size_t explicit_values;
} tally;

static void count_option(void *user, const refit_option *option)
{
    tally *seen = user;
    const rft_option *row = &rft_options[seen->count++];
    assert_int_equal(option->size, sizeof *option);
    assert_string_equal(option->key, row->key);
    assert_string_equal(option->default_value, row->standard);
    assert_string_equal(option->unit, row->unit);
    assert_true(strlen(option->help) > 10);
    if (option->origin == REFIT_CONFIG_EXPLICIT) {
        seen->explicit_values++;
        assert_string_equal(option->value, "interleave");
    } else {
        assert_string_equal(option->value, option->default_value);
    }
    if (strcmp(option->key, "broadcast.slots") == 0) assert_string_equal(option->range, "1 to 2");
}

TEST_WITH(each_shows_every_option_in_order, start, NULL)
{
    tally seen = {0, 0};
    assert_ok(refit_config_set(&config, "offload.numa", "interleave", &error));
    refit_config_each(&config, count_option, &seen);
    assert_int_equal(seen.count, rft_option_count);
    assert_int_equal(seen.explicit_values, 1);
    refit_config_each(NULL, count_option, &seen);
    refit_config_each(&config, NULL, &seen);
    assert_int_equal(seen.count, rft_option_count);
}

/* ---- The nearest name: distances are right, whatever the lengths, and the key meant is found */

static size_t distance(const char *a, const char *b)
{
    return rft_edit_distance(a, strlen(a), b, strlen(b));
}

TEST(distances_count_single_changes)
{
    assert_int_equal(distance("", ""), 0);
    assert_int_equal(distance("slab", ""), 4);
    assert_int_equal(distance("", "slab"), 4);
    assert_int_equal(distance("slab", "slab"), 0);
    assert_int_equal(distance("slab", "slabs"), 1);
    assert_int_equal(distance("slab", "slob"), 1);
    assert_int_equal(distance("slab", "salb"), 1);
    assert_int_equal(distance("kitten", "sitting"), 3);
    assert_int_equal(distance("ca", "abc"), 3);
}

TEST(only_the_given_lengths_count)
{
    assert_int_equal(rft_edit_distance("offload.numa", 7, "offload.pin", 7), 0);
}

TEST(long_words_are_cut_not_overrun)
{
    char longer[4000];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    assert_int_equal(distance(longer, longer), 0);
    assert_int_equal(distance(longer, ""), 127);
    assert_non_null(rft_nearest_key(longer));
}

TEST(meant_key_is_found)
{
    assert_string_equal(rft_nearest_key("offload.slab_byte"), "offload.slab_bytes");
    assert_string_equal(rft_nearest_key("broadcast.endpiont"), "broadcast.endpoint");
    assert_string_equal(rft_nearest_key("Device"), "device");
    assert_string_equal(rft_nearest_key("use_pinned_offload"), "use_pinned_optimizer_offload");
}

int main(void)
{
    return test_run("config");
}
