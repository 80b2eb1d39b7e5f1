/* Messages of every kind to test with, and a way to rebuild a message key by key. */
#ifndef WIRE_SAMPLES_H
#define WIRE_SAMPLES_H

#include <msgpack.h>

#include "wire/message.h"

/* Ordinary limits of a configuration, with room for every sample. */
rft_limits sample_limits(void);

/* Values that leave all that is optional empty; small and large values of every field. */
rft_message sample_small(rft_message_kind kind);
rft_message sample_large(rft_message_kind kind);

/* Field by field; fails the test where they differ. */
void assert_messages_equal(const rft_message *a, const rft_message *b);

/* Encodes or fails the test. Close the bytes. */
rft_bytes sample_encode(const rft_message *message);

/* How many keys an encoded message has. */
uint32_t sample_key_count(const rft_bytes *encoded);

/* What sample_rebuild does with one key: `value` packs another value, or the key is left out. */
typedef void (*sample_value_fn)(msgpack_packer *packer);

/* Writes the message again with key number `changed` left out (`value` is NULL) or with another
 * value. Close the bytes. */
rft_bytes sample_rebuild(const rft_bytes *encoded, uint32_t changed, sample_value_fn value);

/* Writes the message again with one more pair at the end. */
rft_bytes sample_extend(const rft_bytes *encoded, const char *key, sample_value_fn value);

/* The msgpack type of key number `index`, and whether it is the kind ("k"). */
msgpack_object_type sample_value_type(const rft_bytes *encoded, uint32_t index);

rft_view bytes_view(const void *data, size_t count);

#endif
