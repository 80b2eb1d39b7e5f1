/* An allocator that counts requests and refuses one of them; everything else goes to malloc. */
#include "tests/support/failing_alloc.h"
#include "tests/support/test.h"

#include <stdatomic.h>
#include <stdlib.h>

#include <refit/host.h>

static atomic_uint_fast64_t requests;
static atomic_uint_fast64_t failing; /* 0: none */

static _Thread_local uint64_t left_here; /* requests of this thread until one fails; 0: none does */
static _Thread_local bool refused_here;

static bool is_refused(void)
{
    if (left_here > 0 && --left_here == 0) {
        refused_here = true;
        return true;
    }
    return atomic_fetch_add(&requests, 1) + 1 == atomic_load(&failing);
}

static void *allocate(void *user, size_t bytes)
{
    (void)user;
    return is_refused() ? NULL : malloc(bytes);
}

static void *reallocate(void *user, void *block, size_t bytes)
{
    (void)user;
    return is_refused() ? NULL : realloc(block, bytes);
}

static void release(void *user, void *block)
{
    (void)user;
    free(block);
}

void failing_alloc_begin(uint64_t nth)
{
    const refit_allocator allocator = {sizeof allocator, allocate, reallocate, release, NULL};
    atomic_store(&requests, 0);
    atomic_store(&failing, nth);
    assert_ok(refit_set_allocator(&allocator));
}

void failing_alloc_here(uint64_t nth)
{
    left_here = nth;
    refused_here = false;
}

bool failing_alloc_stop_here(void)
{
    left_here = 0;
    return refused_here;
}

bool failing_alloc_stop(void)
{
    uint64_t nth = atomic_exchange(&failing, 0);
    return nth != 0 && atomic_load(&requests) >= nth;
}

bool failing_alloc_end(void)
{
    assert_ok(refit_set_allocator(NULL)); /* else a block has leaked */
    return failing_alloc_stop();
}
