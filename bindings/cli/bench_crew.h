/* bench_crew: worker processes of a benchmark: this program again, ended by closing their standard
 * input. */
#ifndef BENCH_CREW_H
#define BENCH_CREW_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { BENCH_CREW_MOST = 16 };

typedef struct bench_crew {
    uint32_t count;
    pid_t pids[BENCH_CREW_MOST];
    int inputs[BENCH_CREW_MOST];
} bench_crew;

/* Starts `count` processes `refit bench worker KIND ENDPOINT BYTES`. False: not all could be
 * started; call bench_crew_stop all the same. */
bool bench_crew_start(bench_crew *crew, uint32_t count, const char *kind, const char *endpoint,
                      uint64_t bytes);
void bench_crew_stop(bench_crew *crew);

#endif
