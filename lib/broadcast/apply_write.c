/* The bytes come from a verified image, but in the publisher's shared memory they may be
 * overwritten under our eyes: nothing here depends on their staying as they are, and the mark tells
 * at the end.
 */
#include "broadcast/apply_write.h"

#include "wire/sparse.h"

rft_apply_run rft_apply_run_of(const rft_block *blocks, uint32_t most)
{
    rft_apply_run run = {.blocks = blocks, .offset = blocks[0].tensor_offset};
    while (run.count < most && run.bytes + blocks[run.count].bytes <= RFT_WINDOW_BYTES)
        run.bytes += blocks[run.count++].bytes;
    return run;
}

refit_status rft_apply_read(const rft_in_place_source *source, uint64_t offset, uint64_t bytes,
                            unsigned char *window, const unsigned char **out, refit_error *error)
{
    const unsigned char *from = source->image->bytes + offset;
    *out = source->device == NULL ? from : window;
    if (source->device == NULL) return REFIT_OK;
    return refit_stream_copy(source->device, REFIT_STREAM_NONE, window, from, bytes, error);
}

/* Notes and changes the window; what of it was touched lies from *first to *end. */
static refit_status change_window(rft_in_place *place, uint32_t index,
                                  const rft_in_place_source *source, const rft_apply_run *run,
                                  const unsigned char *from, unsigned char *window, uint64_t *first,
                                  uint64_t *end, refit_error *error)
{
    uint64_t at = 0;
    *first = *end = 0;
    for (uint32_t i = 0; i < run->count; at += run->blocks[i++].bytes) {
        const rft_block *block = &run->blocks[i];
        rft_note_place where = {index, block->tensor_offset};
        rft_delta_shape shape = rft_sparse_shape(source->image->catalog->manifest, block);
        uint32_t changed;
        RFT_TRY(rft_rollback_change(&place->old, where, shape, window + at, from + at, &changed,
                                    error));
        if (changed == 0) continue;
        place->changed += (uint64_t)changed * shape.width;
        if (*end == 0) *first = at;
        *end = at + block->bytes;
    }
    return REFIT_OK;
}

static refit_status write_run(rft_in_place *place, uint32_t index,
                              const rft_in_place_source *source, const rft_apply_run *run,
                              refit_error *error)
{
    const rft_destination *one = &place->to.list[index];
    const unsigned char *from;
    unsigned char *window;
    uint64_t first, end;
    RFT_TRY(
        rft_apply_read(source, run->blocks[0].offset, run->bytes, place->to.source, &from, error));
    RFT_TRY(rft_destinations_fetch(&place->to, one, run->offset, run->bytes, &window, error));
    RFT_TRY(change_window(place, index, source, run, from, window, &first, &end, error));
    if (end == 0) return REFIT_OK;
    return rft_destinations_put(one, run->offset + first, window + first, end - first, error);
}

refit_status rft_apply_write(rft_in_place *place, uint32_t index, const rft_in_place_source *source,
                             refit_error *error)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    const rft_manifest_tensor *tensor = &manifest->tensors[place->tensors[index]];
    for (uint32_t done = 0; done < tensor->blocks;) {
        rft_apply_run run =
            rft_apply_run_of(&manifest->blocks[tensor->first_block + done], tensor->blocks - done);
        RFT_TRY(write_run(place, index, source, &run, error));
        done += run.count;
    }
    return REFIT_OK;
}
