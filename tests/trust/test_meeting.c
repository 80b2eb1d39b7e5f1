/* Both ends of user://NAME meet although they would choose different folders, whichever comes
 * first; and a trainer whose socket file was removed says so. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <refit/broadcast.h>
#include <refit/host.h>

#include "base/clock.h"
#include "tests/support/file_tree.h"
#include "tests/support/quick_config.h"
#include "tests/support/test.h"

#define WAIT_MS 50000

typedef struct scene {
    file_tree tree; /* what XDG_RUNTIME_DIR is for the worker */
    char name[64];
    refit_config config;
} scene;

static scene scene_open(void)
{
    scene it = {.tree = file_tree_open(), .config = quick_config()};
    (void)snprintf(it.name, sizeof it.name, "user://meet-%ld", (long)getpid());
    return it;
}

static refit_publisher *trainer_elsewhere(const scene *it)
{
    refit_publisher *publisher = NULL;
    refit_error error = {0};
    assert_int_equal(unsetenv("XDG_RUNTIME_DIR"), 0);
    if (refit_publisher_open(it->name, &it->config, &publisher, &error) != REFIT_OK)
        fail_msg("%s", error.text);
    assert_null(strstr(refit_publisher_endpoint(publisher), it->tree.root));
    return publisher;
}

static refit_subscriber *worker_here(const scene *it)
{
    refit_subscriber *subscriber = NULL;
    refit_error error = {0};
    assert_int_equal(setenv("XDG_RUNTIME_DIR", it->tree.root, 1), 0);
    if (refit_subscriber_open(it->name, &it->config, &subscriber, &error) != REFIT_OK)
        fail_msg("%s", error.text);
    return subscriber;
}

static bool is_connected(refit_subscriber *subscriber)
{
    refit_subscriber_info info = {.size = sizeof info};
    assert_ok(refit_subscriber_describe(subscriber, &info, NULL));
    return info.connected;
}

static void wait_until(refit_subscriber *subscriber, bool connected)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    while (is_connected(subscriber) != connected && rft_ms_until(deadline) > 0)
        (void)poll(NULL, 0, 5);
    assert_int_equal(is_connected(subscriber), connected);
}

TEST(a_worker_that_comes_later_finds_its_trainer)
{
    scene it = scene_open();
    refit_publisher *publisher = trainer_elsewhere(&it);
    refit_subscriber *subscriber = worker_here(&it);
    wait_until(subscriber, true);
    refit_subscriber_close(subscriber);
    refit_publisher_close(publisher);
    file_tree_close(&it.tree);
}

/* The file of a socket at which no process listens any more. */
static void leave_socket(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(strlen(path) < sizeof address.sun_path);
    memcpy(address.sun_path, path, strlen(path));
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(close(fd), 0);
}

TEST(a_worker_that_waits_finds_each_trainer)
{
    char path[256];
    scene it = scene_open();
    refit_subscriber *subscriber = worker_here(&it);
    (void)snprintf(path, sizeof path, "%s/refit/meet-%ld.sock", it.tree.root, (long)getpid());
    leave_socket(path); /* of a trainer that was killed */
    for (int i = 0; i < 2; i++) {
        refit_publisher *publisher = trainer_elsewhere(&it);
        wait_until(subscriber, true);
        refit_publisher_close(publisher);
        wait_until(subscriber, false);
    }
    /* And one at the first place. */
    refit_publisher *publisher = NULL;
    assert_int_equal(setenv("XDG_RUNTIME_DIR", it.tree.root, 1), 0);
    assert_ok(refit_publisher_open(it.name, &it.config, &publisher, NULL));
    wait_until(subscriber, true);
    refit_subscriber_close(subscriber);
    refit_publisher_close(publisher);
    file_tree_close(&it.tree);
}

TEST(a_name_has_one_trainer_whichever_folder_it_is_in)
{
    refit_error why;
    refit_publisher *second = NULL;
    scene it = scene_open();
    refit_publisher *publisher = trainer_elsewhere(&it);
    assert_int_equal(setenv("XDG_RUNTIME_DIR", it.tree.root, 1), 0);
    assert_int_equal(refit_publisher_open(it.name, &it.config, &second, &why), REFIT_ERR_BUSY);
    assert_says(&why, refit_publisher_endpoint(publisher));
    refit_publisher_close(publisher);
    assert_ok(refit_publisher_open(it.name, &it.config, &second, &why));
    refit_publisher_close(second);
    file_tree_close(&it.tree);
}

TEST(a_worker_without_a_trainer_names_the_endpoint)
{
    char expected[128];
    refit_update *update;
    refit_error error;
    scene it = scene_open();
    refit_subscriber *subscriber = worker_here(&it);
    (void)snprintf(expected, sizeof expected, "no trainer has answered at %s of user %u", it.name,
                   (unsigned)geteuid());
    assert_int_equal(refit_subscriber_next(subscriber, 1, &update, &error), REFIT_ERR_TIMEOUT);
    assert_says(&error, expected);
    refit_subscriber_close(subscriber);
    file_tree_close(&it.tree);
}

/* ---- A socket file that is gone ---- */

static atomic_int warnings;

static void hear(void *user, refit_log_level level, const char *line)
{
    (void)user;
    if (level == REFIT_LOG_WARNING && strstr(line, "was removed: workers that come now") != NULL)
        atomic_fetch_add(&warnings, 1);
}

/* As when the system removes the folder of a user after logout. */
TEST(a_trainer_whose_socket_was_removed_says_so)
{
    refit_publisher *publisher = NULL;
    scene it = scene_open();
    atomic_store(&warnings, 0);
    refit_set_log(hear, NULL, REFIT_LOG_WARNING);
    assert_int_equal(setenv("XDG_RUNTIME_DIR", it.tree.root, 1), 0);
    assert_ok(refit_publisher_open(it.name, &it.config, &publisher, NULL));
    refit_subscriber *subscriber = worker_here(&it);
    wait_until(subscriber, true);
    assert_int_equal(unlink(refit_publisher_endpoint(publisher) + strlen("ipc://")), 0);
    int64_t deadline = rft_deadline(WAIT_MS);
    while (atomic_load(&warnings) == 0 && rft_ms_until(deadline) > 0)
        (void)poll(NULL, 0, 5);
    assert_int_equal(atomic_load(&warnings), 1);
    assert_true(is_connected(subscriber));
    refit_subscriber_close(subscriber);
    refit_publisher_close(publisher);
    refit_set_log(NULL, NULL, REFIT_LOG_WARNING);
    file_tree_close(&it.tree);
}

int main(void)
{
    return test_run("meeting");
}
