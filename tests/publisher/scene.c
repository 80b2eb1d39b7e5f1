#include "scene.h"

static void close_all(scene *on)
{
    for (uint32_t i = 0; i < SCENE_WORKERS; i++)
        if (on->workers[i].channel != NULL) scene_close_worker(&on->workers[i]);
    trainer_close(&on->trainer);
}

void scene_renew(scene *on)
{
    close_all(on);
    memset(on, 0, sizeof *on);
    on->config = trainer_config();
}

void scene_open(scene *on, uint32_t workers, bool shm)
{
    static const char *const names[] = {"a", "b"};
    trainer_open(&on->trainer, &on->config);
    on->publisher = on->trainer.publisher;
    for (uint32_t i = 0; i < workers; i++)
        raw_worker_join(scene_add(on, names[i], shm));
    trainer_wait_workers(&on->trainer, workers);
}

raw_worker *scene_add(scene *on, const char *name, bool shm)
{
    uint32_t i = 0;
    while (i < SCENE_WORKERS && on->workers[i].channel != NULL)
        i++;
    assert_true(i < SCENE_WORKERS);
    raw_worker_open(&on->workers[i], refit_publisher_endpoint(on->publisher), name, shm);
    return &on->workers[i];
}

void scene_close_worker(raw_worker *worker)
{
    raw_worker_close(worker);
    memset(worker, 0, sizeof *worker);
}

void scene_take(raw_worker *worker, uint64_t version)
{
    raw_worker_stage(worker);
    trainer_check_bytes(worker, version);
    raw_worker_apply(worker);
}

void scene_publish(scene *on, uint64_t version)
{
    trainer_offer(&on->trainer, version);
    for (uint32_t i = 0; i < SCENE_WORKERS && on->workers[i].channel != NULL; i++)
        raw_worker_stage(&on->workers[i]);
    for (uint32_t i = 0; i < SCENE_WORKERS && on->workers[i].channel != NULL; i++) {
        trainer_check_bytes(&on->workers[i], version);
        raw_worker_apply(&on->workers[i]);
        if (version > 1) raw_worker_say_released(&on->workers[i], version - 1);
    }
    assert_ok(trainer_join(&on->trainer));
}

int scene_setup(void **state)
{
    static scene on;
    scene_renew(&on);
    *state = &on;
    return 0;
}

int scene_teardown(void **state)
{
    close_all(*state);
    memset(*state, 0, sizeof(scene));
    return 0;
}
