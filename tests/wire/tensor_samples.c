/* Tensors and manifests to test with; the digests are taken tensor by tensor, not block by block.
 */
#include <stdio.h>
#include <stdlib.h>

#include "kernels/digest.h"
#include "tensor_samples.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "wire_samples.h"

refit_tensor sample_tensor(const char *name, refit_dtype dtype, uint32_t rank, uint64_t first,
                           uint64_t second)
{
    refit_tensor tensor = {.size = sizeof tensor,
                           .name = name,
                           .dtype = dtype,
                           .rank = rank,
                           .shape = {first, second},
                           .alias_of = REFIT_NO_ALIAS};
    uint64_t elements = (rank > 0 ? first : 1) * (rank > 1 ? second : 1);
    tensor.bytes = (elements * refit_dtype_bits(dtype) + 7) / 8;
    return tensor;
}

static uint32_t pick_original(const refit_tensor *tensors, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (tensors[i].alias_of == REFIT_NO_ALIAS) return i;
    return REFIT_NO_ALIAS;
}

void sample_tensors(uint64_t *seed, refit_tensor *tensors, uint32_t count, uint64_t most_elements)
{
    static char names[64][32];
    assert_true(count <= 64);
    for (uint32_t i = 0; i < count; i++) {
        refit_dtype dtype = (refit_dtype)(1 + seeded_below(seed, 20));
        uint64_t columns = 1 + seeded_below(seed, 40);
        uint64_t rows = seeded_below(seed, most_elements / columns + 1);
        (void)snprintf(names[i], sizeof names[i], "layer.%u.weight", i);
        tensors[i] = sample_tensor(names[i], dtype, (uint32_t)seeded_below(seed, 3), rows, columns);
        uint32_t original = pick_original(tensors, i);
        if (original == REFIT_NO_ALIAS || seeded_below(seed, 5) != 0) continue;
        const char *name = tensors[i].name;
        tensors[i] = tensors[original];
        tensors[i].name = name;
        tensors[i].alias_of = original;
    }
}

rft_manifest *sample_manifest(const refit_tensor *tensors, uint32_t count, uint64_t frame_bytes)
{
    rft_limits limits = sample_limits();
    rft_manifest *manifest;
    refit_error error = {0};
    refit_status status =
        rft_manifest_open(tensors, count, frame_bytes, &limits, &manifest, &error);
    if (status != REFIT_OK) fail_msg("%s", error.text);
    return manifest;
}

unsigned char *sample_image(const rft_manifest *manifest, uint64_t *seed)
{
    unsigned char *image = calloc(1, manifest->store_bytes);
    assert_non_null(image);
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        for (uint64_t at = 0; at < tensor->bytes; at++)
            image[tensor->offset + at] = (unsigned char)(seeded_next(seed) >> 17);
    }
    return image;
}

rft_message sample_seal(const rft_manifest *manifest, const unsigned char *image,
                        unsigned char *digests)
{
    uint64_t *numbers = calloc(manifest->originals, sizeof *numbers);
    assert_non_null(numbers);
    uint32_t next = 0;
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        uint64_t sum = rft_digest_part(image + tensor->offset, tensor->bytes, 0);
        numbers[next] = rft_digest_finish(sum, tensor->bytes);
        rft_put_u64(digests + 8 * (size_t)next, numbers[next]);
        next++;
    }
    rft_message seal = {.kind = RFT_SEAL};
    seal.as.seal.version = 1;
    seal.as.seal.digest = rft_version_digest(manifest, numbers);
    seal.as.seal.tensors = bytes_view(digests, 8 * (size_t)next);
    free(numbers);
    return seal;
}
