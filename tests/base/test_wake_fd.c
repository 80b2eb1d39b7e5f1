/* Wake descriptors: readable while set, however often; clear after one clear; errno unchanged. */
#include <errno.h>
#include <poll.h>

#include "base/thread.h"
#include "tests/support/test.h"

static int is_set(int fd)
{
    struct pollfd item = {.fd = fd, .events = POLLIN};
    return poll(&item, 1, 0);
}

static void it_is_readable_while_it_is_set(void **state)
{
    int fd = -1;
    refit_error error;
    assert_ok(rft_wake_fd_open(&fd, &error));
    assert_int_equal(is_set(fd), 0);
    rft_wake_fd_set(fd);
    rft_wake_fd_set(fd);
    assert_int_equal(is_set(fd), 1);
    assert_int_equal(is_set(fd), 1);
    rft_wake_fd_clear(fd);
    assert_int_equal(is_set(fd), 0);
    rft_wake_fd_clear(fd);
    assert_int_equal(is_set(fd), 0);
    rft_wake_fd_close(fd);
}

static void setting_does_not_change_errno(void **state)
{
    int fd = -1;
    refit_error error;
    assert_ok(rft_wake_fd_open(&fd, &error));
    errno = 77;
    rft_wake_fd_set(fd);
    assert_int_equal(errno, 77);
    rft_wake_fd_close(fd);
    errno = 77;
    rft_wake_fd_set(-1);
    assert_int_equal(errno, 77);
}

static void closing_none_is_harmless(void **state)
{
    rft_wake_fd_close(-1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_is_readable_while_it_is_set),
        cmocka_unit_test(setting_does_not_change_errno),
        cmocka_unit_test(closing_none_is_harmless),
    };
    return cmocka_run_group_tests_name("wake_fd", tests, NULL, NULL);
}
