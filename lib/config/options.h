/*
 * options: the one table of everything a user may choose, and how a row reads and prints its value.
 *
 * A row's value lives in refit_config at `offset`. All kinds but RFT_TEXT pass through one unsigned
 * number, the code, so that reading, printing and the range check are the same for the file, the
 * environment and values that a program wrote into the struct by hand.
 */
#ifndef RFT_OPTIONS_H
#define RFT_OPTIONS_H

#include <stdbool.h>

#include <refit/config.h>

#include "base/error.h"

typedef enum rft_kind {
    RFT_FLAG,   /* uint8_t; true, false */
    RFT_COUNT,  /* uint32_t; a whole number */
    RFT_SIZE,   /* uint64_t bytes; KiB to TiB */
    RFT_TIME,   /* uint32_t milliseconds; ms, s, min */
    RFT_SHARE,  /* double of 0 to 1; its code counts billionths */
    RFT_CHOICE, /* int32_t; the names are the option's unit, "auto|always|never" */
    RFT_NODE,   /* int32_t; REFIT_NUMA_* or a node; its code is 3 more */
    RFT_TEXT,   /* char[width] */
    RFT_KINDS,
} rft_kind;

typedef struct rft_option {
    const char *key;
    size_t offset; /* in refit_config */
    size_t width;  /* bytes there */
    rft_kind kind;
    const char *standard; /* the default, as text */
    uint64_t least, most; /* codes; for RFT_TEXT most is the longest text */
    const char *unit;
    const char *help;
} rft_option;

/* The rows, in the order of configs/refit.yaml. */
extern const rft_option rft_options[];
extern const size_t rft_option_count;

#define RFT_VALUE_TEXT 256 /* room for every printed value */
#define RFT_RANGE_TEXT 64  /* room for every printed range */

/* The row of `key`, or NULL. */
const rft_option *rft_option_find(const char *key);

/* Whether a struct of so many bytes holds this option: older callers have shorter ones. */
bool rft_option_within(const rft_option *option, size_t size);

/* Reads `text` into the option's field. REFIT_ERR_CONFIG, and `config` is unchanged. */
refit_status rft_option_parse(const rft_option *option, const char *text, refit_config *config,
                              refit_error *error);

/* Reads a size as every option does: "512MiB". False, and nothing is written, if it is none. */
bool rft_size_read(const char *text, uint64_t *bytes);

/* Prints the field as the file would say it. */
void rft_option_print(const rft_option *option, const refit_config *config,
                      char text[RFT_VALUE_TEXT]);

/* Prints the allowed range ("1 to 2"); empty where the unit says it all. */
void rft_option_range(const rft_option *option, char text[RFT_RANGE_TEXT]);

/* Whether the field holds a value that rft_option_parse would have let through. REFIT_ERR_CONFIG */
refit_status rft_option_check(const rft_option *option, const refit_config *config,
                              refit_error *error);

/* ---- "Did you mean": which known name was probably meant */

/* How many letters must be inserted, left out, replaced or swapped with their neighbour to make `b`
 * from `a`. Of longer words only the first 127 letters are compared. */
size_t rft_edit_distance(const char *a, size_t a_length, const char *b, size_t b_length);

/* The key of the option nearest to `word`. Never NULL. */
const char *rft_nearest_key(const char *word);

/* The section nearest to `word`, as the first *length bytes of what it returns. Never NULL. */
const char *rft_nearest_section(const char *word, size_t *length);

#endif
