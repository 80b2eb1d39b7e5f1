/*
 * Reading the kernel's text files. Parsers take what is there and answer "no such number" for all
 * else: a file that is missing or says something new is not an error here. Knows nothing of what
 * the numbers mean.
 */
#include "memory/procfile.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

bool rft_procfile_read(const char *path, char *text, size_t room)
{
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    size_t filled = 0;
    ssize_t got = 1;
    while (filled < room - 1 && got != 0) {
        got = read(file, text + filled, room - 1 - filled);
        if (got < 0 && errno != EINTR) break;
        if (got > 0) filled += (size_t)got;
    }
    text[filled] = '\0';
    close(file);
    return got >= 0;
}

bool rft_procfile_number(const char *text, uint64_t *out)
{
    uint64_t value = 0;
    text += strspn(text, " \t");
    if (*text < '0' || *text > '9') return false;
    for (; *text >= '0' && *text <= '9'; text++) {
        if (__builtin_mul_overflow(value, UINT64_C(10), &value) ||
            __builtin_add_overflow(value, (uint64_t)(*text - '0'), &value)) {
            return false;
        }
    }
    *out = value;
    return true;
}

/* The next range of a list, which goes on at `*text`; NULL: it ends there. */
static bool next_range(const char **text, uint64_t *first, uint64_t *last)
{
    if (*text == NULL || !rft_procfile_number(*text, first)) return false;
    const char *dash = *text + strcspn(*text, "-,");
    if (*dash != '-' || !rft_procfile_number(dash + 1, last)) *last = *first;
    *text = strchr(*text, ',');
    if (*text != NULL) ++*text;
    return true;
}

bool rft_procfile_lists(const char *text, uint64_t number)
{
    uint64_t first, last;
    while (next_range(&text, &first, &last)) {
        if (number >= first && number <= last) return true;
    }
    return false;
}

uint64_t rft_procfile_count(const char *text)
{
    uint64_t first, last, count = 0;
    while (next_range(&text, &first, &last)) {
        if (last >= first) count += last - first + 1;
    }
    return count;
}

bool rft_procfile_find(const char *text, const char *key, uint64_t *out)
{
    size_t length = strlen(key);
    while (text != NULL && *text != '\0') {
        if (strncmp(text, key, length) == 0 && strchr(": \t", text[length]) != NULL &&
            text[length] != '\0') {
            return rft_procfile_number(text + length + (text[length] == ':'), out);
        }
        text = strchr(text, '\n');
        if (text != NULL) text++;
    }
    return false;
}
