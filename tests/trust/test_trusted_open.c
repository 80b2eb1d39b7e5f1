/* Paths that only this user and root could have led where they lead: all others are refused, and
 * what is not refused is what open() opens. */
#include <stdio.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/file_tree.h"
#include "tests/support/test.h"
#include "trust/trusted_path.h"

#define STRANGER 12345

/* keys/file, and open/file in a folder that only sticks; its own folder is the test's alone. */
static file_tree tree_open(void)
{
    file_tree tree = file_tree_open();
    file_tree_write(&tree, "/keys/file", "kept");
    file_tree_write(&tree, "/open/file", "laid");
    return tree;
}

static const char *at(const file_tree *tree, const char *below, char path[256])
{
    (void)snprintf(path, 256, "%s/%s", tree->root, below);
    return path;
}

static void set_mode(const file_tree *tree, const char *below, mode_t mode)
{
    char path[256];
    assert_int_equal(chmod(at(tree, below, path), mode), 0);
}

static void link_to(const file_tree *tree, const char *below, const char *target)
{
    char path[256];
    assert_int_equal(symlink(target, at(tree, below, path)), 0);
}

/* Opens and closes, and leaves no descriptor open. */
static refit_status try_from(int folder, const char *path, refit_error *error)
{
    int lowest = dup(0), fd = -1;
    assert_int_equal(close(lowest), 0);
    refit_status status =
        rft_trusted_open(folder, path, "key file", O_RDONLY | O_NONBLOCK, &fd, error);
    if (status == REFIT_OK) {
        struct stat one, other;
        assert_int_equal(fstat(fd, &one), 0);
        assert_int_equal(fstatat(folder, path, &other, 0), 0);
        assert_true(one.st_ino == other.st_ino && one.st_dev == other.st_dev);
        assert_true((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
        assert_int_equal(close(fd), 0);
    }
    int again = dup(0);
    assert_int_equal(close(again), 0);
    assert_int_equal(again, lowest);
    return status;
}

static refit_status try(const file_tree *tree, const char *below, refit_error *error)
{
    char path[256];
    return try_from(AT_FDCWD, at(tree, below, path), error);
}

TEST(honest_ways_lead_where_open_leads)
{
    static const char *const ways[] = {"keys/file",  "/keys//./file", "open/../keys/file",
                                       "near/file",  "far/file",      "link",
                                       "link_twice", "keys",          "keys/",
                                       "near",       "keys/..",       "keys/back/keys/file"};
    file_tree tree = tree_open();
    char path[256];
    link_to(&tree, "near", "keys");
    link_to(&tree, "far", at(&tree, "keys//", path));
    link_to(&tree, "link", "./keys/file");
    link_to(&tree, "link_twice", "near/../link");
    link_to(&tree, "keys/back", "..");
    set_mode(&tree, "open", 01777);
    for (size_t i = 0; i < COUNT_OF(ways); i++) {
        refit_error error;
        if (try(&tree, ways[i], &error) != REFIT_OK) fail_msg("%s: %s", ways[i], error.text);
    }
    int folder = open(at(&tree, "keys", path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_ok(try_from(folder, "file", NULL));
    assert_ok(try_from(folder, "../link_twice", NULL));
    assert_ok(try_from(-1, at(&tree, "link_twice", path), NULL));
    assert_int_equal(close(folder), 0);
    assert_ok(try_from(AT_FDCWD, "/", NULL));
    file_tree_close(&tree);
}

TEST(ways_that_end_nowhere_say_why)
{
    file_tree tree = tree_open();
    char longest[NAME_MAX + 2], path[256];
    static char farther[PATH_MAX + 1];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    memset(farther, '/', sizeof farther - 1);
    link_to(&tree, "loop", "loop");
    link_to(&tree, "away", "/nowhere/at/all");
    link_to(&tree, "longer", longest);
    const struct {
        const char *way;
        int code;
    } rows[] = {{"none", ENOENT},         {"none/file", ENOENT},   {"keys/file/", ENOTDIR},
                {"keys/file/x", ENOTDIR}, {"loop", ELOOP},         {"loop/file", ELOOP},
                {"away", ENOENT},         {"longer", ENAMETOOLONG}};
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        refit_error error;
        assert_int_equal(try(&tree, rows[i].way, &error), REFIT_ERR_IO);
        assert_int_equal(error.subsystem, rows[i].code);
        assert_says(&error, rows[i].way);
    }
    assert_int_equal(try_from(AT_FDCWD, "", NULL), REFIT_ERR_IO);
    assert_int_equal(try_from(AT_FDCWD, farther, NULL), REFIT_ERR_IO);
    assert_int_equal(try_from(-1, "file", NULL), REFIT_ERR_IO);
    link_to(&tree, "far", at(&tree, "keys", path));
    file_tree_close(&tree);
}

static void expect_refused(const file_tree *tree, const char *below, const char *words)
{
    refit_error error;
    assert_int_equal(try(tree, below, &error), REFIT_ERR_SECURITY);
    if (strstr(error.text, words) == NULL) fail_msg("%s: %s", below, error.text);
}

TEST(a_folder_that_others_may_write_to_leads_nowhere)
{
    static const mode_t modes[] = {0777, 0770, 0720, 0702};
    file_tree tree = tree_open();
    link_to(&tree, "open/back", "../keys/file");
    link_to(&tree, "keys/there", "../open/file");
    link_to(&tree, "keys/through", "../open/../keys/file");
    for (size_t i = 0; i < COUNT_OF(modes); i++) {
        char folder[256];
        refit_error error;
        set_mode(&tree, "open", modes[i]);
        expect_refused(&tree, "open/file", "chmod go-w");
        expect_refused(&tree, "open/back", "chmod go-w"); /* any user may have made it */
        expect_refused(&tree, "keys/there", "chmod go-w");
        expect_refused(&tree, "keys/through", "chmod go-w");
        assert_int_equal(try(&tree, "open/file", &error), REFIT_ERR_SECURITY);
        assert_says(&error, at(&tree, "open", folder));
        assert_ok(try(&tree, "keys/file", NULL));
        assert_ok(try(&tree, "open", NULL)); /* the end is the caller's to check */
    }
    set_mode(&tree, "open", 01777);
    assert_ok(try(&tree, "keys/through", NULL));
    set_mode(&tree, "open", 0755);
    assert_ok(try(&tree, "open/back", NULL));
    file_tree_close(&tree);
}

/* A relative path is as good as the folder that it starts in, and those above it. */
TEST(where_one_stands_is_checked_too)
{
    file_tree tree = tree_open();
    char path[256], before[PATH_MAX];
    assert_non_null(getcwd(before, sizeof before));
    assert_int_equal(chdir(at(&tree, "keys", path)), 0);
    refit_status good = try_from(AT_FDCWD, "file", NULL);
    set_mode(&tree, "", 0777);
    refit_status bad = try_from(AT_FDCWD, "file", NULL);
    assert_int_equal(chdir(before), 0);
    assert_ok(good);
    assert_int_equal(bad, REFIT_ERR_SECURITY);
    file_tree_close(&tree);
}

TEST(what_another_user_owns_leads_nowhere)
{
    if (geteuid() != 0) skip(); /* only root can give files away */
    file_tree tree = tree_open();
    char path[256];
    link_to(&tree, "open/link", "../keys/file");
    set_mode(&tree, "open", 01777);
    assert_ok(try(&tree, "open/link", NULL));
    assert_int_equal(lchown(at(&tree, "open/link", path), STRANGER, (gid_t)-1), 0);
    expect_refused(&tree, "open/link", "12345");
    set_mode(&tree, "open", 0755);
    assert_int_equal(chown(at(&tree, "open", path), STRANGER, (gid_t)-1), 0);
    expect_refused(&tree, "open/file", "12345");
    assert_int_equal(chown(path, 0, (gid_t)-1), 0);
    assert_ok(try(&tree, "open/file", NULL));
    file_tree_close(&tree);
}

/* /proc/PID/cmdline of a process that hides belongs to root, but the process chose its text. */
TEST(what_the_kernel_makes_up_is_refused)
{
    static const char *const files[] = {"/proc/self/cmdline", "/proc/version",
                                        "/sys/kernel/mm/transparent_hugepage/enabled"};
    file_tree tree = tree_open();
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        char name[16];
        (void)snprintf(name, sizeof name, "link%zu", i);
        if (access(files[i], R_OK) != 0) continue; /* no such file in a sandbox */
        link_to(&tree, name, files[i]);
        expect_refused(&tree, name, "makes files up: use another place");
    }
    file_tree_close(&tree);
}

/* There the owner of "/" has the number of all users that are not mapped. */
static void open_as_unmapped(const char *path)
{
    refit_error error;
    if (setresgid(STRANGER, STRANGER, STRANGER) != 0 ||
        setresuid(STRANGER, STRANGER, STRANGER) != 0)
        _exit(0);
    if (unshare(CLONE_NEWUSER) != 0) _exit(0);
    bool system = try_from(AT_FDCWD, "/etc/passwd", NULL) == REFIT_OK;
    bool others = try_from(AT_FDCWD, path, &error) == REFIT_ERR_SECURITY;
    _exit(system && others ? 0 : 1);
}

TEST(stranger_unmapped_in_user_namespace_is_not_owner_of_all)
{
    char path[256];
    file_tree tree = tree_open();
    assert_int_equal(chmod(tree.root, 0755), 0);
    set_mode(&tree, "keys", 0755);
    set_mode(&tree, "keys/file", 0644);
    pid_t child = fork();
    if (child == 0) open_as_unmapped(at(&tree, "keys/file", path));
    assert_child_succeeds(child);
    file_tree_close(&tree);
}

int main(void)
{
    return test_run("trusted_open");
}
