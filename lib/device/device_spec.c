/*
 * Device specs as text: "host", "host:capacity=2GiB", "cuda:0", "auto".
 *
 * The part before the colon chooses the implementation; what follows is read by that one. Knows
 * nothing of what the implementations do.
 */
#include "device/device_spec.h"

#include <string.h>

#include "config/options.h"

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
    bool more = text[length] == ':';
    const char *rest = more ? text + length + 1 : "";
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (!text_is(text, length, kinds[i].word) || (more && *rest == '\0')) continue;
        *out = (rft_device_spec){kinds[i].kind, rest};
        return REFIT_OK;
    }
    return rft_fail(error, REFIT_ERR_INVALID,
                    "device \"%.64s\" cannot be read: say \"host\", \"host:capacity=2GiB\", "
                    "\"cuda:0\" or \"auto\"",
                    text);
}

bool rft_device_spec_capacity(const char *text, uint64_t *bytes)
{
    static const char key[] = "capacity=";
    *bytes = UINT64_MAX;
    if (text[0] == '\0') return true;
    return strncmp(text, key, sizeof key - 1) == 0 && rft_size_read(text + sizeof key - 1, bytes) &&
           *bytes != 0;
}
