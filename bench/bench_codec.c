/* bench_codec: refit's own way, block by block, by the kernels themselves; wire/sparse.c and
 * wire/assembly.c do the same with the version around it. */
#include "bench_codec.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/delta.h"
#include "kernels/digest.h"

typedef enum block_mode { MODE_SAME, MODE_SPARSE, MODE_DENSE } block_mode;

/* What travels of a sparse one is changed, escapes and the digests: RFT_DELTA_ENTRY_BYTES. */
struct bench_block {
    block_mode mode;
    uint32_t changed, escapes;
    uint64_t before, after;
};

/* ---- What it works with ---- */

static uint64_t blocks_of(const bench_pair *pair)
{
    return (pair->elements + RFT_DELTA_ELEMENTS - 1) / RFT_DELTA_ELEMENTS;
}

bool bench_coder_open(bench_coder *coder, const bench_pairs *pairs)
{
    uint64_t most = pairs->bytes + 4 * pairs->elements; /* positions and values */
    *coder = (bench_coder){0};
    for (uint32_t i = 0; i < pairs->count; i++)
        coder->block_count += blocks_of(&pairs->all[i]);
    /* Besides: what a compressor needs for bytes that it cannot shrink, and refit for a block. */
    coder->coded_room = most + most / 64 + ((uint64_t)pairs->count + 16) * 4096 + (2 << 20);
    coder->coded = malloc(coder->coded_room);
    coder->scratch = malloc(pairs->image_bytes + 2 * pairs->elements + 4096);
    coder->blocks = calloc(coder->block_count + 1, sizeof *coder->blocks);
    if (coder->coded == NULL || coder->scratch == NULL || coder->blocks == NULL) return false;
    memset(coder->coded, 1, coder->coded_room); /* the first use is none of the figures */
    return bench_codec_open_zstd(coder);
}

void bench_coder_close(bench_coder *coder)
{
    bench_codec_close_zstd(coder);
    free(coder->coded);
    free(coder->scratch);
    free(coder->blocks);
    *coder = (bench_coder){0};
}

/* A block of a pair. */
typedef struct place {
    rft_delta_shape shape;
    uint64_t image_offset, tensor_offset;
    size_t bytes;
} place;

static place place_of(const bench_pair *pair, uint64_t block)
{
    uint64_t first = block * RFT_DELTA_ELEMENTS, left = pair->elements - first;
    uint32_t elements = left < RFT_DELTA_ELEMENTS ? (uint32_t)left : RFT_DELTA_ELEMENTS;
    return (place){.shape = {elements, pair->width, pair->half ? RFT_DELTA_HALF : RFT_DELTA_RAW},
                   .image_offset = pair->offset + first * pair->width,
                   .tensor_offset = first * pair->width,
                   .bytes = (size_t)elements * pair->width};
}

/* ---- Encoding ---- */

static void encode_block(bench_coder *coder, const bench_pairs *pairs, place at, bool digests,
                         struct bench_block *block)
{
    const unsigned char *before = pairs->before + at.image_offset;
    const unsigned char *after = pairs->after + at.image_offset;
    unsigned char *out = coder->coded + coder->bytes;
    rft_delta_entry entry;
    bool sparse = rft_delta_encode(at.shape, before, after, out, &entry);
    *block = (struct bench_block){.mode = MODE_SPARSE, .changed = entry.changed};
    coder->changed += entry.changed;
    if (sparse) {
        block->escapes = entry.escapes;
        coder->bytes += entry.total;
        coder->sparse++;
    } else if (entry.changed > 0) {
        block->mode = MODE_DENSE;
        memcpy(out, after, at.bytes);
        coder->bytes += at.bytes;
        coder->dense++;
    } else {
        block->mode = MODE_SAME;
        coder->same++;
        return;
    }
    if (!digests) return;
    block->before = rft_digest_part(before, at.bytes, at.tensor_offset);
    block->after = rft_digest_part(after, at.bytes, at.tensor_offset);
}

static bool encode(bench_coder *coder, const bench_pairs *pairs, bool digests)
{
    struct bench_block *block = coder->blocks;
    coder->bytes = coder->changed = coder->same = coder->sparse = coder->dense = 0;
    for (uint32_t i = 0; i < pairs->count; i++) {
        const bench_pair *pair = &pairs->all[i];
        for (uint64_t b = 0; b < blocks_of(pair); b++)
            encode_block(coder, pairs, place_of(pair, b), digests, block++);
    }
    coder->bytes += coder->sparse * RFT_DELTA_ENTRY_BYTES;
    return true;
}

static bool encode_plain(bench_coder *coder, const bench_pairs *pairs)
{
    return encode(coder, pairs, false);
}

static bool encode_with_digests(bench_coder *coder, const bench_pairs *pairs)
{
    return encode(coder, pairs, true);
}

/* ---- Decoding ---- */

typedef struct decoder {
    bool copy;    /* from the version before; otherwise in place */
    bool digests; /* as encode_with_digests left them */
    const unsigned char *next, *end;
} decoder;

/* The block before it changes; its digest if that is wanted. */
static uint64_t bring_base(const decoder *it, const unsigned char *from, unsigned char *to,
                           place at)
{
    if (it->copy && it->digests) return rft_digest_copy_part(to, from, at.bytes, at.tensor_offset);
    if (it->copy) memcpy(to, from, at.bytes);
    return it->digests ? rft_digest_part(to, at.bytes, at.tensor_offset) : 0;
}

/* The bytes that it takes from the coded ones; 0: they contradict each other. */
static size_t take_block(const decoder *it, const struct bench_block *block, unsigned char *to,
                         place at)
{
    rft_delta_entry entry;
    size_t room = (size_t)(it->end - it->next);
    if (block->mode == MODE_DENSE) {
        if (room >= at.bytes) memcpy(to, it->next, at.bytes);
        return room >= at.bytes ? at.bytes : 0;
    }
    if (!rft_delta_measure(at.shape, block->changed, block->escapes, it->next, room, &entry))
        return 0;
    return rft_delta_apply(at.shape, &entry, it->next, to) ? entry.total : 0;
}

static bool decode_block(decoder *it, const bench_pairs *pairs, const struct bench_block *block,
                         place at)
{
    unsigned char *to = pairs->into + at.image_offset;
    if (block->mode == MODE_SAME) {
        if (it->copy) (void)bring_base(it, pairs->before + at.image_offset, to, at);
        return true;
    }
    uint64_t before = bring_base(it, pairs->before + at.image_offset, to, at);
    size_t taken = take_block(it, block, to, at);
    it->next += taken;
    if (taken == 0 || !it->digests) return taken != 0;
    return before == block->before &&
           rft_digest_part(to, at.bytes, at.tensor_offset) == block->after;
}

static bool decode(bench_coder *coder, const bench_pairs *pairs, bool copy, bool digests)
{
    const struct bench_block *block = coder->blocks;
    uint64_t planes = coder->bytes - coder->sparse * RFT_DELTA_ENTRY_BYTES;
    decoder it = {copy, digests, coder->coded, coder->coded + planes};
    for (uint32_t i = 0; i < pairs->count; i++) {
        const bench_pair *pair = &pairs->all[i];
        for (uint64_t b = 0; b < blocks_of(pair); b++)
            if (!decode_block(&it, pairs, block++, place_of(pair, b))) return false;
    }
    return it.next == it.end;
}

static bool decode_plain(bench_coder *coder, const bench_pairs *pairs)
{
    return decode(coder, pairs, true, false);
}

static bool decode_with_digests(bench_coder *coder, const bench_pairs *pairs)
{
    return decode(coder, pairs, true, true);
}

static bool apply_plain(bench_coder *coder, const bench_pairs *pairs)
{
    return decode(coder, pairs, false, false);
}

static bool apply_with_digests(bench_coder *coder, const bench_pairs *pairs)
{
    return decode(coder, pairs, false, true);
}

const bench_codec bench_codec_refit = {
    "refit",
    {{"encode", BENCH_ENCODES, encode_plain},
     {"encode_with_digests", BENCH_ENCODES, encode_with_digests},
     {"decode", BENCH_COPIES, decode_plain},
     {"decode_with_digests", BENCH_COPIES, decode_with_digests},
     {"apply", BENCH_APPLIES, apply_plain},
     {"apply_with_digests", BENCH_APPLIES, apply_with_digests},
     {NULL, BENCH_ENCODES, NULL}},
};
