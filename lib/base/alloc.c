/*
 * The allocation hook: every small structure of refit comes from here.
 *
 * Process-wide by nature, like malloc: the process installs one allocator before it opens any refit
 * object. The count of live blocks is what tells whether one is open.
 */
#include "base/alloc.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <refit/host.h>

static void *default_allocate(void *user, size_t bytes)
{
    (void)user;
    return malloc(bytes);
}

static void *default_reallocate(void *user, void *block, size_t bytes)
{
    (void)user;
    return realloc(block, bytes);
}

static void default_release(void *user, void *block)
{
    (void)user;
    free(block);
}

#define DEFAULT_ALLOCATOR                                                                          \
    {                                                                                              \
        sizeof(refit_allocator), default_allocate, default_reallocate, default_release, NULL       \
    }

/* Written only while no block is live, so readers need no lock. */
static refit_allocator current = DEFAULT_ALLOCATOR;
static atomic_uint_fast64_t live_blocks;
static atomic_uint_fast64_t requests;

refit_status refit_set_allocator(const refit_allocator *allocator)
{
    static const refit_allocator defaults = DEFAULT_ALLOCATOR;
    if (atomic_load(&live_blocks) != 0) return REFIT_ERR_STATE;
    if (allocator == NULL) allocator = &defaults;
    if (allocator->size < sizeof *allocator || allocator->allocate == NULL ||
        allocator->reallocate == NULL || allocator->release == NULL) {
        return REFIT_ERR_INVALID;
    }
    current = *allocator;
    return REFIT_OK;
}

static void *count_block(void *block)
{
    if (block != NULL) atomic_fetch_add(&live_blocks, 1);
    return block;
}

void *rft_calloc(size_t count, size_t bytes)
{
    size_t total;
    if (__builtin_mul_overflow(count, bytes, &total) || total == 0) return NULL;
    atomic_fetch_add(&requests, 1);
    void *block = count_block(current.allocate(current.user, total));
    return block == NULL ? NULL : memset(block, 0, total);
}

void *rft_realloc(void *block, size_t count, size_t bytes)
{
    if (block == NULL) return rft_calloc(count, bytes);
    size_t total;
    if (__builtin_mul_overflow(count, bytes, &total) || total == 0) return NULL;
    atomic_fetch_add(&requests, 1);
    return current.reallocate(current.user, block, total);
}

char *rft_strdup(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = rft_calloc(bytes, 1);
    return copy == NULL ? NULL : memcpy(copy, text, bytes);
}

void rft_free(void *block)
{
    if (block == NULL) return;
    current.release(current.user, block);
    atomic_fetch_sub(&live_blocks, 1);
}

uint64_t rft_alloc_count(void)
{
    return atomic_load(&requests);
}
