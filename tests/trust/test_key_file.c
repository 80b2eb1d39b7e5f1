/* Key files: what keygen writes can be read; what others could read, change or have put there, and
 * what is not a key, is refused with a sentence. */
#include <stdio.h>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <refit/keys.h>

#include "tests/support/key_fixture.h"
#include "tests/support/test.h"
#include "trust/key.h"

static const char good[] = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID";

static refit_status read_at(const key_fixture *smith, const char *file, rft_key_half half,
                            refit_error *error)
{
    char path[256];
    rft_key key;
    key_fixture_path(smith, file, path);
    return rft_key_file_read(AT_FDCWD, path, half, &key, error);
}

static void put(const key_fixture *smith, const char *file, const char *text, mode_t mode)
{
    char path[256], below[128];
    (void)snprintf(below, sizeof below, "/%s", file);
    file_tree_write(&smith->tree, below, text);
    key_fixture_path(smith, file, path);
    assert_int_equal(chmod(path, mode), 0);
}

static mode_t mode_of(const key_fixture *smith, const char *file)
{
    char path[256];
    struct stat found;
    key_fixture_path(smith, file, path);
    assert_int_equal(stat(path, &found), 0);
    return found.st_mode & 07777;
}

TEST(generated_keys_have_their_modes_whatever_the_umask)
{
    static const mode_t masks[] = {0, 022, 0777};
    for (size_t i = 0; i < 3; i++) {
        key_fixture smith = {file_tree_open()};
        char path[256];
        key_fixture_path(&smith, "new", path);
        assert_int_equal(mkdir(path, 0700), 0);
        mode_t before = umask(masks[i]);
        refit_status status = refit_keys_generate(path, "w0", 0, NULL);
        (void)umask(before);
        assert_ok(status);
        assert_int_equal(mode_of(&smith, "new/w0.secret"), 0600);
        assert_int_equal(mode_of(&smith, "new/w0.public"), 0644);
        assert_ok(read_at(&smith, "new/w0.secret", RFT_KEY_SECRET, NULL));
        assert_ok(read_at(&smith, "new/w0.public", RFT_KEY_PUBLIC, NULL));
        key_fixture_close(&smith);
    }
}

TEST(keys_are_never_written_over_unless_forced)
{
    key_fixture smith = key_fixture_open();
    char path[256];
    rft_key before, after;
    refit_error error;
    key_fixture_path(&smith, "keys/trainer.secret", path);
    assert_ok(rft_key_file_read(AT_FDCWD, path, RFT_KEY_SECRET, &before, NULL));
    char folder[256];
    key_fixture_path(&smith, "keys", folder);
    assert_int_equal(refit_keys_generate(folder, "trainer", 0, &error), REFIT_ERR_EXISTS);
    assert_says(&error, "trainer.secret");
    assert_ok(rft_key_file_read(AT_FDCWD, path, RFT_KEY_SECRET, &after, NULL));
    assert_memory_equal(&before, &after, sizeof before);

    /* One half alone is kept, too, and the other is not left. */
    assert_int_equal(unlink(path), 0);
    assert_int_equal(refit_keys_generate(folder, "trainer", 0, &error), REFIT_ERR_EXISTS);
    assert_int_equal(access(path, F_OK), -1);

    assert_ok(refit_keys_generate(folder, "trainer", 1, NULL));
    assert_ok(rft_key_file_read(AT_FDCWD, path, RFT_KEY_SECRET, &after, NULL));
    assert_memory_not_equal(&before, &after, sizeof before);
    assert_int_equal(mode_of(&smith, "keys/trainer.secret"), 0600);
    key_fixture_close(&smith);
}

/* How many names a folder has. */
static int count_names(const key_fixture *smith, const char *folder)
{
    char path[256];
    int count = 0;
    key_fixture_path(smith, folder, path);
    DIR *listing = opendir(path);
    assert_non_null(listing);
    for (struct dirent *found; (found = readdir(listing)) != NULL;)
        count += strcmp(found->d_name, ".") != 0 && strcmp(found->d_name, "..") != 0;
    assert_int_equal(closedir(listing), 0);
    return count;
}

/* The second half finds a folder where its file should be. */
TEST(a_pair_is_replaced_as_a_whole_or_not_at_all)
{
    key_fixture smith = key_fixture_open();
    char folder[256], secret[256], public[256];
    rft_key before, after;
    key_fixture_path(&smith, "keys", folder);
    key_fixture_path(&smith, "keys/trainer.secret", secret);
    key_fixture_path(&smith, "keys/trainer.public", public);
    assert_ok(refit_keys_generate(folder, "trainer", 1, NULL));
    assert_int_equal(count_names(&smith, "keys"), 2);
    assert_ok(rft_key_file_read(AT_FDCWD, secret, RFT_KEY_SECRET, &before, NULL));
    assert_int_equal(unlink(public), 0);
    assert_int_equal(mkdir(public, 0700), 0);
    assert_int_equal(refit_keys_generate(folder, "trainer", 1, NULL), REFIT_ERR_IO);
    assert_ok(rft_key_file_read(AT_FDCWD, secret, RFT_KEY_SECRET, &after, NULL));
    assert_memory_equal(&before, &after, sizeof before);
    assert_int_equal(mode_of(&smith, "keys/trainer.secret"), 0600);
    assert_int_equal(count_names(&smith, "keys"), 2);

    assert_int_equal(unlink(secret), 0); /* where there was none, none is left */
    assert_int_equal(refit_keys_generate(folder, "trainer", 1, NULL), REFIT_ERR_IO);
    assert_int_equal(count_names(&smith, "keys"), 1);
    assert_int_equal(mkdir(secret, 0700), 0); /* the first half cannot, either */
    assert_int_equal(refit_keys_generate(folder, "trainer", 1, NULL), REFIT_ERR_IO);
    assert_int_equal(count_names(&smith, "keys"), 2);
    key_fixture_close(&smith);
}

/* A link that another user put where the secret is to be written does not redirect it. */
TEST(links_are_not_followed_when_keys_are_written)
{
    key_fixture smith = key_fixture_open();
    char link_path[256], target[256], folder[256];
    key_fixture_path(&smith, "keys/w0.secret", link_path);
    key_fixture_path(&smith, "elsewhere", target);
    key_fixture_path(&smith, "keys", folder);
    assert_int_equal(symlink(target, link_path), 0);
    assert_int_equal(refit_keys_generate(folder, "w0", 0, NULL), REFIT_ERR_EXISTS);
    assert_ok(refit_keys_generate(folder, "w0", 1, NULL));
    assert_int_equal(access(target, F_OK), -1);
    assert_ok(read_at(&smith, "keys/w0.secret", RFT_KEY_SECRET, NULL));
    key_fixture_close(&smith);
}

TEST(names_that_lead_elsewhere_are_refused)
{
    static const char *const names[] = {"", ".", "..", "../w0", "a/b", "-w0", ".w0", "w 0", "w\n0"};
    key_fixture smith = key_fixture_open();
    char folder[256], longest[RFT_KEY_NAME_BYTES + 1];
    key_fixture_path(&smith, "keys", folder);
    for (size_t i = 0; i < COUNT_OF(names); i++)
        assert_invalid(refit_keys_generate(folder, names[i], 0, NULL));
    memset(longest, 'w', sizeof longest);
    longest[RFT_KEY_NAME_BYTES] = '\0';
    assert_invalid(refit_keys_generate(folder, longest, 0, NULL));
    longest[RFT_KEY_NAME_BYTES - 1] = '\0';
    assert_ok(refit_keys_generate(folder, longest, 0, NULL));
    assert_ok(refit_keys_generate(folder, longest, 1, NULL));
    assert_invalid(refit_keys_generate(NULL, "w0", 0, NULL));
    assert_invalid(refit_keys_generate(folder, NULL, 0, NULL));
    key_fixture_path(&smith, "keys/trainer.public", folder);
    assert_int_equal(refit_keys_generate(folder, "w0", 0, NULL), REFIT_ERR_IO);
    key_fixture_close(&smith);
}

TEST(a_secret_that_others_can_read_is_refused)
{
    static const mode_t modes[] = {0644, 0640, 0604, 0601, 0660, 0610, 0602};
    key_fixture smith = key_fixture_open();
    char path[256];
    key_fixture_path(&smith, "keys/trainer.secret", path);
    for (size_t i = 0; i < COUNT_OF(modes); i++) {
        assert_int_equal(chmod(path, modes[i]), 0);
        assert_refused(read_at(&smith, "keys/trainer.secret", RFT_KEY_SECRET, error),
                       REFIT_ERR_SECURITY, "chmod 600");
    }
    assert_int_equal(chmod(path, 0400), 0);
    assert_ok(read_at(&smith, "keys/trainer.secret", RFT_KEY_SECRET, NULL));
    key_fixture_close(&smith);
}

TEST(a_public_key_that_others_can_change_is_refused)
{
    key_fixture smith = key_fixture_open();
    put(&smith, "open.public", good, 0666);
    assert_refused(read_at(&smith, "open.public", RFT_KEY_PUBLIC, error), REFIT_ERR_SECURITY,
                   "chmod 644");
    put(&smith, "open.public", good, 0644);
    assert_ok(read_at(&smith, "open.public", RFT_KEY_PUBLIC, NULL));
    key_fixture_close(&smith);
}

TEST(a_file_of_another_user_is_refused)
{
    if (geteuid() != 0) skip(); /* only root can give files away */
    key_fixture smith = key_fixture_open();
    char path[256];
    key_fixture_path(&smith, "keys/trainer.secret", path);
    assert_int_equal(chown(path, 12345, (gid_t)-1), 0);
    assert_refused(read_at(&smith, "keys/trainer.secret", RFT_KEY_SECRET, error),
                   REFIT_ERR_SECURITY, "12345");
    key_fixture_close(&smith);
}

/* What counts is where a link leads. */
TEST(a_link_is_checked_by_its_target)
{
    key_fixture smith = key_fixture_open();
    char target[256], path[256];
    key_fixture_path(&smith, "keys/trainer.secret", target);
    key_fixture_path(&smith, "link.secret", path);
    assert_int_equal(symlink(target, path), 0);
    assert_ok(read_at(&smith, "link.secret", RFT_KEY_SECRET, NULL));
    assert_int_equal(chmod(target, 0644), 0);
    assert_int_equal(read_at(&smith, "link.secret", RFT_KEY_SECRET, NULL), REFIT_ERR_SECURITY);
    assert_int_equal(unlink(target), 0);
    assert_int_equal(read_at(&smith, "link.secret", RFT_KEY_SECRET, NULL), REFIT_ERR_IO);
    key_fixture_close(&smith);
}

/* Those that write to the folder could put another key there. */
TEST(a_key_in_a_folder_that_others_can_write_to_is_refused)
{
    key_fixture smith = key_fixture_open();
    char folder[256];
    refit_error error;
    key_fixture_path(&smith, "keys", folder);
    assert_int_equal(chmod(folder, 0777), 0);
    assert_int_equal(read_at(&smith, "keys/trainer.secret", RFT_KEY_SECRET, &error),
                     REFIT_ERR_SECURITY);
    assert_says(&error, "chmod go-w");
    assert_says(&error, folder);
    assert_int_equal(chmod(folder, 01777), 0); /* as /tmp is */
    assert_ok(read_at(&smith, "keys/trainer.secret", RFT_KEY_SECRET, NULL));
    key_fixture_close(&smith);
}

/* And a pipe without a writer is not waited for. */
TEST(what_is_no_file_is_refused)
{
    key_fixture smith = key_fixture_open();
    char path[256];
    refit_error error;
    key_fixture_path(&smith, "pipe.secret", path);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(read_at(&smith, "pipe.secret", RFT_KEY_SECRET, &error), REFIT_ERR_SECURITY);
    assert_int_equal(read_at(&smith, "keys", RFT_KEY_SECRET, NULL), REFIT_ERR_SECURITY);
    assert_int_equal(read_at(&smith, "none.secret", RFT_KEY_SECRET, &error), REFIT_ERR_IO);
    assert_says(&error, "none.secret");
    key_fixture_close(&smith);
}

TEST(the_other_half_is_recognised)
{
    key_fixture smith = key_fixture_open();
    assert_refused(read_at(&smith, "keys/trainer.secret", RFT_KEY_PUBLIC, error),
                   REFIT_ERR_SECURITY, "holds a secret key");
    /* Its mode, as keygen makes it, is none for a secret: that is not what is wrong. */
    assert_refused(read_at(&smith, "keys/trainer.public", RFT_KEY_SECRET, error),
                   REFIT_ERR_SECURITY, "holds a public key: the secret one is wanted here");
    key_fixture_close(&smith);
}

TEST(texts_that_are_no_key_are_refused_and_comments_are_not)
{
    char twice[128], crlf[128], hash[RFT_KEY_TEXT], filled[2000];
    (void)snprintf(twice, sizeof twice, "%s\n%s\n", good, good);
    (void)snprintf(crlf, sizeof crlf, "# mine\r\n#\r\n\r\n%s \t\r\n", good);
    strcpy(hash, good);
    hash[0] = '#'; /* a digit of Z85, so a line may begin with it */
    memset(filled, '\n', sizeof filled - 1);
    filled[sizeof filled - 1] = '\0';
    const struct {
        const char *text;
        refit_status status;
        const char *words;
    } rows[] = {
        {good, REFIT_OK, NULL},
        {crlf, REFIT_OK, NULL},
        {"", REFIT_ERR_CONFIG, "no key"},
        {"# only words\n", REFIT_ERR_CONFIG, "no key"},
        {twice, REFIT_ERR_CONFIG, "more than one"},
        {"short", REFIT_ERR_CONFIG, "5 characters instead of 40"},
        {"Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hI\"", REFIT_ERR_CONFIG, "Z85"},
        {"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n", REFIT_ERR_CONFIG,
         "35 characters"},
        {filled, REFIT_ERR_CONFIG, "not a key file"},
    };
    key_fixture smith = key_fixture_open();
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        refit_error error;
        put(&smith, "some.public", rows[i].text, 0600);
        assert_int_equal(read_at(&smith, "some.public", RFT_KEY_PUBLIC, &error), rows[i].status);
        if (rows[i].words != NULL && strstr(error.text, rows[i].words) == NULL)
            fail_msg("%s", error.text);
    }
    put(&smith, "some.public", hash, 0600);
    refit_error error = {0};
    (void)read_at(&smith, "some.public", RFT_KEY_PUBLIC, &error);
    assert_null(strstr(error.text, "no key in it"));
    key_fixture_close(&smith);
}

int main(void)
{
    return test_run("key_file");
}
