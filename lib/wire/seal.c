/*
 * The last check before a version counts: every original tensor's digest against the one that the
 * publisher sent, then the version's digest over all of them, which ties them to this manifest.
 * The sums come from an assembly, or are taken from an image here, which may take several calls: a
 * cursor keeps the tensor reached and the sum of its bytes so far. Nothing is allocated.
 */
#include "wire/seal.h"

#include "kernels/digest.h"
#include "wire/assembly.h"

#define DIGEST_BYTES 8u
/* Parts of a digest begin at whole words. */
#define WORD_BYTES 8u

static refit_status check_length(const rft_manifest *manifest, rft_view digests, refit_error *error)
{
    RFT_REFUSE_IF(digests.count != (size_t)manifest->originals * DIGEST_BYTES, error,
                  REFIT_ERR_PROTOCOL, "the seal has %zu bytes of digests for %u tensors",
                  digests.count, manifest->originals);
    return REFIT_OK;
}

static refit_status check_tensor(const rft_manifest_tensor *tensor, uint64_t sum,
                                 const unsigned char *expected, refit_error *error)
{
    uint64_t digest = rft_digest_finish(sum, tensor->bytes);
    RFT_REFUSE_IF(digest != rft_get_u64(expected), error, REFIT_ERR_CORRUPT,
                  "tensor '%.80s' is not what the publisher wrote: digest %016llx, not %016llx",
                  tensor->name, (unsigned long long)digest,
                  (unsigned long long)rft_get_u64(expected));
    return REFIT_OK;
}

static refit_status check_version(const rft_manifest *manifest, const rft_message *seal,
                                  refit_error *error)
{
    rft_digest128 version = rft_version_digest_encoded(manifest, seal->as.seal.tensors);
    RFT_REFUSE_IF(!rft_digest128_equal(&version, &seal->as.seal.digest), error, REFIT_ERR_CORRUPT,
                  "all tensors are right but the version's digest is not: the publisher has "
                  "another manifest");
    return REFIT_OK;
}

refit_status rft_seal_check(const rft_manifest *manifest, const uint64_t *sums,
                            const rft_message *seal, refit_error *error)
{
    RFT_TRY(check_length(manifest, seal->as.seal.tensors, error));
    const unsigned char *expected = seal->as.seal.tensors.data;
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        RFT_TRY(check_tensor(tensor, sums[i], expected, error));
        expected += DIGEST_BYTES;
    }
    return check_version(manifest, seal, error);
}

/* ---- An image, part by part ---- */

/* Adds what it may of the tensor at the cursor, and says how many bytes those were. */
static uint64_t add_part(rft_image_cursor *cursor, const rft_manifest_tensor *tensor,
                         const unsigned char *image, uint64_t most)
{
    uint64_t left = tensor->bytes - cursor->offset;
    uint64_t bytes = left <= most ? left : most - most % WORD_BYTES;
    cursor->sum +=
        rft_digest_part(image + tensor->offset + cursor->offset, (size_t)bytes, cursor->offset);
    cursor->offset += bytes;
    return bytes;
}

static void next_tensor(rft_image_cursor *cursor, bool original)
{
    cursor->tensor++;
    cursor->original += original ? 1 : 0;
    cursor->offset = 0;
    cursor->sum = 0;
}

refit_status rft_image_verify_part(const rft_manifest *manifest, const unsigned char *image,
                                   const rft_message *seal, uint64_t most, rft_image_cursor *cursor,
                                   refit_error *error)
{
    RFT_TRY(check_length(manifest, seal->as.seal.tensors, error));
    const unsigned char *expected = seal->as.seal.tensors.data;
    while (cursor->tensor < manifest->count) {
        const rft_manifest_tensor *tensor = &manifest->tensors[cursor->tensor];
        bool original = tensor->alias_of == REFIT_NO_ALIAS;
        if (original) {
            most -= add_part(cursor, tensor, image, most);
            if (cursor->offset < tensor->bytes) return REFIT_OK;
            RFT_TRY(check_tensor(tensor, cursor->sum,
                                 expected + (size_t)cursor->original * DIGEST_BYTES, error));
        }
        next_tensor(cursor, original);
    }
    RFT_TRY(check_version(manifest, seal, error));
    cursor->done = true;
    return REFIT_OK;
}

refit_status rft_image_verify(const rft_manifest *manifest, const unsigned char *image,
                              const rft_message *seal, refit_error *error)
{
    rft_image_cursor cursor = {0};
    return rft_image_verify_part(manifest, image, seal, UINT64_MAX, &cursor, error);
}
