/* The ranks of a trainer: what they are told, what they say, and what must hold for them. Rank 0 is
 * the trainer of a run like any other; here is what it has in common with the rest. */
#include "run.h"

#include <arpa/inet.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "detour.h"

#define SHARD_MS  2000u
#define MARGIN_MS 1500u /* of a rank that another's death is to end, on a busy machine */

static bool has_ranks(const chaos_run *run)
{
    return run->plan.ranks > 1;
}

process *ranks_process(chaos_run *run, uint32_t rank)
{
    return rank == 0 ? &run->trainer : &run->rank[rank].process;
}

/* ---- Starting */

void ranks_start(chaos_run *run, uint32_t rank)
{
    char address[INET_ADDRSTRLEN] = "";
    actor_part part = {.plan = &run->plan, .smith = run->keys ? &run->smith : NULL};
    if (rank == 0) {
        run_start_trainer(run);
        return;
    }
    const struct in_addr own = detour_address(run->address, rank);
    inet_ntop(AF_INET, &own, address, sizeof address);
    part.rank = rank;
    snprintf(part.endpoint, sizeof part.endpoint, "tcp://%s:0", address);
    run->rank[rank].ready = false;
    ranks_unshard(run);
    if (!process_start(&run->rank[rank].process, trainer_run, &part, NULL))
        run_fail(run, "a process could not be started");
}

/* ---- Shards */

void ranks_unshard(chaos_run *run)
{
    if (!has_ranks(run)) return;
    run->sharded = false;
    run->served = 0;
}

bool ranks_are_ready(const chaos_run *run)
{
    for (uint32_t i = 1; i < run->plan.ranks; i++) {
        if (run->rank[i].process.pid == 0 || !run->rank[i].ready) return false;
    }
    return true;
}

/* Where a rank finds rank 0: through its link, if it has one. */
static void name_coordinator(const chaos_run *run, uint32_t rank, chaos_note *order)
{
    char address[INET_ADDRSTRLEN] = "";
    inet_ntop(AF_INET, &run->address, address, sizeof address);
    snprintf(order->text, sizeof order->text, "tcp://%s:%u", address, run->rank[rank].port);
    if (rank == 0 || !run->plan.linked)
        snprintf(order->text, sizeof order->text, "%s", run->endpoint);
}

void ranks_order_shards(chaos_run *run)
{
    chaos_note order = {.kind = NOTE_SHARD,
                        .manner = run->variant,
                        .amount = ++run->edition,
                        .digest = run->plan.model + run->edition,
                        .ms = SHARD_MS};
    run_say(run, "the ranks say which shards they have, edition %" PRIu32, run->edition);
    ranks_unshard(run);
    for (uint32_t i = 0; i < run->plan.ranks; i++) {
        run->rank[i].answer.kind = NOTE_SHARD;
        name_coordinator(run, i, &order);
        if (!note_send(ranks_process(run, i)->line, &order))
            run_fail(run, "rank %" PRIu32 " does not hear", i);
    }
}

/* Whether each that lives has answered. */
bool ranks_have_answered(const chaos_run *run)
{
    for (uint32_t i = 0; i < run->plan.ranks; i++) {
        bool lives = i == 0 ? run->trainer.pid != 0 : run->rank[i].process.pid != 0;
        if (lives && run->rank[i].answer.kind == NOTE_SHARD) return false;
    }
    return true;
}

void ranks_conclude_shards(chaos_run *run)
{
    run->sharded = run->trainer.pid != 0;
    for (uint32_t i = 0; i < run->plan.ranks; i++) {
        const chaos_note *answer = &run->rank[i].answer;
        run->sharded = run->sharded && answer->kind == NOTE_SHARDED && answer->status == REFIT_OK;
    }
}

static bool ranks_are_garbled(const chaos_run *run)
{
    bool any = false;
    for (uint32_t i = 1; i < run->plan.ranks; i++)
        any = any || run->rank[i].garbled;
    return any;
}

static void hear_sharded(chaos_run *run, uint32_t rank, const chaos_note *note)
{
    if (note->amount != run->edition) return;
    run_say(run, "rank %" PRIu32 ": shards %s after %u ms %s", rank,
            refit_status_name((refit_status)note->status), note->ms, note->text);
    bool well = note->status == REFIT_OK || note->status == REFIT_ERR_PEER ||
                note->status == REFIT_ERR_TIMEOUT || note->status == REFIT_ERR_CANCELLED;
    if (!well && !ranks_are_garbled(run))
        run_fail(run, "rank %" PRIu32 " cannot say which shard it has", rank);
    if (note->ms > SHARD_MS + run_timeout_ms())
        run_fail(run, "rank %" PRIu32 " waited %u ms for the others", rank, note->ms);
    run->rank[rank].answer = *note;
    run->rank[rank].sharded = true;
}

/* ---- A version */

void ranks_begin(chaos_run *run, const chaos_note *order, uint32_t aborts)
{
    run->order = *order;
    run->aborts = aborts;
    run->ordered = false;
    for (uint32_t i = 0; i < run->plan.ranks; i++) {
        run_rank *rank = &run->rank[i];
        rank->open = false;
        rank->harmed = rank->open_faults != 0;
        rank->phase = PHASE_TIME;
        rank->death = rank->written = 0;
        rank->done.kind = 0;
    }
    run->rank[0].open = true;
}

chaos_note ranks_order_of(const chaos_run *run, uint32_t rank)
{
    chaos_note order = run->order;
    if (has_ranks(run) && (run->aborts >> rank & 1u) == 0) order.fate = FATE_COMMIT;
    return order;
}

/* As a trainer's barrier does: once rank 0 has its workers. */
void ranks_order_version(chaos_run *run)
{
    if (run->ordered) return;
    run->ordered = true;
    for (uint32_t i = 1; i < run->plan.ranks; i++) {
        chaos_note order = ranks_order_of(run, i);
        run_rank *rank = &run->rank[i];
        rank->open = rank->sharded && note_send(rank->process.line, &order);
    }
}

bool ranks_are_done(const chaos_run *run)
{
    for (uint32_t i = 1; i < run->plan.ranks; i++) {
        if (run->rank[i].open) return false;
    }
    return true;
}

bool ranks_reached(const chaos_run *run, const chaos_action *action)
{
    const run_rank *rank = &run->rank[action->amount % run->plan.ranks];
    if (action->phase == PHASE_DECIDED && run->round.decided) return true;
    return rank->phase >= action->phase;
}

static void enter(chaos_run *run, uint32_t rank, chaos_phase phase)
{
    if (run->rank[rank].phase < phase) run->rank[rank].phase = phase;
}

/* A rank's death ends what the others do with the version, unless it is committed. */
static void judge_survivor(chaos_run *run, uint32_t at, const chaos_note *note)
{
    run_rank *rank = &run->rank[at];
    bool typed = note->status == REFIT_ERR_PEER || note->status == REFIT_ERR_TIMEOUT ||
                 note->status == REFIT_ERR_CANCELLED;
    if (rank->death == 0 || rank->harmed || note->amount == note->version) return;
    if (!typed)
        run_fail(run, "rank %" PRIu32 " ends with %s after another's death", at,
                 refit_status_name((refit_status)note->status));
    if (at == 0 && rank->written == 0) return;   /* it had to clear a slot first */
    uint32_t beats = rank->written == 0 ? 2 : 1; /* it may have waited for one that joins again */
    int64_t since = rank->death > rank->written ? rank->death : rank->written;
    int64_t ms = (note->moment - since) / 1000000;
    if (ms > (int64_t)run->totals.survived_ms) run->totals.survived_ms = (uint32_t)ms;
    run->totals.survived++;
    if (ms > (int64_t)(beats * ACTOR_HEARTBEAT_TIMEOUT + MARGIN_MS))
        run_fail(run, "rank %" PRIu32 " waited %" PRId64 " ms after another's death", at, ms);
}

static void hear_done(chaos_run *run, uint32_t rank, const chaos_note *note)
{
    if (!has_ranks(run)) return;
    run->rank[rank].open = false;
    run->rank[rank].done = *note;
    enter(run, rank, PHASE_DECIDED);
    judge_survivor(run, rank, note);
}

static void hear_written(chaos_run *run, uint32_t rank, const chaos_note *note)
{
    enter(run, rank, PHASE_COMMIT);
    run->rank[rank].written = note->moment;
    ledger_entry *entry = ledger_find(&run->ledger, note->version);
    if (entry == NULL) run_fail(run, "version %" PRIu64 " never began", note->version);
    if (entry->digest != 0 && entry->digest != note->digest)
        run_fail(run, "the ranks have other weights: the harness is wrong");
    entry->digest = note->digest;
}

/* Both sides of the decision, once all have spoken that live. */
void ranks_judge(chaos_run *run)
{
    ledger_entry *entry = ledger_find(&run->ledger, run->order.version);
    if (!has_ranks(run) || entry == NULL) return;
    run->round.told = true;
    for (uint32_t i = 1; i < run->plan.ranks; i++) {
        const chaos_note *done = &run->rank[i].done;
        bool committed = done->kind == NOTE_DONE && done->amount == entry->number;
        if (committed && entry->fate == ENTRY_ABORTED)
            run_fail(run, "rank %" PRIu32 " committed version %" PRIu64 ", which rank 0 aborted", i,
                     entry->number);
        if (committed && done->status != REFIT_OK)
            run_fail(run, "rank %" PRIu32 " committed version %" PRIu64 " and failed", i,
                     entry->number);
        if (committed || entry->fate != ENTRY_COMMITTED) continue;
        /* It was lost before it was told: no worker that comes late has its part from it. */
        bool excused = run->rank[i].harmed || run->rank[i].death != 0 || done->kind != NOTE_DONE ||
                       done->status == REFIT_ERR_CANCELLED || run->round.stopped_ms != 0;
        run_say(run, "rank %" PRIu32 " does not know that version %" PRIu64 " is committed%s", i,
                entry->number, excused ? "" : ", and nothing was done to it");
        run->totals.untold++;
        run->totals.unexplained += !excused;
        run->round.told = false;
        run->served = 0;
    }
}

/* ---- Harm */

void ranks_note_death(chaos_run *run, uint32_t dead)
{
    if (!has_ranks(run)) return;
    run->rank[dead].open = false;
    run->rank[dead].ready = run->rank[dead].sharded = false;
    run->rank[dead].answer.kind = 0; /* the one in its place was not asked */
    ranks_unshard(run);
    for (uint32_t i = 0; i < run->plan.ranks; i++) {
        run_rank *rank = &run->rank[i];
        if (i != dead && rank->death == 0) rank->death = rft_now();
        rank->harmed = rank->harmed || ranks_process(run, i)->stopped;
    }
}

/* With keys no bit is covered by nothing. Nothing that was garbled is under way afterwards. */
void ranks_ungarble(chaos_run *run)
{
    for (uint32_t i = 1; i < run->plan.ranks; i++) {
        if (!run->rank[i].garbled) continue;
        uint32_t link = run_link_number(run, OF_RANKS + i, 0);
        run_link(run, link, FAULT_FLIP_NONE, 0);
        run_link(run, link, FAULT_RESET, 0);
        run->rank[i].garbled = false;
        if (!run->keys) ranks_unshard(run);
    }
}

/* ---- Their words */

static void hear_ready(chaos_run *run, uint32_t rank, const chaos_note *note)
{
    if (note->status != REFIT_OK) run_fail(run, "rank %" PRIu32 ": %s", rank, note->text);
    run->rank[rank].ready = true;
    snprintf(run->rank[rank].endpoint, sizeof run->rank[rank].endpoint, "%s", note->text);
    run_say(run, "rank %" PRIu32 " is ready at %s", rank, note->text);
    run_tell_proxy(run, rank);
}

void ranks_hear(chaos_run *run, uint32_t rank, const chaos_note *note)
{
    switch (note->kind) {
    case NOTE_SHARDED: hear_sharded(run, rank, note); break;
    case NOTE_BEGUN:
        if (note->status == REFIT_OK) enter(run, rank, PHASE_WRITING);
        break;
    case NOTE_WRITTEN: hear_written(run, rank, note); break;
    case NOTE_READY:
        if (rank > 0) hear_ready(run, rank, note);
        break;
    case NOTE_DONE:
        if (rank > 0)
            run_say(run,
                    "version %" PRIu64 " at rank %" PRIu32 ": %s after %u ms, it is at %" PRIu64
                    " %s",
                    note->version, rank, refit_status_name((refit_status)note->status), note->ms,
                    note->amount, note->text);
        hear_done(run, rank, note);
        break;
    case NOTE_COUNTED:
        if (rank > 0) run->rank[rank].count = *note;
        break;
    case NOTE_LOG:
        if (rank > 0) run_say(run, "rank %" PRIu32 " says: %s", rank, note->text);
        break;
    default: break;
    }
}

void ranks_hear_all(chaos_run *run)
{
    chaos_note note;
    for (uint32_t i = 1; i < run->plan.ranks; i++) {
        const process *one = &run->rank[i].process;
        int got = 0;
        while (one->pid != 0 && (got = note_receive(one->line, &note)) > 0)
            ranks_hear(run, i, &note);
        if (got < 0) run_fail(run, "the process of rank %" PRIu32 " has died", i);
    }
}
