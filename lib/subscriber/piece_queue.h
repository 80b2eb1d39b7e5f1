/*
 * piece_queue: a version that comes piece by piece, while its trainer still writes it.
 *
 * What the trainer makes on the way, and has no room for on the GPU, lies there for a while only:
 * PIECES says where, the caller copies it into the engine, and TAKEN lets the trainer write the
 * next pieces there. So the engine is written before the version is committed, and a version that
 * fails leaves it torn; the caller's accept waits for the trainer's decision.
 *
 *                  PIECES, …            SEAL                    accept            COMMIT
 *     OPEN ───────────────────► OPEN ─────────► WHOLE (all fits) ─────► (STAGED) ─────────►
 * COMMITTED │                                         │                        │ └────────────
 * ABORT, a lost connection, a breach of the protocol ──┴──► FAILED
 *
 * The service thread puts pieces in, and frees those that the caller is done with; the caller reads
 * one list of pieces at a time. The order of pieces and that they make up every tensor is checked
 * here; their bytes are compared with SEAL by whoever copies them (gpu_copy.h).
 */
#ifndef RFT_PIECE_QUEUE_H
#define RFT_PIECE_QUEUE_H

#include <refit/broadcast.h>

#include "base/thread.h"
#include "subscriber/gpu_memory.h"
#include "wire/message.h"

/* Lists of pieces that a trainer may be waiting for. */
#define RFT_PIECES_MOST 8u

/* The pieces of one message. */
typedef struct rft_pieces {
    rft_gpu_version *where; /* what they lie in, mapped */
    refit_piece *list;      /* owned */
    uint32_t count;
} rft_pieces;

typedef enum rft_piece_queue_state {
    RFT_PIECES_OPEN,
    RFT_PIECES_WHOLE,
    RFT_PIECES_COMMITTED,
    RFT_PIECES_FAILED,
} rft_piece_queue_state;

typedef struct rft_piece_queue {
    const rft_manifest *manifest; /* borrowed */
    int wake_fd;                  /* borrowed: of the service thread, set when pieces are taken */
    int ready_fd;                 /* set when `arrived` or `state` changes */
    rft_mutex lock;
    rft_pieces ready[RFT_PIECES_MOST]; /* of sequence s at s % RFT_PIECES_MOST: the caller reads
                                          that after `taken`, the service thread owns the others */
    uint32_t arrived;                  /* guarded by lock: sequence of the last */
    uint32_t taken;                    /* guarded by lock: the caller reads no more of it */
    rft_piece_queue_state state;       /* guarded by lock */
    refit_error failure;               /* guarded by lock: of FAILED */

    uint64_t *covered; /* owned, the service thread's: how much of each tensor has come */
    uint64_t *digests; /* owned; per tensor: of SEAL, once WHOLE */
    uint32_t freed;    /* the service thread's: sequence of the last whose memory it gave back */
    uint64_t *sums;    /* owned, the caller's; per tensor: of the pieces that it has digested */
    bool compared;     /* the caller's: `sums` make `digests` */
    bool reading;      /* the caller's: it has the pieces after `taken` */
} rft_piece_queue;

/* `wake_fd` and the manifest are borrowed until close. REFIT_ERR_HOST_MEMORY, REFIT_ERR_SYSTEM. */
refit_status rft_piece_queue_open(const rft_manifest *manifest, int wake_fd, rft_piece_queue **out,
                                  refit_error *error);
/* A device may read the pieces for ever: what they lie in stays mapped. */
void rft_piece_queue_abandon(rft_piece_queue *queue);
/* NULL is allowed. */
void rft_piece_queue_close(rft_piece_queue *queue);

/* ---- The service thread's side */

/* Maps the pieces of a message. REFIT_ERR_PROTOCOL: they are not the next ones, or do not fit the
 * tensors; REFIT_ERR_HOST_MEMORY, and what rft_gpu_memory_map answers. */
refit_status rft_piece_queue_put(rft_piece_queue *queue, rft_gpu_memory *memory,
                                 const rft_message *pieces, refit_error *error);
/* SEAL has come, with 8 bytes for each original tensor. REFIT_ERR_PROTOCOL: some bytes have not. */
refit_status rft_piece_queue_seal(rft_piece_queue *queue, rft_view digests, refit_error *error);
/* Unmaps what the caller is done with; returns its last sequence, or 0 if nothing is new. */
uint32_t rft_piece_queue_collect(rft_piece_queue *queue);
/* The first of these counts. */
void rft_piece_queue_fail(rft_piece_queue *queue, const refit_error *why);
void rft_piece_queue_commit(rft_piece_queue *queue);

/* ---- The caller's side */

/* Is done with the pieces before, and waits for the next; NULL: all have come. REFIT_ERR_TIMEOUT;
 * the failure. */
refit_status rft_piece_queue_next(rft_piece_queue *queue, int64_t deadline, const rft_pieces **out,
                                  refit_error *error);
/* Whether all pieces have come, were taken, and make up the version of SEAL, even if that has
 * failed since. */
bool rft_piece_queue_is_whole(rft_piece_queue *queue);
/* Whether pieces were given to the caller. */
bool rft_piece_queue_was_read(rft_piece_queue *queue);
/* Waits for the trainer's decision about a whole version. REFIT_ERR_TIMEOUT; the failure. */
refit_status rft_piece_queue_await_commit(rft_piece_queue *queue, int64_t deadline,
                                          refit_error *error);

#endif
