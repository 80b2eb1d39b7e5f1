/* mapped: whether memory is mapped at an address, asked in a way that memory checkers do not take
 * for an access. */
#ifndef MAPPED_H
#define MAPPED_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

static inline bool is_mapped(const void *memory)
{
    unsigned char there;
    uintptr_t page = (uintptr_t)memory & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
    return mincore((void *)page, 1, &there) == 0;
}

#endif
