/*
 * hub_bench: the publisher's state machine on the bench, without socket, clock or thread. The test
 * is the workers, the trainer and the time; what the workers are told is kept.
 */
#ifndef HUB_BENCH_H
#define HUB_BENCH_H

#include "broadcast/hub.h"
#include "tests/support/sample_version.h"

#define HUB_EPOCH UINT64_C(77)
#define HUB_PROOF UINT64_C(4711)
#define HUB_TOLD  512u

/* One message to a worker; its views are gone, but for the reason of those that have one. */
typedef struct hub_told {
    unsigned worker;
    rft_message message;
} hub_told;

typedef struct hub_bench {
    refit_config config;
    rft_hub hub;
    rft_attic attic;
    rft_store *store;
    const sample_version *sample; /* the last one written */
    int64_t now;
    hub_told told[HUB_TOLD];
    uint32_t told_count;
} hub_bench;

/* Worker n is called "w<n>", its id is the byte n, its instance n. */
void hub_bench_open(hub_bench *bench, uint32_t slots, bool shared);
void hub_bench_close(hub_bench *bench);

/* Frees the versions that all benches share; none may be open. They are made again when needed. */
void hub_samples_forget(void);

void hub_bench_say(hub_bench *bench, unsigned worker, const rft_message *message);
void hub_bench_tick(hub_bench *bench, uint32_t ms);

/* How many messages of a kind the worker was told since the last forget, and the last one. */
uint32_t hub_bench_count(hub_bench *bench, unsigned worker, rft_message_kind kind);
const rft_message *hub_bench_told(hub_bench *bench, unsigned worker, rft_message_kind kind);
void hub_bench_forget(hub_bench *bench);

void hub_bench_hello(hub_bench *bench, unsigned worker);
void hub_bench_join(hub_bench *bench, unsigned worker, bool shm);
void hub_bench_prepare(hub_bench *bench, uint64_t version);
void hub_bench_begin(hub_bench *bench, uint64_t version); /* prepare included */
void hub_bench_write(hub_bench *bench);
void hub_bench_seal(hub_bench *bench);
void hub_bench_settle(hub_bench *bench);
void hub_bench_offer(hub_bench *bench, uint64_t version); /* begin, write, seal */

rft_message hub_staged(uint64_t version);
rft_message hub_committed(uint64_t version);
rft_message hub_failed(uint64_t version, refit_status code, bool kept);
rft_message hub_released(uint64_t version);
rft_message hub_pull(uint64_t version, uint32_t credits);
rft_message hub_beat(uint64_t held, uint64_t staged);

void hub_bench_stage(hub_bench *bench, unsigned worker);
void hub_bench_apply(hub_bench *bench, unsigned worker);

/* NULL: neither subscribed nor joining. */
rft_peer *hub_bench_peer(hub_bench *bench, unsigned worker);

#endif
