/*
 * Z85 (ZeroMQ's RFC 32): four bytes, big end first, are five digits of base 85. Of five digits some
 * stand for more than four bytes hold; those are refused, so that a key has one text and no other.
 * A key is judged before it is written, so that there is no copy of a secret on the stack.
 */
#include "trust/key.h"

#include <stdint.h>
#include <string.h>

static const char digits[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                             ".-:+=^!/*?&<>()[]{}@%$#";

void rft_key_print(const rft_key *key, char text[RFT_KEY_TEXT])
{
    for (uint32_t i = 0; i < RFT_KEY_BYTES / 4; i++) {
        const unsigned char *at = key->bytes + (size_t)i * 4;
        uint32_t value =
            (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
        for (uint32_t digit = 5; digit > 0; digit--) {
            text[i * 5 + digit - 1] = digits[value % 85];
            value /= 85;
        }
    }
    text[RFT_KEY_CHARS] = '\0';
}

static bool group_parse(const char *text, unsigned char bytes[4])
{
    uint64_t value = 0;
    for (uint32_t i = 0; i < 5; i++) {
        const char *digit = text[i] == '\0' ? NULL : strchr(digits, text[i]);
        if (digit == NULL) return false;
        value = value * 85 + (uint64_t)(digit - digits);
    }
    for (uint32_t i = 0; i < 4; i++) {
        bytes[i] = (unsigned char)(value >> (24 - 8 * i));
    }
    return value <= UINT32_MAX;
}

bool rft_key_parse(const char *text, size_t count, rft_key *out)
{
    unsigned char group[4];
    bool good = count == RFT_KEY_CHARS;
    for (uint32_t i = 0; good && i < RFT_KEY_BYTES / 4; i++)
        good = group_parse(text + (size_t)i * 5, group);
    explicit_bzero(group, sizeof group);
    for (uint32_t i = 0; good && i < RFT_KEY_BYTES / 4; i++)
        (void)group_parse(text + (size_t)i * 5, out->bytes + (size_t)i * 4);
    return good;
}
