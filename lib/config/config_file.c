/*
 * A configuration as YAML: a text, a file and the files that it includes; and options from the
 * environment.
 *
 * A file is read whole, up to a limit. The chain of files being read lives on the stack; a file
 * that stands in it already, by device and inode, would include itself. Everything goes into a full
 * copy of the caller's struct, given back when all files were good. Independent of what the options
 * do.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <yaml.h>

#include "base/alloc.h"
#include "base/text.h"
#include "config/config.h"
#include "config/options.h"

#define FILE_BYTES_MOST ((size_t)256 << 10)
#define FILES_DEEP      8
#define PATH_ROOM       128 /* longer paths of keys name no option */

typedef struct source_file {
    const struct source_file *includer; /* NULL: the file that the caller named */
    const char *where; /* of the include, before every sentence; empty without one */
    const char *path;
    int descriptor; /* -1: a text that lies in no file */
    dev_t device;
    ino_t inode;
    size_t caller_size;
} source_file;

/* The end of a long path says more than its beginning, and leaves room for the sentence. */
static const char *shorten(const char *path)
{
    const size_t most = 80;
    size_t length = strlen(path);
    return length <= most ? path : path + length - most;
}

static refit_status include_file(const source_file *includer, const char *where, const char *path,
                                 refit_config *full, refit_error *error);

/* ---- YAML
 *
 * libyaml's events are walked as they come; no document is kept. Nested mappings become dotted
 * keys, and a mapping is entered only if some key of the table begins with its path, so the table
 * bounds the depth. What the language offers beyond mappings and plain values (lists, anchors,
 * aliases, tags, several documents) is refused: a configuration should say each thing once, in the
 * open. Every refusal names file, line and column. */

typedef struct yaml_reader {
    const source_file *file;
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
    return rft_fail(reader->error, status, "%s:%zu:%zu: %s", shorten(reader->file->path),
                    at.line + 1, at.column + 1, sentence);
}

static refit_status refuse_syntax(yaml_reader *reader)
{
    const yaml_parser_t *parser = &reader->parser;
    if (parser->error == YAML_MEMORY_ERROR) {
        return rft_fail(reader->error, REFIT_ERR_HOST_MEMORY, "%s: no memory to parse it",
                        shorten(reader->file->path));
    }
    const char *problem = parser->problem != NULL ? parser->problem : "not YAML";
    if (parser->error == YAML_READER_ERROR) {
        return rft_fail(reader->error, REFIT_ERR_CONFIG, "%s: byte %zu: %s",
                        shorten(reader->file->path), parser->problem_offset, problem);
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

/* The first option whose key begins with the path and a dot, or NULL: then it is not a section. */
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
    if (reader->file->descriptor < 0 || *path == '\0') {
        return refuse(reader, at, REFIT_ERR_CONFIG, "there is no file to include");
    }
    char where[160];
    (void)snprintf(where, sizeof where, "%s:%zu:%zu: ", shorten(reader->file->path), at.line + 1,
                   at.column + 1);
    return include_file(reader->file, where, path, reader->full, reader->error);
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
    refit_status status = rft_config_assign(reader->full, reader->file->caller_size, option, text,
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

static refit_status read_yaml(const source_file *file, const char *text, size_t bytes,
                              refit_config *full, refit_error *error)
{
    yaml_reader reader = {.file = file, .full = full, .error = error};
    RFT_REFUSE_IF(!yaml_parser_initialize(&reader.parser), error, REFIT_ERR_HOST_MEMORY,
                  "%s: no memory for the YAML parser", shorten(file->path));
    yaml_parser_set_input_string(&reader.parser, (const unsigned char *)text, bytes);
    refit_status status = read_stream(&reader);
    yaml_event_delete(&reader.event);
    yaml_parser_delete(&reader.parser);
    return status;
}

refit_status rft_config_read_text(const char *name, const char *text, size_t bytes,
                                  size_t caller_size, refit_config *full, refit_error *error)
{
    const source_file none = {
        .where = "", .path = name, .descriptor = -1, .caller_size = caller_size};
    return read_yaml(&none, text, bytes, full, error);
}

/* ---- Files */

static refit_status refuse_chain(const source_file *file, refit_error *error)
{
    size_t depth = 1;
    for (const source_file *above = file->includer; above != NULL; above = above->includer) {
        RFT_REFUSE_IF(above->device == file->device && above->inode == file->inode, error,
                      REFIT_ERR_CONFIG, "%s%s includes itself: break the circle", file->where,
                      shorten(file->path));
        RFT_REFUSE_IF(++depth > FILES_DEEP, error, REFIT_ERR_CONFIG,
                      "%s%s would be the file number %zu that includes another: at most %d",
                      file->where, shorten(file->path), depth, FILES_DEEP);
    }
    return REFIT_OK;
}

/* Without waiting: at the other end of a FIFO there may never be a writer. */
static refit_status open_file(source_file *file, refit_error *error)
{
    file->descriptor = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (file->descriptor < 0) {
        return rft_fail_sub(error, REFIT_ERR_IO, errno, "%scannot open %s: %s", file->where,
                            shorten(file->path), strerror(errno));
    }
    struct stat stat;
    if (fstat(file->descriptor, &stat) != 0) {
        int code = errno;
        (void)close(file->descriptor);
        return rft_fail_sub(error, REFIT_ERR_IO, code, "%scannot look at %s: %s", file->where,
                            shorten(file->path), strerror(code));
    }
    file->device = stat.st_dev;
    file->inode = stat.st_ino;
    refit_status status =
        S_ISREG(stat.st_mode)
            ? refuse_chain(file, error)
            : rft_fail(error, REFIT_ERR_CONFIG,
                       "%s%s is not a regular file: write the configuration into one", file->where,
                       shorten(file->path));
    if (status != REFIT_OK) (void)close(file->descriptor);
    return status;
}

/* Reads up to one byte more than is allowed, so that a longer file shows. */
static refit_status read_text(const source_file *file, char *text, size_t *bytes,
                              refit_error *error)
{
    size_t filled = 0;
    while (filled <= FILE_BYTES_MOST) {
        ssize_t got = read(file->descriptor, text + filled, FILE_BYTES_MOST + 1 - filled);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            return rft_fail_sub(error, REFIT_ERR_IO, errno, "%scannot read %s: %s", file->where,
                                shorten(file->path), strerror(errno));
        }
        if (got == 0) break;
        filled += (size_t)got;
    }
    RFT_REFUSE_IF(filled > FILE_BYTES_MOST, error, REFIT_ERR_CONFIG,
                  "%s%s is longer than %zu bytes: is it a configuration file?", file->where,
                  shorten(file->path), FILE_BYTES_MOST);
    *bytes = filled;
    return REFIT_OK;
}

static refit_status read_file(source_file *file, refit_config *full, refit_error *error)
{
    char *text = rft_calloc(FILE_BYTES_MOST + 1, 1);
    RFT_REFUSE_IF(text == NULL, error, REFIT_ERR_HOST_MEMORY, "%sno memory to read %s into",
                  file->where, shorten(file->path));
    size_t bytes = 0;
    refit_status status = read_text(file, text, &bytes, error);
    if (status == REFIT_OK) status = read_yaml(file, text, bytes, full, error);
    rft_free(text);
    return status;
}

static refit_status load_file(source_file *file, refit_config *full, refit_error *error)
{
    RFT_TRY(open_file(file, error));
    refit_status status = read_file(file, full, error);
    (void)close(file->descriptor);
    return status;
}

/* A relative path starts in the folder of the file that names it. */
static refit_status include_file(const source_file *includer, const char *where, const char *path,
                                 refit_config *full, refit_error *error)
{
    const char *slash = strrchr(includer->path, '/');
    int folder = path[0] == '/' || slash == NULL ? 0 : (int)(slash + 1 - includer->path);
    char joined[PATH_MAX];
    int length = snprintf(joined, sizeof joined, "%.*s%s", folder, includer->path, path);
    RFT_REFUSE_IF(length < 0 || (size_t)length >= sizeof joined, error, REFIT_ERR_CONFIG,
                  "%sthe path %s is longer than %d bytes", where, shorten(path), PATH_MAX - 1);
    source_file file = {
        .includer = includer, .where = where, .path = joined, .caller_size = includer->caller_size};
    return load_file(&file, full, error);
}

refit_status refit_config_load(refit_config *config, const char *path, refit_error *error)
{
    RFT_REFUSE_IF(path == NULL || path[0] == '\0', error, REFIT_ERR_INVALID,
                  "refit_config_load needs the path of a file");
    refit_config full;
    RFT_TRY(rft_config_take(config, &full, error));
    source_file file = {.where = "", .path = path, .caller_size = config->size};
    RFT_TRY(load_file(&file, &full, error));
    rft_config_give(config, &full);
    return REFIT_OK;
}

/* ---- Variables -------------------------------------------------------------------------------
 * Options from the environment.
 *
 * The name of a variable is made from the key by one rule (REFIT_, then the key in capitals with
 * '_' for '.'), so the table maps both ways and a variable that no key makes is a mistake worth
 * refusing: a misspelt one would otherwise change nothing, silently.
 */

#define PREFIX    "REFIT_"
#define PACKAGE   PREFIX "LIBRARY" /* no option: which library the Python package opens */
#define NAME_ROOM 64               /* the longest key fits; a test reads them all */

static void make_name(const rft_option *option, char name[NAME_ROOM])
{
    size_t length = sizeof PREFIX - 1;
    memcpy(name, PREFIX, length);
    for (const char *from = option->key; *from != '\0' && length + 1 < NAME_ROOM; from++) {
        char letter = *from == '.' ? '_' : *from;
        name[length++] = letter >= 'a' && letter <= 'z' ? (char)(letter - 'a' + 'A') : letter;
    }
    name[length] = '\0';
}

static bool is_name(const char *text, size_t length, const char *name)
{
    return strlen(name) == length && memcmp(name, text, length) == 0;
}

static const rft_option *find_by_name(const char *name, size_t length)
{
    char candidate[NAME_ROOM];
    for (size_t i = 0; i < rft_option_count; i++) {
        make_name(&rft_options[i], candidate);
        if (is_name(name, length, candidate)) return &rft_options[i];
    }
    return NULL;
}

static refit_status refuse_name(const char *name, size_t length, refit_error *error)
{
    char candidate[NAME_ROOM];
    size_t nearest = 0, best = SIZE_MAX;
    for (size_t i = 0; i < rft_option_count; i++) {
        make_name(&rft_options[i], candidate);
        size_t distance = rft_edit_distance(name, length, candidate, strlen(candidate));
        if (distance < best) {
            best = distance;
            nearest = i;
        }
    }
    make_name(&rft_options[nearest], candidate);
    return rft_fail(error, REFIT_ERR_CONFIG,
                    "environment: %.*s names no option: the nearest is %s; unset it or correct it",
                    (int)(length < 80 ? length : 80), name, candidate);
}

static refit_status take_variable(const char *variable, refit_config *full, size_t caller_size,
                                  refit_error *error)
{
    size_t length = strcspn(variable, "=");
    if (variable[length] == '\0') return REFIT_OK; /* no assignment at all */
    const rft_option *option = find_by_name(variable, length);
    if (option == NULL && is_name(variable, length, PACKAGE)) return REFIT_OK;
    if (option == NULL) return refuse_name(variable, length, error);
    refit_error inner;
    refit_status status = rft_config_assign(full, caller_size, option, variable + length + 1,
                                            REFIT_CONFIG_ENVIRONMENT, &inner);
    if (status == REFIT_OK) return REFIT_OK;
    return rft_fail(error, status, "environment: %.*s: %s", (int)length, variable, inner.text);
}

refit_status refit_config_load_env(refit_config *config, refit_error *error)
{
    refit_config full;
    RFT_TRY(rft_config_take(config, &full, error));
    for (char **variable = environ; variable != NULL && *variable != NULL; variable++) {
        if (strncmp(*variable, PREFIX, sizeof PREFIX - 1) != 0) continue;
        RFT_TRY(take_variable(*variable, &full, config->size, error));
    }
    rft_config_give(config, &full);
    return REFIT_OK;
}
