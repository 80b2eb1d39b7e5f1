/* Another user that may read an archive can read its versions, and cannot keep its writer out.
 * Needs root, to be another user. */
#include <stdio.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/archive/archive_rig.h"
#include "tests/support/test.h"

#define OTHER_USER 65534
#define SKIPPED    77

/* In a process of another user: 0 if it could do what it came for. */
static int as_another_user(archive_rig *rig, int (*action)(archive_rig *rig))
{
    int status;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        if (setgid(OTHER_USER) != 0 || setuid(OTHER_USER) != 0) _exit(2);
        _exit(action(rig));
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_not_equal(WEXITSTATUS(status), 2);
    return WEXITSTATUS(status);
}

static int read_version(archive_rig *rig)
{
    refit_archive *archive = NULL;
    refit_snapshot *snapshot = NULL;
    refit_status status =
        refit_archive_open(rig->folder, REFIT_ARCHIVE_READ, &rig->config, &archive, NULL);
    if (status == REFIT_OK) status = refit_archive_read(archive, RIG_EPOCH, 1, &snapshot, NULL);
    refit_snapshot_close(snapshot);
    refit_archive_close(archive);
    return status == REFIT_OK ? 0 : 1;
}

static int hold_lock(archive_rig *rig)
{
    char path[128];
    (void)snprintf(path, sizeof path, "%s/.lock", rig->folder);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    return fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) == 0 ? 0 : 1;
}

TEST(a_reader_of_another_user_cannot_hold_the_lock)
{
    archive_rig rig = {0};
    refit_error error;
    rig_open(&rig, 10);
    rig_keep(&rig, RIG_EPOCH, 1);
    assert_int_equal(chmod(rig.root, 0755), 0);
    assert_int_equal(as_another_user(&rig, read_version), 1); /* refit made the folder */
    assert_int_equal(chmod(rig.folder, 0755), 0);             /* now its user lets others read */
    assert_int_equal(as_another_user(&rig, read_version), 0);
    refit_archive_close(rig.archive);
    rig.archive = NULL;
    assert_int_equal(as_another_user(&rig, hold_lock), 1);
    assert_ok(
        refit_archive_open(rig.folder, REFIT_ARCHIVE_WRITE, &rig.config, &rig.archive, &error));
    rig_close(&rig);
}

static int write_version(archive_rig *rig)
{
    refit_archive *archive = NULL;
    refit_error error = {0};
    refit_status status =
        refit_archive_open(rig->folder, REFIT_ARCHIVE_WRITE, &rig->config, &archive, &error);
    refit_archive_close(archive);
    return status == REFIT_ERR_IO && strstr(error.text, "user 0 writes to this archive") != NULL;
}

TEST(second_writer_of_shared_folder_is_told_one_user_writes)
{
    archive_rig rig = {0};
    rig_open(&rig, 10);
    rig_keep(&rig, RIG_EPOCH, 1);
    assert_int_equal(chmod(rig.root, 0755), 0);
    assert_int_equal(chown(rig.folder, 0, OTHER_USER), 0);
    assert_int_equal(chmod(rig.folder, 02770), 0);
    assert_int_equal(as_another_user(&rig, write_version), 1);
    rig_close(&rig);
}

int main(void)
{
    if (geteuid() != 0) return SKIPPED;
    return test_run("archive_lock");
}
