/* refit version: the version of the library that the command runs with. */
#include <stdio.h>

#include <refit/version.h>

#include "args.h"
#include "cli.h"

static int run_version(int count, char **arguments)
{
    static const cli_flag none[] = {{NULL, false}};
    const char *value;
    cli_args args = {count, arguments, 0, false};
    switch (cli_args_next(&args, none, &value)) {
    case CLI_ARGS_END: break;
    case CLI_ARGS_WORD: return cli_complain(CLI_USAGE, "refit version takes no argument");
    default: return CLI_USAGE;
    }
    (void)printf("refit %s\n", refit_version());
    return CLI_DONE;
}

const cli_command cli_version = {
    .name = "version",
    .summary = "show the version",
    .usage = "usage: refit version\n\nShows the version of the refit library in use.\n",
    .run = run_version,
};
