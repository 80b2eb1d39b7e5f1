/* Masters come back bit for bit from weights and remainders, at every level, length and alignment,
 * whatever the weights are; what does not fit, or has changed, is found and nothing is written. */
#include "kernels/cast.h"
#include "kernels/digest.h"
#include "kernels/master_rules.h"
#include "tests/kernels/levels.h"
#include "tests/kernels/master_data.h"
#include "tests/support/test.h"

#define GUARD 64u

static master_data data;
static _Alignas(64) unsigned char coded[8 * MASTER_MOST], expected[8 * MASTER_MOST];
static _Alignas(64) unsigned char decoded[4 * MASTER_MOST + 2 * GUARD + 64];

static rft_master_result encode(uint64_t elements, uint32_t room)
{
    rft_master_result result = {0};
    assert_true(rft_master_bytes(elements, room) + GUARD <= sizeof coded);
    memset(coded, 0xA5, (size_t)rft_master_bytes(elements, room) + GUARD);
    rft_master_job job = {.master = data.masters,
                          .weights = data.weights,
                          .coded = coded,
                          .result = &result,
                          .elements = elements,
                          .room = room};
    rft_master_split(&job);
    rft_master_list(&job);
    return result;
}

/* What is wrong with `coded`, which is joined into `master` or compared with it. */
static uint32_t join(void *master, uint64_t elements, uint32_t room, bool compares)
{
    rft_master_result result = {0};
    rft_master_join(&(rft_master_job){.master = master,
                                      .weights = data.weights,
                                      .coded = coded,
                                      .result = &result,
                                      .elements = elements,
                                      .room = room,
                                      .compares = compares});
    return result.found;
}

static uint32_t compare(uint64_t elements, uint32_t room)
{
    return join(data.masters, elements, room, true);
}

/* Into memory with guards around it. */
static uint32_t decode(uint64_t elements, uint32_t room, size_t aside)
{
    memset(decoded, 0x5A, 4 * elements + 2 * GUARD + aside);
    uint32_t wrong = join(decoded + GUARD + aside, elements, room, false);
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal(decoded[i], 0x5A);
        assert_int_equal(decoded[GUARD + aside + 4 * elements + i], 0x5A);
    }
    return wrong;
}

static uint64_t elements_now;
static uint32_t room_now;

/* Against what the base level wrote, which is the first to run. */
static void check_level(void)
{
    rft_master_result result = encode(elements_now, room_now);
    size_t bytes = (size_t)rft_master_bytes(elements_now, room_now);
    if (rft_cpu_get_level() == RFT_CPU_BASE) memcpy(expected, coded, bytes + GUARD);
    assert_memory_equal(coded, expected, bytes + GUARD);
    assert_int_equal(result.found, 0);
    assert_true(result.need <= room_now);
    for (size_t aside = 0; aside < 64; aside += 52) {
        assert_int_equal(decode(elements_now, room_now, aside), 0);
        assert_memory_equal(decoded + GUARD + aside, data.masters, 4 * elements_now);
    }
    assert_int_equal(compare(elements_now, room_now), 0);
}

static void check(uint64_t elements, master_weights kind, size_t aside, uint32_t room)
{
    master_data_fill(&data, elements, kind, aside);
    elements_now = elements;
    room_now = room;
    on_every_level(check_level);
    master_data_free(&data);
}

TEST(every_kind_of_weight_gives_the_masters_back)
{
    for (int kind = 0; kind < MASTER_KINDS; kind++) {
        check(3 * RFT_MASTER_BLOCK + 17, (master_weights)kind, 0, RFT_MASTER_ROOM);
        check(RFT_MASTER_UNIT + RFT_MASTER_BLOCK, (master_weights)kind, 1, RFT_MASTER_ROOM);
    }
}

TEST(every_length_and_alignment_gives_the_masters_back)
{
    for (uint64_t elements = 1; elements < 140; elements++)
        check(elements, (master_weights)(elements % MASTER_KINDS), (size_t)elements % 31, 1024);
    check(RFT_MASTER_UNIT, MASTER_ROUNDED, 3, 32768);
    check(2 * RFT_MASTER_UNIT, MASTER_ROUNDED_EXACTLY, 0, 0);
    check(MASTER_MOST, MASTER_ROUNDED, 2, 32768);
}

/* The rules of master.h, written down by hand. */
TEST(known_answers_are_given)
{
    assert_false(rft_master_is_exception(0x3F800000, 0x3F80)); /* 1 */
    assert_false(rft_master_is_exception(0x3F807FFF, 0x3F80)); /* rounded down */
    assert_false(rft_master_is_exception(0x3F808001, 0x3F81)); /* rounded up */
    assert_false(rft_master_is_exception(0x3F808000, 0x3F80)); /* the middle, to even below */
    assert_true(rft_master_is_exception(0x3F818000, 0x3F82));  /* the middle, to even above */
    assert_false(rft_master_is_exception(0x7F800000, 0x7F80)); /* infinity */
    assert_false(rft_master_is_exception(0x7F7FFFFF, 0x7F80)); /* rounded to infinity */
    assert_false(rft_master_is_exception(0x0000FFFF, 0x0001)); /* a subnormal */
    assert_false(rft_master_is_exception(0x80000000, 0x8000)); /* minus zero */
    assert_true(rft_master_is_exception(0x7FC00000, 0x7FFF));  /* a NaN */
    assert_false(rft_master_is_exception(0xFFFFFFFF, 0x0000)); /* the subtraction wraps */
    assert_int_equal(rft_master_extra(4096, 0), 0);
    assert_int_equal(rft_master_extra(4096, 2047), 8188);
    assert_int_equal(rft_master_extra(4096, 2048), 8192);
    assert_int_equal(rft_master_extra(4096, 4096), 8192);
    assert_int_equal(rft_master_extra(5, 3), 12);
    assert_int_equal(rft_master_bytes(0, 16), 0);
    assert_int_equal(rft_master_bytes(1, 16), 16 + 16 + 16);
    assert_int_equal(rft_master_bytes(RFT_MASTER_UNIT + 4097, 32),
                     64 * 16 + 2 * RFT_MASTER_UNIT + 32 + 2 * 16 + 8208 + 32);
}

TEST(exceptions_take_as_little_as_they_can)
{
    const uint64_t elements = 2 * RFT_MASTER_BLOCK;
    master_data_fill(&data, elements, MASTER_ROUNDED_EXACTLY, 0);
    assert_int_equal(encode(elements, 0).need, 0);
    uint16_t *weights = data.weights;
    weights[7] ^= 1;
    weights[RFT_MASTER_BLOCK + 9] ^= 1;
    assert_int_equal(encode(elements, 16).need, 8);
    for (uint32_t i = 0; i < 2048; i++)
        weights[i] = (uint16_t)(data.masters[i] >> 16 ^ 0x40);
    assert_int_equal(encode(elements, 8208).need, 8196);
    master_data_free(&data);
}

TEST(exceptions_that_do_not_fit_are_told)
{
    const uint64_t elements = RFT_MASTER_UNIT + 100;
    master_data_fill(&data, elements, MASTER_RANDOM, 0);
    rft_master_result result = encode(elements, 8192);
    assert_int_equal(result.found, RFT_MASTER_NO_ROOM);
    assert_int_equal(result.need, RFT_MASTER_ROOM);
    /* The tables say of which units. */
    const unsigned char *second = coded + rft_master_bytes(RFT_MASTER_UNIT, 8192);
    assert_int_equal(rft_master_need(coded, RFT_MASTER_UNIT), RFT_MASTER_ROOM);
    assert_int_equal(rft_master_need(second, 100), 200);
    assert_int_equal(decode(elements, 8192, 0), RFT_MASTER_MALFORMED);
    master_data_free(&data);
}

TEST(changed_weights_are_found_and_nothing_is_written)
{
    const uint64_t elements = 2 * RFT_MASTER_BLOCK + 5;
    master_data_fill(&data, elements, MASTER_ROUNDED, 0);
    encode(elements, 4096);
    uint16_t *weights = data.weights;
    for (uint32_t bit = 0; bit < 16; bit++) {
        weights[RFT_MASTER_BLOCK + 77] ^= (uint16_t)(1u << bit);
        assert_int_equal(decode(elements, 4096, 0), RFT_MASTER_CHANGED);
        for (size_t i = 0; i < 4 * RFT_MASTER_BLOCK; i++)
            assert_int_equal(decoded[GUARD + 4 * RFT_MASTER_BLOCK + i], 0x5A);
        assert_int_equal(compare(elements, 4096), RFT_MASTER_CHANGED);
        weights[RFT_MASTER_BLOCK + 77] ^= (uint16_t)(1u << bit);
    }
    assert_int_equal(decode(elements, 4096, 0), 0);
    assert_memory_equal(decoded + GUARD, data.masters, 4 * elements);
    master_data_free(&data);
}

/* Every bit that decoding reads: another value is noticed, by decoding or by comparing. */
TEST(a_changed_bit_is_found)
{
    const uint64_t elements = 600;
    master_data_fill(&data, elements, MASTER_ROUNDED, 0);
    ((uint16_t *)data.weights)[11] ^= 1;
    ((uint16_t *)data.weights)[599] ^= 1;
    rft_master_result result = encode(elements, 64);
    assert_true(result.need >= 8);
    size_t low = sizeof(rft_master_entry), room = low + rft_master_low_bytes(600);
    for (size_t at = 0; at < room + result.need; at++) {
        if (at >= low + 1200 && at < room) continue;
        for (unsigned bit = 0; bit < 8; bit++) {
            coded[at] ^= (unsigned char)(1u << bit);
            assert_int_not_equal(compare(elements, 64), 0);
            (void)decode(elements, 64, 0);
            coded[at] ^= (unsigned char)(1u << bit);
        }
    }
    assert_int_equal(compare(elements, 64), 0);
    master_data_free(&data);
}

TEST(any_table_and_list_are_safe_to_follow)
{
    const uint64_t elements = 3 * RFT_MASTER_BLOCK - 1;
    uint64_t seed = 5;
    master_data_fill(&data, elements, MASTER_ROUNDED, 0);
    for (int round = 0; round < 2000; round++) {
        encode(elements, 8192);
        size_t room = (size_t)rft_master_bytes(elements, 8192) - 8192;
        rft_master_entry entry;
        memcpy(&entry, coded + sizeof entry, sizeof entry);
        entry.exceptions = (uint32_t)seeded_below(&seed, round % 2 == 0 ? 6000 : UINT32_MAX);
        entry.at = (uint32_t)seeded_below(&seed, round % 3 == 0 ? 9000 : UINT32_MAX);
        memcpy(coded + sizeof entry, &entry, sizeof entry);
        for (size_t i = 0; i < 8192; i++)
            coded[room + i] = (unsigned char)(seeded_next(&seed) >> 40);
        (void)decode(elements, 8192, 0);
        (void)compare(elements, 8192);
    }
    master_data_free(&data);
}

int main(void)
{
    return test_run("master");
}
