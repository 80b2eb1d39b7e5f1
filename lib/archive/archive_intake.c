/*
 * What refit_archive_write is given, checked before anything is written, and the memory that a
 * version needs, which stays for the next version of the same tensors.
 */
#include "archive/archive_work.h"
#include "base/alloc.h"
#include "base/checked.h"

/* ---- What the caller gives ---- */

refit_status rft_archive_check_version(const refit_archive *archive,
                                       const refit_archive_version *version, refit_error *error)
{
    RFT_REFUSE_IF(archive == NULL || version == NULL || version->size < sizeof *version, error,
                  REFIT_ERR_INVALID, "refit_archive_write needs an archive and version.size set");
    RFT_REFUSE_IF(archive->folder.lock < 0, error, REFIT_ERR_STATE,
                  "the archive is open for reading: open it with REFIT_ARCHIVE_WRITE");
    RFT_REFUSE_IF(archive->written, error, REFIT_ERR_STATE,
                  "version %llu is written: commit or abort it first",
                  (unsigned long long)archive->header.version);
    RFT_REFUSE_IF(version->epoch == 0 || version->version == 0, error, REFIT_ERR_INVALID,
                  "epochs and versions begin at 1");
    RFT_REFUSE_IF(version->weights == NULL && version->weight_count > 0, error, REFIT_ERR_INVALID,
                  "the list of weights is NULL");
    return REFIT_OK;
}

static refit_status take_weight(const rft_manifest *manifest, const refit_weight *weight,
                                const void **memory, bool *taken, refit_error *error)
{
    RFT_REFUSE_IF(weight->tensor >= manifest->count, error, REFIT_ERR_INVALID,
                  "there is no tensor %u: the version has %u", weight->tensor, manifest->count);
    const rft_manifest_tensor *tensor = &manifest->tensors[weight->tensor];
    RFT_REFUSE_IF(tensor->alias_of != REFIT_NO_ALIAS, error, REFIT_ERR_INVALID,
                  "tensor '%.80s' is tied: give the one that it shares bytes with", tensor->name);
    RFT_REFUSE_IF(taken[weight->tensor], error, REFIT_ERR_INVALID, "tensor '%.80s' comes twice",
                  tensor->name);
    RFT_REFUSE_IF(weight->bytes != tensor->bytes, error, REFIT_ERR_INVALID,
                  "tensor '%.80s' has %llu bytes, not %llu", tensor->name,
                  (unsigned long long)tensor->bytes, (unsigned long long)weight->bytes);
    RFT_REFUSE_IF(tensor->bytes > 0 &&
                      (weight->memory == NULL || !rft_span_exists(weight->memory, tensor->bytes)),
                  error, REFIT_ERR_INVALID,
                  "tensor '%.80s' has no memory: its address is NULL, or ends beyond those that "
                  "there are",
                  tensor->name);
    taken[weight->tensor] = true;
    memory[weight->tensor] = weight->memory;
    return REFIT_OK;
}

/* Each original once; `memory` has a place for each tensor. */
refit_status rft_archive_take_weights(const rft_manifest *manifest,
                                      const refit_archive_version *version, const void **memory,
                                      refit_error *error)
{
    RFT_REFUSE_IF(version->weight_count != manifest->originals, error, REFIT_ERR_INVALID,
                  "%u weights for %u tensors that are not tied", version->weight_count,
                  manifest->originals);
    bool *taken = rft_calloc(manifest->count, sizeof *taken);
    RFT_REFUSE_IF(taken == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for %u tensors",
                  manifest->count);
    refit_status status = REFIT_OK;
    for (uint32_t i = 0; i < version->weight_count && status == REFIT_OK; i++)
        status = take_weight(manifest, &version->weights[i], memory, taken, error);
    rft_free(taken);
    return status;
}

/* ---- Memory, which stays for versions of the same tensors ---- */

static refit_status take_memory(refit_archive *archive, refit_error *error)
{
    const rft_manifest *manifest = archive->manifest;
    if (archive->slice == NULL) archive->slice = rft_calloc(1, sizeof *archive->slice);
    archive->image = rft_calloc((size_t)manifest->store_bytes, 1);
    archive->frame = rft_calloc((size_t)rft_archive_slice_most(manifest), 1);
    archive->same = rft_calloc(RFT_FRAME_BLOCKS, 1);
    archive->changes = rft_calloc(manifest->count, sizeof *archive->changes);
    archive->sums = rft_calloc(manifest->count, sizeof *archive->sums);
    archive->digests = rft_calloc((size_t)manifest->originals + 1, 8);
    bool all = archive->slice != NULL && archive->image != NULL && archive->frame != NULL &&
               archive->same != NULL && archive->changes != NULL && archive->sums != NULL &&
               archive->digests != NULL;
    RFT_REFUSE_IF(!all, error, REFIT_ERR_HOST_MEMORY,
                  "no memory for the archive's copy of the weights, %llu bytes",
                  (unsigned long long)manifest->store_bytes);
    return REFIT_OK;
}

/* Keeps the image where the tensors are the same as before. */
refit_status rft_archive_use_manifest(refit_archive *archive, rft_manifest *manifest,
                                      refit_error *error)
{
    bool same = archive->manifest != NULL &&
                rft_digest128_equal(&archive->manifest->digest, &manifest->digest);
    if (same) {
        rft_manifest_close(manifest);
        return REFIT_OK;
    }
    rft_archive_forget(archive);
    archive->manifest = manifest;
    refit_status status = take_memory(archive, error);
    if (status != REFIT_OK) rft_archive_forget(archive);
    return status;
}
