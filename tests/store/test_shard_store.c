/* Stores of shards, next to one of everything that is written with the same values: what they keep,
 * what their frames give a worker, and the digests that they make together. */
#include <stdlib.h>

#include "kernels/digest.h"
#include "store/frames.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/quick_config.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"
#include "tests/wire/shard_rig.h"
#include "tests/wire/tensor_samples.h"

#ifndef SEEDS
#define SEEDS 4u
#endif
#define VERSIONS 5u
#define POISON   0xee

typedef struct rank_store {
    rft_store *store;
    rft_want *shard; /* of the store's manifest */
} rank_store;

typedef struct shard_bench {
    shard_rig rig;
    refit_config config;
    rft_limits limits;
    rft_retire_list retired;
    rft_pool *pool; /* NULL: one thread codes */
    rft_store *whole;
    rank_store ranks[SHARD_RIG_MOST];
    unsigned char *now; /* the version that is written, or the one committed */
    unsigned char *before;
    uint64_t version; /* that is, or was, written last */
    uint64_t base;    /* `before` */
    unsigned char *digests;
    rft_message seal;
    rft_frame_counts counts; /* of all frames that were coded */
    uint32_t packed;
} shard_bench;

/* ---- Opening and closing */

static rft_manifest *copy_manifest(const shard_bench *bench)
{
    rft_manifest *copy = NULL;
    const rft_manifest *manifest = bench->rig.manifest;
    assert_ok(rft_manifest_decode(rft_bytes_view(&manifest->encoded), manifest->frame_bytes,
                                  &bench->limits, &copy, NULL));
    return copy;
}

static void renew_all(rft_store *store, uint32_t slots)
{
    for (uint32_t i = 0; i < slots; i++)
        assert_ok(rft_store_renew(store, i, NULL));
}

static void open_rank(shard_bench *bench, uint32_t rank, uint32_t slots)
{
    rank_store *one = &bench->ranks[rank];
    rft_manifest *manifest = copy_manifest(bench);
    rft_view rows = rft_bytes_view(&bench->rig.shards[rank]->encoded);
    assert_ok(rft_want_open(manifest, rows, &one->shard, NULL));
    assert_ok(
        rft_store_open_shard(manifest, one->shard, slots, &bench->retired, &one->store, NULL));
    renew_all(one->store, slots);
}

static void open_bench(shard_bench *bench, uint64_t seed, uint32_t slots)
{
    *bench = (shard_bench){.config = quick_config()};
    bench->limits = rft_limits_from(&bench->config);
    if (seed % 2 == 0) bench->config.broadcast_delta = REFIT_DELTA_ALWAYS;
    shard_rig_open(&bench->rig, seed);
    assert_ok(
        rft_store_open(copy_manifest(bench), slots, false, &bench->retired, &bench->whole, NULL));
    renew_all(bench->whole, slots);
    for (uint32_t i = 0; i < bench->rig.ranks; i++)
        open_rank(bench, i, slots);
    bench->now = sample_image(bench->rig.manifest, &bench->rig.seed);
    bench->before = calloc(1, bench->rig.manifest->store_bytes);
    bench->digests = calloc(bench->rig.manifest->originals, 8);
    assert_true(bench->before != NULL && bench->digests != NULL);
}

static void close_bench(shard_bench *bench)
{
    rft_store_close(bench->whole);
    for (uint32_t i = 0; i < bench->rig.ranks; i++) {
        rft_want_release(bench->ranks[i].shard);
        rft_store_close(bench->ranks[i].store);
    }
    assert_int_equal(rft_retire_list_close(&bench->retired, 0), 0);
    shard_rig_close(&bench->rig);
    free(bench->now);
    free(bench->before);
    free(bench->digests);
}

/* ---- Writing */

/* Some blocks stay, some change a little, others altogether. */
static void draw_next(shard_bench *bench)
{
    const rft_manifest *manifest = bench->rig.manifest;
    uint64_t *seed = &bench->rig.seed;
    memcpy(bench->before, bench->now, manifest->store_bytes);
    for (uint32_t i = 0; i < manifest->block_count; i++) {
        const rft_block *block = &manifest->blocks[i];
        uint64_t kind = seeded_below(seed, 4), step = kind == 3 ? 1 : 997;
        for (uint64_t at = seeded_below(seed, 90); kind > 0 && at < block->bytes; at += step)
            bench->now[block->offset + at] ^= (unsigned char)(1 + seeded_below(seed, 255));
    }
}

static void add_ready(void *user, uint32_t frame)
{
    rft_store_add_ready(user, frame);
}

/* As a device does: it gives the sum of what it has brought, or not. */
static void write_by_device(shard_bench *bench, rft_store *store, uint32_t tensor,
                            const unsigned char *bytes, uint64_t count)
{
    uint64_t sum = rft_digest_part(bytes, count, 0);
    unsigned char *to = rft_store_begin_device_write(store, tensor);
    assert_non_null(to);
    if (count > 0) memcpy(to, bytes, count);
    rft_store_end_device_write(store, tensor);
    bool gives = seeded_below(&bench->rig.seed, 2) == 0;
    rft_store_compare(store, tensor, gives ? &sum : NULL, add_ready, store);
}

static void write_tensor(shard_bench *bench, uint32_t rank, uint32_t tensor)
{
    uint64_t count;
    rank_store *one = &bench->ranks[rank];
    unsigned char *cut = shard_rig_cut(one->shard, tensor, bench->now, &count);
    if (seeded_below(&bench->rig.seed, 3) == 0)
        write_by_device(bench, one->store, tensor, cut, count);
    else if (count > 0 || seeded_below(&bench->rig.seed, 2) == 0)
        assert_done(rft_store_write(one->store, tensor, cut, count, add_ready, one->store, error));
    free(cut);
}

static bool is_original(const shard_bench *bench, uint32_t tensor)
{
    return bench->rig.manifest->tensors[tensor].alias_of == REFIT_NO_ALIAS;
}

static void begin_all(shard_bench *bench)
{
    bench->version++;
    rft_store_begin(bench->whole, bench->version);
    for (uint32_t i = 0; i < bench->rig.ranks; i++)
        rft_store_begin(bench->ranks[i].store, bench->version);
}

/* Those before `end`, backwards: frames become complete in another order than they are numbered. */
static void write_all(shard_bench *bench, uint32_t end)
{
    for (uint32_t i = end; i-- > 0;) {
        const rft_manifest_tensor *tensor = &bench->rig.manifest->tensors[i];
        if (!is_original(bench, i)) continue;
        assert_ok(rft_store_write(bench->whole, i, bench->now + tensor->offset, tensor->bytes,
                                  add_ready, bench->whole, NULL));
        for (uint32_t rank = 0; rank < bench->rig.ranks; rank++)
            write_tensor(bench, rank, i);
    }
}

static void add_sums(const shard_bench *bench, uint64_t *sums, rft_bytes *words)
{
    for (uint32_t rank = 0; rank < bench->rig.ranks; rank++) {
        const rft_store *store = bench->ranks[rank].store;
        uint32_t original = 0;
        for (uint32_t i = 0; i < store->manifest->count; i++)
            if (is_original(bench, i)) sums[i] += store->next.tensor_sums[original++];
        assert_ok(rft_bytes_append(words, store->words.data, store->words.count, NULL));
    }
}

/* All are sealed, and have the digests that they make together, which are those of everything. */
static void seal_all(shard_bench *bench)
{
    const rft_manifest *manifest = bench->rig.manifest;
    uint64_t *sums = calloc(manifest->count, sizeof *sums);
    rft_bytes words = {0};
    uint32_t original = 0;
    assert_non_null(sums);
    assert_ok(rft_store_seal(bench->whole, NULL));
    for (uint32_t i = 0; i < bench->rig.ranks; i++)
        assert_done(rft_store_seal(bench->ranks[i].store, error));
    add_sums(bench, sums, &words);
    assert_ok(rft_shards_add_words(manifest, &words, sums, NULL));
    for (uint32_t i = 0; i < manifest->count; i++) {
        if (!is_original(bench, i)) continue;
        sums[original] = rft_digest_finish(sums[i], manifest->tensors[i].bytes);
        assert_int_equal(sums[original], bench->whole->next.tensor_sums[original]);
        rft_put_u64(bench->digests + (size_t)8 * original, sums[original]);
        original++;
    }
    for (uint32_t i = 0; i < bench->rig.ranks; i++) {
        rft_store_conclude(bench->ranks[i].store, sums);
        assert_true(
            rft_digest128_equal(&bench->ranks[i].store->next.digest, &bench->whole->next.digest));
    }
    bench->seal = (rft_message){.kind = RFT_SEAL};
    bench->seal.as.seal.version = bench->version;
    bench->seal.as.seal.digest = bench->whole->next.digest;
    bench->seal.as.seal.tensors = (rft_view){bench->digests, (size_t)8 * original};
    rft_bytes_close(&words);
    free(sums);
}

static void commit_all(shard_bench *bench)
{
    rft_store_commit(bench->whole);
    for (uint32_t i = 0; i < bench->rig.ranks; i++)
        rft_store_commit(bench->ranks[i].store);
}

/* ---- What the stores have */

static void check_slot(const shard_bench *bench, uint32_t rank, const unsigned char *image)
{
    const rank_store *one = &bench->ranks[rank];
    const unsigned char *packed = rft_slot_image(rft_store_served_slot(one->store));
    for (uint32_t i = 0; i < one->store->layout->count; i++) {
        uint64_t count;
        const rft_manifest_tensor *tensor = &one->store->layout->tensors[i];
        if (!is_original(bench, i)) continue;
        unsigned char *cut = shard_rig_cut(one->shard, i, image, &count);
        assert_int_equal(tensor->bytes, count);
        assert_memory_equal(packed + tensor->offset, cut, count);
        free(cut);
    }
}

/* Each frame of which the rank has bytes, once. */
static void check_ready(const rank_store *one)
{
    uint32_t *times = calloc(one->store->manifest->frame_count + 1u, sizeof *times);
    assert_non_null(times);
    for (uint32_t i = 0; i < one->store->ready_count; i++)
        times[one->store->ready[i]]++;
    for (uint32_t i = 0; i < one->store->manifest->frame_count; i++) {
        if (rft_want_frame(one->shard, i) != RFT_WANT_NONE) assert_int_equal(times[i], 1);
        assert_true(times[i] <= 1);
    }
    free(times);
}

static void check_same(const shard_bench *bench, const rank_store *one)
{
    const rft_manifest *manifest = one->store->manifest;
    if (one->store->base == 0) return;
    unsigned char *wanted = shard_rig_map(one->shard);
    for (uint32_t i = 0; i < manifest->block_count; i++) {
        const rft_block *block = &manifest->blocks[i];
        bool same = true;
        for (uint64_t at = block->offset; at < block->offset + block->bytes; at++)
            same = same && (wanted[at] == 0 || bench->now[at] == bench->before[at]);
        if (rft_want_block(one->shard, block) > 0) assert_int_equal(one->store->same[i] != 0, same);
    }
    free(wanted);
}

/* ---- Frames to a worker */

typedef struct worker {
    rft_reassembly *reassembly;
    unsigned char *staging;
    unsigned char *held; /* of the version before: what is wanted, and nothing else */
    unsigned char *wanted;
} worker;

static void open_worker(worker *to, const shard_bench *bench, const rft_want *want, bool base)
{
    const rft_manifest *manifest = bench->rig.manifest;
    *to = (worker){.wanted = shard_rig_map(want)};
    to->staging = malloc(manifest->store_bytes);
    to->held = malloc(manifest->store_bytes);
    assert_true(to->staging != NULL && to->held != NULL);
    memset(to->staging, POISON, manifest->store_bytes);
    for (uint64_t i = 0; i < manifest->store_bytes; i++)
        to->held[i] = to->wanted[i] ? bench->before[i] : POISON;
    assert_ok(rft_reassembly_open(want->manifest, to->staging, base ? to->held : NULL,
                                  &to->reassembly, NULL));
    rft_reassembly_narrow(to->reassembly, want);
}

static void close_worker(worker *from)
{
    rft_reassembly_close(from->reassembly);
    free(from->staging);
    free(from->held);
    free(from->wanted);
}

static void check_arrived(const shard_bench *bench, const worker *to)
{
    assert_true(rft_reassembly_complete(to->reassembly));
    assert_done(rft_reassembly_verify(to->reassembly, &bench->seal, error));
    for (uint64_t i = 0; i < bench->rig.manifest->store_bytes; i++) {
        if (to->staging[i] != (to->wanted[i] ? bench->now[i] : POISON))
            fail_msg("byte %llu", (unsigned long long)i);
    }
}

static void send_all(shard_bench *bench, const rank_store *from, rft_frames *frames,
                     rft_coding coding, rft_want *want)
{
    worker to;
    open_worker(&to, bench, want, coding != RFT_CODING_WHOLE);
    for (uint32_t i = 0; i < from->store->manifest->frame_count; i++) {
        rft_encoded frame;
        rft_message message;
        if (rft_want_frame(want, i) == RFT_WANT_NONE) continue;
        assert_done(rft_frames_encode(frames, from->store, i, coding, want,
                                      from->store->ready_count, &frame, error));
        assert_ok(rft_message_decode(frame.message, &bench->limits, &message, NULL));
        assert_done(rft_reassembly_take(to.reassembly, &message, frame.payload.bytes, error));
        bench->packed += message.as.frame.planes.count > 0;
    }
    check_arrived(bench, &to);
    close_worker(&to);
}

/* In every coding that the store has a base for. */
static void check_frames(shard_bench *bench, uint32_t rank)
{
    rank_store *one = &bench->ranks[rank];
    rft_want *part = shard_rig_part(&bench->rig, rank, one->store->manifest);
    for (rft_coding coding = 0; coding < RFT_CODINGS; coding++) {
        rft_frames *frames = NULL;
        if (coding != RFT_CODING_WHOLE && one->store->base == 0) continue;
        assert_ok(
            rft_frames_open(one->store->manifest, &bench->config, bench->pool, &frames, NULL));
        send_all(bench, one, frames, coding, one->shard);
        send_all(bench, one, frames, coding, part);
        rft_frames_counts counts = rft_frames_count(frames);
        bench->counts.same += counts.blocks.same;
        bench->counts.sparse += counts.blocks.sparse;
        bench->counts.dense += counts.blocks.dense;
        rft_frames_close(frames, &bench->retired);
    }
    rft_want_release(part);
}

/* Written, sealed and committed; looked at before the commit or after it. */
static void publish(shard_bench *bench)
{
    bool early = bench->version % 2 == 0;
    if (bench->version > 0) draw_next(bench);
    begin_all(bench);
    write_all(bench, bench->rig.manifest->count);
    for (uint32_t i = 0; i < bench->rig.ranks; i++) {
        check_ready(&bench->ranks[i]);
        check_same(bench, &bench->ranks[i]);
    }
    seal_all(bench);
    for (uint32_t i = 0; early && i < bench->rig.ranks; i++)
        check_frames(bench, i);
    commit_all(bench);
    for (uint32_t i = 0; i < bench->rig.ranks; i++) {
        check_slot(bench, i, bench->now);
        if (!early) check_frames(bench, i);
    }
}

/* ---- Tests */

static void publish_all(uint32_t slots, uint64_t seeds, rft_pool *pool)
{
    rft_frame_counts counts = {0};
    uint32_t packed = 0;
    for (uint64_t seed = 1; seed <= seeds; seed++) {
        shard_bench bench;
        open_bench(&bench, seed, slots);
        bench.pool = pool;
        for (uint32_t i = 0; i < VERSIONS; i++)
            publish(&bench);
        counts.same += bench.counts.same;
        counts.sparse += bench.counts.sparse;
        counts.dense += bench.counts.dense;
        packed += bench.packed;
        close_bench(&bench);
    }
    assert_true(counts.same > 0 && counts.sparse > 0 && counts.dense > 0 && packed > 0);
}

TEST(frames_of_shards_give_the_version_with_one_slot)
{
    publish_all(1, SEEDS, NULL);
}

TEST(frames_of_shards_give_the_version_with_two_slots)
{
    publish_all(2, SEEDS, NULL);
}

TEST(frames_of_shards_that_are_made_along_give_the_version)
{
    rft_pool encoders;
    assert_ok(rft_frames_open_pool(&encoders, 3, NULL));
    publish_all(2, SEEDS / 2, &encoders);
    rft_pool_close(&encoders);
}

/* Dropped after some tensors, or sealed; with versions between. */
TEST(shards_of_the_version_before_come_back)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        shard_bench bench;
        open_bench(&bench, seed, 1 + seed % 2);
        publish(&bench);
        for (uint32_t round = 0; round < 4; round++) {
            uint64_t bytes = bench.rig.manifest->store_bytes;
            uint32_t count = bench.rig.manifest->count;
            unsigned char *kept = malloc(bytes);
            assert_non_null(kept);
            memcpy(kept, bench.now, bytes);
            draw_next(&bench);
            begin_all(&bench);
            write_all(&bench, round == 3 ? count : (uint32_t)seeded_below(&bench.rig.seed, count));
            if (round == 3) seal_all(&bench);
            memcpy(bench.now, kept, bytes);
            free(kept);
            rft_store_undo(bench.whole);
            rft_store_rollback(bench.whole, true);
            for (uint32_t i = 0; i < bench.rig.ranks; i++) {
                rft_store_undo(bench.ranks[i].store);
                rft_store_rollback(bench.ranks[i].store, true);
                check_slot(&bench, i, bench.now);
                assert_int_equal(bench.ranks[i].store->base, 0);
                assert_int_equal(bench.ranks[i].store->ready_count,
                                 bench.rig.manifest->frame_count);
            }
            if (round != 1) continue;
            publish(&bench);
        }
        publish(&bench);
        close_bench(&bench);
    }
}

TEST(memory_of_a_slot_is_that_of_the_shard)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        shard_bench bench;
        open_bench(&bench, seed, 2);
        for (uint32_t i = 0; i < bench.rig.ranks; i++) {
            const rft_store *store = bench.ranks[i].store;
            uint64_t most = bench.rig.shards[i]->bytes +
                            (uint64_t)RFT_TENSOR_ALIGNMENT * (store->manifest->count + 1) +
                            RFT_SEQLOCK_BYTES;
            for (uint32_t slot = 0; slot < 2; slot++) {
                const rft_segment *segment = &store->slots[slot].buffer->segment;
                assert_in_range(segment->bytes, bench.rig.shards[i]->bytes, most + 4095);
                assert_int_equal(segment->name[0], '\0'); /* of this process alone */
            }
        }
        close_bench(&bench);
    }
}

TEST(a_renewed_slot_has_the_shard_of_before)
{
    shard_bench bench;
    open_bench(&bench, 3, 1);
    publish(&bench);
    for (uint32_t i = 0; i < bench.rig.ranks; i++) {
        assert_ok(rft_store_renew(bench.ranks[i].store, 0, NULL));
        check_slot(&bench, i, bench.now);
    }
    publish(&bench);
    close_bench(&bench);
}

static refit_status write_count(rft_store *store, uint32_t tensor, const void *bytes,
                                uint64_t count, refit_error *error)
{
    return rft_store_write(store, tensor, bytes, count, add_ready, store, error);
}

TEST(other_bytes_than_the_shards_are_refused)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        shard_bench bench;
        open_bench(&bench, seed, 1);
        begin_all(&bench);
        for (uint32_t rank = 0; rank < bench.rig.ranks; rank++) {
            rft_store *store = bench.ranks[rank].store;
            for (uint32_t i = 0; i < store->manifest->count; i++) {
                uint64_t own = store->layout->tensors[i].bytes;
                uint64_t all = store->manifest->tensors[i].bytes;
                if (!is_original(&bench, i)) {
                    assert_refused(write_count(store, i, bench.now, own, error), REFIT_ERR_INVALID,
                                   "shares the bytes");
                    continue;
                }
                const char *words = "bytes on this rank, not";
                assert_refused(write_count(store, i, bench.now, own + 1, error), REFIT_ERR_INVALID,
                               words);
                if (own > 0)
                    assert_refused(write_count(store, i, bench.now, own - 1, error),
                                   REFIT_ERR_INVALID, words);
                if (own < all)
                    assert_refused(write_count(store, i, bench.now, all, error), REFIT_ERR_INVALID,
                                   words);
                if (own > 0)
                    assert_refused(write_count(store, i, NULL, own, error), REFIT_ERR_INVALID,
                                   "has no memory");
            }
            assert_refused(write_count(store, store->manifest->count, bench.now, 1, error),
                           REFIT_ERR_INVALID, "there is no tensor");
        }
        write_all(&bench, bench.rig.manifest->count); /* nothing of that was taken */
        seal_all(&bench);
        commit_all(&bench);
        close_bench(&bench);
    }
}

/* All but one tensor of which the rank has bytes. */
TEST(a_shard_with_one_tensor_missing_is_not_sealed)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        shard_bench bench;
        open_bench(&bench, seed, 1 + seed % 2);
        begin_all(&bench);
        for (uint32_t rank = 0; rank < bench.rig.ranks; rank++) {
            rft_store *store = bench.ranks[rank].store;
            uint32_t left = UINT32_MAX;
            for (uint32_t i = 0; i < store->manifest->count; i++) {
                if (!is_original(&bench, i)) continue;
                if (left == UINT32_MAX && store->layout->tensors[i].bytes > 0)
                    left = i;
                else
                    write_tensor(&bench, rank, i);
            }
            if (left == UINT32_MAX) continue;
            assert_refused(rft_store_seal(store, error), REFIT_ERR_STATE, "lacks 1 tensors");
            assert_refused(rft_store_seal(store, error), REFIT_ERR_STATE,
                           store->manifest->tensors[left].name);
            write_tensor(&bench, rank, left);
            assert_ok(rft_store_seal(store, NULL));
        }
        close_bench(&bench);
    }
}

TEST(a_shard_of_nothing_is_sealed_at_once)
{
    shard_bench bench;
    rft_want *none = NULL;
    rft_store *store = NULL;
    open_bench(&bench, 1, 1);
    rft_manifest *manifest = copy_manifest(&bench);
    assert_ok(rft_want_open(manifest, (rft_view){0}, &none, NULL));
    assert_ok(rft_store_open_shard(manifest, none, 1, &bench.retired, &store, NULL));
    renew_all(store, 1);
    for (uint64_t version = 1; version < 4; version++) {
        rft_store_begin(store, version);
        assert_ok(rft_store_seal(store, NULL));
        for (uint32_t i = 0; i < manifest->originals; i++)
            assert_int_equal(store->next.tensor_sums[i], 0);
        assert_int_equal(store->words.count, 0);
        rft_store_commit(store);
    }
    rft_store_close(store);
    rft_want_release(none);
    close_bench(&bench);
}

/* ---- Memory */

TEST(failed_allocations_leave_nothing)
{
    for (uint32_t slots = 1; slots <= 2; slots++) {
        for (uint64_t nth = 1;; nth++) {
            shard_bench bench = {.config = quick_config()};
            rft_want *shard = NULL;
            rft_store *store = NULL;
            failing_alloc_begin(0);
            bench.limits = rft_limits_from(&bench.config);
            shard_rig_open(&bench.rig, 3);
            rft_manifest *manifest = copy_manifest(&bench);
            rft_view rows = rft_bytes_view(&bench.rig.shards[0]->encoded);
            assert_ok(rft_want_open(manifest, rows, &shard, NULL));
            failing_alloc_here(nth);
            refit_status status =
                rft_store_open_shard(manifest, shard, slots, &bench.retired, &store, NULL);
            if (status == REFIT_OK) status = rft_store_renew(store, 0, NULL);
            bool came = failing_alloc_stop_here();
            rft_want_release(shard);
            rft_store_close(store);
            assert_int_equal(rft_retire_list_close(&bench.retired, 0), 0);
            shard_rig_close(&bench.rig);
            (void)failing_alloc_end();
            assert_int_equal(status, came ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
            if (!came) break;
        }
    }
}

/* There was no memory for the words of a tensor: it is as if it had not been written. */
TEST(a_tensor_whose_words_found_no_memory_is_written_again)
{
    uint32_t failed = 0;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        shard_bench bench;
        failing_alloc_begin(0);
        open_bench(&bench, seed, 1 + seed % 2);
        begin_all(&bench);
        for (uint32_t i = 0; i < bench.rig.manifest->count; i++) {
            for (uint32_t rank = 0; is_original(&bench, i) && rank < bench.rig.ranks; rank++) {
                uint64_t count;
                refit_status status;
                rft_store *store = bench.ranks[rank].store;
                unsigned char *cut = shard_rig_cut(bench.ranks[rank].shard, i, bench.now, &count);
                do {
                    failing_alloc_here(1 + failed % 2);
                    status = write_count(store, i, cut, count, NULL);
                    bool came = failing_alloc_stop_here();
                    assert_int_equal(status, came ? REFIT_ERR_HOST_MEMORY : REFIT_OK);
                    failed += came;
                    if (came) status = write_count(store, i, cut, count, NULL);
                } while (status != REFIT_OK);
                free(cut);
            }
            const rft_manifest_tensor *tensor = &bench.rig.manifest->tensors[i];
            if (is_original(&bench, i))
                assert_ok(
                    write_count(bench.whole, i, bench.now + tensor->offset, tensor->bytes, NULL));
        }
        for (uint32_t rank = 0; rank < bench.rig.ranks; rank++)
            check_ready(&bench.ranks[rank]);
        seal_all(&bench);
        for (uint32_t rank = 0; rank < bench.rig.ranks; rank++)
            check_frames(&bench, rank);
        close_bench(&bench);
        (void)failing_alloc_end();
    }
    assert_true(failed > 0);
}

int main(void)
{
    return test_run("shard_store");
}
