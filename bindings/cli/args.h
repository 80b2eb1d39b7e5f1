/*
 * args: a command line, argument by argument.
 *
 *     cli_args args = {count, arguments, 0, false};
 *     while ((found = cli_args_next(&args, flags, &value)) != CLI_ARGS_END) { ... }
 */
#ifndef CLI_ARGS_H
#define CLI_ARGS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct cli_flag {
    const char *name; /* "--timeout"; NULL ends the list */
    bool takes_value; /* "--timeout 5" or "--timeout=5" */
} cli_flag;

typedef struct cli_args {
    int count;
    char **values;
    int at;
    bool words_only; /* after "--" */
} cli_args;

enum {
    CLI_ARGS_END = -1,
    CLI_ARGS_WORD = -2,  /* `value` is an argument that is not a flag */
    CLI_ARGS_WRONG = -3, /* the complaint has been printed */
};

/* The index of the next argument's flag, or one of the above. */
int cli_args_next(cli_args *args, const cli_flag *flags, const char **value);

/* Reads a whole number; false, with a complaint that names `flag`, if it is none or out of range.
 */
bool cli_args_number(const char *flag, const char *text, uint32_t least, uint32_t most,
                     uint32_t *out);

#endif
