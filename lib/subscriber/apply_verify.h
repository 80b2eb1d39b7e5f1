/* apply_verify: whether what is in the destinations is the version, by its digest. */
#ifndef RFT_APPLY_VERIFY_H
#define RFT_APPLY_VERIFY_H

#include "subscriber/in_place.h"

/* Reads all that was written, where it lies. REFIT_ERR_CORRUPT: it is not; REFIT_ERR_HOST_MEMORY,
 * and what a device says. */
refit_status rft_apply_verify(const rft_in_place *place, const rft_in_place_source *source,
                              refit_error *error);

#endif
