/*
 * The scalar form of coding masters, which every other form equals bit for bit, and the choice
 * between them at run time.
 *
 * Only splitting and joining whole blocks have wide forms; exceptions are rare. Elements are read
 * and written as bytes, so they may lie anywhere. A block is joined once all that could be wrong
 * with it has been looked for.
 */
#include "kernels/master.h"

#include <string.h>

#include "kernels/cpu.h"
#include "kernels/digest.h"
#include "kernels/master_rules.h"
#include "kernels/master_wide.h"

/* From this many bytes of masters on they are streamed, as in copy.c. */
#define STREAM_LEAST ((uint64_t)1 << 20)

static uint32_t load_word(const char *from, size_t i)
{
    uint32_t word;
    memcpy(&word, from + 4 * i, sizeof word);
    return word;
}

static void store_word(char *to, size_t i, uint32_t word)
{
    memcpy(to + 4 * i, &word, sizeof word);
}

static uint32_t load_half(const char *from, size_t i)
{
    uint16_t half;
    memcpy(&half, from + 2 * i, sizeof half);
    return half;
}

static void store_half(char *to, size_t i, uint32_t bits)
{
    uint16_t half = (uint16_t)bits;
    memcpy(to + 2 * i, &half, sizeof half);
}

/* A block of a job, its parts found. */
typedef struct master_block {
    char *master;
    const char *weights;
    char *low;
    char *table; /* of its unit */
    char *room;
    uint32_t number;
    uint32_t elements;
} master_block;

static master_block find_block(const rft_master_job *job, const rft_master_place *place,
                               uint32_t number)
{
    uint64_t first = place->first + (uint64_t)number * RFT_MASTER_BLOCK;
    return (master_block){.master = (char *)job->master + 4 * first,
                          .weights = (const char *)job->weights + 2 * first,
                          .low = (char *)place->low + (size_t)2 * number * RFT_MASTER_BLOCK,
                          .table = (char *)place->table,
                          .room = (char *)place->room,
                          .number = number,
                          .elements = rft_master_block_elements(place, number)};
}

static rft_master_entry load_entry(const master_block *block)
{
    rft_master_entry entry;
    memcpy(&entry, block->table + block->number * sizeof entry, sizeof entry);
    return entry;
}

static void store_entry(const master_block *block, rft_master_entry entry)
{
    memcpy(block->table + block->number * sizeof entry, &entry, sizeof entry);
}

static uint64_t count_units(uint64_t elements)
{
    return (elements + RFT_MASTER_UNIT - 1) / RFT_MASTER_UNIT;
}

uint64_t rft_master_bytes(uint64_t elements, uint32_t room)
{
    uint64_t whole = elements / RFT_MASTER_UNIT;
    uint32_t rest = (uint32_t)(elements % RFT_MASTER_UNIT);
    uint64_t bytes = whole * rft_master_unit_bytes(RFT_MASTER_UNIT, room);
    return rest == 0 ? bytes : bytes + rft_master_unit_bytes(rest, room);
}

/* ---- Split */

static uint32_t scalar_split(char *low, const char *master, const char *weights, size_t count)
{
    uint32_t exceptions = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = load_word(master, i);
        exceptions += rft_master_is_exception(bits, load_half(weights, i));
        store_half(low, i, bits & 0xFFFFu);
    }
    return exceptions;
}

/* The wide form, as far as it goes; `*done` elements. */
static uint32_t wide_split(const master_block *block, size_t *done)
{
    *done = block->elements / RFT_MASTER_STEP * RFT_MASTER_STEP;
#if defined(__x86_64__)
    switch (rft_cpu_get_level()) {
    case RFT_CPU_AVX512:
        return rft_master_split_avx512(block->low, block->master, block->weights, *done);
    case RFT_CPU_AVX2:
        return rft_master_split_avx2(block->low, block->master, block->weights, *done);
    case RFT_CPU_BASE: break;
    }
#elif defined(__aarch64__)
    if (rft_cpu_get_level() == RFT_CPU_NEON)
        return rft_master_split_neon(block->low, block->master, block->weights, *done);
#endif
    *done = 0;
    return 0;
}

static void split_block(const master_block *block)
{
    size_t done;
    rft_master_entry entry = {.digest = rft_digest_part(block->weights, 2 * block->elements, 0)};
    entry.exceptions = wide_split(block, &done);
    entry.exceptions += scalar_split(block->low + 2 * done, block->master + 4 * done,
                                     block->weights + 2 * done, block->elements - done);
    store_entry(block, entry);
}

void rft_master_split(const rft_master_job *job)
{
    uint64_t units = count_units(job->elements);
    for (uint64_t unit = 0; unit < units; unit++) {
        rft_master_place place = rft_master_find(job->coded, job->elements, job->room, unit);
        for (uint32_t number = 0; number < place.blocks; number++) {
            master_block block = find_block(job, &place, number);
            split_block(&block);
        }
    }
}

/* ---- List */

static void write_list(const master_block *block, char *to)
{
    size_t count = 0;
    for (uint32_t i = 0; i < block->elements; i++) {
        uint32_t bits = load_word(block->master, i);
        if (!rft_master_is_exception(bits, load_half(block->weights, i))) continue;
        store_word(to, count++, i << 16 | bits >> 16);
    }
}

static void write_halves(const master_block *block, char *to)
{
    for (uint32_t i = 0; i < block->elements; i++) {
        store_half(to, i, load_word(block->master, i) >> 16);
    }
    if (block->elements % 2 != 0) store_half(to, block->elements, 0);
}

/* Returns where the next block's exceptions begin. */
static uint32_t list_block(const master_block *block, uint32_t at, uint32_t room)
{
    rft_master_entry entry = load_entry(block);
    uint32_t extra = rft_master_extra(block->elements, entry.exceptions);
    entry.at = at;
    store_entry(block, entry);
    if (extra == 0 || at + extra > room) return at + extra;
    if (rft_master_is_whole(block->elements, entry.exceptions)) {
        write_halves(block, block->room + at);
    } else {
        write_list(block, block->room + at);
    }
    return at + extra;
}

void rft_master_list(const rft_master_job *job)
{
    uint64_t units = count_units(job->elements);
    for (uint64_t unit = 0; unit < units; unit++) {
        rft_master_place place = rft_master_find(job->coded, job->elements, job->room, unit);
        uint32_t need = 0;
        for (uint32_t number = 0; number < place.blocks; number++) {
            master_block block = find_block(job, &place, number);
            need = list_block(&block, need, job->room);
        }
        if (need > job->room) job->result->found |= RFT_MASTER_NO_ROOM;
        if (need > job->result->need) job->result->need = need;
    }
}

uint32_t rft_master_need(const void *coded, uint32_t elements)
{
    rft_master_place place = rft_master_find((void *)coded, elements, 0, 0);
    uint32_t need = 0;
    for (uint32_t number = 0; number < place.blocks; number++) {
        rft_master_entry entry;
        memcpy(&entry, place.table + number * sizeof entry, sizeof entry);
        need += rft_master_extra(rft_master_block_elements(&place, number), entry.exceptions);
    }
    return need;
}

/* ---- Join */

static void scalar_join(char *master, const char *weights, const char *low, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t rest = load_half(low, i);
        store_word(master, i, rft_master_upper(load_half(weights, i), rest) << 16 | rest);
    }
}

/* The wide form, as far as it goes: returns how many elements. */
static size_t wide_join(const master_block *block, bool streams)
{
    size_t count = block->elements / RFT_MASTER_STEP * RFT_MASTER_STEP;
#if defined(__x86_64__)
    streams = streams && (uintptr_t)block->master % 64 == 0;
    switch (rft_cpu_get_level()) {
    case RFT_CPU_AVX512:
        rft_master_join_avx512(block->master, block->weights, block->low, count, streams);
        return count;
    case RFT_CPU_AVX2:
        rft_master_join_avx2(block->master, block->weights, block->low, count, streams);
        return count;
    case RFT_CPU_BASE: break;
    }
#elif defined(__aarch64__)
    if (rft_cpu_get_level() == RFT_CPU_NEON) {
        rft_master_join_neon(block->master, block->weights, block->low, count);
        return count;
    }
#endif
    (void)count;
    (void)streams;
    return 0;
}

static void join_elements(const master_block *block, bool streams)
{
    size_t done = wide_join(block, streams);
    scalar_join(block->master + 4 * done, block->weights + 2 * done, block->low + 2 * done,
                block->elements - done);
}

static void join_halves(const master_block *block, const char *halves)
{
    for (uint32_t i = 0; i < block->elements; i++) {
        store_word(block->master, i, load_half(halves, i) << 16 | load_half(block->low, i));
    }
}

static void join_list(const master_block *block, const char *list, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t exception = load_word(list, i), element = exception >> 16;
        store_word(block->master, element, exception << 16 | load_half(block->low, element));
    }
}

/* Every exception is of an element that there is, each of another one. */
static bool is_list(const master_block *block, const char *list, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t element = load_word(list, i) >> 16;
        if (element >= block->elements) return false;
        if (i > 0 && element <= load_word(list, i - 1) >> 16) return false;
    }
    return true;
}

/* What is wrong with the block; 0: it can be joined. */
static uint32_t check_block(const master_block *block, const rft_master_entry *entry, uint32_t room)
{
    if (!rft_master_is_placed(entry, block->elements, room)) return RFT_MASTER_MALFORMED;
    if (rft_digest_part(block->weights, 2 * block->elements, 0) != entry->digest)
        return RFT_MASTER_CHANGED;
    if (rft_master_is_whole(block->elements, entry->exceptions)) return 0;
    bool good =
        entry->exceptions == 0 || is_list(block, block->room + entry->at, entry->exceptions);
    return good ? 0 : RFT_MASTER_MALFORMED;
}

static void join_block(const master_block *block, const rft_master_entry *entry, bool streams)
{
    const char *extra = block->room + (entry->exceptions == 0 ? 0 : entry->at);
    if (rft_master_is_whole(block->elements, entry->exceptions)) {
        join_halves(block, extra);
        return;
    }
    join_elements(block, streams);
    join_list(block, extra, entry->exceptions);
}

/* Is the master what joining the block gives? */
static bool is_same(const master_block *block, const rft_master_entry *entry)
{
    _Alignas(64) char made[4 * RFT_MASTER_BLOCK];
    master_block copy = *block;
    copy.master = made;
    join_block(&copy, entry, false);
    return memcmp(made, block->master, (size_t)4 * block->elements) == 0;
}

void rft_master_join(const rft_master_job *job)
{
    uint64_t units = count_units(job->elements);
    bool streams = 4 * job->elements >= STREAM_LEAST;
    for (uint64_t unit = 0; unit < units; unit++) {
        rft_master_place place = rft_master_find(job->coded, job->elements, job->room, unit);
        for (uint32_t number = 0; number < place.blocks; number++) {
            master_block block = find_block(job, &place, number);
            rft_master_entry entry = load_entry(&block);
            uint32_t wrong = check_block(&block, &entry, job->room);
            if (wrong == 0 && !job->compares) join_block(&block, &entry, streams);
            if (wrong == 0 && job->compares && !is_same(&block, &entry)) wrong = RFT_MASTER_DIFFERS;
            job->result->found |= wrong;
        }
    }
}
