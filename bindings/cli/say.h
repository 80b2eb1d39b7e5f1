/* say: what refit says by itself, such as that weights cannot travel through shared memory. */
#ifndef CLI_SAY_H
#define CLI_SAY_H

#include <stdbool.h>

/* From now on warnings and errors of refit are lines on stderr. */
void cli_say_begin(void);

/* Whether there was one. */
bool cli_said(void);

#endif
