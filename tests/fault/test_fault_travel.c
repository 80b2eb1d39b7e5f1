/* Allocations and system calls fail one by one while weights travel, with keys and as deltas: the
 * failure is returned or made up for, nothing leaks, no worker sees a torn version, and the next
 * refit succeeds. */
#include <string.h>

#include "base/checked.h"
#include "tests/fault/ledger.h"
#include "tests/fault/whole.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/locksmith.h"

#define MOST   5000u /* more of either than two cycles can have */
#define CYCLES 2     /* the second one's version has a base */

/* What is to fail: an allocation, or a call of the system. */
typedef struct sweep {
    const char *what;
    void (*arm)(uint64_t nth);
    bool (*disarm)(void);
} sweep;

static void refuse_call(uint64_t nth)
{
    failing_alloc_begin(0);
    ledger_refuse(nth);
}

static const sweep allocations = {"allocations", failing_alloc_begin, failing_alloc_stop};
static const sweep calls = {"system calls", refuse_call, ledger_stop};

static void check_status(refit_status status)
{
    switch (status) {
    case REFIT_OK:
    case REFIT_ERR_BUSY: /* a lock that is refused is taken for a held one */
    case REFIT_ERR_HOST_MEMORY:
    case REFIT_ERR_DEVICE_MEMORY:
    case REFIT_ERR_DEVICE:
    case REFIT_ERR_PIN:
    case REFIT_ERR_SYSTEM:
    case REFIT_ERR_CALLBACK:
    case REFIT_ERR_PEER:
    case REFIT_ERR_TIMEOUT: return;
    default: fail_msg("%s was told as %s", ledger_refused(), refit_status_name(status));
    }
}

static refit_status cycle_twice(whole *on)
{
    refit_status first = REFIT_OK;
    for (int i = 0; i < CYCLES && first == REFIT_OK; i++)
        first = whole_cycle(on);
    return first;
}

static uint64_t sparse_blocks(const whole *on)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_publisher_stats(on->publisher, &stats, NULL));
    return stats.publish_sparse_blocks_last;
}

/* True if the n-th came, and so failed. `sparse`: the most blocks that were coded in a version. */
static bool fail_one(const sweep *by, const char *const *settings, uint64_t nth, uint64_t *sparse)
{
    whole on;
    ledger_open();
    by->arm(nth);
    refit_status status = whole_open(&on, WHOLE_FRAMES, settings);
    bool opened = status == REFIT_OK;
    if (opened) status = cycle_twice(&on);
    check_status(status);
    bool met = by->disarm();
    if (!opened) assert_ok(whole_open(&on, WHOLE_FRAMES, settings));
    whole_prove(&on);
    *sparse = rft_max_u64(*sparse, sparse_blocks(&on)); /* none where the worker came anew */
    whole_close(&on);
    (void)failing_alloc_end();
    ledger_check();
    return met;
}

/* Gives the most blocks that were coded in a version. */
static uint64_t fail_each(const sweep *by, const char *const *settings)
{
    uint64_t nth = 0, sparse = 0;
    do {
        whole_say(by->what, ++nth);
    } while (nth < MOST && fail_one(by, settings, nth, &sparse));
    whole_say(NULL, 0);
    assert_in_range(nth, 10, MOST - 1);
    return sparse;
}

/* ---- Keys */

/* Both ends of `whole` have one configuration, and so one pair. */
static void fail_each_with_keys(const sweep *by)
{
    locksmith smith = locksmith_open();
    char key[256], server_key[256], allow[256];
    locksmith_allow(&smith, "trainer");
    locksmith_path(&smith, "keys/trainer.secret", key);
    locksmith_path(&smith, "keys/trainer.public", server_key);
    locksmith_path(&smith, "allow", allow);
    const char *const settings[] = {
        "security.key", key, "security.server_key", server_key, "security.allow", allow, NULL};
    (void)fail_each(by, settings);
    locksmith_close(&smith);
}

whole_test(an_allocation_that_fails_costs_at_most_one_refit_with_keys)
{
    (void)state;
    fail_each_with_keys(&allocations);
}

whole_test(a_refusal_costs_at_most_one_refit_with_keys)
{
    (void)state;
    fail_each_with_keys(&calls);
}

/* ---- What changed */

static const char *const deltas[] = {"broadcast.delta",
                                     "always",
                                     "broadcast.compress",
                                     "zstd",
                                     "broadcast.encode_threads",
                                     "2",
                                     NULL};
static const char *const deltas_of_one_slot[] = {"broadcast.delta", "always", "broadcast.slots",
                                                 "1", NULL};

whole_test(an_allocation_that_fails_costs_at_most_one_refit_of_changes)
{
    (void)state;
    assert_true(fail_each(&allocations, deltas) > 0);
    assert_true(fail_each(&allocations, deltas_of_one_slot) > 0);
}

whole_test(a_refusal_costs_at_most_one_refit_of_changes)
{
    (void)state;
    assert_true(fail_each(&calls, deltas) > 0);
}

int main(void)
{
    return test_run("fault_travel");
}
