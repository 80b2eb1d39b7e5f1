/*
 * The value of one option in a configuration: read, printed, and held to its range.
 *
 * Each kind has a codec; what is the same for all of them stands here: the refusals with their
 * sentences, the range, and texts, which have no code. The meaning of an option is none of this
 * file's business.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "config/codec.h"

/* Names stand in the option's unit; numbers are explained by their kind. */
static refit_status refuse_text(const rft_option *option, const char *text, refit_error *error)
{
    bool names = option->kind == RFT_CHOICE || option->kind == RFT_NODE;
    return rft_fail(error, REFIT_ERR_CONFIG, "%s cannot be \"%.60s\": %s%s", option->key, text,
                    rft_codecs[option->kind].expected, names ? option->unit : "");
}

static refit_status refuse_code(const rft_option *option, uint64_t code, refit_error *error)
{
    char value[RFT_VALUE_TEXT], range[RFT_RANGE_TEXT];
    rft_codecs[option->kind].print(option, code, value, sizeof value);
    rft_option_range(option, range);
    return rft_fail(error, REFIT_ERR_CONFIG, "%s cannot be %s: it must be %s", option->key, value,
                    range[0] != '\0' ? range : option->unit);
}

static refit_status parse_text(const rft_option *option, const char *text, char *field,
                               refit_error *error)
{
    size_t length = strlen(text);
    RFT_REFUSE_IF(length > option->most, error, REFIT_ERR_CONFIG,
                  "%s has %zu bytes: it can hold at most %" PRIu64, option->key, length,
                  option->most);
    for (size_t i = 0; i < length; i++) {
        unsigned char byte = (unsigned char)text[i];
        RFT_REFUSE_IF(byte < 0x20 || byte == 0x7f, error, REFIT_ERR_CONFIG,
                      "%s has a control character (byte %zu): leave it out", option->key, i + 1);
    }
    memset(field, 0, option->width);
    memcpy(field, text, length);
    return REFIT_OK;
}

refit_status rft_option_parse(const rft_option *option, const char *text, refit_config *config,
                              refit_error *error)
{
    char *field = (char *)config + option->offset;
    if (option->kind == RFT_TEXT) return parse_text(option, text, field, error);
    uint64_t code;
    if (!rft_codecs[option->kind].read(option, text, &code))
        return refuse_text(option, text, error);
    if (code < option->least || code > option->most) return refuse_code(option, code, error);
    rft_codecs[option->kind].store(field, code);
    return REFIT_OK;
}

void rft_option_print(const rft_option *option, const refit_config *config,
                      char text[RFT_VALUE_TEXT])
{
    const char *field = (const char *)config + option->offset;
    if (option->kind == RFT_TEXT) {
        (void)snprintf(text, RFT_VALUE_TEXT, "%.*s", (int)option->most, field);
    } else {
        const rft_codec *kind = &rft_codecs[option->kind];
        kind->print(option, kind->load(field), text, RFT_VALUE_TEXT);
    }
}

void rft_option_range(const rft_option *option, char text[RFT_RANGE_TEXT])
{
    text[0] = '\0';
    if (option->kind == RFT_TEXT) {
        (void)snprintf(text, RFT_RANGE_TEXT, "at most %" PRIu64 " bytes", option->most);
    } else if (option->kind != RFT_FLAG && option->kind != RFT_CHOICE && option->kind != RFT_NODE) {
        char least[24], most[24];
        rft_codecs[option->kind].print(option, option->least, least, sizeof least);
        rft_codecs[option->kind].print(option, option->most, most, sizeof most);
        (void)snprintf(text, RFT_RANGE_TEXT, "%s to %s", least, most);
    }
}

refit_status rft_option_check(const rft_option *option, const refit_config *config,
                              refit_error *error)
{
    const char *field = (const char *)config + option->offset;
    if (option->kind == RFT_TEXT) {
        RFT_REFUSE_IF(memchr(field, '\0', option->width) == NULL, error, REFIT_ERR_CONFIG,
                      "%s does not end within its %zu bytes: end it with NUL", option->key,
                      option->width);
        return REFIT_OK;
    }
    uint64_t code = rft_codecs[option->kind].load(field);
    if (code < option->least || code > option->most) return refuse_code(option, code, error);
    return REFIT_OK;
}
