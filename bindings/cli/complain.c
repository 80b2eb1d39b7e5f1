/*
 * Error messages of the refit command: one line each, whatever the text holds.
 *
 * Names of files and workers come from elsewhere and may hold line breaks or terminal sequences, so
 * control characters, those of C1 too, are replaced before anything reaches the terminal.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "cli.h"

int cli_complain(int status, const char *format, ...)
{
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    rft_text_say_list(line, sizeof line, format, arguments);
    va_end(arguments);
    (void)fprintf(stderr, "refit: %s\n", line);
    return status;
}

int cli_flush(void)
{
    errno = 0;
    if (fflush(stdout) == 0 && ferror(stdout) == 0) return CLI_DONE;
    return cli_complain(CLI_IO, "cannot write to standard output%s%s", errno != 0 ? ": " : "",
                        errno != 0 ? strerror(errno) : "");
}

static int exit_status(refit_status status)
{
    switch (status) {
    case REFIT_OK: return CLI_DONE;
    case REFIT_ERR_CONFIG:
    case REFIT_ERR_NOT_FOUND: return CLI_CONFIG;
    case REFIT_ERR_IO: return CLI_IO;
    case REFIT_ERR_PEER:
    case REFIT_ERR_TIMEOUT:
    case REFIT_ERR_CLOSED: return CLI_PEERS;
    default: return CLI_FAILED;
    }
}

int cli_complain_error(const refit_error *error)
{
    return cli_complain(exit_status((refit_status)error->status), "%s", error->text);
}

static int file_status(refit_status status)
{
    switch (status) {
    case REFIT_ERR_IO:
    case REFIT_ERR_NOT_FOUND:
    case REFIT_ERR_BUSY: return CLI_IO;
    case REFIT_ERR_INVALID:
    case REFIT_ERR_UNSUPPORTED:
    case REFIT_ERR_LIMIT:
    case REFIT_ERR_CORRUPT:
    case REFIT_ERR_STALE:
    case REFIT_ERR_EXISTS: return CLI_FILE;
    default: return exit_status(status);
    }
}

int cli_complain_file(const refit_error *error)
{
    return cli_complain(file_status((refit_status)error->status), "%s", error->text);
}

int cli_complain_content(const char *path, const refit_error *error)
{
    return cli_complain(file_status((refit_status)error->status), "%s: %s", path, error->text);
}

static bool is_inside_character(char byte)
{
    return ((unsigned char)byte & 0xc0) == 0x80;
}

/* A sentence that is too long loses its middle, between characters: its end says what to do. */
static void fit(const char *whole, char *out, size_t room)
{
    size_t length = strlen(whole), kept = room - sizeof "...";
    if (length < room) {
        memcpy(out, whole, length + 1);
        return;
    }
    size_t head = kept / 2, tail = length - (kept - head);
    while (head > 0 && is_inside_character(whole[head]))
        head--;
    while (is_inside_character(whole[tail]))
        tail++;
    (void)snprintf(out, room, "%.*s...%s", (int)head, whole, whole + tail);
}

refit_status cli_refuse(refit_error *error, refit_status status, int code, const char *format, ...)
{
    char whole[2048];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(whole, sizeof whole, format, arguments);
    va_end(arguments);
    fit(whole, error->text, sizeof error->text);
    error->status = (int32_t)status;
    error->subsystem = code;
    return status;
}
