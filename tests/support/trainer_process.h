/*
 * trainer_process: a publisher in a process of its own, with a limit of descriptors, so that a test
 * can see it killed, out of descriptors, or busy. Start it before the test has threads. Every call
 * but the last fails the test if it cannot be done.
 */
#ifndef TRAINER_PROCESS_H
#define TRAINER_PROCESS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include <refit/config.h>
#include <refit/stats.h>

typedef struct trainer_process {
    pid_t pid;
    int orders, answers;
    char endpoint[128];
    uint16_t port; /* of tcp */
} trainer_process;

typedef struct trainer_report {
    refit_stats stats;
    double cpu_seconds; /* that it has used so far */
    bool can_open;      /* 16 files at once */
} trainer_report;

/* At the endpoint of the configuration; `descriptors` 0: the limit of this process. */
void trainer_process_start(trainer_process *trainer, const refit_config *config,
                           uint32_t descriptors);
trainer_report trainer_process_ask(trainer_process *trainer);
/* Waits until that number of refit_stats is at least so high; its value. */
#define trainer_process_await(trainer, field, least)                                               \
    trainer_process_await_at((trainer), #field, offsetof(refit_stats, field), (least))
uint64_t trainer_process_await_at(trainer_process *trainer, const char *name, size_t offset,
                                  uint64_t least);
/* Opens files until no descriptor is left; closes them again. */
void trainer_process_fill(trainer_process *trainer);
void trainer_process_empty(trainer_process *trainer);
/* Closes the first `count` of those files, with the lowest numbers; at most 9. */
void trainer_process_free(trainer_process *trainer, uint32_t count);
/* Ends it; whether it had lived until then, and closed in order. */
bool trainer_process_end(trainer_process *trainer);
/* By SIGKILL. */
void trainer_process_kill(trainer_process *trainer);

#endif
