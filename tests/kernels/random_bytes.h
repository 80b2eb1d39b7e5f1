/* Random bytes, and memory that ends where its bytes do, so that a sanitizer sees what is read or
 * written beyond them. */
#ifndef RANDOM_BYTES_H
#define RANDOM_BYTES_H

#include <stdlib.h>

#include "tests/support/seeded.h"
#include "tests/support/test.h"

static inline unsigned char *take(size_t bytes)
{
    unsigned char *taken = malloc(bytes == 0 ? 1 : bytes);
    assert_non_null(taken);
    return taken;
}

static inline void fill_random(unsigned char *memory, size_t bytes, uint64_t *seed)
{
    for (size_t i = 0; i < bytes; i++)
        memory[i] = (unsigned char)(seeded_next(seed) >> 40);
}

static inline unsigned char *take_random(size_t bytes, uint64_t *seed)
{
    unsigned char *taken = take(bytes);
    fill_random(taken, bytes, seed);
    return taken;
}

static inline unsigned char *take_copy(const void *bytes, size_t count)
{
    return memcpy(take(count), bytes, count);
}

#endif
