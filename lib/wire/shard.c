/*
 * The layout keeps where each tensor begins modulo the alignment: then the padding between two
 * tensors that follow each other is that of the manifest, and a frame of which the shard has all is
 * in memory what it is on the wire; unless it begins in a tensor of which the shard has columns,
 * and ends in the next one (frame.c).
 *
 * Shards are held against each other by one walk for each rank: the run that comes next must begin
 * where the last one has ended.
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

/* The next run of one rank's shard of a tensor. */
typedef struct rank_run {
    rft_want_walk walk;
    uint64_t offset;
    uint64_t bytes; /* 0: there are no more */
} rank_run;

static void next_run(rank_run *run)
{
    if (!rft_want_walk_next(&run->walk, &run->offset, &run->bytes)) run->bytes = 0;
}

/* The rank whose run begins first; `ranks` if none has any more. */
static uint32_t find_first(const rank_run *runs, uint32_t ranks)
{
    uint32_t first = ranks;
    for (uint32_t i = 0; i < ranks; i++) {
        bool sooner = runs[i].bytes > 0 && (first == ranks || runs[i].offset < runs[first].offset);
        if (sooner) first = i;
    }
    return first;
}

static refit_status check_tensor(const rft_manifest_tensor *tensor, rank_run *runs, uint32_t ranks,
                                 refit_error *error)
{
    uint64_t end = 0;
    uint32_t last = ranks;
    while (end < tensor->bytes) {
        uint32_t rank = find_first(runs, ranks);
        RFT_REFUSE_IF(rank == ranks || runs[rank].offset > end, error, REFIT_ERR_INVALID,
                      "the ranks do not publish all of tensor \"%.80s\": none has its byte %llu of "
                      "%llu",
                      tensor->name, (unsigned long long)end, (unsigned long long)tensor->bytes);
        RFT_REFUSE_IF(
            runs[rank].offset < end, error, REFIT_ERR_INVALID,
            "ranks %u and %u both publish byte %llu of tensor \"%.80s\": of replicas only "
            "one is published",
            last < rank ? last : rank, last < rank ? rank : last,
            (unsigned long long)runs[rank].offset, tensor->name);
        last = rank;
        end = runs[rank].offset + runs[rank].bytes;
        next_run(&runs[rank]);
    }
    uint32_t rank = find_first(runs, ranks);
    RFT_REFUSE_IF(
        rank < ranks, error, REFIT_ERR_INVALID,
        "ranks %u and %u both publish byte %llu of tensor \"%.80s\": of replicas only one "
        "is published",
        last < rank ? last : rank, last < rank ? rank : last, (unsigned long long)runs[rank].offset,
        tensor->name);
    return REFIT_OK;
}

refit_status rft_shards_check(const rft_manifest *manifest, rft_want *const *shards, uint32_t ranks,
                              refit_error *error)
{
    refit_status status = REFIT_OK;
    rank_run *runs = rft_calloc(ranks, sizeof *runs);
    RFT_REFUSE_IF(runs == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to compare %u shards",
                  ranks);
    for (uint32_t i = 0; status == REFIT_OK && i < manifest->count; i++) {
        if (manifest->tensors[i].alias_of != REFIT_NO_ALIAS) continue;
        for (uint32_t rank = 0; rank < ranks; rank++) {
            runs[rank].walk = rft_want_walk_begin(shards[rank], i, 0, UINT64_MAX);
            next_run(&runs[rank]);
        }
        status = check_tensor(&manifest->tensors[i], runs, ranks, error);
    }
    rft_free(runs);
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
