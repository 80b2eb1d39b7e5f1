/*
 * crew: rollout workers as threads of the test. Each receives versions through the public door,
 * takes the digest of what it sees, and does with it what it was told to; the test waits for what
 * it did.
 */
#ifndef CREW_H
#define CREW_H

#include <stdbool.h>

#include <refit/broadcast.h>

#include "base/thread.h"

#define CREW_VERSIONS 32u

typedef enum crew_habit {
    CREW_ACCEPT,
    CREW_REFUSE_KEPT,
    CREW_REFUSE_LOST,
    CREW_CLOSE, /* without a word */
    CREW_KEEP,  /* accepts, and keeps the update open until it is let go */
} crew_habit;

typedef struct crew_member {
    refit_subscriber *subscriber;
    rft_thread thread;
    rft_mutex lock;
    rft_cond changed;
    crew_habit habit;                 /* guarded by lock, like all below */
    bool let_go;                      /* a kept update may be closed */
    bool torn;                        /* a kept update changed while it was open */
    uint64_t versions[CREW_VERSIONS]; /* seen, oldest first */
    uint64_t digests[CREW_VERSIONS];
    bool on_device[CREW_VERSIONS]; /* its bytes lay there */
    uint32_t count;
    refit_status end; /* why it stopped */
} crew_member;

/* Opens the subscriber and starts the thread. On failure `subscriber` is NULL, and nothing is to be
 * stopped. */
refit_status crew_open(crew_member *member, const char *endpoint, const refit_config *config,
                       crew_habit habit, refit_error *error);

/* As crew_open, but fails the test on an error. */
void crew_start(crew_member *member, const char *endpoint, const refit_config *config,
                crew_habit habit);
/* As crew_start, on a GPU; `device` may be NULL. */
void crew_start_on(crew_member *member, const char *endpoint, const refit_config *config,
                   refit_device *device, crew_habit habit);
void crew_stop(crew_member *member);
void crew_set_habit(crew_member *member, crew_habit habit);
void crew_let_go(crew_member *member);

/* Waits until it has seen `version` in this many updates; the digest of the last. */
uint64_t crew_wait(crew_member *member, uint64_t version, uint32_t times);
/* Why it stopped by itself; REFIT_OK while it goes on. */
refit_status crew_end(crew_member *member);
/* Whether the last update of that version lay in the GPU's memory. */
bool crew_was_on_device(crew_member *member, uint64_t version);
uint32_t crew_count(crew_member *member, uint64_t version);

/* The digest that crew_wait returns for these tensors. */
uint64_t crew_digest(const refit_tensor *tensors, uint32_t count, const void *const *bytes);

#endif
