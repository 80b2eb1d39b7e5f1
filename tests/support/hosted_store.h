/* hosted_store: a store whose slots have memory already, as the publisher's begin gives it. */
#ifndef HOSTED_STORE_H
#define HOSTED_STORE_H

#include "store/store.h"

static inline refit_status hosted_store_open(rft_manifest *manifest, uint32_t slots, bool shared,
                                             rft_retire_list *retired, rft_store **out,
                                             refit_error *error)
{
    RFT_TRY(rft_store_open(manifest, slots, shared, retired, out, error));
    for (uint32_t i = 0; i < slots; i++) {
        refit_status status = rft_store_renew(*out, i, error);
        if (status == REFIT_OK) continue;
        rft_store_close(*out);
        *out = NULL;
        return status;
    }
    return REFIT_OK;
}

#endif
