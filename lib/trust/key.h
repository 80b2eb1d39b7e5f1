/* key: one half of a CURVE key pair, as 32 bytes and as the 40 characters (Z85) that files hold. */
#ifndef RFT_KEY_H
#define RFT_KEY_H

#include <stdbool.h>
#include <stddef.h>

#define RFT_KEY_BYTES 32u
#define RFT_KEY_CHARS 40u
#define RFT_KEY_TEXT  (RFT_KEY_CHARS + 1u) /* with its end */

typedef struct rft_key {
    unsigned char bytes[RFT_KEY_BYTES];
} rft_key;

void rft_key_print(const rft_key *key, char text[RFT_KEY_TEXT]);

/* Reads `count` characters. False: these are no key, and nothing is written. */
bool rft_key_parse(const char *text, size_t count, rft_key *out);

#endif
