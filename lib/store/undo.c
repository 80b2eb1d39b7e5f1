/*
 * The undo log as a sparse second image: a block is saved where it lay, so there is no list to keep
 * and nothing to allocate while a version is written.
 */
#include "store/undo.h"

#include <string.h>
#include <sys/mman.h>

#include "base/alloc.h"
#include "kernels/copy.h"

refit_status rft_undo_open(rft_undo *undo, const rft_manifest *manifest, refit_error *error)
{
    *undo = (rft_undo){.manifest = manifest};
    unsigned char *has = rft_calloc((size_t)manifest->block_count + 1, 1);
    RFT_REFUSE_IF(has == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for the undo log");
    refit_status status = rft_segment_create_sparse(&undo->saved, manifest->store_bytes, error);
    if (status == REFIT_OK) {
        undo->has = has;
    } else {
        rft_free(has);
    }
    return status;
}

void rft_undo_close(rft_undo *undo)
{
    if (undo->has == NULL) return;
    rft_segment_close(&undo->saved);
    rft_free(undo->has);
    undo->has = NULL;
}

void rft_undo_save(rft_undo *undo, uint32_t block, const unsigned char *image)
{
    const rft_block *place = &undo->manifest->blocks[block];
    if (undo->has[block]) return;
    rft_copy_bytes(undo->saved.memory + place->offset, image + place->offset, place->bytes);
    undo->has[block] = 1;
}

void rft_undo_restore(const rft_undo *undo, unsigned char *image)
{
    for (uint32_t i = 0; i < undo->manifest->block_count; i++) {
        const rft_block *place = &undo->manifest->blocks[i];
        if (!undo->has[i]) continue;
        rft_copy_bytes(image + place->offset, undo->saved.memory + place->offset, place->bytes);
    }
}

void rft_undo_reset(rft_undo *undo)
{
    if (undo->has == NULL) return;
    memset(undo->has, 0, undo->manifest->block_count);
    (void)madvise(undo->saved.memory, undo->saved.bytes, MADV_DONTNEED);
}
