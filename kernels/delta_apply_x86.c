/*
 * Applying with vectors, the way of delta_encode_x86.c back. What the planes say is judged chunk by
 * chunk, before an element of the chunk is touched. Planes are read from a copy of their next
 * bytes, so that reading by words cannot go beyond what there is.
 */
#include "kernels/delta_x86.h"

#if defined(__x86_64__)
#include "kernels/delta_chunk_x86.h"

typedef struct decoder {
    rft_delta_reader *from;
    unsigned char *block;
    uint32_t least;               /* where the next element may lie */
    uint16_t bit[RFT_DELTA_ROOM]; /* of HIGH, modulo 65,536 */
    uint16_t place[RFT_DELTA_ROOM];
    uint16_t half[RFT_DELTA_ROOM];
    uint16_t symbol[RFT_DELTA_ROOM];
    unsigned char bytes[2 * RFT_DELTA_ROOM + 16]; /* of a plane */
} decoder;

/* The bytes in which the next `count` elements have `bits` bits each. */
static const unsigned char *fetch(decoder *d, rft_delta_plane plane, uint32_t bits, uint32_t count)
{
    size_t at = (size_t)d->from->done * bits / 8;
    memcpy(d->bytes, d->from->plane[plane] + at, ((size_t)count * bits + 7) / 8);
    return d->bytes;
}

/* The low bits of all. */
RFT_DELTA_TARGET static void get_low(decoder *d, uint32_t count)
{
    uint32_t low = d->from->low_bits;
    uint64_t mask = rft_delta_four(low);
    const unsigned char *at = fetch(d, RFT_DELTA_LOW, low, count);
    for (uint32_t i = 0; i < count; i += 8, at += low) {
        uint64_t four[2];
        four[0] = _pdep_u64(rft_delta_load(at), mask);
        four[1] = _pdep_u64(rft_delta_load(at + low / 2) >> low % 2 * 4, mask);
        memcpy(d->place + i, four, sizeof four);
    }
}

/* The places from both parts. Those of the high part never fall, and the last one is not beyond the
 * block's last, so that nothing is lost in 16 bits. */
RFT_DELTA_TARGET static bool get_high(decoder *d, uint32_t count)
{
    uint32_t low = d->from->low_bits, rank = d->from->done;
    uint32_t last = (uint16_t)(d->bit[count - 1] - (rank + count - 1));
    if (last > (d->from->shape.elements - 1) >> low) return false;
    const __m256i lanes = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i shift = _mm_cvtsi32_si128((int)low);
    for (uint32_t i = 0; i < count; i += 16) {
        __m256i *place = (__m256i *)(d->place + i);
        __m256i ranks = _mm256_add_epi16(_mm256_set1_epi16((short)(rank + i)), lanes);
        __m256i bits = _mm256_loadu_si256((const __m256i *)(d->bit + i));
        __m256i high = _mm256_sll_epi16(_mm256_sub_epi16(bits, ranks), shift);
        _mm256_storeu_si256(place, _mm256_or_si256(high, _mm256_loadu_si256(place)));
    }
    return true;
}

/* Each place lies behind the one before it. */
RFT_DELTA_TARGET static bool is_rising(const uint16_t *place, uint32_t count)
{
    const __m256i zero = _mm256_setzero_si256();
    __m256i falls = zero;
    uint32_t i = 1;
    for (; i + 16 <= count; i += 16) {
        __m256i here = _mm256_loadu_si256((const __m256i *)(place + i));
        __m256i last = _mm256_loadu_si256((const __m256i *)(place + i - 1));
        __m256i rise = _mm256_subs_epu16(here, last);
        falls = _mm256_or_si256(falls, _mm256_cmpeq_epi16(rise, zero));
    }
    for (; i < count; i++) {
        if (place[i] <= place[i - 1]) return false;
    }
    return _mm256_testz_si256(falls, falls) != 0;
}

RFT_DELTA_TARGET static bool get_places(decoder *d, uint32_t count)
{
    if (d->from->low_bits == 0) {
        memcpy(d->place, d->bit, count * sizeof *d->place);
    } else {
        get_low(d, count);
        if (!get_high(d, count) || !is_rising(d->place, count)) return false;
    }
    if (d->place[0] < d->least || d->place[count - 1] >= d->from->shape.elements) return false;
    d->least = (uint32_t)d->place[count - 1] + 1;
    return true;
}

/* The numbers nearest to `own` that leave `rest` when divided by 3. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE __m256i nearest(__m256i own, __m256i rest)
{
    const __m256i one = _mm256_set1_epi16(1), less = _mm256_set1_epi16(-1);
    const __m256i three = _mm256_set1_epi16(3), zero = _mm256_setzero_si256();
    __m256i apart = _mm256_sub_epi16(rest, rft_delta_third16(own));
    __m256i beyond = _mm256_and_si256(_mm256_cmpgt_epi16(apart, one), three);
    __m256i below = _mm256_and_si256(_mm256_cmpgt_epi16(less, apart), three);
    apart = _mm256_add_epi16(_mm256_sub_epi16(apart, beyond), below);
    /* From the ends of the range: three the other way. */
    __m256i up = _mm256_and_si256(_mm256_cmpeq_epi16(apart, one), _mm256_cmpeq_epi16(own, less));
    __m256i down = _mm256_and_si256(_mm256_cmpeq_epi16(apart, less), _mm256_cmpeq_epi16(own, zero));
    __m256i back = _mm256_sub_epi16(_mm256_and_si256(down, three), _mm256_and_si256(up, three));
    return _mm256_add_epi16(_mm256_add_epi16(own, apart), back);
}

/* A symbol a lane. */
RFT_DELTA_TARGET static void get_symbols(decoder *d, uint32_t count)
{
    const uint64_t mask = rft_delta_four(2);
    const unsigned char *at = fetch(d, RFT_DELTA_SYMBOLS, 2, count);
    for (uint32_t i = 0; i < count; i += 8) {
        uint64_t four[2] = {_pdep_u64(at[i / 4], mask), _pdep_u64(at[i / 4 + 1], mask)};
        memcpy(d->symbol + i, four, sizeof four);
    }
}

/* Which of 16 symbols are escapes, a bit each. */
RFT_DELTA_TARGET static RFT_DELTA_INLINE uint32_t find_escapes(__m256i symbols)
{
    __m256i each = _mm256_cmpeq_epi16(symbols, _mm256_set1_epi16(3));
    __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(each), _mm256_extracti128_si256(each, 1));
    return (uint32_t)_mm_movemask_epi8(bytes);
}

/* What the halves become; escapes are left for later, and listed. */
RFT_DELTA_TARGET static uint32_t make_near(decoder *d, uint32_t count, uint16_t *escaped)
{
    uint32_t escapes = 0;
    for (uint32_t i = 0; i < count; i += 16) {
        __m256i *half = (__m256i *)(d->half + i);
        __m256i own = rft_delta_number16(_mm256_loadu_si256(half));
        __m256i symbols = _mm256_loadu_si256((const __m256i *)(d->symbol + i));
        __m256i far = _mm256_cmpeq_epi16(symbols, _mm256_set1_epi16(3));
        __m256i number = _mm256_blendv_epi8(nearest(own, symbols), own, far);
        _mm256_storeu_si256(half, rft_delta_bits16(number));
        uint32_t set = find_escapes(symbols);
        if (count - i < 16) set &= (1u << (count - i)) - 1;
        escapes += rft_delta_places(set, i, escaped + escapes);
    }
    return escapes;
}

RFT_DELTA_TARGET static bool apply_halves(decoder *d, uint32_t count)
{
    uint16_t escaped[RFT_DELTA_ROOM];
    for (uint32_t i = 0; i < count; i++) {
        memcpy(&d->half[i], d->block + 2 * (size_t)d->place[i], 2);
    }
    get_symbols(d, count);
    uint32_t escapes = make_near(d, count, escaped);
    for (uint32_t i = 0; i < escapes; i++) {
        uint32_t bits;
        if (!rft_delta_get_escape(d->from, d->half[escaped[i]], &bits)) return false;
        d->half[escaped[i]] = (uint16_t)bits;
    }
    for (uint32_t i = 0; i < count; i++) {
        memcpy(d->block + 2 * (size_t)d->place[i], &d->half[i], 2);
    }
    return true;
}

#define APPLY_VALUES(width)                                                                        \
    for (uint32_t i = 0; i < count; i++) {                                                         \
        memcpy(d->block + (size_t)(width)*d->place[i], from + (size_t)(width)*i, (width));         \
    }                                                                                              \
    break

static void apply_values(decoder *d, uint32_t count)
{
    uint32_t width = d->from->shape.width;
    const unsigned char *from = d->from->plane[RFT_DELTA_VALUES] + (size_t)d->from->done * width;
    switch (width) {
    case 1: APPLY_VALUES(1);
    case 2: APPLY_VALUES(2);
    case 4: APPLY_VALUES(4);
    default: APPLY_VALUES(8);
    }
}

RFT_DELTA_TARGET static bool apply_chunk(decoder *d, uint32_t count)
{
    if (count == 0) return true;
    if (count > d->from->entry->changed - d->from->done) return false;
    if (!get_places(d, count)) return false;
    if (d->from->shape.kind == RFT_DELTA_RAW) {
        apply_values(d, count);
    } else if (!apply_halves(d, count)) {
        return false;
    }
    d->from->done += count;
    return true;
}

RFT_DELTA_TARGET bool rft_delta_apply_avx2(rft_delta_reader *from, unsigned char *block)
{
    decoder d;
    d.from = from;
    d.block = block;
    d.least = 0;
    const unsigned char *high = from->plane[RFT_DELTA_HIGH];
    const unsigned char *end = high + from->entry->bytes[RFT_DELTA_HIGH];
    uint32_t count = 0;
    for (const unsigned char *at = high; at < end; at += 8) {
        uint32_t base = (uint32_t)(at - high) * 8;
        count += rft_delta_places(rft_delta_load_before(at, end), base, d.bit + count);
        if (count < RFT_DELTA_CHUNK) continue;
        uint32_t whole = count / RFT_DELTA_GROUP * RFT_DELTA_GROUP;
        if (!apply_chunk(&d, whole)) return false;
        memcpy(d.bit, d.bit + whole, RFT_DELTA_GROUP * sizeof *d.bit);
        count -= whole;
    }
    return apply_chunk(&d, count) && rft_delta_is_read(from);
}
#endif
