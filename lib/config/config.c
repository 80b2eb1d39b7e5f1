/*
 * The configuration struct: filled, changed, shown.
 *
 * Callers may have been compiled against a shorter or longer refit_config. So nothing works on the
 * caller's struct itself: it is taken into a full copy of ours, changed there, and given back up to
 * the caller's size once everything has succeeded. That also makes each change all or nothing.
 */
#include <stddef.h>
#include <string.h>

#include "config/nearest.h"
#include "config/options.h"
#include "config/resolve.h"

/* The first release's options began behind these; no caller is shorter. */
#define SMALLEST offsetof(refit_config, offload_slab_bytes)

static void fill_defaults(refit_config *full)
{
    memset(full, 0, sizeof *full);
    full->size = sizeof *full;
    for (size_t i = 0; i < rft_option_count; i++) {
        /* A test reads every default; one that cannot be read would leave 0. */
        (void)rft_option_parse(&rft_options[i], rft_options[i].standard, full, NULL);
    }
}

/* Writes the caller's part of `full` and leaves its size field alone. */
void rft_config_give(refit_config *config, const refit_config *full)
{
    const size_t head = sizeof config->size;
    size_t size = config->size < sizeof *full ? config->size : sizeof *full;
    memcpy((char *)config + head, (const char *)full + head, size - head);
}

void refit_config_init(refit_config *config, size_t size)
{
    if (config == NULL || size < SMALLEST) return;
    refit_config full;
    fill_defaults(&full);
    memset(config, 0, size);
    config->size = size;
    rft_config_give(config, &full);
}

refit_status rft_config_take(const refit_config *config, refit_config *full, refit_error *error)
{
    RFT_REFUSE_IF(config == NULL, error, REFIT_ERR_INVALID, "config is NULL");
    RFT_REFUSE_IF(config->size < SMALLEST, error, REFIT_ERR_INVALID,
                  "config has size %zu: call refit_config_init before anything else", config->size);
    fill_defaults(full);
    memcpy(full->origin, config->origin, sizeof full->origin);
    for (size_t i = 0; i < rft_option_count; i++) {
        const rft_option *option = &rft_options[i];
        if (!rft_option_within(option, config->size)) continue;
        memcpy((char *)full + option->offset, (const char *)config + option->offset, option->width);
    }
    return REFIT_OK;
}

refit_status rft_config_resolve(const refit_config *config, refit_config *own, refit_error *error)
{
    refit_config full;
    if (config == NULL) {
        fill_defaults(&full);
    } else {
        RFT_TRY(refit_config_check(config, error));
        RFT_TRY(rft_config_take(config, &full, error));
    }
    *own = full;
    return REFIT_OK;
}

refit_status rft_config_assign(refit_config *full, size_t caller_size, const rft_option *option,
                               const char *text, refit_config_origin origin, refit_error *error)
{
    RFT_REFUSE_IF(!rft_option_within(option, caller_size), error, REFIT_ERR_CONFIG,
                  "%s is newer than this program: compile it against the current refit/config.h",
                  option->key);
    RFT_TRY(rft_option_parse(option, text, full, error));
    full->origin[option - rft_options] = (unsigned char)origin;
    return REFIT_OK;
}

refit_status refit_config_set(refit_config *config, const char *key, const char *value,
                              refit_error *error)
{
    RFT_REFUSE_IF(key == NULL || value == NULL, error, REFIT_ERR_INVALID, "%s is NULL",
                  key == NULL ? "key" : "value");
    refit_config full;
    RFT_TRY(rft_config_take(config, &full, error));
    const rft_option *option = rft_option_find(key);
    RFT_REFUSE_IF(option == NULL, error, REFIT_ERR_NOT_FOUND,
                  "there is no option %.80s: the nearest is %s", key, rft_nearest_key(key));
    RFT_TRY(rft_config_assign(&full, config->size, option, value, REFIT_CONFIG_EXPLICIT, error));
    rft_config_give(config, &full);
    return REFIT_OK;
}

static void show(const rft_option *option, const refit_config *full, refit_option_fn function,
                 void *user)
{
    char value[RFT_VALUE_TEXT], range[RFT_RANGE_TEXT];
    rft_option_print(option, full, value);
    rft_option_range(option, range);
    const refit_option shown = {
        .size = sizeof shown,
        .key = option->key,
        .value = value,
        .default_value = option->standard,
        .unit = option->unit,
        .help = option->help,
        .origin = (refit_config_origin)full->origin[option - rft_options],
        .range = range,
    };
    function(user, &shown);
}

void refit_config_each(const refit_config *config, refit_option_fn function, void *user)
{
    refit_config full;
    if (function == NULL || rft_config_take(config, &full, NULL) != REFIT_OK) return;
    for (size_t i = 0; i < rft_option_count; i++) {
        if (rft_option_within(&rft_options[i], config->size)) {
            show(&rft_options[i], &full, function, user);
        }
    }
}
