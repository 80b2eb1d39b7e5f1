/*
 * Mappings that begin where a huge page can. The kernel is asked for huge pages: what returns to
 * the device is written at once from end to end, and with them its page faults cost a third.
 *
 * A machine without huge pages ignores the wish; nothing else depends on it.
 */
#include "device/host_map.h"

#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>

#include "base/checked.h"

#define HUGE_PAGE (UINT64_C(2) << 20)

/* Gives back what lies before the first place of a huge page, and what is left behind the end. */
static char *trim(char *mapped, uint64_t mapped_bytes, uint64_t bytes)
{
    uint64_t before = -(uintptr_t)mapped % HUGE_PAGE;
    uint64_t behind = mapped_bytes - before - bytes;
    if (before != 0) munmap(mapped, before);
    if (behind != 0) munmap(mapped + before + bytes, behind);
    return mapped + before;
}

void *rft_host_map(uint64_t bytes, bool reservation)
{
    int protection = reservation ? PROT_NONE : PROT_READ | PROT_WRITE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (reservation ? MAP_NORESERVE : 0);
    uint64_t mapped_bytes = bytes;
    if (bytes >= HUGE_PAGE && !rft_add_u64(bytes, HUGE_PAGE, &mapped_bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    void *mapped = mmap(NULL, mapped_bytes, protection, flags, -1, 0);
    if (mapped == MAP_FAILED) return NULL;
    if (bytes < HUGE_PAGE) return mapped;
    char *block = trim(mapped, mapped_bytes, bytes);
    (void)madvise(block, bytes, MADV_HUGEPAGE);
    return block;
}
