/*
 * Statuses and error details.
 *
 * The public list in refit/status.h gives names and texts; rft_fail_sub writes a sentence into the
 * caller's refit_error. Nothing is kept here: an error belongs to the call that made it.
 */
#include "base/error.h"

#include <stdarg.h>

#include "base/text.h"

const char *refit_status_name(refit_status status)
{
    switch (status) {
#define STATUS_NAME(name, number, text)                                                            \
    case REFIT_##name: return #name;
        REFIT_STATUS_MAP(STATUS_NAME)
#undef STATUS_NAME
    }
    return "ERR_UNKNOWN";
}

const char *refit_status_text(refit_status status)
{
    switch (status) {
#define STATUS_TEXT(name, number, text)                                                            \
    case REFIT_##name: return text;
        REFIT_STATUS_MAP(STATUS_TEXT)
#undef STATUS_TEXT
    }
    return "an unknown status";
}

/* In parentheses: the static analyser sees a macro of this name. */
refit_status(rft_fail_sub)(refit_error *error, refit_status status, int subsystem,
                           const char *format, ...)
{
    if (error != NULL) {
        va_list arguments;
        va_start(arguments, format);
        rft_text_say_list(error->text, sizeof error->text, format, arguments);
        va_end(arguments);
        error->status = (int32_t)status;
        error->subsystem = subsystem;
    }
    return status;
}
