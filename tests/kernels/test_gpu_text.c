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
#include "kernels/digest_job.h"
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

/* A call of a kernel; that of packs gets its entries as `from`, that of many digests its jobs as
 * `to`. */
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

static void do_digest_list(void *user)
{
    const text_call *call = user;
    rft_digest_list_kernel(call->to, (uint32_t)call->count);
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

/* One job: where its data lies, and where the copy goes, or none. */
typedef struct wanted {
    size_t bytes, aside;
    uint64_t offset;
    bool copies;
    size_t to_aside; /* a multiple of 8 */
} wanted;

/* Its place among the targets. */
static size_t room_of(const wanted *one)
{
    return GUARD + (one->to_aside + one->bytes + 7) / 8 * 8;
}

/* A list as the kernel gets it, and as the twin does. */
typedef struct listed {
    rft_digest_job *jobs, *twins;
    unsigned char **sources, *got, *expected;
    size_t room;
} listed;

/* Each source ends where its memory does; what lies between the targets must stay. */
static void listed_open(listed *it, const wanted *list, uint32_t count)
{
    uint64_t end = 0;
    it->room = GUARD;
    for (uint32_t i = 0; i < count; i++)
        it->room += room_of(&list[i]);
    it->got = take_random(it->room, &seed);
    it->expected = take_copy(it->got, it->room);
    it->jobs = calloc(count + 1, sizeof *it->jobs);
    it->twins = calloc(count + 1, sizeof *it->twins);
    it->sources = calloc(count + 1, sizeof *it->sources);
    assert_true(it->jobs != NULL && it->twins != NULL && it->sources != NULL);
    for (size_t i = 0, at = GUARD; i < count; at += room_of(&list[i++])) {
        const wanted *one = &list[i];
        it->sources[i] = take_random(one->aside + one->bytes, &seed);
        end += RFT_DIGEST_CHUNKS(one->bytes);
        it->jobs[i] = (rft_digest_job){.from = (uintptr_t)(it->sources[i] + one->aside),
                                       .bytes = one->bytes,
                                       .offset = one->offset,
                                       .end = end,
                                       .sum = 5 + i};
        it->twins[i] = it->jobs[i];
        if (!one->copies) continue;
        it->jobs[i].to = (uintptr_t)(it->got + at + one->to_aside);
        it->twins[i].to = (uintptr_t)(it->expected + at + one->to_aside);
    }
}

static void listed_close(listed *it, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        free(it->sources[i]);
    free(it->sources);
    free(it->twins);
    free(it->jobs);
    free(it->expected);
    free(it->got);
}

static void check_list(shape grid, const wanted *list, uint32_t count)
{
    listed it;
    listed_open(&it, list, count);
    text_call call = {.to = it.jobs, .count = count};
    grid_launch(grid.x, 1, grid.threads, do_digest_list, &call);
    rft_digest_list(it.twins, count);
    assert_memory_equal(it.got, it.expected, it.room);
    for (uint32_t i = 0; i < count; i++) {
        const unsigned char *from = it.sources[i] + list[i].aside;
        uint64_t sum = 5 + i + rft_digest_part(from, list[i].bytes, list[i].offset);
        assert_true(it.twins[i].sum == sum);
        it.twins[i].to = it.jobs[i].to;
        assert_memory_equal(&it.jobs[i], &it.twins[i], sizeof it.jobs[i]);
    }
    listed_close(&it, count);
}

TEST(a_list_of_nothing_is_no_work)
{
    static const wanted none[40];
    check_list((shape){2, 1, 64}, none, 0);
    check_list((shape){1, 1, 32}, none, 1);
    check_list((shape){3, 1, 64}, none, 40);
}

TEST(listed_digests_of_every_alignment_and_length_are_equal)
{
    wanted list[16 * 4];
    for (size_t bytes = 0; bytes <= 72; bytes++) {
        for (size_t i = 0; i < COUNT_OF(list); i++)
            list[i] = (wanted){bytes, i % 16, 8 * bytes, i >= 16, i >= 48 ? 8 : 0};
        check_list((shape){1 + (unsigned)bytes % 3, 1, 32 + 32 * ((unsigned)bytes % 2)}, list,
                   COUNT_OF(list));
    }
}

/* From 17 bytes before an end of a chunk to as many after it. */
TEST(listed_digests_around_chunks_are_equal)
{
    wanted list[16];
    for (size_t chunks = 1; chunks <= 3; chunks++) {
        for (size_t more = 0; more <= 34; more++) {
            for (size_t i = 0; i < COUNT_OF(list); i++)
                list[i] = (wanted){chunks * RFT_DIGEST_CHUNK + more - 17, i, UINT64_C(1) << 40,
                                   i % 3 != 0, 8 * (i % 2)};
            check_list((shape){2, 1, 64}, list, COUNT_OF(list));
        }
    }
}

/* Grids with fewer warps than chunks, and with more. */
TEST(lists_of_long_and_short_in_any_order_are_equal)
{
    static const size_t sizes[] = {0, 1, 1024, 7, RFT_DIGEST_CHUNK, 100003, 8, 17, 0, 40000};
    wanted list[120];
    for (unsigned round = 0; round < 6; round++) {
        for (size_t i = 0; i < COUNT_OF(list); i++)
            list[i] = (wanted){sizes[seeded_below(&seed, COUNT_OF(sizes))],
                               (size_t)seeded_below(&seed, 16), 8 * seeded_below(&seed, 1000),
                               seeded_below(&seed, 2) == 0, 8 * (size_t)seeded_below(&seed, 2)};
        check_list((shape){1 + 9 * round, 1, 32 + 32 * (round % 3)}, list, COUNT_OF(list));
    }
    for (size_t i = 0; i < COUNT_OF(list); i++)
        list[i] = (wanted){i == 77 ? 60 * RFT_DIGEST_CHUNK + 5 : 9, i % 16, 8 * i, i % 2 == 0, 0};
    check_list((shape){3, 1, 96}, list, COUNT_OF(list));
    check_list((shape){90, 1, 64}, list, COUNT_OF(list));
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
