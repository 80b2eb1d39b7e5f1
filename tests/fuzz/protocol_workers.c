/* The workers' end of the bench: sessions, and users that do as the input says. */
#include <stdio.h>

#include "base/clock.h"
#include "protocol_bench.h"

/* Puts what the session has said into the line to the trainer. */
static void send_all(protocol_bench *bench, uint32_t at)
{
    rft_send_queue *queue = &bench->workers[at].session.send_queue;
    bench_link *link = &bench->links[at];
    rft_outgoing next;
    FUZZ_REQUIRE(queue->failures == 0);
    while (rft_send_queue_take(queue, &next))
        if (link->open) (void)bench_push(&link->up, next.message, (rft_view){NULL, 0});
    rft_send_queue_reset(queue);
}

void __real_rft_mailbox_deliver(rft_mailbox *mailbox, rft_image *image,
                                const rft_session_report *report);
void __wrap_rft_mailbox_deliver(rft_mailbox *mailbox, rft_image *image,
                                const rft_session_report *report);

void __wrap_rft_mailbox_deliver(rft_mailbox *mailbox, rft_image *image,
                                const rft_session_report *report)
{
    FUZZ_REQUIRE(mailbox->ready == NULL);
    __real_rft_mailbox_deliver(mailbox, image, report);
}

void bench_worker_moved(protocol_bench *bench, uint32_t at, uint32_t by)
{
    send_all(bench, at);
    law_worker_moved(bench, at, by);
}

/* Some of a tensor, or two whole ones. */
static const rft_selection *part_of(uint32_t at)
{
    static refit_selection rows[] = {
        {.size = sizeof(refit_selection), .name = "first", .rank = 1, .first = {8}, .shape = {24}}};
    static refit_selection whole[] = {{.size = sizeof(refit_selection), .name = "second"},
                                      {.size = sizeof(refit_selection), .name = "thi*"}};
    static const rft_selection selections[] = {{.list = rows, .count = 1},
                                               {.list = whole, .count = 2}};
    return &selections[at];
}

void bench_worker_opens(protocol_bench *bench, uint32_t at)
{
    bench_worker *worker = &bench->workers[at];
    memset(worker, 0, sizeof *worker);
    /* No descriptors: no thread waits for them. */
    worker->mailbox.ready_fd = worker->mailbox.wake_fd = -1;
    FUZZ_REQUIRE(rft_mutex_open(&worker->mailbox.lock, NULL) == REFIT_OK);
    (void)snprintf(worker->identity.worker, sizeof worker->identity.worker, "w%u", at);
    strcpy(worker->identity.host, "bench");
    worker->identity.instance = ++bench->instances;
    worker->may_end = !bench_key_counts(bench, at);
    rft_session_init(&worker->session, &bench->config, &worker->identity, &worker->mailbox,
                     bench->now);
    if (bench->parts && at < 2) rft_session_select(&worker->session, part_of(at), bench->now);
    worker->before = worker->session.report.state;
}

void bench_worker_closes(protocol_bench *bench, uint32_t at, bool says_goodbye)
{
    bench_worker *worker = &bench->workers[at];
    if (says_goodbye) rft_session_leave(&worker->session);
    send_all(bench, at);
    rft_session_close(&worker->session);
    rft_mailbox_close(&worker->mailbox);
    /* What it said last arrives before its connection ends. */
    if (says_goodbye) bench_deliver_up(bench, at, LINE_MOST);
    bench_connect(bench, at);
}

/* `before` was ready before something happened. A version that the user has not taken gives way to
 * a newer one; one that it has taken does not. */
static void look_for_delivery(protocol_bench *bench, uint32_t at, const rft_image *before)
{
    const bench_worker *worker = &bench->workers[at];
    const rft_image *ready = worker->mailbox.ready;
    if (ready == NULL || ready == before) return;
    FUZZ_REQUIRE(!worker->taken);
    law_delivered(bench, at, ready);
}

void bench_worker_hears(protocol_bench *bench, uint32_t at, rft_view bytes, rft_view payload)
{
    bench_worker *worker = &bench->workers[at];
    rft_session *session = &worker->session;
    rft_message message;
    refit_error why;
    if (rft_message_decode(bytes, &session->limits, &message, &why) == REFIT_OK) {
        const rft_image *ready = worker->mailbox.ready;
        if (message.kind == RFT_COMMIT) worker->told_commit = message.as.commit.version;
        rft_session_message(session, &message, payload, bench->now);
        look_for_delivery(bench, at, ready);
        if (!session->told) worker->told_commit = 0;
        bench_worker_moved(bench, at, message.kind);
    } else {
        rft_session_garbage(session, &why, bench->now);
        bench_worker_moved(bench, at, LAW_GARBAGE);
    }
}

static void decide(protocol_bench *bench, uint32_t at, uint32_t decision)
{
    bench_worker *worker = &bench->workers[at];
    rft_session *session = &worker->session;
    const rft_image *ready = worker->mailbox.ready;
    worker->taken = false;
    worker->open = true;
    if (decision < 2 && rft_image_is_intact(session->applying)) {
        rft_session_accept(session, bench->now);
    } else {
        worker->lost = decision != 2;
        rft_session_refuse(session, REFIT_ERR_CALLBACK, decision == 2, "the input wants it so",
                           bench->now);
    }
    look_for_delivery(bench, at, ready);
    worker->told_commit = 0;
}

void bench_user_acts(protocol_bench *bench, uint32_t at, uint32_t decision)
{
    bench_worker *worker = &bench->workers[at];
    if (worker->open) {
        worker->open = false;
        rft_session_release(&worker->session, bench->now);
    } else if (worker->taken) {
        decide(bench, at, decision);
    } else if (worker->mailbox.ready != NULL) {
        rft_image *image = NULL;
        FUZZ_REQUIRE(rft_mailbox_take(&worker->mailbox, 0, &image, NULL) == REFIT_OK);
        worker->taken = true;
    }
    bench_worker_moved(bench, at, LAW_USER);
}
