/* Memory for bookkeeping, through the allocator that the process installed (refit_set_allocator).
 */
#ifndef RFT_ALLOC_H
#define RFT_ALLOC_H

#include <stddef.h>
#include <stdint.h>

/* `count` zeroed elements of `bytes` each, or NULL (also if the product overflows). Free with
 * rft_free. */
void *rft_calloc(size_t count, size_t bytes);

/* Grows or shrinks a block; the old one stays valid on failure (NULL). New bytes are undefined. */
void *rft_realloc(void *block, size_t count, size_t bytes);

/* A copy of `text`, or NULL. */
char *rft_strdup(const char *text);

/* NULL is allowed. */
void rft_free(void *block);

/* How often memory was asked for in this process: what "the hot path allocates nothing" is held
 * against. */
uint64_t rft_alloc_count(void);

#endif
