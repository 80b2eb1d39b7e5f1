/* What a trainer makes on the way, and is more than the GPU may keep of it, goes to workers on that
 * GPU piece by piece, through a bounded part of its memory. */
#include <poll.h>

#include "publisher/publisher.h"
#include "tests/support/gpu_play.h"
#include "tests/support/test.h"

#define LONG_MS 20000u
#define BUCKETS 4096u

static void small_bucket(refit_config *config)
{
    config->broadcast_gpu_bucket_bytes = BUCKETS;
}

static void small_bucket_and_short_stage(refit_config *config)
{
    small_bucket(config);
    config->broadcast_stage_timeout_ms = 500;
}

/* Tensor by tensor, and all with one call; the worker copies with one call, and by itself. */
PLAY_TEST(a_version_goes_through_less_memory_than_it_has)
{
    gpu_play_open(play, small_bucket);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    for (uint64_t version = 1; version <= 6; version++) {
        play->trainer.at_once = version > 3;
        gpu_play_bring(play, member, version);
        assert_true(rollouts_was_streamed(member, version));
        assert_int_equal(trainer_stats(&play->trainer).publish_gpu_bytes, BUCKETS);
    }
    refit_stats stats = trainer_stats(&play->trainer);
    assert_int_equal(stats.publish_pinned_bytes, 0);
    assert_int_equal(stats.workers_committed_last, 1);
}

/* No memory is taken, exported or mapped from the second version on. */
PLAY_TEST(its_memory_is_kept_from_version_to_version)
{
    gpu_play_open(play, small_bucket);
    play->trainer.at_once = true;
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    gpu_play_bring(play, member, 1);
    uint64_t exports = fake_cuda_calls("cuIpcGetMemHandle");
    uint64_t maps = fake_cuda_calls("cuIpcOpenMemHandle");
    for (uint64_t version = 2; version <= 5; version++)
        gpu_play_bring(play, member, version);
    assert_int_equal(fake_cuda_calls("cuIpcGetMemHandle"), exports);
    assert_int_equal(fake_cuda_calls("cuIpcOpenMemHandle"), maps);
}

PLAY_TEST(several_workers_take_the_same_pieces)
{
    gpu_play_open(play, small_bucket);
    for (uint32_t i = 0; i < 3; i++)
        gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    for (uint64_t version = 1; version <= 3; version++) {
        uint64_t digest = gpu_play_publish(play, version);
        for (uint32_t i = 0; i < 3; i++) {
            assert_true(rollouts_wait(&play->rollouts[i], version, 1) == digest);
            assert_true(rollouts_was_streamed(&play->rollouts[i], version));
        }
    }
}

/* The store keeps the same version for a worker that is not on the GPU. */
PLAY_TEST(a_worker_on_the_host_reads_it_from_the_store)
{
    gpu_play_open(play, small_bucket);
    rollout_thread *here = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    rollout_thread *elsewhere = gpu_play_hire(play, false, ROLLOUT_ACCEPT);
    for (uint64_t version = 1; version <= 4; version++) {
        play->trainer.at_once = version % 2 == 0;
        uint64_t digest = gpu_play_publish(play, version);
        assert_true(rollouts_wait(here, version, 1) == digest);
        assert_true(rollouts_wait(elsewhere, version, 1) == digest);
        assert_true(rollouts_was_streamed(here, version));
        assert_false(rollouts_was_on_device(elsewhere, version));
    }
}

/* From host memory, too, with and without a worker there. */
PLAY_TEST(weights_on_the_host_are_sent_piece_by_piece)
{
    gpu_play_open(play, small_bucket);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    trainer_take_device(&play->trainer, NULL);
    gpu_play_bring(play, member, 1);
    assert_true(rollouts_was_streamed(member, 1));
    rollout_thread *elsewhere = gpu_play_hire(play, false, ROLLOUT_ACCEPT);
    uint64_t digest = gpu_play_publish(play, 2);
    assert_true(rollouts_wait(member, 2, 1) == digest);
    assert_true(rollouts_wait(elsewhere, 2, 1) == digest);
    trainer_take_device(&play->trainer, play->device);
    gpu_play_expect(play, 3, gpu_play_publish(play, 3));
}

/* What was lent, and what had room, is announced where it lies when the rest has none. */
PLAY_TEST(what_is_lent_comes_with_the_pieces)
{
    refit_weight weights[SAMPLE_TENSORS];
    gpu_play_open(play, small_bucket);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    for (uint64_t version = 1; version <= 3; version++) {
        trainer_begin(&play->trainer, version);
        uint32_t count = trainer_weights(&play->trainer, weights), half = count / 2;
        assert_ok(refit_publisher_lend(play->trainer.publisher, weights, half, play->device,
                                       REFIT_STREAM_NONE, NULL));
        assert_done(refit_publisher_write_all(play->trainer.publisher, weights + half, count - half,
                                              play->device, REFIT_STREAM_NONE, error));
        assert_done(refit_publisher_commit(play->trainer.publisher, error));
        assert_true(rollouts_wait(member, version, 1) == gpu_play_digest(version));
        assert_true(rollouts_was_streamed(member, version));
    }
}

/* A version that lends all follows one that was streamed, and the other way round. */
PLAY_TEST(streamed_and_lent_versions_follow_each_other)
{
    gpu_play_open(play, small_bucket);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    for (uint64_t version = 1; version <= 6; version++) {
        play->trainer.lends = version % 2 == 0;
        gpu_play_bring(play, member, version);
        assert_int_equal(rollouts_was_streamed(member, version), version % 2 == 1);
        assert_true(rollouts_was_on_device(member, version));
    }
}

/* ---- When things go wrong */

static refit_subscriber *subscribe(gpu_play *play)
{
    refit_subscriber *subscriber = NULL;
    const char *endpoint = refit_publisher_endpoint(play->trainer.publisher);
    assert_ok(refit_subscriber_open(endpoint, &play->config, &subscriber, NULL));
    assert_ok(refit_subscriber_use_device(subscriber, play->theirs, NULL));
    while (trainer_stats(&play->trainer).workers_gpu == 0)
        trainer_wait_workers(&play->trainer, 1);
    return subscriber;
}

static refit_update *next_of(refit_subscriber *subscriber)
{
    refit_update *update = NULL;
    assert_done(refit_subscriber_next(subscriber, LONG_MS, &update, error));
    return update;
}

/* Takes all pieces without a copy. */
static refit_status drain(refit_update *update, refit_error *error)
{
    const refit_piece *pieces;
    uint32_t count = 1;
    while (count > 0)
        RFT_TRY(refit_update_next_pieces(update, LONG_MS, &pieces, &count, error));
    return REFIT_OK;
}

PLAY_TEST(a_streamed_version_has_no_bytes_of_its_own)
{
    const void *bytes;
    uint32_t left;
    unsigned char digest[16];
    gpu_play_open(play, small_bucket);
    refit_subscriber *subscriber = subscribe(play);
    trainer_start(&play->trainer, TRAINER_PUBLISH, 1);
    refit_update *update = next_of(subscriber);
    assert_true(refit_update_is_streamed(update));
    assert_ptr_equal(refit_update_device(update), play->theirs);
    assert_int_equal(refit_update_tensor(update, 0, NULL, &bytes, NULL), REFIT_ERR_STATE);
    assert_int_equal(refit_update_digest(update, digest, NULL), REFIT_ERR_STATE);
    assert_int_equal(refit_update_apply(update, &left, NULL), REFIT_ERR_STATE);
    assert_int_equal(refit_update_accept(update, NULL), REFIT_ERR_STATE); /* not all was taken */
    assert_ok(drain(update, NULL));
    assert_ok(drain(update, NULL)); /* the end stays the end */
    assert_ok(refit_update_accept(update, NULL));
    assert_ok(refit_update_digest(update, digest, NULL));
    assert_int_equal(refit_update_accept(update, NULL), REFIT_ERR_STATE);
    assert_ok(trainer_join(&play->trainer));
    refit_update_close(update);
    refit_subscriber_close(subscriber);
}

/* The trainer's error names the worker, which takes the next version. */
PLAY_TEST(a_worker_that_refuses_in_the_middle_is_torn)
{
    const refit_piece *pieces;
    uint32_t count;
    gpu_play_open(play, small_bucket);
    refit_subscriber *subscriber = subscribe(play);
    trainer_start(&play->trainer, TRAINER_PUBLISH, 1);
    refit_update *update = next_of(subscriber);
    assert_ok(refit_update_next_pieces(update, LONG_MS, &pieces, &count, NULL));
    assert_ok(refit_update_refuse(update, "no memory for embed", 1, NULL));
    refit_update_close(update);
    assert_int_equal(trainer_join(&play->trainer), REFIT_ERR_PEER);
    assert_says(&play->trainer.error, "no memory for embed");
    refit_subscriber_info info = {.size = sizeof info};
    assert_ok(refit_subscriber_describe(subscriber, &info, NULL));
    assert_int_equal(info.version, 0);
    trainer_wait_workers(&play->trainer, 1);
    trainer_start(&play->trainer, TRAINER_PUBLISH, 2);
    update = next_of(subscriber);
    assert_int_equal(refit_update_version(update), 2);
    assert_ok(drain(update, NULL));
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    assert_ok(trainer_join(&play->trainer));
    refit_subscriber_close(subscriber);
}

/* Both have copied all of it; the one learns that it comes to nothing, since the other refuses. */
PLAY_TEST(what_others_refuse_comes_to_nothing)
{
    refit_error why;
    gpu_play_open(play, small_bucket);
    rollout_thread *other = gpu_play_hire(play, true, ROLLOUT_REFUSE_LOST);
    refit_subscriber *subscriber = subscribe(play);
    trainer_wait_workers(&play->trainer, 2);
    trainer_start(&play->trainer, TRAINER_PUBLISH, 1);
    refit_update *update = next_of(subscriber);
    refit_status status = drain(update, &why);
    if (status == REFIT_OK) status = refit_update_accept(update, &why);
    assert_int_equal(status, REFIT_ERR_CANCELLED);
    assert_int_equal(trainer_join(&play->trainer), REFIT_ERR_PEER);
    refit_update_close(update);
    rollout_set_action(other, ROLLOUT_ACCEPT);
    trainer_wait_workers(&play->trainer, 2);
    trainer_start(&play->trainer, TRAINER_PUBLISH, 2);
    update = next_of(subscriber);
    assert_ok(drain(update, NULL));
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    assert_ok(trainer_join(&play->trainer));
    refit_subscriber_close(subscriber);
}

/* Nothing is lacking but the trainer's decision, and that has come before the worker's. */
PLAY_TEST(what_the_trainer_drops_before_it_is_accepted_comes_to_nothing)
{
    refit_error why;
    gpu_play_open(play, small_bucket);
    refit_subscriber *subscriber = subscribe(play);
    trainer_start(&play->trainer, TRAINER_PUBLISH, 1);
    refit_update *update = next_of(subscriber);
    assert_ok(drain(update, NULL));
    refit_publisher_cancel(play->trainer.publisher);
    assert_int_equal(trainer_join(&play->trainer), REFIT_ERR_CANCELLED);
    while (drain(update, NULL) == REFIT_OK) {
    }
    assert_int_equal(refit_update_accept(update, &why), REFIT_ERR_CANCELLED);
    assert_int_equal(refit_update_refuse(update, "too late", 0, NULL), REFIT_ERR_STATE);
    refit_update_close(update);
    refit_subscriber_close(subscriber);
    gpu_play_await_nobody(play);
    gpu_play_bring(play, gpu_play_hire(play, true, ROLLOUT_ACCEPT), 2);
}

PLAY_TEST(a_worker_that_takes_no_pieces_in_time_is_evicted)
{
    const refit_piece *pieces;
    uint32_t count;
    gpu_play_open(play, small_bucket_and_short_stage);
    refit_subscriber *subscriber = subscribe(play);
    trainer_start(&play->trainer, TRAINER_PUBLISH, 1);
    refit_update *update = next_of(subscriber);
    assert_ok(refit_update_next_pieces(update, LONG_MS, &pieces, &count, NULL));
    assert_int_equal(trainer_join(&play->trainer), REFIT_ERR_PEER);
    assert_int_equal(trainer_stats(&play->trainer).workers_evicted, 1);
    assert_int_not_equal(drain(update, NULL), REFIT_OK); /* it is told */
    assert_ok(refit_update_refuse(update, "", 0, NULL));
    refit_update_close(update);
    refit_subscriber_close(subscriber);
}

PLAY_TEST(the_trainer_cancels_while_a_worker_copies)
{
    gpu_play_open(play, small_bucket);
    refit_subscriber *subscriber = subscribe(play);
    trainer_start(&play->trainer, TRAINER_PUBLISH, 1);
    refit_update *update = next_of(subscriber);
    refit_publisher_cancel(play->trainer.publisher);
    assert_int_equal(trainer_join(&play->trainer), REFIT_ERR_CANCELLED);
    assert_int_equal(refit_publisher_commit(play->trainer.publisher, NULL), REFIT_ERR_STATE);
    assert_ok(refit_publisher_abort(play->trainer.publisher, NULL));
    assert_int_equal(drain(update, NULL), REFIT_ERR_CANCELLED);
    refit_update_close(update);
    refit_subscriber_close(subscriber);
    gpu_play_await_nobody(play);
    gpu_play_bring(play, gpu_play_hire(play, true, ROLLOUT_ACCEPT), 2);
}

PLAY_TEST(a_trainer_that_goes_while_a_worker_copies_is_told)
{
    gpu_play_open(play, small_bucket);
    refit_subscriber *subscriber = subscribe(play);
    trainer_start(&play->trainer, TRAINER_PUBLISH, 1);
    refit_update *update = next_of(subscriber);
    refit_publisher_cancel(play->trainer.publisher);
    assert_int_equal(trainer_join(&play->trainer), REFIT_ERR_CANCELLED);
    refit_publisher_close(play->trainer.publisher);
    play->trainer.publisher = NULL;
    assert_int_not_equal(drain(update, NULL), REFIT_OK);
    refit_update_close(update);
    refit_subscriber_close(subscriber);
}

/* A copy of the trainer's that fails ends the version, not the publisher. */
PLAY_TEST(a_copy_that_fails_ends_the_version)
{
    refit_weight weights[SAMPLE_TENSORS];
    gpu_play_open(play, small_bucket);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    trainer_begin(&play->trainer, 1);
    uint32_t count = trainer_weights(&play->trainer, weights);
    fake_cuda_fail("cuEventRecord", 1, 1, RFT_CU_UNKNOWN);
    refit_status status = refit_publisher_write_all(play->trainer.publisher, weights, count,
                                                    play->device, REFIT_STREAM_NONE, NULL);
    assert_int_not_equal(status, REFIT_OK);
    assert_int_equal(refit_publisher_write_all(play->trainer.publisher, weights, count,
                                               play->device, REFIT_STREAM_NONE, NULL),
                     REFIT_ERR_STATE);
    assert_ok(refit_publisher_abort(play->trainer.publisher, NULL));
    gpu_play_bring(play, member, 2);
}

/* Without memory for a bucket it goes over the host, as it does where a worker cannot take pieces.
 */
PLAY_TEST(without_memory_for_a_bucket_it_goes_over_the_host)
{
    gpu_play_open(play, small_bucket);
    play->trainer.at_once = true;
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    trainer_begin(&play->trainer, 1);
    fake_cuda_fail("cuMemAlloc", 1, 1, RFT_CU_OUT_OF_MEMORY);
    trainer_write(&play->trainer);
    assert_done(refit_publisher_commit(play->trainer.publisher, error));
    assert_true(rollouts_wait(member, 1, 1) == gpu_play_digest(1));
    assert_false(rollouts_was_on_device(member, 1));
    gpu_play_bring(play, member, 2);
    gpu_play_bring(play, member, 3);
}

PLAY_TEST(a_worker_with_bound_memory_takes_whole_versions)
{
    void *memory = NULL;
    uint32_t left = 0;
    gpu_play_open(play, small_bucket);
    refit_subscriber *subscriber = subscribe(play);
    const refit_tensor *first = &sample_tensors()[0];
    assert_ok(refit_memory_alloc(play->theirs, first->bytes + 64, &memory, NULL));
    const refit_destination to = {.size = sizeof to,
                                  .name = first->name,
                                  .memory = memory,
                                  .bytes = first->bytes,
                                  .device = play->theirs};
    assert_ok(refit_subscriber_bind(subscriber, &to, 1, NULL));
    trainer_start(&play->trainer, TRAINER_PUBLISH, 1);
    refit_update *update = next_of(subscriber);
    while (refit_update_is_streamed(update)) { /* it began before the trainer knew */
        refit_update_close(update);
        (void)trainer_join(&play->trainer);
        trainer_wait_workers(&play->trainer, 1);
        trainer_start(&play->trainer, TRAINER_PUBLISH,
                      refit_publisher_version(play->trainer.publisher) + 5);
        update = next_of(subscriber);
    }
    assert_ok(refit_update_apply(update, &left, NULL));
    assert_ok(refit_update_accept(update, NULL));
    assert_ok(trainer_join(&play->trainer));
    refit_update_close(update);
    assert_ok(refit_subscriber_unbind(subscriber, NULL));
    refit_subscriber_close(subscriber);
    assert_ok(refit_memory_free(play->theirs, memory, NULL));
}

/* What was lent before, and freed since, is named to no worker. */
PLAY_TEST(memory_that_the_trainer_has_freed_is_not_named)
{
    gpu_play_open(play, small_bucket);
    play->trainer.lends = true;
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    gpu_play_bring(play, member, 1);
    play->trainer.lends = false;
    trainer_take_device(&play->trainer, NULL); /* frees what was lent */
    (void)gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    gpu_play_expect(play, 2, gpu_play_publish(play, 2));
    assert_int_equal(gpu_play_path(play, &play->rollouts[1]), REFIT_PATH_CUDA_IPC);
    trainer_take_device(&play->trainer, play->device);
}

static void short_commit(refit_config *config)
{
    small_bucket(config);
    config->broadcast_commit_timeout_ms = 1;
}

/* The worker decides about a version while pieces of the next one are there; it gets them then. */
PLAY_TEST(pieces_wait_for_the_decision_about_the_version_before)
{
    gpu_play_open(play, short_commit);
    refit_subscriber *subscriber = subscribe(play);
    play->trainer.lends = true;
    trainer_start(&play->trainer, TRAINER_PUBLISH, 1);
    refit_update *update = next_of(subscriber);
    (void)trainer_join(&play->trainer); /* committed, and not applied in time */
    play->trainer.lends = false;
    while (trainer_stats(&play->trainer).workers_gpu == 0)
        trainer_wait_workers(&play->trainer, 1);
    trainer_start(&play->trainer, TRAINER_PUBLISH, 2);
    (void)poll(NULL, 0, 50); /* pieces may come before the decision, or after it */
    refit_update_close(update);
    update = next_of(subscriber);
    assert_int_equal(refit_update_version(update), 2);
    assert_ok(drain(update, NULL));
    assert_ok(refit_update_accept(update, NULL));
    refit_update_close(update);
    (void)trainer_join(&play->trainer); /* a millisecond may have been too short */
    refit_subscriber_close(subscriber);
}

static void quorum_of_one(refit_config *config)
{
    small_bucket(config);
    config->broadcast_commit = REFIT_COMMIT_QUORUM;
    config->broadcast_quorum = 1;
}

/* Though the store has all of it for a worker on the host, which would be enough. */
PLAY_TEST(a_version_of_which_a_write_failed_cannot_be_committed)
{
    refit_weight weights[SAMPLE_TENSORS];
    gpu_play_open(play, quorum_of_one);
    (void)gpu_play_hire(play, false, ROLLOUT_ACCEPT);
    (void)gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    trainer_take_device(&play->trainer, NULL);
    trainer_begin(&play->trainer, 1);
    refit_publisher *publisher = play->trainer.publisher;
    uint32_t last = trainer_weights(&play->trainer, weights) - 1;
    assert_ok(refit_publisher_write_all(publisher, weights, last, NULL, REFIT_STREAM_NONE, NULL));
    fake_cuda_fail("cuLaunchKernel", 1, 1000, RFT_CU_UNKNOWN); /* at the worker's end, too */
    assert_int_not_equal(refit_publisher_write(publisher, weights[last].tensor,
                                               weights[last].memory, weights[last].bytes, NULL,
                                               REFIT_STREAM_NONE, NULL),
                         REFIT_OK);
    assert_refused(refit_publisher_commit(publisher, error), REFIT_ERR_STATE, "abort");
    assert_ok(refit_publisher_abort(publisher, NULL));
    fake_cuda_forget_faults();
    trainer_take_device(&play->trainer, play->device);
    gpu_play_expect(play, 2, gpu_play_publish(play, 2));
}

/* The last tensor, which is large, lies on another GPU. */
static refit_status write_from_two(gpu_play *play, refit_device *other, uint64_t version)
{
    void *memory = NULL;
    refit_weight weights[SAMPLE_TENSORS];
    refit_publisher *publisher = play->trainer.publisher;
    trainer_begin(&play->trainer, version);
    uint32_t last = trainer_weights(&play->trainer, weights) - 1;
    assert_ok(
        refit_publisher_write_all(publisher, weights, last, play->device, REFIT_STREAM_NONE, NULL));
    assert_ok(refit_memory_alloc(other, weights[last].bytes, &memory, NULL));
    const unsigned char *from =
        play->trainer.sample.image +
        ((const unsigned char *)weights[last].memory - play->trainer.memory);
    assert_ok(refit_stream_copy(other, REFIT_STREAM_NONE, memory, from, weights[last].bytes, NULL));
    refit_status status =
        refit_publisher_write(publisher, weights[last].tensor, memory, weights[last].bytes, other,
                              REFIT_STREAM_NONE, NULL);
    if (status == REFIT_OK) {
        status = refit_publisher_commit(publisher, NULL);
    } else {
        assert_ok(refit_publisher_abort(publisher, NULL));
    }
    assert_ok(refit_memory_free(other, memory, NULL));
    return status;
}

/* Over the store, which the first such version does not have. */
PLAY_TEST(tensors_of_another_gpu_come_over_the_host)
{
    refit_device *other = NULL;
    gpu_play_open(play, small_bucket);
    assert_ok(refit_device_open("cuda:1", NULL, &other, NULL));
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    assert_int_equal(write_from_two(play, other, 1), REFIT_ERR_INVALID);
    for (uint64_t version = 2; version <= 4; version++) {
        assert_ok(write_from_two(play, other, version));
        assert_true(rollouts_wait(member, version, 1) == gpu_play_digest(version));
        assert_true(rollouts_was_streamed(member, version));
    }
    gpu_play_dismiss(play);
    refit_publisher_close(play->trainer.publisher); /* it uses the device until then */
    play->trainer.publisher = NULL;
    assert_ok(refit_device_close(other, NULL));
}

PLAY_TEST(the_store_is_page_locked_for_a_streamed_version_too)
{
    gpu_play_open(play, small_bucket);
    play->trainer.at_once = true;
    (void)gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    (void)gpu_play_hire(play, false, ROLLOUT_ACCEPT);
    gpu_play_expect(play, 1, gpu_play_publish(play, 1));
    assert_true(trainer_stats(&play->trainer).publish_pinned_bytes > 0);
}

/* All that it can, though what cannot be lent has begun to be streamed. */
PLAY_TEST(what_can_be_lent_is_not_copied_through_the_ring)
{
    refit_weight weights[SAMPLE_TENSORS];
    gpu_play_open(play, small_bucket);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    trainer_begin(&play->trainer, 1);
    refit_publisher *publisher = play->trainer.publisher;
    uint32_t count = trainer_weights(&play->trainer, weights);
    assert_ok(refit_publisher_write(publisher, weights[count - 1].tensor, weights[count - 1].memory,
                                    weights[count - 1].bytes, play->device, REFIT_STREAM_NONE,
                                    NULL));
    assert_true(publisher->ring.on);
    uint32_t sequence = publisher->ring.sequence;
    assert_ok(
        refit_publisher_lend(publisher, weights, count - 1, play->device, REFIT_STREAM_NONE, NULL));
    assert_int_equal(publisher->ring.sequence, sequence); /* no bucket was filled by them */
    assert_ok(refit_publisher_commit(publisher, NULL));
    assert_true(rollouts_wait(member, 1, 1) == gpu_play_digest(1));
}

/* Whichever call of the driver fails, at either end, the version is committed and whole or it is
 * not committed, and the next one is. Even versions are copied by the library, which waits for
 * copies that it has begun. */
static void sweep(gpu_play *play, const char *call, int error)
{
    uint64_t version = 2;
    gpu_play_open(play, small_bucket);
    rollout_thread *member = gpu_play_hire(play, true, ROLLOUT_ACCEPT);
    for (uint32_t nth = 1; nth <= 24; nth += 1 + nth / 6) {
        refit_error why;
        trainer_begin(&play->trainer, version);
        fake_cuda_fail(call, nth, 1, error);
        play->trainer.at_once = nth % 2 == 0;
        refit_weight weights[SAMPLE_TENSORS];
        uint32_t count = trainer_weights(&play->trainer, weights);
        refit_status status = refit_publisher_write_all(play->trainer.publisher, weights, count,
                                                        play->device, REFIT_STREAM_NONE, &why);
        if (status == REFIT_OK) {
            status = refit_publisher_commit(play->trainer.publisher, &why);
        } else {
            assert_ok(refit_publisher_abort(play->trainer.publisher, NULL));
        }
        fake_cuda_forget_faults();
        bool there = refit_publisher_version(play->trainer.publisher) == version;
        if (status == REFIT_OK)
            assert_true(rollouts_wait(member, version, 1) == gpu_play_digest(version));
        else if (!there)
            assert_int_equal(rollouts_count(member, version), 0);
        version += 2;
        trainer_wait_workers(&play->trainer, 1);
    }
    gpu_play_bring(play, member, version);
}

PLAY_TEST(a_copy_that_cannot_be_started_costs_a_version)
{
    sweep(play, "cuLaunchKernel", RFT_CU_UNKNOWN);
}

PLAY_TEST(an_event_that_cannot_be_recorded_costs_a_version)
{
    sweep(play, "cuEventRecord", RFT_CU_UNKNOWN);
}

PLAY_TEST(memory_that_cannot_be_had_costs_no_version)
{
    sweep(play, "cuMemAlloc", RFT_CU_OUT_OF_MEMORY);
}

int main(void)
{
    return test_run("ring");
}
