/* The changes of each tensor, packed files, and files of format 1. */
#include "archive_rig.h"
#include "tests/support/failing_alloc.h"

#define MANY  200000u
#define EARLY "tests/archive/format1" /* versions 1 to 3 of a rig with 100 elements */

/* An archive opened to read, of which the caller wants one file by itself. */
static refit_snapshot *open_file(archive_rig *rig, uint32_t index)
{
    refit_snapshot *snapshot;
    assert_done(refit_snapshot_open(rig_path(rig, index), &rig->config, &snapshot, error));
    return snapshot;
}

static refit_tensor_change change_of(const refit_snapshot *snapshot, uint32_t tensor)
{
    refit_tensor_change change = {.size = sizeof change};
    assert_ok(refit_snapshot_change(snapshot, tensor, &change, NULL));
    return change;
}

static void assert_change(const refit_snapshot *snapshot, uint32_t tensor, uint64_t elements,
                          uint64_t changed, uint32_t same, uint32_t sparse, uint32_t dense)
{
    const refit_tensor_change change = change_of(snapshot, tensor);
    assert_int_equal(change.elements, elements);
    assert_int_equal(change.changed, changed);
    assert_int_equal(change.blocks_same, same);
    assert_int_equal(change.blocks_sparse, sparse);
    assert_int_equal(change.blocks_dense, dense);
}

/* "embed" and what is tied to it, "norm", and those that stay. */
static void assert_delta(const refit_snapshot *snapshot)
{
    const uint32_t blocks = MANY / 65536 + 1, bytes = 3 * MANY / 65536 + 1;
    assert_change(snapshot, 0, MANY, 2 * MANY / 100, 0, blocks, 0);
    assert_change(snapshot, 1, 9, 9, 0, 0, 1);
    assert_change(snapshot, 2, MANY, 2 * MANY / 100, 0, blocks, 0);
    assert_change(snapshot, 3, 0, 0, 0, 0, 0);
    assert_change(snapshot, 4, 4, 0, 1, 0, 0);
    assert_change(snapshot, 5, 1, 0, 1, 0, 0);
    assert_change(snapshot, 6, 3 * (uint64_t)MANY, 0, bytes, 0, 0);
}

RIG_TEST(a_delta_says_what_became_of_each_tensor)
{
    rig_open_with(rig, MANY, 2);
    refit_snapshot *anchor = open_file(rig, 0), *delta = open_file(rig, 1), *rebuilt;
    for (uint32_t i = 0; i < RIG_TENSORS; i++) {
        const refit_tensor_change change = change_of(anchor, i);
        assert_int_equal(change.changed, change.elements);
        assert_int_equal(change.blocks_same + change.blocks_sparse, 0);
    }
    assert_delta(delta);
    assert_ok(refit_archive_read(rig->archive, RIG_EPOCH, 2, &rebuilt, NULL));
    assert_delta(rebuilt);
    refit_tensor_change change = {.size = sizeof change};
    assert_int_equal(refit_snapshot_change(delta, RIG_TENSORS, &change, NULL), REFIT_ERR_NOT_FOUND);
    assert_invalid(refit_snapshot_change(NULL, 0, &change, NULL));
    change.size = 8;
    assert_invalid(refit_snapshot_change(delta, 0, &change, NULL));
    refit_snapshot_close(anchor);
    refit_snapshot_close(delta);
    refit_snapshot_close(rebuilt);
}

RIG_TEST(lists_are_read_without_weights)
{
    refit_snapshot *outline = NULL;
    refit_archive_info info = {.size = sizeof info};
    const void *bytes = rig;
    rig_open_with(rig, MANY, 3);
    refit_archive_version other = rig_version(rig, RIG_EPOCH, 4);
    other.count = other.weight_count = 2;
    rig_keep_this(rig, &other);
    const uint32_t order[] = {0, 1, 2, 3, 1, 3};
    for (uint32_t i = 0; i < 6; i++) {
        assert_ok(refit_archive_outline(rig->archive, order[i], &outline, NULL));
        assert_ok(refit_snapshot_describe(outline, &info, NULL));
        assert_int_equal(info.version, order[i] + 1);
        assert_int_equal(refit_snapshot_count(outline), order[i] == 3 ? 2 : RIG_TENSORS);
        if (order[i] == 1 || order[i] == 2) assert_delta(outline);
    }
    refit_tensor tensor = {.size = sizeof tensor};
    assert_ok(refit_snapshot_tensor(outline, 0, &tensor, &bytes, NULL, NULL));
    assert_null(bytes);
    assert_int_equal(refit_archive_outline(rig->archive, 4, &outline, NULL), REFIT_ERR_NOT_FOUND);
    assert_ok(refit_snapshot_describe(outline, &info, NULL)); /* as it was */
    assert_int_equal(info.version, 4);
    refit_snapshot_close(outline);
}

/* Whether the second outline failed, and the first was still there. */
static refit_status outline_twice(archive_rig *rig, bool *was_kept)
{
    refit_archive *archive;
    refit_snapshot *outline = NULL;
    refit_archive_info info = {.size = sizeof info};
    refit_status status =
        refit_archive_open(rig->folder, REFIT_ARCHIVE_READ, &rig->config, &archive, NULL);
    if (status != REFIT_OK) return status;
    status = refit_archive_outline(archive, 0, &outline, NULL);
    if (status == REFIT_OK) {
        status = refit_archive_outline(archive, 1, &outline, NULL);
        assert_ok(refit_snapshot_describe(outline, &info, NULL));
        assert_int_equal(info.version, status == REFIT_OK ? 2 : 1);
        assert_int_equal(refit_snapshot_count(outline), RIG_TENSORS);
        *was_kept = status != REFIT_OK;
    }
    refit_snapshot_close(outline);
    refit_archive_close(archive);
    return status;
}

RIG_TEST(failed_allocations_leave_an_outline_as_it_was)
{
    bool was_kept = false;
    rig_open_with(rig, 10, 2);
    rig_close_archive(rig);
    unsigned kept = 0;
    for (uint64_t nth = 1;; nth++) {
        failing_alloc_begin(nth);
        refit_status status = outline_twice(rig, &was_kept);
        bool came = failing_alloc_end();
        assert_int_equal(status, came ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
        kept += was_kept;
        if (!came) break;
    }
    assert_true(kept > 2);
}

static uint64_t kept_bytes(archive_rig *rig)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < rig_count(rig); i++)
        bytes += rig_info(rig, i).file_bytes;
    return bytes;
}

TEST(packed_files_are_smaller_and_give_the_same_bytes)
{
    archive_rig plain = {0}, packed = {0};
    rig_open_with(&plain, MANY, 9);
    rig_open_packed(&packed, MANY, 9);
    for (uint32_t i = 0; i < 9; i++) {
        const refit_archive_info info = rig_info(&packed, i), other = rig_info(&plain, i);
        assert_int_equal(other.frames_packed, 0);
        assert_int_equal(info.frames, other.frames);
        assert_true(info.frames_packed > 0 && info.frames_packed <= info.frames);
        assert_true(info.file_bytes < other.file_bytes);
        assert_int_equal(info.changed, other.changed);
        assert_memory_equal(info.digest, other.digest, 16);
        rig_expect(&packed, RIG_EPOCH, i + 1);
    }
    print_message("three anchors and six deltas of 1 MB: %llu bytes, packed %llu\n",
                  (unsigned long long)kept_bytes(&plain), (unsigned long long)kept_bytes(&packed));
    assert_true(kept_bytes(&packed) < kept_bytes(&plain) / 2);
    rig_close(&plain);
    rig_close(&packed);
}

RIG_TEST(packed_and_other_files_make_one_chain)
{
    rig_open(rig, MANY);
    for (uint64_t version = 1; version <= 4; version++) {
        rig->config.broadcast_compress =
            version % 2 == 0 ? REFIT_COMPRESS_ZSTD : REFIT_COMPRESS_NONE;
        rig_reopen(rig);
        rig_keep(rig, RIG_EPOCH, version);
    }
    rig->config.broadcast_compress = REFIT_COMPRESS_NONE; /* a reader needs no such option */
    for (uint64_t version = 1; version <= 4; version++)
        rig_expect(rig, RIG_EPOCH, version);
}

RIG_TEST(limits_hold_for_packed_files)
{
    refit_error error;
    rig_open_packed(rig, MANY, 1);
    const refit_archive_info info = rig_info(rig, 0);
    assert_true(info.file_bytes < info.weight_bytes / 2);
    rig->config.limits_version_bytes = info.weight_bytes - 1; /* more than the file has */
    assert_int_equal(rig_check(rig, RIG_EPOCH, 1, &error), REFIT_ERR_LIMIT);
}

static void open_early(archive_rig *rig)
{
    char command[256];
    rig_open(rig, 100);
    (void)snprintf(command, sizeof command, "cp " EARLY "/*.refit %s/", rig->folder);
    assert_int_equal(system(command), 0);
    rig_reopen(rig);
}

RIG_TEST(early_files_are_read)
{
    open_early(rig);
    assert_int_equal(rig_count(rig), 3);
    for (uint64_t version = 1; version <= 3; version++)
        rig_expect(rig, RIG_EPOCH, version);
    refit_snapshot *anchor = open_file(rig, 0), *delta = open_file(rig, 1);
    assert_change(anchor, 0, 100, 100, 0, 0, 1);
    assert_change(delta, 0, 100, 2, 0, 1, 0);
    assert_change(delta, 1, 9, REFIT_CHANGED_UNKNOWN, 0, 0, 1); /* they were not counted */
    assert_change(delta, 6, 300, 0, 1, 0, 0);
    refit_snapshot_close(anchor);
    anchor = NULL;
    assert_ok(refit_archive_outline(rig->archive, 1, &anchor, NULL));
    assert_change(anchor, 0, 100, 2, 0, 1, 0);
    refit_snapshot_close(anchor);
    refit_snapshot_close(delta);
}

int main(void)
{
    return test_run("archive_changes");
}
