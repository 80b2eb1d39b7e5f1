/* Tensors and manifests to test with. */
#ifndef TENSOR_SAMPLES_H
#define TENSOR_SAMPLES_H

#include "wire/manifest.h"

/* A tensor with the bytes that its shape makes, of its own (no alias). */
refit_tensor sample_tensor(const char *name, refit_dtype dtype, uint32_t rank, uint64_t first,
                           uint64_t second);

/* Seeded tensors of all dtypes, some tied, some empty, at most `most_elements` each; the names live
 * in static memory until the next call. `tensors` has room for `count` <= 64. */
void sample_tensors(uint64_t *seed, refit_tensor *tensors, uint32_t count, uint64_t most_elements);

/* Opens or fails the test. */
rft_manifest *sample_manifest(const refit_tensor *tensors, uint32_t count, uint64_t frame_bytes);

/* store_bytes of seeded bytes, padding zero; free it. */
unsigned char *sample_image(const rft_manifest *manifest, uint64_t *seed);

/* The SEAL of an image; `digests` takes 8 bytes per original. */
rft_message sample_seal(const rft_manifest *manifest, const unsigned char *image,
                        unsigned char *digests);

#endif
