/*
 * The configuration of a run: defaults, --config FILE, REFIT_* variables, --set; a later one
 * overrides an earlier one. Flags that stand for an option (--timeout, --name) override all.
 */
#include "settings.h"

#include <stdio.h>
#include <string.h>

#include "cli.h"

bool cli_settings_add(cli_settings *settings, const char *assignment)
{
    if (settings->set_count == CLI_SETS_MOST) {
        (void)cli_complain(CLI_USAGE, "more than %d times --set: use a file", CLI_SETS_MOST);
        return false;
    }
    settings->sets[settings->set_count++] = assignment;
    return true;
}

static int assign(refit_config *config, const char *assignment)
{
    char key[128];
    const size_t length = strcspn(assignment, "=");
    if (assignment[length] != '=' || length >= sizeof key) {
        return cli_complain(CLI_USAGE, "--set %s: write KEY=VALUE", assignment);
    }
    (void)snprintf(key, sizeof key, "%.*s", (int)length, assignment);
    refit_error error;
    if (refit_config_set(config, key, assignment + length + 1, &error) != REFIT_OK) {
        return cli_complain_error(&error);
    }
    return CLI_DONE;
}

int cli_settings_load(const cli_settings *settings, refit_config *config)
{
    refit_error error;
    refit_config_init(config, sizeof *config);
    if (settings->file != NULL && refit_config_load(config, settings->file, &error) != REFIT_OK) {
        return cli_complain_error(&error);
    }
    if (refit_config_load_env(config, &error) != REFIT_OK) return cli_complain_error(&error);
    for (int i = 0; i < settings->set_count; i++) {
        int status = assign(config, settings->sets[i]);
        if (status != CLI_DONE) return status;
    }
    if (refit_config_check(config, &error) != REFIT_OK) return cli_complain_error(&error);
    return CLI_DONE;
}
