/* See sweep.h. */
#include "tests/fault/sweep.h"

#include "tests/fault/ledger.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/key_fixture.h"

#define MOST 5000u /* more than two cycles can have */

typedef struct setting {
    const char *name;
    whole_path path;
    const char *settings[9]; /* NULL: those of whole_open alone */
    bool keys;
    int cycles; /* the second one's version has a base */
    bool coded; /* that version comes as changes */
} setting;

static const setting settings[] = {
    {"a refit through frames", WHOLE_FRAMES, {NULL}, .cycles = 1},
    {"a refit through shared memory", WHOLE_SHM, {NULL}, .cycles = 1},
    {"a verified refit with one slot",
     WHOLE_SHM,
     {"offload.verify", "true", "broadcast.verify", "always", "broadcast.slots", "1"},
     .cycles = 1},
    {"a refit where all is required",
     WHOLE_SHM,
     {"broadcast.shm", "require", "offload.pin", "require", "broadcast.slots", "1"},
     .cycles = 1},
    {"a pageable refit", WHOLE_FRAMES, {"use_pinned_optimizer_offload", "false"}, .cycles = 1},
    {"a refit with memory on its way", WHOLE_SHM, {"offload.background", "true"}, .cycles = 1},
    {"a refit with memory on its way that must be locked",
     WHOLE_SHM,
     {"offload.background", "true", "offload.pin", "require"},
     .cycles = 1},
    {"a refit with keys", WHOLE_FRAMES, {NULL}, .keys = true, .cycles = 2},
    {"a refit of changes",
     WHOLE_FRAMES,
     {"broadcast.delta", "always", "broadcast.compress", "zstd", "broadcast.encode_threads", "2"},
     .cycles = 2,
     .coded = true},
    {"a refit of changes with one slot",
     WHOLE_FRAMES,
     {"broadcast.delta", "always", "broadcast.slots", "1"},
     .cycles = 2,
     .coded = true},
};

static const sweep *swept;

static void check_status(refit_status status)
{
    const refit_status *known = swept->known;
    while (*known != REFIT_OK && *known != status)
        known++;
    if (*known != status) fail_msg("%s: %s", swept->last_failed(), refit_status_name(status));
}

static uint64_t sparse_blocks(const whole *on)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_publisher_stats(on->publisher, &stats, NULL));
    return stats.publish_sparse_blocks_last;
}

/* True if the n-th came, and so failed. `sparse`: the blocks of the last version that were coded.
 */
static bool fail_one(const setting *in, const char *const *with, uint64_t nth, uint64_t *sparse)
{
    whole on;
    ledger_open();
    swept->arm(nth);
    refit_status status = whole_open(&on, in->path, with);
    bool opened = status == REFIT_OK;
    for (int i = 0; i < in->cycles && status == REFIT_OK; i++)
        status = whole_cycle(&on);
    check_status(status);
    bool met = swept->disarm();
    if (!opened) assert_ok(whole_open(&on, in->path, with));
    whole_prove(&on);
    *sparse = sparse_blocks(&on);
    whole_close(&on);
    (void)failing_alloc_end();
    ledger_check();
    return met;
}

static void each_costs_at_most_one_refit(void **state)
{
    const setting *in = *state;
    key_fixture smith = key_fixture_open();
    char key[256], server_key[256], allow[256];
    /* Both ends of `whole` have one configuration, and so one pair. */
    const char *const keys[] = {
        "security.key", key, "security.server_key", server_key, "security.allow", allow, NULL};
    uint64_t nth = 0, sparse = 0;
    key_fixture_allow(&smith, "trainer");
    key_fixture_path(&smith, "keys/trainer.secret", key);
    key_fixture_path(&smith, "keys/trainer.public", server_key);
    key_fixture_path(&smith, "allow", allow);
    do {
        whole_say(swept->what, ++nth);
    } while (nth < MOST && fail_one(in, in->keys ? keys : in->settings, nth, &sparse));
    /* Where nothing failed; but a worker that was held up may have come anew, without a base. */
    for (int tries = 0; in->coded && sparse == 0 && tries < 5; tries++)
        assert_false(fail_one(in, in->settings, MOST, &sparse));
    whole_say(NULL, 0);
    assert_in_range(nth, 10, MOST - 1);
    if (in->coded) assert_true(sparse > 0);
    key_fixture_close(&smith);
}

int sweep_run(const char *group, const sweep *by)
{
    static setting each[COUNT_OF(settings)]; /* cmocka's states are not const */
    static struct CMUnitTest tests[COUNT_OF(settings)];
    swept = by;
    memcpy(each, settings, sizeof each);
    for (size_t i = 0; i < COUNT_OF(settings); i++)
        tests[i] = (struct CMUnitTest){each[i].name, each_costs_at_most_one_refit, NULL, whole_tell,
                                       &each[i]};
    return cmocka_run_group_tests_name(group, tests, NULL, NULL);
}
