/*
 * bench_arm: tensors on a device, and refit, which moves them off it and back.
 *
 * Device memory is written and read through copies alone, so that it need not be addressable. What
 * the tensors hold differs from place to place, and bench_arm_check says whether it is still there.
 */
#ifndef BENCH_ARM_H
#define BENCH_ARM_H

#include "bench.h"

enum { BENCH_WAIT_MS = 120000 };

typedef struct bench_arm {
    const bench_list *list;
    refit_device *device;
    refit_arena *arena; /* NULL: the memory stays while the bytes are away */
    refit_offloader *offloader;
    void **memory; /* of each tensor */
    void *block;   /* that all of them lie in; NULL: each is an allocation of its own */
    uint64_t block_bytes;
    char *sample; /* host bytes that the tensors are filled from */
    double seal_seconds;
} bench_arm;

/* How an arm is opened. */
typedef struct bench_arm_kind {
    bool pinned;  /* use_pinned_optimizer_offload */
    bool reclaim; /* device memory is given back and taken again, by an arena */
    refit_policy policy;
} bench_arm_kind;

/* Opens all and seals; `list` must stay. On failure, too, bench_arm_close gives back what there is.
 */
refit_status bench_arm_open(bench_arm *it, const bench_options *options, const bench_list *list,
                            bench_arm_kind kind, refit_error *error);
refit_status bench_arm_close(bench_arm *it, refit_error *error);

/* All the way out, and all the way back. */
refit_status bench_arm_out(void *it, refit_error *error);
refit_status bench_arm_back(void *it, refit_error *error);

/* REFIT_ERR_CORRUPT: a tensor does not hold what it was filled with, or what lies between them. */
refit_status bench_arm_check(const bench_arm *it, refit_error *error);

#endif
