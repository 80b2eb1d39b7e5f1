/* Plan: every byte is moved once, in as few copies as the limits allow, with nothing allocated. */
#include "base/alloc.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "transfer/plan.h"

#define ROOM 4096
#define SLAB 512 /* a registration of `target` */

static char source[ROOM];
static char target[ROOM];

static rft_plan_limits limits_of(uint32_t pieces, uint64_t bytes, uint64_t piece_bytes,
                                 uint32_t batch)
{
    return (rft_plan_limits){
        .pieces = pieces, .bytes = bytes, .piece_bytes = piece_bytes, .batch_most = batch};
}

static refit_status try_plan(rft_plan *plan, uint32_t pieces, uint64_t bytes, uint64_t piece_bytes,
                             uint32_t batch)
{
    rft_plan_limits limits = limits_of(pieces, bytes, piece_bytes, batch);
    return rft_plan_open(plan, &limits, NULL);
}

static rft_plan open_plan(uint32_t pieces, uint64_t bytes, uint64_t piece_bytes, uint32_t batch)
{
    rft_plan plan;
    assert_ok(try_plan(&plan, pieces, bytes, piece_bytes, batch));
    return plan;
}

static rft_piece piece_of(char *to, const char *from, uint64_t bytes, uint32_t group)
{
    return (rft_piece){.to = to, .from = from, .bytes = bytes, .group = group};
}

/* What the mover makes of it, on plain memory. */
static void carry_out(const rft_plan *plan)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < plan->batch_count; i++) {
        const rft_batch *batch = &plan->batches[i];
        assert_int_equal(batch->first, next);
        assert_in_range(batch->count, 1, plan->limits.batch_most);
        next += batch->count;
        uint64_t bytes = 0;
        for (uint32_t j = 0; j < batch->count; j++) {
            const rft_copy *copy = &plan->copies[batch->first + j];
            size_t at = (size_t)((char *)copy->to - target);
            assert_in_range(copy->bytes, 1, plan->limits.piece_bytes);
            assert_int_equal(at / SLAB, (at + copy->bytes - 1) / SLAB);
            assert_int_equal(copy->from == NULL, plan->copies[batch->first].from == NULL);
            if (copy->from == NULL) memset(copy->to, 0, copy->bytes);
            if (copy->from != NULL) memcpy(copy->to, copy->from, copy->bytes);
            bytes += copy->bytes;
        }
        assert_int_equal(batch->bytes, bytes);
        assert_in_range(bytes, 1, plan->limits.batch_bytes);
    }
    assert_int_equal(next, plan->copy_count);
    assert_true(plan->copy_count <= plan->copy_room);
}

/* Cuts `target` into pieces at random; some come from a neighbouring source, some from elsewhere,
 * some from nowhere. None lies across two slabs of it. */
static uint32_t cut_pieces(uint64_t *seed, rft_piece *pieces, uint32_t most)
{
    uint64_t at = 0;
    uint32_t count = 0;
    while (count < most) {
        uint64_t bytes = seeded_next(seed) % 200;
        if (bytes > SLAB - at % SLAB) bytes = SLAB - at % SLAB;
        if (at + bytes > ROOM) break;
        uint64_t kind = seeded_next(seed) % 8;
        uint64_t elsewhere = seeded_next(seed) % (ROOM - 200);
        const char *from = kind == 0 ? NULL : kind == 1 ? source + elsewhere : source + at;
        uint32_t group = (uint32_t)(seeded_next(seed) % 8 == 0);
        pieces[count] = piece_of(target + at, from, bytes, group);
        pieces[count++].slab = (uint32_t)(at / SLAB);
        at += bytes;
    }
    return count;
}

TEST(any_pieces_are_moved_whole)
{
    uint64_t seed = 1234567890123456789u;
    for (size_t i = 0; i < ROOM; i++)
        source[i] = (char)(1 + seeded_next(&seed) % 255);
    for (int round = 0; round < 500; round++) {
        rft_piece pieces[64];
        uint32_t count = cut_pieces(&seed, pieces, 64);
        rft_plan plan;
        rft_plan_limits limits =
            limits_of(64, ROOM, 1 + seeded_next(&seed) % 300, 1 + (uint32_t)(round % 5));
        limits.batch_bytes = round % 3 == 0 ? 1 + seeded_next(&seed) % 300 : 0;
        assert_ok(rft_plan_open(&plan, &limits, NULL));
        assert_ok(rft_plan_fill(&plan, pieces, count, NULL));
        memset(target, 0x55, sizeof target);
        carry_out(&plan);
        uint64_t bytes = 0;
        for (uint32_t i = 0; i < count; i++) {
            static const char zeros[200];
            const void *expected = pieces[i].from == NULL ? zeros : pieces[i].from;
            assert_memory_equal(pieces[i].to, expected, pieces[i].bytes);
            bytes += pieces[i].bytes;
        }
        assert_int_equal(plan.bytes, bytes);
        rft_plan_close(&plan);
    }
}

/* A piece, or a copy, by its places in `target` and `source`; ZERO: it has no source. */
typedef struct part {
    int to;
    int from;
    uint64_t bytes;
    uint32_t group;
    uint32_t slab;  /* of a piece */
    int allocation; /* of a piece: the number of its allocation */
    uint32_t slack; /* bytes after it */
    bool known_memory;
} part;

#define ZERO (-1)
#define PART(place, start, length)                                                                 \
    {                                                                                              \
        .to = (place), .from = (start), .bytes = (length)                                          \
    }
#define PART_WITH(place, start, length, more)                                                      \
    {                                                                                              \
        .to = (place), .from = (start), .bytes = (length), more                                    \
    }

typedef struct plan_case {
    const char *name;
    struct {
        uint64_t piece_bytes;
        uint32_t batch_most;
        uint64_t batch_bytes; /* 0: no bound */
        uint32_t batches;     /* there are */
    } in;
    part pieces[4]; /* up to one of no bytes */
    part copies[5];
} plan_case;

static const plan_case plans[] = {
    {"neighbours on both sides are joined, on one side they are not",
     {1000, 16, 0, 1},
     {PART(0, 0, 100), PART(100, 100, 50), PART(150, 200, 50), PART(300, 250, 50)},
     {PART(0, 0, 150), PART(150, 200, 50), PART(300, 250, 50)}},
    {"no copy lies across two slabs",
     {1000, 16, 0, 1},
     {PART(0, 0, 100), PART(100, 100, 50), PART_WITH(150, 150, 50, .slab = 1)},
     {PART(0, 0, 150), PART(150, 150, 50)}},
    {"no copy lies across two allocations",
     {1000, 16, 0, 2},
     {PART(0, 0, 100), PART_WITH(100, 100, 50, .allocation = 1), PART(150, ZERO, 50),
      PART_WITH(200, ZERO, 50, .allocation = 1)},
     {PART(0, 0, 100), PART(100, 100, 50), PART(150, ZERO, 50), PART(200, ZERO, 50)}},
    {"a piece of known memory is not joined to one of unknown memory",
     {1000, 16, 0, 1},
     {PART_WITH(0, 0, 100, .known_memory = true), PART(100, 100, 50)},
     {PART_WITH(0, 0, 100, .known_memory = true), PART(100, 100, 50)}},
    /* After a run lies what is after its last piece; after a part of it lies the next part. */
    {"slack stays behind the last copy of a run",
     {100, 16, 0, 1},
     {PART(0, 0, 100), PART_WITH(100, 100, 50, .slack = 50), PART_WITH(200, 200, 50, .slack = 7)},
     {PART(0, 0, 100), PART_WITH(100, 100, 50, .slack = 50), PART_WITH(200, 200, 50, .slack = 7)}},
    {"a batch is bounded in bytes",
     {1000, 16, 300, 4},
     {PART(0, 0, 1000)},
     {PART(0, 0, 300), PART(300, 300, 300), PART(600, 600, 300), PART(900, 900, 100)}},
    {"groups are never mixed",
     {1000, 16, 0, 3},
     {PART(0, 0, 100), PART_WITH(100, 100, 50, .group = 1), PART_WITH(150, ZERO, 50, .group = 1)},
     {PART(0, 0, 100), PART_WITH(100, 100, 50, .group = 1), PART_WITH(150, ZERO, 50, .group = 1)}},
    {"a huge piece is cut",
     {250, 2, 0, 3},
     {PART(0, 0, 1001)},
     {PART(0, 0, 250), PART(250, 250, 250), PART(500, 500, 250), PART(750, 750, 250),
      PART(1000, 1000, 1)}},
};

static const char *source_of(const part *it)
{
    return it->from == ZERO ? NULL : source + it->from;
}

static uint32_t lay_pieces(const plan_case *it, rft_piece *pieces, uint64_t *bytes)
{
    uint32_t count = 0;
    *bytes = 0;
    for (; count < 4 && it->pieces[count].bytes != 0; count++) {
        const part *piece = &it->pieces[count];
        pieces[count] = piece_of(target + piece->to, source_of(piece), piece->bytes, piece->group);
        pieces[count].slab = piece->slab;
        pieces[count].allocation = piece->allocation == 0 ? target : source;
        pieces[count].slack = piece->slack;
        pieces[count].known_memory = piece->known_memory;
        *bytes += piece->bytes;
    }
    return count;
}

static uint32_t count_copies(const plan_case *it)
{
    uint32_t count = 0;
    while (count < 5 && it->copies[count].bytes != 0)
        count++;
    return count;
}

/* Has the batch the copies of the case, all of one group? */
static bool batch_is_right(const plan_case *it, const rft_plan *plan, const rft_batch *batch)
{
    uint64_t bytes = 0;
    bool right = true;
    for (uint32_t i = batch->first; i < batch->first + batch->count; i++) {
        const part *wanted = &it->copies[i];
        const rft_copy *copy = &plan->copies[i];
        right = right && copy->to == target + wanted->to && copy->from == source_of(wanted) &&
                copy->bytes == wanted->bytes && copy->slack == wanted->slack &&
                copy->known_memory == wanted->known_memory && batch->group == wanted->group;
        bytes += copy->bytes;
    }
    return right && batch->bytes == bytes;
}

TEST(pieces_become_these_copies)
{
    for (size_t i = 0; i < COUNT_OF(plans); i++) {
        const plan_case *it = &plans[i];
        rft_piece pieces[4];
        uint64_t bytes;
        uint32_t count = lay_pieces(it, pieces, &bytes);
        rft_plan plan;
        rft_plan_limits limits = limits_of(count, bytes, it->in.piece_bytes, it->in.batch_most);
        limits.batch_bytes = it->in.batch_bytes;
        assert_ok(rft_plan_open(&plan, &limits, NULL));
        assert_ok(rft_plan_fill(&plan, pieces, count, NULL));
        bool right = plan.copy_count == count_copies(it) && plan.batch_count == it->in.batches;
        for (uint32_t at = 0; right && at < plan.batch_count; at++)
            right = batch_is_right(it, &plan, &plan.batches[at]);
        if (!right) {
            fail_msg("%s: %u copies in %u batches", it->name, plan.copy_count, plan.batch_count);
        }
        assert_true(plan.copy_count <= plan.copy_room);
        rft_plan_close(&plan);
    }
}

TEST(there_is_room_for_the_copies_of_a_huge_piece)
{
    rft_plan plan = open_plan(1, 1001, 250, 2);
    assert_int_equal(plan.copy_room, 5);
    rft_plan_close(&plan);
}

TEST(filling_again_allocates_nothing)
{
    rft_piece piece = piece_of(target, source, 1000, 0);
    rft_plan plan = open_plan(4, 4000, 100, 3);
    uint64_t before = rft_alloc_count();
    for (int i = 0; i < 10; i++) {
        piece.to = target + i;
        assert_ok(rft_plan_fill(&plan, &piece, 1, NULL));
        assert_ptr_equal(plan.copies[0].to, target + i);
        assert_int_equal(plan.copy_count, 10);
    }
    assert_int_equal(rft_alloc_count(), before);
    rft_plan_close(&plan);
}

TEST(more_than_it_was_opened_for_is_refused)
{
    rft_piece pieces[] = {piece_of(target, source, 100, 0), piece_of(target + 200, source, 100, 0)};
    rft_plan plan = open_plan(1, 200, 1000, 16);
    assert_int_equal(rft_plan_fill(&plan, pieces, 2, NULL), REFIT_ERR_LIMIT);
    assert_int_equal(plan.copy_count, 0);
    pieces[0].bytes = 201;
    assert_int_equal(rft_plan_fill(&plan, pieces, 1, NULL), REFIT_ERR_LIMIT);
    rft_plan_close(&plan);
    plan = open_plan(2, UINT64_MAX, UINT64_MAX, 16);
    pieces[0].bytes = UINT64_MAX;
    assert_int_equal(rft_plan_fill(&plan, pieces, 2, NULL), REFIT_ERR_LIMIT);
    rft_plan_close(&plan);
}

TEST(plans_that_cannot_be_are_refused)
{
    rft_plan plan;
    assert_invalid(try_plan(&plan, 1, 1, 0, 1));
    assert_invalid(try_plan(&plan, 1, 1, 1, 0));
    assert_int_equal(try_plan(&plan, 1, UINT64_MAX, 1, 1), REFIT_ERR_LIMIT);
    assert_int_equal(try_plan(&plan, UINT32_MAX, 64, 64, 1), REFIT_ERR_LIMIT);
}

TEST(plan_of_nothing_is_empty)
{
    rft_piece none = piece_of(target, source, 0, 0);
    rft_plan plan = open_plan(0, 0, 64, 1);
    assert_ok(rft_plan_fill(&plan, NULL, 0, NULL));
    assert_int_equal(plan.batch_count, 0);
    rft_plan_close(&plan);
    plan = open_plan(1, 0, 64, 1);
    assert_ok(rft_plan_fill(&plan, &none, 1, NULL));
    assert_int_equal(plan.copy_count, 0);
    rft_plan_close(&plan);
}

TEST(every_failed_allocation_is_an_error)
{
    for (uint64_t nth = 1;; nth++) {
        rft_plan plan;
        failing_alloc_begin(nth);
        refit_status status = try_plan(&plan, 4, 4000, 100, 3);
        if (status == REFIT_OK) rft_plan_close(&plan);
        if (!failing_alloc_end()) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
}

/* Neighbours that would be one copy, were they moved as they are. */
TEST(each_stretch_of_a_master_is_a_batch_of_its_own)
{
    rft_recode recodes[2] = {{.out = true}, {.out = true}};
    rft_piece pieces[5];
    rft_plan plan = open_plan(5, 1000, 64, 2);
    for (uint32_t i = 0; i < 5; i++) {
        pieces[i] = piece_of(target + 100 * i, source + 100 * i, 100, 3);
        if (i >= 1 && i <= 3) pieces[i].recode = &recodes[i == 3];
    }
    assert_ok(rft_plan_fill(&plan, pieces, 5, NULL));
    static const uint32_t counts[] = {2, 4, 2, 2};
    assert_int_equal(plan.batch_count, 4);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(plan.batches[i].count, counts[i]);
        assert_int_equal(plan.batches[i].bytes, i == 1 ? 200 : 100);
        assert_int_equal(plan.batches[i].group, 3);
    }
    assert_null(plan.batches[0].recode);
    assert_ptr_equal(plan.batches[1].recode, &recodes[0]);
    assert_ptr_equal(plan.batches[2].recode, &recodes[1]);
    assert_null(plan.batches[3].recode);
    assert_int_equal(plan.bytes, 500);
    rft_plan_close(&plan);
}

int main(void)
{
    return test_run("plan");
}
