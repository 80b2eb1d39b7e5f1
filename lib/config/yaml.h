/* yaml: options from YAML text in memory; refit_config_load adds files and their includes. */
#ifndef RFT_YAML_H
#define RFT_YAML_H

#include <refit/config.h>

#include "base/error.h"

/* Reads what `include: FILE` names into `full`, for a text that came from `user`'s file. `where`,
 * "file:line:column: ", goes before a sentence that refuses the file as a whole. */
typedef refit_status (*rft_include_fn)(void *user, const char *where, const char *path,
                                       refit_config *full, refit_error *error);

typedef struct rft_yaml_source {
    const char *name; /* stands before line and column in errors */
    const char *text;
    size_t bytes;
    size_t caller_size;     /* of the caller's refit_config: options beyond it are refused */
    rft_include_fn include; /* NULL: nothing can be included */
    void *user;
} rft_yaml_source;

/* Changes `full` as far as it came, also on failure. REFIT_ERR_CONFIG, REFIT_ERR_HOST_MEMORY, and
 * what the include answers. */
refit_status rft_yaml_read(const rft_yaml_source *source, refit_config *full, refit_error *error);

#endif
