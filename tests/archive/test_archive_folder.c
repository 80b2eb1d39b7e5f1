/* Folders that another program has changed: links, false names, entries that are not files, files
 * that may not be written. Nothing outside the folder is touched, and files that can be read are
 * read. */
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "archive_rig.h"

#define OTHER_USER 65534

static char path[2][160];

/* A path in the archive's folder, or next to it. */
static const char *inside(archive_rig *rig, const char *name)
{
    (void)snprintf(path[0], sizeof path[0], "%s/%s", rig->folder, name);
    return path[0];
}

static const char *next_to(archive_rig *rig, const char *name)
{
    (void)snprintf(path[1], sizeof path[1], "%s/%s", rig->root, name);
    return path[1];
}

static refit_status open_writer(archive_rig *rig, refit_error *error)
{
    return refit_archive_open(rig->folder, REFIT_ARCHIVE_WRITE, &rig->config, &rig->archive, error);
}

RIG_TEST(a_lock_that_is_a_link_is_refused)
{
    rig_open_with(rig, 10, 1);
    rig_close_archive(rig);
    assert_int_equal(unlink(inside(rig, ".lock")), 0);
    assert_int_equal(symlink(next_to(rig, "victim"), inside(rig, ".lock")), 0);
    assert_refused(open_writer(rig, error), REFIT_ERR_IO, ".lock");
    assert_int_equal(access(next_to(rig, "victim"), F_OK), -1);
    rig_expect(rig, RIG_EPOCH, 1); /* a reader needs no lock */
}

RIG_TEST(what_is_removed_or_written_is_never_through_a_link)
{
    size_t count;
    rig_open_with(rig, 10, 1);
    rig_close_archive(rig);
    rig_store(next_to(rig, "victim"), (const unsigned char *)"precious", 8);
    assert_int_equal(symlink(next_to(rig, "victim"), inside(rig, ".next")), 0);
    assert_ok(open_writer(rig, NULL));
    assert_int_equal(link(next_to(rig, "victim"), inside(rig, ".next")), 0);
    rig_keep(rig, RIG_EPOCH, 2);
    rig_expect(rig, RIG_EPOCH, 2);
    unsigned char *bytes = rig_load(next_to(rig, "victim"), &count);
    assert_int_equal(count, 8);
    assert_memory_equal(bytes, "precious", 8);
    free(bytes);
}

RIG_TEST(a_version_may_lie_elsewhere)
{
    rig_open_with(rig, 10, 2);
    const char *file = rig_path(rig, 0), *other = next_to(rig, "moved");
    assert_int_equal(rename(file, other), 0);
    assert_int_equal(symlink(other, file), 0);
    rig_expect(rig, RIG_EPOCH, 2);
    assert_int_equal(unlink(other), 0);
    assert_refused(rig_check(rig, RIG_EPOCH, 2, error), REFIT_ERR_NOT_FOUND, "0001-00000001-");
}

RIG_TEST(a_name_that_lies_is_refused_and_nothing_builds_on_it)
{
    refit_archive *archive;
    refit_archive_info info = {.size = sizeof info};
    size_t count;
    rig_open_with(rig, 10, 2);
    unsigned char *bytes = rig_load(rig_path(rig, 1), &count);
    rig_store(inside(rig, "0001-00000007-9f1c66a04b7de210.refit"), bytes, count);
    free(bytes);
    assert_refused(rig_check(rig, RIG_EPOCH, 7, error), REFIT_ERR_STALE, "it holds version 2");
    assert_ok(refit_archive_open(rig->folder, REFIT_ARCHIVE_READ, &rig->config, &archive, NULL));
    assert_int_equal(refit_archive_count(archive), 3);
    assert_int_equal(refit_archive_describe(archive, 2, &info, NULL), REFIT_ERR_STALE);
    refit_archive_close(archive);
    rig_reopen(rig);
    rig_keep(rig, RIG_EPOCH, 8);
    rig_expect(rig, RIG_EPOCH, 8);
    rig_expect(rig, RIG_EPOCH, 2);
}

RIG_TEST(what_is_no_file_is_refused_and_not_waited_for)
{
    refit_error error;
    rig_open_with(rig, 10, 1);
    assert_int_equal(mkdir(inside(rig, "0001-00000002-9f1c66a04b7de210.refit"), 0777), 0);
    assert_int_equal(mkfifo(inside(rig, "0001-00000003-9f1c66a04b7de210.refit"), 0666), 0);
    assert_int_equal(rig_check(rig, RIG_EPOCH, 2, &error), REFIT_ERR_CORRUPT);
    assert_int_equal(rig_check(rig, RIG_EPOCH, 3, &error), REFIT_ERR_CORRUPT);
    assert_says(&error, "is not a regular file");
    rig_reopen(rig);
    rig_keep(rig, RIG_EPOCH, 4);
    rig_expect(rig, RIG_EPOCH, 4);
}

/* Between the two steps of a version, and before them. */
RIG_TEST(a_folder_that_somebody_removes_is_not_found)
{
    char command[128];
    rig_open_with(rig, 10, 1);
    const refit_archive_version two = rig_version(rig, RIG_EPOCH, 2);
    assert_ok(refit_archive_write(rig->archive, &two, NULL));
    (void)snprintf(command, sizeof command, "rm -rf %s", rig->folder);
    assert_int_equal(system(command), 0);
    assert_int_equal(refit_archive_commit(rig->archive, NULL, NULL), REFIT_ERR_NOT_FOUND);
    assert_int_equal(refit_archive_write(rig->archive, &two, NULL), REFIT_ERR_NOT_FOUND);
    refit_archive_info info = {.size = sizeof info};
    assert_int_equal(refit_archive_describe(rig->archive, 0, &info, NULL), REFIT_ERR_NOT_FOUND);
}

RIG_TEST(what_somebody_has_removed_is_aborted)
{
    rig_open(rig, 10);
    const refit_archive_version one = rig_version(rig, RIG_EPOCH, 1);
    assert_ok(refit_archive_write(rig->archive, &one, NULL));
    assert_int_equal(unlink(inside(rig, ".next")), 0);
    assert_ok(refit_archive_abort(rig->archive, NULL));
    rig_keep(rig, RIG_EPOCH, 1);
}

static refit_status try_all(archive_rig *rig)
{
    refit_archive *archive;
    refit_error error;
    refit_archive_info info = {.size = sizeof info};
    if (open_writer(rig, &error) != REFIT_ERR_IO) return REFIT_ERR_STATE;
    if (strstr(error.text, "cannot create .lock") == NULL) return REFIT_ERR_STATE;
    refit_status status =
        refit_archive_open(rig->folder, REFIT_ARCHIVE_READ, &rig->config, &archive, NULL);
    if (status != REFIT_OK) return status;
    status = refit_archive_describe(archive, 1, &info, NULL);
    refit_archive_close(archive);
    return status == REFIT_OK ? rig_check(rig, RIG_EPOCH, 2, NULL) : status;
}

RIG_TEST(who_may_not_write_may_read)
{
    int status = 0;
    rig_open_with(rig, 10, 2);
    rig_close_archive(rig);
    assert_int_equal(unlink(inside(rig, ".lock")), 0);
    assert_int_equal(chmod(rig->root, 0755), 0);
    assert_int_equal(chmod(rig->folder, 0555), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (geteuid() == 0 && setuid(OTHER_USER) != 0) _exit(2);
        _exit(try_all(rig) == REFIT_OK ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_int_equal(chmod(rig->folder, 0755), 0);
}

static mode_t mode_of(const char *file)
{
    struct stat found;
    assert_int_equal(stat(file, &found), 0);
    return found.st_mode & 07777;
}

/* A lock of an earlier release too, which every reader could hold. */
RIG_TEST(the_lock_is_closed_to_others)
{
    refit_error error;
    mode_t before = umask(0);
    rig_open(rig, 10);
    umask(before);
    assert_int_equal(mode_of(rig->folder), 0700);
    assert_int_equal(mode_of(inside(rig, ".lock")), 0600);
    rig_keep(rig, RIG_EPOCH, 1);
    rig_close_archive(rig);
    assert_int_equal(chmod(inside(rig, ".lock"), 0644), 0);
    assert_ok(open_writer(rig, &error));
    assert_int_equal(mode_of(inside(rig, ".lock")), 0600);
}

int main(void)
{
    return test_run("archive_folder");
}
