/*
 * children: child processes that obey commands. A command is given with say and its answer awaited
 * with hear, so that a trainer can wait in commit while a worker is killed, stopped or served.
 * Every wait ends by failing the test.
 */
#ifndef CHILDREN_H
#define CHILDREN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct child_process {
    pid_t pid; /* 0: none */
    int to;
    int from;
    bool stopped;
    bool lends; /* a trainer: by refit_publisher_lend */
    bool open_update;
    bool accepted;    /* the last update it took */
    char answer[512]; /* the last, without its newline */
    uint64_t version; /* of the last update it took */
    char digest[17];  /* of the last update it took */
} child;

void child_start(child *one);
/* Ends its input and sees it leave in good order. Harmless on one that is gone. */
void child_end(child *one);
void child_kill(child *one);
void child_stop(child *one);
void child_continue(child *one);

void child_say(child *one, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *child_hear(child *one);
bool child_has_answer(child *one, int timeout_ms);
/* say and hear; the answer must be OK; its words. */
const char *child_ask(child *one, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- Workers */

void worker_open(child *worker, const char *endpoint, bool shm);
/* Waits until describe says so. */
void worker_await(child *worker, const char *state);
#define TAKE_MS 60000
/* Takes the next update if there is one within `timeout_ms`. */
bool worker_take(child *worker, int timeout_ms);
/* Accepts what it has taken, and lets go. False if what it read was overwritten meanwhile. */
bool worker_accept(child *worker);
/* Takes, accepts and lets go until it has taken `version` of digest `digest`. */
void worker_follow(child *worker, uint64_t version, const char *digest);

/* ---- Trainers */

/* The endpoint that it found is written to `endpoint`, of 128 bytes. `setting`: "key=value", or
 * empty. */
void trainer_open(child *trainer, char *endpoint, bool shm, unsigned slots, const char *setting);
/* begin and write; the digest is kept in trainer->digest. */
void trainer_write(child *trainer, unsigned seed);
/* Serves the workers (NULL ones and stopped ones left out) until the trainer has answered; whether
 * the answer is OK. */
bool trainer_finish(child *trainer, child *const workers[], unsigned count);
/* A version from begin until all workers have it. One that died a moment ago may still count as a
 * member and cost a version or two: tried five times. */
void trainer_publish(child *trainer, unsigned seed, child *const workers[], unsigned count);
/* The version it has committed. */
uint64_t trainer_version(child *trainer);

/* How many pieces of refit's shared memory the process has mapped. Fails the test if one is a file.
 */
unsigned process_segments(pid_t pid);

#endif
