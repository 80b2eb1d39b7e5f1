/*
 * The text of the GPU's delta kernels, run on the CPU as in test_gpu_text.c, applies, refuses and
 * notes what the C twins do, bit for bit.
 */
#include "kernels/delta.h"
#include "kernels/delta_exchange.h"
#include "tests/kernels/grid.h"
#include "tests/kernels/random_bytes.h"
#include "tests/support/test.h"

/* The kernels themselves. */
#include "kernels/delta_apply.cu"
#include "kernels/delta_exchange.cu"

#define JOBS 5u

static uint64_t seed = 11;

/* Several blocks, with what the twins made of them. All memory ends where its bytes do. */
typedef struct batch {
    rft_delta_job jobs[JOBS];
    rft_delta_entry entries[JOBS];
    bool coded[JOBS];
    unsigned char *before[JOBS], *after[JOBS], *twin[JOBS];
    size_t aside[JOBS]; /* of every block, from a boundary */
} batch;

static size_t bytes_of(const batch *all, uint32_t i)
{
    return (size_t)all->jobs[i].shape.elements * all->jobs[i].shape.width;
}

static void change(unsigned char *element, rft_delta_shape shape)
{
    static const unsigned steps[] = {1, 1, 1, 2, 7, 8, 9, 127, 128, 0x3333};
    if (shape.kind == RFT_DELTA_RAW) {
        element[seeded_below(&seed, shape.width)] ^= (unsigned char)(1 + seeded_below(&seed, 255));
        return;
    }
    unsigned bits = element[0] | (unsigned)element[1] << 8;
    bits += seeded_below(&seed, 2) == 0 ? steps[seeded_below(&seed, 10)]
                                        : 0x10000u - steps[seeded_below(&seed, 10)];
    element[0] = (unsigned char)bits;
    element[1] = (unsigned char)(bits >> 8);
}

static void fill_job(batch *all, uint32_t i, rft_delta_shape shape, uint32_t changed)
{
    size_t bytes = (size_t)shape.elements * shape.width;
    all->aside[i] = (size_t)seeded_below(&seed, 3) * shape.width + seeded_below(&seed, 2);
    if (i == 0) all->aside[i] = 0;
    all->before[i] = take_random(all->aside[i] + bytes, &seed);
    all->after[i] = take_copy(all->before[i], all->aside[i] + bytes);
    unsigned char *a = all->before[i] + all->aside[i], *b = all->after[i] + all->aside[i];
    for (uint32_t k = 0; k < shape.elements; k++) {
        if (seeded_below(&seed, shape.elements) < changed)
            change(b + (size_t)k * shape.width, shape);
    }
    all->twin[i] = take(rft_delta_bound(shape));
    all->coded[i] = rft_delta_encode(shape, a, b, all->twin[i], &all->entries[i]);
    all->jobs[i] =
        (rft_delta_job){.before = (uintptr_t)a, .after = (uintptr_t)b, .shape = shape, .good = 77};
}

static void close_batch(batch *all)
{
    for (uint32_t i = 0; i < JOBS; i++) {
        free(all->before[i]);
        free(all->after[i]);
        free(all->twin[i]);
    }
}

static void do_apply(void *user)
{
    rft_delta_apply_kernel(user, JOBS);
}

/* Each job's coded bytes, in memory of their length, at any address, onto its block as it was. */
static void open_apply(const batch *all, rft_delta_job *jobs, unsigned char **planes)
{
    for (uint32_t i = 0; i < JOBS; i++) {
        size_t aside = i % 4, total = all->coded[i] ? all->entries[i].total : 0;
        planes[i] = take(aside + total);
        memcpy(planes[i] + aside, all->twin[i], total);
        jobs[i] = all->jobs[i];
        jobs[i].after = jobs[i].before;
        jobs[i].coded = (uintptr_t)(planes[i] + aside);
        jobs[i].entry = all->coded[i] ? all->entries[i] : (rft_delta_entry){0};
    }
}

static void check_applied(const batch *all, unsigned blocks, unsigned threads)
{
    rft_delta_job jobs[JOBS];
    unsigned char *planes[JOBS];
    open_apply(all, jobs, planes);
    for (uint32_t round = 0; round < 2; round++) { /* idempotent */
        grid_launch(blocks, 1, threads, do_apply, jobs);
        for (uint32_t i = 0; i < JOBS; i++) {
            assert_int_equal(jobs[i].good, all->coded[i]);
            if (!all->coded[i]) continue;
            assert_memory_equal(all->before[i] + all->aside[i], all->after[i] + all->aside[i],
                                bytes_of(all, i));
        }
    }
    for (uint32_t i = 0; i < JOBS; i++)
        free(planes[i]);
}

static const rft_delta_shape kinds[JOBS] = {
    {0, 2, RFT_DELTA_HALF}, {0, 4, RFT_DELTA_RAW}, {0, 2, RFT_DELTA_HALF},
    {0, 1, RFT_DELTA_RAW},  {0, 8, RFT_DELTA_RAW},
};

/* `share`: one of so many elements changes; 0: none. */
static void open_batch(batch *all, uint32_t elements, uint32_t share)
{
    for (uint32_t i = 0; i < JOBS; i++) {
        rft_delta_shape shape = kinds[i];
        shape.elements = elements - i % 3;
        fill_job(all, i, shape, share == 0 ? 0 : (shape.elements + share - 1) / share);
    }
}

static void check_batch(uint32_t elements, uint32_t share, unsigned blocks, unsigned threads)
{
    batch all;
    open_batch(&all, elements, share);
    check_applied(&all, blocks, threads);
    close_batch(&all);
}

TEST(blocks_of_every_density_are_equal)
{
    static const uint32_t shares[] = {1, 2, 3, 5, 9, 40, 150, 900, 100000};
    for (uint32_t i = 0; i < COUNT_OF(shares); i++)
        check_batch(3000 + 7 * i, shares[i], 1 + i % 3, 32 + 32 * (i % 3));
}

TEST(blocks_of_every_length_are_equal)
{
    for (uint32_t elements = 3; elements < 200; elements += 3 + elements / 8)
        check_batch(elements, 1 + elements / 9, 1 + elements % 5, 32);
}

TEST(whole_blocks_are_equal)
{
    check_batch(RFT_DELTA_ELEMENTS, 100, 2, 256);
    check_batch(RFT_DELTA_ELEMENTS, 4, 5, 256);
    check_batch(RFT_DELTA_ELEMENTS, RFT_DELTA_ELEMENTS, 1, 64);
}

TEST(same_blocks_are_nothing)
{
    check_batch(100, 0, 1, 32);
}

/* ---- Exchanging */

typedef struct exchange {
    rft_delta_job jobs[JOBS];
    rft_delta_notes notes;
    uint64_t used;
} exchange;

static void do_exchange(void *user)
{
    exchange *on = user;
    rft_delta_exchange_kernel(on->jobs, JOBS, on->notes.memory, on->notes.room, on->notes.used);
}

/* A batch's blocks `after` become as those `before`. Room for no more than `room` bytes of notes.
 */
static void open_exchange(const batch *all, uint64_t room, exchange *on)
{
    *on = (exchange){.notes = {.room = room, .used = NULL}};
    on->notes.memory = room == 0 ? NULL : aligned_alloc(16, (room + 15) / 16 * 16);
    for (uint32_t i = 0; i < JOBS; i++)
        on->jobs[i] = all->jobs[i];
}

/* What the twin notes of one block, in `out`, and how many bytes. The block is the caller's copy.
 */
static size_t twin_note(const rft_delta_job *job, unsigned char *block, unsigned char *out,
                        rft_delta_entry *entry, bool *whole)
{
    bool coded =
        rft_delta_exchange(job->shape, block, (const void *)(uintptr_t)job->before, out, entry);
    *whole = !coded && entry->changed > 0;
    return coded ? entry->total : *whole ? (size_t)job->shape.elements * job->shape.width : 0;
}

/* Returns whether the job was done: there was room for its note. */
static bool check_exchanged(const batch *all, const exchange *on, uint32_t i,
                            const unsigned char *old)
{
    const rft_delta_job *job = &on->jobs[i];
    size_t bytes = bytes_of(all, i);
    const unsigned char *now = all->after[i] + all->aside[i];
    if (!job->good) {
        assert_memory_equal(now, old, bytes);
        assert_int_equal(job->entry.changed, 0);
        assert_int_equal(job->whole, 0);
        return false;
    }
    bool whole;
    rft_delta_entry entry;
    unsigned char *block = take_copy(old, bytes), *out = take(rft_delta_bound(job->shape));
    size_t noted = twin_note(job, block, out, &entry, &whole);
    assert_memory_equal(now, block, bytes);
    assert_int_equal(job->whole, whole);
    assert_int_equal(job->entry.changed, entry.changed);
    if (on->notes.memory != NULL && noted > 0) {
        if (!whole) assert_memory_equal(&job->entry, &entry, sizeof entry);
        assert_int_equal(job->coded % 16, 0);
        assert_in_range(job->coded - (uintptr_t)on->notes.memory, 0, on->notes.room - noted);
        assert_memory_equal((const void *)(uintptr_t)job->coded, out, noted);
    }
    free(block);
    free(out);
    return true;
}

/* Blocks are exchanged, as many as there is room for, and brought back. */
static void run_exchange(uint32_t elements, uint32_t share, uint64_t room, unsigned threads)
{
    batch all;
    exchange on;
    uint32_t done = 0;
    unsigned char *old[JOBS];
    open_batch(&all, elements, share);
    open_exchange(&all, room, &on);
    on.notes.used = &on.used;
    for (uint32_t i = 0; i < JOBS; i++)
        old[i] = take_copy(all.after[i] + all.aside[i], bytes_of(&all, i));
    grid_launch(2, 1, threads, do_exchange, &on);
    for (uint32_t i = 0; i < JOBS; i++)
        done += check_exchanged(&all, &on, i, old[i]);
    if (room == 0) assert_int_equal(on.used, 0);
    assert_int_equal(done == JOBS, on.used <= room);
    for (uint32_t round = 0; room > 0 && round < 2; round++) { /* idempotent */
        grid_launch(3, 1, threads, do_apply, on.jobs);
        for (uint32_t i = 0; i < JOBS; i++)
            assert_memory_equal(all.after[i] + all.aside[i], old[i], bytes_of(&all, i));
    }
    for (uint32_t i = 0; i < JOBS; i++)
        free(old[i]);
    free(on.notes.memory);
    close_batch(&all);
}

TEST(blocks_are_exchanged_and_brought_back_as_by_the_twin)
{
    static const uint32_t shares[] = {0, 1, 2, 3, 9, 150, 900};
    for (uint32_t i = 0; i < COUNT_OF(shares); i++) {
        run_exchange(3001 + 7 * i, shares[i], 1 << 20, 32 + 32 * (i % 3));
        run_exchange(3 + 9 * i, shares[i], 1 << 20, 32);
    }
    run_exchange(RFT_DELTA_ELEMENTS, 100, 2 << 20, 256);
    run_exchange(RFT_DELTA_ELEMENTS, 1, 2 << 20, 256);
}

TEST(blocks_without_room_for_a_note_stay)
{
    for (uint64_t room = 16; room < 60000; room += room / 2)
        run_exchange(3000, room % 3 == 0 ? 1 : 30, room, 64);
}

TEST(without_memory_for_notes_blocks_are_only_written)
{
    for (uint32_t share = 0; share < 200; share += 1 + share / 2)
        run_exchange(2999, share, 0, 64);
}

/* The result is the twin's; a block that is refused stays as it was. */
TEST(malformed_planes_are_checked_as_by_the_twin)
{
    uint32_t refused = 0;
    for (uint32_t round = 0; round < 60; round++) {
        batch all;
        rft_delta_job jobs[JOBS];
        unsigned char *planes[JOBS], *twin[JOBS];
        bool good[JOBS];
        open_batch(&all, 700, 4 + 8 * (round % 9));
        open_apply(&all, jobs, planes);
        for (uint32_t i = 0; i < JOBS; i++) {
            unsigned char *coded = (unsigned char *)jobs[i].coded;
            assert_true(all.coded[i]);
            uint32_t bit = (uint32_t)seeded_below(&seed, 8 * jobs[i].entry.total);
            coded[bit / 8] ^= (unsigned char)(1u << bit % 8);
            twin[i] = take_copy((void *)jobs[i].after, bytes_of(&all, i));
            good[i] = rft_delta_apply(jobs[i].shape, &jobs[i].entry, coded, twin[i]);
            if (!good[i]) memcpy(twin[i], (void *)jobs[i].after, bytes_of(&all, i));
            refused += !good[i];
        }
        grid_launch(2, 1, 32, do_apply, jobs);
        for (uint32_t i = 0; i < JOBS; i++) {
            assert_int_equal(jobs[i].good, good[i]);
            assert_memory_equal(twin[i], (void *)jobs[i].after, bytes_of(&all, i));
            free(twin[i]);
            free(planes[i]);
        }
        close_batch(&all);
    }
    assert_in_range(refused, 50, 250);
}

int main(void)
{
    return test_run("gpu_delta");
}
