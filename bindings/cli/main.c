/*
 * The refit command: picks a subcommand and runs it.
 *
 * Results go to stdout, complaints to stderr, one line each; nothing is ever coloured, and progress
 * is shown on a terminal only. The exit statuses are listed in cli.h and in --help. The command
 * sees refit through its public headers, like any other program.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include <refit/version.h>

#include "cli.h"
#include "say.h"

static const cli_command *const commands[] = {&cli_publish, &cli_subscribe, &cli_materialize,
                                              &cli_inspect, &cli_keygen,    &cli_config,
                                              &cli_bench,   &cli_version};
#define COMMANDS (sizeof commands / sizeof commands[0])

static void print_help(FILE *out)
{
    (void)fprintf(out,
                  "refit %s: new weights for rollout workers, one version that all switch to\n\n"
                  "usage: refit COMMAND [ARGUMENT...]\n\n",
                  refit_version());
    for (size_t i = 0; i < COMMANDS; i++) {
        (void)fprintf(out, "  %-11s %s\n", commands[i]->name, commands[i]->summary);
    }
    (void)fprintf(out, "\nrefit COMMAND --help tells more.\n\n"
                       "Options come from --config FILE, then from REFIT_* variables, then from\n"
                       "--set KEY=VALUE; refit config lists them.\n\n"
                       "exit status: 0 done; 1 failed; 2 wrong command line; 3 wrong option;\n"
                       "4 workers or the trainer missing, late or failed; 5 a file that cannot\n"
                       "be used; 6 reading or writing failed; 128+N ended by signal N\n");
}

/* Output that could not be written is a failure even if everything else went well. */
static int finish(int status)
{
    return status != CLI_DONE ? status : cli_flush();
}

static int run(const cli_command *command, int count, char **arguments)
{
    for (int i = 0; i < count && strcmp(arguments[i], "--") != 0; i++) {
        if (strcmp(arguments[i], "--help") != 0) continue;
        (void)fputs(command->usage, stdout);
        return CLI_DONE;
    }
    return command->run(count, arguments);
}

int main(int count, char **arguments)
{
    /* A closed standard output is a failed write, so that workers and files are left in order. */
    (void)signal(SIGPIPE, SIG_IGN);
    cli_say_begin();
    if (count < 2) {
        return cli_complain(CLI_USAGE, "which command? refit --help lists them");
    }
    const char *name = arguments[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0) {
        print_help(stdout);
        return finish(CLI_DONE);
    }
    if (strcmp(name, "--version") == 0) name = cli_version.name;
    for (size_t i = 0; i < COMMANDS; i++) {
        if (strcmp(name, commands[i]->name) != 0) continue;
        return finish(run(commands[i], count - 2, arguments + 2));
    }
    return cli_complain(CLI_USAGE, "there is no command %s: refit --help lists them", name);
}
