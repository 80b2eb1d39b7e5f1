/* The run from its first version to its last, and what must hold after each. */
#include "run.h"

#include <arpa/inet.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "clocks.h"

#define QUIET_MS      150000u
#define QUIET_WAIT    3000u
#define QUIET_ROUNDS  3u
#define LATE_VERSIONS 3u    /* with plan.late, after so many all workers are to be current */
#define FLIPPED_MS    1500u /* after which a flipped bit may excuse a worker */
#define MISSES_MOST   3u
#define RESIDENT_ROOM (UINT64_C(6) << 20)
#define PLANT_BYTES   (UINT64_C(10) << 20)

/* ---- Waiting */

static bool trainer_is_ready(const chaos_run *run, const void *what)
{
    (void)what;
    return run->trainer.pid != 0 && run->trainer_ready && ranks_are_ready(run);
}

static bool shards_are_told(const chaos_run *run, const void *what)
{
    (void)what;
    return ranks_have_answered(run);
}

static bool round_is_over(const chaos_run *run, const void *what)
{
    (void)what;
    return !run->round.open && ranks_are_done(run);
}

/* A version is gone, for a worker that came late, with what the trainer lent for it. One that has
 * no copy on the host is not for workers elsewhere, either. */
static bool is_gone_for(const chaos_run *run, uint32_t worker)
{
    bool gone = !run->hosted && (run->passes || !run->plan.each[worker].gpu);
    return gone && (run->has >> worker & 1u) == 0;
}

/* Whether the worker need not have the version that is served. */
static bool may_lack(const chaos_run *run, uint32_t worker)
{
    const run_worker *one = &run->worker[worker];
    return one->open_faults != 0 || one->kept == run->served || run->served <= one->lost ||
           is_gone_for(run, worker);
}

/* Every worker that is well holds the trainer's version. That its bytes are the trainer's was seen
 * when it accepted them. */
static bool all_are_current(const chaos_run *run, const void *what)
{
    (void)what;
    if (run->served == 0) return true;
    for (uint32_t i = 0; i < run->plan.workers; i++) {
        if (!may_lack(run, i) && run->worker[i].version != run->served) return false;
    }
    return true;
}

/* A bit of a message that no hash covers (of a digest, say) costs the worker that version, as its
 * trainer knows: it is offered the next one. */
static void excuse_flipped(chaos_run *run)
{
    for (uint32_t i = 0; i < run->plan.workers; i++) {
        run_worker *one = &run->worker[i];
        if (one->version == run->served) one->missed = 0;
        if (run->keys) continue; /* then no bit is covered by nothing */
        bool misses = one->version != run->served && !may_lack(run, i);
        if (!misses || !one->flipped || one->missed == MISSES_MOST) continue;
        run_say(run, "%s lacks version %" PRIu64 " after a flipped bit", one->name, run->served);
        one->kept = run->served;
        one->missed++;
        run->totals.missed++;
    }
}

static void await(chaos_run *run, bool (*holds)(const chaos_run *run, const void *what),
                  uint32_t timeout_ms, const char *complaint)
{
    int64_t deadline = rft_deadline(timeout_ms);
    while (!holds(run, NULL)) {
        int left = rft_ms_until(deadline);
        if (left == 0) run_fail(run, "%s", complaint);
        run_pump(run, left);
    }
}

static void await_processes(chaos_run *run)
{
    await(run, trainer_is_ready, run_timeout_ms() + 3000,
          "no trainer has started before the deadline");
}

static void await_shards(chaos_run *run)
{
    await(run, shards_are_told, run_timeout_ms() + 3000,
          "a rank does not say whether its shard was taken");
    ranks_conclude_shards(run);
}

/* On a busy machine the ranks may lose each other while they join. */
static void await_trainer(chaos_run *run)
{
    int64_t deadline = rft_deadline(run_timeout_ms());
    await_processes(run);
    while (run->plan.ranks > 1 && !run->sharded) {
        if (rft_ms_until(deadline) == 0) run_fail(run, "the ranks do not come together");
        ranks_order_shards(run);
        await_shards(run);
        await_processes(run);
    }
}

/* Harm that comes while ranks say which shards they have. */
static void harm_shards(chaos_run *run, const chaos_action *action)
{
    int64_t due = rft_deadline(action->after_ms);
    await_processes(run);
    ranks_order_shards(run);
    while (rft_ms_until(due) > 0)
        run_pump(run, rft_ms_until(due));
    action_do(run, action);
    await_shards(run);
}

static void await_current(chaos_run *run)
{
    int64_t excused = rft_deadline(FLIPPED_MS);
    while (!all_are_current(run, NULL) && rft_ms_until(excused) > 0)
        run_pump(run, rft_ms_until(excused));
    if (run->served != 0) excuse_flipped(run);
    await(run, all_are_current, run_timeout_ms() + 4000,
          "a worker that is well does not hold the trainer's version");
}

/* ---- A version */

static uint32_t count_well(const chaos_run *run)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < run->plan.workers; i++)
        count += run->worker[i].open_faults == 0;
    return count;
}

static void order_version(chaos_run *run, const chaos_version_plan *version)
{
    chaos_note order = {.kind = NOTE_PUBLISH,
                        .version = ++run->next,
                        .digest = version->change,
                        .rate = version->rate,
                        .fate = version->fate,
                        .manner = version->way,
                        .amount = count_well(run),
                        .ms = version->wait_ms,
                        .pause_us = version->pause_us};
    run->wait_ms = version->wait_ms;
    ranks_begin(run, &order, version->aborts);
    run->round =
        (run_round){.open = true, .claimed = run->claimed, .result = {.number = order.version}};
    bool small = run->plan.bucket_kib < MODEL_LEAST_KIB, lends = version->way >= WAY_LENT;
    run->round.passes = !run->plan.gpu_stores && !run->plan.late && (lends || small);
    ledger_entry *entry = ledger_add(&run->ledger, order.version, run->trainers);
    if (entry == NULL) run_fail(run, "the harness has no room for a version");
    run_say(run, "version %" PRIu64 " begins, %s changes, %s%s", order.version,
            model_rate_name(version->rate), way_name(version->way),
            version->fate == FATE_ABORT ? ", to be aborted" : "");
    order = ranks_order_of(run, 0);
    if (!note_send(run->trainer.line, &order)) run_fail(run, "the trainer does not hear");
    if (order.ms == 0) ranks_order_version(run);
}

/* Until a rank has come so far with the version, and then a little. */
static void await_phase(chaos_run *run, const chaos_action *action)
{
    while (!ranks_reached(run, action) && !round_is_over(run, NULL))
        run_pump(run, 1000);
    int64_t due = rft_deadline(action->after_ms);
    while (rft_ms_until(due) > 0)
        run_pump(run, rft_ms_until(due));
}

/* Does what the plan has for the version, each action in its time. */
static void play_actions(chaos_run *run, const chaos_version_plan *version)
{
    int64_t began = rft_now();
    for (uint32_t i = 0; i < version->actions; i++) {
        const chaos_action *action = &run->plan.actions[version->first + i];
        int64_t due = rft_after_ms(began, action->at_ms);
        while (action->at_ms != 0 && rft_ms_until(due) > 0 && run->round.open)
            run_pump(run, rft_ms_until(due));
        if (action->phase > PHASE_SHARD) await_phase(run, action);
        if (action->at_ms != 0) action_do(run, action);
    }
}

static void play_version(chaos_run *run, const chaos_version_plan *version)
{
    for (uint32_t i = 0; i < version->actions; i++) {
        const chaos_action *action = &run->plan.actions[version->first + i];
        if (action->at_ms != 0) break;
        if (action->phase == PHASE_SHARD) harm_shards(run, action);
        if (action->phase != PHASE_SHARD) action_do(run, action);
        await_trainer(run);
    }
    await_trainer(run);
    order_version(run, version);
    play_actions(run, version);
    await(run, round_is_over,
          run_timeout_ms() + run->wait_ms + 2 * (ACTOR_STAGE_TIMEOUT + ACTOR_COMMIT_TIMEOUT) +
              run->round.stopped_ms,
          "the version does not end");
    ranks_judge(run);
    ranks_ungarble(run);
    await_trainer(run);
    if (!run->plan.late || run->next % LATE_VERSIONS == 0) await_current(run);
}

/* ---- Quiet versions: all workers are well, count and apply it */

static bool quiet_version(chaos_run *run, uint64_t change, chaos_way way)
{
    const chaos_version_plan quiet = {
        .rate = RATE_SOME, .change = change, .wait_ms = QUIET_WAIT, .way = way};
    uint32_t missed = run->totals.missed;
    order_version(run, &quiet);
    await(run, round_is_over,
          run_timeout_ms() + run->wait_ms + 2 * (ACTOR_STAGE_TIMEOUT + ACTOR_COMMIT_TIMEOUT),
          "a quiet version does not end");
    ranks_judge(run);
    await_current(run);
    const ledger_result *result = &run->round.result;
    return result->status == REFIT_OK && result->counted == run->plan.workers &&
           (run->plan.ranks == 1 || run->round.told) && run->totals.missed == missed;
}

/* ---- Resources */

static bool all_have_counted(const chaos_run *run, const void *what)
{
    bool all = run->trainer_count.kind == NOTE_COUNTED;
    (void)what;
    for (uint32_t i = 1; i < run->plan.ranks; i++)
        all = all && run->rank[i].count.kind == NOTE_COUNTED;
    for (uint32_t i = 0; i < run->plan.workers; i++)
        all = all && run->worker[i].count.kind == NOTE_COUNTED;
    return all;
}

/* Whether all of them were steady: on a busy machine one may have lost the other, and with it what
 * it had mapped. */
static bool count_all(chaos_run *run)
{
    const chaos_note order = {.kind = NOTE_COUNT};
    run->trainer_count.kind = order.kind;
    bool heard = note_send(run->trainer.line, &order);
    for (uint32_t i = 1; i < run->plan.ranks; i++) {
        run->rank[i].count.kind = order.kind;
        heard = note_send(run->rank[i].process.line, &order) && heard;
    }
    for (uint32_t i = 0; i < run->plan.workers; i++) {
        run->worker[i].count.kind = order.kind;
        heard = note_send(run->worker[i].process.line, &order) && heard;
    }
    if (!heard) run_fail(run, "a process does not hear");
    await(run, all_have_counted, run_timeout_ms(), "a process does not count what it has");
    bool steady = run->trainer_count.flags != 0;
    for (uint32_t i = 0; i < run->plan.workers; i++)
        steady = steady && run->worker[i].count.flags != 0;
    return steady;
}

/* Shows that the count finds what is leaked, and not what malloc keeps free. */
static void plant(chaos_run *run)
{
    const chaos_note order = {
        .kind = NOTE_PLANT, .amount = PLANT_BYTES, .fate = run->options->plant};
    const run_worker *last = &run->worker[run->plan.workers - 1];
    if (order.fate != PLANT_NONE && !note_send(last->process.line, &order))
        run_fail(run, "%s does not hear", last->name);
}

static void keep_greater(resources *most, const resources *now)
{
    if (now->descriptors > most->descriptors) most->descriptors = now->descriptors;
    if (now->segments > most->segments) most->segments = now->segments;
    if (now->resident > most->resident) most->resident = now->resident;
}

/* The greatest of several is kept. */
static bool count_resources(chaos_run *run)
{
    bool steady = count_all(run);
    keep_greater(&run->trainer_before, &run->trainer_count.count);
    for (uint32_t i = 1; i < run->plan.ranks; i++)
        keep_greater(&run->rank[i].before, &run->rank[i].count.count);
    for (uint32_t i = 0; i < run->plan.workers; i++)
        keep_greater(&run->worker[i].before, &run->worker[i].count.count);
    return steady;
}

/* On a GPU a version may have needed what the first three did not: each slot has memory there, with
 * a segment that says who reads it; each has memory on the host, once a flipped bit has taken a
 * worker off the GPU; and a worker keeps those mapped, two segments each. */
static bool fits(const resources *before, const resources *now, uint32_t slots)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    bool resident = true; /* freed memory is kept there for a while */
#else
    bool resident = now->resident <= before->resident + RESIDENT_ROOM;
#endif
    return resident && now->descriptors <= before->descriptors + 2 * slots &&
           now->segments <= before->segments + 3 * slots;
}

static void say_resources(chaos_run *run, const char *name, const resources *before,
                          const resources *now)
{
    run_say(run,
            "%s: %" PRIu32 " descriptors, %" PRIu32 " segments, %" PRIu64 " KiB; before: %" PRIu32
            ", %" PRIu32 ", %" PRIu64,
            name, now->descriptors, now->segments, now->resident / 1024, before->descriptors,
            before->segments, before->resident / 1024);
}

static bool all_fit(chaos_run *run, bool say)
{
    const resources *now = &run->trainer_count.count;
    (void)count_all(run);
    uint32_t slots = run->gpu ? run->plan.slots : 0;
    bool all = fits(&run->trainer_before, now, slots);
    if (say) say_resources(run, "trainer", &run->trainer_before, now);
    for (uint32_t i = 1; i < run->plan.ranks; i++) {
        const run_rank *rank = &run->rank[i];
        all = fits(&rank->before, &rank->count.count, slots) && all;
        if (say) say_resources(run, "a rank", &rank->before, &rank->count.count);
    }
    for (uint32_t i = 0; i < run->plan.workers; i++) {
        const run_worker *one = &run->worker[i];
        all = fits(&one->before, &one->count.count, run->plan.each[i].gpu ? slots : 0) && all;
        if (say) say_resources(run, one->name, &one->before, &one->count.count);
    }
    return all;
}

/* Closed connections are cleared away in time; what was leaked on purpose is not waited for. */
static void compare_resources(chaos_run *run)
{
    bool leaked = run->options->plant == PLANT_LEAKED;
    int64_t deadline = rft_deadline(leaked ? QUIET_WAIT : run_timeout_ms());
    while (!all_fit(run, false)) {
        if (rft_ms_until(deadline) == 0) {
            (void)all_fit(run, true);
            run_fail(run, "memory or descriptors are not where they were");
        }
        run_pump(run, 20);
    }
    (void)all_fit(run, true);
}

/* ---- Rounds of quiet versions */

/* One after the other, each of which counts all workers and is followed by `then`, if that is not
 * NULL and holds. */
static void quiet_versions(chaos_run *run, bool (*then)(chaos_run *run))
{
    int64_t deadline = rft_deadline(QUIET_MS);
    uint32_t good = 0;
    for (uint32_t i = 0; good < QUIET_ROUNDS; i++) {
        if (rft_ms_until(deadline) == 0)
            run_fail(run, "no version counts all workers, though all are well");
        /* With a quorum, what is lent may be over before all workers have it. */
        chaos_way way = run->gpu && run->plan.quorum == 0 ? (chaos_way)good : WAY_HOST;
        bool well = quiet_version(run, run->plan.model + i, way) && (then == NULL || then(run));
        good = well ? good + 1 : 0;
        if (!well) run_pump(run, (int)ACTOR_HEARTBEAT);
    }
}

/* ---- From the first to the last */

static struct in_addr own_address(void)
{
    uint32_t self = (uint32_t)getpid(); /* of 22 bits at most */
    struct in_addr address = {htonl(0x7f400000u + (self & 0x3fffffu))};
    return address;
}

/* The proxy's, which is forked off: where its links listen, and the ranks that they lead to. */
static int listeners[LINKS_MOST + 1];
static uint32_t listeners_ranks[LINKS_MOST];

static int run_proxy(const actor_part *part)
{
    proxy_run(part->line, listeners, listeners_ranks, part->number);
    return 0;
}

static void open_link(chaos_run *run, uint32_t of, uint32_t to, uint16_t *port)
{
    uint32_t number = run_link_number(run, of, to);
    listeners_ranks[number] = to;
    listeners[number] = proxy_listen(run->address, port);
    if (listeners[number] < 0) run_fail(run, "no port for a link");
}

/* Without links to other ranks a worker's ports for them are 0. */
static void start_proxy(chaos_run *run)
{
    const chaos_plan *plan = &run->plan;
    actor_part part = {.plan = plan, .number = plan->workers};
    for (uint32_t i = 0; i < plan->workers; i++) {
        for (uint32_t to = 0; to < (plan->linked ? plan->ranks : 1u); to++)
            open_link(run, i, to, &run->worker[i].ports[to]);
    }
    for (uint32_t i = 1; i < plan->ranks && plan->linked; i++)
        open_link(run, OF_RANKS + i, 0, &run->rank[i].port);
    if (plan->linked) part.number = plan->workers * plan->ranks + plan->ranks - 1;
    listeners[part.number] = -1;
    if (!process_start(&run->proxy, run_proxy, &part, listeners))
        run_fail(run, "a process could not be started");
    for (uint32_t i = 0; i < part.number; i++)
        close(listeners[i]);
}

/* Removes the keys' folder whichever way the run ends. */
static key_fixture *smith_at_exit;

static void dismiss_smith(void)
{
    key_fixture_close(smith_at_exit);
}

static void make_keys(chaos_run *run)
{
    char key[16];
    run->keys = run->plan.keys;
    if (!run->keys) return;
    run->smith = key_fixture_open();
    smith_at_exit = &run->smith;
    atexit(dismiss_smith);
    for (uint32_t i = 0; i < run->plan.workers; i++) {
        run_key_name(i, key);
        key_fixture_admit(&run->smith, key);
    }
    key_fixture_admit(&run->smith, ATTACKER_LIAR);
    key_fixture_admit(&run->smith, ATTACKER_EVICTED);
    if (run->plan.ranks > 1) key_fixture_allow(&run->smith, "trainer");
}

/* Tried in a process that is not needed afterwards. */
static bool succeeds_elsewhere(bool (*act)(void))
{
    int status = 0;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) _exit(act() ? 0 : 1);
    return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

static bool moves_boot_clock(void)
{
    return clocks_move_boot(1000);
}

static bool opens_gpu(void)
{
    on_gpu gpu;
    return on_gpu_open(&gpu, NULL) == REFIT_OK;
}

static void try_boot_clocks(chaos_run *run)
{
    run->boot_clocks = succeeds_elsewhere(moves_boot_clock);
    if (!run->boot_clocks)
        run_say(run, "no time namespaces on this machine: all monotonic clocks are one");
}

/* The same, for the GPU: the conductor's children could not use a device that it has opened. */
static void try_gpu(chaos_run *run)
{
    if (!run->plan.gpu) return;
    run->gpu = succeeds_elsewhere(opens_gpu);
    if (!run->gpu) run_say(run, "no GPU on this machine: all go without");
}

static void try_users(chaos_run *run)
{
    run->users = run->plan.users && geteuid() == 0;
    if (run->plan.users && !run->users) run_say(run, "not root: all workers run as one user");
}

static void start_attackers(chaos_run *run)
{
    actor_part part = {.plan = &run->plan, .smith = run->keys ? &run->smith : NULL};
    for (part.number = 0; part.number < ROLES; part.number++) {
        if (!process_start(&run->attackers[part.number], attacker_run, &part, NULL))
            run_fail(run, "a process could not be started");
    }
}

static void start_all(chaos_run *run)
{
    char address[INET_ADDRSTRLEN];
    run->address = own_address();
    inet_ntop(AF_INET, &run->address, address, sizeof address);
    snprintf(run->endpoint, sizeof run->endpoint, "tcp://%s:0", address);
    try_boot_clocks(run);
    try_gpu(run);
    try_users(run);
    make_keys(run);
    start_proxy(run);
    start_attackers(run);
    for (uint32_t i = 0; i < run->plan.ranks; i++)
        ranks_start(run, i);
    await_trainer(run);
    for (uint32_t i = 0; i < run->plan.workers; i++) {
        snprintf(run->worker[i].name, sizeof run->worker[i].name, "w%" PRIu32, i);
        run_start_worker(run, i);
    }
}

static void end_process(chaos_run *run, process *one, const char *name)
{
    const chaos_note quit = {.kind = NOTE_QUIT};
    chaos_note note = {0};
    if (!note_send(one->line, &quit)) run_fail(run, "%s does not hear", name);
    while (note_await(one->line, &note, (int)run_timeout_ms()) && note.kind != NOTE_GONE) {
        if (note.kind == NOTE_COUNTS && one == &run->trainer) {
            run->totals.resent += note.amount;
            run->totals.evicted += note.version;
            run->totals.sent_bytes += note.digest;
        } else if (note.kind == NOTE_COUNTS) {
            run->totals.damaged += note.amount;
        }
    }
    if (note.kind != NOTE_GONE) run_fail(run, "%s ended without a word", name);
    if (note.amount != 0) run_fail(run, "%s leaks %" PRIu64 " allocations", name, note.amount);
    if (!process_await_end(one, run_timeout_ms())) run_fail(run, "%s ends badly", name);
}

static void end_workers(chaos_run *run)
{
    for (uint32_t i = 0; i < run->plan.workers; i++)
        end_process(run, &run->worker[i].process, run->worker[i].name);
}

static void end_all(chaos_run *run)
{
    const chaos_note quit = {.kind = NOTE_QUIT};
    bool trainer_first = run->plan.model % 2 == 0;
    if (!trainer_first) end_workers(run);
    end_process(run, &run->trainer, "the trainer");
    for (uint32_t i = 1; i < run->plan.ranks; i++)
        end_process(run, &run->rank[i].process, "a rank");
    if (trainer_first) end_workers(run);
    for (uint32_t i = 0; i < ROLES; i++)
        end_process(run, &run->attackers[i], "an attacker");
    (void)note_send(run->proxy.line, &quit);
    if (!process_await_end(&run->proxy, run_timeout_ms())) run_fail(run, "the proxy ends badly");
}

void run_play(chaos_run *run, uint64_t seed, const chaos_options *options)
{
    memset(run, 0, sizeof *run);
    run->options = options;
    run->began = rft_now();
    run->log = options->verbose ? stdout : tmpfile();
    if (run->log == NULL) exit(1);
    if (options->verbose) setvbuf(stdout, NULL, _IOLBF, 0);
    plan_draw(&run->plan, seed, options->versions, options->workers);
    plan_print(&run->plan, run->log);
    run->variant = run->plan.variant;
    start_all(run);
    quiet_versions(run, count_resources);
    for (uint32_t i = 0; i < run->plan.versions; i++)
        play_version(run, &run->plan.version[i]);
    run_end_attacks(run);
    action_mend(run, true);
    await_trainer(run);
    quiet_versions(run, NULL);
    plant(run);
    compare_resources(run);
    end_all(run);
}
