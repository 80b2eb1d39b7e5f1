/*
 * plan: from pieces to as few copies as possible.
 *
 * Neighbours on both sides become one copy, unless two page-lock registrations hold their host
 * sides, or two allocations those on the device: no copy lies across two. What is larger than
 * offload.piece_bytes is cut, so that small copies of other streams are not held up; batches hold
 * at most offload.batch of them, and no batch holds pieces of two groups, so that a group is done
 * when its last batch is. A chunk of a master that passes through device memory as what its
 * weights lack is a batch of its own. All memory is taken when the plan is opened: filling it
 * again, for other addresses, allocates nothing.
 */
#ifndef RFT_PLAN_H
#define RFT_PLAN_H

#include <refit/config.h>

#include "device/device.h"
#include "kernels/master.h"

/* A chunk of a master, coded on its way out and decoded on its way back: the host's side is
 * copied from or to `job.coded`, in device memory that the next chunk uses again. */
typedef struct rft_recode {
    rft_master_job job; /* its addresses are memory of the device */
    bool out;
    bool begins;  /* the first of its master: the result is cleared before */
    void *result; /* host memory; where the result goes afterwards, after the last of its master;
                      else NULL */
} rft_recode;

/* One contiguous chunk to move, in the order it should move. `from` NULL: zero `to` instead. */
typedef struct rft_piece {
    void *to;
    const void *from;
    uint64_t bytes;
    uint32_t group;
    uint32_t slab; /* which registration holds the host side, all of it; any number */
    const void
        *allocation;   /* the allocation or arena that contains the device's side. Only its identity
                     matters: two pieces are joined into one copy only if it is the same */
    uint32_t slack;    /* as in rft_copy: after the host side */
    bool known_memory; /* as in rft_copy */
    const rft_recode *recode; /* NULL: moved as it is. Pieces of one follow each other. It must stay
                                 as long as the filling */
} rft_piece;

/* Copies [first, first + count) of the plan, all of one group; all with a source, or all without
 * (from == NULL: zero); all those of one recode, which may be more than limits.batch_most, or none
 * of any. */
typedef struct rft_batch {
    uint32_t first;
    uint32_t count;
    uint32_t group;
    uint64_t bytes;           /* of its copies */
    const rft_recode *recode; /* NULL: none */
} rft_batch;

/* What a plan is made for. */
typedef struct rft_plan_limits {
    uint32_t pieces;      /* most of them in one filling */
    uint64_t bytes;       /* most of them in all */
    uint64_t piece_bytes; /* of one copy; not 0 */
    uint32_t batch_most;  /* copies of one batch, no more than the device takes; not 0 */
    uint64_t batch_bytes; /* of one batch, and so of one copy; 0: no bound */
} rft_plan_limits;

typedef struct rft_plan {
    rft_copy *copies; /* owned; in the order of the pieces */
    uint32_t copy_count;
    uint32_t copy_room;
    rft_batch *batches; /* owned; room for copy_room */
    uint32_t batch_count;
    uint64_t bytes; /* of all copies */
    rft_plan_limits limits;
} rft_plan;

/* On failure nothing is owned. REFIT_ERR_INVALID, REFIT_ERR_HOST_MEMORY, REFIT_ERR_LIMIT. */
refit_status rft_plan_open(rft_plan *plan, const rft_plan_limits *limits, refit_error *error);
void rft_plan_close(rft_plan *plan);

/* Fills the plan again. `pieces` no more, and of no more bytes, than it was opened for
 * (REFIT_ERR_LIMIT, and the plan is empty). */
refit_status rft_plan_fill(rft_plan *plan, const rft_piece *pieces, uint32_t count,
                           refit_error *error);

/* The copies go the other way, in the same order and the same batches. A plan without zeroes and
 * without chunks of masters. */
void rft_plan_reverse(rft_plan *plan);

#endif
