/* bytes: a borrowed range of bytes, and a growing one that is owned. */
#ifndef RFT_BYTES_H
#define RFT_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

/* Borrowed; not NUL-terminated. */
typedef struct rft_view {
    const void *data;
    size_t count;
} rft_view;

/* Owned. {0} is empty and valid; a reset keeps the memory. */
typedef struct rft_bytes {
    unsigned char *data;
    size_t count;
    size_t room;
} rft_bytes;

/* The bytes of `text` without its NUL; NULL gives an empty view. */
rft_view rft_view_text(const char *text);

/* Whether it is UTF-8 without control characters: what a name must be. */
bool rft_view_is_text(rft_view view);

/* Copies a view as text into `out`, fitted to its room (base/text.h): control characters and what
 * is not UTF-8 replaced by '?', always NUL-terminated. */
void rft_view_print(rft_view view, char *out, size_t room);

/* Makes room for `count` more bytes. REFIT_ERR_HOST_MEMORY; the bytes stay as they are. */
refit_status rft_bytes_reserve(rft_bytes *bytes, size_t count, refit_error *error);
refit_status rft_bytes_append(rft_bytes *bytes, const void *data, size_t count, refit_error *error);
void rft_bytes_reset(rft_bytes *bytes);
void rft_bytes_close(rft_bytes *bytes);
rft_view rft_bytes_view(const rft_bytes *bytes);

/* Numbers inside byte strings (SEAL's digests, RESEND's sequences) are little-endian and lie
 * anywhere. */
static inline void rft_put_u32(unsigned char *to, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        to[i] = (unsigned char)(value >> (8 * i));
}

static inline void rft_put_u64(unsigned char *to, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        to[i] = (unsigned char)(value >> (8 * i));
}

static inline uint32_t rft_get_u32(const unsigned char *from)
{
    uint32_t value = 0;
    for (int i = 0; i < 4; i++)
        value |= (uint32_t)from[i] << (8 * i);
    return value;
}

static inline uint64_t rft_get_u64(const unsigned char *from)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value |= (uint64_t)from[i] << (8 * i);
    return value;
}

#endif
