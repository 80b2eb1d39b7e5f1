/*
 * Device specs as text: "host", "host:capacity=2GiB", "cuda:0", "auto".
 *
 * The part before the colon chooses the implementation; what follows is read by that one. Knows
 * nothing of what the implementations do.
 */
#include "device/device_spec.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

static bool text_is(const char *text, size_t length, const char *word)
{
    return strlen(word) == length && memcmp(text, word, length) == 0;
}

refit_status rft_device_spec_parse(const char *text, rft_device_spec *out, refit_error *error)
{
    static const struct {
        const char *word;
        rft_device_kind kind;
    } kinds[] = {{"auto", RFT_DEVICE_AUTO}, {"host", RFT_DEVICE_HOST}, {"cuda", RFT_DEVICE_CUDA}};
    size_t length = strcspn(text, ":");
    const char *rest = text[length] == ':' ? text + length + 1 : "";
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (!text_is(text, length, kinds[i].word)) continue;
        *out = (rft_device_spec){kinds[i].kind, rest};
        return REFIT_OK;
    }
    return rft_fail(error, REFIT_ERR_INVALID,
                    "device \"%.64s\" cannot be read: say \"host\", \"host:capacity=2GiB\", "
                    "\"cuda:0\" or \"auto\"",
                    text);
}

static bool suffix_shift(const char *suffix, unsigned *shift)
{
    static const char *const suffixes[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    for (unsigned i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++) {
        if (strcmp(suffix, suffixes[i]) != 0) continue;
        *shift = 10 * i;
        return true;
    }
    return false;
}

refit_status rft_device_spec_bytes(const char *text, uint64_t *out, refit_error *error)
{
    char *suffix = NULL;
    unsigned shift = 0;
    errno = 0;
    /* strtoull takes spaces and signs, which have no meaning here. */
    bool digits = text[0] >= '0' && text[0] <= '9';
    uint64_t value = digits ? strtoull(text, &suffix, 10) : 0;
    if (!digits || errno != 0 || value == 0 || !suffix_shift(suffix, &shift) ||
        !rft_mul_u64(value, UINT64_C(1) << shift, &value)) {
        return rft_fail(error, REFIT_ERR_INVALID,
                        "\"%.64s\" is no size: write a whole number > 0 with B, KiB, MiB, GiB or "
                        "TiB, like 2GiB",
                        text);
    }
    *out = value;
    return REFIT_OK;
}
