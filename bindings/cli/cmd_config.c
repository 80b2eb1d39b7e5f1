/*
 * refit config: every option, its value, where it came from and what it is for.
 *
 * With --defaults it writes configs/refit.yaml, byte for byte: the file is made from the table of
 * options, and a test compares it with this output.
 */
#include <stdio.h>
#include <string.h>

#include <refit/config.h>

#include "args.h"
#include "cli.h"
#include "settings.h"

#define COLUMNS 79

static const char *const origins[] = {
    [REFIT_CONFIG_DEFAULT] = "default",
    [REFIT_CONFIG_FILE] = "file",
    [REFIT_CONFIG_ENVIRONMENT] = "environment",
    [REFIT_CONFIG_EXPLICIT] = "set",
};

/* "bytes, 4KiB to 64GiB": what the value may be. */
static void print_domain(const refit_option *option)
{
    (void)printf("%s%s%s", option->unit, option->range[0] != '\0' ? ", " : "", option->range);
}

/* Only texts need quotes to be read back as they are. */
static void print_value(const refit_option *option, const char *value)
{
    if (strcmp(option->unit, "text") != 0) {
        (void)fputs(value, stdout);
        return;
    }
    (void)putchar('"');
    for (; *value != '\0'; value++) {
        if (*value == '"' || *value == '\\') (void)putchar('\\');
        (void)putchar(*value);
    }
    (void)putchar('"');
}

/* Prints `text`, broken at spaces, each line after `prefix`, none longer than `columns` bytes
 * unless one word is. */
static void print_wrapped(const char *prefix, const char *text, size_t columns)
{
    size_t used = 0;
    while (*text != '\0') {
        const size_t word = strcspn(text, " ");
        if (used > 0 && used + 1 + word > columns) {
            (void)putchar('\n');
            used = 0;
        }
        used += (size_t)printf("%s%.*s", used == 0 ? prefix : " ", (int)word, text);
        text += word;
        text += strspn(text, " ");
    }
    (void)putchar('\n');
}

static void show_option(void *user, const refit_option *option)
{
    (void)user;
    (void)printf("%s: ", option->key);
    print_value(option, option->value);
    (void)printf("\n    from: %s", origins[option->origin]);
    if (option->origin != REFIT_CONFIG_DEFAULT) {
        (void)fputs("; default: ", stdout);
        print_value(option, option->default_value);
    }
    (void)fputs("; takes: ", stdout);
    print_domain(option);
    (void)putchar('\n');
    print_wrapped("    ", option->help, COLUMNS);
}

/* The part before the last dot, or nothing. */
static size_t section_length(const char *key)
{
    const char *dot = strrchr(key, '.');
    return dot == NULL ? 0 : (size_t)(dot - key);
}

static void write_default(void *user, const refit_option *option)
{
    char *section = user;
    const size_t length = section_length(option->key);
    const char *indent = length > 0 ? "  " : "";
    if (strncmp(section, option->key, length) != 0 || section[length] != '\0') {
        (void)snprintf(section, 64, "%.*s", (int)length, option->key);
        (void)printf("\n%s:", section);
    }
    (void)printf("\n%s# ", indent);
    print_domain(option);
    (void)putchar('\n');
    print_wrapped(length > 0 ? "  # " : "# ", option->help, COLUMNS);
    (void)printf("%s%s: ", indent, option->key + length + (length > 0));
    print_value(option, option->default_value);
    (void)putchar('\n');
}

static int write_defaults(void)
{
    char section[64] = "";
    refit_config config;
    refit_config_init(&config, sizeof config);
    (void)fputs("# Every option of refit: unit and range, why one would change it, its default.\n"
                "#\n"
                "# Made by `refit config --defaults`. A file of your own names only what differs\n"
                "# and may begin with `include: refit.yaml`. Variables go over files:\n"
                "# REFIT_OFFLOAD_BATCH stands for offload.batch. Sizes take KiB, MiB, GiB, TiB;\n"
                "# times take ms, s, min.\n",
                stdout);
    refit_config_each(&config, write_default, section);
    return CLI_DONE;
}

enum { FLAG_FILE, FLAG_CONFIG, FLAG_SET, FLAG_DEFAULTS };

static const cli_flag flags[] = {
    [FLAG_FILE] = {"--file", true},
    [FLAG_CONFIG] = {"--config", true},
    [FLAG_SET] = {"--set", true},
    [FLAG_DEFAULTS] = {"--defaults", false},
    {NULL, false},
};

static int run_config(int count, char **arguments)
{
    cli_settings settings = {0};
    bool defaults = false;
    const char *value = NULL;
    cli_args args = {count, arguments, 0, false};
    for (int found; (found = cli_args_next(&args, flags, &value)) != CLI_ARGS_END;) {
        switch (found) {
        case FLAG_FILE:
        case FLAG_CONFIG: settings.file = value; break;
        case FLAG_SET:
            if (!cli_settings_add(&settings, value)) return CLI_USAGE;
            break;
        case FLAG_DEFAULTS: defaults = true; break;
        case CLI_ARGS_WORD: return cli_complain(CLI_USAGE, "what is %s? try --file", value);
        default: return CLI_USAGE;
        }
    }
    if (defaults) return write_defaults();
    refit_config config;
    int status = cli_settings_load(&settings, &config);
    if (status == CLI_DONE) refit_config_each(&config, show_option, NULL);
    return status;
}

const cli_command cli_config = {
    .name = "config",
    .summary = "show every option: its value, where it came from, what it is for",
    .usage = "usage: refit config [--file FILE] [--set KEY=VALUE]... [--defaults]\n"
             "\n"
             "Shows every option with its value, where the value came from, and its help.\n"
             "\n"
             "  --file FILE      read this configuration file (--config is the same)\n"
             "  --set KEY=VALUE  set one option, over the file and the environment\n"
             "  --defaults       write the defaults as a commented YAML file instead\n"
             "\n"
             "A REFIT_* variable goes over the file: REFIT_OFFLOAD_BATCH for offload.batch.\n"
             "Values that are wrong, or do not fit together, are refused with status 3.\n",
    .run = run_config,
};
