/* A subscriber of an archive, by its public functions: what it gives is used as from a trainer. */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alloc.h"
#include "tests/archive/archive_rig.h"
#include "tests/support/bound_engine.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/test.h"
#include "tests/support/test_device.h"

#define SMALL   10u
#define LARGE   200000u
#define LONG_MS 50000u

typedef struct scene {
    archive_rig rig;
    char endpoint[128];
    refit_subscriber *subscriber;
} scene;

static void follow(scene *it)
{
    (void)snprintf(it->endpoint, sizeof it->endpoint, "archive://%s", it->rig.folder);
    assert_done(refit_subscriber_open(it->endpoint, &it->rig.config, &it->subscriber, error));
}

static void begin(scene *it, uint32_t elements, uint64_t versions)
{
    rig_open_with(&it->rig, elements, versions);
    follow(it);
}

static int setup(void **state)
{
    static scene it;
    memset(&it, 0, sizeof it);
    *state = &it;
    return 0;
}

static int teardown(void **state)
{
    scene *it = *state;
    refit_subscriber_close(it->subscriber);
    if (it->rig.root[0] != '\0') rig_close(&it->rig);
    return 0;
}

#define SCENE(name) TEST_ON(scene *it, name, setup, teardown)

static refit_update *next_of(refit_subscriber *subscriber)
{
    refit_update *update = NULL;
    assert_done(refit_subscriber_next(subscriber, LONG_MS, &update, error));
    return update;
}

/* To the bit. */
static void assert_is(scene *it, const refit_update *update, uint64_t epoch, uint64_t version)
{
    assert_int_equal(refit_update_version(update), version);
    assert_int_equal(refit_update_epoch(update), epoch);
    assert_int_equal(refit_update_count(update), RIG_TENSORS);
    assert_int_equal(refit_update_is_streamed(update), 0);
    assert_null(refit_update_device(update));
    (void)rig_version(&it->rig, epoch, version);
    for (uint32_t i = 0; i < RIG_TENSORS; i++) {
        const uint32_t original = it->rig.tensors[i].alias_of;
        const void *bytes;
        refit_tensor tensor = {.size = sizeof tensor};
        assert_ok(refit_update_tensor(update, i, &tensor, &bytes, NULL));
        assert_string_equal(tensor.name, it->rig.tensors[i].name);
        assert_memory_equal(bytes, it->rig.bytes[original == REFIT_NO_ALIAS ? i : original],
                            tensor.bytes);
    }
}

static void apply(scene *it, uint64_t version)
{
    refit_update *update = next_of(it->subscriber);
    assert_is(it, update, RIG_EPOCH, version);
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
}

static refit_subscriber_info describe(const scene *it)
{
    refit_subscriber_info info = {.size = sizeof info};
    assert_ok(refit_subscriber_describe(it->subscriber, &info, NULL));
    return info;
}

TEST(arguments_are_checked)
{
    refit_subscriber *subscriber = NULL;
    refit_config config;
    refit_config_init(&config, sizeof config);
    assert_refused(refit_subscriber_open("archive://", &config, &subscriber, error),
                   REFIT_ERR_INVALID, "names no folder");
    config.broadcast_gpu = REFIT_GPU_REQUIRE;
    assert_refused(refit_subscriber_open("archive:///tmp", &config, &subscriber, error),
                   REFIT_ERR_CONFIG, "broadcast.gpu");
    refit_publisher *publisher = NULL;
    config.broadcast_gpu = REFIT_GPU_AUTO;
    assert_refused(refit_publisher_open("archive:///tmp", &config, &publisher, error),
                   REFIT_ERR_INVALID, "archive:///tmp");
    assert_null(subscriber);
}

TEST(open_survives_every_failed_allocation)
{
    for (uint64_t nth = 1;; nth++) {
        refit_subscriber *subscriber = NULL;
        failing_alloc_begin(nth);
        refit_status status =
            refit_subscriber_open("archive:///refit-absent", NULL, &subscriber, NULL);
        refit_subscriber_close(subscriber);
        (void)failing_alloc_end();
        if (status == REFIT_OK) break;
        assert_int_equal(status, REFIT_ERR_HOST_MEMORY);
    }
}

SCENE(a_version_is_as_from_a_trainer)
{
    begin(it, LARGE, 3);
    struct pollfd item = {.fd = refit_subscriber_fd(it->subscriber), .events = POLLIN};
    assert_int_equal(poll(&item, 1, LONG_MS), 1);
    refit_update *update = next_of(it->subscriber);
    assert_is(it, update, RIG_EPOCH, 3);
    assert_int_equal(poll(&item, 1, 0), 0);
    unsigned char digest[16];
    assert_ok(refit_update_digest(update, digest, NULL));
    assert_memory_equal(digest, rig_info(&it->rig, 2).digest, sizeof digest);
    uint32_t index = 0;
    assert_ok(refit_update_find(update, "head", &index, NULL));
    assert_int_equal(index, 2);
    assert_string_equal(describe(it).state, "applying");
    refit_update *second = NULL;
    assert_refused(refit_subscriber_next(it->subscriber, 0, &second, error), REFIT_ERR_STATE,
                   "still open");
    void *kept = NULL;
    const void *bytes;
    assert_ok(refit_update_tensor(update, 6, NULL, &bytes, NULL));
    assert_ok(refit_update_retain(update, 4096, &kept, NULL));
    assert_ok(refit_update_accept(update, NULL));
    assert_int_equal(refit_update_accept(update, NULL), REFIT_ERR_STATE);
    refit_update_close(update);
    for (uint64_t version = 4; version <= 9; version++) {
        rig_keep(&it->rig, RIG_EPOCH, version);
        apply(it, version);
    }
    (void)rig_version(&it->rig, RIG_EPOCH, 3); /* the views of version 3 stay */
    assert_memory_equal(bytes, it->rig.bytes[6], it->rig.tensors[6].bytes);
    refit_update_release(kept);
    refit_subscriber_info info = describe(it);
    assert_int_equal(info.version, 9);
    assert_int_equal(info.epoch, RIG_EPOCH);
    assert_int_equal(info.path, REFIT_PATH_ARCHIVE);
    assert_int_equal(info.connected, 1);
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_subscriber_stats(it->subscriber, &stats, NULL));
    assert_in_range(stats.receive_count, 6, 7); /* the last decision may be on its way */
    assert_int_equal(stats.receive_version, 9);
    assert_true(stats.receive_bytes_total > 0);
}

SCENE(a_wait_ends_in_time_and_by_wake)
{
    refit_update *update = NULL;
    rig_open(&it->rig, SMALL);
    follow(it);
    refit_subscriber_wake(it->subscriber);
    assert_int_equal(refit_subscriber_next(it->subscriber, LONG_MS, &update, NULL),
                     REFIT_ERR_CANCELLED);
    assert_refused(refit_subscriber_next(it->subscriber, 1, &update, error), REFIT_ERR_TIMEOUT,
                   "no new version in time");
    rig_keep(&it->rig, RIG_EPOCH, 1);
    apply(it, 1);
}

/* The path is that of the moment when it was opened. */
SCENE(a_folder_may_be_relative)
{
    char before[4096];
    rig_open_with(&it->rig, SMALL, 1);
    assert_non_null(getcwd(before, sizeof before));
    assert_int_equal(chdir(it->rig.root), 0);
    assert_done(refit_subscriber_open("archive://kept", &it->rig.config, &it->subscriber, error));
    assert_int_equal(chdir(before), 0);
    apply(it, 1);
    rig_keep(&it->rig, RIG_EPOCH, 2);
    apply(it, 2);
}

SCENE(the_endpoint_may_come_from_the_configuration)
{
    rig_open_with(&it->rig, SMALL, 1);
    (void)snprintf(it->rig.config.broadcast_endpoint, sizeof it->rig.config.broadcast_endpoint,
                   "archive://%s", it->rig.folder);
    assert_done(refit_subscriber_open(NULL, &it->rig.config, &it->subscriber, error));
    apply(it, 1);
}

/* Applied, taken back, applied again; the version comes once more after a refusal that kept
 * nothing. */
SCENE(bound_memory_is_written_and_taken_back)
{
    engine bound;
    begin(it, LARGE, 1);
    engine_open(&bound, NULL, it->rig.tensors, RIG_TENSORS, 1, 7);
    assert_ok(refit_subscriber_bind(it->subscriber, bound.list, bound.count, NULL));
    refit_update *update = next_of(it->subscriber);
    assert_done(refit_update_apply(update, NULL, error));
    assert_true(engine_is_like(&bound, update));
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);

    engine_save(&bound);
    rig_keep(&it->rig, RIG_EPOCH, 2);
    update = next_of(it->subscriber);
    assert_done(refit_update_apply(update, NULL, error));
    assert_false(engine_is_as_saved(&bound));
    assert_ok(refit_update_refuse(update, "not today", 1, NULL));
    assert_true(engine_is_as_saved(&bound));
    refit_update_close(update);

    rig_keep(&it->rig, RIG_EPOCH, 3);
    update = next_of(it->subscriber);
    assert_int_equal(refit_update_version(update), 3);
    refit_update_close(update); /* refused, and nothing kept */
    update = next_of(it->subscriber);
    assert_int_equal(refit_update_version(update), 3);
    assert_done(refit_update_apply(update, NULL, error));
    assert_true(engine_is_like(&bound, update));
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    refit_subscriber_close(it->subscriber);
    it->subscriber = NULL;
    engine_close(&bound);
}

/* On a GPU: copied there from the image, and written in place. */
SCENE(a_gpu_takes_it_from_host_memory)
{
    refit_device *device;
    engine bound;
    if (!test_on_cuda()) skip();
    assert_ok(test_device_open("host", &device, NULL));
    begin(it, LARGE, 1);
    assert_ok(refit_subscriber_use_device(it->subscriber, device, NULL));
    engine_open(&bound, device, it->rig.tensors, RIG_TENSORS, 1, 7);
    for (uint64_t version = 1; version <= 3; version++) {
        if (version == 3)
            assert_ok(refit_subscriber_bind(it->subscriber, bound.list, bound.count, NULL));
        if (version > 1) rig_keep(&it->rig, RIG_EPOCH, version);
        refit_update *update = next_of(it->subscriber);
        assert_null(refit_update_device(update)); /* it lies on the host */
        refit_target targets[RIG_TENSORS];
        for (uint32_t i = 0; i < RIG_TENSORS; i++)
            targets[i] = (refit_target){i, bound.list[i].memory, bound.list[i].bytes, NULL};
        if (version == 3)
            assert_done(refit_update_apply(update, NULL, error));
        else
            assert_done(
                refit_update_copy(update, targets, RIG_TENSORS, (refit_stream_ref){0}, error));
        assert_ok(refit_update_accept(update, NULL));
        assert_true(engine_is_like(&bound, update));
        refit_update_close(update);
    }
    refit_subscriber_close(it->subscriber);
    it->subscriber = NULL;
    engine_close(&bound);
    assert_ok(refit_device_close(device, NULL));
    assert_true(test_device_quiet());
}

SCENE(several_follow_one_archive)
{
    refit_subscriber *second = NULL;
    begin(it, LARGE, 2);
    assert_done(refit_subscriber_open(it->endpoint, &it->rig.config, &second, error));
    for (uint64_t version = 2; version <= 6; version++) {
        if (version > 2) rig_keep(&it->rig, RIG_EPOCH, version);
        refit_update *one = next_of(it->subscriber), *other = next_of(second);
        assert_is(it, one, RIG_EPOCH, version);
        assert_is(it, other, RIG_EPOCH, version);
        assert_ok(refit_update_accept(one, NULL));
        assert_ok(refit_update_accept(other, NULL));
        refit_update_close(one);
        refit_update_close(other);
    }
    refit_subscriber_close(second);
}

/* The service thread reads while versions are written and old ones are removed. */
SCENE(it_keeps_up_with_a_writer_that_removes_old_versions)
{
    const uint64_t last = 60;
    uint64_t had = 0;
    begin(it, LARGE, 1);
    for (uint64_t version = 2; version <= last; version++) {
        refit_update *update = NULL;
        rig_keep(&it->rig, RIG_EPOCH, version);
        assert_ok(refit_archive_prune(it->rig.archive, 1, NULL, NULL));
        if (refit_subscriber_next(it->subscriber, 0, &update, NULL) != REFIT_OK) continue;
        assert_true(refit_update_version(update) > had);
        had = refit_update_version(update);
        assert_is(it, update, RIG_EPOCH, had);
        assert_ok(refit_update_accept(update, NULL));
        refit_update_close(update);
    }
    while (had < last) {
        refit_update *update = next_of(it->subscriber);
        assert_true(refit_update_version(update) > had);
        had = refit_update_version(update);
        assert_is(it, update, RIG_EPOCH, had);
        assert_ok(refit_update_accept(update, NULL));
        refit_update_close(update);
    }
}

static _Noreturn void write_half(scene *it, int ready)
{
    const refit_archive_version what = rig_version(&it->rig, RIG_EPOCH, 4);
    refit_archive *archive;
    if (refit_archive_open(it->rig.folder, REFIT_ARCHIVE_WRITE, &it->rig.config, &archive, NULL) !=
            REFIT_OK ||
        refit_archive_write(archive, &what, NULL) != REFIT_OK || write(ready, "x", 1) != 1)
        _exit(1);
    child_waits();
}

SCENE(a_writer_that_is_killed_leaves_whole_versions)
{
    int ready[2];
    char byte;
    refit_update *update = NULL;
    rig_open_with(&it->rig, LARGE, 3);
    rig_close_archive(&it->rig);
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) write_half(it, ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    follow(it);
    apply(it, 3);
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
    (void)close(ready[0]);
    (void)close(ready[1]);
    assert_int_equal(refit_subscriber_next(it->subscriber, 300, &update, NULL), REFIT_ERR_TIMEOUT);
    rig_reopen(&it->rig);
    rig_keep(&it->rig, RIG_EPOCH, 4);
    apply(it, 4);
}

/* Whatever it is about to do. */
SCENE(close_ends_it_at_any_time)
{
    rig_open_with(&it->rig, LARGE, 9);
    for (uint32_t i = 0; i < 40; i++) {
        refit_update *update = NULL;
        follow(it);
        if (i % 4 == 1) (void)!refit_subscriber_next(it->subscriber, 0, &update, NULL);
        if (i % 4 == 2) update = next_of(it->subscriber);
        if (i % 8 == 2) assert_ok(refit_update_accept(update, NULL));
        refit_subscriber_close(it->subscriber);
        it->subscriber = NULL;
    }
}

int main(void)
{
    return test_run("subscriber of an archive");
}
