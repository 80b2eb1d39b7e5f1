/* Does the processes and their links harm, and notes when each harm is to be mended. */
#include "run.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

static void mend_later(chaos_run *run, chaos_deed_kind kind, uint32_t worker, uint32_t ms)
{
    if (run->mend_count == sizeof run->mends / sizeof *run->mends)
        run_fail(run, "too many faults at once for the harness");
    run->mends[run->mend_count++] = (run_mend){rft_deadline(ms), kind, worker};
    if (kind != DEED_KILL_TRAINER && kind != DEED_STOP_TRAINER) run->worker[worker].ills++;
}

/* ---- Workers */

static void rename_worker(run_worker *one, uint32_t at, bool new_name)
{
    if (new_name) snprintf(one->name, sizeof one->name, "w%" PRIu32 ".%" PRIu32, at, one->times);
}

/* A stopped process has said all that it will say before it is killed. Nothing is mended meanwhile:
 * that could let it go on. A worker that was refused for good has another in its place, or none. */
static void stop_and_hear(chaos_run *run, player *one)
{
    do {
        player_stop(one);
        run_hear(run);
    } while (one->pid != 0 && !one->stopped);
}

static void kill_worker(chaos_run *run, uint32_t at, const chaos_deed *deed)
{
    run_worker *one = &run->worker[at];
    if (one->player.pid == 0) return;
    stop_and_hear(run, &one->player);
    if (one->player.pid == 0) return;
    player_kill(&one->player);
    rename_worker(one, at, deed->amount != 0);
    mend_later(run, DEED_KILL, at, deed->ms);
}

/* All are heard meanwhile: what it says until its end counts, and the trainer may judge by it. */
static void await_worker_end(chaos_run *run, run_worker *one)
{
    const chaos_note quit = {.kind = NOTE_QUIT};
    int64_t deadline = rft_deadline(run_patience_ms() + ACTOR_LINGER);
    if (one->player.stopped) player_continue(&one->player);
    bool heard = note_send(one->player.line, &quit);
    one->leaving = true;
    while (heard && one->player.pid != 0 && rft_ms_until(deadline) > 0)
        run_pump(run, rft_ms_until(deadline));
    if (one->player.pid != 0) run_fail(run, "%s does not leave in good order", one->name);
}

static void dismiss_worker(chaos_run *run, const chaos_deed *deed)
{
    run_worker *one = &run->worker[deed->worker];
    if (one->player.pid == 0) return;
    await_worker_end(run, one);
    rename_worker(one, deed->worker, deed->amount != 0);
    mend_later(run, DEED_LEAVE, deed->worker, deed->ms);
}

static void stop_worker(chaos_run *run, const chaos_deed *deed)
{
    run_worker *one = &run->worker[deed->worker];
    if (one->player.pid == 0 || one->player.stopped) return;
    player_stop(&one->player);
    mend_later(run, DEED_STOP, deed->worker, deed->ms);
}

static void set_manner(chaos_run *run, uint32_t at, worker_manner manner, uint32_t ms)
{
    const chaos_note note = {.kind = NOTE_MANNER, .manner = manner, .ms = ms};
    const run_worker *one = &run->worker[at];
    if (one->player.pid != 0 && !note_send(one->player.line, &note))
        run_fail(run, "%s does not hear", one->name);
}

static void take_key(chaos_run *run, const chaos_deed *deed)
{
    char key[16];
    run_worker *one = &run->worker[deed->worker];
    if (!run->keys || one->shut) return;
    run_key_name(deed->worker, key);
    locksmith_revoke(&run->smith, key);
    one->shut = true;
    one->revoked = true;
    mend_later(run, DEED_REVOKE, deed->worker, deed->ms);
}

static void give_key_back(chaos_run *run, uint32_t at)
{
    char key[16];
    run_worker *one = &run->worker[at];
    run_key_name(at, key);
    locksmith_allow(&run->smith, key);
    one->shut = false;
    if (one->banished) run_start_worker(run, at);
    one->banished = false;
}

static void move_clock(chaos_run *run, const chaos_deed *deed)
{
    int64_t minutes = deed->amount;
    const chaos_note note = {.kind = NOTE_CLOCK,
                             .seconds = minutes % 2 == 0 ? minutes * 60 : -minutes * 60};
    const run_worker *one = &run->worker[deed->worker];
    if (one->player.pid != 0) (void)note_send(one->player.line, &note);
}

/* ---- The trainer */

static void kill_trainer(chaos_run *run, const chaos_deed *deed)
{
    if (run->trainer.pid == 0) return;
    stop_and_hear(run, &run->trainer);
    player_kill(&run->trainer);
    for (uint32_t i = 0; i < run->ledger.count; i++) {
        if (run->ledger.entries[i].fate == ENTRY_OPEN) run->ledger.entries[i].fate = ENTRY_UNKNOWN;
    }
    run->round.open = false;
    run->trainer_ready = false;
    run->committed = run->served = 0;
    mend_later(run, DEED_KILL_TRAINER, 0, deed->ms);
}

static void stop_trainer(chaos_run *run, const chaos_deed *deed)
{
    if (run->trainer.pid == 0 || run->trainer.stopped) return;
    player_stop(&run->trainer);
    run->round.stopped_ms += deed->ms;
    mend_later(run, DEED_STOP_TRAINER, 0, deed->ms);
}

/* These two are between versions. */
static void ask_trainer(chaos_run *run, chaos_note_kind kind, uint32_t seed)
{
    const chaos_note note = {.kind = kind, .digest = seed};
    if (run->trainer.pid == 0 || run->round.open) return;
    run->trainer_ready = false;
    run->served = 0;
    if (!note_send(run->trainer.line, &note)) run_fail(run, "the trainer does not hear");
    if (kind != NOTE_REOPEN) return;
    run->trainers++;
    run_number_versions(run);
}

static void kill_all(chaos_run *run, const chaos_deed *deed)
{
    for (uint32_t i = 0; i < run->plan.workers; i++)
        kill_worker(run, i, deed);
}

/* ---- Attackers */

/* Without keys a name belongs to the worker that claims it first: the worker that has it may be
 * kept out as long as a liar beats in its name, and what is said of that name is not the worker's
 * doing. */
static void excuse_claimed(chaos_run *run, const chaos_deed *deed)
{
    bool claims = deed->kind == DEED_LIAR && deed->amount == LIAR_CLAIMS_NAMES;
    if (!claims || run->keys) return;
    run->claimed |= 1u << deed->worker;
    run->round.claimed |= run->claimed;
    mend_later(run, DEED_LIAR, deed->worker, deed->ms + ACTOR_HEARTBEAT_TIMEOUT);
}

static void attack_trainer(chaos_run *run, const chaos_deed *deed)
{
    attacker_role role = ROLE_STRANGER;
    if (deed->kind == DEED_EVICTED) role = ROLE_EVICTED;
    if (deed->kind == DEED_LIAR) role = ROLE_LIAR;
    chaos_note order = {.kind = NOTE_ATTACK,
                        .manner = deed->amount,
                        .worker = deed->worker,
                        .digest = run->plan.model + deed->at_ms + deed->ms,
                        .ms = deed->ms};
    snprintf(order.text, sizeof order.text, "%s", run->endpoint);
    excuse_claimed(run, deed);
    if (!note_send(run->attackers[role].line, &order)) run_fail(run, "an attacker does not hear");
}

/* ---- All of them */

static void do_to_worker(chaos_run *run, const chaos_deed *deed)
{
    uint32_t at = deed->worker;
    switch (deed->kind) {
    case DEED_KILL: kill_worker(run, at, deed); break;
    case DEED_LEAVE: dismiss_worker(run, deed); break;
    case DEED_STOP: stop_worker(run, deed); break;
    case DEED_SLOW: set_manner(run, at, MANNER_SLOW, deed->amount); break;
    case DEED_REFUSE_KEPT: set_manner(run, at, MANNER_REFUSE_KEPT, 0); break;
    case DEED_REFUSE_LOST: set_manner(run, at, MANNER_REFUSE_LOST, 0); break;
    case DEED_HOLD: set_manner(run, at, MANNER_HOLD, deed->amount); break;
    case DEED_REVOKE: take_key(run, deed); break;
    case DEED_CLOCK: move_clock(run, deed); break;
    default: break;
    }
    if (deed->kind != DEED_DEAF || run->worker[at].player.pid == 0) return;
    set_manner(run, at, MANNER_DEAF, 0);
    mend_later(run, DEED_DEAF, at, deed->ms);
}

static void do_to_link(chaos_run *run, const chaos_deed *deed)
{
    static const proxy_fault faults[DEED_KINDS] = {
        [DEED_DELAY] = FAULT_DELAY,         [DEED_THROTTLE] = FAULT_RATE,
        [DEED_RESET] = FAULT_RESET,         [DEED_CLOSE] = FAULT_CLOSE,
        [DEED_HALF_DOWN] = FAULT_HALF_DOWN, [DEED_HALF_UP] = FAULT_HALF_UP,
        [DEED_HOLE] = FAULT_HOLE,           [DEED_FLIP_DOWN] = FAULT_FLIP_DOWN,
        [DEED_FLIP_UP] = FAULT_FLIP_UP,
    };
    uint64_t amount = deed->amount;
    if (deed->kind == DEED_THROTTLE) amount *= 1000;
    if (deed->kind == DEED_HOLE) amount = 1;
    if (deed->kind == DEED_FLIP_DOWN || deed->kind == DEED_FLIP_UP)
        run->worker[deed->worker].flipped = true;
    run_link(run, deed->worker, faults[deed->kind], amount);
    bool lasts = deed->kind == DEED_DELAY || deed->kind == DEED_THROTTLE || deed->kind == DEED_HOLE;
    if (lasts) mend_later(run, deed->kind, deed->worker, deed->ms);
}

static void do_to_trainer(chaos_run *run, const chaos_deed *deed)
{
    switch (deed->kind) {
    case DEED_KILL_TRAINER: kill_trainer(run, deed); break;
    case DEED_STOP_TRAINER: stop_trainer(run, deed); break;
    case DEED_REOPEN: ask_trainer(run, NOTE_REOPEN, 0); break;
    case DEED_DECLARE: ask_trainer(run, NOTE_DECLARE, deed->at_ms + deed->worker); break;
    case DEED_CANCEL:
        if (run->trainer.pid != 0) (void)kill(run->trainer.pid, SIGUSR1);
        break;
    case DEED_KILL_ALL: kill_all(run, deed); break;
    default: break;
    }
}

void deed_do(chaos_run *run, const chaos_deed *deed)
{
    char *text = NULL;
    size_t size = 0;
    FILE *words = open_memstream(&text, &size);
    plan_print_deed(deed, words);
    fclose(words);
    run_say(run, "* %s", text);
    free(text);
    run->totals.deeds++;
    switch (deed_target(deed->kind)) {
    case TARGET_WORKER: do_to_worker(run, deed); break;
    case TARGET_LINK: do_to_link(run, deed); break;
    case TARGET_TRAINER: do_to_trainer(run, deed); break;
    case TARGET_ATTACK: attack_trainer(run, deed); break;
    }
}

/* ---- Mending */

static void mend(chaos_run *run, const run_mend *what)
{
    run_worker *one = &run->worker[what->worker];
    switch (what->kind) {
    case DEED_KILL:
    case DEED_LEAVE: run_start_worker(run, what->worker); break;
    case DEED_STOP:
        if (one->player.pid != 0 && one->player.stopped) player_continue(&one->player);
        break;
    case DEED_REVOKE: give_key_back(run, what->worker); break;
    case DEED_DEAF: set_manner(run, what->worker, MANNER_PLAIN, 0); break;
    case DEED_DELAY: run_link(run, what->worker, FAULT_DELAY, 0); break;
    case DEED_THROTTLE: run_link(run, what->worker, FAULT_RATE, 0); break;
    case DEED_HOLE: run_link(run, what->worker, FAULT_HOLE, 0); break;
    case DEED_LIAR: run->claimed &= ~(1u << what->worker); break;
    case DEED_KILL_TRAINER: run_start_trainer(run); break;
    case DEED_STOP_TRAINER:
        if (run->trainer.pid != 0 && run->trainer.stopped) player_continue(&run->trainer);
        break;
    default: break;
    }
    if (what->kind == DEED_KILL_TRAINER || what->kind == DEED_STOP_TRAINER) {
        run_say(run, "+ the trainer is back");
        return;
    }
    one->ills--;
    run_say(run, "+ %s is mended", one->name);
}

void deed_mend(chaos_run *run, bool all)
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

int64_t deed_next_mend(const chaos_run *run)
{
    int64_t first = rft_deadline(1000);
    for (uint32_t i = 0; i < run->mend_count; i++) {
        if (run->mends[i].due < first) first = run->mends[i].due;
    }
    return first;
}
