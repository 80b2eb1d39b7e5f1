/*
 * The text of the GPU's kernels for masters, run on the CPU as in test_gpu_text.c, codes, decodes,
 * compares and refuses what the C twins do, bit for bit.
 */
#include "tests/kernels/grid.h"
#include "tests/kernels/master_data.h"

/* The kernels themselves. */
#include "kernels/master.cu"

static void do_split(void *user)
{
    const rft_master_job *job = user;
    rft_master_split_kernel(job->master, job->weights, job->coded, job->elements, job->room);
}

static void do_list(void *user)
{
    const rft_master_job *job = user;
    rft_master_list_kernel(job->master, job->weights, job->coded, job->elements, job->room,
                           job->result);
}

static void do_join(void *user)
{
    const rft_master_job *job = user;
    rft_master_join_kernel(job->master, job->weights, job->coded, job->elements, job->room,
                           job->result, job->compares);
}

/* What the kernels make of the data, and what the twins do. All memory ends where its bytes do. */
typedef struct pair {
    master_data data;
    rft_master_job job;
    unsigned char *coded, *twin, *back, *twin_back;
    rft_master_result result, twin_result;
    size_t bytes;
    unsigned blocks, threads; /* of the grid */
} pair;

static unsigned char *take(size_t bytes, int filled)
{
    unsigned char *taken = aligned_alloc(16, (bytes + 15) / 16 * 16);
    assert_non_null(taken);
    memset(taken, filled, bytes);
    return taken;
}

static void open_pair(pair *on, uint64_t elements, master_weights kind, uint32_t room)
{
    master_data_fill(&on->data, elements, kind, (size_t)elements % 5);
    on->bytes = (size_t)rft_master_bytes(elements, room);
    on->coded = take(on->bytes, 0xA5);
    on->twin = take(on->bytes, 0xA5);
    on->back = take(4 * elements, 0x5A);
    on->twin_back = take(4 * elements, 0x5A);
    on->blocks = 1 + (unsigned)elements % 3;
    on->threads = 32 * (1 + (unsigned)elements % 4);
    on->result = (rft_master_result){0};
    on->twin_result = (rft_master_result){0};
    on->job = (rft_master_job){.master = on->data.masters,
                               .weights = on->data.weights,
                               .elements = elements,
                               .room = room};
}

static void close_pair(pair *on)
{
    master_data_free(&on->data);
    free(on->coded);
    free(on->twin);
    free(on->back);
    free(on->twin_back);
}

static void encode_pair(pair *on)
{
    on->job.coded = on->twin;
    on->job.result = &on->twin_result;
    rft_master_split(&on->job);
    rft_master_list(&on->job);
    on->job.coded = on->coded;
    on->job.result = &on->result;
    grid_launch(on->blocks, 1, on->threads, do_split, &on->job);
    grid_launch(on->blocks, 1, on->threads, do_list, &on->job);
    assert_memory_equal(on->coded, on->twin, on->bytes);
    assert_memory_equal(&on->result, &on->twin_result, sizeof on->result);
}

/* Both decode what the kernel coded; returns what both found wrong. */
static uint32_t decode_pair(pair *on, bool compares)
{
    rft_master_job job = on->job;
    on->result.found = 0;
    on->twin_result.found = 0;
    job.coded = on->coded;
    job.compares = compares;
    if (!compares) job.master = on->twin_back;
    job.result = &on->twin_result;
    rft_master_join(&job);
    if (!compares) job.master = on->back;
    job.result = &on->result;
    grid_launch(on->blocks, 1, on->threads, do_join, &job);
    assert_int_equal(on->result.found, on->twin_result.found);
    assert_memory_equal(on->back, on->twin_back, 4 * on->job.elements);
    return on->result.found;
}

static void check(uint64_t elements, master_weights kind, uint32_t room)
{
    pair on;
    open_pair(&on, elements, kind, room);
    encode_pair(&on);
    if (on.result.found == 0) {
        assert_int_equal(decode_pair(&on, true), 0);
        assert_int_equal(decode_pair(&on, false), 0);
        assert_memory_equal(on.back, on.data.masters, 4 * elements);
    }
    close_pair(&on);
}

TEST(every_length_and_alignment_is_equal)
{
    for (uint64_t elements = 1; elements < 80; elements += 1 + elements / 20)
        check(elements, (master_weights)(elements % MASTER_KINDS), 256);
}

TEST(every_kind_of_weight_is_equal)
{
    for (int kind = 0; kind < MASTER_KINDS; kind++)
        check(2 * RFT_MASTER_BLOCK + 5 * (uint64_t)kind, (master_weights)kind, 3 * 8192);
}

TEST(several_units_are_equal)
{
    check(RFT_MASTER_UNIT + RFT_MASTER_BLOCK + 4, MASTER_MIXED, RFT_MASTER_ROOM);
}

TEST(a_unit_without_room_is_equal)
{
    pair on;
    open_pair(&on, 5 * RFT_MASTER_BLOCK, MASTER_RANDOM, 8192 + 16);
    encode_pair(&on);
    assert_int_equal(on.result.found, RFT_MASTER_NO_ROOM);
    assert_int_equal(on.result.need, 5 * 8192);
    assert_int_equal(decode_pair(&on, false), RFT_MASTER_MALFORMED);
    close_pair(&on);
}

TEST(changed_weights_are_found_alike)
{
    pair on;
    open_pair(&on, 2 * RFT_MASTER_BLOCK + 6, MASTER_ROUNDED, 4096);
    encode_pair(&on);
    on.data.weights[RFT_MASTER_BLOCK] ^= 0x10;
    assert_int_equal(decode_pair(&on, false), RFT_MASTER_CHANGED);
    on.data.weights[RFT_MASTER_BLOCK] ^= 0x10;
    on.data.masters[9] ^= 4;
    assert_int_equal(decode_pair(&on, true), RFT_MASTER_DIFFERS);
    close_pair(&on);
}

/* A bit of the coded bytes is another: both make the same of it. */
TEST(malformed_units_are_checked_as_by_the_twin)
{
    uint64_t seed = 21;
    uint32_t wrong = 0;
    for (uint32_t round = 0; round < 120; round++) {
        pair on;
        open_pair(&on, 700, round % 2 == 0 ? MASTER_ROUNDED : MASTER_RANDOM, 2048);
        on.data.weights[3] ^= 1;
        on.data.weights[400] ^= 1;
        encode_pair(&on);
        size_t at = round % 3 == 0 ? 8 + (size_t)seeded_below(&seed, 8)
                                   : (size_t)seeded_below(&seed, on.bytes);
        if (round % 3 == 1) at = on.bytes - 2048 + (size_t)seeded_below(&seed, 64);
        on.coded[at] ^= (unsigned char)(1u << seeded_below(&seed, 8));
        wrong += decode_pair(&on, true) != 0;
        (void)decode_pair(&on, false);
        close_pair(&on);
    }
    assert_in_range(wrong, 60, 119);
}

int main(void)
{
    return test_run("gpu_master");
}
