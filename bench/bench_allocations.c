/* bench_allocations: counts the allocations of refit, with an allocator that passes all on to the C
 * library. */
#include <stdatomic.h>
#include <stdlib.h>

#include "bench.h"

static atomic_uint_fast64_t allocations;

static void *count_allocate(void *user, size_t bytes)
{
    (void)user;
    atomic_fetch_add(&allocations, 1);
    return malloc(bytes);
}

static void *count_reallocate(void *user, void *block, size_t bytes)
{
    (void)user;
    atomic_fetch_add(&allocations, 1);
    return realloc(block, bytes);
}

static void count_release(void *user, void *block)
{
    (void)user;
    free(block);
}

bool bench_count_allocations(void)
{
    static const refit_allocator counting = {sizeof counting, count_allocate, count_reallocate,
                                             count_release, NULL};
    return refit_set_allocator(&counting) == REFIT_OK;
}

uint64_t bench_allocations(void)
{
    return atomic_load(&allocations);
}
