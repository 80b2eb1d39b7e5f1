/* limits: what the wire accepts at most, from limits.* of the configuration. */
#ifndef RFT_LIMITS_H
#define RFT_LIMITS_H

#include <stdbool.h>

#include <refit/config.h>

typedef struct rft_limits {
    uint32_t tensors;
    uint32_t rank;
    uint32_t name_bytes;
    uint64_t message_bytes;
    uint64_t manifest_bytes;
    uint64_t frame_bytes;
    uint64_t version_bytes;
    uint64_t memory_bytes; /* of this machine, which has to hold a version; 0: not looked at */
    uint32_t blocks;
    bool blocks_told; /* `blocks` is what those who sent the list said, and not the user's choice */
    uint32_t window;
} rft_limits;

rft_limits rft_limits_from(const refit_config *config);

#endif
