/* A worker's session without sockets, clock or threads. */
#include "tests/support/session_bench.h"

#include <stdlib.h>

#include "tests/support/quick_config.h"
#include "tests/support/test.h"

static void note_resend(session_bench *bench, const rft_message *message)
{
    bench->resent_count = (uint32_t)(message->as.resend.sequences.count / 4);
    const unsigned char *at = message->as.resend.sequences.data;
    for (uint32_t i = 0; i < bench->resent_count; i++)
        bench->resent[i] = rft_get_u32(at + (size_t)i * 4);
}

/* Takes the messages out of the session's send queue. */
static void listen_to(session_bench *bench)
{
    rft_outgoing next;
    while (rft_send_queue_take(&bench->session.send_queue, &next)) {
        rft_message *message = &bench->said[bench->said_count];
        assert_true(bench->said_count < BENCH_SAID);
        assert_ok(rft_message_decode(next.message, &bench->session.limits, message, NULL));
        bench->said_count++;
        if (message->kind == RFT_RESEND) note_resend(bench, message);
    }
    rft_send_queue_reset(&bench->session.send_queue);
}

void __real_rft_mailbox_deliver(rft_mailbox *mailbox, rft_image *image,
                                const rft_session_report *report);
void __wrap_rft_mailbox_deliver(rft_mailbox *mailbox, rft_image *image,
                                const rft_session_report *report);

/* A session delivers no version before the one before it was taken or withdrawn. */
void __wrap_rft_mailbox_deliver(rft_mailbox *mailbox, rft_image *image,
                                const rft_session_report *report)
{
    assert_null(mailbox->ready);
    __real_rft_mailbox_deliver(mailbox, image, report);
}

void bench_open(session_bench *bench)
{
    memset(bench, 0, sizeof *bench);
    bench->config = quick_config();
    bench->config.broadcast_shm = REFIT_SHM_OFF;
    strcpy(bench->identity.worker, "bench");
    strcpy(bench->identity.host, "here");
    bench->identity.instance = 5;
    bench->now = 1000;
    for (uint32_t i = 0; i < 4; i++)
        sample_open(&bench->samples[i], i + 1);
    assert_ok(rft_mailbox_open(&bench->mailbox, NULL));
    rft_session_init(&bench->session, &bench->config, &bench->identity, &bench->mailbox,
                     bench->now);
}

void bench_close(session_bench *bench)
{
    rft_session_close(&bench->session);
    rft_mailbox_close(&bench->mailbox);
    for (uint32_t i = 0; i < 4; i++)
        sample_close(&bench->samples[i]);
}

void bench_renew(session_bench *bench)
{
    bench_close(bench);
    bench_open(bench);
}

void bench_hear(session_bench *bench, rft_message message)
{
    rft_session_message(&bench->session, &message, (rft_view){0}, bench->now);
    listen_to(bench);
}

void bench_tick(session_bench *bench, uint32_t ms)
{
    bench->now += (int64_t)ms * 1000000;
    rft_session_tick(&bench->session, bench->now);
    listen_to(bench);
}

const rft_message *bench_said(session_bench *bench, rft_message_kind kind)
{
    listen_to(bench);
    for (uint32_t i = bench->said_count; i > 0; i--) {
        if (bench->said[i - 1].kind == kind) return &bench->said[i - 1];
    }
    return NULL;
}

uint32_t bench_count(session_bench *bench, rft_message_kind kind)
{
    listen_to(bench);
    uint32_t count = 0;
    for (uint32_t i = 0; i < bench->said_count; i++)
        count += bench->said[i].kind == kind ? 1 : 0;
    return count;
}

uint32_t bench_count_all(session_bench *bench)
{
    listen_to(bench);
    return bench->said_count;
}

void bench_forget(session_bench *bench)
{
    listen_to(bench);
    bench->said_count = 0;
    bench->resent_count = 0;
}

sample_version *bench_sample(session_bench *bench, uint64_t version)
{
    assert_in_range(version, 1, 4);
    return &bench->samples[version - 1];
}

rft_session_state bench_state(const session_bench *bench)
{
    return bench->session.report.state;
}

void bench_join(session_bench *bench, uint64_t epoch)
{
    bench_tick(bench, bench->config.broadcast_heartbeat_ms);
    assert_non_null(bench_said(bench, RFT_HELLO));
    bench_hear(bench, sample_welcome(epoch, NULL));
    assert_int_equal(bench_state(bench), RFT_SESSION_JOINING);
    bench_hear(bench, sample_beat(epoch));
    assert_int_equal(bench_state(bench), RFT_SESSION_CURRENT);
}

void bench_offer(session_bench *bench, uint64_t version, uint64_t base)
{
    uint64_t epoch = bench->session.report.epoch;
    sample_version *sample = bench_sample(bench, version);
    if (bench->session.catalog == NULL) bench_hear(bench, sample_manifest(sample, epoch));
    bench_hear(bench, sample_offer(sample, epoch, base, NULL, 0));
}

void bench_frame(session_bench *bench, uint64_t version, uint64_t base, uint32_t sequence,
                 bool damaged)
{
    sample_version *sample = bench_sample(bench, version);
    unsigned char *same = base == 0 ? NULL : sample_same(sample, bench_sample(bench, base));
    rft_view payload;
    rft_message frame = sample_frame(sample, sequence, same, &payload);
    if (damaged) frame.as.frame.hash ^= 1;
    rft_session_message(&bench->session, &frame, payload, bench->now);
    listen_to(bench);
    free(same);
}

void bench_frames(session_bench *bench, uint64_t version, uint64_t base)
{
    for (uint32_t i = 0; i < bench_sample(bench, version)->manifest->frame_count; i++)
        bench_frame(bench, version, base, i, false);
}

void bench_stage(session_bench *bench, uint64_t version, uint64_t base)
{
    bench_offer(bench, version, base);
    bench_frames(bench, version, base);
    bench_hear(bench, sample_seal(bench_sample(bench, version)));
    assert_int_equal(bench_state(bench), RFT_SESSION_STAGED);
}

void bench_commit(session_bench *bench, uint64_t version)
{
    bench_hear(bench, sample_commit(bench_sample(bench, version)));
}

rft_image *bench_take(session_bench *bench)
{
    rft_image *image = NULL;
    assert_ok(rft_mailbox_take(&bench->mailbox, 0, &image, NULL));
    return image;
}

void bench_apply(session_bench *bench, uint64_t version, uint64_t base)
{
    bench_stage(bench, version, base);
    bench_commit(bench, version);
    bench_take(bench);
    rft_session_accept(&bench->session, bench->now);
    rft_session_release(&bench->session, bench->now);
    assert_int_equal(bench_state(bench), RFT_SESSION_CURRENT);
}

void bench_hold(session_bench *bench, uint64_t version)
{
    bench_join(bench, BENCH_EPOCH);
    bench_apply(bench, version, 0);
}

uint32_t bench_failed(session_bench *bench)
{
    const rft_message *failed = bench_said(bench, RFT_FAILED);
    return failed == NULL ? REFIT_OK : failed->as.failed.code;
}

void bench_reach(session_bench *bench, rft_session_state state)
{
    if (state == RFT_SESSION_CONNECTING) return;
    if (state == RFT_SESSION_JOINING) {
        bench_tick(bench, 0);
        bench_hear(bench, sample_welcome(BENCH_EPOCH, NULL));
        return;
    }
    bench_join(bench, BENCH_EPOCH);
    if (state == RFT_SESSION_STAGING) bench_offer(bench, 1, 0);
    if (state >= RFT_SESSION_STAGED) bench_stage(bench, 1, 0);
    if (state == RFT_SESSION_APPLYING) bench_commit(bench, 1);
}

int bench_setup(void **state)
{
    static session_bench bench;
    bench_open(&bench);
    *state = &bench;
    return 0;
}

int bench_teardown(void **state)
{
    bench_close(*state);
    return 0;
}

void assert_image_is(const rft_image *image, const sample_version *sample)
{
    for (uint32_t i = 0; i < sample->manifest->count; i++) {
        const rft_manifest_tensor *tensor = &sample->manifest->tensors[i];
        assert_memory_equal(image->bytes + tensor->offset, sample->image + tensor->offset,
                            tensor->bytes);
    }
}
