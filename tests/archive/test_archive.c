/* The archive: every version that was kept can be rebuilt, byte for byte, and nothing else is
 * there. */
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "archive_rig.h"

#define MANY 200000u

RIG_TEST(every_version_can_be_rebuilt)
{
    rig_open_with(rig, MANY, 9);
    assert_int_equal(rig_count(rig), 9);
    for (uint64_t version = 9; version >= 1; version--)
        rig_expect(rig, RIG_EPOCH, version);
    assert_int_equal(rig_names(rig), 9);
}

/* There is no number after it to count to. */
RIG_TEST(the_last_number_of_all_is_a_version_like_others)
{
    rig_open(rig, 10);
    rig_keep(rig, RIG_EPOCH, UINT64_MAX - 1);
    rig_keep(rig, RIG_EPOCH, UINT64_MAX);
    rig_expect(rig, RIG_EPOCH, UINT64_MAX - 1);
    rig_expect(rig, RIG_EPOCH, UINT64_MAX);
    assert_int_equal(rig_info(rig, 1).base, UINT64_MAX - 1);
    rig_reopen(rig);
    rig_keep(rig, RIG_EPOCH, 1); /* numbers do not go on after it */
    assert_int_equal(rig_info(rig, 0).base, 0);
    rig_expect(rig, RIG_EPOCH, UINT64_MAX);
}

RIG_TEST(an_anchor_comes_every_so_many_versions)
{
    rig_open_with(rig, MANY, 9);
    for (uint32_t i = 0; i < 9; i++) {
        refit_archive_info info = rig_info(rig, i);
        bool anchor = i % rig->config.archive_anchor_every == 0;
        assert_int_equal(info.version, i + 1);
        assert_int_equal(info.base, anchor ? 0 : i);
        assert_true(anchor == (info.file_bytes > info.weight_bytes));
    }
}

RIG_TEST(with_one_every_version_is_an_anchor)
{
    rig_open(rig, 10);
    rig->config.archive_anchor_every = 1;
    rig_reopen(rig);
    rig_keep(rig, RIG_EPOCH, 1);
    rig_keep(rig, RIG_EPOCH, 2);
    assert_int_equal(rig_info(rig, 1).base, 0);
    rig_expect(rig, RIG_EPOCH, 2);
}

RIG_TEST(a_delta_says_what_changed)
{
    rig_open_with(rig, MANY, 2);
    refit_archive_info anchor = rig_info(rig, 0), delta = rig_info(rig, 1);
    const uint64_t elements = MANY + 9 + 4 + 1 + 3 * (uint64_t)MANY; /* F4 counts as bytes */
    assert_int_equal(anchor.elements, elements);
    assert_int_equal(anchor.changed, elements);
    assert_int_equal(anchor.tensors, RIG_TENSORS);
    assert_int_equal(anchor.weight_bytes, 5 * (uint64_t)MANY + 36 + 4 + 8);
    /* every hundredth element twice (the old changes undone, and new ones), and the nine of "norm"
     */
    assert_int_equal(delta.changed, 2 * MANY / 100 + 9);
    assert_int_equal(delta.blocks_same + delta.blocks_sparse + delta.blocks_dense,
                     anchor.blocks_dense);
    assert_int_equal(delta.blocks_same, anchor.blocks_dense - 4 - 1);
    assert_int_equal(delta.blocks_sparse, 4); /* all nine of "norm" changed: it stays whole */
    assert_memory_equal(delta.base_digest, anchor.digest, 16);
    assert_memory_equal(delta.manifest, anchor.manifest, 16);
    assert_true(delta.file_bytes < anchor.file_bytes / 100);
}

RIG_TEST(a_version_that_changed_nothing_is_small)
{
    rig_open_with(rig, MANY, 1);
    refit_archive_version again = rig_version(rig, RIG_EPOCH, 1);
    again.version = 2;
    rig_keep_this(rig, &again);
    refit_archive_info anchor = rig_info(rig, 0), info = rig_info(rig, 1);
    assert_int_equal(info.changed, 0);
    assert_int_equal(info.blocks_dense + info.blocks_sparse, 0);
    assert_memory_equal(info.digest, anchor.digest, 16);
    assert_true(info.file_bytes < 4096);
}

RIG_TEST(a_version_that_was_missed_makes_an_anchor)
{
    rig_open(rig, 10);
    rig_keep(rig, RIG_EPOCH, 5);
    rig_keep(rig, RIG_EPOCH, 6);
    rig_keep(rig, RIG_EPOCH, 8);
    rig_keep(rig, RIG_EPOCH, 9);
    const uint64_t bases[] = {0, 5, 0, 8};
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(rig_info(rig, i).base, bases[i]);
    rig_expect(rig, RIG_EPOCH, 9);
}

RIG_TEST(a_new_trainer_is_a_run_of_its_own)
{
    refit_error error;
    rig_open_with(rig, 10, 2);
    rig_keep(rig, RIG_OTHER, 2);
    rig_keep(rig, RIG_OTHER, 3);
    assert_int_equal(rig_info(rig, 2).epoch, RIG_OTHER);
    assert_int_equal(rig_info(rig, 2).base, 0);
    assert_string_equal(rig_info(rig, 0).name, "0001-00000001-9f1c66a04b7de210.refit");
    assert_string_equal(rig_info(rig, 3).name, "0002-00000003-0000000000000007.refit");
    rig_expect(rig, RIG_EPOCH, 2);
    rig_expect(rig, RIG_OTHER, 2);
    assert_int_equal(rig_check(rig, 0, 2, &error), REFIT_ERR_EXISTS);
    assert_says(&error, "0000000000000007");
    assert_int_equal(rig_check(rig, RIG_OTHER, 1, &error), REFIT_ERR_NOT_FOUND);
}

RIG_TEST(without_an_epoch_the_only_one_is_meant)
{
    refit_archive *archive;
    refit_snapshot *snapshot;
    refit_archive_info info = {.size = sizeof info};
    rig_open_with(rig, 10, 1);
    assert_ok(refit_archive_open(rig->folder, REFIT_ARCHIVE_READ, &rig->config, &archive, NULL));
    assert_ok(refit_archive_read(archive, 0, 1, &snapshot, NULL));
    assert_ok(refit_snapshot_describe(snapshot, &info, NULL));
    assert_int_equal(info.epoch, RIG_EPOCH);
    refit_snapshot_close(snapshot);
    refit_archive_close(archive);
}

RIG_TEST(what_is_not_committed_is_not_there)
{
    rig_open_with(rig, 10, 1);
    refit_archive_version two = rig_version(rig, RIG_EPOCH, 2);
    assert_ok(refit_archive_write(rig->archive, &two, NULL));
    assert_int_equal(rig_count(rig), 1);
    assert_int_equal(refit_archive_write(rig->archive, &two, NULL), REFIT_ERR_STATE);
    assert_ok(refit_archive_abort(rig->archive, NULL));
    assert_int_equal(rig_names(rig), 1);
    assert_int_equal(refit_archive_commit(rig->archive, NULL, NULL), REFIT_ERR_STATE);
    assert_int_equal(refit_archive_abort(rig->archive, NULL), REFIT_ERR_STATE);
    rig_keep(rig, RIG_EPOCH, 2); /* its base was partly overwritten, and is read back */
    assert_int_equal(rig_info(rig, 1).base, 1);
    rig_expect(rig, RIG_EPOCH, 2);
    two.version = 3;
    assert_ok(refit_archive_write(rig->archive, &two, NULL));
    rig_reopen(rig); /* closed in between: aborted */
    assert_int_equal(rig_names(rig), 2);
}

RIG_TEST(a_version_that_is_there_is_not_written_again)
{
    struct stat before, after;
    rig_open_with(rig, 10, 2);
    assert_int_equal(stat(rig_path(rig, 1), &before), 0);
    rig_reopen(rig);
    rig_keep(rig, RIG_EPOCH, 2); /* a worker that restarts gets the current version once more */
    assert_int_equal(stat(rig_path(rig, 1), &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);
    refit_archive_version other = rig_version(rig, RIG_EPOCH, 1);
    other.version = 2;
    assert_refused(refit_archive_write(rig->archive, &other, error), REFIT_ERR_EXISTS, "version 2");
    rig_keep(rig, RIG_EPOCH, 3);
    assert_int_equal(rig_info(rig, 2).base, 2);
    rig_expect(rig, RIG_EPOCH, 2);
    rig_expect(rig, RIG_EPOCH, 3);
}

RIG_TEST(a_wrong_digest_is_refused)
{
    refit_error error;
    rig_open_with(rig, 10, 1);
    refit_archive_info info = rig_info(rig, 0);
    refit_archive_version two = rig_version(rig, RIG_EPOCH, 2);
    two.digest = info.digest;
    assert_int_equal(refit_archive_write(rig->archive, &two, &error), REFIT_ERR_CORRUPT);
    assert_int_equal(rig_names(rig), 1);
    refit_archive_version one = rig_version(rig, RIG_EPOCH, 1);
    one.digest = info.digest;
    assert_ok(refit_archive_write(rig->archive, &one, NULL)); /* there already */
    assert_ok(refit_archive_commit(rig->archive, NULL, NULL));
    one.digest = (const unsigned char *)"something else..";
    assert_int_equal(refit_archive_write(rig->archive, &one, NULL), REFIT_ERR_CORRUPT);
}

RIG_TEST(only_one_writes)
{
    refit_archive *second;
    refit_error error;
    rig_open(rig, 10);
    assert_int_equal(
        refit_archive_open(rig->folder, REFIT_ARCHIVE_WRITE, &rig->config, &second, &error),
        REFIT_ERR_BUSY);
    assert_says(&error, "another process");
    assert_ok(refit_archive_open(rig->folder, REFIT_ARCHIVE_READ, &rig->config, &second, &error));
    refit_archive_version one = rig_version(rig, RIG_EPOCH, 1);
    assert_int_equal(refit_archive_write(second, &one, NULL), REFIT_ERR_STATE);
    refit_archive_close(second);
}

RIG_TEST(a_child_that_goes_on_does_not_keep_the_writer_out)
{
    int line[2];
    char none;
    rig_open(rig, 10);
    assert_int_equal(pipe(line), 0);
    pid_t child = fork();
    if (child == 0) {
        close(line[1]);
        _exit((int)read(line[0], &none, 1));
    }
    rig_reopen(rig);
    close(line[1]);
    assert_child_succeeds(child);
    close(line[0]);
}

RIG_TEST(wrong_versions_are_refused)
{
    rig_open(rig, 10);
    const refit_archive_version good = rig_version(rig, RIG_EPOCH, 1);
    refit_weight twice[RIG_ORIGINALS], tied[RIG_ORIGINALS], shorter[RIG_ORIGINALS];
    memcpy(twice, rig->weights, sizeof twice);
    memcpy(tied, rig->weights, sizeof tied);
    memcpy(shorter, rig->weights, sizeof shorter);
    twice[1] = twice[0];
    tied[1].tensor = 2;
    shorter[0].bytes--;
    refit_weight nowhere[COUNT_OF(rig->weights)];
    memcpy(nowhere, rig->weights, sizeof nowhere);
    nowhere[0].memory = NULL;
    refit_archive_version bad[9];
    for (size_t i = 0; i < 9; i++)
        bad[i] = good;
    bad[0].size = 8;
    bad[1].epoch = 0;
    bad[2].version = 0;
    bad[3].weights = NULL;
    bad[4].weights = twice;
    bad[5].weights = tied;
    bad[6].weights = shorter;
    bad[7].weight_count--;
    bad[8].weights = nowhere;
    for (size_t i = 0; i < 9; i++)
        assert_invalid(refit_archive_write(rig->archive, &bad[i], NULL));
    assert_refused(refit_archive_write(rig->archive, &bad[8], error), REFIT_ERR_INVALID,
                   "has no memory: its address is NULL");
    assert_invalid(refit_archive_write(NULL, &good, NULL));
    assert_invalid(refit_archive_write(rig->archive, NULL, NULL));
    assert_int_equal(rig_names(rig), 0);
    rig_keep(rig, RIG_EPOCH, 1);
}

RIG_TEST(wrong_calls_are_refused)
{
    refit_archive *archive;
    refit_snapshot *snapshot;
    refit_archive_info info = {.size = sizeof info};
    rig_open(rig, 10);
    assert_invalid(refit_archive_open(NULL, REFIT_ARCHIVE_READ, NULL, &archive, NULL));
    assert_invalid(refit_archive_open("", REFIT_ARCHIVE_READ, NULL, &archive, NULL));
    assert_invalid(refit_archive_open(rig->folder, (refit_archive_mode)7, NULL, &archive, NULL));
    assert_int_equal(
        refit_archive_open("/nowhere/at/all", REFIT_ARCHIVE_READ, NULL, &archive, NULL),
        REFIT_ERR_NOT_FOUND);
    assert_int_equal(
        refit_archive_open("/nowhere/at/all", REFIT_ARCHIVE_WRITE, NULL, &archive, NULL),
        REFIT_ERR_NOT_FOUND);
    assert_int_equal(refit_archive_describe(rig->archive, 0, &info, NULL), REFIT_ERR_NOT_FOUND);
    info.size = 4;
    assert_invalid(refit_archive_describe(rig->archive, 0, &info, NULL));
    assert_int_equal(refit_archive_read(rig->archive, 0, 1, &snapshot, NULL), REFIT_ERR_NOT_FOUND);
    assert_invalid(refit_archive_read(rig->archive, 0, 1, NULL, NULL));
    assert_invalid(refit_snapshot_open(rig->folder, NULL, &snapshot, NULL));
    assert_invalid(refit_snapshot_open("", NULL, &snapshot, NULL));
    assert_int_equal(refit_snapshot_open("/nowhere", NULL, &snapshot, NULL), REFIT_ERR_NOT_FOUND);
    assert_int_equal(refit_archive_count(NULL), 0);
    assert_int_equal(refit_snapshot_count(NULL), 0);
    refit_archive_close(NULL);
    refit_snapshot_close(NULL);
}

RIG_TEST(a_file_can_be_looked_at_alone)
{
    refit_snapshot *snapshot;
    refit_archive_info info = {.size = sizeof info};
    rig_open_with(rig, MANY, 2);
    assert_ok(refit_snapshot_open(rig_path(rig, 1), &rig->config, &snapshot, NULL));
    assert_ok(refit_snapshot_describe(snapshot, &info, NULL));
    assert_int_equal(info.version, 2);
    assert_string_equal(info.name, "0001-00000002-9f1c66a04b7de210.refit");
    refit_tensor tensor = {.size = sizeof tensor};
    const void *bytes = &tensor;
    uint64_t digest, tied;
    assert_ok(refit_snapshot_tensor(snapshot, 0, &tensor, &bytes, &digest, NULL));
    assert_null(bytes);
    assert_string_equal(tensor.name, "embed");
    assert_ok(refit_snapshot_tensor(snapshot, 2, NULL, NULL, &tied, NULL));
    assert_int_equal(digest, tied);
    assert_int_equal(refit_snapshot_tensor(snapshot, RIG_TENSORS, NULL, NULL, NULL, NULL),
                     REFIT_ERR_NOT_FOUND);
    tensor.size = 3;
    assert_invalid(refit_snapshot_tensor(snapshot, 0, &tensor, NULL, NULL, NULL));
    refit_snapshot_close(snapshot);
}

RIG_TEST(other_files_of_the_folder_are_passed_over)
{
    char path[160];
    static const char *const names[] = {"notes.txt",
                                        "1-2-3.refit",
                                        "0001-00000001-0.refit",
                                        "0001-00000001-9f1c66a04b7de210.refit.bak",
                                        "0000-00000001-9f1c66a04b7de210.refit",
                                        "0001-00000000-9f1c66a04b7de210.refit",
                                        "0001- 0000001-9f1c66a04b7de210.refit",
                                        "0001-00000001-9F1C66A04B7DE210.refit",
                                        "0001-99999999999999999999999-9f1c66a04b7de210.refit"};
    rig_open(rig, 10);
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        (void)snprintf(path, sizeof path, "%s/%s", rig->folder, names[i]);
        rig_store(path, (const unsigned char *)"x", 1);
    }
    rig_reopen(rig);
    assert_int_equal(refit_archive_count(rig->archive), 0);
    rig_keep(rig, RIG_EPOCH, 1);
    rig_expect(rig, RIG_EPOCH, 1);
}

int main(void)
{
    return test_run("archive");
}
