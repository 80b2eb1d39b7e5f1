/* The workers' end of the bench: sessions, and users that do as the input says. */
#include <stdio.h>

#include "base/clock.h"
#include "protocol_bench.h"

/* What a session's host needs to know. */
typedef struct worker_host {
    protocol_bench *bench;
    uint32_t worker;
} worker_host;

static worker_host hosts[HONEST];

/* A queue that nobody empties costs the connection, as backlog.c has it. */
static void host_send(void *user, const rft_message *message)
{
    const worker_host *host = user;
    bench_link *link = &host->bench->links[host->worker];
    rft_bytes *scratch = &host->bench->scratch;
    rft_bytes_reset(scratch);
    FUZZ_REQUIRE(rft_message_encode(message, &host->bench->workers[host->worker].session.limits,
                                    scratch, NULL) == REFIT_OK);
    if (link->open) (void)bench_push(&link->up, rft_bytes_view(scratch), (rft_view){NULL, 0});
}

static void host_deliver(void *user, rft_image *image)
{
    const worker_host *host = user;
    bench_worker *worker = &host->bench->workers[host->worker];
    FUZZ_REQUIRE(worker->ready == NULL && !worker->taken);
    worker->ready = image;
    law_delivered(host->bench, host->worker, image);
}

static bool host_withdraw(void *user)
{
    const worker_host *host = user;
    bench_worker *worker = &host->bench->workers[host->worker];
    bool there = worker->ready != NULL;
    worker->ready = NULL;
    return there;
}

void bench_worker_opens(protocol_bench *bench, uint32_t at)
{
    bench_worker *worker = &bench->workers[at];
    memset(worker, 0, sizeof *worker);
    hosts[at] = (worker_host){bench, at};
    (void)snprintf(worker->identity.worker, sizeof worker->identity.worker, "w%u", at);
    strcpy(worker->identity.host, "bench");
    worker->identity.instance = ++bench->instances;
    worker->may_end = !bench_key_counts(bench, at);
    rft_session_host host = {&hosts[at], host_send, host_deliver, host_withdraw};
    rft_session_init(&worker->session, &bench->config, &worker->identity, host, bench->now);
    worker->before = worker->session.report.state;
}

void bench_worker_closes(protocol_bench *bench, uint32_t at, bool says_goodbye)
{
    bench_worker *worker = &bench->workers[at];
    if (says_goodbye) rft_session_leave(&worker->session);
    rft_session_close(&worker->session);
    /* What it said last arrives before its connection ends. */
    if (says_goodbye) bench_deliver_up(bench, at, LINE_MOST);
    bench_connect(bench, at);
}

void bench_worker_hears(protocol_bench *bench, uint32_t at, rft_view bytes, rft_view payload)
{
    bench_worker *worker = &bench->workers[at];
    rft_session *session = &worker->session;
    rft_message message;
    refit_error why;
    if (rft_message_decode(bytes, &session->limits, &message, &why) == REFIT_OK) {
        worker->told_commit = message.kind == RFT_COMMIT ? message.as.commit.version : 0;
        rft_session_message(session, &message, payload, bench->now);
        worker->told_commit = 0;
        law_worker_moved(bench, at, message.kind);
    } else {
        rft_session_garbage(session, &why, bench->now);
        law_worker_moved(bench, at, LAW_GARBAGE);
    }
}

static void decide(protocol_bench *bench, uint32_t at, uint32_t decision)
{
    bench_worker *worker = &bench->workers[at];
    rft_session *session = &worker->session;
    worker->taken = false;
    worker->open = true;
    if (decision < 2 && rft_image_is_intact(session->applying)) {
        rft_session_accept(session, bench->now);
    } else {
        worker->lost = decision != 2;
        rft_session_refuse(session, REFIT_ERR_CALLBACK, decision == 2, "the input wants it so",
                           bench->now);
    }
}

void bench_user_acts(protocol_bench *bench, uint32_t at, uint32_t decision)
{
    bench_worker *worker = &bench->workers[at];
    if (worker->open) {
        worker->open = false;
        rft_session_release(&worker->session, bench->now);
    } else if (worker->taken) {
        decide(bench, at, decision);
    } else if (worker->ready != NULL) {
        worker->ready = NULL;
        worker->taken = true;
    }
    law_worker_moved(bench, at, LAW_USER);
}
