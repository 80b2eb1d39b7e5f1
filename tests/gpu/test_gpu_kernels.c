/* The GPU's kernels do what their C twins do, bit for bit, on random data: wherever it lies,
 * however it is aligned, whatever lies next to it. TEST_SEED (a number) makes other data. */
#include <stdio.h>
#include <stdlib.h>

#include "device/cuda/cuda_kernels.h"
#include "kernels/cast.h"
#include "kernels/delta_exchange.h"
#include "kernels/delta_job.h"
#include "kernels/digest.h"
#include "kernels/digest_job.h"
#include "kernels/master.h"
#include "kernels/pack.h"
#include "tests/support/test.h"
#include "tests/support/test_device.h"

#define ROOM    (16 * MIB)
#define ENTRIES 4000u
#define LISTED  2000u /* jobs, which are twice as long, in the same table */

/* One memory of the device's and one page-locked of the host's, and what both should hold. */
static struct fixture {
    refit_device *device;
    rft_cuda_device *cuda;
    refit_stream_ref stream;
    char *there;        /* on the device, ROOM */
    char *here;         /* page-locked, ROOM */
    rft_cu_ptr here_at; /* its address on the device */
    char *there_twin;   /* ordinary memory */
    char *here_twin;
    void *table; /* on the device */
    uint64_t random;
    refit_error error;
} on;

static uint64_t next(void)
{
    on.random = on.random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return on.random ^ on.random >> 31;
}

static uint64_t below(uint64_t bound)
{
    return next() % bound;
}

static void scramble(void *memory, uint64_t bytes)
{
    uint64_t *words = memory;
    for (uint64_t i = 0; i < bytes / sizeof *words; i++)
        words[i] = next();
}

/* Fills both sides with new bytes, and their twins with the same. */
static void fill(void)
{
    scramble(on.there_twin, ROOM);
    scramble(on.here_twin, ROOM);
    test_write(on.device, on.there, on.there_twin, ROOM);
    memcpy(on.here, on.here_twin, ROOM);
}

static void succeeds(refit_status status)
{
    if (status != REFIT_OK) fail_msg("%s", on.error.text);
}

static void wait(void)
{
    succeeds(refit_stream_wait(on.device, on.stream, TIMEOUT_MS, &on.error));
}

/* Not a byte is otherwise, on either side. */
static void check(void)
{
    wait();
    assert_device_equal(on.device, on.there, on.there_twin, ROOM);
    assert_memory_equal(on.here, on.here_twin, ROOM);
}

static int set_up(void **state)
{
    void *memory;
    const char *seed = getenv("TEST_SEED");
    on.random = seed != NULL ? strtoull(seed, NULL, 10) : 1;
    succeeds(test_device_open("host", &on.device, &on.error));
    on.cuda = on.device->self;
    if (on.cuda->kernels == NULL) fail_msg("%s", on.cuda->kernels_missing.text);
    succeeds(refit_stream_open(on.device, &on.stream, &on.error));
    succeeds(refit_memory_alloc(on.device, ROOM, &memory, &on.error));
    on.there = memory;
    succeeds(refit_memory_alloc(on.device, ENTRIES * sizeof(rft_pack_entry), &on.table, &on.error));
    on.here = test_host_alloc(on.device, ROOM);
    on.there_twin = malloc(ROOM);
    on.here_twin = malloc(ROOM);
    assert_true(on.there_twin != NULL && on.here_twin != NULL);
    rft_cuda_guard guard;
    assert_ok(rft_cuda_enter(on.cuda, &guard, &on.error));
    assert_int_equal(on.cuda->driver.host_pointer(&on.here_at, on.here, 0), RFT_CU_SUCCESS);
    rft_cuda_leave(on.cuda, &guard);
    return 0;
}

static int tear_down(void **state)
{
    free(on.there_twin);
    free(on.here_twin);
    test_host_free(on.device, on.here, ROOM);
    assert_ok(refit_memory_free(on.device, on.table, &on.error));
    assert_ok(refit_memory_free(on.device, on.there, &on.error));
    assert_ok(refit_stream_close(on.device, on.stream, &on.error));
    assert_ok(refit_device_close(on.device, &on.error));
    return test_device_quiet() ? 0 : -1;
}

#define GPU_TEST(name) TEST_WITH(name, set_up, tear_down)

/* Launches kernel(device, stream, …, error). */
#define LAUNCH(kernel, ...)                                                                        \
    do {                                                                                           \
        rft_cuda_guard guard;                                                                      \
        assert_ok(rft_cuda_enter(on.cuda, &guard, &on.error));                                     \
        refit_status launched =                                                                    \
            rft_cuda_launch_##kernel(on.cuda, on.stream.native, __VA_ARGS__, &on.error);           \
        rft_cuda_leave(on.cuda, &guard);                                                           \
        succeeds(launched);                                                                        \
    } while (0)

static rft_cu_ptr device_address(uint64_t offset)
{
    return (rft_cu_ptr)(uintptr_t)on.there + offset;
}

/* ---- pack */

/* Sizes of every order of magnitude, each as likely. */
static uint64_t any_size(uint64_t most)
{
    uint64_t size = below(UINT64_C(1) << below(18));
    return size < most ? size : most;
}

/* Which sides the entries of one call have. */
typedef enum sides { THERE_TO_THERE, THERE_TO_HERE, HERE_TO_THERE, SIDES } sides;

/* Cuts the upper halves into targets with gaps, filled from anywhere in the lower halves. */
static uint32_t make_entries(sides direction, rft_pack_entry *entries, rft_pack_entry *twins)
{
    rft_cu_ptr to = direction == THERE_TO_HERE ? on.here_at : device_address(0);
    rft_cu_ptr from = direction == HERE_TO_THERE ? on.here_at : device_address(0);
    const char *to_twin = direction == THERE_TO_HERE ? on.here_twin : on.there_twin;
    const char *from_twin = direction == HERE_TO_THERE ? on.here_twin : on.there_twin;
    uint64_t at = ROOM / 2;
    uint32_t count = 0;
    while (count < ENTRIES) {
        uint64_t bytes = any_size(ROOM / 2);
        at += below(40);
        if (at + bytes > ROOM) break;
        uint64_t source = below(ROOM / 2 - bytes + 1);
        entries[count] = (rft_pack_entry){to + at, from + source, bytes};
        twins[count++] =
            (rft_pack_entry){(uintptr_t)to_twin + at, (uintptr_t)from_twin + source, bytes};
        at += bytes;
    }
    return count;
}

static void pack_once(sides direction)
{
    static rft_pack_entry entries[ENTRIES], twins[ENTRIES];
    uint64_t bytes = 0;
    fill();
    uint32_t count = make_entries(direction, entries, twins);
    for (uint32_t i = 0; i < count; i++)
        bytes += entries[i].bytes;
    test_write(on.device, on.table, entries, count * sizeof *entries);
    LAUNCH(pack, (uintptr_t)on.table, count, bytes);
    rft_pack(twins, count);
    check();
}

GPU_TEST(pack_moves_every_byte_and_no_other)
{
    for (int round = 0; round < 4; round++) {
        for (int direction = 0; direction < SIDES; direction++)
            pack_once((sides)direction);
    }
}

/* ---- cast */

/* Every sign, exponent and upper fraction, with lower halves around all that rounding looks at. */
static uint64_t every_kind_of_number(uint32_t *words)
{
    static const uint32_t lows[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    uint64_t count = 0;
    for (uint32_t high = 0; high <= 0xFFFF; high++) {
        for (size_t i = 0; i < COUNT_OF(lows); i++)
            words[count++] = high << 16 | lows[i];
    }
    return count;
}

/* `count` numbers at `from` in the lower half to `to` in the upper half. */
static void cast_once(uint64_t to, uint64_t from, uint64_t count)
{
    LAUNCH(cast, device_address(to), device_address(from), count);
    rft_cast_bf16((uint16_t *)(void *)(on.there_twin + to),
                  (const float *)(const void *)(on.there_twin + from), count);
    check();
}

GPU_TEST(cast_rounds_every_kind_of_number_alike)
{
    fill();
    uint64_t count = every_kind_of_number((uint32_t *)(void *)on.there_twin);
    assert_true(count * 4 <= ROOM / 2);
    test_write(on.device, on.there, on.there_twin, count * 4);
    cast_once(ROOM / 2, 0, count);
}

GPU_TEST(cast_writes_its_range_and_no_more)
{
    fill();
    for (int round = 0; round < 12; round++) {
        uint64_t count = any_size(ROOM / 16);
        uint64_t from = below(1000) * 4;
        uint64_t to = ROOM / 2 + below(1000) * 2;
        cast_once(to, from, count);
    }
    cast_once(ROOM / 2 + 2, 4, ROOM / 16 + 1);
}

/* ---- digest */

static void digest_once(uint64_t at, uint64_t bytes, uint64_t offset)
{
    uint64_t zero = 0, sum;
    test_write(on.device, on.table, &zero, sizeof zero);
    LAUNCH(digest, device_address(at), bytes, offset, (uintptr_t)on.table);
    wait();
    test_read(on.device, &sum, on.table, sizeof sum);
    assert_int_equal(sum, rft_digest_part(on.there_twin + at, bytes, offset));
}

GPU_TEST(digest_is_the_same_at_every_size_and_place)
{
    fill();
    for (uint64_t bytes = 0; bytes < 70; bytes++)
        digest_once(bytes % 17, bytes, 8 * bytes);
    for (int round = 0; round < 60; round++) {
        uint64_t bytes = any_size(ROOM / 2);
        digest_once(below(ROOM / 2), bytes, below(UINT64_C(1) << 40) * 8);
    }
    digest_once(0, ROOM, 0);
    digest_once(5, ROOM - 5, 8);
}

GPU_TEST(digests_add_up_in_one_sum)
{
    uint64_t zero = 0, sum;
    fill();
    test_write(on.device, on.table, &zero, sizeof zero);
    for (uint64_t at = 0; at < ROOM; at += ROOM / 8)
        LAUNCH(digest, device_address(at), ROOM / 8, at, (uintptr_t)on.table);
    wait();
    test_read(on.device, &sum, on.table, sizeof sum);
    assert_int_equal(sum, rft_digest_part(on.there_twin, ROOM, 0));
}

/* Jobs that read the lower half, and copy to places one after the other in the upper one. */
static void make_digests(rft_digest_job *jobs, rft_digest_job *twins, uint32_t count, uint64_t most)
{
    uint64_t to = ROOM / 2 + 8, end = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bytes = below(16) == 0 ? 0 : any_size(most), from = below(ROOM / 2 - most);
        bool copies = below(3) != 0 && to + bytes + 64 <= ROOM;
        if (below(3) != 0) from = from / 8 * 8;
        end += RFT_DIGEST_CHUNKS(bytes);
        jobs[i] = (rft_digest_job){.to = copies ? device_address(to) : 0,
                                   .from = device_address(from),
                                   .bytes = bytes,
                                   .offset = 8 * below(UINT64_C(1) << 40),
                                   .end = end,
                                   .sum = next()};
        twins[i] = jobs[i];
        twins[i].from = (uintptr_t)on.there_twin + from;
        twins[i].to = copies ? (uintptr_t)on.there_twin + to : 0;
        if (copies) to += (bytes + 7) / 8 * 8 + 8 * below(4);
    }
}

static void list_once(uint32_t count, uint64_t most)
{
    static rft_digest_job jobs[LISTED], twins[LISTED];
    fill();
    make_digests(jobs, twins, count, most);
    test_write(on.device, on.table, jobs, count * sizeof *jobs);
    LAUNCH(digest_list, (uintptr_t)on.table, count);
    rft_digest_list(twins, count);
    check();
    test_read(on.device, jobs, on.table, count * sizeof *jobs);
    for (uint32_t i = 0; i < count; i++)
        assert_true(jobs[i].sum == twins[i].sum);
}

GPU_TEST(listed_digests_copy_their_ranges_and_no_more)
{
    static const uint64_t most[] = {20, 100, 2000, ROOM / 64, ROOM / 4};
    LAUNCH(digest_list, (uintptr_t)on.table, 0);
    for (unsigned round = 0; round < 15; round++)
        list_once(1 + (uint32_t)below(LISTED), most[round % 5]);
    list_once(1, ROOM / 4);
    list_once(LISTED, 100);
}

/* ---- master: masters in the first quarter, weights in the second, the result and what is coded
 * in the upper half */

/* `aside`: elements that masters and weights lie off a boundary. */
static rft_master_job master_at(uint64_t base, uint64_t elements, uint64_t aside, uint32_t room)
{
    return (rft_master_job){.master = (void *)(uintptr_t)(base + 4 * aside),
                            .weights = (void *)(uintptr_t)(base + ROOM / 4 + 2 * aside),
                            .result = (void *)(uintptr_t)(base + ROOM / 2),
                            .coded = (void *)(uintptr_t)(base + ROOM / 2 + 64),
                            .elements = elements,
                            .room = room};
}

/* Weights that are the rounding but for one in `one_in`. */
static void make_weights(const rft_master_job *twin, uint64_t one_in)
{
    uint16_t *weights = (uint16_t *)(uintptr_t)twin->weights;
    rft_cast_bf16(weights, twin->master, twin->elements);
    for (uint64_t i = 0; i < twin->elements; i++) {
        if (below(one_in) == 0) weights[i] = (uint16_t)next();
    }
    *twin->result = (rft_master_result){0};
}

static void decode_once(rft_master_job *job, rft_master_job *twin)
{
    LAUNCH(master_decode, job);
    rft_master_join(twin);
    check();
}

static void master_once(uint64_t elements, uint64_t aside, uint64_t one_in)
{
    uint32_t room = one_in < 8 ? RFT_MASTER_ROOM : 16384;
    rft_master_job job = master_at(device_address(0), elements, aside, room);
    rft_master_job twin = master_at((uintptr_t)on.there_twin, elements, aside, room);
    fill();
    make_weights(&twin, one_in);
    test_write(on.device, on.there, on.there_twin, ROOM);
    LAUNCH(master_encode, &job);
    rft_master_split(&twin);
    rft_master_list(&twin);
    check();
    job.compares = true;
    twin.compares = true;
    decode_once(&job, &twin);
    job.compares = false;
    twin.compares = false;
    scramble(on.there_twin, ROOM / 4);
    test_write(on.device, on.there, on.there_twin, ROOM / 4);
    decode_once(&job, &twin);
    on.there_twin[ROOM / 4 + 2 * aside] ^= 1; /* another weight */
    test_write(on.device, on.there, on.there_twin, ROOM);
    decode_once(&job, &twin);
}

GPU_TEST(masters_are_coded_and_decoded_as_by_the_twin)
{
    static const uint64_t shares[] = {1, 3, 2000, UINT64_C(1) << 40};
    for (unsigned round = 0; round < 8; round++) {
        uint64_t elements = 1 + any_size(200000), aside = below(9);
        master_once(elements, aside, shares[round % 4]);
    }
    master_once(3 * RFT_MASTER_UNIT + 4097, 0, 2000);
    master_once(3 * RFT_MASTER_UNIT + 4097, 1, 30);
}

/* ---- delta: the blocks in the first quarter, what became of them in the second, the coded bytes
 * in the upper half */

#define JOBS 24u

/* What the host makes of the jobs, which have the same places in the twin. */
typedef struct delta_batch {
    rft_delta_job jobs[JOBS], twins[JOBS];
} delta_batch;

static unsigned char *twin_of(rft_cu_ptr address)
{
    return (unsigned char *)on.there_twin + (address - device_address(0));
}

/* Densities from one in 60,000 to all, and lengths of every order of magnitude. */
static void change_block(unsigned char *after, rft_delta_shape shape)
{
    uint64_t one_in = UINT64_C(1) << below(17);
    for (uint32_t i = 0; i < shape.elements; i++) {
        if (below(one_in) != 0) continue;
        after[(uint64_t)i * shape.width] ^= (unsigned char)(1u << below(8));
        if (shape.width == 2 && below(9) == 0) after[(uint64_t)i * 2 + 1] ^= 3;
    }
}

static void make_jobs(delta_batch *batch)
{
    static const rft_delta_shape kinds[] = {
        {0, 2, RFT_DELTA_HALF}, {0, 1, RFT_DELTA_RAW}, {0, 2, RFT_DELTA_RAW},
        {0, 2, RFT_DELTA_HALF}, {0, 4, RFT_DELTA_RAW}, {0, 8, RFT_DELTA_RAW},
    };
    uint64_t block = 3, coded = ROOM / 2;
    for (uint32_t i = 0; i < JOBS; i++) {
        rft_delta_shape shape = kinds[i % 6];
        shape.elements = i < 6 ? 16384 : 1 + (uint32_t)any_size(16383);
        uint64_t bytes = (uint64_t)shape.elements * shape.width;
        memcpy(on.there_twin + ROOM / 4 + block, on.there_twin + block, bytes);
        change_block((unsigned char *)on.there_twin + ROOM / 4 + block, shape);
        batch->jobs[i] = (rft_delta_job){.before = device_address(block),
                                         .after = device_address(ROOM / 4 + block),
                                         .coded = device_address(coded),
                                         .shape = shape};
        block += bytes + below(9);
        coded += (rft_delta_bound(shape) + 63) / 64 * 64;
    }
    assert_true(block <= ROOM / 4 && coded <= ROOM);
    memcpy(batch->twins, batch->jobs, sizeof batch->jobs);
}

static void apply_jobs(delta_batch *batch)
{
    test_write(on.device, on.table, batch->jobs, sizeof batch->jobs);
    LAUNCH(delta_apply, (uintptr_t)on.table, JOBS);
    wait();
    test_read(on.device, batch->jobs, on.table, sizeof batch->jobs);
}

/* In the twin's memory; jobs and twins say what came of it. */
static void encode_twins(delta_batch *batch)
{
    for (uint32_t i = 0; i < JOBS; i++) {
        rft_delta_job *twin = &batch->twins[i];
        twin->good = rft_delta_encode(twin->shape, twin_of(twin->before), twin_of(twin->after),
                                      twin_of(twin->coded), &twin->entry);
        batch->jobs[i].entry = twin->entry;
        batch->jobs[i].good = twin->good;
    }
}

/* Onto the blocks as they were; then the whole memory is as the twin's, the coded bytes included.
 */
static void apply_once(delta_batch *batch)
{
    for (uint32_t i = 0; i < JOBS; i++) {
        rft_delta_job *job = &batch->jobs[i];
        job->after = job->before;
        if (job->good == 0) job->entry.changed = 0; /* refused, and nothing done */
        job->good = 2;
    }
    test_write(on.device, on.there, on.there_twin, ROOM);
    apply_jobs(batch);
    for (uint32_t i = 0; i < JOBS; i++) {
        const rft_delta_job *twin = &batch->twins[i];
        assert_int_equal(batch->jobs[i].good, twin->good);
        if (!twin->good) continue;
        memcpy(twin_of(twin->before), twin_of(twin->after),
               (uint64_t)twin->shape.elements * twin->shape.width);
    }
    check();
}

GPU_TEST(delta_applies_as_the_twin)
{
    static delta_batch batch;
    for (int round = 0; round < 6; round++) {
        fill();
        make_jobs(&batch);
        encode_twins(&batch);
        apply_once(&batch);
    }
}

/* ---- Exchanging: notes in the upper half, how much of it is used after the table */

static uint64_t exchange_blocks(delta_batch *batch, uint64_t room)
{
    uint64_t used = 0;
    unsigned char *count = (unsigned char *)on.table + sizeof batch->jobs;
    test_write(on.device, on.table, batch->jobs, sizeof batch->jobs);
    test_write(on.device, count, &used, sizeof used);
    LAUNCH(delta_exchange, (uintptr_t)on.table, JOBS, room == 0 ? 0 : device_address(ROOM / 2),
           room, (uintptr_t)count);
    wait();
    test_read(on.device, batch->jobs, on.table, sizeof batch->jobs);
    test_read(on.device, &used, count, sizeof used);
    return used;
}

/* What the twin makes of the block and notes of it, in the twin's memory too. */
static void check_exchanged(const rft_delta_job *job)
{
    static unsigned char note[RFT_DELTA_ELEMENTS * 8];
    rft_delta_entry entry;
    uint64_t bytes = (uint64_t)job->shape.elements * job->shape.width;
    bool coded =
        rft_delta_exchange(job->shape, twin_of(job->after), twin_of(job->before), note, &entry);
    bool whole = !coded && entry.changed > 0;
    assert_int_equal(job->whole, whole);
    assert_int_equal(job->entry.changed, entry.changed);
    if (coded) assert_memory_equal(&job->entry, &entry, sizeof entry);
    if (job->coded >= device_address(ROOM / 2) && entry.changed > 0)
        memcpy(twin_of(job->coded), note, whole ? bytes : entry.total);
}

/* All of the lower half is compared, and each note. */
static void exchange_once(uint64_t room)
{
    static delta_batch batch;
    static unsigned char old[ROOM / 2];
    uint32_t done = 0;
    fill();
    make_jobs(&batch);
    for (uint32_t i = 0; i < JOBS; i++)
        batch.jobs[i].coded = 0;
    test_write(on.device, on.there, on.there_twin, ROOM);
    memcpy(old, on.there_twin, sizeof old);
    uint64_t used = exchange_blocks(&batch, room);
    for (uint32_t i = 0; i < JOBS; i++) {
        const rft_delta_job *job = &batch.jobs[i];
        done += job->good;
        if (!job->good) continue;
        check_exchanged(job);
        if (room == 0 || job->entry.changed == 0) continue;
        assert_device_equal(on.device, (void *)(uintptr_t)job->coded, twin_of(job->coded),
                            job->whole ? (uint64_t)job->shape.elements * job->shape.width
                                       : job->entry.total);
    }
    assert_int_equal(done == JOBS, used <= room);
    assert_device_equal(on.device, on.there, on.there_twin, ROOM / 2);
    if (room == 0) return;
    apply_jobs(&batch);
    assert_device_equal(on.device, on.there, old, ROOM / 2);
}

GPU_TEST(delta_exchanges_as_the_twin_and_brings_back)
{
    for (int round = 0; round < 6; round++) {
        exchange_once(ROOM / 2);
        exchange_once(20000 + below(200000));
        exchange_once(0);
    }
}

int main(void)
{
    if (!test_on_cuda()) return 77;
    return test_run("gpu_kernels");
}
