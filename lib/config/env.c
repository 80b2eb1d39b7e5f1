/*
 * Options from the environment.
 *
 * The name of a variable is made from the key by one rule (REFIT_, then the key in capitals with
 * '_' for '.'), so the table maps both ways and a variable that no key makes is a mistake worth
 * refusing: a misspelt one would otherwise change nothing, silently.
 */
#include <string.h>
#include <unistd.h>

#include "config/nearest.h"
#include "config/options.h"
#include "config/resolve.h"

#define PREFIX    "REFIT_"
#define PACKAGE   PREFIX "LIBRARY" /* no option: which library the Python package opens */
#define NAME_ROOM 64               /* the longest key fits; a test reads them all */

static void make_name(const rft_option *option, char name[NAME_ROOM])
{
    size_t length = sizeof PREFIX - 1;
    memcpy(name, PREFIX, length);
    for (const char *from = option->key; *from != '\0' && length + 1 < NAME_ROOM; from++) {
        char letter = *from == '.' ? '_' : *from;
        name[length++] = letter >= 'a' && letter <= 'z' ? (char)(letter - 'a' + 'A') : letter;
    }
    name[length] = '\0';
}

static bool is_name(const char *text, size_t length, const char *name)
{
    return strlen(name) == length && memcmp(name, text, length) == 0;
}

static const rft_option *find_by_name(const char *name, size_t length)
{
    char candidate[NAME_ROOM];
    for (size_t i = 0; i < rft_option_count; i++) {
        make_name(&rft_options[i], candidate);
        if (is_name(name, length, candidate)) return &rft_options[i];
    }
    return NULL;
}

static refit_status refuse_name(const char *name, size_t length, refit_error *error)
{
    char candidate[NAME_ROOM];
    size_t nearest = 0, best = SIZE_MAX;
    for (size_t i = 0; i < rft_option_count; i++) {
        make_name(&rft_options[i], candidate);
        size_t distance = rft_edit_distance(name, length, candidate, strlen(candidate));
        if (distance < best) {
            best = distance;
            nearest = i;
        }
    }
    make_name(&rft_options[nearest], candidate);
    return rft_fail(error, REFIT_ERR_CONFIG,
                    "environment: %.*s names no option: the nearest is %s; unset it or correct it",
                    (int)(length < 80 ? length : 80), name, candidate);
}

static refit_status take_variable(const char *variable, refit_config *full, size_t caller_size,
                                  refit_error *error)
{
    size_t length = strcspn(variable, "=");
    if (variable[length] == '\0') return REFIT_OK; /* no assignment at all */
    const rft_option *option = find_by_name(variable, length);
    if (option == NULL && is_name(variable, length, PACKAGE)) return REFIT_OK;
    if (option == NULL) return refuse_name(variable, length, error);
    refit_error inner;
    refit_status status = rft_config_assign(full, caller_size, option, variable + length + 1,
                                            REFIT_CONFIG_ENVIRONMENT, &inner);
    if (status == REFIT_OK) return REFIT_OK;
    return rft_fail(error, status, "environment: %.*s: %s", (int)length, variable, inner.text);
}

refit_status refit_config_load_env(refit_config *config, refit_error *error)
{
    refit_config full;
    RFT_TRY(rft_config_take(config, &full, error));
    for (char **variable = environ; variable != NULL && *variable != NULL; variable++) {
        if (strncmp(*variable, PREFIX, sizeof PREFIX - 1) != 0) continue;
        RFT_TRY(take_variable(*variable, &full, config->size, error));
    }
    rft_config_give(config, &full);
    return REFIT_OK;
}
