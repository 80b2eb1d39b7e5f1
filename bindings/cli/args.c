/*
 * The command line's arguments.
 *
 * Long flags only, "--flag value" or "--flag=value", in any order among other words; "--" ends
 * them. getopt_long would do as much, but it prints its own sentences and keeps global state.
 */
#include "args.h"

#include <stddef.h>
#include <string.h>

#include "cli.h"

static int take_value(cli_args *args, const cli_flag *flag, const char *after, const char **value)
{
    if (!flag->takes_value) {
        if (*after == '\0') return 0;
        (void)cli_complain(CLI_USAGE, "%s takes no value", flag->name);
        return CLI_ARGS_WRONG;
    }
    if (*after == '=') {
        *value = after + 1;
    } else if (args->at < args->count) {
        *value = args->values[args->at++];
    } else {
        (void)cli_complain(CLI_USAGE, "%s needs a value", flag->name);
        return CLI_ARGS_WRONG;
    }
    return 0;
}

int cli_args_next(cli_args *args, const cli_flag *flags, const char **value)
{
    if (args->at >= args->count) return CLI_ARGS_END;
    const char *argument = args->values[args->at++];
    if (!args->words_only && strcmp(argument, "--") == 0) {
        args->words_only = true;
        return cli_args_next(args, flags, value);
    }
    if (args->words_only || argument[0] != '-' || argument[1] == '\0') {
        *value = argument;
        return CLI_ARGS_WORD;
    }
    size_t length = strcspn(argument, "=");
    for (int i = 0; flags[i].name != NULL; i++) {
        if (strlen(flags[i].name) != length || memcmp(flags[i].name, argument, length) != 0) {
            continue;
        }
        return take_value(args, &flags[i], argument + length, value) == 0 ? i : CLI_ARGS_WRONG;
    }
    (void)cli_complain(CLI_USAGE, "%s is not known here: --help lists what is", argument);
    return CLI_ARGS_WRONG;
}

bool cli_args_number(const char *flag, const char *text, uint32_t least, uint32_t most,
                     uint32_t *out)
{
    uint64_t number = 0;
    const char *at = text;
    for (; *at >= '0' && *at <= '9' && number <= UINT32_MAX; at++) {
        number = number * 10 + (uint64_t)(*at - '0');
    }
    if (at == text || *at != '\0' || number < least || number > most) {
        (void)cli_complain(CLI_USAGE, "%s cannot be %s: write a whole number, %u to %u", flag, text,
                           least, most);
        return false;
    }
    *out = (uint32_t)number;
    return true;
}
