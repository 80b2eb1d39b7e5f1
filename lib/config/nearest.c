/*
 * The nearest known name, for "did you mean".
 *
 * Edit distance with neighbouring swaps (optimal string alignment), over three rows on the stack.
 * It only serves error messages, so clarity counts and speed does not.
 */
#include "config/nearest.h"

#include <string.h>

#include "config/options.h"

#define LONGEST 127

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

size_t rft_edit_distance(const char *a, size_t a_length, const char *b, size_t b_length)
{
    size_t rows[3][LONGEST + 1];
    size_t *before = rows[0], *above = rows[1], *row = rows[2];
    a_length = least(a_length, LONGEST);
    b_length = least(b_length, LONGEST);
    for (size_t j = 0; j <= b_length; j++)
        above[j] = j;
    for (size_t i = 1; i <= a_length; i++) {
        row[0] = i;
        for (size_t j = 1; j <= b_length; j++) {
            row[j] = least(above[j - 1] + (a[i - 1] != b[j - 1]), least(above[j], row[j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
                row[j] = least(row[j], before[j - 2] + 1);
            }
        }
        size_t *free_row = before;
        before = above;
        above = row;
        row = free_row;
    }
    return above[b_length];
}

const char *rft_nearest_key(const char *word)
{
    const char *nearest = rft_options[0].key;
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < rft_option_count; i++) {
        const char *key = rft_options[i].key;
        size_t distance = rft_edit_distance(word, strlen(word), key, strlen(key));
        if (distance < best) {
            best = distance;
            nearest = key;
        }
    }
    return nearest;
}

const char *rft_nearest_section(const char *word, size_t *length)
{
    const char *nearest = "";
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < rft_option_count; i++) {
        const char *dot = strrchr(rft_options[i].key, '.');
        if (dot == NULL) continue;
        size_t span = (size_t)(dot - rft_options[i].key);
        size_t distance = rft_edit_distance(word, strlen(word), rft_options[i].key, span);
        if (distance < best) {
            best = distance;
            nearest = rft_options[i].key;
            *length = span;
        }
    }
    return nearest;
}
