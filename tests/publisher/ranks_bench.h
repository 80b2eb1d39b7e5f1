/* ranks_bench: rank 0 of three on the bench (server_bench.h); the test is the others. */
#ifndef RANKS_BENCH_H
#define RANKS_BENCH_H

#include "tests/support/server_bench.h"

#define RANKS  3u
#define FIRST  1u /* connections: those that may be ranks */
#define SENDER 7u /* and one after the last; honest ranks have those after it */

typedef struct ranks_bench {
    server_bench server;
    sample_version sample; /* what each version has, whatever its number */
    rft_bytes rows[RANKS];
    rft_want *shards[RANKS]; /* of the store's manifest */
    rft_bytes sums, words;   /* of the last message */
    uint64_t version;
    uint64_t seed; /* of what the test draws */
} ranks_bench;

void ranks_bench_open(ranks_bench *bench);
void ranks_bench_close(ranks_bench *bench);

/* A test on a fresh bench, which is its state. */
int ranks_bench_setup(void **state);
int ranks_bench_teardown(void **state);
#define ON_RANKS(test) TEST_ON(ranks_bench *bench, test, ranks_bench_setup, ranks_bench_teardown)

/* ---- What ranks say */

void ranks_bench_say(ranks_bench *bench, unsigned sender, rft_message message);
void ranks_bench_hello(ranks_bench *bench, unsigned sender, uint32_t rank, uint64_t instance);
rft_message ranks_bench_shard(const ranks_bench *bench, uint32_t rank);
/* What an honest rank says of the version; in the bench until the next call. */
rft_message ranks_bench_sums(ranks_bench *bench, uint32_t rank);

/* ---- The trainer's calls */

/* False: it is refused. */
bool ranks_bench_begin(ranks_bench *bench);
void ranks_bench_write(ranks_bench *bench);
/* An aborted version goes, and one that is under way is given up. */
void ranks_bench_settle(ranks_bench *bench);
/* The version was aborted, for a reason in which the words stand; and goes. */
void ranks_bench_expect_aborted(ranks_bench *bench, const char *words);

/* ---- Honest ranks */

void ranks_bench_say_shards(ranks_bench *bench);
/* And all are there then. */
void ranks_bench_join(ranks_bench *bench);
void ranks_bench_publish(ranks_bench *bench);

#endif
