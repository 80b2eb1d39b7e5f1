/* A sequence lock with one writer, whose readers never wait. */
#include "store/seqlock.h"

#define RETIRED UINT64_MAX /* odd */

void rft_seqlock_fence(void)
{
    atomic_thread_fence(memory_order_seq_cst);
}

void rft_seqlock_begin(rft_seqlock *lock)
{
    uint64_t generation = atomic_load(&lock->generation);
    atomic_store(&lock->generation, (generation | 1) + (generation & 1) * 2);
    atomic_thread_fence(memory_order_seq_cst);
}

void rft_seqlock_end(rft_seqlock *lock)
{
    atomic_fetch_add(&lock->generation, 1);
}

void rft_seqlock_retire(rft_seqlock *lock)
{
    atomic_store(&lock->generation, RETIRED);
}

bool rft_seqlock_note(const rft_seqlock *lock, uint64_t *generation)
{
    *generation = atomic_load_explicit(&lock->generation, memory_order_acquire);
    return *generation % 2 == 0;
}

bool rft_seqlock_holds(const rft_seqlock *lock, uint64_t generation)
{
    /* The user's reads come before this look at the number, as in any sequence lock. */
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&lock->generation, memory_order_relaxed) == generation;
}

bool rft_seqlock_is_retired(const rft_seqlock *lock)
{
    return atomic_load(&lock->generation) == RETIRED;
}
