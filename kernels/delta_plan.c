/*
 * The planes of a coded block: the place of each for a coder, and the checks of planes from
 * elsewhere that need no element.
 */
#include "kernels/delta_plan.h"

rft_delta_writer rft_delta_open_writer(rft_delta_shape shape, unsigned char *out,
                                       rft_delta_entry *entry)
{
    rft_delta_writer to = {.shape = shape, .entry = entry};
    uint32_t most = shape.kind == RFT_DELTA_HALF ? entry->changed : 0; /* of escapes */
    rft_delta_lay_out(shape, entry);
    to.low_bits = rft_delta_low_bits(shape.elements, entry->changed);
    to.plane[RFT_DELTA_LOW] = out;
    to.plane[RFT_DELTA_HIGH] = out + entry->bytes[RFT_DELTA_LOW];
    to.plane[RFT_DELTA_SYMBOLS] = to.plane[RFT_DELTA_HIGH] + entry->bytes[RFT_DELTA_HIGH];
    to.plane[RFT_DELTA_ESCAPES] = to.plane[RFT_DELTA_SYMBOLS] + entry->bytes[RFT_DELTA_SYMBOLS];
    to.plane[RFT_DELTA_FAR] = to.plane[RFT_DELTA_ESCAPES] + (most + 1) / 2;
    to.plane[RFT_DELTA_VALUES] = to.plane[RFT_DELTA_FAR] + most;
    return to;
}

void rft_delta_close_writer(rft_delta_writer *writer)
{
    rft_delta_entry *entry = writer->entry;
    rft_delta_lay_out(writer->shape, entry);
    unsigned char *end = writer->plane[RFT_DELTA_ESCAPES] + entry->bytes[RFT_DELTA_ESCAPES];
    for (uint32_t plane = RFT_DELTA_FAR; plane < RFT_DELTA_PLANES; plane++) {
        if (end != writer->plane[plane]) memmove(end, writer->plane[plane], entry->bytes[plane]);
        end += entry->bytes[plane];
    }
}

bool rft_delta_open_reader(rft_delta_shape shape, const rft_delta_entry *entry,
                           const unsigned char *coded, rft_delta_reader *reader)
{
    if (!rft_delta_is_laid_out(shape, entry)) return false;
    *reader = (rft_delta_reader){.shape = shape, .entry = entry};
    reader->low_bits = rft_delta_low_bits(shape.elements, entry->changed);
    reader->plane[0] = coded;
    for (uint32_t i = 0; i < RFT_DELTA_PLANES; i++) {
        reader->plane[i + 1] = reader->plane[i] + entry->bytes[i];
    }
    uint32_t symbol_bits = shape.kind == RFT_DELTA_HALF ? 2 * entry->changed : 0;
    uint32_t high_bits = rft_delta_high_bits(shape.elements, entry->changed);
    return rft_delta_is_clean(reader->plane[RFT_DELTA_LOW], entry->changed * reader->low_bits) &&
           rft_delta_is_clean(reader->plane[RFT_DELTA_HIGH], high_bits) &&
           rft_delta_is_clean(reader->plane[RFT_DELTA_SYMBOLS], symbol_bits) &&
           rft_delta_is_clean(reader->plane[RFT_DELTA_ESCAPES], 4 * entry->escapes);
}

bool rft_delta_is_read(const rft_delta_reader *reader)
{
    const rft_delta_entry *entry = reader->entry;
    bool raw = reader->shape.kind == RFT_DELTA_RAW;
    return reader->done == entry->changed && reader->escapes == entry->escapes &&
           reader->far == entry->far && (raw || reader->values == entry->values);
}
