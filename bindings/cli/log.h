/* log: what refit says by itself, such as that weights cannot travel through shared memory. */
#ifndef CLI_LOG_H
#define CLI_LOG_H

#include <stdbool.h>

/* From now on warnings and errors of refit are lines on stderr. */
void cli_log_begin(void);

/* Whether there was one. */
bool cli_log_said(void);

#endif
