/* Ranks of one node, each with its controller and its GPU, in processes and in threads: they take
 * host memory at the same time, and none takes what another is about to take; a rank that dies or
 * fails meanwhile harms no other; and the states of all ranks come back to where they were. */
#include <stdio.h>

#include <poll.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/thread.h"
#include "children.h"
#include "fake_cuda.h"
#include "rank.h"
#include "tests/support/test.h"

#define GPUS    2u
#define WAIT_MS 90000
#define TRIES   3 /* after so many in vain, one is really kept waiting */

/* What a node has free when ranks of RANK_IMAGE bytes come: with this share of what is free each
 * gets its memory, and two have theirs, but a third is refused. */
#define FREE_BYTES (16 * (long long)MIB)
#define SHARE      "offload.budget_share=0.6"

typedef struct fixture {
    test_node *node;
    int file;
    child ranks[NODE_RANKS];
} fixture;

static int set_up(void **state)
{
    static fixture all;
    memset(&all, 0, sizeof all);
    fake_cuda_reset();
    all.node = node_open(FREE_BYTES, &all.file);
    assert_non_null(all.node);
    *state = &all;
    return 0;
}

/* All memory is back, and no more was ever taken than there was. */
static int tear_down(void **state)
{
    fixture *all = *state;
    atomic_store(&all->node->held, false);
    for (unsigned i = 0; i < NODE_RANKS; i++) {
        if (all->ranks[i].pid != 0) child_kill(&all->ranks[i]);
    }
    assert_int_equal(atomic_load(&all->node->inside), 0);
    assert_int_equal(atomic_load(&all->node->together), 0);
    assert_int_equal(atomic_load(&all->node->unclaimed), 0);
    assert_true(atomic_load(&all->node->least) >= 0);
    assert_int_equal(atomic_load(&all->node->free_bytes), FREE_BYTES);
    node_leave(all->node);
    close(all->file);
    return 0;
}

#define FIXTURE_TEST(name) TEST_ON(fixture *all, name, set_up, tear_down)

/* ---- Ranks as processes */

static child *open_rank(fixture *all, unsigned number, const char *setting)
{
    child *rank = &all->ranks[number];
    child_start(rank);
    (void)child_ask(rank, "open %d %d %u %u %s", (int)getpid(), all->file, number, number % GPUS,
                    setting);
    return rank;
}

static void close_rank(child *rank)
{
    (void)child_ask(rank, "close");
    child_end(rank);
}

/* Waits until the number is at least so high. */
static void await(atomic_int *number, int least)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    while (atomic_load(number) < least) {
        if (rft_now() >= deadline) fail_msg("%d in the end, not %d", atomic_load(number), least);
        (void)poll(NULL, 0, 2); /* another process changes it */
    }
}

/* The first has claimed its memory, touches none of it yet, and stands. */
static void seal_and_stand(fixture *all, child *first)
{
    atomic_store(&all->node->held, true);
    child_say(first, "seal");
    await(&all->node->standing, 1);
}

/* The second finds that the claim of the first, which stands, leaves too little. */
static void seal_while_another_waits(fixture *all, child *first, child *second)
{
    test_node *node = all->node;
    seal_and_stand(all, first);
    int before = atomic_load(&node->waits);
    child_say(second, "seal");
    await(&node->waits, before + TRIES);
    assert_false(child_has_answer(second, 0));
    assert_int_equal(atomic_load(&node->takings), 0);
}

static void hear(child *rank, const char *status)
{
    (void)child_hear(rank);
    if (strncmp(rank->answer, status, strlen(status)) != 0) {
        fail_msg("answered: %s, not %s", rank->answer, status);
    }
}

FIXTURE_TEST(each_process_has_its_gpu_and_two_take_memory_at_once)
{
    child *first = open_rank(all, 0, SHARE), *second = open_rank(all, 1, SHARE);
    seal_and_stand(all, first);
    child_stop(first);
    atomic_store(&all->node->held, false);
    (void)child_ask(second, "seal");
    assert_int_equal(atomic_load(&all->node->takings), 1);
    assert_int_equal(atomic_load(&all->node->free_bytes), FREE_BYTES - RANK_IMAGE);
    child_continue(first);
    hear(first, "OK ");
    assert_int_equal(atomic_load(&all->node->free_bytes), FREE_BYTES - 2 * RANK_IMAGE);
    child_say(first, "cycle 3");
    child_say(second, "cycle 4");
    hear(first, "OK ");
    hear(second, "OK ");
    assert_int_equal(atomic_load(&all->node->takings), 2);
    close_rank(first);
    close_rank(second);
}

/* Then two fit no longer. */
#define LESS (4 * (long long)MIB)

/* Each alone would fit: it must see what the one before it has taken. */
static void refuse_the_second(fixture *all, const char *setting)
{
    atomic_store(&all->node->takings, 0);
    child *first = open_rank(all, 0, setting), *second = open_rank(all, 1, setting);
    seal_while_another_waits(all, first, second);
    atomic_store(&all->node->held, false);
    hear(first, "OK ");
    hear(second, "ERR_BUDGET ");
    assert_int_equal(atomic_load(&all->node->takings), 1);
    (void)child_ask(second, "check");
    (void)child_ask(first, "cycle 1");
    close_rank(first);
    (void)child_ask(second, "seal");
    (void)child_ask(second, "cycle 2");
    close_rank(second);
}

FIXTURE_TEST(the_second_sees_what_the_first_has_taken)
{
    atomic_fetch_sub(&all->node->free_bytes,
                     6 * (long long)MIB); /* 10 MiB are left, and each needs 6 */
    refuse_the_second(all, "offload.budget_share=1");
    refuse_the_second(all, "offload.budget_bytes=6MiB");
    atomic_fetch_add(&all->node->free_bytes, 6 * (long long)MIB);
}

/* More ranks than GPUs, all at once: as many as fit get their memory, and no more. */
FIXTURE_TEST(as_many_as_fit_and_no_more)
{
    unsigned served = 0, refused = 0;
    for (unsigned i = 0; i < NODE_RANKS; i++) {
        (void)open_rank(all, i, SHARE);
    }
    for (unsigned i = 0; i < NODE_RANKS; i++) {
        child_say(&all->ranks[i], "seal");
    }
    for (unsigned i = 0; i < NODE_RANKS; i++) {
        const char *answer = child_hear(&all->ranks[i]);
        if (strncmp(answer, "OK ", 3) == 0) served++;
        if (strncmp(answer, "ERR_BUDGET ", 11) == 0) refused++;
    }
    assert_int_equal(served, 2);
    assert_int_equal(refused, NODE_RANKS - 2);
    for (unsigned i = 0; i < NODE_RANKS; i++) {
        (void)child_ask(&all->ranks[i], "check");
        close_rank(&all->ranks[i]);
    }
}

FIXTURE_TEST(one_that_is_killed_leaves_what_it_claimed_to_the_next)
{
    child *first = open_rank(all, 0, SHARE), *second = open_rank(all, 1, SHARE);
    atomic_fetch_sub(&all->node->free_bytes, LESS);
    seal_while_another_waits(all, first, second);
    child_stop(first);
    assert_false(child_has_answer(second, 0)); /* it stands, and its claim still counts */
    node_bury(all->node, 0);
    child_kill(first);
    await(&all->node->standing, 1);
    atomic_store(&all->node->held, false);
    hear(second, "OK ");
    atomic_fetch_add(&all->node->free_bytes, LESS);
    (void)child_ask(second, "cycle 2");
    first = open_rank(all, 0, SHARE);
    (void)child_ask(first, "seal");
    (void)child_ask(first, "cycle 2");
    (void)child_ask(second, "cycle 1");
    close_rank(first);
    close_rank(second);
}

/* The second is not refused for memory that the first gives back. */
FIXTURE_TEST(a_failing_pin_harms_no_other_rank)
{
    child *first = open_rank(all, 0, SHARE), *second = open_rank(all, 1, SHARE);
    (void)child_ask(first, "fault 4");
    atomic_fetch_sub(&all->node->free_bytes, LESS);
    seal_while_another_waits(all, first, second);
    atomic_store(&all->node->held, false);
    hear(first, "ERR_PIN ");
    hear(second, "OK ");
    atomic_fetch_add(&all->node->free_bytes, LESS);
    assert_int_equal(atomic_load(&all->node->taken[0]), 0);
    assert_int_equal(atomic_load(&all->node->taken[1]), RANK_IMAGE);
    (void)child_ask(first, "check");
    (void)child_ask(second, "cycle 2");
    (void)child_ask(first, "seal");
    (void)child_ask(first, "cycle 2");
    (void)child_ask(second, "check");
    close_rank(first);
    close_rank(second);
}

/* ---- Ranks as threads */

typedef struct thread_rank {
    test_rank rank;
    rft_thread thread;
    refit_status status;
} thread_rank;

static void *run_cycles(void *user)
{
    thread_rank *one = user;
    one->status = rank_seal(&one->rank);
    for (int i = 0; i < 4 && one->status == REFIT_OK; i++) {
        one->status = rank_cycle(&one->rank);
    }
    return NULL;
}

static void open_both(fixture *all, thread_rank ranks[GPUS])
{
    static const char *const settings[] = {SHARE, NULL};
    for (unsigned i = 0; i < GPUS; i++) {
        assert_ok(rank_open(&ranks[i].rank, all->node, i, (int)i, settings));
    }
}

static void close_both(thread_rank ranks[GPUS])
{
    for (unsigned i = 0; i < GPUS; i++) {
        assert_ok(rank_close(&ranks[i].rank));
    }
    assert_string_equal(fake_cuda_violation(), "");
    assert_int_equal(fake_cuda_leaks(), 0);
}

FIXTURE_TEST(one_process_may_have_a_controller_for_each_gpu)
{
    static thread_rank ranks[GPUS];
    test_node *node = all->node;
    open_both(all, ranks);
    atomic_store(&node->held, true);
    assert_ok(rft_thread_start(&ranks[0].thread, "rank-0", run_cycles, &ranks[0], NULL));
    await(&node->standing, 1);
    assert_ok(rft_thread_start(&ranks[1].thread, "rank-1", run_cycles, &ranks[1], NULL));
    await(&node->standing, 2); /* both at once */
    assert_int_equal(atomic_load(&node->takings), 0);
    atomic_store(&node->held, false);
    for (unsigned i = 0; i < GPUS; i++) {
        rft_thread_join(ranks[i].thread);
        if (ranks[i].status != REFIT_OK) fail_msg("rank %u: %s", i, ranks[i].rank.error.text);
    }
    assert_int_equal(atomic_load(&node->free_bytes), FREE_BYTES - 2 * RANK_IMAGE);
    assert_ok(rank_check(&ranks[0].rank));
    assert_ok(rank_check(&ranks[1].rank));
    close_both(ranks);
}

static void expect_stranger(refit_status status, const refit_error *error)
{
    assert_invalid(status);
    assert_says(error, "memory of cuda:1, and this device is cuda:0");
}

FIXTURE_TEST(memory_of_the_other_gpu_is_refused)
{
    static thread_rank ranks[GPUS];
    open_both(all, ranks);
    test_rank *own = &ranks[0].rank, *other = &ranks[1].rank;
    refit_error *error = &own->error;
    refit_region_id id;
    refit_region_desc region = {
        .size = sizeof region, .name = "stray", .memory = other->weight, .bytes = RANK_WEIGHT};
    expect_stranger(refit_offloader_add(own->offloader, &region, &id, error), error);
    region.memory = other->states[0];
    expect_stranger(refit_offloader_add(own->offloader, &region, &id, error), error);
    assert_ok(rank_seal(own));
    const refit_weight weight = {0, other->weight, RANK_WEIGHT};
    expect_stranger(refit_controller_publish(own->controller, 0, &weight, 1, own->device,
                                             REFIT_STREAM_NONE, error),
                    error);
    assert_invalid(refit_memory_free(own->device, other->weight, error));
    assert_ok(rank_seal(other));
    assert_ok(rank_check(other));
    assert_ok(rank_cycle(own));
    assert_ok(rank_cycle(other));
    close_both(ranks);
}

int main(void)
{
    return test_run("ranks");
}
