/* The machine-wide lock: it never has two holders, also when a holder dies, forks or keeps it too
 * long; and a file of another user is never locked. */
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
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

/* A child that has the lock and stands; with `grandchild`, so does a child of its own. */
static pid_t start_holder(bool grandchild, pid_t *third)
{
    int pipe_ends[2];
    assert_int_equal(pipe(pipe_ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        pid_t own = 0;
        if (rft_machine_lock_take(&all.machine_lock, 0, &all.token, NULL) != REFIT_OK) _exit(1);
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
        pid_t holder = start_holder(lives_on, &grandchild);
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
    assert_false(atomic_load(&all.token.in_line));
    assert_ok(rft_thread_start(&thread, "waiting", wait_for_lock, NULL, NULL));
    int64_t deadline = rft_deadline(TIMEOUT_MS);
    while (!atomic_load(&all.token.in_line) && rft_now() < deadline)
        (void)sched_yield();
    assert_true(atomic_load(&all.token.in_line));
    rft_cancel_token_stop(&all.token);
    assert_int_equal(pthread_join(thread, &status), 0);
    assert_int_equal((uintptr_t)status, REFIT_ERR_CANCELLED);
    assert_false(atomic_load(&all.token.in_line));
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

int main(void)
{
    return test_run("machine_lock");
}
