/* A sequence lock with one writer, whose readers never wait. */
#include "store/seqlock.h"

#define RETIRED UINT64_MAX /* odd */

void rft_seqlock_fence(void)
{
    atomic_thread_fence(memory_order_seq_cst);
}

void rft_seqlock_begin(rft_seqlock *mark)
{
    uint64_t generation = atomic_load(&mark->generation);
    atomic_store(&mark->generation, (generation | 1) + (generation & 1) * 2);
    atomic_thread_fence(memory_order_seq_cst);
}

void rft_seqlock_end(rft_seqlock *mark)
{
    atomic_fetch_add(&mark->generation, 1);
}

void rft_seqlock_retire(rft_seqlock *mark)
{
    atomic_store(&mark->generation, RETIRED);
}

bool rft_seqlock_note(const rft_seqlock *mark, uint64_t *generation)
{
    *generation = atomic_load_explicit(&mark->generation, memory_order_acquire);
    return *generation % 2 == 0;
}

bool rft_seqlock_holds(const rft_seqlock *mark, uint64_t generation)
{
    /* The user's reads come before this look at the mark, as in any sequence lock. */
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&mark->generation, memory_order_relaxed) == generation;
}

bool rft_seqlock_is_retired(const rft_seqlock *mark)
{
    return atomic_load(&mark->generation) == RETIRED;
}
