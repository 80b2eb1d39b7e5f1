/* bench_workers: worker processes of a benchmark. They run this program, and end when their
 * standard input is closed. */
#ifndef BENCH_WORKERS_H
#define BENCH_WORKERS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "settings.h"

enum { BENCH_WORKERS_MOST = 16 };

/* The arguments of `refit bench worker KIND ENDPOINT BYTES`. */
typedef struct bench_duty {
    const char *kind, *endpoint;
    uint64_t bytes;
    const cli_settings *settings; /* theirs as well; NULL: the defaults */
    const char *netns;            /* the network namespace they live in; NULL: this process's */
} bench_duty;

typedef struct bench_workers {
    uint32_t count;
    pid_t pids[BENCH_WORKERS_MOST];
    int inputs[BENCH_WORKERS_MOST];
} bench_workers;

/* Starts `count` of them. False: not all could be started; call bench_workers_stop all the same. */
bool bench_workers_start(bench_workers *workers, uint32_t count, const bench_duty *duty);
void bench_workers_stop(bench_workers *workers);

#endif
