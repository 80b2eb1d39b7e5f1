/* Every device: digests, casts, coded masters and exchanged blocks are those of kernels/, in stream
 * order. */
#include "tests/device/every_device.h"

#include <stdint.h>
#include <stdlib.h>

#include "kernels/cast.h"
#include "kernels/digest.h"
#include "kernels/digest_job.h"
#include "kernels/master.h"

#define ROOM (UINT64_C(3) << 20)

/* Device memory that holds the pattern of `seed`, and its bytes on the host. */
typedef struct filled {
    unsigned char *device;
    unsigned char *host;
} filled;

static filled make_filled(unsigned seed)
{
    filled made = {.host = malloc(ROOM)};
    assert_non_null(made.host);
    made.device = device_alloc(ROOM);
    pattern_fill(made.host, ROOM, seed);
    device_fill(made.device, ROOM, seed);
    return made;
}

static void free_filled(filled made)
{
    device_free(made.device);
    free(made.host);
}

TEST(digests_are_those_of_the_host)
{
    static const uint64_t sizes[] = {0, 1, 7, 8, 9, 4096, 70001, ROOM - 64};
    const refit_stream_ref streams[] = {on.stream, REFIT_STREAM_NONE};
    filled made = make_filled(3);
    for (unsigned i = 0; i < 16; i++) {
        uint64_t sum = 0, bytes = sizes[i % 8], offset = i * 8;
        refit_stream_ref stream = streams[i / 8];
        uint64_t expected = rft_digest_part(made.host + i, bytes, offset);
        assert_ok(
            rft_device_digest(on.device, stream, made.device + i, bytes, offset, &sum, &on.error));
        if (stream.native != NULL) wait_stream();
        assert_int_equal(sum, expected);
    }
    free_filled(made);
}

TEST(a_digest_is_of_the_bytes_at_its_place_in_the_stream)
{
    enum { BYTES = 100000 };
    filled made = make_filled(4);
    char *later = steady_alloc(BYTES);
    uint64_t before = 1, zeroed = 2, after = 3;
    pattern_fill(later, BYTES, 5);
    gate_put(on.stream);
    assert_ok(rft_device_digest(on.device, on.stream, made.device, BYTES, 0, &before, &on.error));
    assert_ok(rft_device_zero(on.device, on.stream, made.device, BYTES, &on.error));
    assert_ok(rft_device_digest(on.device, on.stream, made.device, BYTES, 0, &zeroed, &on.error));
    assert_ok(refit_stream_copy(on.device, on.stream, made.device, later, BYTES, &on.error));
    assert_ok(rft_device_digest(on.device, on.stream, made.device, BYTES, 0, &after, &on.error));
    assert_int_equal(before, 1);
    gate_open();
    wait_stream();
    assert_int_equal(before, rft_digest_part(made.host, BYTES, 0));
    memset(made.host, 0, BYTES);
    assert_int_equal(zeroed, rft_digest_part(made.host, BYTES, 0));
    assert_int_equal(after, rft_digest_part(later, BYTES, 0));
    steady_free(later, BYTES);
    free_filled(made);
}

TEST(many_digests_are_under_way_at_once)
{
    enum { COUNT = 50 }; /* CUDA's queue takes 56; then a call waits */
    static uint64_t sums[COUNT];
    filled made = make_filled(6);
    gate_put(on.stream);
    for (uint64_t i = 0; i < COUNT; i++) {
        sums[i] = 0;
        assert_ok(rft_device_digest(on.device, on.stream, made.device + 64 * i, 64, 64 * i,
                                    &sums[i], &on.error));
    }
    gate_open();
    wait_stream();
    uint64_t whole = 0;
    for (uint64_t i = 0; i < COUNT; i++) {
        assert_int_equal(sums[i], rft_digest_part(made.host + 64 * i, 64, 64 * i));
        whole += sums[i];
    }
    assert_int_equal(whole, rft_digest_part(made.host, 64 * (uint64_t)COUNT, 0));
    free_filled(made);
}

/* What lies at `device`, and around it, is what lies on the host. */
static void check_bytes(const filled *made)
{
    unsigned char *got = malloc(ROOM);
    assert_non_null(got);
    assert_ok(refit_stream_copy(on.device, REFIT_STREAM_NONE, got, made->device, ROOM, &on.error));
    assert_memory_equal(got, made->host, ROOM);
    free(got);
}

#define LISTED_MOST 24u

/* A table on the device, and what should become of it. */
typedef struct listed {
    rft_digest_job *device;
    rft_digest_job twins[LISTED_MOST];
    uint32_t count;
    const filled *from;
    const filled *to;
} listed;

static void list_digest(listed *list, bool copies, unsigned aside, uint64_t bytes)
{
    uint64_t before = list->count == 0 ? 0 : list->twins[list->count - 1].end;
    list->twins[list->count++] = (rft_digest_job){
        .to = copies ? (uintptr_t)list->to->device + 8 + UINT64_C(8) * aside : 0,
        .from = (uintptr_t)list->from->device + aside,
        .bytes = bytes,
        .offset = UINT64_C(8) * aside,
        .end = before + RFT_DIGEST_CHUNKS(bytes),
        .sum = aside,
    };
}

/* What the jobs do, done here. */
static void do_here(listed *list)
{
    for (uint32_t i = 0; i < list->count; i++) {
        rft_digest_job *twin = &list->twins[i];
        const unsigned char *from = list->from->host + (twin->from - (uintptr_t)list->from->device);
        twin->sum += rft_digest_part(from, twin->bytes, twin->offset);
        if (twin->to == 0) continue;
        memcpy(list->to->host + (twin->to - (uintptr_t)list->to->device), from, twin->bytes);
    }
}

static void run_list(listed *list, refit_stream_ref stream)
{
    rft_digest_job found[LISTED_MOST];
    uint64_t bytes = list->count * sizeof *found;
    assert_ok(refit_stream_copy(on.device, REFIT_STREAM_NONE, list->device, list->twins, bytes,
                                &on.error));
    assert_ok(rft_device_digest_list(on.device, stream, list->device, list->count, &on.error));
    if (stream.native != NULL) wait_stream();
    do_here(list);
    assert_ok(
        refit_stream_copy(on.device, REFIT_STREAM_NONE, found, list->device, bytes, &on.error));
    assert_memory_equal(found, list->twins, bytes);
    check_bytes(list->to);
    list->count = 0;
}

/* Copies of one list do not meet. */
TEST(digests_of_a_list_are_those_of_the_host_and_copy_on_the_way)
{
    static const uint64_t sizes[] = {0, 1, 8, 9, 4096, 70001, RFT_DIGEST_CHUNK, ROOM / 2};
    filled from = make_filled(10), to = make_filled(11);
    listed list = {.device = device_alloc(sizeof list.twins), .from = &from, .to = &to};
    for (unsigned i = 0; i < LISTED_MOST; i++)
        list_digest(&list, i == 5, i, sizes[i % 8]);
    run_list(&list, on.stream);
    for (unsigned i = 0; i < 8; i++) {
        list_digest(&list, true, 3 * i, sizes[7 - i]);
        list_digest(&list, false, i, sizes[i]);
        run_list(&list, i % 2 == 0 ? REFIT_STREAM_NONE : on.stream);
    }
    assert_ok(rft_device_digest_list(on.device, on.stream, NULL, 0, &on.error));
    device_free(list.device);
    free_filled(to);
    free_filled(from);
}

/* The table too is read when the stream comes to it. */
TEST(a_list_of_digests_is_done_at_its_place_in_the_stream)
{
    enum { BYTES = 100000 };
    filled from = make_filled(10), to = make_filled(11);
    rft_digest_job *job = steady_alloc(sizeof *job), *back = steady_alloc(sizeof *back);
    rft_digest_job *table = device_alloc(sizeof *table);
    *job = (rft_digest_job){.to = (uintptr_t)to.device,
                            .from = (uintptr_t)from.device,
                            .bytes = BYTES,
                            .end = RFT_DIGEST_CHUNKS(BYTES),
                            .sum = 7};
    gate_put(on.stream);
    assert_ok(refit_stream_copy(on.device, on.stream, table, job, sizeof *job, &on.error));
    assert_ok(rft_device_digest_list(on.device, on.stream, table, 1, &on.error));
    assert_ok(refit_stream_copy(on.device, on.stream, back, table, sizeof *back, &on.error));
    assert_ok(rft_device_zero(on.device, on.stream, from.device, BYTES, &on.error));
    assert_ok(rft_device_zero(on.device, on.stream, table, sizeof *table, &on.error));
    gate_open();
    wait_stream();
    assert_true(back->sum == 7 + rft_digest_part(from.host, BYTES, 0));
    memcpy(to.host, from.host, BYTES);
    check_bytes(&to);
    device_free(table);
    steady_free(back, sizeof *back);
    steady_free(job, sizeof *job);
    free_filled(to);
    free_filled(from);
}

/* The results of a cast, and what lies around them, as the host makes them. */
static void check_cast(refit_stream_ref stream, const filled *from, const filled *to,
                       uint64_t aside, uint64_t count)
{
    assert_ok(refit_stream_cast_bf16(on.device, stream, (void *)(to->device + 64 + aside),
                                     (const void *)(from->device + 2 * aside), count, &on.error));
    if (stream.native != NULL) wait_stream();
    rft_cast_bf16((void *)(to->host + 64 + aside), (const void *)(from->host + 2 * aside), count);
    check_bytes(to);
}

TEST(casts_are_those_of_the_host)
{
    static const uint64_t counts[] = {1, 7, 8, 1000, ROOM / 4 - 8};
    filled from = make_filled(7), to = make_filled(8);
    for (unsigned i = 0; i < 5; i++) {
        check_cast(on.stream, &from, &to, 2 * i, counts[i]);
        check_cast(REFIT_STREAM_NONE, &from, &to, 2 * i + 1, counts[i]);
    }
    free_filled(to);
    free_filled(from);
}

TEST(a_cast_is_made_in_stream_order)
{
    enum { COUNT = 1000 };
    filled from = make_filled(9);
    uint16_t *expected = malloc(2 * COUNT), *back = steady_alloc(2 * COUNT);
    assert_non_null(expected);
    void *to = device_alloc(2 * COUNT);
    memset(back, 0, 2 * COUNT);
    gate_put(on.stream);
    assert_ok(refit_stream_cast_bf16(on.device, on.stream, to, (const void *)from.device, COUNT,
                                     &on.error));
    assert_ok(refit_stream_copy(on.device, on.stream, back, to, 2 * COUNT, &on.error));
    assert_ok(rft_device_zero(on.device, on.stream, from.device, 4 * COUNT, &on.error));
    gate_open();
    wait_stream();
    rft_cast_bf16(expected, (const void *)from.host, COUNT);
    assert_memory_equal(back, expected, 2 * COUNT);
    device_free(to);
    steady_free(back, 2 * COUNT);
    free(expected);
    free_filled(from);
}

/* Masters in the first third, weights in the second, and in the last the result, which is followed
 * by what is coded. */
enum { MASTERS = 0, WEIGHTS = 1 << 20, RESULT = 2 << 20 };

static rft_master_job job_at(unsigned char *base, uint64_t elements, uint32_t room)
{
    return (rft_master_job){.master = base + MASTERS,
                            .weights = base + WEIGHTS,
                            .result = (void *)(base + RESULT),
                            .coded = base + RESULT + 64,
                            .elements = elements,
                            .room = room};
}

/* Half of the weights are the rounding, the others stand for what lies there. */
static filled make_masters(uint64_t elements)
{
    filled made = make_filled(12);
    assert_true(4 * elements <= WEIGHTS);
    rft_cast_bf16((void *)(made.host + WEIGHTS), (const void *)made.host, elements / 2);
    memset(made.host + RESULT, 0, 64);
    assert_ok(
        refit_stream_copy(on.device, REFIT_STREAM_NONE, made.device, made.host, ROOM, &on.error));
    return made;
}

TEST(masters_are_coded_as_by_the_host)
{
    static const uint64_t counts[] = {1, 5000, 70001, 1 << 18};
    if (!rft_device_get_caps(on.device).masters) skip();
    for (unsigned i = 0; i < 8; i++) {
        uint64_t elements = counts[i / 2];
        refit_stream_ref stream = i % 2 == 0 ? on.stream : REFIT_STREAM_NONE;
        filled made = make_masters(elements);
        rft_master_job job = job_at(made.device, elements, RFT_MASTER_ROOM / 2 + 4096);
        rft_master_job twin = job_at(made.host, elements, RFT_MASTER_ROOM / 2 + 4096);
        assert_ok(rft_device_master_encode(on.device, stream, &job, &on.error));
        if (stream.native != NULL) wait_stream();
        rft_master_split(&twin);
        rft_master_list(&twin);
        check_bytes(&made);
        job.compares = true;
        assert_ok(rft_device_master_decode(on.device, stream, &job, &on.error));
        job.compares = false;
        assert_ok(rft_device_zero(on.device, stream, made.device, 4 * elements, &on.error));
        assert_ok(rft_device_master_decode(on.device, stream, &job, &on.error));
        if (stream.native != NULL) wait_stream();
        check_bytes(&made);
        free_filled(made);
    }
}

TEST(masters_with_other_weights_are_left_alone)
{
    enum { COUNT = 10000 };
    if (!rft_device_get_caps(on.device).masters) skip();
    filled made = make_masters(COUNT);
    rft_master_job job = job_at(made.device, COUNT, 16384);
    rft_master_job twin = job_at(made.host, COUNT, 16384);
    assert_ok(rft_device_master_encode(on.device, on.stream, &job, &on.error));
    assert_ok(rft_device_zero(on.device, on.stream, made.device, 4 * COUNT, &on.error));
    assert_ok(rft_device_zero(on.device, on.stream, made.device + WEIGHTS, 2, &on.error));
    assert_ok(rft_device_master_decode(on.device, on.stream, &job, &on.error));
    wait_stream();
    rft_master_split(&twin);
    rft_master_list(&twin);
    memset(made.host, 0, 4 * RFT_MASTER_BLOCK);
    memset(made.host + WEIGHTS, 0, 2);
    twin.result->found |= RFT_MASTER_CHANGED;
    check_bytes(&made);
    free_filled(made);
}

TEST(a_job_for_masters_that_breaks_a_rule_is_refused)
{
    static _Alignas(16) unsigned char memory[4096];
    rft_master_job good = {.master = memory,
                           .weights = memory + 1024,
                           .coded = memory + 2048,
                           .result = (void *)(memory + 4000),
                           .elements = 16,
                           .room = 16};
    rft_master_job bad[10];
    for (int i = 0; i < 10; i++)
        bad[i] = good;
    bad[0].master = NULL;
    bad[1].weights = NULL;
    bad[2].coded = NULL;
    bad[3].result = NULL;
    bad[4].master = memory + 2;
    bad[5].weights = memory + 1;
    bad[6].coded = memory + 8;
    bad[7].room = 8;
    bad[8].room = RFT_MASTER_ROOM + 16;
    bad[9].elements = UINT64_MAX / 4;
    for (int i = 0; i < 10; i++) {
        assert_invalid(rft_device_master_encode(on.device, on.stream, &bad[i], &on.error));
        assert_invalid(rft_device_master_decode(on.device, on.stream, &bad[i], &on.error));
    }
    good.elements = 0;
    assert_ok(rft_device_master_encode(on.device, on.stream, &good, &on.error));
    assert_ok(rft_device_master_decode(on.device, on.stream, &good, &on.error));
}

/* ---- Blocks that are exchanged: the old ones, the new ones, the notes, the jobs and the count */

enum { NEW = 1 << 20, NOTES = 2 << 20, TABLE = (5 << 20) / 2, BLOCKS = 3, ELEMENTS = 40000 };

/* The blocks differ in every 64th element, and the last one in all. */
static filled make_blocks(rft_delta_job *jobs)
{
    filled made = make_filled(12);
    memcpy(made.host + NEW, made.host, NEW);
    for (uint32_t i = 0; i < BLOCKS * ELEMENTS; i += i < (BLOCKS - 1) * ELEMENTS ? 64 : 1)
        made.host[NEW + 2 * i] ^= 0x55;
    memset(made.host + TABLE, 0, 4096);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        uint64_t at = 2 * (uint64_t)ELEMENTS * i;
        jobs[i] = (rft_delta_job){.before = (uintptr_t)(made.device + NEW + at),
                                  .after = (uintptr_t)(made.device + at),
                                  .shape = {ELEMENTS, 2, RFT_DELTA_HALF}};
    }
    memcpy(made.host + TABLE + 64, jobs, BLOCKS * sizeof *jobs);
    assert_ok(refit_stream_copy(on.device, on.stream, made.device, made.host, ROOM, &on.error));
    wait_stream();
    return made;
}

TEST(blocks_are_exchanged_and_brought_back)
{
    if (!rft_device_get_caps(on.device).deltas) skip();
    rft_delta_job jobs[BLOCKS];
    filled made = make_blocks(jobs);
    rft_delta_job *table = (void *)(made.device + TABLE + 64);
    rft_delta_notes notes = {made.device + NOTES, 100000, (void *)(made.device + TABLE)};
    unsigned char *now = malloc(ROOM);
    assert_non_null(now);
    assert_ok(rft_device_delta_exchange(on.device, on.stream, table, BLOCKS, &notes, &on.error));
    assert_ok(refit_stream_copy(on.device, on.stream, now, made.device, ROOM, &on.error));
    assert_ok(rft_device_delta_apply(on.device, on.stream, table, BLOCKS, &on.error));
    wait_stream();
    assert_memory_equal(now, made.host + NEW, 2 * BLOCKS * ELEMENTS);
    memcpy(jobs, now + TABLE + 64, sizeof jobs);
    assert_int_equal(jobs[0].entry.changed, ELEMENTS / 64);
    assert_true(jobs[0].good && !jobs[0].whole && jobs[2].good && jobs[2].whole);
    assert_ok(refit_stream_copy(on.device, on.stream, now, made.device, NOTES, &on.error));
    wait_stream();
    assert_memory_equal(now, made.host, NOTES);
    free(now);
    free_filled(made);
}

TEST(blocks_without_kernels_or_out_of_place_are_refused)
{
    static _Alignas(16) unsigned char memory[4096];
    rft_delta_job *jobs = (void *)memory, *aside = (void *)(memory + 4);
    rft_delta_notes notes = {memory + 1024, 1024, (void *)(memory + 2048)};
    rft_delta_notes odd = {memory + 1032, 1024, (void *)(memory + 2048)};
    assert_ok(rft_device_delta_exchange(on.device, on.stream, jobs, 0, &notes, &on.error));
    assert_ok(rft_device_delta_apply(on.device, on.stream, jobs, 0, &on.error));
    assert_invalid(rft_device_delta_exchange(on.device, on.stream, aside, 1, &notes, &on.error));
    assert_invalid(rft_device_delta_exchange(on.device, on.stream, jobs, 1, &odd, &on.error));
    assert_invalid(rft_device_delta_apply(on.device, on.stream, aside, 1, &on.error));
    if (rft_device_get_caps(on.device).deltas) return;
    assert_int_equal(rft_device_delta_exchange(on.device, on.stream, jobs, 1, &notes, &on.error),
                     REFIT_ERR_UNSUPPORTED);
    assert_int_equal(rft_device_delta_apply(on.device, on.stream, jobs, 1, &on.error),
                     REFIT_ERR_UNSUPPORTED);
}

TEST(arguments_that_make_no_sense_are_refused)
{
    uint64_t sum = 0, words[2] = {0, 0};
    refit_device *device = on.device;
    assert_invalid(rft_device_digest(device, on.stream, NULL, 8, 0, &sum, &on.error));
    assert_invalid(rft_device_digest(device, on.stream, words, 8, 0, NULL, &on.error));
    assert_invalid(rft_device_digest(device, on.stream, words, 8, 4, &sum, &on.error));
    assert_invalid(rft_device_digest_list(device, on.stream, NULL, 1, &on.error));
    assert_invalid(
        rft_device_digest_list(device, on.stream, (void *)((char *)words + 4), 1, &on.error));
    assert_invalid(refit_stream_cast_bf16(NULL, on.stream, NULL, NULL, 1, &on.error));
    assert_invalid(refit_stream_cast_bf16(device, on.stream, NULL, NULL, 1, &on.error));
    assert_invalid(refit_stream_cast_bf16(device, on.stream, (void *)words, (void *)words,
                                          UINT64_MAX / 2, &on.error));
    assert_invalid(refit_stream_cast_bf16(device, on.stream, (void *)words, (void *)words,
                                          UINT64_C(1) << 61, &on.error));
    assert_invalid(rft_device_digest(device, on.stream, words, UINT64_MAX, 0, &sum, &on.error));
    assert_ok(refit_stream_cast_bf16(device, on.stream, NULL, NULL, 0, &on.error));
    wait_stream();
    assert_int_equal(sum, 0);
}

/* A kernel that met it would end the device. */
TEST(memory_that_the_device_cannot_reach_is_refused)
{
    if (rft_device_get_caps(on.device).host_addressable) skip();
    uint64_t sum = 0;
    filled made = make_filled(10);
    assert_invalid(rft_device_digest(on.device, on.stream, made.host, 4096, 0, &sum, &on.error));
    assert_invalid(refit_stream_cast_bf16(on.device, on.stream, (void *)made.host,
                                          (const void *)made.device, 16, &on.error));
    assert_invalid(refit_stream_cast_bf16(on.device, on.stream, (void *)made.device,
                                          (const void *)made.host, 16, &on.error));
    rft_master_job job = job_at(made.device, 16, 16);
    job.weights = made.host;
    assert_invalid(rft_device_master_encode(on.device, on.stream, &job, &on.error));
    job = job_at(made.device, 16, 16);
    job.master = made.host;
    assert_invalid(rft_device_master_decode(on.device, on.stream, &job, &on.error));
    wait_stream();
    assert_int_equal(device_right(made.device, ROOM, 10), ROOM);
    free_filled(made);
}

TEST(memory_of_an_arena_that_is_gone_is_not_computed_with)
{
    if (!on.strict) skip();
    void *base;
    uint64_t granule, sum = 5;
    assert_ok(rft_device_reserve(on.device, UINT64_C(1) << 20, &base, &granule, &on.error));
    assert_int_equal(rft_device_digest(on.device, REFIT_STREAM_NONE, base, 64, 0, &sum, &on.error),
                     REFIT_ERR_COPY);
    assert_int_equal(sum, 5);
    assert_int_equal(refit_stream_cast_bf16(on.device, REFIT_STREAM_NONE, base, base, 4, &on.error),
                     REFIT_ERR_COPY);
    rft_digest_job jobs[2] = {{.from = (uintptr_t)&sum, .bytes = 8, .end = 1, .sum = 3},
                              {.from = (uintptr_t)base, .bytes = 8, .end = 2, .sum = 3}};
    assert_int_equal(rft_device_digest_list(on.device, REFIT_STREAM_NONE, jobs, 2, &on.error),
                     REFIT_ERR_COPY);
    assert_int_equal(rft_device_digest_list(on.device, REFIT_STREAM_NONE, base, 1, &on.error),
                     REFIT_ERR_COPY);
    assert_int_equal(jobs[0].sum, 3);
    rft_master_job job = job_at(base, 64, 16);
    job.result = (void *)((unsigned char *)base + 4096);
    job.weights = job.result;
    job.coded = job.result;
    assert_int_equal(rft_device_master_encode(on.device, REFIT_STREAM_NONE, &job, &on.error),
                     REFIT_ERR_COPY);
    assert_int_equal(rft_device_master_decode(on.device, REFIT_STREAM_NONE, &job, &on.error),
                     REFIT_ERR_COPY);
    /* In a queue it loses the device, as on a GPU. */
    assert_ok(rft_device_digest(on.device, on.stream, base, 64, 0, &sum, &on.error));
    assert_int_equal(refit_stream_wait(on.device, on.stream, TIMEOUT_MS, &on.error),
                     REFIT_ERR_DEVICE);
    assert_int_equal(sum, 5);
    rft_device_unreserve(on.device, base, UINT64_C(1) << 20);
}

int main(void)
{
    return run_on_every_device("device_compute");
}
