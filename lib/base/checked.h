/* Arithmetic on sizes that came from elsewhere: the result, or a refusal; never a wrap. */
#ifndef RFT_CHECKED_H
#define RFT_CHECKED_H

#include <stdbool.h>
#include <stdint.h>

static inline bool rft_add_u64(uint64_t a, uint64_t b, uint64_t *sum)
{
    return !__builtin_add_overflow(a, b, sum);
}

static inline bool rft_mul_u64(uint64_t a, uint64_t b, uint64_t *product)
{
    return !__builtin_mul_overflow(a, b, product);
}

/* Rounds up to a multiple of `alignment`, a power of two. */
static inline bool rft_align_u64(uint64_t value, uint64_t alignment, uint64_t *aligned)
{
    uint64_t sum;
    if (!rft_add_u64(value, alignment - 1, &sum)) return false;
    *aligned = sum & ~(alignment - 1);
    return true;
}

/* No process has more addresses: 57 bits of them on x86-64, fewer elsewhere. */
#define RFT_ADDRESSES (UINT64_C(1) << 57)

/* Whether so many bytes can lie at `memory`. Addresses may carry a tag in their upper bits. */
static inline bool rft_span_exists(const void *memory, uint64_t bytes)
{
    uint64_t end;
    return bytes <= RFT_ADDRESSES && rft_add_u64((uintptr_t)memory, bytes, &end);
}

static inline bool rft_is_power_of_two(uint64_t value)
{
    return value != 0 && (value & (value - 1)) == 0;
}

static inline uint64_t rft_min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline uint64_t rft_max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

#endif
