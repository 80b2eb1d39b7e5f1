/* Draws first, prints, and has no part in what happens then. */
#include "chaos_plan.h"

#include <inttypes.h>
#include <string.h>

#include "tests/support/seeded.h"

typedef struct action_rule {
    const char *words;
    chaos_target target;
    uint32_t weight;
    uint32_t amount[2];
    uint32_t ms[2];
} action_rule;

static const action_rule rules[ACTION_KINDS] = {
#define CHAOS_ACTION_RULE(name, words, target, weight, low, high, short_, long_)                   \
    [ACTION_##name] = {words, TARGET_##target, weight, {low, high}, {short_, long_}},
    CHAOS_ACTIONS(CHAOS_ACTION_RULE)
#undef CHAOS_ACTION_RULE
};

chaos_target action_target(chaos_action_kind kind)
{
    return rules[kind].target;
}

static uint32_t below(uint64_t *seed, uint32_t bound)
{
    return (uint32_t)seeded_below(seed, bound);
}

static bool one_in(uint64_t *seed, uint32_t count)
{
    return below(seed, count) == 0;
}

static uint32_t between(uint64_t *seed, const uint32_t range[2])
{
    return range[0] + below(seed, range[1] - range[0] + 1);
}

/* Neighbouring seeds are to have nothing in common. */
static uint64_t spread(uint64_t seed)
{
    seed = (seed + 1) * UINT64_C(0x9e3779b97f4a7c15);
    seed ^= seed >> 31;
    seed *= UINT64_C(0xbf58476d1ce4e5b9);
    seed ^= seed >> 29;
    return seed != 0 ? seed : 1;
}

/* ---- What holds for the whole run */

static int64_t draw_clock(uint64_t *seed)
{
    int64_t away = (int64_t)seeded_below(seed, 10u * 365 * 86400);
    if (one_in(seed, 2)) return 0;
    return one_in(seed, 2) ? away : -away;
}

static void draw_worker(chaos_worker_plan *worker, uint32_t shm_of_4, uint64_t *seed)
{
    worker->shm = below(seed, 4) < shm_of_4;
    worker->polls = one_in(seed, 2);
    worker->wall_clock_s = draw_clock(seed);
    worker->boot_clock_s = one_in(seed, 2) ? (int64_t)seeded_below(seed, 1000000) : 0;
}

static void draw_setting(chaos_plan *plan, uint64_t *seed)
{
    static const uint32_t shares[] = {0, 2, 2, 3, 4}; /* of 4 workers, through shared memory */
    uint32_t shm_of_4 = shares[below(seed, 5)];
    plan->slots = 1 + below(seed, 2);
    bool quorum = one_in(seed, 3);
    plan->quorum = quorum ? 1 + below(seed, plan->workers) : 0;
    plan->frame_kib = 64u << below(seed, 3);
    plan->window = 1 + below(seed, 8);
    static const char *const deltas[] = {"auto", "auto", "always", "always", "never"};
    plan->delta = deltas[below(seed, 5)];
    plan->zstd = one_in(seed, 3);
    plan->encoders = 1 + below(seed, 3);
    plan->verify_always = one_in(seed, 3);
    plan->keys = one_in(seed, 3);
    plan->numbers_fall = one_in(seed, 2);
    plan->variant = below(seed, MODEL_VARIANTS);
    plan->trainer_wall_clock_s = draw_clock(seed);
    plan->model = seeded_next(seed);
    for (uint32_t i = 0; i < ROLES; i++)
        plan->attacks[i] = below(seed, plan->versions);
    for (uint32_t i = 0; i < plan->workers; i++) {
        draw_worker(&plan->each[i], shm_of_4, seed);
    }
}

/* All that has to do with a GPU, by draws of its own. */
static void draw_gpu(chaos_plan *plan, uint64_t seed)
{
    static const chaos_way ways[] = {WAY_HOST, WAY_COPIED, WAY_COPIED, WAY_LENT,
                                     WAY_LENT, WAY_LENT,   WAY_PARTS};
    plan->gpu = one_in(&seed, 2);
    plan->gpu_stores = one_in(&seed, 5);
    /* A quorum on the host may be faster in every version than workers to which it is streamed. */
    plan->bucket_kib = one_in(&seed, 2) && plan->quorum == 0 ? 64 : 4096;
    uint32_t of_4 = 1 + below(&seed, 4);
    for (uint32_t i = 0; i < plan->workers; i++) {
        chaos_worker_plan *worker = &plan->each[i];
        worker->gpu = plan->gpu && below(&seed, 4) < of_4;
        worker->shm = worker->shm || worker->gpu; /* where it says what it reads */
    }
    for (uint32_t i = 0; i < plan->versions; i++) {
        chaos_way way = ways[below(&seed, sizeof ways / sizeof *ways)];
        plan->version[i].way = plan->gpu ? way : WAY_HOST;
    }
}

/* By a draw of its own: other plans stay what they were. */
static void draw_late(chaos_plan *plan, uint64_t seed)
{
    plan->late = plan->slots == 2 && one_in(&seed, 2);
}

/* Workers that would read the trainer's memory share that of one among them. */
static void draw_remote(chaos_plan *plan, uint64_t seed)
{
    plan->remote = !plan->gpu && !one_in(&seed, 3);
    for (uint32_t i = 0; plan->remote && i < plan->workers; i++)
        plan->each[i].shm = !one_in(&seed, 4);
}

/* ---- What happens in a version */

static chaos_action_kind draw_kind(uint64_t *seed)
{
    uint32_t sum = 0, kind = 0;
    for (uint32_t i = 0; i < ACTION_KINDS; i++)
        sum += rules[i].weight;
    uint32_t draw = below(seed, sum);
    while (draw >= rules[kind].weight)
        draw -= rules[kind++].weight;
    return (chaos_action_kind)kind;
}

static void draw_action(chaos_plan *plan, chaos_action_kind kind, uint64_t *seed)
{
    if (plan->action_count == ACTIONS_MOST) return;
    chaos_action *action = &plan->actions[plan->action_count++];
    action->kind = kind;
    action->worker = below(seed, plan->workers);
    action->at_ms = one_in(seed, 3) ? 0 : below(seed, 30);
    action->amount = between(seed, rules[action->kind].amount);
    action->ms = between(seed, rules[action->kind].ms);
}

static void sort_actions(chaos_action *actions, uint32_t count)
{
    for (uint32_t i = 1; i < count; i++) {
        for (uint32_t k = i; k > 0 && actions[k].at_ms < actions[k - 1].at_ms; k--) {
            chaos_action earlier = actions[k];
            actions[k] = actions[k - 1];
            actions[k - 1] = earlier;
        }
    }
}

static void draw_version(chaos_plan *plan, chaos_version_plan *version, uint64_t *seed)
{
    static const uint32_t counts[] = {0, 0, 0, 1, 1, 1, 2, 3};
    version->rate = (model_rate)below(seed, RATE_COUNT);
    version->change = seeded_next(seed);
    version->fate = one_in(seed, 15) ? FATE_ABORT : FATE_COMMIT;
    version->wait_ms = one_in(seed, 4) ? 0 : 400;
    version->pause_us = one_in(seed, 2) ? 0 : below(seed, 4000);
    version->first = plan->action_count;
    for (uint32_t i = counts[below(seed, 8)]; i > 0; i--) {
        draw_action(plan, draw_kind(seed), seed);
    }
    for (uint32_t i = 0; i < ROLES; i++) {
        static const chaos_action_kind kinds[ROLES] = {[ROLE_STRANGER] = ACTION_STRANGER,
                                                       [ROLE_EVICTED] = ACTION_EVICTED,
                                                       [ROLE_LIAR] = ACTION_LIAR};
        if (&plan->version[plan->attacks[i]] == version) draw_action(plan, kinds[i], seed);
    }
    version->actions = plan->action_count - version->first;
    sort_actions(plan->actions + version->first, version->actions);
}

/* ---- Ranks */

static void draw_rank_action(const chaos_plan *plan, chaos_action *action, uint64_t *seed)
{
    static const chaos_action_kind kinds[] = {ACTION_KILL_RANK,  ACTION_KILL_RANK, ACTION_KILL_RANK,
                                              ACTION_STOP_RANK,  ACTION_STOP_RANK, ACTION_STOP_RANK,
                                              ACTION_CANCEL_RANK};
    action->kind = kinds[below(seed, sizeof kinds / sizeof *kinds)];
    action->phase = (chaos_phase)below(seed, PHASES);
    action->amount = below(seed, plan->ranks);
    action->ms = between(seed, rules[action->kind].ms);
    action->after_ms = one_in(seed, 2) ? 0 : below(seed, 12);
    action->at_ms = action->phase == PHASE_SHARD ? 0 : 1 + below(seed, 30);
}

/* Makes room for one more action of the version. */
static void add_action(chaos_plan *plan, uint32_t version, const chaos_action *action)
{
    chaos_version_plan *to = &plan->version[version];
    uint32_t end = to->first + to->actions;
    if (plan->action_count == ACTIONS_MOST) return;
    memmove(&plan->actions[end + 1], &plan->actions[end],
            (plan->action_count - end) * sizeof *plan->actions);
    plan->actions[end] = *action;
    plan->action_count++;
    to->actions++;
    for (uint32_t i = version + 1; i < plan->versions; i++)
        plan->version[i].first++;
    sort_actions(plan->actions + to->first, to->actions);
}

/* By draws of its own: other plans stay what they were. */
static void draw_ranks(chaos_plan *plan, uint64_t seed)
{
    plan->ranks = 1;
    if (plan->gpu || !one_in(&seed, 4)) return;
    plan->ranks = 2 + below(&seed, RANKS_MOST - 1);
    for (uint32_t i = 0; i < plan->versions; i++) {
        plan->version[i].aborts = 1 + below(&seed, (1u << plan->ranks) - 1);
        if (!one_in(&seed, 3)) continue;
        chaos_action action = {0};
        draw_rank_action(plan, &action, &seed);
        add_action(plan, i, &action);
    }
}

/* Of the links, of which each worker then has one to every rank, and each other rank one to rank 0.
 */
static chaos_action draw_rank_link(const chaos_plan *plan, uint64_t *seed)
{
    chaos_action action = {.worker = OF_RANKS + 1 + below(seed, plan->ranks - 1)};
    do {
        action.kind = draw_kind(seed);
    } while (rules[action.kind].target != TARGET_LINK);
    bool flips = action.kind == ACTION_FLIP_DOWN || action.kind == ACTION_FLIP_UP;
    action.amount = between(seed, flips ? rules[ACTION_FLIP_UP].amount : rules[action.kind].amount);
    action.ms = between(seed, rules[action.kind].ms);
    action.at_ms = one_in(seed, 3) ? 0 : 1 + below(seed, 30);
    return action;
}

static void draw_links(chaos_plan *plan, uint64_t seed)
{
    plan->linked = plan->ranks > 1 && !one_in(&seed, 3);
    if (!plan->linked) return;
    for (uint32_t i = 0; i < plan->action_count; i++) {
        uint32_t rank = below(&seed, plan->ranks);
        if (rules[plan->actions[i].kind].target == TARGET_LINK) plan->actions[i].rank = rank;
    }
    for (uint32_t i = 0; i < plan->versions; i++) {
        chaos_action action = draw_rank_link(plan, &seed);
        if (one_in(&seed, 3)) add_action(plan, i, &action);
    }
}

/* ---- What else some workers are: by draws of their own */

/* One on the GPU takes all. */
static void draw_parts(chaos_plan *plan, uint64_t seed)
{
    bool some = one_in(&seed, 2);
    for (uint32_t i = 0; some && i < plan->workers; i++)
        plan->each[i].parts = one_in(&seed, 2) && !plan->each[i].gpu;
}

static void draw_scarcity(chaos_plan *plan, uint64_t seed)
{
    bool some = one_in(&seed, 2);
    for (uint32_t i = 0; some && i < plan->versions; i++) {
        chaos_action action = {.kind = ACTION_SCARCE, .worker = below(&seed, plan->workers)};
        action.at_ms = one_in(&seed, 2) ? 0 : 1 + below(&seed, 30);
        action.amount = between(&seed, rules[ACTION_SCARCE].amount);
        action.ms = between(&seed, rules[ACTION_SCARCE].ms);
        if (one_in(&seed, 4) && !plan->each[action.worker].gpu) add_action(plan, i, &action);
    }
}

/* Keys are files that one user owns. */
static void draw_users(chaos_plan *plan, uint64_t seed)
{
    plan->users = one_in(&seed, 2) && !plan->keys && !plan->gpu;
    for (uint32_t i = 0; plan->users && i < plan->workers; i++)
        plan->each[i].apart = one_in(&seed, 2);
}

void plan_draw(chaos_plan *plan, uint64_t seed, uint32_t versions, uint32_t workers)
{
    uint64_t state = spread(seed);
    memset(plan, 0, sizeof *plan);
    plan->seed = seed;
    plan->versions = versions < VERSIONS_MOST ? versions : VERSIONS_MOST;
    plan->workers = workers < WORKERS_MOST ? workers : WORKERS_MOST;
    draw_setting(plan, &state);
    for (uint32_t i = 0; i < plan->versions; i++) {
        draw_version(plan, &plan->version[i], &state);
    }
    draw_gpu(plan, spread(seed + (UINT64_C(1) << 32)));
    draw_late(plan, spread(seed + (UINT64_C(2) << 32)));
    draw_remote(plan, spread(seed + (UINT64_C(3) << 32)));
    draw_ranks(plan, spread(seed + (UINT64_C(4) << 32)));
    draw_links(plan, spread(seed + (UINT64_C(5) << 32)));
    draw_parts(plan, spread(seed + (UINT64_C(6) << 32)));
    draw_scarcity(plan, spread(seed + (UINT64_C(7) << 32)));
    draw_users(plan, spread(seed + (UINT64_C(8) << 32)));
}

/* ---- Printing */

const char *way_name(chaos_way way)
{
    static const char *const names[WAYS] = {"from the host", "copied", "lent", "lent in part"};
    return names[way];
}

const char *phase_name(chaos_phase phase)
{
    static const char *const names[PHASES] = {"at its time", "as the shards are told",
                                              "as it writes", "as it commits",
                                              "once it is decided"};
    return names[phase];
}

void plan_print_action(const chaos_action *action, FILE *to)
{
    const action_rule *rule = &rules[action->kind];
    bool of_worker = rule->target == TARGET_WORKER || rule->target == TARGET_LINK;
    if (of_worker && action->worker < OF_RANKS) fprintf(to, "w%" PRIu32 " ", action->worker);
    if (of_worker && action->worker >= OF_RANKS)
        fprintf(to, "rank %" PRIu32 " ", action->worker - OF_RANKS);
    if (action->rank != 0) fprintf(to, "to rank %" PRIu32 " ", action->rank);
    fprintf(to, "%s", rule->words);
    if (rule->amount[1] > 1 || action->kind == ACTION_SCARCE)
        fprintf(to, " [%" PRIu32 "]", action->amount);
    if (rule->ms[1] > 0) fprintf(to, " (%" PRIu32 " ms)", action->ms);
    if (action->phase != PHASE_TIME)
        fprintf(to, ", %s, after %" PRIu32 " ms", phase_name(action->phase), action->after_ms);
}

static void print_worker(const chaos_plan *plan, uint32_t i, FILE *to)
{
    const chaos_worker_plan *worker = &plan->each[i];
    fprintf(to,
            "  w%" PRIu32 ": %s%s, %s%s%s, wall clock %+" PRId64 " s, boot clock %+" PRId64 " s\n",
            i, worker->gpu ? "the GPU, or " : "", worker->shm ? "shared memory" : "sockets",
            worker->polls ? "polls" : "waits", worker->parts ? ", takes parts" : "",
            worker->apart ? ", another user" : "", worker->wall_clock_s, worker->boot_clock_s);
}

static void print_version(const chaos_plan *plan, uint32_t i, FILE *to)
{
    const chaos_version_plan *version = &plan->version[i];
    fprintf(to, "  version %" PRIu32 ": %s changes, %s, %s, pauses of %" PRIu32 " us%s\n", i + 1,
            model_rate_name(version->rate), way_name(version->way),
            version->wait_ms != 0 ? "waits for workers" : "does not wait", version->pause_us,
            version->fate == FATE_ABORT ? ", aborted when half written" : "");
    for (uint32_t k = 0; k < version->actions; k++) {
        const chaos_action *action = &plan->actions[version->first + k];
        fprintf(to, "    at %2" PRIu32 " ms: ", action->at_ms);
        plan_print_action(action, to);
        fputc('\n', to);
    }
}

void plan_print(const chaos_plan *plan, FILE *to)
{
    fprintf(to,
            "seed %" PRIu64 ": %" PRIu32 " workers, %" PRIu32 " versions, %" PRIu32
            " slots, commit: %s%.0" PRIu32 "%s, frames of %" PRIu32 " KiB, window %" PRIu32
            ", delta: %s%s by %" PRIu32 " threads, verify: %s%s\n",
            plan->seed, plan->workers, plan->versions, plan->slots,
            plan->quorum != 0 ? "quorum of " : "all", plan->quorum,
            plan->late ? ", wait: staged" : "", plan->frame_kib, plan->window, plan->delta,
            plan->zstd ? " with zstd" : "", plan->encoders, plan->verify_always ? "always" : "auto",
            plan->keys ? ", keys" : "");
    if (plan->remote) fprintf(to, "  the trainer shares no memory, workers share theirs\n");
    if (plan->ranks > 1)
        fprintf(to, "  the trainer is %" PRIu32 " ranks%s\n", plan->ranks,
                plan->linked ? ", all of which are reached through the proxy" : "");
    if (plan->gpu)
        fprintf(to, "  on a GPU, %s, buckets of %" PRIu32 " KiB\n",
                plan->gpu_stores ? "which keeps all versions" : "lends", plan->bucket_kib);
    for (uint32_t i = 0; i < plan->workers; i++)
        print_worker(plan, i, to);
    for (uint32_t i = 0; i < plan->versions; i++)
        print_version(plan, i, to);
}
