/*
 * Any bytes as a message. What decodes must encode again, and the bytes of that must decode to the
 * same: encoding is a fixed point after one step.
 */
#include <string.h>

#include "fuzz.h"
#include "wire/message.h"

static const rft_limits limits = {
    .tensors = 1000,
    .rank = 8,
    .name_bytes = 256,
    .message_bytes = 4096,
    .manifest_bytes = 1 << 16,
    .frame_bytes = 1 << 20,
    .version_bytes = UINT64_C(1) << 40,
    .window = 64,
};

static void encode_again(const rft_message *message)
{
    rft_bytes first = {0};
    rft_bytes second = {0};
    rft_message decoded;
    FUZZ_REQUIRE(rft_message_encode(message, &limits, &first, NULL) == REFIT_OK);
    FUZZ_REQUIRE(rft_message_decode(rft_bytes_view(&first), &limits, &decoded, NULL) == REFIT_OK);
    FUZZ_REQUIRE(rft_message_encode(&decoded, &limits, &second, NULL) == REFIT_OK);
    FUZZ_REQUIRE(first.count == second.count && memcmp(first.data, second.data, first.count) == 0);
    rft_bytes_close(&first);
    rft_bytes_close(&second);
    fuzz_taken++;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    rft_message message;
    refit_error error;
    refit_status status = rft_message_decode((rft_view){data, size}, &limits, &message, &error);
    if (status == REFIT_OK)
        encode_again(&message);
    else
        FUZZ_REQUIRE(status == REFIT_ERR_PROTOCOL || status == REFIT_ERR_LIMIT);
    return 0;
}
