/*
 * Deltas: the functions of delta.h, and the choice between the forms at run time.
 *
 * Encoding compares a block once, which leaves a bit for each element, and then walks the bits that
 * are set, while the block is still in the cache. All forms equal the scalar ones in delta_scalar.c
 * byte for byte.
 */
#include "kernels/delta.h"

#include "kernels/cpu.h"
#include "kernels/delta_exchange.h"
#include "kernels/delta_plan.h"
#include "kernels/delta_scalar.h"
#include "kernels/delta_wide.h"

/* Whole words where the CPU has a wide form, the rest by the scalar one. */
static uint32_t compare(rft_delta_shape shape, const void *before, const void *after, uint64_t *map)
{
    uint32_t words = 0, changed = 0;
#if defined(__x86_64__) || defined(__aarch64__)
    if (rft_cpu_get_level() != RFT_CPU_BASE) {
        words = shape.elements / 64;
        changed = rft_delta_compare_wide(shape.width, words, before, after, map);
    }
#endif
    return changed + rft_delta_compare_scalar(shape, words * 64, before, after, map);
}

static void encode(rft_delta_writer *to, const void *before, const void *after, const uint64_t *map)
{
#if defined(__x86_64__) || defined(__aarch64__)
    if (rft_cpu_get_level() != RFT_CPU_BASE) {
        rft_delta_encode_wide(to, before, after, map);
        return;
    }
#endif
    rft_delta_encode_scalar(to, before, after, map);
}

static bool apply(rft_delta_reader *from, unsigned char *block)
{
#if defined(__x86_64__) || defined(__aarch64__)
    if (rft_cpu_get_level() != RFT_CPU_BASE) return rft_delta_apply_wide(from, block);
#endif
    return rft_delta_apply_scalar(from, block);
}

uint32_t rft_delta_count(rft_delta_shape shape, const void *before, const void *after)
{
    uint64_t map[RFT_DELTA_MAP_WORDS];
    return compare(shape, before, after, map);
}

/* LOW and HIGH are never longer together than a bit an element, but for their last bytes. The
 * planes after them are first written with room between them. */
size_t rft_delta_bound(rft_delta_shape shape)
{
    return shape.elements / 8 +
           (size_t)shape.elements * (shape.kind == RFT_DELTA_HALF ? 4 : shape.width) + 64;
}

static bool is_smaller(rft_delta_shape shape, const rft_delta_entry *entry)
{
    return entry->total + RFT_DELTA_ENTRY_BYTES < shape.elements * shape.width &&
           entry->escapes <= UINT16_MAX;
}

/* Before the coding: `total` is without what only that can tell. */
static bool pays(rft_delta_shape shape, uint32_t price, const rft_delta_entry *entry)
{
    uint64_t least = (uint64_t)entry->total + RFT_DELTA_ENTRY_BYTES;
    return least + (uint64_t)price * entry->changed < (uint64_t)shape.elements * shape.width;
}

/* `swap` as rft_delta_writer has it. */
static bool encode_block(rft_delta_shape shape, uint32_t price, const void *before,
                         const void *after, void *swap, unsigned char *out, rft_delta_entry *entry)
{
    uint64_t map[RFT_DELTA_MAP_WORDS];
    *entry = (rft_delta_entry){0};
    entry->changed = compare(shape, before, after, map);
    if (entry->changed == 0) return false;
    if (shape.kind == RFT_DELTA_RAW) entry->values = entry->changed;
    rft_delta_writer to = rft_delta_open_writer(shape, out, entry);
    if (!pays(shape, price, entry)) return false;
    to.swap = swap;
    encode(&to, before, after, map);
    rft_delta_close_writer(&to);
    return is_smaller(shape, entry);
}

bool rft_delta_encode(rft_delta_shape shape, const void *before, const void *after,
                      unsigned char *out, rft_delta_entry *entry)
{
    return encode_block(shape, 0, before, after, NULL, out, entry);
}

bool rft_delta_encode_if(rft_delta_shape shape, uint32_t price, const void *before,
                         const void *after, unsigned char *out, rft_delta_entry *entry)
{
    return encode_block(shape, price, before, after, NULL, out, entry);
}

/* The least coded length follows from the number of elements that differ, so `block` is not written
 * before it is known that it will be coded. */
bool rft_delta_exchange(rft_delta_shape shape, void *block, const void *after, unsigned char *out,
                        rft_delta_entry *entry)
{
    size_t bytes = (size_t)shape.elements * shape.width;
    shape.kind = RFT_DELTA_RAW;
    bool coded = encode_block(shape, 0, after, block, block, out, entry);
    if (coded || entry->changed == 0) return coded;
    memcpy(out, block, bytes);
    memcpy(block, after, bytes);
    return false;
}

/* As far as the counts go that are known: whether so many bytes are there. */
static bool fits(rft_delta_shape shape, rft_delta_entry *entry, size_t room)
{
    rft_delta_lay_out(shape, entry);
    return entry->total <= room;
}

bool rft_delta_measure(rft_delta_shape shape, uint32_t changed, uint32_t escapes,
                       const unsigned char *coded, size_t room, rft_delta_entry *entry)
{
    *entry = (rft_delta_entry){.changed = changed, .escapes = escapes};
    if (changed == 0 || changed > shape.elements || escapes > changed || escapes > UINT16_MAX)
        return false;
    if (shape.kind == RFT_DELTA_RAW) {
        entry->values = changed;
        return escapes == 0 && fits(shape, entry, room);
    }
    if (!fits(shape, entry, room)) return false;
    const unsigned char *rest = coded + entry->total; /* ESCAPES is the last plane so far */
    entry->far = rft_delta_count_far(rest - entry->bytes[RFT_DELTA_ESCAPES], escapes);
    if (!fits(shape, entry, room)) return false;
    entry->values = rft_delta_count_values(rest, entry->far);
    return fits(shape, entry, room);
}

bool rft_delta_apply(rft_delta_shape shape, const rft_delta_entry *entry,
                     const unsigned char *coded, void *block)
{
    rft_delta_reader from;
    return rft_delta_open_reader(shape, entry, coded, &from) && apply(&from, block);
}
