/* Divisions are noted byte by byte, apart from the rows that say them. */
#include <stdlib.h>

#include "shard_rig.h"
#include "tensor_samples.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "wire/selection.h"
#include "wire_samples.h"

#define SAMPLED  6u /* tensors that are drawn */
#define WIDE     SAMPLED
#define ELEMENTS 150000u

/* Those that are as they are: at the borders of blocks, with three dimensions, of half bytes. */
static const refit_tensor fixed[] = {
    {sizeof(refit_tensor), "wide", REFIT_U8, 2, {2, 100000}, 200000, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "after.wide", REFIT_F32, 1, {3001}, 12004, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "cube", REFIT_BF16, 3, {7, 33, 301}, 139062, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "less", REFIT_U8, 1, {65535}, 65535, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "even", REFIT_BF16, 1, {131072}, 262144, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "more", REFIT_U8, 1, {65537}, 65537, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "empty", REFIT_F32, 2, {0, 5}, 0, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "halves", REFIT_F4, 1, {9}, 5, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "scalar", REFIT_F64, 0, {0}, 8, REFIT_NO_ALIAS},
    {sizeof(refit_tensor), "cube.too", REFIT_F32, 3, {4, 50, 90}, 72000, REFIT_NO_ALIAS},
};

/* ---- Dividing */

static void note_rows(shard_rig *rig, uint32_t rank, const rft_want_rows *rows)
{
    unsigned char *first = rig->owners + rig->manifest->tensors[rows->tensor].offset + rows->offset;
    for (uint64_t row = 0; row < rows->count; row++) {
        for (uint64_t i = 0; i < rows->bytes; i++)
            first[row * rows->stride + i] |= (unsigned char)(1u << rank);
    }
}

static void give(shard_rig *rig, rft_bytes *lists, uint32_t rank, rft_want_rows rows)
{
    rank %= rig->ranks;
    if (rows.count == 0 || rows.bytes == 0) return;
    if (rows.count == 1) rows.stride = rows.bytes;
    assert_ok(rft_want_append(&lists[rank], &rows, NULL));
    note_rows(rig, rank, &rows);
}

/* Where parts of `whole` begin and end; some may be empty. */
static void draw_cuts(shard_rig *rig, uint64_t whole, uint64_t cuts[SHARD_RIG_MOST + 1])
{
    cuts[0] = 0;
    for (uint32_t i = 1; i < rig->ranks; i++)
        cuts[i] = cuts[i - 1] + seeded_below(&rig->seed, 2 * (whole - cuts[i - 1]) / 3 + 1);
    cuts[rig->ranks] = whole;
}

/* Columns at any byte of rows of `stride` bytes; one row: runs. */
static void divide_columns(shard_rig *rig, rft_bytes *lists, uint32_t tensor, uint64_t stride)
{
    uint64_t cuts[SHARD_RIG_MOST + 1];
    uint64_t count = rig->manifest->tensors[tensor].bytes / stride;
    uint32_t first = (uint32_t)seeded_below(&rig->seed, rig->ranks);
    draw_cuts(rig, stride, cuts);
    for (uint32_t i = 0; i < rig->ranks; i++) {
        const rft_want_rows rows = {tensor, cuts[i], count, stride, cuts[i + 1] - cuts[i]};
        give(rig, lists, first + i, rows);
    }
}

/* Upper and lower rows, left and right columns: four ranks. */
static void divide_grid(shard_rig *rig, rft_bytes *lists, uint32_t tensor, uint64_t stride)
{
    uint64_t count = rig->manifest->tensors[tensor].bytes / stride;
    uint64_t top = seeded_below(&rig->seed, count), left = seeded_below(&rig->seed, stride);
    give(rig, lists, 0, (rft_want_rows){tensor, 0, top, stride, left});
    give(rig, lists, 1, (rft_want_rows){tensor, left, top, stride, stride - left});
    give(rig, lists, 2, (rft_want_rows){tensor, top * stride, count - top, stride, left});
    give(rig, lists, 3,
         (rft_want_rows){tensor, top * stride + left, count - top, stride, stride - left});
}

static void give_box(shard_rig *rig, rft_bytes *lists, uint32_t rank, const refit_selection *box)
{
    rft_selection *selection = NULL;
    rft_want *want = NULL;
    const char *missing = NULL;
    assert_ok(rft_selection_open(box, 1, &selection, NULL));
    assert_ok(rft_selection_resolve(selection, rig->manifest, &want, &missing, NULL));
    assert_null(missing);
    for (uint32_t i = 0; i < want->row_count; i++)
        give(rig, lists, rank, want->rows[i]);
    rft_want_release(want);
    rft_selection_close(selection);
}

/* Boxes that one dimension is cut into; the first two ranks' is cut in another one, too. */
static void divide_cube(shard_rig *rig, rft_bytes *lists, uint32_t tensor)
{
    const rft_manifest_tensor *cube = &rig->manifest->tensors[tensor];
    uint32_t cut = (uint32_t)seeded_below(&rig->seed, 3), other = (cut + 1) % 3;
    uint64_t each = cube->shape[cut] / rig->ranks, half = cube->shape[other] / 2;
    refit_selection box = {.size = sizeof box, .name = cube->name, .rank = 3};
    for (uint32_t rank = 0; rank < rig->ranks; rank++) {
        uint64_t first = rank < 2 ? 0 : rank * each;
        bool last = rank + 1 == rig->ranks || (rank < 2 && rig->ranks == 2);
        for (uint32_t i = 0; i < 3; i++) {
            box.first[i] = 0;
            box.shape[i] = cube->shape[i];
        }
        box.first[cut] = first;
        box.shape[cut] = last ? cube->shape[cut] - first : rank < 2 ? 2 * each : each;
        if (box.shape[cut] == 0) continue;
        if (rank < 2) {
            box.first[other] = rank == 0 ? 0 : half;
            box.shape[other] = rank == 0 ? half : cube->shape[other] - half;
        }
        give_box(rig, lists, rank, &box);
    }
}

/* What rows of the tensor may have: some number that its bytes are a multiple of. */
static uint64_t draw_stride(shard_rig *rig, const rft_manifest_tensor *tensor)
{
    uint64_t count = 1 + seeded_below(&rig->seed, 300);
    if (seeded_below(&rig->seed, 4) == 0 && tensor->rank > 0 && tensor->shape[0] > 0)
        count = tensor->shape[0];
    while (tensor->bytes % count != 0)
        count--;
    return tensor->bytes / count;
}

/* Columns of the two long rows of the first one, and the next one whole to the rank that has its
 * last bytes. */
static void divide_wide(shard_rig *rig, rft_bytes *lists)
{
    const uint64_t cut = 40000 + seeded_below(&rig->seed, 20000);
    give(rig, lists, 0, (rft_want_rows){WIDE, 0, 2, 100000, cut});
    give(rig, lists, 1, (rft_want_rows){WIDE, cut, 2, 100000, 100000 - cut});
    give(rig, lists, 1, (rft_want_rows){WIDE + 1, 0, 1, 12004, 12004});
}

static void divide(shard_rig *rig, rft_bytes *lists, uint32_t index)
{
    const rft_manifest_tensor *tensor = &rig->manifest->tensors[index];
    if (tensor->alias_of != REFIT_NO_ALIAS || tensor->bytes == 0) return;
    if (tensor->rank == 3 && seeded_below(&rig->seed, 4) != 0) {
        divide_cube(rig, lists, index);
        return;
    }
    switch (seeded_below(&rig->seed, 4)) {
    case 0:
        give(rig, lists, (uint32_t)seeded_next(&rig->seed) % rig->ranks,
             (rft_want_rows){index, 0, 1, tensor->bytes, tensor->bytes});
        break;
    case 1: divide_columns(rig, lists, index, tensor->bytes); break;
    case 2:
        if (rig->ranks >= 4) {
            divide_grid(rig, lists, index, draw_stride(rig, tensor));
            break;
        }
        divide_columns(rig, lists, index, draw_stride(rig, tensor));
        break;
    default: divide_columns(rig, lists, index, draw_stride(rig, tensor)); break;
    }
}

/* ---- Opening and closing */

void shard_rig_open(shard_rig *rig, uint64_t seed)
{
    refit_tensor tensors[SAMPLED + COUNT_OF(fixed)];
    rft_bytes lists[SHARD_RIG_MOST] = {{0}};
    *rig = (shard_rig){.seed = seed * UINT64_C(0x9e3779b97f4a7c15)};
    sample_tensors(&rig->seed, tensors, SAMPLED, ELEMENTS);
    memcpy(tensors + SAMPLED, fixed, sizeof fixed);
    uint64_t frame_bytes = 1 + seeded_below(&rig->seed, 400000);
    bool wide = seed % 3 == 0; /* its last block begins a frame */
    rig->manifest = sample_manifest(tensors, COUNT_OF(tensors), wide ? 65536 : frame_bytes);
    rig->ranks = 2 + (uint32_t)seeded_below(&rig->seed, SHARD_RIG_MOST - 1);
    rig->owners = calloc(1, rig->manifest->store_bytes);
    assert_non_null(rig->owners);
    for (uint32_t i = 0; i < rig->manifest->count; i++) {
        if (wide && i == WIDE)
            divide_wide(rig, lists);
        else if (!wide || i != WIDE + 1)
            divide(rig, lists, i);
    }
    for (uint32_t i = 0; i < rig->ranks; i++) {
        assert_ok(rft_want_open(rig->manifest, rft_bytes_view(&lists[i]), &rig->shards[i], NULL));
        rft_bytes_close(&lists[i]);
    }
}

static void release_shards(shard_rig *rig)
{
    for (uint32_t i = 0; i < rig->ranks; i++) {
        rft_want_release(rig->shards[i]);
        rig->shards[i] = NULL;
    }
}

void shard_rig_close(shard_rig *rig)
{
    release_shards(rig);
    rft_manifest_close(rig->manifest);
    free(rig->owners);
}

/* The runs of one rank, as they are noted. */
static rft_want *follow(const shard_rig *rig, uint32_t rank)
{
    rft_bytes list = {0};
    rft_want *want = NULL;
    for (uint32_t i = 0; i < rig->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &rig->manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        const unsigned char *owners = rig->owners + tensor->offset;
        for (uint64_t at = 0, end; at < tensor->bytes; at = end) {
            for (end = at; end < tensor->bytes && (owners[end] >> rank & 1) != 0;)
                end++;
            const rft_want_rows rows = {i, at, 1, end - at, end - at};
            if (end > at)
                assert_ok(rft_want_append(&list, &rows, NULL));
            else
                end++;
        }
    }
    assert_ok(rft_want_open(rig->manifest, rft_bytes_view(&list), &want, NULL));
    rft_bytes_close(&list);
    return want;
}

void shard_rig_follow(shard_rig *rig)
{
    release_shards(rig);
    for (uint32_t i = 0; i < rig->ranks; i++)
        rig->shards[i] = follow(rig, i);
}

/* ---- Parts and bytes */

rft_want *shard_rig_part(shard_rig *rig, uint32_t rank, const rft_manifest *manifest)
{
    rft_bytes list = {0}, common = {0};
    rft_want *drawn = NULL, *part = NULL;
    for (uint32_t i = 0; i < rig->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &rig->manifest->tensors[i];
        uint64_t kind = seeded_below(&rig->seed, 4);
        if (tensor->alias_of != REFIT_NO_ALIAS || tensor->bytes == 0 || kind == 0) continue;
        uint64_t from = kind == 1 ? 0 : seeded_below(&rig->seed, tensor->bytes);
        uint64_t left = tensor->bytes - from;
        uint64_t bytes = kind == 1 ? left : 1 + seeded_below(&rig->seed, left);
        rft_want_rows rows = {i, from, 1, bytes, bytes};
        if (kind == 3) {
            rows.bytes = 1 + seeded_below(&rig->seed, left < 900 ? left : 900);
            rows.stride = rows.bytes + 1 + seeded_below(&rig->seed, 3000);
            rows.count = 1 + (left - rows.bytes) / rows.stride;
        }
        assert_ok(rft_want_append(&list, &rows, NULL));
    }
    assert_ok(rft_want_open(rig->manifest, rft_bytes_view(&list), &drawn, NULL));
    assert_ok(rft_want_intersect(rig->shards[rank], drawn, &common, NULL));
    assert_ok(rft_want_open(manifest, rft_bytes_view(&common), &part, NULL));
    rft_want_release(drawn);
    rft_bytes_close(&list);
    rft_bytes_close(&common);
    return part;
}

unsigned char *shard_rig_cut(const rft_want *want, uint32_t tensor, const unsigned char *image,
                             uint64_t *count)
{
    uint64_t offset, bytes;
    const unsigned char *from = image + want->manifest->tensors[tensor].offset;
    rft_want_walk walk = rft_want_walk_begin(want, tensor, 0, UINT64_MAX);
    *count = 0;
    while (rft_want_walk_next(&walk, &offset, &bytes))
        *count += bytes;
    unsigned char *cut = malloc(*count + (*count == 0)), *to = cut;
    assert_non_null(cut);
    walk = rft_want_walk_begin(want, tensor, 0, UINT64_MAX);
    while (rft_want_walk_next(&walk, &offset, &bytes)) {
        memcpy(to, from + offset, bytes);
        to += bytes;
    }
    return cut;
}

unsigned char *shard_rig_map(const rft_want *want)
{
    unsigned char *map = calloc(1, want->manifest->store_bytes);
    assert_non_null(map);
    for (uint32_t i = 0; i < want->row_count; i++) {
        const rft_want_rows *rows = &want->rows[i];
        unsigned char *first = map + want->manifest->tensors[rows->tensor].offset + rows->offset;
        for (uint64_t row = 0; row < rows->count; row++)
            memset(first + row * rows->stride, 1, rows->bytes);
    }
    return map;
}
