/* Malformed coded bytes are refused, or at worst give wrong elements: nothing outside the block is
 * touched, nothing beyond the bytes is read, and all forms agree. */
#include "kernels/delta.h"
#include "tests/kernels/levels.h"
#include "tests/kernels/random_bytes.h"
#include "tests/support/test.h"

#define GUARD ((size_t)64)

static uint64_t seed = 9;

/* A block that is coded, with all planes in use. */
typedef struct coded {
    rft_delta_shape shape;
    size_t bytes;
    unsigned char *before, *out;
    rft_delta_entry entry;
} coded;

/* Steps of 1, of 3, of 30 and across the range, by turns. */
static void move(unsigned char *half, uint32_t turn)
{
    static const unsigned steps[] = {1, 3, 1, 30, 2, 0x2001};
    unsigned bits = half[0] | (unsigned)half[1] << 8;
    bits = (bits & 0x8000u) | ((bits & 0x7FFFu) + steps[turn % 6]) % 0x8000u;
    half[0] = (unsigned char)bits;
    half[1] = (unsigned char)(bits >> 8);
}

static coded open_coded(uint32_t elements, uint32_t width, rft_delta_kind kind, uint32_t every)
{
    coded made = {.shape = {elements, width, kind}, .bytes = (size_t)elements * width};
    made.out = take(rft_delta_bound(made.shape));
    made.before = take_random(made.bytes, &seed);
    unsigned char *after = take_copy(made.before, made.bytes);
    for (uint32_t i = every / 2, turn = 0; i < elements; i += every, turn++) {
        if (kind == RFT_DELTA_HALF) move(after + 2 * (size_t)i, turn);
        if (kind == RFT_DELTA_RAW) after[(size_t)i * width] ^= 1;
    }
    assert_true(rft_delta_encode(made.shape, made.before, after, made.out, &made.entry));
    free(after);
    return made;
}

static void close_coded(const coded *made)
{
    free(made->before);
    free(made->out);
}

/* The result on `planes`, the same at every level; so are the elements, if it is a good one. What
 * lies around the block stays, and the second time changes nothing. */
static bool apply(const coded *made, const rft_delta_entry *entry, const unsigned char *planes)
{
    size_t all = made->bytes + 2 * GUARD;
    unsigned char *room = take(all), *first = take(made->bytes);
    unsigned char *exact = take_copy(planes, entry->total);
    bool result = false;
    for (int level = RFT_CPU_BASE; level <= RFT_CPU_AVX512; level++) {
        memset(room, 0xA5, all);
        memcpy(room + GUARD, made->before, made->bytes);
        rft_cpu_limit((rft_cpu_level)level);
        bool good = rft_delta_apply(made->shape, entry, exact, room + GUARD);
        if (level == RFT_CPU_BASE) {
            result = good;
            memcpy(first, room + GUARD, made->bytes);
        }
        assert_int_equal(good, result);
        for (size_t i = 0; i < GUARD; i++) {
            assert_int_equal(room[i], 0xA5);
            assert_int_equal(room[GUARD + made->bytes + i], 0xA5);
        }
        if (!good) continue;
        assert_memory_equal(room + GUARD, first, made->bytes);
        assert_true(rft_delta_apply(made->shape, entry, exact, room + GUARD));
        assert_memory_equal(room + GUARD, first, made->bytes);
    }
    free(room);
    free(first);
    free(exact);
    return result;
}

static size_t plane_at(const coded *made, rft_delta_plane plane)
{
    size_t at = 0;
    for (uint32_t i = 0; i < (uint32_t)plane; i++)
        at += made->entry.bytes[i];
    return at;
}

static coded every_kind(uint32_t i)
{
    static const rft_delta_shape shapes[] = {
        {1000, 2, RFT_DELTA_HALF}, {61, 2, RFT_DELTA_HALF},  {5000, 2, RFT_DELTA_HALF},
        {999, 1, RFT_DELTA_RAW},   {1000, 4, RFT_DELTA_RAW}, {100, 8, RFT_DELTA_RAW},
    };
    static const uint32_t every[] = {3, 2, 5, 70, 9, 40};
    return open_coded(shapes[i].elements, shapes[i].width, shapes[i].kind, every[i]);
}
#define EVERY_KIND 6u

TEST(wrong_counts_are_refused)
{
    for (uint32_t i = 0; i < EVERY_KIND; i++) {
        coded made = every_kind(i);
        assert_true(apply(&made, &made.entry, made.out));
        uint32_t *counts[] = {&made.entry.changed, &made.entry.escapes, &made.entry.far,
                              &made.entry.values};
        for (uint32_t k = 0; k < 4; k++) {
            uint32_t right = *counts[k];
            const uint32_t wrong[] = {right + 1, right - 1, 0, 65536, 65537, UINT32_MAX};
            for (uint32_t w = 0; w < 6; w++) {
                if (wrong[w] == right) continue;
                *counts[k] = wrong[w];
                assert_false(rft_delta_apply(made.shape, &made.entry, made.out, made.before));
            }
            *counts[k] = right;
        }
        close_coded(&made);
    }
}

/* Counts that lie are measured with more bytes after the planes, so that they may seem to fit. */
TEST(wrong_counts_stay_within_the_block)
{
    for (uint32_t i = 0; i < EVERY_KIND; i++) {
        coded made = every_kind(i);
        size_t room = made.entry.total + 4096;
        unsigned char *longer = take(room);
        memset(longer, (int)i * 0x33, room);
        memcpy(longer, made.out, made.entry.total);
        for (int more = -2; more <= 2; more++) {
            for (int most = -2; most <= 2; most++) {
                rft_delta_entry entry;
                uint32_t changed = made.entry.changed + (uint32_t)more;
                uint32_t escapes = made.entry.escapes + (uint32_t)most;
                bool seems = rft_delta_measure(made.shape, changed, escapes, longer, room, &entry);
                if (more == 0 && most == 0) assert_true(seems);
                if (seems && (more != 0 || most != 0)) (void)apply(&made, &entry, longer);
                if (seems && more == 0 && most != 0) assert_false(apply(&made, &entry, longer));
            }
        }
        free(longer);
        close_coded(&made);
    }
}

TEST(impossible_counts_are_not_measured)
{
    const unsigned char none[64] = {0};
    const rft_delta_shape half = {20, 2, RFT_DELTA_HALF}, raw = {20, 1, RFT_DELTA_RAW};
    const rft_delta_shape full = {RFT_DELTA_ELEMENTS, 2, RFT_DELTA_HALF};
    rft_delta_entry entry;
    assert_false(rft_delta_measure(half, 0, 0, none, sizeof none, &entry));
    assert_false(rft_delta_measure(half, 21, 0, none, sizeof none, &entry));
    assert_false(rft_delta_measure(half, 3, 4, none, sizeof none, &entry));
    assert_false(rft_delta_measure(raw, 3, 1, none, sizeof none, &entry));
    assert_false(rft_delta_measure(full, 65536, 65536, none, sizeof none, &entry));
    assert_false(rft_delta_measure(half, UINT32_MAX, 0, none, sizeof none, &entry));
    assert_true(rft_delta_measure(raw, 20, 0, none, sizeof none, &entry));
}

/* Every prefix is in memory that ends with it. */
TEST(every_truncation_is_found_out)
{
    for (uint32_t i = 0; i < EVERY_KIND; i++) {
        coded made = every_kind(i);
        for (uint32_t room = 0; room < made.entry.total; room++) {
            unsigned char *exact = take_copy(made.out, room);
            rft_delta_entry entry;
            assert_false(rft_delta_measure(made.shape, made.entry.changed, made.entry.escapes,
                                           exact, room, &entry));
            free(exact);
        }
        close_coded(&made);
    }
}

/* HIGH with one bit too few or too many is found out; of the others what can be is. */
TEST(every_flipped_bit_is_checked_alike)
{
    for (uint32_t i = 0; i < EVERY_KIND; i++) {
        coded made = every_kind(i);
        size_t high = plane_at(&made, RFT_DELTA_HIGH),
               following = plane_at(&made, RFT_DELTA_SYMBOLS);
        for (size_t bit = 0; bit < 8 * (size_t)made.entry.total; bit++) {
            made.out[bit / 8] ^= (unsigned char)(1u << bit % 8);
            bool good = apply(&made, &made.entry, made.out);
            if (bit / 8 >= high && bit / 8 < following) assert_false(good);
            made.out[bit / 8] ^= (unsigned char)(1u << bit % 8);
        }
        close_coded(&made);
    }
}

TEST(random_planes_are_checked_alike)
{
    for (uint32_t round = 0; round < 3000; round++) {
        coded made = every_kind(round % EVERY_KIND);
        for (uint32_t k = 0; k <= round % 7; k++) {
            size_t at = (size_t)seeded_below(&seed, made.entry.total);
            made.out[at] = (unsigned char)(seeded_next(&seed) >> 40);
        }
        rft_delta_entry entry;
        if (rft_delta_measure(made.shape, made.entry.changed, made.entry.escapes, made.out,
                              made.entry.total, &entry)) {
            (void)apply(&made, &entry, made.out);
        }
        close_coded(&made);
    }
}

/* Of 29 elements 2 changed: l is 3, HIGH has 5 bits. */
static bool apply_two(unsigned char low, unsigned char high)
{
    const unsigned char planes[] = {low, high, 7, 8};
    coded made = {.shape = {29, 1, RFT_DELTA_RAW}, .bytes = 29};
    unsigned char block[29] = {0};
    made.before = block;
    rft_delta_entry entry;
    assert_true(rft_delta_measure(made.shape, 2, 0, planes, sizeof planes, &entry));
    assert_int_equal(entry.total, sizeof planes);
    return apply(&made, &entry, planes);
}

TEST(positions_out_of_order_or_range_are_found_out)
{
    assert_true(apply_two(2 | 5 << 3, 0x03));  /* 2 and 5 */
    assert_false(apply_two(5 | 2 << 3, 0x03)); /* 5 and 2 */
    assert_false(apply_two(5 | 5 << 3, 0x03)); /* twice the same */
    assert_true(apply_two(5 | 4 << 3, 0x12));  /* 8 + 5 and 24 + 4, the last one */
    assert_false(apply_two(5 | 5 << 3, 0x12)); /* 24 + 5 is beyond */
    assert_false(apply_two(0, 0x21));          /* an unused bit */
    assert_false(apply_two(0x40, 0x05));       /* an unused bit, too */
    assert_false(apply_two(0, 0x01));          /* one too few */
    assert_false(apply_two(2 << 3, 0x07));     /* one too many */
}

/* Remainders keep within the range, whatever block they are applied to. */
TEST(remainders_stay_in_range_and_settle)
{
    coded made = open_coded(4000, 2, RFT_DELTA_HALF, 5);
    for (size_t i = 0; i < made.bytes; i += 2) { /* the ends of the range: NaNs of both signs */
        made.before[i] = 0xFF;
        made.before[i + 1] = i % 4 == 0 ? 0xFF : 0x7F;
    }
    for (uint32_t round = 0; round < 50; round++) {
        size_t from = plane_at(&made, RFT_DELTA_SYMBOLS);
        for (size_t at = from; at < plane_at(&made, RFT_DELTA_FAR); at++) {
            /* Another remainder; an escape stays one, far stays far, and 0, which may be unused. */
            for (uint32_t bit = 0; bit < 8;
                 bit += at < plane_at(&made, RFT_DELTA_ESCAPES) ? 2 : 4) {
                uint32_t most = at < plane_at(&made, RFT_DELTA_ESCAPES) ? 3 : 15;
                uint32_t rest = (uint32_t)made.out[at] >> bit & most;
                if (rest == most) continue;
                uint32_t other = (uint32_t)seeded_below(&seed, rest == 0 ? 1 : most);
                made.out[at] = (unsigned char)((made.out[at] & ~(most << bit)) | other << bit);
            }
        }
        assert_true(apply(&made, &made.entry, made.out));
    }
    close_coded(&made);
}

int main(void)
{
    return test_run("delta_malformed");
}
