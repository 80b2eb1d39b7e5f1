/*
 * The planes of a coded block: their lengths, where a coder writes them, and what can be said
 * against those that came from elsewhere before an element is read.
 */
#include "kernels/delta_plan.h"

void rft_delta_lay_out(rft_delta_shape shape, rft_delta_entry *entry)
{
    bool half = shape.kind == RFT_DELTA_HALF;
    uint32_t changed = entry->changed;
    entry->bytes[RFT_DELTA_LOW] = (changed * rft_delta_low_bits(shape.elements, changed) + 7) / 8;
    entry->bytes[RFT_DELTA_HIGH] = (rft_delta_high_bits(shape.elements, changed) + 7) / 8;
    entry->bytes[RFT_DELTA_SYMBOLS] = half ? (changed + 3) / 4 : 0;
    entry->bytes[RFT_DELTA_ESCAPES] = (entry->escapes + 1) / 2;
    entry->bytes[RFT_DELTA_FAR] = entry->far;
    entry->bytes[RFT_DELTA_VALUES] = entry->values * shape.width;
    entry->total = 0;
    for (uint32_t i = 0; i < RFT_DELTA_PLANES; i++) {
        entry->total += entry->bytes[i];
    }
}

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

/* The counts agree with each other, and the lengths with the counts. */
static bool is_laid_out(rft_delta_shape shape, const rft_delta_entry *entry)
{
    bool half = shape.kind == RFT_DELTA_HALF;
    if (entry->changed == 0 || entry->changed > shape.elements) return false;
    if (entry->escapes > (half ? entry->changed : 0) || entry->far > entry->escapes) return false;
    if (half ? entry->values > entry->far : entry->values != entry->changed) return false;
    rft_delta_entry expected = *entry;
    rft_delta_lay_out(shape, &expected);
    return memcmp(&expected, entry, sizeof expected) == 0;
}

static bool is_clean(const unsigned char *plane, uint32_t bits)
{
    return bits % 8 == 0 || plane[bits / 8] >> bits % 8 == 0;
}

bool rft_delta_open_reader(rft_delta_shape shape, const rft_delta_entry *entry,
                           const unsigned char *coded, rft_delta_reader *reader)
{
    if (!is_laid_out(shape, entry)) return false;
    *reader = (rft_delta_reader){.shape = shape, .entry = entry};
    reader->low_bits = rft_delta_low_bits(shape.elements, entry->changed);
    reader->plane[0] = coded;
    for (uint32_t i = 0; i < RFT_DELTA_PLANES; i++) {
        reader->plane[i + 1] = reader->plane[i] + entry->bytes[i];
    }
    uint32_t symbol_bits = shape.kind == RFT_DELTA_HALF ? 2 * entry->changed : 0;
    uint32_t high_bits = rft_delta_high_bits(shape.elements, entry->changed);
    return is_clean(reader->plane[RFT_DELTA_LOW], entry->changed * reader->low_bits) &&
           is_clean(reader->plane[RFT_DELTA_HIGH], high_bits) &&
           is_clean(reader->plane[RFT_DELTA_SYMBOLS], symbol_bits) &&
           is_clean(reader->plane[RFT_DELTA_ESCAPES], 4 * entry->escapes);
}

bool rft_delta_is_read(const rft_delta_reader *reader)
{
    const rft_delta_entry *entry = reader->entry;
    bool raw = reader->shape.kind == RFT_DELTA_RAW;
    return reader->done == entry->changed && reader->escapes == entry->escapes &&
           reader->far == entry->far && (raw || reader->values == entry->values);
}
