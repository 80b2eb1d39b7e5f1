/*
 * gpu_play: a trainer on a GPU of the fake driver, and workers as threads of this process, on it or
 * not. Its end checks that nothing is left on the GPU and that no rule of the driver was broken.
 */
#ifndef GPU_PLAY_H
#define GPU_PLAY_H

#include "tests/fake_cuda/fake_cuda.h"
#include "tests/support/rollout_threads.h"
#include "tests/support/trainer.h"

#define GPU_PLAY_ROLLOUTS 4u

typedef struct gpu_play {
    refit_config config;
    refit_device *device; /* the trainer's */
    refit_device *theirs; /* the workers', of the same GPU */
    test_trainer trainer;
    rollout_thread rollouts[GPU_PLAY_ROLLOUTS];
    uint32_t rollouts_count;
} gpu_play;

/* Changes of the configuration, for gpu_play_open. */
void with_gpu_required(refit_config *config);
void with_one_slot(refit_config *config);
void with_gpu_required_and_one_slot(refit_config *config);

/* Closes what is open first. `change` may be NULL. Resets the driver. */
void gpu_play_open(gpu_play *play, void (*change)(refit_config *config));

/* A test opens the play that is its state; it is closed afterwards. */
int gpu_play_setup(void **state);
int gpu_play_teardown(void **state);
#define PLAY_TEST(test) TEST_ON(gpu_play *play, test, gpu_play_setup, gpu_play_teardown)

/* A worker on the GPU, or on none, with the play's configuration; subscribed when it returns. */
rollout_thread *gpu_play_hire(gpu_play *play, bool on_gpu, rollout_action action);
/* A worker with its own configuration and device; does not wait. */
rollout_thread *gpu_play_hire_as(gpu_play *play, const refit_config *config, refit_device *device,
                                 rollout_action action);

/* A version from begin to commit, which must succeed; the digest that workers must see. */
uint64_t gpu_play_publish(gpu_play *play, uint64_t version);
/* The same, and this worker sees it. */
void gpu_play_bring(gpu_play *play, rollout_thread *member, uint64_t version);
/* The digest of a sample version. */
uint64_t gpu_play_digest(uint64_t version);
/* All workers hired see it; whether all, or none, in the GPU's memory. */
void gpu_play_expect(gpu_play *play, uint64_t version, uint64_t digest);
/* All workers leave. */
void gpu_play_dismiss(gpu_play *play);
/* Until the trainer knows of all that have left: a BYE is received a moment later, and one that
 * comes while a version is under way ends it. */
void gpu_play_await_nobody(gpu_play *play);
refit_path gpu_play_path(gpu_play *play, const rollout_thread *member);
/* Waits until the trainer says so of the worker. */
void gpu_play_await_path(gpu_play *play, const rollout_thread *member, refit_path path);

#endif
