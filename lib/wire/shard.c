/*
 * The layout keeps where each tensor begins modulo the alignment: then the padding between two
 * tensors that follow each other is that of the manifest, and a frame of which the shard has all is
 * in memory what it is on the wire; unless it begins in a tensor of which the shard has columns,
 * and ends in the next one (frame.c).
 *
 * Shards are held against each other in the order in which their rows begin: the next must begin
 * where the last one has ended. Columns, rows of equal number and stride, repeat themselves, and
 * the first row stands for all of them; what is divided otherwise is walked row by row.
 */
#include "wire/shard.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "kernels/digest.h"
#include "wire/message.h"

#define WORD 8u

/* ---- The layout */

static bool has_rows(const rft_want *want, uint32_t tensor)
{
    return want->first[tensor] < want->first[tensor + 1];
}

static uint64_t align_like(uint64_t cursor, uint64_t offset)
{
    uint64_t ahead = (offset - cursor) % RFT_TENSOR_ALIGNMENT;
    return cursor + ahead;
}

/* Places one tensor's blocks from `cursor` on, and gives where they end. */
static uint64_t place_tensor(rft_manifest *layout, const rft_want *shard, uint32_t index,
                             uint64_t cursor)
{
    rft_manifest_tensor *tensor = &layout->tensors[index];
    bool there = tensor->alias_of == REFIT_NO_ALIAS && has_rows(shard, index);
    if (there)
        cursor = align_like(cursor, tensor->offset + shard->rows[shard->first[index]].offset);
    tensor->offset = cursor;
    for (uint32_t i = 0; i < tensor->blocks; i++) {
        rft_block *block = &layout->blocks[tensor->first_block + i];
        uint64_t bytes = rft_want_block(shard, block);
        block->offset = cursor;
        block->bytes = bytes;
        cursor += bytes;
    }
    tensor->bytes = cursor - tensor->offset;
    return cursor;
}

static void place_all(rft_manifest *layout, const rft_want *shard)
{
    uint64_t cursor = 0;
    layout->payload_bytes = shard->bytes;
    for (uint32_t i = 0; i < layout->count; i++) {
        if (layout->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        cursor = place_tensor(layout, shard, i, cursor);
    }
    for (uint32_t i = 0; i < layout->count; i++) {
        rft_manifest_tensor *tensor = &layout->tensors[i];
        if (tensor->alias_of == REFIT_NO_ALIAS) continue;
        tensor->offset = layout->tensors[tensor->alias_of].offset;
        tensor->bytes = layout->tensors[tensor->alias_of].bytes;
    }
    for (uint32_t i = 0; i < layout->frame_count; i++) {
        rft_frame_span *span = &layout->frames[i];
        const rft_block *first = &layout->blocks[span->first_block];
        const rft_block *last = first + span->blocks - 1;
        span->offset = first->offset;
        span->bytes = last->offset + last->bytes - first->offset;
    }
    uint64_t lines = (cursor + RFT_TENSOR_ALIGNMENT - 1) / RFT_TENSOR_ALIGNMENT;
    layout->store_bytes = (lines == 0 ? 1 : lines) * RFT_TENSOR_ALIGNMENT;
}

static void *copy_of(const void *list, size_t count, size_t bytes)
{
    void *copy = rft_calloc(count + 1, bytes);
    if (copy != NULL && count > 0) memcpy(copy, list, count * bytes);
    return copy;
}

refit_status rft_shard_layout(const rft_manifest *manifest, const rft_want *shard,
                              rft_manifest **out, refit_error *error)
{
    rft_manifest *layout = copy_of(manifest, 1, sizeof *manifest);
    RFT_REFUSE_IF(layout == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to lay out a shard");
    layout->names = NULL;
    layout->index = NULL;
    layout->encoded = (rft_bytes){0};
    layout->tensors = copy_of(manifest->tensors, manifest->count, sizeof *layout->tensors);
    layout->blocks = copy_of(manifest->blocks, manifest->block_count, sizeof *layout->blocks);
    layout->frames = copy_of(manifest->frames, manifest->frame_count, sizeof *layout->frames);
    if (layout->tensors == NULL || layout->blocks == NULL || layout->frames == NULL) {
        rft_manifest_close(layout);
        return rft_fail(error, REFIT_ERR_HOST_MEMORY, "no memory to lay out a shard");
    }
    place_all(layout, shard);
    *out = layout;
    return REFIT_OK;
}

/* Both walks go on alike: each run of `want` lies in one of the shard's. */
void rft_shard_gather(const rft_want *want, const rft_want *shard, const rft_block *placed,
                      const unsigned char *image, unsigned char *out)
{
    const rft_manifest_tensor *tensor = &want->manifest->tensors[placed->tensor];
    uint64_t begin = placed->tensor_offset, end = begin + tensor->block_bytes;
    rft_want_walk wanted = rft_want_walk_begin(want, placed->tensor, begin, end);
    rft_want_walk walk = rft_want_walk_begin(shard, placed->tensor, begin, end);
    const unsigned char *run = image + placed->offset;
    uint64_t offset, bytes, first = 0, length = 0;
    while (rft_want_walk_next(&wanted, &offset, &bytes)) {
        while (first + length <= offset) {
            run += length;
            if (!rft_want_walk_next(&walk, &first, &length)) return;
        }
        memcpy(out, run + (offset - first), bytes);
        out += bytes;
    }
}

/* ---- Whether they are the tensors */

/* Rows that one rank has of a tensor. */
typedef struct piece {
    const rft_want_rows *rows;
    uint32_t rank;
    uint64_t row; /* the next, of a walk */
} piece;

static uint64_t row_at(const piece *one, uint64_t row)
{
    return one->rows->offset + row * one->rows->stride;
}

/* After the last of its bytes. */
static uint64_t end_of(const piece *one)
{
    return row_at(one, one->rows->count - 1) + one->rows->bytes;
}

static int compare_pieces(const void *one, const void *other)
{
    const piece *a = one, *b = other;
    if (a->rows->offset != b->rows->offset) return a->rows->offset < b->rows->offset ? -1 : 1;
    return a->rank < b->rank ? -1 : 1;
}

static refit_status fail_hole(const rft_manifest_tensor *tensor, uint64_t offset,
                              refit_error *error)
{
    return rft_fail(error, REFIT_ERR_INVALID,
                    "the ranks do not publish all of tensor \"%.80s\": none has its byte %llu of "
                    "%llu",
                    tensor->name, (unsigned long long)offset, (unsigned long long)tensor->bytes);
}

static refit_status fail_overlap(const rft_manifest_tensor *tensor, const piece *one,
                                 const piece *other, uint64_t offset, refit_error *error)
{
    uint32_t low = one->rank < other->rank ? one->rank : other->rank;
    uint32_t high = one->rank < other->rank ? other->rank : one->rank;
    return rft_fail(error, REFIT_ERR_INVALID,
                    "ranks %u and %u both publish byte %llu of tensor \"%.80s\": of replicas only "
                    "one is published",
                    low, high, (unsigned long long)offset, tensor->name);
}

/* How many pieces there are up to the first that begins after all before it have ended. */
static size_t group_size(const piece *pieces, size_t count)
{
    uint64_t end = end_of(&pieces[0]);
    size_t size = 1;
    while (size < count && pieces[size].rows->offset < end) {
        if (end_of(&pieces[size]) > end) end = end_of(&pieces[size]);
        size++;
    }
    return size;
}

static bool is_regular(const piece *pieces, size_t count)
{
    const rft_want_rows *first = pieces[0].rows;
    for (size_t i = 1; i < count; i++) {
        const rft_want_rows *rows = pieces[i].rows;
        if (rows->count != first->count || rows->stride != first->stride) return false;
    }
    return true;
}

/* As many rows, as far apart: all are like the first, which ends where the next begins. */
static refit_status check_first_row(const rft_manifest_tensor *tensor, const piece *pieces,
                                    size_t count, uint64_t *end, refit_error *error)
{
    const rft_want_rows *first = pieces[0].rows;
    uint64_t next = first->offset + first->stride;
    for (size_t i = 0; i < count; i++) {
        const rft_want_rows *rows = pieces[i].rows;
        if (rows->offset > *end) return fail_hole(tensor, *end, error);
        if (rows->offset < *end)
            return fail_overlap(tensor, &pieces[i - 1], &pieces[i], rows->offset, error);
        *end += rows->bytes;
    }
    if (first->count == 1) return REFIT_OK;
    if (*end < next) return fail_hole(tensor, *end, error);
    if (*end > next) return fail_overlap(tensor, &pieces[0], &pieces[count - 1], next, error);
    *end = first->offset + first->count * first->stride;
    return REFIT_OK;
}

/* The piece whose next row begins first; NULL if none has any more. */
static piece *find_first(piece *pieces, size_t count)
{
    piece *first = NULL;
    for (size_t i = 0; i < count; i++) {
        piece *other = &pieces[i];
        if (other->row == other->rows->count) continue;
        bool sooner = first == NULL || row_at(other, other->row) < row_at(first, first->row);
        if (sooner) first = other;
    }
    return first;
}

static refit_status check_each_row(const rft_manifest_tensor *tensor, piece *pieces, size_t count,
                                   uint64_t *end, refit_error *error)
{
    piece *last = NULL, *next;
    while ((next = find_first(pieces, count)) != NULL) {
        uint64_t begin = row_at(next, next->row++);
        if (begin > *end) return fail_hole(tensor, *end, error);
        if (begin < *end) return fail_overlap(tensor, last, next, begin, error);
        *end = begin + next->rows->bytes;
        last = next;
    }
    return REFIT_OK;
}

static refit_status check_tensor(const rft_manifest_tensor *tensor, piece *pieces, size_t count,
                                 refit_error *error)
{
    uint64_t end = 0;
    if (count > 1) qsort(pieces, count, sizeof *pieces, compare_pieces);
    for (size_t i = 0, size; i < count; i += size) {
        size = group_size(pieces + i, count - i);
        if (pieces[i].rows->offset > end) break;
        RFT_TRY(is_regular(pieces + i, size)
                    ? check_first_row(tensor, pieces + i, size, &end, error)
                    : check_each_row(tensor, pieces + i, size, &end, error));
    }
    return end < tensor->bytes ? fail_hole(tensor, end, error) : REFIT_OK;
}

/* Notes what each rank has of the tensor; returns how many pieces that is. NULL: counts them. */
static size_t list_pieces(rft_want *const *shards, uint32_t ranks, uint32_t tensor, piece *pieces)
{
    size_t count = 0;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        const rft_want *shard = shards[rank];
        for (uint32_t i = shard->first[tensor]; i < shard->first[tensor + 1]; i++, count++)
            if (pieces != NULL) pieces[count] = (piece){&shard->rows[i], rank, 0};
    }
    return count;
}

refit_status rft_shards_check(const rft_manifest *manifest, rft_want *const *shards, uint32_t ranks,
                              refit_error *error)
{
    refit_status status = REFIT_OK;
    size_t most = 1;
    for (uint32_t i = 0; i < manifest->count; i++) {
        size_t count = list_pieces(shards, ranks, i, NULL);
        if (count > most) most = count;
    }
    piece *pieces = rft_calloc(most, sizeof *pieces);
    RFT_REFUSE_IF(pieces == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to compare %u shards",
                  ranks);
    for (uint32_t i = 0; status == REFIT_OK && i < manifest->count; i++) {
        if (manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        size_t count = list_pieces(shards, ranks, i, pieces);
        status = check_tensor(&manifest->tensors[i], pieces, count, error);
    }
    rft_free(pieces);
    return status;
}

/* ---- Digests */

/* A word of the tensor of which only some bytes are here. */
static refit_status add_word(rft_bytes *words, uint32_t tensor, uint64_t offset,
                             const unsigned char *from, uint64_t bytes, refit_error *error)
{
    unsigned char entry[RFT_WORD_BYTES] = {0};
    rft_put_u32(entry, tensor);
    rft_put_u64(entry + 4, offset / WORD);
    memcpy(entry + 12 + offset % WORD, from, bytes);
    return rft_bytes_append(words, entry, sizeof entry, error);
}

/* One run: what it has of the words at its ends, and the sum of those between. The end of the
 * tensor ends a word, too. */
static refit_status sum_run(uint32_t tensor, uint64_t tensor_bytes, uint64_t offset, uint64_t bytes,
                            const unsigned char *from, uint64_t *sum, rft_bytes *words,
                            refit_error *error)
{
    uint64_t head = (WORD - offset % WORD) % WORD;
    if (head > bytes) head = bytes;
    if (head > 0) RFT_TRY(add_word(words, tensor, offset, from, head, error));
    offset += head;
    bytes -= head;
    uint64_t tail = offset + bytes == tensor_bytes ? 0 : bytes % WORD;
    if (bytes > tail) *sum += rft_digest_part(from + head, bytes - tail, offset);
    if (tail == 0) return REFIT_OK;
    return add_word(words, tensor, offset + bytes - tail, from + head + bytes - tail, tail, error);
}

refit_status rft_shard_sum(const rft_want *shard, uint32_t tensor, const unsigned char *bytes,
                           uint64_t *sum, rft_bytes *words, refit_error *error)
{
    uint64_t offset, count;
    rft_want_walk walk = rft_want_walk_begin(shard, tensor, 0, UINT64_MAX);
    *sum = 0;
    while (rft_want_walk_next(&walk, &offset, &count)) {
        RFT_TRY(sum_run(tensor, shard->manifest->tensors[tensor].bytes, offset, count, bytes, sum,
                        words, error));
        bytes += count;
    }
    return REFIT_OK;
}

static int compare_words(const void *one, const void *other)
{
    const unsigned char *a = one, *b = other;
    if (rft_get_u32(a) != rft_get_u32(b)) return rft_get_u32(a) < rft_get_u32(b) ? -1 : 1;
    if (rft_get_u64(a + 4) != rft_get_u64(b + 4))
        return rft_get_u64(a + 4) < rft_get_u64(b + 4) ? -1 : 1;
    return 0;
}

refit_status rft_shards_add_words(const rft_manifest *manifest, rft_bytes *words, uint64_t *sums,
                                  refit_error *error)
{
    size_t count = words->count / RFT_WORD_BYTES;
    if (count > 0) qsort(words->data, count, RFT_WORD_BYTES, compare_words);
    for (size_t i = 0, next; i < count; i = next) {
        const unsigned char *entry = words->data + i * RFT_WORD_BYTES;
        uint32_t tensor = rft_get_u32(entry);
        uint64_t index = rft_get_u64(entry + 4), word = 0;
        unsigned char whole[WORD];
        bool known = tensor < manifest->count &&
                     manifest->tensors[tensor].alias_of == REFIT_NO_ALIAS &&
                     index < (manifest->tensors[tensor].bytes + WORD - 1) / WORD;
        RFT_REFUSE_IF(!known, error, REFIT_ERR_PROTOCOL,
                      "a rank has a part of a word that no tensor has");
        for (next = i; next < count; next++) {
            const unsigned char *other = words->data + next * RFT_WORD_BYTES;
            if (compare_words(entry, other) != 0) break;
            word |= rft_get_u64(other + 12);
        }
        rft_put_u64(whole, word);
        sums[tensor] += rft_digest_part(whole, WORD, index * WORD);
    }
    return REFIT_OK;
}
