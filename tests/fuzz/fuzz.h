/* fuzz: what every target has: the function that libFuzzer and replay.c call, and a way to fail. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Ends the program where something that must hold does not, so that the fuzzer keeps the input. */
#define FUZZ_REQUIRE(condition)                                                                    \
    do {                                                                                           \
        if (condition) break;                                                                      \
        (void)fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);       \
        __builtin_trap();                                                                          \
    } while (0)

/* How many inputs were taken, not refused; a target adds to it. A corpus of which none is reaches
 * nothing after the first check, which replay.c finds out. */
__attribute__((weak)) unsigned fuzz_taken = 0;

/* Memory that is asked for again and again; {0} is none. It is kept from one input to the next,
 * since under a sanitizer fresh memory costs more than most of what is tested. */
typedef struct fuzz_room {
    unsigned char *block;
    size_t bytes;
} fuzz_room;

/* So many bytes, the last of which is the last of a block of the heap: a sanitizer sees every step
 * beyond it. Theirs until the room is used again; `from` (may be NULL) is copied there. */
static inline unsigned char *fuzz_room_take(fuzz_room *room, const void *from, size_t bytes)
{
    if (room->block == NULL || bytes > room->bytes) {
        free(room->block);
        room->bytes = 2 * bytes + 64;
        room->block = (unsigned char *)malloc(room->bytes);
        FUZZ_REQUIRE(room->block != NULL);
    }
    unsigned char *at = room->block + room->bytes - bytes;
    if (from != NULL && bytes != 0) memcpy(at, from, bytes);
    return at;
}

#endif
