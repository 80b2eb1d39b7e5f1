/* The folder of allowed keys: what is in it is known, what changes is noticed, junk does no harm,
 * and a folder or file that others could have written allows no key. */
#include <stdio.h>
#include <stdlib.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <refit/host.h>

#include "tests/support/failing_alloc.h"
#include "tests/support/key_fixture.h"
#include "tests/support/test.h"
#include "trust/allow_list.h"

static key_fixture smith;
static char allowed[256]; /* the folder of the allowed keys */
static rft_allow_list *list;

static int make_keys(void **state)
{
    smith = key_fixture_open();
    key_fixture_path(&smith, "allow", allowed);
    list = NULL;
    return 0;
}

static int remove_keys(void **state)
{
    rft_allow_list_close(list);
    key_fixture_close(&smith);
    return 0;
}

#define WITH_KEYS(name) TEST_WITH(name, make_keys, remove_keys)

static void start_anew(void)
{
    (void)remove_keys(NULL);
    (void)make_keys(NULL);
}

static void open_list(void)
{
    refit_error error;
    if (rft_allow_list_open(allowed, &list, &error) != REFIT_OK) fail_msg("%s", error.text);
}

static void expect_refused(refit_status status, const char *words)
{
    rft_allow_list *other = NULL;
    refit_error error;
    assert_int_equal(rft_allow_list_open(allowed, &other, &error), status);
    assert_says(&error, words);
}

/* The 40 characters of keys/NAME.public. */
static void key_of(const char *name, char text[RFT_KEY_TEXT])
{
    char path[256], file[128];
    rft_key key;
    (void)snprintf(file, sizeof file, "keys/%s.public", name);
    key_fixture_path(&smith, file, path);
    assert_ok(rft_key_file_read(AT_FDCWD, path, RFT_KEY_PUBLIC, &key, NULL));
    rft_key_print(&key, text);
}

static bool has(const char *name)
{
    char key[RFT_KEY_TEXT], found[RFT_KEY_NAME_BYTES] = "";
    key_of(name, key);
    bool there = rft_allow_list_has(list, key, found);
    if (there) assert_string_equal(found, name);
    return there;
}

WITH_KEYS(keys_come_and_go_with_their_files)
{
    open_list();
    assert_int_equal(rft_allow_list_count(list), 0); /* an empty folder is allowed */
    uint64_t edition = rft_allow_list_edition(list);
    key_fixture_admit(&smith, "w0");
    key_fixture_make(&smith, "w1");
    assert_false(has("w0")); /* not looked at yet */
    rft_allow_list_refresh(list);
    assert_true(has("w0"));
    assert_false(has("w1"));
    assert_true(rft_allow_list_edition(list) > edition);

    edition = rft_allow_list_edition(list);
    rft_allow_list_refresh(list);
    assert_int_equal(rft_allow_list_edition(list), edition);

    key_fixture_allow(&smith, "w1");
    rft_allow_list_refresh(list);
    assert_true(has("w1"));
    key_fixture_revoke(&smith, "w0");
    rft_allow_list_refresh(list);
    assert_false(has("w0"));
    assert_true(has("w1"));
    assert_false(rft_allow_list_has(list, "", NULL));
}

/* Within one tick of the file system's clock, over and over. */
WITH_KEYS(a_change_right_after_a_look_is_noticed)
{
    key_fixture_make(&smith, "w0");
    open_list();
    for (int i = 0; i < 200; i++) {
        key_fixture_allow(&smith, "w0");
        rft_allow_list_refresh(list);
        assert_true(has("w0"));
        key_fixture_revoke(&smith, "w0");
        rft_allow_list_refresh(list);
        assert_false(has("w0"));
    }
}

WITH_KEYS(a_file_with_another_key_is_another_key)
{
    key_fixture_admit(&smith, "w0");
    open_list();
    char before[RFT_KEY_TEXT], path[256];
    key_of("w0", before);
    assert_true(rft_allow_list_has(list, before, NULL));
    key_fixture_revoke(&smith, "w0");
    key_fixture_path(&smith, "keys/w0.secret", path);
    assert_int_equal(unlink(path), 0);
    key_fixture_path(&smith, "keys/w0.public", path);
    assert_int_equal(unlink(path), 0);
    key_fixture_admit(&smith, "w0");
    rft_allow_list_refresh(list);
    assert_false(rft_allow_list_has(list, before, NULL));
    assert_true(has("w0"));
}

static void link_to(const char *file, const char *target)
{
    char path[256];
    key_fixture_path(&smith, file, path);
    assert_int_equal(symlink(target, path), 0);
}

/* Which no open() opens: ENXIO. */
static void put_socket(const char *file)
{
    char path[256];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    key_fixture_path(&smith, file, path);
    assert_in_range(snprintf(address.sun_path, sizeof address.sun_path, "%s", path), 1,
                    sizeof address.sun_path - 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (const struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(close(fd), 0);
}

WITH_KEYS(junk_in_the_folder_is_passed_over)
{
    char path[256], target[256];
    key_fixture_admit(&smith, "w0");
    key_fixture_make(&smith, "w1");
    file_tree_write(&smith.tree, "/allow/README", "hello");
    file_tree_write(&smith.tree, "/allow/bad.public", "not a key");
    file_tree_write(&smith.tree, "/allow/empty.public", "");
    file_tree_write(&smith.tree, "/allow/.hidden.public", "x");
    file_tree_write(&smith.tree, "/allow/w 2.public", "x");
    file_tree_write(&smith.tree, "/allow/.public", "x");
    file_tree_write(&smith.tree, "/allow/folder.public/file", "x");
    key_fixture_path(&smith, "allow/pipe.public", path);
    assert_int_equal(mkfifo(path, 0600), 0);
    char longer[300];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    link_to("allow/loop.public", "loop.public");
    link_to("allow/away.public", "/nowhere/at/all");
    link_to("allow/through.public", "/etc/passwd/no-folder");
    link_to("allow/longer.public", longer);
    put_socket("allow/socket.public");
    /* A secret that was put there by mistake allows no key. */
    key_fixture_path(&smith, "keys/w1.secret", target);
    key_fixture_path(&smith, "allow/w1.public", path);
    assert_int_equal(link(target, path), 0);
    open_list();
    assert_int_equal(rft_allow_list_count(list), 1);
    assert_true(has("w0"));
    link_to("allow/late.public", "/etc/passwd/no-folder");
    rft_allow_list_refresh(list);
    assert_true(has("w0"));
}

/* As configuration systems lay out files that they swap all at once. */
WITH_KEYS(links_to_keys_are_followed)
{
    char target[256], path[256];
    key_fixture_make(&smith, "w0");
    key_fixture_path(&smith, "keys/w0.public", target);
    key_fixture_path(&smith, "allow/w0.public", path);
    assert_int_equal(symlink(target, path), 0);
    open_list();
    assert_true(has("w0"));
    assert_int_equal(chmod(target, 0666), 0);
    rft_allow_list_refresh(list);
    char key[RFT_KEY_TEXT];
    assert_int_equal(rft_allow_list_count(list), 0);
    assert_int_equal(chmod(target, 0644), 0);
    rft_allow_list_refresh(list);
    key_of("w0", key);
    assert_true(rft_allow_list_has(list, key, NULL));
}

/* While `checked` has a mode that lets others write there, no key is allowed, and the list does not
 * open. */
static void assert_shut_while(const char *checked, const mode_t *modes, size_t count, mode_t good)
{
    char key[RFT_KEY_TEXT];
    key_fixture_admit(&smith, "w0");
    key_of("w0", key);
    open_list();
    assert_true(rft_allow_list_has(list, key, NULL));
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(chmod(checked, modes[i]), 0);
        expect_refused(REFIT_ERR_SECURITY, "chmod go-w");
        rft_allow_list_refresh(list);
        assert_false(rft_allow_list_has(list, key, NULL));
        assert_int_equal(chmod(checked, good), 0);
        rft_allow_list_refresh(list);
        assert_true(rft_allow_list_has(list, key, NULL));
    }
}

WITH_KEYS(a_folder_that_others_can_write_to_allows_no_key)
{
    static const mode_t modes[] = {0777, 0720, 0702};
    assert_shut_while(allowed, modes, COUNT_OF(modes), 0755);
}

/* They could put another in its place; where the sticky bit is, they could not. */
WITH_KEYS(a_folder_within_one_that_others_can_write_to_allows_no_key)
{
    static const mode_t mode = 0770;
    assert_shut_while(smith.tree.root, &mode, 1, 01777);
}

WITH_KEYS(a_folder_that_vanishes_allows_no_key_until_it_is_back)
{
    char away[256];
    key_fixture_admit(&smith, "w0");
    open_list();
    key_fixture_path(&smith, "away", away);
    assert_int_equal(rename(allowed, away), 0);
    rft_allow_list_refresh(list);
    assert_false(has("w0"));
    rft_allow_list_refresh(list);
    expect_refused(REFIT_ERR_IO, "security.allow");
    assert_int_equal(rename(away, allowed), 0);
    rft_allow_list_refresh(list);
    assert_true(has("w0"));
}

/* ---- What comes between counting and reading */

#define COMERS 9u

static const key_fixture *comers; /* has the keys w1 to w9, which come; NULL: none come */

void __real_rewinddir(DIR *folder);
void __wrap_rewinddir(DIR *folder);

static void name_comer(char name[8], uint32_t number)
{
    snprintf(name, 8, "w%u", number);
}

void __wrap_rewinddir(DIR *folder)
{
    for (uint32_t i = 1; comers != NULL && i <= COMERS; i++) {
        char name[8];
        name_comer(name, i);
        key_fixture_allow(comers, name);
    }
    comers = NULL;
    __real_rewinddir(folder);
}

/* Whichever of them the folder lists first. */
WITH_KEYS(keys_that_were_there_stay_while_others_come)
{
    key_fixture_admit(&smith, "w0");
    for (uint32_t i = 1; i <= COMERS; i++) {
        char name[8];
        name_comer(name, i);
        key_fixture_make(&smith, name);
    }
    open_list();
    comers = &smith;
    rft_allow_list_refresh(list);
    assert_null(comers);
    assert_true(has("w0"));
    assert_int_equal(rft_allow_list_count(list), 1 + COMERS);
}

/* ---- What cannot be read for now */

static const char *unreadable; /* the name that cannot be opened; NULL: none */
static int unreadable_code;

int __real_openat(int folder, const char *name, int flags, unsigned mode);
int __wrap_openat(int folder, const char *name, int flags, unsigned mode);

int __wrap_openat(int folder, const char *name, int flags, unsigned mode)
{
    if (unreadable == NULL || strcmp(name, unreadable) != 0)
        return __real_openat(folder, name, flags, mode);
    errno = unreadable_code;
    return -1;
}

/* The same call as libc's headers name it where calls are checked (_FORTIFY_SOURCE). */
int __wrap___openat_2(int folder, const char *name, int flags);
int __wrap___openat_2(int folder, const char *name, int flags)
{
    return __wrap_openat(folder, name, flags, 0);
}

static void refresh_without(const char *name, int code)
{
    unreadable = name;
    unreadable_code = code;
    rft_allow_list_refresh(list);
    unreadable = NULL;
}

static const int PASSING[] = {EMFILE, ENFILE, ENOMEM, EIO, ESTALE};
#define PASSING_COUNT (COUNT_OF(PASSING))

WITH_KEYS(a_file_that_cannot_be_read_keeps_no_other_key_in)
{
    for (size_t i = 0; i < PASSING_COUNT; i++) {
        start_anew();
        key_fixture_admit(&smith, "w0");
        key_fixture_admit(&smith, "w1");
        key_fixture_make(&smith, "w2");
        open_list();
        key_fixture_revoke(&smith, "w1");
        key_fixture_allow(&smith, "w2");
        refresh_without("w0.public", PASSING[i]);
        assert_true(has("w0"));
        assert_false(has("w1"));
        assert_true(has("w2"));
        assert_int_equal(rft_allow_list_count(list), 2);
        key_fixture_revoke(&smith, "w0"); /* gone is gone, however it was before */
        refresh_without("w0.public", PASSING[i]);
        assert_false(has("w0"));
        assert_true(has("w2"));
    }
}

WITH_KEYS(a_link_to_nowhere_allows_no_key_though_files_cannot_be_read)
{
    char target[256], path[256], key[RFT_KEY_TEXT];
    key_fixture_make(&smith, "w0");
    key_of("w0", key);
    key_fixture_path(&smith, "keys/w0.public", target);
    key_fixture_path(&smith, "allow/w0.public", path);
    assert_int_equal(symlink(target, path), 0);
    open_list();
    refresh_without("w0.public", EMFILE);
    assert_true(rft_allow_list_has(list, key, NULL));
    assert_int_equal(unlink(target), 0);
    refresh_without("w0.public", EMFILE);
    assert_false(rft_allow_list_has(list, key, NULL));
}

WITH_KEYS(a_file_that_could_never_be_read_is_in_once_it_can_be)
{
    key_fixture_admit(&smith, "w1");
    open_list();
    key_fixture_admit(&smith, "w0");
    key_fixture_admit(&smith, "w2");
    refresh_without("w0.public", EIO);
    assert_false(has("w0"));
    assert_true(has("w1"));
    assert_true(has("w2"));
    assert_int_equal(rft_allow_list_count(list), 2);
    rft_allow_list_refresh(list);
    assert_true(has("w0"));
    assert_int_equal(rft_allow_list_count(list), 3);
}

/* By the folder as it was opened last, as long as that is the folder. */
WITH_KEYS(a_removed_key_is_out_though_the_folder_cannot_be_opened)
{
    for (size_t i = 0; i < PASSING_COUNT; i++) {
        start_anew();
        key_fixture_admit(&smith, "w0");
        key_fixture_admit(&smith, "w1");
        open_list();
        key_fixture_revoke(&smith, "w1");
        refresh_without("allow", PASSING[i]);
        assert_true(has("w0"));
        assert_false(has("w1"));
        refresh_without("allow", PASSING[i]);
        assert_true(has("w0"));
    }
}

WITH_KEYS(a_folder_that_cannot_be_opened_is_still_judged)
{
    char away[256];
    key_fixture_admit(&smith, "w0");
    open_list();
    key_fixture_path(&smith, "away", away);
    assert_int_equal(chmod(allowed, 0777), 0);
    refresh_without("allow", EMFILE);
    assert_false(has("w0"));
    assert_int_equal(chmod(allowed, 0700), 0);
    rft_allow_list_refresh(list);
    assert_true(has("w0"));

    assert_int_equal(rename(allowed, away), 0);
    assert_int_equal(mkdir(allowed, 0700), 0);
    refresh_without("allow", EMFILE); /* another one, of which nothing is known */
    assert_true(has("w0"));
    assert_int_equal(chmod(allowed, 0777), 0);
    refresh_without("allow", EMFILE);
    assert_false(has("w0"));
    assert_int_equal(rmdir(allowed), 0);
    refresh_without("allow", EMFILE);
    assert_false(has("w0"));
    assert_int_equal(rename(away, allowed), 0);
}

/* Which keys are allowed must not depend on how many files this process has open. */
WITH_KEYS(a_want_of_descriptors_removes_only_keys_whose_files_are_gone)
{
    key_fixture_admit(&smith, "w0");
    key_fixture_make(&smith, "w1");
    open_list();
    char key[RFT_KEY_TEXT];
    struct rlimit before, none;
    key_of("w0", key);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    for (rlim_t room = 0; room < 6; room++) {
        key_fixture_allow(&smith, "w1");
        rft_allow_list_refresh(list);
        assert_true(has("w1"));
        key_fixture_revoke(&smith, "w1");
        int lowest = dup(0);
        assert_true(lowest >= 0);
        assert_int_equal(close(lowest), 0);
        none = (struct rlimit){(rlim_t)lowest + room, before.rlim_max};
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
        rft_allow_list_refresh(list);
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
        assert_true(rft_allow_list_has(list, key, NULL));
        assert_false(has("w1"));
    }
}

/* Links to nowhere count as the files they would be, and are cheap. */
static void link_files(uint32_t first, uint32_t end, bool make)
{
    for (uint32_t i = first; i < end; i++) {
        char path[256 + 32];
        (void)snprintf(path, sizeof path, "%s/n%u.public", allowed, i);
        assert_int_equal(make ? symlink("nowhere", path) : unlink(path), 0);
    }
}

/* So that no user of the folder can make the trainer read and keep any number of files. */
WITH_KEYS(a_folder_of_too_many_files_allows_no_key)
{
    char path[300], key[256];
    strcpy(allowed, "/dev/shm/refit-many-XXXXXX"); /* where many files are cheap */
    assert_non_null(mkdtemp(allowed));
    key_fixture_make(&smith, "w0");
    key_fixture_path(&smith, "keys/w0.public", key);
    (void)snprintf(path, sizeof path, "%s/w0.public", allowed);
    assert_int_equal(symlink(key, path), 0);
    assert_ok(rft_allow_list_open(allowed, &list, NULL));
    assert_true(has("w0"));
    link_files(0, RFT_ALLOW_MOST, true);
    expect_refused(REFIT_ERR_LIMIT, "more than 65536 keys");
    rft_allow_list_refresh(list);
    assert_false(has("w0"));
    link_files(0, 1, false); /* as many as there may be */
    rft_allow_list_refresh(list);
    assert_true(has("w0"));
    assert_int_equal(rft_allow_list_count(list), 1);
    link_files(1, RFT_ALLOW_MOST, false);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(allowed), 0);
}

WITH_KEYS(every_allocation_that_fails_is_an_error_and_leaks_nothing)
{
    key_fixture_admit(&smith, "w0");
    for (uint64_t nth = 1;; nth++) {
        failing_alloc_begin(nth);
        refit_status status = rft_allow_list_open(allowed, &list, NULL);
        rft_allow_list_close(list);
        list = NULL;
        if (!failing_alloc_end()) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
}

int main(void)
{
    return test_run("allow_list");
}
