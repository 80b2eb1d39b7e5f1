/*
 * Converts the values of a tensor between fp32, fp16 and bf16, for a worker whose tensors have
 * another type than the trainer's. From one half type to the other it goes through fp32, piece by
 * piece: only the last step rounds. Which tensors are converted is unknown here.
 */
#include "subscriber/convert.h"

#include "kernels/cast.h"
#include "kernels/floats.h"

#define PIECE 1024u

static bool is_known(refit_dtype dtype)
{
    return dtype == REFIT_F32 || dtype == REFIT_F16 || dtype == REFIT_BF16;
}

bool rft_converts(refit_dtype from, refit_dtype to)
{
    return from != to && is_known(from) && is_known(to);
}

static void widen(refit_dtype from, float *out, const uint16_t *in, size_t count)
{
    if (from == REFIT_BF16) {
        rft_floats_from_bf16(out, in, count);
    } else {
        rft_floats_from_half(out, in, count);
    }
}

static void narrow(refit_dtype to, uint16_t *out, const float *in, size_t count)
{
    if (to == REFIT_BF16) {
        rft_cast_bf16(out, in, count);
    } else {
        rft_floats_to_half(out, in, count);
    }
}

static void change_half(refit_dtype from, refit_dtype to, uint16_t *out, const uint16_t *in,
                        size_t count)
{
    float between[PIECE];
    for (size_t done = 0, piece; done < count; done += piece) {
        piece = count - done < PIECE ? count - done : PIECE;
        widen(from, between, in + done, piece);
        narrow(to, out + done, between, piece);
    }
}

void rft_convert(refit_dtype from, refit_dtype to, void *out, const void *in, size_t count)
{
    if (to == REFIT_F32) {
        widen(from, out, in, count);
    } else if (from == REFIT_F32) {
        narrow(to, out, in, count);
    } else {
        change_half(from, to, out, in, count);
    }
}
