/* progress: one line on the terminal that shows how far a transfer is; nothing in a pipe. */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct cli_progress {
    bool shown;     /* stderr is a terminal */
    char label[64]; /* "version 3" */
    uint64_t total, done;
    int64_t next_at; /* nanoseconds: not before this moment is the line drawn again */
} cli_progress;

void cli_progress_begin(cli_progress *progress, uint64_t total, const char *label);
void cli_progress_add(cli_progress *progress, uint64_t bytes);

/* Says what is waited for, in place of the bytes. */
void cli_progress_say(cli_progress *progress, const char *words);

/* Clears the line. */
void cli_progress_end(cli_progress *progress);

/* Clears the line that is shown, if one is. Any thread. */
void cli_progress_clear(void);

#define CLI_SIZE_TEXT 32

/* "1.2 GiB"; bytes below 1 KiB as "17 B". */
const char *cli_size_text(uint64_t bytes, char text[CLI_SIZE_TEXT]);

/* Seconds on the monotonic clock. */
double cli_seconds(void);

#endif
