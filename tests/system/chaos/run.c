/* Hears the processes: one poll over all lines, and the clock for what is to be mended. */
#include "run.h"

#include <arpa/inet.h>
#include <inttypes.h>
#include <poll.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

#define TIMEOUT_MS 60000u

uint32_t run_timeout_ms(void)
{
    return TIMEOUT_MS;
}

/* ---- Saying */

static void say_time(chaos_run *run)
{
    fprintf(run->log, "%8.1f ms  ", (double)(rft_now() - run->began) * 1e-6);
}

void run_say(chaos_run *run, const char *format, ...)
{
    va_list arguments;
    say_time(run);
    va_start(arguments, format);
    vfprintf(run->log, format, arguments);
    va_end(arguments);
    fputc('\n', run->log);
}

static void say_workers(chaos_run *run)
{
    for (uint32_t i = 0; i < run->plan.workers; i++) {
        const run_worker *one = &run->worker[i];
        run_say(run,
                "%s: %s%s, version %" PRIu64 ", open %" PRIu64 ", refused %" PRIu64 ", %" PRIu32
                " faults to mend",
                one->name, one->process.pid == 0 ? "gone" : "there",
                one->process.stopped ? ", stopped" : "", one->version, one->taken, one->kept,
                one->open_faults);
    }
}

void run_fail(chaos_run *run, const char *format, ...)
{
    va_list arguments;
    char *log_text = NULL;
    say_workers(run);
    say_time(run);
    fprintf(run->log, "WRONG: ");
    va_start(arguments, format);
    vfprintf(run->log, format, arguments);
    va_end(arguments);
    fputc('\n', run->log);
    fflush(run->log);
    if (!run->options->verbose) {
        rewind(run->log);
        size_t size = 0;
        while (getline(&log_text, &size, run->log) >= 0)
            fputs(log_text, stdout);
    }
    free(log_text);
    fflush(stdout);
    exit(1);
}

/* ---- The trainer's words */

static int worker_of_name(const chaos_run *run, const char *name)
{
    unsigned number;
    if (sscanf(name, "w%u", &number) != 1 || number >= run->plan.workers) return -1;
    return (int)number;
}

static bool any_flipped(const chaos_run *run)
{
    if (run->garbled) return true;
    for (uint32_t i = 0; i < run->plan.workers; i++) {
        if (run->worker[i].flipped) return true;
    }
    return false;
}

/* Where it is shared memory alone that cannot be had, no worker fails for that. */
static void hear_scarce(chaos_run *run, uint32_t at)
{
    bool claimed = (run->round.claimed >> at & 1u) != 0;
    if (!run->worker[at].was_scarce && !claimed)
        run_fail(run, "%s has no memory for a version, which is not scarce", run->worker[at].name);
    run->totals.refused++;
}

static void hear_member(chaos_run *run, const chaos_note *note)
{
    ledger_result *result = &run->round.result;
    int worker = worker_of_name(run, note->name);
    bool committed = (note->flags & MEMBER_COMMITTED) != 0;
    run_say(run, "  %s:%s%s%s, at %" PRIu64 " %s %s", note->name,
            (note->flags & MEMBER_SUBSCRIBED) != 0 ? " subscribed" : " gone",
            (note->flags & MEMBER_COUNTED) != 0 ? ", counted" : "",
            committed ? ", has applied it" : "", note->amount,
            note->status != REFIT_OK ? refit_status_name((refit_status)note->status) : "",
            note->text);
    bool attacker = note->name[0] == ATTACKER_LIAR[0];
    if (worker >= 0) users_judge_path(run, (uint32_t)worker, (refit_path)note->manner);
    bool lacks = note->status == REFIT_ERR_HOST_MEMORY || note->status == REFIT_ERR_SYSTEM;
    if (worker >= 0 && lacks) hear_scarce(run, (uint32_t)worker);
    if (worker < 0 && !attacker && !any_flipped(run))
        run_fail(run, "no worker is called %s", note->name);
    if ((note->flags & MEMBER_COUNTED) != 0) result->counted++;
    if ((note->flags & MEMBER_COUNTED) != 0 &&
        (note->manner == REFIT_PATH_SHM || note->manner == REFIT_PATH_SOCKET))
        run->round.hosted = true;
    if ((note->flags & MEMBER_COUNTED) != 0 && committed) result->applied++;
    if (worker >= 0 && committed) result->names |= 1u << worker;
}

static void hear_workers(chaos_run *run);

/* A version is served from its copies. Those on the GPU go with any begin that finds no worker
 * there, and with one slot the version before goes with one that fails, if either had no other. */
static void keep_served(chaos_run *run, const chaos_note *done)
{
    run_round *round = &run->round;
    bool one_slot = run->plan.slots == 1 && !round->hosted;
    if (done->amount != done->version) {
        if (run->gpu && (!run->hosted || one_slot)) run->served = 0;
        return;
    }
    run->served = done->amount;
    run->hosted = round->hosted || !run->gpu;
    run->passes = round->passes;
    run->has = round->result.names;
    for (uint32_t i = 0; i < run->plan.workers; i++) {
        /* One that had it may have been killed, and replaced, before the trainer was done. */
        if (run->worker[i].version == 0 && run->worker[i].taken == 0) run->has &= ~(1u << i);
    }
}

/* A worker announces a version before the trainer counts it: the workers are heard first. */
static void judge_done(chaos_run *run)
{
    char complaint[LEDGER_COMPLAINT];
    const chaos_note *note = &run->round.done;
    if (!run->round.open || note->kind != NOTE_DONE) return;
    hear_workers(run);
    ledger_result *result = &run->round.result;
    result->names &= ~run->round.claimed; /* what an attacker said in a worker's name */
    result->status = note->status;
    result->committed = note->amount;
    result->before = run->committed;
    result->quorum = run->plan.quorum;
    result->late = run->plan.late;
    if (!ledger_ends(&run->ledger, result, complaint)) run_fail(run, "%s", complaint);
    run->committed = note->amount;
    for (int i = 0; i < 3 && note->amount == note->version; i++)
        run->totals.blocks[i] += note->blocks[i];
    keep_served(run, note);
    if (note->amount == note->version) run->totals.committed++;
    if (note->amount != note->version) run->totals.aborted++;
    uint32_t most = ACTOR_STAGE_TIMEOUT + ACTOR_COMMIT_TIMEOUT + run->round.stopped_ms;
    if (note->ms > most + TIMEOUT_MS || run->round.begin_ms > most + TIMEOUT_MS)
        run_fail(run, "the trainer waited %u ms in begin and %u ms after it", run->round.begin_ms,
                 note->ms);
    run->round.open = false;
}

static void hear_done(chaos_run *run, const chaos_note *note)
{
    run_say(run, "version %" PRIu64 ": %s after %u ms, the trainer is at %" PRIu64 " %s",
            note->version, refit_status_name((refit_status)note->status), note->ms, note->amount,
            note->text);
    run->round.done = *note;
}

static void hear_written(chaos_run *run, const chaos_note *note)
{
    ledger_entry *entry = ledger_find(&run->ledger, note->version);
    if (entry == NULL) run_fail(run, "version %" PRIu64 " never began", note->version);
    entry->digest = note->digest;
    entry->written = true; /* rank 0's word comes before its part, and so before any worker's */
    run_say(run, "version %" PRIu64 " is written: %016" PRIx64, note->version, note->digest);
}

static void hear_parts(chaos_run *run, const chaos_note *note)
{
    ledger_entry *entry = ledger_find(&run->ledger, note->version);
    if (entry == NULL) run_fail(run, "version %" PRIu64 " never began", note->version);
    entry->parts[note->worker] = note->digest;
}

static void hear_ready(chaos_run *run, const chaos_note *note)
{
    if (note->status != REFIT_OK)
        run_fail(run, "the trainer: %s: %s", refit_status_name((refit_status)note->status),
                 note->text);
    run->trainer_ready = true;
    run_say(run, "the trainer is ready");
    if (note->text[0] == '\0') return;
    snprintf(run->rank[0].endpoint, sizeof run->rank[0].endpoint, "%s", note->text);
    snprintf(run->endpoint, sizeof run->endpoint, "%s", note->text);
    run_tell_proxy(run, 0);
}

static void trainer_says(chaos_run *run, const chaos_note *note)
{
    if (run->plan.ranks > 1) ranks_hear(run, 0, note);
    switch (note->kind) {
    case NOTE_READY: hear_ready(run, note); break;
    case NOTE_WAITED:
        if (note->status != REFIT_OK) run_say(run, "not all are subscribed: %s", note->text);
        if (note->ms > run->wait_ms + run->round.stopped_ms + TIMEOUT_MS)
            run_fail(run, "the trainer waited %u ms for workers, instead of %u", note->ms,
                     run->wait_ms);
        ranks_order_version(run);
        break;
    case NOTE_BEGUN:
        run->round.begin_ms = note->ms;
        if (note->status != REFIT_OK)
            run_say(run, "begin: %s %s", refit_status_name((refit_status)note->status), note->text);
        break;
    case NOTE_PARTS: hear_parts(run, note); break;
    case NOTE_WRITTEN: hear_written(run, note); break;
    case NOTE_MEMBER: hear_member(run, note); break;
    case NOTE_DONE: hear_done(run, note); break;
    case NOTE_COUNTED: run->trainer_count = *note; break;
    case NOTE_LOG: run_say(run, "trainer says: %s", note->text); break;
    default: break;
    }
}

/* All that it has said so far. */
static void hear_trainer(chaos_run *run)
{
    chaos_note note;
    int got = 0;
    while (run->trainer.pid != 0 && (got = note_receive(run->trainer.line, &note)) > 0)
        trainer_says(run, &note);
    if (got < 0) run_fail(run, "the trainer's process has died");
}

/* ---- The workers' words */

static void has_nothing(chaos_run *run, uint32_t at)
{
    run->worker[at].version = run->worker[at].taken = 0;
    run->has &= ~(1u << at);
}

/* Whether the trainer may have changed what it lent, or copied, to the GPU for a version. */
static bool is_over(chaos_run *run, uint64_t version)
{
    hear_trainer(run);
    const ledger_entry *entry = ledger_find(&run->ledger, version);
    const chaos_note *done = &run->round.done;
    bool ended = done->kind == NOTE_DONE && done->version == version;
    return entry != NULL && (entry->fate != ENTRY_OPEN || ended);
}

/* A worker on the GPU could not load a version that ended without it, or came to nothing. */
static void hear_lost(chaos_run *run, uint32_t at, const chaos_note *note)
{
    run_worker *one = &run->worker[at];
    bool streamed = (note->flags & TAKEN_STREAMED) != 0;
    bool late = note->status == REFIT_ERR_TIMEOUT && run->plan.each[at].gpu;
    bool torn = note->status == REFIT_ERR_CORRUPT && (streamed || is_over(run, note->version));
    bool given_up = note->status == REFIT_ERR_NOT_FOUND;
    bool flipped = note->status == REFIT_ERR_PROTOCOL && one->flipped && !run->keys;
    bool failed = streamed && (note->status == REFIT_ERR_CANCELLED ||
                               note->status == REFIT_ERR_CLOSED || flipped || given_up);
    run_say(run, "%s cannot load version %" PRIu64 "%s: %s %s", one->name, note->version,
            streamed ? ", streamed" : "", refit_status_name((refit_status)note->status),
            note->text);
    if (!late && !((note->flags & TAKEN_ON_GPU) != 0 && (torn || failed)))
        run_fail(run, "%s cannot load version %" PRIu64, one->name, note->version);
    has_nothing(run, at);
    if (streamed) one->lost = run->next;
    run->totals.lost++;
}

static void hear_decided(chaos_run *run, uint32_t at, const chaos_note *note)
{
    char complaint[LEDGER_COMPLAINT];
    run_worker *one = &run->worker[at];
    bool kept = note->manner == MANNER_REFUSE_KEPT, lost = note->manner == MANNER_REFUSE_LOST;
    bool streamed = (note->flags & TAKEN_STREAMED) != 0;
    bool failed =
        streamed && (note->status == REFIT_ERR_CANCELLED || note->status == REFIT_ERR_CLOSED);
    lost = lost || (kept && streamed);
    one->taken = 0;
    if (note->status == REFIT_ERR_STALE || failed || (lost && note->status == REFIT_OK)) {
        run_say(run, "%s has nothing: %s %s", one->name,
                lost ? "refused" : refit_status_name((refit_status)note->status), note->text);
        has_nothing(run, at);
        if (streamed) one->lost = run->next;
        return;
    }
    if (note->status != REFIT_OK)
        run_fail(run, "%s cannot decide: %s %s", one->name,
                 refit_status_name((refit_status)note->status), note->text);
    if (kept) {
        run_say(run, "%s refused version %" PRIu64, one->name, note->version);
        one->kept = note->version;
        return;
    }
    hear_trainer(run); /* what it wrote it said before */
    if (!ledger_accepts(&run->ledger, at, note->version, one->digest, complaint))
        run_fail(run, "%s", complaint);
    const ledger_entry *before = ledger_find(&run->ledger, one->version);
    const ledger_entry *now = ledger_find(&run->ledger, note->version);
    if (before != NULL && before->trainer == now->trainer && before->number > now->number)
        run_fail(run, "%s went back from version %" PRIu64 " to %" PRIu64, one->name,
                 before->number, now->number);
    one->version = note->version;
}

static void hear_decides(chaos_run *run, uint32_t at, const chaos_note *note)
{
    if (note->manner == MANNER_REFUSE_KEPT || note->manner == MANNER_REFUSE_LOST) return;
    ledger_entry *entry = ledger_find(&run->ledger, note->version);
    if (entry != NULL) entry->announced |= 1u << at;
    if (note->version == run->order.version) run->round.decided = true;
}

static void hear_taken(chaos_run *run, uint32_t at, const chaos_note *note)
{
    run_worker *one = &run->worker[at];
    if (note->ms > TIMEOUT_MS) run_fail(run, "%s waited %u ms for 20", one->name, note->ms);
    if (note->version == 0) return;
    users_judge(run, at);
    run->totals.parts += run->plan.each[at].parts;
    one->taken = note->version;
    one->digest = note->digest;
    if ((note->flags & TAKEN_ON_GPU) != 0) run->totals.on_gpu++;
    if ((note->flags & TAKEN_STREAMED) != 0) run->totals.streamed++;
    if ((note->flags & TAKEN_FROM_NEIGHBOR) != 0) run->totals.mapped++;
}

/* A flipped bit may make the trainer refuse a worker for good; a key that was taken back must. */
static void hear_ended(chaos_run *run, uint32_t at, const chaos_note *note)
{
    run_worker *one = &run->worker[at];
    bool expected = one->revoked && note->status == REFIT_ERR_SECURITY;
    if (!one->flipped && !expected)
        run_fail(run, "%s was refused for good: %s %s", one->name,
                 refit_status_name((refit_status)note->status), note->text);
    run_say(run, "%s was refused for good: %s", one->name, note->text);
    if (one->leaving) return; /* its end is awaited */
    process_kill(&one->process);
    one->removed = one->shut;
    if (!one->removed) run_start_worker(run, at);
}

static void worker_says(chaos_run *run, uint32_t at, const chaos_note *note)
{
    run_worker *one = &run->worker[at];
    switch (note->kind) {
    case NOTE_READY:
        if (note->status != REFIT_OK) run_fail(run, "%s: %s", one->name, note->text);
        one->ready = true;
        break;
    case NOTE_TAKEN: hear_taken(run, at, note); break;
    case NOTE_LOST: hear_lost(run, at, note); break;
    case NOTE_DECIDES: hear_decides(run, at, note); break;
    case NOTE_DECIDED: hear_decided(run, at, note); break;
    case NOTE_ENDED: hear_ended(run, at, note); break;
    case NOTE_COUNTS: run->totals.damaged += note->amount; break;
    case NOTE_COUNTED: one->count = *note; break;
    case NOTE_GONE:
        if (note->amount != 0)
            run_fail(run, "%s leaks %" PRIu64 " allocations", one->name, note->amount);
        break;
    case NOTE_LOG:
        run_say(run, "%s says: %s", one->name, note->text);
        run->totals.unshared += strstr(note->text, "is not shared with other workers") != NULL;
        break;
    default: break;
    }
}

static void hear_worker(chaos_run *run, uint32_t at)
{
    chaos_note note;
    run_worker *one = &run->worker[at];
    int got = 0;
    while (one->process.pid != 0 && (got = note_receive(one->process.line, &note)) > 0)
        worker_says(run, at, &note);
    if (one->process.pid == 0 || got >= 0) return;
    if (!one->leaving) run_fail(run, "the process of %s has died", one->name);
    if (!process_await_end(&one->process, TIMEOUT_MS)) run_fail(run, "%s ends badly", one->name);
    one->leaving = false;
}

static void hear_workers(chaos_run *run)
{
    for (uint32_t i = 0; i < run->plan.workers; i++)
        hear_worker(run, i);
}

/* They say nothing that matters, but live as long as the run. */
static void hear_attackers(chaos_run *run)
{
    chaos_note note;
    for (uint32_t i = 0; i < ROLES; i++) {
        int got;
        while ((got = note_receive(run->attackers[i].line, &note)) > 0) {
            if (note.kind == NOTE_LOG) run_say(run, "attacker %u says: %s", i, note.text);
        }
        if (got < 0) run_fail(run, "the process of an attacker has died");
    }
}

void run_end_attacks(chaos_run *run)
{
    const chaos_note end = {.kind = NOTE_ATTACK};
    for (uint32_t i = 0; i < ROLES; i++) {
        if (!note_send(run->attackers[i].line, &end)) run_fail(run, "an attacker does not hear");
    }
}

/* ---- All of them */

void run_hear(chaos_run *run)
{
    hear_trainer(run);
    ranks_hear_all(run);
    hear_workers(run);
    hear_attackers(run);
    judge_done(run);
}

void run_pump(chaos_run *run, int timeout_ms)
{
    struct pollfd items[WORKERS_MOST + ROLES + RANKS_MOST + 2];
    uint32_t count = 0;
    int until = rft_ms_until(action_next_mend(run));
    if (until < timeout_ms) timeout_ms = until;
    for (uint32_t i = 0; i < run->plan.workers; i++) {
        const process *one = &run->worker[i].process;
        items[count++] = (struct pollfd){.fd = one->pid != 0 ? one->line : -1, .events = POLLIN};
    }
    for (uint32_t i = 1; i < run->plan.ranks; i++) {
        const process *one = &run->rank[i].process;
        items[count++] = (struct pollfd){.fd = one->pid != 0 ? one->line : -1, .events = POLLIN};
    }
    for (uint32_t i = 0; i < ROLES; i++)
        items[count++] = (struct pollfd){.fd = run->attackers[i].line, .events = POLLIN};
    items[count++] =
        (struct pollfd){.fd = run->trainer.pid != 0 ? run->trainer.line : -1, .events = POLLIN};
    items[count++] = (struct pollfd){.fd = run->proxy.line, .events = POLLIN};
    (void)poll(items, count, timeout_ms);
    run_hear(run);
    if (items[count - 1].revents != 0) run_fail(run, "the proxy's process has died");
    action_mend(run, false);
}

/* ---- Starting */

void run_key_name(uint32_t worker, char name[16])
{
    snprintf(name, 16, "w%" PRIu32, worker);
}

static actor_part make_part(const chaos_run *run)
{
    return (actor_part){.plan = &run->plan, .smith = run->keys ? &run->smith : NULL};
}

void run_number_versions(chaos_run *run)
{
    uint64_t apart = (uint64_t)LEDGER_MOST * run->trainers;
    run->committed = run->served = 0;
    for (uint32_t i = 0; i < run->plan.workers; i++)
        run->worker[i].lost = 0;
    run->next = run->plan.numbers_fall ? UINT64_C(1000000000) - apart : apart;
}

void run_start_trainer(chaos_run *run)
{
    actor_part part = make_part(run);
    part.number = run->trainers++;
    part.gpu = run->gpu;
    snprintf(part.endpoint, sizeof part.endpoint, "%s", run->endpoint);
    run->trainer_ready = false;
    ranks_unshard(run);
    run_number_versions(run);
    if (!process_start(&run->trainer, trainer_run, &part, NULL))
        run_fail(run, "a process could not be started");
}

void run_start_worker(chaos_run *run, uint32_t worker)
{
    run_worker *one = &run->worker[worker];
    actor_part part = make_part(run);
    char address[INET_ADDRSTRLEN] = "";
    inet_ntop(AF_INET, &run->address, address, sizeof address);
    part.number = worker;
    part.gpu = run->gpu && run->plan.each[worker].gpu;
    part.boot_clock = run->boot_clocks && run->plan.each[worker].boot_clock_s != 0;
    snprintf(part.name, sizeof part.name, "%s", one->name);
    part.address = run->address;
    part.user = users_of(run, worker);
    memcpy(part.ports, one->ports, sizeof part.ports);
    snprintf(part.endpoint, sizeof part.endpoint, "tcp://%s:%u", address, one->ports[0]);
    run_key_name(worker, part.key);
    one->times++;
    one->revoked = one->shut;
    one->kept = one->lost = 0;
    has_nothing(run, worker);
    one->ready = one->scarce = false;
    if (!process_start(&one->process, worker_run, &part, NULL))
        run_fail(run, "a process could not be started");
}

uint32_t run_link_number(const chaos_run *run, uint32_t of, uint32_t to)
{
    const chaos_plan *plan = &run->plan;
    uint32_t each = plan->linked ? plan->ranks : 1;
    return of < OF_RANKS ? of * each + to : plan->workers * each + of - OF_RANKS - 1;
}

void run_tell_proxy(chaos_run *run, uint32_t rank)
{
    chaos_note upstream = {.kind = NOTE_UPSTREAM, .worker = rank};
    const char *endpoint = run->rank[rank].endpoint;
    const char *port = strrchr(endpoint, ':');
    upstream.amount = strtoull(port + 1, NULL, 10);
    snprintf(upstream.name, sizeof upstream.name, "%.*s", (int)(port - endpoint - 6),
             endpoint + 6); /* after tcp:// */
    (void)note_send(run->proxy.line, &upstream);
}

void run_link(chaos_run *run, uint32_t number, proxy_fault fault, uint64_t amount)
{
    const chaos_note note = {.kind = NOTE_LINK, .worker = number, .fault = fault, .amount = amount};
    if (!note_send(run->proxy.line, &note)) run_fail(run, "the proxy does not listen");
}
