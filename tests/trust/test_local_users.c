/* What another user of the machine tries at the default endpoint and at ipc paths, as that user: no
 * worker takes its weights, and no trainer waits for it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <refit/broadcast.h>

#include "base/clock.h"
#include "net/channel.h"
#include "tests/support/other_user.h"
#include "tests/support/quick_config.h"

#define OWNER    61001u
#define STRANGER 61002u
#define OWN_TMP  "/tmp/refit-61001"
#define WAIT_MS  30000u

/* A folder in which all users may make files, and a path in it. */
typedef struct scene {
    char folder[64], path[80], endpoint[96];
} scene;

static scene scene_open(mode_t mode)
{
    scene it;
    strcpy(it.folder, "/tmp/refit-users-XXXXXX");
    assert_non_null(mkdtemp(it.folder));
    assert_int_equal(chmod(it.folder, mode), 0);
    (void)snprintf(it.path, sizeof it.path, "%s/s", it.folder);
    (void)snprintf(it.endpoint, sizeof it.endpoint, "ipc://%s", it.path);
    return it;
}

static void scene_close(const scene *it)
{
    char lock[96];
    (void)snprintf(lock, sizeof lock, "%s.lock", it->path);
    (void)unlink(it->path);
    (void)unlink(lock);
    assert_int_equal(rmdir(it->folder), 0);
}

/* ---- Both ends, for any user ---- */

static refit_config config_of(uint32_t patience_ms)
{
    refit_config config = quick_config();
    strcpy(config.broadcast_endpoint, "user://refit");
    config.broadcast_shm = REFIT_SHM_OFF;
    config.broadcast_heartbeat_timeout_ms = patience_ms;
    return config;
}

static bool declare(refit_publisher *publisher)
{
    const refit_tensor tensor = {.size = sizeof tensor,
                                 .name = "w",
                                 .dtype = REFIT_U8,
                                 .rank = 1,
                                 .shape = {8},
                                 .bytes = 8,
                                 .alias_of = REFIT_NO_ALIAS};
    return refit_publisher_declare(publisher, &tensor, 1, NULL) == REFIT_OK;
}

static bool publish(refit_publisher *publisher, uint64_t version, const char weights[9])
{
    return refit_publisher_begin(publisher, version, NULL) == REFIT_OK &&
           refit_publisher_write(publisher, 0, weights, 8, NULL, REFIT_STREAM_NONE, NULL) ==
               REFIT_OK &&
           refit_publisher_commit(publisher, NULL) == REFIT_OK;
}

/* Opens, publishes these weights, and goes on until it is told to end. The socket is open to all.
 */
static bool trainer_at(const other_self *self, const char *endpoint, const char weights[9])
{
    refit_config config = config_of(5000);
    refit_publisher *publisher = NULL;
    refit_error error = {0};
    refit_status status = refit_publisher_open(endpoint, &config, &publisher, &error);
    if (status != REFIT_OK) (void)fprintf(stderr, "%s\n", error.text);
    bool well =
        other_holds(status == REFIT_OK) && other_holds(declare(publisher)) &&
        other_holds(publish(publisher, 1, weights)) &&
        other_holds(chmod(refit_publisher_endpoint(publisher) + strlen("ipc://"), 0666) == 0);
    well = well && other_ready(self) && other_until_told(self);
    refit_publisher_close(publisher);
    return well;
}

static bool honest_trainer(const other_self *self, const void *with)
{
    return trainer_at(self, with, "genuine!");
}

static bool false_trainer(const other_self *self, const void *with)
{
    return trainer_at(self, with, "tampered");
}

static bool takes(refit_subscriber *subscriber, const char weights[9])
{
    refit_update *update = NULL;
    refit_tensor tensor = {.size = sizeof tensor};
    const void *bytes = NULL;
    if (!other_holds(refit_subscriber_next(subscriber, WAIT_MS, &update, NULL) == REFIT_OK))
        return false;
    bool same = other_holds(refit_update_tensor(update, 0, &tensor, &bytes, NULL) == REFIT_OK) &&
                other_holds(memcmp(bytes, weights, 8) == 0) &&
                other_holds(refit_update_accept(update, NULL) == REFIT_OK);
    refit_update_close(update);
    return same;
}

/* A worker that gets the genuine weights. */
static bool honest_worker(const other_self *self, const void *with)
{
    (void)self;
    refit_config config = config_of(5000);
    refit_subscriber *subscriber = NULL;
    bool well = other_holds(refit_subscriber_open(with, &config, &subscriber, NULL) == REFIT_OK) &&
                takes(subscriber, "genuine!");
    refit_subscriber_close(subscriber);
    return well;
}

/* ---- What is refused ---- */

static bool says(const refit_error *error, const char *part)
{
    if (strstr(error->text, part) == NULL)
        (void)fprintf(stderr, "no '%s' in: %s\n", part, error->text);
    return strstr(error->text, part) != NULL;
}

/* An end that is refused at once, with PART in the sentence. */
typedef struct refusal {
    const char *endpoint; /* NULL: the default */
    refit_status status;
    const char *part;
} refusal;

static bool worker_is_refused(const other_self *self, const void *with)
{
    (void)self;
    const refusal *it = with;
    refit_config config = config_of(5000);
    refit_subscriber *subscriber = NULL;
    refit_error error = {0};
    refit_status status = refit_subscriber_open(it->endpoint, &config, &subscriber, &error);
    refit_subscriber_close(subscriber);
    return other_holds(status == it->status) && other_holds(says(&error, it->part));
}

static bool trainer_is_refused(const other_self *self, const void *with)
{
    (void)self;
    const refusal *it = with;
    refit_config config = config_of(5000);
    refit_publisher *publisher = NULL;
    refit_error error = {0};
    refit_status status = refit_publisher_open(it->endpoint, &config, &publisher, &error);
    refit_publisher_close(publisher);
    return other_holds(status == it->status) && other_holds(says(&error, it->part));
}

/* As this test's user, root, and as one that is not. */
static void both_are_refused(const refusal *it)
{
    assert_true(worker_is_refused(NULL, it));
    assert_true(trainer_is_refused(NULL, it));
    other_user_do(OWNER, worker_is_refused, it);
    other_user_do(OWNER, trainer_is_refused, it);
}

/* ---- The default endpoint ---- */

static bool cannot_connect(const char *path, int code)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool refused = connect(fd, (struct sockaddr *)&address, sizeof address) != 0 && errno == code;
    return close(fd) == 0 && refused;
}

static bool cannot_bind(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool refused = bind(fd, (struct sockaddr *)&address, sizeof address) != 0 && errno == EACCES;
    return close(fd) == 0 && refused;
}

/* Subscribing, stalling and taking places need a connection; the rest a name in the folder. */
static bool stranger_gets_nowhere(const other_self *self, const void *with)
{
    (void)self;
    (void)with;
    const refusal refused = {"ipc://" OWN_TMP "/refit.sock", REFIT_ERR_SECURITY,
                             "belongs to user 61001"};
    refit_config config = config_of(5000);
    refit_glance *glance = NULL;
    bool well = other_holds(cannot_connect(OWN_TMP "/refit.sock", EACCES)) &&
                other_holds(cannot_bind(OWN_TMP "/other.sock")) &&
                other_holds(open(OWN_TMP "/refit.sock.lock", O_RDONLY) < 0 && errno == EACCES) &&
                other_holds(unlink(OWN_TMP "/refit.sock") != 0 && errno == EACCES) &&
                other_holds(rename(OWN_TMP, "/tmp/refit-61001-away") != 0) &&
                other_holds(rmdir(OWN_TMP) != 0) && other_holds(chmod(OWN_TMP, 0777) != 0) &&
                worker_is_refused(NULL, &refused) && trainer_is_refused(NULL, &refused);
    /* Its own default is another place, where no process listens. */
    well = well &&
           other_holds(refit_glance_open(NULL, &config, 100, &glance, NULL) == REFIT_ERR_TIMEOUT);
    (void)rmdir("/tmp/refit-61002");
    return well;
}

static void processes_of_one_user_meet_and_others_stay_outside(void **state)
{
    (void)state;
    if (!other_user_can_be()) skip();
    other_user trainer = other_user_start(OWNER, honest_trainer, NULL);
    other_user_await(&trainer);
    other_user_do(STRANGER, stranger_gets_nowhere, NULL);
    other_user_do(OWNER, honest_worker, NULL);
    other_user_end(&trainer);
    assert_int_equal(rmdir(OWN_TMP), 0); /* nothing is left in it */
}

static bool make_folder(const other_self *self, const void *with)
{
    (void)self;
    return other_holds(mkdir(with, 0777) == 0) && other_holds(chmod(with, 0777) == 0);
}

static bool make_link(const other_self *self, const void *with)
{
    (void)self;
    return other_holds(symlink("/var/tmp", with) == 0);
}

static void a_name_that_a_stranger_took_is_refused(void **state)
{
    (void)state;
    const refusal folder = {NULL, REFIT_ERR_SECURITY, "belongs to user 61002, not to user 61001"};
    const refusal link = {NULL, REFIT_ERR_SECURITY, "is a link or no folder"};
    if (!other_user_can_be()) skip();
    other_user_do(STRANGER, make_folder, OWN_TMP);
    other_user_do(OWNER, worker_is_refused, &folder);
    other_user_do(OWNER, trainer_is_refused, &folder);
    assert_int_equal(rmdir(OWN_TMP), 0);
    other_user_do(STRANGER, make_link, OWN_TMP);
    other_user_do(OWNER, worker_is_refused, &link);
    other_user_do(OWNER, trainer_is_refused, &link);
    assert_int_equal(unlink(OWN_TMP), 0);
}

/* ---- A path in a folder where all users may make files */

static void a_socket_that_a_stranger_bound_first_is_refused(void **state)
{
    (void)state;
    if (!other_user_can_be()) skip();
    scene it = scene_open(01777);
    const refusal worker = {it.endpoint, REFIT_ERR_SECURITY, "belongs to user 61002"};
    const refusal trainer = {it.endpoint, REFIT_ERR_BUSY, "belongs to user 61002"};
    other_user stranger = other_user_start(STRANGER, false_trainer, it.endpoint);
    other_user_await(&stranger);
    assert_true(worker_is_refused(NULL, &worker));
    assert_true(trainer_is_refused(NULL, &trainer));
    other_user_do(OWNER, worker_is_refused, &worker);
    other_user_do(OWNER, trainer_is_refused, &trainer);
    assert_int_equal(access(it.path, F_OK), 0);
    other_user_end(&stranger);
    scene_close(&it);
}

/* The stranger binds while the worker looks for its trainer. */
static bool waiting_worker(const other_self *self, const void *with)
{
    refit_config config = config_of(500);
    refit_subscriber *subscriber = NULL;
    refit_update *update = NULL;
    refit_error error = {0};
    bool well = other_holds(refit_subscriber_open(with, &config, &subscriber, NULL) == REFIT_OK) &&
                other_ready(self) &&
                other_holds(refit_subscriber_next(subscriber, WAIT_MS, &update, &error) ==
                            REFIT_ERR_SECURITY) &&
                other_holds(says(&error, "user 61002 listens at ipc://"));
    refit_subscriber_close(subscriber);
    return well;
}

/* It lets the kernel take connections, and says nothing. */
static bool silent_listener(const other_self *self, const void *with)
{
    const char *path = (const char *)with + strlen("ipc://");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return other_holds(bind(fd, (struct sockaddr *)&address, sizeof address) == 0) &&
           other_holds(chmod(path, 0666) == 0) && other_holds(listen(fd, 64) == 0) &&
           other_ready(self) && other_until_told(self);
}

static void worker_refuses(uid_t user, bool (*act)(const other_self *self, const void *with))
{
    scene it = scene_open(01777);
    other_user worker = other_user_start(user, waiting_worker, it.endpoint);
    other_user_await(&worker);
    other_user stranger = other_user_start(STRANGER, act, it.endpoint);
    other_user_await(&stranger);
    other_user_end(&worker);
    other_user_end(&stranger);
    scene_close(&it);
}

static void a_socket_that_a_stranger_binds_later_is_refused(void **state)
{
    (void)state;
    if (!other_user_can_be()) skip();
    worker_refuses(OWNER, false_trainer);
    worker_refuses(0, false_trainer);
    worker_refuses(OWNER, silent_listener);
}

/* ---- Message by message, without a look at the connection ---- */

static rft_view hello(void)
{
    return rft_view_text("hello");
}

/* A ROUTER that answers everything. */
static bool echo(const other_self *self, const void *with)
{
    const scene *it = with;
    refit_config config = config_of(5000);
    rft_channel *channel = NULL;
    rft_envelope got;
    bool answered = false;
    bool well = other_holds(rft_channel_bind(it->endpoint, &config, &channel, NULL) == REFIT_OK) &&
                other_holds(chmod(it->path, 0666) == 0) && other_ready(self);
    for (int64_t deadline = rft_deadline(WAIT_MS); well && !answered && rft_now() < deadline;) {
        rft_channel_poll(channel, -1, 100);
        if (rft_channel_receive(channel, &got, NULL) != REFIT_OK) continue;
        const rft_peer_id to = got.from;
        answered = rft_channel_send(channel, &to, hello(), NULL, NULL) == REFIT_OK;
    }
    well = well && other_holds(answered) && other_until_told(self);
    rft_channel_close(channel);
    return well;
}

/* It never polls, so its handshake hears of no connection: each message is judged by itself. */
static bool deaf_worker(const other_self *self, const void *with)
{
    refit_config config = config_of(5000);
    rft_channel *channel = NULL;
    rft_envelope got;
    refit_error why = {0};
    refit_status heard = REFIT_ERR_TIMEOUT, noted = REFIT_OK;
    bool well = other_holds(rft_channel_connect(with, &config, &channel, NULL) == REFIT_OK) &&
                other_ready(self);
    for (int64_t deadline = rft_deadline(WAIT_MS);
         well && heard == REFIT_ERR_TIMEOUT && noted == REFIT_OK && rft_now() < deadline;) {
        (void)rft_channel_send(channel, NULL, hello(), NULL, NULL);
        heard = rft_channel_receive(channel, &got, NULL);
        noted = rft_channel_take_failure(channel, &why);
        if (noted == REFIT_OK) (void)poll(NULL, 0, 1);
    }
    well = well && other_holds(heard == REFIT_ERR_TIMEOUT) &&
           other_holds(noted == REFIT_ERR_SECURITY) &&
           other_holds(says(&why, "user 61002 listens at ipc://"));
    rft_channel_close(channel);
    return well;
}

static void no_message_of_a_stranger_is_heard_before_the_connection_was_looked_at(void **state)
{
    (void)state;
    if (!other_user_can_be()) skip();
    scene it = scene_open(01777);
    other_user worker = other_user_start(OWNER, deaf_worker, it.endpoint);
    other_user_await(&worker);
    other_user stranger = other_user_start(STRANGER, echo, &it);
    other_user_await(&stranger);
    other_user_end(&worker);
    other_user_end(&stranger);
    scene_close(&it);
}

/* It took a version of its trainer, which leaves; meanwhile the stranger has the path. */
static bool patient_worker(const other_self *self, const void *with)
{
    refit_config config = config_of(30000);
    refit_subscriber *subscriber = NULL;
    bool well = other_holds(refit_subscriber_open(with, &config, &subscriber, NULL) == REFIT_OK) &&
                takes(subscriber, "genuine!") && other_ready(self) && other_until_told(self);
    refit_update *update = NULL;
    refit_error error = {0};
    /* Nothing comes while the stranger is there; that it is, the sentence says in the end. */
    while (well && strstr(error.text, "user 61002 listens") == NULL)
        well = other_holds(refit_subscriber_next(subscriber, 100, &update, &error) ==
                           REFIT_ERR_TIMEOUT);
    well = well && other_ready(self) && takes(subscriber, "genuine!");
    refit_subscriber_close(subscriber);
    return well;
}

static void a_worker_waits_for_its_trainer_while_a_stranger_has_the_path(void **state)
{
    (void)state;
    if (!other_user_can_be()) skip();
    scene it = scene_open(01777);
    other_user trainer = other_user_start(OWNER, honest_trainer, it.endpoint);
    other_user_await(&trainer);
    other_user worker = other_user_start(OWNER, patient_worker, it.endpoint);
    other_user_await(&worker);
    other_user_end(&trainer);
    other_user stranger = other_user_start(STRANGER, false_trainer, it.endpoint);
    other_user_await(&stranger);
    other_user_tell(&worker);
    other_user_await(&worker);
    other_user_end(&stranger);
    trainer = other_user_start(OWNER, honest_trainer, it.endpoint);
    other_user_await(&trainer);
    other_user_end(&worker);
    other_user_end(&trainer);
    scene_close(&it);
    assert_int_equal(rmdir(OWN_TMP), 0); /* where the lock was */
}

static bool hold_lock(const other_self *self, const void *with)
{
    const scene *it = with;
    char lock[96];
    (void)snprintf(lock, sizeof lock, "%s.lock", it->path);
    int fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    return other_holds(fd >= 0) && other_holds(flock(fd, LOCK_EX | LOCK_NB) == 0) &&
           other_ready(self) && other_until_told(self);
}

static void a_lock_that_a_stranger_holds_keeps_no_trainer_out(void **state)
{
    (void)state;
    if (!other_user_can_be()) skip();
    scene it = scene_open(01777);
    const refusal second = {it.endpoint, REFIT_ERR_BUSY, "another publisher has the endpoint"};
    other_user stranger = other_user_start(STRANGER, hold_lock, &it);
    other_user_await(&stranger);
    other_user trainer = other_user_start(OWNER, honest_trainer, it.endpoint);
    other_user_await(&trainer);
    other_user_do(OWNER, honest_worker, it.endpoint);
    other_user_do(OWNER, trainer_is_refused, &second); /* the lock is where its owner finds it */
    other_user_end(&trainer);
    other_user_end(&stranger);
    scene_close(&it);
    assert_int_equal(rmdir(OWN_TMP), 0);
}

/* ---- Folders ---- */

static void a_folder_where_others_can_exchange_the_socket_is_refused(void **state)
{
    (void)state;
    if (!other_user_can_be()) skip();
    static const mode_t modes[] = {0777, 0775, 0757};
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        scene it = scene_open(modes[i]);
        const refusal refused = {it.endpoint, REFIT_ERR_SECURITY, "chmod go-w"};
        both_are_refused(&refused);
        scene_close(&it);
    }
}

static void a_folder_of_a_stranger_is_refused(void **state)
{
    (void)state;
    if (!other_user_can_be()) skip();
    scene it = scene_open(0755);
    const refusal refused = {it.endpoint, REFIT_ERR_SECURITY, "belongs to user 61002"};
    assert_int_equal(chown(it.folder, STRANGER, STRANGER), 0);
    both_are_refused(&refused);
    /* Nor one further up. */
    char below[96];
    (void)snprintf(below, sizeof below, "ipc://%s/below/s", it.folder);
    const refusal deeper = {below, REFIT_ERR_SECURITY, "belongs to user 61002"};
    (void)snprintf(it.path, sizeof it.path, "%s/below", it.folder);
    assert_int_equal(mkdir(it.path, 0755), 0);
    both_are_refused(&deeper);
    assert_int_equal(rmdir(it.path), 0);
    scene_close(&it);
}

static bool link_folder(const other_self *self, const void *with)
{
    (void)self;
    const scene *it = with;
    return other_holds(symlink("/tmp", it->path) == 0);
}

static void a_folder_that_a_stranger_links_is_refused(void **state)
{
    (void)state;
    char endpoint[128];
    if (!other_user_can_be()) skip();
    scene it = scene_open(01777);
    (void)snprintf(endpoint, sizeof endpoint, "ipc://%s/s", it.path);
    const refusal refused = {endpoint, REFIT_ERR_SECURITY, "belongs to user 61002"};
    other_user_do(STRANGER, link_folder, &it);
    both_are_refused(&refused);
    scene_close(&it);
}

/* ---- Root ---- */

/* Root can connect to any socket, but believes only sockets of its own. */
static void root_takes_no_weights_of_a_user(void **state)
{
    (void)state;
    if (!other_user_can_be()) skip();
    scene it = scene_open(01777);
    const refusal refused = {it.endpoint, REFIT_ERR_SECURITY, "or keys (security.key)"};
    other_user trainer = other_user_start(OWNER, honest_trainer, it.endpoint);
    other_user_await(&trainer);
    assert_true(worker_is_refused(NULL, &refused));
    other_user_end(&trainer);
    scene_close(&it);
    assert_int_equal(rmdir(OWN_TMP), 0);
}

/* What a failed test, or a stranger's lock, has left. */
static int sweep(void **state)
{
    (void)state;
    (void)rmdir("/tmp/refit-61001");
    (void)rmdir("/tmp/refit-61002");
    return unsetenv("XDG_RUNTIME_DIR");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(processes_of_one_user_meet_and_others_stay_outside),
        cmocka_unit_test(a_name_that_a_stranger_took_is_refused),
        cmocka_unit_test(a_socket_that_a_stranger_bound_first_is_refused),
        cmocka_unit_test(a_socket_that_a_stranger_binds_later_is_refused),
        cmocka_unit_test(no_message_of_a_stranger_is_heard_before_the_connection_was_looked_at),
        cmocka_unit_test(a_worker_waits_for_its_trainer_while_a_stranger_has_the_path),
        cmocka_unit_test(a_lock_that_a_stranger_holds_keeps_no_trainer_out),
        cmocka_unit_test(a_folder_where_others_can_exchange_the_socket_is_refused),
        cmocka_unit_test(a_folder_of_a_stranger_is_refused),
        cmocka_unit_test(a_folder_that_a_stranger_links_is_refused),
        cmocka_unit_test(root_takes_no_weights_of_a_user),
    };
    return cmocka_run_group_tests(tests, sweep, sweep);
}
