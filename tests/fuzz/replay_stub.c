/* A target for replay.sh: it takes inputs that begin with t and crashes on those with c. */
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    FUZZ_REQUIRE(size == 0 || data[0] != 'c');
    fuzz_taken += size > 0 && data[0] == 't';
    return 0;
}
