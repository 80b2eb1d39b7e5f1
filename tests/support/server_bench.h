/*
 * server_bench: the publisher's state machine on the bench, without socket, clock or thread. The
 * test is the workers, the trainer and the time; what the workers are told is kept.
 */
#ifndef SERVER_BENCH_H
#define SERVER_BENCH_H

#include "publisher/server.h"
#include "tests/support/sample_version.h"

#define SERVER_EPOCH UINT64_C(77)
#define SERVER_PROOF UINT64_C(4711)
#define SERVER_TOLD  512u

/* One message to a worker; its views are gone, but for the reason of those that have one. */
typedef struct server_told {
    unsigned worker;
    rft_message message;
} server_told;

typedef struct server_bench {
    refit_config config;
    rft_server server;
    rft_retire_list retired;
    rft_store *store;
    const sample_version *sample; /* the last one written */
    bool selects;                 /* those that join want a part of each version */
    const char *place;            /* where those that say hello share images; NULL: nowhere */
    int64_t now;
    server_told told[SERVER_TOLD];
    uint32_t told_count;
} server_bench;

/* Worker n is called "w<n>", its id is the byte n, its instance n. */
void server_bench_open(server_bench *bench, uint32_t slots, bool shared);
void server_bench_close(server_bench *bench);
void server_bench_reopen(server_bench *bench, uint32_t slots, bool shared);

/* A test on a fresh bench with two slots, which is its state. */
int server_bench_setup(void **state);
int server_bench_teardown(void **state);
#define ON_BENCH(test) TEST_ON(server_bench *bench, test, server_bench_setup, server_bench_teardown)

/* Frees the versions that all benches share; none may be open. They are made again when needed. */
void server_samples_forget(void);

void server_bench_say(server_bench *bench, unsigned worker, rft_message message);
void server_bench_tick(server_bench *bench, uint32_t ms);

/* The number of messages of a kind that the worker was sent since the last forget, and the last. */
uint32_t server_bench_count(server_bench *bench, unsigned worker, rft_message_kind kind);
const rft_message *server_bench_told(server_bench *bench, unsigned worker, rft_message_kind kind);
void server_bench_forget(server_bench *bench);

void server_bench_hello(server_bench *bench, unsigned worker);
void server_bench_join(server_bench *bench, unsigned worker, bool shm);
void server_bench_prepare(server_bench *bench, uint64_t version);
void server_bench_begin(server_bench *bench, uint64_t version); /* prepare included */
void server_bench_write(server_bench *bench);
void server_bench_seal(server_bench *bench);
void server_bench_settle(server_bench *bench);
void server_bench_offer(server_bench *bench, uint64_t version); /* begin, write, seal */

rft_message server_staged(uint64_t version);
rft_message server_committed(uint64_t version);
rft_message server_failed(uint64_t version, refit_status code, bool kept);
rft_message server_released(uint64_t version);
rft_message server_pull(uint64_t version, uint32_t credits);
rft_message server_beat(uint64_t held, uint64_t staged);

void server_bench_stage(server_bench *bench, unsigned worker);
void server_bench_apply(server_bench *bench, unsigned worker);
void server_bench_publish(server_bench *bench, uint64_t version, unsigned worker); /* all three */

/* NULL: neither subscribed nor joining. */
rft_peer *server_bench_peer(server_bench *bench, unsigned worker);

#endif
