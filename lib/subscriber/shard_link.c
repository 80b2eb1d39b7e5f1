/*
 * One link:
 *
 *     CONNECTING ──WELCOME of the coordinator's epoch──► joined
 *         ▲                                                │
 *         └──────silence, REFUSE, BYE, a breach, ──────────┘
 *                  no connection
 *
 * While it is connecting, it says HELLO each heartbeat, and what it has to ask for waits. A version
 * of which frames are missing fails with the link; one that is complete does not need it.
 */
#include "subscriber/shard_link.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"
#include "subscriber/welcome.h"

#define MESSAGES_WAITING 512u /* for a socket that takes none; a list of rows is many */

/* ---- Opening and closing */

refit_status rft_shard_link_open(const rft_link_common *common, const rft_message *shard,
                                 uint64_t serial, rft_want *rows, int64_t now, rft_shard_link **out,
                                 refit_error *error)
{
    rft_shard_link *link = rft_calloc(1, sizeof *link);
    RFT_REFUSE_IF(link == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a link to rank %u",
                  shard->as.shard.rank);
    link->common = common;
    link->rank = shard->as.shard.rank;
    link->serial = serial;
    link->rows = rows;
    link->send_queue.most = MESSAGES_WAITING;
    link->heartbeat_ms = common->config->broadcast_heartbeat_ms;
    link->next_beat = now;
    rft_view_print(shard->as.shard.endpoint, link->endpoint, sizeof link->endpoint);
    rft_fetch_init(&link->fetch, common->config, common->limits, &link->send_queue, common->counts);
    *out = link;
    return REFIT_OK;
}

void rft_shard_link_close(rft_shard_link *link)
{
    if (link == NULL) return;
    rft_fetch_close(&link->fetch);
    rft_send_queue_close(&link->send_queue);
    rft_want_release(link->rows);
    rft_want_release(link->part);
    rft_want_release(link->wanted);
    rft_free(link);
}

void rft_shard_link_set_rows(rft_shard_link *link, rft_want *rows)
{
    rft_want_release(link->rows);
    link->rows = rows;
    link->cut = link->told = false;
}

/* ---- Messages of the worker */

/* A message that cannot be put in costs the link, at the next tick. */
static void link_send(rft_shard_link *link, const rft_message *message)
{
    (void)rft_send_queue_put(&link->send_queue, NULL, message, link->common->limits, NULL);
}

/* Under a name of its own: the rank may be the coordinator, which knows the worker by the other. */
static void send_hello(rft_shard_link *link)
{
    const refit_config *config = link->common->config;
    char name[64];
    snprintf(name, sizeof name, "frames:%016" PRIx64 ":%" PRIu32, link->common->instance,
             link->rank);
    rft_message message = {.kind = RFT_HELLO};
    message.as.hello.protocol = RFT_PROTOCOL;
    message.as.hello.worker = rft_view_text(name);
    message.as.hello.instance = link->common->instance;
    message.as.hello.window = config->broadcast_window;
    message.as.hello.delta = config->broadcast_delta != REFIT_DELTA_NEVER;
    message.as.hello.zstd = message.as.hello.delta;
    message.as.hello.fetches = true;
    /* What the socket has not taken by now is of an earlier connection, or an earlier HELLO. */
    rft_send_queue_reset(&link->send_queue);
    link_send(link, &message);
}

static void send_bye(rft_shard_link *link)
{
    rft_message message = {.kind = RFT_BYE};
    message.as.bye.reason = rft_view_text("the trainer closed");
    link_send(link, &message);
}

static void send_beat(rft_shard_link *link)
{
    const rft_message message = {.kind = RFT_BEAT};
    link_send(link, &message);
}

/* ---- A version */

/* What is wanted of the rank's rows. It stays for the versions that follow. */
static refit_status find_part(rft_shard_link *link, rft_want *want, refit_error *error)
{
    if (link->cut && rft_want_equal(want, link->wanted)) return REFIT_OK;
    rft_want *part = NULL;
    if (want == NULL) {
        part = rft_want_acquire(link->rows);
    } else {
        rft_bytes encoded = {0};
        refit_status status = rft_want_intersect(want, link->rows, &encoded, error);
        if (status == REFIT_OK)
            status = rft_want_open(want->manifest, rft_bytes_view(&encoded), &part, error);
        rft_bytes_close(&encoded);
        RFT_TRY(status);
    }
    rft_want_release(link->part);
    rft_want_release(link->wanted);
    link->part = part;
    link->wanted = rft_want_acquire(want);
    link->cut = true;
    link->told = false;
    return REFIT_OK;
}

refit_status rft_shard_link_begin(rft_shard_link *link, const rft_fetch_plan *plan,
                                  refit_error *error)
{
    rft_shard_link_end(link);
    RFT_TRY(find_part(link, plan->want, error));
    if (link->part->bytes == 0) return REFIT_OK;
    rft_fetch_plan own = *plan;
    own.want = link->part;
    return rft_fetch_begin(&link->fetch, &own, error);
}

/* What of the rank's rows is fetched, of this version and those that follow. */
static void send_want(rft_shard_link *link)
{
    rft_want_slice slice = {0};
    rft_message message = {.kind = RFT_WANT};
    message.as.want.manifest = link->fetch.catalog->manifest->digest;
    while (rft_want_slice_next(link->part, link->common->limits, &slice)) {
        message.as.want.rows = slice.rows;
        message.as.want.from = slice.from;
        message.as.want.more = slice.more;
        link_send(link, &message);
    }
    link->told = true;
}

/* The first PULL of a version says of which tensors it is. */
static void ask(rft_shard_link *link)
{
    bool due = link->joined && link->ready && !link->asked && rft_shard_link_lacks(link);
    if (!due) return;
    rft_message pull = {.kind = RFT_PULL};
    const rft_digest128 *manifest = &link->fetch.catalog->manifest->digest;
    pull.as.pull.base = link->base;
    pull.as.pull.have = link->have;
    pull.as.pull.manifest = (rft_view){manifest->bytes, sizeof manifest->bytes};
    pull.as.pull.part = !rft_want_equal(link->part, link->rows);
    if (pull.as.pull.part && !link->told) send_want(link);
    if (link->window < link->fetch.window) link->fetch.window = link->window;
    link->asked = true;
    rft_fetch_announce(&link->fetch, &pull);
}

void rft_shard_link_pull(rft_shard_link *link, uint64_t base, rft_view have)
{
    link->base = base;
    link->have = have;
    link->ready = true;
    ask(link);
}

void rft_shard_link_end(rft_shard_link *link)
{
    rft_fetch_end(&link->fetch);
    link->ready = false;
    link->asked = false;
}

bool rft_shard_link_is_fetching(const rft_shard_link *link)
{
    return link != NULL && link->fetch.version != 0;
}

bool rft_shard_link_lacks(const rft_shard_link *link)
{
    return rft_shard_link_is_fetching(link) && !rft_reassembly_complete(link->fetch.reassembly);
}

/* ---- Losing the rank */

static const char *place_of(const rft_shard_link *link)
{
    return link->endpoint[0] == '\0' ? "the trainer's endpoint" : link->endpoint;
}

/* A rank that does not come back is lost again and again, and the cause stays the same. */
static void log_loss(rft_shard_link *link, const char *why)
{
    bool known = strcmp(link->why, why) == 0;
    rft_log(known ? REFIT_LOG_DEBUG : REFIT_LOG_WARNING,
            "worker %s has no link to rank %u at %s: %s", link->common->worker, link->rank,
            place_of(link), why);
    rft_text_say(link->why, sizeof link->why, "%s", why);
}

refit_status rft_shard_link_lose(rft_shard_link *link, const char *why, int64_t now,
                                 refit_error *error)
{
    log_loss(link, why);
    link->joined = false;
    link->heartbeat_ms = link->common->config->broadcast_heartbeat_ms;
    link->next_beat = rft_after_ms(now, link->heartbeat_ms);
    rft_send_queue_reset(&link->send_queue);
    link->failures_seen = link->send_queue.failures;
    RFT_REFUSE_IF(rft_shard_link_lacks(link), error, REFIT_ERR_PEER,
                  "rank %u at %.100s is lost, and frames of version %llu with it: %.200s",
                  link->rank, place_of(link), (unsigned long long)link->fetch.version, why);
    return REFIT_OK;
}

/* ---- Messages of the rank */

static void adopt(rft_shard_link *link, const rft_message *welcome, int64_t now)
{
    link->joined = true;
    link->told = false;
    link->window = welcome->as.welcome.window;
    link->heartbeat_ms = welcome->as.welcome.heartbeat_ms;
    link->heartbeat_timeout_ms = welcome->as.welcome.heartbeat_timeout_ms;
    link->next_beat = rft_after_ms(now, link->heartbeat_ms);
    link->why[0] = '\0';
    ask(link);
}

/* One of another epoch is of a rank that has not joined the coordinator, or has left it. */
static refit_status answer_welcome(rft_shard_link *link, const rft_message *welcome, int64_t now,
                                   refit_error *error)
{
    refit_error why;
    if (welcome->as.welcome.protocol != RFT_PROTOCOL) {
        rft_message_say_protocols(welcome->as.welcome.protocol, RFT_PROTOCOL, why.text);
        return rft_shard_link_lose(link, why.text, now, error);
    }
    if (rft_welcome_check(welcome, &why) != REFIT_OK)
        return rft_shard_link_lose(link, why.text, now, error);
    bool ours = welcome->as.welcome.epoch == link->common->epoch &&
                welcome->as.welcome.frame_bytes == link->common->frame_bytes;
    if (!ours && link->joined)
        return rft_shard_link_lose(link, "it has left the other ranks", now, error);
    if (ours && !link->joined) adopt(link, welcome, now);
    return REFIT_OK;
}

static refit_status answer_leave(rft_shard_link *link, rft_view reason, int64_t now,
                                 refit_error *error)
{
    char why[RFT_SENTENCE_BYTES];
    rft_view_print(reason, why, sizeof why);
    return rft_shard_link_lose(link, why, now, error);
}

/* The rank awaits the answer where it closes. */
static refit_status answer_bye(rft_shard_link *link, const rft_message *bye, int64_t now,
                               refit_error *error)
{
    bool joined = link->joined;
    refit_status status = answer_leave(link, bye->as.bye.reason, now, error);
    if (joined) send_bye(link);
    return status;
}

/* A breach of the protocol is the rank's alone: the coordinator is told that the version failed. */
static refit_status answer_frame(rft_shard_link *link, const rft_message *frame, rft_view payload,
                                 int64_t now, refit_error *error)
{
    refit_error why;
    bool ours = rft_shard_link_is_fetching(link) && frame->as.frame.version == link->fetch.version;
    if (!ours) return REFIT_OK;
    refit_status status = rft_fetch_frame(&link->fetch, frame, payload, &why);
    if (status == REFIT_ERR_PROTOCOL) return rft_shard_link_lose(link, why.text, now, error);
    return status == REFIT_OK ? REFIT_OK : rft_fail(error, status, "%s", why.text);
}

static refit_status answer_abort(const rft_shard_link *link, const rft_message *message,
                                 refit_error *error)
{
    char reason[RFT_SENTENCE_BYTES];
    bool ours = rft_shard_link_lacks(link) && message->as.failed.version == link->fetch.version;
    if (!ours) return REFIT_OK;
    rft_view_print(message->as.failed.reason, reason, sizeof reason);
    bool stale = message->as.failed.code == REFIT_ERR_STALE;
    return rft_fail(error, stale ? REFIT_ERR_STALE : REFIT_ERR_PEER,
                    "rank %u at %.100s does not serve version %llu: %.200s", link->rank,
                    place_of(link), (unsigned long long)link->fetch.version, reason);
}

/* What only a rank that is joined says. */
static refit_status answer_joined(rft_shard_link *link, const rft_message *message,
                                  rft_view payload, int64_t now, refit_error *error)
{
    char why[64];
    switch (message->kind) {
    case RFT_BEAT: return REFIT_OK;
    case RFT_FRAME: return answer_frame(link, message, payload, now, error);
    case RFT_ABORT: return answer_abort(link, message, error);
    default:
        snprintf(why, sizeof why, "it says %s to a worker that fetches",
                 rft_message_kind_name(message->kind));
        return rft_shard_link_lose(link, why, now, error);
    }
}

refit_status rft_shard_link_message(rft_shard_link *link, const rft_message *message,
                                    rft_view payload, int64_t now, refit_error *error)
{
    bool other = message->kind == RFT_BEAT && message->as.beat.held.epoch != link->common->epoch;
    if (other) return REFIT_OK;
    link->heard = now;
    switch (message->kind) {
    case RFT_WELCOME: return answer_welcome(link, message, now, error);
    case RFT_REFUSE: return answer_leave(link, message->as.refuse.reason, now, error);
    case RFT_BYE: return answer_bye(link, message, now, error);
    default: return link->joined ? answer_joined(link, message, payload, now, error) : REFIT_OK;
    }
}

/* ---- Time */

static int64_t silence_at(const rft_shard_link *link)
{
    return rft_after_ms(link->heard, link->heartbeat_timeout_ms);
}

refit_status rft_shard_link_tick(rft_shard_link *link, int64_t now, refit_error *error)
{
    char why[64];
    if (link->send_queue.failures != link->failures_seen)
        return rft_shard_link_lose(link, "messages to it could not be sent", now, error);
    if (link->joined && now >= silence_at(link)) {
        snprintf(why, sizeof why, "silent for %u ms", link->heartbeat_timeout_ms);
        return rft_shard_link_lose(link, why, now, error);
    }
    if (now < link->next_beat) return REFIT_OK;
    if (link->joined)
        send_beat(link);
    else
        send_hello(link);
    link->next_beat = rft_after_ms(now, link->heartbeat_ms);
    return REFIT_OK;
}

int64_t rft_shard_link_tick_at(const rft_shard_link *link)
{
    bool silent = link->joined && silence_at(link) < link->next_beat;
    return silent ? silence_at(link) : link->next_beat;
}
