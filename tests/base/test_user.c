/* Whose a number is, in a user namespace and outside. */
#include <sched.h>
#include <unistd.h>

#include "base/user.h"
#include "tests/support/test.h"

#define NOBODY 65534

TEST(the_number_of_this_process_is_its_own_and_no_other)
{
    assert_true(rft_user_is_own(geteuid()));
    assert_false(rft_user_is_own(geteuid() + 1));
    assert_string_equal(rft_user_doubt(geteuid() + 1), "");
}

/* Containers run as nobody. */
TEST(nobody_is_a_user_where_all_are_mapped)
{
    pid_t child = fork();
    if (child == 0)
        _exit(setresuid(NOBODY, NOBODY, NOBODY) == 0 &&
              rft_user_is_unknown(NOBODY) == rft_user_is_own(NOBODY));
    assert_child_succeeds(child);
}

TEST(the_number_of_all_who_are_not_mapped_is_not_our_own)
{
    pid_t child = fork();
    if (child == 0) {
        if (unshare(CLONE_NEWUSER) != 0) _exit(0); /* not everywhere */
        bool same = geteuid() == NOBODY;
        bool own = rft_user_is_own(NOBODY) || !rft_user_is_unknown(NOBODY);
        _exit(same && !own && strstr(rft_user_doubt(NOBODY), "uid_map") != NULL ? 0 : 1);
    }
    assert_child_succeeds(child);
}

int main(void)
{
    return test_run("user");
}
