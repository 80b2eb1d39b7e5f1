/*
 * sweep: a whole refit in which the first fails, then the second, and so on, in each of several
 * settings: the failure is returned or made up for, nothing leaks, no worker sees a torn version,
 * and the next refit succeeds.
 */
#ifndef SWEEP_H
#define SWEEP_H

#include "tests/fault/whole.h"

/* What is to fail. */
typedef struct sweep {
    const char *what;
    void (*arm)(uint64_t nth);
    bool (*disarm)(void);             /* true if the n-th came */
    const refit_status *known;        /* what a refit may end with then, ended by REFIT_OK */
    const char *(*last_failed)(void); /* for messages */
} sweep;

/* A test for each setting. */
int sweep_run(const char *group, const sweep *by);

#endif
