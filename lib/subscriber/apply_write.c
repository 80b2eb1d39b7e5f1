/* The bytes come from a verified image, but in the publisher's shared memory they may be
 * overwritten under our eyes: nothing here depends on their staying as they are, and the mark tells
 * at the end.
 */
#include "subscriber/apply_write.h"

#include "subscriber/convert.h"
#include "wire/sparse.h"

rft_apply_cast rft_apply_cast_of(const rft_destination *one, const rft_manifest_tensor *tensor)
{
    rft_apply_cast none = {.from_width = 1, .to_width = 1};
    if (!one->cast || !rft_converts(tensor->dtype, one->dtype)) return none;
    return (rft_apply_cast){
        .from = tensor->dtype,
        .to = one->dtype,
        .from_width = refit_dtype_bits(tensor->dtype) / 8,
        .to_width = refit_dtype_bits(one->dtype) / 8,
    };
}

bool rft_apply_casts(rft_apply_cast cast)
{
    return cast.from != cast.to;
}

uint64_t rft_apply_there(rft_apply_cast cast, uint64_t bytes)
{
    return bytes / cast.from_width * cast.to_width;
}

static bool fits(const rft_apply_run *run)
{
    uint64_t bytes = run->bytes + run->blocks[run->count].bytes;
    return bytes <= RFT_WINDOW_BYTES && rft_apply_there(run->cast, bytes) <= RFT_WINDOW_BYTES;
}

rft_apply_run rft_apply_run_of(const rft_block *blocks, uint32_t most, rft_apply_cast cast)
{
    rft_apply_run run = {.blocks = blocks, .cast = cast, .offset = blocks[0].tensor_offset};
    while (run.count < most && fits(&run))
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

refit_status rft_apply_read_run(const rft_in_place *place, const rft_in_place_source *source,
                                const rft_apply_run *run, const unsigned char **out,
                                refit_error *error)
{
    RFT_TRY(
        rft_apply_read(source, run->blocks[0].offset, run->bytes, place->to.source, out, error));
    if (!rft_apply_casts(run->cast)) return REFIT_OK;
    rft_convert(run->cast.from, run->cast.to, place->to.converted, *out,
                run->bytes / run->cast.from_width);
    *out = place->to.converted;
    return REFIT_OK;
}

/* Of a block as it is in the destination. */
static rft_delta_shape shape_of(const rft_in_place_source *source, const rft_apply_run *run,
                                const rft_block *block)
{
    rft_delta_shape shape = rft_sparse_shape(source->image->catalog->manifest, block);
    if (rft_apply_casts(run->cast)) shape.width = run->cast.to_width;
    return shape;
}

/* Notes and changes the window; what of it was touched lies from *first to *end. */
static refit_status change_window(rft_in_place *place, uint32_t index,
                                  const rft_in_place_source *source, const rft_apply_run *run,
                                  const unsigned char *from, unsigned char *window, uint64_t *first,
                                  uint64_t *end, refit_error *error)
{
    uint64_t at = 0, bytes;
    *first = *end = 0;
    for (uint32_t i = 0; i < run->count; i++, at += bytes) {
        const rft_block *block = &run->blocks[i];
        rft_note_place where = {index, rft_apply_there(run->cast, block->tensor_offset)};
        rft_delta_shape shape = shape_of(source, run, block);
        uint32_t changed;
        bytes = rft_apply_there(run->cast, block->bytes);
        RFT_TRY(rft_rollback_change(&place->old, where, shape, window + at, from + at, &changed,
                                    error));
        if (changed == 0) continue;
        place->changed += (uint64_t)changed * shape.width;
        if (*end == 0) *first = at;
        *end = at + bytes;
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
    uint64_t offset = rft_apply_there(run->cast, run->offset);
    RFT_TRY(rft_apply_read_run(place, source, run, &from, error));
    RFT_TRY(rft_destinations_fetch(&place->to, one, offset, rft_apply_there(run->cast, run->bytes),
                                   &window, error));
    RFT_TRY(change_window(place, index, source, run, from, window, &first, &end, error));
    if (end == 0) return REFIT_OK;
    return rft_destinations_put(one, offset + first, window + first, end - first, error);
}

refit_status rft_apply_write(rft_in_place *place, uint32_t index, const rft_in_place_source *source,
                             refit_error *error)
{
    const rft_manifest *manifest = source->image->catalog->manifest;
    const rft_manifest_tensor *tensor = &manifest->tensors[place->tensors[index]];
    rft_apply_cast cast = rft_apply_cast_of(&place->to.list[index], tensor);
    for (uint32_t done = 0; done < tensor->blocks;) {
        rft_apply_run run = rft_apply_run_of(&manifest->blocks[tensor->first_block + done],
                                             tensor->blocks - done, cast);
        RFT_TRY(write_run(place, index, source, &run, error));
        done += run.count;
    }
    return REFIT_OK;
}
