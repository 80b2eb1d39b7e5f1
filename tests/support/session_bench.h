/*
 * session_bench: a worker's session on the bench. The test is its publisher, its user and its
 * clock; what it says is kept.
 */
#ifndef SESSION_BENCH_H
#define SESSION_BENCH_H

#include "subscriber/session.h"
#include "tests/support/sample_version.h"

#define BENCH_EPOCH UINT64_C(77)
#define BENCH_SAID  128u

typedef struct session_bench {
    refit_config config;
    rft_session_identity identity;
    rft_mailbox mailbox;
    rft_session session;
    int64_t now;
    rft_message said[BENCH_SAID]; /* views in it are gone */
    uint32_t said_count;
    uint32_t resent[64]; /* the numbers of the last RESEND */
    uint32_t resent_count;
    sample_version samples[4]; /* versions 1 to 4 */
} session_bench;

#define STATES     (RFT_SESSION_APPLYING + 1)
#define CONNECTING RFT_SESSION_CONNECTING
#define JOINING    RFT_SESSION_JOINING
#define CURRENT    RFT_SESSION_CURRENT
#define STAGING    RFT_SESSION_STAGING
#define STAGED     RFT_SESSION_STAGED
#define APPLYING   RFT_SESSION_APPLYING

/* With broadcast.shm off. */
void bench_open(session_bench *bench);
void bench_close(session_bench *bench);
/* Closes it and opens it again. */
void bench_renew(session_bench *bench);

void bench_hear(session_bench *bench, rft_message message);
void bench_tick(session_bench *bench, uint32_t ms);

/* The last message of that kind that was said since the last bench_forget, or NULL. */
const rft_message *bench_said(session_bench *bench, rft_message_kind kind);
uint32_t bench_count(session_bench *bench, rft_message_kind kind);
uint32_t bench_count_all(session_bench *bench);
void bench_forget(session_bench *bench);

sample_version *bench_sample(session_bench *bench, uint64_t version);
void bench_join(session_bench *bench, uint64_t epoch);
void bench_offer(session_bench *bench, uint64_t version, uint64_t base);
/* Frame `sequence`, its first byte changed if it is to be damaged. */
void bench_frame(session_bench *bench, uint64_t version, uint64_t base, uint32_t sequence,
                 bool damaged);
void bench_frames(session_bench *bench, uint64_t version, uint64_t base);
void bench_stage(session_bench *bench, uint64_t version, uint64_t base);
void bench_commit(session_bench *bench, uint64_t version);
/* The user takes what was delivered. */
rft_image *bench_take(session_bench *bench);
/* All of it: staged, committed, taken, accepted, closed. */
void bench_apply(session_bench *bench, uint64_t version, uint64_t base);
/* From a fresh bench to a worker that has joined and holds that version. */
void bench_hold(session_bench *bench, uint64_t version);
/* The code of the last FAILED that was said; REFIT_OK: none. */
uint32_t bench_failed(session_bench *bench);
/* From a fresh bench to `state`, with version 1 offered where that says something. */
void bench_reach(session_bench *bench, rft_session_state state);

void assert_image_is(const rft_image *image, const sample_version *sample);

/* A test on a fresh bench, which is its state. */
int bench_setup(void **state);
int bench_teardown(void **state);
#define BENCH_TEST(name) TEST_ON(session_bench *bench, name, bench_setup, bench_teardown)

rft_session_state bench_state(const session_bench *bench);

#endif
