/*
 * A destination equals the image where it was compared, so this is for broadcast.verify: always:
 * the digests of what is really there, a device's memory included, up to the digest of the version.
 */
#include "subscriber/apply_verify.h"

#include "base/alloc.h"
#include "kernels/digest.h"
#include "subscriber/apply_plan.h"
#include "subscriber/apply_write.h"

static refit_status digest_source(const rft_in_place *place, const rft_in_place_source *source,
                                  const rft_manifest_tensor *tensor, rft_apply_cast cast,
                                  uint64_t *sum, refit_error *error)
{
    *sum = 0;
    for (uint32_t done = 0; done < tensor->blocks;) {
        const rft_manifest *manifest = source->image->catalog->manifest;
        rft_apply_run run = rft_apply_run_of(&manifest->blocks[tensor->first_block + done],
                                             tensor->blocks - done, cast);
        const unsigned char *bytes;
        RFT_TRY(rft_apply_read_run(place, source, &run, &bytes, error));
        *sum += rft_digest_part(bytes, rft_apply_there(cast, run.bytes),
                                rft_apply_there(cast, run.offset));
        done += run.count;
    }
    return REFIT_OK;
}

/* What was converted is held against the image converted once more. */
static refit_status check_converted(const rft_in_place *place, const rft_in_place_source *source,
                                    const rft_destination *one, const rft_manifest_tensor *tensor,
                                    refit_error *error)
{
    uint64_t sum, expected;
    RFT_TRY(rft_destinations_digest(&place->to, one, &sum, error));
    RFT_TRY(digest_source(place, source, tensor, rft_apply_cast_of(one, tensor), &expected, error));
    RFT_REFUSE_IF(sum != expected, error, REFIT_ERR_CORRUPT,
                  "the destination of '%.160s' is not what was written there", one->name);
    return REFIT_OK;
}

/* Of all tensors: what has no destination counts as it lies in the image, so that it is the
 * version's digest that comes of it. Where one has several, each is held against the first. */
static refit_status digest_tensors(const rft_in_place *place, const rft_in_place_source *source,
                                   uint64_t *digests, unsigned char *known, refit_error *error)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    const rft_apply_cast none = {.from_width = 1, .to_width = 1};
    for (uint32_t i = 0; i < place->to.count; i++) {
        uint32_t tensor = place->tensors[i];
        if (tensor == RFT_NO_TENSOR) continue;
        const rft_destination *one = &place->to.list[i];
        if (rft_apply_casts(rft_apply_cast_of(one, &manifest->tensors[tensor]))) {
            RFT_TRY(check_converted(place, source, one, &manifest->tensors[tensor], error));
            continue;
        }
        uint64_t sum;
        RFT_TRY(rft_destinations_digest(&place->to, one, &sum, error));
        sum = rft_digest_finish(sum, manifest->tensors[tensor].bytes);
        RFT_REFUSE_IF(known[tensor] && digests[tensor] != sum, error, REFIT_ERR_CORRUPT,
                      "the destination of '%.160s' is not what was written there", one->name);
        digests[tensor] = sum;
        known[tensor] = 1;
    }
    for (uint32_t i = 0; i < manifest->count; i++) {
        if (known[i] || manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        RFT_TRY(digest_source(place, source, &manifest->tensors[i], none, &digests[i], error));
        digests[i] = rft_digest_finish(digests[i], manifest->tensors[i].bytes);
    }
    return REFIT_OK;
}

/* rft_version_digest wants those of originals, in order. */
static refit_status check_digest(const rft_manifest *manifest, const rft_image *image,
                                 uint64_t *digests, refit_error *error)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < manifest->count; i++) {
        if (manifest->tensors[i].alias_of == REFIT_NO_ALIAS) digests[count++] = digests[i];
    }
    rft_digest128 digest = rft_version_digest(manifest, digests);
    RFT_REFUSE_IF(!rft_digest128_equal(&digest, &image->held.digest), error, REFIT_ERR_CORRUPT,
                  "the digest of what was written is not that of version %llu",
                  (unsigned long long)image->held.version);
    return REFIT_OK;
}

refit_status rft_apply_verify(const rft_in_place *place, const rft_in_place_source *source,
                              refit_error *error)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    uint64_t *digests = rft_calloc((size_t)manifest->count + 1, sizeof *digests);
    unsigned char *known = rft_calloc((size_t)manifest->count + 1, 1);
    refit_status status = REFIT_OK;
    if (digests == NULL || known == NULL) {
        status =
            rft_fail(error, REFIT_ERR_HOST_MEMORY, "no memory for %u digests", manifest->count);
    }
    if (status == REFIT_OK) status = digest_tensors(place, source, digests, known, error);
    if (status == REFIT_OK) status = check_digest(manifest, source->image, digests, error);
    rft_free(digests);
    rft_free(known);
    return status;
}
