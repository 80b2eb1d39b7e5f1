/* interrupt: SIGINT and SIGTERM: a command asks whether one came, or is woken by it. */
#ifndef CLI_INTERRUPT_H
#define CLI_INTERRUPT_H

#include <refit/broadcast.h>

/* From now on the first SIGINT or SIGTERM is remembered; a second one ends the process. Writing
 * beyond a file size limit becomes an error of the write. */
void cli_interrupt_catch(void);

/* The signal that came, or 0. */
int cli_interrupt_signal(void);

/* A signal wakes this subscriber; NULL before it is closed. */
void cli_interrupt_wakes(refit_subscriber *subscriber);

#endif
