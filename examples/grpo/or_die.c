/* or_die: one line on stderr, then the end. */
#include "or_die.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

void or_die(refit_status status, const refit_error *error)
{
    if (status != REFIT_OK) die("%s (%s)", error->text, refit_status_name(status));
}

void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fflush(stdout);
    fputs("grpo: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

void *calloc_or_die(size_t count, size_t bytes)
{
    void *block = calloc(count, bytes);
    if (block == NULL) die("no memory for %zu elements of %zu bytes", count, bytes);
    return block;
}
