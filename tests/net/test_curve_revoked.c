/* A key that is taken from the allow list: its worker is evicted at once, in each of
 * its states, told so, and no longer heard; other workers do not notice; with the file back it
 * joins again. */
#include <stdio.h>

#include <sys/stat.h>

#include "base/clock.h"
#include "tests/support/key_fixture.h"
#include "tests/support/rollout_threads.h"
#include "tests/support/test.h"
#include "tests/support/trainer.h"

typedef struct scene {
    key_fixture smith;
    test_trainer trainer;
    raw_worker worker; /* "w0", allowed */
} scene;

static void scene_open(scene *play)
{
    play->smith = key_fixture_open();
    refit_config config = trainer_config(), own = quick_config();
    key_fixture_admit(&play->smith, "w0");
    key_fixture_equip_trainer(&play->smith, &config);
    key_fixture_equip_worker(&play->smith, "w0", &own);
    trainer_open(&play->trainer, &config);
    raw_worker_open_as(&play->worker, refit_publisher_endpoint(play->trainer.publisher), "rank0",
                       false, &own);
    raw_worker_join(&play->worker);
    trainer_wait_workers(&play->trainer, 1);
}

static void scene_close(scene *play)
{
    raw_worker_close(&play->worker);
    trainer_close(&play->trainer);
    key_fixture_close(&play->smith);
}

static void wait_evicted(scene *play)
{
    const rft_message *refusal = raw_worker_expect(&play->worker, RFT_REFUSE);
    assert_int_equal(refusal->as.refuse.code, REFIT_ERR_SECURITY);
    assert_true(refusal->as.refuse.final);
    refit_worker_info info = trainer_worker(&play->trainer, "w0/rank0");
    assert_int_equal(info.subscribed, 0);
    assert_int_equal(trainer_stats(&play->trainer).workers, 0);
}

static void scene_open_revoked(scene *play)
{
    scene_open(play);
    key_fixture_revoke(&play->smith, "w0");
    wait_evicted(play);
}

TEST(a_subscribed_worker_is_evicted)
{
    scene play;
    scene_open_revoked(&play);
    assert_int_equal(trainer_stats(&play.trainer).workers_evicted, 1);
    scene_close(&play);
}

static void a_worker_of_a_version_is_named_with_its_key(bool staged)
{
    scene play;
    scene_open(&play);
    trainer_begin(&play.trainer, 1);
    raw_worker_offer(&play.worker);
    if (!staged) raw_worker_pull(&play.worker, 1);
    trainer_write(&play.trainer);
    trainer_start(&play.trainer, TRAINER_COMMIT, 1);
    if (staged) raw_worker_fetch(&play.worker);
    key_fixture_revoke(&play.smith, "w0");
    wait_evicted(&play);
    assert_int_equal(trainer_join(&play.trainer), REFIT_ERR_PEER);
    refit_worker_info info = trainer_worker(&play.trainer, "w0/rank0");
    assert_int_equal(info.status, REFIT_ERR_SECURITY);
    assert_int_equal(info.committed, 0);
    assert_non_null(strstr(info.reason, "w0"));
    assert_non_null(strstr(info.reason, "security.allow"));
    scene_close(&play);
}

TEST(a_worker_that_is_staging_fails_the_version)
{
    a_worker_of_a_version_is_named_with_its_key(false);
}

TEST(a_worker_that_has_all_bytes_fails_the_version)
{
    a_worker_of_a_version_is_named_with_its_key(true);
}

TEST(messages_after_the_eviction_are_refused)
{
    scene play;
    scene_open_revoked(&play);
    uint64_t refused = trainer_stats(&play.trainer).messages_refused;
    raw_worker_say_hello(&play.worker);
    raw_worker_send_bytes(&play.worker, "garbage", 7);
    raw_worker_beat(&play.worker, 0);
    int64_t deadline = rft_deadline(RAW_WAIT_MS);
    while (trainer_stats(&play.trainer).messages_refused < refused + 3 &&
           rft_ms_until(deadline) > 0) {
        rft_channel_poll(play.worker.channel, -1, 20);
    }
    /* One more may be a beat that was on its way. */
    assert_true(trainer_stats(&play.trainer).messages_refused >= refused + 3);
    assert_false(raw_worker_has_heard(&play.worker, RFT_WELCOME));
    scene_close(&play);
}

TEST(it_joins_again_once_the_file_is_back)
{
    scene play;
    scene_open_revoked(&play);
    key_fixture_allow(&play.smith, "w0");
    /* Through the connection that stands, as soon as the trainer has looked. */
    int64_t deadline = rft_deadline(RAW_WAIT_MS);
    bool welcome = false;
    while (!welcome && rft_ms_until(deadline) > 0) {
        raw_worker_say_hello(&play.worker);
        rft_channel_poll(play.worker.channel, -1, 50);
        welcome = raw_worker_has_heard(&play.worker, RFT_WELCOME);
    }
    assert_true(welcome);
    raw_worker_join(&play.worker);
    trainer_wait_workers(&play.trainer, 1);
    scene_close(&play);
}

/* What a second worker, "w1", is given. */
static refit_config admit_second(const scene *play)
{
    refit_config own = quick_config();
    key_fixture_admit(&play->smith, "w1");
    key_fixture_equip_worker(&play->smith, "w1", &own);
    return own;
}

/* Two workers, of which one is revoked: the other goes on. */
TEST(others_do_not_notice)
{
    scene play;
    scene_open(&play);
    const refit_config own = admit_second(&play);
    rollout_thread member;
    rollouts_start(&member, refit_publisher_endpoint(play.trainer.publisher), &own, ROLLOUT_ACCEPT);
    trainer_wait_workers(&play.trainer, 2);
    key_fixture_revoke(&play.smith, "w0");
    const rft_message *refusal = raw_worker_expect(&play.worker, RFT_REFUSE);
    assert_int_equal(refusal->as.refuse.code, REFIT_ERR_SECURITY);
    trainer_start(&play.trainer, TRAINER_PUBLISH, 1);
    assert_ok(trainer_join(&play.trainer));
    (void)rollouts_wait(&member, 1, 1);
    assert_int_equal(trainer_stats(&play.trainer).workers, 1);
    rollouts_stop(&member);
    scene_close(&play);
}

TEST(the_user_of_a_revoked_worker_is_told)
{
    scene play;
    scene_open(&play);
    const refit_config own = admit_second(&play);
    refit_subscriber *subscriber = NULL;
    refit_update *update = NULL;
    assert_ok(refit_subscriber_open(refit_publisher_endpoint(play.trainer.publisher), &own,
                                    &subscriber, NULL));
    trainer_wait_workers(&play.trainer, 2);
    key_fixture_revoke(&play.smith, "w1");
    assert_refused(refit_subscriber_next(subscriber, RAW_WAIT_MS, &update, error),
                   REFIT_ERR_SECURITY, "security.allow");
    refit_subscriber_close(subscriber);
    scene_close(&play);
}

TEST(a_folder_that_vanishes_evicts_all)
{
    scene play;
    char folder[256], away[256];
    scene_open(&play);
    key_fixture_path(&play.smith, "allow", folder);
    key_fixture_path(&play.smith, "away", away);
    assert_int_equal(rename(folder, away), 0);
    wait_evicted(&play);
    scene_close(&play);
}

TEST(a_folder_that_others_may_write_to_evicts_all)
{
    scene play;
    char folder[256];
    scene_open(&play);
    key_fixture_path(&play.smith, "allow", folder);
    assert_int_equal(chmod(folder, 0777), 0);
    wait_evicted(&play);
    scene_close(&play);
}

int main(void)
{
    return test_run("curve_revoked");
}
