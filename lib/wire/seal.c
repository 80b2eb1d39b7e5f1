/*
 * The last check before a version counts: every original tensor's digest against the one that the
 * publisher sent, then the version's digest over all of them, which ties them to this manifest.
 * The sums come from an assembly, or are taken from an image here; nothing is allocated.
 */
#include "wire/seal.h"

#include "kernels/digest.h"
#include "wire/assembly.h"

#define DIGEST_BYTES 8u

/* Where a tensor's sum is to be had: one of the two is NULL. */
typedef struct sum_source {
    const uint64_t *sums;
    const unsigned char *image;
} sum_source;

static uint64_t digest_of(const rft_manifest_tensor *tensor, uint32_t index,
                          const sum_source *source)
{
    uint64_t sum = source->sums != NULL
                       ? source->sums[index]
                       : rft_digest_part(source->image + tensor->offset, tensor->bytes, 0);
    return rft_digest_finish(sum, tensor->bytes);
}

static refit_status check_tensors(const rft_manifest *manifest, const sum_source *source,
                                  const unsigned char *expected, refit_error *error)
{
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        uint64_t digest = digest_of(tensor, i, source);
        RFT_REFUSE_IF(digest != rft_get_u64(expected), error, REFIT_ERR_CORRUPT,
                      "tensor '%.80s' is not what the publisher wrote: digest %016llx, not %016llx",
                      tensor->name, (unsigned long long)digest,
                      (unsigned long long)rft_get_u64(expected));
        expected += DIGEST_BYTES;
    }
    return REFIT_OK;
}

static refit_status check_seal(const rft_manifest *manifest, const sum_source *source,
                               const rft_message *seal, refit_error *error)
{
    rft_view digests = seal->as.seal.tensors;
    RFT_REFUSE_IF(digests.count != (size_t)manifest->originals * DIGEST_BYTES, error,
                  REFIT_ERR_PROTOCOL, "the seal has %zu bytes of digests for %u tensors",
                  digests.count, manifest->originals);
    RFT_TRY(check_tensors(manifest, source, digests.data, error));
    rft_digest128 version = rft_version_digest_encoded(manifest, digests);
    RFT_REFUSE_IF(!rft_digest128_equal(&version, &seal->as.seal.digest), error, REFIT_ERR_CORRUPT,
                  "all tensors are right but the version's digest is not: the publisher has "
                  "another manifest");
    return REFIT_OK;
}

refit_status rft_seal_check(const rft_manifest *manifest, const uint64_t *sums,
                            const rft_message *seal, refit_error *error)
{
    return check_seal(manifest, &(sum_source){.sums = sums}, seal, error);
}

refit_status rft_image_verify(const rft_manifest *manifest, const unsigned char *image,
                              const rft_message *seal, refit_error *error)
{
    return check_seal(manifest, &(sum_source){.image = image}, seal, error);
}
