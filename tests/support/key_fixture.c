/* Keys for tests: see key_fixture.h. */
#include "tests/support/key_fixture.h"
#include "tests/support/test.h"

#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <refit/keys.h>

void key_fixture_path(const key_fixture *smith, const char *file, char path[256])
{
    (void)snprintf(path, 256, "%s/%s", smith->tree.root, file);
}

key_fixture key_fixture_open(void)
{
    char path[256];
    key_fixture smith = {file_tree_open()};
    key_fixture_path(&smith, "allow", path);
    assert_int_equal(mkdir(path, 0700), 0);
    key_fixture_make(&smith, "trainer");
    return smith;
}

void key_fixture_close(key_fixture *smith)
{
    file_tree_close(&smith->tree);
}

void key_fixture_make(const key_fixture *smith, const char *name)
{
    char path[256];
    key_fixture_path(smith, "keys", path);
    assert_ok(refit_keys_generate(path, name, 0, NULL));
}

static void file_of(const key_fixture *smith, const char *folder, const char *name, char path[256])
{
    char file[128];
    (void)snprintf(file, sizeof file, "%s/%s.public", folder, name);
    key_fixture_path(smith, file, path);
}

void key_fixture_allow(const key_fixture *smith, const char *name)
{
    char from[256], to[256];
    file_of(smith, "keys", name, from);
    file_of(smith, "allow", name, to);
    assert_int_equal(link(from, to), 0);
}

void key_fixture_revoke(const key_fixture *smith, const char *name)
{
    char path[256];
    file_of(smith, "allow", name, path);
    assert_int_equal(unlink(path), 0);
}

void key_fixture_admit(const key_fixture *smith, const char *name)
{
    key_fixture_make(smith, name);
    key_fixture_allow(smith, name);
}

void key_fixture_equip_trainer(const key_fixture *smith, refit_config *config)
{
    key_fixture_path(smith, "keys/trainer.secret", config->security_key);
    key_fixture_path(smith, "allow", config->security_allow);
}

void key_fixture_equip_rank(const key_fixture *smith, refit_config *config)
{
    key_fixture_path(smith, "keys/trainer.public", config->security_server_key);
}

void key_fixture_equip_worker(const key_fixture *smith, const char *name, refit_config *config)
{
    char file[128];
    (void)snprintf(file, sizeof file, "keys/%s.secret", name);
    key_fixture_path(smith, file, config->security_key);
    key_fixture_path(smith, "keys/trainer.public", config->security_server_key);
}
