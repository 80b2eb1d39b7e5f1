/*
 * What a device must provide: four nouns (memory, streams, events, copies) as one table.
 *
 * Modules above call the rft_device_* functions below, never a slot: they check and count, then
 * forward. An optional slot that a device lacks is filled with one that answers
 * REFIT_ERR_UNSUPPORTED, so no slot is ever NULL. "host" (host/host_device.c) is the oracle: every
 * other device runs the same conformance suite (tests/device/).
 *
 * Streams are native handles (refit_stream_ref): those of refit_stream_open and those of the caller
 * look the same. REFIT_STREAM_NONE is the calling thread: work put there is done before the call
 * returns.
 *
 * Failures:
 * - A call that puts work on a stream and fails has put none of it there, or a part of it, which
 *   ends by itself. It may be made again. What it was to write is undefined until then.
 * - Work that fails on its stream loses the device, as a GPU's context breaks. From then on each
 *   wait for an event, and each call but those that free or close, answers REFIT_ERR_DEVICE with
 *   the sentence of the first failure; no work is carried out any more, so nothing is to be waited
 *   for. What device memory holds is undefined; host memory that no such work was to write is as it
 *   was.
 */
#ifndef RFT_DEVICE_H
#define RFT_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>

#include <refit/advanced/arena.h>
#include <refit/device.h>

#include "base/error.h"
#include "base/thread.h"
#include "kernels/delta_job.h"
#include "kernels/digest_job.h"
#include "kernels/master.h"

/* One copy. Either side may be host or device memory; the sides do not overlap. */
typedef struct rft_copy {
    void *to;
    const void *from;
    uint64_t bytes;
    uint32_t slack; /* bytes of padding right after the host side: a device may read them, and may
                       write anything there. 0: keep off */
    bool known_memory; /* one side is host memory, and the other has passed
                          rft_device_memory_check: code of the device may touch it. Copy engines
                          refuse memory that they cannot reach; code breaks on it */
} rft_copy;

/* Rows that lie apart: as many bytes of each, to rows that lie apart in another way. */
typedef struct rft_rows {
    void *to;         /* memory of the device */
    const void *from; /* memory of the device, or of the host */
    bool from_host;
    uint64_t bytes; /* of a row */
    uint64_t count;
    uint64_t to_step; /* bytes from one row's beginning to the next, at least those of a row */
    uint64_t from_step;
} rft_rows;

/* When the source of a batch may be read. */
typedef enum rft_copy_order {
    RFT_COPY_STREAM = 0, /* after the work before it on the stream: always right */
    RFT_COPY_ANY = 1,    /* at any time from the call on: for host bytes that do not change */
} rft_copy_order;

typedef struct rft_event rft_event;

#define RFT_UUID_BYTES 16u

/* What a device can do, so that callers ask instead of probing. */
typedef struct rft_device_caps {
    bool host_addressable; /* the CPU may dereference device pointers */
    bool stable_arena;     /* the reserve/commit slots work */
    bool needs_pinned;     /* copies from pageable memory are slow or synchronous: pin auto means
                              require */
    bool digests;          /* the digest slots work */
    bool masters;          /* the master slots work */
    bool deltas;           /* the delta slots work */
    bool shares;           /* the share slots work */
    uint32_t batch_most;   /* descriptors that one copy_batch takes */
    int numa_node;         /* the host node closest to it, or -1 */
    int ordinal;           /* the driver's number for it; 0 where there is only one */
    uint64_t chunk_bytes;  /* reserved addresses get and lose their memory in chunks of so many
                              bytes, counted from the base: a multiple of the granule */
    unsigned char uuid[RFT_UUID_BYTES]; /* all zero: it has none */
} rft_device_caps;

/* Device memory as another process on the same device finds it. Plain bytes, fit for a message. */
typedef struct rft_share {
    unsigned char uuid[RFT_UUID_BYTES]; /* of the device it lies on */
    unsigned char handle[64];           /* of the allocation that holds it */
    uint64_t offset;                    /* into that allocation */
    uint64_t bytes;
    uint64_t address; /* a hint by which the process that exported it knows its own allocation;
                         in another process it leads nowhere */
    uint64_t id; /* of the allocation, as in rft_memory_range; another one may get the same handle
                    once it is freed. 0: not known */
} rft_share;

/* What contains memory: one allocation, or a reservation of addresses. No copy lies across two. */
typedef struct rft_memory_range {
    const void *base;
    uint64_t bytes;
    uint64_t id; /* once it is freed, another at the same addresses has another number; 0: the
                    device does not say */
    const void *mapped; /* what is mapped in one piece where the memory begins; NULL: not known */
    uint64_t mapped_bytes;
} rft_memory_range;

#define RFT_DEVICE_OPS_VERSION 8

/* `self` is the device's own state. Every slot is thread-safe. */
typedef struct rft_device_ops {
    uint32_t version; /* RFT_DEVICE_OPS_VERSION */
    size_t size;      /* sizeof(rft_device_ops) */
    const char *kind; /* "host" */

    void (*close)(void *self);
    void (*describe)(void *self, refit_device_info *info); /* fills all but `size` and `kind` */
    void (*caps)(void *self, rft_device_caps *caps);
    bool (*is_lost)(void *self); /* see above */

    /* Memory, aligned to 512 bytes. */
    refit_status (*memory_alloc)(void *self, uint64_t bytes, void **out, refit_error *error);
    refit_status (*memory_free)(void *self, void *memory, refit_error *error);
    /* Is [memory, memory + bytes) memory of this device, allocated by refit or not, that can be
     * copied from and to? REFIT_ERR_INVALID says what it is instead (host memory, managed, another
     * device's). `allocation` is never NULL. */
    refit_status (*memory_check)(void *self, const void *memory, uint64_t bytes,
                                 rft_memory_range *allocation, refit_error *error);

    /* Addresses without memory, and memory mapped to them. All in multiples of *granule. commit is
     * all-or-nothing and idempotent; after decommit the bytes are gone, the addresses stay
     * reserved; `*freed` is what the device really got back, also by a call that failed half-way
     * and is to be repeated: a chunk goes when the last granule in it does. */
    refit_status (*reserve)(void *self, uint64_t bytes, void **out, uint64_t *granule,
                            refit_error *error);
    refit_status (*commit)(void *self, void *base, uint64_t bytes, refit_error *error);
    refit_status (*decommit)(void *self, void *base, uint64_t bytes, uint64_t *freed,
                             refit_error *error);
    void (*unreserve)(void *self, void *base, uint64_t bytes);

    /* Page-locks host memory so that the device copies from and to it at full speed; `read_only`:
     * only from it, as the process may not write there. */
    refit_status (*host_pin)(void *self, void *memory, uint64_t bytes, bool read_only,
                             refit_error *error);
    void (*host_unpin)(void *self, void *memory, uint64_t bytes);

    refit_status (*stream_open)(void *self, refit_stream_ref *out, refit_error *error);
    /* One that has nothing left to do: else REFIT_ERR_TIMEOUT at once, and it stays open. */
    refit_status (*stream_close)(void *self, refit_stream_ref stream, refit_error *error);
    refit_status (*stream_call)(void *self, refit_stream_ref stream, refit_stream_fn function,
                                void *user, refit_error *error);

    /* Copies in stream order as a whole; those inside one batch in any order, possibly in parallel.
     * `copies` may be reused when the call returns. At most caps.batch_most of them. */
    refit_status (*copy_batch)(void *self, refit_stream_ref stream, const rft_copy *copies,
                               uint32_t count, rft_copy_order order, refit_error *error);
    /* REFIT_ERR_UNSUPPORTED: not with such steps; nothing was queued. */
    refit_status (*copy_rows)(void *self, refit_stream_ref stream, const rft_rows *rows,
                              refit_error *error);
    refit_status (*zero)(void *self, refit_stream_ref stream, void *memory, uint64_t bytes,
                         refit_error *error);

    /* Arithmetic in stream order, bit for bit as in kernels/. digest: of memory of this device,
     * the part that lies `offset` bytes into a whole (kernels/digest.h); `*sum`, in host memory,
     * holds it once an event recorded after is done. cast: fp32 to bf16 (kernels/cast.h). */
    refit_status (*digest)(void *self, refit_stream_ref stream, const void *memory, uint64_t bytes,
                           uint64_t offset, uint64_t *sum, refit_error *error);
    refit_status (*cast_bf16)(void *self, refit_stream_ref stream, uint16_t *to, const float *from,
                              uint64_t count, refit_error *error);
    /* Many digests at once, as kernels/digest_job.h says. The table is read and written in stream
     * order: it stays until the work is done. It and all that it names are known to be memory of
     * this device, since code of the device touches it: from memory_alloc or share_map, or
     * checked. */
    refit_status (*digest_list)(void *self, refit_stream_ref stream, rft_digest_job *jobs,
                                uint32_t count, refit_error *error);

    /* In stream order, too: masters are coded, and decoded or compared, as kernels/master.h says,
     * whose rules about addresses hold. All that `job` names, the result too, is memory of this
     * device; the job itself is read before the call returns. */
    refit_status (*master_encode)(void *self, refit_stream_ref stream, const rft_master_job *job,
                                  refit_error *error);
    refit_status (*master_decode)(void *self, refit_stream_ref stream, const rft_master_job *job,
                                  refit_error *error);

    /* Blocks become others, and are brought back, as kernels/delta_job.h says. The table, all that
     * it names and the memory of the notes are known to be memory of this device, since code of the
     * device touches it. */
    refit_status (*delta_exchange)(void *self, refit_stream_ref stream, rft_delta_job *jobs,
                                   uint32_t count, const rft_delta_notes *notes,
                                   refit_error *error);
    refit_status (*delta_apply)(void *self, refit_stream_ref stream, rft_delta_job *jobs,
                                uint32_t count, refit_error *error);

    /* Memory of memory_alloc shown to other processes on the same device, and theirs mapped here.
     * One mapping an allocation, however often it is asked for: count, and unmap as often. The
     * exporter frees only after all have unmapped. */
    refit_status (*share_export)(void *self, const void *memory, uint64_t bytes, rft_share *out,
                                 refit_error *error);
    refit_status (*share_map)(void *self, const rft_share *share, void **out, refit_error *error);
    void (*share_unmap)(void *self, void *memory);

    /* An event is a place in a stream. Recording again moves it. One never recorded is done. */
    refit_status (*event_open)(void *self, rft_event **out, refit_error *error);
    void (*event_close)(void *self, rft_event *event);
    refit_status (*event_record)(void *self, rft_event *event, refit_stream_ref stream,
                                 refit_error *error);
    /* Makes the work put on `stream` from now on wait for the event as it is recorded now. */
    refit_status (*event_join)(void *self, rft_event *event, refit_stream_ref stream,
                               refit_error *error);
    /* REFIT_OK done, REFIT_ERR_TIMEOUT not yet, REFIT_ERR_DEVICE: the device is lost. 0: only look.
     */
    refit_status (*event_wait)(void *self, rft_event *event, uint32_t timeout_ms,
                               refit_error *error);
} rft_device_ops;

/* Something on the device that outlives its owner, such as memory that another process maps. */
typedef struct rft_deferred_free {
    struct rft_deferred_free *next;
    /* False: not yet. True: all of it is given back, the struct with it. */
    bool (*give_back)(struct rft_deferred_free *deferred, refit_device *device);
} rft_deferred_free;

struct refit_device {
    rft_device_ops ops; /* a copy in which every slot is filled */
    void *self;
    /* What is open on it; close refuses while there is any. */
    atomic_uint_fast32_t users;    /* offloaders, arenas, … */
    atomic_uint_fast32_t memories; /* of refit_memory_alloc */
    atomic_uint_fast32_t streams;  /* of refit_stream_open */
    /* Of the host arenas for it, which share offload.budget_bytes. Kept by lib/memory. */
    atomic_uint_fast64_t host_bytes;
    rft_mutex lock;
    refit_arena *arenas; /* the first of those that lib/memory links here; guarded by lock */
    rft_event *spare;    /* kept for refit_stream_wait; guarded by lock */
    rft_deferred_free *deferred; /* the first; guarded by lock */
    uint32_t wait_most_ms;       /* the limit of each wait for streams: offload.timeout_ms of the
                                    configuration that the device was opened with */
    rft_mutex reserve_lock;
    struct rft_reservation *reservations; /* device_calls.c; guarded by reserve_lock */
};

/* Wraps an implementation; takes `self` if it succeeds. For the implementations and for tests that
 * bring their own. REFIT_ERR_INVALID: another version of the table, or a required slot is NULL. */
refit_status rft_device_make(const rft_device_ops *ops, void *self, refit_device **out,
                             refit_error *error);

/* Fills the optional slots that are NULL: calls answer REFIT_ERR_UNSUPPORTED, unpin and unmap do
 * nothing, and memory_check believes its caller. REFIT_ERR_INVALID names a required one that is
 * NULL. */
refit_status rft_device_fill_optional(rft_device_ops *ops, refit_error *error);

/* "capacity=2GiB", the end of a spec; "" is UINT64_MAX: as much as there is. False for anything
 * else. */
bool rft_device_read_capacity(const char *text, uint64_t *bytes);

/* An object on the device begins and ends. */
void rft_device_retain(refit_device *device);
void rft_device_release(refit_device *device);

/* Takes `deferred`. It is asked again by sweep and when the device is closed, which fails until it
 * is gone. Sweep returns false if something is left. Any thread. */
void rft_device_defer_free(refit_device *device, rft_deferred_free *deferred);
bool rft_device_sweep(refit_device *device);

rft_device_caps rft_device_get_caps(refit_device *device);
/* `allocation` may be NULL. */
refit_status rft_device_memory_check(refit_device *device, const void *memory, uint64_t bytes,
                                     rft_memory_range *allocation, refit_error *error);
/* The same of one memory after the other, all of which stay allocated meanwhile: `last` is {0} at
 * first, then the answer. The driver is not asked about what lies in the piece of the last one. */
refit_status rft_device_memory_check_next(refit_device *device, const void *memory, uint64_t bytes,
                                          rft_memory_range *last, refit_error *error);
refit_status rft_device_reserve(refit_device *device, uint64_t bytes, void **out, uint64_t *granule,
                                refit_error *error);
refit_status rft_device_commit(refit_device *device, void *base, uint64_t bytes,
                               refit_error *error);
/* First waits, at most wait_most_ms, for what the streams of rft_device_reserve_add_stream have
 * queued by now: REFIT_ERR_TIMEOUT or REFIT_ERR_STATE (a capture is in progress on one), and then
 * nothing has gone. `freed` may be NULL. */
refit_status rft_device_decommit(refit_device *device, void *base, uint64_t bytes, uint64_t *freed,
                                 refit_error *error);
/* Nothing queued may use it any more. */
void rft_device_unreserve(refit_device *device, void *base, uint64_t bytes);
/* Work on `stream` uses the reservation that begins at `base`: see decommit. Idempotent. It ends
 * with remove_stream, with refit_stream_close, or with unreserve. A stream that refit did not open
 * ends its use before it is destroyed: a driver crashes on the handle of a destroyed stream, or
 * takes it for the next stream's. REFIT_STREAM_NONE uses nothing. Any thread. remove_stream first
 * waits for what is queued there: REFIT_ERR_TIMEOUT and REFIT_ERR_STATE leave it in use; another
 * failure is that of the work, and it has ended. */
refit_status rft_device_reserve_add_stream(refit_device *device, void *base,
                                           refit_stream_ref stream, refit_error *error);
refit_status rft_device_reserve_remove_stream(refit_device *device, void *base,
                                              refit_stream_ref stream, refit_error *error);
refit_status rft_device_host_pin(refit_device *device, void *memory, uint64_t bytes, bool read_only,
                                 refit_error *error);
void rft_device_host_unpin(refit_device *device, void *memory, uint64_t bytes);
refit_status rft_device_copy_batch(refit_device *device, refit_stream_ref stream,
                                   const rft_copy *copies, uint32_t count, rft_copy_order order,
                                   refit_error *error);
/* In stream order; a device that cannot do it at once copies row by row. All memory was checked. */
refit_status rft_device_copy_rows(refit_device *device, refit_stream_ref stream,
                                  const rft_rows *rows, refit_error *error);
refit_status rft_device_zero(refit_device *device, refit_stream_ref stream, void *memory,
                             uint64_t bytes, refit_error *error);
refit_status rft_device_digest(refit_device *device, refit_stream_ref stream, const void *memory,
                               uint64_t bytes, uint64_t offset, uint64_t *sum, refit_error *error);
refit_status rft_device_digest_list(refit_device *device, refit_stream_ref stream,
                                    rft_digest_job *jobs, uint32_t count, refit_error *error);
/* REFIT_ERR_INVALID for a job that breaks a rule of kernels/master.h. Of no elements: REFIT_OK. */
refit_status rft_device_master_encode(refit_device *device, refit_stream_ref stream,
                                      const rft_master_job *job, refit_error *error);
refit_status rft_device_master_decode(refit_device *device, refit_stream_ref stream,
                                      const rft_master_job *job, refit_error *error);
refit_status rft_device_delta_exchange(refit_device *device, refit_stream_ref stream,
                                       rft_delta_job *jobs, uint32_t count,
                                       const rft_delta_notes *notes, refit_error *error);
refit_status rft_device_delta_apply(refit_device *device, refit_stream_ref stream,
                                    rft_delta_job *jobs, uint32_t count, refit_error *error);
refit_status rft_device_share_export(refit_device *device, const void *memory, uint64_t bytes,
                                     rft_share *out, refit_error *error);
refit_status rft_device_share_map(refit_device *device, const rft_share *share, void **out,
                                  refit_error *error);
void rft_device_share_unmap(refit_device *device, void *memory);
refit_status rft_device_event_open(refit_device *device, rft_event **out, refit_error *error);
void rft_device_event_close(refit_device *device, rft_event *event);
refit_status rft_device_event_record(refit_device *device, rft_event *event,
                                     refit_stream_ref stream, refit_error *error);
refit_status rft_device_event_join(refit_device *device, rft_event *event, refit_stream_ref stream,
                                   refit_error *error);
refit_status rft_device_event_wait(refit_device *device, rft_event *event, uint32_t timeout_ms,
                                   refit_error *error);

/* Is the device lost (see above)? Any thread. */
bool rft_device_is_lost(refit_device *device);

/* The implementations. `rest` is what follows the colon of the spec ("capacity=2GiB"), or "";
 * `config` is resolved and not kept. */
refit_status rft_device_host_open(const char *rest, const refit_config *config, refit_device **out,
                                  refit_error *error);
/* "", "0", "0:capacity=2GiB". REFIT_ERR_NOT_FOUND: no driver, no GPU, or none of this number. */
refit_status rft_device_cuda_open(const char *rest, const refit_config *config, refit_device **out,
                                  refit_error *error);

#endif
