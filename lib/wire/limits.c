/*
 * The limits of the wire, taken from a configuration that was checked when its object was opened.
 */
#include "wire/limits.h"

rft_limits rft_limits_from(const refit_config *config)
{
    return (rft_limits){
        .tensors = config->limits_tensors,
        .rank = config->limits_rank,
        .name_bytes = config->limits_name_bytes,
        .message_bytes = config->limits_message_bytes,
        .manifest_bytes = config->limits_manifest_bytes,
        .frame_bytes = config->limits_frame_bytes,
        .version_bytes = config->limits_version_bytes,
        .blocks = config->limits_blocks,
        .window = config->limits_window,
    };
}
