/*
 * The digests of 128 bits, of a list of tensors and of a version, and those of tensors as a seal
 * has them, a tensor each. XXH3-128 in its canonical byte order, so that every machine writes the
 * same bytes. The hashing state lives on the stack: nothing here can fail.
 */
#include <string.h>

#define XXH_STATIC_LINKING_ONLY /* the state's size, to keep it on the stack */
#include <xxhash.h>

#include "kernels/digest.h"
#include "wire/manifest.h"

static rft_digest128 canonical(XXH128_hash_t hash)
{
    XXH128_canonical_t bytes;
    XXH128_canonicalFromHash(&bytes, hash);
    rft_digest128 digest;
    memcpy(digest.bytes, bytes.digest, sizeof digest.bytes);
    return digest;
}

rft_digest128 rft_digest128_of(rft_view bytes)
{
    return canonical(XXH3_128bits(bytes.data, bytes.count));
}

static void begin_version(XXH3_state_t *state, const rft_manifest *manifest)
{
    XXH3_INITSTATE(state);
    (void)XXH3_128bits_reset(state);
    (void)XXH3_128bits_update(state, manifest->digest.bytes, sizeof manifest->digest.bytes);
}

rft_digest128 rft_version_digest(const rft_manifest *manifest, const uint64_t *tensor_digests)
{
    XXH3_state_t state;
    begin_version(&state, manifest);
    for (uint32_t i = 0; i < manifest->originals; i++) {
        unsigned char bytes[8];
        rft_put_u64(bytes, tensor_digests[i]);
        (void)XXH3_128bits_update(&state, bytes, sizeof bytes);
    }
    return canonical(XXH3_128bits_digest(&state));
}

rft_digest128 rft_version_digest_encoded(const rft_manifest *manifest, rft_view tensor_digests)
{
    XXH3_state_t state;
    begin_version(&state, manifest);
    (void)XXH3_128bits_update(&state, tensor_digests.data, tensor_digests.count);
    return canonical(XXH3_128bits_digest(&state));
}

void rft_digests_by_tensor(const rft_manifest *manifest, const unsigned char *encoded,
                           uint64_t *by_tensor)
{
    for (uint32_t i = 0; i < manifest->count; i++) {
        if (manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        by_tensor[i] = rft_get_u64(encoded);
        encoded += 8;
    }
    for (uint32_t i = 0; i < manifest->count; i++) {
        uint32_t original = manifest->tensors[i].alias_of;
        if (original != REFIT_NO_ALIAS) by_tensor[i] = by_tensor[original];
    }
}

bool rft_digest128_equal(const rft_digest128 *a, const rft_digest128 *b)
{
    return memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

/* ---- The door ---- */

uint64_t refit_tensor_digest(const void *memory, uint64_t bytes)
{
    uint64_t sum = bytes == 0 ? 0 : rft_digest_part(memory, (size_t)bytes, 0);
    return rft_digest_finish(sum, bytes);
}

refit_status refit_version_digest(const refit_tensor *tensors, uint32_t count,
                                  const uint64_t *digests, unsigned char digest[16],
                                  refit_error *error)
{
    refit_config config; /* how a version is cut is no part of its digest */
    refit_config_init(&config, sizeof config);
    const rft_limits limits = rft_limits_from(&config);
    RFT_REFUSE_IF(digests == NULL || digest == NULL, error, REFIT_ERR_INVALID,
                  "refit_version_digest needs `digests` and `digest`");
    rft_manifest *manifest;
    RFT_TRY(
        rft_manifest_open(tensors, count, config.broadcast_frame_bytes, &limits, &manifest, error));
    rft_digest128 result = rft_version_digest(manifest, digests);
    rft_manifest_close(manifest);
    memcpy(digest, result.bytes, sizeof result.bytes);
    return REFIT_OK;
}
