/* run_options: what the command line chooses. */
#ifndef GRPO_RUN_OPTIONS_H
#define GRPO_RUN_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include <refit.h>

typedef struct run_options {
    uint32_t workers;
    uint32_t cycles;
    uint64_t seed;
    float target;       /* mean reward of the last cycles to be reached; 0: none */
    const char *device; /* as refit_device_open reads it */
    const char *json;   /* file for one object a line, or NULL */
    bool offload;       /* false: --no-offload */
    bool check;
    bool quiet;          /* no line per cycle: for --check */
    refit_config config; /* defaults, then --config, then the environment */
    /* A worker process, started by the trainer. */
    bool is_worker;
    uint32_t worker_index;
    const char *worker_endpoint;
} run_options;

/* Reads the command line; prints help or what is wrong and ends the program where that is what it
 * asks for. */
void run_options_read(run_options *out, int argc, char **argv);

#endif
