/* The validator: bytes with false lengths, too deep nesting or unwanted types are refused. */
#include <stdlib.h>

#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "wire/fields.h"

static const rft_walk_limits ordinary = {.nodes = 64, .text_bytes = 16};

/* In memory of exactly that size, so that a sanitizer sees a read past the end. */
static refit_status walk(const void *data, size_t count, size_t *used)
{
    unsigned char *exact = malloc(count == 0 ? 1 : count);
    assert_non_null(exact);
    memcpy(exact, data, count);
    refit_status status = rft_validate((rft_view){exact, count}, &ordinary, used, NULL);
    free(exact);
    return status;
}

#define REFUSED(text)                                                                              \
    do {                                                                                           \
        size_t used = 77;                                                                          \
        assert_int_equal(walk(text, sizeof(text) - 1, &used), REFIT_ERR_PROTOCOL);                 \
        assert_int_equal(used, 77);                                                                \
    } while (0)

#define ACCEPTED(text)                                                                             \
    do {                                                                                           \
        size_t used = 77;                                                                          \
        assert_ok(walk(text, sizeof(text) - 1, &used));                                            \
        assert_int_equal(used, sizeof(text) - 1);                                                  \
    } while (0)

TEST(lying_lengths_are_refused)
{
    REFUSED("\xdd\xff\x00\x00\x00");
    REFUSED("\xdd\x10\x00\x00\x00");
    REFUSED("\xdf\x10\x00\x00\x00");
    REFUSED("\xdf\xff\xff\xff\xff");
    REFUSED("\xdc\xff\xff\xc0");
    REFUSED("\xde\xff\xff\xa1k\xc0");
    REFUSED("\x8f\xa1k");
    REFUSED("\xdb\xff\xff\xff\xff");
    REFUSED("\xdb\xff\xff\xff\xfftext");
    REFUSED("\xc6\xff\xff\xff\xff");
    REFUSED("\xd9\x05text");
    REFUSED("\xa5text");
}

/* Each array alone would be believable: what counts is what all of them owe together. */
TEST(nested_promises_add_up)
{
    REFUSED("\x94\x94\x94\x94\xc0");
    REFUSED("\xdc\x00\x08\xdc\x00\x08\xdc\x00\x08");
    REFUSED("\x82\xa1"
            "a\x92\xc0\xc0\xa1");
    ACCEPTED("\x92\x92\xc0\xc0\x80");
}

TEST(every_long_format_cut_short_is_refused)
{
    REFUSED("");
    for (unsigned first = 0xc4; first < 0xe0; first++) {
        unsigned char head[] = {(unsigned char)first};
        size_t used;
        assert_int_equal(walk(head, 1, &used), REFIT_ERR_PROTOCOL);
    }
    REFUSED("\xcf\x00\x00\x00\x00\x00\x00\x00");
    REFUSED("\xd3\x00\x00\x00\x00\x00\x00\x00");
}

TEST(floats_extensions_and_the_unused_byte_are_refused)
{
    REFUSED("\xc1");
    REFUSED("\xca\x00\x00\x00\x00");
    REFUSED("\xcb\x00\x00\x00\x00\x00\x00\x00\x00");
    REFUSED("\xd4\x01\x00");
    REFUSED("\xd8\x01"
            "0123456789abcdef");
    REFUSED("\xc7\x01\x01\x00");
    REFUSED("\x91\xc1");
}

TEST(map_keys_are_strings)
{
    REFUSED("\x81\x01\x01");
    REFUSED("\x81\xc0\x01");
    REFUSED("\x81\xc4\x01k\x01");
    REFUSED("\x81\x90\x01");
    REFUSED("\x82\xa1k\x01\x02\x03");
    ACCEPTED("\x82\xa1k\x01\xa1l\xa1m");
}

TEST(all_other_formats_are_accepted)
{
    ACCEPTED("\xc0");
    ACCEPTED("\xc2");
    ACCEPTED("\xc3");
    ACCEPTED("\x7f");
    ACCEPTED("\xff");
    ACCEPTED("\xcc\x01");
    ACCEPTED("\xcd\x01\x02");
    ACCEPTED("\xce\x01\x02\x03\x04");
    ACCEPTED("\xcf\x01\x02\x03\x04\x05\x06\x07\x08");
    ACCEPTED("\xd0\x01");
    ACCEPTED("\xd1\x01\x02");
    ACCEPTED("\xd2\x01\x02\x03\x04");
    ACCEPTED("\xd3\x01\x02\x03\x04\x05\x06\x07\x08");
    ACCEPTED("\xc4\x02xx");
    ACCEPTED("\xc5\x00\x02xx");
    ACCEPTED("\xc6\x00\x00\x00\x02xx");
    ACCEPTED("\xa2xx");
    ACCEPTED("\xd9\x02xx");
    ACCEPTED("\xda\x00\x02xx");
    ACCEPTED("\xdb\x00\x00\x00\x02xx");
    ACCEPTED("\xdc\x00\x01\x01");
    ACCEPTED("\xdd\x00\x00\x00\x01\x01");
    ACCEPTED("\xde\x00\x01\xa1k\x01");
    ACCEPTED("\xdf\x00\x00\x00\x01\xa1k\x80");
}

TEST(eight_levels_are_the_deepest)
{
    ACCEPTED("\x91\x91\x91\x91\x91\x91\x91\x90");
    REFUSED("\x91\x91\x91\x91\x91\x91\x91\x91\x90");
    REFUSED("\x81\xa1k\x81\xa1k\x81\xa1k\x81\xa1k\x81\xa1k\x81\xa1k\x81\xa1k\x81\xa1k\x80");
}

TEST(levels_that_are_full_are_left)
{
    ACCEPTED("\x93\x91\x91\x91\x90\x91\x91\x91\x90\x91\x91\x91\x91\x91\x91\x90");
}

TEST(values_are_counted)
{
    unsigned char array[3 + 64] = {0xdc, 0, 63};
    size_t used;
    assert_ok(walk(array, 3 + 63, &used));
    array[2] = 64;
    assert_int_equal(walk(array, 3 + 64, &used), REFIT_ERR_LIMIT);
}

TEST(long_strings_are_refused_and_long_bytes_are_not)
{
    unsigned char text[2 + 17] = {0xd9, 16};
    size_t used;
    assert_ok(walk(text, 2 + 16, &used));
    text[1] = 17;
    assert_int_equal(walk(text, 2 + 17, &used), REFIT_ERR_LIMIT);
    text[0] = 0xc4;
    assert_ok(walk(text, 2 + 17, &used));
}

TEST(one_value_is_walked_and_no_more)
{
    size_t used;
    assert_ok(walk("\x81\xa1k\x01\xc1\xc1", 6, &used));
    assert_int_equal(used, 4);
}

/* Never more is used than there is, whatever the bytes. */
TEST(random_bytes_never_overrun)
{
    uint64_t seed = 20;
    for (int round = 0; round < 200000; round++) {
        unsigned char bytes[24];
        size_t count = seeded_below(&seed, sizeof bytes + 1);
        for (size_t i = 0; i < count; i++)
            bytes[i] = (unsigned char)(seeded_next(&seed) >> 11);
        size_t used = 0;
        refit_status status = walk(bytes, count, &used);
        assert_true(status != REFIT_OK || (used > 0 && used <= count));
    }
}

int main(void)
{
    return test_run("validate");
}
