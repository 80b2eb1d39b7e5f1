/* Decoding a message takes no memory, neither through refit's allocator nor past it. This program
 * counts the requests to the C library. */
#include <stdlib.h>

#include "tests/support/test.h"
#include "wire_samples.h"

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && defined(__GLIBC__)
#define COUNTS 1

static volatile uint64_t requests; /* a compiler may think that malloc leaves it alone */

#define EXPORTED __attribute__((visibility("default"))) /* libraries call it, too */

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *block, size_t bytes);

EXPORTED void *malloc(size_t bytes)
{
    requests++;
    return __libc_malloc(bytes);
}

EXPORTED void *calloc(size_t count, size_t bytes)
{
    requests++;
    return __libc_calloc(count, bytes);
}

EXPORTED void *realloc(void *block, size_t bytes)
{
    requests++;
    return __libc_realloc(block, bytes);
}
#else
#define COUNTS 0
static const volatile uint64_t requests;
#endif

/* Under valgrind others answer. */
static bool counts(void)
{
    uint64_t before = requests;
    void *volatile block = malloc(1);
    free(block);
    return COUNTS && requests > before;
}

TEST(every_kind_is_read_without_memory)
{
    if (!counts()) skip();
    rft_limits limits = sample_limits();
    for (uint32_t kind = 0; kind < RFT_MESSAGE_KINDS; kind++) {
        rft_message message = sample_large((rft_message_kind)kind), read;
        rft_bytes encoded = sample_encode(&message);
        uint64_t before = requests;
        refit_status status = rft_message_decode(rft_bytes_view(&encoded), &limits, &read, NULL);
        uint64_t after = requests;
        assert_ok(status);
        assert_int_equal(after, before);
        rft_bytes_close(&encoded);
    }
}

int main(void)
{
    return test_run("decode_memory");
}
