/* manifest_rules: what a manifest must be, for manifest.c. */
#ifndef RFT_MANIFEST_RULES_H
#define RFT_MANIFEST_RULES_H

#include "wire/manifest.h"
#include "wire/tensor_list.h"

/* What a manifest is held against, and how a breach is answered. */
typedef struct rft_manifest_rules {
    uint64_t frame_bytes;
    const rft_limits *limits;
    refit_status refusal; /* REFIT_ERR_INVALID for a caller's list, _PROTOCOL for a peer's */
    refit_error *error;
} rft_manifest_rules;

refit_status rft_rules_check_frame_bytes(const rft_manifest_rules *rules);

/* One entry alone: its name, type, rank, and that its bytes are those of its shape. */
refit_status rft_rules_check_tensor(const rft_listed_tensor *tensor,
                                    const rft_manifest_rules *rules);

/* That each tied tensor names an original of the same dtype and bytes. */
refit_status rft_rules_check_ties(const rft_manifest *manifest, const rft_manifest_rules *rules);

/* Fills and sorts the index of names; no name may be there twice. */
refit_status rft_rules_check_names(rft_manifest *manifest, const rft_manifest_rules *rules);

/* For sorting and searching rft_manifest_name by name. */
int rft_manifest_name_compare(const void *a, const void *b);

#endif
