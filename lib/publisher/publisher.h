/*
 * publisher: the parts of a refit_publisher, and what the caller's thread and the service thread
 * share.
 *
 * The server has all shared state, under one lock. The caller's thread takes steps of the
 * transaction there and waits for `changed`; the service thread owns the channel, hands messages to
 * the server and sends the server's. Bytes are written and sent without the lock: see `sending`.
 */
#ifndef RFT_PUBLISHER_H
#define RFT_PUBLISHER_H

#include <stdatomic.h>

#include "base/thread.h"
#include "net/channel.h"
#include "publisher/server.h"
#include "store/copy_queue.h"
#include "store/frames.h"

/* Tensors whose bytes are in the store, but not yet compared (and digested): the next ones are
 * copied meanwhile. */
typedef struct rft_to_compare {
    uint32_t count;
    bool digested; /* by the device: `sums` */
    uint32_t tensors[RFT_DIGEST_BATCH_MOST];
    uint64_t sums[RFT_DIGEST_BATCH_MOST];
} rft_to_compare;

/* A part of the GPU's memory that pieces are copied through. */
typedef struct rft_bucket {
    unsigned char *memory;
    uint64_t bytes;
    uint64_t used;     /* by pieces that are not announced yet */
    uint32_t chunk;    /* of the block, with the next one */
    uint64_t offset;   /* in it */
    uint32_t sequence; /* of the PIECES that workers may still read there; 0: none do */
} rft_bucket;

/* One of those that are on the stream. */
typedef struct rft_ring_piece {
    uint32_t tensor;
    bool last; /* of the tensor, which the store does not have yet */
} rft_ring_piece;

/* With what was announced before the first bucket, no more than a worker keeps apart
 * (RFT_PIECES_MOST). */
#define RFT_BUCKETS_MOST 7u

/* publisher_ring.c. {0}: the version is not streamed. */
typedef struct rft_ring {
    bool on;
    bool broken; /* a write failed: the version can only be aborted */
    rft_bucket buckets[RFT_BUCKETS_MOST];
    uint32_t bucket_count;
    uint32_t current;  /* is being filled */
    uint32_t sequence; /* of the last PIECES */
    rft_bytes pieces;  /* of the next one */
    rft_bytes areas;
    uint64_t *sums; /* owned; per tensor: of its pieces so far */
    rft_ring_piece batch[RFT_DIGEST_BATCH_MOST];
    uint32_t batch_count;
} rft_ring;

struct refit_publisher {
    refit_config config;
    rft_segment probe;
    rft_channel *channel;  /* the service thread's while it runs */
    rft_channel *link;     /* the same; to rank 0, if this is another rank; NULL: there is none */
    int wake;              /* ends the service thread's poll */
    atomic_bool cancelled; /* set by any thread, taken by the caller's, in the wait that it ends */
    rft_thread thread;

    rft_mutex lock;
    rft_cond changed;    /* the server may have changed, or `sending` has ended */
    rft_server server;   /* guarded by lock */
    bool stopping;       /* guarded by lock */
    int64_t leave_at;    /* guarded by lock: stopping waits for goodbyes no longer */
    bool sending;        /* guarded by lock: the service thread uses store and frames unlocked */
    uint64_t sent_bytes; /* guarded by lock */
    rft_frames_counts coded; /* guarded by lock: the counts of `frames` after its last use */
    rft_connection_counts connections; /* guarded by lock: as the service thread saw them last */
    double write_seconds;  /* guarded by lock: of the version under way, or the last one */
    uint64_t pinned_bytes; /* guarded by lock: of the store */
    uint64_t gpu_bytes;    /* guarded by lock: of the GPU */

    rft_store *store;        /* the caller's; changed only under lock and while nothing is sent */
    rft_pool encoders;       /* the service thread's while `sending` */
    rft_frames *frames;      /* as store; and the service thread's while `sending` */
    rft_retire_list retired; /* the caller's */

    rft_gpu_store *gpu; /* the caller's, like store; NULL: no versions in a GPU's memory */
    /* These are the caller's. */
    bool unsettled;             /* how the last version ended, its commit has not waited to see */
    rft_copy_queue *copy_queue; /* of the device that was written from last; NULL: of none */
    rft_copy_queue *gpu_copy_queue; /* of the GPU of `gpu`; NULL: none */
    rft_to_compare to_compare;
    rft_ring ring;
    bool over_host; /* tensors of another GPU came to a version that was streamed: they have to come
                       over the store, so versions have bytes on the host from now on */
    bool outgrown;  /* nothing of the last version was lent, and it was too much for the GPU: the
                      next one begins on the host */
};

/* ---- publisher_write.c */

/* REFIT_ERR_STATE: there is no version to `verb`. */
refit_status rft_publisher_check_writing(refit_publisher *publisher, const char *verb,
                                         refit_error *error);
/* Compares the tensors that were written last. */
void rft_publisher_compare_written(refit_publisher *publisher);
/* Waits for copies that an earlier write gave up waiting for. */
void rft_publisher_await_copies(refit_publisher *publisher, int64_t deadline);
/* Copies what is written of the version, and lies on the GPU alone, to its fresh slot of the store.
 */
refit_status rft_publisher_copy_to_host(refit_publisher *publisher, refit_error *error);
/* Sums up the page-locked bytes. */
void rft_publisher_count_pinned(refit_publisher *publisher);

/* Whether it is the GPU that versions are shown on; its copy queue, idle. */
bool rft_publisher_is_gpu(const refit_publisher *publisher, refit_device *device);
refit_status rft_publisher_gpu_queue(refit_publisher *publisher, rft_copy_queue **out,
                                     refit_error *error);
/* The queue copies to where the version is written. */
void rft_publisher_hold(refit_publisher *publisher, rft_copy_queue *queue);
/* Waits until the work that the caller has put on the stream is done. */
refit_status rft_publisher_await_stream(const refit_publisher *publisher, refit_device *device,
                                        refit_stream_ref after, refit_error *error);
/* Page-locks the memory of the version in the store, if it has any. */
void rft_publisher_pin_slot(refit_publisher *publisher, refit_device *device);
/* Copies a tensor from another GPU to the store, and waits. */
refit_status rft_publisher_fetch_to_store(refit_publisher *publisher, const refit_weight *weight,
                                          refit_device *device, refit_stream_ref after,
                                          refit_error *error);
/* The tensor is written, with this sum. */
void rft_publisher_note_written(refit_publisher *publisher, uint32_t tensor, uint64_t sum);
/* Copies a tensor from host memory to the store. */
refit_status rft_publisher_write_to_store(refit_publisher *publisher, const refit_weight *weight,
                                          refit_error *error);

/* ---- publisher_ring.c */

/* The version under way is streamed from now on. REFIT_ERR_UNSUPPORTED: a worker, or the GPU,
 * cannot; REFIT_ERR_DEVICE_MEMORY, REFIT_ERR_HOST_MEMORY, those of a copy queue. It goes another
 * way then, unless `ring.on`: then it is lost. */
refit_status rft_publisher_stream(refit_publisher *publisher, refit_error *error);
/* Writes tensors that were checked. As refit_publisher_write_all; also REFIT_ERR_CANCELLED. */
refit_status rft_publisher_write_ring(refit_publisher *publisher, const refit_weight *weights,
                                      uint32_t count, refit_device *device, refit_stream_ref after,
                                      refit_error *error);
/* All tensors are written: the last pieces are announced. REFIT_ERR_HOST_MEMORY; REFIT_ERR_STATE: a
 * write has failed. */
refit_status rft_publisher_flush_ring(refit_publisher *publisher, refit_error *error);
/* The version is over. */
void rft_publisher_end_streaming(refit_publisher *publisher);

/* ---- publisher.c */

/* REFIT_ERR_STATE: a version is under way. Waits for one whose commit has waited for nothing. */
refit_status rft_publisher_check_idle(refit_publisher *publisher, refit_error *error);
/* The store takes the place of the one before. */
void rft_publisher_adopt(refit_publisher *publisher, rft_store *store, rft_frames *frames);
/* Whether refit_publisher_cancel was called since the last time: it is told once. A wait that is
 * under way asks with the lock held. */
bool rft_publisher_take_cancel(refit_publisher *publisher);

/* Waits until no worker reads pieces up to this sequence; evicts those that do not take them
 * within broadcast.stage_timeout_ms. REFIT_ERR_CANCELLED. */
refit_status rft_publisher_await_taken(refit_publisher *publisher, uint32_t sequence,
                                       refit_error *error);

/* Whether versions on the GPU are copies that stay: workers may take them late. */
bool rft_publisher_keeps_copies(const refit_publisher *publisher);

/* How many bytes more the block of the version may have. */
uint64_t rft_publisher_block_room(const refit_publisher *publisher);
/* More memory of the GPU for the version's tensors that are not lent. Where there is none, the
 * version goes another way, unless broadcast.gpu is require; then rft_gpu_store_writing is NULL. */
refit_status rft_publisher_grow_block(refit_publisher *publisher, uint64_t bytes,
                                      refit_error *error);
/* Memory of the host for the version being written, if it has none, with what is written of it. */
refit_status rft_publisher_take_host(refit_publisher *publisher, refit_error *error);

/* ---- publisher_service.c */

/* The service thread: sends, receives, beats, until `stopping`. `user` is the publisher. */
void *rft_publisher_serve(void *user);

#endif
