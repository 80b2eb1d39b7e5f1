/*
 * Deltas without vectors: the oracle of the other forms, and what other architectures run.
 */
#include "kernels/delta_scalar.h"

#include "kernels/delta_plan.h"

/* ---- Encoding */

static bool differs(const unsigned char *a, const unsigned char *b, uint32_t width)
{
    switch (width) {
    case 1: return *a != *b;
    case 2: return memcmp(a, b, 2) != 0;
    case 4: return memcmp(a, b, 4) != 0;
    default: return memcmp(a, b, 8) != 0;
    }
}

static uint64_t compare_word(const unsigned char *a, const unsigned char *b, uint32_t count,
                             uint32_t width)
{
    uint64_t word = 0;
    if (memcmp(a, b, (size_t)count * width) == 0) return 0;
    for (uint32_t i = 0; i < count; i++) {
        word |= (uint64_t)differs(a + (size_t)i * width, b + (size_t)i * width, width) << i;
    }
    return word;
}

uint32_t rft_delta_compare_scalar(rft_delta_shape shape, const void *before, const void *after,
                                  uint64_t *map)
{
    const unsigned char *a = before, *b = after;
    uint32_t changed = 0, width = shape.width;
    for (uint32_t at = 0; at < shape.elements; at += 64) {
        uint32_t count = shape.elements - at < 64 ? shape.elements - at : 64;
        uint64_t word = compare_word(a + (size_t)at * width, b + (size_t)at * width, count, width);
        map[at / 64] = word;
        changed += (uint32_t)__builtin_popcountll(word);
    }
    return changed;
}

/* Where the next bit or byte of each plane goes. */
typedef struct writer {
    unsigned char *plane[RFT_DELTA_PLANES];
    uint32_t low_bits;
    uint32_t done; /* elements */
    rft_delta_entry *entry;
} writer;

/* Into a plane that is 0 there so far. */
static void put_bits(unsigned char *plane, uint32_t at, uint32_t bits)
{
    for (uint32_t shifted = bits << at % 8, i = at / 8; shifted != 0; shifted >>= 8, i++) {
        plane[i] |= (unsigned char)shifted;
    }
}

static void put_position(writer *to, uint32_t position)
{
    uint32_t low = to->low_bits;
    uint32_t rank = low == 0 ? 0 : to->done;
    put_bits(to->plane[RFT_DELTA_LOW], to->done * low, position & ((1u << low) - 1));
    put_bits(to->plane[RFT_DELTA_HIGH], (position >> low) + rank, 1);
}

static void put_far(writer *to, const unsigned char *after, uint32_t number, uint32_t distance)
{
    unsigned char far = distance <= 127 ? (unsigned char)(number % 255) : 255;
    to->plane[RFT_DELTA_FAR][to->entry->far++] = far;
    if (far == 255) memcpy(to->plane[RFT_DELTA_VALUES] + 2 * (size_t)to->entry->values++, after, 2);
}

static void put_half(writer *to, const unsigned char *before, const unsigned char *after)
{
    uint32_t old = rft_delta_number(before), number = rft_delta_number(after);
    uint32_t distance = number > old ? number - old : old - number;
    put_bits(to->plane[RFT_DELTA_SYMBOLS], 2 * to->done, distance <= 1 ? number % 3 : 3);
    if (distance <= 1) return;
    put_bits(to->plane[RFT_DELTA_ESCAPES], 4 * to->entry->escapes++,
             distance <= 7 ? number % 15 : 15);
    if (distance > 7) put_far(to, after, number, distance);
}

/* The planes whose lengths are not known yet stand so far apart that they cannot meet. */
static writer open_writer(rft_delta_shape shape, unsigned char *out, rft_delta_entry *entry)
{
    writer to = {.low_bits = rft_delta_low_bits(shape.elements, entry->changed), .entry = entry};
    uint32_t known = entry->bytes[RFT_DELTA_LOW] + entry->bytes[RFT_DELTA_HIGH] +
                     entry->bytes[RFT_DELTA_SYMBOLS];
    bool half = shape.kind == RFT_DELTA_HALF;
    to.plane[RFT_DELTA_LOW] = out;
    to.plane[RFT_DELTA_HIGH] = out + entry->bytes[RFT_DELTA_LOW];
    to.plane[RFT_DELTA_SYMBOLS] = to.plane[RFT_DELTA_HIGH] + entry->bytes[RFT_DELTA_HIGH];
    to.plane[RFT_DELTA_ESCAPES] = out + known;
    to.plane[RFT_DELTA_FAR] = out + known + (half ? (entry->changed + 1) / 2 : 0);
    to.plane[RFT_DELTA_VALUES] = to.plane[RFT_DELTA_FAR] + (half ? entry->changed : 0);
    memset(out, 0, (size_t)(to.plane[RFT_DELTA_FAR] - out));
    return to;
}

/* Closes the ranks. */
static void close_writer(rft_delta_shape shape, writer *to)
{
    rft_delta_lay_out(shape, to->entry);
    unsigned char *end = to->plane[RFT_DELTA_ESCAPES] + to->entry->bytes[RFT_DELTA_ESCAPES];
    for (uint32_t plane = RFT_DELTA_FAR; plane < RFT_DELTA_PLANES; plane++) {
        memmove(end, to->plane[plane], to->entry->bytes[plane]);
        end += to->entry->bytes[plane];
    }
}

void rft_delta_encode_scalar(rft_delta_shape shape, const void *before, const void *after,
                             const uint64_t *map, unsigned char *out, rft_delta_entry *entry)
{
    writer to = open_writer(shape, out, entry);
    for (uint32_t at = 0; at < shape.elements; at += 64) {
        for (uint64_t word = map[at / 64]; word != 0; word &= word - 1, to.done++) {
            uint32_t position = at + (uint32_t)__builtin_ctzll(word);
            size_t from = (size_t)position * shape.width;
            const unsigned char *value = (const unsigned char *)after + from;
            put_position(&to, position);
            if (shape.kind == RFT_DELTA_HALF) {
                put_half(&to, (const unsigned char *)before + from, value);
            } else {
                memcpy(to.plane[RFT_DELTA_VALUES] + (size_t)to.done * shape.width, value,
                       shape.width);
            }
        }
    }
    close_writer(shape, &to);
}

/* ---- Applying */

typedef struct reader {
    const unsigned char *plane[RFT_DELTA_PLANES];
    const unsigned char *end;
    const rft_delta_entry *entry;
    uint32_t low_bits;
    uint32_t done, escapes, far, values; /* of the entry's, read so far */
} reader;

static uint32_t get_bits(const unsigned char *plane, const unsigned char *end, uint32_t at,
                         uint32_t count)
{
    uint64_t word = rft_delta_load_before(plane + at / 8, end);
    return (uint32_t)(word >> at % 8) & ((1u << count) - 1);
}

/* The number nearest to `own` that leaves `rest` when divided by `by`, which is odd and divides
 * 65,535. */
static uint32_t nearest(uint32_t own, uint32_t rest, uint32_t by)
{
    int32_t apart = (int32_t)rest - (int32_t)(own % by), half = (int32_t)by / 2;
    if (apart > half) apart -= (int32_t)by;
    if (apart < -half) apart += (int32_t)by;
    int32_t number = (int32_t)own + apart;
    if (number < 0) number += (int32_t)by;
    if (number > UINT16_MAX) number -= (int32_t)by;
    return (uint32_t)number;
}

static bool get_far(reader *from, unsigned char *element)
{
    if (from->far == from->entry->far) return false;
    unsigned char far = from->plane[RFT_DELTA_FAR][from->far++];
    if (far != 255) {
        rft_delta_put_number(element, nearest(rft_delta_number(element), far, 255));
        return true;
    }
    if (from->values == from->entry->values) return false;
    memcpy(element, from->plane[RFT_DELTA_VALUES] + 2 * (size_t)from->values++, 2);
    return true;
}

static bool get_half(reader *from, unsigned char *element)
{
    uint32_t symbol = get_bits(from->plane[RFT_DELTA_SYMBOLS], from->end, 2 * from->done, 2);
    if (symbol != 3) {
        rft_delta_put_number(element, nearest(rft_delta_number(element), symbol, 3));
        return true;
    }
    if (from->escapes == from->entry->escapes) return false;
    uint32_t escape = get_bits(from->plane[RFT_DELTA_ESCAPES], from->end, 4 * from->escapes++, 4);
    if (escape == 15) return get_far(from, element);
    rft_delta_put_number(element, nearest(rft_delta_number(element), escape, 15));
    return true;
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

/* Unused bits at the end of a plane are 0. */
static bool is_clean(const unsigned char *plane, uint32_t bits)
{
    return bits % 8 == 0 || plane[bits / 8] >> bits % 8 == 0;
}

static bool open_reader(rft_delta_shape shape, const rft_delta_entry *entry,
                        const unsigned char *coded, reader *from)
{
    if (!is_laid_out(shape, entry)) return false;
    *from = (reader){.end = coded, .entry = entry};
    from->low_bits = rft_delta_low_bits(shape.elements, entry->changed);
    for (uint32_t i = 0; i < RFT_DELTA_PLANES; i++) {
        from->plane[i] = from->end;
        from->end += entry->bytes[i];
    }
    uint32_t symbol_bits = shape.kind == RFT_DELTA_HALF ? 2 * entry->changed : 0;
    return is_clean(from->plane[RFT_DELTA_LOW], entry->changed * from->low_bits) &&
           is_clean(from->plane[RFT_DELTA_HIGH],
                    rft_delta_high_bits(shape.elements, entry->changed)) &&
           is_clean(from->plane[RFT_DELTA_SYMBOLS], symbol_bits) &&
           is_clean(from->plane[RFT_DELTA_ESCAPES], 4 * entry->escapes);
}

/* Whether all that is in the planes has been read. */
static bool is_at_end(const reader *from, rft_delta_kind kind)
{
    const rft_delta_entry *entry = from->entry;
    return from->done == entry->changed && from->escapes == entry->escapes &&
           from->far == entry->far && (kind == RFT_DELTA_RAW || from->values == entry->values);
}

/* The element whose bit of HIGH is `bit`. */
static bool get_element(rft_delta_shape shape, reader *from, uint32_t bit, unsigned char *block,
                        uint32_t *least)
{
    uint32_t low = from->low_bits, rank = low == 0 ? 0 : from->done;
    if (from->done == from->entry->changed) return false;
    uint32_t position = (bit - rank) << low;
    position |= get_bits(from->plane[RFT_DELTA_LOW], from->end, from->done * low, low);
    if (position < *least || position >= shape.elements) return false;
    *least = position + 1;
    unsigned char *element = block + (size_t)position * shape.width;
    if (shape.kind == RFT_DELTA_HALF) {
        if (!get_half(from, element)) return false;
    } else {
        memcpy(element, from->plane[RFT_DELTA_VALUES] + (size_t)from->done * shape.width,
               shape.width);
    }
    from->done++;
    return true;
}

bool rft_delta_apply_scalar(rft_delta_shape shape, const rft_delta_entry *entry,
                            const unsigned char *coded, void *block)
{
    reader from;
    if (!open_reader(shape, entry, coded, &from)) return false;
    const unsigned char *high = from.plane[RFT_DELTA_HIGH];
    const unsigned char *end = high + entry->bytes[RFT_DELTA_HIGH];
    uint32_t least = 0;
    for (const unsigned char *at = high; at < end; at += 8) {
        for (uint64_t word = rft_delta_load_before(at, end); word != 0; word &= word - 1) {
            uint32_t bit = (uint32_t)(at - high) * 8 + (uint32_t)__builtin_ctzll(word);
            if (!get_element(shape, &from, bit, block, &least)) return false;
        }
    }
    return is_at_end(&from, shape.kind);
}
