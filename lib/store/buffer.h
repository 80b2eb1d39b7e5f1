/*
 * buffer: memory that the transport or a device may still read after its owner has done with it, by
 * a count of its readers; and the list where such memory waits to be freed. A version would be torn
 * if bytes changed while they are read: a buffer that still has readers is never written again, but
 * retired.
 */
#ifndef RFT_BUFFER_H
#define RFT_BUFFER_H

#include "base/thread.h"
#include "device/device.h"
#include "store/segment.h"
#include "wire/message.h"

/* The page-lock of such memory, by which a device copies at full speed. It is taken in pieces,
 * because drivers and kernels bound one registration; a copy must not lie across two. */

/* {0} is open on nothing: closing it is harmless. */
typedef struct rft_pinning {
    refit_device *device; /* that locked it; NULL: nothing is */
    unsigned char *memory;
    uint64_t bytes;
    uint64_t piece_bytes;
} rft_pinning;

/* All of it or nothing. The device stays in use until close. */
refit_status rft_pinning_open(rft_pinning *pinning, refit_device *device, void *memory,
                              uint64_t bytes, uint64_t piece_bytes, bool read_only,
                              refit_error *error);
/* Before the memory is unmapped, and with no copy under way. */
void rft_pinning_close(rft_pinning *pinning);

/* How many of `bytes` at `memory` may be one copy: those up to the next piece; all where nothing is
 * locked. NULL is allowed. */
uint64_t rft_pinning_reach(const rft_pinning *pinning, const void *memory, uint64_t bytes);

typedef struct rft_buffer {
    rft_segment segment;     /* a slot's; may be closed */
    rft_pinning pinning;     /* of the segment */
    int64_t pin_at;          /* when it may be tried to page-lock the segment, by rft_now */
    rft_bytes gathered;      /* a frame's or a message's; may be empty */
    rft_pending pending;     /* its readers: payloads in flight, and copies of a device */
    struct rft_buffer *next; /* in a retire list */
} rft_buffer;

/* An empty one; the owner fills it. NULL: no memory. It is freed by a retire list alone. */
rft_buffer *rft_buffer_open(void);

/* {0} is empty. */
typedef struct rft_retire_list {
    rft_buffer *first;
} rft_retire_list;

/* Takes the buffer (NULL is allowed), and retires its segment. It is freed when it has no readers.
 */
void rft_retire_list_put(rft_retire_list *retired, rft_buffer *buffer);
/* All that is in `from`. */
void rft_retire_list_move(rft_retire_list *retired, rft_retire_list *from);
/* Frees what has no readers. */
void rft_retire_list_sweep(rft_retire_list *retired);
/* Waits until none has readers, or until `deadline`. What still has readers then stays mapped for
 * the rest of the process, since they would read freed memory otherwise. Returns how many those
 * are. */
uint32_t rft_retire_list_close(rft_retire_list *retired, int64_t deadline);

/* A message that many workers are sent, or one of them again and again, encoded once. A send queue
 * holds a reference to it, however large it is and however often peers make the publisher send it.
 * {0} holds no message. */
typedef struct rft_cached_message {
    rft_buffer *buffer;
    uint64_t version; /* that it is about; 0: no version */
    rft_digest128 digest;
} rft_cached_message;

bool rft_cached_message_is_about(const rft_cached_message *cached, uint64_t version,
                                 const rft_digest128 *digest);

/* Encodes another message in the place of the one before, which is retired.
 *
 * Errors: REFIT_ERR_HOST_MEMORY, REFIT_ERR_LIMIT. It holds no message then. */
refit_status rft_cached_message_write(rft_cached_message *cached, const rft_message *message,
                                      uint64_t version, const rft_digest128 *digest,
                                      const rft_limits *limits, rft_retire_list *retired,
                                      refit_error *error);
void rft_cached_message_close(rft_cached_message *cached, rft_retire_list *retired);

#endif
