/*
 * The C twin of pack.cu: one copy after the other. A large entry goes round the caches, as any
 * large copy does.
 */
#include "kernels/pack.h"

#include "kernels/copy.h"

void rft_pack(const rft_pack_entry *entries, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        rft_copy_bytes((void *)(uintptr_t)entries[i].to, (const void *)(uintptr_t)entries[i].from,
                       entries[i].bytes);
    }
}
