/* heard: what refit logs while a test runs. */
#ifndef HEARD_H
#define HEARD_H

#include <refit/host.h>

/* Hears lines of this level and of worse ones from now on, and forgets those before. */
void heard_begin(refit_log_level most);
void heard_end(void);

/* How many lines had the words ("": all), of the last 64. */
unsigned heard_count(const char *words);

#endif
