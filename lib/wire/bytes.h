/* bytes: a borrowed stretch of bytes, and a growing one that is owned. */
#ifndef RFT_BYTES_H
#define RFT_BYTES_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

/* Borrowed; not NUL-terminated. */
typedef struct rft_view {
    const void *data;
    size_t count;
} rft_view;

/* Owned. {0} is empty and valid; reuse keeps the room. */
typedef struct rft_bytes {
    unsigned char *data;
    size_t count;
    size_t room;
} rft_bytes;

rft_view rft_view_text(const char *text);
/* Copies a view as text into `out`, cut to its room, control characters replaced, always
 * NUL-terminated. */
void rft_view_print(rft_view view, char *out, size_t room);

refit_status rft_bytes_append(rft_bytes *bytes, const void *data, size_t count, refit_error *error);
void rft_bytes_reset(rft_bytes *bytes);
void rft_bytes_close(rft_bytes *bytes);

#endif
