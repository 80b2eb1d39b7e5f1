/*
 * Text from elsewhere is checked here, and made fit to be shown.
 *
 * A question mark stands for one byte, so what is shown is as long as what came, and a place to cut
 * can be chosen before anything is copied. A cut is never inside a character.
 */
#include "base/text.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"

#define SENTENCE   4608u /* the longest path, and what is said about it */
#define CUT        "..."
#define CUT_BYTES  (sizeof CUT - 1)
#define WORD_LEAST 24u /* bytes that are left of a word that is cut */

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

size_t rft_text_clean_part(const void *data, size_t count)
{
    const unsigned char *at = data;
    size_t clean = 0;
    while (clean < count) {
        size_t length = character_length(at + clean, count - clean);
        if (length == 0) break;
        clean += length;
    }
    return clean;
}

bool rft_text_is_clean(const void *data, size_t count)
{
    return rft_text_clean_part(data, count) == count;
}

/* A range of bytes that is left out. */
typedef struct gap {
    size_t begin;
    size_t end;
} gap;

static gap longest_word(const char *text, size_t count)
{
    gap longest = {0, 0};
    for (size_t at = 0; at < count;) {
        const char *space = memchr(text + at, ' ', count - at);
        size_t end = space == NULL ? count : (size_t)(space - text);
        if (end - at > longest.end - longest.begin) longest = (gap){at, end};
        at = end + 1;
    }
    return longest;
}

/* Leaves out `excess` bytes of what does not fit, in the middle of a word, or of all. */
static gap choose_gap(const char *text, size_t count, size_t excess)
{
    gap around = longest_word(text, count);
    if (around.end - around.begin < excess + WORD_LEAST) around = (gap){0, count};
    size_t kept = around.end - around.begin - excess;
    return (gap){around.begin + (kept + 1) / 2, around.end - kept / 2};
}

/* Copies what is before the gap and what is after it; a character that the gap touches goes. */
static char *show(const unsigned char *text, size_t count, gap hole, char *out)
{
    bool cut = false;
    for (size_t at = 0; at < count;) {
        size_t length = character_length(text + at, count - at);
        size_t width = length == 0 ? 1 : length;
        if (at + width <= hole.begin || at >= hole.end) {
            if (length == 0)
                *out = '?';
            else
                memcpy(out, text + at, width);
            out += width;
        } else if (!cut && hole.end < count) {
            memcpy(out, CUT, CUT_BYTES);
            out += CUT_BYTES;
            cut = true;
        }
        at += width;
    }
    return out;
}

void rft_text_fit(const void *data, size_t count, char *out, size_t room)
{
    if (room == 0) return;
    gap hole = {count, count};
    if (count >= room) {
        bool words = room > WORD_LEAST + CUT_BYTES;
        hole = words ? choose_gap(data, count, count - (room - 1) + CUT_BYTES)
                     : (gap){room - 1, count};
    }
    *show(data, count, hole, out) = '\0';
}

void rft_text_say_list(char *out, size_t room, const char *format, va_list arguments)
{
    char sentence[SENTENCE];
    int length = vsnprintf(sentence, sizeof sentence, format, arguments);
    size_t count = length < 0 ? 0 : (size_t)length;
    rft_text_fit(sentence, rft_min_u64(count, sizeof sentence - 1), out, room);
}

void rft_text_say(char *out, size_t room, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    rft_text_say_list(out, room, format, arguments);
    va_end(arguments);
}
