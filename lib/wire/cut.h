/* cut: how a version is laid out and cut up, for manifest.c. */
#ifndef RFT_CUT_H
#define RFT_CUT_H

#include "wire/manifest_rules.h"

/* From tensors whose names, types, shapes and ties were checked: offsets, blocks and frames.
 * REFIT_ERR_LIMIT, REFIT_ERR_HOST_MEMORY; the manifest's owner closes it then. */
refit_status rft_manifest_cut(rft_manifest *manifest, const rft_manifest_rules *rules);

#endif
