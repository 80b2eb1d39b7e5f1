/* A worker that has a key takes the name of another: it gets a name of its own key, whatever it
 * says, and the other one comes in. Workers that share a key, and those that give no name. */
#include <stdio.h>

#include "base/clock.h"
#include "tests/support/key_fixture.h"
#include "tests/support/rollout_threads.h"
#include "tests/support/test.h"
#include "tests/support/trainer.h"

typedef struct scene {
    key_fixture smith;
    test_trainer trainer;
} scene;

static void scene_open(scene *play)
{
    play->smith = key_fixture_open();
    refit_config config = trainer_config();
    key_fixture_admit(&play->smith, "w1");
    key_fixture_admit(&play->smith, "w0");
    key_fixture_equip_trainer(&play->smith, &config);
    trainer_open(&play->trainer, &config);
}

static void scene_close(scene *play)
{
    trainer_close(&play->trainer);
    key_fixture_close(&play->smith);
}

static void join_as(const scene *play, raw_worker *worker, const char *key, const char *name)
{
    refit_config own = quick_config();
    key_fixture_equip_worker(&play->smith, key, &own);
    raw_worker_open_as(worker, refit_publisher_endpoint(play->trainer.publisher), name, false,
                       &own);
    raw_worker_join(worker);
}

static bool is_there(const scene *play, const char *name)
{
    refit_worker_info info = {.size = sizeof info};
    for (uint32_t i = 0;
         refit_publisher_worker(play->trainer.publisher, i, &info, NULL) == REFIT_OK; i++) {
        if (strcmp(info.name, name) == 0 && info.subscribed) return true;
    }
    return false;
}

TEST(no_key_takes_a_name_of_another)
{
    scene play;
    raw_worker thief, liar, real, second;
    scene_open(&play);
    join_as(&play, &thief, "w1", "w0");
    join_as(&play, &liar, "w1", "w0/0");
    trainer_wait_workers(&play.trainer, 2);
    assert_false(is_there(&play, "w0"));
    assert_true(is_there(&play, "w1/w0"));
    assert_true(is_there(&play, "w1/w0/0"));
    join_as(&play, &real, "w0", "w0");
    join_as(&play, &second, "w0", "w0/0");
    trainer_wait_workers(&play.trainer, 4);
    assert_true(is_there(&play, "w0"));
    assert_true(is_there(&play, "w0/0"));
    raw_worker_close(&second);
    raw_worker_close(&real);
    raw_worker_close(&liar);
    raw_worker_close(&thief);
    scene_close(&play);
}

/* A key whose name leaves no room for another one after it. */
#define LONG_KEY "k1234567890123456789012345678901234567890123456789012345678901"

TEST(a_long_key_is_one_worker_and_the_next_is_told_so)
{
    scene play;
    raw_worker first;
    refit_config own = quick_config();
    refit_subscriber *second = NULL;
    refit_update *update = NULL;
    refit_error error = {0};
    assert_int_equal(strlen(LONG_KEY), 62);
    scene_open(&play);
    key_fixture_admit(&play.smith, LONG_KEY);
    join_as(&play, &first, LONG_KEY, "w0");
    trainer_wait_workers(&play.trainer, 1);
    assert_true(is_there(&play, LONG_KEY));
    key_fixture_equip_worker(&play.smith, LONG_KEY, &own);
    assert_ok(refit_subscriber_open(refit_publisher_endpoint(play.trainer.publisher), &own, &second,
                                    NULL));
    int64_t deadline = rft_deadline(RAW_WAIT_MS);
    while (strstr(error.text, "the key a name of at most 61 characters") == NULL &&
           rft_ms_until(deadline) > 0) {
        raw_worker_beat(&first, 0);
        assert_int_equal(refit_subscriber_next(second, 50, &update, &error), REFIT_ERR_TIMEOUT);
    }
    assert_says(&error, "another worker uses this key: give this one a key of its");
    refit_subscriber_close(second);
    raw_worker_close(&first);
    scene_close(&play);
}

static rollout_thread *start_unnamed(const scene *play, rollout_thread *member, const char *key)
{
    refit_config own = quick_config();
    key_fixture_equip_worker(&play->smith, key, &own);
    rollouts_start(member, refit_publisher_endpoint(play->trainer.publisher), &own, ROLLOUT_ACCEPT);
    return member;
}

TEST(workers_that_share_a_key_take_versions_together)
{
    scene play;
    rollout_thread rollouts[3];
    refit_worker_info info = {.size = sizeof info};
    scene_open(&play);
    for (uint32_t i = 0; i < 3; i++)
        (void)start_unnamed(&play, &rollouts[i], "w0");
    trainer_wait_workers(&play.trainer, 3);
    for (uint32_t i = 0; i < 3; i++) {
        assert_ok(refit_publisher_worker(play.trainer.publisher, i, &info, NULL));
        assert_memory_equal(info.name, "w0/", 3);
    }
    trainer_start(&play.trainer, TRAINER_PUBLISH, 1);
    assert_ok(trainer_join(&play.trainer));
    for (uint32_t i = 0; i < 3; i++) {
        (void)rollouts_wait(&rollouts[i], 1, 1);
        rollouts_stop(&rollouts[i]);
    }
    scene_close(&play);
}

/* The file of a key gets another name while its worker is here: the worker is called by that. */
TEST(a_worker_follows_the_name_of_its_key)
{
    scene play;
    raw_worker worker;
    char from[256], to[256];
    scene_open(&play);
    join_as(&play, &worker, "w0", "rank3");
    trainer_wait_workers(&play.trainer, 1);
    assert_true(is_there(&play, "w0/rank3"));
    key_fixture_path(&play.smith, "allow/w0.public", from);
    key_fixture_path(&play.smith, "allow/w7.public", to);
    assert_int_equal(rename(from, to), 0);
    int64_t deadline = rft_deadline(RAW_WAIT_MS);
    while (!is_there(&play, "w7/rank3") && rft_ms_until(deadline) > 0) {
        raw_worker_beat(&worker, 0);
        rft_channel_poll(worker.channel, -1, 20);
    }
    assert_true(is_there(&play, "w7/rank3"));
    assert_int_equal(trainer_stats(&play.trainer).workers, 1);
    assert_int_equal(trainer_stats(&play.trainer).workers_evicted, 0);
    raw_worker_close(&worker);
    scene_close(&play);
}

int main(void)
{
    return test_run("key_names");
}
