/* broadcast.verify: always digests shared memory part by part, and all else goes on meanwhile. */
#include "tests/support/raw_publisher.h"
#include "tests/support/session_bench.h"
#include "tests/support/test.h"

#define PART_BYTES (16u * 1024)
#define PARTS_MOST 64u

typedef struct verify_bench {
    session_bench bench;
    rft_segment probe;
    rft_segment slot; /* with version 1 */
} verify_bench;

static int verify_setup(void **state)
{
    static verify_bench fixture;
    session_bench *bench = &fixture.bench;
    bench_open(bench);
    bench->config.broadcast_shm = REFIT_SHM_REQUIRE;
    bench->config.broadcast_verify = REFIT_VERIFY_ALWAYS;
    bench->session.receive.verify_bytes = PART_BYTES;
    assert_ok(rft_segment_create(&fixture.probe, 8, NULL));
    memset(fixture.probe.memory, 1, 8);
    raw_slot_open(&fixture.slot, bench_sample(bench, 1));
    bench_tick(bench, 0);
    bench_hear(bench, sample_welcome(BENCH_EPOCH, fixture.probe.name));
    bench_hear(bench, sample_manifest(bench_sample(bench, 1), BENCH_EPOCH));
    assert_int_equal(bench_state(bench), CURRENT);
    *state = &fixture;
    return 0;
}

static int verify_teardown(void **state)
{
    verify_bench *fixture = *state;
    bench_close(&fixture->bench);
    rft_segment_close(&fixture->probe);
    rft_segment_close(&fixture->slot);
    return 0;
}

#define VERIFY_TEST(name) TEST_ON(verify_bench *fixture, name, verify_setup, verify_teardown)

/* Up to the first part, which is left to do. */
static void offer_and_seal(verify_bench *fixture)
{
    session_bench *bench = &fixture->bench;
    const sample_version *sample = bench_sample(bench, 1);
    bench_hear(bench, sample_offer(sample, BENCH_EPOCH, 0, fixture->slot.name, RFT_SEQLOCK_BYTES));
    bench_hear(bench, sample_seal(sample));
    assert_int_equal(bench_state(bench), STAGING);
    assert_int_equal(bench->session.receive.phase, RFT_RECEIVE_VERIFYING);
    bench_forget(bench);
}

/* Parts until the session is done with the version, and how many. */
static uint32_t verify_all(session_bench *bench)
{
    uint32_t parts = 0;
    while (bench_state(bench) == STAGING) {
        assert_true(rft_session_tick_at(&bench->session) <= bench->now);
        bench_tick(bench, 0);
        assert_true(++parts < PARTS_MOST);
    }
    return parts;
}

VERIFY_TEST(a_part_of_the_bytes_is_digested_a_tick)
{
    session_bench *bench = &fixture->bench;
    uint64_t bytes = bench_sample(bench, 1)->manifest->payload_bytes;
    offer_and_seal(fixture);
    assert_true(verify_all(bench) >= bytes / PART_BYTES);
    assert_int_equal(bench_state(bench), STAGED);
    assert_int_equal(bench_count(bench, RFT_STAGED), 1);
    assert_true(rft_session_tick_at(&bench->session) > bench->now);
    bench_commit(bench, 1);
    assert_image_is(bench_take(bench), bench_sample(bench, 1));
    rft_session_accept(&bench->session, bench->now);
}

VERIFY_TEST(the_worker_beats_between_two_parts)
{
    session_bench *bench = &fixture->bench;
    offer_and_seal(fixture);
    for (uint32_t beats = 1; beats < 4; beats++) {
        bench_hear(bench, sample_beat(BENCH_EPOCH));
        bench_tick(bench, bench->session.heartbeat_ms);
        assert_int_equal(bench_state(bench), STAGING);
        assert_int_equal(bench_count(bench, RFT_BEAT), beats);
    }
    verify_all(bench);
    assert_int_equal(bench_state(bench), STAGED);
}

VERIFY_TEST(damage_in_a_later_part_fails_the_version)
{
    session_bench *bench = &fixture->bench;
    const rft_manifest *manifest = bench_sample(bench, 1)->manifest;
    const rft_block *last = &manifest->blocks[manifest->block_count - 1];
    fixture->slot.memory[RFT_SEQLOCK_BYTES + last->offset] ^= 1;
    offer_and_seal(fixture);
    assert_true(verify_all(bench) > 1);
    assert_int_equal(bench_state(bench), CURRENT);
    assert_int_equal(bench_failed(bench), REFIT_ERR_CORRUPT);
    assert_null(bench_said(bench, RFT_STAGED));
}

VERIFY_TEST(bytes_overwritten_between_two_parts_fail_the_version)
{
    session_bench *bench = &fixture->bench;
    offer_and_seal(fixture);
    bench_tick(bench, 0);
    assert_int_equal(bench_state(bench), STAGING);
    atomic_fetch_add(&raw_slot_seqlock(&fixture->slot)->generation, 1);
    bench_tick(bench, 0);
    assert_int_equal(bench_state(bench), CURRENT);
    assert_int_equal(bench_failed(bench), REFIT_ERR_STALE);
}

VERIFY_TEST(an_abort_between_two_parts_is_obeyed)
{
    session_bench *bench = &fixture->bench;
    offer_and_seal(fixture);
    bench_tick(bench, 0);
    bench_hear(bench, sample_abort(bench_sample(bench, 1)));
    assert_int_equal(bench_state(bench), CURRENT);
    assert_true(rft_session_tick_at(&bench->session) > bench->now);
    offer_and_seal(fixture);
    verify_all(bench);
    assert_int_equal(bench_state(bench), STAGED);
}

VERIFY_TEST(a_deadline_between_two_parts_fails_the_version)
{
    session_bench *bench = &fixture->bench;
    offer_and_seal(fixture);
    bench_tick(bench, 0);
    bench->now = bench->session.receive.deadline;
    bench_hear(bench, sample_beat(BENCH_EPOCH));
    bench_tick(bench, 0);
    assert_int_equal(bench_state(bench), CURRENT);
    assert_int_equal(bench_failed(bench), REFIT_ERR_TIMEOUT);
}

int main(void)
{
    return test_run("session_verify");
}
