/* fp32 to bf16 is round to nearest even at every level, exponent, length and alignment, and every
 * NaN is 0x7FFF. */
#include "kernels/cast.h"
#include "tests/kernels/cast_oracle.h"
#include "tests/kernels/levels.h"
#include "tests/kernels/random_bytes.h"
#include "tests/support/test.h"

#define COUNT ((size_t)((1 << 19) + 1000)) /* as many as are streamed, and more */
#define GUARD ((size_t)256)

static unsigned char source[4 * COUNT + GUARD], target[2 * COUNT + 2 * GUARD];

static uint32_t bits_at(const unsigned char *at, size_t i)
{
    uint32_t bits;
    memcpy(&bits, at + 4 * i, sizeof bits);
    return bits;
}

static uint16_t result_at(const unsigned char *at, size_t i)
{
    uint16_t result;
    memcpy(&result, at + 2 * i, sizeof result);
    return result;
}

static void check(size_t to, size_t from, size_t count)
{
    unsigned char untouched[GUARD];
    memset(untouched, 0xA5, sizeof untouched);
    unsigned char *results = target + GUARD + to;
    memset(target, 0xA5, GUARD + to);
    memset(results + 2 * count, 0xA5, GUARD - to);
    rft_cast_bf16((void *)results, (const void *)(source + from), count);
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = bits_at(source + from, i);
        if (result_at(results, i) != cast_oracle(bits)) {
            fail_msg("0x%08x became 0x%04x, not 0x%04x", bits, result_at(results, i),
                     cast_oracle(bits));
        }
    }
    assert_memory_equal(target, untouched, GUARD);
    assert_memory_equal(results + 2 * count, untouched, GUARD - to);
}

static uint16_t cast_one(uint32_t bits)
{
    uint16_t result;
    float value;
    memcpy(&value, &bits, sizeof value);
    rft_cast_bf16(&result, &value, 1);
    return result;
}

/* What NVIDIA's conversion gives, written down by hand. */
TEST(known_answers_are_given)
{
    assert_int_equal(cast_one(0x3F800000), 0x3F80); /* 1 */
    assert_int_equal(cast_one(0x3F808000), 0x3F80); /* halfway, down to even */
    assert_int_equal(cast_one(0x3F818000), 0x3F82); /* halfway, up to even */
    assert_int_equal(cast_one(0x3F808001), 0x3F81); /* just above halfway */
    assert_int_equal(cast_one(0x3F817FFF), 0x3F81); /* just below it */
    assert_int_equal(cast_one(0x3FFFFFFF), 0x4000); /* into the next exponent */
    assert_int_equal(cast_one(0x7F7F7FFF), 0x7F7F); /* the largest that stays finite */
    assert_int_equal(cast_one(0x7F7F8000), 0x7F80); /* to infinity */
    assert_int_equal(cast_one(0xFF7FFFFF), 0xFF80); /* to minus infinity */
    assert_int_equal(cast_one(0x7F800000), 0x7F80); /* infinity */
    assert_int_equal(cast_one(0xFF800000), 0xFF80);
    assert_int_equal(cast_one(0x00000000), 0x0000);
    assert_int_equal(cast_one(0x80000000), 0x8000); /* minus zero */
    assert_int_equal(cast_one(0x00000001), 0x0000); /* the smallest subnormal */
    assert_int_equal(cast_one(0x00008001), 0x0001); /* subnormals stay */
    assert_int_equal(cast_one(0x007FFFFF), 0x0080); /* the largest subnormal becomes normal */
    assert_int_equal(cast_one(0x7F800001), 0x7FFF); /* NaNs: signalling, quiet, negative */
    assert_int_equal(cast_one(0x7FC00000), 0x7FFF);
    assert_int_equal(cast_one(0x7FFFFFFF), 0x7FFF);
    assert_int_equal(cast_one(0xFF800001), 0x7FFF);
    assert_int_equal(cast_one(0xFFFFFFFF), 0x7FFF);
}

/* Around every place where the result changes, in every exponent and sign. */
static size_t fill_with_edges(void)
{
    static const uint32_t low[] = {0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    static const uint32_t high[] = {0x00, 0x01, 0x02, 0x3F, 0x40, 0x7E, 0x7F};
    size_t count = 0;
    for (uint32_t exponent = 0; exponent < 512; exponent++) { /* the sign is its highest bit */
        for (size_t h = 0; h < COUNT_OF(high); h++) {
            for (size_t l = 0; l < COUNT_OF(low); l++, count++) {
                uint32_t bits = exponent << 23 | high[h] << 16 | low[l];
                memcpy(source + 4 * count, &bits, sizeof bits);
            }
        }
    }
    return count;
}

TEST(every_exponent_is_rounded_right)
{
    check(0, 0, fill_with_edges());
}

TEST(every_length_and_alignment_is_exact)
{
    uint64_t seed = 7;
    fill_random(source, 4 * 400 + GUARD, &seed);
    for (size_t count = 0; count <= 300; count++)
        check(count % 67, count % 37, count);
}

/* Sizes that are streamed and one below, also to odd addresses. */
TEST(large_casts_are_exact)
{
    const size_t least = (size_t)1 << 19;
    uint64_t seed = 11;
    fill_random(source, sizeof source, &seed);
    for (size_t to = 0; to < 66; to += 13) {
        check(to, to % 5, least - 1);
        check(to, to % 7, least + to);
    }
    check(2, 1, COUNT);
}

int main(void)
{
    return run_on_every_level("cast");
}
