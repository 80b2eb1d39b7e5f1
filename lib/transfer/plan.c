/*
 * The copies of one operation, made from pieces.
 *
 * Pieces are joined into runs while they are neighbours on both sides in one slab and one
 * allocation, and moved as they are; a run is cut into copies of at most piece_bytes; copies are
 * gathered into batches of one group and one kind. A run of b bytes makes at most 1 + b /
 * piece_bytes copies, and there are no more runs than pieces: so pieces + bytes / piece_bytes is
 * room for any filling. Knows nothing of streams or time.
 */
#include "transfer/plan.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"

static refit_status count_room(const rft_plan_limits *limits, uint32_t *room, refit_error *error)
{
    uint64_t copies;
    bool counted = rft_add_u64(limits->pieces, limits->bytes / limits->piece_bytes, &copies);
    RFT_REFUSE_IF(!counted || copies > UINT32_MAX, error, REFIT_ERR_LIMIT,
                  "%" PRIu32 " pieces of %" PRIu64 " bytes make too many copies of %" PRIu64
                  " bytes: raise offload.piece_bytes, or offload.rate_limit if it is set",
                  limits->pieces, limits->bytes, limits->piece_bytes);
    *room = (uint32_t)copies;
    return REFIT_OK;
}

refit_status rft_plan_open(rft_plan *plan, const rft_plan_limits *limits, refit_error *error)
{
    RFT_REFUSE_IF(limits->piece_bytes == 0 || limits->batch_most == 0, error, REFIT_ERR_INVALID,
                  "a plan needs offload.piece_bytes and offload.batch above 0");
    rft_plan made = {.limits = *limits};
    if (made.limits.batch_bytes == 0) made.limits.batch_bytes = UINT64_MAX;
    made.limits.piece_bytes = rft_min_u64(limits->piece_bytes, made.limits.batch_bytes);
    RFT_TRY(count_room(&made.limits, &made.copy_room, error));
    if (made.copy_room > 0) {
        made.copies = rft_calloc(made.copy_room, sizeof *made.copies);
        made.batches = rft_calloc(made.copy_room, sizeof *made.batches);
        if (made.copies == NULL || made.batches == NULL) {
            uint32_t room = made.copy_room;
            rft_plan_close(&made);
            return rft_fail(error, REFIT_ERR_HOST_MEMORY,
                            "no memory for a plan of %" PRIu32 " copies", room);
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
static bool batch_takes(const rft_plan *plan, const rft_copy *copy, const rft_piece *run)
{
    if (plan->batch_count == 0) return false;
    const rft_batch *last = &plan->batches[plan->batch_count - 1];
    bool zeroes = plan->copies[last->first].from == NULL;
    if (last->recode != run->recode) return false;
    if (run->recode != NULL) return true;
    return last->group == run->group && zeroes == (copy->from == NULL) &&
           last->count < plan->limits.batch_most &&
           copy->bytes <= plan->limits.batch_bytes - last->bytes;
}

static void add_copy(rft_plan *plan, const rft_copy *copy, const rft_piece *run)
{
    if (!batch_takes(plan, copy, run)) {
        plan->batches[plan->batch_count++] =
            (rft_batch){.first = plan->copy_count, .group = run->group, .recode = run->recode};
    }
    rft_batch *batch = &plan->batches[plan->batch_count - 1];
    batch->count++;
    batch->bytes += copy->bytes;
    plan->copies[plan->copy_count++] = *copy;
    plan->bytes += copy->bytes;
}

static void advance(rft_copy *copy, uint64_t bytes)
{
    copy->to = (char *)copy->to + bytes;
    if (copy->from != NULL) copy->from = (const char *)copy->from + bytes;
    copy->bytes -= bytes;
}

/* What is after a run is after its last copy; after the others lies the run itself. */
static void add_run(rft_plan *plan, const rft_piece *run)
{
    rft_copy left = {
        .to = run->to, .from = run->from, .bytes = run->bytes, .known_memory = run->known_memory};
    while (left.bytes > 0) {
        rft_copy part = left;
        part.bytes = rft_min_u64(left.bytes, plan->limits.piece_bytes);
        if (part.bytes == left.bytes) part.slack = run->slack;
        add_copy(plan, &part, run);
        advance(&left, part.bytes);
    }
}

static bool are_alike(const rft_piece *run, const rft_piece *next)
{
    return run->group == next->group && run->slab == next->slab &&
           run->allocation == next->allocation && run->known_memory == next->known_memory &&
           run->recode == NULL && next->recode == NULL;
}

static bool is_neighbour(const rft_piece *run, const rft_piece *next)
{
    if (!are_alike(run, next) || (const char *)run->to + run->bytes != next->to) return false;
    if (run->from == NULL || next->from == NULL) return run->from == next->from;
    return (const char *)run->from + run->bytes == next->from;
}

static refit_status check_room(const rft_plan *plan, const rft_piece *pieces, uint32_t count,
                               refit_error *error)
{
    uint64_t bytes = 0;
    bool counted = count <= plan->limits.pieces;
    for (uint32_t i = 0; counted && i < count; i++) {
        counted = rft_add_u64(bytes, pieces[i].bytes, &bytes) && bytes <= plan->limits.bytes;
    }
    RFT_REFUSE_IF(!counted, error, REFIT_ERR_LIMIT,
                  "%" PRIu32 " pieces do not fit into a plan made for %" PRIu32
                  " pieces of %" PRIu64 " bytes in all",
                  count, plan->limits.pieces, plan->limits.bytes);
    return REFIT_OK;
}

refit_status rft_plan_fill(rft_plan *plan, const rft_piece *pieces, uint32_t count,
                           refit_error *error)
{
    plan->copy_count = 0;
    plan->batch_count = 0;
    plan->bytes = 0;
    RFT_TRY(check_room(plan, pieces, count, error));
    rft_piece run = {.bytes = 0};
    for (uint32_t i = 0; i < count; i++) {
        if (pieces[i].bytes == 0) continue;
        if (run.bytes > 0 && is_neighbour(&run, &pieces[i])) {
            run.bytes += pieces[i].bytes;
            run.slack = pieces[i].slack;
        } else {
            add_run(plan, &run);
            run = pieces[i];
        }
    }
    add_run(plan, &run);
    return REFIT_OK;
}

void rft_plan_reverse(rft_plan *plan)
{
    for (uint32_t i = 0; i < plan->copy_count; i++) {
        rft_copy *copy = &plan->copies[i];
        void *to = (void *)(uintptr_t)copy->from;
        copy->from = copy->to;
        copy->to = to;
    }
}
