/* log: lines for the function that the process installed (refit_set_log); without one, nothing.
 */
#ifndef RFT_LOG_H
#define RFT_LOG_H

#include <refit/host.h>

/* One line, cut at 400 bytes. Log where something happens, once; errors that are returned are not
 * logged. */
void rft_log(refit_log_level level, const char *format, ...) REFIT_PRINTF(2, 3);

#endif
