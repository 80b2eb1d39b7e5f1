/* A subscriber that reads its versions in the publisher's shared memory. */
#include "tests/support/pairing.h"
#include "tests/support/unit.h"

#define STAGED UINT32_MAX /* instead of a status */

/* ---- Shared memory */

static void offer_slot(pairing *pair, uint32_t index, const char *name, uint64_t offset)
{
    const sample_version *sample = &pair->samples[index];
    raw_say(&pair->raw, sample_manifest(sample, PAIR_EPOCH));
    raw_say(&pair->raw, sample_offer(sample, PAIR_EPOCH, 0, name, offset));
}

static void a_version_in_shared_memory_is_read_in_place(void **state)
{
    (void)state;
    pairing pair;
    rft_segment slots[2];
    pair_open(&pair, true, NULL);
    raw_join(&pair.raw);
    assert_true(pair.raw.heard.as.join.shm);
    assert_memory_equal(&pair.raw.heard.as.join.proof, pair.raw.probe.memory, 8);
    for (uint32_t i = 0; i < 2; i++) {
        raw_slot_open(&slots[i], &pair.samples[i]);
        offer_slot(&pair, i, slots[i].name, RFT_SEQLOCK_BYTES);
        raw_say(&pair.raw, sample_seal(&pair.samples[i]));
        raw_hear_staged(&pair.raw, &pair.samples[i]);
        raw_say(&pair.raw, sample_commit(&pair.samples[i]));
        refit_update *update = pair_next(&pair);
        assert_update_is(update, &pair.samples[i]);
        assert_ok(refit_update_accept(update, NULL));
        raw_hear(&pair.raw, RFT_COMMITTED);
        refit_update_close(update);
        raw_hear(&pair.raw, RFT_RELEASED);
    }
    pair_await_report(&pair);
    assert_int_equal(pair_describe(&pair).path, REFIT_PATH_SHM);
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_subscriber_stats(pair.subscriber, &stats, NULL));
    assert_int_equal(stats.receive_bytes_total, 0);
    pair_close(&pair);
    rft_segment_close(&slots[0]);
    rft_segment_close(&slots[1]);
}

static void bytes_overwritten_under_an_update_are_not_accepted(void **state)
{
    (void)state;
    pairing pair;
    rft_segment slot;
    refit_error error;
    pair_open(&pair, true, NULL);
    raw_join(&pair.raw);
    raw_slot_open(&slot, &pair.samples[0]);
    offer_slot(&pair, 0, slot.name, RFT_SEQLOCK_BYTES);
    raw_say(&pair.raw, sample_seal(&pair.samples[0]));
    raw_hear_staged(&pair.raw, &pair.samples[0]);
    raw_say(&pair.raw, sample_commit(&pair.samples[0]));
    refit_update *update = pair_next(&pair);
    atomic_fetch_add(&raw_slot_seqlock(&slot)->generation, 1);
    assert_int_equal(refit_update_accept(update, &error), REFIT_ERR_STALE);
    assert_int_equal(refit_update_accept(update, &error), REFIT_ERR_STATE);
    raw_hear(&pair.raw, RFT_FAILED);
    assert_int_equal(pair.raw.heard.as.failed.code, REFIT_ERR_STALE);
    assert_false(pair.raw.heard.as.failed.kept);
    assert_int_equal(pair_describe(&pair).version, 0);
    refit_update_close(update);
    pair_close(&pair);
    rft_segment_close(&slot);
}

static void verify_always(refit_config *config)
{
    config->broadcast_verify = REFIT_VERIFY_ALWAYS;
}

/* What FAILED says about a slot with something wrong; STAGED if it was staged. */
static uint32_t try_slot(int wrong, void (*change)(refit_config *config))
{
    pairing pair;
    rft_segment slot;
    pair_open(&pair, true, change);
    raw_join(&pair.raw);
    raw_slot_open(&slot, &pair.samples[0]);
    rft_message seal = sample_seal(&pair.samples[0]);
    const char *name = slot.name;
    uint64_t offset = RFT_SEQLOCK_BYTES;
    if (wrong == 1) name = "/proc/999999999/fd/3:1";
    if (wrong == 2) name = "/etc/passwd";
    if (wrong == 3) offset = 2 * RFT_SEQLOCK_BYTES;
    if (wrong == 4) offset = 0;
    if (wrong == 5) offset = RFT_SEQLOCK_BYTES + 8;
    if (wrong == 6) offset = UINT64_MAX - 63;
    if (wrong == 7) atomic_store(&raw_slot_seqlock(&slot)->generation, 3);
    if (wrong == 8) seal.as.seal.digest.bytes[0] ^= 1;
    if (wrong == 9) slot.memory[RFT_SEQLOCK_BYTES + 5] ^= 1;
    offer_slot(&pair, 0, name, offset);
    raw_say(&pair.raw, seal);
    raw_hear(&pair.raw, wrong == 0 || (wrong == 9 && change == NULL) ? RFT_STAGED : RFT_FAILED);
    bool staged = pair.raw.heard.kind == RFT_STAGED;
    uint32_t code = staged ? STAGED : pair.raw.heard.as.failed.code;
    pair_close(&pair);
    rft_segment_close(&slot);
    return code;
}

static void a_slot_that_is_not_what_was_offered_fails_the_version(void **state)
{
    (void)state;
    assert_int_equal(try_slot(0, NULL), STAGED);
    assert_int_equal(try_slot(1, NULL), REFIT_ERR_NOT_FOUND);
    for (int wrong = 2; wrong <= 6; wrong++) {
        assert_int_equal(try_slot(wrong, NULL), REFIT_ERR_PROTOCOL);
    }
    assert_int_equal(try_slot(7, NULL), REFIT_ERR_STALE);
    assert_int_equal(try_slot(8, NULL), REFIT_ERR_CORRUPT);
}

static void verify_always_hashes_shared_memory_too(void **state)
{
    (void)state;
    assert_int_equal(try_slot(0, verify_always), STAGED);
    assert_int_equal(try_slot(9, NULL), STAGED);
    assert_int_equal(try_slot(9, verify_always), REFIT_ERR_CORRUPT);
}

static void without_a_probe_the_path_is_the_socket(void **state)
{
    (void)state;
    pairing pair;
    char reason[160];
    pair_open(&pair, true, NULL);
    raw_hear(&pair.raw, RFT_HELLO);
    assert_true(pair.raw.heard.as.hello.shm);
    raw_say(&pair.raw, sample_welcome(PAIR_EPOCH, "/proc/999999999/fd/3:1"));
    raw_hear(&pair.raw, RFT_JOIN);
    assert_false(pair.raw.heard.as.join.shm);
    rft_view_print(pair.raw.heard.as.join.reason, reason, sizeof reason);
    assert_non_null(strstr(reason, "could not be opened"));
    raw_say(&pair.raw, sample_beat(PAIR_EPOCH));
    pair_apply(&pair, 0, NULL);
    pair_close(&pair);
}

static void require_shm(refit_config *config)
{
    config->broadcast_shm = REFIT_SHM_REQUIRE;
}

static void shm_that_is_required_and_not_to_be_had_is_final(void **state)
{
    (void)state;
    pairing pair;
    refit_update *update = NULL;
    refit_error error;
    pair_open(&pair, false, require_shm);
    raw_hear(&pair.raw, RFT_HELLO);
    raw_say(&pair.raw, sample_welcome(PAIR_EPOCH, NULL));
    assert_int_equal(refit_subscriber_next(pair.subscriber, PAIR_LONG, &update, &error),
                     REFIT_ERR_SYSTEM);
    raw_hear(&pair.raw, RFT_BYE);
    pair_close(&pair);
}

/* The trainer changes from shared memory to sockets: the version held has no bytes here any more.
 */
static void a_path_that_changes_brings_the_next_version_in_full(void **state)
{
    (void)state;
    pairing pair;
    rft_segment slot;
    pair_open(&pair, true, NULL);
    raw_join(&pair.raw);
    raw_slot_open(&slot, &pair.samples[0]);
    offer_slot(&pair, 0, slot.name, RFT_SEQLOCK_BYTES);
    raw_say(&pair.raw, sample_seal(&pair.samples[0]));
    raw_hear_staged(&pair.raw, &pair.samples[0]);
    raw_say(&pair.raw, sample_commit(&pair.samples[0]));
    refit_update *update = pair_next(&pair);
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    raw_hear(&pair.raw, RFT_RELEASED);
    raw_say(&pair.raw, sample_bye());
    rft_segment_close(&slot);
    rft_segment_close(&pair.raw.probe);
    raw_join(&pair.raw);
    assert_false(pair.raw.heard.as.join.shm);
    raw_offer(&pair.raw, &pair.samples[1], 1);
    raw_hear(&pair.raw, RFT_FAILED);
    assert_int_equal(pair.raw.heard.as.failed.code, REFIT_ERR_STALE);
    pair_apply(&pair, 1, NULL);
    pair_close(&pair);
}

/* Reads an update after everything it came from is closed. */
static void keep_beyond_the_end(bool shm)
{
    pairing pair;
    rft_segment slot;
    void *kept = NULL;
    const void *bytes;
    refit_tensor tensor = {.size = sizeof tensor};
    pair_open(&pair, shm, NULL);
    raw_join(&pair.raw);
    if (shm) {
        raw_slot_open(&slot, &pair.samples[0]);
        offer_slot(&pair, 0, slot.name, RFT_SEQLOCK_BYTES);
        raw_say(&pair.raw, sample_seal(&pair.samples[0]));
        raw_hear_staged(&pair.raw, &pair.samples[0]);
    } else {
        raw_stage(&pair.raw, &pair.samples[0], NULL);
    }
    raw_say(&pair.raw, sample_commit(&pair.samples[0]));
    refit_update *update = pair_next(&pair);
    assert_int_equal(refit_update_keep(update, 16, NULL, NULL), REFIT_ERR_INVALID);
    assert_ok(refit_update_keep(update, 16, &kept, NULL));
    assert_ok(refit_update_tensor(update, 1, &tensor, &bytes, NULL));
    unsigned char before[8];
    assert_true(tensor.bytes >= sizeof before);
    memcpy(before, bytes, sizeof before);
    refit_update_close(update);
    void *late;
    assert_int_equal(refit_update_keep(update, 16, &late, NULL), REFIT_ERR_STATE);
    pair_close(&pair);
    if (shm) rft_segment_close(&slot);
    assert_memory_equal(bytes, before, sizeof before);
    refit_update_unkeep(kept);
}

static void kept_bytes_stay_mapped_beyond_update_and_subscriber(void **state)
{
    (void)state;
    keep_beyond_the_end(true);
    keep_beyond_the_end(false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_version_in_shared_memory_is_read_in_place),
        cmocka_unit_test(bytes_overwritten_under_an_update_are_not_accepted),
        cmocka_unit_test(a_slot_that_is_not_what_was_offered_fails_the_version),
        cmocka_unit_test(verify_always_hashes_shared_memory_too),
        cmocka_unit_test(without_a_probe_the_path_is_the_socket),
        cmocka_unit_test(shm_that_is_required_and_not_to_be_had_is_final),
        cmocka_unit_test(a_path_that_changes_brings_the_next_version_in_full),
        cmocka_unit_test(kept_bytes_stay_mapped_beyond_update_and_subscriber),
    };
    return cmocka_run_group_tests_name("subscriber_shm", tests, NULL, NULL);
}
