/*
 * refit/broadcast.h: new weights for every rollout worker, as one version that all switch to.
 *
 *     trainer                                     each worker
 *     refit_publisher_open                        refit_subscriber_open
 *     refit_publisher_declare    (once)           loop:
 *     refit_publisher_wait_workers                  refit_subscriber_next   -> update
 *     per version:                                  refit_update_tensor     (views, read-only)
 *       refit_publisher_begin                       refit_update_accept, or refit_update_refuse
 *       refit_publisher_write    (or _write_all,    refit_update_close
 *                                 or _lend)
 *       refit_publisher_commit   (or abort)
 *
 * A worker sees whole versions only: what refit_subscriber_next returns is complete, verified
 * against the publisher's digests, and committed by the publisher. Every wait has a deadline. A
 * peer that falls silent is found by its missing heartbeat.
 *
 * Each publisher and each subscriber runs one service thread of its own (it beats, answers late
 * joiners and receives while the caller trains or generates), started by open and joined by close.
 * The transport adds its I/O thread. Neither object survives a fork: a child must not use it.
 */
#ifndef REFIT_BROADCAST_H
#define REFIT_BROADCAST_H

#include <refit/config.h>
#include <refit/device.h>
#include <refit/dtype.h>
#include <refit/stats.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct refit_publisher refit_publisher;
typedef struct refit_subscriber refit_subscriber;
typedef struct refit_update refit_update;

#define REFIT_RANK_MAX 8
#define REFIT_NO_ALIAS UINT32_MAX

/* One tensor of a manifest. A tied tensor names the one whose bytes it shares and travels no second
 * time. */
typedef struct refit_tensor {
    size_t size;      /* sizeof(refit_tensor) */
    const char *name; /* unique in the manifest */
    refit_dtype dtype;
    uint32_t rank; /* dimensions, <= REFIT_RANK_MAX; 0 for a scalar */
    uint64_t shape[REFIT_RANK_MAX];
    uint64_t bytes;    /* must equal the elements times their size, rounded up to bytes */
    uint32_t alias_of; /* index of the tensor it shares bytes with, or REFIT_NO_ALIAS */
} refit_tensor;

/*
 * The digest of a tensor's bytes in host memory, as versions have it: equal for equal bytes on
 * every CPU and GPU. It guards against accidents, not against an adversary. Any thread.
 */
REFIT_API uint64_t refit_tensor_digest(const void *memory, uint64_t bytes);

/*
 * The digest of a version that has these tensors (as refit_publisher_declare takes them), from the
 * digests of those that are not tied, in their order. Any thread.
 *
 * Errors:
 * - REFIT_ERR_INVALID, REFIT_ERR_LIMIT, REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_version_digest(const refit_tensor *tensors,
                                                             uint32_t count,
                                                             const uint64_t *digests,
                                                             unsigned char digest[16],
                                                             refit_error *error);

/* ---- The trainer's end ------------------------------------------------------------------ */

/*
 * Binds `endpoint` (NULL: broadcast.endpoint of `config`): "user://NAME", a socket that only this
 * user reaches (NAME.sock in $XDG_RUNTIME_DIR/refit, /run/user/UID/refit or /tmp/refit-UID, the
 * first that is the user's own and not too long for a socket; an asterisk as NAME: one that is
 * free), "ipc:///run/refit.sock", "tcp://127.0.0.1:0" (0: any free port), "inproc://name". An
 * address beyond this host needs keys (security.key and security.allow; see refit/keys.h) or
 * broadcast.insecure: true; one of this host without keys is open to all of its users, and a
 * warning in the log says so. `config` may be NULL; it is copied. One thread at a time uses a
 * publisher, but for what is marked "any thread".
 *
 * Errors:
 * - REFIT_ERR_BUSY: another process has the endpoint, or the socket of another user lies at its
 *   path
 * - REFIT_ERR_EXISTS: a file that is not a socket has the place of an ipc:// endpoint
 * - REFIT_ERR_SECURITY: also where other users could replace the socket and there are no keys, or
 *   where another user made the folder of user:// first
 * - REFIT_ERR_IO: a key file, or the folder of user:// cannot be made
 * - REFIT_ERR_UNSUPPORTED: no CURVE
 * - REFIT_ERR_CONFIG, REFIT_ERR_INVALID, REFIT_ERR_HOST_MEMORY, REFIT_ERR_SYSTEM
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_publisher_open(const char *endpoint,
                                                             const refit_config *config,
                                                             refit_publisher **out,
                                                             refit_error *error);

/*
 * Aborts a version under way, says goodbye to the workers, waits until they have unmapped the GPU's
 * memory, what was lent to them too, and frees all; NULL is allowed. Blocks at most
 * broadcast.linger_ms and a moment; what a worker still maps then is a line in the log.
 */
REFIT_API void refit_publisher_close(refit_publisher *publisher);

/*
 * The same, and tells the workers that no trainer follows: their refit_subscriber_next answers
 * REFIT_ERR_CLOSED at once, where it would wait for another trainer until
 * broadcast.idle_timeout_ms. A worker that is not subscribed then is not told.
 */
REFIT_API void refit_publisher_end(refit_publisher *publisher);

/*
 * The endpoint that workers connect to, with the port that was found; borrowed until close. Any
 * thread.
 */
REFIT_API const char *refit_publisher_endpoint(const refit_publisher *publisher);

/*
 * Says which GPU the trainer is on, so that workers on the same one (by its UUID, in any container)
 * read the weights in its memory. Call it right after open, and before declare with broadcast.gpu:
 * require; once, with one device, which stays in use until close.
 *
 * Tensors of refit_publisher_lend are read where they lie. Of others the publisher keeps a copy in
 * the GPU's memory, in broadcast.slots slots, allocated as they are written: with broadcast.gpu:
 * require always; with auto and store while a worker on that GPU is subscribed. A version that has
 * no room on the GPU, or with auto needs more than broadcast.gpu_bucket_bytes, is streamed: it goes
 * through that much memory piece by piece, while it is written (refit_update_is_streamed). Then
 * refit_publisher_write waits for workers to copy, and evicts those that have not done so within
 * broadcast.stage_timeout_ms; after one of its calls has failed, the version can only be aborted.
 * Where a worker takes no pieces, or the GPU has no memory at all, the version goes over the host.
 * A version has a copy in host memory unless all subscribed workers are on that GPU: a worker that
 * comes after such a version may have to wait for the next one. Nothing happens with broadcast.gpu:
 * off, or, unless it is require, for a device whose memory cannot be shown to other processes (the
 * host device). Between versions only. Takes 512 bytes of the GPU, which workers map as proof that
 * they can. Blocks only for a version whose commit has waited for nothing.
 *
 * Errors:
 * - REFIT_ERR_STATE: a version is under way, or another device was given before
 * - REFIT_ERR_CANCELLED: refit_publisher_cancel ended the wait
 * - REFIT_ERR_UNSUPPORTED, REFIT_ERR_SYSTEM (no shared memory): with broadcast.gpu: require only
 * - REFIT_ERR_INVALID, REFIT_ERR_HOST_MEMORY, REFIT_ERR_DEVICE_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_publisher_use_device(refit_publisher *publisher,
                                                                   refit_device *device,
                                                                   refit_error *error);

/*
 * Declares the tensors of the versions; the list is copied. The memory for them (broadcast.slots
 * copies of the weights, in shared memory where that is on) is taken by refit_publisher_begin, for
 * a version that some worker reads there. It may be called again between versions: a changed list
 * makes a new store, and the next version is sent whole to every worker. Blocks only for a version
 * whose commit has waited for nothing.
 *
 * Errors:
 * - REFIT_ERR_CANCELLED: refit_publisher_cancel ended the wait
 * - REFIT_ERR_INVALID: sizes that do not fit shapes, duplicate names, bad aliases
 * - REFIT_ERR_STATE, REFIT_ERR_LIMIT, REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_publisher_declare(refit_publisher *publisher,
                                                                const refit_tensor *tensors,
                                                                uint32_t count, refit_error *error);

#define REFIT_TO_THE_END UINT64_MAX

/* A part of a tensor: what a worker takes of each version, or what one of several publishers has.
 */
typedef struct refit_selection {
    size_t size;                    /* sizeof(refit_selection), set by the caller */
    const char *name;               /* of a tensor; with '*' at its end, of all that begin so */
    uint32_t rank;                  /* dimensions that follow: those after them are whole */
    uint64_t first[REFIT_RANK_MAX]; /* the first index in each */
    uint64_t shape[REFIT_RANK_MAX]; /* how many from there, not 0; or REFIT_TO_THE_END */
} refit_selection;

/* What one of several publishers has of the tensors. */
typedef struct refit_shards {
    size_t size;                 /* sizeof(refit_shards), set by the caller */
    const char *coordinator;     /* endpoint of rank 0's publisher; not looked at there */
    uint32_t rank;               /* of this publisher; 0 coordinates */
    uint32_t ranks;              /* how many there are; 1: it has all of the tensors again */
    const refit_selection *list; /* its parts: one a tensor at most */
    uint32_t count;              /* 0: it has none */
} refit_shards;

/*
 * Makes this publisher one of several, each of which serves the shard that its rank of a trainer
 * has: nothing is gathered. Workers subscribe to rank 0, receive each part from the rank that has
 * it, and see whole tensors in one version, as from a single publisher. Called on every rank, after
 * all of them have declared all tensors, with names and shapes of the whole; the lists are copied.
 * The parts of all ranks are each tensor exactly: of replicas one rank has a part, and the others
 * have not. From then on a rank writes its parts alone: memory has the bytes of the part, in the
 * order of its rows, and refit_publisher_begin of another rank than 0 waits until rank 0 has begun.
 *
 * Rank 0 decides about a version for all: the others' refit_publisher_commit returns what it has
 * decided. A rank that fails, aborts, or is lost ends the version on all ranks, whatever
 * broadcast.commit says. Another rank's refit_publisher_cancel ends its wait in commit, and nothing
 * else. A rank whose connection was lost joins again by itself; one that was started anew is not
 * known, and every rank calls this once more. So it does after REFIT_ERR_INVALID, and where the
 * tensors are divided in another way: in any order, a rank that is faster waits for rank 0.
 *
 * Another rank looks for rank 0 by its own configuration, and workers find it at
 * refit_publisher_endpoint: bind an address that they can reach, and no wildcard. With keys all
 * ranks have the same security.key, whose public half is their security.server_key and is in
 * security.allow. Versions go over sockets: into one image a host, but from no shared memory and
 * no GPU's. Memory is taken for the shard. Another list of refit_publisher_declare ends it, and so
 * does this call with one rank alone. Between versions only. Blocks until all ranks have called it,
 * at most `timeout_ms`.
 *
 * Errors:
 * - REFIT_ERR_INVALID: parts that are missing, or that two ranks have: the sentence names a tensor
 *   and the ranks; also on the other ranks. A part that is not within its tensor; no such tensor;
 *   another broadcast.frame_bytes than at rank 0
 * - REFIT_ERR_TIMEOUT: the sentence says which ranks are missing, or what rank 0 has answered last
 * - REFIT_ERR_STATE: nothing is declared, or a version is under way
 * - REFIT_ERR_PEER: rank 0 is another publisher than the one that this rank had joined
 * - REFIT_ERR_UNSUPPORTED: broadcast.gpu is require
 * - REFIT_ERR_SECURITY, REFIT_ERR_CANCELLED, REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_publisher_shard(refit_publisher *publisher,
                                                              const refit_shards *shards,
                                                              uint32_t timeout_ms,
                                                              refit_error *error);

/*
 * Says what commits wait for from now on, in place of broadcast.wait. Workers switch to the newest
 * committed version when they ask for the next one, and none of them ever sees a part of one; what
 * differs is when the trainer goes on. Unless it waits until workers have applied a version, no
 * tensor is lent: the version lies in the store, or in a copy on the GPU, with broadcast.gpu: auto
 * of at most broadcast.gpu_bucket_bytes. Between versions only. Blocks only for a version whose
 * commit has waited for nothing.
 *
 * Errors:
 * - REFIT_ERR_STATE: a version is under way; or there is one slot, and `wait` is not applied
 * - REFIT_ERR_CANCELLED: refit_publisher_cancel ended the wait
 * - REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_publisher_set_wait(refit_publisher *publisher,
                                                                 refit_wait wait,
                                                                 refit_error *error);

/*
 * Ends a wait: makes the refit_publisher_wait_workers, _begin or _commit that is under way (also
 * inside refit_controller_publish), or else the next one, return REFIT_ERR_CANCELLED; each says
 * below what state that leaves. Idempotent; NULL is allowed. A cancel that came too late for its
 * call is pending for the next one: refit_publisher_wait_workers for 0 workers clears it. Any
 * thread, and safe in a signal handler; not after close.
 */
REFIT_API void refit_publisher_cancel(refit_publisher *publisher);

/*
 * Waits until `count` workers are subscribed. Blocks, at most `timeout_ms`.
 *
 * Errors:
 * - REFIT_ERR_TIMEOUT: the sentence says how many there are
 * - REFIT_ERR_CANCELLED
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_publisher_wait_workers(refit_publisher *publisher,
                                                                     uint32_t count,
                                                                     uint32_t timeout_ms,
                                                                     refit_error *error);

/*
 * Begins a version: a number above all before it in this epoch, or 0 for the next one. The workers
 * subscribed now are its members; they are offered it at once and fetch the tensors that are
 * written while the rest still comes.
 *
 * It waits until all workers have let go of the version whose slot it takes (with one slot the
 * version before, with two the one before that), at most broadcast.stage_timeout_ms; a worker that
 * does not is evicted. Then it waits until the transport has sent the frames that lie in that slot,
 * at most broadcast.linger_ms. A slot that a worker may still read after that gets fresh memory;
 * where no shared memory is left, broadcast.shm: auto makes it private, and all workers fetch
 * through sockets until other tensors are declared. The same holds for the GPU's memory, if workers
 * read the version there: an evicted worker can no longer accept the version that it reads.
 *
 * After a failure nothing has begun, and a later begin tries again. With one slot the version
 * before may be gone by then, if it lay on the GPU alone: workers keep it, but none that comes
 * later is served it.
 *
 * Errors:
 * - REFIT_ERR_STATE: nothing is declared, or a version is under way
 * - REFIT_ERR_STALE: the number is used, or none is left
 * - REFIT_ERR_HOST_MEMORY, REFIT_ERR_SYSTEM: no fresh memory
 * - REFIT_ERR_CANCELLED: no worker is evicted then; the wait for the transport is not cut short
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_publisher_begin(refit_publisher *publisher,
                                                              uint64_t version, refit_error *error);

/*
 * Writes one tensor's bytes (host memory, or a device's) into the store, with its digest; when it
 * returns, `memory` may change. Each tensor once, in any order; tied tensors are not written.
 * `device` is where `memory` lives, NULL for plain host memory, and `after` a stream of it to come
 * after; with REFIT_STREAM_NONE the bytes are there already. Blocks for the copy, which a device
 * makes on a stream of the publisher's own as soon as `after` has come so far, into page-locked
 * memory where that can be had; at most broadcast.stage_timeout_ms. A device that was written from
 * stays in use until the publisher is closed.
 *
 * Errors:
 * - REFIT_ERR_STATE: not begun, or written already
 * - REFIT_ERR_INVALID: index, size, a stream without its device, memory that is not the device's,
 *   or of another GPU than broadcast.gpu: require shows
 * - REFIT_ERR_TIMEOUT: the stream is not done: the device may read `memory` until it is
 * - REFIT_ERR_CANCELLED: refit_publisher_cancel, while workers copied a streamed version
 * - what the device reports of the stream and the copy
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_publisher_write(refit_publisher *publisher,
                                                              uint32_t tensor, const void *memory,
                                                              uint64_t bytes, refit_device *device,
                                                              refit_stream_ref after,
                                                              refit_error *error);

/* The bytes of one tensor of the manifest, for many at once. */
typedef struct refit_weight {
    uint32_t tensor;    /* its index in what refit_publisher_declare was given */
    const void *memory; /* borrowed for the call */
    uint64_t bytes;
} refit_weight;

/*
 * Writes many tensors of the version as refit_publisher_write writes one, all of them from `device`
 * and after `after`; the list may be the whole version or a part of it. A GPU that takes digests
 * itself is waited for once every 4,096 tensors, and every 64 MiB of copies to the host, instead of
 * once a tensor. Blocks for the copies, each wait at most broadcast.stage_timeout_ms.
 *
 * The whole list is checked before the first write: REFIT_ERR_INVALID and REFIT_ERR_STATE, also for
 * a tensor that comes twice, mean that none was written. After any other failure the version stays
 * open, and the sentence names the tensor, or the first of those that were waited for together; all
 * before it are written, and none from it on.
 *
 * Errors:
 * - those of refit_publisher_write
 */
REFIT_API REFIT_MUST_CHECK refit_status
refit_publisher_write_all(refit_publisher *publisher, const refit_weight *weights, uint32_t count,
                          refit_device *device, refit_stream_ref after, refit_error *error);

/*
 * As refit_publisher_write_all, of tensors that stay as they are until refit_publisher_commit or
 * refit_publisher_abort has returned, or the publisher is closed. Workers on the GPU of
 * refit_publisher_use_device read them where they lie: nothing is copied for them. Each of them
 * then maps the allocations that the tensors lie in, once, and keeps that; and the version is over
 * when the commit returns: a worker that comes later gets the next one, and one that has not
 * accepted it in time cannot any more. What cannot be lent is copied, as by write_all: tensors of
 * host memory or of another device, those at an address that is not a multiple of 16, and memory
 * that CUDA cannot show to another process (cudaMallocAsync, virtual memory). All tensors are
 * copied with broadcast.gpu: store, and unless commits wait until workers have applied a version.
 *
 * Errors:
 * - those of refit_publisher_write_all
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_publisher_lend(refit_publisher *publisher,
                                                             const refit_weight *weights,
                                                             uint32_t count, refit_device *device,
                                                             refit_stream_ref after,
                                                             refit_error *error);

/*
 * Ends a version: waits until all members (or the quorum) have staged it, at most
 * broadcast.stage_timeout_ms, tells them to commit, and waits until they have applied it, at most
 * broadcast.commit_timeout_ms. REFIT_OK: the version is the current one. Without workers (and with
 * broadcast.commit: all) it commits at once: the store serves workers that come later.
 *
 * With broadcast.wait: staged it does not wait until they have applied it, unless a member's
 * version is more than broadcast.max_behind versions older. With none it returns at
 * once, and the version goes on. The next refit_publisher_begin, _declare, _use_device or _set_wait
 * waits for the end of it, refit_publisher_close for at most broadcast.linger_ms. Whether it was
 * committed is then told by publish_version; one that came to nothing is a line in the log and in
 * the statistics (publish_aborts), and until one of these calls, or refit_publisher_wait_workers,
 * workers that join are offered nothing.
 *
 * With fewer members than needed it is aborted: every worker keeps the version before, and so does
 * the store. (An exception is one slot where one of the two versions lies on a GPU alone, or where
 * a copy that a write gave up waiting for has taken it and there is no memory to replace it: such a
 * store serves nothing until the next version. What was lent is not served after its commit.) Once
 * committed, workers that fail to apply are named but do not undo the version, and those that have
 * not answered in time are evicted.
 *
 * A cancel before the workers are told to commit aborts the version, complete or not. After that
 * the version stands (publish_version is the new one), and only the wait ends: a worker that has
 * not answered yet may do so later, unless the version was lent, and is not evicted.
 *
 * Errors:
 * - REFIT_ERR_PEER, REFIT_ERR_TIMEOUT: aborted; refit_publisher_worker names the workers and the
 *   reasons
 * - REFIT_ERR_PEER with publish_version at the new one: committed, and workers failed to apply it
 * - REFIT_ERR_CANCELLED
 * - REFIT_ERR_STATE: no version is under way, or it lacks a tensor; it stays open
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_publisher_commit(refit_publisher *publisher,
                                                               refit_error *error);

/*
 * Drops the version under way; workers keep the one before.
 *
 * Errors:
 * - REFIT_ERR_STATE: there is none
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_publisher_abort(refit_publisher *publisher,
                                                              refit_error *error);

/* The last committed version, 0 if there is none. Any thread. */
REFIT_API uint64_t refit_publisher_version(refit_publisher *publisher);

typedef enum refit_path {
    REFIT_PATH_NONE = 0,
    REFIT_PATH_SOCKET = 1,   /* frames through ZeroMQ */
    REFIT_PATH_SHM = 2,      /* the store, mapped */
    REFIT_PATH_CUDA_IPC = 3, /* the memory of the GPU that both are on, mapped */
    REFIT_PATH_NEIGHBOR = 4, /* the image that another worker of its host received, mapped */
    REFIT_PATH_ARCHIVE = 5,  /* the files of an archive */
} refit_path;

/* What is known of one worker, subscribed or lost in the last version. */
typedef struct refit_worker_info {
    size_t size;   /* sizeof(refit_worker_info), set by the caller */
    char name[64]; /* its own; with keys that of its key, or after that and '/' */
    refit_path path;
    uint64_t version;    /* what it holds; 0 for nothing */
    uint8_t subscribed;  /* 0: evicted, gone, or joining again */
    uint8_t member;      /* 1: the last version counted on it */
    uint8_t committed;   /* 1: it applied the last version */
    refit_status status; /* why it failed in the last version, or REFIT_OK */
    char reason[160];    /* the reason, in words */
} refit_worker_info;

/*
 * Describes worker `index` (0, 1, …) as of now: subscribed ones and those of the last version that
 * join again, then those lost since it began.
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_publisher_worker(refit_publisher *publisher,
                                                               uint32_t index,
                                                               refit_worker_info *info,
                                                               refit_error *error);

/* Adds the publisher's figures to `stats`. Any thread. */
REFIT_API REFIT_MUST_CHECK refit_status refit_publisher_stats(refit_publisher *publisher,
                                                              refit_stats *stats,
                                                              refit_error *error);

/* ---- The worker's end ----------------------------------------------------------------------- */

/*
 * Starts to subscribe at `endpoint` (NULL: broadcast.endpoint). Returns at once, whether or not the
 * trainer is there; it is looked for until close, with user:// in each folder where a trainer of
 * this user may have bound; the folders are determined once, in this call. `config` may be NULL; it
 * is copied. One thread at a time uses a subscriber, but for what is marked "any thread". An
 * address beyond this host needs keys (security.key and security.server_key) or broadcast.insecure:
 * true. With security.key the trainer's keys are checked whenever it is found: see
 * refit_subscriber_next. Without, the process that listens at an ipc path (user:// is one) must be
 * of this user or root, at a path that others cannot lead elsewhere; that is looked at here, and
 * again at each connection.
 *
 * "archive://FOLDER" follows an archive (refit/advanced/archive.h) in the place of a trainer:
 * archive:///mnt/weights, or archive://kept in the directory of this call. The folder is looked
 * into every broadcast.heartbeat_ms; its newest version, by run and number, is committed to this
 * worker as soon as it was read and checked, later ones alike; those that were missed are passed
 * over. A version is built on the one in memory where its files do, or else on its anchor. A file
 * that is damaged, cut short or above limits.* is named in the log and passed over until it
 * changes; one that was removed or cannot be read is named too, and tried at each look. A folder
 * that is not there or cannot be read is waited for, as a trainer is. Anyone who can write
 * to the folder decides what this worker gets. Takes memory for two versions and a few frames;
 * nothing is written.
 *
 * Errors:
 * - REFIT_ERR_INVALID: port 0 or * among it, which only a publisher binds; no folder
 * - REFIT_ERR_CONFIG: also broadcast.shm or broadcast.gpu: require, with an archive
 * - REFIT_ERR_IO: a key file, or the folder of user:// cannot be made
 * - REFIT_ERR_UNSUPPORTED: no CURVE
 * - REFIT_ERR_SECURITY, REFIT_ERR_HOST_MEMORY, REFIT_ERR_SYSTEM
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_subscriber_open(const char *endpoint,
                                                              const refit_config *config,
                                                              refit_subscriber **out,
                                                              refit_error *error);

/*
 * Leaves in good order; NULL is allowed. An open update ends with it (and is refused, if it was
 * undecided): it must not be closed afterwards. Blocks at most for the message that is being
 * handled; what is still to be sent has broadcast.linger_ms.
 */
REFIT_API void refit_subscriber_close(refit_subscriber *subscriber);

/*
 * Says which GPU the engine is on: refit_update_copy copies there, and versions are read in the
 * trainer's memory if the trainer is on the same one (by its UUID) and has said so, too. Call it
 * right after open: a worker that is connected already joins once more. Once, with one device,
 * which stays in use until close. With broadcast.gpu: off, and where the memory cannot be mapped,
 * versions come another way (with require: refit_subscriber_next says why). Nothing happens for the
 * host device. Does not block.
 *
 * Errors:
 * - REFIT_ERR_STATE: another device was given before
 * - REFIT_ERR_UNSUPPORTED: with broadcast.gpu: require only
 * - REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_subscriber_use_device(refit_subscriber *subscriber,
                                                                    refit_device *device,
                                                                    refit_error *error);

/*
 * Takes only these parts of each version from now on: where versions come over a socket nothing
 * else is sent, as an engine needs that has some layers, some experts or a slice of each tensor.
 * Several entries may name one tensor; where they meet, all of it is taken. Tensors that are not
 * selected are REFIT_ERR_NOT_FOUND for the calls of an update, and so is a whole tensor of which a
 * part is selected for those that copy or write it; refit_update_tensor gives its memory, of which
 * the selected part alone has its bytes. Digests of the trainer's are compared for tensors that are
 * selected whole; parts have those of the frames that they came in. A name that the trainer does
 * not have is told in the log; a part that is not within its tensor refuses the version.
 *
 * `manifest` (NULL: of all versions) are the 16 bytes that refit_update_manifest gave: versions
 * with other tensors are then taken whole. A later call takes the place of the one before; with a
 * count of 0 all is taken again. It holds for each version that refit_subscriber_next gives from
 * now on: one that is there and was not taken is fetched anew, and is missed if it was lent. An
 * update that is open stays as it is. The trainer is joined once more, which a version under way
 * waits for, and the next version does not build on the one held. Does not block.
 *
 * Errors:
 * - REFIT_ERR_INVALID: an entry without a name, or an empty one
 * - REFIT_ERR_UNSUPPORTED: it follows an archive
 * - REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_subscriber_select(refit_subscriber *subscriber,
                                                                const refit_selection *list,
                                                                uint32_t count,
                                                                const unsigned char *manifest,
                                                                refit_error *error);

/*
 * Waits for the next committed version and gives it as an update that the caller closes; one update
 * is open at a time. A version that was not taken before the trainer was lost is withdrawn: a
 * trainer that comes back brings the current one, if it was not lent. Blocks, at most `timeout_ms`.
 *
 * Errors:
 * - REFIT_ERR_TIMEOUT: a GPU has not ended the copies of the version before; or nothing new yet;
 * the sentence says whether there is a trainer, or that the handshake failed, which may pass (a
 * wrong security.server_key is reported so, too), or what cannot be read of an archive
 * - REFIT_ERR_STATE: an update is open; or broadcast.gpu is require and refit_subscriber_use_device
 *   was not called
 * - REFIT_ERR_SECURITY, REFIT_ERR_PROTOCOL: the trainer refused this worker for good. Its key was
 *   removed; or the trainer has not allowed it, one end has keys and the other none, or another
 *   user has listened at an ipc path that is used without keys, each for
 *   broadcast.heartbeat_timeout_ms; or the trainer speaks another version of the protocol
 * - REFIT_ERR_CLOSED, from then on: the trainer has ended (refit_publisher_end), or none was heard
 *   for broadcast.idle_timeout_ms; a trainer that is there is heard however long it trains. Or no
 *   archive could be read for so long; one that can be read may be without new versions
 * - REFIT_ERR_CANCELLED: after refit_subscriber_wake
 * - REFIT_ERR_SYSTEM: broadcast.shm is require and the trainer's memory cannot be shared
 * - with broadcast.gpu: require: REFIT_ERR_UNSUPPORTED if the trainer is on another GPU, and those
 *   of the device if its memory cannot be mapped
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_subscriber_next(refit_subscriber *subscriber,
                                                              uint32_t timeout_ms,
                                                              refit_update **out,
                                                              refit_error *error);

/*
 * Makes a waiting refit_subscriber_next, or else the next one, return REFIT_ERR_CANCELLED. Any
 * thread, and safe in a signal handler.
 */
REFIT_API void refit_subscriber_wake(refit_subscriber *subscriber);

/*
 * A descriptor that polls readable while refit_subscriber_next would not wait; borrowed until
 * close. Do not read it.
 */
REFIT_API int refit_subscriber_fd(const refit_subscriber *subscriber);

typedef struct refit_subscriber_info {
    size_t size;       /* sizeof(refit_subscriber_info), set by the caller */
    char worker[64];   /* the name it goes by */
    uint8_t connected; /* 1: welcomed, and the trainer's heart beats; or the archive is readable */
    refit_path path;
    uint64_t epoch;   /* of the trainer it knows; 0 for none */
    uint64_t version; /* applied; 0 for none */
    char state[16];   /* "connecting", "joining", "current", "staging", "staged", "applying" */
} refit_subscriber_info;

/* Describes the subscriber as of now. Any thread. */
REFIT_API REFIT_MUST_CHECK refit_status refit_subscriber_describe(refit_subscriber *subscriber,
                                                                  refit_subscriber_info *info,
                                                                  refit_error *error);

/* Adds the subscriber's figures to `stats`. Any thread. */
REFIT_API REFIT_MUST_CHECK refit_status refit_subscriber_stats(refit_subscriber *subscriber,
                                                               refit_stats *stats,
                                                               refit_error *error);

/* Memory of the engine that a tensor's bytes are to be written into. */
typedef struct refit_destination {
    size_t size;      /* sizeof(refit_destination) */
    const char *name; /* of the tensor; copied */
    void *memory;     /* borrowed until unbind */
    uint64_t bytes;
    refit_device *device; /* where `memory` lies; NULL: plain host memory */
    refit_dtype dtype;    /* of its elements; 0: not looked at */
    int cast;             /* 1: elements are converted to `dtype` where the version has another */
} refit_destination;

/*
 * Says where the engine has its weights, so that refit_update_apply writes versions into them. Each
 * name once. Two names may have one memory, whole and of one device: for tensors that the trainer
 * ties, or that have the same bytes in a version, which is checked for each version. Any other
 * overlap is refused. With `cast`, elements of F32, F16 and BF16 are converted to each other, to
 * nearest even; a NaN that gets shorter becomes 0x7FFF. Elements of the destination are what is
 * compared, noted and put back. May be called again only after refit_subscriber_unbind. Each device
 * in the list is in use until then and needs 4 MiB of host memory. What lies on the GPU of
 * refit_subscriber_use_device, and is not converted, is written by its kernels. Does not block.
 *
 * Errors:
 * - REFIT_ERR_STATE: bound already
 * - REFIT_ERR_INVALID, REFIT_ERR_HOST_MEMORY
 * - those of a device, for its memory and for a stream of its own
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_subscriber_bind(refit_subscriber *subscriber,
                                                              const refit_destination *list,
                                                              uint32_t count, refit_error *error);

/*
 * Gives the destinations back, as they are; refit_subscriber_close does it, too. None bound is
 * allowed. What a device had kept from being taken back is taken back now; if that fails again it
 * is the device's error, and they stay bound. Blocks for that, and at most broadcast.linger_ms for
 * a device that failed.
 *
 * Errors:
 * - REFIT_ERR_STATE: an update is applied, and neither accepted nor refused
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_subscriber_unbind(refit_subscriber *subscriber,
                                                                refit_error *error);

/* The version's number. */
REFIT_API uint64_t refit_update_version(const refit_update *update);

/*
 * The epoch of the trainer that it comes from: a restarted trainer has another epoch, and counts
 * from 1 again. 0 for a closed update.
 */
REFIT_API uint64_t refit_update_epoch(const refit_update *update);

/*
 * The version's digest, 16 bytes: equal for equal tensors with equal bytes.
 *
 * Errors:
 * - REFIT_ERR_STATE: closed
 * - REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_update_digest(const refit_update *update,
                                                            unsigned char digest[16],
                                                            refit_error *error);

/* How many tensors it has, tied ones included. */
REFIT_API uint32_t refit_update_count(const refit_update *update);

/*
 * The digest of what its tensors are, 16 bytes: equal for versions that have the same names, types,
 * shapes and ties under the same indices, whatever their bytes. What a caller has found out about
 * the tensors of one version then holds for the other.
 *
 * Errors:
 * - REFIT_ERR_STATE: closed
 * - REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_update_manifest(const refit_update *update,
                                                              unsigned char digest[16],
                                                              refit_error *error);

/*
 * Where the update's bytes lie: NULL: in host memory; else in the memory of this device, the one of
 * refit_subscriber_use_device. They are all there when the update is: work on any stream may read
 * them at once, and must be done before the update is accepted, refused or closed: from then on it
 * is the trainer's again.
 */
REFIT_API refit_device *refit_update_device(const refit_update *update);

/*
 * Tensor `index`: what it is, and its bytes, aligned to 64 in host memory and to 16 in a GPU's
 * (refit_update_device). Both are borrowed until refit_update_close; bytes in a GPU's memory until
 * the update is decided. Tied tensors share one pointer.
 *
 * The bytes are for reading. Host memory withstands a write: in shared memory it changes a copy of
 * the page, which is seen through this update alone and ends with it; what came through a socket is
 * no base for the next version then, which comes whole. refit_update_apply writes the version as it
 * was sent all the same where it lies in shared memory. A GPU's memory must not be written.
 *
 * Errors:
 * - REFIT_ERR_STATE: closed, or bytes of a GPU's memory are asked for, and the update is decided
 * - REFIT_ERR_NOT_FOUND, REFIT_ERR_INVALID
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_update_tensor(const refit_update *update,
                                                            uint32_t index, refit_tensor *tensor,
                                                            const void **bytes, refit_error *error);

/*
 * Where the bytes of all tensors lie, as refit_update_tensor tells it of one: `places` has an entry
 * for each of the `count` tensors that there are (refit_update_count).
 *
 * Errors: those of refit_update_tensor; REFIT_ERR_INVALID: another count
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_update_places(const refit_update *update,
                                                            const void **places, uint32_t count,
                                                            refit_error *error);

#define REFIT_BOX_RANK_MAX 4

/* A part of a tensor, and where each of its elements goes: from `offset`, and to the beginning of
 * the memory, on by a stride for each dimension. Dimensions go from the outermost to the innermost,
 * whose elements follow each other on both sides (stride 1); no two elements meet. */
typedef struct refit_box {
    refit_dtype dtype; /* in the memory: the tensor's, or BF16 for a tensor of F32 */
    uint32_t rank;     /* 1 to REFIT_BOX_RANK_MAX */
    uint64_t shape[REFIT_BOX_RANK_MAX];
    uint64_t offset;                           /* of the first element in the tensor, in elements */
    uint64_t from_strides[REFIT_BOX_RANK_MAX]; /* strides in the tensor, in elements */
    uint64_t to_strides[REFIT_BOX_RANK_MAX];   /* strides in the memory, in elements of `dtype` */
} refit_box;

/* Memory of the caller's that a tensor, or a part of it, is copied to. */
typedef struct refit_target {
    uint32_t tensor;      /* its index in the version */
    void *memory;         /* borrowed for the call */
    uint64_t bytes;       /* the tensor's; of a part: from its first byte to its last */
    const refit_box *box; /* borrowed for the call; NULL: the whole tensor */
} refit_target;

/*
 * Copies tensors of a version to memory on the GPU of refit_subscriber_use_device, after the work
 * that the caller has put on `after`. When the call returns all bytes are there. The whole list is
 * checked before the first copy. Blocks for the copies, at most broadcast.stage_timeout_ms. Where
 * entries of the list meet they must bring the same bytes.
 *
 * A part whose elements all follow each other is one copy, one of rows is one for each two inner
 * dimensions. F32 becomes BF16 on the way (rounded to the nearest, ties to even) where the version
 * is in the GPU's memory and all elements of the part follow each other on both sides.
 *
 * A version in that GPU's memory (refit_update_device) takes one wait for each 4,096 tensors, and
 * what was copied is compared with the trainer's digests, so that a trainer that changes tensors it
 * has lent is noticed. The digest of a whole tensor is that of the bytes which were copied; one of
 * which parts were copied is read as a whole once more, after the last of its parts that stand next
 * to each other in the list: so keep those together. A change that the trainer took back before
 * this is not noticed. A version in host memory takes one wait; its memory is page-locked by the
 * first such call, and stays so for the versions that come into it. Where that cannot be had the
 * copies are slower, and the log says so. What the caller wrote into views of shared memory is not
 * copied.
 *
 * A version that comes piece by piece (refit_update_is_streamed) is copied as it comes, until all
 * of it has, with a wait for each list of pieces.
 *
 * After a call that has failed once it had begun to copy (CORRUPT, TIMEOUT, an error of the device)
 * the update can only be refused, and that counts with `kept` 0.
 *
 * Errors:
 * - REFIT_ERR_UNSUPPORTED, nothing was written: it lies in the GPU's memory, and the GPU takes no
 *   digests; or a part that is not a copy of rows, or a conversion that there is not
 * - REFIT_ERR_INVALID, nothing was written: another size, memory that is not the GPU's, or a part
 *   that is not within the tensor or whose elements meet
 * - REFIT_ERR_CORRUPT: a tensor was changed while it was read; some of the memory is written
 * - REFIT_ERR_TIMEOUT: the copies go on, and refit_update_close waits for them
 * - REFIT_ERR_STATE: no device was given, or the update is closed; or it is decided, and lies in
 *   the GPU's memory
 * - those of the device
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_update_copy(refit_update *update,
                                                          const refit_target *list, uint32_t count,
                                                          refit_stream_ref after,
                                                          refit_error *error);

/*
 * Whether the version comes piece by piece, through a bounded part of the GPU's memory, while the
 * trainer is writing it. It is not committed yet, and lies nowhere as a whole: its tensors have no
 * bytes (refit_update_tensor), and refit_update_apply is refused. refit_update_copy copies it, or
 * refit_update_next_pieces gives the pieces. Then the engine has lost the version before: where
 * anything fails, it holds no version whole, the update can only be refused, and that counts with
 * `kept` 0. refit_update_accept waits for the trainer's decision.
 *
 * Versions come so where the trainer has made tensors on the way, more than
 * broadcast.gpu_bucket_bytes of them, and every worker on its GPU can take them; one that has bound
 * destinations (refit_subscriber_bind) takes no pieces.
 */
REFIT_API int refit_update_is_streamed(const refit_update *update);

/* A piece of a tensor, in the memory of refit_update_device. */
typedef struct refit_piece {
    uint32_t tensor; /* its index in the version; never that of a tied one */
    uint64_t offset; /* in the tensor, in bytes */
    uint64_t bytes;
    const void *memory; /* aligned to 16; until the next call, and for reading */
} refit_piece;

/*
 * Waits for the next pieces of a streamed version. The call says that those before have been
 * copied: the trainer writes others in their place, so the copies must be done. Pieces of a tensor
 * come in order, and make it up without gaps. `*count` 0: all have come, and are those that the
 * trainer wrote. Blocks at most `timeout_ms`, and for a digest of the pieces on the GPU.
 *
 * Errors:
 * - REFIT_ERR_STATE: the version is not streamed, or the update is closed or decided
 * - REFIT_ERR_TIMEOUT: call again
 * - REFIT_ERR_CANCELLED, REFIT_ERR_CLOSED, REFIT_ERR_PROTOCOL, …: the version came to nothing;
 *   refuse it
 * - REFIT_ERR_CORRUPT: the trainer changed the pieces while they were read; refuse it
 * - those of the device
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_update_next_pieces(refit_update *update,
                                                                 uint32_t timeout_ms,
                                                                 const refit_piece **pieces,
                                                                 uint32_t *count,
                                                                 refit_error *error);

/*
 * Finds a tensor's index by name.
 *
 * Errors:
 * - REFIT_ERR_NOT_FOUND
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_update_find(const refit_update *update,
                                                          const char *name, uint32_t *index,
                                                          refit_error *error);

/*
 * Writes the version into the bound destinations, whatever bytes they hold: elements that differ
 * are written, and their old bytes are noted. refit_update_accept then makes it final; refuse, or
 * close without a decision, puts the old bytes back, and so does this call if it fails. The engine
 * must not use the destinations meanwhile: its work queued on a device's streams must be done
 * before. When the call returns all bytes are there. With broadcast.verify: always they are read
 * once more, and compared with the version's digest. What comes from a GPU's memory and is not
 * converted is always compared, so that a trainer that changes tensors it has lent is noticed
 * (REFIT_ERR_CORRUPT). Blocks for the copies and kernels, each wait at most
 * broadcast.stage_timeout_ms.
 *
 * Tied tensors need one destination among them. With `left` NULL every tensor with bytes must have
 * a destination, and every destination a tensor, or nothing is written (REFIT_ERR_NOT_FOUND).
 * Otherwise `*left` is the number of tensors without one, which the caller loads.
 *
 * Until an update was accepted since the bind, the destinations hold no version: nothing is noted
 * then, and nothing put back. A failure in the middle, a refusal or a close leaves bytes of the
 * version in them. From then on only an apply that succeeds makes an accept possible, and a refusal
 * counts with `kept` 0. The same holds where bytes could not be put back; the sentence says so.
 *
 * Notes count against offload.budget_bytes; those that kernels take lie on their GPU, in at most
 * broadcast.gpu_bucket_bytes, and what does not fit there on the host. Where memory for them is
 * short, what was written is put back.
 *
 * Errors:
 * - REFIT_ERR_STATE: nothing is bound, or the update is decided
 * - REFIT_ERR_INVALID: other sizes or types than the version's, or one memory for two tensors that
 *   differ
 * - REFIT_ERR_NOT_FOUND: see `left`
 * - REFIT_ERR_STALE: the trainer evicted this worker and took the memory for a newer version
 * - REFIT_ERR_BUDGET, REFIT_ERR_HOST_MEMORY, REFIT_ERR_DEVICE_MEMORY: the notes do not fit
 * - REFIT_ERR_CORRUPT
 * - REFIT_ERR_TIMEOUT: the GPU's work goes on; the destinations are torn until it has ended
 * - those of a device's copies and kernels
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_update_apply(refit_update *update, uint32_t *left,
                                                           refit_error *error);

/*
 * Tells the trainer that the engine runs on this version from now on. Views of host memory stay
 * until close; a trainer with one slot waits for that. Does not block, but for a version that came
 * piece by piece: it returns when the trainer has committed or aborted it, within its deadlines.
 * Of other versions REFIT_OK also if the trainer was lost meanwhile: the engine does run on the
 * version, and the next trainer is told so.
 *
 * Errors:
 * - REFIT_ERR_CANCELLED, REFIT_ERR_CLOSED: a version that came piece by piece was aborted, or its
 *   trainer is lost: the update counts as refused with nothing kept
 * - REFIT_ERR_STALE: the trainer had evicted this worker and took the memory for a newer version.
 *   Bytes that were read may be torn: the update counts as refused with nothing kept, and applied
 *   bytes are put back
 * - REFIT_ERR_STATE: it was accepted or refused before; or a refit_update_copy of it failed; or
 *   bound destinations hold no whole version; or the last refit_update_apply failed and they are
 * still bound: an engine without the version must not report it
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_update_accept(refit_update *update,
                                                            refit_error *error);

/*
 * Tells the trainer that the version could not be applied, and why (`reason`: NULL for no words;
 * cut to 160 bytes). `kept` is 1 if the engine still runs on the version before, 0 if it holds no
 * version that may serve. The trainer names this worker in its report. With `kept` 0 the worker
 * joins again and is offered the current version in full, or, if that was lent, the next one; with
 * 1 it is offered the next one.
 * Applied bytes are put back first; if a device cannot, the call returns that device's error, and
 * the update counts as refused with `kept` 0. So does one that was applied where no version was
 * before, and then the call succeeds.
 *
 * Errors:
 * - REFIT_ERR_STATE: it was accepted or refused before
 * - those of a device's copies
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_update_refuse(refit_update *update,
                                                            const char *reason, int kept,
                                                            refit_error *error);

/*
 * For views that may outlive the update: its bytes in host memory stay mapped, beyond its close and
 * its subscriber's, until refit_update_release(*out). What lies there after the close may be bytes
 * of another version. `*out` is `room` zeroed bytes for the caller's use, aligned for any type.
 *
 * Errors:
 * - REFIT_ERR_UNSUPPORTED: a GPU's memory
 * - REFIT_ERR_STATE, REFIT_ERR_HOST_MEMORY
 */
REFIT_API REFIT_MUST_CHECK refit_status refit_update_retain(refit_update *update, size_t room,
                                                            void **out, refit_error *error);

/*
 * Gives back what one refit_update_retain gave; NULL is allowed. Any thread, also when update and
 * subscriber are closed, and in a forked child, where it unmaps nothing.
 */
REFIT_API void refit_update_release(void *kept);

/*
 * Ends the views; NULL is allowed. Nothing may read them any more, but for what was kept, work on a
 * GPU's streams included. An update neither accepted nor refused is refused, with nothing held, and
 * what was applied is taken back.
 */
REFIT_API void refit_update_close(refit_update *update);

#ifdef __cplusplus
}
#endif
#endif
