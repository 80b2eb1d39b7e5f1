/* A block coded and applied is exact, of every width, length and density; so is one applied twice,
 * or half done. Exchanged in place, it comes back. */
#include "kernels/delta.h"
#include "kernels/delta_exchange.h"
#include "tests/kernels/levels.h"
#include "tests/kernels/random_bytes.h"
#include "tests/support/test.h"

static uint64_t seed = 5;

typedef struct pair {
    rft_delta_shape shape;
    size_t bytes;
    unsigned char *before, *after; /* end where their memory does */
} pair;

static pair open_pair(uint32_t elements, uint32_t width, rft_delta_kind kind)
{
    pair made = {.shape = {elements, width, kind}, .bytes = (size_t)elements * width};
    made.before = take_random(made.bytes, &seed);
    made.after = take_copy(made.before, made.bytes);
    return made;
}

static void close_pair(const pair *made)
{
    free(made->before);
    free(made->after);
}

static uint32_t number_of(uint32_t bits)
{
    return bits >= 0x8000u ? 0xFFFFu - bits : bits + 0x8000u;
}

static uint32_t bits_of(uint32_t number)
{
    return number >= 0x8000u ? number - 0x8000u : 0xFFFFu - number;
}

/* Most by one, fewer by more: every way of coding a half occurs. */
static uint32_t random_step(void)
{
    static const uint32_t most[] = {1, 1, 1, 1, 2, 7, 8, 9, 127, 128, 300, 70000};
    return 1 + (uint32_t)seeded_below(&seed, most[seeded_below(&seed, 12)]);
}

static void change_half(unsigned char *at)
{
    uint32_t number = number_of(at[0] | (uint32_t)at[1] << 8), step = random_step();
    uint32_t moved = bits_of((seeded_next(&seed) >> 30 & 1) != 0 ? (number + step) & 0xFFFFu
                                                                 : (number - step) & 0xFFFFu);
    at[0] = (unsigned char)moved;
    at[1] = (unsigned char)(moved >> 8);
}

static void change_element(const pair *made, size_t i)
{
    unsigned char *at = made->after + i * made->shape.width;
    if (made->shape.kind == RFT_DELTA_HALF) {
        change_half(at);
    } else {
        at[seeded_below(&seed, made->shape.width)] ^= (unsigned char)(1 + seeded_below(&seed, 255));
    }
}

static uint32_t count_changed(const pair *made)
{
    uint32_t changed = 0, width = made->shape.width;
    for (size_t i = 0; i < made->shape.elements; i++)
        changed += memcmp(made->before + i * width, made->after + i * width, width) != 0;
    return changed;
}

/* Onto `block`, whose memory ends with it. */
static void apply_to(const pair *made, const rft_delta_entry *entry, const unsigned char *coded,
                     const unsigned char *block)
{
    unsigned char *exact = take_copy(block, made->bytes);
    assert_true(rft_delta_apply(made->shape, entry, coded, exact));
    assert_memory_equal(exact, made->after, made->bytes);
    free(exact);
}

/* Some elements are new, the others old. */
static void apply_to_half_done(const pair *made, const rft_delta_entry *entry,
                               const unsigned char *coded)
{
    unsigned char *mixed = take_copy(made->before, made->bytes);
    for (size_t i = 0; i < made->shape.elements; i++) {
        size_t at = i * made->shape.width;
        if (seeded_below(&seed, 2) == 0) memcpy(mixed + at, made->after + at, made->shape.width);
    }
    apply_to(made, entry, coded, mixed);
    free(mixed);
}

/* What the receiver has: the bytes, and two counts. */
static void check_coded(const pair *made, const rft_delta_entry *entry, const unsigned char *out)
{
    unsigned char *coded = take_copy(out, entry->total);
    rft_delta_entry measured;
    assert_true(rft_delta_measure(made->shape, entry->changed, entry->escapes, coded, entry->total,
                                  &measured));
    assert_memory_equal(&measured, entry, sizeof measured);
    assert_false(rft_delta_measure(made->shape, entry->changed, entry->escapes, coded,
                                   entry->total - 1, &measured));
    apply_to(made, entry, coded, made->before);
    apply_to(made, entry, coded, made->after);
    apply_to_half_done(made, entry, coded);
    free(coded);
}

/* In place, and back. */
static void check_exchange(const pair *made, uint32_t changed)
{
    const rft_delta_shape raw = {made->shape.elements, made->shape.width, RFT_DELTA_RAW};
    unsigned char *block = take_copy(made->before, made->bytes);
    unsigned char *out = take(rft_delta_bound(raw));
    rft_delta_entry entry;
    bool coded = rft_delta_exchange(made->shape, block, made->after, out, &entry);
    assert_int_equal(entry.changed, changed);
    assert_memory_equal(block, made->after, made->bytes);
    if (coded) {
        assert_true(entry.total < made->bytes);
        assert_true(rft_delta_apply(raw, &entry, out, block));
        assert_memory_equal(block, made->before, made->bytes);
    } else if (changed > 0) {
        assert_memory_equal(out, made->before, made->bytes);
    }
    free(block);
    free(out);
}

/* Returns whether the block was worth coding. */
static bool check_pair(const pair *made)
{
    uint32_t changed = count_changed(made);
    unsigned char *out = take(rft_delta_bound(made->shape));
    rft_delta_entry entry;
    assert_int_equal(rft_delta_count(made->shape, made->before, made->after), changed);
    bool coded = rft_delta_encode(made->shape, made->before, made->after, out, &entry);
    assert_int_equal(entry.changed, changed);
    if (coded) {
        assert_true(entry.total + RFT_DELTA_ENTRY_BYTES < made->bytes);
        check_coded(made, &entry, out);
    }
    check_exchange(made, changed);
    free(out);
    return coded;
}

static bool check_density(rft_delta_shape shape, uint32_t changed)
{
    pair made = open_pair(shape.elements, shape.width, shape.kind);
    for (uint32_t i = 0; i < shape.elements; i++) {
        if (seeded_below(&seed, shape.elements) < changed) change_element(&made, i);
    }
    if (count_changed(&made) == 0) change_element(&made, seeded_below(&seed, shape.elements));
    bool coded = check_pair(&made);
    close_pair(&made);
    return coded;
}

static const rft_delta_shape kinds[] = {
    {0, 2, RFT_DELTA_HALF}, {0, 1, RFT_DELTA_RAW}, {0, 2, RFT_DELTA_RAW},
    {0, 4, RFT_DELTA_RAW},  {0, 8, RFT_DELTA_RAW},
};
#define KINDS (COUNT_OF(kinds))

TEST(blocks_of_every_length_are_exact)
{
    for (uint32_t elements = 1; elements <= 700; elements += elements < 140 ? 1 : 37) {
        for (uint32_t kind = 0; kind < KINDS; kind++) {
            rft_delta_shape shape = {elements, kinds[kind].width, kinds[kind].kind};
            (void)check_density(shape, 1 + (uint32_t)seeded_below(&seed, elements));
            (void)check_density(shape, elements / 30);
        }
    }
}

TEST(blocks_of_every_density_are_exact)
{
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        for (uint32_t changed = 1; changed < RFT_DELTA_ELEMENTS; changed = changed * 3 + 1) {
            rft_delta_shape shape = {RFT_DELTA_ELEMENTS, kinds[kind].width, kinds[kind].kind};
            bool coded = check_density(shape, changed);
            assert_true(coded || changed > RFT_DELTA_ELEMENTS / 3);
            shape.elements -= (uint32_t)seeded_below(&seed, 100);
            (void)check_density(shape, changed);
        }
    }
}

/* Every number moved by `step`, once round the ring. */
static void check_step(uint32_t step)
{
    pair made = open_pair(RFT_DELTA_ELEMENTS, 2, RFT_DELTA_HALF);
    for (uint32_t i = 0; i < RFT_DELTA_ELEMENTS; i++) {
        uint32_t old = bits_of(i), moved = bits_of((i + step) & 0xFFFFu);
        memcpy(made.before + 2 * (size_t)i,
               (unsigned char[]){(unsigned char)old, (unsigned char)(old >> 8)}, 2);
        memcpy(made.after + 2 * (size_t)i,
               (unsigned char[]){(unsigned char)moved, (unsigned char)(moved >> 8)}, 2);
    }
    /* Every other one: a block in which all move far is not worth coding. */
    for (uint32_t i = 0; i < RFT_DELTA_ELEMENTS; i++) {
        if (i % 4 != (step & 3)) memcpy(made.after + 2 * (size_t)i, made.before + 2 * (size_t)i, 2);
    }
    assert_true(check_pair(&made));
    close_pair(&made);
}

/* NaN, infinities, zeros of both signs and both ends of the range are among them. */
TEST(every_half_moves_by_every_kind_of_step)
{
    static const uint32_t steps[] = {1,   2,   3,   7,   8,   14,     15,    16,
                                     127, 128, 254, 255, 256, 0x7FFF, 0x8000};
    for (uint32_t i = 0; i < COUNT_OF(steps); i++) {
        check_step(steps[i]);
        check_step(0x10000u - steps[i]);
    }
}

TEST(nothing_changed_is_nothing_coded)
{
    pair made = open_pair(1000, 2, RFT_DELTA_HALF);
    assert_false(check_pair(&made));
    close_pair(&made);
}

/* Dearer, a block is coded to the same bytes or not at all, and less of them are. */
TEST(blocks_that_do_not_pay_are_not_coded)
{
    uint32_t most = RFT_DELTA_ELEMENTS;
    for (uint32_t price = 0; price <= 12; price += 4) {
        uint32_t dearest = 0;
        for (uint32_t tenths = 1; tenths <= 10; tenths++) {
            pair made = open_pair(RFT_DELTA_ELEMENTS, 2, RFT_DELTA_HALF);
            for (uint32_t i = 0; i < RFT_DELTA_ELEMENTS; i++) {
                if (i % 10 < tenths) made.after[2 * (size_t)i] ^= 1;
            }
            unsigned char *out = take(2 * rft_delta_bound(made.shape));
            unsigned char *cheap = out + rft_delta_bound(made.shape);
            rft_delta_entry entry, other;
            assert_true(rft_delta_encode(made.shape, made.before, made.after, cheap, &other));
            bool coded =
                rft_delta_encode_if(made.shape, price, made.before, made.after, out, &entry);
            assert_int_equal(entry.changed, other.changed);
            if (coded) {
                dearest = entry.changed;
                assert_memory_equal(&entry, &other, sizeof entry);
                assert_memory_equal(out, cheap, entry.total);
                assert_true(entry.total + price * entry.changed < made.bytes);
            }
            free(out);
            close_pair(&made);
        }
        assert_true(dearest > 0 && (price == 0 ? dearest == most : dearest < most));
        most = dearest;
    }
}

int main(void)
{
    return run_on_every_level("delta");
}
