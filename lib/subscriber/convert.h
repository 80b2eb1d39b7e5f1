/* convert: elements of one floating-point type to those of another, as PyTorch's `to` does it: to
 * nearest even; but every NaN that gets shorter becomes 0x7FFF. Between F32, F16 and BF16. */
#ifndef RFT_CONVERT_H
#define RFT_CONVERT_H

#include <refit/broadcast.h>

#include <stdbool.h>

bool rft_converts(refit_dtype from, refit_dtype to);
/* Of types that rft_converts allows. `out` and `in` are apart and aligned to their elements. */
void rft_convert(refit_dtype from, refit_dtype to, void *out, const void *in, size_t count);

#endif
