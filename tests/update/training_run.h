/*
 * training_run: a trainer in this process with a model whose bytes the test changes, and its
 * workers as threads. A test sets the configuration and the tensors between run_begin and run_open.
 */
#ifndef TRAINING_RUN_H
#define TRAINING_RUN_H

#include "tests/support/quick_config.h"
#include "tests/support/rollout_threads.h"
#include "tests/support/seeded.h"
#include "tests/support/test.h"

#define RUN_CREW    4u
#define RUN_TENSORS 32u
#define RUN_WAIT_MS 30000u

typedef struct training_run {
    refit_config config;
    refit_publisher *publisher;
    char endpoint[128];
    refit_tensor tensors[RUN_TENSORS];
    char names[RUN_TENSORS][32];
    unsigned char *bytes[RUN_TENSORS]; /* tied tensors have one */
    uint32_t count;
    rollout_thread rollouts[RUN_CREW];
    uint32_t rollouts_count;
    uint64_t seed;
    uint64_t changed;    /* elements, by run_change_tensor */
    refit_status status; /* of the commit on a thread */
} training_run;

/* No tensors and no publisher yet. */
void run_begin(training_run *run, uint32_t slots);
/* Of zeros. `alias_of`: REFIT_NO_ALIAS, or the tensor that it is tied to. */
void run_add_tensor(training_run *run, refit_dtype dtype, uint64_t elements, uint32_t alias_of);
void run_open(training_run *run, const char *endpoint);
void run_end(training_run *run);

void run_wait_workers(training_run *run, uint32_t count);
rollout_thread *run_add_worker(training_run *run, rollout_action action);

/* One in `every` elements changes: mostly to the next value. 0: none does. */
void run_change_tensor(training_run *run, uint32_t index, uint64_t every);
/* Each tensor as the seed wants it: not at all, here and there, or all of it. */
void run_change(training_run *run);
/* The bytes as they are now. */
uint64_t run_digest(const training_run *run);
void run_write(training_run *run, uint64_t version); /* 0: the next one */
void run_commit(training_run *run);
void *run_commit_on_thread(void *user);
/* Every worker of the rollouts sees the version. */
void run_expect(training_run *run, uint64_t version, uint64_t digest);
refit_stats run_stats(training_run *run);

#endif
