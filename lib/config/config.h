/*
 * config: a caller's refit_config, which may be NULL or of another release, as a full one of this
 * release.
 *
 *     refit_config own;
 *     RFT_TRY(rft_config_resolve(config, &own, error));
 */
#ifndef RFT_CONFIG_H
#define RFT_CONFIG_H

#include <refit/config.h>

#include "config/options.h"

/* What every open does: the defaults for NULL, else the caller's values, checked to fit together.
 * REFIT_ERR_INVALID (never initialised), REFIT_ERR_CONFIG. */
refit_status rft_config_resolve(const refit_config *config, refit_config *own, refit_error *error);

/* take makes a full copy without the check, and give writes it back: for changes that succeed as a
 * whole or not at all. REFIT_ERR_INVALID */
refit_status rft_config_take(const refit_config *config, refit_config *full, refit_error *error);
void rft_config_give(refit_config *config, const refit_config *full);

/* Sets one option of a full copy and remembers where the value came from. An option beyond
 * `caller_size` cannot be given back and is refused. REFIT_ERR_CONFIG */
refit_status rft_config_assign(refit_config *full, size_t caller_size, const rft_option *option,
                               const char *text, refit_config_origin origin, refit_error *error);

/* Reads YAML text into `full`, as from a file called `name`, and refuses options beyond
 * `caller_size`. A text that lies in no file can include none. `full` is changed as far as the text
 * was read, also on failure. REFIT_ERR_CONFIG, REFIT_ERR_HOST_MEMORY. */
refit_status rft_config_read_text(const char *name, const char *text, size_t bytes,
                                  size_t caller_size, refit_config *full, refit_error *error);

#endif
