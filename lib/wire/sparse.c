/*
 * One sparse block and its entry in the directory; kernels/delta.c does the coding.
 */
#include "wire/sparse.h"

rft_delta_shape rft_sparse_shape(const rft_manifest *manifest, const rft_block *block)
{
    refit_dtype dtype = manifest->tensors[block->tensor].dtype;
    uint32_t bits = refit_dtype_bits(dtype);
    uint32_t width = bits % 8 == 0 ? bits / 8 : 1;
    bool half = dtype == REFIT_BF16 || dtype == REFIT_F16;
    return (rft_delta_shape){
        .elements = (uint32_t)(block->bytes / width),
        .width = width,
        .kind = half ? RFT_DELTA_HALF : RFT_DELTA_RAW,
    };
}

bool rft_sparse_encode(const rft_manifest *manifest, const rft_block *block, uint32_t price,
                       const void *before, const void *after, unsigned char *planes,
                       rft_sparse *out)
{
    out->shape = rft_sparse_shape(manifest, block);
    return rft_delta_encode_if(out->shape, price, before, after, planes, &out->delta);
}

static void put_u16(unsigned char *to, uint32_t value)
{
    to[0] = (unsigned char)value;
    to[1] = (unsigned char)(value >> 8);
}

static uint32_t get_u16(const unsigned char *from)
{
    return (uint32_t)from[0] | (uint32_t)from[1] << 8;
}

void rft_sparse_write_entry(const rft_sparse *sparse, unsigned char *entry)
{
    put_u16(entry, sparse->delta.changed - 1);
    put_u16(entry + 2, sparse->delta.escapes);
    rft_put_u64(entry + 4, sparse->before);
    rft_put_u64(entry + 12, sparse->after);
}

void rft_sparse_read_counts(const unsigned char *entry, uint32_t *changed, uint32_t *escapes)
{
    *changed = get_u16(entry) + 1;
    *escapes = get_u16(entry + 2);
}

bool rft_sparse_read(const rft_manifest *manifest, const rft_block *block,
                     const unsigned char *entry, const unsigned char *planes, size_t room,
                     rft_sparse *out)
{
    uint32_t changed, escapes;
    rft_sparse_read_counts(entry, &changed, &escapes);
    out->shape = rft_sparse_shape(manifest, block);
    out->before = rft_get_u64(entry + 4);
    out->after = rft_get_u64(entry + 12);
    return rft_delta_measure(out->shape, changed, escapes, planes, room, &out->delta) &&
           (uint64_t)out->delta.total + RFT_SPARSE_ENTRY_BYTES < block->bytes;
}
