/* bench_crew: worker processes of a benchmark: this program again, ended by closing their standard
 * input. */
#ifndef BENCH_CREW_H
#define BENCH_CREW_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "settings.h"

enum { BENCH_CREW_MOST = 16 };

/* What they are to do: `refit bench worker KIND ENDPOINT BYTES`. */
typedef struct bench_duty {
    const char *kind, *endpoint;
    uint64_t bytes;
    const cli_settings *settings; /* theirs as well; NULL: the defaults */
    const char *netns;            /* the network namespace they live in; NULL: this process's */
} bench_duty;

typedef struct bench_crew {
    uint32_t count;
    pid_t pids[BENCH_CREW_MOST];
    int inputs[BENCH_CREW_MOST];
} bench_crew;

/* Starts `count` of them. False: not all could be started; call bench_crew_stop all the same. */
bool bench_crew_start(bench_crew *crew, uint32_t count, const bench_duty *duty);
void bench_crew_stop(bench_crew *crew);

#endif
