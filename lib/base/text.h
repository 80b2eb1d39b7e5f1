/*
 * text: UTF-8 without control characters, as names, options and sentences are.
 *
 * Bytes from elsewhere are checked here, and shown here: what is no such text is shown as question
 * marks, so that no name forges a line, and what is too long loses its middle, since a sentence
 * ends with what to do, and a path with its file.
 */
#ifndef RFT_TEXT_H
#define RFT_TEXT_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include <refit/status.h>

/* Whether all of it is UTF-8 without control characters and line breaks. */
bool rft_text_is_clean(const void *data, size_t count);

/* How many bytes at its beginning are: `count` if all are. */
size_t rft_text_clean_part(const void *data, size_t count);

/* Shows the bytes in a buffer of `room` bytes, NUL included: each byte that is no such text as '?';
 * "..." for what there is no room for, in the middle of the longest word if that is long enough.
 * Nothing for a room of 0. */
void rft_text_fit(const void *data, size_t count, char *out, size_t room);

/* As snprintf does, and fits the result. `out` may be among the arguments. */
void rft_text_say(char *out, size_t room, const char *format, ...) REFIT_PRINTF(3, 4);
void rft_text_say_list(char *out, size_t room, const char *format, va_list arguments)
    REFIT_PRINTF(3, 0);

#endif
