/* The trainer's process: publishes as it is told, and reports what came of it. */
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "actor.h"
#include "base/clock.h"
#include "clocks.h"
#include "tests/support/key_fixture.h"

typedef struct trainer {
    const actor_part *part;
    refit_publisher *publisher;
    refit_config config;
    chaos_model model;
    uint32_t variant;
    char endpoint[256];
    bool well;
    on_gpu gpu; /* where a copy of the model lies */
    uint32_t part_count;
    division_part parts[MODEL_TENSORS_MOST]; /* of this rank */
} trainer;

/* A signal handler has no argument. */
static refit_publisher *volatile cancelled;

static void cancel(int signal)
{
    (void)signal;
    refit_publisher_cancel(cancelled);
}

static uint32_t ms_since(int64_t began)
{
    return (uint32_t)((rft_now() - began) / 1000000);
}

static void report(const trainer *the, chaos_note note, const refit_error *error)
{
    if (note.status != REFIT_OK) snprintf(note.text, sizeof note.text, "%s", error->text);
    (void)note_send(the->part->line, &note);
}

/* ---- Opening */

static refit_status declare(trainer *the, refit_error *error)
{
    return refit_publisher_declare(the->publisher, the->model.tensors, the->model.count, error);
}

static refit_status use_gpu(trainer *the, refit_error *error)
{
    if (!the->part->gpu) return REFIT_OK;
    refit_status status = on_gpu_open(&the->gpu, error);
    return status == REFIT_OK ? refit_publisher_use_device(the->publisher, the->gpu.device, error)
                              : status;
}

static void open_publisher(trainer *the)
{
    refit_error error;
    refit_status status =
        refit_publisher_open(the->endpoint, &the->config, &the->publisher, &error);
    if (status == REFIT_OK) status = use_gpu(the, &error);
    if (status == REFIT_OK) {
        cancelled = the->publisher;
        snprintf(the->endpoint, sizeof the->endpoint, "%s",
                 refit_publisher_endpoint(the->publisher));
        status = declare(the, &error);
    }
    chaos_note note = {.kind = NOTE_READY, .status = (int32_t)status};
    snprintf(note.text, sizeof note.text, "%s", the->endpoint);
    report(the, note, &error);
}

static void close_publisher(trainer *the)
{
    cancelled = NULL;
    refit_publisher_close(the->publisher);
    the->publisher = NULL;
    the->well = on_gpu_close(&the->gpu) && the->well;
}

static void do_reopen(trainer *the)
{
    close_publisher(the);
    open_publisher(the);
}

static void do_declare(trainer *the, uint64_t seed)
{
    refit_error error;
    model_close(&the->model);
    refit_status status = REFIT_ERR_HOST_MEMORY;
    if (model_open(&the->model, ++the->variant, seed)) status = declare(the, &error);
    report(the, (chaos_note){.kind = NOTE_READY, .status = (int32_t)status}, &error);
}

/* ---- One rank of several */

static bool is_ranked(const trainer *the)
{
    return the->part->plan->ranks > 1;
}

static refit_status tell_shard(trainer *the, const chaos_note *order, refit_error *error)
{
    const chaos_plan *plan = the->part->plan;
    refit_selection list[MODEL_TENSORS_MOST];
    the->part_count =
        division_draw(&the->model, plan->model, the->part->rank, plan->ranks, the->parts);
    for (uint32_t i = 0; i < the->part_count; i++) {
        const char *name = the->model.tensors[the->parts[i].tensor].name;
        list[i] = division_selection(&the->parts[i], name);
    }
    const refit_shards shards = {.size = sizeof shards,
                                 .coordinator = order->text,
                                 .rank = the->part->rank,
                                 .ranks = plan->ranks,
                                 .list = list,
                                 .count = the->part_count};
    return refit_publisher_shard(the->publisher, &shards, order->ms, error);
}

/* All ranks have the same weights, as if each had gathered them. */
static void do_shard(trainer *the, const chaos_note *order)
{
    refit_error error = {0};
    chaos_note sharded = {.kind = NOTE_SHARDED, .amount = order->amount};
    model_close(&the->model);
    the->variant = order->manner;
    sharded.status = REFIT_ERR_HOST_MEMORY;
    if (model_open(&the->model, the->variant, order->digest))
        sharded.status = (int32_t)declare(the, &error);
    int64_t began = rft_now();
    if (sharded.status == REFIT_OK) sharded.status = (int32_t)tell_shard(the, order, &error);
    sharded.ms = ms_since(began);
    report(the, sharded, &error);
}

static refit_status write_part(const trainer *the, const division_part *part, refit_error *error)
{
    const refit_tensor *tensor = &the->model.tensors[part->tensor];
    uint64_t bytes = division_bytes(tensor, part);
    unsigned char *gathered = malloc((size_t)bytes + 1);
    if (gathered == NULL) return REFIT_ERR_HOST_MEMORY;
    division_gather(tensor, the->model.bytes[part->tensor], part, gathered);
    refit_status status = refit_publisher_write(the->publisher, part->tensor, gathered, bytes, NULL,
                                                REFIT_STREAM_NONE, error);
    free(gathered);
    return status;
}

/* ---- Publishing */

static void pause_us(uint32_t us)
{
    if (us >= 1000) (void)poll(NULL, 0, (int)(us / 1000));
}

/* No version is under way: what was lent is the trainer's again. */
static refit_status upload(const trainer *the, refit_error *error)
{
    refit_status status = REFIT_OK;
    for (uint32_t i = 0; i < the->model.count && status == REFIT_OK; i++) {
        const refit_tensor *tensor = &the->model.tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS || tensor->bytes == 0) continue;
        status = refit_stream_copy(the->gpu.device, REFIT_STREAM_NONE, on_gpu_at(&the->gpu, i),
                                   the->model.bytes[i], tensor->bytes, error);
    }
    return status;
}

static refit_status write_tensor(const trainer *the, const refit_weight *weight, chaos_way way,
                                 refit_error *error)
{
    bool lends = way == WAY_LENT || (way == WAY_PARTS && weight->tensor % 2 == 0);
    refit_device *device = way == WAY_HOST ? NULL : the->gpu.device;
    return lends ? refit_publisher_lend(the->publisher, weight, 1, device, REFIT_STREAM_NONE, error)
                 : refit_publisher_write(the->publisher, weight->tensor, weight->memory,
                                         weight->bytes, device, REFIT_STREAM_NONE, error);
}

static refit_status write_parts(const trainer *the, const chaos_note *order, bool all,
                                refit_error *error)
{
    refit_status status = REFIT_OK;
    uint32_t count = all ? the->part_count : the->part_count / 2;
    for (uint32_t i = 0; i < count && status == REFIT_OK; i++) {
        uint32_t at = (uint32_t)((order->digest + i) % the->part_count);
        status = write_part(the, &the->parts[at], error);
        pause_us(order->pause_us);
    }
    return status;
}

/* From the tensor `first` on, round: one by one, or, from the GPU and without pauses, at once. */
static refit_status write_tensors(trainer *the, const chaos_note *order, uint32_t count,
                                  refit_error *error)
{
    refit_weight weights[MODEL_TENSORS_MOST];
    chaos_way way = the->part->gpu ? (chaos_way)order->manner : WAY_HOST;
    uint32_t first = (uint32_t)(order->digest % the->model.count), listed = 0;
    refit_status status = REFIT_OK;
    if (is_ranked(the)) return write_parts(the, order, count == the->model.count, error);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = (first + i) % the->model.count;
        const refit_tensor *tensor = &the->model.tensors[at];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        const void *from = way == WAY_HOST ? the->model.bytes[at] : on_gpu_at(&the->gpu, at);
        weights[listed++] = (refit_weight){at, from, tensor->bytes};
    }
    bool at_once = order->pause_us == 0 && (way == WAY_COPIED || way == WAY_LENT);
    if (at_once && way == WAY_LENT)
        return refit_publisher_lend(the->publisher, weights, listed, the->gpu.device,
                                    REFIT_STREAM_NONE, error);
    if (at_once)
        return refit_publisher_write_all(the->publisher, weights, listed, the->gpu.device,
                                         REFIT_STREAM_NONE, error);
    for (uint32_t i = 0; i < listed && status == REFIT_OK; i++) {
        status = write_tensor(the, &weights[i], way, error);
        pause_us(order->pause_us);
    }
    return status;
}

static refit_status begin(trainer *the, const chaos_note *order, refit_error *error)
{
    int64_t began = rft_now();
    refit_status status = refit_publisher_begin(the->publisher, order->version, error);
    report(the,
           (chaos_note){.kind = NOTE_BEGUN,
                        .status = (int32_t)status,
                        .version = order->version,
                        .ms = ms_since(began)},
           error);
    return status;
}

static void report_members(const trainer *the, uint64_t version)
{
    refit_worker_info info = {.size = sizeof info};
    refit_error error;
    for (uint32_t i = 0; refit_publisher_worker(the->publisher, i, &info, &error) == REFIT_OK;
         i++) {
        chaos_note note = {.kind = NOTE_MEMBER, .version = version, .status = (int32_t)info.status};
        if (info.subscribed) note.flags |= MEMBER_SUBSCRIBED;
        if (info.member) note.flags |= MEMBER_COUNTED;
        if (info.committed) note.flags |= MEMBER_COMMITTED;
        note.amount = info.version;
        note.manner = (uint32_t)info.path;
        memcpy(note.name, info.name, sizeof note.name);
        snprintf(note.text, sizeof note.text, "%s", info.reason);
        (void)note_send(the->part->line, &note);
    }
}

/* What the workers that do not take all of the version are to have of it. */
static void report_parts(const trainer *the, uint64_t version)
{
    division_part parts[MODEL_NAMES_MOST];
    const chaos_plan *plan = the->part->plan;
    for (uint32_t i = 0; the->part->rank == 0 && i < plan->workers; i++) {
        chaos_note note = {.kind = NOTE_PARTS, .version = version, .worker = i};
        if (!plan->each[i].parts) continue;
        note.digest = DIGEST_EMPTY;
        uint32_t count = division_select(plan->model + i, parts), at = 0;
        for (uint32_t k = 0; k < count; k++) {
            const refit_tensor *tensor = model_find(&the->model, parts[k].name, &at);
            if (tensor == NULL || tensor->bytes == 0) continue;
            note.digest = division_digest(note.digest, tensor, the->model.bytes[at], &parts[k]);
        }
        (void)note_send(the->part->line, &note);
    }
}

static refit_status finish(trainer *the, const chaos_note *order, refit_error *error)
{
    refit_status status;
    if (order->fate == FATE_ABORT) {
        (void)write_tensors(the, order, the->model.count / 2, error);
        status = refit_publisher_abort(the->publisher, error);
        return status == REFIT_OK ? REFIT_ERR_CANCELLED : status;
    }
    status = write_tensors(the, order, the->model.count, error);
    if (status != REFIT_OK) {
        refit_status aborted = refit_publisher_abort(the->publisher, NULL);
        return aborted == REFIT_OK ? status : aborted;
    }
    const chaos_note written = {.kind = NOTE_WRITTEN,
                                .version = order->version,
                                .digest = model_digest(&the->model),
                                .moment = rft_now()};
    report_parts(the, order->version);
    report(the, written, NULL);
    return refit_publisher_commit(the->publisher, error);
}

/* A worker that is not there by then is left out. */
static void await_workers(const trainer *the, const chaos_note *order)
{
    refit_error error;
    chaos_note waited = {.kind = NOTE_WAITED};
    int64_t began = rft_now();
    if (order->ms == 0) return;
    refit_status status =
        refit_publisher_wait_workers(the->publisher, (uint32_t)order->amount, order->ms, &error);
    waited.ms = ms_since(began);
    waited.status = (int32_t)status;
    report(the, waited, &error);
}

static void count_blocks(const trainer *the, chaos_note *done)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    if (refit_publisher_stats(the->publisher, &stats, NULL) != REFIT_OK) return;
    if (stats.publish_delta_bytes_last == 0) return; /* whole, for every worker */
    done->blocks[0] = stats.publish_same_blocks_last;
    done->blocks[1] = stats.publish_sparse_blocks_last;
    done->blocks[2] = stats.publish_dense_blocks_last;
}

static void do_publish(trainer *the, const chaos_note *order)
{
    refit_error error = {0};
    chaos_note done = {.kind = NOTE_DONE, .version = order->version};
    if (the->part->rank == 0) await_workers(the, order);
    model_step(&the->model, (model_rate)order->rate, order->digest);
    if (the->part->gpu) done.status = (int32_t)upload(the, &error);
    if (done.status != REFIT_OK)
        report(the, (chaos_note){.kind = NOTE_READY, .status = done.status}, &error);
    done.status = (int32_t)begin(the, order, &error);
    bool begun = done.status == REFIT_OK;
    int64_t began = rft_now();
    if (begun) done.status = (int32_t)finish(the, order, &error);
    done.moment = rft_now();
    done.ms = ms_since(began);
    done.amount = refit_publisher_version(the->publisher);
    if (begun && the->part->rank == 0) report_members(the, order->version);
    count_blocks(the, &done);
    report(the, done, &error);
}

/* ---- The process */

static bool has_all_workers(const void *who)
{
    const trainer *the = who;
    const chaos_plan *plan = the->part->plan;
    refit_stats stats;
    uint32_t expected = 0;
    if (the->part->rank > 0) return true; /* they are subscribed to rank 0 */
    /* What is neither lent nor streamed has no room in a small bucket. */
    bool leaves = plan->late && !plan->gpu_stores && plan->bucket_kib < MODEL_LEAST_KIB;
    for (uint32_t i = 0; i < plan->workers && the->part->gpu && !leaves; i++)
        expected += plan->each[i].gpu;
    refit_stats_init(&stats, sizeof stats);
    return refit_publisher_stats(the->publisher, &stats, NULL) == REFIT_OK &&
           stats.workers == plan->workers && stats.workers_gpu == expected;
}

static void obey(trainer *the, const chaos_note *order)
{
    switch (order->kind) {
    case NOTE_PUBLISH: do_publish(the, order); break;
    case NOTE_REOPEN: do_reopen(the); break;
    case NOTE_DECLARE: do_declare(the, order->digest); break;
    case NOTE_SHARD: do_shard(the, order); break;
    default: actor_obey(the->part, order, has_all_workers, the); break;
    }
}

static void send_counts(const trainer *the)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    if (refit_publisher_stats(the->publisher, &stats, NULL) != REFIT_OK) return;
    const chaos_note note = {.kind = NOTE_COUNTS,
                             .amount = stats.publish_resent_frames,
                             .digest = stats.publish_sent_bytes_total,
                             .version = stats.workers_evicted};
    (void)note_send(the->part->line, &note);
}

int trainer_run(const actor_part *part)
{
    trainer the = {.part = part, .variant = part->plan->variant, .well = true};
    struct sigaction on_cancel = {.sa_handler = cancel, .sa_flags = SA_RESTART};
    refit_error error;
    chaos_note order;
    actor_prepare(part);
    clocks_move_wall(part->plan->trainer_wall_clock_s);
    sigaction(SIGUSR1, &on_cancel, NULL);
    snprintf(the.endpoint, sizeof the.endpoint, "%s", part->endpoint);
    if (actor_configure(part, !part->plan->remote, &the.config, &error) != REFIT_OK ||
        !model_open(&the.model, the.variant, part->plan->model + part->number)) {
        return 1;
    }
    if (part->smith != NULL) key_fixture_equip_trainer(part->smith, &the.config);
    if (part->smith != NULL && is_ranked(&the)) key_fixture_equip_rank(part->smith, &the.config);
    open_publisher(&the);
    while (note_await(part->line, &order, -1) && order.kind != NOTE_QUIT)
        obey(&the, &order);
    send_counts(&the);
    close_publisher(&the);
    model_close(&the.model);
    actor_leave(part);
    return the.well ? 0 : 1;
}
