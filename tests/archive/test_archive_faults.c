/*
 * The archive when the system refuses, or its process dies, at any step: the folder has whole
 * versions only, none that was committed is lost, and the next one can be written.
 *
 * The linker puts the functions below before the system's, so that the n-th of all calls fails, or
 * ends the process.
 */
#include <errno.h>
#include <sys/wait.h>
#include <unistd.h>

#include "archive_rig.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/file_size_limit.h"

/* ---- Calls that fail ---- */

typedef enum fault {
    FAULT_NONE,
    FAULT_REFUSED, /* the n-th call */
    FAULT_BROKEN,  /* that one and all after it */
    FAULT_SHORT,
    FAULT_STUCK, /* a write takes nothing, and says no error */
    FAULT_KILLED
} fault;

static fault kind;
static unsigned calls, fatal;

/* Whether this call is the one. */
static bool is_hit(void)
{
    if (kind == FAULT_NONE || ++calls < fatal) return false;
    if (calls > fatal && kind != FAULT_BROKEN) return false;
    if (kind == FAULT_KILLED) _exit(7);
    errno = ENOSPC;
    return true;
}

ssize_t __real_pwrite(int file, const void *bytes, size_t count, off_t at);
int __real_fsync(int file);
int __real_openat(int folder, const char *name, int flags, unsigned mode);
int __real_renameat(int from, const char *name, int to, const char *as);
ssize_t __wrap_pwrite(int file, const void *bytes, size_t count, off_t at);
int __wrap_fsync(int file);
int __wrap_openat(int folder, const char *name, int flags, unsigned mode);
int __wrap_renameat(int from, const char *name, int to, const char *as);
int __real_unlinkat(int folder, const char *name, int flags);
int __wrap_unlinkat(int folder, const char *name, int flags);

ssize_t __wrap_pwrite(int file, const void *bytes, size_t count, off_t at)
{
    if (kind == FAULT_SHORT) return __real_pwrite(file, bytes, count < 3 ? count : 3, at);
    if (kind == FAULT_STUCK) return 0;
    return is_hit() ? -1 : __real_pwrite(file, bytes, count, at);
}

int __wrap_fsync(int file)
{
    return is_hit() ? -1 : __real_fsync(file);
}

int __wrap_openat(int folder, const char *name, int flags, unsigned mode)
{
    return is_hit() ? -1 : __real_openat(folder, name, flags, mode);
}

int __wrap_renameat(int from, const char *name, int to, const char *as)
{
    return is_hit() ? -1 : __real_renameat(from, name, to, as);
}

int __wrap_unlinkat(int folder, const char *name, int flags)
{
    return is_hit() ? -1 : __real_unlinkat(folder, name, flags);
}

static void begin_fault(fault what, unsigned nth)
{
    kind = what;
    calls = 0;
    fatal = nth;
}

/* Whether the fault came. */
static bool end_fault(void)
{
    bool came = kind != FAULT_NONE && calls >= fatal;
    kind = FAULT_NONE;
    return came;
}

/* ---- Tests ---- */

static refit_status try_version(archive_rig *rig, uint64_t version, refit_error *error)
{
    const refit_archive_version what = rig_version(rig, RIG_EPOCH, version);
    refit_status status = refit_archive_write(rig->archive, &what, error);
    return status == REFIT_OK ? refit_archive_commit(rig->archive, NULL, error) : status;
}

/* A writer that is killed may have named its version before. */
static void assert_whole(archive_rig *rig, uint32_t least)
{
    uint32_t count = rig_count(rig);
    assert_true(count == least || count == least + 1);
    for (uint32_t i = 1; i <= count; i++)
        rig_expect(rig, RIG_EPOCH, i);
}

RIG_TEST(a_call_that_is_refused_leaves_the_folder_as_it_was)
{
    unsigned nth = 1;
    for (bool came = true; came; nth++) {
        refit_error error = {0};
        rig_open_with(rig, 10, 1);
        begin_fault(FAULT_REFUSED, nth);
        refit_status status = try_version(rig, 2, &error);
        came = end_fault();
        assert_int_equal(status, came ? REFIT_ERR_IO : REFIT_OK);
        if (came) {
            assert_int_equal(error.subsystem, ENOSPC);
            assert_says(&error, "No space left");
        }
        assert_int_equal(rig_names(rig), rig_count(rig)); /* nothing else is left */
        assert_whole(rig, 1);
        if (nth % 2 == 0) rig_reopen(rig); /* or the same archive goes on */
        rig_keep(rig, RIG_EPOCH, 2);
        assert_int_equal(rig_info(rig, 1).base, 1);
        rig_keep(rig, RIG_EPOCH, 3);
        assert_whole(rig, 3);
    }
    assert_true(nth > 10);
}

/* Everything in the folder is in its list, and can be rebuilt. */
static void assert_known(archive_rig *rig)
{
    const uint32_t count = rig_count(rig);
    assert_int_equal(rig_names(rig), count);
    assert_int_equal(refit_archive_count(rig->archive), count);
    for (uint32_t i = 0; i < count; i++)
        rig_expect(rig, RIG_EPOCH, rig_info(rig, i).version);
}

/* Version 2 fails from the n-th call on; then the same archive goes on, and removes old files. */
static bool fails_and_goes_on(fault what, unsigned nth)
{
    archive_rig rig = {0};
    rig_open_with(&rig, 10, 1);
    begin_fault(what, nth);
    refit_status status = try_version(&rig, 2, NULL);
    const bool came = end_fault();
    assert_int_equal(status, came ? REFIT_ERR_IO : REFIT_OK);
    if (what == FAULT_REFUSED) assert_int_equal(rig_count(&rig), came ? 1 : 2);
    const bool there = refit_archive_count(rig.archive) == 2;
    assert_int_equal(rig_count(&rig), there ? 2 : 1);
    rig_keep(&rig, RIG_EPOCH, 3);
    assert_int_equal(rig_info(&rig, there ? 2 : 1).base, there ? 2 : 0);
    assert_known(&rig);
    assert_ok(refit_archive_prune(rig.archive, 1, NULL, NULL));
    assert_known(&rig);
    assert_int_equal(rig_count(&rig), there ? 3 : 1);
    rig_keep(&rig, RIG_EPOCH, 4);
    rig_close(&rig);
    return came;
}

TEST(after_any_failure_the_archive_knows_what_the_folder_has)
{
    static const fault faults[] = {FAULT_REFUSED, FAULT_BROKEN};
    for (size_t i = 0; i < COUNT_OF(faults); i++) {
        unsigned nth = 1;
        while (fails_and_goes_on(faults[i], nth))
            nth++;
        assert_true(nth > 10);
    }
}

/* Whether the child met its fault; the folder that it leaves is opened again. */
static bool has_died(archive_rig *rig, pid_t child)
{
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && (WEXITSTATUS(status) == 7 || WEXITSTATUS(status) == 0));
    assert_ok(
        refit_archive_open(rig->folder, REFIT_ARCHIVE_WRITE, &rig->config, &rig->archive, NULL));
    return WEXITSTATUS(status) == 7;
}

/* In a child, whose death is as sudden as SIGKILL's: a version is written, or all but the last are
 * removed. */
static bool die_in(archive_rig *rig, bool pruning, unsigned nth)
{
    refit_archive_close(rig->archive);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        const refit_archive_version what = rig_version(rig, RIG_EPOCH, 3);
        refit_archive *archive;
        if (!pruning) begin_fault(FAULT_KILLED, nth);
        if (refit_archive_open(rig->folder, REFIT_ARCHIVE_WRITE, &rig->config, &archive, NULL) !=
            REFIT_OK)
            _exit(9);
        if (pruning) begin_fault(FAULT_KILLED, nth);
        refit_status status = pruning ? refit_archive_prune(archive, 1, NULL, NULL)
                                      : refit_archive_write(archive, &what, NULL);
        if (status == REFIT_OK && !pruning) status = refit_archive_commit(archive, NULL, NULL);
        _exit(status == REFIT_OK ? 0 : 9);
    }
    return has_died(rig, child);
}

RIG_TEST(a_writer_killed_between_any_two_steps_leaves_whole_versions)
{
    unsigned nth = 1;
    for (bool died = true; died; nth++) {
        rig_open_with(rig, 10, 2);
        died = die_in(rig, false, nth);
        assert_whole(rig, 2);
        assert_int_equal(rig_names(rig), rig_count(rig)); /* what it left is removed */
        rig_keep(rig, RIG_EPOCH, 3);
        assert_int_equal(rig_count(rig), 3);
        rig_expect(rig, RIG_EPOCH, 3);
    }
    assert_true(nth > 10);
}

/* ---- Removing old files ---- */

#define KEPT 11u /* versions: anchors at 1, 5 and 9 */

/* What is left can be rebuilt, all of it, and the newest chain is there. */
static uint32_t assert_left(archive_rig *rig)
{
    const uint32_t count = rig_count(rig);
    assert_int_equal(rig_names(rig), count);
    assert_true(count >= 3 && count <= KEPT);
    for (uint32_t i = 0; i < count; i++)
        rig_expect(rig, RIG_EPOCH, rig_info(rig, i).version);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(rig_info(rig, count - 1 - i).version, KEPT - i);
    return count;
}

RIG_TEST(prune_killed_between_two_steps_leaves_rebuildable_versions)
{
    unsigned nth = 1;
    uint32_t least = KEPT, most = 0;
    for (bool died = true; died; nth++) {
        rig_open_with(rig, 10, KEPT);
        died = die_in(rig, true, nth);
        const uint32_t left = assert_left(rig);
        least = left < least ? left : least;
        most = left > most ? left : most;
        assert_ok(refit_archive_prune(rig->archive, 1, NULL, NULL));
        assert_int_equal(assert_left(rig), 3);
        rig_keep(rig, RIG_EPOCH, KEPT + 1);
        assert_int_equal(rig_info(rig, 3).base, KEPT);
        rig_expect(rig, RIG_EPOCH, KEPT + 1);
    }
    assert_int_equal(least, 3);
    assert_int_equal(most, KEPT);
    assert_true(nth > 8 + 3); /* eight files, and the folder's fsyncs */
}

RIG_TEST(a_prune_that_is_refused_says_so_and_can_be_called_again)
{
    unsigned nth = 1;
    for (bool came = true; came; nth++) {
        refit_error error = {0};
        uint32_t removed = 99;
        rig_open_with(rig, 10, KEPT);
        assert_ok(refit_archive_prune(rig->archive, 3, NULL, NULL)); /* looks */
        begin_fault(FAULT_REFUSED, nth);
        refit_status status = refit_archive_prune(rig->archive, 1, &removed, &error);
        came = end_fault();
        assert_int_equal(status, came ? REFIT_ERR_IO : REFIT_OK);
        assert_int_equal(removed, KEPT - assert_left(rig));
        assert_int_equal(refit_archive_count(rig->archive), KEPT - removed);
        assert_ok(refit_archive_prune(rig->archive, 1, NULL, NULL));
        assert_int_equal(assert_left(rig), 3);
    }
    assert_true(nth > 8 + 3);
}

/* How many files are opened to read the last of so many versions, which build on each other. */
static unsigned opened_for(uint32_t versions)
{
    archive_rig rig = {0};
    refit_snapshot *snapshot;
    rig_open(&rig, 10);
    rig.config.archive_anchor_every = 1000;
    rig_reopen(&rig);
    for (uint64_t version = 1; version <= versions; version++)
        rig_keep(&rig, RIG_EPOCH, version);
    begin_fault(FAULT_REFUSED, 0); /* counts */
    assert_ok(refit_archive_read(rig.archive, RIG_EPOCH, versions, &snapshot, NULL));
    const unsigned opened = calls;
    (void)end_fault();
    refit_snapshot_close(snapshot);
    rig_close(&rig);
    return opened;
}

TEST(a_long_chain_is_read_file_by_file)
{
    assert_int_equal(opened_for(50), 2 * 50); /* each for its header, then for all of it */
    assert_int_equal(opened_for(100), 2 * 100);
}

RIG_TEST(writes_that_take_little_are_finished)
{
    rig_open(rig, 10);
    begin_fault(FAULT_SHORT, 0);
    rig_keep(rig, RIG_EPOCH, 1);
    rig_keep(rig, RIG_EPOCH, 2);
    (void)end_fault();
    rig_expect(rig, RIG_EPOCH, 2);
}

RIG_TEST(a_write_that_takes_nothing_is_an_error)
{
    refit_error error;
    rig_open_with(rig, 10, 1);
    begin_fault(FAULT_STUCK, 0);
    assert_int_equal(try_version(rig, 2, &error), REFIT_ERR_IO);
    (void)end_fault();
    assert_int_equal(error.subsystem, ENOSPC);
    rig_keep(rig, RIG_EPOCH, 2);
    rig_expect(rig, RIG_EPOCH, 2);
}

RIG_TEST(a_full_disk_is_an_error_of_the_write)
{
    refit_error error;
    rig_open_with(rig, 200000, 1);
    const struct rlimit before = file_size_limit_to(1000);
    refit_status status = try_version(rig, 2, &error);
    file_size_limit_back(&before);
    assert_int_equal(status, REFIT_ERR_IO);
    assert_int_equal(error.subsystem, EFBIG);
    assert_int_equal(rig_names(rig), 1);
    rig_keep(rig, RIG_EPOCH, 2);
    rig_expect(rig, RIG_EPOCH, 2);
}

RIG_TEST(failed_allocations_leak_nothing)
{
    rig_open_packed(rig, 4000, 2);
    refit_archive_close(rig->archive);
    for (uint64_t nth = 1;; nth++) {
        const refit_archive_version three = rig_version(rig, RIG_EPOCH, 3);
        refit_archive *archive;
        refit_snapshot *snapshot;
        failing_alloc_begin(nth);
        refit_status status =
            refit_archive_open(rig->folder, REFIT_ARCHIVE_WRITE, &rig->config, &archive, NULL);
        if (status == REFIT_OK) {
            status = refit_archive_write(archive, &three, NULL);
            if (status == REFIT_OK) status = refit_archive_abort(archive, NULL);
            if (status == REFIT_OK) {
                status = refit_archive_read(archive, RIG_EPOCH, 2, &snapshot, NULL);
                if (status == REFIT_OK) refit_snapshot_close(snapshot);
            }
            refit_archive_close(archive);
        }
        bool came = failing_alloc_end();
        assert_int_equal(status, came ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
        assert_int_equal(rig_names(rig), 2);
        if (!came) break;
    }
    rig->archive = NULL;
}

/* The list of files has room for 64, and grows for the next. */
RIG_TEST(a_list_that_cannot_grow_refuses_the_version)
{
    bool came = true;
    failing_alloc_begin(0);
    rig_open_with(rig, 100, 64);
    for (uint64_t nth = 1; came; nth++) {
        failing_alloc_here(nth);
        refit_status status = try_version(rig, 65, NULL);
        came = failing_alloc_stop_here();
        assert_int_equal(status, came ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
        assert_int_equal(rig_names(rig), came ? 64 : 65);
    }
    rig_close_archive(rig);
    assert_false(failing_alloc_end());
}

/* The image held another run's version, whose bytes are much alike, before it was given up for the
 * one that is to be resumed. */
RIG_TEST(what_a_failed_resume_leaves_is_no_base)
{
    bool came = true;
    const uint64_t alike = RIG_EPOCH + 256;
    failing_alloc_begin(0);
    rig_open_with(rig, 4000, 2);
    for (uint64_t nth = 1; came; nth++) {
        const uint64_t other = 2 * nth;
        rig_keep(rig, alike, other);
        failing_alloc_here(nth);
        refit_status status = try_version(rig, 3, NULL);
        came = failing_alloc_stop_here();
        assert_int_equal(status, came ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
        rig_keep(rig, alike, other + 1);
        rig_expect(rig, alike, other + 1);
    }
    rig_close_archive(rig);
    assert_false(failing_alloc_end());
}

RIG_TEST(failed_allocations_of_one_file_leak_nothing)
{
    char path[160];
    rig_open_with(rig, 10, 1);
    (void)snprintf(path, sizeof path, "%s", rig_path(rig, 0));
    rig_close_archive(rig);
    for (uint64_t nth = 1;; nth++) {
        refit_snapshot *snapshot;
        failing_alloc_begin(nth);
        refit_status status = refit_snapshot_open(path, &rig->config, &snapshot, NULL);
        if (status == REFIT_OK) refit_snapshot_close(snapshot);
        bool came = failing_alloc_end();
        assert_int_equal(status, came ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
        if (!came) break;
    }
}

int main(void)
{
    return test_run("archive_faults");
}
