/* Does the processes and their links harm, and notes when each harm is to be mended. */
#include "run.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

static void mend_later(chaos_run *run, chaos_action_kind kind, uint32_t worker, uint32_t ms)
{
    if (run->mend_count == sizeof run->mends / sizeof *run->mends)
        run_fail(run, "too many faults at once for the harness");
    run->mends[run->mend_count++] = (run_mend){rft_deadline(ms), kind, worker, 0};
    if (action_target(kind) != TARGET_TRAINER) run->worker[worker].open_faults++;
}

static void mend_link_later(chaos_run *run, const chaos_action *action)
{
    if (run->mend_count == sizeof run->mends / sizeof *run->mends)
        run_fail(run, "too many faults at once for the harness");
    run->mends[run->mend_count++] =
        (run_mend){rft_deadline(action->ms), action->kind, action->worker, action->rank};
    if (action->worker < OF_RANKS) run->worker[action->worker].open_faults++;
    if (action->worker >= OF_RANKS) run->rank[action->worker - OF_RANKS].open_faults++;
}

/* ---- Workers */

static void rename_worker(run_worker *one, uint32_t at, bool new_name)
{
    if (new_name) snprintf(one->name, sizeof one->name, "w%" PRIu32 ".%" PRIu32, at, one->times);
}

/* A stopped process has said all that it will say before it is killed. Nothing is mended meanwhile:
 * that could let it go on. A worker that was refused for good has another in its place, or none. */
static void stop_and_hear(chaos_run *run, process *one)
{
    do {
        process_stop(one);
        run_hear(run);
    } while (one->pid != 0 && !one->stopped);
}

static void kill_worker(chaos_run *run, uint32_t at, const chaos_action *action)
{
    run_worker *one = &run->worker[at];
    if (one->process.pid == 0) return;
    stop_and_hear(run, &one->process);
    if (one->process.pid == 0) return;
    process_kill(&one->process);
    rename_worker(one, at, action->amount != 0);
    mend_later(run, ACTION_KILL, at, action->ms);
}

/* All are heard meanwhile: what it says until its end counts, and the trainer may check by it. */
static void await_worker_end(chaos_run *run, run_worker *one)
{
    const chaos_note quit = {.kind = NOTE_QUIT};
    int64_t deadline = rft_deadline(run_timeout_ms() + ACTOR_LINGER);
    if (one->process.stopped) process_continue(&one->process);
    bool heard = note_send(one->process.line, &quit);
    one->leaving = true;
    while (heard && one->process.pid != 0 && rft_ms_until(deadline) > 0)
        run_pump(run, rft_ms_until(deadline));
    if (one->process.pid != 0) run_fail(run, "%s does not leave in good order", one->name);
}

static void dismiss_worker(chaos_run *run, const chaos_action *action)
{
    run_worker *one = &run->worker[action->worker];
    if (one->process.pid == 0) return;
    await_worker_end(run, one);
    rename_worker(one, action->worker, action->amount != 0);
    mend_later(run, ACTION_LEAVE, action->worker, action->ms);
}

static void stop_worker(chaos_run *run, const chaos_action *action)
{
    run_worker *one = &run->worker[action->worker];
    if (one->process.pid == 0 || one->process.stopped) return;
    process_stop(&one->process);
    mend_later(run, ACTION_STOP, action->worker, action->ms);
}

static void set_manner(chaos_run *run, uint32_t at, worker_manner manner, uint32_t ms)
{
    const chaos_note note = {.kind = NOTE_MANNER, .manner = manner, .ms = ms};
    const run_worker *one = &run->worker[at];
    if (one->process.pid != 0 && !note_send(one->process.line, &note))
        run_fail(run, "%s does not hear", one->name);
}

static void take_key(chaos_run *run, const chaos_action *action)
{
    char key[16];
    run_worker *one = &run->worker[action->worker];
    if (!run->keys || one->shut) return;
    run_key_name(action->worker, key);
    key_fixture_revoke(&run->smith, key);
    one->shut = true;
    one->revoked = true;
    mend_later(run, ACTION_REVOKE, action->worker, action->ms);
}

static void give_key_back(chaos_run *run, uint32_t at)
{
    char key[16];
    run_worker *one = &run->worker[at];
    run_key_name(at, key);
    key_fixture_allow(&run->smith, key);
    one->shut = false;
    if (one->removed) run_start_worker(run, at);
    one->removed = false;
}

static void move_clock(chaos_run *run, const chaos_action *action)
{
    int64_t minutes = action->amount;
    const chaos_note note = {.kind = NOTE_CLOCK,
                             .seconds = minutes % 2 == 0 ? minutes * 60 : -minutes * 60};
    const run_worker *one = &run->worker[action->worker];
    if (one->process.pid != 0) (void)note_send(one->process.line, &note);
}

static void make_scarce(chaos_run *run, const chaos_action *action)
{
    if (scarcity_begin(run, action->worker, action->amount != 0))
        mend_later(run, ACTION_SCARCE, action->worker, action->ms);
}

/* ---- The trainer */

static void end_trainer(chaos_run *run)
{
    stop_and_hear(run, &run->trainer);
    process_kill(&run->trainer);
    ranks_note_death(run, 0);
    for (uint32_t i = 0; i < run->ledger.count; i++) {
        if (run->ledger.entries[i].fate == ENTRY_OPEN) run->ledger.entries[i].fate = ENTRY_UNKNOWN;
    }
    run->round.open = false;
    run->trainer_ready = false;
    run->committed = run->served = 0;
}

static void kill_rank(chaos_run *run, uint32_t rank, uint32_t ms)
{
    process *one = ranks_process(run, rank);
    if (one->pid == 0) return;
    if (rank == 0) {
        end_trainer(run);
    } else {
        stop_and_hear(run, one);
        process_kill(one);
        ranks_note_death(run, rank);
    }
    mend_later(run, ACTION_KILL_RANK, rank, ms);
}

/* All ranks of it. */
static void kill_trainer(chaos_run *run, const chaos_action *action)
{
    for (uint32_t i = 0; i < run->plan.ranks; i++)
        kill_rank(run, i, action->ms);
}

static void stop_rank(chaos_run *run, uint32_t rank, const chaos_action *action)
{
    process *one = ranks_process(run, rank);
    if (one->pid == 0 || one->stopped) return;
    process_stop(one);
    run->rank[rank].harmed = true;
    run->round.stopped_ms += action->ms;
    mend_later(run, ACTION_STOP_RANK, rank, action->ms);
}

/* These two are between versions. */
static void ask_trainer(chaos_run *run, chaos_note_kind kind, uint32_t seed)
{
    const chaos_note note = {.kind = kind, .digest = seed};
    if (run->trainer.pid == 0 || run->round.open) return;
    ranks_unshard(run);
    if (kind == NOTE_DECLARE) run->variant++;
    if (kind == NOTE_DECLARE && run->plan.ranks > 1) return; /* each with its shard */
    run->trainer_ready = false;
    run->served = 0;
    if (!note_send(run->trainer.line, &note)) run_fail(run, "the trainer does not hear");
    if (kind != NOTE_REOPEN) return;
    run->trainers++;
    run_number_versions(run);
}

static void kill_all(chaos_run *run, const chaos_action *action)
{
    for (uint32_t i = 0; i < run->plan.workers; i++)
        kill_worker(run, i, action);
}

/* ---- Attackers */

/* Without keys a name belongs to the worker that claims it first: the worker that has it may be
 * kept out as long as a liar beats in its name, and what is said of that name is not the worker's
 * doing. */
static void excuse_claimed(chaos_run *run, const chaos_action *action)
{
    bool claims = action->kind == ACTION_LIAR && action->amount == LIAR_CLAIMS_NAMES;
    if (!claims || run->keys) return;
    run->claimed |= 1u << action->worker;
    run->round.claimed |= run->claimed;
    mend_later(run, ACTION_LIAR, action->worker, action->ms + ACTOR_HEARTBEAT_TIMEOUT);
}

static void attack_trainer(chaos_run *run, const chaos_action *action)
{
    attacker_role role = ROLE_STRANGER;
    if (action->kind == ACTION_EVICTED) role = ROLE_EVICTED;
    if (action->kind == ACTION_LIAR) role = ROLE_LIAR;
    chaos_note order = {.kind = NOTE_ATTACK,
                        .manner = action->amount,
                        .worker = action->worker,
                        .digest = run->plan.model + action->at_ms + action->ms,
                        .ms = action->ms};
    const char *at = run->rank[action->ms % run->plan.ranks].endpoint;
    snprintf(order.text, sizeof order.text, "%s", at[0] != '\0' ? at : run->endpoint);
    excuse_claimed(run, action);
    if (!note_send(run->attackers[role].line, &order)) run_fail(run, "an attacker does not hear");
}

/* ---- All of them */

static void do_to_worker(chaos_run *run, const chaos_action *action)
{
    uint32_t at = action->worker;
    switch (action->kind) {
    case ACTION_KILL: kill_worker(run, at, action); break;
    case ACTION_LEAVE: dismiss_worker(run, action); break;
    case ACTION_STOP: stop_worker(run, action); break;
    case ACTION_SLOW: set_manner(run, at, MANNER_SLOW, action->amount); break;
    case ACTION_REFUSE_KEPT: set_manner(run, at, MANNER_REFUSE_KEPT, 0); break;
    case ACTION_REFUSE_LOST: set_manner(run, at, MANNER_REFUSE_LOST, 0); break;
    case ACTION_HOLD: set_manner(run, at, MANNER_HOLD, action->amount); break;
    case ACTION_REVOKE: take_key(run, action); break;
    case ACTION_CLOCK: move_clock(run, action); break;
    case ACTION_SCARCE: make_scarce(run, action); break;
    default: break;
    }
    if (action->kind != ACTION_DEAF || run->worker[at].process.pid == 0) return;
    set_manner(run, at, MANNER_DEAF, 0);
    mend_later(run, ACTION_DEAF, at, action->ms);
}

/* A version under way may come to nothing by it. */
static void harm_rank_link(chaos_run *run, const chaos_action *action, bool flips)
{
    run_rank *rank = &run->rank[action->worker - OF_RANKS];
    rank->harmed = true;
    rank->garbled = rank->garbled || flips;
    run->garbled = run->garbled || flips;
}

static void do_to_link(chaos_run *run, const chaos_action *action)
{
    static const proxy_fault faults[ACTION_KINDS] = {
        [ACTION_DELAY] = FAULT_DELAY,         [ACTION_THROTTLE] = FAULT_RATE,
        [ACTION_RESET] = FAULT_RESET,         [ACTION_CLOSE] = FAULT_CLOSE,
        [ACTION_HALF_DOWN] = FAULT_HALF_DOWN, [ACTION_HALF_UP] = FAULT_HALF_UP,
        [ACTION_HOLE] = FAULT_HOLE,           [ACTION_FLIP_DOWN] = FAULT_FLIP_DOWN,
        [ACTION_FLIP_UP] = FAULT_FLIP_UP,
    };
    uint64_t amount = action->amount;
    if (action->kind == ACTION_THROTTLE) amount *= 1000;
    if (action->kind == ACTION_HOLE) amount = 1;
    bool flips = action->kind == ACTION_FLIP_DOWN || action->kind == ACTION_FLIP_UP;
    if (flips && action->worker < OF_RANKS) run->worker[action->worker].flipped = true;
    if (action->worker >= OF_RANKS) harm_rank_link(run, action, flips);
    run->totals.links += action->worker >= OF_RANKS || action->rank != 0;
    uint32_t number = run_link_number(run, action->worker, action->rank);
    run_link(run, number, faults[action->kind], amount);
    bool lasts = action->kind == ACTION_DELAY || action->kind == ACTION_THROTTLE ||
                 action->kind == ACTION_HOLE;
    if (lasts) mend_link_later(run, action);
}

static void do_to_trainer(chaos_run *run, const chaos_action *action)
{
    uint32_t rank = action->amount % run->plan.ranks;
    switch (action->kind) {
    case ACTION_KILL_TRAINER: kill_trainer(run, action); break;
    case ACTION_STOP_TRAINER: stop_rank(run, 0, action); break;
    case ACTION_KILL_RANK: kill_rank(run, rank, action->ms); break;
    case ACTION_STOP_RANK: stop_rank(run, rank, action); break;
    case ACTION_CANCEL_RANK:
        if (ranks_process(run, rank)->pid != 0) (void)kill(ranks_process(run, rank)->pid, SIGUSR1);
        break;
    case ACTION_REOPEN: ask_trainer(run, NOTE_REOPEN, 0); break;
    case ACTION_DECLARE: ask_trainer(run, NOTE_DECLARE, action->at_ms + action->worker); break;
    case ACTION_CANCEL:
        if (run->trainer.pid != 0) (void)kill(run->trainer.pid, SIGUSR1);
        break;
    case ACTION_KILL_ALL: kill_all(run, action); break;
    default: break;
    }
}

void action_do(chaos_run *run, const chaos_action *action)
{
    char *text = NULL;
    size_t size = 0;
    FILE *words = open_memstream(&text, &size);
    plan_print_action(action, words);
    fclose(words);
    run_say(run, "* %s", text);
    free(text);
    run->totals.actions++;
    switch (action_target(action->kind)) {
    case TARGET_WORKER: do_to_worker(run, action); break;
    case TARGET_LINK: do_to_link(run, action); break;
    case TARGET_TRAINER: do_to_trainer(run, action); break;
    case TARGET_ATTACK: attack_trainer(run, action); break;
    }
}

/* ---- Mending */

static void mend_link(chaos_run *run, const run_mend *what)
{
    uint32_t number = run_link_number(run, what->worker, what->rank);
    if (what->kind == ACTION_DELAY) run_link(run, number, FAULT_DELAY, 0);
    if (what->kind == ACTION_THROTTLE) run_link(run, number, FAULT_RATE, 0);
    if (what->kind == ACTION_HOLE) run_link(run, number, FAULT_HOLE, 0);
    if (what->worker >= OF_RANKS) {
        run->rank[what->worker - OF_RANKS].open_faults--;
        run_say(run, "+ the link of rank %" PRIu32 " is mended", what->worker - OF_RANKS);
        return;
    }
    run->worker[what->worker].open_faults--;
    run_say(run, "+ %s is mended", run->worker[what->worker].name);
}

static void mend(chaos_run *run, const run_mend *what)
{
    process *rank;
    if (action_target(what->kind) == TARGET_LINK) {
        mend_link(run, what);
        return;
    }
    run_worker *one = &run->worker[what->worker];
    switch (what->kind) {
    case ACTION_KILL:
    case ACTION_LEAVE: run_start_worker(run, what->worker); break;
    case ACTION_STOP:
        if (one->process.pid != 0 && one->process.stopped) process_continue(&one->process);
        break;
    case ACTION_REVOKE: give_key_back(run, what->worker); break;
    case ACTION_DEAF: set_manner(run, what->worker, MANNER_PLAIN, 0); break;
    case ACTION_SCARCE: scarcity_end(run, what->worker); break;
    case ACTION_LIAR: run->claimed &= ~(1u << what->worker); break;
    case ACTION_KILL_RANK: ranks_start(run, what->worker); break;
    case ACTION_STOP_RANK:
        rank = ranks_process(run, what->worker);
        if (rank->pid != 0 && rank->stopped) process_continue(rank);
        break;
    default: break;
    }
    if (action_target(what->kind) == TARGET_TRAINER) {
        run_say(run, "+ rank %" PRIu32 " of the trainer is back", what->worker);
        return;
    }
    one->open_faults--;
    run_say(run, "+ %s is mended", one->name);
}

void action_mend(chaos_run *run, bool all)
{
    for (uint32_t i = 0; i < run->mend_count;) {
        if (!all && rft_ms_until(run->mends[i].due) > 0) {
            i++;
            continue;
        }
        run_mend what = run->mends[i];
        run->mends[i] = run->mends[--run->mend_count];
        mend(run, &what);
    }
}

int64_t action_next_mend(const chaos_run *run)
{
    int64_t first = rft_deadline(1000);
    for (uint32_t i = 0; i < run->mend_count; i++) {
        if (run->mends[i].due < first) first = run->mends[i].due;
    }
    return first;
}
