/* Keys as text: the example of the specification, every key back as it was, and nothing else read.
 */
#include "tests/support/test.h"
#include "trust/key.h"

/* The key pair of ZeroMQ's RFC 32, of which one half is this. */
static const unsigned char known[RFT_KEY_BYTES] = {
    0xBB, 0x88, 0x47, 0x1D, 0x65, 0xE2, 0x65, 0x9B, 0x30, 0xC5, 0x5A, 0x53, 0x21, 0xCE, 0xBB, 0x5A,
    0xAB, 0x2B, 0x70, 0xA3, 0x98, 0x64, 0x5C, 0x26, 0xDC, 0xA2, 0xB2, 0xFC, 0xB4, 0x3F, 0xC5, 0x18};
static const char known_text[] = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID";

TEST(the_known_key_is_the_known_text)
{
    rft_key key;
    char text[RFT_KEY_TEXT];
    memcpy(key.bytes, known, sizeof known);
    rft_key_print(&key, text);
    assert_string_equal(text, known_text);
    memset(&key, 0, sizeof key);
    assert_true(rft_key_parse(known_text, RFT_KEY_CHARS, &key));
    assert_memory_equal(key.bytes, known, sizeof known);
}

TEST(every_byte_comes_back)
{
    for (uint32_t value = 0; value < 256; value++) {
        rft_key key, back;
        char text[RFT_KEY_TEXT];
        for (uint32_t i = 0; i < RFT_KEY_BYTES; i++)
            key.bytes[i] = (unsigned char)(value + i * 37);
        rft_key_print(&key, text);
        assert_int_equal(strlen(text), RFT_KEY_CHARS);
        assert_true(rft_key_parse(text, RFT_KEY_CHARS, &back));
        assert_memory_equal(back.bytes, key.bytes, RFT_KEY_BYTES);
    }
}

TEST(what_is_no_key_is_not_read)
{
    static const char bad[] = "\"\\;,'`|~_ \t\n";
    rft_key key;
    memset(&key, 7, sizeof key);
    rft_key before = key;
    for (size_t at = 0; at < RFT_KEY_CHARS; at++) {
        char text[RFT_KEY_TEXT];
        for (size_t i = 0; i < sizeof bad; i++) { /* NUL among them */
            strcpy(text, known_text);
            text[at] = bad[i];
            assert_false(rft_key_parse(text, RFT_KEY_CHARS, &key));
        }
        strcpy(text, known_text);
        text[at] = (char)0xe9;
        assert_false(rft_key_parse(text, RFT_KEY_CHARS, &key));
    }
    assert_false(rft_key_parse(known_text, RFT_KEY_CHARS - 1, &key));
    assert_false(rft_key_parse(known_text, RFT_KEY_CHARS + 1, &key));
    assert_false(rft_key_parse("", 0, &key));
    assert_memory_equal(&key, &before, sizeof key);
}

/* "%nSc0" are four bytes of ones; "%nSc1" would need a fifth. */
TEST(digits_beyond_four_bytes_are_refused)
{
    char text[RFT_KEY_TEXT];
    rft_key key;
    strcpy(text, known_text);
    memcpy(text, "%nSc0", 5);
    assert_true(rft_key_parse(text, RFT_KEY_CHARS, &key));
    assert_int_equal(key.bytes[3], 0xff);
    memcpy(text, "%nSc1", 5);
    assert_false(rft_key_parse(text, RFT_KEY_CHARS, &key));
    memcpy(text, "#####", 5);
    assert_false(rft_key_parse(text, RFT_KEY_CHARS, &key));
}

int main(void)
{
    return test_run("key");
}
