/*
 * rollout_threads: rollout workers as threads of the test. Each receives versions through the
 * public door, takes the digest of what it sees, and does with it what it was told to; the test
 * waits for what it did.
 */
#ifndef ROLLOUT_H
#define ROLLOUT_H

#include <stdbool.h>

#include <refit/broadcast.h>

#include "base/thread.h"

#define ROLLOUT_VERSIONS 32u

typedef enum rollout_action {
    ROLLOUT_ACCEPT,
    ROLLOUT_REFUSE_KEPT,
    ROLLOUT_REFUSE_LOST,
    ROLLOUT_CLOSE, /* without a word */
    ROLLOUT_KEEP,  /* accepts, and keeps the update open until it is let go */
} rollout_action;

typedef struct rollout_thread {
    refit_subscriber *subscriber;
    rft_thread thread;
    rft_mutex lock;
    rft_cond changed;
    rollout_action action;               /* guarded by lock, like all below */
    bool let_go;                         /* a kept update may be closed */
    bool torn;                           /* a kept update changed while it was open */
    uint64_t versions[ROLLOUT_VERSIONS]; /* seen, oldest first */
    uint64_t digests[ROLLOUT_VERSIONS];
    bool on_device[ROLLOUT_VERSIONS]; /* its bytes lay there */
    bool streamed[ROLLOUT_VERSIONS];  /* and came piece by piece */
    uint32_t count;
    refit_status end; /* why it stopped */
} rollout_thread;

/* Opens the subscriber and starts the thread. On failure `subscriber` is NULL, and nothing is to be
 * stopped. */
refit_status rollouts_open(rollout_thread *member, const char *endpoint, const refit_config *config,
                           rollout_action action, refit_error *error);

/* As rollouts_open, but fails the test on an error. */
void rollouts_start(rollout_thread *member, const char *endpoint, const refit_config *config,
                    rollout_action action);
/* As rollouts_start, on a GPU; `device` may be NULL. */
void rollouts_start_on(rollout_thread *member, const char *endpoint, const refit_config *config,
                       refit_device *device, rollout_action action);
void rollouts_stop(rollout_thread *member);
void rollout_set_action(rollout_thread *member, rollout_action action);
void rollouts_let_go(rollout_thread *member);

/* Waits until it has seen `version` in this many updates; the digest of the last. */
uint64_t rollouts_wait(rollout_thread *member, uint64_t version, uint32_t times);
/* Why it stopped by itself; REFIT_OK while it goes on. */
refit_status rollouts_end(rollout_thread *member);
/* Whether the last update of that version lay in the GPU's memory. */
bool rollouts_was_on_device(rollout_thread *member, uint64_t version);
/* Whether it came piece by piece. */
bool rollouts_was_streamed(rollout_thread *member, uint64_t version);
uint32_t rollouts_count(rollout_thread *member, uint64_t version);

/* The digest that rollouts_wait returns for these tensors. */
uint64_t rollouts_digest(const refit_tensor *tensors, uint32_t count, const void *const *bytes);

#endif
