/* settings: the configuration of one run: a file, the environment, --set, in this order. */
#ifndef CLI_SETTINGS_H
#define CLI_SETTINGS_H

#include <stdbool.h>

#include <refit/config.h>

#define CLI_SETS_MOST 128

typedef struct cli_settings {
    const char *file; /* NULL: none */
    const char *sets[CLI_SETS_MOST];
    int set_count;
} cli_settings;

/* Remembers one "KEY=VALUE"; false, with a complaint, if there are too many. */
bool cli_settings_add(cli_settings *settings, const char *assignment);

/* Makes the configuration. An exit status; a failure has been complained about. */
int cli_settings_load(const cli_settings *settings, refit_config *config);

#endif
