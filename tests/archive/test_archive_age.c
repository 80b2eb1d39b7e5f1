/* An archive over time: its writer restarts and continues, and old versions are removed. */
#include <unistd.h>

#include <refit/host.h>

#include "archive_rig.h"

/* ---- What is logged ---- */

static char logged[4096];

static void note(void *user, refit_log_level level, const char *line)
{
    (void)user;
    (void)level;
    const size_t used = strlen(logged);
    (void)snprintf(logged + used, sizeof logged - used, "%s\n", line);
}

static int listen(void **state)
{
    logged[0] = '\0';
    refit_set_log(note, NULL, REFIT_LOG_INFO);
    return rig_setup(state);
}

static int stop_listening(void **state)
{
    refit_set_log(NULL, NULL, REFIT_LOG_ERROR);
    return rig_teardown(state);
}

#define HEARD(name) TEST_ON(archive_rig *rig, name, listen, stop_listening)

/* ---- A writer that restarts ---- */

HEARD(a_writer_that_starts_anew_goes_on_with_deltas)
{
    rig_open(rig, 200000);
    for (uint64_t version = 1; version <= 9; version++) {
        rig_keep(rig, RIG_EPOCH, version);
        rig_reopen(rig);
        assert_int_equal(rig_info(rig, (uint32_t)version - 1).base,
                         version % 4 == 1 ? 0 : version - 1);
    }
    for (uint64_t version = 1; version <= 9; version++)
        rig_expect(rig, RIG_EPOCH, version);
    assert_string_equal(logged, "");
}

HEARD(it_is_sent_the_current_version_again_and_goes_on)
{
    rig_open_with(rig, 10, 2);
    rig_reopen(rig);
    rig_keep(rig, RIG_EPOCH, 2);
    rig_keep(rig, RIG_EPOCH, 3);
    assert_int_equal(rig_info(rig, 2).base, 2);
    rig_expect(rig, RIG_EPOCH, 3);
    assert_string_equal(logged, "");
}

HEARD(what_it_missed_makes_an_anchor_and_is_logged)
{
    rig_open_with(rig, 10, 1);
    rig_reopen(rig);
    rig_keep(rig, RIG_EPOCH, 3);
    assert_int_equal(rig_info(rig, 1).base, 0);
    assert_non_null(strstr(logged, "version 3 is kept whole: version 2 of epoch 9f1c66a04b7de210 "
                                   "is not there"));
}

HEARD(another_trainer_makes_an_anchor_and_is_logged)
{
    rig_open_with(rig, 10, 1);
    rig_reopen(rig);
    rig_keep(rig, RIG_OTHER, 2);
    assert_int_equal(rig_info(rig, 1).base, 0);
    assert_non_null(strstr(logged, "version 2 is kept whole"));
    rig_expect(rig, RIG_OTHER, 2);
    logged[0] = '\0';
    rig_keep(rig, RIG_EPOCH + 1, 1); /* there is nothing before it: not worth a word */
    assert_string_equal(logged, "");
}

HEARD(other_tensors_make_an_anchor_and_are_logged)
{
    rig_open_with(rig, 10, 1);
    rig_reopen(rig);
    refit_archive_version fewer = rig_version(rig, RIG_EPOCH, 2);
    fewer.count = fewer.weight_count = 2;
    rig_keep_this(rig, &fewer);
    assert_int_equal(rig_info(rig, 1).base, 0);
    assert_non_null(strstr(logged, "nothing can build on version 1: its tensors are others"));
    assert_int_equal(rig_info(rig, 1).tensors, 2);
    rig_keep(rig, RIG_EPOCH, 3);
    assert_int_equal(rig_info(rig, 2).base, 0);
    rig_expect(rig, RIG_EPOCH, 3);
}

/* Changes one byte in the middle of file `index`. */
static void damage(archive_rig *rig, uint32_t index)
{
    size_t count;
    char path[160];
    (void)snprintf(path, sizeof path, "%s", rig_path(rig, index));
    unsigned char *bytes = rig_load(path, &count);
    bytes[count - 1] ^= 1;
    rig_store(path, bytes, count);
    free(bytes);
}

HEARD(nothing_builds_on_a_chain_that_is_damaged)
{
    refit_error error;
    for (uint32_t file = 0; file < 2; file++) {
        logged[0] = '\0';
        rig_open_with(rig, 10, 2);
        rig_reopen(rig);
        damage(rig, file);
        rig_keep(rig, RIG_EPOCH, 3);
        assert_int_equal(rig_info(rig, 2).base, 0);
        assert_non_null(strstr(logged, "nothing can build on version 2: 0001-0000000"));
        assert_non_null(strstr(logged, "is damaged"));
        rig_expect(rig, RIG_EPOCH, 3);
        rig_keep(rig, RIG_EPOCH, 4);
        assert_int_equal(rig_info(rig, 3).base, 3);
        rig_expect(rig, RIG_EPOCH, 4);
        assert_int_equal(rig_check(rig, RIG_EPOCH, 2, &error), REFIT_ERR_CORRUPT);
    }
}

HEARD(a_chain_without_its_anchor_is_not_gone_on_with)
{
    rig_open_with(rig, 10, 2);
    assert_int_equal(unlink(rig_path(rig, 0)), 0);
    rig_reopen(rig);
    rig_keep(rig, RIG_EPOCH, 3);
    assert_int_equal(rig_info(rig, 1).base, 0);
    assert_non_null(strstr(logged, "builds on version 1, and its file is not there"));
}

/* ---- Old versions ---- */

static void prune(archive_rig *rig, uint32_t anchors, uint32_t expected)
{
    uint32_t removed = 99;
    assert_ok(refit_archive_prune(rig->archive, anchors, &removed, NULL));
    assert_int_equal(removed, expected);
    assert_int_equal(refit_archive_count(rig->archive), rig_count(rig));
}

RIG_TEST(the_last_anchors_and_what_hangs_on_them_stay)
{
    rig_open_with(rig, 10, 11); /* anchors: 1, 5, 9 */
    prune(rig, 4, 0);
    prune(rig, 3, 0);
    prune(rig, 2, 4);
    for (uint64_t version = 5; version <= 11; version++)
        rig_expect(rig, RIG_EPOCH, version);
    prune(rig, 1, 4);
    prune(rig, 1, 0);
    assert_int_equal(rig_info(rig, 0).version, 9);
    rig_keep(rig, RIG_EPOCH, 12); /* builds on what is held */
    assert_int_equal(rig_info(rig, 3).base, 11);
    rig_reopen(rig);
    rig_keep(rig, RIG_EPOCH, 13);
    assert_int_equal(rig_info(rig, 4).base, 0);
    prune(rig, 1, 4);
    rig_expect(rig, RIG_EPOCH, 13);
    assert_int_equal(rig_names(rig), 1);
}

RIG_TEST(pruned_after_each_version_the_archive_stays_small)
{
    rig_open(rig, 10);
    for (uint64_t version = 1; version <= 40; version++) {
        rig_keep(rig, version <= 21 ? RIG_EPOCH : RIG_OTHER,
                 version <= 21 ? version : version - 20);
        assert_ok(refit_archive_prune(rig->archive, 2, NULL, NULL));
        assert_true(rig_names(rig) <= 2 * rig->config.archive_anchor_every);
        if (version % 7 == 0) rig_reopen(rig);
    }
    for (uint32_t i = 0; i < rig_count(rig); i++) {
        const refit_archive_info info = rig_info(rig, i);
        rig_expect(rig, info.epoch, info.version);
    }
}

/* A trainer that goes on after another one has come, and whose versions are the older ones. */
RIG_TEST(what_was_removed_is_no_base)
{
    rig_open_with(rig, 10, 1);
    rig_keep(rig, RIG_OTHER, 1);
    rig_keep(rig, RIG_EPOCH, 2);
    prune(rig, 1, 2);
    rig_keep(rig, RIG_EPOCH, 3);
    assert_int_equal(rig_info(rig, 1).base, 0);
    rig_expect(rig, RIG_EPOCH, 3);
}

RIG_TEST(files_that_have_lost_their_anchor_or_are_damaged_go_too)
{
    rig_open_with(rig, 10, 10); /* anchors: 1, 5, 9 */
    assert_int_equal(unlink(rig_path(rig, 0)), 0);
    assert_int_equal(truncate(rig_path(rig, 5), 100), 0); /* version 7 */
    rig_reopen(rig);
    prune(rig, 2, 3);
    rig_expect(rig, RIG_EPOCH, 6);
    prune(rig, 1, 4);
    rig_expect(rig, RIG_EPOCH, 10);
}

RIG_TEST(wrong_prunes_are_refused)
{
    refit_archive *reader;
    rig_open_with(rig, 10, 1);
    assert_invalid(refit_archive_prune(rig->archive, 0, NULL, NULL));
    assert_invalid(refit_archive_prune(NULL, 1, NULL, NULL));
    assert_ok(refit_archive_open(rig->folder, REFIT_ARCHIVE_READ, NULL, &reader, NULL));
    assert_int_equal(refit_archive_prune(reader, 1, NULL, NULL), REFIT_ERR_STATE);
    refit_archive_close(reader);
    const refit_archive_version two = rig_version(rig, RIG_EPOCH, 2);
    assert_ok(refit_archive_write(rig->archive, &two, NULL));
    assert_int_equal(refit_archive_prune(rig->archive, 1, NULL, NULL), REFIT_ERR_STATE);
    assert_ok(refit_archive_commit(rig->archive, NULL, NULL));
    prune(rig, 1, 0);
}

int main(void)
{
    return test_run("archive_age");
}
