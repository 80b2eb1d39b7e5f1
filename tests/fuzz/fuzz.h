/* fuzz: what every target has: the function that libFuzzer and replay.c call, and a way to fail. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Ends the program where something that must hold does not, so that the fuzzer keeps the input. */
#define FUZZ_REQUIRE(condition)                                                                    \
    do {                                                                                           \
        if (condition) break;                                                                      \
        (void)fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);       \
        __builtin_trap();                                                                          \
    } while (0)

#endif
