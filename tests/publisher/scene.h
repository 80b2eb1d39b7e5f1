/*
 * scene: a trainer and the workers by hand that it publishes to. A test may change the
 * configuration before it opens the scene; what is open is closed after the test.
 */
#ifndef PUBLISHER_SCENE_H
#define PUBLISHER_SCENE_H

#include "publisher/publisher.h"
#include "tests/support/test.h"
#include "tests/support/trainer.h"

#define SCENE_WORKERS 3u

typedef struct scene {
    refit_config config;
    test_trainer trainer;
    refit_publisher *publisher; /* the trainer's */
    raw_worker workers[SCENE_WORKERS];
} scene;

/* Closes what is open, and starts from trainer_config again. */
void scene_renew(scene *on);
/* The trainer, and so many workers that have joined: "a", then "b". */
void scene_open(scene *on, uint32_t workers, bool shm);
/* Another worker, which has said nothing yet. */
raw_worker *scene_add(scene *on, const char *name, bool shm);
void scene_close_worker(raw_worker *worker);

/* The worker has staged the version and its bytes are right; then it applies it. */
void scene_take(raw_worker *worker, uint64_t version);
/* A version that all workers apply, and let go of what they had before. */
void scene_publish(scene *on, uint64_t version);

int scene_setup(void **state);
int scene_teardown(void **state);
#define ON_SCENE(test) TEST_ON(scene *on, test, scene_setup, scene_teardown)

#endif
