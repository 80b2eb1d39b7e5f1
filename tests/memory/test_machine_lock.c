/* The machine-wide lock: it never has two holders, also when a holder dies, forks or keeps it too
 * long; and a file of another user is never locked. Claims: each counts for the others until it
 * ends or its holder dies, and where none can be made the lock stands in for it. */
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "memory/machine_lock.h"
#include "tests/support/descriptors.h"
#include "tests/support/file_tree.h"
#include "tests/support/heard.h"
#include "tests/support/test.h"

#define PROCESSES 5
#define ROUNDS    8

typedef struct fixture {
    file_tree tree;
    char path[RFT_MACHINE_LOCK_PATH_BYTES]; /* of the file */
    rft_cancel_token token;
    rft_machine_lock machine_lock;
} fixture;

static fixture all;

static int set_up(void **state)
{
    memset(&all, 0, sizeof all);
    unsetenv("XDG_RUNTIME_DIR");
    all.tree = file_tree_open();
    file_tree_write(&all.tree, "/dev/shm/other", "");
    assert_ok(rft_cancel_token_open(&all.token, NULL));
    rft_machine_lock_find(&all.machine_lock, all.tree.root);
    strcpy(all.path, all.machine_lock.paths[0]);
    heard_begin(REFIT_LOG_WARNING);
    return 0;
}

static int tear_down(void **state)
{
    heard_end();
    rft_machine_lock_give(&all.machine_lock);
    rft_cancel_token_close(&all.token);
    file_tree_close(&all.tree);
    return 0;
}

#define LOCK_TEST(name) TEST_WITH(name, set_up, tear_down)

/* Tries the lock as another holder would, without a wait. */
static bool is_taken(void)
{
    rft_machine_lock other;
    rft_machine_lock_find(&other, all.tree.root);
    refit_status status = rft_machine_lock_take(&other, 0, &all.token, NULL);
    assert_true(status == REFIT_OK || status == REFIT_ERR_TIMEOUT);
    if (status == REFIT_OK) assert_non_null(other.held);
    rft_machine_lock_give(&other);
    return status == REFIT_ERR_TIMEOUT;
}

LOCK_TEST(the_holder_keeps_others_out_until_it_gives_the_lock_back)
{
    struct stat file;
    assert_false(is_taken());
    assert_ok(rft_machine_lock_take(&all.machine_lock, 0, &all.token, NULL));
    assert_true(is_taken());
    assert_int_equal(stat(all.path, &file), 0);
    assert_int_equal(file.st_mode & 07777, 0600);
    rft_machine_lock_give(&all.machine_lock);
    rft_machine_lock_give(&all.machine_lock);
    assert_false(is_taken());
    assert_int_equal(heard_count(""), 0);
}

LOCK_TEST(no_descriptor_stays_open)
{
    int before = count_descriptors();
    assert_ok(rft_machine_lock_take(&all.machine_lock, 0, &all.token, NULL));
    assert_int_equal(count_descriptors(), before);
    assert_true(is_taken());
    assert_int_equal(count_descriptors(), before);
}

LOCK_TEST(a_wait_ends_at_its_deadline_and_says_what_to_do)
{
    rft_machine_lock other;
    refit_error error = {0};
    assert_ok(rft_machine_lock_take(&all.machine_lock, 0, &all.token, NULL));
    rft_machine_lock_find(&other, all.tree.root);
    int64_t deadline = rft_deadline(30);
    assert_int_equal(rft_machine_lock_take(&other, 30, &all.token, &error), REFIT_ERR_TIMEOUT);
    assert_true(rft_now() >= deadline);
    assert_null(other.held);
    assert_int_equal(error.status, REFIT_ERR_TIMEOUT);
    assert_non_null(strstr(error.text, "offload.take_turns"));
    assert_non_null(strstr(error.text, "offload.timeout_ms"));
}

/* ---- Time */

static int64_t fake_now;      /* 0: the clock's; else each look is a millisecond later */
static int64_t passes_on[3];  /* when another one takes the lock; 0: not */
static const char *fake_path; /* of the file */

int64_t __real_rft_now(void);
int64_t __wrap_rft_now(void);

int64_t __wrap_rft_now(void)
{
    if (fake_now == 0) return __real_rft_now();
    fake_now += 1000000;
    for (size_t i = 0; i < 3; i++) {
        const struct timespec times[2] = {{100, 0}, {100 + (time_t)i, 5}};
        if (passes_on[i] == 0 || fake_now < passes_on[i]) continue;
        passes_on[i] = 0;
        assert_int_equal(utimensat(AT_FDCWD, fake_path, times, 0), 0);
    }
    return fake_now;
}

/* Eight ranks that take a while each are not a reason for the last one to give up. */
LOCK_TEST(the_deadline_is_for_each_holder_not_for_all)
{
    rft_machine_lock other;
    assert_ok(rft_machine_lock_take(&all.machine_lock, 0, &all.token, NULL));
    rft_machine_lock_find(&other, all.tree.root);
    fake_path = all.path;
    const int64_t ms = 1000000;
    passes_on[0] = 1900 * ms;
    passes_on[1] = 2800 * ms;
    passes_on[2] = 3700 * ms;
    fake_now = 1000 * ms;
    refit_status status = rft_machine_lock_take(&other, 1000, &all.token, NULL);
    int64_t ended = fake_now;
    fake_now = 0;
    assert_int_equal(status, REFIT_ERR_TIMEOUT);
    assert_in_range(ended, 4700 * ms, 4800 * ms);
}

/* ---- Several processes */

typedef struct shared {
    atomic_int inside;
    atomic_int together; /* how often two were inside */
    int entries;         /* changed inside only */
} shared;

static void enter_often(shared *with)
{
    for (int i = 0; i < ROUNDS; i++) {
        rft_machine_lock machine_lock;
        rft_machine_lock_find(&machine_lock, all.tree.root);
        if (rft_machine_lock_take(&machine_lock, TIMEOUT_MS, &all.token, NULL) != REFIT_OK)
            _exit(1);
        if (atomic_fetch_add(&with->inside, 1) != 0) atomic_fetch_add(&with->together, 1);
        int entries = with->entries;
        (void)sched_yield(); /* a chance for a process that should not be inside */
        with->entries = entries + 1;
        atomic_fetch_sub(&with->inside, 1);
        rft_machine_lock_give(&machine_lock);
    }
}

LOCK_TEST(no_two_processes_are_ever_inside_at_once)
{
    pid_t children[PROCESSES];
    shared *with =
        mmap(NULL, sizeof *with, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(with != MAP_FAILED);
    for (int i = 0; i < PROCESSES; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            enter_often(with);
            _exit(0);
        }
    }
    for (int i = 0; i < PROCESSES; i++)
        assert_child_succeeds(children[i]);
    assert_int_equal(atomic_load(&with->together), 0);
    assert_int_equal(with->entries, PROCESSES * ROUNDS);
    munmap(with, sizeof *with);
}

/* A child that has the lock, or with `claims` so many bytes, and stands; with `grandchild`, so does
 * a child of its own. */
static pid_t start_holder(uint64_t claims, bool grandchild, pid_t *third)
{
    int pipe_ends[2];
    assert_int_equal(pipe(pipe_ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        pid_t own = 0;
        if (rft_machine_lock_take(&all.machine_lock, 0, &all.token, NULL) != REFIT_OK) _exit(1);
        if (claims > 0) rft_machine_lock_claim(&all.machine_lock, claims);
        if (grandchild) own = fork();
        if (own != 0 || !grandchild) (void)!write(pipe_ends[1], &own, sizeof own);
        child_waits();
    }
    assert_int_equal(read(pipe_ends[0], third, sizeof *third), sizeof *third);
    close(pipe_ends[0]);
    close(pipe_ends[1]);
    return child;
}

static void kill_child(pid_t child)
{
    int how;
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, &how, 0), child);
}

/* The second time a child of it lives on, as when a trainer is killed but not its data loaders. */
LOCK_TEST(the_lock_of_a_killed_process_is_free)
{
    for (int lives_on = 0; lives_on < 2; lives_on++) {
        pid_t grandchild;
        pid_t holder = start_holder(0, lives_on, &grandchild);
        assert_true(is_taken());
        kill_child(holder);
        if (lives_on) assert_int_equal(kill(grandchild, 0), 0);
        assert_ok(rft_machine_lock_take(&all.machine_lock, TIMEOUT_MS, &all.token, NULL));
        rft_machine_lock_give(&all.machine_lock);
        if (lives_on) assert_int_equal(kill(grandchild, SIGKILL), 0);
    }
}

LOCK_TEST(a_child_does_not_keep_the_lock_that_its_parent_gives)
{
    assert_ok(rft_machine_lock_take(&all.machine_lock, 0, &all.token, NULL));
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) child_waits();
    assert_true(is_taken());
    rft_machine_lock_give(&all.machine_lock);
    assert_false(is_taken());
    kill_child(child);
}

/* ---- Stopped */

static void *wait_for_lock(void *user)
{
    rft_machine_lock other;
    refit_error error = {0};
    rft_machine_lock_find(&other, all.tree.root);
    refit_status status = rft_machine_lock_take(&other, TIMEOUT_MS, &all.token, &error);
    rft_machine_lock_give(&other);
    return (void *)(uintptr_t)status;
}

LOCK_TEST(a_wait_can_be_stopped)
{
    rft_thread thread;
    void *status;
    assert_ok(rft_machine_lock_take(&all.machine_lock, 0, &all.token, NULL));
    assert_ok(rft_thread_start(&thread, "waiting", wait_for_lock, NULL, NULL));
    rft_cancel_token_stop(&all.token);
    assert_int_equal(pthread_join(thread, &status), 0);
    assert_int_equal((uintptr_t)status, REFIT_ERR_CANCELLED);
}

/* ---- Files that are not trusted */

static void go_on_without(void)
{
    heard_begin(REFIT_LOG_WARNING);
    assert_ok(rft_machine_lock_take(&all.machine_lock, 0, &all.token, NULL));
    assert_null(all.machine_lock.held);
    assert_int_equal(heard_count(""), 1);
}

LOCK_TEST(a_file_that_others_may_open_is_not_used)
{
    assert_int_equal(close(open(all.path, O_CREAT | O_RDWR, 0600)), 0);
    assert_int_equal(chmod(all.path, 0604), 0);
    go_on_without();
    assert_int_equal(chmod(all.path, 0600), 0);
    assert_false(is_taken());
}

LOCK_TEST(a_file_of_another_user_is_not_used)
{
    if (geteuid() != 0) skip();
    assert_int_equal(close(open(all.path, O_CREAT | O_RDWR, 0600)), 0);
    assert_int_equal(chown(all.path, 65534, 65534), 0);
    go_on_without();
}

/* In a user namespace that maps no one all have one number, and the file may be anyone's. */
LOCK_TEST(a_file_whose_user_is_not_mapped_is_not_used)
{
    assert_int_equal(close(open(all.path, O_CREAT | O_RDWR, 0600)), 0);
    pid_t child = fork();
    if (child == 0) {
        if (unshare(CLONE_NEWUSER) != 0) _exit(0); /* not everywhere */
        bool went_on = rft_machine_lock_take(&all.machine_lock, 0, &all.token, NULL) == REFIT_OK;
        _exit(went_on && all.machine_lock.held == NULL && heard_count("") == 1 ? 0 : 1);
    }
    assert_child_succeeds(child);
}

LOCK_TEST(what_is_no_file_is_not_used)
{
    char target[128];
    snprintf(target, sizeof target, "%s/target", all.tree.root);
    assert_int_equal(symlink(target, all.path), 0);
    go_on_without();
    assert_int_not_equal(access(target, F_OK), 0);
    assert_int_equal(unlink(all.path), 0);
    assert_int_equal(mkfifo(all.path, 0600), 0);
    go_on_without();
    assert_int_equal(unlink(all.path), 0);
    assert_int_equal(mkdir(all.path, 0700), 0);
    go_on_without();
    assert_int_equal(rmdir(all.path), 0);
}

LOCK_TEST(without_any_place_it_goes_on_and_says_so_once)
{
    rft_machine_lock_find(&all.machine_lock, "/nowhere/to/be/found");
    go_on_without();
}

LOCK_TEST(the_second_place_is_the_runtime_folder)
{
    char folder[128];
    rft_machine_lock other;
    snprintf(folder, sizeof folder, "%s/dev", all.tree.root);
    setenv("XDG_RUNTIME_DIR", folder, 1);
    rft_machine_lock_find(&all.machine_lock, "/nowhere");
    rft_machine_lock_find(&other, "/nowhere");
    assert_ok(rft_machine_lock_take(&all.machine_lock, 0, &all.token, NULL));
    assert_non_null(all.machine_lock.held);
    assert_int_equal(heard_count(""), 0);
    assert_int_equal(access(all.machine_lock.paths[1], F_OK), 0);
    assert_int_equal(rft_machine_lock_take(&other, 0, &all.token, NULL), REFIT_ERR_TIMEOUT);
    setenv("XDG_RUNTIME_DIR", "relative/folder", 1);
    rft_machine_lock_find(&other, "/nowhere");
    assert_string_equal(other.paths[1], "");
    unsetenv("XDG_RUNTIME_DIR");
}

/* Then other processes lock a new file: at least none may wait for the removed one. */
LOCK_TEST(a_file_that_was_removed_is_made_again)
{
    assert_ok(rft_machine_lock_take(&all.machine_lock, 0, &all.token, NULL));
    assert_int_equal(unlink(all.path), 0);
    assert_false(is_taken());
    rft_machine_lock_give(&all.machine_lock);
    assert_ok(rft_machine_lock_take(&all.machine_lock, 0, &all.token, NULL));
    assert_true(is_taken());
}

/* ---- Claims */

#define PLACES 64 /* for claims */

static void take_now(rft_machine_lock *machine_lock)
{
    rft_machine_lock_find(machine_lock, all.tree.root);
    assert_ok(rft_machine_lock_take(machine_lock, 0, &all.token, NULL));
    assert_non_null(machine_lock->held);
}

static void claim_now(rft_machine_lock *machine_lock, uint64_t bytes)
{
    take_now(machine_lock);
    rft_machine_lock_claim(machine_lock, bytes);
    assert_null(machine_lock->held);
    assert_non_null(machine_lock->claim);
}

/* What another process finds. */
static bool is_claimed(uint64_t *bytes)
{
    rft_machine_lock other;
    take_now(&other);
    bool claimed = rft_machine_lock_claimed(&other, bytes);
    rft_machine_lock_give(&other);
    return claimed;
}

static void expect_claims(uint64_t expected)
{
    uint64_t bytes;
    assert_true(is_claimed(&bytes));
    assert_true(bytes == expected);
}

static void expect_none(void)
{
    uint64_t bytes = 7;
    assert_false(is_claimed(&bytes));
    assert_int_equal(bytes, 0);
}

static const char *claim_path(int nth)
{
    static char path[RFT_MACHINE_LOCK_PATH_BYTES + 16];
    snprintf(path, sizeof path, "%s.claim-%d", all.path, nth);
    return path;
}

LOCK_TEST(a_claim_gives_the_lock_and_counts_until_it_ends)
{
    struct stat file;
    expect_none();
    int before = count_descriptors();
    claim_now(&all.machine_lock, 12 * GIB);
    assert_int_equal(count_descriptors(), before);
    assert_int_equal(stat(claim_path(0), &file), 0);
    assert_int_equal(file.st_mode & 07777, 0600);
    assert_false(is_taken());
    expect_claims(12 * GIB);
    assert_int_equal(count_descriptors(), before);
    atomic_store(all.machine_lock.claim, 5 * GIB);
    expect_claims(5 * GIB);
    atomic_store(all.machine_lock.claim, 0);
    expect_claims(0);
    rft_machine_lock_give(&all.machine_lock);
    assert_null(all.machine_lock.claim);
    expect_none();
    rft_machine_lock_give(&all.machine_lock);
    assert_int_equal(heard_count(""), 0);
}

LOCK_TEST(claims_add_up_and_their_files_are_used_again)
{
    rft_machine_lock others[3];
    for (int round = 0; round < 3; round++) {
        for (uint64_t i = 0; i < 3; i++)
            claim_now(&others[i], i + 1);
        expect_claims(6);
        rft_machine_lock_give(&others[1]);
        expect_claims(4);
        claim_now(&others[1], UINT64_MAX - 4);
        expect_claims(UINT64_MAX);
        rft_machine_lock_give(&others[1]);
        claim_now(&others[1], UINT64_MAX - 3);
        expect_claims(UINT64_MAX);
        for (int i = 0; i < 3; i++)
            rft_machine_lock_give(&others[i]);
        expect_none();
    }
    assert_int_equal(access(claim_path(2), F_OK), 0);
    assert_int_not_equal(access(claim_path(3), F_OK), 0);
}

/* The second time a child of it lives on. */
LOCK_TEST(the_claim_of_a_killed_process_does_not_count)
{
    for (int lives_on = 0; lives_on < 2; lives_on++) {
        pid_t grandchild;
        pid_t holder = start_holder(3 * GIB, lives_on, &grandchild);
        expect_claims(3 * GIB);
        kill_child(holder);
        if (lives_on) assert_int_equal(kill(grandchild, 0), 0);
        expect_none();
        claim_now(&all.machine_lock, MIB);
        expect_claims(MIB);
        rft_machine_lock_give(&all.machine_lock);
        if (lives_on) assert_int_equal(kill(grandchild, SIGKILL), 0);
    }
}

LOCK_TEST(a_child_does_not_keep_the_claim_that_its_parent_ends)
{
    claim_now(&all.machine_lock, MIB);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) child_waits();
    expect_claims(MIB);
    rft_machine_lock_give(&all.machine_lock);
    expect_none();
    kill_child(child);
}

static atomic_bool enough;

static void *claim_often(void *user)
{
    while (!atomic_load(&enough)) {
        uint64_t bytes;
        rft_machine_lock machine_lock;
        rft_machine_lock_find(&machine_lock, all.tree.root);
        if (rft_machine_lock_take(&machine_lock, 0, &all.token, NULL) != REFIT_OK) return user;
        (void)rft_machine_lock_claimed(&machine_lock, &bytes);
        rft_machine_lock_claim(&machine_lock, MIB);
        rft_machine_lock_give(&machine_lock);
    }
    return NULL;
}

/* At whatever moment of it. */
LOCK_TEST(a_child_keeps_nothing_when_another_thread_is_at_it)
{
    pid_t children[120];
    void *failed;
    rft_thread thread;
    atomic_store(&enough, false);
    assert_ok(rft_thread_start(&thread, "claiming", claim_often, &all, NULL));
    for (size_t i = 0; i < COUNT_OF(children); i++) {
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i] == 0) child_waits();
    }
    atomic_store(&enough, true);
    assert_int_equal(pthread_join(thread, &failed), 0);
    assert_null(failed);
    assert_false(is_taken());
    expect_none();
    for (size_t i = 0; i < COUNT_OF(children); i++)
        kill_child(children[i]);
}

/* ---- Waiting for claims */

LOCK_TEST(a_retry_lets_others_have_the_lock_and_takes_it_again)
{
    uint64_t bytes;
    rft_machine_lock other;
    claim_now(&other, MIB);
    take_now(&all.machine_lock);
    assert_true(rft_machine_lock_claimed(&all.machine_lock, &bytes));
    assert_ok(rft_machine_lock_retry(&all.machine_lock, TIMEOUT_MS, &all.token, NULL));
    assert_true(is_taken());
    rft_machine_lock_give(&other);
    assert_false(rft_machine_lock_claimed(&all.machine_lock, &bytes));
}

/* Waits for the claim of `other`, which falls by a byte at each of three moments. */
static refit_status wait_until_it_gives_up(rft_machine_lock *other, const int64_t falls[3])
{
    uint64_t bytes;
    refit_status status = REFIT_OK;
    for (int i = 0; status == REFIT_OK; i += i < 3 && fake_now >= falls[i]) {
        atomic_store(other->claim, (uint64_t)(10 - i));
        assert_true(rft_machine_lock_claimed(&all.machine_lock, &bytes));
        status = rft_machine_lock_retry(&all.machine_lock, 1000, &all.token, NULL);
    }
    return status;
}

/* A holder that goes on touching its memory is not a reason to give up. */
LOCK_TEST(the_deadline_is_for_claims_that_stay_the_same)
{
    const int64_t ms = 1000000, falls[3] = {1900 * ms, 2800 * ms, 3700 * ms};
    rft_machine_lock other;
    claim_now(&other, 10);
    take_now(&all.machine_lock);
    fake_now = 1000 * ms;
    refit_status status = wait_until_it_gives_up(&other, falls);
    int64_t ended = fake_now;
    fake_now = 0;
    assert_int_equal(status, REFIT_ERR_TIMEOUT);
    assert_in_range(ended, 4700 * ms, 4800 * ms);
    assert_null(all.machine_lock.held);
    fake_now = 1000 * ms; /* a second time it waits as long */
    take_now(&all.machine_lock);
    status = wait_until_it_gives_up(&other, falls);
    ended = fake_now;
    fake_now = 0;
    assert_int_equal(status, REFIT_ERR_TIMEOUT);
    assert_in_range(ended, 4700 * ms, 4800 * ms);
    rft_machine_lock_give(&other);
}

LOCK_TEST(a_retry_can_be_stopped)
{
    uint64_t bytes;
    refit_error error = {0};
    rft_machine_lock other;
    claim_now(&other, MIB);
    take_now(&all.machine_lock);
    assert_true(rft_machine_lock_claimed(&all.machine_lock, &bytes));
    rft_cancel_token_stop(&all.token);
    assert_int_equal(rft_machine_lock_retry(&all.machine_lock, TIMEOUT_MS, &all.token, &error),
                     REFIT_ERR_CANCELLED);
    assert_null(all.machine_lock.held);
    assert_false(is_taken());
    rft_machine_lock_give(&other);
}

/* ---- Claims that cannot be made */

/* The holder keeps the others out until it has its memory. */
static void claim_in_vain(void)
{
    heard_begin(REFIT_LOG_WARNING);
    take_now(&all.machine_lock);
    rft_machine_lock_claim(&all.machine_lock, MIB);
    assert_null(all.machine_lock.claim);
    assert_int_equal(heard_count("wait until this one has taken its host memory"), 1);
    assert_true(is_taken());
    rft_machine_lock_give(&all.machine_lock);
    expect_none();
}

LOCK_TEST(a_claim_in_a_file_that_is_not_trusted_does_not_count)
{
    char target[128];
    claim_now(&all.machine_lock, MIB);
    assert_int_equal(chmod(claim_path(0), 0620), 0);
    expect_none();
    rft_machine_lock_give(&all.machine_lock);
    claim_in_vain();
    assert_int_equal(unlink(claim_path(0)), 0);
    snprintf(target, sizeof target, "%s/target", all.tree.root);
    assert_int_equal(symlink(target, claim_path(0)), 0);
    claim_in_vain();
    assert_int_not_equal(access(target, F_OK), 0);
    assert_int_equal(unlink(claim_path(0)), 0);
    assert_int_equal(mkfifo(claim_path(0), 0600), 0);
    claim_in_vain();
    assert_int_equal(unlink(claim_path(0)), 0);
    claim_now(&all.machine_lock, MIB);
    expect_claims(MIB);
}

LOCK_TEST(a_claim_in_a_file_that_was_removed_ends_like_others)
{
    claim_now(&all.machine_lock, MIB);
    assert_int_equal(unlink(claim_path(0)), 0);
    expect_none(); /* it can no longer be found */
    atomic_store(all.machine_lock.claim, 1);
    rft_machine_lock_give(&all.machine_lock);
    claim_now(&all.machine_lock, 2 * MIB);
    expect_claims(2 * MIB);
}

LOCK_TEST(where_a_file_must_have_no_bytes_the_lock_is_kept)
{
    struct rlimit before, none;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    none = before;
    none.rlim_cur = sizeof(uint64_t) - 1;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &none), 0);
    take_now(&all.machine_lock);
    rft_machine_lock_claim(&all.machine_lock, MIB);
    bool kept = all.machine_lock.claim == NULL && is_taken();
    rft_machine_lock_give(&all.machine_lock);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_true(kept);
    assert_int_equal(heard_count("File too large"), 1);
    assert_false(is_taken());
}

LOCK_TEST(the_claim_for_which_there_is_no_file_keeps_the_lock)
{
    static rft_machine_lock others[PLACES];
    for (int i = 0; i < PLACES; i++)
        claim_now(&others[i], 1);
    expect_claims(PLACES);
    take_now(&all.machine_lock);
    rft_machine_lock_claim(&all.machine_lock, MIB);
    assert_null(all.machine_lock.claim);
    assert_true(is_taken());
    rft_machine_lock_give(&all.machine_lock);
    for (int i = 0; i < PLACES; i++)
        rft_machine_lock_give(&others[i]);
    claim_now(&all.machine_lock, MIB);
    expect_claims(MIB);
}

LOCK_TEST(without_the_lock_nothing_is_claimed)
{
    uint64_t bytes = 7;
    rft_machine_lock_find(&all.machine_lock, "/nowhere");
    go_on_without();
    assert_false(rft_machine_lock_claimed(&all.machine_lock, &bytes));
    assert_int_equal(bytes, 0);
    rft_machine_lock_claim(&all.machine_lock, MIB);
    assert_null(all.machine_lock.claim);
    assert_int_equal(heard_count(""), 1);
}

int main(void)
{
    return test_run("machine_lock");
}
