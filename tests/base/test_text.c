/* Text: what is clean is told from what is not; what is too long loses its middle, between
 * characters, and keeps its end; sentences of errors keep their advice. */
#include <stdlib.h>

#include "base/error.h"
#include "base/text.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"

#define LAYER "\xe5\xb1\x82" /* one character of three bytes */

/* `count` times `piece`. */
static void repeat(char *out, const char *piece, size_t count)
{
    size_t length = strlen(piece);
    for (size_t i = 0; i < count; i++)
        memcpy(out + i * length, piece, length);
    out[count * length] = '\0';
}

TEST(the_clean_part_ends_before_what_is_none)
{
    assert_int_equal(rft_text_clean_part("a" LAYER "b", 5), 5);
    assert_int_equal(rft_text_clean_part("ab\n", 3), 2);
    assert_int_equal(rft_text_clean_part("ab\xe5\xb1", 4), 2);
    assert_int_equal(rft_text_clean_part("\xff", 1), 0);
    assert_int_equal(rft_text_clean_part(NULL, 0), 0);
    assert_true(rft_text_is_clean("a" LAYER, 4));
    assert_false(rft_text_is_clean("a" LAYER, 3));
}

TEST(a_long_word_loses_its_middle)
{
    char out[64];
    const char *from = "file /a/folder/that/has/a/name/too/long/for/this/line/weights.bin is "
                       "gone: bring it back";
    rft_text_fit(from, strlen(from), out, sizeof out);
    assert_int_equal(strlen(out), sizeof out - 1);
    assert_string_equal(out, "file /a/folder/that/h...line/weights.bin is gone: bring it back");
}

TEST(a_long_sentence_keeps_both_ends)
{
    char from[400], out[64];
    repeat(from, "word ", 60);
    memcpy(from, "First", 5);
    memcpy(from + strlen(from) - 5, "last.", 5);
    rft_text_fit(from, strlen(from), out, sizeof out);
    assert_int_equal(strlen(out), sizeof out - 1);
    assert_memory_equal(out, "First", 5);
    assert_non_null(strstr(out, "..."));
    assert_string_equal(out + strlen(out) - 5, "last.");
}

TEST(a_cut_is_never_inside_a_character)
{
    char from[3 * 200 + 1];
    repeat(from, LAYER, 200);
    for (size_t count = 3; count <= 600; count += 3) {
        for (size_t room = 1; room < 100; room++) {
            char *out = malloc(room);
            assert_non_null(out);
            rft_text_fit(from, count, out, room);
            assert_true(strlen(out) < room);
            assert_true(rft_text_is_clean(out, strlen(out)));
            if (count < room) assert_int_equal(strlen(out), count);
            free(out);
        }
    }
}

/* Any bytes, any room, each in memory of exactly that size. */
TEST(fitting_never_overruns)
{
    uint64_t seed = 11;
    for (int round = 0; round < 20000; round++) {
        size_t count = 1 + seeded_below(&seed, 90), room = 1 + seeded_below(&seed, 90);
        unsigned char *from = malloc(count);
        char *out = malloc(room);
        assert_true(from != NULL && out != NULL);
        for (size_t i = 0; i < count; i++) {
            unsigned char byte = (unsigned char)(seeded_next(&seed) >> 23);
            from[i] = seeded_below(&seed, 3) == 0 ? byte : seeded_below(&seed, 9) == 0 ? ' ' : 'x';
        }
        rft_text_fit(from, count, out, room);
        assert_true(strlen(out) < room);
        assert_true(rft_text_is_clean(out, strlen(out)));
        free(from);
        free(out);
    }
}

TEST(saying_takes_what_is_there_already)
{
    char out[16] = "before";
    rft_text_say(out, sizeof out, "%s: %s", "now", out);
    assert_string_equal(out, "now: before");
}

TEST(an_error_keeps_its_advice)
{
    char name[3 * 150 + 1];
    repeat(name, LAYER, 150);
    refit_error error;
    (void)rft_fail(&error, REFIT_ERR_INVALID, "tensor '%s' has no bytes: give it some", name);
    assert_true(rft_text_is_clean(error.text, strlen(error.text)));
    assert_non_null(strstr(error.text, LAYER "..." LAYER));
    assert_non_null(strstr(error.text, "' has no bytes: give it some"));
    (void)rft_fail(&error, REFIT_ERR_PEER, "version 7 is aborted: %s; refit again", error.text);
    assert_memory_equal(error.text, "version 7 is aborted: tensor '", 30);
    assert_non_null(strstr(error.text, "; refit again"));
}

TEST(a_name_that_was_cut_before_is_shown_as_text)
{
    refit_error error;
    (void)rft_fail(&error, REFIT_ERR_INVALID, "'%.4s' is not a name", LAYER LAYER);
    assert_string_equal(error.text, "'" LAYER "?' is not a name");
}

int main(void)
{
    return test_run("text");
}
