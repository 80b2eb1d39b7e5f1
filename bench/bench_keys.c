/* bench_keys: two pairs in a folder of their own; the worker's, next to nobody, is the allow list.
 */
#include "bench_keys.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <refit/keys.h>

#include "bench.h"
#include "cli.h"

/* The worker's own pair lies in the folder of those that are allowed. */
static const char *const files[] = {"trainer.secret", "trainer.public", "allow/worker.secret",
                                    "allow/worker.public"};

refit_status bench_keys_open(bench_keys *keys, refit_error *error)
{
    char allow[sizeof keys->folder + 8];
    const char *where = getenv("TMPDIR");
    *keys = (bench_keys){.folder = ""};
    if (where == NULL || where[0] == '\0' || strlen(where) > sizeof keys->folder - 32)
        where = "/tmp";
    snprintf(keys->folder, sizeof keys->folder, "%s/refit-bench-XXXXXX", where);
    if (mkdtemp(keys->folder) == NULL) {
        keys->folder[0] = '\0';
        return cli_refuse(error, REFIT_ERR_IO, errno, "no folder for keys can be made in %s",
                          where);
    }
    snprintf(allow, sizeof allow, "%s/allow", keys->folder);
    BENCH_TRY(refit_keys_generate(keys->folder, "trainer", 0, error));
    BENCH_TRY(refit_keys_generate(allow, "worker", 0, error));
    snprintf(keys->worker_sets[0], sizeof keys->worker_sets[0], "security.key=%s/%s", keys->folder,
             files[2]);
    snprintf(keys->worker_sets[1], sizeof keys->worker_sets[1], "security.server_key=%s/%s",
             keys->folder, files[1]);
    return REFIT_OK;
}

void bench_keys_close(bench_keys *keys)
{
    char path[sizeof keys->folder + 32];
    if (keys->folder[0] == '\0') return;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "%s/%s", keys->folder, files[i]);
        (void)unlink(path);
    }
    snprintf(path, sizeof path, "%s/allow", keys->folder);
    (void)rmdir(path);
    (void)rmdir(keys->folder);
    keys->folder[0] = '\0';
}

refit_status bench_keys_for_trainer(const bench_keys *keys, refit_config *config,
                                    refit_error *error)
{
    char path[sizeof keys->folder + 32];
    snprintf(path, sizeof path, "%s/%s", keys->folder, files[0]);
    BENCH_TRY(refit_config_set(config, "security.key", path, error));
    snprintf(path, sizeof path, "%s/allow", keys->folder);
    return refit_config_set(config, "security.allow", path, error);
}

bool bench_keys_for_worker(const bench_keys *keys, cli_settings *settings)
{
    return cli_settings_add(settings, keys->worker_sets[0]) &&
           cli_settings_add(settings, keys->worker_sets[1]);
}
