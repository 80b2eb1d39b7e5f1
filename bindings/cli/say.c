/*
 * Lines of refit's log on stderr, in the form of the command's own complaints.
 *
 * They may come from service threads while a progress line is shown: it is cleared first.
 */
#include "say.h"

#include <stdatomic.h>
#include <stddef.h>

#include <refit/host.h>

#include "cli.h"
#include "progress.h"

static atomic_uint said;

static void print_line(void *user, refit_log_level level, const char *line)
{
    (void)user;
    (void)level;
    atomic_fetch_add(&said, 1);
    cli_progress_clear();
    (void)cli_complain(CLI_DONE, "%s", line);
}

void cli_say_begin(void)
{
    refit_set_log(print_line, NULL, REFIT_LOG_WARNING);
}

uint32_t cli_said(void)
{
    return atomic_load(&said);
}
