/* Shards: how they lie in memory, whether they are the tensors exactly, and the digests that ranks
 * add up. Each is held against a note of who has which byte. */
#include <stdio.h>
#include <stdlib.h>

#include "kernels/digest.h"
#include "shard_rig.h"
#include "tensor_samples.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "wire/frame.h"
#include "wire/message.h"

#ifndef SEEDS
#define SEEDS 12u
#endif

static bool is_original(const rft_manifest *manifest, uint32_t tensor)
{
    return manifest->tensors[tensor].alias_of == REFIT_NO_ALIAS;
}

static uint64_t count_owned(const shard_rig *rig, uint32_t rank, uint64_t offset, uint64_t bytes)
{
    uint64_t count = 0;
    for (uint64_t i = 0; i < bytes; i++)
        count += rig->owners[offset + i] >> rank & 1;
    return count;
}

TEST(rigs_give_each_byte_to_one_rank)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        shard_rig rig;
        shard_rig_open(&rig, seed);
        for (uint32_t i = 0; i < rig.manifest->count; i++) {
            const rft_manifest_tensor *tensor = &rig.manifest->tensors[i];
            for (uint64_t at = 0; at < tensor->bytes; at++) {
                unsigned char owners = rig.owners[tensor->offset + at];
                if (owners == 0 || (owners & (owners - 1)) != 0) fail_msg("%s", tensor->name);
            }
        }
        shard_rig_close(&rig);
    }
}

/* ---- The layout */

static void check_blocks(const shard_rig *rig, uint32_t rank, const rft_manifest *layout,
                         uint32_t index)
{
    const rft_manifest_tensor *tensor = &layout->tensors[index];
    uint64_t at = tensor->offset;
    for (uint32_t i = tensor->first_block; i < tensor->first_block + tensor->blocks; i++) {
        const rft_block *block = &layout->blocks[i], *whole = &rig->manifest->blocks[i];
        assert_int_equal(block->offset, at);
        assert_int_equal(block->bytes, count_owned(rig, rank, whole->offset, whole->bytes));
        assert_int_equal(block->tensor_offset, whole->tensor_offset);
        assert_int_equal(block->tensor, whole->tensor);
        at += block->bytes;
    }
    assert_int_equal(tensor->bytes, at - tensor->offset);
}

/* From one 64 bytes to the next as in a version, and no more room than that takes. */
static void check_place(const shard_rig *rig, uint32_t rank, const rft_manifest *layout,
                        uint32_t index, uint64_t *end)
{
    const rft_manifest_tensor *tensor = &layout->tensors[index];
    const rft_want *shard = rig->shards[rank];
    if (tensor->bytes > 0) {
        uint64_t first = shard->rows[shard->first[index]].offset;
        uint64_t offset = rig->manifest->tensors[index].offset + first;
        assert_int_equal(tensor->offset % RFT_TENSOR_ALIGNMENT, offset % RFT_TENSOR_ALIGNMENT);
        assert_in_range(tensor->offset, *end, *end + RFT_TENSOR_ALIGNMENT - 1);
        *end = tensor->offset + tensor->bytes;
    }
}

static void check_frames(const rft_manifest *layout)
{
    for (uint32_t i = 0; i < layout->frame_count; i++) {
        const rft_frame_span *span = &layout->frames[i];
        const rft_block *first = &layout->blocks[span->first_block];
        const rft_block *last = first + span->blocks - 1;
        assert_int_equal(span->offset, first->offset);
        assert_int_equal(span->offset + span->bytes, last->offset + last->bytes);
    }
}

TEST(layout_has_the_bytes_of_the_shard_and_no_others)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        shard_rig rig;
        shard_rig_open(&rig, seed);
        for (uint32_t rank = 0; rank < rig.ranks; rank++) {
            rft_manifest *layout = NULL;
            uint64_t end = 0, sum = 0;
            assert_ok(rft_shard_layout(rig.manifest, rig.shards[rank], &layout, NULL));
            for (uint32_t i = 0; i < layout->count; i++) {
                const rft_manifest_tensor *tensor = &layout->tensors[i];
                if (is_original(layout, i)) {
                    check_blocks(&rig, rank, layout, i);
                    check_place(&rig, rank, layout, i, &end);
                    sum += tensor->bytes;
                } else {
                    assert_int_equal(tensor->offset, layout->tensors[tensor->alias_of].offset);
                    assert_int_equal(tensor->bytes, layout->tensors[tensor->alias_of].bytes);
                }
            }
            check_frames(layout);
            assert_int_equal(layout->payload_bytes, sum);
            assert_int_equal(layout->payload_bytes, rig.shards[rank]->bytes);
            assert_in_range(layout->store_bytes, end, end + RFT_TENSOR_ALIGNMENT);
            assert_int_equal(layout->store_bytes % RFT_TENSOR_ALIGNMENT, 0);
            assert_true(layout->store_bytes > 0);
            rft_manifest_close(layout);
        }
        shard_rig_close(&rig);
    }
}

TEST(a_shard_of_everything_lies_as_a_version_does)
{
    shard_rig rig;
    rft_manifest *layout = NULL;
    shard_rig_open(&rig, 1);
    for (uint64_t at = 0; at < rig.manifest->store_bytes; at++)
        rig.owners[at] = 1;
    shard_rig_follow(&rig);
    assert_ok(rft_shard_layout(rig.manifest, rig.shards[0], &layout, NULL));
    assert_int_equal(layout->store_bytes, rig.manifest->store_bytes);
    for (uint32_t i = 0; i < layout->block_count; i++) {
        assert_int_equal(layout->blocks[i].offset, rig.manifest->blocks[i].offset);
        assert_int_equal(layout->blocks[i].bytes, rig.manifest->blocks[i].bytes);
    }
    rft_manifest_close(layout);
    assert_ok(rft_shard_layout(rig.manifest, rig.shards[1], &layout, NULL));
    assert_int_equal(layout->payload_bytes, 0);
    assert_int_equal(layout->store_bytes, RFT_TENSOR_ALIGNMENT);
    rft_manifest_close(layout);
    shard_rig_close(&rig);
}

/* ---- Gathering */

/* The shard's bytes of an image, as they lie in the layout. */
static unsigned char *make_packed(const shard_rig *rig, uint32_t rank, const rft_manifest *layout,
                                  const unsigned char *image)
{
    unsigned char *packed = calloc(1, layout->store_bytes);
    assert_non_null(packed);
    for (uint32_t i = 0; i < layout->count; i++) {
        uint64_t count;
        if (!is_original(layout, i)) continue;
        unsigned char *cut = shard_rig_cut(rig->shards[rank], i, image, &count);
        assert_int_equal(count, layout->tensors[i].bytes);
        memcpy(packed + layout->tensors[i].offset, cut, count);
        free(cut);
    }
    return packed;
}

/* Byte by byte, from a map of what is wanted. */
static void check_gathered(const shard_rig *rig, const rft_want *want, const rft_block *whole,
                           const unsigned char *wanted, const unsigned char *image,
                           const unsigned char *gathered)
{
    uint64_t count = 0;
    for (uint64_t i = whole->offset; i < whole->offset + whole->bytes; i++) {
        if (wanted[i] == 0) continue;
        if (gathered[count] != image[i])
            fail_msg("byte %llu of %s", (unsigned long long)(i - whole->offset),
                     rig->manifest->tensors[whole->tensor].name);
        count++;
    }
    assert_int_equal(count, rft_want_block(want, whole));
}

static void gather_all(const shard_rig *rig, uint32_t rank, const rft_want *want,
                       const rft_manifest *layout, const unsigned char *image,
                       const unsigned char *packed)
{
    unsigned char *wanted = shard_rig_map(want);
    for (uint32_t i = 0; i < layout->block_count; i++) {
        uint64_t bytes = rft_want_block(want, &rig->manifest->blocks[i]);
        unsigned char *gathered = malloc(bytes + (bytes == 0));
        assert_non_null(gathered);
        rft_shard_gather(want, rig->shards[rank], &layout->blocks[i], packed, gathered);
        check_gathered(rig, want, &rig->manifest->blocks[i], wanted, image, gathered);
        free(gathered);
    }
    free(wanted);
}

TEST(wanted_bytes_are_gathered_from_the_layout)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        shard_rig rig;
        shard_rig_open(&rig, seed);
        unsigned char *image = sample_image(rig.manifest, &rig.seed);
        for (uint32_t rank = 0; rank < rig.ranks; rank++) {
            rft_manifest *layout = NULL;
            assert_ok(rft_shard_layout(rig.manifest, rig.shards[rank], &layout, NULL));
            unsigned char *packed = make_packed(&rig, rank, layout, image);
            rft_want *part = shard_rig_part(&rig, rank, rig.manifest);
            gather_all(&rig, rank, rig.shards[rank], layout, image, packed);
            gather_all(&rig, rank, part, layout, image, packed);
            rft_want_release(part);
            rft_manifest_close(layout);
            free(packed);
        }
        free(image);
        shard_rig_close(&rig);
    }
}

static void check_whole(const shard_rig *rig, uint32_t rank, const rft_manifest *layout,
                        uint32_t sequence, const unsigned char *image, const unsigned char *packed)
{
    rft_bytes modes = {0}, scratch = {0};
    rft_frame frame;
    const rft_frame_span *span = &rig->manifest->frames[sequence];
    const rft_frame_source source = {
        .image = packed, .want = rig->shards[rank], .shard = rig->shards[rank], .layout = layout};
    assert_ok(rft_frame_encode(rig->manifest, sequence, &source, &modes, &scratch, &frame, NULL));
    assert_int_equal(frame.payload.count, span->bytes);
    assert_memory_equal(frame.payload.data, image + span->offset, span->bytes);
    bool copied = layout->frames[sequence].bytes != span->bytes;
    assert_int_equal(frame.gathered, copied);
    rft_bytes_close(&modes);
    rft_bytes_close(&scratch);
}

/* Also where one begins in a tensor of which the shard has columns: the padding after these is
 * another one than in a version. */
TEST(frames_of_which_the_shard_has_all_are_those_of_the_version)
{
    uint32_t frames = 0, others = 0;
    for (uint64_t seed = 1; seed <= 2 * SEEDS; seed++) {
        shard_rig rig;
        shard_rig_open(&rig, seed);
        unsigned char *image = sample_image(rig.manifest, &rig.seed);
        for (uint32_t rank = 0; rank < rig.ranks; rank++) {
            rft_manifest *layout = NULL;
            assert_ok(rft_shard_layout(rig.manifest, rig.shards[rank], &layout, NULL));
            unsigned char *packed = make_packed(&rig, rank, layout, image);
            for (uint32_t i = 0; i < layout->frame_count; i++) {
                if (rft_want_frame(rig.shards[rank], i) != RFT_WANT_ALL) continue;
                check_whole(&rig, rank, layout, i, image, packed);
                others += layout->frames[i].bytes != rig.manifest->frames[i].bytes;
                frames++;
            }
            rft_manifest_close(layout);
            free(packed);
        }
        free(image);
        shard_rig_close(&rig);
    }
    assert_true(frames > 20);
    assert_true(others > 0);
}

/* ---- Whether they are the tensors */

TEST(shards_that_are_the_tensors_are_taken)
{
    for (uint64_t seed = 1; seed <= 2 * SEEDS; seed++) {
        shard_rig rig;
        shard_rig_open(&rig, seed);
        assert_done(rft_shards_check(rig.manifest, rig.shards, rig.ranks, error));
        shard_rig_follow(&rig);
        assert_done(rft_shards_check(rig.manifest, rig.shards, rig.ranks, error));
        shard_rig_close(&rig);
    }
}

typedef enum flaw { FLAW_HOLE, FLAW_OVERLAP, FLAW_REPLICA, FLAWS } flaw;
typedef enum site { SITE_BEGIN, SITE_MIDDLE, SITE_END, SITES } site;

static uint32_t draw_tensor(shard_rig *rig)
{
    for (;;) {
        uint32_t index = (uint32_t)seeded_below(&rig->seed, rig->manifest->count);
        if (is_original(rig->manifest, index) && rig->manifest->tensors[index].bytes > 0)
            return index;
    }
}

/* A range of the tensor: at its begin, in its middle, at its end. */
static void draw_range(shard_rig *rig, uint32_t tensor, site where, uint64_t *from, uint64_t *end)
{
    uint64_t whole = rig->manifest->tensors[tensor].bytes;
    uint64_t bytes = 1 + seeded_below(&rig->seed, whole < 40 ? whole : whole / 20);
    *from = where == SITE_BEGIN ? 0
            : where == SITE_END ? whole - bytes
                                : seeded_below(&rig->seed, whole - bytes + 1);
    *end = *from + bytes;
}

static void spoil(shard_rig *rig, flaw how, site where, uint32_t tensor)
{
    unsigned char *owners = rig->owners + rig->manifest->tensors[tensor].offset;
    uint64_t from = 0, end = rig->manifest->tensors[tensor].bytes;
    unsigned char more = (unsigned char)(1u << seeded_below(&rig->seed, rig->ranks));
    if (how == FLAW_REPLICA) { /* all that one rank has */
        while (where != SITE_BEGIN && seeded_below(&rig->seed, 3) != 0 && from < end / 2)
            from += end / 7 + 1;
        unsigned char first = owners[from];
        if (more == first) more = (unsigned char)(first == 1 ? 2 : first >> 1);
        for (uint64_t at = 0; at < end; at++)
            owners[at] |= owners[at] == first ? more : 0;
        return;
    }
    draw_range(rig, tensor, where, &from, &end);
    if (more == owners[from]) more = (unsigned char)(more == 1 ? 2 : more >> 1);
    for (uint64_t at = from; at < end; at++)
        owners[at] = how == FLAW_HOLE ? 0 : (unsigned char)(owners[at] | more);
}

/* The first byte of the tensor that is not one rank's, and the sentence about it. */
static void expect(const shard_rig *rig, uint32_t tensor, char words[2][120])
{
    const unsigned char *owners = rig->owners + rig->manifest->tensors[tensor].offset;
    uint64_t at = 0;
    uint32_t ranks[2], count = 0;
    while ((owners[at] & (owners[at] - 1)) == 0 && owners[at] != 0)
        at++;
    for (uint32_t rank = 0; rank < rig->ranks; rank++) {
        if ((owners[at] >> rank & 1) != 0) ranks[count++] = rank;
    }
    (void)snprintf(words[0], 120, "tensor \"%s\"", rig->manifest->tensors[tensor].name);
    if (count == 0)
        (void)snprintf(words[1], 120, "none has its byte %llu of %llu", (unsigned long long)at,
                       (unsigned long long)rig->manifest->tensors[tensor].bytes);
    else
        (void)snprintf(words[1], 120, "ranks %u and %u both publish byte %llu of", ranks[0],
                       ranks[1], (unsigned long long)at);
}

TEST(holes_overlaps_and_replicas_are_named)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        for (uint32_t kind = 0; kind < (uint32_t)FLAWS * SITES; kind += 1 + (uint32_t)(seed % 2)) {
            shard_rig rig;
            char words[2][120];
            refit_error error = {0};
            shard_rig_open(&rig, seed);
            uint32_t tensor = draw_tensor(&rig);
            spoil(&rig, (flaw)(kind / SITES), (site)(kind % SITES), tensor);
            shard_rig_follow(&rig);
            assert_invalid(rft_shards_check(rig.manifest, rig.shards, rig.ranks, &error));
            assert_int_equal(error.status, REFIT_ERR_INVALID);
            expect(&rig, tensor, words);
            assert_says(&error, words[0]);
            assert_says(&error, words[1]);
            shard_rig_close(&rig);
        }
    }
}

/* ---- Rows that are almost columns of a tensor */

#define LINE   12u
#define LINES  5u
#define BYTES  (LINE * LINES)
#define OWNERS 3u

/* Three columns, of which one may begin, end or repeat itself elsewhere. */
static void draw_columns(uint64_t *seed, rft_want_rows columns[OWNERS])
{
    uint64_t first = 1 + seeded_below(seed, 5), second = first + 1 + seeded_below(seed, 5);
    columns[0] = (rft_want_rows){0, 0, LINES, LINE, first};
    columns[1] = (rft_want_rows){0, first, LINES, LINE, second - first};
    columns[2] = (rft_want_rows){0, second, LINES, LINE, LINE - second};
    rft_want_rows *rows = &columns[seeded_below(seed, OWNERS)];
    switch (seeded_below(seed, 6)) {
    case 0: rows->bytes += seeded_below(seed, 2); break;
    case 1: rows->bytes -= rows->bytes > 1; break;
    case 2: rows->count -= 1 + seeded_below(seed, 2); break;
    case 3: rows->offset += seeded_below(seed, 2) * LINE; break;
    case 4: rows->stride += rows->bytes < LINE - 1; break;
    default: break;
    }
    while (rows->offset + (rows->count - 1) * rows->stride + rows->bytes > BYTES)
        rows->count--;
}

/* What is wrong with the first byte that is not one rank's; false if each is. */
static bool find_fault(const rft_want_rows columns[OWNERS], char words[40])
{
    unsigned owners[BYTES] = {0};
    for (uint32_t i = 0; i < OWNERS; i++)
        for (uint64_t row = 0; row < columns[i].count; row++)
            for (uint64_t k = 0; k < columns[i].bytes; k++)
                owners[columns[i].offset + row * columns[i].stride + k]++;
    for (unsigned at = 0; at < BYTES; at++) {
        if (owners[at] == 1) continue;
        (void)snprintf(words, 40, owners[at] == 0 ? "its byte %u of" : "both publish byte %u of",
                       at);
        return true;
    }
    return false;
}

TEST(columns_are_judged_as_their_bytes_are)
{
    const refit_tensor tensor = {sizeof tensor, "t",   REFIT_U8,      2,
                                 {LINES, LINE}, BYTES, REFIT_NO_ALIAS};
    rft_manifest *manifest = sample_manifest(&tensor, 1, 65536);
    uint64_t seed = 11;
    unsigned faults = 0;
    for (uint32_t i = 0; i < 400 * SEEDS; i++) {
        rft_want_rows columns[OWNERS];
        rft_want *shards[OWNERS] = {NULL};
        char words[40];
        refit_error error = {0};
        draw_columns(&seed, columns);
        for (uint32_t rank = 0; rank < OWNERS; rank++) {
            rft_bytes list = {0};
            assert_ok(rft_want_append(&list, &columns[rank], NULL));
            assert_ok(rft_want_open(manifest, rft_bytes_view(&list), &shards[rank], NULL));
            rft_bytes_close(&list);
        }
        bool fault = find_fault(columns, words);
        refit_status status = rft_shards_check(manifest, shards, OWNERS, &error);
        assert_int_equal(status, fault ? REFIT_ERR_INVALID : REFIT_OK);
        if (fault) assert_says(&error, words);
        faults += fault;
        for (uint32_t rank = 0; rank < OWNERS; rank++)
            rft_want_release(shards[rank]);
    }
    assert_in_range(faults, 100 * SEEDS, 350 * SEEDS);
    rft_manifest_close(manifest);
}

/* Boxes around one in the middle: no line divides them. */
TEST(boxes_that_no_line_divides_are_walked_row_by_row)
{
    static const rft_want_rows boxes[] = {{0, 0, 3, 10, 6},
                                          {0, 6, 5, 10, 4},
                                          {0, 30, 5, 10, 3},
                                          {0, 33, 2, 10, 3},
                                          {0, 53, 3, 10, 7}};
    const refit_tensor tensor = {sizeof tensor, "t", REFIT_U8, 2, {8, 10}, 80, REFIT_NO_ALIAS};
    rft_manifest *manifest = sample_manifest(&tensor, 1, 65536);
    rft_want *shards[COUNT_OF(boxes)];
    for (uint32_t missing = 0; missing <= COUNT_OF(boxes); missing++) {
        for (uint32_t rank = 0; rank < COUNT_OF(boxes); rank++) {
            rft_bytes list = {0};
            if (rank != missing) assert_ok(rft_want_append(&list, &boxes[rank], NULL));
            assert_ok(rft_want_open(manifest, rft_bytes_view(&list), &shards[rank], NULL));
            rft_bytes_close(&list);
        }
        refit_status status = rft_shards_check(manifest, shards, COUNT_OF(boxes), NULL);
        assert_int_equal(status, missing == COUNT_OF(boxes) ? REFIT_OK : REFIT_ERR_INVALID);
        for (uint32_t rank = 0; rank < COUNT_OF(boxes); rank++)
            rft_want_release(shards[rank]);
    }
    rft_manifest_close(manifest);
}

TEST(a_tensor_that_no_rank_has_is_named)
{
    shard_rig rig;
    shard_rig_open(&rig, 2);
    uint32_t last = rig.manifest->count - 1;
    const rft_manifest_tensor *tensor = &rig.manifest->tensors[last];
    memset(rig.owners + tensor->offset, 0, tensor->bytes);
    shard_rig_follow(&rig);
    assert_refused(rft_shards_check(rig.manifest, rig.shards, rig.ranks, error), REFIT_ERR_INVALID,
                   "none has its byte 0 of 72000");
    shard_rig_close(&rig);
}

/* ---- Digests */

typedef struct sums_rig {
    shard_rig shards;
    unsigned char *image;
    uint64_t *sums;
    rft_bytes words;
} sums_rig;

static void open_sums(sums_rig *rig, uint64_t seed)
{
    *rig = (sums_rig){0};
    shard_rig_open(&rig->shards, seed);
    rig->image = sample_image(rig->shards.manifest, &rig->shards.seed);
    rig->sums = calloc(rig->shards.manifest->count, sizeof *rig->sums);
    assert_non_null(rig->sums);
}

static void close_sums(sums_rig *rig)
{
    rft_bytes_close(&rig->words);
    free(rig->sums);
    free(rig->image);
    shard_rig_close(&rig->shards);
}

/* One rank's part of all tensors. */
static void add_rank(sums_rig *rig, uint32_t rank)
{
    const rft_want *shard = rig->shards.shards[rank];
    for (uint32_t i = 0; i < shard->manifest->count; i++) {
        uint64_t count, sum = 77;
        if (!is_original(shard->manifest, i)) continue;
        unsigned char *cut = shard_rig_cut(shard, i, rig->image, &count);
        size_t words = rig->words.count;
        assert_ok(rft_shard_sum(shard, i, cut, &sum, &rig->words, NULL));
        if (count == 0) assert_int_equal(sum, 0);
        if (count == shard->manifest->tensors[i].bytes) assert_int_equal(rig->words.count, words);
        rig->sums[i] += sum;
        free(cut);
    }
}

static bool is_digest(const sums_rig *rig, uint32_t index)
{
    const rft_manifest_tensor *tensor = &rig->shards.manifest->tensors[index];
    uint64_t whole = rft_digest_part(rig->image + tensor->offset, tensor->bytes, 0);
    return rft_digest_finish(rig->sums[index], tensor->bytes) ==
           rft_digest_finish(whole, tensor->bytes);
}

TEST(what_ranks_add_up_is_the_digest_in_any_order)
{
    for (uint64_t seed = 1; seed <= 2 * SEEDS; seed++) {
        sums_rig rig;
        open_sums(&rig, seed);
        uint32_t ranks = rig.shards.ranks;
        uint32_t first = (uint32_t)seeded_below(&rig.shards.seed, ranks);
        uint32_t step = ranks == 5 ? 1 + (uint32_t)seeded_below(&rig.shards.seed, 4) : 1;
        for (uint32_t i = 0; i < ranks; i++)
            add_rank(&rig, (first + i * step) % ranks);
        assert_ok(rft_shards_add_words(rig.shards.manifest, &rig.words, rig.sums, NULL));
        for (uint32_t i = 0; i < rig.shards.manifest->count; i++)
            if (is_original(rig.shards.manifest, i)) assert_true(is_digest(&rig, i));
        close_sums(&rig);
    }
}

/* Ranks that have a byte each: every word is put together from eight parts. */
TEST(words_of_single_bytes_are_put_together)
{
    sums_rig rig;
    open_sums(&rig, 3);
    rig.shards.ranks = SHARD_RIG_MOST;
    for (uint64_t at = 0; at < rig.shards.manifest->store_bytes; at++)
        rig.shards.owners[at] = (unsigned char)(1u << at % SHARD_RIG_MOST);
    shard_rig_follow(&rig.shards);
    assert_ok(rft_shards_check(rig.shards.manifest, rig.shards.shards, SHARD_RIG_MOST, NULL));
    for (uint32_t rank = 0; rank < SHARD_RIG_MOST; rank++)
        add_rank(&rig, rank);
    assert_ok(rft_shards_add_words(rig.shards.manifest, &rig.words, rig.sums, NULL));
    for (uint32_t i = 0; i < rig.shards.manifest->count; i++)
        if (is_original(rig.shards.manifest, i)) assert_true(is_digest(&rig, i));
    close_sums(&rig);
}

TEST(a_byte_that_differs_is_in_the_sum)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        sums_rig rig;
        open_sums(&rig, seed);
        uint32_t tensor = draw_tensor(&rig.shards);
        const rft_manifest_tensor *place = &rig.shards.manifest->tensors[tensor];
        uint64_t at = place->offset + seeded_below(&rig.shards.seed, place->bytes);
        rig.image[at] ^= 1;
        for (uint32_t i = 0; i < rig.shards.ranks; i++)
            add_rank(&rig, i);
        assert_ok(rft_shards_add_words(rig.shards.manifest, &rig.words, rig.sums, NULL));
        rig.image[at] ^= 1;
        for (uint32_t i = 0; i < rig.shards.manifest->count; i++)
            if (is_original(rig.shards.manifest, i))
                assert_int_equal(is_digest(&rig, i), i != tensor);
        close_sums(&rig);
    }
}

static refit_status add_word(const rft_manifest *manifest, uint64_t *sums, uint32_t tensor,
                             uint64_t index)
{
    rft_bytes words = {0};
    unsigned char entry[RFT_WORD_BYTES] = {0};
    const uint32_t last = manifest->count - 1;
    rft_put_u32(entry, last); /* one that is sound */
    assert_ok(rft_bytes_append(&words, entry, sizeof entry, NULL));
    rft_put_u32(entry, tensor);
    rft_put_u64(entry + 4, index);
    assert_ok(rft_bytes_append(&words, entry, sizeof entry, NULL));
    refit_status status = rft_shards_add_words(manifest, &words, sums, NULL);
    rft_bytes_close(&words);
    return status;
}

TEST(words_that_no_tensor_has_are_refused)
{
    static const refit_tensor tensors[] = {
        {sizeof(refit_tensor), "one", REFIT_U8, 1, {17}, 17, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "tied", REFIT_U8, 1, {17}, 17, 0},
        {sizeof(refit_tensor), "empty", REFIT_U8, 1, {0}, 0, REFIT_NO_ALIAS},
        {sizeof(refit_tensor), "two", REFIT_U8, 1, {16}, 16, REFIT_NO_ALIAS},
    };
    uint64_t sums[4] = {0};
    rft_manifest *manifest = sample_manifest(tensors, 4, 1000);
    assert_ok(add_word(manifest, sums, 0, 0));
    assert_ok(add_word(manifest, sums, 0, 2));
    assert_ok(add_word(manifest, sums, 3, 1));
    assert_int_equal(add_word(manifest, sums, 0, 3), REFIT_ERR_PROTOCOL);
    assert_int_equal(add_word(manifest, sums, 0, UINT64_MAX), REFIT_ERR_PROTOCOL);
    assert_int_equal(add_word(manifest, sums, 1, 0), REFIT_ERR_PROTOCOL);
    assert_int_equal(add_word(manifest, sums, 2, 0), REFIT_ERR_PROTOCOL);
    assert_int_equal(add_word(manifest, sums, 3, 2), REFIT_ERR_PROTOCOL);
    assert_int_equal(add_word(manifest, sums, 4, 0), REFIT_ERR_PROTOCOL);
    assert_int_equal(add_word(manifest, sums, UINT32_MAX, 0), REFIT_ERR_PROTOCOL);
    rft_manifest_close(manifest);
}

/* ---- Memory */

static refit_status try_all(const shard_rig *rig, const unsigned char *bytes, uint32_t tensor)
{
    uint64_t sum;
    rft_bytes words = {0};
    rft_manifest *layout = NULL;
    refit_error error = {0};
    refit_status status = rft_shard_layout(rig->manifest, rig->shards[0], &layout, &error);
    if (status == REFIT_OK) {
        rft_manifest_close(layout);
        status = rft_shards_check(rig->manifest, rig->shards, rig->ranks, &error);
    }
    if (status == REFIT_OK)
        status = rft_shard_sum(rig->shards[0], tensor, bytes, &sum, &words, &error);
    rft_bytes_close(&words);
    assert_int_equal(status, error.status);
    return status;
}

TEST(failed_allocations_are_errors_and_leave_nothing)
{
    uint32_t failed = 0;
    for (uint64_t nth = 1;; nth++) {
        shard_rig rig;
        uint64_t count;
        failing_alloc_begin(0);
        shard_rig_open(&rig, 4);
        uint32_t tensor = rig.manifest->count - 1;
        uint64_t offset = rig.manifest->tensors[tensor].offset;
        for (uint64_t i = 0; i < 72000; i++)
            rig.owners[offset + i] = (unsigned char)(1u << i % 2);
        shard_rig_follow(&rig);
        unsigned char *image = sample_image(rig.manifest, &rig.seed);
        unsigned char *cut = shard_rig_cut(rig.shards[0], tensor, image, &count);
        failing_alloc_here(nth);
        refit_status status = try_all(&rig, cut, tensor);
        bool came = failing_alloc_stop_here();
        free(cut);
        free(image);
        shard_rig_close(&rig);
        (void)failing_alloc_end();
        assert_int_equal(status, came ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
        if (!came) break;
        failed++;
    }
    assert_true(failed >= 6);
}

int main(void)
{
    return test_run("shard");
}
