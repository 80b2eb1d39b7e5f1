/*
 * Byte strings, borrowed and owned.
 *
 * An owned one grows by half, so appending is cheap on average, and keeps its room when it
 * is reset, so a loop that reuses it allocates only at first. Text that came from elsewhere is
 * shown through rft_view_print alone: a peer's name cannot forge a line of a log or overrun a
 * buffer.
 */
#include "wire/bytes.h"

#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"

#define FIRST_ROOM 256u

rft_view rft_view_text(const char *text)
{
    return (rft_view){text, text == NULL ? 0 : strlen(text)};
}

/* What the first byte of a UTF-8 sequence says. */
typedef struct utf8_lead {
    size_t length;  /* 0: it cannot be a first byte */
    uint32_t bits;  /* of the code point, so far */
    uint32_t least; /* code point that needs that length */
} utf8_lead;

static utf8_lead read_lead(unsigned char first)
{
    if (first < 0x80) return (utf8_lead){1, first, 0};
    if (first >= 0xc2 && first < 0xe0) return (utf8_lead){2, first & 0x1f, 0x80};
    if (first >= 0xe0 && first < 0xf0) return (utf8_lead){3, first & 0x0f, 0x800};
    if (first >= 0xf0 && first < 0xf5) return (utf8_lead){4, first & 0x07, 0x10000};
    return (utf8_lead){0};
}

static bool is_printable(uint32_t point)
{
    bool control = point < 0x20 || (point >= 0x7f && point < 0xa0);
    bool surrogate = point >= 0xd800 && point < 0xe000;
    bool line_break = point == 0x2028 || point == 0x2029;
    return !control && !surrogate && !line_break && point <= 0x10ffff;
}

/* The length of the printable character at `at`, or 0 if there is none. */
static size_t character_length(const unsigned char *at, size_t left)
{
    utf8_lead lead = read_lead(at[0]);
    if (lead.length == 0 || lead.length > left) return 0;
    uint32_t point = lead.bits;
    for (size_t i = 1; i < lead.length; i++) {
        if ((at[i] & 0xc0) != 0x80) return 0;
        point = point << 6 | (at[i] & 0x3fu);
    }
    return point >= lead.least && is_printable(point) ? lead.length : 0;
}

bool rft_view_is_text(rft_view view)
{
    const unsigned char *at = view.data;
    for (size_t left = view.count; left > 0;) {
        size_t length = character_length(at, left);
        if (length == 0) return false;
        at += length;
        left -= length;
    }
    return true;
}

void rft_view_print(rft_view view, char *out, size_t room)
{
    if (room == 0) return;
    const unsigned char *at = view.data;
    size_t left = view.count;
    while (left > 0) {
        size_t length = character_length(at, left);
        size_t width = length == 0 ? 1 : length;
        if (width >= room) break;
        if (length == 0)
            *out = '?';
        else
            memcpy(out, at, width);
        out += width;
        room -= width;
        at += width;
        left -= width;
    }
    *out = '\0';
}

refit_status rft_bytes_reserve(rft_bytes *bytes, size_t count, refit_error *error)
{
    uint64_t needed;
    RFT_REFUSE_IF(!rft_add_u64(bytes->count, count, &needed), error, REFIT_ERR_HOST_MEMORY,
                  "a byte string of more than 2^64 bytes was asked for");
    if (needed <= bytes->room) return REFIT_OK;
    size_t room = rft_max_u64(rft_max_u64(needed, FIRST_ROOM), bytes->room + bytes->room / 2);
    unsigned char *data = rft_realloc(bytes->data, room, 1);
    RFT_REFUSE_IF(data == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory for %zu bytes of a message", room);
    bytes->data = data;
    bytes->room = room;
    return REFIT_OK;
}

refit_status rft_bytes_append(rft_bytes *bytes, const void *data, size_t count, refit_error *error)
{
    if (count == 0) return REFIT_OK;
    RFT_TRY(rft_bytes_reserve(bytes, count, error));
    memcpy(bytes->data + bytes->count, data, count);
    bytes->count += count;
    return REFIT_OK;
}

void rft_bytes_reset(rft_bytes *bytes)
{
    bytes->count = 0;
}

void rft_bytes_close(rft_bytes *bytes)
{
    rft_free(bytes->data);
    *bytes = (rft_bytes){0};
}

rft_view rft_bytes_view(const rft_bytes *bytes)
{
    return (rft_view){bytes->data, bytes->count};
}
