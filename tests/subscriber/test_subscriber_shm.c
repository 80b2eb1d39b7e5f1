/* A subscriber that reads its versions in the publisher's shared memory. */
#include "tests/support/pairing.h"
#include "tests/support/test.h"

PAIR_TEST(a_version_in_shared_memory_is_read_in_place)
{
    rft_segment slots[2];
    pair_open(pair, true, NULL);
    raw_join(&pair->raw);
    assert_true(pair->raw.heard.as.join.shm);
    assert_memory_equal(&pair->raw.heard.as.join.proof, pair->raw.probe.memory, 8);
    for (uint32_t i = 0; i < 2; i++) {
        refit_update *update = pair_take_slot(pair, i, &slots[i]);
        assert_update_is(update, &pair->samples[i]);
        assert_ok(refit_update_accept(update, NULL));
        raw_hear(&pair->raw, RFT_COMMITTED);
        refit_update_close(update);
        raw_hear(&pair->raw, RFT_RELEASED);
    }
    pair_await_report(pair);
    assert_int_equal(pair_describe(pair).path, REFIT_PATH_SHM);
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_subscriber_stats(pair->subscriber, &stats, NULL));
    assert_int_equal(stats.receive_bytes_total, 0);
    rft_segment_close(&slots[0]);
    rft_segment_close(&slots[1]);
}

/* An engine changes a weight that it loads. The seqlock lies on the same page. */
PAIR_TEST(bytes_overwritten_after_user_write_are_not_accepted)
{
    rft_segment slot;
    const void *bytes;
    pair_open(pair, true, NULL);
    raw_join(&pair->raw);
    refit_update *update = pair_take_slot(pair, 0, &slot);
    assert_ok(refit_update_tensor(update, 0, NULL, &bytes, NULL));
    unsigned char *first = (unsigned char *)(uintptr_t)bytes;
    *first ^= 1;
    assert_int_equal(*first, slot.memory[RFT_SEQLOCK_BYTES] ^ 1);
    atomic_fetch_add(&raw_slot_seqlock(&slot)->generation, 1);
    assert_int_equal(refit_update_accept(update, NULL), REFIT_ERR_STALE);
    raw_hear(&pair->raw, RFT_FAILED);
    refit_update_close(update);
    rft_segment_close(&slot);
}

PAIR_TEST(bytes_overwritten_under_an_update_are_not_accepted)
{
    rft_segment slot;
    refit_error error;
    pair_open(pair, true, NULL);
    raw_join(&pair->raw);
    refit_update *update = pair_take_slot(pair, 0, &slot);
    atomic_fetch_add(&raw_slot_seqlock(&slot)->generation, 1);
    assert_int_equal(refit_update_accept(update, &error), REFIT_ERR_STALE);
    assert_int_equal(refit_update_accept(update, &error), REFIT_ERR_STATE);
    raw_hear(&pair->raw, RFT_FAILED);
    assert_int_equal(pair->raw.heard.as.failed.code, REFIT_ERR_STALE);
    assert_false(pair->raw.heard.as.failed.kept);
    assert_int_equal(pair_describe(pair).version, 0);
    refit_update_close(update);
    rft_segment_close(&slot);
}

PAIR_TEST(a_slot_that_is_not_what_was_offered_fails_the_version)
{
    static const uint64_t right = RFT_SEQLOCK_BYTES, none = UINT64_MAX;
    const struct {
        const char *label;
        const char *name; /* NULL: the slot's */
        uint64_t offset;
        uint64_t damaged;    /* where one byte of the slot is changed */
        refit_status status; /* REFIT_OK: it is staged */
        bool mistaken;       /* the seal has another digest */
        bool verified;
    } rows[] = {
        {"right", NULL, right, none, .status = REFIT_OK},
        {"right, verified", NULL, right, none, .status = REFIT_OK, .verified = true},
        {"gone", "/proc/999999999/fd/3:1", right, none, .status = REFIT_ERR_NOT_FOUND},
        {"another file", "/etc/passwd", right, none, .status = REFIT_ERR_PROTOCOL},
        {"ends after the file", NULL, 2 * right, none, .status = REFIT_ERR_PROTOCOL},
        {"begins at the seqlock", NULL, 0, none, .status = REFIT_ERR_PROTOCOL},
        {"begins unaligned", NULL, right + 8, none, .status = REFIT_ERR_PROTOCOL},
        {"begins beyond memory", NULL, UINT64_MAX - 63, none, .status = REFIT_ERR_PROTOCOL},
        {"being written, as its generation is odd", NULL, right, 0, .status = REFIT_ERR_STALE},
        {"sealed as another", NULL, right, none, .status = REFIT_ERR_CORRUPT, .mistaken = true},
        {"damaged", NULL, right, right + 5, .status = REFIT_OK},
        {"damaged, verified", NULL, right, right + 5, .status = REFIT_ERR_CORRUPT,
         .verified = true},
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        rft_segment slot;
        print_message("a slot that is %s\n", rows[i].label);
        pair_renew(pair, true, rows[i].verified ? with_verify_always : NULL);
        raw_join(&pair->raw);
        raw_slot_open(&slot, &pair->samples[0]);
        if (rows[i].damaged != none) slot.memory[rows[i].damaged] ^= 1;
        pair_offer_slot(pair, 0, rows[i].name == NULL ? slot.name : rows[i].name, rows[i].offset);
        rft_message seal = sample_seal(&pair->samples[0]);
        if (rows[i].mistaken) seal.as.seal.digest.bytes[0] ^= 1;
        raw_say(&pair->raw, seal);
        raw_hear(&pair->raw, rows[i].status == REFIT_OK ? RFT_STAGED : RFT_FAILED);
        if (rows[i].status != REFIT_OK)
            assert_int_equal(pair->raw.heard.as.failed.code, rows[i].status);
        rft_segment_close(&slot);
    }
}

PAIR_TEST(without_a_probe_the_path_is_the_socket)
{
    char reason[160];
    pair_open(pair, true, NULL);
    raw_hear(&pair->raw, RFT_HELLO);
    assert_true(pair->raw.heard.as.hello.shm);
    raw_say(&pair->raw, sample_welcome(PAIR_EPOCH, "/proc/999999999/fd/3:1"));
    raw_hear(&pair->raw, RFT_JOIN);
    assert_false(pair->raw.heard.as.join.shm);
    rft_view_print(pair->raw.heard.as.join.reason, reason, sizeof reason);
    assert_non_null(strstr(reason, "could not be opened"));
    raw_say(&pair->raw, sample_beat(PAIR_EPOCH));
    pair_apply(pair, 0, NULL);
}

static void require_shm(refit_config *config)
{
    config->broadcast_shm = REFIT_SHM_REQUIRE;
}

PAIR_TEST(shm_that_is_required_and_not_to_be_had_is_final)
{
    refit_update *update = NULL;
    refit_error error;
    pair_open(pair, false, require_shm);
    raw_hear(&pair->raw, RFT_HELLO);
    raw_say(&pair->raw, sample_welcome(PAIR_EPOCH, NULL));
    assert_int_equal(refit_subscriber_next(pair->subscriber, PAIR_LONG, &update, &error),
                     REFIT_ERR_SYSTEM);
    raw_hear(&pair->raw, RFT_BYE);
}

/* The trainer changes from shared memory to sockets: the version held has no bytes here any more.
 */
PAIR_TEST(a_path_that_changes_brings_the_next_version_in_full)
{
    rft_segment slot;
    pair_open(pair, true, NULL);
    raw_join(&pair->raw);
    refit_update *update = pair_take_slot(pair, 0, &slot);
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    raw_hear(&pair->raw, RFT_RELEASED);
    raw_say(&pair->raw, sample_bye());
    rft_segment_close(&slot);
    rft_segment_close(&pair->raw.probe);
    raw_join(&pair->raw);
    assert_false(pair->raw.heard.as.join.shm);
    raw_offer(&pair->raw, &pair->samples[1], 1);
    raw_hear(&pair->raw, RFT_FAILED);
    assert_int_equal(pair->raw.heard.as.failed.code, REFIT_ERR_STALE);
    pair_apply(pair, 1, NULL);
}

PAIR_TEST(kept_bytes_stay_mapped_beyond_update_and_subscriber)
{
    for (int shm = 0; shm < 2; shm++) {
        rft_segment slot = {0};
        void *kept = NULL, *late;
        const void *bytes;
        unsigned char before[8];
        pair_renew(pair, shm, NULL);
        raw_join(&pair->raw);
        refit_update *update = shm ? pair_take_slot(pair, 0, &slot) : pair_take(pair, 0, NULL);
        assert_invalid(refit_update_retain(update, 16, NULL, NULL));
        assert_ok(refit_update_retain(update, 16, &kept, NULL));
        assert_ok(refit_update_tensor(update, 1, NULL, &bytes, NULL));
        memcpy(before, bytes, sizeof before);
        refit_update_close(update);
        assert_int_equal(refit_update_retain(update, 16, &late, NULL), REFIT_ERR_STATE);
        refit_subscriber_close(pair->subscriber);
        pair->subscriber = NULL;
        rft_segment_close(&slot);
        assert_memory_equal(bytes, before, sizeof before);
        refit_update_release(kept);
    }
}

int main(void)
{
    return test_run("subscriber_shm");
}
