/* What another user of the machine tries at the default endpoint and at ipc paths, as that user: no
 * worker takes its weights, and no trainer waits for it. */
#include "tests/support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <refit/advanced/query.h>
#include <refit/broadcast.h>

#include "base/clock.h"
#include "net/channel.h"
#include "tests/support/other_user.h"
#include "tests/support/quick_config.h"

#define WAIT_MS 50000u

/* Two users that no other run plays at the same time, and what is said of the second. */
static uid_t owner_id, stranger_id;
static char own_folder[32], own_socket[64]; /* the owner's, without XDG_RUNTIME_DIR */
static char belongs_to_stranger[64], stranger_listens[64];

static bool is_free(uid_t user)
{
    char folder[32];
    if (!other_user_claim(user)) return false;
    (void)snprintf(folder, sizeof folder, "/tmp/refit-%u", (unsigned)user);
    (void)rmdir(folder); /* left by a run that failed */
    return access(folder, F_OK) != 0;
}

static int choose_users(void **state)
{
    for (owner_id = 61000; !is_free(owner_id); owner_id++)
        continue;
    for (stranger_id = owner_id + 1; !is_free(stranger_id); stranger_id++)
        continue;
    const unsigned owner = owner_id, stranger = stranger_id;
    (void)snprintf(own_folder, sizeof own_folder, "/tmp/refit-%u", owner);
    (void)snprintf(own_socket, sizeof own_socket, "ipc://%s/refit.sock", own_folder);
    (void)snprintf(belongs_to_stranger, 64, "belongs to user %u", stranger);
    (void)snprintf(stranger_listens, 64, "user %u listens at ipc://", stranger);
    return unsetenv("XDG_RUNTIME_DIR");
}

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

static refit_config default_config(void)
{
    refit_config config = quick_config();
    strcpy(config.broadcast_endpoint, "user://refit");
    config.broadcast_shm = REFIT_SHM_OFF;
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
    refit_config config = default_config();
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
    refit_config config = default_config();
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

/* Both ends are refused at once, with PART in the sentence. */
typedef struct refusal {
    const char *endpoint;    /* NULL: the default */
    refit_status of_trainer; /* that of the worker is REFIT_ERR_SECURITY */
    const char *part;
} refusal;

static bool both_are_refused(const other_self *self, const void *with)
{
    const refusal *it = with;
    const refit_config config = default_config();
    refit_subscriber *subscriber = NULL;
    refit_publisher *publisher = NULL;
    refit_error error = {0};
    bool well = other_holds(refit_subscriber_open(it->endpoint, &config, &subscriber, &error) ==
                            REFIT_ERR_SECURITY) &&
                other_holds(says(&error, it->part)) &&
                other_holds(refit_publisher_open(it->endpoint, &config, &publisher, &error) ==
                            it->of_trainer) &&
                other_holds(says(&error, it->part));
    refit_subscriber_close(subscriber);
    refit_publisher_close(publisher);
    return well;
}

/* As this test's user, root, and as one that is not. */
static void all_are_refused(const char *endpoint, refit_status of_trainer, const char *part)
{
    const refusal it = {endpoint, of_trainer, part};
    assert_true(both_are_refused(NULL, &it));
    other_user_do(owner_id, both_are_refused, &it);
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
    char other[64], lock[64], strangers[32];
    const char *path = own_socket + strlen("ipc://");
    char part[64];
    (void)snprintf(part, sizeof part, "belongs to user %u", (unsigned)owner_id);
    (void)snprintf(other, sizeof other, "%s/other.sock", own_folder);
    (void)snprintf(lock, sizeof lock, "%s.lock", path);
    (void)snprintf(strangers, sizeof strangers, "/tmp/refit-%u", (unsigned)stranger_id);
    const refusal refused = {own_socket, REFIT_ERR_SECURITY, part};
    const refit_config config = default_config();
    refit_query *query = NULL;
    bool well = other_holds(cannot_connect(path, EACCES)) && other_holds(cannot_bind(other)) &&
                other_holds(open(lock, O_RDONLY) < 0 && errno == EACCES) &&
                other_holds(unlink(path) != 0 && errno == EACCES) &&
                other_holds(rename(own_folder, strangers) != 0) &&
                other_holds(rmdir(own_folder) != 0) && other_holds(chmod(own_folder, 0777) != 0) &&
                both_are_refused(NULL, &refused);
    /* Its own default is another place, where no process listens. */
    well = well &&
           other_holds(refit_query_open(NULL, &config, 100, &query, NULL) == REFIT_ERR_TIMEOUT);
    (void)rmdir(strangers);
    return well;
}

TEST(processes_of_one_user_meet_and_others_stay_outside)
{
    other_user trainer = other_user_ready(owner_id, honest_trainer, NULL);
    other_user_do(stranger_id, stranger_gets_nowhere, NULL);
    other_user_do(owner_id, honest_worker, NULL);
    other_user_end(&trainer);
    assert_int_equal(rmdir(own_folder), 0); /* nothing is left in it */
}

static bool make_folder(const other_self *self, const void *with)
{
    return other_holds(mkdir(own_folder, 0777) == 0) && other_holds(chmod(own_folder, 0777) == 0);
}

static bool make_link(const other_self *self, const void *with)
{
    return other_holds(symlink("/var/tmp", own_folder) == 0);
}

TEST(a_name_that_a_stranger_took_is_refused)
{
    const refusal folder = {NULL, REFIT_ERR_SECURITY, belongs_to_stranger};
    const refusal link = {NULL, REFIT_ERR_SECURITY, "is a link or no folder"};
    other_user_do(stranger_id, make_folder, NULL);
    other_user_do(owner_id, both_are_refused, &folder);
    assert_int_equal(rmdir(own_folder), 0);
    other_user_do(stranger_id, make_link, NULL);
    other_user_do(owner_id, both_are_refused, &link);
    assert_int_equal(unlink(own_folder), 0);
}

/* ---- A path in a folder where all users may make files */

TEST(a_socket_that_a_stranger_bound_first_is_refused)
{
    scene it = scene_open(01777);
    other_user stranger = other_user_ready(stranger_id, false_trainer, it.endpoint);
    all_are_refused(it.endpoint, REFIT_ERR_BUSY, belongs_to_stranger);
    assert_int_equal(access(it.path, F_OK), 0);
    other_user_end(&stranger);
    scene_close(&it);
}

/* The stranger binds while the worker looks for its trainer. */
static bool waiting_worker(const other_self *self, const void *with)
{
    refit_config config = default_config();
    config.broadcast_heartbeat_timeout_ms = 2000; /* so long it puts up with the stranger */
    refit_subscriber *subscriber = NULL;
    refit_update *update = NULL;
    refit_error error = {0};
    bool well = other_holds(refit_subscriber_open(with, &config, &subscriber, NULL) == REFIT_OK) &&
                other_ready(self) &&
                other_holds(refit_subscriber_next(subscriber, WAIT_MS, &update, &error) ==
                            REFIT_ERR_SECURITY) &&
                other_holds(says(&error, stranger_listens));
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
    other_user worker = other_user_ready(user, waiting_worker, it.endpoint);
    other_user stranger = other_user_ready(stranger_id, act, it.endpoint);
    other_user_end(&worker);
    other_user_end(&stranger);
    scene_close(&it);
}

TEST(a_socket_that_a_stranger_binds_later_is_refused)
{
    worker_refuses(owner_id, false_trainer);
    worker_refuses(0, false_trainer);
    worker_refuses(owner_id, silent_listener);
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
    refit_config config = default_config();
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

/* It never polls, so its handshake hears of no connection: each message is checked by itself. */
static bool deaf_worker(const other_self *self, const void *with)
{
    refit_config config = default_config();
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
           other_holds(noted == REFIT_ERR_SECURITY) && other_holds(says(&why, stranger_listens));
    rft_channel_close(channel);
    return well;
}

TEST(stranger_is_not_heard_before_its_connection_is_checked)
{
    scene it = scene_open(01777);
    other_user worker = other_user_ready(owner_id, deaf_worker, it.endpoint);
    other_user stranger = other_user_ready(stranger_id, echo, &it);
    other_user_end(&worker);
    other_user_end(&stranger);
    scene_close(&it);
}

/* It took a version of its trainer, which leaves; meanwhile the stranger has the path. */
static bool patient_worker(const other_self *self, const void *with)
{
    refit_config config = default_config();
    config.broadcast_heartbeat_timeout_ms = 60000;
    refit_subscriber *subscriber = NULL;
    bool well = other_holds(refit_subscriber_open(with, &config, &subscriber, NULL) == REFIT_OK) &&
                takes(subscriber, "genuine!") && other_ready(self) && other_until_told(self);
    refit_update *update = NULL;
    refit_error error = {0};
    /* Nothing comes while the stranger is there; that it is, the sentence says in the end. */
    while (well && strstr(error.text, stranger_listens) == NULL)
        well = other_holds(refit_subscriber_next(subscriber, 100, &update, &error) ==
                           REFIT_ERR_TIMEOUT);
    well = well && other_ready(self) && takes(subscriber, "genuine!");
    refit_subscriber_close(subscriber);
    return well;
}

TEST(a_worker_waits_for_its_trainer_while_a_stranger_has_the_path)
{
    scene it = scene_open(01777);
    other_user trainer = other_user_ready(owner_id, honest_trainer, it.endpoint);
    other_user worker = other_user_ready(owner_id, patient_worker, it.endpoint);
    other_user_end(&trainer);
    other_user stranger = other_user_ready(stranger_id, false_trainer, it.endpoint);
    other_user_tell(&worker);
    other_user_await(&worker);
    other_user_end(&stranger);
    trainer = other_user_ready(owner_id, honest_trainer, it.endpoint);
    other_user_end(&worker);
    other_user_end(&trainer);
    scene_close(&it);
    assert_int_equal(rmdir(own_folder), 0); /* where the lock was */
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

/* The lock is where its owner finds it. */
static bool second_trainer_is_refused(const other_self *self, const void *with)
{
    const refit_config config = default_config();
    refit_publisher *publisher = NULL;
    refit_error error = {0};
    return other_holds(refit_publisher_open(with, &config, &publisher, &error) == REFIT_ERR_BUSY) &&
           other_holds(says(&error, "another publisher has the endpoint"));
}

TEST(a_lock_that_a_stranger_holds_keeps_no_trainer_out)
{
    scene it = scene_open(01777);
    other_user stranger = other_user_ready(stranger_id, hold_lock, &it);
    other_user trainer = other_user_ready(owner_id, honest_trainer, it.endpoint);
    other_user_do(owner_id, honest_worker, it.endpoint);
    other_user_do(owner_id, second_trainer_is_refused, it.endpoint);
    other_user_end(&trainer);
    other_user_end(&stranger);
    scene_close(&it);
    assert_int_equal(rmdir(own_folder), 0);
}

/* ---- Folders ---- */

TEST(a_folder_where_others_can_exchange_the_socket_is_refused)
{
    static const mode_t modes[] = {0777, 0775, 0757};
    for (size_t i = 0; i < COUNT_OF(modes); i++) {
        scene it = scene_open(modes[i]);
        all_are_refused(it.endpoint, REFIT_ERR_SECURITY, "chmod go-w");
        scene_close(&it);
    }
}

TEST(a_folder_of_a_stranger_is_refused)
{
    char below[96];
    scene it = scene_open(0755);
    assert_int_equal(chown(it.folder, stranger_id, stranger_id), 0);
    all_are_refused(it.endpoint, REFIT_ERR_SECURITY, belongs_to_stranger);
    /* Nor one further up. */
    (void)snprintf(below, sizeof below, "ipc://%s/below/s", it.folder);
    (void)snprintf(it.path, sizeof it.path, "%s/below", it.folder);
    assert_int_equal(mkdir(it.path, 0755), 0);
    all_are_refused(below, REFIT_ERR_SECURITY, belongs_to_stranger);
    assert_int_equal(rmdir(it.path), 0);
    scene_close(&it);
}

static bool link_folder(const other_self *self, const void *with)
{
    const scene *it = with;
    return other_holds(symlink("/tmp", it->path) == 0);
}

TEST(a_folder_that_a_stranger_links_is_refused)
{
    char endpoint[128];
    scene it = scene_open(01777);
    (void)snprintf(endpoint, sizeof endpoint, "ipc://%s/s", it.path);
    other_user_do(stranger_id, link_folder, &it);
    all_are_refused(endpoint, REFIT_ERR_SECURITY, belongs_to_stranger);
    scene_close(&it);
}

/* ---- Root ---- */

/* Root can connect to any socket, but believes only sockets of its own. */
TEST(root_takes_no_weights_of_a_user)
{
    const refit_config config = default_config();
    refit_subscriber *subscriber = NULL;
    scene it = scene_open(01777);
    other_user trainer = other_user_ready(owner_id, honest_trainer, it.endpoint);
    assert_refused(refit_subscriber_open(it.endpoint, &config, &subscriber, error),
                   REFIT_ERR_SECURITY, "or keys (security.key)");
    other_user_end(&trainer);
    scene_close(&it);
    assert_int_equal(rmdir(own_folder), 0);
}

int main(void)
{
    if (!other_user_can_be()) return 77;
    return test_run_within("local_users", choose_users, NULL);
}
