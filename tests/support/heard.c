#include "tests/support/heard.h"

#include <stdio.h>
#include <string.h>

#define MOST 64u

static char lines[MOST][512];
static unsigned count;

static void hear(void *user, refit_log_level level, const char *line)
{
    (void)user, (void)level;
    snprintf(lines[count++ % MOST], sizeof lines[0], "%s", line);
}

void heard_begin(refit_log_level most)
{
    refit_set_log(hear, NULL, most);
    count = 0;
}

void heard_end(void)
{
    refit_set_log(NULL, NULL, REFIT_LOG_ERROR);
}

unsigned heard_count(const char *words)
{
    unsigned found = 0;
    for (unsigned i = 0; i < MOST && i < count; i++)
        found += strstr(lines[i], words) != NULL;
    return found;
}
