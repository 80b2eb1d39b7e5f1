/*
 * copy_queue: bytes between the memory of one device and the host, or within the device, on a
 * stream of its own after the caller's; and their digests.
 *
 * Work is put on the stream by copy and digest, and waited for by wait. If it is not done by then,
 * the queue stays busy, and so does the memory that was named by hold: nothing may be written
 * there or freed until a later wait has seen the end of it.
 *
 * Belongs to one thread.
 */
#ifndef RFT_COPY_QUEUE_H
#define RFT_COPY_QUEUE_H

#include "store/buffer.h"

#define RFT_DIGEST_BATCH_MOST 4096u /* digests at a time */
#define RFT_STAGING_BYTES     (UINT64_C(4) << 20)

typedef struct rft_copy_queue rft_copy_queue;

refit_status rft_copy_queue_open(refit_device *device, const refit_config *config,
                                 rft_copy_queue **out, refit_error *error);
/* Waits for what is under way until `deadline`. False: it was not done, and the queue, its stream
 * and its device stay open until the process ends, since the device would write into freed memory
 * otherwise. NULL is allowed. */
bool rft_copy_queue_close(rft_copy_queue *queue, int64_t deadline);

refit_device *rft_copy_queue_device(const rft_copy_queue *queue);

/* What is put on the stream from now on waits for what the caller has put on `after`. */
refit_status rft_copy_queue_follow(rft_copy_queue *queue, refit_stream_ref after,
                                   refit_error *error);
/* The memory that `pending` counts for is in use until a wait has seen the end of the work, of
 * which there may be none. On a queue that is not busy; at most two at a time. */
void rft_copy_queue_hold(rft_copy_queue *queue, rft_pending *pending);
/* Between host memory and the device's, which was checked before. `pinning`: of the slot on the
 * host side, or NULL. */
refit_status rft_copy_queue_copy(rft_copy_queue *queue, void *to, const void *from, uint64_t bytes,
                                 const rft_pinning *pinning, refit_error *error);
/* To the device's memory. Without a pinning the bytes, and rows from the host, go through
 * page-locked memory of the queue's own, if it is open: the call copies them there, bytes with
 * threads that the queue keeps for it, and waits for the device to have read what was there before;
 * all calls until the next wait together at most broadcast.stage_timeout_ms. After a failure the
 * queue must be waited for before the next call. open takes two times RFT_STAGING_BYTES; where it
 * cannot, copies stay slow, and it is tried again after a while. */
void rft_copy_queue_open_staging(rft_copy_queue *queue);
refit_status rft_copy_queue_copy_up(rft_copy_queue *queue, void *to, const void *from,
                                    uint64_t bytes, const rft_pinning *pinning, refit_error *error);
/* Within the device. */
refit_status rft_copy_queue_copy_within(rft_copy_queue *queue, void *to, const void *from,
                                        uint64_t bytes, refit_error *error);
/* For work of another kind, which counts as under way from now on, and for another queue to follow.
 */
refit_stream_ref rft_copy_queue_stream(rft_copy_queue *queue);
/* Rows that lie apart, to the device's memory. `pinning`: of those on the host, or NULL. */
refit_status rft_copy_queue_copy_rows(rft_copy_queue *queue, const rft_rows *rows,
                                      const rft_pinning *pinning, refit_error *error);
/* Elements of fp32, within the device, to bf16. */
refit_status rft_copy_queue_cast(rft_copy_queue *queue, uint16_t *to, const float *from,
                                 uint64_t count, refit_error *error);
/* The digest of memory of the device that lies `offset` bytes into a whole. Where the device takes
 * none itself, the bytes are fetched piece by piece, and the call waits for that. */
refit_status rft_copy_queue_digest(rft_copy_queue *queue, const void *memory, uint64_t bytes,
                                   uint64_t offset, refit_error *error);
/* Whether the device takes digests itself. */
bool rft_copy_queue_digests(const rft_copy_queue *queue);
/* What rft_copy_queue_digest asked for, after a wait: the sum of the parts. */
uint64_t rft_copy_queue_sum(const rft_copy_queue *queue);

/* Up to RFT_DIGEST_BATCH_MOST digests as one piece of work, on a device that takes them itself.
 * open takes the room for them, once. begin: REFIT_ERR_TIMEOUT while an earlier batch is under way.
 * add names memory that was checked, which is copied on the way to `to`, within the device, on a
 * boundary of 8 bytes (NULL: it is not); `offset` is as in rft_copy_queue_digest. end puts all that
 * were added on the stream: after all that was put there since begin, of which nothing reads what
 * they write. The sum of the one that was added as number `index` is good after a wait, until the
 * next begin. */
refit_status rft_copy_queue_batch_open(rft_copy_queue *queue, refit_error *error);
refit_status rft_copy_queue_batch_begin(rft_copy_queue *queue, refit_error *error);
void rft_copy_queue_batch_add(rft_copy_queue *queue, void *to, const void *from, uint64_t bytes,
                              uint64_t offset);
refit_status rft_copy_queue_batch_end(rft_copy_queue *queue, refit_error *error);
uint64_t rft_copy_queue_batch_sum(const rft_copy_queue *queue, uint32_t index);

/* Waits until all that is on the stream is done. REFIT_ERR_TIMEOUT: it is not, and the queue is
 * busy; else how it went. */
refit_status rft_copy_queue_wait(rft_copy_queue *queue, uint32_t timeout_ms, refit_error *error);
/* Whether work may be under way: no wait has seen its end. NULL is not busy. */
bool rft_copy_queue_is_busy(const rft_copy_queue *queue);
/* The same, in the memory that `pending` counts for. */
bool rft_copy_queue_holds(const rft_copy_queue *queue, const rft_pending *pending);

#endif
