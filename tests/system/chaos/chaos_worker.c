/* A worker's process: takes what comes, reports its digest, and decides in the manner it is told.
 */

#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "actor.h"
#include "base/clock.h"
#include "clocks.h"
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
} worker;

static void report(const worker *the, chaos_note note)
{
    (void)note_send(the->part->line, &note);
}

/* ---- Updates */

static refit_status digest_update(const refit_update *update, uint64_t *digest, refit_error *error)
{
    *digest = DIGEST_EMPTY;
    for (uint32_t i = 0; i < refit_update_count(update); i++) {
        refit_tensor tensor = {.size = sizeof tensor};
        const void *bytes = NULL;
        refit_status status = refit_update_tensor(update, i, &tensor, &bytes, error);
        if (status != REFIT_OK) return status;
        *digest = digest_add(*digest, &tensor, bytes);
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

static void take(worker *the, uint32_t timeout_ms)
{
    refit_error error;
    chaos_note note = {.kind = NOTE_TAKEN};
    int64_t began = rft_now();
    refit_status status = refit_subscriber_next(the->subscriber, timeout_ms, &the->update, &error);
    note.ms = (uint32_t)((rft_now() - began) / 1000000);
    if (status == REFIT_OK) status = digest_update(the->update, &note.digest, &error);
    if (status == REFIT_ERR_TIMEOUT && note.ms < 1000) return;
    if (status != REFIT_OK && status != REFIT_ERR_TIMEOUT) {
        end(the, status, &error);
        return;
    }
    if (status == REFIT_OK) {
        note.version = refit_update_version(the->update);
        the->moment = TAKEN;
        the->until = rft_deadline(the->manner == MANNER_SLOW ? the->manner_ms : 0);
    }
    report(the, note);
}

static void close_update(worker *the)
{
    refit_update_close(the->update);
    the->update = NULL;
    the->moment = IDLE;
}

static void decide(worker *the)
{
    refit_error error = {0};
    chaos_note note = {
        .kind = NOTE_DECIDES, .version = refit_update_version(the->update), .manner = the->manner};
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

int worker_run(const actor_part *part)
{
    const chaos_worker_plan *plan = &part->plan->each[part->number];
    worker the = {.part = part};
    refit_config config;
    refit_error error;
    if (part->boot_clock && !clocks_move_boot(plan->boot_clock_s)) return 1;
    actor_prepare(part);
    clocks_move_wall(plan->wall_clock_s);
    refit_status status = actor_configure(part, plan->shm, &config, &error);
    if (status == REFIT_OK)
        status = refit_config_set(&config, "broadcast.worker", part->name, &error);
    if (part->smith != NULL) key_fixture_equip_worker(part->smith, part->key, &config);
    if (status == REFIT_OK)
        status = refit_subscriber_open(part->endpoint, &config, &the.subscriber, &error);
    chaos_note ready = {.kind = NOTE_READY, .status = (int32_t)status};
    if (status != REFIT_OK) snprintf(ready.text, sizeof ready.text, "%s", error.text);
    report(&the, ready);
    while (status == REFIT_OK && live(&the)) {
    }
    if (status == REFIT_OK) send_counts(&the);
    refit_subscriber_close(the.subscriber);
    actor_leave(part);
    return status == REFIT_OK ? 0 : 1;
}
