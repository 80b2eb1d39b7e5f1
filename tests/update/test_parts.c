/* Parts of tensors are copied to the engine's GPU by one call: bits, bounds, failures, from the
 * trainer's memory there and from the host. */
#include <stdlib.h>

#include <refit/broadcast.h>

#include "base/thread.h"
#include "kernels/cast.h"
#include "store/copy_queue.h"
#include "tests/fake_cuda/fake_cuda.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

#define LONG_MS   20000u
#define UNTOUCHED 0xEE

enum { FLOATS, BYTES, HALVES, NOTHING, TENSORS };

static const refit_tensor tensors[TENSORS] = {
    {sizeof(refit_tensor), "floats", REFIT_F32, 3, {4, 6, 5}, 480, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "bytes", REFIT_U8, 2, {400, 1000}, 400000, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "halves", REFIT_F4, 1, {10}, 5, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "nothing", REFIT_F32, 2, {0, 5}, 0, REFIT_NO_ALIAS},
};

#define PLACE_BYTES 400384u /* of one tensor, in all memories here */
#define WHOLE_BYTES (TENSORS * PLACE_BYTES)
#define ROOM_BYTES  (400000u + 4096u) /* of the engine */

/* A trainer on a GPU, and a worker there or on another one, which reads host memory. */
typedef struct scene {
    bool lends;
    refit_device *device, *theirs;
    refit_publisher *publisher;
    refit_subscriber *subscriber;
    refit_update *update;
    rft_thread thread;
    refit_status committed;
    unsigned char *image; /* what the version has, on the host */
    unsigned char *lent;  /* the same on the trainer's GPU */
    unsigned char *room;  /* the engine's, on its GPU */
} scene;

static void *commit(void *user)
{
    scene *it = user;
    it->committed = refit_publisher_commit(it->publisher, NULL);
    return NULL;
}

static void open_ends(scene *it, void (*change)(refit_config *config))
{
    refit_config config = quick_config();
    void *lent = NULL, *room = NULL;
    if (change != NULL) change(&config);
    assert_ok(refit_device_open("cuda:0", NULL, &it->device, NULL));
    assert_ok(refit_device_open(it->lends ? "cuda:0" : "cuda:1", NULL, &it->theirs, NULL));
    assert_ok(refit_publisher_open("inproc://parts", &config, &it->publisher, NULL));
    if (it->lends) assert_ok(refit_publisher_use_device(it->publisher, it->device, NULL));
    assert_ok(refit_publisher_declare(it->publisher, tensors, TENSORS, NULL));
    assert_ok(refit_subscriber_open("inproc://parts", &config, &it->subscriber, NULL));
    assert_ok(refit_subscriber_use_device(it->subscriber, it->theirs, NULL));
    assert_ok(refit_publisher_wait_workers(it->publisher, 1, LONG_MS, NULL));
    refit_stats stats = {.size = sizeof stats};
    while (it->lends && stats.workers_gpu == 0) {
        assert_ok(refit_publisher_wait_workers(it->publisher, 1, LONG_MS, NULL));
        assert_ok(refit_publisher_stats(it->publisher, &stats, NULL));
    }
    assert_ok(refit_memory_alloc(it->device, WHOLE_BYTES, &lent, NULL));
    assert_ok(refit_memory_alloc(it->theirs, ROOM_BYTES, &room, NULL));
    it->lent = lent;
    it->room = room;
}

static void fill_image(scene *it, uint64_t version)
{
    uint32_t state = (uint32_t)version * 2654435761u + 12345;
    for (uint32_t i = 0; i < WHOLE_BYTES; i++) {
        state = state * 1664525u + 1013904223u;
        it->image[i] = (unsigned char)(state >> 24);
    }
}

static void offer(scene *it, uint64_t version)
{
    refit_weight weights[TENSORS];
    fill_image(it, version);
    assert_ok(
        refit_stream_copy(it->device, REFIT_STREAM_NONE, it->lent, it->image, WHOLE_BYTES, NULL));
    for (uint32_t i = 0; i < TENSORS; i++)
        weights[i] = (refit_weight){i, (it->lends ? it->lent : it->image) + i * PLACE_BYTES,
                                    tensors[i].bytes};
    assert_ok(refit_publisher_begin(it->publisher, version, NULL));
    if (it->lends)
        assert_ok(refit_publisher_lend(it->publisher, weights, TENSORS, it->device,
                                       REFIT_STREAM_NONE, NULL));
    else
        assert_ok(refit_publisher_write_all(it->publisher, weights, TENSORS, NULL,
                                            REFIT_STREAM_NONE, NULL));
    assert_ok(rft_thread_start(&it->thread, "commit", commit, it, NULL));
    assert_ok(refit_subscriber_next(it->subscriber, LONG_MS, &it->update, NULL));
    assert_int_equal(refit_update_device(it->update) != NULL, it->lends);
}

static void decide(scene *it, bool accepts)
{
    if (accepts) assert_ok(refit_update_accept(it->update, NULL));
    if (!accepts) assert_ok(refit_update_refuse(it->update, "no", 0, NULL));
    refit_update_close(it->update);
    rft_thread_join(it->thread);
    assert_int_equal(it->committed, accepts ? REFIT_OK : REFIT_ERR_PEER);
}

static scene *scene_open(bool lends, void (*change)(refit_config *config))
{
    scene *it = calloc(1, sizeof *it);
    assert_non_null(it);
    fake_cuda_reset();
    it->lends = lends;
    it->image = calloc(1, WHOLE_BYTES);
    assert_non_null(it->image);
    open_ends(it, change);
    offer(it, 1);
    return it;
}

static void scene_close(scene *it, bool accepts)
{
    decide(it, accepts);
    refit_subscriber_close(it->subscriber);
    refit_publisher_close(it->publisher);
    assert_ok(refit_memory_free(it->device, it->lent, NULL));
    assert_ok(refit_memory_free(it->theirs, it->room, NULL));
    assert_ok(refit_device_close(it->theirs, NULL));
    assert_ok(refit_device_close(it->device, NULL));
    assert_int_equal(fake_cuda_leaks(), 0);
    assert_string_equal(fake_cuda_violation(), "");
    free(it->image);
    free(it);
}

/* ---- Parts, and what they must come to */

/* One part, which goes `at` bytes into the room. */
typedef struct piece {
    uint32_t tensor;
    uint64_t at;
    refit_box box;
} piece;

static uint64_t width_of(refit_dtype dtype)
{
    return refit_dtype_bits(dtype) / 8;
}

static refit_target target_of(const scene *it, const piece *one)
{
    uint64_t reach = 1;
    for (uint32_t i = 0; i < one->box.rank && i < COUNT_OF(one->box.shape); i++)
        reach += (one->box.shape[i] - 1) * one->box.to_strides[i];
    return (refit_target){one->tensor, it->room + one->at, reach * width_of(one->box.dtype),
                          &one->box};
}

/* Element by element. */
static void copy_here(const scene *it, const piece *one, unsigned char *room)
{
    const refit_box *box = &one->box;
    uint64_t count = 1, from_width = width_of(tensors[one->tensor].dtype);
    for (uint32_t i = 0; i < box->rank; i++)
        count *= box->shape[i];
    for (uint64_t number = 0; number < count; number++) {
        uint64_t left = number, from = box->offset, to = 0;
        for (uint32_t i = box->rank; i-- > 0; left /= box->shape[i]) {
            from += left % box->shape[i] * box->from_strides[i];
            to += left % box->shape[i] * box->to_strides[i];
        }
        const unsigned char *source = it->image + one->tensor * PLACE_BYTES + from * from_width;
        unsigned char *place = room + one->at + to * width_of(box->dtype);
        if (box->dtype == tensors[one->tensor].dtype) {
            memcpy(place, source, from_width);
        } else {
            float element;
            uint16_t cast;
            memcpy(&element, source, sizeof element);
            rft_cast_bf16(&cast, &element, 1);
            memcpy(place, &cast, sizeof cast);
        }
    }
}

static void clear_room(const scene *it)
{
    static unsigned char bytes[ROOM_BYTES];
    memset(bytes, UNTOUCHED, ROOM_BYTES);
    assert_ok(refit_stream_copy(it->theirs, REFIT_STREAM_NONE, it->room, bytes, ROOM_BYTES, NULL));
}

static void expect_room(const scene *it, const unsigned char *expected)
{
    static unsigned char found[ROOM_BYTES];
    assert_ok(refit_stream_copy(it->theirs, REFIT_STREAM_NONE, found, it->room, ROOM_BYTES, NULL));
    assert_memory_equal(found, expected, ROOM_BYTES);
}

static refit_status copy_all(const scene *it, const piece *pieces, uint32_t count,
                             refit_error *error)
{
    refit_target *list = calloc(count, sizeof *list);
    assert_non_null(list);
    for (uint32_t i = 0; i < count; i++)
        list[i] = target_of(it, &pieces[i]);
    refit_status status = refit_update_copy(it->update, list, count, REFIT_STREAM_NONE, error);
    free(list);
    return status;
}

static void check_pieces(const scene *it, const piece *pieces, uint32_t count)
{
    static unsigned char expected[ROOM_BYTES];
    memset(expected, UNTOUCHED, ROOM_BYTES);
    clear_room(it);
    for (uint32_t i = 0; i < count; i++)
        copy_here(it, &pieces[i], expected);
    assert_done(copy_all(it, pieces, count, error));
    expect_room(it, expected);
}

#define BOX(dtype, rank, ...)                                                                      \
    {                                                                                              \
        (dtype), (rank), __VA_ARGS__                                                               \
    }

static const piece pieces[] = {
    /* A row, rows, and rows at odd addresses and steps. */
    {FLOATS, 0, BOX(REFIT_F32, 1, {5}, 7, {1}, {1})},
    {BYTES, 4001, BOX(REFIT_U8, 2, {31, 17}, 1003, {1000, 1}, {29, 1})},
    {BYTES, 9001, BOX(REFIT_U8, 2, {400, 3}, 997, {1000, 1}, {3, 1})},
    {FLOATS, 12003, BOX(REFIT_F32, 2, {6, 2}, 33, {5, 1}, {3, 1})},
    /* Three dimensions and four, some of one element, and some that go on from one another. */
    {FLOATS, 14001, BOX(REFIT_F32, 3, {2, 3, 4}, 31, {60, 10, 1}, {40, 9, 1})},
    {BYTES, 16001, BOX(REFIT_U8, 4, {2, 3, 4, 5}, 11, {20000, 2000, 10, 1}, {500, 100, 7, 1})},
    {FLOATS, 20000, BOX(REFIT_F32, 3, {4, 6, 5}, 0, {30, 5, 1}, {30, 5, 1})},
    {FLOATS, 21001, BOX(REFIT_F32, 3, {3, 1, 5}, 5, {30, 77, 1}, {5, 99, 1})},
    {BYTES, 30000, BOX(REFIT_U8, 2, {40, 1000}, 200000, {1000, 1}, {1000, 1})},
    {FLOATS, 22000, BOX(REFIT_F32, 2, {1, 1}, 119, {3, 8}, {2, 4})},
    /* What comes later stays. */
    {FLOATS, 4, BOX(REFIT_F32, 1, {2}, 100, {1}, {1})},
};

TEST(parts_are_copied_bit_for_bit_with_one_wait)
{
    for (int lends = 0; lends < 2; lends++) {
        scene *it = scene_open(lends, NULL);
        assert_done(copy_all(it, pieces, COUNT_OF(pieces), error)); /* page-locks */
        uint64_t waits = fake_cuda_calls("cuEventRecord");
        assert_done(copy_all(it, pieces, COUNT_OF(pieces), error));
        assert_int_equal(fake_cuda_calls("cuEventRecord"), waits + 1);
        check_pieces(it, pieces, COUNT_OF(pieces));
        for (uint32_t i = 0; i < COUNT_OF(pieces); i++)
            check_pieces(it, &pieces[i], 1);
        scene_close(it, true);
    }
}

/* Rows that lie apart are one copy of the driver's, however many there are. */
TEST(rows_are_one_copy)
{
    scene *it = scene_open(true, NULL);
    uint64_t rows = fake_cuda_calls("cuMemcpy2DAsync"), single = fake_cuda_calls("cuMemcpyAsync");
    assert_done(copy_all(it, &pieces[2], 1, error));
    assert_int_equal(fake_cuda_calls("cuMemcpy2DAsync"), rows + 1);
    assert_done(copy_all(it, &pieces[5], 1, error)); /* two times three of them */
    assert_int_equal(fake_cuda_calls("cuMemcpy2DAsync"), rows + 7);
    assert_int_equal(fake_cuda_calls("cuMemcpyAsync"), single + 4); /* digests */
    assert_done(copy_all(it, &pieces[8], 1, error));                /* goes on from row to row */
    assert_int_equal(fake_cuda_calls("cuMemcpy2DAsync"), rows + 7);
    scene_close(it, true);
}

static void small_slabs(refit_config *config)
{
    config->offload_slab_bytes = 64 * 1024;
    config->offload_piece_bytes = 64 * 1024;
}

/* Rows of which some lie across two page-locked pieces of the version's memory. */
TEST(rows_on_the_host_may_lie_across_two_page_locks)
{
    const piece some[] = {
        {BYTES, 1, BOX(REFIT_U8, 2, {400, 999}, 1, {1000, 1}, {1000, 1})},
        {BYTES, 0, BOX(REFIT_U8, 2, {400, 2}, 0, {1000, 1}, {1000, 1})},
    };
    scene *it = scene_open(false, small_slabs);
    check_pieces(it, some, COUNT_OF(some));
    assert_true(fake_cuda_calls("cuMemHostRegister") > 1);
    scene_close(it, true);
}

TEST(rows_are_copied_where_nothing_can_be_page_locked)
{
    scene *it = scene_open(false, NULL);
    fake_cuda_fail("cuMemHostRegister", 1, 1000, RFT_CU_OUT_OF_MEMORY);
    check_pieces(it, pieces, COUNT_OF(pieces));
    fake_cuda_forget_faults();
    scene_close(it, true);
}

TEST(fp32_becomes_bf16_on_the_way)
{
    const piece some[] = {
        {FLOATS, 0, BOX(REFIT_BF16, 1, {60}, 0, {1}, {1})},
        {FLOATS, 120, BOX(REFIT_BF16, 2, {4, 15}, 60, {15, 1}, {15, 1})},
        {FLOATS, 1001, BOX(REFIT_BF16, 1, {7}, 3, {1}, {1})}, /* at an odd address */
        {FLOATS, 2000, BOX(REFIT_F32, 2, {3, 5}, 0, {30, 1}, {5, 1})},
    };
    scene *it = scene_open(true, NULL);
    check_pieces(it, some, COUNT_OF(some));
    scene_close(it, true);
}

/* A whole tensor stands among the parts, and its digest is that of the copy. */
TEST(whole_tensors_and_parts_go_together)
{
    static unsigned char expected[ROOM_BYTES];
    scene *it = scene_open(true, NULL);
    const refit_target list[] = {
        target_of(it, &pieces[4]),
        {FLOATS, it->room + 512, tensors[FLOATS].bytes, NULL},
        target_of(it, &pieces[2]),
        {NOTHING, NULL, 0, NULL},
        {HALVES, it->room + 1024, tensors[HALVES].bytes, NULL},
    };
    clear_room(it);
    memset(expected, UNTOUCHED, ROOM_BYTES);
    copy_here(it, &pieces[4], expected);
    memcpy(expected + 512, it->image + FLOATS * PLACE_BYTES, tensors[FLOATS].bytes);
    copy_here(it, &pieces[2], expected);
    memcpy(expected + 1024, it->image + HALVES * PLACE_BYTES, tensors[HALVES].bytes);
    assert_done(refit_update_copy(it->update, list, COUNT_OF(list), REFIT_STREAM_NONE, error));
    expect_room(it, expected);
    scene_close(it, true);
}

/* ---- Refused */

typedef struct wrong_piece {
    refit_status status;
    piece it;
} wrong_piece;

#define MOST UINT64_MAX

static const wrong_piece wrong[] = {
    /* Beyond the tensor, by one element and by very many. */
    {REFIT_ERR_INVALID, {FLOATS, 0, BOX(REFIT_F32, 1, {5}, 116, {1}, {1})}},
    {REFIT_ERR_INVALID, {FLOATS, 0, BOX(REFIT_F32, 1, {2}, MOST, {1}, {1})}},
    {REFIT_ERR_INVALID, {FLOATS, 0, BOX(REFIT_F32, 2, {5, 5}, 0, {30, 1}, {5, 1})}},
    {REFIT_ERR_INVALID, {FLOATS, 0, BOX(REFIT_F32, 2, {2, 5}, 0, {MOST, 1}, {5, 1})}},
    {REFIT_ERR_INVALID, {FLOATS, 0, BOX(REFIT_F32, 2, {MOST, 5}, 0, {5, 1}, {9, 1})}},
    {REFIT_ERR_INVALID, {FLOATS, 0, BOX(REFIT_F32, 2, {MOST, 5}, 0, {5, 1}, {5, 1})}},
    {REFIT_ERR_INVALID, {NOTHING, 0, BOX(REFIT_F32, 1, {1}, 0, {1}, {1})}},
    /* Elements that meet, on either side. */
    {REFIT_ERR_INVALID, {FLOATS, 0, BOX(REFIT_F32, 2, {2, 5}, 0, {4, 1}, {5, 1})}},
    {REFIT_ERR_INVALID, {FLOATS, 0, BOX(REFIT_F32, 2, {2, 5}, 0, {5, 1}, {0, 1})}},
    {REFIT_ERR_INVALID, {FLOATS, 0, BOX(REFIT_F32, 2, {2, 5}, 0, {0, 1}, {5, 1})}},
    /* No dimensions or too many, none of a length, no such type. */
    {REFIT_ERR_INVALID, {FLOATS, 0, BOX(REFIT_F32, 0, {1}, 0, {1}, {1})}},
    {REFIT_ERR_INVALID, {FLOATS, 0, BOX(REFIT_F32, 5, {1}, 0, {1}, {1})}},
    {REFIT_ERR_INVALID, {FLOATS, 0, BOX((refit_dtype)99, 1, {1}, 0, {1}, {1})}},
    {REFIT_ERR_INVALID, {FLOATS, 0, BOX((refit_dtype)0, 1, {1}, 0, {1}, {1})}},
    /* No rows, other types, elements that are not whole bytes. */
    {REFIT_ERR_UNSUPPORTED, {FLOATS, 0, BOX(REFIT_F32, 1, {3}, 0, {2}, {1})}},
    {REFIT_ERR_UNSUPPORTED, {FLOATS, 0, BOX(REFIT_F32, 2, {5, 6}, 0, {1, 5}, {6, 1})}},
    {REFIT_ERR_UNSUPPORTED, {BYTES, 0, BOX(REFIT_U8, 2, {400, 1}, 0, {1000, 1}, {1, 1})}},
    {REFIT_ERR_UNSUPPORTED, {FLOATS, 0, BOX(REFIT_F16, 1, {3}, 0, {1}, {1})}},
    {REFIT_ERR_UNSUPPORTED, {FLOATS, 0, BOX(REFIT_BF16, 2, {2, 3}, 0, {5, 1}, {3, 1})}},
    {REFIT_ERR_UNSUPPORTED, {BYTES, 0, BOX(REFIT_BF16, 1, {3}, 0, {1}, {1})}},
    {REFIT_ERR_UNSUPPORTED, {HALVES, 0, BOX(REFIT_F4, 1, {2}, 0, {1}, {1})}},
};

/* Each after one that is good, of which nothing is copied either. */
static void refuse(const scene *it, refit_target bad, refit_status status)
{
    refit_error error;
    const refit_target both[] = {target_of(it, &pieces[0]), bad};
    uint64_t launches = fake_cuda_calls("cuLaunchKernel");
    assert_int_equal(refit_update_copy(it->update, both, 2, REFIT_STREAM_NONE, &error), status);
    assert_true(strlen(error.text) > 0);
    assert_int_equal(fake_cuda_calls("cuLaunchKernel"), launches);
}

TEST(what_is_no_part_is_refused_before_the_first_byte)
{
    static unsigned char expected[ROOM_BYTES];
    memset(expected, UNTOUCHED, ROOM_BYTES);
    for (int lends = 0; lends < 2; lends++) {
        scene *it = scene_open(lends, NULL);
        clear_room(it);
        for (uint32_t i = 0; i < COUNT_OF(wrong); i++) {
            refit_target bad = {wrong[i].it.tensor, it->room, 4096, &wrong[i].it.box};
            refit_target fits = target_of(it, &wrong[i].it);
            if (fits.bytes <= ROOM_BYTES) bad.bytes = fits.bytes;
            refuse(it, bad, wrong[i].status);
        }
        refit_target bad = target_of(it, &pieces[4]);
        bad.bytes++;
        refuse(it, bad, REFIT_ERR_INVALID);
        bad = target_of(it, &pieces[4]);
        bad.memory = &bad; /* host memory */
        refuse(it, bad, REFIT_ERR_INVALID);
        bad.memory = it->room + (1 << 30);
        refuse(it, bad, REFIT_ERR_INVALID);
        bad = target_of(it, &pieces[4]);
        bad.tensor = TENSORS;
        refuse(it, bad, REFIT_ERR_INVALID);
        expect_room(it, expected);
        check_pieces(it, pieces, COUNT_OF(pieces)); /* nothing had begun */
        scene_close(it, true);
    }
}

static uint64_t next_random(uint64_t *state, uint64_t below)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (*state >> 33) % below;
}

static piece random_piece(uint64_t *state)
{
    piece one = {FLOATS, 4 * next_random(state, 100), {.dtype = REFIT_F32}};
    uint64_t from = 1, to = 1;
    one.box.rank = 1 + (uint32_t)next_random(state, REFIT_BOX_RANK_MAX);
    one.box.offset = next_random(state, 130);
    for (uint32_t i = one.box.rank; i-- > 0;) {
        one.box.shape[i] = 1 + next_random(state, 4);
        one.box.from_strides[i] = next_random(state, 6) == 0 ? next_random(state, 40) : from;
        one.box.to_strides[i] = next_random(state, 6) == 0 ? next_random(state, 40) : to;
        from = one.box.from_strides[i] * one.box.shape[i] + next_random(state, 2);
        to = one.box.to_strides[i] * one.box.shape[i] + next_random(state, 2);
    }
    return one;
}

/* Element by element: whether all are within the tensor. */
static bool is_within(const piece *one)
{
    uint64_t last = one->box.offset;
    for (uint32_t i = 0; i < one->box.rank; i++)
        last += (one->box.shape[i] - 1) * one->box.from_strides[i];
    return last < 120;
}

TEST(random_parts_are_copied_bit_for_bit_or_refused)
{
    uint64_t seed = 7;
    uint32_t copied = 0;
    scene *it = scene_open(true, NULL);
    for (uint32_t i = 0; i < 2000; i++) {
        refit_error error;
        const piece one = random_piece(&seed);
        refit_status status = copy_all(it, &one, 1, &error);
        if (status == REFIT_OK) {
            assert_true(is_within(&one));
            if (copied++ % 8 == 0) check_pieces(it, &one, 1);
        } else {
            assert_true(status == REFIT_ERR_INVALID || status == REFIT_ERR_UNSUPPORTED);
        }
    }
    assert_in_range(copied, 400, 1600);
    scene_close(it, true);
}

TEST(fp32_on_the_host_is_not_converted)
{
    scene *it = scene_open(false, NULL);
    const piece one = {FLOATS, 0, BOX(REFIT_BF16, 1, {60}, 0, {1}, {1})};
    refuse(it, target_of(it, &one), REFIT_ERR_UNSUPPORTED);
    scene_close(it, true);
}

/* ---- Digests, and failures under way */

/* In the part, and elsewhere in its tensor. */
TEST(tensors_that_change_while_parts_of_them_are_read_are_found_out)
{
    const uint64_t places[] = {7 * 4, 479};
    for (uint32_t i = 0; i < COUNT_OF(places); i++) {
        refit_error error;
        unsigned char *at, other;
        scene *it = scene_open(true, NULL);
        at = it->lent + FLOATS * PLACE_BYTES + places[i];
        other = (unsigned char)(it->image[FLOATS * PLACE_BYTES + places[i]] + 1);
        assert_ok(refit_stream_copy(it->device, REFIT_STREAM_NONE, at, &other, 1, NULL));
        assert_int_equal(copy_all(it, &pieces[2], 1, &error), REFIT_OK); /* of another tensor */
        assert_int_equal(copy_all(it, pieces, 1, &error), REFIT_ERR_CORRUPT);
        assert_non_null(strstr(error.text, "'floats' was changed by the trainer"));
        assert_int_equal(refit_update_accept(it->update, NULL), REFIT_ERR_STATE);
        scene_close(it, false);
    }
}

/* Of one tensor; then of two in turn, where each part has a digest of its own. */
TEST(parts_of_one_tensor_have_one_digest)
{
    static piece many[2 * RFT_DIGEST_BATCH_MOST];
    scene *it = scene_open(true, NULL);
    for (uint32_t i = 0; i < COUNT_OF(many); i++)
        many[i] = (piece){BYTES, i, BOX(REFIT_U8, 1, {1}, i * 7, {1}, {1})};
    check_pieces(it, many, COUNT_OF(many));
    uint64_t waits = fake_cuda_calls("cuEventRecord"), kernels = fake_cuda_calls("cuLaunchKernel");
    assert_done(copy_all(it, many, COUNT_OF(many), error));
    assert_int_equal(fake_cuda_calls("cuEventRecord"), waits + 1);
    assert_int_equal(fake_cuda_calls("cuLaunchKernel"), kernels + 1);
    for (uint32_t i = 0; i < COUNT_OF(many); i += 2)
        many[i] = (piece){FLOATS, 4 * i, BOX(REFIT_F32, 1, {1}, i % 120, {1}, {1})};
    check_pieces(it, many, COUNT_OF(many));
    waits = fake_cuda_calls("cuEventRecord");
    assert_done(copy_all(it, many, COUNT_OF(many), error));
    assert_int_equal(fake_cuda_calls("cuEventRecord"), waits + 2);
    scene_close(it, true);
}

typedef struct failing_call {
    bool lends;
    const char *call;
    uint32_t piece;
    refit_status status;
} failing_call;

TEST(a_part_that_cannot_be_copied_leaves_an_update_that_can_only_be_refused)
{
    const failing_call fails[] = {
        {true, "cuMemcpy2DAsync", 2, REFIT_ERR_COPY},
        {false, "cuMemcpy2DAsync", 2, REFIT_ERR_COPY},
        {true, "cuMemcpyAsync", 0, REFIT_ERR_COPY},
        {true, "cuLaunchKernel", 0, REFIT_ERR_COPY},
    };
    for (uint32_t i = 0; i < COUNT_OF(fails); i++) {
        refit_error error;
        scene *it = scene_open(fails[i].lends, NULL);
        check_pieces(it, pieces, COUNT_OF(pieces));
        fake_cuda_fail(fails[i].call, 1, 1, RFT_CU_INVALID_VALUE);
        refit_status status = copy_all(it, &pieces[fails[i].piece], 1, &error);
        assert_int_not_equal(status, REFIT_OK);
        if (strncmp(fails[i].call, "cuMemcpy", 8) == 0) assert_int_equal(status, fails[i].status);
        assert_int_equal(refit_update_accept(it->update, NULL), REFIT_ERR_STATE);
        scene_close(it, false);
    }
}

int main(void)
{
    return test_run("parts");
}
