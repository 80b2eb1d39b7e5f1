/*
 * Pages that are kept, for a build without sanitizers: a sequence maps and unmaps some dozens of
 * single pages, which takes a quarter of its time. Only memory that no file backs and that
 * fits a page is kept. A page that is given back is filled with a pattern, which must still be
 * there when the page is taken again: a write after the end is noticed then, and a read gives bytes
 * that no version has.
 */
#include <stdbool.h>
#include <sys/mman.h>

#include "fuzz.h"

#define PAGE      4096u
#define PAGES     128u
#define LEFT_BYTE 0xa7

static struct {
    unsigned char *block; /* of PAGES */
    uint32_t free[PAGES];
    uint32_t free_count;
} kept;

void *__real_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void *memory, size_t bytes);
int __real_madvise(void *memory, size_t bytes, int advice);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void *memory, size_t bytes);
int __wrap_madvise(void *memory, size_t bytes, int advice);

static void open_once(void)
{
    if (kept.block != NULL) return;
    void *block = __real_mmap(NULL, (size_t)PAGES * PAGE, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    FUZZ_REQUIRE(block != MAP_FAILED);
    kept.block = block;
    memset(kept.block, LEFT_BYTE, (size_t)PAGES * PAGE);
    for (uint32_t i = 0; i < PAGES; i++)
        kept.free[kept.free_count++] = i;
}

static bool is_kept(const void *memory)
{
    const unsigned char *at = memory;
    return kept.block != NULL && at >= kept.block && at < kept.block + (size_t)PAGES * PAGE;
}

/* The page taken next is the one that has been free for longest. */
static unsigned char *take(void)
{
    unsigned char *page = kept.block + (size_t)kept.free[0] * PAGE;
    kept.free_count--;
    memmove(kept.free, kept.free + 1, kept.free_count * sizeof kept.free[0]);
    FUZZ_REQUIRE(page[0] == LEFT_BYTE && memcmp(page, page + 1, PAGE - 1) == 0);
    memset(page, 0, PAGE);
    return page;
}

void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    bool private = at == NULL && fd < 0 && (flags & MAP_PRIVATE) != 0 &&
                   protection == (PROT_READ | PROT_WRITE) && bytes <= PAGE;
    open_once();
    if (!private || kept.free_count == 0)
        return __real_mmap(at, bytes, protection, flags, fd, offset);
    return take();
}

int __wrap_munmap(void *memory, size_t bytes)
{
    if (!is_kept(memory)) return __real_munmap(memory, bytes);
    FUZZ_REQUIRE(bytes <= PAGE);
    memset(memory, LEFT_BYTE, PAGE);
    kept.free[kept.free_count++] =
        (uint32_t)((size_t)((unsigned char *)memory - kept.block) / PAGE);
    return 0;
}

/* Of all advice one changes what is read. */
int __wrap_madvise(void *memory, size_t bytes, int advice)
{
    if (!is_kept(memory)) return __real_madvise(memory, bytes, advice);
    if (advice == MADV_DONTNEED) memset(memory, 0, PAGE);
    return 0;
}
