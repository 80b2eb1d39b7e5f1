/*
 * Lists of pieces are kept in a ring by their sequence. The caller reads the list after `taken`,
 * which the service thread leaves alone until `taken` says that it has been copied; so the lock is
 * held for numbers only.
 */
#include "subscriber/piece_queue.h"

#include <poll.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"

refit_status rft_piece_queue_open(const rft_manifest *manifest, int wake_fd, rft_piece_queue **out,
                                  refit_error *error)
{
    refit_status status;
    rft_piece_queue *queue = rft_calloc(1, sizeof *queue);
    RFT_REFUSE_IF(queue == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a version");
    *queue = (rft_piece_queue){.manifest = manifest, .wake_fd = wake_fd, .ready_fd = -1};
    queue->covered = rft_calloc((size_t)manifest->count + 1, sizeof *queue->covered);
    queue->digests = rft_calloc((size_t)manifest->count + 1, sizeof *queue->digests);
    queue->sums = rft_calloc((size_t)manifest->count + 1, sizeof *queue->sums);
    status = queue->covered == NULL || queue->digests == NULL || queue->sums == NULL
                 ? rft_fail(error, REFIT_ERR_HOST_MEMORY, "no memory to follow %u tensors",
                            manifest->count)
                 : REFIT_OK;
    if (status != REFIT_OK) goto undo_memory;
    RFT_TRY_GOTO(rft_wake_fd_open(&queue->ready_fd, error), undo_memory);
    RFT_TRY_GOTO(rft_mutex_open(&queue->lock, error), undo_fd);
    *out = queue;
    return REFIT_OK;

undo_fd:
    rft_wake_fd_close(queue->ready_fd);
undo_memory:
    rft_free(queue->covered);
    rft_free(queue->digests);
    rft_free(queue->sums);
    rft_free(queue);
    return status;
}

static void pieces_close(rft_pieces *pieces)
{
    rft_gpu_version_release(pieces->where);
    rft_free(pieces->list);
    *pieces = (rft_pieces){0};
}

void rft_piece_queue_abandon(rft_piece_queue *queue)
{
    for (uint32_t i = 0; i < RFT_PIECES_MOST; i++) {
        if (queue->ready[i].where != NULL) (void)rft_gpu_version_acquire(queue->ready[i].where);
    }
}

void rft_piece_queue_close(rft_piece_queue *queue)
{
    if (queue == NULL) return;
    for (uint32_t i = 0; i < RFT_PIECES_MOST; i++)
        pieces_close(&queue->ready[i]);
    rft_mutex_close(&queue->lock);
    rft_wake_fd_close(queue->ready_fd);
    rft_free(queue->covered);
    rft_free(queue->digests);
    rft_free(queue->sums);
    rft_free(queue);
}

/* ---- The service thread's side */

/* Notes that a piece has come. */
static refit_status cover(rft_piece_queue *queue, const refit_piece *piece, refit_error *error)
{
    const rft_manifest *manifest = queue->manifest;
    bool known = piece->tensor < manifest->count &&
                 manifest->tensors[piece->tensor].alias_of == REFIT_NO_ALIAS;
    RFT_REFUSE_IF(!known, error, REFIT_ERR_PROTOCOL, "a piece of a tensor %u that has no bytes",
                  piece->tensor);
    const rft_manifest_tensor *tensor = &manifest->tensors[piece->tensor];
    uint64_t *covered = &queue->covered[piece->tensor];
    bool last = piece->bytes == tensor->bytes - *covered;
    bool fits = piece->offset == *covered && piece->bytes > 0 &&
                piece->bytes <= tensor->bytes - *covered && (last || piece->bytes % 8 == 0);
    RFT_REFUSE_IF(
        !fits, error, REFIT_ERR_PROTOCOL, "%llu bytes at %llu are not the next piece of '%.160s'",
        (unsigned long long)piece->bytes, (unsigned long long)piece->offset, tensor->name);
    *covered += piece->bytes;
    return REFIT_OK;
}

static refit_status read_list(rft_piece_queue *queue, rft_pieces *pieces, rft_view list,
                              refit_error *error)
{
    const unsigned char *at = list.data;
    for (uint32_t i = 0; i < pieces->count; i++, at += RFT_PIECE_BYTES) {
        pieces->list[i] = (refit_piece){
            .tensor = rft_get_u32(at),
            .offset = rft_get_u64(at + 4 + RFT_PLACE_BYTES),
            .bytes = rft_get_u64(at + 12 + RFT_PLACE_BYTES),
            .memory = pieces->where->tensors[i],
        };
        RFT_TRY(cover(queue, &pieces->list[i], error));
    }
    return REFIT_OK;
}

static refit_status pieces_open(rft_piece_queue *queue, rft_gpu_memory *memory,
                                const rft_message *message, rft_pieces *out, refit_error *error)
{
    rft_pieces pieces = {0};
    rft_view list = message->as.pieces.list;
    char lock[RFT_SEGMENT_NAME_BYTES];
    RFT_REFUSE_IF(message->as.pieces.lock.count >= sizeof lock, error, REFIT_ERR_PROTOCOL,
                  "a lock's name of more than %zu bytes", sizeof lock - 1);
    rft_view_print(message->as.pieces.lock, lock, sizeof lock);
    pieces.count = (uint32_t)(list.count / RFT_PIECE_BYTES);
    pieces.list = rft_calloc((size_t)pieces.count + 1, sizeof *pieces.list);
    RFT_REFUSE_IF(pieces.list == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory for %u pieces of a version", pieces.count);
    refit_status status = rft_gpu_memory_map_pieces(memory, lock, message->as.pieces.areas, list,
                                                    &pieces.where, error);
    if (status == REFIT_OK) status = read_list(queue, &pieces, list, error);
    if (status == REFIT_OK) {
        *out = pieces;
    } else {
        pieces_close(&pieces);
    }
    return status;
}

refit_status rft_piece_queue_put(rft_piece_queue *queue, rft_gpu_memory *memory,
                                 const rft_message *pieces, refit_error *error)
{
    uint32_t sequence = pieces->as.pieces.sequence;
    /* Only this thread changes `arrived` and `freed`. */
    bool next = sequence == queue->arrived + 1 && sequence - queue->freed <= RFT_PIECES_MOST;
    RFT_REFUSE_IF(!next, error, REFIT_ERR_PROTOCOL,
                  "pieces %u come after %u, of which %u were taken", sequence, queue->arrived,
                  queue->freed);
    RFT_TRY(pieces_open(queue, memory, pieces, &queue->ready[sequence % RFT_PIECES_MOST], error));
    rft_lock(&queue->lock);
    queue->arrived = sequence;
    rft_unlock(&queue->lock);
    rft_wake_fd_set(queue->ready_fd);
    return REFIT_OK;
}

static void end(rft_piece_queue *queue, rft_piece_queue_state from, rft_piece_queue_state to,
                const refit_error *why)
{
    rft_lock(&queue->lock);
    bool goes =
        to == RFT_PIECES_FAILED ? queue->state < RFT_PIECES_COMMITTED : queue->state == from;
    if (goes) queue->state = to;
    if (goes && why != NULL) queue->failure = *why;
    rft_unlock(&queue->lock);
    rft_wake_fd_set(queue->ready_fd);
}

refit_status rft_piece_queue_seal(rft_piece_queue *queue, rft_view digests, refit_error *error)
{
    const rft_manifest *manifest = queue->manifest;
    for (uint32_t i = 0; i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        bool whole = tensor->alias_of != REFIT_NO_ALIAS || queue->covered[i] == tensor->bytes;
        RFT_REFUSE_IF(!whole, error, REFIT_ERR_PROTOCOL,
                      "the version is sealed, and only %llu bytes of '%.160s' have come",
                      (unsigned long long)queue->covered[i], tensor->name);
    }
    rft_digests_by_tensor(manifest, digests.data, queue->digests);
    end(queue, RFT_PIECES_OPEN, RFT_PIECES_WHOLE, NULL);
    return REFIT_OK;
}

uint32_t rft_piece_queue_collect(rft_piece_queue *queue)
{
    rft_lock(&queue->lock);
    uint32_t taken = queue->taken;
    rft_unlock(&queue->lock);
    if (taken == queue->freed) return 0;
    while (queue->freed != taken)
        pieces_close(&queue->ready[++queue->freed % RFT_PIECES_MOST]);
    return taken;
}

void rft_piece_queue_fail(rft_piece_queue *queue, const refit_error *why)
{
    end(queue, RFT_PIECES_OPEN, RFT_PIECES_FAILED, why);
}

void rft_piece_queue_commit(rft_piece_queue *queue)
{
    end(queue, RFT_PIECES_WHOLE, RFT_PIECES_COMMITTED, NULL);
}

/* ---- The caller's side */

static void take(rft_piece_queue *queue)
{
    if (!queue->reading) return;
    queue->reading = false;
    rft_lock(&queue->lock);
    queue->taken++;
    rft_unlock(&queue->lock);
    rft_wake_fd_set(queue->wake_fd);
}

/* REFIT_ERR_TIMEOUT: nothing yet; without a sentence. */
static refit_status look(rft_piece_queue *queue, const rft_pieces **out, refit_error *error)
{
    if (queue->state == RFT_PIECES_FAILED)
        return rft_fail(error, (refit_status)queue->failure.status, "%s", queue->failure.text);
    *out =
        queue->arrived == queue->taken ? NULL : &queue->ready[(queue->taken + 1) % RFT_PIECES_MOST];
    return *out == NULL && queue->state == RFT_PIECES_OPEN ? REFIT_ERR_TIMEOUT : REFIT_OK;
}

static void wait_until(const rft_piece_queue *queue, int64_t deadline)
{
    struct pollfd item = {.fd = queue->ready_fd, .events = POLLIN};
    (void)poll(&item, 1, rft_ms_until(deadline));
}

refit_status rft_piece_queue_next(rft_piece_queue *queue, int64_t deadline, const rft_pieces **out,
                                  refit_error *error)
{
    take(queue);
    for (;;) {
        rft_wake_fd_clear(queue->ready_fd);
        rft_lock(&queue->lock);
        refit_status status = look(queue, out, error);
        rft_unlock(&queue->lock);
        queue->reading = status == REFIT_OK && *out != NULL;
        if (status != REFIT_ERR_TIMEOUT) return status;
        RFT_REFUSE_IF(rft_ms_until(deadline) == 0, error, REFIT_ERR_TIMEOUT,
                      "the trainer has sent no further pieces of the version in time");
        wait_until(queue, deadline);
    }
}

bool rft_piece_queue_is_whole(rft_piece_queue *queue)
{
    rft_lock(&queue->lock);
    bool whole =
        queue->state != RFT_PIECES_OPEN && queue->taken == queue->arrived && queue->compared;
    rft_unlock(&queue->lock);
    return whole;
}

bool rft_piece_queue_was_read(rft_piece_queue *queue)
{
    return queue->reading || queue->taken > 0;
}

refit_status rft_piece_queue_await_commit(rft_piece_queue *queue, int64_t deadline,
                                          refit_error *error)
{
    for (;;) {
        rft_wake_fd_clear(queue->ready_fd);
        rft_lock(&queue->lock);
        rft_piece_queue_state state = queue->state;
        refit_error failure = queue->failure;
        rft_unlock(&queue->lock);
        if (state == RFT_PIECES_COMMITTED) return REFIT_OK;
        if (state == RFT_PIECES_FAILED)
            return rft_fail(error, (refit_status)failure.status, "%s", failure.text);
        RFT_REFUSE_IF(rft_ms_until(deadline) == 0, error, REFIT_ERR_TIMEOUT,
                      "the trainer has not decided about the version in time");
        wait_until(queue, deadline);
    }
}
