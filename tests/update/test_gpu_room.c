/* Reports of the memory that versions take, and versions where memory is scarce. */
#include <poll.h>

#include "publisher/publisher.h"
#include "tests/support/gpu_play.h"
#include "tests/support/unit.h"

#define MEMORY_BYTES (UINT64_C(64) << 20) /* of a GPU of the fake driver */

static void linger(refit_config *config)
{
    config->broadcast_linger_ms = 20000;
}

static void declare_anew(gpu_play *play)
{
    refit_tensor changed[SAMPLE_TENSORS];
    memcpy(changed, sample_tensors(), sizeof changed);
    changed[0].name = "renamed";
    assert_ok(refit_publisher_declare(play->trainer.publisher, changed, SAMPLE_TENSORS, NULL));
}

static void hold(rft_share_lock *share_lock, const refit_publisher *publisher, uint32_t slot)
{
    const rft_gpu_block *block = publisher->gpu->slots[slot].block;
    assert_ok(rft_share_lock_hold(share_lock, block->share_lock.segment.name, NULL));
}

/* Of the two blocks before, one is freed while begin looks for memory, and one much later. */
static void room_for_one_version_is_enough_for_one(void **state)
{
    gpu_play *play = *state;
    rft_share_lock kept = {0}, late = {0};
    gpu_play_open(play, linger);
    crew_member *member = gpu_play_hire(play, true, CREW_ACCEPT);
    gpu_play_expect(play, 1, gpu_play_publish(play, 1));
    gpu_play_expect(play, 2, gpu_play_publish(play, 2));
    hold(&kept, play->trainer.publisher, 0);
    hold(&late, play->trainer.publisher, 1);
    fake_cuda_set_taken(0, MEMORY_BYTES - fake_cuda_used(0));
    declare_anew(play);
    uint64_t asked = fake_cuda_calls("cuMemAlloc");
    trainer_start(&play->trainer, TRAINER_BEGIN, 3);
    while (fake_cuda_calls("cuMemAlloc") == asked) {
        (void)poll(NULL, 0, 1);
    }
    rft_share_lock_close(&late);
    assert_ok(trainer_join(&play->trainer));
    assert_int_equal(trainer_stats(&play->trainer).publish_gpu_bytes,
                     2 * play->trainer.sample.manifest->store_bytes);
    trainer_write(&play->trainer);
    assert_ok(refit_publisher_commit(play->trainer.publisher, NULL));
    assert_true(crew_wait(member, 3, 1) == gpu_play_digest(3));
    assert_true(crew_was_on_device(member, 3));
    rft_share_lock_close(&kept);
    fake_cuda_set_taken(0, 0);
}

static void the_figures_are_those_of_the_tensors_there_are(void **state)
{
    gpu_play *play = *state;
    gpu_play_open(play, NULL);
    (void)gpu_play_hire(play, true, CREW_ACCEPT);
    gpu_play_expect(play, 1, gpu_play_publish(play, 1));
    uint64_t bytes = play->trainer.sample.manifest->store_bytes;
    refit_stats stats = trainer_stats(&play->trainer);
    assert_int_equal(stats.publish_gpu_bytes, bytes);
    assert_int_equal(stats.publish_pinned_bytes, bytes + RFT_SEQLOCK_BYTES);
    gpu_play_dismiss(play);
    declare_anew(play);
    stats = trainer_stats(&play->trainer);
    assert_int_equal(stats.publish_gpu_bytes, 0);
    assert_int_equal(stats.publish_pinned_bytes, 0);
}

/* Though the next slot keeps the block that it has. */
static void what_was_let_go_is_freed_when_the_next_slot_is_cleared(void **state)
{
    enum { BYTES = 4096 };
    refit_device *device = NULL;
    rft_gpu_store *store = NULL;
    rft_share_lock reader = {0};
    fake_cuda_reset();
    assert_ok(refit_device_open("cuda:0", NULL, &device, NULL));
    assert_ok(rft_gpu_store_open(device, &store, NULL));
    assert_ok(rft_gpu_store_clear(store, 0, BYTES, NULL));
    assert_ok(rft_gpu_store_clear(store, 1, BYTES, NULL));
    const char *name = store->slots[0].block->share_lock.segment.name;
    assert_ok(rft_share_lock_hold(&reader, name, NULL));
    assert_ok(rft_share_lock_read(&reader, NULL));
    assert_ok(rft_gpu_store_clear(store, 0, BYTES, NULL));
    assert_int_equal(rft_gpu_store_bytes(store), 3 * BYTES);
    rft_share_lock_close(&reader);
    const rft_gpu_block *kept = store->slots[1].block;
    assert_ok(rft_gpu_store_clear(store, 1, BYTES, NULL));
    assert_ptr_equal(store->slots[1].block, kept);
    assert_int_equal(rft_gpu_store_bytes(store), 2 * BYTES);
    assert_int_equal(rft_gpu_store_close(store, 0), 0);
    assert_ok(refit_device_close(device, NULL));
    assert_int_equal(fake_cuda_leaks(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        PLAY_TEST(room_for_one_version_is_enough_for_one),
        PLAY_TEST(the_figures_are_those_of_the_tensors_there_are),
        cmocka_unit_test(what_was_let_go_is_freed_when_the_next_slot_is_cleared),
    };
    return cmocka_run_group_tests_name("gpu_room", tests, NULL, NULL);
}
