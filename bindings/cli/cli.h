/* cli: shared by the parts of the refit command: its commands, its exit statuses, its complaints.
 */
#ifndef CLI_H
#define CLI_H

#include <refit/status.h>

/* Scripts rely on these numbers: none changes its meaning. */
typedef enum cli_status {
    CLI_DONE = 0,
    CLI_FAILED = 1,   /* whatever has no number of its own */
    CLI_USAGE = 2,    /* the command line */
    CLI_CONFIG = 3,   /* a file, a variable or --set */
    CLI_PEERS = 4,    /* workers or the trainer missing, late or failed */
    CLI_FILE = 5,     /* a file whose content cannot be used */
    CLI_IO = 6,       /* reading or writing failed */
    CLI_SIGNAL = 128, /* and the signal's number */
} cli_status;

/* An endpoint that names the folder of an archive begins so. */
#define CLI_ARCHIVE_SCHEME "archive://"

/* `arguments` are those after the command's name. */
typedef struct cli_command {
    const char *name;
    const char *summary; /* one line of `refit --help` */
    const char *usage;   /* what --help shows: at most 24 lines of 79 columns */
    int (*run)(int count, char **arguments);
} cli_command;

extern const cli_command cli_publish, cli_subscribe, cli_materialize, cli_inspect, cli_keygen,
    cli_config, cli_bench, cli_version;

/* One line on stderr, "refit: ...", whose control characters, and bytes that are not UTF-8, are
 * shown as '?'; returns `status`. */
int cli_complain(int status, const char *format, ...) REFIT_PRINTF(2, 3);

/* As cli_complain, with the sentence and the status of a refit error. */
int cli_complain_error(const refit_error *error);

/* As cli_complain_error, for an error of a file or folder that the user named. */
int cli_complain_file(const refit_error *error);

/* As cli_complain_file, for a sentence about a file's content that does not name the file. */
int cli_complain_content(const char *path, const refit_error *error);

/* Writes out what was printed; CLI_IO, with a complaint, if it or what came before could not be
 * written: its reader has gone, or the disk is full. */
int cli_flush(void);

/* A refusal of the command's own parts, in the form that refit calls use. `code`: errno or 0. */
refit_status cli_refuse(refit_error *error, refit_status status, int code, const char *format, ...)
    REFIT_PRINTF(4, 5);

#endif
