/* field_check: what writing and reading by table share. */
#ifndef RFT_FIELD_CHECK_H
#define RFT_FIELD_CHECK_H

#include "wire/fields.h"

/* The one number that a field's bounds speak of: a value, a view's units, a shape's rank. */
uint64_t rft_field_measure(const rft_field *field, const void *value);

/* Holds a value against its bounds (`refusal`) and its configured limit (REFIT_ERR_LIMIT). */
refit_status rft_field_check(const rft_fields *fields, const rft_field *field, const void *value,
                             const rft_limits *limits, refit_status refusal, refit_error *error);

#endif
