/*
 * The text of the GPU's kernels, run on the CPU, equals the C twins bit for bit: in every
 * alignment, at lengths around every boundary, for grids of several shapes; it writes nothing
 * beside its results and, under AddressSanitizer, reads nothing beside its data.
 *
 * It proves the arithmetic, the division of work and, under ThreadSanitizer, the barriers. It does
 * not prove what a GPU's compiler makes of them, nor any speed: tests/gpu/ does.
 */
#include "kernels/cast.h"
#include "kernels/digest.h"
#include "kernels/pack.h"
#include "tests/kernels/grid.h"
#include "tests/kernels/random_bytes.h"

/* The kernels themselves. */
#include "kernels/cast.cu"
#include "kernels/digest.cu"
#include "kernels/pack.cu"

#define GUARD ((size_t)64)

typedef struct shape {
    unsigned x, y, threads;
} shape;

static uint64_t seed = 3;

/* A call of a kernel; that of packs gets its entries as `from`. */
typedef struct text_call {
    void *to;
    const void *from;
    uint64_t count, offset, sum;
} text_call;

static void do_digest(void *user)
{
    text_call *call = user;
    rft_digest_kernel(call->from, call->count, call->offset, &call->sum);
}

static void do_digest_copy(void *user)
{
    text_call *call = user;
    rft_digest_copy_kernel(call->to, call->from, call->count, call->offset, &call->sum);
}

static void do_cast(void *user)
{
    const text_call *call = user;
    rft_cast_kernel(call->to, call->from, call->count);
}

static void do_pack(void *user)
{
    const text_call *call = user;
    rft_pack_kernel(call->from, (uint32_t)call->count);
}

/* Digest. */

/* The data ends where its memory does. */
static void check_digest(shape grid, size_t aside, size_t bytes, uint64_t offset)
{
    unsigned char *data = take_random(aside + bytes, &seed);
    text_call call = {NULL, data + aside, bytes, offset, 17};
    grid_launch(grid.x, 1, grid.threads, do_digest, &call);
    assert_int_equal(call.sum, 17 + rft_digest_part(data + aside, bytes, offset));
    free(data);
}

TEST(digests_of_every_alignment_and_length_are_equal)
{
    for (size_t bytes = 0; bytes <= 72; bytes++) {
        check_digest((shape){1 + (unsigned)bytes % 3, 1, 32}, bytes % 17, bytes, 8 * bytes);
        check_digest((shape){1, 1, 32}, (bytes * 7 + 3) % 16, bytes, UINT64_C(1) << 40);
    }
    for (size_t aside = 0; aside < 16; aside++)
        check_digest((shape){2, 1, 64}, aside, 5000 + 3 * aside, 4096);
}

TEST(large_digests_are_equal)
{
    check_digest((shape){3, 1, 256}, 0, 100003, 0);
    check_digest((shape){1, 1, 96}, 8, 70000, 0);
    check_digest((shape){7, 1, 64}, 0, 65536, UINT64_MAX - 7);
    check_digest((shape){5, 1, 64}, 5, 33333, 8);
}

/* As for a digest; bytes around the copy must stay. */
static void check_digest_copy(shape grid, size_t to_aside, size_t aside, size_t bytes,
                              uint64_t offset)
{
    size_t all = GUARD + to_aside + bytes + GUARD, at = GUARD + to_aside;
    unsigned char *data = take_random(aside + bytes, &seed), *got = take_random(all, &seed);
    unsigned char *expected = take_copy(got, all);
    memcpy(expected + at, data + aside, bytes);
    text_call call = {got + at, data + aside, bytes, offset, 5};
    grid_launch(grid.x, 1, grid.threads, do_digest_copy, &call);
    assert_int_equal(call.sum, 5 + rft_digest_part(data + aside, bytes, offset));
    assert_memory_equal(got, expected, all);
    free(data);
    free(got);
    free(expected);
}

TEST(copies_with_a_digest_are_equal)
{
    for (size_t bytes = 0; bytes <= 72; bytes++) {
        check_digest_copy((shape){1 + (unsigned)bytes % 3, 1, 32}, 8 * (bytes % 2), bytes % 17,
                          bytes, 8 * bytes);
        check_digest_copy((shape){1, 1, 32}, 0, 0, bytes, 0);
    }
    for (size_t aside = 0; aside < 16; aside++) {
        check_digest_copy((shape){2, 1, 64}, 0, aside, 5000 + 3 * aside, 4096);
        check_digest_copy((shape){2, 1, 64}, 8, aside, 5000 + 3 * aside, 4096);
    }
    check_digest_copy((shape){3, 1, 256}, 0, 0, 100003, 0);
    check_digest_copy((shape){1, 1, 96}, 8, 8, 70000, 0);
    check_digest_copy((shape){5, 1, 64}, 8, 0, 33333, 8);
    check_digest_copy((shape){5, 1, 64}, 0, 5, 33333, UINT64_C(1) << 40);
}

/* Cast. */

/* Every third element is one at which rounding changes. */
static void put_edges(unsigned char *from, size_t count)
{
    static const uint32_t edges[] = {0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800001, 0xFFC00000,
                                     0x00000001, 0x007FFFFF, 0x80008001, 0xFF800000, 0x7F800000};
    for (size_t i = 0; i < count; i += 3)
        memcpy(from + 4 * i, &edges[i / 3 % 10], 4);
}

static void check_cast(shape grid, size_t to_aside, size_t from_aside, size_t count)
{
    size_t all = GUARD + to_aside + 2 * count + GUARD, at = GUARD + to_aside;
    unsigned char *from = take_random(from_aside + 4 * count, &seed);
    unsigned char *got = take_random(all, &seed), *expected = take_copy(got, all);
    put_edges(from + from_aside, count);
    text_call call = {got + at, from + from_aside, count, 0, 0};
    grid_launch(grid.x, 1, grid.threads, do_cast, &call);
    rft_cast_bf16((void *)(expected + at), (const void *)(from + from_aside), count);
    assert_memory_equal(got, expected, all);
    free(from);
    free(got);
    free(expected);
}

TEST(casts_of_every_alignment_and_length_are_equal)
{
    for (size_t aside = 0; aside < 16; aside++) {
        check_cast((shape){2, 1, 32}, aside, 2 * aside, 301);
        check_cast((shape){1, 1, 64}, aside, aside, 1000 + aside);
        for (size_t from = 0; from < 16; from += 4)
            check_cast((shape){1, 1, 32}, aside, from, 120);
    }
    for (size_t count = 0; count <= 40; count++) {
        check_cast((shape){1 + (unsigned)count % 2, 1, 32}, 0, 0, count);
        check_cast((shape){1, 1, 32}, 2 * (count % 8), 4 * (count % 8), count);
    }
}

TEST(large_casts_are_equal)
{
    check_cast((shape){3, 1, 256}, 0, 0, 30011);
    check_cast((shape){2, 1, 64}, 6, 12, 20000);
    check_cast((shape){2, 1, 64}, 2, 0, 10000);
}

/* Pack. */

/* Each source ends where its memory does; what lies between the targets must stay. */
static void check_pack(shape grid, const uint32_t *sizes, uint32_t count)
{
    size_t room = GUARD;
    for (uint32_t i = 0; i < count; i++)
        room += sizes[i] + GUARD;
    unsigned char *got = take_random(room, &seed), *expected = take_copy(got, room);
    rft_pack_entry *entries = calloc(count + 1, sizeof *entries),
                   *twins = calloc(count + 1, sizeof *twins);
    unsigned char **sources = calloc(count + 1, sizeof *sources);
    assert_true(entries != NULL && twins != NULL && sources != NULL);
    for (size_t i = 0, at = GUARD; i < count; at += sizes[i++] + GUARD) {
        size_t from = seeded_below(&seed, 40), to = at + seeded_below(&seed, 40);
        if (i % 3 == 0) to = at, from = ((uintptr_t)(got + at)) % 16;
        sources[i] = take_random(from + sizes[i], &seed);
        entries[i] =
            (rft_pack_entry){(uintptr_t)(got + to), (uintptr_t)(sources[i] + from), sizes[i]};
        twins[i] = entries[i];
        twins[i].to = (uintptr_t)(expected + to);
    }
    text_call call = {NULL, entries, count, 0, 0};
    grid_launch(grid.x, grid.y, grid.threads, do_pack, &call);
    rft_pack(twins, count);
    assert_memory_equal(got, expected, room);
    for (uint32_t i = 0; i < count; i++)
        free(sources[i]);
    free(sources);
    free(twins);
    free(entries);
    free(expected);
    free(got);
}

TEST(packs_of_every_length_are_equal)
{
    uint32_t sizes[300];
    for (uint32_t i = 0; i < 300; i++)
        sizes[i] = i;
    check_pack((shape){2, 1, 64}, sizes, 300);
    check_pack((shape){3, 2, 32}, sizes, 300);
    check_pack((shape){1, 1, 256}, sizes, 33);
    check_pack((shape){40, 1, 32}, sizes, 7);
}

TEST(packs_of_long_and_short_are_equal)
{
    static const uint32_t sizes[] = {100000, 0,     1,   8192, 8191, 8193, 16384, 3,
                                     20011,  65536, 512, 0,    7777, 40,   8208,  2048};
    for (unsigned y = 1; y <= 5; y += 2) {
        check_pack((shape){1, y, 64}, sizes, 16);
        check_pack((shape){4, y, 32}, sizes, 16);
        check_pack((shape){3, y, 96}, sizes + 9, 1);
    }
}

TEST(a_pack_of_nothing_is_no_work)
{
    static const uint32_t none[3] = {0, 0, 0};
    check_pack((shape){1, 1, 32}, none, 0);
    check_pack((shape){2, 2, 32}, none, 3);
}

int main(void)
{
    return test_run("gpu_text");
}
