/* A worker's process: takes what comes, reports its digest, and decides in the manner it is told.
 */

#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "actor.h"
#include "base/clock.h"
#include "clocks.h"
#include "detour.h"
#include "tests/support/key_fixture.h"

#define NEXT_MS 20u /* how long one wait in next is; an order waits no longer */

typedef enum moment {
    IDLE,
    TAKEN, /* an update is open and undecided */
    HELD,  /* decided, still open */
} moment;

typedef struct worker {
    const actor_part *part;
    refit_subscriber *subscriber;
    refit_update *update;
    moment moment;
    worker_manner manner;
    uint32_t manner_ms;
    int64_t until; /* of the moment */
    bool ended;
    on_gpu gpu;
    uint32_t part_count;
    division_part parts[MODEL_NAMES_MOST]; /* that it takes; none: all of everything */
} worker;

static void report(const worker *the, chaos_note note)
{
    (void)note_send(the->part->line, &note);
}

/* ---- Updates */

static uint32_t flags_of(const refit_update *update)
{
    return (refit_update_device(update) != NULL ? TAKEN_ON_GPU : 0u) |
           (refit_update_is_streamed(update) ? TAKEN_STREAMED : 0u);
}

/* A tensor of the update, which a worker on the GPU has loaded before, or reads where it lies. */
static refit_status read_tensor(const worker *the, uint32_t at, bool loaded, refit_tensor *tensor,
                                const void **bytes, refit_error *error)
{
    refit_status status =
        refit_update_tensor(the->update, at, tensor, loaded ? NULL : bytes, error);
    if (status != REFIT_OK || the->gpu.device == NULL) return status;
    uint32_t original = tensor->alias_of == REFIT_NO_ALIAS ? at : tensor->alias_of;
    if (loaded) *bytes = on_gpu_at(&the->gpu, original);
    return on_gpu_read(&the->gpu, *bytes, tensor->bytes, bytes, error);
}

/* A worker on the GPU loads what it takes, but for a third of what lies there. */
static refit_status digest_update(const worker *the, uint64_t *digest, refit_error *error)
{
    refit_update *update = the->update;
    refit_status status = REFIT_OK;
    bool loads = the->gpu.device != NULL &&
                 (flags_of(update) != TAKEN_ON_GPU || refit_update_version(update) % 3 != 0);
    if (loads) status = on_gpu_load(&the->gpu, update, error);
    *digest = DIGEST_EMPTY;
    for (uint32_t i = 0; status == REFIT_OK && i < refit_update_count(update); i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        const void *bytes = NULL;
        status = read_tensor(the, i, loads, &tensor, &bytes, error);
        if (status == REFIT_OK) *digest = digest_add(*digest, &tensor, bytes);
    }
    return status;
}

/* What it has selected. A tensor that this model has not, or that is empty, is not there. */
static refit_status digest_parts(const worker *the, uint64_t *digest, refit_error *error)
{
    *digest = DIGEST_EMPTY;
    for (uint32_t i = 0; i < the->part_count; i++) {
        uint32_t at;
        refit_tensor tensor = {.size = sizeof tensor};
        const void *bytes;
        refit_status status = refit_update_find(the->update, the->parts[i].name, &at, error);
        if (status == REFIT_ERR_NOT_FOUND) continue;
        if (status == REFIT_OK)
            status = refit_update_tensor(the->update, at, &tensor, &bytes, error);
        if (status != REFIT_OK) return status;
        if (tensor.bytes != 0) *digest = division_digest(*digest, &tensor, bytes, &the->parts[i]);
    }
    return REFIT_OK;
}

static void end(worker *the, refit_status status, const refit_error *error)
{
    chaos_note note = {.kind = NOTE_ENDED, .status = (int32_t)status};
    snprintf(note.text, sizeof note.text, "%s", error->text);
    report(the, note);
    the->ended = true;
}

static void close_update(worker *the)
{
    refit_update_close(the->update);
    the->update = NULL;
    the->moment = IDLE;
}

/* The engine's memory is half written. */
static void lose(worker *the, refit_status status, const refit_error *error)
{
    chaos_note note = {.kind = NOTE_LOST,
                       .version = refit_update_version(the->update),
                       .status = (int32_t)status,
                       .flags = flags_of(the->update)};
    refit_error refused;
    snprintf(note.text, sizeof note.text, "%s", error->text);
    status = refit_update_refuse(the->update, "it cannot be loaded", 0, &refused);
    close_update(the);
    report(the, note);
    if (status != REFIT_OK) end(the, status, &refused);
}

/* As of its last offer, which may be that of the next version. */
static bool maps_neighbor(const worker *the)
{
    refit_subscriber_info info = {.size = sizeof info};
    return refit_subscriber_describe(the->subscriber, &info, NULL) == REFIT_OK &&
           info.path == REFIT_PATH_NEIGHBOR;
}

static void take(worker *the, uint32_t timeout_ms)
{
    refit_error error;
    chaos_note note = {.kind = NOTE_TAKEN};
    int64_t began = rft_now();
    refit_status status = refit_subscriber_next(the->subscriber, timeout_ms, &the->update, &error);
    note.ms = (uint32_t)((rft_now() - began) / 1000000);
    if (status == REFIT_ERR_TIMEOUT && note.ms < 1000) return;
    if (status != REFIT_OK && status != REFIT_ERR_TIMEOUT) {
        end(the, status, &error);
        return;
    }
    if (status == REFIT_OK) {
        bool all = !the->part->plan->each[the->part->number].parts;
        refit_status read = all ? digest_update(the, &note.digest, &error)
                                : digest_parts(the, &note.digest, &error);
        if (read != REFIT_OK) {
            lose(the, read, &error);
            return;
        }
        note.flags = flags_of(the->update) | (maps_neighbor(the) ? TAKEN_FROM_NEIGHBOR : 0u);
        note.version = refit_update_version(the->update);
        the->moment = TAKEN;
        the->until = rft_deadline(the->manner == MANNER_SLOW ? the->manner_ms : 0);
    }
    report(the, note);
}

static void decide(worker *the)
{
    refit_error error = {0};
    chaos_note note = {
        .kind = NOTE_DECIDES, .version = refit_update_version(the->update), .manner = the->manner};
    note.flags = flags_of(the->update);
    bool refuses = the->manner == MANNER_REFUSE_KEPT || the->manner == MANNER_REFUSE_LOST;
    refit_status status;
    report(the, note);
    note.kind = NOTE_DECIDED;
    status = refuses ? refit_update_refuse(the->update, "as told",
                                           the->manner == MANNER_REFUSE_KEPT, &error)
                     : refit_update_accept(the->update, &error);
    note.status = (int32_t)status;
    if (note.status != REFIT_OK) snprintf(note.text, sizeof note.text, "%s", error.text);
    the->moment = HELD;
    the->until = rft_deadline(the->manner == MANNER_HOLD ? the->manner_ms : 0);
    the->manner = MANNER_PLAIN;
    report(the, note);
}

/* ---- The process */

static bool has_its_trainer(const void *who)
{
    const worker *the = who;
    refit_subscriber_info info = {.size = sizeof info};
    return refit_subscriber_describe(the->subscriber, &info, NULL) == REFIT_OK &&
           strcmp(info.state, "current") == 0;
}

static void obey(worker *the, const chaos_note *order)
{
    actor_obey(the->part, order, has_its_trainer, the);
    if (order->kind == NOTE_CLOCK) clocks_move_wall(order->seconds);
    if (order->kind != NOTE_MANNER) return;
    the->manner = (worker_manner)order->manner;
    the->manner_ms = order->ms;
}

static bool hear(worker *the)
{
    chaos_note order;
    int got;
    while ((got = note_receive(the->part->line, &order)) > 0) {
        if (order.kind == NOTE_QUIT) return false;
        obey(the, &order);
    }
    return got == 0;
}

static bool is_waiting(const worker *the)
{
    return the->moment == IDLE && the->manner != MANNER_DEAF && !the->ended;
}

static void act(worker *the, bool ready)
{
    bool polls = the->part->plan->each[the->part->number].polls;
    if (is_waiting(the)) {
        if (ready || !polls) take(the, polls ? 0 : NEXT_MS);
    } else if (the->manner != MANNER_DEAF && rft_ms_until(the->until) == 0) {
        if (the->moment == TAKEN) decide(the);
        if (the->moment == HELD && rft_ms_until(the->until) == 0) close_update(the);
    }
}

static bool live(worker *the)
{
    bool waiting = is_waiting(the);
    bool polls = the->part->plan->each[the->part->number].polls;
    struct pollfd items[2] = {
        {.fd = the->part->line, .events = POLLIN},
        {.fd = waiting && polls ? refit_subscriber_fd(the->subscriber) : -1, .events = POLLIN},
    };
    int wait_ms = -1;
    if (waiting && !polls) wait_ms = 0;
    if (the->moment != IDLE && the->manner != MANNER_DEAF) wait_ms = rft_ms_until(the->until);
    (void)poll(items, 2, wait_ms);
    if (items[0].revents != 0 && !hear(the)) return false;
    act(the, items[1].revents != 0);
    return true;
}

static void send_counts(const worker *the)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    if (refit_subscriber_stats(the->subscriber, &stats, NULL) != REFIT_OK) return;
    report(the, (chaos_note){.kind = NOTE_COUNTS,
                             .amount = stats.receive_bad_frames,
                             .digest = stats.receive_bytes_total,
                             .version = stats.receive_count});
}

static refit_status select_parts(worker *the, refit_error *error)
{
    refit_selection list[MODEL_NAMES_MOST];
    const actor_part *part = the->part;
    if (!part->plan->each[part->number].parts) return REFIT_OK;
    the->part_count = division_select(part->plan->model + part->number, the->parts);
    for (uint32_t i = 0; i < the->part_count; i++)
        list[i] = division_selection(&the->parts[i], the->parts[i].name);
    return refit_subscriber_select(the->subscriber, list, the->part_count, NULL, error);
}

/* A process that was root's lets others of its user see it, as theirs do. */
static bool become(uid_t user)
{
    return setgroups(0, NULL) == 0 && setresgid(user, user, user) == 0 &&
           setresuid(user, user, user) == 0 && prctl(PR_SET_DUMPABLE, 1) == 0 &&
           prctl(PR_SET_PDEATHSIG, SIGKILL) == 0;
}

int worker_run(const actor_part *part)
{
    const chaos_worker_plan *plan = &part->plan->each[part->number];
    worker the = {.part = part};
    refit_config config;
    refit_error error;
    if (part->boot_clock && !clocks_move_boot(plan->boot_clock_s)) return 1;
    if (part->user != 0 && !become(part->user)) return 1;
    (void)signal(SIGXFSZ, SIG_IGN); /* of ACTION_SCARCE */
    detour_take(part->address, part->ports);
    actor_prepare(part);
    clocks_move_wall(plan->wall_clock_s);
    refit_status status = actor_configure(part, plan->shm, &config, &error);
    if (status == REFIT_OK)
        status = refit_config_set(&config, "broadcast.worker", part->name, &error);
    if (part->smith != NULL) key_fixture_equip_worker(part->smith, part->key, &config);
    if (status == REFIT_OK)
        status = refit_subscriber_open(part->endpoint, &config, &the.subscriber, &error);
    if (status == REFIT_OK) status = select_parts(&the, &error);
    if (status == REFIT_OK && part->gpu) status = on_gpu_open(&the.gpu, &error);
    if (status == REFIT_OK && part->gpu)
        status = refit_subscriber_use_device(the.subscriber, the.gpu.device, &error);
    chaos_note ready = {.kind = NOTE_READY, .status = (int32_t)status};
    if (status != REFIT_OK) snprintf(ready.text, sizeof ready.text, "%s", error.text);
    report(&the, ready);
    while (status == REFIT_OK && live(&the)) {
    }
    if (status == REFIT_OK) send_counts(&the);
    refit_subscriber_close(the.subscriber);
    bool well = on_gpu_close(&the.gpu) && status == REFIT_OK;
    actor_leave(part);
    return well ? 0 : 1;
}
