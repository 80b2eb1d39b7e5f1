/*
 * Versions for tests: a small manifest with everything that is odd about tensors (several blocks, a
 * tied one, an empty one, a scalar, four bits an element), bytes that follow from the version's
 * number, and the messages in which a publisher would say so.
 */
#ifndef SAMPLE_VERSION_H
#define SAMPLE_VERSION_H

#include "wire/reassembly.h"

#define SAMPLE_TENSORS     6u
#define SAMPLE_FRAME_BYTES (64u * 1024)

/* The tensors as refit_publisher_declare takes them. */
const refit_tensor *sample_tensors(void);

typedef struct sample_version {
    rft_manifest *manifest; /* owned */
    uint64_t version;
    unsigned char *image;   /* owned; manifest->store_bytes */
    unsigned char *digests; /* owned; 8 bytes an original, as in SEAL */
    rft_digest128 digest;
    rft_bytes modes, scratch; /* of the last frame */
} sample_version;

/* Fails the test if it cannot. */
void sample_open(sample_version *sample, uint64_t version);
void sample_close(sample_version *sample);

/* One byte a block: 1 where `sample` equals `base`. To be freed with free. */
unsigned char *sample_same(const sample_version *sample, const sample_version *base);

rft_message sample_welcome(uint64_t epoch, const char *probe);
rft_message sample_manifest(const sample_version *sample, uint64_t epoch);
/* In full with base 0; through the socket with segment NULL. */
rft_message sample_offer(const sample_version *sample, uint64_t epoch, uint64_t base,
                         const char *segment, uint64_t offset);
rft_message sample_seal(const sample_version *sample);
/* Places of LEND, all in one area that is as an image: in room for SAMPLE_TENSORS of them. */
rft_view sample_places(const sample_version *sample, unsigned char *room);
/* `same` as of sample_same, or NULL. */
rft_message sample_frame(sample_version *sample, uint32_t sequence, const unsigned char *same,
                         rft_view *payload);
rft_message sample_commit(const sample_version *sample);
rft_message sample_abort(const sample_version *sample);
rft_message sample_beat(uint64_t epoch);
rft_message sample_refuse(refit_status code, bool final);
rft_message sample_bye(void);

#endif
