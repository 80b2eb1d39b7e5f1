/*
 * question: what ZeroMQ asks about a key that connects (ZAP, its RFC 27), frame by frame.
 *
 * ZeroMQ writes the frames, but what a stranger sent is in them: his key and his routing id. Knows
 * no sockets and no lists.
 */
#ifndef RFT_QUESTION_H
#define RFT_QUESTION_H

#include <stdbool.h>
#include <stdint.h>

#include "trust/key.h"
#include "wire/bytes.h"

#define RFT_QUESTION_DOMAIN 32 /* room, with its end */

typedef struct rft_question {
    unsigned char id[256];
    size_t id_bytes;
    char domain[RFT_QUESTION_DOMAIN];
    char address[64];
    char mechanism[8];
    rft_key key;
    bool whole; /* seven frames of the right version, and a key in the last: CURVE */
} rft_question;

/* Takes frame `at` of a question that was {0} before its first. Too long a text counts as none. */
void rft_question_take(rft_question *asked, uint32_t at, rft_view part);

/* There were so many. */
void rft_question_end(rft_question *asked, uint32_t count);

#endif
