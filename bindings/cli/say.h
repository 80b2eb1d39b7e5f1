/* say: warnings of the library, such as that weights cannot travel through shared memory. */
#ifndef CLI_SAY_H
#define CLI_SAY_H

#include <stdint.h>

/* From now on warnings and errors of refit are lines on stderr. */
void cli_say_begin(void);

/* The number of lines so far. */
uint32_t cli_said(void);

#endif
