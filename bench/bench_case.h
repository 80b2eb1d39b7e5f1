/*
 * bench_case: tensors on a device, and refit, which moves them off it and back.
 *
 * Device memory is written and read through copies alone, so that it need not be addressable. The
 * contents differ from place to place, and bench_case_check compares them.
 */
#ifndef BENCH_CASE_H
#define BENCH_CASE_H

#include "bench.h"

enum { BENCH_WAIT_MS = 120000 };

typedef struct bench_case {
    const bench_list *list;
    refit_device *device;
    refit_arena *arena; /* NULL: the memory stays while the bytes are away */
    refit_offloader *offloader;
    void **memory; /* of each tensor */
    void *block;   /* that all of them lie in; NULL: each is an allocation of its own */
    uint64_t block_bytes;
    char *sample; /* host bytes that the tensors are filled from */
    double seal_seconds;
} bench_case;

/* The options of a case. */
typedef struct bench_case_kind {
    bool pinned;  /* use_pinned_optimizer_offload */
    bool reclaim; /* device memory is given back and taken again, by an arena */
    refit_policy policy;
} bench_case_kind;

/* Opens all and seals; `list` must stay. On failure, too, bench_case_close gives back what there
 * is.
 */
refit_status bench_case_open(bench_case *it, const bench_options *options, const bench_list *list,
                             bench_case_kind kind, refit_error *error);
refit_status bench_case_close(bench_case *it, refit_error *error);

/* Offload and restore, each until it has finished. */
refit_status bench_case_out(void *it, refit_error *error);
refit_status bench_case_back(void *it, refit_error *error);

/* REFIT_ERR_CORRUPT: a tensor does not hold what it was filled with, or what lies between them. */
refit_status bench_case_check(const bench_case *it, refit_error *error);

#endif
