/*
 * YAML text to options.
 *
 * libyaml's events are walked as they come; no document is kept. Nested mappings become dotted
 * keys, and a mapping is entered only if some key of the table begins with its path, so the
 * table bounds the depth. What the language offers beyond mappings and plain values (lists,
 * anchors, aliases, tags, several documents) is refused: a configuration should say each thing
 * once, in the open. Every refusal names file, line and column. Knows neither files nor what the
 * options do.
 */
#include "config/yaml.h"

#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include <yaml.h>

#include "base/text.h"
#include "config/options.h"
#include "config/resolve.h"

#define PATH_ROOM 128 /* longer paths name no option */

typedef struct yaml_reader {
    const rft_yaml_source *source;
    refit_config *full;
    refit_error *error;
    yaml_parser_t parser;
    yaml_event_t event; /* the current one; given back by the next */
    yaml_mark_t key_at;
    char path[PATH_ROOM];                        /* dotted, of the current key */
    bool seen[REFIT_CONFIG_ORIGINS];             /* options that this text has set */
    unsigned char entered[REFIT_CONFIG_ORIGINS]; /* by first option: bit n, as section at depth n */
    bool any;                                    /* a key was read */
} yaml_reader;

static refit_status refuse(yaml_reader *reader, yaml_mark_t at, refit_status status,
                           const char *format, ...) REFIT_PRINTF(4, 5);

static refit_status refuse(yaml_reader *reader, yaml_mark_t at, refit_status status,
                           const char *format, ...)
{
    char sentence[RFT_SENTENCE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    rft_text_say_list(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    return rft_fail(reader->error, status, "%s:%zu:%zu: %s", reader->source->name, at.line + 1,
                    at.column + 1, sentence);
}

static refit_status refuse_syntax(yaml_reader *reader)
{
    const yaml_parser_t *parser = &reader->parser;
    if (parser->error == YAML_MEMORY_ERROR) {
        return rft_fail(reader->error, REFIT_ERR_HOST_MEMORY, "%s: no memory to parse it",
                        reader->source->name);
    }
    const char *problem = parser->problem != NULL ? parser->problem : "not YAML";
    if (parser->error == YAML_READER_ERROR) {
        return rft_fail(reader->error, REFIT_ERR_CONFIG, "%s: byte %zu: %s", reader->source->name,
                        parser->problem_offset, problem);
    }
    return refuse(reader, parser->problem_mark, REFIT_ERR_CONFIG, "%s", problem);
}

static const char *scalar_text(const yaml_event_t *event)
{
    return (const char *)event->data.scalar.value;
}

/* What makes a value mean something else than it says, or something said elsewhere. */
static const char *find_decoration(const yaml_event_t *event)
{
    switch (event->type) {
    case YAML_ALIAS_EVENT: return "an alias";
    case YAML_SCALAR_EVENT:
        if (event->data.scalar.anchor != NULL) return "an anchor";
        if (event->data.scalar.tag != NULL) return "a tag";
        return strlen(scalar_text(event)) != event->data.scalar.length ? "a NUL byte" : NULL;
    case YAML_MAPPING_START_EVENT:
        if (event->data.mapping_start.anchor != NULL) return "an anchor";
        return event->data.mapping_start.tag != NULL ? "a tag" : NULL;
    default: return NULL;
    }
}

static refit_status next_event(yaml_reader *reader)
{
    yaml_event_delete(&reader->event);
    if (!yaml_parser_parse(&reader->parser, &reader->event)) return refuse_syntax(reader);
    const char *decoration = find_decoration(&reader->event);
    if (decoration != NULL) {
        return refuse(reader, reader->event.start_mark, REFIT_ERR_CONFIG,
                      "%s is not taken here: write the value itself", decoration);
    }
    return REFIT_OK;
}

/* The first option whose key begins with the path and a dot, or NULL: then it is no section. */
static const rft_option *find_section(const char *path)
{
    size_t length = strlen(path);
    for (size_t i = 0; i < rft_option_count; i++) {
        const char *key = rft_options[i].key;
        if (strncmp(key, path, length) == 0 && key[length] == '.') return &rft_options[i];
    }
    return NULL;
}

static refit_status refuse_section(yaml_reader *reader)
{
    const char *path = reader->path;
    if (rft_option_find(path) != NULL) {
        return refuse(reader, reader->key_at, REFIT_ERR_CONFIG, "%s takes one value, not a mapping",
                      path);
    }
    size_t length;
    const char *nearest = rft_nearest_section(path, &length);
    return refuse(reader, reader->key_at, REFIT_ERR_CONFIG,
                  "there is no section %s: the nearest is %.*s", path, (int)length, nearest);
}

static refit_status refuse_key(yaml_reader *reader)
{
    const char *path = reader->path;
    if (find_section(path) != NULL) {
        return refuse(reader, reader->key_at, REFIT_ERR_CONFIG,
                      "%s is a section: write its options on lines of their own, indented", path);
    }
    return refuse(reader, reader->key_at, REFIT_ERR_CONFIG,
                  "there is no option %s: the nearest is %s", path, rft_nearest_key(path));
}

static refit_status refuse_twice(yaml_reader *reader)
{
    return refuse(reader, reader->key_at, REFIT_ERR_CONFIG, "%s is there twice: keep one",
                  reader->path);
}

/* Takes the current event as a key and appends it to the path, whose first `prefix` bytes are that
 * of the section. */
static refit_status read_key(yaml_reader *reader, size_t prefix)
{
    reader->key_at = reader->event.start_mark;
    if (reader->event.type != YAML_SCALAR_EVENT) {
        return refuse(reader, reader->key_at, REFIT_ERR_CONFIG, "a key must be a single word");
    }
    const char *key = scalar_text(&reader->event);
    int length =
        snprintf(reader->path + prefix, PATH_ROOM - prefix, "%s%s", prefix > 0 ? "." : "", key);
    if (length < 0 || (size_t)length >= PATH_ROOM - prefix) return refuse_key(reader);
    return REFIT_OK;
}

static refit_status read_include(yaml_reader *reader)
{
    const yaml_mark_t at = reader->event.start_mark;
    if (reader->any) {
        return refuse(reader, reader->key_at, REFIT_ERR_CONFIG,
                      "include comes first, because what it reads goes first, and only once");
    }
    const char *path = scalar_text(&reader->event);
    if (reader->source->include == NULL || *path == '\0') {
        return refuse(reader, at, REFIT_ERR_CONFIG, "there is no file to include");
    }
    char where[160];
    (void)snprintf(where, sizeof where, "%s:%zu:%zu: ", reader->source->name, at.line + 1,
                   at.column + 1);
    return reader->source->include(reader->source->user, where, path, reader->full, reader->error);
}

/* An absent value is most likely a slip, so it is none: "" says empty on purpose. */
static bool is_absent(const yaml_event_t *event)
{
    const char *text = scalar_text(event);
    return event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           (strcmp(text, "") == 0 || strcmp(text, "~") == 0 || strcmp(text, "null") == 0);
}

static refit_status read_option(yaml_reader *reader)
{
    const rft_option *option = rft_option_find(reader->path);
    if (option == NULL) return refuse_key(reader);
    const size_t index = (size_t)(option - rft_options);
    if (reader->seen[index]) return refuse_twice(reader);
    reader->seen[index] = true;
    const yaml_mark_t at = reader->event.start_mark;
    if (is_absent(&reader->event)) {
        return refuse(reader, at, REFIT_ERR_CONFIG,
                      "%s has no value: leave out the line to keep "
                      "the default %s",
                      option->key, option->standard);
    }
    const char *text = scalar_text(&reader->event);
    refit_error inner;
    refit_status status = rft_config_assign(reader->full, reader->source->caller_size, option, text,
                                            REFIT_CONFIG_FILE, &inner);
    return status == REFIT_OK ? REFIT_OK : refuse(reader, at, status, "%s", inner.text);
}

static refit_status read_mapping(yaml_reader *reader, size_t prefix, unsigned depth);

static refit_status read_section(yaml_reader *reader, unsigned depth)
{
    const rft_option *first = find_section(reader->path);
    if (first == NULL) return refuse_section(reader);
    unsigned char *entered = &reader->entered[first - rft_options];
    const unsigned char bit = (unsigned char)(1u << depth);
    if ((*entered & bit) != 0) return refuse_twice(reader);
    *entered |= bit;
    return read_mapping(reader, strlen(reader->path), depth + 1);
}

static refit_status read_value(yaml_reader *reader, unsigned depth)
{
    switch (reader->event.type) {
    case YAML_MAPPING_START_EVENT: return read_section(reader, depth);
    case YAML_SCALAR_EVENT:
        if (strcmp(reader->path, "include") == 0) return read_include(reader);
        return read_option(reader);
    default:
        return refuse(reader, reader->event.start_mark, REFIT_ERR_CONFIG,
                      "%s takes one value, not a list", reader->path);
    }
}

/* `depth` stays below the number of dots in the longest key. */
static refit_status read_mapping(yaml_reader *reader, size_t prefix, unsigned depth)
{
    for (;;) {
        RFT_TRY(next_event(reader));
        if (reader->event.type == YAML_MAPPING_END_EVENT) return REFIT_OK;
        RFT_TRY(read_key(reader, prefix));
        RFT_TRY(next_event(reader));
        RFT_TRY(read_value(reader, depth));
        reader->any = true;
    }
}

static refit_status read_document(yaml_reader *reader)
{
    RFT_TRY(next_event(reader));
    const yaml_event_t *root = &reader->event;
    if (root->type == YAML_MAPPING_START_EVENT) {
        RFT_TRY(read_mapping(reader, 0, 0));
    } else if (root->type != YAML_SCALAR_EVENT || !is_absent(root)) {
        return refuse(reader, root->start_mark, REFIT_ERR_CONFIG,
                      "write options as lines of the form key: value");
    }
    return next_event(reader); /* the document's end */
}

static refit_status read_stream(yaml_reader *reader)
{
    RFT_TRY(next_event(reader));
    RFT_TRY(next_event(reader));
    if (reader->event.type == YAML_DOCUMENT_START_EVENT) {
        RFT_TRY(read_document(reader));
        RFT_TRY(next_event(reader));
    }
    if (reader->event.type != YAML_STREAM_END_EVENT) {
        return refuse(reader, reader->event.start_mark, REFIT_ERR_CONFIG,
                      "a second document begins here: keep one a file");
    }
    return REFIT_OK;
}

refit_status rft_yaml_read(const rft_yaml_source *source, refit_config *full, refit_error *error)
{
    yaml_reader reader = {.source = source, .full = full, .error = error};
    RFT_REFUSE_IF(!yaml_parser_initialize(&reader.parser), error, REFIT_ERR_HOST_MEMORY,
                  "%s: no memory for the YAML parser", source->name);
    yaml_parser_set_input_string(&reader.parser, (const unsigned char *)source->text,
                                 source->bytes);
    refit_status status = read_stream(&reader);
    yaml_event_delete(&reader.event);
    yaml_parser_delete(&reader.parser);
    return status;
}
