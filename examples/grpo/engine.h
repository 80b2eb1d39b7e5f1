/*
 * engine: the trainer's own inference engine, which shares the device with it. Awake it holds a
 * cache of one context per sequence, as an LLM engine holds its KV cache; asleep it holds nothing.
 * It answers every prompt several times to tell how good the policy is.
 */
#ifndef GRPO_ENGINE_H
#define GRPO_ENGINE_H

#include <refit.h>

#include "policy.h"

enum { ENGINE_ANSWERS = 10, ENGINE_SEQUENCES = PROMPTS * ENGINE_ANSWERS };

typedef struct engine {
    refit_device *device;
    float (*cache)[WIDTH]; /* device memory, one context per sequence; NULL while asleep */
} engine;

/* Takes the cache. REFIT_ERR_DEVICE_MEMORY where the device has no room for it. */
refit_status engine_wake(engine *it, refit_error *error);
void engine_sleep(engine *it);

/* The mean reward over all prompts, under `weights`. */
float engine_evaluate(engine *it, const float *weights, uint64_t seed, uint64_t version);

#endif
