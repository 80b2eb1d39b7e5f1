/* Byte strings: text from elsewhere is shown harmlessly; owned bytes grow and keep what they had.
 */
#include <stdlib.h>

#include "tests/support/failing_alloc.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "wire/bytes.h"

static void check_print(const char *from, size_t count, const char *shown)
{
    char out[32];
    rft_view_print((rft_view){from, count}, out, sizeof out);
    assert_string_equal(out, shown);
}

TEST(control_characters_are_replaced)
{
    check_print("plain", 5, "plain");
    check_print("a\nb\0c\x1b[31m\x7f", 11, "a?b?c?[31m?");
    check_print("\xc2\x9b", 2, "??");
    check_print("\xe2\x80\xa8", 3, "???");
    check_print("gr\xc3\xbc\xc3\x9f", 6, "gr\xc3\xbc\xc3\x9f");
    check_print("\xf0\x9f\x8e\x89", 4, "\xf0\x9f\x8e\x89");
    check_print(NULL, 0, "");
}

TEST(what_is_not_utf8_is_replaced)
{
    check_print("\xff", 1, "?");
    check_print("\xc3", 1, "?");
    check_print("\xc3(", 2, "?(");
    check_print("\xc0\xaf", 2, "??");
    check_print("\xe0\x80\xaf", 3, "???");
    check_print("\xed\xa0\x80", 3, "???");
    check_print("\xf4\x90\x80\x80", 4, "????");
    check_print("\xe2\x82", 2, "??");
}

TEST(text_is_cut_between_characters)
{
    char out[4];
    rft_view_print(rft_view_text("abcdef"), out, sizeof out);
    assert_string_equal(out, "abc");
    rft_view_print(rft_view_text("ab\xc3\xbc"), out, sizeof out);
    assert_string_equal(out, "ab");
    rft_view_print(rft_view_text("a\xc3\xbc"), out, sizeof out);
    assert_string_equal(out, "a\xc3\xbc");
    out[0] = 'x';
    rft_view_print(rft_view_text("a"), out, 1);
    assert_string_equal(out, "");
    out[0] = 'x';
    rft_view_print(rft_view_text("a"), out, 0);
    assert_int_equal(out[0], 'x');
}

/* Any bytes, any room, each in memory of exactly that size: the result is text that fits. */
TEST(printing_never_overruns)
{
    uint64_t seed = 7;
    for (int round = 0; round < 20000; round++) {
        size_t count = seeded_below(&seed, 20);
        size_t room = 1 + seeded_below(&seed, 20);
        unsigned char *from = malloc(count + 1);
        char *out = malloc(room);
        assert_true(from != NULL && out != NULL);
        for (size_t i = 0; i < count; i++)
            from[i] = (unsigned char)(seeded_next(&seed) >> 23);
        unsigned char *exact = count == 0 ? NULL : realloc(from, count);
        rft_view_print((rft_view){exact, count}, out, room);
        assert_true(strlen(out) < room);
        assert_true(rft_view_is_text(rft_view_text(out)));
        free(exact == NULL ? from : exact);
        free(out);
    }
}

TEST(names_are_text)
{
    assert_true(rft_view_is_text(rft_view_text("model.layers.0.weight")));
    assert_true(rft_view_is_text(rft_view_text("\xe5\xb1\x82")));
    assert_true(rft_view_is_text((rft_view){0}));
    assert_false(rft_view_is_text((rft_view){"a\0b", 3}));
    assert_false(rft_view_is_text(rft_view_text("a\tb")));
    assert_false(rft_view_is_text(rft_view_text("\xe5\xb1")));
}

TEST(a_missing_text_is_empty)
{
    assert_int_equal(rft_view_text(NULL).count, 0);
}

TEST(appended_bytes_stay)
{
    rft_bytes bytes = {0};
    for (unsigned i = 0; i < 5000; i++) {
        unsigned char byte = (unsigned char)i;
        assert_ok(rft_bytes_append(&bytes, &byte, 1, NULL));
    }
    assert_int_equal(bytes.count, 5000);
    for (unsigned i = 0; i < 5000; i++)
        assert_int_equal(bytes.data[i], (unsigned char)i);
    size_t room = bytes.room;
    rft_bytes_reset(&bytes);
    assert_int_equal(bytes.count, 0);
    assert_int_equal(bytes.room, room);
    assert_ok(rft_bytes_append(&bytes, NULL, 0, NULL));
    rft_bytes_close(&bytes);
    assert_null(bytes.data);
    rft_bytes_close(&bytes);
}

TEST(more_than_there_can_be_is_refused)
{
    rft_bytes bytes = {0};
    assert_ok(rft_bytes_append(&bytes, "x", 1, NULL));
    assert_int_equal(rft_bytes_reserve(&bytes, SIZE_MAX, NULL), REFIT_ERR_HOST_MEMORY);
    assert_int_equal(bytes.count, 1);
    rft_bytes_close(&bytes);
}

TEST(a_failed_allocation_keeps_the_bytes)
{
    rft_bytes bytes = {0};
    failing_alloc_begin(2);
    assert_ok(rft_bytes_append(&bytes, "kept", 4, NULL));
    assert_int_equal(rft_bytes_reserve(&bytes, 100000, NULL), REFIT_ERR_HOST_MEMORY);
    assert_int_equal(bytes.count, 4);
    assert_memory_equal(bytes.data, "kept", 4);
    rft_bytes_close(&bytes);
    assert_true(failing_alloc_end());
}

TEST(numbers_are_little_endian_anywhere)
{
    unsigned char memory[9] = {0};
    rft_put_u64(memory + 1, UINT64_C(0x0102030405060708));
    assert_memory_equal(memory, "\0\x08\x07\x06\x05\x04\x03\x02\x01", 9);
    assert_true(rft_get_u64(memory + 1) == UINT64_C(0x0102030405060708));
    rft_put_u32(memory + 1, UINT32_C(0xfffefdfc));
    assert_memory_equal(memory + 1, "\xfc\xfd\xfe\xff", 4);
    assert_true(rft_get_u32(memory + 1) == UINT32_C(0xfffefdfc));
}

int main(void)
{
    return test_run("bytes");
}
