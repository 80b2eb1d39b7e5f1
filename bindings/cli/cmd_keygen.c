/*
 * refit keygen: a key pair for one trainer or worker, as two files.
 *
 * The secret half is shown nowhere and goes into a file that only its owner can read; existing
 * files are never overwritten by accident, because the owner of a lost pair can connect no more.
 */
#include <stdio.h>

#include <refit/keys.h>

#include "args.h"
#include "cli.h"

enum { FLAG_FORCE };

static const cli_flag flags[] = {
    [FLAG_FORCE] = {"--force", false},
    {NULL, false},
};

static int make_pair(const char *folder, const char *name, bool force)
{
    refit_error error;
    refit_status status = refit_keys_generate(folder, name, force, &error);
    if (status == REFIT_ERR_INVALID) return cli_complain(CLI_USAGE, "%s", error.text);
    if (status == REFIT_ERR_EXISTS) return cli_complain(CLI_FAILED, "%s (--force)", error.text);
    if (status != REFIT_OK) return cli_complain_error(&error);
    (void)printf("%s/%s.secret\n%s/%s.public\n", folder, name, folder, name);
    return CLI_DONE;
}

static int run_keygen(int count, char **arguments)
{
    const char *words[2] = {NULL, NULL}, *value = NULL;
    int word_count = 0;
    bool force = false;
    cli_args args = {count, arguments, 0, false};
    for (int found; (found = cli_args_next(&args, flags, &value)) != CLI_ARGS_END;) {
        switch (found) {
        case FLAG_FORCE: force = true; break;
        case CLI_ARGS_WORD:
            if (word_count == 2) return cli_complain(CLI_USAGE, "what is %s?", value);
            words[word_count++] = value;
            break;
        default: return CLI_USAGE;
        }
    }
    if (word_count < 2) return cli_complain(CLI_USAGE, "which keys? refit keygen FOLDER NAME");
    return make_pair(words[0], words[1], force);
}

const cli_command cli_keygen = {
    .name = "keygen",
    .summary = "make a key pair, for weights that leave this host",
    .usage = "usage: refit keygen FOLDER NAME [--force]\n"
             "\n"
             "Makes FOLDER/NAME.secret (mode 0600) and FOLDER/NAME.public, and says so.\n"
             "\n"
             "  --force   replace files that are there: what the old pair opened is shut then\n"
             "\n"
             "Options of a trainer:  security.key: TRAINER.secret\n"
             "                       security.allow: FOLDER, with its workers' .public files\n"
             "and of a worker:       security.key: WORKER.secret\n"
             "                       security.server_key: TRAINER.public\n"
             "\n"
             "A secret file stays where it was made.\n",
    .run = run_keygen,
};
