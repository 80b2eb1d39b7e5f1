/*
 * The value of one option in a configuration: read, printed, and held to its range.
 *
 * Each kind has a codec; what is the same for all of them stands here: the refusals with their
 * sentences, the range, and texts, which have no code. Independent of what an option means.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/text.h"
#include "config/options.h"

/* ---- Codecs ----------------------------------------------------------------------------------
 * Codes as text and back.
 *
 * Numbers are read by hand, because strtod and printf follow the locale of the process that refit
 * lives in, and because strtoull takes signs, spaces and overflow too kindly. Printing gives the
 * shortest text that reads back as the same code. Ranges are checked below.
 */

typedef struct codec {
    bool (*read)(const rft_option *option, const char *text, uint64_t *code);
    void (*print)(const rft_option *option, uint64_t code, char *text, size_t capacity);
    uint64_t (*load)(const void *field);
    void (*store)(void *field, uint64_t code);
    /* Prints a field that a program filled with what no text stands for; NULL: as the others. */
    void (*print_stray)(const void *field, char *text, size_t capacity);
    const char *expected; /* for the sentence that refuses a text */
} codec;

#define BILLION      1000000000u
#define BILLION_TEXT "1000000000"

typedef struct unit {
    const char *name;
    uint64_t factor;
} unit;

/* From the largest down: printing takes the first that divides. */
static const unit size_units[] = {{"TiB", (uint64_t)1 << 40},
                                  {"GiB", (uint64_t)1 << 30},
                                  {"MiB", (uint64_t)1 << 20},
                                  {"KiB", (uint64_t)1 << 10},
                                  {"", 1}};
static const unit time_units[] = {{"min", 60000}, {"s", 1000}, {"ms", 1}, {"", 1}};

/* Reads digits at *text and moves it after them. */
static bool read_digits(const char **text, uint64_t *out)
{
    const char *at = *text;
    uint64_t value = 0;
    for (; *at >= '0' && *at <= '9'; at++) {
        if (!rft_mul_u64(value, 10, &value) || !rft_add_u64(value, (uint64_t)(*at - '0'), &value)) {
            return false;
        }
    }
    if (at == *text) return false;
    *text = at;
    *out = value;
    return true;
}

static bool read_units(const char *text, const unit *units, size_t count, uint64_t *code)
{
    uint64_t value;
    if (!read_digits(&text, &value)) return false;
    for (size_t i = 0; i < count; i++) {
        if (strcmp(text, units[i].name) == 0) return rft_mul_u64(value, units[i].factor, code);
    }
    return false;
}

static void print_units(uint64_t code, const unit *units, size_t count, char *text, size_t capacity)
{
    size_t i = 0;
    while (i + 1 < count && (code == 0 || code % units[i].factor != 0))
        i++;
    (void)snprintf(text, capacity, "%" PRIu64 "%s", code / units[i].factor, units[i].name);
}

static bool read_flag(const rft_option *option, const char *text, uint64_t *code)
{
    (void)option;
    *code = strcmp(text, "true") == 0;
    return *code == 1 || strcmp(text, "false") == 0;
}

static void print_flag(const rft_option *option, uint64_t code, char *text, size_t capacity)
{
    (void)option;
    (void)snprintf(text, capacity, "%s", code != 0 ? "true" : "false");
}

static bool read_count(const rft_option *option, const char *text, uint64_t *code)
{
    (void)option;
    return read_digits(&text, code) && *text == '\0';
}

static void print_count(const rft_option *option, uint64_t code, char *text, size_t capacity)
{
    (void)option;
    (void)snprintf(text, capacity, "%" PRIu64, code);
}

bool rft_size_read(const char *text, uint64_t *bytes)
{
    uint64_t code;
    if (!read_units(text, size_units, sizeof size_units / sizeof size_units[0], &code)) {
        return false;
    }
    *bytes = code;
    return true;
}

static bool read_size(const rft_option *option, const char *text, uint64_t *code)
{
    (void)option;
    return rft_size_read(text, code);
}

static void print_size(const rft_option *option, uint64_t code, char *text, size_t capacity)
{
    (void)option;
    print_units(code, size_units, sizeof size_units / sizeof size_units[0], text, capacity);
}

static bool read_time(const rft_option *option, const char *text, uint64_t *code)
{
    (void)option;
    return read_units(text, time_units, sizeof time_units / sizeof time_units[0], code);
}

static void print_time(const rft_option *option, uint64_t code, char *text, size_t capacity)
{
    (void)option;
    print_units(code, time_units, sizeof time_units / sizeof time_units[0], text, capacity);
}

/* "0.8": up to nine decimals, which every code can say exactly. */
static bool read_share(const rft_option *option, const char *text, uint64_t *code)
{
    (void)option;
    uint64_t whole;
    if (!read_digits(&text, &whole) || whole > BILLION) return false;
    *code = whole * BILLION;
    if (*text == '\0') return true;
    if (*text++ != '.' || *text == '\0') return false;
    uint64_t place = BILLION / 10;
    for (; *text >= '0' && *text <= '9' && place > 0; text++, place /= 10) {
        *code += (uint64_t)(*text - '0') * place;
    }
    return *text == '\0';
}

static void print_share(const rft_option *option, uint64_t code, char *text, size_t capacity)
{
    (void)option;
    int length = snprintf(text, capacity, "%" PRIu64 ".%09" PRIu64, code / BILLION, code % BILLION);
    char *end = text + length;
    while (end[-1] == '0')
        *--end = '\0';
    if (end[-1] == '.') end[-1] = '\0';
}

static bool read_choice(const rft_option *option, const char *text, uint64_t *code)
{
    size_t length = strlen(text);
    uint64_t index = 0;
    for (const char *name = option->unit; *name != '\0'; index++) {
        size_t span = strcspn(name, "|");
        if (span == length && memcmp(name, text, span) == 0) {
            *code = index;
            return true;
        }
        name += span + (name[span] == '|');
    }
    return false;
}

static void print_choice(const rft_option *option, uint64_t code, char *text, size_t capacity)
{
    const char *name = option->unit;
    for (; code > 0; code--)
        name += strcspn(name, "|") + 1;
    (void)snprintf(text, capacity, "%.*s", (int)strcspn(name, "|"), name);
}

/* The names of the codes below the first node, which stand for REFIT_NUMA_* in this order. */
static const char *const node_names[] = {"interleave", "off", "auto"};
#define NODE_NAMES 3

static bool read_node(const rft_option *option, const char *text, uint64_t *code)
{
    for (uint64_t i = 0; i < NODE_NAMES; i++) {
        if (strcmp(text, node_names[i]) == 0) {
            *code = i;
            return true;
        }
    }
    return read_count(option, text, code) && rft_add_u64(*code, NODE_NAMES, code);
}

static void print_node(const rft_option *option, uint64_t code, char *text, size_t capacity)
{
    if (code >= NODE_NAMES) {
        print_count(option, code - NODE_NAMES, text, capacity);
    } else {
        (void)snprintf(text, capacity, "%s", node_names[code]);
    }
}

static void print_stray_flag(const void *field, char *text, size_t capacity)
{
    (void)snprintf(text, capacity, "%u", *(const uint8_t *)field);
}

static void print_stray_number(const void *field, char *text, size_t capacity)
{
    (void)snprintf(text, capacity, "%" PRId32, *(const int32_t *)field);
}

static void print_stray_share(const void *field, char *text, size_t capacity)
{
    double share = *(const double *)field;
    double size = share < 0.0 ? -share : share;
    if (!(size < BILLION)) {
        (void)snprintf(text, capacity, "%s",
                       share > 0.0   ? "above " BILLION_TEXT
                       : share < 0.0 ? "below -" BILLION_TEXT
                                     : "NaN");
        return;
    }
    size_t sign = share < 0.0;
    text[0] = '-';
    print_share(NULL, (uint64_t)(size * BILLION + 0.5), text + sign, capacity - sign);
}

static uint64_t load_u8(const void *field)
{
    return *(const uint8_t *)field;
}

static void store_u8(void *field, uint64_t code)
{
    *(uint8_t *)field = (uint8_t)code;
}

static uint64_t load_u32(const void *field)
{
    return *(const uint32_t *)field;
}

static void store_u32(void *field, uint64_t code)
{
    *(uint32_t *)field = (uint32_t)code;
}

static uint64_t load_u64(const void *field)
{
    return *(const uint64_t *)field;
}

static void store_u64(void *field, uint64_t code)
{
    *(uint64_t *)field = code;
}

static uint64_t load_share(const void *field)
{
    double share = *(const double *)field;
    if (!(share >= 0.0 && share < BILLION)) return UINT64_MAX; /* NaN too */
    return (uint64_t)(share * BILLION + 0.5);
}

static void store_share(void *field, uint64_t code)
{
    *(double *)field = (double)code / BILLION;
}

/* A negative number that no name stands for becomes a code beyond every range. */
static uint64_t load_i32(const void *field)
{
    return (uint64_t)(int64_t)(*(const int32_t *)field);
}

static void store_i32(void *field, uint64_t code)
{
    *(int32_t *)field = (int32_t)code;
}

static uint64_t load_node(const void *field)
{
    return (uint64_t)((int64_t)(*(const int32_t *)field) + NODE_NAMES);
}

static void store_node(void *field, uint64_t code)
{
    *(int32_t *)field = (int32_t)((int64_t)code - NODE_NAMES);
}

static const codec codecs[RFT_KINDS] = {
    [RFT_FLAG] = {read_flag, print_flag, load_u8, store_u8, print_stray_flag,
                  "write true or false"},
    [RFT_COUNT] = {read_count, print_count, load_u32, store_u32, NULL, "write a whole number"},
    [RFT_SIZE] = {read_size, print_size, load_u64, store_u64, NULL,
                  "write a whole number of bytes, or of KiB, MiB, GiB or TiB, such as 512MiB"},
    [RFT_TIME] = {read_time, print_time, load_u32, store_u32, NULL,
                  "write a whole number of ms, s or min, such as 30s"},
    [RFT_SHARE] = {read_share, print_share, load_share, store_share, print_stray_share,
                   "write a number with at most nine decimals, such as 0.8"},
    [RFT_CHOICE] = {read_choice, print_choice, load_i32, store_i32, print_stray_number,
                    "write one of "},
    [RFT_NODE] = {read_node, print_node, load_node, store_node, print_stray_number,
                  "write one of "},
};

/* ---- Values ------------------------------------------------------------------------------- */

/* Names stand in the option's unit; numbers are explained by their kind. */
static refit_status refuse_text(const rft_option *option, const char *text, refit_error *error)
{
    bool names = option->kind == RFT_CHOICE || option->kind == RFT_NODE;
    return rft_fail(error, REFIT_ERR_CONFIG, "%s cannot be \"%.60s\": %s%s", option->key, text,
                    codecs[option->kind].expected, names ? option->unit : "");
}

/* A value that a program wrote into the struct need not be one that a text gives. */
static void print_field(const rft_option *option, const char *field, char text[RFT_VALUE_TEXT])
{
    const codec *kind = &codecs[option->kind];
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
                  "%s has a control character (byte %zu), or is not UTF-8 there: leave it out",
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
    if (!codecs[option->kind].read(option, text, &code)) return refuse_text(option, text, error);
    if (code < option->least || code > option->most) {
        char value[RFT_VALUE_TEXT];
        codecs[option->kind].print(option, code, value, sizeof value);
        return refuse_value(option, value, error);
    }
    codecs[option->kind].store(field, code);
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
        codecs[option->kind].print(option, option->least, least, sizeof least);
        codecs[option->kind].print(option, option->most, most, sizeof most);
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
    uint64_t code = codecs[option->kind].load(field);
    if (code >= option->least && code <= option->most) return REFIT_OK;
    char value[RFT_VALUE_TEXT];
    print_field(option, field, value);
    return refuse_value(option, value, error);
}
