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

#include "base/text.h"
#include "config/codec.h"

/* Names stand in the option's unit; numbers are explained by their kind. */
static refit_status refuse_text(const rft_option *option, const char *text, refit_error *error)
{
    bool names = option->kind == RFT_CHOICE || option->kind == RFT_NODE;
    return rft_fail(error, REFIT_ERR_CONFIG, "%s cannot be \"%.60s\": %s%s", option->key, text,
                    rft_codecs[option->kind].expected, names ? option->unit : "");
}

/* A value that a program wrote into the struct need not be one that a text gives. */
static void print_field(const rft_option *option, const char *field, char text[RFT_VALUE_TEXT])
{
    const rft_codec *kind = &rft_codecs[option->kind];
    uint64_t code = kind->load(field);
    if (kind->print_stray != NULL && (code < option->least || code > option->most)) {
        kind->print_stray(field, text, RFT_VALUE_TEXT);
    } else {
        kind->print(option, code, text, RFT_VALUE_TEXT);
    }
}

static refit_status refuse_value(const rft_option *option, const char *value, refit_error *error)
{
    static const char *const before[RFT_KINDS] = {[RFT_CHOICE] = "one of ", [RFT_NODE] = "one of "};
    char range[RFT_RANGE_TEXT];
    rft_option_range(option, range);
    const char *rule = option->kind == RFT_FLAG ? "0 (false) or 1 (true)"
                       : range[0] != '\0'       ? range
                                                : option->unit;
    return rft_fail(error, REFIT_ERR_CONFIG, "%s cannot be %s: it must be %s%s", option->key, value,
                    before[option->kind] == NULL ? "" : before[option->kind], rule);
}

/* The one check of texts, whichever way they come. */
static refit_status check_text(const rft_option *option, const char *text, size_t length,
                               refit_error *error)
{
    RFT_REFUSE_IF(length > option->most, error, REFIT_ERR_CONFIG,
                  "%s has %zu bytes: it can hold at most %" PRIu64, option->key, length,
                  option->most);
    size_t clean = rft_text_clean_part(text, length);
    RFT_REFUSE_IF(clean < length, error, REFIT_ERR_CONFIG,
                  "%s has a control character (byte %zu), or is no UTF-8 there: leave it out",
                  option->key, clean + 1);
    return REFIT_OK;
}

static refit_status parse_text(const rft_option *option, const char *text, char *field,
                               refit_error *error)
{
    size_t length = strlen(text);
    RFT_TRY(check_text(option, text, length, error));
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
    if (code < option->least || code > option->most) {
        char value[RFT_VALUE_TEXT];
        rft_codecs[option->kind].print(option, code, value, sizeof value);
        return refuse_value(option, value, error);
    }
    rft_codecs[option->kind].store(field, code);
    return REFIT_OK;
}

void rft_option_print(const rft_option *option, const refit_config *config,
                      char text[RFT_VALUE_TEXT])
{
    const char *field = (const char *)config + option->offset;
    if (option->kind == RFT_TEXT) {
        rft_text_fit(field, strnlen(field, option->most), text, RFT_VALUE_TEXT);
    } else {
        print_field(option, field, text);
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
        size_t length = strnlen(field, option->width);
        RFT_REFUSE_IF(length == option->width, error, REFIT_ERR_CONFIG,
                      "%s does not end within its %zu bytes: end it with NUL", option->key,
                      option->width);
        return check_text(option, field, length, error);
    }
    uint64_t code = rft_codecs[option->kind].load(field);
    if (code >= option->least && code <= option->most) return REFIT_OK;
    char value[RFT_VALUE_TEXT];
    print_field(option, field, value);
    return refuse_value(option, value, error);
}
