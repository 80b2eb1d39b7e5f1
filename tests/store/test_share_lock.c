/* A share lock: its owner knows whether a holder maps its memory and whether one reads it, however
 * the holders end, and whatever children of theirs live on. */
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "store/segment.h"
#include "tests/support/test.h"

static rft_share_lock owner_open(void)
{
    rft_share_lock owner = {0};
    assert_done(rft_share_lock_open(&owner, error));
    return owner;
}

static rft_share_lock hold(const rft_share_lock *owner)
{
    rft_share_lock holder = {0};
    assert_done(rft_share_lock_hold(&holder, owner->segment.name, error));
    return holder;
}

TEST(a_holder_is_seen_until_it_lets_go)
{
    rft_share_lock owner = owner_open();
    assert_false(rft_share_lock_is_mapped(&owner));
    assert_false(rft_share_lock_is_read(&owner));
    rft_share_lock holder = hold(&owner);
    assert_true(rft_share_lock_is_mapped(&owner));
    assert_false(rft_share_lock_is_read(&owner));
    assert_ok(rft_share_lock_read(&holder, NULL));
    assert_true(rft_share_lock_is_read(&owner));
    rft_share_lock_unread(&holder);
    assert_false(rft_share_lock_is_read(&owner));
    assert_true(rft_share_lock_is_mapped(&owner));
    rft_share_lock_close(&holder);
    assert_false(rft_share_lock_is_mapped(&owner));
    rft_share_lock_close(&holder);
    rft_share_lock_close(&owner);
}

TEST(several_holders_are_seen_until_the_last_lets_go)
{
    rft_share_lock owner = owner_open();
    rft_share_lock first = hold(&owner), second = hold(&owner);
    assert_ok(rft_share_lock_read(&first, NULL));
    assert_ok(rft_share_lock_read(&second, NULL));
    rft_share_lock_close(&first);
    assert_true(rft_share_lock_is_mapped(&owner));
    assert_true(rft_share_lock_is_read(&owner));
    rft_share_lock_close(&second);
    assert_false(rft_share_lock_is_mapped(&owner));
    assert_false(rft_share_lock_is_read(&owner));
    rft_share_lock_close(&owner);
}

TEST(what_the_owner_writes_into_the_mark_is_seen)
{
    rft_share_lock owner = owner_open();
    rft_share_lock holder = hold(&owner);
    uint64_t generation;
    assert_true(rft_seqlock_note(rft_share_lock_seqlock(&holder), &generation));
    assert_true(rft_seqlock_holds(rft_share_lock_seqlock(&holder), generation));
    rft_seqlock_begin(rft_share_lock_seqlock(&owner));
    assert_false(rft_seqlock_holds(rft_share_lock_seqlock(&holder), generation));
    uint64_t while_written;
    assert_false(rft_seqlock_note(rft_share_lock_seqlock(&holder), &while_written));
    rft_seqlock_end(rft_share_lock_seqlock(&owner));
    assert_false(rft_seqlock_holds(rft_share_lock_seqlock(&holder), generation));
    rft_share_lock_close(&holder);
    rft_share_lock_close(&owner);
}

TEST(a_retired_lock_takes_no_holder)
{
    rft_share_lock owner = owner_open();
    rft_share_lock holder = hold(&owner), late = {0};
    rft_share_lock_retire(&owner);
    assert_int_equal(rft_share_lock_hold(&late, owner.segment.name, NULL), REFIT_ERR_NOT_FOUND);
    assert_true(rft_seqlock_is_retired(rft_share_lock_seqlock(&holder)));
    rft_share_lock_close(&holder);
    assert_false(rft_share_lock_is_mapped(&owner)); /* the late one left nothing */
    rft_share_lock_close(&owner);
}

TEST(a_name_that_is_not_there_is_refused)
{
    rft_share_lock owner = owner_open(), late = {0};
    char name[RFT_SEGMENT_NAME_BYTES];
    strcpy(name, owner.segment.name);
    rft_share_lock_close(&owner);
    assert_int_equal(rft_share_lock_hold(&late, name, NULL), REFIT_ERR_NOT_FOUND);
    assert_int_equal(rft_share_lock_hold(&late, "/etc/passwd", NULL), REFIT_ERR_PROTOCOL);
    assert_int_equal(rft_share_lock_hold(&late, "", NULL), REFIT_ERR_PROTOCOL);
}

/* The child holds, says so, and waits to be killed. */
static pid_t start_holder(const char *name, int *said)
{
    int ends[2];
    char byte = 0;
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        rft_share_lock holder = {0};
        bool held = rft_share_lock_hold(&holder, name, NULL) == REFIT_OK &&
                    rft_share_lock_read(&holder, NULL) == REFIT_OK;
        if (!held || write(ends[1], &byte, 1) != 1) _exit(1);
        child_waits();
    }
    close(ends[1]);
    *said = ends[0];
    return child;
}

TEST(a_holder_that_is_killed_has_let_go)
{
    rft_share_lock owner = owner_open();
    int said;
    char byte;
    pid_t child = start_holder(owner.segment.name, &said);
    assert_true(child > 0);
    assert_int_equal(read(said, &byte, 1), 1);
    assert_true(rft_share_lock_is_mapped(&owner));
    assert_true(rft_share_lock_is_read(&owner));
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
    assert_false(rft_share_lock_is_mapped(&owner));
    assert_false(rft_share_lock_is_read(&owner));
    close(said);
    rft_share_lock_close(&owner);
}

/* A child of a holder that lives until `line` is closed. */
static pid_t child_that_lasts(int line[2])
{
    char none;
    pid_t child = fork();
    if (child == 0) {
        close(line[1]);
        _exit((int)read(line[0], &none, 1));
    }
    return child;
}

TEST(a_child_keeps_no_lock_that_its_parent_gives)
{
    rft_share_lock owner = owner_open();
    rft_share_lock holder = hold(&owner);
    int line[2];
    assert_int_equal(pipe2(line, O_CLOEXEC), 0);
    assert_ok(rft_share_lock_read(&holder, NULL));
    pid_t child = child_that_lasts(line);
    assert_true(rft_share_lock_is_read(&owner));
    rft_share_lock_close(&holder);
    assert_false(rft_share_lock_is_mapped(&owner));
    assert_false(rft_share_lock_is_read(&owner));
    close(line[0]);
    close(line[1]);
    assert_child_succeeds(child);
    rft_share_lock_close(&owner);
}

/* A worker that has a child of its own, says when the child is there, and waits to be killed. */
static pid_t start_holder_with_child(const char *name, int said, int line[2])
{
    pid_t child = fork();
    if (child == 0) {
        char none = 0;
        rft_share_lock holder = {0};
        close(line[1]);
        if (rft_share_lock_hold(&holder, name, NULL) != REFIT_OK) _exit(1);
        if (fork() == 0) {
            if (write(said, &none, 1) != 1) _exit(1);
            _exit((int)read(line[0], &none, 1));
        }
        child_waits();
    }
    return child;
}

TEST(a_child_keeps_no_lock_of_a_killed_holder)
{
    rft_share_lock owner = owner_open();
    int said[2], line[2];
    char byte;
    assert_int_equal(pipe2(said, O_CLOEXEC), 0);
    assert_int_equal(pipe2(line, O_CLOEXEC), 0);
    pid_t holder = start_holder_with_child(owner.segment.name, said[1], line);
    assert_int_equal(read(said[0], &byte, 1), 1);
    assert_true(rft_share_lock_is_mapped(&owner));
    assert_int_equal(kill(holder, SIGKILL), 0);
    assert_int_equal(waitpid(holder, NULL, 0), holder);
    assert_false(rft_share_lock_is_mapped(&owner));
    for (int i = 0; i < 2; i++) {
        close(said[i]);
        close(line[i]);
    }
    rft_share_lock_close(&owner);
}

TEST(an_owner_that_lets_go_leaves_the_mark_to_its_holders)
{
    rft_share_lock owner = owner_open();
    rft_share_lock holder = hold(&owner);
    uint64_t generation;
    assert_true(rft_seqlock_note(rft_share_lock_seqlock(&holder), &generation));
    rft_share_lock_close(&owner);
    assert_true(rft_seqlock_holds(rft_share_lock_seqlock(&holder), generation));
    assert_ok(rft_share_lock_read(&holder, NULL));
    rft_share_lock_close(&holder);
}

int main(void)
{
    return test_run("share_lock");
}
