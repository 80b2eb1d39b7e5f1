/* nearest: which known name was probably meant. */
#ifndef RFT_NEAREST_H
#define RFT_NEAREST_H

#include <stddef.h>

/* How many letters must be inserted, left out, replaced or swapped with their neighbour to make `b`
 * from `a`. Of longer words only the first 127 letters are compared. */
size_t rft_edit_distance(const char *a, size_t a_length, const char *b, size_t b_length);

/* The key of the option nearest to `word`. Never NULL. */
const char *rft_nearest_key(const char *word);

/* The section nearest to `word`, as the first *length bytes of what it returns. Never NULL. */
const char *rft_nearest_section(const char *word, size_t *length);

#endif
