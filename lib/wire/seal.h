/* seal: whether bytes are the version that a SEAL message describes, for assembly.c. */
#ifndef RFT_SEAL_H
#define RFT_SEAL_H

#include "wire/manifest.h"

/* `sums`: per tensor, the sum of its digest's parts; aliases' are not looked at. REFIT_ERR_CORRUPT
 * names the first tensor that differs; REFIT_ERR_PROTOCOL: SEAL does not fit the manifest. */
refit_status rft_seal_check(const rft_manifest *manifest, const uint64_t *sums,
                            const rft_message *seal, refit_error *error);

#endif
