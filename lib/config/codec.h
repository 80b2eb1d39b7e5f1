/* codec: how each kind of option but RFT_TEXT is read, printed and stored, by way of its code. */
#ifndef RFT_CODEC_H
#define RFT_CODEC_H

#include "config/options.h"

typedef struct rft_codec {
    bool (*read)(const rft_option *option, const char *text, uint64_t *code);
    void (*print)(const rft_option *option, uint64_t code, char *text, size_t capacity);
    uint64_t (*load)(const void *field);
    void (*store)(void *field, uint64_t code);
    /* Prints a field that a program filled with what no text stands for; NULL: as the others. */
    void (*print_stray)(const void *field, char *text, size_t capacity);
    const char *expected; /* for the sentence that refuses a text */
} rft_codec;

extern const rft_codec rft_codecs[RFT_KINDS];

#endif
