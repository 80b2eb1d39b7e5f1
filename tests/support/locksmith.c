/* Keys for tests: see locksmith.h. */
#include "tests/support/locksmith.h"
#include "tests/support/test.h"

#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <refit/keys.h>

void locksmith_path(const locksmith *smith, const char *file, char path[256])
{
    (void)snprintf(path, 256, "%s/%s", smith->tree.root, file);
}

locksmith locksmith_open(void)
{
    char path[256];
    locksmith smith = {file_tree_open()};
    locksmith_path(&smith, "allow", path);
    assert_int_equal(mkdir(path, 0700), 0);
    locksmith_make(&smith, "trainer");
    return smith;
}

void locksmith_close(locksmith *smith)
{
    file_tree_close(&smith->tree);
}

void locksmith_make(const locksmith *smith, const char *name)
{
    char path[256];
    locksmith_path(smith, "keys", path);
    assert_ok(refit_keys_generate(path, name, 0, NULL));
}

static void file_of(const locksmith *smith, const char *folder, const char *name, char path[256])
{
    char file[128];
    (void)snprintf(file, sizeof file, "%s/%s.public", folder, name);
    locksmith_path(smith, file, path);
}

void locksmith_allow(const locksmith *smith, const char *name)
{
    char from[256], to[256];
    file_of(smith, "keys", name, from);
    file_of(smith, "allow", name, to);
    assert_int_equal(link(from, to), 0);
}

void locksmith_revoke(const locksmith *smith, const char *name)
{
    char path[256];
    file_of(smith, "allow", name, path);
    assert_int_equal(unlink(path), 0);
}

void locksmith_admit(const locksmith *smith, const char *name)
{
    locksmith_make(smith, name);
    locksmith_allow(smith, name);
}

void locksmith_equip_trainer(const locksmith *smith, refit_config *config)
{
    locksmith_path(smith, "keys/trainer.secret", config->security_key);
    locksmith_path(smith, "allow", config->security_allow);
}

void locksmith_equip_worker(const locksmith *smith, const char *name, refit_config *config)
{
    char file[128];
    (void)snprintf(file, sizeof file, "keys/%s.secret", name);
    locksmith_path(smith, file, config->security_key);
    locksmith_path(smith, "keys/trainer.public", config->security_server_key);
}
