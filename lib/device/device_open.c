/*
 * Opens a device from its spec: "host", "host:capacity=2GiB", "cuda:0", "auto".
 *
 * The part before the colon chooses the implementation; what follows is read by that one. This is
 * the only file of the shared part that knows which implementations there are, and it knows them by
 * their open functions.
 */
#include <string.h>

#include "base/log.h"
#include "config/config.h"
#include "device/device.h"

typedef enum device_kind {
    DEVICE_AUTO,
    DEVICE_HOST,
    DEVICE_CUDA,
} device_kind;

typedef struct device_spec {
    device_kind kind;
    const char *rest; /* what follows the colon, or ""; points into the text that was parsed */
} device_spec;

static bool text_is(const char *text, size_t length, const char *word)
{
    return strlen(word) == length && memcmp(text, word, length) == 0;
}

static refit_status parse_spec(const char *text, device_spec *out, refit_error *error)
{
    static const struct {
        const char *word;
        device_kind kind;
    } kinds[] = {{"auto", DEVICE_AUTO}, {"host", DEVICE_HOST}, {"cuda", DEVICE_CUDA}};
    size_t length = strcspn(text, ":");
    bool more = text[length] == ':';
    const char *rest = more ? text + length + 1 : "";
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        if (!text_is(text, length, kinds[i].word) || (more && *rest == '\0')) continue;
        *out = (device_spec){kinds[i].kind, rest};
        return REFIT_OK;
    }
    return rft_fail(error, REFIT_ERR_INVALID,
                    "device \"%.64s\" cannot be read: say \"host\", \"host:capacity=2GiB\", "
                    "\"cuda:0\" or \"auto\"",
                    text);
}

/* The first GPU; the host only where there is no driver or no GPU. A GPU that is there and cannot
 * be used is an error: it should not be passed over in silence. */
static refit_status open_auto(const char *rest, const refit_config *config, refit_device **out,
                              refit_error *error)
{
    refit_error reason = {0};
    RFT_REFUSE_IF(rest[0] != '\0', error, REFIT_ERR_INVALID,
                  "\"auto:%.64s\" cannot be read: \"auto\" takes nothing after it", rest);
    refit_status status = rft_device_cuda_open("", config, out, &reason);
    if (status == REFIT_OK) {
        rft_log(REFIT_LOG_INFO, "device auto: cuda:0");
    } else if (status == REFIT_ERR_NOT_FOUND) {
        rft_log(REFIT_LOG_INFO, "device auto: host, since %s", reason.text);
        status = rft_device_host_open("", config, out, error);
    } else if (error != NULL) {
        *error = reason;
    }
    return status;
}

static refit_status open_kind(const char *spec, const refit_config *config, refit_device **out,
                              refit_error *error)
{
    device_spec parsed = {.rest = ""};
    RFT_TRY(parse_spec(spec, &parsed, error));
    switch (parsed.kind) {
    case DEVICE_CUDA: return rft_device_cuda_open(parsed.rest, config, out, error);
    case DEVICE_AUTO: return open_auto(parsed.rest, config, out, error);
    case DEVICE_HOST: break;
    }
    return rft_device_host_open(parsed.rest, config, out, error);
}

refit_status refit_device_open(const char *spec, const refit_config *config, refit_device **out,
                               refit_error *error)
{
    RFT_REFUSE_IF(out == NULL, error, REFIT_ERR_INVALID, "no place to put the device: out is NULL");
    refit_config own;
    RFT_TRY(rft_config_resolve(config, &own, error));
    if (spec == NULL) spec = own.device;
    RFT_TRY(open_kind(spec, &own, out, error));
    (*out)->wait_most_ms = own.offload_timeout_ms;
    return REFIT_OK;
}
