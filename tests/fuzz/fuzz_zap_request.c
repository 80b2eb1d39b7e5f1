/*
 * A request about a key: frames, a byte for the length of each and then its bytes. Whatever they
 * are, texts end within their room, and only a whole request has a key.
 */
#include "fuzz.h"
#include "net/zap.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const rft_key none;
    static fuzz_room room;
    rft_zap_request asked = {0};
    uint32_t count = 0;
    for (; size > 0; count++) {
        size_t bytes = data[0] < size - 1 ? data[0] : size - 1;
        /* 255 stands for more than an id may have. */
        size_t made = data[0] == UINT8_MAX ? 300 : bytes;
        unsigned char *part = fuzz_room_take(&room, NULL, made);
        memset(part, 'x', made);
        memcpy(part, data + 1, bytes < made ? bytes : made);
        rft_zap_request_take(&asked, count, (rft_view){part, made});
        data += 1 + bytes;
        size -= 1 + bytes;
    }
    rft_zap_request_end(&asked, count);
    fuzz_taken += asked.whole;
    FUZZ_REQUIRE(asked.id_bytes <= sizeof asked.id);
    FUZZ_REQUIRE(memchr(asked.domain, '\0', sizeof asked.domain) != NULL);
    FUZZ_REQUIRE(memchr(asked.address, '\0', sizeof asked.address) != NULL);
    FUZZ_REQUIRE(memchr(asked.mechanism, '\0', sizeof asked.mechanism) != NULL);
    FUZZ_REQUIRE(!asked.whole || (count == 7 && strcmp(asked.mechanism, "CURVE") == 0));
    FUZZ_REQUIRE(count >= 7 || memcmp(&asked.key, &none, sizeof none) == 0);
    return 0;
}
