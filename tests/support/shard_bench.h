/*
 * shard_bench: a worker's session on the bench (session_bench.h) whose trainer has three ranks. The
 * test is also the publishers of all of them: what a link says is kept, and each sends the rows
 * that it was asked for.
 */
#ifndef SHARD_BENCH_H
#define SHARD_BENCH_H

#include "tests/support/session_bench.h"

#define SHARD_RANKS 3u
#define SHARD_SAID  64u

typedef struct shard_rank {
    rft_bytes rows;               /* what it publishes, as WANT has it */
    rft_message said[SHARD_SAID]; /* of its link; views in it are gone */
    uint32_t said_count;
    uint32_t resent;  /* the first number of the last RESEND */
    rft_bytes wanted; /* of the last WANT */
    uint32_t wants;
    rft_want *asked; /* of the last first PULL of a version; NULL: none came */
    rft_bytes have;  /* of the same */
} shard_rank;

typedef struct shard_bench {
    session_bench bench;
    shard_rank ranks[SHARD_RANKS];
} shard_bench;

/* The worker has joined, has the manifest and was told of all ranks, which have welcomed it: of the
 * first tensor two have a part each, of the second columns; the last two tensors are one each's. */
void shards_open(shard_bench *on);
void shards_close(shard_bench *on);

rft_message shards_message(const shard_bench *on, uint32_t rank);
void shards_tell(shard_bench *on);
void shards_offer(shard_bench *on, rft_message offer);
/* sample_offer from all ranks. */
rft_message shards_offer_of(shard_bench *on, uint64_t version, uint64_t base);

rft_shard_link *shards_link(shard_bench *on, uint32_t rank);
void shards_hear(shard_bench *on, uint32_t rank, rft_message message);
void shards_welcome(shard_bench *on, uint32_t rank);
void shards_frame(shard_bench *on, uint32_t rank, uint64_t version, uint64_t base,
                  uint32_t sequence, bool damaged);
/* All that the rank was asked for; all that all of them were. */
void shards_frames(shard_bench *on, uint32_t rank, uint64_t version, uint64_t base);
void shards_all_frames(shard_bench *on, uint64_t version, uint64_t base);

const rft_message *shards_said(shard_bench *on, uint32_t rank, rft_message_kind kind);
void shards_forget(shard_bench *on);

/* Ticks until nothing is left that takes long. */
void shards_work(shard_bench *on);
/* From the offer to the update, which is closed, and its bytes compared. */
void shards_apply(shard_bench *on, uint64_t version, uint64_t base);

#define SHARD_TEST(name) TEST_ON(shard_bench *on, name, shards_setup, shards_teardown)
int shards_setup(void **state);
int shards_teardown(void **state);

#endif
