/* show: one aligned line per cycle, a progress bar on a terminal, the same as JSON, and a summary.
 */
#ifndef GRPO_SHOW_H
#define GRPO_SHOW_H

#include <stdio.h>

#include "run_options.h"

typedef struct show {
    FILE *json; /* or NULL */
    bool quiet;
    bool terminal; /* stdout is one */
    uint32_t cycles;
} show;

/* What there is to say of one cycle. */
typedef struct cycle_report {
    uint32_t cycle;
    uint64_t version;
    float reward;     /* of the workers' completions */
    float evaluation; /* of the engine's own */
    float loss;
    refit_stats stats; /* of this cycle */
} cycle_report;

void show_open(show *it, const run_options *options);
void show_cycle(show *it, const cycle_report *report);

/* Ends the progress bar's line; then other things may be printed. */
void show_close(show *it);

#endif
