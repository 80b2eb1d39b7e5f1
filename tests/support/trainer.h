/*
 * A trainer for tests: a publisher of sample versions, and a thread for the calls that wait for
 * workers, so that the test can be the workers meanwhile.
 */
#ifndef TRAINER_H
#define TRAINER_H

#include <refit/broadcast.h>

#include "base/thread.h"
#include "tests/support/quick_config.h"
#include "tests/support/raw_worker.h"
#include "tests/support/sample_version.h"

typedef enum trainer_call {
    TRAINER_BEGIN,
    TRAINER_WRITE,
    TRAINER_COMMIT,
    TRAINER_PUBLISH
} trainer_call;

typedef struct test_trainer {
    refit_publisher *publisher;
    sample_version sample; /* of the version under way, or the last one */
    refit_device *device;  /* where the weights are written from; NULL: the host */
    unsigned char *memory; /* of the device, with the sample's image */
    refit_stream_ref after;
    bool at_once; /* by refit_publisher_write_all, not tensor by tensor */
    bool lends;   /* by refit_publisher_lend */
    rft_thread thread;
    trainer_call call;
    refit_status status;
    refit_error error;
} test_trainer;

/* quick_config with the samples' frame size. */
refit_config trainer_config(void);

/* Opens at the endpoint of the configuration, and declares. */
void trainer_open(test_trainer *trainer, const refit_config *config);
/* As trainer_open, on a GPU, which has the weights and the versions. NULL: the host. */
void trainer_open_on(test_trainer *trainer, const refit_config *config, refit_device *device);
void trainer_close(test_trainer *trainer);

/* From now on the weights lie on the device, which the test closes after the trainer. */
void trainer_take_device(test_trainer *trainer, refit_device *device);

/* From now on the publisher waits so long for copies, for workers that stage a version, and for
 * those that read the slot of another one. What must end is waited for shortly, and then long
 * again. */
void publisher_set_stage_timeout(refit_publisher *publisher, uint32_t ms);

/* From now on a worker that is silent so long is evicted. */
void publisher_set_silence(refit_publisher *publisher, uint32_t ms);

void trainer_wait_workers(test_trainer *trainer, uint32_t count);
/* Makes the version's bytes, for a begin of the test's own. */
void trainer_sample(test_trainer *trainer, uint64_t version);
void trainer_begin(test_trainer *trainer, uint64_t version);
void trainer_write(test_trainer *trainer);
/* The sample's tensors as they lie now, the last one first; how many. */
uint32_t trainer_weights(const test_trainer *trainer, refit_weight weights[SAMPLE_TENSORS]);

/* The call runs on the thread until join, which gives its status. PUBLISH is begin, write, commit;
 * WRITE is write, commit. `version` is that of the sample for BEGIN and PUBLISH. */
void trainer_start(test_trainer *trainer, trainer_call call, uint64_t version);
refit_status trainer_join(test_trainer *trainer);

/* begin, write, and commit started. */
void trainer_offer(test_trainer *trainer, uint64_t version);

/* By name; subscribed or lost. Fails the test if there is none. */
refit_worker_info trainer_worker(test_trainer *trainer, const char *name);
refit_stats trainer_stats(test_trainer *trainer);

/* Whether the worker's staged bytes are those of the version, padding left out. */
void trainer_check_bytes(const raw_worker *worker, uint64_t version);

#endif
