/*
 * Address space of the fake's devices. A space is mapped twice as long as it is: the first half are
 * the addresses that the driver hands out, without rights, and after each of them, as far on as
 * the space is long, lie its bytes, which are those of a file in memory or nothing. So no CPU finds
 * the bytes by a device's address, and other processes can map the same file.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake_state.h"

static fake_tree spaces; /* guarded by fake.lock */

static bool fits(uint64_t base, uint64_t alignment)
{
    return alignment == 0 || base % alignment == 0;
}

/* Addresses at a multiple of the alignment: more are asked for, and what is too much goes back. */
static uint64_t aligned(uint64_t bytes, uint64_t alignment)
{
    uint64_t more = bytes + alignment;
    char *memory = mmap(NULL, more, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return 0;
    uint64_t start = (uint64_t)(uintptr_t)memory;
    uint64_t base = (start + alignment - 1) / alignment * alignment;
    if (base > start) munmap(memory, base - start);
    if (start + more > base + bytes)
        munmap(memory + (base - start) + bytes, start + more - (base + bytes));
    return base;
}

uint64_t fake_space_open(uint64_t bytes, uint64_t alignment, uint64_t wish)
{
    uint64_t base = 0;
    if (wish != 0 && fits(wish, alignment)) {
        void *memory = mmap((void *)(uintptr_t)wish, 2 * bytes, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory != MAP_FAILED) base = (uint64_t)(uintptr_t)memory;
        if (base != wish && base != 0) munmap(memory, 2 * bytes);
        if (base != wish) base = 0;
    }
    if (base == 0) base = aligned(2 * bytes, alignment);
    if (base == 0) return 0;
    fake_node *node = fake_new(sizeof *node);
    node->base = base;
    node->size = 2 * bytes;
    fake_tree_put(&spaces, node);
    return base;
}

void fake_space_close(uint64_t base, uint64_t bytes)
{
    fake_node *node = fake_tree_at(&spaces, base);
    fake_tree_take(&spaces, node);
    free(node);
    munmap((void *)(uintptr_t)base, 2 * bytes);
}

bool fake_space_back(uint64_t at, uint64_t shift, uint64_t bytes, int file, uint64_t offset)
{
    return mmap((void *)(uintptr_t)(at + shift), bytes, PROT_READ | PROT_WRITE,
                MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file, (off_t)offset) != MAP_FAILED;
}

void fake_space_bare(uint64_t at, uint64_t shift, uint64_t bytes)
{
    void *memory = mmap((void *)(uintptr_t)(at + shift), bytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
}

int fake_space_file(uint64_t bytes)
{
    int file = memfd_create("fake_cuda", MFD_CLOEXEC);
    if (file >= 0 && ftruncate(file, (off_t)bytes) == 0) return file;
    perror("the fake driver has no file for a device's memory");
    abort();
}

bool fake_space_has(uint64_t address)
{
    return fake_tree_at(&spaces, address) != NULL;
}

void fake_space_reset(void)
{
    while (spaces.root != NULL)
        fake_space_close(spaces.root->base, spaces.root->size / 2);
}
