/* safetensors_header: what the JSON of a safetensors file says, as tensors. */
#ifndef CLI_SAFETENSORS_HEADER_H
#define CLI_SAFETENSORS_HEADER_H

#include <jansson.h>

#include "safetensors.h"

/* Fills in the tensors of `out`, also where it fails; offset 0 of the header lies at byte `data` of
 * a file that has `bytes`. Names stay those of `header`. REFIT_ERR_INVALID, REFIT_ERR_UNSUPPORTED,
 * REFIT_ERR_HOST_MEMORY. */
refit_status cli_header_read(json_t *header, uint64_t data, uint64_t bytes, cli_weights *out,
                             refit_error *error);

#endif
