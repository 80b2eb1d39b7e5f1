/* bench_keys: keys for a trainer and its workers, for as long as a benchmark runs. */
#ifndef BENCH_KEYS_H
#define BENCH_KEYS_H

#include <refit/config.h>

#include "settings.h"

typedef struct bench_keys {
    char folder[128]; /* empty: none were made */
    char worker_sets[2][256];
} bench_keys;

/* On failure bench_keys_close removes what there is. */
refit_status bench_keys_open(bench_keys *keys, refit_error *error);
void bench_keys_close(bench_keys *keys);

/* Gives a configuration the trainer's; the settings the worker's, borrowed from `keys`. */
refit_status bench_keys_for_trainer(const bench_keys *keys, refit_config *config,
                                    refit_error *error);
bool bench_keys_for_worker(const bench_keys *keys, cli_settings *settings);

#endif
