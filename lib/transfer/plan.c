/*
 * The copies of one operation, made from pieces.
 *
 * Pieces are joined into runs while they are neighbours on both sides; a run is cut into copies of
 * at most piece_bytes; copies are gathered into batches of one group and one kind. A run of b bytes
 * makes at most 1 + b / piece_bytes copies, and there are no more runs than pieces: so pieces +
 * bytes / piece_bytes is room for any filling. Knows nothing of streams or time.
 */
#include "transfer/plan.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"

refit_status rft_plan_open(rft_plan *plan, uint32_t pieces, uint64_t bytes, uint64_t piece_bytes,
                           uint32_t batch_most, refit_error *error)
{
    RFT_REFUSE_IF(piece_bytes == 0 || batch_most == 0, error, REFIT_ERR_INVALID,
                  "a plan needs offload.piece_bytes and offload.batch above 0");
    uint64_t room;
    bool counted = rft_add_u64(pieces, bytes / piece_bytes, &room);
    RFT_REFUSE_IF(!counted || room > UINT32_MAX, error, REFIT_ERR_LIMIT,
                  "%" PRIu32 " pieces of %" PRIu64 " bytes make too many copies of %" PRIu64
                  " bytes: raise offload.piece_bytes",
                  pieces, bytes, piece_bytes);
    rft_plan made = {.copy_room = (uint32_t)room,
                     .piece_bytes = piece_bytes,
                     .batch_most = batch_most,
                     .pieces_most = pieces,
                     .bytes_most = bytes};
    if (room > 0) {
        made.copies = rft_calloc(room, sizeof *made.copies);
        made.batches = rft_calloc(room, sizeof *made.batches);
        if (made.copies == NULL || made.batches == NULL) {
            rft_plan_close(&made);
            return rft_fail(error, REFIT_ERR_HOST_MEMORY,
                            "no memory for a plan of %" PRIu64 " copies", room);
        }
    }
    *plan = made;
    return REFIT_OK;
}

void rft_plan_close(rft_plan *plan)
{
    rft_free(plan->copies);
    rft_free(plan->batches);
    memset(plan, 0, sizeof *plan);
}

/* A batch goes on while group and kind stay the same and it has room. */
static bool batch_takes(const rft_plan *plan, const rft_copy *copy, uint32_t group)
{
    if (plan->batch_count == 0) return false;
    const rft_batch *last = &plan->batches[plan->batch_count - 1];
    bool zeroes = plan->copies[last->first].from == NULL;
    return last->group == group && last->count < plan->batch_most && zeroes == (copy->from == NULL);
}

static void add_copy(rft_plan *plan, const rft_copy *copy, uint32_t group)
{
    if (!batch_takes(plan, copy, group)) {
        plan->batches[plan->batch_count++] = (rft_batch){plan->copy_count, 0, group};
    }
    plan->batches[plan->batch_count - 1].count++;
    plan->copies[plan->copy_count++] = *copy;
    plan->bytes += copy->bytes;
}

static void advance(rft_copy *copy, uint64_t bytes)
{
    copy->to = (char *)copy->to + bytes;
    if (copy->from != NULL) copy->from = (const char *)copy->from + bytes;
    copy->bytes -= bytes;
}

static void add_run(rft_plan *plan, const rft_piece *run)
{
    rft_copy left = {.to = run->to, .from = run->from, .bytes = run->bytes};
    while (left.bytes > 0) {
        rft_copy part = {
            .to = left.to, .from = left.from, .bytes = rft_min_u64(left.bytes, plan->piece_bytes)};
        add_copy(plan, &part, run->group);
        advance(&left, part.bytes);
    }
}

static bool is_neighbour(const rft_piece *run, const rft_piece *next)
{
    if (run->group != next->group || (const char *)run->to + run->bytes != next->to) return false;
    if (run->from == NULL || next->from == NULL) return run->from == next->from;
    return (const char *)run->from + run->bytes == next->from;
}

static refit_status check_room(const rft_plan *plan, const rft_piece *pieces, uint32_t count,
                               refit_error *error)
{
    uint64_t bytes = 0;
    bool counted = count <= plan->pieces_most;
    for (uint32_t i = 0; counted && i < count; i++) {
        counted = rft_add_u64(bytes, pieces[i].bytes, &bytes) && bytes <= plan->bytes_most;
    }
    RFT_REFUSE_IF(!counted, error, REFIT_ERR_LIMIT,
                  "%" PRIu32 " pieces do not fit into a plan made for %" PRIu32
                  " pieces of %" PRIu64 " bytes in all",
                  count, plan->pieces_most, plan->bytes_most);
    return REFIT_OK;
}

refit_status rft_plan_fill(rft_plan *plan, const rft_piece *pieces, uint32_t count,
                           refit_error *error)
{
    plan->copy_count = 0;
    plan->batch_count = 0;
    plan->bytes = 0;
    RFT_TRY(check_room(plan, pieces, count, error));
    rft_piece run = {NULL, NULL, 0, 0};
    for (uint32_t i = 0; i < count; i++) {
        if (pieces[i].bytes == 0) continue;
        if (run.bytes > 0 && is_neighbour(&run, &pieces[i])) {
            run.bytes += pieces[i].bytes;
        } else {
            add_run(plan, &run);
            run = pieces[i];
        }
    }
    add_run(plan, &run);
    return REFIT_OK;
}
