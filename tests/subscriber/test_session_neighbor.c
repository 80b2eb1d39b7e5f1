/* Workers of one host: one receives a version into an image that it shares, the others map it, and
 * one of them goes on where the first is lost. */
#include <errno.h>

#include "tests/support/session_bench.h"
#include "tests/support/test.h"

static bool without_memory;

int __real_memfd_create(const char *name, unsigned flags);
int __wrap_memfd_create(const char *name, unsigned flags);

int __wrap_memfd_create(const char *name, unsigned flags)
{
    if (!without_memory) return __real_memfd_create(name, flags);
    errno = ENOSYS;
    return -1;
}

typedef struct host {
    session_bench receiver;
    session_bench neighbor;
} host;

static void open_worker(session_bench *bench)
{
    bench_open(bench);
    rft_segment_place(bench->session.place);
    assert_true(bench->session.place[0] != '\0');
    bench_join(bench, BENCH_EPOCH);
    bench_forget(bench);
}

static int host_setup(void **state)
{
    static host fixture;
    open_worker(&fixture.receiver);
    open_worker(&fixture.neighbor);
    *state = &fixture;
    return 0;
}

static int host_teardown(void **state)
{
    host *on = *state;
    bench_close(&on->neighbor);
    bench_close(&on->receiver);
    return 0;
}

#define HOST_TEST(name) TEST_ON(host *on, name, host_setup, host_teardown)

static void offer(session_bench *bench, uint64_t version, uint64_t base, bool share,
                  const char *segment)
{
    const sample_version *sample = bench_sample(bench, version);
    if (bench->session.catalog == NULL) bench_hear(bench, sample_manifest(sample, BENCH_EPOCH));
    rft_message message = sample_offer(sample, BENCH_EPOCH, base, segment, 0);
    message.as.offer.share = share;
    message.as.offer.neighbor = segment != NULL;
    bench_hear(bench, message);
}

static const char *segment_of(const session_bench *bench)
{
    return bench->session.receive.image->memory.name;
}

/* The receiver is offered the version, and the neighbor its image. */
static void offer_both(host *on, uint64_t version, uint64_t base)
{
    offer(&on->receiver, version, base, true, NULL);
    assert_int_equal(bench_state(&on->receiver), STAGING);
    offer(&on->neighbor, version, 0, false, segment_of(&on->receiver));
    assert_int_equal(bench_state(&on->neighbor), STAGING);
    assert_int_equal(on->neighbor.session.report.path, REFIT_PATH_NEIGHBOR);
}

static void stage_both(host *on, uint64_t version, uint64_t base)
{
    offer_both(on, version, base);
    bench_frames(&on->receiver, version, base);
    bench_hear(&on->receiver, sample_seal(bench_sample(&on->receiver, version)));
    assert_int_equal(bench_state(&on->receiver), STAGED);
    assert_int_equal(bench_state(&on->neighbor), STAGING);
    bench_hear(&on->neighbor, sample_seal(bench_sample(&on->neighbor, version)));
    assert_int_equal(bench_state(&on->neighbor), STAGED);
}

static void accept(session_bench *bench, uint64_t version)
{
    bench_commit(bench, version);
    assert_image_is(bench_take(bench), bench_sample(bench, version));
    rft_session_accept(&bench->session, bench->now);
    rft_session_release(&bench->session, bench->now);
}

/* Private memory of the worker that versions lie in. */
static uint32_t count_own(const session_bench *bench)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++)
        count += bench->session.images.private[i].memory.memory != NULL;
    return count;
}

/* ---- In good order */

HOST_TEST(a_neighbor_reads_what_the_receiver_received)
{
    stage_both(on, 1, 0);
    bench_commit(&on->receiver, 1);
    bench_commit(&on->neighbor, 1);
    rft_image *first = bench_take(&on->receiver), *second = bench_take(&on->neighbor);
    assert_image_is(first, bench_sample(&on->receiver, 1));
    assert_image_is(second, bench_sample(&on->neighbor, 1));
    assert_ptr_not_equal(first->view, first->bytes);
    /* What a user writes stays with it. */
    memset((unsigned char *)(uintptr_t)first->view, 7, 100);
    memset((unsigned char *)(uintptr_t)second->view, 8, 100);
    assert_image_is(first, bench_sample(&on->receiver, 1));
    assert_image_is(second, bench_sample(&on->neighbor, 1));
    assert_int_equal(second->view[0], 8);
    assert_int_equal(count_own(&on->neighbor), 0);
}

HOST_TEST(one_image_is_left_between_versions)
{
    for (uint64_t version = 1; version <= 3; version++) {
        stage_both(on, version, 0);
        accept(&on->receiver, version);
        accept(&on->neighbor, version);
        assert_int_equal(count_own(&on->receiver), 1);
        assert_int_equal(count_own(&on->neighbor), 0);
    }
}

HOST_TEST(a_mapped_image_is_a_base)
{
    stage_both(on, 1, 0);
    accept(&on->receiver, 1);
    accept(&on->neighbor, 1);
    bench_close(&on->receiver); /* its memory stays, as the neighbor has it mapped */
    open_worker(&on->receiver);
    bench_stage(&on->neighbor, 2, 1);
    accept(&on->neighbor, 2);
}

HOST_TEST(memory_of_versions_before_is_given_back)
{
    offer(&on->neighbor, 1, 0, false, NULL);
    bench_frames(&on->neighbor, 1, 0);
    bench_hear(&on->neighbor, sample_seal(bench_sample(&on->neighbor, 1)));
    accept(&on->neighbor, 1);
    assert_int_equal(count_own(&on->neighbor), 1);
    stage_both(on, 2, 0);
    accept(&on->neighbor, 2);
    stage_both(on, 3, 0);
    assert_int_equal(count_own(&on->neighbor), 0);
}

/* ---- Names */

HOST_TEST(the_first_pull_says_where_the_frames_go)
{
    offer(&on->receiver, 1, 0, true, NULL);
    assert_int_equal(bench_count(&on->receiver, RFT_PULL), 1);
    assert_true(bench_said(&on->receiver, RFT_PULL)->as.pull.image.count > 0);
    assert_int_equal(bench_said(&on->receiver, RFT_PULL)->as.pull.have.count, 0);
    bench_forget(&on->receiver);
    offer(&on->receiver, 2, 0, false, NULL);
    assert_int_equal(bench_said(&on->receiver, RFT_PULL)->as.pull.image.count, 0);
}

HOST_TEST(an_image_that_cannot_be_mapped_is_refused)
{
    static const char *const names[] = {"/proc/1/fd/7:1f", "nonsense", "/proc/self/fd/1:2"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        bench_forget(&on->neighbor);
        offer(&on->neighbor, 1, 0, false, names[i]);
        assert_int_equal(bench_failed(&on->neighbor), REFIT_ERR_UNSUPPORTED);
        assert_int_equal(bench_state(&on->neighbor), CURRENT);
    }
    bench_forget(&on->neighbor);
    on->neighbor.session.place[0] = '\0';
    offer(&on->neighbor, 1, 0, false, names[0]);
    assert_int_equal(bench_failed(&on->neighbor), REFIT_ERR_PROTOCOL);
}

HOST_TEST(an_image_of_another_version_is_refused)
{
    stage_both(on, 1, 0);
    accept(&on->receiver, 1);
    accept(&on->neighbor, 1);
    const rft_image *image = on->receiver.session.held_image;
    offer(&on->neighbor, 2, 0, false, image->memory.name);
    assert_int_equal(bench_failed(&on->neighbor), REFIT_ERR_UNSUPPORTED);
    stage_both(on, 3, 0);
}

HOST_TEST(an_image_with_gaps_is_refused)
{
    offer_both(on, 1, 0);
    uint32_t frames = bench_sample(&on->receiver, 1)->manifest->frame_count;
    for (uint32_t i = 1; i < frames; i++)
        bench_frame(&on->receiver, 1, 0, i, false);
    bench_hear(&on->neighbor, sample_seal(bench_sample(&on->neighbor, 1)));
    assert_int_equal(bench_failed(&on->neighbor), REFIT_ERR_SECURITY);
    assert_int_equal(bench_state(&on->neighbor), CURRENT);
}

HOST_TEST(other_bytes_are_found_with_verify_always)
{
    on->neighbor.config.broadcast_verify = REFIT_VERIFY_ALWAYS;
    offer_both(on, 1, 0);
    bench_frames(&on->receiver, 1, 0);
    on->receiver.session.receive.image->memory.memory[0] ^= 1;
    bench_hear(&on->neighbor, sample_seal(bench_sample(&on->neighbor, 1)));
    bench_tick(&on->neighbor, 0);
    assert_int_equal(bench_failed(&on->neighbor), REFIT_ERR_CORRUPT);
}

HOST_TEST(where_there_is_no_such_memory_the_worker_keeps_it_for_itself)
{
    without_memory = true;
    offer(&on->receiver, 1, 0, true, NULL);
    without_memory = false;
    assert_int_equal(bench_said(&on->receiver, RFT_PULL)->as.pull.image.count, 0);
    bench_frames(&on->receiver, 1, 0);
    bench_hear(&on->receiver, sample_seal(bench_sample(&on->receiver, 1)));
    accept(&on->receiver, 1);
}

/* ---- The receiver is lost */

/* Frames 0 to `count` - 1 are there when the receiver ends; the neighbor takes over. */
static void take_over(host *on, uint32_t count, bool share)
{
    offer_both(on, 1, 0);
    for (uint32_t i = 0; i < count; i++)
        bench_frame(&on->receiver, 1, 0, i, false);
    bench_close(&on->receiver);
    open_worker(&on->receiver);
    bench_forget(&on->neighbor);
    offer(&on->neighbor, 1, 0, share, NULL);
    while (rft_receive_is_busy(&on->neighbor.session.receive)) {
        assert_true(rft_session_tick_at(&on->neighbor.session) <= on->neighbor.now);
        bench_tick(&on->neighbor, 0);
    }
}

HOST_TEST(a_neighbor_goes_on_with_the_frames_that_are_there)
{
    uint32_t frames = bench_sample(&on->receiver, 1)->manifest->frame_count;
    on->neighbor.session.receive.verify_bytes = 1; /* a frame a tick */
    take_over(on, 2, true);
    const rft_message *pull = bench_said(&on->neighbor, RFT_PULL);
    assert_int_equal(pull->as.pull.have.count, (frames + 7) / 8);
    assert_true(pull->as.pull.image.count > 0);
    assert_int_equal(((unsigned char *)on->neighbor.session.receive.have.data)[0], 3);
    for (uint32_t i = 2; i < frames; i++)
        bench_frame(&on->neighbor, 1, 0, i, false);
    bench_hear(&on->neighbor, sample_seal(bench_sample(&on->neighbor, 1)));
    assert_int_equal(bench_state(&on->neighbor), STAGED);
    accept(&on->neighbor, 1);
}

HOST_TEST(frames_come_while_it_copies)
{
    uint32_t frames = bench_sample(&on->receiver, 1)->manifest->frame_count;
    on->neighbor.session.receive.verify_bytes = 1;
    offer_both(on, 1, 0);
    for (uint32_t i = 0; i < 2; i++)
        bench_frame(&on->receiver, 1, 0, i, false);
    bench_forget(&on->neighbor);
    offer(&on->neighbor, 1, 0, true, NULL);
    assert_int_equal(bench_said(&on->neighbor, RFT_PULL)->as.pull.have.count, (frames + 7) / 8);
    for (uint32_t i = 1; i < frames; i++)
        bench_frame(&on->neighbor, 1, 0, i, false);
    assert_true(rft_receive_is_busy(&on->neighbor.session.receive));
    bench_hear(&on->neighbor, sample_seal(bench_sample(&on->neighbor, 1)));
    while (rft_receive_is_busy(&on->neighbor.session.receive))
        bench_tick(&on->neighbor, 0);
    assert_int_equal(bench_state(&on->neighbor), STAGED);
    accept(&on->neighbor, 1);
}

HOST_TEST(a_seal_that_comes_while_it_copies_is_kept)
{
    offer_both(on, 1, 0);
    bench_frames(&on->receiver, 1, 0);
    bench_close(&on->receiver);
    open_worker(&on->receiver);
    offer(&on->neighbor, 1, 0, false, NULL);
    assert_true(rft_receive_is_busy(&on->neighbor.session.receive));
    bench_hear(&on->neighbor, sample_seal(bench_sample(&on->neighbor, 1)));
    bench_tick(&on->neighbor, 0);
    assert_int_equal(bench_state(&on->neighbor), STAGED); /* no frame is left to fetch */
    accept(&on->neighbor, 1);
}

HOST_TEST(a_second_neighbor_goes_on_after_the_first)
{
    take_over(on, 2, true);
    session_bench *third = &on->receiver;
    offer(third, 1, 0, false, segment_of(&on->neighbor));
    bench_frame(&on->neighbor, 1, 0, 2, false);
    bench_close(&on->neighbor);
    open_worker(&on->neighbor);
    offer(third, 1, 0, false, NULL);
    bench_tick(third, 0);
    assert_int_equal(((unsigned char *)third->session.receive.have.data)[0], 7);
}

HOST_TEST(damage_in_what_was_there_is_found_at_the_end)
{
    offer_both(on, 1, 0);
    bench_frames(&on->receiver, 1, 0);
    on->receiver.session.receive.image->memory.memory[0] ^= 1;
    bench_close(&on->receiver);
    open_worker(&on->receiver);
    offer(&on->neighbor, 1, 0, false, NULL);
    bench_tick(&on->neighbor, 0);
    bench_hear(&on->neighbor, sample_seal(bench_sample(&on->neighbor, 1)));
    assert_int_equal(bench_failed(&on->neighbor), REFIT_ERR_CORRUPT);
    bench_stage(&on->neighbor, 1, 0); /* offered once more, all of it is fetched */
}

HOST_TEST(another_version_begins_with_nothing)
{
    offer_both(on, 1, 0);
    bench_frame(&on->receiver, 1, 0, 0, false);
    bench_forget(&on->neighbor);
    offer(&on->neighbor, 2, 0, true, NULL);
    assert_false(rft_receive_is_busy(&on->neighbor.session.receive));
    assert_int_equal(bench_said(&on->neighbor, RFT_PULL)->as.pull.have.count, 0);
    offer_both(on, 3, 0);
    bench_hear(&on->neighbor, sample_abort(bench_sample(&on->neighbor, 3)));
    assert_int_equal(bench_state(&on->neighbor), CURRENT);
    offer(&on->neighbor, 3, 0, false, NULL);
    assert_false(rft_receive_is_busy(&on->neighbor.session.receive));
}

HOST_TEST(a_lost_connection_ends_what_is_copied)
{
    on->neighbor.session.receive.verify_bytes = 1;
    offer_both(on, 1, 0);
    bench_frames(&on->receiver, 1, 0);
    offer(&on->neighbor, 1, 0, false, NULL);
    bench_tick(&on->neighbor, 0);
    assert_true(rft_receive_is_busy(&on->neighbor.session.receive));
    rft_session_disconnect(&on->neighbor.session, 0, on->neighbor.now);
    assert_false(rft_receive_is_busy(&on->neighbor.session.receive));
    bench_join(&on->neighbor, BENCH_EPOCH);
    bench_stage(&on->neighbor, 1, 0);
}

/* ---- Parts of versions */

static rft_want *want_of(const rft_manifest *manifest, uint64_t columns)
{
    rft_want *want = NULL;
    rft_bytes list = {0};
    const rft_want_rows rows = {1, 0, 3, 65569, columns};
    assert_ok(rft_want_append(&list, &rows, NULL));
    assert_ok(rft_want_open(manifest, rft_bytes_view(&list), &want, NULL));
    rft_bytes_close(&list);
    return want;
}

static void offer_part(session_bench *bench, bool share, const char *segment, const rft_want *want)
{
    const sample_version *sample = bench_sample(bench, 1);
    if (bench->session.catalog == NULL) bench_hear(bench, sample_manifest(sample, BENCH_EPOCH));
    rft_message message = sample_offer(sample, BENCH_EPOCH, 0, segment, 0);
    message.as.offer.share = share;
    message.as.offer.neighbor = segment != NULL;
    message.as.offer.want = rft_bytes_view(&want->encoded);
    bench_hear(bench, message);
}

static void send_part(session_bench *bench, const rft_want *want)
{
    sample_version *sample = bench_sample(bench, 1);
    for (uint32_t i = 0; i < sample->manifest->frame_count; i++) {
        rft_frame frame;
        rft_message message = {.kind = RFT_FRAME};
        const rft_frame_source source = {.image = sample->image, .want = want};
        if (rft_want_frame(want, i) == RFT_WANT_NONE) continue;
        assert_ok(rft_frame_encode(sample->manifest, i, &source, &sample->modes, &sample->scratch,
                                   &frame, NULL));
        message.as.frame.version = 1;
        message.as.frame.sequence = i;
        message.as.frame.hash = frame.hash;
        message.as.frame.modes = rft_bytes_view(&sample->modes);
        rft_session_message(&bench->session, &message, frame.payload, bench->now);
    }
}

static void check_part(session_bench *bench, uint64_t columns)
{
    const sample_version *sample = bench_sample(bench, 1);
    bench_hear(bench, sample_seal(sample));
    bench_commit(bench, 1);
    const rft_image *image = bench_take(bench);
    uint64_t at = sample->manifest->tensors[1].offset;
    for (uint32_t row = 0; row < 3; row++, at += 65569)
        assert_memory_equal(image->bytes + at, sample->image + at, columns);
}

/* A receiver of `before` columns is lost, and the neighbor is to receive `after`. */
static void grow(host *on, uint64_t before, uint64_t after)
{
    const rft_manifest *manifest = bench_sample(&on->receiver, 1)->manifest;
    rft_want *first = want_of(manifest, before), *second = want_of(manifest, after);
    offer_part(&on->receiver, true, NULL, first);
    offer_part(&on->neighbor, false, segment_of(&on->receiver), first);
    send_part(&on->receiver, first);
    bench_close(&on->receiver);
    open_worker(&on->receiver);
    bench_forget(&on->neighbor);
    offer_part(&on->neighbor, true, NULL, second);
    bool resumes = bench_said(&on->neighbor, RFT_PULL)->as.pull.have.count > 0;
    assert_int_equal(resumes, after <= before);
    if (!resumes) send_part(&on->neighbor, second);
    while (rft_receive_is_busy(&on->neighbor.session.receive))
        bench_tick(&on->neighbor, 0);
    check_part(&on->neighbor, after);
    rft_want_release(first);
    rft_want_release(second);
}

HOST_TEST(a_part_goes_on_where_the_receiver_is_lost)
{
    grow(on, 100, 100);
}

HOST_TEST(a_larger_part_begins_anew)
{
    grow(on, 100, 200);
}

HOST_TEST(a_part_is_mapped_without_the_rest)
{
    rft_want *want = want_of(bench_sample(&on->receiver, 1)->manifest, 300);
    offer_part(&on->receiver, true, NULL, want);
    offer_part(&on->neighbor, false, segment_of(&on->receiver), want);
    send_part(&on->receiver, want);
    check_part(&on->receiver, 300);
    check_part(&on->neighbor, 300);
    rft_want_release(want);
}

int main(void)
{
    return test_run("session_neighbor");
}
