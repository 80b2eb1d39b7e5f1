/* A trainer for tests: see trainer.h. */
#include "tests/support/trainer.h"
#include "tests/support/test.h"

#include "publisher/publisher.h"

refit_config trainer_config(void)
{
    refit_config config = quick_config();
    config.broadcast_frame_bytes = SAMPLE_FRAME_BYTES;
    return config;
}

void trainer_open(test_trainer *trainer, const refit_config *config)
{
    trainer_open_on(trainer, config, NULL);
}

void trainer_open_on(test_trainer *trainer, const refit_config *config, refit_device *device)
{
    refit_error error = {0};
    memset(trainer, 0, sizeof *trainer);
    refit_status status =
        refit_publisher_open(config->broadcast_endpoint, config, &trainer->publisher, &error);
    if (status == REFIT_OK && device != NULL) {
        status = refit_publisher_use_device(trainer->publisher, device, &error);
    }
    if (status != REFIT_OK) fail_msg("open: %s", error.text);
    trainer->device = device;
    assert_ok(refit_publisher_declare(trainer->publisher, sample_tensors(), SAMPLE_TENSORS, NULL));
}

static void upload(test_trainer *trainer)
{
    uint64_t bytes = trainer->sample.manifest->store_bytes;
    void *memory = trainer->memory;
    if (memory == NULL) {
        assert_ok(refit_memory_alloc(trainer->device, bytes, &memory, NULL));
        trainer->memory = memory;
    }
    assert_ok(refit_stream_copy(trainer->device, REFIT_STREAM_NONE, memory, trainer->sample.image,
                                bytes, NULL));
}

void trainer_sample(test_trainer *trainer, uint64_t version)
{
    if (trainer->sample.manifest != NULL) sample_close(&trainer->sample);
    sample_open(&trainer->sample, version);
    if (trainer->device != NULL) upload(trainer);
}

static void give_back(test_trainer *trainer)
{
    if (trainer->memory == NULL) return;
    assert_ok(refit_memory_free(trainer->device, trainer->memory, NULL));
    trainer->memory = NULL;
}

void trainer_take_device(test_trainer *trainer, refit_device *device)
{
    give_back(trainer);
    trainer->device = device;
    trainer->after = REFIT_STREAM_NONE;
}

void trainer_close(test_trainer *trainer)
{
    refit_publisher_close(trainer->publisher);
    give_back(trainer);
    if (trainer->sample.manifest != NULL) sample_close(&trainer->sample);
}

void publisher_set_stage_timeout(refit_publisher *publisher, uint32_t ms)
{
    rft_lock(&publisher->lock);
    publisher->config.broadcast_stage_timeout_ms = ms;
    rft_unlock(&publisher->lock);
}

void publisher_set_silence(refit_publisher *publisher, uint32_t ms)
{
    rft_lock(&publisher->lock);
    publisher->config.broadcast_heartbeat_timeout_ms = ms;
    rft_unlock(&publisher->lock);
}

void trainer_wait_workers(test_trainer *trainer, uint32_t count)
{
    assert_ok(refit_publisher_wait_workers(trainer->publisher, count, RAW_WAIT_MS, NULL));
}

void trainer_begin(test_trainer *trainer, uint64_t version)
{
    trainer_sample(trainer, version);
    assert_ok(refit_publisher_begin(trainer->publisher, version, NULL));
}

uint32_t trainer_weights(const test_trainer *trainer, refit_weight weights[SAMPLE_TENSORS])
{
    const rft_manifest *manifest = trainer->sample.manifest;
    const unsigned char *image = trainer->device == NULL ? trainer->sample.image : trainer->memory;
    uint32_t count = 0;
    for (uint32_t i = manifest->count; i-- > 0;) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS) continue;
        weights[count++] = (refit_weight){i, image + tensor->offset, tensor->bytes};
    }
    return count;
}

static refit_status write_all(test_trainer *trainer)
{
    refit_weight weights[SAMPLE_TENSORS];
    refit_status status = REFIT_OK;
    uint32_t count = trainer_weights(trainer, weights);
    if (trainer->lends) {
        return refit_publisher_lend(trainer->publisher, weights, count, trainer->device,
                                    trainer->after, &trainer->error);
    }
    if (trainer->at_once) {
        return refit_publisher_write_all(trainer->publisher, weights, count, trainer->device,
                                         trainer->after, &trainer->error);
    }
    for (uint32_t i = 0; i < count && status == REFIT_OK; i++) {
        status = refit_publisher_write(trainer->publisher, weights[i].tensor, weights[i].memory,
                                       weights[i].bytes, trainer->device, trainer->after,
                                       &trainer->error);
    }
    return status;
}

void trainer_write(test_trainer *trainer)
{
    if (write_all(trainer) != REFIT_OK) fail_msg("write: %s", trainer->error.text);
}

static bool begins(trainer_call call)
{
    return call == TRAINER_BEGIN || call == TRAINER_PUBLISH;
}

static void *run(void *user)
{
    test_trainer *trainer = user;
    trainer_call call = trainer->call;
    trainer->status = REFIT_OK;
    if (begins(call)) {
        trainer->status =
            refit_publisher_begin(trainer->publisher, trainer->sample.version, &trainer->error);
    }
    if (trainer->status == REFIT_OK && (call == TRAINER_PUBLISH || call == TRAINER_WRITE)) {
        trainer->status = write_all(trainer);
    }
    if (trainer->status == REFIT_OK && call != TRAINER_BEGIN) {
        trainer->status = refit_publisher_commit(trainer->publisher, &trainer->error);
    }
    return NULL;
}

void trainer_start(test_trainer *trainer, trainer_call call, uint64_t version)
{
    trainer->call = call;
    memset(&trainer->error, 0, sizeof trainer->error);
    if (begins(call)) trainer_sample(trainer, version);
    assert_ok(rft_thread_start(&trainer->thread, "trainer", run, trainer, NULL));
}

refit_status trainer_join(test_trainer *trainer)
{
    rft_thread_join(trainer->thread);
    return trainer->status;
}

void trainer_offer(test_trainer *trainer, uint64_t version)
{
    trainer_begin(trainer, version);
    trainer_write(trainer);
    trainer_start(trainer, TRAINER_COMMIT, version);
}

refit_worker_info trainer_worker(test_trainer *trainer, const char *name)
{
    refit_worker_info info = {.size = sizeof info};
    for (uint32_t i = 0; refit_publisher_worker(trainer->publisher, i, &info, NULL) == REFIT_OK;
         i++) {
        if (strcmp(info.name, name) == 0) return info;
    }
    fail_msg("there is no worker %s", name);
    return info;
}

refit_stats trainer_stats(test_trainer *trainer)
{
    refit_stats stats;
    refit_stats_init(&stats, sizeof stats);
    assert_ok(refit_publisher_stats(trainer->publisher, &stats, NULL));
    return stats;
}

void trainer_check_bytes(const raw_worker *worker, uint64_t version)
{
    sample_version sample;
    sample_open(&sample, version);
    for (uint32_t i = 0; i < sample.manifest->count; i++) {
        const rft_manifest_tensor *tensor = &sample.manifest->tensors[i];
        assert_memory_equal(raw_worker_bytes(worker) + tensor->offset,
                            sample.image + tensor->offset, tensor->bytes);
    }
    sample_close(&sample);
}
