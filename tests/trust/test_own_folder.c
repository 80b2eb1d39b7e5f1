/* The folder of a user's own: which one it is, that it is made closed, and that one which another
 * user made or may enter is refused. */
#include <stdio.h>
#include <stdlib.h>

#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/file_tree.h"
#include "tests/support/test.h"
#include "trust/trusted_path.h"

#define STRANGER 61002u

static const char *at(const file_tree *tree, const char *below, char path[256])
{
    (void)snprintf(path, 256, "%s/%s", tree->root, below);
    return path;
}

/* XDG_RUNTIME_DIR is this folder of the tree, which has that mode. */
static file_tree runtime_of(mode_t mode)
{
    char path[256];
    file_tree tree = file_tree_open();
    assert_int_equal(mkdir(at(&tree, "run", path), 0700), 0);
    assert_int_equal(chmod(path, mode), 0);
    assert_int_equal(setenv("XDG_RUNTIME_DIR", path, 1), 0);
    return tree;
}

static void expect_in_runtime(const file_tree *tree)
{
    char found[RFT_OWN_FOLDER_BYTES], path[256];
    refit_error error = {0};
    if (rft_own_folder_find(0, found, &error) != REFIT_OK) fail_msg("%s", error.text);
    assert_string_equal(found, at(tree, "run/refit", path));
}

/* Whether it is one of the two places that do not depend on the variable. */
static void expect_usual(void)
{
    char found[RFT_OWN_FOLDER_BYTES], in_run[64], in_tmp[64];
    refit_error error = {0};
    struct stat folder;
    (void)snprintf(in_run, sizeof in_run, "/run/user/%u/refit", (unsigned)geteuid());
    (void)snprintf(in_tmp, sizeof in_tmp, "/tmp/refit-%u", (unsigned)geteuid());
    if (rft_own_folder_find(0, found, &error) != REFIT_OK) fail_msg("%s", error.text);
    if (strcmp(found, in_run) != 0) assert_string_equal(found, in_tmp);
    assert_int_equal(lstat(found, &folder), 0);
    assert_int_equal(folder.st_mode, S_IFDIR | 0700);
    assert_int_equal(folder.st_uid, geteuid());
}

static void expect_refused(const char *part)
{
    char found[RFT_OWN_FOLDER_BYTES];
    refit_error error;
    assert_int_equal(rft_own_folder_find(0, found, &error), REFIT_ERR_SECURITY);
    if (strstr(error.text, part) == NULL) fail_msg("no '%s' in: %s", part, error.text);
}

TEST(it_is_made_in_the_runtime_folder_closed_to_others)
{
    struct stat folder;
    char path[256];
    mode_t mask = umask(0);
    file_tree tree = runtime_of(0700);
    expect_in_runtime(&tree);
    expect_in_runtime(&tree);
    (void)umask(mask);
    assert_int_equal(lstat(at(&tree, "run/refit", path), &folder), 0);
    assert_int_equal(folder.st_mode, S_IFDIR | 0700);
    file_tree_close(&tree);
}

TEST(a_runtime_folder_that_others_may_enter_is_not_used)
{
    static const mode_t modes[] = {0755, 0770, 0701, 01777};
    for (size_t i = 0; i < COUNT_OF(modes); i++) {
        char path[256];
        file_tree tree = runtime_of(modes[i]);
        expect_usual();
        assert_int_not_equal(access(at(&tree, "run/refit", path), F_OK), 0);
        file_tree_close(&tree);
    }
}

TEST(what_is_no_folder_is_not_used)
{
    char path[256];
    file_tree tree = file_tree_open();
    file_tree_write(&tree, "/file", "kept");
    static const char *const names[] = {"file", "none", "file/none"};
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        assert_int_equal(setenv("XDG_RUNTIME_DIR", at(&tree, names[i], path), 1), 0);
        expect_usual();
    }
    assert_int_equal(setenv("XDG_RUNTIME_DIR", "relative", 1), 0);
    expect_usual();
    assert_int_equal(setenv("XDG_RUNTIME_DIR", "", 1), 0);
    expect_usual();
    assert_int_equal(unsetenv("XDG_RUNTIME_DIR"), 0);
    expect_usual();
    file_tree_close(&tree);
}

TEST(a_runtime_folder_of_another_user_is_not_used)
{
    char path[256];
    if (geteuid() != 0) skip();
    file_tree tree = runtime_of(0700);
    assert_int_equal(chown(at(&tree, "run", path), STRANGER, STRANGER), 0);
    expect_usual();
    /* Nor one that another user could exchange for another. */
    assert_int_equal(chown(path, 0, 0), 0);
    expect_in_runtime(&tree);
    assert_int_equal(chown(tree.root, STRANGER, STRANGER), 0);
    expect_usual();
    assert_int_equal(chown(tree.root, 0, 0), 0);
    file_tree_close(&tree);
}

TEST(what_others_may_enter_is_refused)
{
    char path[256];
    file_tree tree = runtime_of(0700);
    expect_in_runtime(&tree);
    assert_int_equal(chmod(at(&tree, "run/refit", path), 0755), 0);
    expect_refused("is open to other users (mode 0755): chmod 700 /");
    assert_int_equal(chmod(path, 0700), 0);
    expect_in_runtime(&tree);
    if (geteuid() == 0) {
        assert_int_equal(chown(path, STRANGER, STRANGER), 0);
        expect_refused("belongs to user 61002, not to user 0");
    }
    file_tree_close(&tree);
}

TEST(a_link_or_a_file_in_its_place_is_refused)
{
    char path[256], target[256];
    file_tree tree = runtime_of(0700);
    assert_int_equal(mkdir(at(&tree, "run/other", target), 0700), 0);
    assert_int_equal(symlink(target, at(&tree, "run/refit", path)), 0);
    expect_refused("is a link or no folder");
    assert_int_equal(unlink(path), 0);
    file_tree_write(&tree, "/run/refit", "");
    expect_refused("is a link or no folder");
    file_tree_close(&tree);
}

TEST(a_path_too_long_for_a_socket_is_not_used)
{
    char path[RFT_OWN_FOLDER_BYTES + 64], found[RFT_OWN_FOLDER_BYTES], in_runtime[256];
    file_tree tree = runtime_of(0700);
    size_t room = RFT_OWN_FOLDER_BYTES - 1 - strlen(at(&tree, "run/refit", in_runtime));
    assert_ok(rft_own_folder_find(room, found, NULL));
    assert_string_equal(found, in_runtime);
    assert_ok(rft_own_folder_find(room + 1, found, NULL));
    assert_string_not_equal(found, in_runtime);
    int length = snprintf(path, sizeof path, "%s/run", tree.root);
    while (length < RFT_OWN_FOLDER_BYTES) {
        path[length++] = '/';
        path[length] = '\0';
    }
    assert_int_equal(setenv("XDG_RUNTIME_DIR", path, 1), 0);
    expect_usual();
    file_tree_close(&tree);
}

static uint32_t count_of(const rft_own_places *places, const char *path)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < places->count; i++)
        count += strcmp(places->paths[i], path) == 0 && rft_own_places_has(places, i);
    return count;
}

TEST(all_places_are_looked_at_and_none_is_made)
{
    char path[256], target[256], usual[64];
    rft_own_places places;
    file_tree tree = runtime_of(0700);
    rft_own_places_list(&places);
    assert_int_equal(places.count, RFT_OWN_PLACES_MOST);
    assert_int_equal(count_of(&places, at(&tree, "run/refit", path)), 0);
    assert_int_not_equal(access(path, F_OK), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(count_of(&places, path), 1);
    /* The variable does not hide the place that a process without it chooses. */
    char chosen[RFT_OWN_FOLDER_BYTES];
    assert_int_equal(unsetenv("XDG_RUNTIME_DIR"), 0);
    assert_ok(rft_own_folder_find(0, chosen, NULL));
    assert_int_equal(count_of(&places, chosen), 1);
    (void)snprintf(usual, sizeof usual, "/tmp/refit-%u", (unsigned)geteuid());
    assert_string_equal(places.paths[2], usual);
    /* What others may enter, or lead elsewhere, is not there. */
    assert_int_equal(chmod(path, 0710), 0);
    assert_int_equal(count_of(&places, path), 0);
    assert_int_equal(chmod(path, 0700), 0);
    assert_int_equal(chmod(at(&tree, "run", target), 0755), 0);
    assert_int_equal(count_of(&places, path), 0);
    assert_int_equal(chmod(target, 0700), 0);
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(mkdir(at(&tree, "run/other", target), 0700), 0);
    assert_int_equal(symlink(target, path), 0);
    assert_int_equal(count_of(&places, path), 0);
    file_tree_close(&tree);
}

int main(void)
{
    return test_run("own_folder");
}
