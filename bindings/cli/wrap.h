/* wrap: text in lines of a given width. */
#ifndef CLI_WRAP_H
#define CLI_WRAP_H

#include <stdio.h>

/* Prints `text`, broken at spaces, each line behind `prefix`, none longer than `columns` bytes
 * unless one word is. */
void cli_wrap(FILE *out, const char *prefix, const char *text, size_t columns);

#endif
