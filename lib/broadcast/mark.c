/* A sequence lock with one writer, whose readers never wait. */
#include "broadcast/mark.h"

#define RETIRED UINT64_MAX /* odd */

void rft_mark_fence(void)
{
    atomic_thread_fence(memory_order_seq_cst);
}

void rft_mark_begin(rft_mark *mark)
{
    uint64_t generation = atomic_load(&mark->generation);
    atomic_store(&mark->generation, (generation | 1) + (generation & 1) * 2);
    atomic_thread_fence(memory_order_seq_cst);
}

void rft_mark_end(rft_mark *mark)
{
    atomic_fetch_add(&mark->generation, 1);
}

void rft_mark_retire(rft_mark *mark)
{
    atomic_store(&mark->generation, RETIRED);
}

bool rft_mark_note(const rft_mark *mark, uint64_t *generation)
{
    *generation = atomic_load_explicit(&mark->generation, memory_order_acquire);
    return *generation % 2 == 0;
}

bool rft_mark_holds(const rft_mark *mark, uint64_t generation)
{
    /* The user's reads come before this look at the mark, as in any sequence lock. */
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&mark->generation, memory_order_relaxed) == generation;
}

bool rft_mark_is_retired(const rft_mark *mark)
{
    return atomic_load(&mark->generation) == RETIRED;
}
