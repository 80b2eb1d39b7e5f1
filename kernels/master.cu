/*
 * master: masters coded and decoded as kernels/master.h says.
 *
 * Splitting and joining take a block of elements for each block of threads, four elements a thread
 * at once: where masters lie on a boundary of 16 and weights of 8, with one load each; four weights
 * are also the word that their digest takes. What exceptions need is known once all blocks of a
 * unit are split, so listing is a kernel of its own, with a unit for each block of threads. It
 * reads again only blocks that have exceptions.
 */
#include "kernels/digest_word.h"
#include "kernels/gpu_scan.h"
#include "kernels/master_rules.h"

#define MASTER_BLOCKS (RFT_MASTER_UNIT / RFT_MASTER_BLOCK)

/* A block of elements, its parts found. */
typedef struct master_block {
    unsigned char *master;
    const unsigned char *weights;
    unsigned char *low;
    unsigned char *room;
    rft_master_entry *entry;
    uint32_t elements;
    bool wide; /* masters and weights lie on the boundaries of vectors */
} master_block;

RFT_GPU_PART master_block master_find(void *master, const void *weights,
                                      const rft_master_place *place, uint32_t number)
{
    uint64_t first = place->first + (uint64_t)number * RFT_MASTER_BLOCK;
    master_block block;
    block.master = (unsigned char *)master + 4 * first;
    block.weights = (const unsigned char *)weights + 2 * first;
    block.low = place->low + 2 * (uint64_t)number * RFT_MASTER_BLOCK;
    block.room = place->room;
    block.entry = (rft_master_entry *)place->table + number;
    block.elements = rft_master_block_elements(place, number);
    block.wide = (uintptr_t)block.master % 16 == 0 && (uintptr_t)block.weights % 8 == 0;
    return block;
}

RFT_GPU_PART uint64_t master_count_blocks(uint64_t elements)
{
    return (elements + RFT_MASTER_BLOCK - 1) / RFT_MASTER_BLOCK;
}

RFT_GPU_PART uint32_t master_bits(const master_block *block, uint32_t i)
{
    return ((const uint32_t *)block->master)[i];
}

RFT_GPU_PART uint32_t master_weight(const master_block *block, uint32_t i)
{
    return ((const uint16_t *)block->weights)[i];
}

/* Elements 4 * i to 4 * i + 3, of which `count` are there; the others are zero. */
RFT_GPU_PART uint4 master_load(const master_block *block, uint32_t i, uint32_t count)
{
    if (block->wide && count == 4) return __ldcs((const uint4 *)block->master + i);
    uint4 bits;
    bits.x = master_bits(block, 4 * i);
    bits.y = count > 1 ? master_bits(block, 4 * i + 1) : 0;
    bits.z = count > 2 ? master_bits(block, 4 * i + 2) : 0;
    bits.w = count > 3 ? master_bits(block, 4 * i + 3) : 0;
    return bits;
}

/* Their weights, each in 16 bits of a word, the first in the lowest. */
RFT_GPU_PART uint64_t master_load_weights(const master_block *block, uint32_t i, uint32_t count)
{
    if (block->wide && count == 4) return ((const uint64_t *)block->weights)[i];
    uint64_t word = 0;
    for (uint32_t k = 0; k < count; k++) {
        word |= (uint64_t)master_weight(block, 4 * i + k) << 16 * k;
    }
    return word;
}

RFT_GPU_PART void master_store(const master_block *block, uint32_t i, uint32_t count, uint4 bits)
{
    if (block->wide && count == 4) {
        __stcs((uint4 *)block->master + i, bits);
        return;
    }
    uint32_t *to = (uint32_t *)block->master + 4 * i;
    to[0] = bits.x;
    if (count > 1) to[1] = bits.y;
    if (count > 2) to[2] = bits.z;
    if (count > 3) to[3] = bits.w;
}

/* What is left of four elements from number 4 * i on. */
RFT_GPU_PART uint32_t master_count(const master_block *block, uint32_t i)
{
    uint32_t left = block->elements - 4 * i;
    return left < 4 ? left : 4;
}

/* Remainders of elements that are not there fall on nothing after them: a unit's remainders end on
 * a boundary of 16, and inside a unit blocks have no such elements. */
RFT_GPU_PART void master_store_low(const master_block *block, uint32_t i, uint32_t count,
                                   uint64_t word)
{
    if (count == 4) {
        ((uint64_t *)block->low)[i] = word;
        return;
    }
    for (uint32_t k = 0; k < count; k++) {
        ((uint16_t *)block->low)[4 * i + k] = (uint16_t)(word >> 16 * k);
    }
}

RFT_GPU_PART uint64_t master_load_low(const master_block *block, uint32_t i, uint32_t count)
{
    if (count == 4) return ((const uint64_t *)block->low)[i];
    uint64_t word = 0;
    for (uint32_t k = 0; k < count; k++) {
        word |= (uint64_t)((const uint16_t *)block->low)[4 * i + k] << 16 * k;
    }
    return word;
}

RFT_GPU_PART uint32_t master_part(uint64_t word, uint32_t k)
{
    return (uint32_t)(word >> 16 * k) & 0xFFFFu;
}

RFT_GPU_PART uint32_t master_odd(uint32_t bits, uint64_t weights, uint32_t k, uint32_t count)
{
    return k < count && rft_master_is_exception(bits, master_part(weights, k)) ? 1 : 0;
}

/* Exceptions of four elements. */
RFT_GPU_PART uint32_t master_count_odd(uint4 bits, uint64_t weights, uint32_t count)
{
    return master_odd(bits.x, weights, 0, count) + master_odd(bits.y, weights, 1, count) +
           master_odd(bits.z, weights, 2, count) + master_odd(bits.w, weights, 3, count);
}

RFT_GPU_PART uint64_t master_lows(uint4 bits)
{
    return (bits.x & 0xFFFFu) | (uint64_t)(bits.y & 0xFFFFu) << 16 |
           (uint64_t)(bits.z & 0xFFFFu) << 32 | (uint64_t)bits.w << 48;
}

/* ---- Split */

/* By all threads of a block. */
RFT_GPU_PART void master_split(const master_block *block, uint64_t *of_warps)
{
    uint64_t digest = 0, exceptions = 0, sum, all;
    for (uint32_t i = threadIdx.x; 4 * i < block->elements; i += blockDim.x) {
        uint32_t count = master_count(block, i);
        uint4 bits = master_load(block, i, count);
        uint64_t weights = master_load_weights(block, i, count);
        master_store_low(block, i, count, master_lows(bits));
        exceptions += master_count_odd(bits, weights, count);
        digest += digest_word(weights, ((uint64_t)i + 1) * DIGEST_STEP);
    }
    (void)gpu_scan(of_warps, digest, &sum);
    (void)gpu_scan(of_warps, exceptions, &all);
    if (threadIdx.x != 0) return;
    rft_master_entry entry;
    entry.digest = sum;
    entry.exceptions = (uint32_t)all;
    entry.at = 0;
    *block->entry = entry;
}

RFT_GPU_KERNEL void rft_master_split_kernel(const void *master, const void *weights, void *coded,
                                            uint64_t elements, uint32_t room)
{
    __shared__ uint64_t of_warps[RFT_GPU_THREADS / RFT_GPU_WARP];
    uint64_t blocks = master_count_blocks(elements);
    for (uint64_t i = blockIdx.x; i < blocks; i += gridDim.x) {
        rft_master_place place = rft_master_find(coded, elements, room, i / MASTER_BLOCKS);
        master_block block =
            master_find((void *)master, weights, &place, (uint32_t)(i % MASTER_BLOCKS));
        master_split(&block, of_warps);
    }
}

/* ---- List */

/* Each thread takes a chunk of the block; a scan says how many exceptions lie before it. */
RFT_GPU_PART void master_write_list(const master_block *block, uint32_t *to, uint64_t *of_warps)
{
    uint32_t each = (block->elements + blockDim.x - 1) / blockDim.x, count = 0;
    uint32_t from = threadIdx.x * each < block->elements ? threadIdx.x * each : block->elements;
    uint32_t end = from + each < block->elements ? from + each : block->elements;
    uint64_t total;
    RFT_GPU_ROLLED
    for (uint32_t i = from; i < end; i++) {
        count += rft_master_is_exception(master_bits(block, i), master_weight(block, i)) ? 1 : 0;
    }
    to += gpu_scan(of_warps, count, &total);
    RFT_GPU_ROLLED
    for (uint32_t i = from; i < end; i++) {
        uint32_t bits = master_bits(block, i);
        if (rft_master_is_exception(bits, master_weight(block, i))) *to++ = i << 16 | bits >> 16;
    }
}

RFT_GPU_PART void master_write_halves(const master_block *block, uint16_t *to)
{
    RFT_GPU_ROLLED
    for (uint32_t i = threadIdx.x; i < block->elements; i += blockDim.x) {
        to[i] = (uint16_t)(master_bits(block, i) >> 16);
    }
    if (threadIdx.x == 0 && block->elements % 2 != 0) to[block->elements] = 0;
}

/* By all threads of a block, which see the same entry: only its first part is read here. Returns
 * where the next block's exceptions begin. */
RFT_GPU_PART uint32_t master_list(const master_block *block, uint32_t at, uint32_t room,
                                  uint64_t *of_warps)
{
    uint32_t exceptions = block->entry->exceptions;
    uint32_t extra = rft_master_extra(block->elements, exceptions);
    if (threadIdx.x == 0) block->entry->at = at;
    if (extra == 0 || at + extra > room) return at + extra;
    if (rft_master_is_whole(block->elements, exceptions)) {
        master_write_halves(block, (uint16_t *)(block->room + at));
    } else {
        master_write_list(block, (uint32_t *)(block->room + at), of_warps);
    }
    return at + extra;
}

RFT_GPU_KERNEL void rft_master_list_kernel(const void *master, const void *weights, void *coded,
                                           uint64_t elements, uint32_t room,
                                           rft_master_result *result)
{
    __shared__ uint64_t of_warps[RFT_GPU_THREADS / RFT_GPU_WARP];
    uint64_t units = (elements + RFT_MASTER_UNIT - 1) / RFT_MASTER_UNIT;
    RFT_GPU_ROLLED
    for (uint64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
        rft_master_place place = rft_master_find(coded, elements, room, unit);
        uint32_t need = 0;
        RFT_GPU_ROLLED
        for (uint32_t number = 0; number < place.blocks; number++) {
            master_block block = master_find((void *)master, weights, &place, number);
            need = master_list(&block, need, room, of_warps);
        }
        if (threadIdx.x != 0) continue;
        if (need > room) atomicOr(&result->found, RFT_MASTER_NO_ROOM);
        atomicMax(&result->need, need);
    }
}

/* ---- Join */

/* What is wrong with the block, to all threads alike; 0: it can be joined. */
RFT_GPU_PART uint32_t master_check(const master_block *block, const rft_master_entry *entry,
                                   uint32_t room, uint64_t *of_warps)
{
    uint64_t digest = 0, strangers = 0, total;
    if (!rft_master_is_placed(entry, block->elements, room)) return RFT_MASTER_MALFORMED;
    for (uint32_t i = threadIdx.x; 4 * i < block->elements; i += blockDim.x) {
        uint64_t weights = master_load_weights(block, i, master_count(block, i));
        digest += digest_word(weights, ((uint64_t)i + 1) * DIGEST_STEP);
    }
    (void)gpu_scan(of_warps, digest, &total);
    if (total != entry->digest) return RFT_MASTER_CHANGED;
    if (entry->exceptions == 0 || rft_master_is_whole(block->elements, entry->exceptions)) return 0;
    const uint32_t *list = (const uint32_t *)(block->room + entry->at);
    RFT_GPU_ROLLED
    for (uint32_t i = threadIdx.x; i < entry->exceptions; i += blockDim.x) {
        bool ordered = i == 0 || list[i - 1] >> 16 < list[i] >> 16;
        strangers += ordered && list[i] >> 16 < block->elements ? 0 : 1;
    }
    (void)gpu_scan(of_warps, strangers, &total);
    return total == 0 ? 0 : RFT_MASTER_MALFORMED;
}

RFT_GPU_PART uint32_t master_low(const master_block *block, uint32_t i)
{
    return ((const uint16_t *)block->low)[i];
}

RFT_GPU_PART uint32_t master_of_weight(const master_block *block, uint32_t i)
{
    uint32_t low = master_low(block, i);
    return rft_master_upper(master_weight(block, i), low) << 16 | low;
}

/* Element number `i` of a block whose upper halves travelled. */
RFT_GPU_PART uint32_t master_of_halves(const master_block *block, const uint16_t *halves,
                                       uint32_t i)
{
    return (uint32_t)halves[i] << 16 | master_low(block, i);
}

RFT_GPU_PART uint32_t master_of_pair(uint64_t weights, uint64_t lows, uint32_t k)
{
    uint32_t low = master_part(lows, k);
    return rft_master_upper(master_part(weights, k), low) << 16 | low;
}

RFT_GPU_PART uint4 master_of_four(uint64_t weights, uint64_t lows)
{
    uint4 bits;
    bits.x = master_of_pair(weights, lows, 0);
    bits.y = master_of_pair(weights, lows, 1);
    bits.z = master_of_pair(weights, lows, 2);
    bits.w = master_of_pair(weights, lows, 3);
    return bits;
}

RFT_GPU_PART void master_join(const master_block *block, const rft_master_entry *entry)
{
    if (rft_master_is_whole(block->elements, entry->exceptions)) {
        const uint16_t *halves = (const uint16_t *)(block->room + entry->at);
        RFT_GPU_ROLLED
        for (uint32_t i = threadIdx.x; i < block->elements; i += blockDim.x) {
            ((uint32_t *)block->master)[i] = master_of_halves(block, halves, i);
        }
        return;
    }
    for (uint32_t i = threadIdx.x; 4 * i < block->elements; i += blockDim.x) {
        uint32_t count = master_count(block, i);
        uint64_t weights = master_load_weights(block, i, count);
        master_store(block, i, count, master_of_four(weights, master_load_low(block, i, count)));
    }
    if (entry->exceptions == 0) return;
    __syncthreads(); /* exceptions replace what other threads wrote */
    const uint32_t *list = (const uint32_t *)(block->room + entry->at);
    RFT_GPU_ROLLED
    for (uint32_t k = threadIdx.x; k < entry->exceptions; k += blockDim.x) {
        uint32_t i = list[k] >> 16;
        ((uint32_t *)block->master)[i] = list[k] << 16 | master_low(block, i);
    }
}

/* What this thread finds of the elements that joining would change: those that weights and
 * remainders do not give, less those of them that an exception gives. Only the sum over the threads
 * is a count. */
RFT_GPU_PART uint64_t master_compare(const master_block *block, const rft_master_entry *entry)
{
    uint64_t others = 0;
    const unsigned char *extra = block->room + entry->at;
    bool whole = rft_master_is_whole(block->elements, entry->exceptions);
    RFT_GPU_ROLLED
    for (uint32_t i = threadIdx.x; i < block->elements; i += blockDim.x) {
        uint32_t made = whole ? master_of_halves(block, (const uint16_t *)extra, i)
                              : master_of_weight(block, i);
        others += made != master_bits(block, i) ? 1 : 0;
    }
    const uint32_t *list = (const uint32_t *)extra;
    RFT_GPU_ROLLED
    for (uint32_t k = threadIdx.x; !whole && k < entry->exceptions; k += blockDim.x) {
        uint32_t i = list[k] >> 16, bits = master_bits(block, i);
        bool given = master_of_weight(block, i) == bits;
        bool listed = (list[k] << 16 | master_low(block, i)) == bits;
        if (given && !listed) others += 1;
        if (!given && listed) others -= 1;
    }
    return others;
}

RFT_GPU_KERNEL void rft_master_join_kernel(void *master, const void *weights, const void *coded,
                                           uint64_t elements, uint32_t room,
                                           rft_master_result *result, uint32_t compares)
{
    __shared__ uint64_t of_warps[RFT_GPU_THREADS / RFT_GPU_WARP];
    uint64_t blocks = master_count_blocks(elements), total;
    for (uint64_t i = blockIdx.x; i < blocks; i += gridDim.x) {
        rft_master_place place = rft_master_find((void *)coded, elements, room, i / MASTER_BLOCKS);
        master_block block = master_find(master, weights, &place, (uint32_t)(i % MASTER_BLOCKS));
        rft_master_entry entry = *block.entry;
        uint32_t wrong = master_check(&block, &entry, room, of_warps);
        if (wrong == 0 && compares == 0) master_join(&block, &entry);
        if (wrong == 0 && compares != 0) {
            (void)gpu_scan(of_warps, master_compare(&block, &entry), &total);
            wrong = total == 0 ? 0 : RFT_MASTER_DIFFERS;
        }
        if (wrong != 0 && threadIdx.x == 0) atomicOr(&result->found, wrong);
    }
}
